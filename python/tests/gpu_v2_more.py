"""More of DeepEP V2 on tensors of torch: FP8 and its scales in every form, padding, and what lies behind the rows."""

import torch
from gpu_common import (
    CASE,
    EMPTY,
    SMALL,
    flat_of,
    inputs,
    is_gpu,
    raised,
    rows_of,
    same,
    synchronize,
    times,
    v1,
    v2,
)

from tokenyard.deep_ep import _world
from tokenyard.deep_ep.utils.math import align, per_token_cast_to_fp8

ALIGNMENT = 16


def scales_of(scales, is_column_major):
    """Scales as they are compared, once their strides are checked."""
    if is_column_major and len(scales) > 1:
        assert scales.stride() == (1, align(len(scales), 4)), scales.stride()
    return scales.contiguous()


def fp8_without_sync(world):
    """FP8 rows and their scales at the front of the most that can arrive, at once and by the handle."""
    for case in (CASE, EMPTY):
        found, most = len(case.sources(world.rank)), case.ranks * case.max_tokens
        buffer = v2(world, case, use_fp8_dispatch=True)
        x, idx, weights = inputs(world, case)
        every = rows_of(world, case, case.sources(world.rank))
        for is_column_major in (False, True):
            form = {"use_tma_aligned_col_major_sf": is_column_major}
            received, _, _, handle, _ = buffer.dispatch(
                per_token_cast_to_fp8(x),
                topk_idx=idx,
                topk_weights=weights,
                num_experts=case.experts,
                do_cpu_sync=False,
                **form,
            )
            again, *_ = buffer.dispatch(per_token_cast_to_fp8(x + 1), handle=handle, **form)
            for (rows, scales), rows_in in ((received, every), (again, every + 1)):
                expected, expected_scales = per_token_cast_to_fp8(rows_in)
                assert len(rows) == len(scales) == most
                same(rows[:found], expected)
                same(scales_of(scales, is_column_major)[:found], expected_scales)
        buffer.destroy()


def fp8_cached(world):
    """A handle of a dispatch with CPU sync brings other rows and scales, in either form of scales."""
    case, buffer = CASE, v2(world, CASE, use_fp8_dispatch=True)
    x, idx, _ = inputs(world, case)
    every = rows_of(world, case, case.sources(world.rank))
    *_, handle, _ = buffer.dispatch(
        per_token_cast_to_fp8(x), topk_idx=idx, num_experts=case.experts
    )
    for is_column_major in (False, True):
        (rows, scales), *_ = buffer.dispatch(
            per_token_cast_to_fp8(x + 1),
            handle=handle,
            use_tma_aligned_col_major_sf=is_column_major,
        )
        expected, expected_scales = per_token_cast_to_fp8(every + 1)
        same(rows, expected)
        same(scales_of(scales, is_column_major), expected_scales)
    buffer.destroy()


def fp8_expanded(world):
    """Expanded FP8 rows with scales and weights, at once and by the handle, with and without CPU sync."""
    for case in (SMALL, CASE):
        for is_synced in (True, False):
            for is_column_major in (False, True):
                check_expanded(world, case, is_synced, is_column_major)


def check_expanded(world, case, is_synced, is_column_major):
    buffer = v2(world, case, use_fp8_dispatch=True)
    x, idx, weights = inputs(world, case)
    form = {"do_expand": True, "use_tma_aligned_col_major_sf": is_column_major}
    received, none, its_weights, handle, _ = buffer.dispatch(
        per_token_cast_to_fp8(x),
        topk_idx=idx,
        topk_weights=weights,
        num_experts=case.experts,
        expert_alignment=ALIGNMENT,
        do_zero_padding=True,
        do_cpu_sync=is_synced,
        **form,
    )
    assert none is None
    again, none, other_weights, same_handle, _ = buffer.dispatch(
        per_token_cast_to_fp8(x + 1), topk_weights=2 * weights, handle=handle, **form
    )
    assert none is None
    assert same_handle is handle
    for (rows, scales), found, added, factor in (
        (received, its_weights, 0, 1),
        (again, other_weights, 1, 2),
    ):
        assert len(rows) == len(scales) == len(found) == handle.num_expanded_tokens
        scales = scales_of(scales, is_column_major)
        for expert, (start, end, rest) in enumerate(places(case, world.rank)):
            wanted = case.expert_rows(world.rank, expert)
            of_expert = rows_of(world, case, [(s, t) for s, t, _ in wanted])
            expected, expected_scales = per_token_cast_to_fp8(of_expert + added)
            same(rows[start:end], expected)
            same(scales[start:end], expected_scales)
            expected = factor * torch.tensor([case.weights[s][t, k] for s, t, k in wanted])
            same(found[start:end].cpu(), expected.float())
            check_padding(rows[end:rest], found[end:rest])
    # Without weights there are none.
    *_, none, _, _ = buffer.dispatch(per_token_cast_to_fp8(x), handle=handle, **form)
    assert none is None
    buffer.destroy()


