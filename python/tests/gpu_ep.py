"""DeepEP 2.5 on tensors of torch: `EPBuffer`, and calls of which the event gives the results."""

import pytest
import torch
from gpu_common import (
    CASE,
    EMPTY,
    SMALL,
    inputs,
    on_device,
    output_mode,
    prepare,
    same,
    synchronize,
    v2,
)
from gpu_work import captured, on, side_stream, slow

from tokenyard import Error
from tokenyard.deep_ep import EPBuffer, EventOverlap
from tokenyard.deep_ep.utils.math import per_token_cast_to_fp8

DEFER = {"async_with_compute_stream": True, "defer_epilogue": True}


def v2_5(world, case, **options):
    prepare(world)
    most = case.max_tokens
    return on_device(
        EPBuffer(world, num_max_tokens_per_rank=most, explicitly_destroy=True, **options)
    )


def same_rows(found, expected, filled):
    """Compares the filled rows of tensors, and of pairs of them, bit for bit."""
    pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
    for one, other in pairs:
        same(one[filled], other[filled])


def deferred_results(world):
    """A wait returns what the call of 2.1 returns: flat and expanded, FP8, without CPU sync, by a handle."""
    for case in (SMALL, CASE, EMPTY):
        buffer, other = v2_5(world, case), v2(world, case)
        x, idx, weights = inputs(world, case)
        for rows in (x, per_token_cast_to_fp8(x)):
            for is_expanded in (False, True):
                for is_synced in (True, False):
                    options = {"do_expand": is_expanded, "do_cpu_sync": is_synced}
                    check_deferred(case, (buffer, other), (rows, idx, weights), options)
        buffer.destroy()
        other.destroy()


def check_deferred(case, buffers, given, options):
    buffer, other = buffers
    rows, idx, weights = given
    call = {"topk_idx": idx, "topk_weights": weights, "num_experts": case.experts, **options}
    expected_x, expected_idx, expected_weights, expected, _ = other.dispatch(rows, **call)
    event = buffer.dispatch(rows, **call, **DEFER)
    assert isinstance(event, EventOverlap)
    found_x, found_idx, found_weights, handle = event.wait()
    assert event.wait() is None
    count = int(expected.psum_num_recv_tokens_per_scaleup_rank[-1])
    is_expanded = options["do_expand"]
    ends = expected.recv_src_metadata[:count, 2:]
    filled = ends[ends >= 0].long() if is_expanded else slice(count)
    same_rows(found_x, expected_x, filled)
    if is_expanded:
        assert found_idx is expected_idx is None
        same(found_weights[filled], expected_weights[filled])
    else:
        same(found_idx[:count], expected_idx[:count])
        is_here = expected_idx[:count] >= 0
        same(found_weights[:count][is_here], expected_weights[:count][is_here])
    same(handle.recv_src_metadata[:count], expected.recv_src_metadata[:count])
    assert handle.num_recv_tokens_per_expert_list == expected.num_recv_tokens_per_expert_list
    assert handle.topk_idx is idx
    event = buffer.dispatch(rows, handle=handle, do_expand=is_expanded, **DEFER)
    again_x, _, none, same_handle = event.current_stream_wait()
    assert (none, same_handle) == (None, handle)
    same_rows(again_x, found_x, filled)


def deferred_combines(world):
    """A combine of which the event gives the sums; a bias may be written until then."""
    case = CASE
    buffer, other = v2_5(world, case), v2(world, case)
    x, idx, weights = inputs(world, case)
    for is_expanded in (False, True):
        call = {"topk_idx": idx, "topk_weights": weights, "num_experts": case.experts}
        rows, _, back, handle, _ = other.dispatch(x, do_expand=is_expanded, **call)
        mine, _, own_back, own, event = buffer.dispatch(x, do_expand=is_expanded, **call)
        assert event.event is None
        ones = torch.ones_like(x)
        for count in range(3):
            late = [torch.zeros_like(x) for _ in range(count)]
            bias = None if not count else late[0] if count == 1 else tuple(late)
            wanted = None if not count else ones if count == 1 else (ones, ones)
            expected, expected_weights, _ = other.combine(rows, handle, back, bias=wanted)
            event = buffer.combine(mine, own, own_back, bias=bias, **DEFER)
            for one in late:
                one.fill_(1)
            combined, weights_back = event.wait()
            assert event.wait() is None
            same(combined, expected)
            same(weights_back, expected_weights)
    buffer.destroy()
    other.destroy()


def waits_on_another_stream(world):
    """The wait may be on another stream than the call: work there is behind the rows. In each mode of outputs."""
    case = CASE
    for mode in ("auto", "arena"):
        with output_mode(mode):
            buffer = v2_5(world, case)
        x, idx, _ = inputs(world, case)
        call = {"topk_idx": idx, "num_experts": case.experts}
        plain, *_ = buffer.dispatch(x, **call)
        side = side_stream()
        for _ in range(20):
            event = buffer.dispatch(x + 1, **call, **DEFER)
            with on(side):
                rows, _, _, handle = event.wait()
                doubled = rows * 2
                event = buffer.combine(rows, handle, **DEFER)
                combined, _ = event.wait()
                slow(1000)
                tripled = combined * 3
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)
            del rows, combined
            same(doubled, (plain + 1) * 2)
            reached = [len(case.ranks_of(world.rank, token)) for token in range(len(x))]
            factors = torch.tensor(reached, device=x.device)[:, None]
            torch.testing.assert_close(tripled, (x + 1) * factors * 3, rtol=0.03, atol=0.1)
        buffer.destroy()


