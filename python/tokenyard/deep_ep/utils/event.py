"""Events. On the CPU a call has ended when it returns, so there is nothing to wait for."""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from .._torch import torch


class EventHandle:
    """A point in the order of the current stream of torch; on the CPU all calls before it have ended."""

    def __init__(self, stream: Any = None) -> None:
        self.tensors_to_record: tuple[Any, ...] | None = None
        self._event: Any = None
        if torch.cuda.is_initialized():
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def current_stream_wait(self) -> None:
        """Work that is queued next on the current stream runs behind the event."""
        if self._event is not None:
            self._event.wait()

    def wait_on(self, stream: Any) -> None:
        """As `current_stream_wait`, for another stream."""
        if self._event is not None:
            self._event.wait(stream)


def _raise(error: Exception) -> NoReturn:
    raise error


class EventOverlap:
    """An event, or None where a call was not asynchronous, and what must live until it."""

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._hook: Callable[[], Any] | None = None
        self._is_released = False

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Waits for the event, runs the hook once, and forgets the event if asked to. Returns what the hook returned:
        of a call with `defer_epilogue` the results. None without a hook, so also the second time; where the hook has
        raised, a later wait raises the same."""
        assert self.event is not None
        self.event.current_stream_wait()
        hook, self._hook = self._hook, None
        try:
            result = hook() if hook is not None else None
        except Exception as error:
            self._hook = functools.partial(_raise, error)
            raise
        if release_handle:
            self.event = None
        return result

    def wait(self) -> Any:
        """As `current_stream_wait`."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook: Callable[[], Any]) -> None:
        """Calls `hook` once, after the wait."""
        assert self._hook is None
        self._hook = hook

    def __call__(self, release_handle: bool = False) -> "EventOverlap":
        """For `with event(release_handle=True):`, whose end waits for the event, and forgets it."""
        self._is_released = release_handle
        return self

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.event is not None:
            self.current_stream_wait(self._is_released)
        self._is_released = False
