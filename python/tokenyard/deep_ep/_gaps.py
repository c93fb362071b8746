"""Counts of rows and experts that results of a buffer lack, where its operations leave ranks out."""

import sys
from typing import Any

import numpy as np

import tokenyard

from ._arrays import Tensor, is_torch
from ._torch import torch


class Gaps:
    """A count to which each operation adds what it left out. Where a loss is an error, nothing is ever left out."""

    def __init__(self, config: tokenyard.Config, device: Any) -> None:
        """`device`: where the tensors of the calls lie; None for the host's arrays."""
        # Whether operations add to it.
        self.is_counted = config.on_failure == "mask"
        self._device = device
        # A graph adds to it, so it is there before any capture.
        self._count: Tensor
        if device is None:
            self._count = np.zeros(1, np.int32)
        else:
            # A tensor of inference mode could not be written outside of it.
            with torch.inference_mode(False):
                self._count = torch.zeros(1, dtype=torch.int32, device=device)

    @property
    def count(self) -> Tensor:
        """`[1]` int32, the same memory each time: a tensor of torch where a program uses that."""
        if self._device is None and "torch" in sys.modules:
            return torch.from_numpy(self._count)
        return self._count

    def room(self, tokens: int) -> Any:
        """Where a combine says, for each token, how many experts its sum lacks; None where nothing is counted."""
        if not self.is_counted:
            return None
        if self._device is None:
            return np.zeros(tokens, np.uint8)
        return torch.empty(tokens, dtype=torch.uint8, device=self._device)

    def add_experts(self, missing: Any) -> None:
        """Adds what a combine has written to its `room`, if there was some, in the order of the current stream."""
        if missing is not None:
            self._add(missing)

    def add_sources(self, lost: Any) -> None:
        """Adds the ranks whose rows an output lacks, as `add_experts`."""
        if self.is_counted:
            self._add(lost)

    def _add(self, gaps: Any) -> None:
        if not is_torch(gaps):
            self._count += np.asarray(gaps).sum(dtype=np.int32)
            return
        # Operations of two streams may add at the same time, so the additions are atomic.
        places = torch.zeros_like(gaps, dtype=torch.int64)
        self._count.scatter_add_(0, places, gaps.to(torch.int32))
