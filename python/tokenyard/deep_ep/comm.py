"""Functions of DeepEP 2.5 beside its buffers, for their communication."""

from typing import Any

from ._missing import absent
from .buffers import base
from .buffers.base import get_logical_domain_size, get_physical_domain_size

__all__ = [
    "barrier",
    "destroy_all_managed_nccl_comm",
    "get_comm_stream",
    "get_logical_domain_size",
    "get_nccl_comm_handle",
    "get_physical_domain_size",
]


def barrier(
    buffer: Any,
    wait_comm_stream: bool = True,
    with_cpu_sync: bool = False,
    sequential: bool = True,
    context_idx: int | None = None,
) -> None:
    """As `EPBuffer.barrier`, of any buffer; of a `BucketBuffer` the group in place `context_idx`. Collective."""
    chosen = buffer if context_idx is None else buffer.contexts[context_idx]
    base.barrier(chosen, wait_comm_stream, with_cpu_sync, sequential)


def get_comm_stream(buffer: Any) -> Any:
    """The stream of a buffer's asynchronous calls; None on the CPU."""
    return buffer.get_comm_stream()


def destroy_all_managed_nccl_comm() -> None:
    """Does nothing: there are no communicators of NCCL."""


get_nccl_comm_handle = absent("get_nccl_comm_handle", "deep_ep.comm")
