"""The calls of `EPBuffer`: those of V2, of which the event may give the results."""

from typing import Any

import numpy as np

from .._arrays import Refusal
from .._torch import torch
from ..utils.event import EventHandle, EventOverlap
from . import elastic, rows
from .call import Call
from .rows import Record
from .streams import CallStream
from .tensors import gpu_of, name_current, on_stream


class _OfBuffer(Call):
    """A call of `EPBuffer` with rows."""

    def __init__(self, given: dict[str, Any]) -> None:
        asked = given["defer_epilogue"]
        super().__init__(given)
        # A wrong one asks for it, too: this rank meets the others, which are right, where events are waited for.
        self.defer_epilogue = not (
            asked is None or (isinstance(asked, (int, np.bool_)) and not asked)
        )
        if self.defer_epilogue and not self.is_async:
            self.wrong = self.wrong or (
                "defer_epilogue: found True without async_with_compute_stream; expected both, or neither"
            )

    def record(self) -> Record:
        found: Record = super().record()  # type: ignore[misc]
        if not self.handle.has_its_ids():
            raise Refusal(
                "handle: found other ids in topk_idx than its dispatch got; expected them as they were while the "
                "handle is in use"
            )
        return found


class DispatchCall(_OfBuffer, elastic.DispatchCall):
    """A dispatch."""

    operation = "EPBuffer.dispatch"
    flags = (*elastic.DispatchCall.flags, "defer_epilogue")

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        if self.do_handle_copy:
            self.wrong = self.wrong or (
                "do_handle_copy: found True; expected False: the handle has the ids of the caller"
            )

    def read(self) -> Any:
        sizes = super().read()
        if self.defer_epilogue:
            self.pool.deferred.expect_room()
        return sizes


class CombineCall(_OfBuffer, elastic.CombineCall):
    """A combine."""

    operation = "EPBuffer.combine"
    flags = (*elastic.CombineCall.flags, "defer_epilogue")


class BarrierCall(elastic.BarrierCall):
    """A barrier, of which the stream of asynchronous calls is the one that it is behind."""

    flags = ("wait_comm_stream", "with_cpu_sync", "sequential")


def dispatch(call: DispatchCall) -> elastic.Result | EventOverlap:
    """A dispatch, or its event."""
    if call.defer_epilogue:
        return on_stream(_deferred_dispatch, call)
    return on_stream(_dispatch, call)


def _dispatch(call: DispatchCall, stream: CallStream) -> elastic.Result:
    return _watched(call, elastic.dispatch(call, stream))


def _watched(call: DispatchCall, results: elastic.Result) -> elastic.Result:
    """The ids of a handle that the call has made must stay. Those of the caller's are watched, or were put back."""
    if call.handle is None:
        results[3].watch_ids()
    return results


def _deferred_dispatch(call: DispatchCall, stream: CallStream) -> EventOverlap:
    """Sends. The wait for the event receives, on the same stream, and the stream that is current then waits for it."""
    pool, received = call.pool, elastic.begin(call, stream)
    stream.record(rows.inputs_of(call))
    found: list[elastic.Result] = []

    def receive() -> None:
        with stream.later():
            found.append(_watched(call, call.given_back(received())))

    hook = pool.hook(receive, None, 1)

    def wait() -> Any:
        hook()
        *results, done = found.pop()
        handle = results[3]
        stream.hand_over(done, (*results[:3], handle._topk_idx, handle._places.memory))
        name_current(handle._record.opened, stream)
        return tuple(results)

    event = _event_of(call, wait, EventHandle(stream.stream))
    pool.deferred.add(hook, event)
    return event


def combine(call: CombineCall) -> tuple[Any, Any, EventOverlap] | EventOverlap:
    """A combine, or its event. Then all of it is done where the event is waited for, with a bias or without: a bias may
    be written until then, and one kernel sends and sums. Ranks with a bias and without make the same operations."""
    if not call.defer_epilogue:
        return on_stream(rows.combine, call)
    device = gpu_of(call.x)
    # Its inputs are written on the stream that is current there.
    begun = EventHandle(None if device is None else torch.cuda.current_stream(device))
    return _event_of(call, lambda: _waited(call, device, begun), begun)


def _waited(call: CombineCall, device: Any, begun: EventHandle) -> tuple[Any, Any]:
    """A combine behind the call for it, behind its event, and behind all of the current stream, where a bias may have
    been written."""
    before, call.previous_event = call.previous_event, None
    current = None if device is None else torch.cuda.current_stream(device)
    for mark in (begun, getattr(before, "event", before)):
        if mark is not None and current is not None:
            mark.wait_on(current)
    x, weights, done = on_stream(rows.combine, call)
    if current is not None and done.event is not None:
        done.event.wait_on(current)
    return x, weights


class _Refused(EventOverlap):
    """The event of a call that asks wrongly to be deferred. To unpack it as results raises what is wrong, too."""

    def __iter__(self) -> Any:
        return iter(self.wait())


def _event_of(call: _OfBuffer, wait: Any, behind: EventHandle) -> EventOverlap:
    event = EventOverlap(behind) if call.is_async else _Refused(behind)
    event.register_hook_after_wait(wait)
    return event
