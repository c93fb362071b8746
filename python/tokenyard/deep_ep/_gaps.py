"""Counts of rows and experts that results of a buffer lack, where its operations leave ranks out."""

from typing import Any

import tokenyard

from ._arrays import Tensor
from ._torch import torch


class Gaps:
    """A count to which each operation adds what it left out. Where a loss is an error, nothing is ever left out."""

    def __init__(self, config: tokenyard.Config, device: Any) -> None:
        """`device`: where the tensors of the calls lie."""
        # Whether operations add to it.
        self.is_counted = config.on_failure == "mask"
        # `[1]` int32. A graph adds to it, so it is there before any capture. A tensor of inference mode could not be
        # written outside of it.
        with torch.inference_mode(False):
            self.count: Tensor = torch.zeros(1, dtype=torch.int32, device=device)

    def room(self, tokens: int) -> Any:
        """Where a combine says, for each token, how many experts its sum lacks; None where nothing is counted."""
        if not self.is_counted:
            return None
        return torch.empty(tokens, dtype=torch.uint8, device=self.count.device)

    def add(self, gaps: Any) -> None:
        """Adds what a combine has written to its `room`, if there was some, or the lost sources of an output, in the
        order of the current stream."""
        if gaps is not None and self.is_counted:
            # Tensors that were made in this mode cannot be written outside of it, and others can.
            with torch.inference_mode():
                # Operations of two streams may add at the same time, so the additions are atomic.
                places = torch.zeros_like(gaps, dtype=torch.int64)
                self.count.scatter_add_(0, places, gaps.to(torch.int32))
