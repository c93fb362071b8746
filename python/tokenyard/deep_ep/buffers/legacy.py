"""DeepEP's first interface: `Buffer`."""

import logging
from typing import Any

from .. import _C, _normal
from .._arrays import Tensor
from .._engine import Engine
from .._missing import refuse_missing
from .._tables import chunk_config
from ..utils.event import EventHandle, EventOverlap

_log = logging.getLogger("tokenyard.deep_ep")


class Runtime:
    """What scripts ask of `buffer.runtime`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def get_num_rdma_ranks(self) -> int:
        return self._engine.domains

    def get_rdma_rank(self) -> int:
        return self._engine.rank // (self._engine.ranks // self._engine.domains)

    def is_available(self) -> bool:
        return not self._engine.is_destroyed


class Buffer:
    """Normal and low latency calls of DeepEP V1.

    To construct it is collective, and so are `dispatch`, `combine` and their relatives: all ranks make the same calls
    in the same order. `group` is a process group of torch (or a tokenyard.World), `comm` a communicator of mpi4py; with
    neither, the launcher's variables say who takes part. Byte counts stay attributes; memory is sized by the calls.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        **others: Any,
    ) -> None:
        refuse_missing("Buffer", others, ("use_fabric", "allow_nvlink_for_normal_mode"))
        self._engine = Engine(group, comm)
        self.group = group
        self.rank, self.group_size = self._engine.rank, self._engine.ranks
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self.runtime = Runtime(self._engine)

    def destroy(self) -> None:
        """Closes it on all ranks. Collective."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self._engine.destroy()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True."""
        return _C.is_sm90_compiled()

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Kept as an attribute. No call takes SMs on the CPU."""
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event behind everything that was called."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that DeepEP would take."""
        return _C.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        )

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> _C.Config:
        """A Config for dispatch. Any number of ranks has one."""
        return chunk_config("dispatch", num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> _C.Config:
        """A Config for combine. Any number of ranks has one."""
        return chunk_config("combine", num_ranks, Buffer.num_sms)

    def get_comm_stream(self) -> None:
        """None: there are no streams on the CPU."""

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """How many tokens go where: `[R]` and `[domains]` int32 or None, `[E]` int32, `[T, R]` bool, the event.

        Local. Raises InvalidInputError.
        """
        layout = _normal.layout(self._engine, topk_idx, num_experts)
        return (*layout, _normal.finished(async_finish))

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: tuple[Tensor, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: _C.Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        **others: Any,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, tuple[Any, ...] | None, Any]:
        """Sends tokens to the ranks of their experts; with `handle`, by the routing of an earlier dispatch.

        - `x`: `[T, H]` bfloat16, float16 or float32, or (FP8 `[T, H]`, scales `[T, S]` of 4 bytes, any strides).
        - `topk_idx` `[T, K]` int64 and `topk_weights` `[T, K]` float32, or neither: then `is_token_in_rank` routes.
        - `num_worst_tokens`: give that many rows, ids -1 behind those that arrived, and no list; at least R * T.

        Returns `(recv_x, recv_topk_idx, recv_topk_weights, num_recv_tokens_per_expert_list, handle, event)`: rows by
        source rank, then source token; ids local, or -1, where the weight is 0. With `handle` all but the rows and the
        event are None. Collective. Raises InvalidInputError here and RefusedError elsewhere, FullError: nothing moved.
        """
        refuse_missing("Buffer.dispatch", others, ())
        call = _normal.DispatchCall(
            x=x,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_tokens_per_rank=num_tokens_per_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=num_tokens_per_expert,
            expert_alignment=expert_alignment,
            num_worst_tokens=num_worst_tokens,
        )
        if handle is not None:
            recv_x = _normal.replay(self._engine, call, handle)
            return recv_x, None, None, None, None, _normal.finished(async_finish)
        return (*_normal.dispatch(self._engine, call), _normal.finished(async_finish))

    def combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: _C.Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Brings rows back and sums them per token, unweighted: `(combined_x, combined_topk_weights, event)`.

        - `x`: the rows of the dispatch, `[N, H]`; `bias`: none, one or two `[T, H]` of its type, added first.
        - `topk_weights`: `[N, K]` float32; summed over the ranks that got the token, into `[T, K]`.

        Collective. Errors are those of `dispatch`.
        """
        refuse_missing("Buffer.combine", others, ())
        combined = _normal.combine(self._engine, x, handle, topk_weights, bias)
        return (*combined, _normal.finished(async_finish))

    internode_dispatch = dispatch
    internode_combine = combine
