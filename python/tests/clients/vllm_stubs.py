"""Stubs of the modules of vLLM that its prepare and finalize classes import. Its real ones need all of vLLM and a GPU.

Real are the classes themselves, `modular_kernel`, which calls them, `topk_weight_and_reduce` and `ubatching`.
"""

import logging
import types

import torch
from common import stub
from deep_ep.utils.math import per_token_cast_to_fp8

LAYERS = "vllm.model_executor.layers"
BLOCK = 128


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
    names = {f"{LAYERS}.quantization.utils", "vllm.v1.worker", "vllm.utils", inner}
    names |= {f"{LAYERS}.fused_moe.runner", f"{LAYERS}.fused_moe.experts"}
    for name in sorted({name for one in names for name in parents(one)}):
        stub(name, __path__=[str(folder / name.replace(".", "/"))])


def parents(name):
    words = name.split(".")
    return [".".join(words[: i + 1]) for i in range(len(words))]


def of_kernels():
    """Stubs of what `modular_kernel` imports. Its two steps around the experts use none of it."""
    fused = f"{LAYERS}.fused_moe"
    stub(
        f"{fused}.activation",
        ApplyMoEActivationConfig=object,
        MoEActivation=types.SimpleNamespace(SILU="silu"),
        apply_moe_activation=None,
    )
    stub(
        f"{fused}.config",
        FusedMoEConfig=object,
        FusedMoEParallelConfig=object,
        FusedMoEQuantConfig=object,
        RoutingMethodType=object,
    )
    stub(f"{fused}.moe_output", UnfinalizedMoEOutput=type("UnfinalizedMoEOutput", (), {}))
    stub(f"{fused}.routed_experts_capturer", RoutedExpertsSink=object)
    stub(f"{fused}.runner.shared_experts", SharedExperts=object, SharedExpertsOrder=object)
    humming = type("HummingIndexedExperts", (), {})
    stub(f"{fused}.experts.fused_humming_moe", HummingIndexedExperts=humming)
    stub(f"{LAYERS}.quantization.utils.quant_utils", QuantKey=object)
    stub("vllm.v1.worker.workspace", current_workspace_manager=None)


def of_triton():
    """Triton, on a GPU. Without one the experts do what vLLM's kernel does there: they make ids global."""
    if torch.cuda.is_available():
        import triton
        import triton.language as tl

        return {"tl": tl, "triton": triton}
    jit = types.SimpleNamespace(jit=lambda f: f)
    return {"tl": types.SimpleNamespace(constexpr=int), "triton": jit}


def current_stream():
    return torch.cuda.current_stream() if torch.cuda.is_available() else None


def install(folder):
    """Fills `sys.modules`. The forward context's batch is the caller's to set."""
    packages(folder)
    of_kernels()
    has_gpu = torch.cuda.is_available()
    logger = logging.getLogger("vllm")
    logger.info_once = logger.warning_once = logger.debug_once = logger.debug
    context = types.SimpleNamespace(dp_metadata=None)
    stub("vllm.envs", VLLM_DEEPEPLL_NVFP4_DISPATCH=False)
    stub("vllm.logger", init_logger=lambda name: logger)
    platform = types.SimpleNamespace(is_rocm=lambda: False, is_cuda=lambda: has_gpu)
    stub("vllm.platforms", current_platform=platform)
    stub(
        "vllm.forward_context",
        get_forward_context=lambda: context,
        ForwardContext=object,
        _forward_context=None,
    )
    stub(
        "vllm.utils.math_utils", round_up=lambda x, y: -(-x // y) * y, cdiv=lambda x, y: -(-x // y)
    )
    stub("vllm.utils.torch_utils", current_stream=current_stream, PIN_MEMORY=has_gpu)
    stub("vllm.triton_utils", **of_triton())
    stub("vllm._custom_ops", moe_sum=lambda rows, out: torch.sum(rows, 1, out=out))
    stub(
        f"{LAYERS}.fused_moe.utils",
        _resize_cache=None,
        moe_kernel_quantize_input=quantize,
        normalize_batched_scales_shape=lambda scales, experts: scales,
    )
    stub(
        f"{LAYERS}.quantization.utils.mxfp8_utils",
        MXFP8_BLOCK_SIZE=32,
        swizzle_mxfp8_scale=lambda scale, M, K: scale,
    )
    return context
