"""The start of DeepEP's scripts: processes of torch in one group."""

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
    """Joins torch's default group: `(rank, ranks, group of all)`.

    `MASTER_ADDR`, `MASTER_PORT` (8361), `WORLD_SIZE` (nodes, 1) and `RANK` (this node, 0) say where. On GPUs, scripts
    of DeepEP expect what it sets there: the GPU of the local rank is the current one, torch makes tensors of bfloat16
    on it by default, and NCCL joins the ranks' GPUs. Without GPUs, torch's defaults stay.
    """
    torch = importlib.import_module("torch")
    distributed = importlib.import_module("torch.distributed")
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("cuda")
        if distributed.is_nccl_available():
            # NCCL starts with the first collective on GPUs. Objects go by gloo.
            backend = "cpu:gloo,cuda:nccl"
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", "8361"))
    nodes, node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    distributed.init_process_group(
        backend=backend,
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
