"""SGLang's dispatchers on the drop-in, with stubs of the modules they import: over V1 in normal mode, in low latency,
and in the mode that takes the one for prefill and the other for decode; over V2 for both."""

import contextlib
import enum
import importlib
import itertools
import sys
import types

import torch
from common import Layer, close, group_of, on_path, replaced, stub
from deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8

PACKAGE = "sglang.srt.layers.moe.token_dispatcher"
MOST = 16
_mode = types.SimpleNamespace(is_extend=True, is_fp8=False)
_buffers = {}


class Setting:
    """An entry of SGLang's `envs`."""

    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value


class Mode(enum.Enum):
    """SGLang's DeepEPMode, as far as its dispatcher asks."""

    LOW_LATENCY = "low_latency"
    NORMAL = "normal"
    AUTO = "auto"

    def enable_normal(self):
        return self is not Mode.LOW_LATENCY

    def enable_low_latency(self):
        return self is not Mode.NORMAL

    def is_low_latency(self):
        return self is Mode.LOW_LATENCY

    def is_normal(self):
        return self is Mode.NORMAL

    def resolve(self, is_extend):
        if self is not Mode.AUTO:
            return self
        return Mode.NORMAL if is_extend else Mode.LOW_LATENCY


DataType = enum.Enum("DataType", "BF16 FP8 INT8 NVFP4 MXFP4 MXFP8")


def packages(folder):
    names = [
        "sglang",
        "sglang.srt",
        "sglang.srt.eplb",
        "sglang.srt.layers",
        "sglang.srt.layers.moe",
    ]
    for name in [*names, PACKAGE]:
        stub(name, __path__=[str(folder / name.replace(".", "/"))])
    for name in ("sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.quantization"):
        stub(name, __path__=[])


def of_the_run():
    """Stubs of SGLang's settings, and of its state of the run."""
    parallel = types.SimpleNamespace(attn_dp_size=2, attn_cp_size=1, tp_size=1, tp_group=None)
    exec_state = types.SimpleNamespace(moe=types.SimpleNamespace(deepep_v2_mode="direct"))
    settings = types.SimpleNamespace(
        SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=Setting(MOST),
        SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND=Setting(None),
        SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK=Setting(MOST),
        SGLANG_DEEPEP_V2_NUM_SMS=Setting(0),
        SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE=Setting(False),
    )
    stub("sglang.srt.environ", envs=settings)
    stub(
        "sglang.srt.runtime_context",
        get_exec=lambda: exec_state,
        get_parallel=lambda: parallel,
        get_resources=lambda: types.SimpleNamespace(buffers=_buffers),
    )
    stub(
        "sglang.srt.utils",
        get_bool_env_var=lambda name: False,
        get_cuda_version=lambda: (13, 0),
        is_blackwell=lambda: False,
        is_flashinfer_available=lambda: False,
        is_hip=lambda: False,
        is_npu=lambda: False,
        load_json_config=None,
    )


def of_layers():
    """Stubs of the router's types, of the numbers of experts, and of SGLang's kernels."""
    scale = types.SimpleNamespace(ue8m0=False, tma_aligned=False)
    recorder = types.SimpleNamespace(
        on_deepep_dispatch_low_latency=lambda counts: None,
        on_deepep_dispatch_normal=lambda counts, **_: None,
    )
    gemm = {"ENABLE_JIT_DEEPGEMM": True, "DEEPGEMM_BLACKWELL": False, "DEEPGEMM_SCALE_UE8M0": False}
    stub("sglang.srt.layers.deep_gemm_wrapper", **gemm)
    stub("sglang.srt.layers.dp_attention", get_is_extend_in_batch=lambda: _mode.is_extend)
    stub("sglang.srt.layers.moe.topk", TopKOutput=object)
    stub(
        "sglang.srt.eplb.expert_distribution",
        get_global_expert_distribution_recorder=lambda: recorder,
    )
    stub(
        "sglang.srt.layers.moe.utils",
        DeepEPMode=Mode,
        DeepEPv2Fp8ScaleFormat=object,
        DispatcherOutputDtype=DataType,
        get_deepep_config=lambda: "",
        get_deepep_output_dtype=lambda _: DataType.FP8 if _mode.is_fp8 else DataType.BF16,
        get_deepep_v2_fp8_scale_format=lambda: scale,
        is_tbo_enabled=lambda: False,
    )
    stub(
        "sglang.kernels.ops.quantization.fp8_kernel",
        sglang_per_token_group_quant_fp8=lambda rows, size, **_: per_token_cast_to_fp8(rows),
    )


