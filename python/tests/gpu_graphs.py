"""CUDA graphs of torch whose outputs were dropped in the capture, and what is beside them."""

import time

import torch
from gpu_common import CASE, inputs, layout_of, raised, rows_of, same, v1, v2
from gpu_work import LONG, branch, captured, join, on, side_stream, slow

NEEDS_GPUS = True


def decode_step(buffer, x, idx, weights, out):
    """A layer in low latency: the experts double. Its tensors are dropped, but for `out`."""
    rows, _, handle, _, _ = buffer.low_latency_dispatch(
        x, idx, CASE.max_tokens, CASE.experts, use_fp8=False
    )
    buffer.low_latency_combine(rows * 2, idx, weights, handle, out=out)


def expected(x, idx, weights):
    return 2 * x.float() * torch.where(idx >= 0, weights, 0).sum(1, keepdim=True)


def close(found, wanted):
    torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0.05)


def beside(world, buffer):
    """An output and a handle that live while graphs are launched, and the check of both."""
    x, idx, weights = inputs(world, CASE)
    options = layout_of(buffer, idx, CASE.experts)
    recv_x, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **options)

    def check():
        same(recv_x, rows_of(world, CASE, CASE.sources(world.rank)))
        again, *_ = buffer.dispatch(x, handle=handle)
        same(again, recv_x)

    return check


