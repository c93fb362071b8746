"""A Mixture-of-Experts layer of torch over `deep_ep`, trained for 20 steps with checkpointing.

    torchrun --nproc-per-node 2 python/examples/moe_layer.py

On GPUs where torch has one for each rank, else on CPUs. Every rank hosts EXPERTS / R small networks, tokens go to TOPK
of them. First gradients are compared with those of dense layers, which have all experts on every rank.
"""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from moe_autograd import Combine, Dispatch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tokenyard

tokenyard.alias_deep_ep()  # not needed where the distribution tokenyard-deep-ep is installed
from deep_ep import Buffer  # noqa: E402

TOKENS, HIDDEN, EXPERTS, TOPK, STEPS = 64, 32, 8, 2, 20


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
        recv_x, recv_idx, recv_weights, *handle = Dispatch.apply(
            self.buffer, x, idx, weights, EXPERTS
        )
        # A zero times every parameter: each rank's gradients are there, also where no token came.
        out = recv_x * 0 + sum(p.sum() for p in self.experts.parameters()) * 0
        for local, expert in enumerate(self.experts):
            row, k = torch.nonzero(recv_idx == local, as_tuple=True)
            out = out.index_add(0, row, expert(recv_x[row]) * recv_weights[row, k, None])
        return x + Combine.apply(self.buffer, out, *handle)

    def dense(self, x, experts):
        """The layer with all experts here."""
        weights, idx = F.softmax(self.router(x), dim=-1).topk(TOPK, dim=-1)
        shares = [torch.where(idx == e, weights, 0).sum(1, keepdim=True) for e in range(EXPERTS)]
        return x + sum(share * expert(x) for share, expert in zip(shares, experts, strict=True))


def loss_of(layers, x, target, experts=None):
    """The loss of the layers, recomputed in the backward pass; with all `experts` of each, of dense layers."""
    for n, layer in enumerate(layers):
        x = layer.dense(x, experts[n]) if experts else checkpoint(layer, x, use_reentrant=False)
    return F.mse_loss(x, target)


def check_gradients(layers, x, target):
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, [copy.deepcopy(layer.experts).cpu() for layer in layers])
    everywhere = [[experts.to(x.device) for experts in rank] for rank in everywhere]
    experts = [[expert for rank in everywhere for expert in rank[n]] for n in range(len(layers))]
    pairs = zip(layers, everywhere[dist.get_rank()], strict=True)
    x = x.clone().requires_grad_()
    mine = [x, *(p for layer in layers for p in layer.parameters())]
    theirs = [x, *(p for layer, own in pairs for m in (layer.router, own) for p in m.parameters())]
    found = torch.autograd.grad(loss_of(layers, x, target), mine)
    loss_of(layers, x, target, experts).backward()
    for parameter in (p for rank in everywhere for layer in rank for p in layer.parameters()):
        dist.all_reduce(parameter.grad)  # each rank has seen its own tokens alone
    torch.testing.assert_close(found, tuple(p.grad for p in theirs), rtol=1e-3, atol=1e-6)


def choose_device():
    """A GPU for each rank of this host, or none."""
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if ranks <= torch.cuda.device_count():
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")


def main():
    choose_device()
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
    check_gradients(layers, x, target)
    losses = []
    for step in range(STEPS):
        loss = loss_of(layers, x, target)
        optimizer.zero_grad()
        loss.backward()
        for parameter in shared:
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
        if buffer.rank == 0:
            print(f"step {step + 1:2}  loss {losses[-1]:.4f}", flush=True)
    assert losses[-1] < 0.8 * losses[0], losses
    buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
