"""Sums of expanded rows in k order, as V2 makes them without multiple reduction."""

from collections.abc import Callable
from typing import Any

from .._torch import torch

# Rows, and the tensor of their sums.
Combine = Callable[[Any, Any], object]


class Ordered:
    """A combine for each k, of that k's rows alone; their sums, in float32, are made here.

    One combine sums the rows of a rank before it adds those of the next rank. Of one k a token has one row at most, so
    the combine only moves it, whatever the kernel set does.
    """

    def __init__(self, rows: Any, slots: Any, biases: list[Any], out: Any) -> None:
        """Takes all memory, so that no rank stops between two combines. `slots` `[N, K]`: rows of copies, or -1."""
        count = rows.shape[0]
        # The place behind the last row takes what has no row.
        self._places = torch.where(slots >= 0, slots, count).long().T.contiguous()
        self._froms = self._places.clamp(max=max(count - 1, 0))
        self._rows = rows
        self._part = rows.new_zeros((count + 1, rows.shape[1]))
        self._picked = rows.new_empty((slots.shape[0], rows.shape[1]))
        self._moved = torch.empty_like(out)
        self._sums = torch.zeros_like(out, dtype=torch.float32)
        for bias in biases:
            self._sums.add_(bias)

    def sum(self, combine: Combine) -> Any:
        """The sums, `[T, H]` float32, from the biases on."""
        for places, froms in zip(self._places, self._froms, strict=True):
            torch.index_select(self._rows, 0, froms, out=self._picked)
            self._part.index_copy_(0, places, self._picked)
            combine(self._part[:-1], self._moved)
            self._sums.add_(self._moved)
            self._part.index_fill_(0, places, 0)
        return self._sums
