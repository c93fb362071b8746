"""V2 calls of which only the end waits for an event: what they give is behind it."""

import torch
from gpu_common import CASE, inputs, rows_of, same, synchronize, times, v2
from gpu_work import join, on, side_stream, slow

# Calls on the current stream, and on the communication stream.
WAYS = ({}, {"async_with_compute_stream": True})


def dispatched(buffer, x, idx, **options):
    """A dispatch that is there for the current stream."""
    *outputs, handle, done = buffer.dispatch(x, topk_idx=idx, num_experts=CASE.experts, **options)
    if options.get("async_with_compute_stream"):
        done.current_stream_wait()
    return *outputs, handle


def written_late(buffer, side, tensor, value):
    """The event behind a write that is queued on another stream, and comes late."""
    synchronize()
    with on(side):
        slow()
        tensor.copy_(value)
        return buffer.capture()


def late_bias(world):
    """A bias that is written on another stream, ahead of the event, is in the sum: one, and two of them."""
    x, idx, _ = inputs(world, CASE)
    factors = torch.from_numpy(times(CASE, world.rank)).to(x.device)[:, None]
    # It lives as long as the other stream reads it.
    threes = torch.full_like(x, 3)
    side = side_stream()
    for is_expanded, options in (
        (False, {}),
        (True, {}),
        (True, {"allow_multiple_reduction": False}),
    ):
        buffer = v2(world, CASE, **options)
        for way in WAYS:
            rows, _, _, handle = dispatched(buffer, x, idx, do_expand=is_expanded)
            if is_expanded:
                factors = (idx >= 0).sum(1, keepdim=True)
            for count in (1, 2):
                # A combine copies what has gaps, or another order.
                turned = torch.zeros(x.shape[::-1], dtype=x.dtype, device=x.device).T
                bias = torch.zeros_like(x) if count == 1 else turned
                event = written_late(buffer, side, bias, threes)
                combined, _, done = buffer.combine(
                    rows,
                    handle,
                    bias=bias if count == 1 else (bias, bias),
                    previous_event_before_epilogue=event,
                    **way,
                )
                if way:
                    done.current_stream_wait()
                torch.testing.assert_close(combined, x * factors + 3 * count, rtol=0.02, atol=0.05)
                join(side)
        buffer.destroy()


def rows_behind_the_event(world):
    """Work behind a dispatch is behind its event, too: of a first dispatch, and of one by a handle."""
    x, idx, _ = inputs(world, CASE)
    side = side_stream()
    flag = torch.zeros(1, device=x.device)
    ones = torch.ones_like(flag)
    found = len(CASE.sources(world.rank))
    expected = rows_of(world, CASE, CASE.sources(world.rank))
    for options in ({}, {"do_cpu_sync": False}, {"do_cpu_sync": False, "do_expand": True}):
        is_expanded = "do_expand" in options
        buffer = v2(world, CASE)
        # It opens the communicator, which waits for all work.
        plain, _, _, handle = dispatched(buffer, x, idx, **options)
        for way in WAYS:
            for cached in (None, handle):
                flag.zero_()
                event = written_late(buffer, side, flag, ones)
                arguments = options | way | {"previous_event_before_epilogue": event}
                if cached is None:
                    rows, *_ = dispatched(buffer, x + 1, idx, **arguments)
                else:
                    rows, *_, done = buffer.dispatch(
                        x + 1,
                        handle=cached,
                        do_expand=is_expanded,
                        previous_event_before_epilogue=event,
                        **way,
                    )
                    if way:
                        done.current_stream_wait()
                seen = flag.clone()
                if not is_expanded:
                    same(rows[:found], expected + 1)
                else:
                    filled = filled_rows(handle, found)
                    same(rows[filled], plain[filled] + 1)
                assert seen.item() == 1, (options, way, cached is not None)
                join(side)
        buffer.destroy()


def filled_rows(handle, found):
    """The rows of an expanded dispatch that are no padding."""
    slots = handle.recv_src_metadata[:found, 2:]
    return slots[slots >= 0].long()


CHECKS = [late_bias, rows_behind_the_event]
