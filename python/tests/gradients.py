"""Gradients through the drop-in against those of a dense layer: with the autograd functions of the example."""

import pathlib
import sys

import torch
from torch.utils.checkpoint import checkpoint

sys.path.append(str(pathlib.Path(__file__).parent.parent / "examples"))
from moe_autograd import Combine, Dispatch


def check_gradients(buffer, case, inputs, with_checkpoint):
    """Forward and backward of three layers, on autograd's thread. `inputs`: x, ids and weights of this rank."""
    x, idx, weights = inputs

    def layer(x, weights):
        recv_x, recv_idx, recv_weights, *handle = Dispatch.apply(
            buffer, x, idx, weights, case.experts
        )
        # Expert e of this rank multiplies by 1 + e.
        factors = torch.where(recv_idx >= 0, 1 + buffer.rank * case.local + recv_idx, 0)
        scaled = recv_x * (recv_weights * factors).sum(1, keepdim=True)
        return Combine.apply(buffer, scaled, *handle)

    def dense(x, weights):
        factors = torch.where(idx >= 0, 1 + idx, 0)
        return x * (weights * factors).sum(1, keepdim=True)

    results = []
    for function in (layer, dense):
        a, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = a
        for _ in range(3):
            is_checked = with_checkpoint and function is layer
            y = checkpoint(function, y, w, use_reentrant=False) if is_checked else function(y, w)
        y.square().mean().backward()
        results.append((y.detach(), a.grad, w.grad))
    for found, expected in zip(*results, strict=True):
        scale = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * scale)
