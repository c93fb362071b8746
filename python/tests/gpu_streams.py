"""Streams, events, lifetimes of outputs, and threads, on GPUs."""

import contextlib
import gc
import threading

import torch
from gpu_common import (
    CASE,
    inputs,
    layout_of,
    output_mode,
    raised,
    rows_of,
    same,
    times,
    v1,
    v2,
)
from gpu_v1 import check_normal
from gpu_work import LONG, in_two_threads

NEEDS_GPUS = True


def asynchronous(world):
    """The communication stream waits for the current one, and that for the event."""
    for mode in ("auto", "arena", "copy"):
        with output_mode(mode):
            buffer = v1(world)
        for dtype in (torch.bfloat16, torch.float32):
            torch.cuda._sleep(LONG)
            check_normal(world, buffer, CASE, dtype, async_finish=True)
            check_normal(
                world,
                buffer,
                CASE,
                dtype,
                captures=True,
                async_finish=True,
                allocate_on_comm_stream=True,
            )
        buffer.destroy()


def previous_event(world):
    """A call waits for the given event, behind which its input is written on another stream."""
    buffer, elastic = v1(world), None
    x, idx, weights = inputs(world, CASE)
    options = layout_of(buffer, idx, CASE.experts)
    expected = rows_of(world, CASE, CASE.sources(world.rank)) + 1
    side = torch.cuda.Stream()
    for is_async in (True, False):
        y = torch.zeros_like(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG)
            torch.add(x, 1, out=y)
            event = buffer.capture()
        recv_x, _, _, _, _, done = buffer.dispatch(
            y,
            topk_idx=idx,
            topk_weights=weights,
            previous_event=event,
            async_finish=is_async,
            **options,
        )
        if is_async:
            done.current_stream_wait()
        same(recv_x, expected)
    buffer.destroy()
    elastic = v2(world, CASE)
    for late in (None, elastic.capture()):
        recv_x, _, _, handle, done = elastic.dispatch(
            x + 1,
            topk_idx=idx,
            num_experts=CASE.experts,
            previous_event=elastic.capture(),
            previous_event_before_epilogue=late,
            async_with_compute_stream=True,
            allocate_on_comm_stream=True,
        )
        with done:
            pass
        same(recv_x, expected)
        combined, _, done = elastic.combine(recv_x, handle, async_with_compute_stream=True)
        done.current_stream_wait()
        factors = torch.from_numpy(times(CASE, world.rank)).to(x.device)[:, None]
        torch.testing.assert_close(combined, (x + 1) * factors, rtol=0.02, atol=0.02)
    elastic.destroy()


def poisoned_arena(world):
    """Outputs in the arena that a side stream still reads when they are dropped, and the next dispatch comes."""
    with output_mode("arena"):
        for is_async in (False, True):
            check_poisoned(world, is_async)


def check_poisoned(world, is_async):
    buffer = v1(world)
    x, idx, weights = inputs(world, CASE)
    options = layout_of(buffer, idx, CASE.experts)
    options |= {"topk_idx": idx, "topk_weights": weights, "async_finish": is_async}
    side = torch.cuda.Stream()

    def dispatch(value):
        recv_x, *_, event = buffer.dispatch(x + value, **options)
        if is_async:
            event.current_stream_wait()
        return recv_x

    # The buffer learns of the stream by a call on it.
    with torch.cuda.stream(side):
        dispatch(0)
    torch.cuda.synchronize()
    copies = []
    for value in range(1, 20):
        recv_x = dispatch(value)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LONG // 4)
            copies.append((value, recv_x.clone()))
        del recv_x
        # Poison, in the same place if that were free.
        dispatch(-1000)
    torch.cuda.synchronize()
    expected = rows_of(world, CASE, CASE.sources(world.rank))
    wrong = [value for value, copy in copies if not torch.equal(copy, expected + value)]
    assert not wrong, f"asynchronous: {is_async}; overwritten before they were read: {wrong}"
    buffer.destroy()


def hook_on_the_stream_of_the_send(world):
    buffer = v1(world, low_latency_mode=True)
    x, idx, weights = inputs(world, CASE)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, CASE.max_tokens, CASE.experts, use_fp8=False, return_recv_hook=True
        )
    hook()
    # It is in the order of `side`, wherever it was called.
    side.synchronize()
    assert counts.tolist() == CASE.expert_counts(world.rank)
    with torch.cuda.stream(side):
        out, _, hook = buffer.low_latency_combine(rows, idx, weights, handle, return_recv_hook=True)
    hook()
    side.synchronize()
    factor = torch.where(idx >= 0, weights, 0).sum(1, keepdim=True)
    torch.testing.assert_close(out.float(), x.float() * factor, rtol=0.05, atol=0.05)
    for _ in range(2):
        *_, event, hook = buffer.low_latency_dispatch(
            x, idx, CASE.max_tokens, CASE.experts, async_finish=True
        )
        assert hook is None
        event.current_stream_wait()
    buffer.destroy()


def two_threads(world):
    """Two micro-batches, a thread and a stream each, whose calls alternate."""
    buffer = v1(world)

    def step(number, in_turn):
        x, idx, weights = inputs(world, CASE)
        x = x + number
        options = layout_of(buffer, idx, CASE.experts)
        recv_x, _, _, _, handle, event = in_turn(
            lambda: buffer.dispatch(
                x, topk_idx=idx, topk_weights=weights, async_finish=True, **options
            )
        )
        event.current_stream_wait()
        same(recv_x, rows_of(world, CASE, CASE.sources(world.rank)) + number)
        combined, _, event = in_turn(lambda: buffer.combine(recv_x, handle, async_finish=True))
        event.current_stream_wait()
        factors = torch.from_numpy(times(CASE, world.rank)).to(x.device)[:, None]
        torch.testing.assert_close(combined, x * factors, rtol=0.02, atol=0.02)

    def work(number, in_turn):
        for _ in range(10):
            step(number, in_turn)

    in_two_threads(world, work)
    buffer.destroy()


