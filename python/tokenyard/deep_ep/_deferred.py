"""Calls of a buffer whose events give their results, from the call to the wait for the event."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tokenyard import errors

from ._arrays import Refusal
from ._hooks import Hook
from .utils.event import EventOverlap

R = TypeVar("R")

# An operation of each of two micro-batches, and for either of them the one that brings a combine's weights.
IN_FLIGHT = 4


@dataclass(frozen=True)
class _Waiting:
    """A call that was sent. Its place among those of the buffer, from 1 on, is its name in messages."""

    number: int
    hook: Hook
    event: "weakref.ref[EventOverlap]"


class Deferred:
    """The calls that were sent and not received, in their order.

    They are held here: an operation that nothing can receive would hold its place in the communicator for ever.
    """

    def __init__(self) -> None:
        self._calls: list[_Waiting] = []
        self._count = 0

    def add(self, hook: Hook, event: EventOverlap) -> None:
        """A call, which is received by the hook, or by the event whose wait calls it."""
        self._count += 1
        self._calls.append(_Waiting(self._count, hook, weakref.ref(event)))

    def _first(self) -> _Waiting | None:
        self._calls = [call for call in self._calls if call.hook.waits]
        return self._calls[0] if self._calls else None

    def expect_room(self) -> None:
        """Refuses one more call where too many wait. The first ones are received where no event is left to do it."""
        while (first := self._first()) is not None and len(self._calls) >= IN_FLIGHT:
            if first.event() is not None:
                raise Refusal(
                    f"defer_epilogue: found {len(self._calls)} dispatches whose events wait; expected fewer than "
                    f"{IN_FLIGHT}: wait first for the event of dispatch {first.number} of those with defer_epilogue "
                    "on this buffer, counted from 1"
                )
            first.hook.settle()

    def start(self, act: Callable[..., R], *arguments: object, **keywords: object) -> R:
        """Makes an operation of a communicator. Where a call that waits holds its place, that is received before:
        its event gives the results later. All ranks make the same operations, so all do it there."""
        while True:
            try:
                return act(*arguments, **keywords)
            except errors.InvalidInputError as error:
                first = self._first() if error.operation == "start operation" else None
                if first is None:
                    raise
            first.hook.settle()

    def settle(self) -> None:
        """Receives all, because a communicator with open operations cannot be closed. Events give results, and raise
        what is wrong, afterwards, too."""
        while (first := self._first()) is not None:
            first.hook.settle()
