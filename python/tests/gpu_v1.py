"""DeepEP V1 on tensors of torch: the assertions of its own tests, in our words."""

import time

import torch
from gpu_common import (
    CASE,
    EMPTY,
    SMALL,
    difference,
    flat_of,
    inputs,
    layout_of,
    raised,
    rows_of,
    same,
    times,
    v1,
)
from gradients import check_gradients
from oracle import Case

from tokenyard.deep_ep._calls.tensors import _dummies
from tokenyard.deep_ep.utils.math import per_token_cast_to_fp8

# Its ids and weights are wider than its rows.
NARROW = Case(2, experts=64, topk=32, hidden=32, max_tokens=64, tokens=(64, 61), seed=8)


def layout_counts(world):
    """Before there is a communicator, by torch; on GPUs then by a kernel of ours."""
    buffer = v1(world)
    for case in (CASE, EMPTY):
        check_layout(world, buffer, case, inputs(world, case)[1])
    x, idx, weights = inputs(world, CASE)
    options = layout_of(buffer, idx, CASE.experts)
    buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **options)
    for case in (CASE, EMPTY):
        check_layout(world, buffer, case, inputs(world, case)[1])
    # Ids that the dispatch will refuse count nowhere.
    bad = idx.clone()
    bad[idx < 0] = CASE.experts
    check_layout(world, buffer, CASE, bad)
    buffer.destroy()


def check_layout(world, buffer, case, idx):
    per_rank, per_domain, per_expert, is_in, event = buffer.get_dispatch_layout(idx, case.experts)
    me = world.rank
    expected = [[r in case.ranks_of(me, t) for r in range(2)] for t in range(case.tokens[me])]
    assert is_in.tolist() == expected
    assert per_rank.tolist() == [sum(row[r] for row in expected) for r in range(2)]
    flat = case.idx[me].flatten().tolist()
    assert per_expert.tolist() == [flat.count(e) for e in range(case.experts)]
    types = (per_rank.dtype, per_expert.dtype, is_in.dtype)
    assert types == (torch.int32, torch.int32, torch.bool)
    assert per_domain is None
    assert event.event is None


def check_normal(world, buffer, case, dtype, captures=False, **options):
    """`captures`: each call waits for an event that is captured just before it."""
    me = world.rank
    x, idx, weights = inputs(world, case, dtype)
    layout = layout_of(buffer, idx, case.experts)
    if captures:
        options["previous_event"] = buffer.capture()
    recv_x, recv_idx, recv_weights, per_expert, handle, event = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, **layout, **options
    )
    if options.get("async_finish"):
        event.current_stream_wait()
    ids, expected_weights = flat_of(world, case)
    same(recv_x, rows_of(world, case, case.sources(me), dtype))
    same(recv_idx, ids)
    same(recv_weights, expected_weights)
    assert per_expert == case.expert_counts(me)
    ends = torch.tensor(case.source_counts(me)).cumsum(0)
    assert handle[0][:, me].tolist() == ends.tolist()
    assert handle[3].tolist() == [token for _, token in case.sources(me)]
    if captures:
        options["previous_event"] = buffer.capture()
    combined, back, event = buffer.combine(recv_x, handle, topk_weights=recv_weights, **options)
    if options.get("async_finish"):
        event.current_stream_wait()
    factors = torch.from_numpy(times(case, me)).to(x.device)[:, None]
    assert difference(combined, x * factors) < 5e-6
    assert difference(back, torch.where(idx >= 0, weights, 0)) < 1e-9
    return x, recv_x, handle


def normal_round_trip(world):
    buffer = v1(world)
    for case in (SMALL, CASE, EMPTY, NARROW):
        for dtype in (torch.bfloat16, torch.float32):
            check_normal(world, buffer, case, dtype)
    buffer.destroy()


def normal_cached(world):
    buffer = v1(world)
    x, recv_x, handle = check_normal(world, buffer, CASE, torch.bfloat16)
    again, ids, weights, counts, none, _ = buffer.dispatch(x + 1, handle=handle)
    assert (ids, weights, counts, none) == (None, None, None, None)
    same(again, recv_x + 1)
    # As a framework that saves tensors alone has it back.
    again, *_ = buffer.dispatch(x, handle=tuple(tensor.detach() for tensor in handle))
    same(again, recv_x)
    buffer.destroy()


