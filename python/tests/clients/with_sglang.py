"""SGLang's dispatcher over V2 on the drop-in, for prefill and for decode, with stubs of the modules it imports."""

import importlib
import sys
import types

import torch
from common import Layer, close, group_of, on_path, stub
from deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8

MODULE = "sglang.srt.layers.moe.token_dispatcher.deepep_v2"
MOST = 16
_mode = types.SimpleNamespace(is_extend=True)


class Setting:
    """An entry of SGLang's `envs`."""

    def __init__(self, value):
        self.value = value

    def get(self):
        return self.value


def packages(folder):
    names = ["sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.moe"]
    for name in [*names, "sglang.srt.layers.moe.token_dispatcher"]:
        stub(name, __path__=[str(folder / name.replace(".", "/"))])


def module_of(folder):
    """The module over stubs of SGLang's settings, its state of the run, and the types of its router."""
    on_path(folder)
    if "sglang" not in sys.modules:
        packages(folder)
        scale = types.SimpleNamespace(ue8m0=False, tma_aligned=False)
        resources = types.SimpleNamespace(buffers={})
        parallel = types.SimpleNamespace(attn_dp_size=2, attn_cp_size=1, tp_size=1, tp_group=None)
        settings = types.SimpleNamespace(
            SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND=Setting(None),
            SGLANG_DEEPEP_V2_NUM_MAX_DISPATCH_TOKENS_PER_RANK=Setting(MOST),
            SGLANG_DEEPEP_V2_NUM_SMS=Setting(0),
        )
        exec_state = types.SimpleNamespace(moe=types.SimpleNamespace(deepep_v2_mode="direct"))
        stub("sglang.kernels", __path__=[])
        stub("sglang.kernels.ops", __path__=[])
        stub("sglang.kernels.ops.quantization", __path__=[])
        stub(
            "sglang.kernels.ops.quantization.fp8_kernel",
            sglang_per_token_group_quant_fp8=lambda rows, size, **_: per_token_cast_to_fp8(rows),
        )
        stub("sglang.srt.environ", envs=settings)
        stub("sglang.srt.layers.dp_attention", get_is_extend_in_batch=lambda: _mode.is_extend)
        stub("sglang.srt.layers.moe.topk", TopKOutput=object)
        stub(
            "sglang.srt.layers.moe.utils",
            DeepEPv2Fp8ScaleFormat=object,
            get_deepep_v2_fp8_scale_format=lambda: scale,
        )
        stub(
            "sglang.srt.runtime_context",
            get_exec=lambda: exec_state,
            get_parallel=lambda: parallel,
            get_resources=lambda: resources,
        )
    return importlib.import_module(MODULE)


def plain(rows, scales):
    if scales is None or not len(rows):
        return rows.bfloat16()
    return per_token_cast_back(rows, scales.contiguous()).bfloat16()


def expanded(layer, got):
    """Outputs of rows that lie expert by expert, each expert's first row at a multiple of the alignment."""
    y = torch.zeros(got.hidden_states.shape, dtype=torch.bfloat16)
    start, align = 0, got.expert_alignment
    for expert, end in enumerate(got.psum_num_recv_tokens_per_expert.tolist()):
        scales = got.hidden_states_scale
        rows = plain(got.hidden_states[start:end], None if scales is None else scales[start:end])
        out = layer.expert(rows, layer.first + expert).float()
        y[start:end] = (out * got.topk_weights[start:end, None]).bfloat16()
        start = -(-end // align) * align
    return y


def compact(layer, got):
    """Outputs of rows in the order of arrival, summed over a row's choices here."""
    rows = plain(got.hidden_states, got.hidden_states_scale)
    y = torch.zeros(rows.shape)
    for expert in range(layer.local):
        scale = torch.where(got.topk_ids == expert, got.topk_weights, 0).sum(1, keepdim=True)
        y += scale * layer.expert(rows, layer.first + expert).float()
    return y.bfloat16()


def layers_are_dense(world, port, size, folder):
    """Prefill, expanded and not, and decode, in bfloat16 and FP8; an idle rank brings the padding of SGLang."""
    module = module_of(folder)
    layer = Layer(group_of(world, port, size), 8, 256, 3, torch.bfloat16, seed=51)
    for is_fp8 in (False, True):
        dispatcher = module.DeepEPv2Dispatcher(
            layer.group,
            layer.topk,
            layer.experts,
            layer.local,
            layer.hidden,
            layer.dtype,
            is_fp8,
        )
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
                out = dispatcher.combine(module.DeepEPv2CombineInput(y, None))
                expected = layer.dense(x.float(), ids, weights, layer.weights.float())
                close(out, expected, 0.1 if is_fp8 else 0.03)
    module.DeepEPv2Buffer.destroy()
