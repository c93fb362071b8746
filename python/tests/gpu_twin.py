"""Operations of two GPUs, or four, each with the load of one of R ranks (see standins/twin/README.md).

torchrun --nproc-per-node 8 python/tests/gpu_twin.py target/release/libtokenyard_plugin_twin.so
torchrun --nproc-per-node 16 python/tests/gpu_twin.py --domains 2 \\
    target/release/libtokenyard_plugin_twin.so target/release/libtokenyard_plugin_paced.so

One domain: low-latency operations are checked and timed. Several: flat rows are checked, and `tokenyard bench dispatch`
times them.
"""

import argparse
import json
import os

import torch
import torch.distributed as dist
from gpu_native import time_in_graph

import tokenyard

CONFIG = """
[world]
deadline_ms = 20000
[kernels]
use = "cuda"
[kernels.cuda]
{kernels}
device = {device}
[transport.scale_up]
use = "twin"
[transport.scale_up.twin]
gpus = {gpus}
device = {device}
[plugins]
paths = {plugins}
"""
LEVELS = """
[transport.scale_out]
use = "paced"
[transport.scale_out.paced]
twin = {gpus}
device = {device}
[topology]
use = "auto"
domains = {domains}
"""


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "plugins", nargs="+", help="the libraries of `twin` and, for domains, `paced`"
    )
    sizes = {"tokens": 128, "experts": 288, "topk": 8, "hidden": 7168, "domains": 1}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--gpus", type=int, default=2, choices=(2, 4), help="default: 2")
    parser.add_argument("--arena-mib", type=int, default=1024, help="of domains; default: 1024")
    return parser.parse_args()


def text_of(sizes, rank):
    """The config of a rank."""
    plugins = [os.path.abspath(plugin) for plugin in sizes.plugins]
    two_levels = sizes.domains > 1
    values = {
        "device": rank % sizes.gpus,
        "gpus": sizes.gpus,
        "domains": sizes.domains,
        "plugins": json.dumps(plugins),
        # Ranks that do nothing have an arena, too.
        "kernels": f"arena_mib = {sizes.arena_mib}" if two_levels else 'decode = "low_latency"',
    }
    return (CONFIG + (LEVELS if two_levels else "")).format(**values)


class Load:
    """The tensors of one rank, and its calls."""

    def __init__(self, comm, rank, sizes):
        generator = torch.Generator("cuda").manual_seed(rank)
        shape = sizes.tokens, sizes.experts
        self.comm = comm
        self.x = torch.randn(
            sizes.tokens, sizes.hidden, device="cuda", generator=generator
        ).bfloat16()
        scores = torch.rand(shape, device="cuda", generator=generator)
        self.weights, self.idx = scores.topk(sizes.topk)
        self.out = torch.empty_like(self.x)

    def options(self):
        return {"stream": torch.cuda.current_stream().cuda_stream, "without_sync": True}

    def dispatch(self, cast=None):
        return self.comm.dispatch(
            self.x,
            self.idx,
            self.weights,
            layout="packed",
            worst_case=True,
            cast=cast,
            **self.options(),
        )

    def combine(self, rows, handle, has_weights=False):
        """`has_weights`: it has weights of its own, as DeepEP's callers give them, and not those of its dispatch."""
        own = {"topk_weights": self.weights, "topk_idx": self.idx} if has_weights else {}
        self.comm.combine(handle, rows, weighted=True, out=self.out, **own, **self.options())

    def check(self, has_weights):
        """Experts that leave rows as they are: a token's sum is its row times the sum of its weights."""
        self.out.fill_(torch.nan)
        received, handle = self.dispatch()
        self.combine(received.x, handle, has_weights)
        torch.cuda.synchronize()
        wanted = self.x.float() * self.weights.sum(1, keepdim=True)
        off = (self.out.float() - wanted).abs().max() / wanted.abs().max()
        assert off < 1e-2, f"found sums that are off by {off} of the largest; expected at most 0.01"


def check_levels(comm, rank, sizes):
    """Flat rows over two levels: a token's sum is its row times the ranks that it goes to. Small whole numbers: sums
    are exact in any order."""
    generator = torch.Generator("cuda").manual_seed(rank)
    for turn in range(20):
        # T that is no multiple of anything, and differs between GPUs.
        tokens = max(1, sizes.tokens - turn * (rank + 1) % sizes.tokens)
        shape = tokens, sizes.hidden
        x = torch.randint(-8, 9, shape, device="cuda", generator=generator).bfloat16()
        scores = torch.rand((tokens, sizes.experts), device="cuda", generator=generator)
        weights, idx = scores.topk(sizes.topk)
        received, handle = comm.dispatch(x, idx, weights)
        out = torch.full_like(x, torch.nan)
        comm.combine(handle, received.x, out=out)
        torch.cuda.synchronize()
        owners = (idx // (sizes.experts // comm.ranks)).sort(1).values
        ranks = 1 + (owners[:, 1:] != owners[:, :-1]).sum(1, keepdim=True)
        wrong = (out != x * ranks).any(1).sum().item()
        assert wrong == 0, f"found {wrong} of {tokens} sums that differ; expected exact ones"


def measure(comm, rank, sizes):
    load = Load(comm, rank, sizes)
    for turn in range(20):
        load.check(turn % 2 == 1)
    received, handle = load.dispatch()

    def pair(has_weights):
        _, its_handle = load.dispatch("fp8")
        load.combine(received.x, its_handle, has_weights)

    calls = {
        "dispatch, cast to FP8": lambda: load.dispatch("fp8"),
        "dispatch, BF16": load.dispatch,
        "combine": lambda: load.combine(received.x, handle),
        "combine, own weights": lambda: load.combine(received.x, handle, True),
        "pair, cast to FP8": lambda: pair(False),
        "pair, own weights": lambda: pair(True),
    }
    times = {what: time_in_graph(call) for what, call in calls.items()}
    load.check(False)
    return times


def main():
    sizes = parse()
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank % sizes.gpus)
    dist.init_process_group("gloo")
    config = tokenyard.Config.parse(text_of(sizes, rank), "twin")
    world = tokenyard.World.from_torch(config=config)
    comm = tokenyard.Communicator(
        world,
        config,
        experts=sizes.experts,
        topk=sizes.topk,
        hidden=sizes.hidden,
        max_tokens=sizes.tokens,
    )
    work = check_levels if sizes.domains > 1 else measure
    times = work(comm, rank, sizes) if rank < sizes.gpus else None
    dist.barrier()
    found = [None] * ranks
    dist.all_gather_object(found, times)
    if rank == 0:
        name = torch.cuda.get_device_name()
        gpus = f"{sizes.gpus} {name}, each with the load of one of {ranks} ranks"
        print(f"{gpus}: a stand-in for {ranks} GPUs in {sizes.domains} domains")
        if sizes.domains > 1:
            print("20 dispatches and combines: all sums are exact")
        for what in times or {}:
            print(f"{what:<24}{max(one[what] for one in found[: sizes.gpus]):8.1f} us")
    comm.close()
    world.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
