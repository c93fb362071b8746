"""How a handle of V1 is found again.

V1's handles are tuples of tensors, and frameworks save only the tensors (`save_for_backward`). So what belongs to a
handle hangs on the memory of one of its tensors: it lives exactly as long as that memory, and is found by its address.
"""

from collections.abc import Iterable
from typing import Any, TypeVar

from tokenyard._native import _record_at

from ._arrays import Refusal, adopted
from ._torch import torch

T = TypeVar("T")


def record_of(handle: Iterable[Any], kind: type[T], place: int = 0) -> T:
    """The record of a handle: on its tensor at `place`, or else on another. Raises Refusal for what is none."""
    if not isinstance(handle, (tuple, list)):
        raise Refusal(f"handle: found {type(handle).__name__}; expected what a dispatch returned")
    # In nearly every call it is at its place, and a tensor.
    if len(handle) > place and type(handle[place]) is torch.Tensor:
        record = _record_at(handle[place].data_ptr())
        if isinstance(record, kind):
            return record
    for tensor in map(adopted, (*handle[place : place + 1], *handle)):
        if isinstance(tensor, torch.Tensor):
            record = _record_at(tensor.data_ptr())
            if isinstance(record, kind):
                return record
    raise Refusal(
        "handle: found one that no dispatch of this process returned; expected its own tensors: copies of them, or "
        "ones that were moved, have lost their routing"
    )
