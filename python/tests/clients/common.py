"""Common parts of the checks of clients: ranks in groups of torch, routing, experts, and a dense layer beside them."""

import contextlib
import importlib
import importlib.util
import sys
import types
from dataclasses import dataclass

import torch
import torch.distributed as dist

# Ranks share the cores.
torch.set_num_threads(1)

_groups = {}


def device():
    """The GPU of this rank, or the host's memory."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def group_of(world, port, size):
    """The group of this rank: all ranks, this rank alone, or one of the pairs, which work at the same time."""
    if not _groups:
        ranks = world.ranks
        address = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=address, rank=world.rank, world_size=ranks)
        for each in sorted({ranks, 2, 1}):
            firsts = range(0, ranks, each)
            made = [dist.new_group(list(range(first, first + each))) for first in firsts]
            _groups[each] = made[world.rank // each]
    return _groups[size]


def own_group():
    """The group of this rank alone."""
    return _groups[1]


def on_path(folder):
    """Lets `import` find the files of a client."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def by_path(name, path):
    """A module of a client whose package would import what is not installed."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def stub(name, **content):
    """A stub of a module that a client imports and these checks do not need: it has these names only."""
    module = types.ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)
    return module


@contextlib.contextmanager
def replaced(owner, **names):
    """Inside, these names of `owner` mean something else."""
    saved = {name: getattr(owner, name) for name in names}
    for name, value in names.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(owner, name, value)


@dataclass
class Layer:
    """Experts y = tanh(x W): their weights are the same on all ranks, and each rank computes its own experts.

    Its numbers are drawn on the host, so that they are the same on GPUs.
    """

    group: dist.ProcessGroup
    experts: int
    hidden: int
    topk: int
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def __post_init__(self):
        self.ranks, self.me = self.group.size(), self.group.rank()
        self.local = self.experts // self.ranks
        self.first = self.me * self.local
        draw = torch.Generator().manual_seed(self.seed)
        shape = (self.experts, self.hidden, self.hidden)
        weights = torch.randn(shape, generator=draw) / self.hidden**0.5
        self.weights = weights.to(device(), self.dtype)

    def own_weights(self):
        """The weights of this rank's experts, a leaf."""
        return self.weights[self.first : self.first + self.local].clone().requires_grad_()

    def inputs(self, tokens, step=0, dropped=0.0):
        """Rows, ids and routing weights of this rank, its own in each step; `dropped` is the share of lost choices."""
        draw = torch.Generator().manual_seed(1000 * self.seed + 10 * step + self.me)
        x = torch.randn(tokens, self.hidden, generator=draw).to(self.dtype)
        scores = torch.rand(tokens, self.experts, generator=draw)
        weights, ids = scores.softmax(1).topk(self.topk, 1)
        lost = torch.rand(ids.shape, generator=draw) < dropped
        given = x, ids.masked_fill(lost, -1), weights.masked_fill(lost, 0)
        return tuple(one.to(device()) for one in given)

    def expert(self, rows, expert, weights=None):
        """The output of one expert; `weights` are those of all experts here."""
        chosen = (self.weights if weights is None else weights)[expert]
        # A processor without instructions for bfloat16 takes seconds for a product of it.
        return torch.tanh(rows.float() @ chosen.float()).to(rows.dtype)

    def by_counts(self, rows, counts, weights):
        """Outputs of rows that lie expert by expert; rows behind them stay unused."""
        parts, start = [], 0
        for expert, count in enumerate(counts):
            parts.append(self.expert(rows[start : start + count], expert, weights))
            start += count
        return torch.cat([*parts, torch.zeros_like(rows[start:])])

    def by_places(self, rows, starts, ends):
        """As `by_counts`, of the rows from start to end of each expert, which the device alone knows: in a graph."""
        y, place = torch.zeros_like(rows), torch.arange(len(rows), device=rows.device)
        for expert in range(self.local):
            is_its = (place >= starts[expert]) & (place < ends[expert])
            y = torch.where(is_its[:, None], self.expert(rows, self.first + expert), y)
        return y

    def by_blocks(self, rows):
        """Outputs of `[experts here, rows, hidden]`."""
        own = self.weights[self.first : self.first + self.local]
        return torch.tanh(torch.bmm(rows.float(), own.float())).to(rows.dtype)

    def dense(self, x, ids, weights, of_experts=None):
        """The output of the layer without any communication, in the precision of its arguments."""
        out = torch.zeros_like(x)
        for expert in range(self.experts):
            scale = torch.where(ids == expert, weights, 0).sum(1, keepdim=True)
            out = out + scale.to(x.dtype) * self.expert(x, expert, of_experts)
        return out

    def sum_of_ranks(self, value):
        """The sum over the ranks of the group."""
        total = value.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total


def close(found, expected, tolerance):
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
