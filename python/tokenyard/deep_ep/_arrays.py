"""Tensors of the caller as numpy arrays, and results as tensors of its library. Nothing of the host is copied."""

import sys
from collections.abc import Iterable
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Tensor: TypeAlias = Any  # torch.Tensor or numpy.ndarray

BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


class Refusal(Exception):
    """An argument of this rank is wrong. The other ranks must learn it before it is raised."""


def reason(error: Exception) -> str:
    """The text of an error that reading arguments raised: of this package, of torch (the GPU's memory is full), or of
    Python. The other ranks wait in their call until they get it."""
    return str(error) if isinstance(error, Refusal) else f"{type(error).__name__}: {error}"


def is_torch(tensor: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def library_of(tensor: Tensor) -> Any:
    """The module whose functions take a tensor: torch or numpy."""
    return sys.modules["torch"] if is_torch(tensor) else np


def to_numpy(name: str, tensor: Tensor) -> Array:
    """The memory of a tensor as an array. Raises Refusal for what is no tensor of the host's memory."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if not is_torch(tensor):
        found = type(tensor).__name__
        raise Refusal(f"{name}: found {found}; expected a tensor of torch or an array of numpy")
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise Refusal(
            f"{name}: found a tensor on {tensor.device}; expected one on cpu, where the drop-in runs"
        )
    tensor = tensor.detach()
    # numpy has no types of its own for these: they cross as integers of the same width.
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.int16).numpy().view(BF16))
    if tensor.dtype == torch.float8_e4m3fn:
        return np.asarray(tensor.view(torch.uint8).numpy().view(FP8))
    return np.asarray(tensor.numpy())


def to_host(name: str, tensor: Tensor) -> Array:
    """As `to_numpy`; a tensor of a GPU is copied."""
    is_on_gpu = is_torch(tensor) and tensor.device.type == "cuda"
    return to_numpy(name, tensor.cpu() if is_on_gpu else tensor)


def can_share(array: Array) -> bool:
    """Whether torch takes the array over as it is: it knows neither memory that is read alone nor negative strides."""
    return array.flags.writeable and min(array.strides, default=0) >= 0


def from_numpy(array: Array) -> Tensor:
    """The array as a tensor of torch over the same memory; a copy of one that torch cannot share.

    Raises TypeError or ValueError for a type that torch has not.
    """
    torch = sys.modules["torch"]
    if not can_share(array):
        array = np.array(array, order="C")
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype == FP8:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array)


def like(reference: Tensor, array: Array) -> Tensor:
    """The array as a tensor of the library that `reference` is of, on its device."""
    return from_numpy(array).to(reference.device) if is_torch(reference) else array


def integers(values: Iterable[int], beside: Tensor, dtype: str = "int64") -> Tensor:
    """Integers as a tensor of the library and on the device of another one."""
    library = library_of(beside)
    made = library.asarray(list(values), dtype=getattr(library, dtype))
    return made.to(beside.device) if is_torch(beside) else made


def address(tensor: Tensor) -> int:
    """Where the first element lies."""
    if is_torch(tensor):
        return int(tensor.data_ptr())
    return int(tensor.__array_interface__["data"][0])
