"""UCCL's module `utils`: the start and the end of its scripts, and their helpers, most of which are DeepEP's."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenyard.deep_ep._arrays import invalid
from tokenyard.deep_ep._torch import torch
from tokenyard.deep_ep.utils import testing
from tokenyard.deep_ep.utils.envs import check_nvlink_connections as check_nvlink_connections
from tokenyard.deep_ep.utils.envs import join
from tokenyard.deep_ep.utils.event import EventOverlap as EventOverlap
from tokenyard.deep_ep.utils.math import calc_diff as calc_diff
from tokenyard.deep_ep.utils.math import create_grouped_scores as create_grouped_scores
from tokenyard.deep_ep.utils.math import hash_tensor as hash_tensor
from tokenyard.deep_ep.utils.math import inplace_unique as inplace_unique
from tokenyard.deep_ep.utils.math import per_token_cast_back as per_token_cast_back
from tokenyard.deep_ep.utils.math import per_token_cast_to_fp8 as per_token_cast_to_fp8
from tokenyard.deep_ep.utils.testing import bench_kineto as bench_kineto

from .ep import EventHandle as EventHandle

# The kernel lists RDMA devices there.
_RDMA_DEVICES = Path("/sys/class/infiniband")


def init_dist(local_rank: int, num_local_ranks: int) -> tuple[int, int, Any]:
    """Joins torch's default group by the variables of torchrun: `(rank, ranks, group of all)`.

    On GPUs the one of the local rank becomes the current one, torch makes tensors of bfloat16 on it by default, and
    NCCL joins the ranks' GPUs, or gloo where ranks share one. Without GPUs, torch's defaults stay.
    """
    distributed = torch.distributed
    if torch.cuda.is_available():
        gpu = local_rank % torch.cuda.device_count()
        torch.cuda.set_device(gpu)
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device(f"cuda:{gpu}")
    join("env://")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    return rank, ranks, distributed.new_group(list(range(ranks)))


init_dist_under_torchrun = init_dist


def detect_ib_hca() -> str | None:
    """The first RDMA device of this host, of NVIDIA or else of Intel; None without either."""
    names = sorted(path.name for path in _RDMA_DEVICES.glob("*"))
    return next(
        (name for kind in ("mlx5", "irdma") for name in names if name.startswith(kind)), None
    )


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Callable[[], Any] | None = None,
) -> tuple[float, float, float]:
    """Seconds of a call on this rank: mean, least, most; see `deep_ep.utils.testing.bench`."""
    return testing.bench(fn, num_warmups, num_tests, post_fn)


class Proxy:
    """The place of UCCL's thread of the host that drives a NIC.

    Transports of tokenyard drive theirs themselves, so the calls of a script change nothing.
    """

    def __init__(self) -> None:
        self.is_running = True

    def calculate_and_set_dispatch_recv_data_offset(
        self, num_tokens: int, hidden: int, num_experts: int
    ) -> None:
        """Does nothing: calls know their sizes."""

    def get_atomic_buffer_ptr(self) -> int:
        """0: there is no such memory."""
        return 0

    def set_atomic_buffer_ptr(self, pointer: int) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Ends it; again is no error."""
        self.is_running = False


def initialize_uccl(
    scratch_ptr: Any,
    scratch_nbytes: int,
    rank: int,
    num_ranks: int,
    group: Any,
    num_experts: int = 0,
    is_intranode: bool | None = None,
    use_normal_mode: bool = False,
    rdma_buffer_is_host_allocated: bool = False,
    object_group: Any = None,
) -> tuple[list[Proxy], None]:
    """The proxies, of which there is one, and None in the place of UCCL's workers. Of the memory nothing is used.

    Local. Raises InvalidInputError where `rank` and `num_ranks` are not those of the group.
    """
    ranks = group.ranks if hasattr(group, "ranks") else group.size()
    own = group.rank if hasattr(group, "ranks") else group.rank()
    if (rank, num_ranks) != (own, ranks):
        raise invalid(
            "initialize_uccl",
            f"rank, num_ranks: found {rank}, {num_ranks}; expected {own}, {ranks}, those of the group",
        )
    return [Proxy()], None


def destroy_uccl(proxies: Sequence[Proxy], workers: None = None) -> None:
    """Stops the proxies; again is no error."""
    for proxy in proxies:
        proxy.stop()
