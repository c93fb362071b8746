"""Plans of the tensors of a buffer's storage, of DeepEP 2.5: `BufferAllocator`."""

from collections.abc import Sequence
from typing import Any

from .. import _C
from .._arrays import Tensor, invalid
from .._torch import torch
from ..utils.math import align


class BufferAllocator:
    """Tensors that share the storage of one buffer, planned before there is one. They begin at multiples of 2 MiB."""

    def __init__(self) -> None:
        self.alignment = _C.get_num_allocation_alignment()
        # Each tensor, and where it begins.
        self.allocations: list[tuple[Tensor, int]] = []
        self.num_bytes = 0
        self.materialized = False

    def allocate(self, shape: Sequence[int], dtype: Any) -> Tensor:
        """A tensor without memory (`meta`), which has some once the buffer was made."""
        if self.materialized:
            raise invalid(
                "BufferAllocator.allocate",
                "BufferAllocator.allocate: found a plan that a buffer has used; expected one that none has",
                fix="make another plan for another buffer",
            )
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self.allocations.append((tensor, self.num_bytes))
        self.num_bytes = align(self.num_bytes + tensor.nbytes, self.alignment)
        return tensor

    def materialize(self, storage: Tensor) -> None:
        """Gives the planned tensors their memory: they become views of `storage`, contiguous uint8 of `num_bytes`."""
        name, found = "BufferAllocator.materialize", None
        if self.materialized:
            found = "a plan that a buffer has used"
        elif not isinstance(storage, torch.Tensor):
            found = type(storage).__name__
        elif storage.dtype != torch.uint8 or not storage.is_contiguous():
            found = f"strides {list(storage.stride())} and type {storage.dtype}"
        elif storage.numel() != self.num_bytes:
            found = f"{storage.numel()} bytes"
        if found is not None:
            wanted = f"contiguous uint8 of {self.num_bytes} bytes, once"
            raise invalid(name, f"{name}: found {found}; expected {wanted}")
        for tensor, begin in self.allocations:
            part = storage.narrow(0, begin, tensor.nbytes)
            torch.utils.swap_tensors(tensor, part.view(tensor.dtype).view(tensor.shape))
        self.materialized = True
