"""Graphs whose work is on several streams: outputs that another stream reads, branches, and asynchronous calls."""

import torch
from gpu_common import CASE, inputs, layout_of, rows_of, same, v1, v2
from gpu_graphs import close, decode_step, expected
from gpu_work import branch, captured, join, on, side_stream, slow

LAUNCHES = 5
# Between the rows of two dispatches.
APART = 8


def check_kept(world, launch, kept, blocks):
    """Each launch leaves the rows of the step's first dispatch in `kept`. `blocks` gives parts of it, and the sources
    of their first rows."""
    for _ in range(LAUNCHES):
        kept.zero_()
        launch()
        for rows, sources in blocks(kept):
            same(rows[: len(sources)], rows_of(world, CASE, sources))


def slow_readers(world):
    """V1 without CPU sync: rows that were dropped are read on, and the next dispatch, which does not wait for the
    reader, goes elsewhere or comes later."""
    buffer = v1(world)
    x, idx, weights = inputs(world, CASE)
    options = layout_of(buffer, idx, CASE.experts)
    options |= {"topk_idx": idx, "topk_weights": weights, "num_worst_tokens": 128}
    other, kept = x + APART, x.new_zeros((128, CASE.hidden))

    def step():
        rows, *others, done = buffer.dispatch(x, async_finish=True, **options)
        done.current_stream_wait()
        early = buffer.capture()
        slow()
        kept.copy_(rows)
        del rows, others
        *_, done = buffer.dispatch(other, previous_event=early, async_finish=True, **options)
        done.current_stream_wait()

    check_kept(world, captured(step), kept, lambda rows: [(rows, CASE.sources(world.rank))])
    buffer.destroy()


def slow_readers_of_v2(world):
    """As `slow_readers`, flat and expanded."""
    for is_expanded in (False, True):
        buffer = v2(world, CASE)
        x, idx, weights = inputs(world, CASE)
        options = {
            "topk_idx": idx,
            "topk_weights": weights,
            "num_experts": CASE.experts,
            "do_cpu_sync": False,
            "do_expand": is_expanded,
            "async_with_compute_stream": True,
        }
        other = x + APART
        room, *_, done = buffer.dispatch(x, **options)
        done.current_stream_wait()
        kept = torch.zeros_like(room)
        del room

        def step(buffer=buffer, x=x, other=other, kept=kept, options=options):
            rows, *others, done = buffer.dispatch(x, **options)
            done.current_stream_wait()
            early = buffer.capture()
            slow()
            kept.copy_(rows)
            del rows, others
            *_, done = buffer.dispatch(other, previous_event=early, **options)
            done.current_stream_wait()

        def blocks(rows, is_expanded=is_expanded):
            if not is_expanded:
                return [(rows, CASE.sources(world.rank))]
            found, start = [], 0
            for of_expert in sources_by_expert(world):
                found.append((rows[start:], of_expert))
                start += len(of_expert)
            return found

        check_kept(world, captured(step), kept, blocks)
        buffer.destroy()


def slow_readers_of_low_latency(world):
    """Calls on one stream, and a reader on another, of which the graph has learnt by a call there."""
    buffer = v1(world, low_latency_mode=True)
    x, idx, _ = inputs(world, CASE)
    other, side = x + APART, side_stream()
    kept = x.new_zeros((CASE.local, CASE.ranks * CASE.max_tokens, CASE.hidden))

    def dispatch(rows):
        return buffer.low_latency_dispatch(rows, idx, CASE.max_tokens, CASE.experts, use_fp8=False)

    def step():
        dispatch(other)
        with branch(side):
            rows, *others = dispatch(x)
        join(side)
        slow()
        kept.copy_(rows)
        del rows, others
        # It waits for the present work of `side` alone, which does not follow the reader.
        with on(side):
            dispatch(other)
        join(side)

    def blocks(rows):
        return zip(rows, sources_by_expert(world), strict=True)

    check_kept(world, captured(step), kept, blocks)
    buffer.destroy()


def sources_by_expert(world):
    """The (source rank, token) of the rows of each local expert."""
    rows = [CASE.expert_rows(world.rank, expert) for expert in range(CASE.local)]
    return [[(source, token) for source, token, _ in of_expert] for of_expert in rows]


