"""The start of DeepEP's scripts: processes of torch in one group."""

import os
import random
import re
import socket
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from .._torch import torch
from ..buffers.base import get_logical_domain_size as get_logical_domain_size
from ..buffers.base import get_physical_domain_size as get_physical_domain_size

# The kernel describes its devices there.
_SYSTEM = Path("/sys/class")

# The word of a rank without one.
_NO_GPU = "none"

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


def _own_gpu() -> str:
    """The current GPU by a name that no other one has, whatever this process calls it; `none` without NCCL."""
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        return _NO_GPU
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    # Older versions of torch do not say it: then a process is taken to see all GPUs of its host.
    uuid = getattr(found, "uuid", None)
    return str(uuid or f"{socket.gethostname()} {torch.cuda.current_device()}")


def backend_of(store: Any, rank: int, ranks: int) -> str:
    """torch's backend for ranks that have chosen their GPUs, and meet in a store of torch. NCCL refuses two ranks on
    one GPU. How many GPUs a process sees does not say it: it may see its own alone."""
    store.set(f"tokenyard/gpu/{rank}", _own_gpu())
    names = {store.get(f"tokenyard/gpu/{other}").decode() for other in range(ranks)}
    if len(names) == ranks and _NO_GPU not in names:
        # NCCL starts with the first collective on GPUs. Objects go by gloo.
        return "cpu:gloo,cuda:nccl"
    return "gloo"


def join(init_method: str, rank: int = -1, ranks: int = -1) -> None:
    """Joins torch's default group, with the backend that fits the GPUs that its ranks have chosen."""
    store, rank, ranks = next(torch.distributed.rendezvous(init_method, rank, ranks))
    backend = backend_of(store, rank, ranks)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=ranks)


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, Any]:
    """Joins torch's default group: `(rank, ranks, group of all)`.

    `MASTER_ADDR`, `MASTER_PORT` (8361), `WORLD_SIZE` (nodes, 1) and `RANK` (this node, 0) say where. On GPUs, scripts
    of DeepEP expect what it sets there: the GPU of the local rank is the current one, torch makes tensors of bfloat16
    on it by default, and NCCL joins the ranks' GPUs, or gloo where ranks share one. Without GPUs, torch's defaults
    stay.
    """
    distributed = torch.distributed
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("cuda")
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", "8361"))
    nodes, node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    ranks_of_all = nodes * num_local_ranks
    join(f"tcp://{address}:{port}", node * num_local_ranks + local_rank, ranks_of_all)
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
