"""The names of DeepEP's native module that scripts use."""

from typing import Any

from ._torch import torch
from .utils.event import EventHandle as EventHandle
from .utils.math import CHANNELS, align

topk_idx_t: Any = torch.int64

_ALLOCATION_ALIGNMENT = 2 << 20
_RDMA_ALIGNMENT = 64
_TMA_ALIGNMENT = 32
_MOST_TOPK = 128
_ID_BYTES = 8


class Config:
    """Tuning of DeepEP's kernels. Nothing here depends on it, but the size hints, which callers compare, do."""

    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        rdma_send, rdma_recv = num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens
        rdma_recv = align(rdma_recv, rdma_send)
        if not num_max_nvl_chunked_send_tokens < num_max_nvl_chunked_recv_tokens:
            raise ValueError(
                f"num_max_nvl_chunked_send_tokens: found {num_max_nvl_chunked_send_tokens}; expected below "
                f"num_max_nvl_chunked_recv_tokens = {num_max_nvl_chunked_recv_tokens}"
            )
        if rdma_send > rdma_recv // 2:
            raise ValueError(
                f"num_max_rdma_chunked_send_tokens: found {rdma_send}; expected at most half of "
                f"num_max_rdma_chunked_recv_tokens = {rdma_recv}"
            )
        self.num_sms = num_sms
        self.num_max_nvl_chunked_send_tokens = num_max_nvl_chunked_send_tokens
        self.num_max_nvl_chunked_recv_tokens = num_max_nvl_chunked_recv_tokens
        self.num_max_rdma_chunked_send_tokens = rdma_send
        self.num_max_rdma_chunked_recv_tokens = rdma_recv

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes that DeepEP would take for rows inside a node."""
        rdma_ranks = max(num_ranks // 8, 1)
        beside = 8 + _MOST_TOPK * (_ID_BYTES + 4 + 4)
        row = self.num_max_nvl_chunked_recv_tokens * (hidden_bytes + beside)
        return align(self.num_sms // 2 * min(num_ranks, 8) * ((2 * rdma_ranks + 3) * 4 + row), 128)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes that DeepEP would take for rows between nodes: 0 for one node."""
        if num_ranks <= 8:
            return 0
        beside = _MOST_TOPK * (_ID_BYTES + 4 + 4) + 16
        row = 2 * self.num_max_rdma_chunked_recv_tokens * (hidden_bytes + beside)
        return align(self.num_sms // 2 * (num_ranks // 8) * ((8 * 2 + 2) * 2 * 4 + row), 128)


def is_sm90_compiled() -> bool:
    """True, so that callers do not take other ways for older GPUs."""
    return True


def get_low_latency_rdma_size_hint(
    num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
) -> int:
    """Bytes that DeepEP would take for low latency calls."""
    tokens = num_max_dispatch_tokens_per_rank
    scales = hidden // CHANNELS * 4
    dispatch = 16 + max(2 * hidden, hidden + scales)
    combine = scales + 2 * hidden
    send = max(tokens * dispatch, num_experts * tokens * combine)
    recv = num_experts * tokens * max(dispatch, combine)
    total = 2 * (send + recv + align(4 * num_experts, 128))
    return (total + 128) // 128 * 128


def get_num_allocation_alignment() -> int:
    """Sizes of buffers are multiples of this many bytes."""
    return _ALLOCATION_ALIGNMENT


def get_num_rdma_alignment() -> int:
    """Records of tokens in DeepEP 2.5 are multiples of this many bytes."""
    return _RDMA_ALIGNMENT


def get_num_tma_alignment() -> int:
    """Rows in DeepEP's records are multiples of this many bytes."""
    return _TMA_ALIGNMENT


# Their names of each buffer, in 2.1 and 2.5.
get_elastic_buffer_alignment = get_num_allocation_alignment
get_ep_buffer_alignment = get_num_allocation_alignment
