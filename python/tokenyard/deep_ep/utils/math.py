"""Numbers that scripts of DeepEP compute: by torch, on the tensors' device. Arrays of numpy are tensors over their
memory, and then results are such arrays."""

from typing import Any

import numpy as np

from tokenyard._native import _SCALED_CHANNELS

from .._arrays import Tensor, by_torch, to_write
from .._torch import torch

# Channels that share a scale: the number of the kernel sets.
CHANNELS = _SCALED_CHANNELS
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


@by_torch
def calc_diff(x: Tensor, y: Tensor) -> float:
    """How far two tensors are apart: 0 for equal ones. Both are shifted by 1, so that zeros count."""
    shifted, other = x.double() + 1, y.to(x.device).double() + 1
    total = float((shifted * shifted).sum() + (other * other).sum())
    return 1 - 2 * float((shifted * other).sum()) / total


def _groups(rows: Any) -> Any:
    """`[T, groups, 128]` float32, with zeros behind the last channel."""
    hidden = rows.shape[1]
    padded = torch.nn.functional.pad(rows.float(), (0, align(hidden, CHANNELS) - hidden))
    return padded.view(len(rows), ceil_div(hidden, CHANNELS), CHANNELS)


def _channels(groups: Any) -> Any:
    """Rows of groups as rows of channels, also where there are none."""
    tokens, count, width = groups.shape
    return groups.reshape(tokens, count * width)


@by_torch
def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[T, H]` as FP8 e4m3, and a float32 scale for each 128 channels that brings the values back."""
    groups = _groups(x)
    largest = groups.abs().amax(2, keepdim=True).clamp(min=_LEAST)
    cast = (groups * (_LARGEST / largest)).to(torch.float8_e4m3fn)
    return _channels(cast)[:, : x.shape[1]].contiguous(), (largest / _LARGEST)[:, :, 0]


@by_torch
def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """bfloat16 of rows in FP8 and their scales: float32, or int32 with four exponents (UE8M0) each."""
    if not len(x_fp8):
        return x_fp8.bfloat16()
    if x_scales.dtype == torch.int32:
        exponents = x_scales.contiguous().view(torch.uint8).int()
        x_scales = (exponents << 23).view(torch.float32)
    if len(x_scales) != len(x_fp8):
        # DeepEP's scripts view packed exponents with as many columns as there are groups.
        x_scales = x_scales.reshape(len(x_fp8), -1)
    groups = _groups(x_fp8)
    scaled = groups * x_scales[:, : groups.shape[1], None].float()
    return _channels(scaled)[:, : x_fp8.shape[1]].bfloat16().contiguous()


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Leaves each value of 0 to `num_slots` - 1 once in each row of `x`, the largest first.

    The rest of a row is -1. Raises InvalidInputError for an array of numpy that torch cannot write.
    """
    x = to_write("inplace_unique", "x", x)
    is_value = (x >= 0) & (x < num_slots)
    kept = x.masked_fill(~is_value, -1).sort(1, descending=True).values
    is_copy = torch.zeros_like(is_value)
    is_copy[:, 1:] = kept[:, 1:] == kept[:, :-1]
    x.copy_(kept.masked_fill(is_copy, -1).sort(1, descending=True).values)


@by_torch
def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """Scores `[T, E]`, zero outside of the groups `[T, n]` of experts."""
    is_kept = scores.new_zeros((len(scores), num_groups), dtype=torch.bool)
    is_kept = is_kept.scatter_(1, group_idx, True)
    return scores.masked_fill(~is_kept.repeat_interleave(scores.shape[1] // num_groups, 1), 0)


@by_torch
def hash_tensor(t: Tensor) -> int:
    """The sum of the memory's words of 4 bytes, or of its bytes where they do not divide it."""
    held = t.detach().contiguous().reshape(-1).view(torch.uint8)
    if held.numel() % 4 or not held.numel():
        return int(held.sum(dtype=torch.int64))
    # torch views words only where a slice begins at a multiple of them.
    aligned = held.clone() if held.storage_offset() % 4 else held
    return int(aligned.view(torch.int32).sum(dtype=torch.int64))


def _tensors(items: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among items, and among tuples and lists of them."""
    found = []
    for item in items:
        if isinstance(item, (tuple, list)):
            found += _tensors(tuple(item))
        elif isinstance(item, (np.ndarray, torch.Tensor)):
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
