"""A decode step of several Mixture-of-Experts layers in a CUDA graph, launched for 1,000 steps.

    torchrun --nproc-per-node 2 python/examples/decode_loop.py

On GPUs, one for each rank of one host. The step drops its outputs inside the capture, as frameworks do. Each launch is
compared with the same layers in one process's arithmetic: every rank hosts EXPERTS / R matrices, made of a seed.
"""

import os
import time

import torch
import torch.distributed as dist

import tokenyard

tokenyard.alias_deep_ep()  # not needed where the distribution tokenyard-deep-ep is installed
from deep_ep import Buffer  # noqa: E402

TOKENS, HIDDEN, EXPERTS, TOPK, LAYERS, STEPS = 64, 2048, 32, 4, 4, 1000


def experts_of(layer):
    """`[EXPERTS, HIDDEN]`: the factors of each expert, the same on all ranks."""
    generator = torch.Generator("cuda").manual_seed(layer)
    return 0.5 + torch.rand(EXPERTS, HIDDEN, generator=generator, device="cuda")


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    buffer = Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    local = EXPERTS // buffer.group_size
    factors = [experts_of(layer).bfloat16() for layer in range(LAYERS)]
    first = buffer.rank * local
    mine = [f[first : first + local, None, :] for f in factors]
    x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    idx = torch.zeros(TOKENS, TOPK, dtype=torch.int64, device="cuda")
    weights = torch.zeros(TOKENS, TOPK, device="cuda")
    out = torch.empty_like(x)

    def step():
        hidden = x
        for own in mine:
            rows, _, handle, _, _ = buffer.low_latency_dispatch(
                hidden, idx, TOKENS, EXPERTS, use_fp8=False
            )
            hidden, _, _ = buffer.low_latency_combine(rows * own, idx, weights, handle)
        out.copy_(hidden)

    def expected():
        hidden = x.float()
        for f in factors:
            scaled = f.float()[idx] * weights[:, :, None]
            hidden = (hidden[:, None, :] * scaled).sum(1).bfloat16().float()
        return hidden

    def bring():
        x.normal_()
        idx.copy_(torch.rand(TOKENS, EXPERTS, device="cuda").topk(TOPK).indices)
        weights.uniform_(0, 2 / TOPK)

    bring()
    step()  # opens the communicator, which no capture can
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(20):
        bring()
        graph.replay()
        torch.testing.assert_close(out.float(), expected(), rtol=0.05, atol=0.05)
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        graph.replay()
    torch.cuda.synchronize()
    taken = 1e6 * (time.perf_counter() - start) / STEPS
    if buffer.rank == 0:
        print(f"{STEPS} steps of {LAYERS} layers, {TOKENS} tokens a rank: {taken:.1f} us a step")
    buffer.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
