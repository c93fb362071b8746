"""How a handle of V1 is found again.

V1's handles are tuples of tensors, and frameworks save only the tensors (`save_for_backward`). So what belongs to a
handle hangs on the memory of one of its tensors: it lives exactly as long as that memory, and is found by its address.
"""

import weakref
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np

from ._arrays import Array, Refusal, Tensor, address, is_torch, like

T = TypeVar("T")


class Anchor:
    """Memory of an array that is not empty, with a record on it."""

    def __init__(self, array: Array, record: object) -> None:
        self.memory = np.ascontiguousarray(array)
        self.record = record
        self.__array_interface__ = self.memory.__array_interface__


_anchors: "weakref.WeakValueDictionary[int, Anchor]" = weakref.WeakValueDictionary()


def anchored(reference: Tensor, array: Array, record: object) -> Tensor:
    """A tensor with the content of `array`, by which `record_of` finds the record."""
    anchor = Anchor(array, record)
    _anchors[address(anchor.memory)] = anchor
    return like(reference, np.asarray(anchor))


def record_of(handle: Iterable[Any], kind: type[T]) -> T:
    """The record of a handle. Raises Refusal for what is none."""
    if not isinstance(handle, (tuple, list)):
        raise Refusal(f"handle: found {type(handle).__name__}; expected what a dispatch returned")
    for tensor in handle:
        if isinstance(tensor, np.ndarray) or is_torch(tensor):
            anchor = _anchors.get(address(tensor))
            if anchor is not None and isinstance(anchor.record, kind):
                return anchor.record
    raise Refusal(
        "handle: found one that no dispatch of this process returned; expected its own tensors: copies of them, or "
        "ones that were moved, have lost their routing"
    )
