"""Outputs that another stream still reads when they are dropped, as micro-batches that overlap leave them."""

import contextlib

import torch
from gpu_common import CASE, inputs, layout_of, output_mode, v1, v2

NEEDS_GPUS = True
ROUNDS, FEWER = 500, 60
# About 1 ms: by then the next dispatch has come.
LATE = 2_000_000
# Rounds have different values, and poison another one.
VALUES, POISON = 7, -1000


def kinds(world):
    """Dispatches by name: each gives the tensors that a caller reads, of tokens that are `value` larger."""
    x, idx, weights = inputs(world, CASE)
    buffer, elastic = v1(world), v2(world, CASE)
    routes = {**layout_of(buffer, idx, CASE.experts), "topk_idx": idx, "topk_weights": weights}
    *_, handle, _ = buffer.dispatch(x, **routes)
    of_elastic = {"topk_idx": idx, "topk_weights": weights, "num_experts": CASE.experts}

    def normal(value):
        rows, ids, its_weights, *_ = buffer.dispatch(x + value, **routes)
        return rows, ids, its_weights

    def asynchronous(value):
        rows, ids, its_weights, *_, event = buffer.dispatch(x + value, async_finish=True, **routes)
        event.current_stream_wait()
        return rows, ids, its_weights

    def cast(value):
        scales = torch.full((len(x), CASE.hidden // 128), 2.0, device=x.device) + value
        scaled = (x + value).to(torch.float8_e4m3fn), scales
        (rows, its_scales), ids, its_weights, *_ = buffer.dispatch(scaled, **routes)
        return rows.view(torch.uint8), its_scales, ids, its_weights

    def cached(value):
        rows, *_ = buffer.dispatch(x + value, handle=handle)
        return (rows,)

    def flat(value):
        rows, ids, its_weights, *_ = elastic.dispatch(x + value, **of_elastic)
        return rows, ids, its_weights

    def expanded(value):
        rows, _, its_weights, *_ = elastic.dispatch(x + value, do_expand=True, **of_elastic)
        return rows, its_weights

    try:
        yield from (
            (call.__name__, call) for call in (normal, asynchronous, cast, cached, flat, expanded)
        )
    finally:
        handle = None
        elastic.destroy()
        buffer.destroy()


def overwritten(dispatch, rounds, has_called):
    """The rounds whose outputs had other values when a second stream came to them.

    That stream waits for the dispatch and then works for long. The outputs are recorded on it and dropped, and the next
    dispatch, and memory of torch, hold poison. `has_called`: the buffer knows the stream by an earlier call.
    """
    wanted = [[one.clone() for one in dispatch(value)] for value in range(VALUES)]
    side = torch.cuda.Stream()
    if has_called:
        with torch.cuda.stream(side):
            dispatch(0)
    torch.cuda.synchronize()
    wrong = torch.zeros(rounds, dtype=torch.bool, device=wanted[0][0].device)
    for number in range(rounds):
        outputs = dispatch(number % VALUES)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(LATE)
            for one, expected in zip(outputs, wanted[number % VALUES], strict=True):
                wrong[number].logical_or_((one != expected).any())
                one.record_stream(side)
        shapes = [(one.shape, one.dtype) for one in outputs]
        del outputs, one
        for shape, dtype in shapes:
            torch.full(shape, 77, dtype=dtype, device=wrong.device)
        dispatch(POISON)
    torch.cuda.synchronize()
    return wrong.nonzero().flatten().tolist()


def recorded_on_another_stream(world):
    """Outputs obey `record_stream` as torch's own memory does, whether or not the buffer was called on that stream."""
    for name, dispatch in kinds(world):
        for has_called in (False, True):
            found = overwritten(dispatch, ROUNDS, has_called)
            assert not found, f"{name}, called: {has_called}: overwritten in rounds {found}"


def arena_knows_streams_by_calls(world):
    """In the arena, `record_stream` does nothing: what a buffer does not know by a call of its own is overwritten. So
    the check above can fail, and the arena is not the default."""
    with output_mode("arena"), contextlib.closing(kinds(world)) as made:
        name, dispatch = next(made)
        lost = overwritten(dispatch, FEWER, has_called=False)
        found = overwritten(dispatch, FEWER, has_called=True)
    assert lost, f"{name}: expected outputs that were overwritten"
    assert not found, f"{name}: overwritten in rounds {found}, although the buffer knows the stream"
    return f"overwritten in {len(lost)} of {FEWER} rounds, as documented"


CHECKS = [recorded_on_another_stream, arena_knows_streams_by_calls]
# Ranks that take turns give a reader time.
NEED_ONE_EACH = {arena_knows_streams_by_calls}
