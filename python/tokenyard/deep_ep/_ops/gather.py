"""All-gathers of V2's sessions: each rank gets the tensors of all ranks."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import tokenyard

from .._arrays import Refusal, adopted, arrays_of, has_array, invalid, reason
from .._calls.tensors import expect_tensor
from .._pool import Pool
from .._torch import torch
from ..utils.math import align, ceil_div
from .common import Flight, Refused, Slot, bytes_of, gpu_of, range_fault, record

# Limits of a session: bytes of its results, and calls.
MOST_BYTES = 1 << 40
MOST_CALLS = 32
# Calls that travel at once. Each has window memory for a whole session.
IN_FLIGHT = 4
# Results of a session begin at multiples of this many bytes.
_UNIT = 32


def shapes_of(shapes: Any) -> tuple[bool, list[Any]]:
    """Whether these are several shapes, and each of them."""
    is_list = bool(len(shapes)) and isinstance(shapes[0], (tuple, list))
    return is_list, list(shapes) if is_list else [shapes]


def session_bytes(ranks: int, shapes: Any, dtype: Any) -> int:
    """Bytes of a session's results for tensors of these shapes."""
    return sum(
        align(ranks * math.prod(one) * dtype.itemsize, _UNIT) for one in shapes_of(shapes)[1]
    )


class Gathers:
    """The gather of a buffer, and its session."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._slot: Slot[tokenyard.Gather] = Slot(pool, "agrs_set_config")
        self._most_bytes = self._most_calls = 0
        self._flight = Flight(IN_FLIGHT)
        # None outside of a session.
        self._bytes: int | None = None
        self._calls = 0
        # The results of tensors that the caller fills in place, by the address and length of this rank's part.
        self._in_place: dict[tuple[int, int], Any] = {}

    def set_config(self, most_bytes: Any, most_calls: Any) -> None:
        """Opens it on all ranks. Collective."""
        wrong = range_fault("num_max_session_bytes", most_bytes, MOST_BYTES) or range_fault(
            "num_max_all_gathers_per_session", most_calls, MOST_CALLS
        )
        if wrong is None and self._bytes is not None:
            wrong = "agrs_set_config: found an open session; expected none: end it first"

        def make(world: tokenyard.World, config: tokenyard.Config) -> tokenyard.Gather:
            share = ceil_div(int(most_bytes), world.ranks)
            return tokenyard.Gather(
                world, config, max_bytes=share, in_flight=min(int(most_calls), IN_FLIGHT)
            )

        gather = self._slot.open(wrong, make)
        self._flight = Flight(gather.in_flight)
        self._most_bytes, self._most_calls = int(most_bytes), int(most_calls)

    def create(self) -> None:
        self._slot.use("create_agrs_session")
        if self._bytes is not None:
            raise invalid(
                "create_agrs_session",
                "create_agrs_session: found an open session; expected destroy_agrs_session before the next one",
            )
        self._bytes = self._calls = 0

    def destroy(self) -> None:
        """Receives the calls whose handles were not called, and ends the session."""
        self._expect_session("destroy_agrs_session")
        self._bytes = None
        self._in_place.clear()
        self._flight.settle()

    @contextlib.contextmanager
    def session(self, is_enabled: bool) -> Iterator[None]:
        """A session, behind whose exceptions nothing is waited for: later calls receive what was sent."""
        if not is_enabled:
            yield
            return
        self.create()
        try:
            yield
        except BaseException:
            self._bytes = None
            self._in_place.clear()
            raise
        self.destroy()

    def in_place(self, shapes: Any, dtype: Any) -> Any:
        """Tensors to fill, which the next calls gather without a copy on this rank: one, or a tuple."""
        self._expect_session("agrs_get_inplace_tensor")
        is_list, every = shapes_of(shapes)
        parts = []
        for shape in every:
            whole = torch.empty((self._pool.ranks, *shape), dtype=dtype, device=self._pool.device)
            part = whole[self._pool.rank]
            if part.numel():
                self._in_place[part.data_ptr(), part.nbytes] = whole
            parts.append(part)
        return tuple(parts) if is_list else parts[0]

    def all_gather(self, given: Any) -> tuple[Any, ...]:
        """Sends a tensor, or several: the results, `[R, *shape]`, and the handle that waits for them. Collective."""
        gather = self._slot.use("all_gather")
        self._expect_session("all_gather")
        self._expect_call()
        try:
            shards, wholes = self._read(given)
        except Exception as error:
            # The others have sent theirs, and learn it.
            shards, wholes = [Refused(reason(error))], []
        rooms = [bytes_of(whole) for whole in wholes]
        device = gpu_of(shards)
        stream = None if device is None else torch.cuda.current_stream(device).cuda_stream

        def receive(pending: tokenyard.PendingGather) -> None:
            pending.recv(rooms)
            # They live until then.
            shards.clear()

        record([*shards, *rooms])
        handle = self._flight.send(
            lambda: gather.all_gather_send(shards, stream=stream), receive, rooms
        )
        results = tuple(wholes)
        return (*(arrays_of(results) if has_array(given) else results), handle)

    def _read(self, given: Any) -> tuple[list[Any], list[Any]]:
        """The tensors that a call sends, and the rooms for its results. Raises what is wrong on this rank alone."""
        is_list = isinstance(given, (tuple, list))
        tensors = [adopted(one) for one in (given if is_list else [given])]
        for place, one in enumerate(tensors):
            expect_tensor(f"t[{place}]" if is_list else "t", one)
        self._expect_bytes(tensors)
        return [bytes_of(one) for one in tensors], [self._whole(one) for one in tensors]

    def _whole(self, part: Any) -> Any:
        """The room for a result."""
        found = self._in_place.pop((part.data_ptr(), part.nbytes), None)
        if found is not None:
            # The caller may have viewed its part as another type or shape.
            return found.view(-1).view(part.dtype).view(self._pool.ranks, *part.shape)
        return part.new_empty((self._pool.ranks, *part.shape), requires_grad=False)

    def _expect_call(self) -> None:
        """Counts a call. Raises where the session has no more, which is so on all ranks."""
        if self._calls >= self._most_calls:
            raise invalid(
                "all_gather",
                f"all_gather: found {self._calls} calls of this session; expected at most "
                f"num_max_all_gathers_per_session = {self._most_calls}",
                fix="begin another session, or name more calls in agrs_set_config",
            )
        self._calls += 1

    def _expect_bytes(self, tensors: list[Any]) -> None:
        """Counts the bytes of results. Raises Refusal where the session has no room for them."""
        each = (align(self._pool.ranks * one.nbytes, _UNIT) for one in tensors)
        taken = (self._bytes or 0) + sum(each)
        if taken > self._most_bytes:
            raise Refusal(
                f"all_gather: found {taken} bytes of results in this session; expected at most num_max_session_bytes = "
                f"{self._most_bytes}"
            )
        self._bytes = taken

    def _expect_session(self, operation: str) -> None:
        if self._bytes is None:
            raise invalid(
                operation,
                f"{operation}: found no open session; expected one of create_agrs_session or agrs_new_session",
            )
