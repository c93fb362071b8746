"""A Mixture-of-Experts layer of torch over `deep_ep`, trained for 20 steps with checkpointing.

    torchrun --nproc-per-node 2 python/examples/moe_layer.py

It runs on CPUs. Every rank hosts EXPERTS / R experts, each a small network; tokens go to TOPK of them.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import tokenyard

tokenyard.alias_deep_ep()  # not needed where the distribution tokenyard-deep-ep is installed
from deep_ep import Buffer  # noqa: E402

TOKENS, HIDDEN, EXPERTS, TOPK, STEPS = 64, 32, 8, 2, 20


class Dispatch(torch.autograd.Function):
    """Tokens to the ranks of their experts. Backward: a combine."""

    @staticmethod
    def forward(ctx, buffer, x, idx, weights):
        per_rank, per_domain, per_expert, is_in, _ = buffer.get_dispatch_layout(idx, EXPERTS)
        recv_x, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_domain,
            is_token_in_rank=is_in,
            num_tokens_per_expert=per_expert,
            topk_idx=idx,
            topk_weights=weights,
        )
        ctx.buffer = buffer
        ctx.save_for_backward(*handle)
        ctx.mark_non_differentiable(recv_idx, *handle)
        return recv_x, recv_idx, recv_weights, *handle

    @staticmethod
    def backward(ctx, x_grad, _, weights_grad, *__):
        x_grad, weights_grad, _ = ctx.buffer.combine(
            x_grad.contiguous(), ctx.saved_tensors, topk_weights=weights_grad.contiguous()
        )
        return None, x_grad, None, weights_grad


class Combine(torch.autograd.Function):
    """Experts' outputs to their tokens, summed. Backward: a dispatch with the same routing."""

    @staticmethod
    def forward(ctx, buffer, x, *handle):
        ctx.buffer = buffer
        ctx.save_for_backward(*handle)
        return buffer.combine(x, handle)[0]

    @staticmethod
    def backward(ctx, grad):
        handle = ctx.saved_tensors  # once: checkpointing recomputes them
        x_grad, *_ = ctx.buffer.dispatch(grad.contiguous(), handle=handle)
        return None, x_grad, *[None] * len(handle)


class MoeLayer(nn.Module):
    """A router that every rank has, and the experts of this rank."""

    def __init__(self, buffer):
        super().__init__()
        self.buffer = buffer
        self.router = nn.Linear(HIDDEN, EXPERTS)
        torch.manual_seed(100 + buffer.rank)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))
            for _ in range(EXPERTS // buffer.group_size)
        )

    def forward(self, x):
        weights, idx = F.softmax(self.router(x), dim=-1).topk(TOPK, dim=-1)
        recv_x, recv_idx, recv_weights, *handle = Dispatch.apply(self.buffer, x, idx, weights)
        # A zero times every parameter: each rank's gradients are there, also where no token came.
        out = recv_x * 0 + sum(p.sum() for p in self.experts.parameters()) * 0
        for local, expert in enumerate(self.experts):
            row, k = torch.nonzero(recv_idx == local, as_tuple=True)
            out = out.index_add(0, row, expert(recv_x[row]) * recv_weights[row, k, None])
        return x + Combine.apply(self.buffer, out, *handle)


def main():
    dist.init_process_group("gloo")
    buffer = Buffer(dist.group.WORLD, explicitly_destroy=True)
    torch.manual_seed(0)
    layers = [MoeLayer(buffer) for _ in range(2)]
    shared = [p for layer in layers for p in layer.router.parameters()]
    for parameter in shared:
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.Adam([p for layer in layers for p in layer.parameters()], lr=3e-3)
    torch.manual_seed(1 + buffer.rank)
    x = torch.randn(TOKENS, HIDDEN)
    target = x.roll(1, dims=1)
    for step in range(STEPS):
        y = x
        for layer in layers:
            y = checkpoint(layer, y, use_reentrant=False)
        loss = F.mse_loss(y, target)
        optimizer.zero_grad()
        loss.backward()
        for parameter in shared:
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if step == 0:
            first = loss.item()
        if buffer.rank == 0:
            print(f"step {step + 1:2}  loss {loss.item():.4f}", flush=True)
    assert loss.item() < 0.8 * first, f"the loss went from {first} to {loss.item()}"
    buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
