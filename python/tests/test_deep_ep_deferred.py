"""Calls of `EPBuffer` whose events give their results, on 2 processes: how many may wait, in which order ranks make
operations, and what becomes of events that are never waited for."""

import gc

import numpy as np
import pytest
import torch
from test_deep_ep_elastic import BF16, CASES
from test_deep_ep_ep_buffer import DEFER, ep_buffer
from test_deep_ep_normal import same
from test_deep_ep_refusals import raises

from tokenyard import errors
from tokenyard.deep_ep import EventOverlap
from tokenyard.deep_ep._calls.streams import CallStream

CASE = CASES[1]
REFUSALS = (errors.InvalidInputError, errors.RefusedError)
WAIT = "wait first for the event of dispatch {} of those with defer_epilogue"


def prepared(world):
    """A buffer, the arguments of a dispatch, and the rows and the handle of one."""
    me, buffer = world.rank, ep_buffer(world, CASE)
    x = CASE.x[me].astype(BF16)
    good = {"x": x, "topk_idx": CASE.idx[me], "num_experts": CASE.experts}
    rows, _, _, handle, _ = buffer.dispatch(**good)
    return buffer, good, rows, handle


def several(world):
    """Four deferred dispatches may wait, in any order; a fifth is refused by name, on all ranks."""
    buffer, good, expected, _ = prepared(world)
    x = good.pop("x")
    events = [buffer.dispatch(x * BF16(n), **good, **DEFER) for n in (1, 2, 4, 8)]
    one_more = buffer.dispatch(x, **good, **DEFER)
    for _ in range(2):
        with pytest.raises(REFUSALS, match=WAIT.format(1)):
            one_more.wait()
    for place in (2, 0, 3, 1):
        rows, *_ = events[place].wait()
        same(rows, expected * BF16(1 << place))
    rows, *_ = buffer.dispatch(x, **good, **DEFER).wait()
    same(rows, expected)
    buffer.destroy()


def test_at_most_four_deferred_dispatches_wait(ranks):
    ranks(2, several)


def several_by_a_handle(world):
    """As many by a handle, which count together with those without one."""
    buffer, good, expected, handle = prepared(world)
    x = good["x"]
    events = [buffer.dispatch(**good, **DEFER)]
    events += [buffer.dispatch(x * BF16(n), handle=handle, **DEFER) for n in (2, 4, 8)]
    with pytest.raises(REFUSALS, match=WAIT.format(1)):
        buffer.dispatch(x, handle=handle, **DEFER)
    events[0].wait()
    events.append(buffer.dispatch(x * BF16(16), handle=handle, **DEFER))
    with pytest.raises(REFUSALS, match=WAIT.format(2)):
        buffer.dispatch(x, handle=handle, **DEFER)
    for place in (1, 2, 3, 4):
        rows, *_ = events[place].wait()
        same(rows, expected * BF16(1 << place))
    same(buffer.combine(rows, handle)[0], BF16(16) * buffer.combine(expected, handle)[0])
    buffer.destroy()


def test_at_most_four_deferred_dispatches_by_a_handle_wait(ranks):
    ranks(2, several_by_a_handle)


def wrongly_deferred(world, wrong):
    """One rank asks wrongly for an event. It meets the others where they wait, behind what they do before."""
    me, (buffer, good, rows, handle) = world.rank, prepared(world)
    sums, _, _ = buffer.combine(rows, handle)
    options = wrong if me == 1 else DEFER
    event = buffer.dispatch(**good, **options)
    same(buffer.combine(rows, handle)[0], sums)
    raises(world, "defer_epilogue: found", event.wait)
    event = buffer.combine(rows, handle, **options)
    same(buffer.dispatch(good["x"], handle=handle)[0], rows)
    raises(world, "defer_epilogue: found", event.wait)
    same(buffer.dispatch(**good, **DEFER).wait()[0], rows)
    buffer.destroy()


@pytest.mark.parametrize(
    "wrong",
    [{"defer_epilogue": True}, {"async_with_compute_stream": True, "defer_epilogue": 2}],
    ids=["not asynchronous", "no truth value"],
)
def test_a_rank_that_defers_wrongly_does_not_hold_up_the_others(ranks, wrong):
    ranks(2, wrongly_deferred, wrong)


def unpacked(world):
    buffer, good, rows, handle = prepared(world)
    with pytest.raises(REFUSALS, match="found True without async"):
        _, *_ = buffer.dispatch(**good, defer_epilogue=True)
    with pytest.raises(REFUSALS, match="found True without async"):
        _, *_ = buffer.combine(rows, handle, defer_epilogue=True)
    buffer.destroy()


