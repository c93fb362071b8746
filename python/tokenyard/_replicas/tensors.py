"""Tensors of experts as rows of bytes: of numpy, or of torch where that was imported."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Types of sums; the wide ones are summed in their own type, others in float32.
WIDE, NARROW = ("float32", "float64"), ("bfloat16", "float16")
# A byte of each element type lies at a multiple of this inside of a part.
UNIT = 16


class Refusal(Exception):
    """An argument of this rank is wrong. The other ranks must learn it before it is raised."""


def of_torch(value: Any) -> bool:
    """Whether it is a tensor of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def type_of(value: Any) -> str:
    """The name of its element type."""
    return str(value.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Rows:
    """A tensor `[count, ...]`, whose rows are of as many bytes each."""

    name: str
    count: int
    size: int
    dtype: str
    # Its bytes, one after the other, and its elements.
    flat: Any
    elements: Any

    @staticmethod
    def read(name: str, value: Any, on_device: bool, is_written: bool = False) -> "Rows":
        """Raises Refusal for what the pipe could not pass."""
        tensor = _plain(name, value, is_written)
        if of_torch(tensor) and tensor.is_cuda != on_device:
            wanted = "a GPU" if on_device else "cpu"
            raise Refusal(f"{name}: found a tensor on {tensor.device}; expected one on {wanted}")
        if on_device and not of_torch(tensor):
            raise Refusal(f"{name}: found an array in host memory; expected a tensor on a GPU")
        if len(tensor.shape) < 1:
            raise Refusal(f"{name}: found no dimension; expected experts in the first one")
        count, dtype = int(tensor.shape[0]), type_of(tensor)
        elements = tensor.reshape(-1)
        size = elements.nbytes // count if count else 0
        return Rows(name, count, size, dtype, _bytes(elements), elements)

    def part(self, row: int, begin: int, end: int) -> Any:
        """Bytes of a row."""
        at = row * self.size
        return self.flat[at + begin : at + end]


def _plain(name: str, value: Any, is_written: bool) -> Any:
    """The tensor, or array, if its elements follow each other."""
    if of_torch(value):
        torch = sys.modules["torch"]
        is_dense = value.layout == torch.strided and value.is_contiguous()
        if not is_dense or value.is_neg() or value.is_conj():
            raise Refusal(f"{name}: found a view with gaps; expected a contiguous tensor")
        return value.detach()
    import numpy

    if not isinstance(value, numpy.ndarray):
        found = type(value).__name__
        raise Refusal(f"{name}: found {found}; expected a tensor of torch or an array of numpy")
    if not value.flags.c_contiguous:
        raise Refusal(f"{name}: found a view with gaps; expected a contiguous array")
    if is_written and not value.flags.writeable:
        raise Refusal(f"{name}: found a read-only array; expected one that can be written")
    return value


def _bytes(flat: Any) -> Any:
    if of_torch(flat):
        return flat.view(sys.modules["torch"].uint8)
    import numpy

    return flat.view(numpy.uint8)


def room_like(flat: Any, size: int) -> Any:
    """Memory for `size` bytes where another tensor lies."""
    if of_torch(flat):
        return flat.new_empty(size, dtype=sys.modules["torch"].uint8)
    import numpy

    return numpy.empty(size, numpy.uint8)


class Summing:
    """Adds terms to rows, in the order in which they come. A sum of float16 or bfloat16 is in float32, and is rounded
    once, behind its last term."""

    def __init__(self, own: list[Rows], most: int) -> None:
        self._own = own
        self._place: tuple[int, int, int, int] | None = None
        self._sum: Any = None
        like = own[0].flat
        self._stream: Any = None
        if of_torch(like) and like.is_cuda:
            # Not the stream of the caller, behind whose kernels the sums would wait.
            self._stream = sys.modules["torch"].cuda.Stream(like.device)
        is_narrow = any(one.dtype in NARROW for one in own)
        with self._queued():
            # All memory is taken before ranks meet. Of narrow types, an element takes twice its bytes.
            self.room = room_like(like, most)
            self._wide = self._floats(room_like(like, 2 * most)) if is_narrow else None

    @staticmethod
    def _floats(flat: Any) -> Any:
        return flat.view(sys.modules["torch"].float32 if of_torch(flat) else "float32")

    def prepare(self) -> None:
        """Waits until earlier work on the memory of this has ended."""
        with self._inside():
            pass

    def add(self, tensor: int, row: int, begin: int, end: int) -> None:
        """Adds what lies in `room` to a part of a row."""
        with self._inside():
            place = (tensor, row, begin, end)
            if place != self._place:
                self._finish()
                self._begin(place)
            own = self._own[tensor]
            term = self.room[: end - begin].view(own.elements.dtype)
            self._sum += term if own.dtype in WIDE else self._widened(term)

    def finish(self) -> None:
        """Writes the last sum."""
        with self._inside():
            self._finish()

    def _begin(self, place: tuple[int, int, int, int]) -> None:
        self._place = place
        mine = self._mine()
        if self._own[place[0]].dtype in WIDE:
            self._sum = mine
        else:
            assert self._wide is not None
            self._sum = self._wide[: mine.shape[0]]
            self._sum[...] = mine

    def _mine(self) -> Any:
        assert self._place is not None
        tensor, row, begin, end = self._place
        own = self._own[tensor]
        return own.part(row, begin, end).view(own.elements.dtype)

    @staticmethod
    def _widened(term: Any) -> Any:
        return term.float() if of_torch(term) else term.astype("float32")

    def _finish(self) -> None:
        if self._place is not None and self._own[self._place[0]].dtype not in WIDE:
            self._mine()[...] = self._sum
        self._place = None

    def _queued(self) -> Any:
        """Work, and memory, inside of it is of the stream of the sums."""
        if self._stream is None:
            return contextlib.nullcontext()
        return sys.modules["torch"].cuda.stream(self._stream)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """As `_queued`, and behind it the work has ended: the room is written next."""
        with self._queued():
            yield
        if self._stream is not None:
            self._stream.synchronize()