def previous_events(world):
    """A deferred call waits for the event that it is given, and the barrier of 2.5 is behind all streams."""
    case = CASE
    buffer = v2_5(world, case)
    x, idx, _ = inputs(world, case)
    call = {"topk_idx": idx, "num_experts": case.experts}
    plain, *_ = buffer.dispatch(x, **call)
    side, late = side_stream(), torch.zeros_like(x)
    with on(side):
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        slow()
        late.copy_(x)
        written = buffer.capture()
    event = buffer.dispatch(
        late, previous_event=written, allocate_on_comm_stream=True, **call, **DEFER
    )
    rows, _, _, handle = event.wait()
    same(rows, plain)
    # A bias that is written on the current stream, of a combine that is behind an event of another.
    expected, *_ = buffer.combine(rows, handle, bias=torch.ones_like(x))
    for _ in range(20):
        bias = torch.zeros_like(x)
        previous = {"previous_event": written, "allocate_on_comm_stream": True}
        event = buffer.combine(rows, handle, bias=bias, **previous, **DEFER)
        slow(1_000_000)
        bias.fill_(1)
        combined, _ = event.wait()
        same(combined, expected)
    buffer.barrier()
    buffer.barrier(wait_comm_stream=False, with_cpu_sync=True)
    buffer.destroy()


def in_a_graph(world):
    """A graph of deferred calls without CPU sync: each launch has the sums of its own rows."""
    case = CASE
    buffer = v2_5(world, case)
    first, idx, _ = inputs(world, case)
    x, out = first.clone(), torch.zeros_like(first)
    reached = [len(case.ranks_of(world.rank, token)) for token in range(len(x))]
    factors = torch.tensor(reached, device=x.device)[:, None]

    def step():
        call = {"topk_idx": idx, "num_experts": case.experts, "do_cpu_sync": False}
        rows, _, _, handle = buffer.dispatch(x, **call, **DEFER).wait()
        bias = torch.ones_like(x)
        combined, _ = buffer.combine(rows, handle, bias=bias, **DEFER).wait()
        out.copy_(combined)

    launch = captured(step)
    for times in (1, 2, 3):
        x.copy_(first * times)
        out.zero_()
        launch()
        torch.testing.assert_close(out, x * factors + 1, rtol=0.02, atol=0.05)
    synchronize()
    buffer.destroy()


def biases_of_some_ranks(world):
    """Ranks with a bias and without make the same operations, whatever comes between call and wait."""
    case = CASE
    buffer = v2_5(world, case)
    x, idx, _ = inputs(world, case)
    rows, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=case.experts)
    for owner in range(world.ranks):
        bias = torch.ones_like(x) if world.rank == owner else None
        wanted, *_ = buffer.combine(rows, handle, bias=bias)
        event = buffer.combine(rows, handle, bias=bias, **DEFER)
        between = buffer.dispatch(x, handle=handle, **DEFER)
        same(buffer.dispatch(x, handle=handle)[0], rows)
        same(event.wait()[0], wanted)
        same(between.wait()[0], rows)
    buffer.destroy()


def events_that_are_left(world):
    """A fifth dispatch is refused by name. Other calls go on, and all that wait are received in the end."""
    case = CASE
    buffer = v2_5(world, case)
    x, idx, _ = inputs(world, case)
    call = {"topk_idx": idx, "num_experts": case.experts}
    rows, _, _, handle, _ = buffer.dispatch(x, **call)
    left = [buffer.dispatch(x * 2, **call, **DEFER)]
    left += [buffer.dispatch(x * 2, handle=handle, **DEFER) for _ in range(3)]
    with pytest.raises(Error, match="wait first for the event of dispatch 1"):
        buffer.dispatch(x, handle=handle, **DEFER)
    for _ in range(5):
        same(buffer.dispatch(x, **call)[0], rows)
        buffer.combine(rows, handle)
    side = side_stream()
    with on(side):
        same(left.pop().wait()[0], rows * 2)
    for _ in range(9):
        # Nothing can wait for them, and their inputs are gone.
        buffer.dispatch(x * 3, handle=handle, **DEFER)
        x.clone().fill_(7)
    left += [buffer.dispatch(x * 2, handle=handle, **DEFER)]
    buffer.destroy()
    for event in left:
        same(event.wait()[0], rows * 2)


def inputs_that_are_dropped(world):
    """The memory of inputs is used again behind the send alone, also where they are dropped at once."""
    case = CASE
    buffer = v2_5(world, case)
    x, idx, _ = inputs(world, case)
    rows, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=case.experts)
    for _ in range(20):
        given = x * 2
        event = buffer.dispatch(given, handle=handle, **DEFER)
        del given
        for _ in range(4):
            torch.full_like(x, 7)
        same(event.wait()[0], rows * 2)
    buffer.destroy()


CHECKS = [
    deferred_results,
    deferred_combines,
    waits_on_another_stream,
    previous_events,
    in_a_graph,
    biases_of_some_ranks,
    events_that_are_left,
    inputs_that_are_dropped,
]