def first_call_in_a_thread(world):
    """The first call of a kind comes from a thread that has chosen no GPU: it opens the buffer's, not the thread's."""
    buffer, elastic, found = v1(world, low_latency_mode=True), v2(world, CASE), []
    x, idx, weights = inputs(world, CASE)

    def call():
        try:
            assert torch.cuda.current_device() == 0
            rows, counts, handle, _, _ = buffer.low_latency_dispatch(
                x, idx, CASE.max_tokens, CASE.experts, use_fp8=False
            )
            out, _, _ = buffer.low_latency_combine(rows, idx, weights, handle)
            elastic.barrier()
            torch.cuda.synchronize(x.device)
            found.append((rows, counts, out))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    rows, counts, out = found[0]
    assert (rows.device, out.device) == (x.device, x.device)
    assert counts.tolist() == CASE.expert_counts(world.rank)
    for expert in range(CASE.local):
        sources = [(source, token) for source, token, _ in CASE.expert_rows(world.rank, expert)]
        same(rows[expert, : len(sources)], rows_of(world, CASE, sources))
    factor = torch.where(idx >= 0, weights, 0).sum(1, keepdim=True)
    torch.testing.assert_close(out.float(), x.float() * factor, rtol=0.05, atol=0.05)
    elastic.destroy()
    buffer.destroy()


def barrier_behind_a_late_rank(world):
    """Work behind the device's barrier runs once the late rank has come to it."""
    buffer = v2(world, CASE)
    for how in ({}, {"use_comm_stream": False}, {"with_cpu_sync": True}):
        buffer.barrier(**how)
        torch.cuda.synchronize()
        world.barrier("together")
        before, behind = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        if world.rank == 1:
            # About 300 ms.
            torch.cuda._sleep(30 * LONG)
        buffer.barrier(**how)
        is_over = "with_cpu_sync" not in how or torch.cuda.current_stream().query()
        behind.record()
        torch.cuda.synchronize()
        took = before.elapsed_time(behind)
        assert took > 150, f"{how}: passed after {took} ms"
        assert is_over, "the host has not waited"
    buffer.destroy()


def full_memory(world):
    """A call that needs memory of torch where there is none is refused on all ranks, and the buffer goes on."""
    buffer, elastic = v1(world), v2(world, CASE)
    x, idx, weights = inputs(world, CASE)
    routes = {**layout_of(buffer, idx, CASE.experts), "topk_idx": idx, "topk_weights": weights}
    recv_x, _, _, _, handle, _ = buffer.dispatch(x, **routes)
    how = {"topk_idx": idx, "num_experts": CASE.experts}
    _, _, _, its_handle, _ = elastic.dispatch(x, **how)
    # Calls copy what is not contiguous.
    sparse, sparse_rows = (
        torch.stack((rows, rows), dim=2).flatten(1)[:, ::2] for rows in (x, recv_x)
    )
    for call in (
        lambda: buffer.dispatch(sparse, **routes),
        lambda: buffer.dispatch(sparse, handle=handle),
        lambda: buffer.combine(sparse_rows, handle),
        lambda: buffer.combine(recv_x, handle),
        lambda: elastic.dispatch(sparse, **how),
        lambda: elastic.dispatch(sparse, handle=its_handle),
        lambda: elastic.combine(recv_x, its_handle),
    ):
        with full(x.device) if world.rank == 1 else contextlib.nullcontext():
            error = raised(call)
        assert "OutOfMemoryError: CUDA out of memory" in str(error), error
        assert isinstance(error, ValueError) == (world.rank == 1)
    same(buffer.dispatch(sparse, **routes)[0], recv_x)
    same(elastic.dispatch(sparse, **how)[0], recv_x)
    elastic.destroy()
    buffer.destroy()


@contextlib.contextmanager
def full(device):
    """torch has no memory left to give out: what it has reserved is taken, and it may reserve no more."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    share = torch.cuda.memory_reserved(device) / total
    torch.cuda.set_per_process_memory_fraction(share, device)
    taken = []
    try:
        for numbers in (1 << 20, 1 << 14, 1 << 7):
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(numbers, dtype=torch.uint8, device=device))
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def steady(world):
    """10,000 steps allocate nothing that stays: neither memory of torch nor of the arena."""
    buffer = v1(world, low_latency_mode=True)
    x, idx, weights = inputs(world, CASE)

    def step():
        rows, _, handle, _, _ = buffer.low_latency_dispatch(
            x, idx, CASE.max_tokens, CASE.experts, use_fp8=False
        )
        buffer.low_latency_combine(rows, idx, weights, handle)

    def measure():
        gc.collect()
        torch.cuda.synchronize()
        opened = list(buffer._pool._opened.values())
        return torch.cuda.memory_allocated(), sum(one.communicator.held_bytes for one in opened)

    for _ in range(100):
        step()
    before = measure()
    for _ in range(10_000):
        step()
    after = measure()
    assert after == before, (before, after)
    buffer.destroy()


CHECKS = [
    asynchronous,
    previous_event,
    poisoned_arena,
    hook_on_the_stream_of_the_send,
    two_threads,
    first_call_in_a_thread,
    barrier_behind_a_late_rank,
    full_memory,
    steady,
]
