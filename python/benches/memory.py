"""The memory that a buffer of the drop-in takes on each rank, beside DeepEP's hint for the same shape. It needs torch.

    python -m torch.distributed.run --nproc-per-node 2 python/benches/memory.py

On GPUs it is the GPU's memory, else that of the process: pages that ranks share count as a part each. The first call of
a shape has been made, with as many tokens as it allows, and its outputs are gone. Before it are DeepEP's hint, and the
results of `memory_needed` for the CPU and for NVLink, which needs no GPU.
"""

import gc
import os
from collections.abc import Callable
from typing import Any

import torch

import tokenyard
from tokenyard.deep_ep import Buffer, ElasticBuffer
from tokenyard.deep_ep._pool import HANDLES, IN_FLIGHT

EXPERTS, TOPK, HIDDEN = 256, 8, 7168
MIB = 1 << 20
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


def taken() -> int:
    """Bytes that this process has now, without those of torch's tensors."""
    gc.collect()
    if HAS_GPU:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved()
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


def inputs(tokens: int) -> tuple[Any, Any, Any]:
    ids = torch.rand(tokens, EXPERTS, device=DEVICE).argsort(1)[:, :TOPK].contiguous()
    x = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    return x, ids, torch.ones(tokens, TOPK, device=DEVICE)


def low_latency(tokens: int) -> tuple[int, Any]:
    """DeepEP's hint, and the buffer after a call."""
    buffer = Buffer(low_latency_mode=True, explicitly_destroy=True)
    x, ids, weights = inputs(tokens)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, tokens, EXPERTS, use_fp8=False)
    buffer.low_latency_combine(rows, ids, weights, handle)
    ranks = buffer.group_size
    return Buffer.get_low_latency_rdma_size_hint(tokens, HIDDEN, ranks, EXPERTS), buffer


def normal(tokens: int) -> tuple[int, Any]:
    """As `low_latency`, in normal mode."""
    buffer = Buffer(explicitly_destroy=True)
    x, ids, weights = inputs(tokens)
    per_rank, _, per_expert, is_in, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    rows, *_, handle, _ = buffer.dispatch(
        x,
        topk_idx=ids,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_expert=per_expert,
        is_token_in_rank=is_in,
    )
    buffer.combine(rows, handle)
    ranks = buffer.group_size
    configs = Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)
    return max(one.get_nvl_buffer_size_hint(2 * HIDDEN, ranks) for one in configs), buffer


def elastic(tokens: int) -> tuple[int, Any]:
    """As `low_latency`, of V2."""
    options = {"num_max_tokens_per_rank": tokens, "hidden": HIDDEN, "num_topk": TOPK}
    buffer = ElasticBuffer(explicitly_destroy=True, **options)
    x, ids, _ = inputs(tokens)
    rows, _, _, handle, _ = buffer.dispatch(x, topk_idx=ids, num_experts=EXPERTS)
    buffer.combine(rows, handle)
    return buffer.num_bytes, buffer


def needed(config: tokenyard.Config, ranks: int, tokens: int, in_flight: int) -> int:
    """Bytes of the windows of the drop-in's communicator, before it is opened."""
    parts = tokenyard.memory_needed(
        config, ranks, EXPERTS, TOPK, HIDDEN, tokens, in_flight=in_flight, handles=HANDLES
    )
    return parts["control"] + parts["arena"]


SHAPES: list[tuple[str, Callable[[int], tuple[int, Any]], tuple[int, ...]]] = [
    ("low latency, M", low_latency, (128, 256, 512, 1024)),
    ("V1 normal, T", normal, (4096, 8192)),
    ("V2, M", elastic, (4096, 8192)),
]


def main() -> None:
    rank = int(os.environ["RANK"])
    if HAS_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Contexts, and the world of all buffers.
    low_latency(8)[1].destroy()
    for name, make, numbers in SHAPES:
        for tokens in numbers:
            before = taken()
            hint, buffer = make(tokens)
            found, ranks = taken() - before, int(os.environ["WORLD_SIZE"])
            buffer.destroy()
            cpu = tokenyard.Config.built_in("cpu")
            decode = "low_latency" if make is low_latency else "direct"
            gpu = tokenyard.Config.built_in("nvlink", decode=decode)
            windows = (
                needed(cpu, ranks, tokens, IN_FLIGHT + 1),
                needed(gpu, ranks, tokens, IN_FLIGHT),
            )
            columns = (hint, *windows, found)
            if rank == 0:
                print(f"| {name} = {tokens} |", *(f"{b / MIB:.0f} |" for b in columns), flush=True)


if __name__ == "__main__":
    main()
