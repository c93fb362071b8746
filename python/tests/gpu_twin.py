"""Low-latency operations of two GPUs, each with the load of one of R ranks (see standins/twin/README.md).

torchrun --nproc-per-node 8 python/tests/gpu_twin.py target/release/libtokenyard_plugin_twin.so
"""

import argparse
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
decode = "low_latency"
device = {device}
[transport.scale_up]
use = "twin"
[transport.scale_up.twin]
device = {device}
[plugins]
paths = ["{plugin}"]
"""


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plugin", help="the library of the transport `twin`")
    for name, value in (("tokens", 128), ("experts", 288), ("topk", 8), ("hidden", 7168)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    return parser.parse_args()


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
    torch.cuda.set_device(rank % 2)
    dist.init_process_group("gloo")
    plugin = os.path.abspath(sizes.plugin)
    config = tokenyard.Config.parse(CONFIG.format(device=rank % 2, plugin=plugin), "twin")
    world = tokenyard.World.from_torch(config=config)
    comm = tokenyard.Communicator(
        world,
        config,
        experts=sizes.experts,
        topk=sizes.topk,
        hidden=sizes.hidden,
        max_tokens=sizes.tokens,
    )
    times = measure(comm, rank, sizes) if rank < 2 else {}
    dist.barrier()
    found = [None] * ranks
    dist.all_gather_object(found, times)
    if rank == 0:
        name = torch.cuda.get_device_name()
        print(
            f"two {name}, each with the load of one of {ranks} ranks: a stand-in for {ranks} GPUs"
        )
        for what in times:
            print(f"{what:<24}{max(one[what] for one in found[:2]):8.1f} us")
    comm.close()
    world.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
