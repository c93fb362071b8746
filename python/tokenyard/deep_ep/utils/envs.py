"""The start of DeepEP's scripts: processes of torch in one group."""

import os
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from .._torch import torch
from ..buffers.elastic import get_logical_domain_size as get_logical_domain_size
from ..buffers.elastic import get_physical_domain_size as get_physical_domain_size

# The kernel describes its devices there.
_SYSTEM = Path("/sys/class")

_global_seed = 0
_local_seed = 0


def init_seed(global_seed: int) -> None:
    """Seeds Python, numpy and torch: by the seed plus the rank in torch's default group, if any."""
    global _global_seed, _local_seed
    rank = 0
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
    _global_seed, _local_seed = global_seed, global_seed + rank
    random.seed(_local_seed)
    np.random.seed(_local_seed % (1 << 32))
    torch.manual_seed(_local_seed)


def get_global_seed() -> int:
    """The last seed of `init_seed`, the same on all ranks, or 0."""
    return _global_seed


def get_local_seed() -> int:
    """The seed of this rank: the global one plus the rank, or 0."""
    return _local_seed


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, Any]:
    """Joins torch's default group: `(rank, ranks, group of all)`.

    `MASTER_ADDR`, `MASTER_PORT` (8361), `WORLD_SIZE` (nodes, 1) and `RANK` (this node, 0) say where. On GPUs, scripts
    of DeepEP expect what it sets there: the GPU of the local rank is the current one, torch makes tensors of bfloat16
    on it by default, and NCCL joins the ranks' GPUs. Without GPUs, torch's defaults stay.
    """
    distributed = torch.distributed
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
    init_seed(seed)
    return rank, ranks, distributed.new_group(list(range(ranks)))


def dist_print(text: str = "", once_in_node: bool = False) -> None:
    """Prints on all ranks, or on the first of this node, in the order of the ranks."""
    distributed = torch.distributed
    local = int(os.environ.get("LOCAL_RANK", distributed.get_rank()))
    for rank in range(distributed.get_world_size()):
        if rank == distributed.get_rank() and (not once_in_node or local == 0):
            print(text, flush=True)
        distributed.barrier()


def _gigabits(path: Path) -> float:
    """The number that a file of the kernel begins with, or 0: links that are down have none."""
    try:
        return max(0.0, float(path.read_text().split()[0]))
    except (OSError, ValueError, IndexError):
        return 0.0


def get_rdma_gbs(nic_name: str = "mlx5_0") -> float:
    """GB/s of a NIC: the rate of its fastest port, else of any RDMA device, else of any network device.

    Never 0, because scripts divide by it: 1 where the kernel names none.
    """
    rdma = sorted(_SYSTEM.glob("infiniband/*/ports/*/rate"))
    named = [path for path in rdma if path.parts[-4] == nic_name]
    for paths in (named, rdma):
        if fastest := max(map(_gigabits, paths), default=0.0):
            return fastest / 8
    # In megabits.
    fastest = max(map(_gigabits, _SYSTEM.glob("net/*/speed")), default=0.0)
    return fastest / 8000 or 1.0


def get_nvlink_gbs(factor: float = 0.9) -> float:
    """GB/s of all NVLinks of the first GPU, times `factor`: as nvidia-smi lists them, or 0 without any."""
    try:
        words = ["nvidia-smi", "nvlink", "--status", "--id=0"]
        listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0.0
    return factor * sum(map(float, re.findall(r"Link \d+: *([\d.]+) GB/s", listed)))


def check_nvlink_connections(group: Any) -> None:
    """Does nothing: which GPUs reach each other is found out when a communicator opens."""
