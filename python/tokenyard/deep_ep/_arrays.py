"""Arrays of numpy and other libraries as tensors of torch, and back. Nothing of the host is copied."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tokenyard import errors

from ._torch import torch

P = ParamSpec("P")
R = TypeVar("R")
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


def invalid(
    operation: str, text: str, rank: int | None = None, fix: str | None = None
) -> errors.InvalidInputError:
    """The error of an argument that no other rank need learn."""
    return errors.InvalidInputError(
        text, kind="invalid_input", rank=rank, operation=operation, fix=fix
    )


def to_numpy(name: str, tensor: Tensor) -> Array:
    """The memory of a tensor as an array. Raises Refusal for what is no tensor of the host's memory."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if not isinstance(tensor, torch.Tensor):
        found = type(tensor).__name__
        raise Refusal(f"{name}: found {found}; expected a tensor of torch or an array of numpy")
    if tensor.device.type != "cpu":
        raise Refusal(f"{name}: found a tensor on {tensor.device}; expected one on cpu")
    tensor = tensor.detach()
    # numpy has no types of its own for these: they cross as integers of the same width.
    if tensor.dtype == torch.bfloat16:
        return np.asarray(tensor.view(torch.int16).numpy().view(BF16))
    if tensor.dtype == torch.float8_e4m3fn:
        return np.asarray(tensor.view(torch.uint8).numpy().view(FP8))
    return np.asarray(tensor.numpy())


def can_share(array: Array) -> bool:
    """Whether torch takes the array over as it is: it knows neither memory that is read alone nor negative strides."""
    return array.flags.writeable and min(array.strides, default=0) >= 0


def from_numpy(array: Array) -> Tensor:
    """The array as a tensor of torch over the same memory; a copy of one that torch cannot share.

    Raises TypeError or ValueError for a type that torch has not.
    """
    if not can_share(array):
        array = np.array(array, order="C")
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype == FP8:
        return torch.from_numpy(array.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(array)


def adopted(value: Any) -> Any:
    """An array of another library as a tensor of torch, and the members of tuples and lists so; all else as it is."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (tuple, list)):
        # A named tuple is made of its fields one by one.
        return (tuple if isinstance(value, tuple) else list)(map(adopted, value))
    with contextlib.suppress(BufferError, RuntimeError, TypeError, ValueError):
        if isinstance(value, np.ndarray):
            return from_numpy(value)
        if hasattr(value, "__dlpack__"):
            # torch lets its current stream wait for the array's.
            return torch.from_dlpack(value)
        if hasattr(value, "__cuda_array_interface__"):
            return torch.as_tensor(value, device="cuda")
    return value


def to_write(operation: str, name: str, value: Any) -> Any:
    """As `adopted`, of one that is written. Raises InvalidInputError for an array that torch would copy."""
    if isinstance(value, np.ndarray) and not can_share(value):
        kind = "one with negative strides" if value.flags.writeable else "a read-only one"
        raise invalid(
            operation,
            f"{name}: found {kind}; expected an array that torch can write",
            fix="give a copy of it",
        )
    return adopted(value)


def has_array(value: Any) -> bool:
    """Whether it is an array of numpy, or a tuple or a list that begins with one."""
    while isinstance(value, (tuple, list)) and value:
        value = value[0]
    return isinstance(value, np.ndarray)


def arrays_of(value: Any) -> Any:
    """A tensor in the host's memory as an array of numpy over it, and the members of tuples and lists so; all else as
    it is."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(arrays_of, value))
    return to_numpy("result", value) if isinstance(value, torch.Tensor) else value


def by_torch(compute: Callable[P, R]) -> Callable[P, R]:
    """A function of tensors that takes arrays of numpy, too. Its results are then such arrays."""

    @functools.wraps(compute)
    def call(*given: P.args, **named: P.kwargs) -> R:
        takes: Any = compute
        results = takes(*map(adopted, given), **{name: adopted(it) for name, it in named.items()})
        if any(map(has_array, (*given, *named.values()))):
            results = arrays_of(results)
        return results  # type: ignore[no-any-return]

    return call