def places(case, me):
    """Of each local expert: where its rows start and end, and where those of the next one start."""
    found, start = [], 0
    for count in case.expert_counts(me):
        rest = align(start + count, ALIGNMENT)
        found.append((start, start + count, rest))
        start = rest
    return found


def check_padding(rows, weights):
    for padding in (rows, weights):
        assert not bool(padding.contiguous().view(torch.uint8).any()), padding


def zero_padding(world):
    """Padding of rows and weights is zero, whatever the arena held before, and so is that of a handle's dispatch."""
    case = CASE
    for is_synced in (True, False):
        buffer = v2(world, case)
        x, idx, weights = inputs(world, case)
        for value in (1, 2, 3):
            options = {
                "topk_idx": idx,
                "topk_weights": weights,
                "num_experts": case.experts,
                "do_cpu_sync": is_synced,
            }
            # Rows without padding, in the place that the next ones may get.
            buffer.dispatch(torch.full_like(x, torch.nan), **options)
            rows, _, its_weights, handle, _ = buffer.dispatch(
                x + value,
                do_expand=True,
                do_zero_padding=True,
                expert_alignment=ALIGNMENT,
                **options,
            )
            found = [(rows, its_weights)]
            rows, _, its_weights, _, _ = buffer.dispatch(
                x - value, topk_weights=weights, handle=handle, do_expand=True
            )
            found.append((rows, its_weights))
            for rows, its_weights in found:
                for _, end, rest in places(case, world.rank):
                    check_padding(rows[end:rest], its_weights[end:rest])
        buffer.destroy()


def ids_behind_the_rows(world):
    """Without CPU sync, ids behind the rows that arrived are -1, whatever lay there before."""
    for case in (SMALL, CASE, EMPTY):
        buffer = v2(world, case)
        x, idx, weights = inputs(world, case)
        found, (ids, expected_weights) = len(case.sources(world.rank)), flat_of(world, case)
        all_of_one = torch.zeros_like(idx)
        all_of_one[:] = torch.arange(case.topk, device=idx.device)
        for _ in range(3):
            # More rows arrive before, on rank 0, and fewer on the other.
            for given in (all_of_one, idx):
                rows, recv_idx, recv_weights, handle, _ = buffer.dispatch(
                    x,
                    topk_idx=given,
                    topk_weights=weights,
                    num_experts=case.experts,
                    do_cpu_sync=False,
                )
            assert len(rows) == len(recv_idx) == case.ranks * case.max_tokens
            _, again, *_ = buffer.dispatch(x, handle=handle)
            for one in (recv_idx, again):
                same(one[:found], ids)
                assert bool((one[found:] == -1).all())
            is_here = ids >= 0
            same(recv_weights[:found][is_here], expected_weights[is_here])
        buffer.destroy()


