"""How scripts of DeepEP start: processes of torch, gloo between them."""

import contextlib
import importlib
import os
import random
from typing import Any

import numpy as np

_seed = 0


def init_seed(seed: int) -> None:
    """Seeds Python, numpy and, where it is there, torch."""
    global _seed
    _seed = seed
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    with contextlib.suppress(ImportError):
        importlib.import_module("torch").manual_seed(seed)


def get_global_seed() -> int:
    """The last seed of `init_seed`, or 0."""
    return _seed


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, Any]:
    """Joins torch's default group over gloo: `(rank, ranks, group of all)`.

    `MASTER_ADDR`, `MASTER_PORT` (8361), `WORLD_SIZE` (nodes, 1) and `RANK` (this node, 0) say where. Default type and
    device of torch stay; the current GPU is that of the local rank.
    """
    cuda = importlib.import_module("torch").cuda
    if cuda.is_available():
        cuda.set_device(local_rank % cuda.device_count())
    distributed = importlib.import_module("torch.distributed")
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", "8361"))
    nodes, node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    distributed.init_process_group(
        backend="gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=nodes * num_local_ranks,
        rank=node * num_local_ranks + local_rank,
    )
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    init_seed(seed + rank)
    return rank, ranks, distributed.new_group(list(range(ranks)))


def dist_print(text: str = "", once_in_node: bool = False) -> None:
    """Prints on all ranks, or on the first of this node, in the order of the ranks."""
    distributed = importlib.import_module("torch.distributed")
    local = int(os.environ.get("LOCAL_RANK", distributed.get_rank()))
    for rank in range(distributed.get_world_size()):
        if rank == distributed.get_rank() and (not once_in_node or local == 0):
            print(text, flush=True)
        distributed.barrier()


def get_rdma_gbs() -> float:
    """0: the drop-in has not looked for NICs. Core reads them where a transport needs one."""
    return 0.0
