"""UCCL's module `buffer`: its `Buffer`, which is that of DeepEP's first interface."""

from typing import Any

from tokenyard import deep_ep
from tokenyard.deep_ep._arrays import Tensor
from tokenyard.deep_ep._torch import torch

from .utils import Proxy, destroy_uccl, initialize_uccl

# UCCL's arguments behind the group, in its order: DeepEP has another one in the last place.
_ARGUMENTS = (
    "num_nvl_bytes",
    "num_rdma_bytes",
    "low_latency_mode",
    "num_qps_per_rank",
    "allow_nvlink_for_low_latency_mode",
    "allow_mnnvl",
    "explicitly_destroy",
    "is_intranode",
)


class Buffer(deep_ep.Buffer):
    """Normal and low latency calls by UCCL's names: those of `deep_ep.Buffer`, and some more around them.

    Arguments behind the group come by position, in the order of UCCL's own class, or by name. Scripts of 2025 give the
    address of their own memory before them, or as `rdma_buffer_ptr`: rows lie in memory of tokenyard's, so it is not
    read.
    """

    def __init__(
        self, group: Any, *sizes: Any, rdma_buffer_ptr: int | None = None, **options: Any
    ) -> None:
        if _has_address(sizes, options):
            rdma_buffer_ptr, *sizes = sizes  # type: ignore[assignment]
        if len(sizes) > len(_ARGUMENTS):
            raise TypeError(
                f"Buffer: found {len(sizes)} arguments behind the group; expected at most {len(_ARGUMENTS)}: "
                f"{', '.join(_ARGUMENTS)}"
            )
        super().__init__(group, **dict(zip(_ARGUMENTS, sizes, strict=False)), **options)
        self.proxies, self.workers = initialize_uccl(
            rdma_buffer_ptr, self.num_rdma_bytes, self.rank, self.group_size, group
        )

    @property
    def scratch(self) -> Tensor:
        """`[num_rdma_bytes]` uint8, made when it is asked for. No call reads or writes it."""
        return self.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True)

    def connect_atomic_buffer(self, proxy: Proxy) -> None:
        """Does nothing: counters are in memory of tokenyard's."""

    def reset_rdma_buffer(self) -> None:
        """Does nothing: no call leaves anything that another would have to clean."""

    def destroy(self) -> None:
        """Closes it on all ranks. Collective."""
        super().destroy()
        destroy_uccl(self.proxies, self.workers)


def _has_address(sizes: tuple[Any, ...], options: dict[str, Any]) -> bool:
    """Whether an address comes first: then the third is a number of bytes, not whether the calls are of low latency, or
    the name of the last one is given, too."""
    if len(sizes) > 2 and not isinstance(sizes[2], bool):
        return True
    return 0 < len(sizes) <= len(_ARGUMENTS) and _ARGUMENTS[len(sizes) - 1] in options