def normal_biases(world):
    buffer = v1(world)
    x, recv_x, handle = check_normal(world, buffer, SMALL, torch.float32)
    bias = torch.full_like(x, 2)
    for given, added in ((bias, 2), ((bias, bias), 4)):
        combined, *_ = buffer.combine(recv_x, handle, bias=given)
        plain, *_ = buffer.combine(recv_x, handle)
        torch.testing.assert_close(combined, plain + added)
    buffer.destroy()


def normal_fp8(world):
    buffer = v1(world)
    me, case = world.rank, CASE
    x, idx, weights = inputs(world, case)
    fp8, scales = per_token_cast_to_fp8(x)
    # Column-major, as a caller's own kernel leaves them.
    scales = scales.T.contiguous().T
    (recv_x, recv_scales), *_ = buffer.dispatch(
        (fp8, scales), topk_idx=idx, topk_weights=weights, **layout_of(buffer, idx, case.experts)
    )
    every = rows_of(world, case, case.sources(me))
    expected, expected_scales = per_token_cast_to_fp8(every)
    assert recv_x.dtype == torch.float8_e4m3fn
    same(recv_x, expected)
    same(recv_scales, expected_scales)
    buffer.destroy()


def normal_without_topk(world):
    buffer = v1(world)
    me, case = world.rank, CASE
    x, idx, _ = inputs(world, case)
    options = layout_of(buffer, idx, case.experts)
    recv_x, recv_idx, recv_weights, per_expert, handle, _ = buffer.dispatch(x, **options)
    assert (recv_idx, recv_weights) == (None, None)
    same(recv_x, rows_of(world, case, case.sources(me)))
    assert per_expert == case.expert_counts(me)
    combined, _, _ = buffer.combine(recv_x, handle)
    factors = torch.from_numpy(times(case, me)).to(x.device)[:, None]
    assert difference(combined, x * factors) < 5e-6
    buffer.destroy()


def normal_worst_tokens(world):
    """No CPU sync: as many rows as asked for, the front bit for bit as with it, ids -1 behind it."""
    buffer = v1(world)
    me = world.rank
    for case, worst in ((CASE, 128), (CASE, 301), (SMALL, 64)):
        x, idx, weights = inputs(world, case)
        options = layout_of(buffer, idx, case.experts)
        options |= {"topk_idx": idx, "topk_weights": weights, "num_worst_tokens": worst}
        recv_x, recv_idx, recv_weights, per_expert, handle, _ = buffer.dispatch(x, **options)
        found = len(case.sources(me))
        ids, expected_weights = flat_of(world, case)
        assert (len(recv_x), len(recv_idx), len(recv_weights)) == (worst, worst, worst)
        assert per_expert == []
        same(recv_x[:found], rows_of(world, case, case.sources(me)))
        same(recv_idx[:found], ids)
        same(recv_weights[:found], expected_weights)
        assert bool((recv_idx[found:] == -1).all())
        combined, back, _ = buffer.combine(recv_x, handle, topk_weights=recv_weights)
        factors = torch.from_numpy(times(case, me)).to(x.device)[:, None]
        assert difference(combined, x * factors) < 5e-6
        assert difference(back, torch.where(idx >= 0, weights, 0)) < 1e-9
        again, *_ = buffer.dispatch(x, handle=handle)
        same(again[:found], recv_x[:found])
    buffer.destroy()


def normal_refusals(world):
    """Wrong arguments of one rank end the call on all; the buffer goes on."""
    buffer = v1(world)
    x, idx, weights = inputs(world, SMALL)
    options = layout_of(buffer, idx, SMALL.experts)
    bad = {"topk_weights": weights.double()} if world.rank == 1 else {"topk_weights": weights}
    error = raised(lambda: buffer.dispatch(x, topk_idx=idx, **options, **bad))
    assert "topk_weights" in str(error), error
    assert isinstance(error, ValueError) == (world.rank == 1)
    check_normal(world, buffer, SMALL, torch.bfloat16)
    wrong = idx.clone()
    if world.rank == 0 and wrong.numel():
        wrong[0, 0] = SMALL.experts
    error = raised(lambda: buffer.dispatch(x, topk_idx=wrong, topk_weights=weights, **options))
    assert "expert" in str(error), error
    check_normal(world, buffer, SMALL, torch.bfloat16)
    buffer.destroy()


