"""Tensors of torch: checked on the way in, and out of the arena, with a copy or without."""

import os
from dataclasses import dataclass
from typing import Any

import tokenyard
from tokenyard import errors

from .._arrays import Refusal
from .._engine import Opened
from .._torch import torch
from .streams import CallStream

OUTPUT_VARIABLE = "TOKENYARD_OUTPUT"
OUTPUTS = ("auto", "arena", "copy")


@dataclass
class Routed:
    """The arguments of a dispatch, checked."""

    x: Any
    scales: Any
    ids: Any
    weights: Any


def floats() -> tuple[Any, ...]:
    """The types of rows that a combine can sum."""
    return (torch.bfloat16, torch.float16, torch.float32)


def read(name: str, tensor: Any, dtypes: tuple[Any, ...], shape: tuple[int | None, ...]) -> Any:
    """The tensor, if it has one of the types and the shape; None stands for any length. Raises Refusal."""
    if not isinstance(tensor, torch.Tensor):
        raise Refusal(f"{name}: found {type(tensor).__name__}; expected a tensor of torch")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise Refusal(f"{name}: found type {tensor.dtype}; expected {names}")
    found = tensor.shape
    is_other = len(found) != len(shape)
    for length, wanted_length in zip(found, shape, strict=False):
        if wanted_length is not None and length != wanted_length:
            is_other = True
    if is_other:
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise Refusal(f"{name}: found shape {list(tensor.shape)}; expected [{wanted}]")
    return tensor.detach() if tensor.requires_grad else tensor


def read_rows(x: Any, tokens: int | None, hidden: int | None) -> tuple[Any, Any]:
    """Rows that travel as they are, and their scales or None."""
    if isinstance(x, tuple):
        if len(x) != 2:
            raise Refusal(f"x: found {len(x)} tensors; expected one, or rows and their scales")
        rows = read("x", x[0], (torch.float8_e4m3fn, torch.uint8), (tokens, hidden))
        scales = read("scales", x[1], (torch.float32, torch.int32), (len(rows), None))
        return rows.contiguous(), scales
    return read("x", x, floats(), (tokens, hidden)).contiguous(), None


def expect_device(reference: Any, **tensors: Any) -> None:
    """Refuses tensors that lie elsewhere: kernels fault on them."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != reference.device:
            raise Refusal(
                f"{name}: found a tensor on {tensor.device}; expected one on {reference.device}"
            )


def take(array: tokenyard.Array, dtype: Any = None) -> Any:
    """An array of tokenyard as a tensor, without a copy. Its order with streams is the caller's."""
    tensor = torch.utils.dlpack.from_dlpack(array.__dlpack__(stream=-1))
    return tensor if dtype is None or tensor.dtype == dtype else tensor.view(dtype)


def output_mode() -> str:
    """`TOKENYARD_OUTPUT`: whether outputs lie in the arena, or in memory of torch."""
    mode = os.environ.get(OUTPUT_VARIABLE, "auto")
    if mode not in OUTPUTS:
        raise errors.ConfigError(
            f"{OUTPUT_VARIABLE}: found {mode!r}; expected auto, arena or copy",
            kind="config",
            operation="read environment",
        )
    return mode


def stays_in_arena(opened: Opened, call: CallStream, x: Any, worst_bytes: int) -> bool:
    """Whether the output of a call is given where it lies. Each rank decides by itself.

    `auto` gives it so under three conditions. The call is on the stream on which the caller goes on. No gradient is
    recorded, which would hold the output for long. The arena has room for two more of the largest.
    """
    mode = output_mode()
    if mode != "auto":
        stays = mode == "arena"
    elif call.is_captured:
        stays = True
    elif call.is_async or x.requires_grad:
        stays = False
    else:
        stays = opened.arena_bytes - opened.communicator.held_bytes >= 2 * worst_bytes
    opened.lends |= stays
    return stays


def name_stream(opened: Opened, call: CallStream) -> None:
    """Regions that were dropped are used again behind all streams that calls were made on: readers may be on any.

    An asynchronous call is made on the current stream, too: there its caller goes on.
    """
    if call.raw is None:
        return
    opened.streams.update((call.raw, call.current_raw))
    others = opened.streams - {call.raw}
    if others and opened.lends and not call.is_captured:
        opened.communicator.release_after(list(others))


def fit(rows: Any, count: int) -> Any:
    """The first rows, or all of them with others of undefined contents behind."""
    if len(rows) >= count:
        return rows[:count]
    room = rows.new_empty((count, *rows.shape[1:]))
    room[: len(rows)] = rows
    return room
