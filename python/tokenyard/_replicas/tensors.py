"""Tensors of experts as rows of bytes: of numpy, or of torch where that was imported."""

import sys
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
    def read(name: str, value: Any, device: int | None, is_written: bool = False) -> "Rows":
        """Raises Refusal for what the pipe could not pass. `device`: the GPU that it works on; None for the host."""
        tensor = _plain(name, value, is_written)
        _expect_place(name, tensor, device)
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


def _expect_place(name: str, tensor: Any, device: int | None) -> None:
    """Raises Refusal for memory that is not the pipe's: an error of the pipe itself would come amid a call."""
    wanted = "cpu" if device is None else f"cuda:{device}"
    if not of_torch(tensor):
        if device is not None:
            raise Refusal(
                f"{name}: found an array in host memory; expected a tensor on {wanted}, the GPU of this rank"
            )
        return
    found = tensor.device
    if (found.type, found.index) != ("cuda", device) and (
        device is not None or found.type != "cpu"
    ):
        raise Refusal(f"{name}: found a tensor on {found}; expected one on {wanted}")


def _bytes(flat: Any) -> Any:
    if of_torch(flat):
        return flat.view(sys.modules["torch"].uint8)
    import numpy

    return flat.view(numpy.uint8)
