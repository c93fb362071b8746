"""Tensors of torch: checked on the way in, and out of the arena, with a copy or without."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

import tokenyard
from tokenyard import errors
from tokenyard._native import _fits, _Reader

from .._arrays import Refusal, adopted, can_share, invalid
from .._pool import Opened, Pool
from .._torch import torch
from .call import Call
from .streams import CallStream

C = TypeVar("C", bound=Call)
R = TypeVar("R")


def floats() -> tuple[Any, ...]:
    """The types of rows that a combine can sum."""
    return (torch.bfloat16, torch.float16, torch.float32)


def read(name: str, tensor: Any, dtypes: tuple[Any, ...], shape: tuple[int | None, ...]) -> Any:
    """The tensor, if it has one of the types and the shape; None stands for any length. Raises Refusal."""
    if not isinstance(tensor, torch.Tensor):
        expect_tensor(name, tensor)
    if not _fits(tensor, dtypes, shape):
        expect(name, tensor.dtype, tensor.shape, dtypes, shape)
    if tensor.is_neg():
        # Its memory holds the opposite values.
        tensor = tensor.resolve_neg()
    return tensor.detach() if tensor.requires_grad else tensor


def expect_tensor(name: str, tensor: Any) -> None:
    """Refuses what is no tensor of torch."""
    if not isinstance(tensor, torch.Tensor):
        found = type(tensor).__name__
        if isinstance(tensor, np.ndarray):
            kind = "a" if tensor.flags.writeable else "a read-only"
            found = f"{kind} numpy array of {tensor.dtype} with strides {list(tensor.strides)}"
        raise Refusal(
            f"{name}: found {found}; expected a tensor of torch, or an array that torch can take over"
        )


def expect(
    name: str, dtype: Any, found: Any, dtypes: tuple[Any, ...], shape: tuple[int | None, ...]
) -> None:
    """Refuses a tensor of another type or shape, as `read`."""
    if dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found_name = str(dtype).removeprefix("torch.")
        raise Refusal(f"{name}: found type {found_name}; expected {names}")
    is_same = len(found) == len(shape) and all(
        wanted in (None, length) for length, wanted in zip(found, shape, strict=True)
    )
    if not is_same:
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise Refusal(f"{name}: found shape {list(found)}; expected [{wanted}]")


# Nothing is to take over of most arguments.
_AS_THEY_ARE = frozenset((type(None), bool, int, torch.Tensor))


def on_stream(act: Callable[[C, CallStream], R], call: C) -> R:
    """Makes a call on its stream, where its `x` lies. Takes over arrays as tensors of torch before, without a copy; on
    GPUs where `x` is none.

    An array that cannot be taken over is left, and refused in the operation: then it counts as one in the host's
    memory.
    """
    x = _first(call.x)
    if not (call.pool.on_device and isinstance(x, torch.Tensor)):
        call.as_given = dict(vars(call))
        for name, value in call.as_given.items():
            if type(value) in _AS_THEY_ARE:
                continue
            # A copy of what is written would be written in its place.
            is_written = name == "out" or name.endswith("_stats")
            if not (is_written and isinstance(value, np.ndarray) and not can_share(value)):
                setattr(call, name, adopted(value))
        x = _first(call.x)
    stream = CallStream(gpu_of(x), call.is_async, call.previous_event)
    if not stream.is_async:
        return call.given_back(act(call, stream))
    with stream.inside():
        return call.given_back(act(call, stream))


def gpu_of(tensor: Any) -> Any:
    """The GPU of a tensor of torch; None for anything else. To ask for the type of its device takes longer."""
    return tensor.device if isinstance(tensor, torch.Tensor) and tensor.is_cuda else None


def _first(x: Any) -> Any:
    """The rows, where they come with their scales."""
    return x[0] if isinstance(x, tuple) and x else x


def sync_in_capture(expected: str) -> errors.InvalidInputError:
    """The error of a dispatch in a capture that needs the host."""
    text = f"found a dispatch whose sizes the host must know; expected {expected}"
    return invalid("capture graph", f"capture graph: {text}")


def add_lost(pool: Pool, received: Any) -> None:
    """Adds the ranks whose rows an output lacks to the gaps. On GPUs only low latency calls leave any out."""
    if pool.gaps.is_counted and not pool.on_device:
        pool.gaps.add(take(received.lost))


def clear_behind(rows: tuple[Any, ...], count: int) -> None:
    """Zeros behind the first `count` rows: on the CPU nothing is undefined."""
    for one in rows:
        if one is not None and len(one) > count:
            one[count:] = 0


def expect_device(pool: Pool, **tensors: Any) -> None:
    """Refuses tensors that lie elsewhere than the first, or on the CPU elsewhere than in the host's memory: kernels
    fault on them."""
    device = None if pool.on_device else torch.device("cpu")
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        found = tensor.device
        device = device or found
        if found != device:
            place = f"{device}" if pool.on_device else "cpu, where the drop-in runs"
            raise Refusal(f"{name}: found a tensor on {tensor.device}; expected one on {place}")


_readers: dict[Any, _Reader] = {}


def reader() -> _Reader:
    """Makes tensors of torch over memory of this package. Their order with streams is the caller's."""
    found = _readers.get(torch)
    if found is None:
        # torch's public function asks what it is given, and then calls this one.
        found = _readers[torch] = _Reader(torch.Tensor, torch._C._from_dlpack, _reads_fp8())
    return found


