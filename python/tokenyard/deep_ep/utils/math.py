"""Numbers that scripts of DeepEP compute: of torch's tensors by torch, on their device; of numpy's arrays by numpy."""

import sys
from typing import Any

import numpy as np

from .._arrays import BF16, FP8, Array, Tensor, is_torch, library_of, like, to_host

CHANNELS = 128
_LARGEST = 448.0  # of e4m3
_LEAST = 1e-4  # below it a row counts as zeros


def ceil_div(x: int, y: int) -> int:
    """x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """The least multiple of y that is not below x."""
    return ceil_div(x, y) * y


def safe_div(a: float, b: float) -> float:
    """a / b, and 0 for 0 / 0."""
    return 0 if a == b == 0 else a / b


def calc_diff(x: Tensor, y: Tensor) -> float:
    """How far two tensors are apart: 0 for equal ones. Both are shifted by 1, so that zeros count."""
    if is_torch(x) and is_torch(y):
        shifted, other = x.double() + 1, y.double() + 1
        total = float((shifted * shifted).sum() + (other * other).sum())
        return 1 - 2 * float((shifted * other).sum()) / total
    a = to_host("x", x).astype(np.float64) + 1
    b = to_host("y", y).astype(np.float64) + 1
    squares = float((a * a).sum() + (b * b).sum())
    return 1 - 2 * float((a * b).sum()) / squares


def _groups(rows: Array) -> Array:
    """`[T, groups, 128]` float32, with zeros behind the last channel."""
    tokens, hidden = rows.shape
    padded = np.zeros((tokens, align(hidden, CHANNELS)), np.float32)
    padded[:, :hidden] = rows.astype(np.float32)
    return padded.reshape(tokens, ceil_div(hidden, CHANNELS), CHANNELS)


def _channels(groups: Any) -> Any:
    """Rows of groups as rows of channels, also where there are none."""
    tokens, count, width = groups.shape
    return groups.reshape(tokens, count * width)


def _torch_groups(rows: Any) -> Any:
    """As `_groups`, of torch's tensors."""
    torch = sys.modules["torch"]
    hidden = rows.shape[1]
    padded = torch.nn.functional.pad(rows.float(), (0, align(hidden, CHANNELS) - hidden))
    return padded.view(len(rows), ceil_div(hidden, CHANNELS), CHANNELS)


def _torch_cast(x: Any) -> tuple[Any, Any]:
    groups = _torch_groups(x)
    largest = groups.abs().amax(2, keepdim=True).clamp(min=_LEAST)
    cast = (groups * (_LARGEST / largest)).to(sys.modules["torch"].float8_e4m3fn)
    return _channels(cast)[:, : x.shape[1]].contiguous(), (largest / _LARGEST)[:, :, 0]


def _torch_cast_back(rows: Any, scales: Any) -> Any:
    torch = sys.modules["torch"]
    if not len(rows):
        return rows.bfloat16()
    if scales.dtype == torch.int32:
        exponents = scales.contiguous().view(torch.uint8).int()
        scales = (exponents << 23).view(torch.float32)
    if len(scales) != len(rows):
        scales = scales.reshape(len(rows), -1)
    groups = _torch_groups(rows)
    scaled = groups * scales[:, : groups.shape[1], None].float()
    return _channels(scaled)[:, : rows.shape[1]].bfloat16().contiguous()


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[T, H]` as FP8 e4m3, and a float32 scale for each 128 channels that brings the values back."""
    if is_torch(x):
        return _torch_cast(x)
    rows = to_host("x", x)
    groups = _groups(rows)
    largest = np.maximum(np.abs(groups).max(axis=2, keepdims=True, initial=0), np.float32(_LEAST))
    cast = (groups * (np.float32(_LARGEST) / largest)).astype(FP8)
    cast = np.ascontiguousarray(_channels(cast)[:, : rows.shape[1]])
    return like(x, cast), like(x, (largest / np.float32(_LARGEST))[:, :, 0])


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """bfloat16 of rows in FP8 and their scales: float32, or int32 with four exponents (UE8M0) each."""
    if is_torch(x_fp8):
        return _torch_cast_back(x_fp8, x_scales)
    rows, scales = to_host("x_fp8", x_fp8), to_host("x_scales", x_scales)
    groups = _groups(rows)
    if scales.dtype == np.int32:
        exponents = np.ascontiguousarray(scales).view(np.uint8).astype(np.uint32)
        scales = (exponents << 23).view(np.float32)
    if len(scales) != len(rows):
        # DeepEP's scripts view packed exponents with as many columns as there are groups.
        scales = scales.reshape(len(rows), -1)
    scaled = groups * scales[:, : groups.shape[1], None].astype(np.float32)
    back = _channels(scaled)[:, : rows.shape[1]].astype(BF16)
    return like(x_fp8, np.ascontiguousarray(back))


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Leaves each value of 0 to `num_slots` - 1 once in each row of `x`, the largest first.

    The rest of a row is -1.
    """
    library = library_of(x)
    is_value = (x >= 0) & (x < num_slots)
    kept = _descending(library.where(is_value, x, -library.ones_like(x)))
    is_copy = library.zeros_like(is_value)
    is_copy[:, 1:] = kept[:, 1:] == kept[:, :-1]
    kept[is_copy] = -1
    x[...] = _descending(kept)


def _descending(rows: Any) -> Any:
    """Rows of integers, sorted."""
    if is_torch(rows):
        return rows.sort(1, descending=True).values
    return -np.sort(-rows, axis=1)


def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """Scores `[T, E]`, zero outside of the groups `[T, n]` of experts."""
    size = scores.shape[1] // num_groups
    if is_torch(scores):
        is_kept = scores.new_zeros((len(scores), num_groups), dtype=sys.modules["torch"].bool)
        is_kept = is_kept.scatter_(1, group_idx, True).repeat_interleave(size, 1)
        return scores.masked_fill(~is_kept, 0)
    is_in = np.zeros((len(scores), num_groups), bool)
    np.put_along_axis(is_in, group_idx, True, axis=1)
    return np.where(np.repeat(is_in, size, axis=1), scores, np.zeros((), scores.dtype))


def hash_tensor(t: Tensor) -> int:
    """The sum of the memory's words of 4 bytes, or of its bytes where they do not divide it."""
    if is_torch(t):
        torch = sys.modules["torch"]
        held = t.detach().contiguous().reshape(-1).view(torch.uint8)
        if held.numel() % 4:
            return int(held.sum(dtype=torch.int64))
        # torch views words only where a slice begins at a multiple of them.
        aligned = held.clone() if held.storage_offset() % 4 else held
        return int(aligned.view(torch.int32).sum(dtype=torch.int64))
    memory = np.ascontiguousarray(to_host("t", t)).reshape(-1).view(np.uint8)
    words = memory.view(np.int32) if memory.size % 4 == 0 else memory
    return int(words.sum(dtype=np.int64))


def _tensors(items: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among items, and among tuples and lists of them."""
    found = []
    for item in items:
        if isinstance(item, (tuple, list)):
            found += _tensors(tuple(item))
        elif isinstance(item, np.ndarray) or is_torch(item):
            found.append(item)
    return found


def hash_tensors(*tensors: Any) -> int:
    """The hashes of all tensors, joined by exclusive or."""
    value = 0
    for tensor in _tensors(tensors):
        value ^= hash_tensor(tensor)
    return value


def count_bytes(*tensors: Any) -> int:
    """Bytes of all tensors."""
    return sum(int(tensor.nbytes) for tensor in _tensors(tensors))