def module_of(folder, name):
    """A module of SGLang over the stubs."""
    on_path(folder)
    if "sglang" not in sys.modules:
        packages(folder)
        of_the_run()
        of_layers()
    return importlib.import_module(f"{PACKAGE}.{name}")


@contextlib.contextmanager
def properties_of_a_gpu():
    """Inside, SGLang learns the size of the GPU, before it makes a buffer, also where there is none."""
    if torch.cuda.is_available():
        yield
        return
    gpu = types.SimpleNamespace(multi_processor_count=132)
    with replaced(torch.cuda, get_device_properties=lambda device: gpu):
        yield


def dispatcher_of(module, layer, is_fp8, mode, is_late=False):
    """The dispatcher over V1 in a mode. `is_late`: it sends asynchronously, and in low latency receives by a hook."""
    _mode.is_fp8 = is_fp8
    return module.DeepEPDispatcher(
        layer.group,
        layer.topk,
        num_experts=layer.experts,
        num_local_experts=layer.local,
        hidden_size=layer.hidden,
        params_dtype=layer.dtype,
        deepep_mode=mode,
        async_finish=is_late,
        return_recv_hook=is_late,
    )


def low_latency_of(folder, layer, is_fp8):
    """The dispatcher of low latency, and the type of its combine's input."""
    module = module_of(folder, "deepep")
    _mode.is_extend = False
    dispatcher = dispatcher_of(module, layer, is_fp8, Mode.LOW_LATENCY)
    return dispatcher, module.DeepEPLLCombineInput


def elastic_of(folder, layer, is_fp8):
    """The dispatcher over V2 for decode, and the type of its combine's input."""
    module = module_of(folder, "deepep_v2")
    _mode.is_extend = False
    dispatcher = module.DeepEPv2Dispatcher(
        layer.group,
        layer.topk,
        layer.experts,
        layer.local,
        layer.hidden,
        layer.dtype,
        is_fp8,
    )
    return dispatcher, module.DeepEPv2CombineInput


def drop_buffers():
    _buffers.clear()


def plain(rows, scales):
    if scales is None or not len(rows):
        return rows.bfloat16()
    return per_token_cast_back(rows, scales.contiguous()).bfloat16()