def test_an_event_that_is_taken_for_results_raises_why_it_is_none(ranks):
    ranks(2, unpacked)


def biased(world):
    """Ranks with a bias and without make the same operations, and sums are those of whole calls, bit for bit."""
    me, (buffer, good, rows, handle) = world.rank, prepared(world)
    x = good["x"]
    for count in (0, 1, 2):
        own = count if me == 0 else 0
        bias = tuple(np.full(x.shape, 0.3 * (n + 1), BF16) for n in range(own)) or None
        late = None if bias is None else tuple(np.zeros_like(one) for one in bias)
        wanted, _, _ = buffer.combine(rows, handle, bias=bias)
        event = buffer.combine(rows, handle, bias=late, **DEFER)
        between = buffer.dispatch(**good, **DEFER)
        same(buffer.dispatch(x, handle=handle)[0], rows)
        for one, written in zip(late or (), bias or (), strict=True):
            one[:] = written
        same(event.wait()[0], wanted)
        same(between.wait()[0], rows)
    buffer.destroy()


def test_a_deferred_combine_is_made_at_one_point_with_a_bias_and_without(ranks):
    ranks(2, biased)


def never_waited(world):
    """Calls go on behind events without a wait, which the buffer receives where it needs their places."""
    buffer, good, expected, handle = prepared(world)
    left = buffer.dispatch(**good, **DEFER)
    for _ in range(7):
        rows, *_ = buffer.dispatch(**good)
        same(rows, expected)
        same(buffer.dispatch(good["x"], handle=handle)[0], expected)
        buffer.combine(rows, handle)
    same(left.wait()[0], expected)
    for number in range(7):
        # Nothing can wait for them any more.
        buffer.dispatch(**good if number % 2 else {"x": good["x"], "handle": handle}, **DEFER)
        gc.collect()
    same(buffer.dispatch(**good)[0], expected)
    buffer.combine(expected, handle, **DEFER)
    left = [buffer.dispatch(good["x"] * BF16(n), handle=handle, **DEFER) for n in (1, 2)]
    spoilt = {**good, "x": good["x"][0]} if world.rank == 1 else good
    refused = buffer.dispatch(**spoilt, **DEFER)
    buffer.destroy()
    for factor, event in zip((1, 2), left, strict=True):
        same(event.wait()[0], expected * BF16(factor))
    raises(world, "x: found shape", refused.wait)


def test_a_buffer_goes_on_and_is_destroyed_with_events_that_were_not_waited_for(ranks):
    ranks(2, never_waited)


def recorded(world):
    """The allocator learns of inputs at the call: they may be dropped before the event is waited for."""
    buffer, good, expected, handle = prepared(world)
    x, seen = torch.from_numpy(CASE.x[world.rank]).bfloat16(), []
    CallStream.record, before = lambda self, inputs: seen.extend(inputs), CallStream.record
    try:
        idx = torch.from_numpy(good["topk_idx"])
        for call, inputs in (
            ({**good, "x": x, "topk_idx": idx}, [x, idx]),
            ({"x": x, "handle": handle}, [x]),
        ):
            event = buffer.dispatch(**call, **DEFER)
            assert {id(one) for one in seen if one is not None} == set(map(id, inputs))
            seen.clear()
            same(event.wait()[0].float().numpy(), expected.astype(np.float32))
            assert not seen
    finally:
        CallStream.record = before
    buffer.destroy()


def test_the_inputs_of_a_deferred_dispatch_are_recorded_at_the_call(ranks):
    ranks(2, recorded)


def put_back(world):
    """A caller who puts ids back into a handle, as autograd does, may change them: a call by it watches nothing."""
    buffer, good, expected, _ = prepared(world)
    x, idx = torch.from_numpy(CASE.x[world.rank]).bfloat16(), torch.from_numpy(good["topk_idx"])
    for options in ({}, DEFER):
        rows, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=CASE.experts)
        handle.topk_idx = idx
        again = buffer.dispatch(x, handle=handle, **options)
        again = again.wait() if isinstance(again, EventOverlap) else again
        same(again[0].float().numpy(), expected.astype(np.float32))
        idx.view(-1)[:0] += 1
        buffer.combine(rows, handle)
    buffer.destroy()


def test_a_call_by_a_handle_does_not_watch_its_ids_anew(ranks):
    ranks(2, put_back)