def decode_loop(world):
    """A captured step of several layers, launched with other inputs, and eager calls of all kinds between."""
    buffer = v1(world, low_latency_mode=True)
    x, idx, weights = inputs(world, CASE)
    outs = [torch.zeros_like(x) for _ in range(8)]

    def step():
        for out in outs:
            decode_step(buffer, x, idx, weights, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for launch in range(30):
        check = beside(world, buffer)
        x.normal_()
        weights.uniform_()
        for out in outs:
            out.fill_(torch.nan)
        eager = torch.empty_like(x)
        graph.replay()
        decode_step(buffer, x, idx, weights, eager)
        for out in (*outs, eager):
            close(out, expected(x, idx, weights))
        if launch % 3 == 0:
            check()
    buffer.destroy()


def many_captures(world):
    """Thousands of captured dispatches, in graphs that live at once, fit where a few eager ones do."""
    buffer = v1(world, low_latency_mode=True)
    x, idx, weights = inputs(world, CASE)
    out = torch.zeros_like(x)
    decode_step(buffer, x, idx, weights, out)
    torch.cuda.synchronize()
    graphs, pool = [], None
    for _ in range(10):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            for _ in range(200):
                decode_step(buffer, x, idx, weights, out)
        pool = pool or graph.pool()
        graphs.append(graph)
    for graph in graphs:
        x.normal_()
        out.zero_()
        graph.replay()
        close(out, expected(x, idx, weights))
    buffer.destroy()


def elastic_step(world):
    """V2 without CPU sync, flat and expanded, with the handle's counts read on the device in the graph."""
    for is_expanded in (False, True):
        buffer = v2(world, CASE)
        x, idx, _ = inputs(world, CASE)
        outs = [torch.zeros_like(x) for _ in range(3)]
        counted = torch.zeros(3, dtype=torch.int32, device=x.device)

        def step(buffer=buffer, outs=outs, counted=counted, is_expanded=is_expanded, x=x, idx=idx):
            for n, out in enumerate(outs):
                recv_x, _, _, handle, _ = buffer.dispatch(
                    x,
                    topk_idx=idx,
                    num_experts=CASE.experts,
                    do_cpu_sync=False,
                    do_expand=is_expanded,
                )
                counted[n] = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
                combined, *_ = buffer.combine(recv_x * 2, handle)
                out.copy_(combined)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        ranks = (idx // CASE.local).masked_fill(idx < 0, -1)
        copies = [
            (ranks == rank).sum(1) if is_expanded else (ranks == rank).any(1) for rank in (0, 1)
        ]
        factor = 2 * sum(copy.float() for copy in copies)[:, None]
        for _ in range(10):
            x.normal_()
            counted.zero_()
            graph.replay()
            for out in outs:
                close(out, x.float() * factor)
            assert counted.tolist() == [len(CASE.sources(world.rank))] * 3
        buffer.destroy()


def worst_tokens_step(world):
    """V1 with `num_worst_tokens` in a graph."""
    buffer = v1(world)
    x, idx, weights = inputs(world, CASE)
    options = layout_of(buffer, idx, CASE.experts)
    options |= {"topk_idx": idx, "topk_weights": weights, "num_worst_tokens": 128}
    out = torch.zeros_like(x)

    def step():
        recv_x, _, _, _, handle, _ = buffer.dispatch(x, **options)
        out.copy_(buffer.combine(recv_x, handle)[0])

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    factor = sum(options["is_token_in_rank"][:, rank].float() for rank in (0, 1))[:, None]
    for _ in range(10):
        x.normal_()
        graph.replay()
        close(out, x.float() * factor)
    buffer.destroy()


def not_warm(world):
    """A capture of sizes that no call had before is refused, and no rank waits."""
    buffer = v1(world, low_latency_mode=True)
    x, idx, weights = inputs(world, CASE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        error = raised(lambda: decode_step(buffer, x, idx, weights, torch.empty_like(x)))
    assert "before the capture" in str(error), error
    decode_step(buffer, x, idx, weights, torch.empty_like(x))
    buffer.destroy()


def not_fitting(world):
    """A capture of wider rows than any call had is refused on both ranks, though there is a communicator, and no rank
    waits. The buffer goes on, and takes the wide rows once it is warm."""
    for make in (of_low_latency, of_worst_tokens, of_v2):
        buffer, call = make(world)
        x, *_ = inputs(world, CASE)
        wide = torch.cat([x, x], 1)
        check_call(call, x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        start = time.monotonic()
        with torch.cuda.graph(graph):
            error = raised(lambda call=call, wide=wide: call(wide))
        assert "before the capture" in str(error), error
        assert "warm up" in error.fix, error.fix
        assert time.monotonic() - start < 10
        for rows in (x, wide, x):
            check_call(call, rows)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, factor = call(wide)
        wide.normal_()
        graph.replay()
        close(out, wide.float() * factor)
        buffer.destroy()


def first_barrier(world):
    """A barrier needs a communicator of its own: the first one of a buffer is refused in a capture, which goes on."""
    buffer = v2(world, CASE)
    x, *_ = inputs(world, CASE)
    graph, found = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    for is_warm in (False, True):
        with torch.cuda.graph(graph):
            for use_comm_stream in (False, True):
                if is_warm:
                    buffer.barrier(use_comm_stream=use_comm_stream)
                    continue
                error = raised(lambda aside=use_comm_stream: buffer.barrier(use_comm_stream=aside))
                assert "before the capture" in str(error), error
            found.add_(x)
        graph.replay()
        torch.cuda.synchronize()
        same(found, (1 + is_warm) * x)
        buffer.barrier()
        graph = torch.cuda.CUDAGraph()
    buffer.destroy()


def streams_of_earlier_captures(world):
    """The host does not wait in a capture for a stream that only an earlier capture had: here for a second of work."""
    buffer = v1(world, low_latency_mode=True)
    x, idx, weights = inputs(world, CASE)
    side, out, behind = side_stream(), torch.empty_like(x), torch.cuda.Event()

    def on_two_streams():
        with branch(side):
            decode_step(buffer, x, idx, weights, out)
        join(side)
        decode_step(buffer, x, idx, weights, out)

    captured(on_two_streams)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # The graph has memory before the stream is busy.
        decode_step(buffer, x, idx, weights, out)
        # It runs: this stream captures nothing now.
        with on(side):
            slow(100 * LONG)
            behind.record()
        for _ in range(3):
            decode_step(buffer, x, idx, weights, out)
    assert not behind.query(), "the capture has waited"
    torch.cuda.synchronize()
    graph.replay()
    close(out, expected(x, idx, weights))
    buffer.destroy()


def check_call(call, x):
    out, factor = call(x)
    close(out, x.float() * factor)


def of_low_latency(world):
    """A buffer, and a call of it on rows of any width, which gives their sums and by what they are multiplied."""
    buffer = v1(world, low_latency_mode=True)
    _, idx, weights = inputs(world, CASE)
    factor = torch.where(idx >= 0, weights, 0).sum(1, keepdim=True)

    def call(x):
        out = torch.empty_like(x)
        decode_step(buffer, x, idx, weights, out)
        return out, 2 * factor

    return buffer, call


def of_worst_tokens(world):
    buffer = v1(world)
    _, idx, weights = inputs(world, CASE)
    options = layout_of(buffer, idx, CASE.experts)
    options |= {"topk_idx": idx, "topk_weights": weights, "num_worst_tokens": 128}
    factor = options["is_token_in_rank"].sum(1, keepdim=True)

    def call(x):
        rows, _, _, _, handle, _ = buffer.dispatch(x, **options)
        return buffer.combine(rows, handle)[0], factor

    return buffer, call


def of_v2(world):
    buffer = v2(world, CASE)
    _, idx, _ = inputs(world, CASE)
    ranks = (idx // CASE.local).masked_fill(idx < 0, -1)
    factor = sum((ranks == rank).any(1, keepdim=True).int() for rank in (0, 1))

    def call(x):
        rows, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=idx, num_experts=CASE.experts, do_cpu_sync=False
        )
        return buffer.combine(rows, handle)[0], factor

    return buffer, call


CHECKS = [
    decode_loop,
    many_captures,
    elastic_step,
    worst_tokens_step,
    not_warm,
    not_fitting,
    first_barrier,
    streams_of_earlier_captures,
]