def expanded(layer, got):
    """Outputs of rows that lie expert by expert, each expert's first row at a multiple of the alignment."""
    ends, align = got.psum_num_recv_tokens_per_expert, got.expert_alignment
    starts = torch.cat([torch.zeros_like(ends[:1]), -(-ends[:-1] // align) * align])
    y = layer.by_places(plain(got.hidden_states, got.hidden_states_scale), starts, ends)
    return (y.float() * got.topk_weights[:, None]).bfloat16()


def compact(layer, got):
    """Outputs of rows in the order of arrival, summed over a row's choices here."""
    rows = plain(got.hidden_states, got.hidden_states_scale)
    y = torch.zeros(rows.shape, device=rows.device)
    for expert in range(layer.local):
        scale = torch.where(got.topk_ids == expert, got.topk_weights, 0).sum(1, keepdim=True)
        y += scale * layer.expert(rows, layer.first + expert).float()
    return y.bfloat16()


def layers_are_dense(world, port, size, folder):
    """Prefill, expanded and not, and decode, in bfloat16 and FP8; an idle rank brings the padding of SGLang."""
    layer = Layer(group_of(world, port, size), 8, 256, 3, torch.bfloat16, seed=51)
    for is_fp8 in (False, True):
        dispatcher, combine_input = elastic_of(folder, layer, is_fp8)
        dispatcher.prebuild()
        for is_extend, is_expanded in ((True, True), (True, False), (False, True)):
            _mode.is_extend = is_extend
            dispatcher._impl._prefill_expand_enabled = is_expanded
            for step in range(3):
                tokens = 0 if step == 2 and layer.me == 1 else 4 + 3 * ((step + layer.me) % 3)
                x, ids, weights = layer.inputs(tokens, step)
                routed = types.SimpleNamespace(topk_ids=ids.int(), topk_weights=weights)
                got = dispatcher.dispatch(x, routed)
                assert (got.is_expanded, got.use_masked_gemm) == (is_expanded, not is_extend)
                y = (expanded if is_expanded else compact)(layer, got)
                out = dispatcher.combine(combine_input(y, None))
                expected = layer.dense(x.float(), ids, weights, layer.weights.float())
                close(out, expected, 0.1 if is_fp8 else 0.03)
    drop_buffers()


def blocks(layer, got):
    """Outputs of the rows of low latency: a block for each expert."""
    rows, scales = got.hidden_states, got.hidden_states_scale
    if scales is not None:
        rows = torch.stack([per_token_cast_back(*one) for one in zip(rows, scales, strict=True)])
    return layer.by_blocks(rows.to(layer.dtype))


def pass_through(module, dispatcher, layer, step):
    """One pass through a dispatcher over V1; rank 1 has no tokens in the last step."""
    tokens = 0 if step == 2 and layer.me == 1 else 4 + 3 * ((step + layer.me) % 3)
    x, ids, weights = layer.inputs(tokens, step)
    routed = types.SimpleNamespace(topk_ids=ids.int(), topk_weights=weights)
    got = dispatcher.dispatch(x, routed)
    if _mode.is_extend:
        assert isinstance(got, module.DeepEPNormalDispatchOutput)
        found = torch.bincount(got.topk_ids[got.topk_ids >= 0], minlength=layer.local)
        # DeepGEMM wants groups of whole blocks.
        assert got.num_recv_tokens_per_expert == (-(-found // 128) * 128).tolist()
        given = module.DeepEPNormalCombineInput(compact(layer, got), got.topk_ids, got.topk_weights)
    else:
        assert isinstance(got, module.DeepEPLLDispatchOutput)
        counted = layer.sum_of_ranks(torch.bincount(ids.flatten(), minlength=layer.experts))
        assert torch.equal(got.masked_m, counted[layer.first :][: layer.local].int())
        given = module.DeepEPLLCombineInput(blocks(layer, got), got.topk_ids, got.topk_weights)
    expected = layer.dense(x.float(), ids, weights, layer.weights.float())
    close(dispatcher.combine(given), expected, 0.1 if _mode.is_fp8 else 0.03)


def layers_over_v1_are_dense(world, port, size, folder):
    """Over V1: prefill in normal mode, decode in low latency, and both in turn in the mode `auto`, whose one buffer is
    cleaned between them; at once and late, in bfloat16 and FP8."""
    module = module_of(folder, "deepep")
    layer = Layer(group_of(world, port, size), 8, 512, 3, torch.bfloat16, seed=52)
    kinds = {Mode.NORMAL: (True,), Mode.LOW_LATENCY: (False,), Mode.AUTO: (True, False, True)}
    with properties_of_a_gpu():
        for mode, is_extend in kinds.items():
            for is_fp8, is_late in itertools.product((False, True), repeat=2):
                dispatcher = dispatcher_of(module, layer, is_fp8, mode, is_late)
                for _mode.is_extend, step in itertools.product(is_extend, range(3)):
                    pass_through(module, dispatcher, layer, step)
            drop_buffers()