def check_branches(call, x, factor):
    """Two calls on parallel branches of a graph: `call(x, out)`, whose results are `factor * x`."""
    sides, given = [side_stream(number) for number in range(2)], [x, x.clone()]
    outs = [torch.zeros_like(x) for _ in sides]

    def step():
        for side, one, out in zip(sides, given, outs, strict=True):
            with branch(side):
                call(one, out)
        for side in sides:
            join(side)

    launch = captured(step)
    for _ in range(20):
        for one, out in zip(given, outs, strict=True):
            one.normal_()
            out.fill_(torch.nan)
        launch()
        for one, out in zip(given, outs, strict=True):
            close(out, one.float() * factor)


def branches(world):
    """Normal calls without CPU sync, and those of low latency."""
    buffer = v1(world, low_latency_mode=True)
    x, idx, weights = inputs(world, CASE)
    options = layout_of(buffer, idx, CASE.experts)
    options |= {"topk_idx": idx, "topk_weights": weights, "num_worst_tokens": 128}

    def normal(x, out):
        rows, _, _, _, handle, _ = buffer.dispatch(x, **options)
        out.copy_(buffer.combine(rows * 2, handle)[0])

    check_branches(normal, x, 2 * options["is_token_in_rank"].sum(1, keepdim=True).float())
    total = expected(torch.ones_like(x), idx, weights)
    check_branches(lambda x, out: decode_step(buffer, x, idx, weights, out), x, total)
    buffer.destroy()


def branches_of_v2(world):
    """Flat and expanded."""
    for is_expanded in (False, True):
        buffer = v2(world, CASE)
        x, idx, _ = inputs(world, CASE)

        def call(x, out, buffer=buffer, idx=idx, is_expanded=is_expanded):
            rows, _, _, handle, _ = buffer.dispatch(
                x,
                topk_idx=idx,
                num_experts=CASE.experts,
                do_cpu_sync=False,
                do_expand=is_expanded,
            )
            out.copy_(buffer.combine(rows * 2, handle)[0])

        check_branches(call, x, 2 * copies_of(idx, is_expanded))
        buffer.destroy()


def copies_of(idx, is_expanded):
    """The rows that each token becomes: one for each rank, or each expert."""
    if is_expanded:
        return (idx >= 0).sum(1, keepdim=True).float()
    ranks = torch.where(idx >= 0, idx // CASE.local, -1)
    return sum((ranks == rank).any(1, keepdim=True).float() for rank in range(CASE.ranks))


def asynchronous_layers(world):
    """Layers as vLLM calls V2: on the communication stream, behind an event of now, launched with other inputs and
    another routing."""
    for is_expanded in (False, True):
        buffer = v2(world, CASE)
        x, idx, weights = inputs(world, CASE)
        outs = [torch.zeros_like(x) for _ in range(3)]

        def step(buffer=buffer, x=x, idx=idx, weights=weights, outs=outs, is_expanded=is_expanded):
            def timing():
                return {
                    "previous_event": buffer.capture(),
                    "async_with_compute_stream": True,
                    "allocate_on_comm_stream": True,
                }

            for out in outs:
                rows, _, _, handle, done = buffer.dispatch(
                    x,
                    topk_idx=idx,
                    topk_weights=weights,
                    num_experts=CASE.experts,
                    do_cpu_sync=False,
                    do_expand=is_expanded,
                    **timing(),
                )
                done.current_stream_wait()
                doubled = rows * 2
                del rows
                combined, _, done = buffer.combine(doubled, handle, **timing())
                done.current_stream_wait()
                out.copy_(combined)

        launch = captured(step)
        for _ in range(10):
            x.normal_()
            idx.copy_(torch.where(idx >= 0, (idx + 5) % CASE.experts, -1))
            for out in outs:
                out.fill_(torch.nan)
            launch()
            for out in outs:
                close(out, 2 * x.float() * copies_of(idx, is_expanded))
        buffer.destroy()


CHECKS = [
    slow_readers,
    slow_readers_of_v2,
    slow_readers_of_low_latency,
    branches,
    branches_of_v2,
    asynchronous_layers,
]
