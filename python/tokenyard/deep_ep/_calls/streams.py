"""The stream of a call: the caller's current one, or for asynchronous calls one of the process."""

import contextlib
from collections.abc import Iterable
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


def gpu_stream(pool: Any) -> Any:
    """The stream of a buffer's asynchronous calls; None on the CPU."""
    return communication_stream(pool.device) if pool.on_device and pool.gpu is not None else None


# It has no state.
_HERE = contextlib.nullcontext()


class CallStream:
    """The stream of one call. `raw` is None in host memory, where there are none."""

    raw: int | None = None
    current_raw: int = 0
    _device: Any = None
    _stream: Any = None
    _is_captured: bool | None = None

    def __init__(self, device: Any, is_async: bool = False, before: Any = None) -> None:
        """`device` is a GPU, or None for the host's memory. `before`: an event that the call waits for."""
        self.is_async = is_async
        if device is None:
            return
        self._device = device
        event = None if before is None else getattr(before, "event", before)
        if self.is_async:
            self._current = torch.cuda.current_stream(device)
            self._stream = communication_stream(device)
            self.raw, self.current_raw = self._stream.cuda_stream, self._current.cuda_stream
            # Asked while the caller's stream is the current one.
            _ = self.is_captured
        else:
            # An integer, without an object of torch, which takes the host some microseconds.
            self.raw = self.current_raw = torch._C._cuda_getCurrentRawStream(device.index)
        if event is not None:
            event.wait_on(self.stream)
        elif self.is_async:
            self._stream.wait_stream(self._current)

    @property
    def is_captured(self) -> bool:
        """Whether torch's current stream captured a graph when this was asked first."""
        found = self._is_captured
        if found is None:
            found = self._device is not None and bool(torch.cuda.is_current_stream_capturing())
            self._is_captured = found
        return found

    def captured_among(self, streams: Iterable[int]) -> list[int]:
        """The streams, by their numbers, that capture a graph now."""
        found = []
        for raw in streams:
            with torch.cuda.stream(torch.cuda.ExternalStream(raw, self._device)):
                if torch.cuda.is_current_stream_capturing():
                    found.append(raw)
        return found

    @property
    def stream(self) -> Any:
        """torch's object of it, made when it is asked for first: while it is the current one, if it is that. None in
        host memory."""
        if self._stream is None and self._device is not None:
            self._stream = torch.cuda.current_stream(self._device)
        return self._stream

    def remember(self) -> None:
        """Prepares `resumed`, while the stream is the current one."""
        _ = self.stream

    def inside(self) -> Any:
        """Work that is queued, and memory that is allocated, inside of it is the stream's."""
        if self._device is None or not self.is_async:
            return _HERE
        return torch.cuda.stream(self.stream)

    def resumed(self) -> Any:
        """As `inside`, where the current stream may have changed since `remember`."""
        return _HERE if self._stream is None else torch.cuda.stream(self._stream)

    def later(self) -> Any:
        """As `inside`, for the rest of an asynchronous call: its outputs are for the stream that is current now."""
        self._look()
        return self.inside()

    def _look(self) -> None:
        if self._device is not None:
            self._current = torch.cuda.current_stream(self._device)
            self.current_raw = self._current.cuda_stream

    def hand_over(self, done: EventOverlap, outputs: Iterable[Any]) -> None:
        """The stream that is current now waits for a call, which may have been received while another one was."""
        if self._device is None or done.event is None:
            return
        before = self.current_raw
        self._look()
        if self.current_raw != before:
            _record(outputs, self._current)
        done.event.wait_on(self._current)

    def record(self, inputs: Iterable[Any]) -> None:
        """The allocator learns that an asynchronous call reads its inputs, which may be dropped before it has ended."""
        if self.is_async and self._device is not None:
            _record(inputs, self.stream)

    def finish(self, inputs: Iterable[Any], outputs: Iterable[Any]) -> EventOverlap:
        """The event behind the call. The allocator learns that both streams use its tensors, and those in tuples."""
        if not self.is_async:
            return EventOverlap()
        if self._device is None:
            return EventOverlap(EventHandle())
        _record(inputs, self.stream)
        _record(outputs, self._current)
        return EventOverlap(EventHandle(self.stream))


def _record(tensors: Iterable[Any], stream: Any) -> None:
    """The allocator learns that a stream uses tensors, and those in tuples."""
    flat = (each for one in tensors for each in (one if isinstance(one, tuple) else (one,)))
    # The caller's tensors are often those that were sent.
    for tensor in {id(one): one for one in flat}.values():
        if isinstance(tensor, torch.Tensor):
            tensor.record_stream(stream)