def _reads_fp8() -> bool:
    """Whether torch reads FP8 by DLPack. Older versions get bytes, of which `take_all` makes a view."""
    one = torch.empty(1, dtype=torch.float8_e4m3fn, device="cpu")
    try:
        return bool(torch._C._from_dlpack(torch._C._to_dlpack(one)).dtype == one.dtype)
    except (BufferError, RuntimeError, TypeError, ValueError):
        return False


def take(array: tokenyard.Array) -> Any:
    """An array of tokenyard as a tensor, without a copy."""
    return reader().array(array)


def take_all(
    received: Any, names: tuple[str, ...], dtype: Any, record: object = None
) -> tuple[Any, ...]:
    """Arrays of an output as tensors, as `take`; the first has a type of torch, and None stands for one that is not
    there. `record` belongs to the memory of the last one."""
    first, *others = reader().output(received, names, dtype is torch.float8_e4m3fn, record)
    return typed(first, dtype), *others


def anchored(tensor: Any, record: object) -> Any:
    """A tensor over the same memory, which is not empty, by which `record_of` finds the record."""
    return reader().anchored(tensor, record)


def typed(tensor: Any, dtype: Any) -> Any:
    """The same bytes as elements of a type. An operation of torch where that is another one."""
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def stays_in_arena(opened: Opened, call: CallStream) -> bool:
    """Whether the output of a normal call is given where it lies. Each rank decides by itself.

    `auto` gives it so in a capture alone: only captured calls use its place again. Elsewhere it is copied to memory of
    torch, whose allocator learns by `record_stream` which other streams read it. The arena never learns that.
    """
    stays = opened.output == "arena" or (opened.output == "auto" and call.is_captured)
    opened.lends |= stays
    return stays


def name_stream(opened: Opened, call: CallStream) -> None:
    """Regions that were dropped are used again behind all streams that calls were made on: readers may be on any.

    An asynchronous call is made on the current stream, too: there its caller goes on. Streams of captures are apart:
    a graph waits for nothing outside of it.
    """
    if call.raw is None:
        return
    streams = _streams_of(opened, call)
    streams.add(call.raw)
    streams.add(call.current_raw)
    # The work of the call follows its own stream by itself.
    _release_after(opened, call, call.raw)


def name_readers(opened: Opened, call: CallStream) -> None:
    """As `name_stream`, before memory is lent to a caller who may write it on any stream."""
    _release_after(opened, call, None)


def name_current(opened: Opened, call: CallStream) -> None:
    """As `name_stream`, of the stream on which the rest of a call was waited for: its outputs are read there."""
    if call.raw is not None:
        _streams_of(opened, call).add(call.current_raw)


def _streams_of(opened: Opened, call: CallStream) -> set[int]:
    return opened.captured_streams if call.is_captured else opened.streams


def _release_after(opened: Opened, call: CallStream, own: int | None) -> None:
    streams = _streams_of(opened, call)
    if len(streams) < 2 or not opened.lends:
        return
    others = [other for other in streams if other != own]
    # Of the streams of earlier captures, most capture nothing now.
    found = call.captured_among(others) if call.is_captured else others
    # Without a stream to name, the next call names those of what was dropped.
    if found:
        opened.communicator.release_after(found)


_dummies: dict[Any, Any] = {}
# Above it, the next one begins anew: callers bring other numbers of tokens in every step.
_MOST_DUMMIES = 256


def dummy(device: Any, *shape: int) -> Any:
    """A tensor of which only the shape counts: one element that is neither read nor written."""
    key = (device, shape)
    found = _dummies.get(key)
    if found is None:
        # Autograd refuses to save what is made in inference mode, and later calls may train.
        with torch.inference_mode(False):
            found = torch.zeros(1, dtype=torch.int32, device=device).expand(shape)
        # In a capture the element lies in the memory of the graph.
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return found
        if len(_dummies) >= _MOST_DUMMIES:
            _dummies.clear()
        _dummies[key] = found
    return found


def fit(rows: Any, count: int) -> Any:
    """The first rows, or all of them with others of undefined contents behind."""
    found = rows.shape[0]
    if found == count:
        return rows
    if found > count:
        return rows[:count]
    room = rows.new_empty((count, *rows.shape[1:]))
    room[:found] = rows
    return room
