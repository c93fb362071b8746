"""Arguments that a call looks at before the ranks meet in it: flags, events and some numbers.

A call keeps what is wrong with them until ranks meet: a rank that raised at once would leave the others waiting.
"""

import contextlib
import numbers
from typing import Any, TypeAlias

import numpy as np

from .._arrays import Refusal
from ..utils.event import EventHandle

# DeepEP's integers have 32 bits; numbers of bytes have 64.
MOST = 2**31 - 1
MOST_BYTES = 2**63 - 1
# The most characters of a wrong value that a message shows.
_SHOWN = 80

# The event that a call waits for, or None, and whether it gives one. Whether outputs are allocated on the communication
# stream follows from the latter: the allocator knows both streams in any case.
Timing: TypeAlias = tuple[Any, bool]


class Judged:
    """A call, with what is wrong with its arguments so far; None if nothing is."""

    wrong: str | None

    def expect_right(self) -> None:
        """Raises Refusal with what is wrong."""
        if self.wrong is not None:
            raise Refusal(self.wrong)


def _shown(value: Any) -> str:
    with contextlib.suppress(Exception):
        text = repr(value)
        return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    return type(value).__name__


def expect_integer(name: str, value: Any, least: int, most: int = MOST) -> None:
    """Refuses what is no integer, too small or too large."""
    if not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
        raise Refusal(f"{name}: found {_shown(value)}; expected an integer from {least} to {most}")


def wrong_integer(most: int = MOST, **integers: Any) -> str | None:
    """The fault of the first that is no integer from 0 on."""
    try:
        for name, value in integers.items():
            expect_integer(name, value, 0, most)
    except Refusal as refusal:
        return str(refusal)
    return None


def truths(**flags: Any) -> tuple[str | None, list[bool]]:
    """The fault of the first flag that is no truth value, and all flags as such. None and 0 are False, 1 is True.

    A wrong one is False, as the flags of most calls that the other ranks may make.
    """
    wrong, values = None, []
    for name, value in flags.items():
        is_truth = value is None or (isinstance(value, (int, np.bool_)) and value in (0, 1))
        if not is_truth:
            wrong = wrong or f"{name}: found {_shown(value)}; expected True or False"
        values.append(is_truth and bool(value))
    return wrong, values


def wrong_event(**events: Any) -> str | None:
    """The fault of the first that is neither None nor an event."""
    for name, value in events.items():
        mark = getattr(value, "event", value)
        if mark is not None and not isinstance(mark, EventHandle):
            return f"{name}: found {_shown(value)}; expected None, or an event that capture() or a call has given"
    return None


def timing_of(
    name: str, is_async: Any, allocates: Any, previous_event: Any, before_epilogue: Any = None
) -> tuple[Timing, Any, str | None]:
    """The timing of a call, the event before its epilogue, and the fault of one of them.

    `name` is that of the flag `is_async`.
    """
    wrong = None
    if not (bool is type(is_async) is type(allocates)):
        wrong, (is_async, _) = truths(**{name: is_async, "allocate_on_comm_stream": allocates})
    if previous_event is not None or before_epilogue is not None:
        wrong = wrong or wrong_event(
            previous_event=previous_event, previous_event_before_epilogue=before_epilogue
        )
    if wrong is not None:
        previous_event = before_epilogue = None
    return (previous_event, is_async), before_epilogue, wrong
