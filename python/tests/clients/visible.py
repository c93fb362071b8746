"""Ranks of which each sees one GPU, or all in another order: `CUDA_VISIBLE_DEVICES` by index and by UUID.

Every process calls its GPU number 0, and the ranks learn of each other which one that is.
"""

import os

import pool as pools
import with_vllm

RANKS = 2


def forms(gpus):
    """The values of both ranks, by a name. On one GPU the ranks share it."""
    if not gpus:
        return {}
    import torch

    names = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(gpus)]
    own, other = 0, min(1, gpus - 1)
    backwards = ",".join(str(i) for i in reversed(range(gpus)))
    found = {
        "own_index": (str(own), str(other)),
        "swapped_indices": (str(other), str(own)),
        "uuids": (names[own], names[other]),
        # "GPU-" and eight digits.
        "uuids_cut_short": (names[own][:12], names[other][:12]),
        "uuid_beside_all_backwards": (names[own], backwards),
    }
    # On one GPU some are the same.
    return {form: values for form, values in found.items() if is_first(found, form)}


def is_first(found, form):
    return next(other for other, values in found.items() if values == found[form]) == form


def run(values, folder):
    """A normal layer and one of low latency, in processes of their own."""
    pool = pools.Pool(RANKS)
    try:
        return pool.run(RANKS, layers, pools.free_port(), values, folder)
    finally:
        pool.close()


def layers(world, port, values, folder):
    # Read when this process first calls the driver.
    os.environ["CUDA_VISIBLE_DEVICES"] = values[world.rank]
    import torch

    torch.cuda.set_device(0)
    found, expected = torch.cuda.device_count(), len(values[world.rank].split(","))
    assert found == expected, f"{values[world.rank]}: found {found} GPUs; expected {expected}"
    with_vllm.high_throughput(world, port, RANKS, folder)
    with_vllm.low_latency(world, port, RANKS, folder)
