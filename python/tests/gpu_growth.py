"""Ten thousand steps take no memory that stays: of torch, of the arena, or of the process."""

import gc

import torch
from gpu_common import CASE, inputs, is_gpu, layout_of, synchronize, v1, v2
from gpu_graphs import decode_step
from gpu_work import captured

# In host memory a step takes milliseconds.
STEPS = 10_000 if is_gpu() else 100
# Calls fill caches, and memory is in pieces, in the first of them.
WARM_UP = 500 if is_gpu() else 25
# 800 bytes a step on GPUs.
MOST_GROWTH = 8 << 20


def memory_of(buffer):
    """Bytes that torch has given out on the GPU, and outputs in the arena; and those of the process."""
    gc.collect()
    synchronize()
    held = sum(one.communicator.held_bytes for one in buffer._pool._opened.values())
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return (torch.cuda.memory_allocated() if is_gpu() else 0, held), pages * 4096


def check_growth(buffer, step):
    for _ in range(WARM_UP):
        step()
    before, resident = memory_of(buffer)
    for _ in range(STEPS):
        step()
    after, resident_after = memory_of(buffer)
    assert after == before, (before, after)
    growth = resident_after - resident
    assert growth < MOST_GROWTH, f"{growth} bytes more of the process after {STEPS} steps"
    return f"{STEPS} steps: {growth / 1024:.0f} KiB more of the process"


def normal_steps(world):
    buffer = v1(world)
    x, idx, weights = inputs(world, CASE)
    options = layout_of(buffer, idx, CASE.experts)
    options |= {"topk_idx": idx, "topk_weights": weights}

    def step():
        rows, _, recv_weights, _, handle, _ = buffer.dispatch(x, **options)
        buffer.dispatch(x, handle=handle)
        buffer.combine(rows, handle, topk_weights=recv_weights)

    note = check_growth(buffer, step)
    buffer.destroy()
    return note


def steps_of_v2(world):
    """Flat and expanded in turn, with and without CPU sync."""
    buffer = v2(world, CASE)
    x, idx, weights = inputs(world, CASE)
    turn = 0

    def step():
        nonlocal turn
        turn += 1
        rows, _, recv_weights, handle, _ = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            num_experts=CASE.experts,
            do_cpu_sync=turn % 2 == 0,
            do_expand=turn % 4 < 2,
        )
        buffer.combine(rows, handle, topk_weights=recv_weights)

    note = check_growth(buffer, step)
    buffer.destroy()
    return note


def low_latency_steps(world):
    """At once, in halves, and cast, in turn."""
    buffer = v1(world, low_latency_mode=True)
    x, idx, weights = inputs(world, CASE)
    turn = 0

    def step():
        nonlocal turn
        turn += 1
        is_cast, has_hook = turn % 4 == 0, turn % 2 == 0
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, CASE.max_tokens, CASE.experts, use_fp8=is_cast, return_recv_hook=has_hook
        )
        if has_hook:
            hook()
        if not is_cast:
            buffer.low_latency_combine(rows, idx, weights, handle)

    note = check_growth(buffer, step)
    buffer.destroy()
    return note


def launches(world):
    """A graph of a low-latency layer, and of a normal one on the communication stream."""
    buffer = v1(world, low_latency_mode=True)
    x, idx, weights = inputs(world, CASE)
    options = layout_of(buffer, idx, CASE.experts)
    options |= {"topk_idx": idx, "topk_weights": weights, "num_worst_tokens": 128}
    out = torch.zeros_like(x)

    def step():
        decode_step(buffer, x, idx, weights, out)
        rows, _, _, _, handle, done = buffer.dispatch(x, async_finish=True, **options)
        done.current_stream_wait()
        combined, _, done = buffer.combine(rows, handle, async_finish=True)
        done.current_stream_wait()
        out.add_(combined)

    note = check_growth(buffer, captured(step))
    buffer.destroy()
    return note


CHECKS = [normal_steps, steps_of_v2, low_latency_steps, launches]
