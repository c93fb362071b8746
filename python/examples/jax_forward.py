"""The forward pass of a Mixture-of-Experts layer in JAX: arrays go in and come out by DLPack, without a copy.

    python python/examples/jax_forward.py

Two ranks, processes of this host: on GPUs where JAX has two, else on CPUs. Every rank hosts EXPERTS / RANKS matrices.
The result is compared with that of a dense layer, which has all experts.
"""

import multiprocessing
import os

RANKS, TOKENS, HIDDEN, EXPERTS, TOPK = 2, 32, 128, 8, 2

CONFIG = """
[kernels]
use = "cuda"
[kernels.cuda]
device = {rank}      # JAX leaves the last GPU as the current one, so the config names it
[transport.scale_up]
use = "nvlink"
"""


def layer(communicator, jax, x, experts, ids, weights):
    """`[TOKENS, HIDDEN]`: each token through its experts, `experts` being those of this rank."""
    # Calls without a stream: arrays are there before each, and its outputs behind it.
    jax.block_until_ready((x, ids, weights))
    received, handle = communicator.dispatch(
        x, ids, weights, layout="expert_major", zero_padding=True
    )
    rows = jax.dlpack.from_dlpack(received.x)
    ends = jax.dlpack.from_dlpack(received.expert_ends)
    # Rows are grouped by expert.
    mine = jax.numpy.searchsorted(ends, jax.numpy.arange(len(rows)), side="right")
    mine = jax.numpy.minimum(mine, len(experts) - 1)
    y = jax.numpy.einsum("nh,nhk->nk", rows, experts[mine])
    # Memory for the result. No other array shares it.
    out = jax.numpy.zeros_like(x)
    jax.block_until_ready((y, out))
    communicator.combine(handle, y, weighted=True, out=out)
    return out


def run(rank, exchange):
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax

    import tokenyard

    jax.config.update("jax_enable_x64", True)  # expert ids of 64 bits
    on_gpus = len(jax.devices()) >= RANKS and jax.devices()[0].platform == "gpu"
    config = tokenyard.Config.built_in("cpu")
    if on_gpus:
        config = tokenyard.Config.parse(CONFIG.format(rank=rank), "jax_forward.py")
        jax.config.update("jax_default_device", jax.devices()[rank])
    keys = jax.random.split(jax.random.key(0), 2)
    experts = jax.random.normal(keys[0], (EXPERTS, HIDDEN, HIDDEN), "float32") / HIDDEN**0.5
    x = jax.random.normal(jax.random.key(1 + rank), (TOKENS, HIDDEN), "float32")
    scores = jax.nn.softmax(x @ jax.random.normal(keys[1], (HIDDEN, EXPERTS), "float32"))
    weights, ids = jax.lax.top_k(scores, TOPK)
    ids = ids.astype("int64")
    local = EXPERTS // RANKS
    with (
        tokenyard.World(rank, RANKS, exchange=exchange, local_rank=rank, config=config) as world,
        tokenyard.Communicator(world, config, EXPERTS, TOPK, HIDDEN, TOKENS) as communicator,
    ):
        mine = experts[rank * local : (rank + 1) * local]
        out = layer(communicator, jax, x, mine, ids, weights)
        through = jax.numpy.einsum("th,ehk->tek", x, experts)
        chosen = jax.numpy.take_along_axis(through, ids[:, :, None], axis=1)
        dense = (chosen * weights[:, :, None]).sum(1)
        error = float(abs(out - dense).max())
    place = jax.devices()[rank].device_kind if on_gpus else "CPU"
    print(f"rank {rank} on {place}: the largest difference is {error:.1e}", flush=True)
    assert error < 2e-2, error


def serve(rank, gathered, barrier):
    def exchange(mine):
        gathered[rank] = mine
        barrier.wait()
        return [gathered[other] for other in range(RANKS)]

    run(rank, exchange)


def main():
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        shared = (manager.dict(), manager.Barrier(RANKS))
        ranks = [context.Process(target=serve, args=(rank, *shared)) for rank in range(RANKS)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert all(rank.exitcode == 0 for rank in ranks)


if __name__ == "__main__":
    main()
