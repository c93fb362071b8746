"""A call: the arguments of a method, judged.

A call keeps what is wrong with them until ranks meet in it: a rank that raised at once would leave the others waiting.
"""

import contextlib
import numbers
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from .._arrays import Refusal, arrays_of, has_array
from .._missing import refuse_missing
from ..utils.event import EventHandle

R = TypeVar("R")

# DeepEP's integers have 32 bits; numbers of bytes have 64.
MOST = 2**31 - 1
MOST_BYTES = 2**63 - 1
# Integers for which None stands for 0.
_MAY_BE_NONE = ("num_sms", "num_qps", "num_bytes", "sl_idx")
# The most characters of a wrong value that a message shows.
_SHOWN = 80


def _shown(value: Any) -> str:
    with contextlib.suppress(Exception):
        text = repr(value)
        return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    return type(value).__name__


def expect_integer(name: str, value: Any, least: int, most: int = MOST) -> None:
    """Refuses what is no integer, too small or too large."""
    # To ask whether another type is one of integers takes longer.
    if type(value) is int and least <= value <= most:
        return
    if not isinstance(value, numbers.Integral) or not least <= int(value) <= most:
        raise Refusal(f"{name}: found {_shown(value)}; expected an integer from {least} to {most}")


def judge_integers(given: dict[str, Any], names: tuple[str, ...], most: int = MOST) -> str | None:
    """Makes integers from 0 on of arguments. Returns the fault of the first that is none; a wrong one becomes 0."""
    wrong = None
    for name in names:
        value = given[name]
        if value is None and name in _MAY_BE_NONE:
            given[name] = 0
        elif type(value) is not int or not 0 <= value <= most:
            try:
                expect_integer(name, value, 0, most)
                given[name] = int(value)
            except Refusal as refusal:
                given[name], wrong = 0, wrong or str(refusal)
    return wrong


def judge_flags(given: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """As `judge_integers`, of truth values. None and 0 are False, 1 is True.

    A wrong one becomes False, as the flags of most calls that the other ranks may make.
    """
    wrong = None
    for name in names:
        value = given[name]
        if value is not False and value is not True:
            is_truth = value is None or (isinstance(value, (int, np.bool_)) and value in (0, 1))
            given[name] = is_truth and bool(value)
            if not is_truth:
                wrong = wrong or f"{name}: found {_shown(value)}; expected True or False"
    return wrong


def _judge_events(given: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """The fault of the first that is neither None nor an event. Where there is one, the call waits for no event."""
    for name in names:
        value = given.get(name)
        mark = getattr(value, "event", value)
        if mark is not None and not isinstance(mark, EventHandle):
            given.update(dict.fromkeys(names))
            return f"{name}: found {_shown(value)}; expected None, or an event that capture() or a call has given"
    return None


class Call:
    """The arguments of a call, by their names, and what is wrong with them so far; None if nothing is."""

    # The method, and keywords of forks that mean nothing to it.
    operation = ""
    ignored: tuple[str, ...] = ()
    # The arguments that are truth values, of which the first says whether the call gives an event; without any it does.
    # And those that are integers which decide how ranks meet. Whether outputs are allocated on the communication stream
    # makes no difference: the allocator knows both streams in any case.
    flags: tuple[str, ...] = ("async_finish", "allocate_on_comm_stream")
    integers: tuple[str, ...] = ()
    # Those that are events.
    events: tuple[str, ...] = ("previous_event",)
    previous_event: Any = None
    previous_event_before_epilogue: Any = None
    # Whether the event of the call gives its results, once it was waited for.
    defer_epilogue: bool = False
    wrong: str | None = None
    # The arguments before tensors of torch replaced arrays.
    as_given: Mapping[str, Any] = MappingProxyType({})

    def __getattr__(self, name: str) -> Any:
        """Arguments have the names that the method gives them: of no other is anything known."""
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def __init__(self, given: dict[str, Any]) -> None:
        """`given`: the `locals()` of the method, which become attributes: names that are written again cost more."""
        if others := given.get("others"):
            refuse_missing(self.operation, others, self.ignored)
        wrong = judge_flags(given, self.flags)
        if self.integers:
            wrong = judge_integers(given, self.integers) or wrong
        for name in self.events:
            if given.get(name) is not None:
                wrong = _judge_events(given, self.events) or wrong
        given["buffer"] = buffer = given.pop("self")
        given["pool"] = pool = buffer._pool
        given["wrong"] = wrong
        given["is_async"] = given[self.flags[0]] if self.flags else True
        # Whether the caller has given arrays of numpy, and wants such back.
        given["is_of_arrays"] = not pool.on_device and has_array(
            given.get("x", given.get("topk_idx"))
        )
        # A copy: a debugger writes into the locals of a frame.
        self.__dict__ = given.copy()

    def prepare(self, opened: Any) -> None:
        """Makes ready what was read, for the communicator that takes it. An exception is a refusal."""

    def usual(self) -> Any:
        """The communicator of calls of this kind, where a handle does not say which; None for that of the last call."""
        return None

    def expect_right(self) -> None:
        """Raises Refusal with what is wrong."""
        if self.wrong is not None:
            raise Refusal(self.wrong)

    def given_back(self, results: R) -> R:
        """The results of the call: arrays over the same memory, where it was made with such."""
        arrays: R = arrays_of(results) if self.is_of_arrays else results
        return arrays
