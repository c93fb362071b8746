"""Stubs of the modules of vLLM that its prepare and finalize classes import. Its real ones need all of vLLM and a GPU.

Real are the classes themselves, `topk_weight_and_reduce` and `ubatching`.
"""

import logging
import types
from dataclasses import dataclass

import torch
from common import stub
from deep_ep.utils.math import per_token_cast_to_fp8

LAYERS = "vllm.model_executor.layers"
BLOCK = 128


@dataclass
class ExpertTokensMetadata:
    expert_num_tokens: torch.Tensor | None
    expert_num_tokens_cpu: torch.Tensor | None
    psum_recv_per_rank: torch.Tensor | None = None
    rank_expert_offset: int | None = None

    @staticmethod
    def make_from_list(counts, device):
        on_host = torch.tensor(counts, dtype=torch.int32)
        return ExpertTokensMetadata(on_host.to(device), on_host)


class Modular:
    """The base class of the classes under test."""


def quantize(rows, scale, quant_dtype, per_act_token_quant=False, block_shape=None, **_):
    """Rows for the experts: FP8 with a scale per block of 128, or as they are."""
    if quant_dtype is None:
        return rows, None
    assert (quant_dtype, block_shape) == (torch.float8_e4m3fn, [BLOCK, BLOCK])
    return per_token_cast_to_fp8(rows)


def quant_config(is_fp8):
    return types.SimpleNamespace(
        a1_gscale=None,
        a1_scale=None,
        a2_scale=None,
        block_shape=[BLOCK, BLOCK] if is_fp8 else None,
        is_block_quantized=is_fp8,
        is_scale_swizzled=False,
        mx_alignment=0,
        per_act_token_quant=False,
        quant_dtype=torch.float8_e4m3fn if is_fp8 else None,
    )


def packages(folder):
    """Packages of vLLM whose modules are looked for in its own folder, without their `__init__.py`."""
    inner = f"{LAYERS}.fused_moe.prepare_finalize"
    names = {"vllm.model_executor.layers.quantization.utils", "vllm.v1.worker", "vllm.utils", inner}
    for name in sorted({name for one in names for name in parents(one)}):
        stub(name, __path__=[str(folder / name.replace(".", "/"))])


def parents(name):
    words = name.split(".")
    return [".".join(words[: i + 1]) for i in range(len(words))]


def install(folder):
    """Fills `sys.modules`. The forward context's batch is the caller's to set."""
    packages(folder)
    logger = logging.getLogger("vllm")
    logger.info_once = logger.warning_once = logger.debug_once = logger.debug
    context = types.SimpleNamespace(dp_metadata=None)
    formats = types.SimpleNamespace(Standard="standard", BatchedExperts="batched")
    stub("vllm.envs", VLLM_DEEPEPLL_NVFP4_DISPATCH=False)
    stub("vllm.logger", init_logger=lambda name: logger)
    stub("vllm.platforms", current_platform=types.SimpleNamespace(is_rocm=lambda: False))
    stub("vllm.forward_context", get_forward_context=lambda: context, ForwardContext=object)
    stub(
        "vllm.utils.math_utils", round_up=lambda x, y: -(-x // y) * y, cdiv=lambda x, y: -(-x // y)
    )
    stub("vllm.utils.torch_utils", current_stream=lambda: None)
    # The kernel that makes ids global is Triton's: on this backend the experts do it, as vLLM lets them.
    stub(
        "vllm.triton_utils",
        tl=types.SimpleNamespace(constexpr=int),
        triton=types.SimpleNamespace(jit=lambda f: f),
    )
    stub("vllm._custom_ops", moe_sum=lambda rows, out: torch.sum(rows, 1, out=out))
    stub(
        f"{LAYERS}.fused_moe.modular_kernel",
        FusedMoEPrepareAndFinalizeModular=Modular,
        FusedMoEActivationFormat=formats,
        FusedMoEExperts=object,
        ExpertTokensMetadata=ExpertTokensMetadata,
        PrepareResultType=tuple,
        ReceiverType=object,
        TopKWeightAndReduce=object,
    )
    stub(f"{LAYERS}.fused_moe.config", FusedMoEQuantConfig=object)
    stub(
        f"{LAYERS}.fused_moe.utils",
        moe_kernel_quantize_input=quantize,
        normalize_batched_scales_shape=lambda scales, experts: scales,
    )
    stub(
        f"{LAYERS}.quantization.utils.mxfp8_utils",
        MXFP8_BLOCK_SIZE=32,
        swizzle_mxfp8_scale=lambda scale, M, K: scale,
    )
    return context