def refused_by_the_communicator_of_the_call(world):
    """Rows of two widths have a communicator each. A rank refuses over that of its call, where the other rank waits,
    even if another one was opened last; and it refuses a call of another M."""
    buffer = v2(world, CASE)
    x, idx, _ = inputs(world, CASE)

    def call(ids, most, width=CASE.hidden):
        rows, *_ = buffer.dispatch(
            x[:most, :width].contiguous(),
            topk_idx=ids[:most],
            num_experts=CASE.experts,
            num_max_tokens_per_rank=most,
        )
        return rows

    kinds = ((CASE.max_tokens,), (8,), (CASE.max_tokens, CASE.hidden // 2))
    for kind in kinds:
        call(idx, *kind)
    for kind in kinds:
        error = raised(lambda kind=kind: call(idx.float() if world.rank else idx, *kind))
        assert "topk_idx: found" in str(error), error
    same(call(idx, CASE.max_tokens), rows_of(world, CASE, CASE.sources(world.rank)))
    assert len(buffer._pool._opened) == 2
    buffer.destroy()


def calls_of_every_m(world):
    """M of a call is a number like any other: calls of M = 1 to 64 in turn, and graphs of an M that no call had, open
    nothing, take no memory, and ask no other rank."""
    low, buffer = v1(world, low_latency_mode=True), v2(world, CASE)
    x, idx, weights = inputs(world, CASE)
    total = torch.where(idx >= 0, weights, 0).sum(1, keepdim=True)
    asked, gather = [], _world.gather_json

    def step(most):
        of_call = x[:most], idx[:most]
        rows, _, handle, _, _ = low.low_latency_dispatch(
            *of_call, most, CASE.experts, use_fp8=False
        )
        assert rows.shape[1] == 2 * most
        sums, _, _ = low.low_latency_combine(rows, idx[:most], weights[:most], handle)
        options = {"num_experts": CASE.experts, "num_max_tokens_per_rank": most}
        flat, *_, handle, _ = buffer.dispatch(
            x[:most], topk_idx=idx[:most], do_cpu_sync=False, **options
        )
        assert len(flat) == 2 * most
        return sums, flat, buffer.combine(flat, handle)[0]

    def check(most, results):
        sums, flat, back = results
        close = torch.testing.assert_close
        close(sums.float(), x[:most] * total[:most], rtol=0.05, atol=0.05)
        factors = torch.from_numpy(times(CASE, world.rank)[:most]).to(x.device)[:, None]
        close(back, x[:most] * factors, rtol=0.02, atol=0.05)
        sources = [one for one in CASE.sources(world.rank) if one[1] < most]
        same(flat[: len(sources)], rows_of(world, CASE, sources))

    check(CASE.max_tokens, step(CASE.max_tokens))
    opened = [each for one in (low, buffer) for each in one._pool._opened.values()]
    assert len(opened) == 2
    _world.gather_json = lambda *arguments: (asked.append(arguments), gather(*arguments))[1]
    try:
        if is_gpu():
            for most in (5, 33):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    results = step(most)
                for _ in range(2):
                    graph.replay()
                    synchronize()
                    check(most, results)
        for most in range(1, CASE.max_tokens + 1):
            check(most, step(most))
    finally:
        _world.gather_json = gather
    assert asked == []
    assert opened == [each for one in (low, buffer) for each in one._pool._opened.values()]
    low.destroy()
    buffer.destroy()


def theoretical_multiprocessors(world):
    """The number that DeepEP would choose leaves the choice to the kernel set, as 0 does; another one counts, unless a
    config of the environment is used, as in host memory."""
    buffer = v2(world, CASE)
    x, idx, _ = inputs(world, CASE)
    for sms in (0, buffer.get_theoretical_num_sms(), 64, 1):
        for is_expanded in (False, True):
            rows, _, _, handle, _ = buffer.dispatch(
                x,
                topk_idx=idx,
                num_experts=CASE.experts,
                num_sms=sms,
                do_expand=is_expanded,
            )
            factors = torch.from_numpy(times(CASE, world.rank)).to(x.device)[:, None]
            if is_expanded:
                factors = (idx >= 0).sum(1, keepdim=True)
            named = {"do_expand": is_expanded, "num_sms": sms + world.rank}
            again, *_ = buffer.dispatch(x, handle=handle, **named)
            same(again, rows)
            for other in (0, 3 + world.rank):
                combined, *_ = buffer.combine(rows, handle, num_sms=other)
                torch.testing.assert_close(combined, x * factors, rtol=0.02, atol=0.05)
        assert len(buffer._pool._opened) == 1, sms
    buffer.destroy()


CHECKS = [
    fp8_without_sync,
    fp8_cached,
    fp8_expanded,
    zero_padding,
    ids_behind_the_rows,
    refused_by_the_communicator_of_the_call,
    calls_of_every_m,
    theoretical_multiprocessors,
]
# The config by which ranks share a GPU decides for all calls of a buffer.
NEED_ONE_EACH = {theoretical_multiprocessors}
