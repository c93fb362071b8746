"""The stream of a call: the caller's current one, or for asynchronous calls one of the process."""

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .._torch import torch
from ..utils.event import EventHandle, EventOverlap

_communication: dict[Any, Any] = {}


def communication_stream(device: Any) -> Any:
    """The stream of asynchronous calls, of high priority: one for each device of the process."""
    stream = _communication.get(device)
    if stream is None:
        stream = _communication[device] = torch.cuda.Stream(device, priority=-1)
    return stream


@dataclass(frozen=True)
class Timing:
    """The event that a call waits for, and whether it gives one.

    Whether outputs are allocated on the communication stream follows from the call being asynchronous: the allocator
    knows both streams in any case.
    """

    previous_event: Any = None
    is_async: bool = False


AT_ONCE = Timing()


class CallStream:
    """The stream of one call. `raw` is None in host memory, where there are none."""

    def __init__(self, device: Any, timing: Timing) -> None:
        self.is_async = timing.is_async
        self.raw: int | None = None
        self.current_raw: int = 0
        self.stream: Any = None
        self.is_captured = False
        if device.type != "cuda":
            return
        self._current = torch.cuda.current_stream(device)
        self.stream = communication_stream(device) if timing.is_async else self._current
        event = getattr(timing.previous_event, "event", timing.previous_event)
        if event is not None:
            event.wait_on(self.stream)
        elif timing.is_async:
            self.stream.wait_stream(self._current)
        self.raw = self.stream.cuda_stream
        self.current_raw = self._current.cuda_stream if timing.is_async else self.raw
        self.is_captured = torch.cuda.is_current_stream_capturing()

    def inside(self) -> Any:
        """Work that is queued, and memory that is allocated, inside of it is the stream's."""
        if self.stream is None or not self.is_async:
            return contextlib.nullcontext()
        return torch.cuda.stream(self.stream)

    def resumed(self) -> Any:
        """As `inside`, where the current stream may have changed since."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def finish(self, inputs: Iterable[Any], outputs: Iterable[Any]) -> EventOverlap:
        """The event behind the call. The allocator learns that both streams use its tensors."""
        if not self.is_async:
            return EventOverlap()
        if self.stream is None:
            return EventOverlap(EventHandle())
        for tensors, stream in ((inputs, self.stream), (outputs, self._current)):
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(stream)
        return EventOverlap(EventHandle(self.stream))