def low_latency(world, case=CASE):
    """Packed rows, with and without a hook, in every cast; then their combine."""
    buffer = v1(world, low_latency_mode=True)
    me, local, most = world.rank, case.local, case.ranks * case.max_tokens
    x, idx, _ = inputs(world, case)
    stats, calls = torch.zeros(local, dtype=torch.int32, device=x.device), 0
    for has_hook in (False, True):
        for cast in ({}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True}, None):
            calls += 1
            packed, counts, handle, event, hook = buffer.low_latency_dispatch(
                x,
                idx,
                case.max_tokens,
                case.experts,
                cumulative_local_expert_recv_stats=stats,
                use_fp8=cast is not None,
                return_recv_hook=has_hook,
                **(cast or {}),
            )
            assert (hook is None) == (not has_hook)
            assert event.event is None
            if has_hook:
                hook()
                hook()
            rows = packed if cast is None else packed[0]
            assert rows.shape == (local, most, case.hidden)
            assert counts.tolist() == case.expert_counts(me)
            # They are cumulative.
            assert stats.tolist() == [calls * count for count in counts.tolist()]
            check_blocks(world, case, (rows, handle), cast, packed)
            check_combine(world, buffer, case, (rows, packed, handle), has_hook)
    buffer.destroy()


def low_latency_waits(world, case=SMALL):
    """Waiting times per source rank: kernels of low latency add them; others refuse them by name."""
    buffer = v1(world, low_latency_mode=True)
    x, idx, weights = inputs(world, case)
    arguments = (x, idx, case.max_tokens, case.experts)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(*arguments, use_fp8=False)
    sent, back = (torch.zeros(2, dtype=torch.int64, device=x.device) for _ in range(2))

    def dispatch():
        return buffer.low_latency_dispatch(*arguments, dispatch_wait_recv_cost_stats=sent)

    def combine():
        buffer.low_latency_combine(rows, idx, weights, handle, combine_wait_recv_cost_stats=back)

    if not buffer._pool.current.takes("statistics"):
        for call in (dispatch, combine):
            error = raised(call)
            assert "waiting times per source rank" in str(error), error
            assert isinstance(error, NotImplementedError), error
        combine = buffer.low_latency_combine
        combine(rows, idx, weights, handle)
        buffer.destroy()
        return
    late = 0.2
    for call, stats in ((dispatch, sent), (combine, back)):
        world.barrier("together")
        if world.rank == 1:
            time.sleep(late)
        call()
        torch.cuda.synchronize()
        waited = stats.tolist()
        # Rank 0 has waited for the one that came late, and that one for none as long.
        most = 1e9 * late / 2
        assert waited[1] > most if world.rank == 0 else waited[0] < most, waited
    wrong = torch.zeros(3, dtype=torch.int64, device=x.device)
    error = raised(
        lambda: buffer.low_latency_dispatch(*arguments, dispatch_wait_recv_cost_stats=wrong)
    )
    assert "expected [2]" in str(error), error
    buffer.destroy()


def low_latency_logfmt(world, case=CASE):
    """Sums in ten bits a value: near the plain ones, equal at every call, in halves too; elsewhere refused by name."""
    buffer = v1(world, low_latency_mode=True)
    x, idx, weights = inputs(world, case)
    # Below 1, so that most chunks of 512 channels are encoded.
    x, weights = x / (1 + x.abs().max()), weights / case.topk
    packed, _, handle, _, _ = buffer.low_latency_dispatch(
        x, idx, case.max_tokens, case.experts, use_fp8=False
    )
    plain, _, _ = buffer.low_latency_combine(packed, idx, weights, handle)
    if not buffer._pool.current.takes("logfmt10"):
        error = raised(
            lambda: buffer.low_latency_combine(packed, idx, weights, handle, use_logfmt=True)
        )
        assert "LogFMT-10" in str(error), error
        buffer.destroy()
        return
    sums = []
    for has_hook in (False, True, False):
        out, _, hook = buffer.low_latency_combine(
            packed, idx, weights, handle, use_logfmt=True, return_recv_hook=has_hook
        )
        if has_hook:
            hook()
        sums.append(out)
    assert all(torch.equal(out, sums[0]) for out in sums)
    assert not torch.equal(sums[0], plain)
    off = (sums[0].float() - plain.float()).abs().max()
    assert off <= 2**-5 * plain.float().abs().max(), off
    buffer.destroy()


