"""Memory where parts arrive that are no rows of the caller: terms of sums, and parts that are forwarded."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from .tensors import NARROW, WIDE, Rows, of_torch


class Memory:
    """Grows to what calls need, and stays: a call has all of it before ranks meet.

    On a GPU it belongs to a stream of its own, and not to that of a caller: kernels that are queued there must not
    write where a part arrives, and sums must not wait for them.
    """

    def __init__(self, like: Any) -> None:
        """Where this tensor lies."""
        self._torch: Any = sys.modules["torch"] if of_torch(like) else None
        self._device: Any = None
        self._stream: Any = None
        if self._torch is not None:
            self._device = like.device
            if like.is_cuda:
                self._stream = self._torch.cuda.Stream(like.device)
        # Bytes of a part, and elements of float32 of a sum.
        self.room = self._empty(0, "uint8")
        self.wide = self._empty(0, "float32")

    def fit(self, room: int, wide: int) -> None:
        """Has room for a part of so many bytes, and a sum of so many elements."""
        with self.queued():
            if len(self.room) < room:
                self.room = self._empty(room, "uint8")
            if len(self.wide) < wide:
                self.wide = self._empty(wide, "float32")

    def _empty(self, length: int, dtype: str) -> Any:
        if self._torch is None:
            import numpy

            return numpy.empty(length, dtype)
        return self._torch.empty(length, dtype=getattr(self._torch, dtype), device=self._device)

    def writing(self) -> Any:
        """Inside, this thread may write tensors of inference mode, and others too."""
        return contextlib.nullcontext() if self._torch is None else self._torch.inference_mode()

    @contextlib.contextmanager
    def queued(self) -> Iterator[None]:
        """Work, and new memory, inside is of the own stream, and has ended behind it: the pipe writes next."""
        if self._stream is None:
            yield
            return
        with self._torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


class Summing:
    """Adds terms to rows, in the order in which they come. A sum of float16 or bfloat16 is in float32, and is rounded
    once, behind its last term."""

    def __init__(self, own: list[Rows], memory: Memory) -> None:
        self._own, self._memory = own, memory
        self._place: tuple[int, int, int, int] | None = None
        self._sum: Any = None

    def add(self, tensor: int, row: int, begin: int, end: int) -> None:
        """Adds what lies in the room of the memory to a part of a row."""
        with self._memory.queued():
            place = (tensor, row, begin, end)
            if place != self._place:
                self._finish()
                self._begin(place)
            term = self._memory.room[: end - begin].view(self._own[tensor].elements.dtype)
            # A term of another type is widened inside of the addition.
            self._sum += term

    def finish(self) -> None:
        """Writes the last sum."""
        with self._memory.queued():
            self._finish()

    def _begin(self, place: tuple[int, int, int, int]) -> None:
        self._place = place
        self._sum = mine = self._mine()
        if self._own[place[0]].dtype in NARROW:
            self._sum = self._memory.wide[: mine.shape[0]]
            self._sum[...] = mine

    def _mine(self) -> Any:
        assert self._place is not None
        tensor, row, begin, end = self._place
        own = self._own[tensor]
        return own.part(row, begin, end).view(own.elements.dtype)

    def _finish(self) -> None:
        if self._place is not None and self._own[self._place[0]].dtype not in WIDE:
            self._mine()[...] = self._sum
        self._place = None