def check_blocks(world, case, found, cast, packed):
    rows, handle = found
    source, ranges = handle[0], handle[1]
    for expert in range(case.local):
        wanted = case.expert_rows(world.rank, expert)
        count = len(wanted)
        assert source[expert, :count].tolist() == [token for _, token, _ in wanted]
        for rank in range(case.ranks):
            mine = [row for row, (s, _, _) in enumerate(wanted) if s == rank]
            value = int(ranges[expert, rank])
            assert value & 0xFFFFFFFF == len(mine)
            assert not mine or value >> 32 == mine[0]
        expected = rows_of(world, case, [(s, t) for s, t, _ in wanted])
        if cast is None:
            same(rows[expert, :count], expected)
        elif "use_ue8m0" not in cast:
            scales = packed[1]
            assert scales.stride() == (scales[0].numel(), 1, scales.shape[1])
            back = rows[expert, :count].float() * scales[expert, :count].repeat_interleave(128, 1)
            assert difference(back, expected) < (0.007 if cast else 2e-3)


def check_combine(world, buffer, case, dispatched, has_hook):
    rows, packed, handle = dispatched
    me = world.rank
    x, idx, weights = inputs(world, case)
    if not isinstance(packed, torch.Tensor):
        # Rows that are known, in place of the experts'.
        rows = torch.zeros(rows.shape, dtype=torch.bfloat16, device=x.device)
        for expert in range(case.local):
            wanted = case.expert_rows(me, expert)
            rows[expert, : len(wanted)] = rows_of(world, case, [(s, t) for s, t, _ in wanted])
    # Rows that no token has may hold anything.
    experts = rows.clone()
    for expert, count in enumerate(case.expert_counts(me)):
        experts[expert, count:] = torch.nan
    selected = torch.where(idx >= 0, weights, 0)
    masked = idx.clone()
    masked[: len(masked) // 2, 0] = -1
    for ids in (idx, masked):
        combined, _, hook = buffer.low_latency_combine(
            experts, ids, weights, handle, return_recv_hook=has_hook
        )
        if has_hook:
            hook()
        factor = torch.where(ids >= 0, selected, 0).sum(1, keepdim=True)
        assert not bool(combined.isnan().any())
        assert difference(combined, x.float() * factor) < 1e-5
    buffer_rows = buffer.get_next_low_latency_combine_buffer(handle)
    buffer_rows.copy_(experts)
    out = torch.empty_like(x)
    given, _, hook = buffer.low_latency_combine(
        torch.zeros_like(experts), idx, weights, handle, zero_copy=True, out=out
    )
    assert hook is None
    assert given is out
    assert difference(out, x.float() * selected.sum(1, keepdim=True)) < 1e-5


def gradients(world, case=SMALL):
    """Forward and backward, plain and with checkpoints, against a dense layer. Backward runs on autograd's thread."""
    buffer = v1(world)
    # A first call in inference mode makes tensors that stay, and that a later forward saves.
    _dummies.clear()
    x, idx, weights = inputs(world, case, torch.float32)
    with torch.inference_mode():
        layout = layout_of(buffer, idx, case.experts)
        buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **layout)
    for with_checkpoint in (False, True):
        check_gradients(buffer, case, inputs(world, case, torch.float32), with_checkpoint)
    buffer.destroy()


CHECKS = [
    layout_counts,
    normal_round_trip,
    normal_cached,
    normal_biases,
    normal_fp8,
    normal_without_topk,
    normal_worst_tokens,
    normal_refusals,
    gradients,
    low_latency,
    low_latency_waits,
    low_latency_logfmt,
]
