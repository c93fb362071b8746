"""DeepEP's first interface: `Buffer`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tokenyard
from tokenyard import errors

from .. import _C
from .._arrays import Tensor, arrays_of, has_array, invalid, to_write
from .._calls import halves, low_latency, normal, rows, streams
from .._calls.call import MOST_BYTES, judge_flags, judge_integers
from .._calls.tensors import on_stream
from .._dynamo import make_opaque
from .._hooks import Hook
from .._missing import refuse_missing
from .._pool import Pool
from .._tables import chunk_config
from .._torch import torch
from .._world import DEFAULT_WAITS
from ..utils.event import EventHandle, EventOverlap

# Arguments of the constructor that are flags, and those that are numbers of 64 bits.
_FLAGS = (
    "low_latency_mode",
    "allow_nvlink_for_low_latency_mode",
    "allow_mnnvl",
    "explicitly_destroy",
    "enable_shrink",
)
_INTEGERS = ("num_nvl_bytes", "num_rdma_bytes", "num_qps_per_rank")


class Runtime:
    """The calls of `buffer.runtime` that scripts make."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def get_num_rdma_ranks(self) -> int:
        return self._pool.domains

    def get_rdma_rank(self) -> int:
        return self._pool.rank // (self._pool.ranks // self._pool.domains)

    def is_available(self) -> bool:
        return not self._pool.is_destroyed


class Buffer:
    """Normal and low latency calls of DeepEP V1.

    To construct it is collective, and so are `dispatch`, `combine` and their relatives: all ranks make the same calls
    in the same order. `group` is a process group of torch (or a tokenyard.World), `comm` a communicator of mpi4py; with
    neither, the launcher's variables say who takes part. Byte counts stay attributes; memory is sized by the calls.
    """

    num_sms: int = 20
    # Whether the caller has chosen it.
    _has_chosen_sms: bool = False

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
        # Forks have them. The ranks that share a host are found here.
        ignored = ("use_fabric", "allow_nvlink_for_normal_mode", "is_intranode")
        refuse_missing("Buffer", others, ignored)
        given = locals()
        wrong = judge_integers(given, _INTEGERS, MOST_BYTES) or judge_flags(given, _FLAGS)
        self._pool = Pool(group, comm, replace(DEFAULT_WAITS, wrong=wrong))
        self.group = group
        self.rank, self.group_size = self._pool.rank, self._pool.ranks
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = given["low_latency_mode"]
        self.explicitly_destroy = given["explicitly_destroy"]
        self.enable_shrink = given["enable_shrink"]
        self.runtime = Runtime(self._pool)

    def destroy(self) -> None:
        """Closes it on all ranks. Collective."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self._pool.destroy()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True."""
        return _C.is_sm90_compiled()

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Multiprocessors of the normal calls that follow, on GPUs; even. Without it the kernel set chooses."""
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms
        Buffer._has_chosen_sms = True

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

    def get_comm_stream(self) -> Any:
        """The stream of asynchronous calls; None on the CPU, where there are no streams."""
        return streams.gpu_stream(self._pool)

    def _chosen_sms(self) -> int:
        """The number of `set_num_sms`, where the kernel set lets a caller choose; else 0."""
        return self._pool.sms_of(Buffer.num_sms if Buffer._has_chosen_sms else 0)

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
        return normal.layout(normal.LayoutCall(locals()))

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
        call = normal.DispatchCall(locals())
        return on_stream(normal.dispatch if handle is None else normal.replay, call)

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
        return on_stream(rows.combine, normal.CombineCall(locals()))

    internode_dispatch = dispatch
    internode_combine = combine

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """A barrier. No call here leaves anything that another would have to clean. Collective."""
        if self._pool.on_device and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._pool.barrier()

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        **others: Any,
    ) -> tuple[Any, Tensor, tuple[Any, ...], EventOverlap, Callable[[], None] | None]:
        """Sends tokens to their experts: `(packed_recv_x, recv_count, handle, event, hook)`.

        - `x` `[T, H]`, `topk_idx` `[T, K]` int64, T at most M = `num_max_dispatch_tokens_per_rank`.
        - `packed_recv_x`: `[E / R, R * M, H]`; with `use_fp8` `(FP8, scales)`, scales `[E / R, R * M, H / 128]`
          float32, or four in an int32 with `use_ue8m0`, column-major. `recv_count` `[E / R]` int32: rows
          that are filled.
        - `return_recv_hook`: the outputs are filled when the hook was called.
        - `dispatch_wait_recv_cost_stats` `[R]` int64: nanoseconds of waiting for each rank are added.

        Collective, as is the hook. Raises InvalidInputError here and RefusedError elsewhere; with a hook, the others
        raise where they call theirs.
        """
        call = low_latency.DispatchCall(locals())
        dispatch = low_latency.dispatch if self._pool.on_device else halves.dispatch
        return on_stream(dispatch, call)

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """Brings the experts' rows back, and sums them with their weights: `(combined_x, event, hook)`.

        - `x` `[E / R, R * M, H]`; with `zero_copy` the buffer of `get_next_low_latency_combine_buffer` is read instead.
        - `topk_idx` `[T, K]`: as dispatched; -1 leaves an expert out. `topk_weights`: `[T, K]` float32.
        - `combine_wait_recv_cost_stats`: as in `low_latency_dispatch`.
        - `out`: `[T, H]` of the type of `x`.
        - `use_logfmt` rounds each rank's sum, and sends it in ten bits a value where its values allow that: bfloat16 of
          a multiple of 512 channels, in one domain, without `zero_copy`.

        Sums are made in float32 and rounded once. Collective; errors are those of `low_latency_dispatch`.
        """
        return on_stream(low_latency.combine, low_latency.CombineCall(locals()))

    def get_next_low_latency_combine_buffer(self, handle: tuple[Any, ...]) -> Tensor:
        """`[E / R, R * M, H]` bfloat16: rows written there are what a combine with `zero_copy` reads."""
        buffer = low_latency.combine_buffer(handle)
        is_of_arrays = not self._pool.on_device and has_array(handle)
        return arrays_of(buffer) if is_of_arrays else buffer

    def get_local_buffer_tensor(
        self,
        dtype: Any,
        size: Any = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> Tensor:
        """Memory of `num_rdma_bytes` or `num_nvl_bytes`, as elements of `dtype`. No call reads or writes it."""
        most = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        device = self._pool.device
        memory = torch.zeros(most - offset, dtype=torch.uint8, device=device).view(dtype)
        return memory if size is None else memory[: size.numel()].view(size)

    @property
    def left_out(self) -> Tensor:
        """As `ElasticBuffer.left_out`."""
        return self._pool.gaps.count

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes 1 for each rank that is left out, else 0, to `[R]` int32."""
        assert self.enable_shrink, "enable_shrink must be set"
        self._expect_no_capture("low_latency_query_mask_buffer")
        lost = self._left_out()
        status = to_write("low_latency_query_mask_buffer", "mask_status", mask_status)
        status.zero_()
        status[lost] = 1

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leaves a rank out of this rank's low-latency calls; or takes it back, which is collective.

        Needs a config with `on_failure = "mask"` and low-latency kernels of a GPU, and a call before.
        """
        assert self.enable_shrink, "enable_shrink must be set"
        given: dict[str, Any] = {"mask": mask}
        wrong, mask = judge_flags(given, ("mask",)), given["mask"]
        if wrong is not None:
            raise invalid("low_latency_update_mask_buffer", wrong, self.rank)
        for communicator in self._masking("low_latency_update_mask_buffer"):
            if mask:
                communicator.mask_rank(rank_to_mask)
            else:
                communicator.unmask_rank(rank_to_mask)
        change = self._pool.masked.add if mask else self._pool.masked.discard
        change(rank_to_mask)

    def low_latency_clean_mask_buffer(self) -> None:
        """Takes all ranks back that live. Collective; a rank that was lost does not come back to a buffer."""
        assert self.enable_shrink, "enable_shrink must be set"
        for communicator in self._masking("low_latency_clean_mask_buffer"):
            communicator.clear_masks()
        self._pool.masked.clear()

    def _masking(self, operation: str) -> list[tokenyard.Communicator]:
        """The communicators of low-latency calls, so that a mask holds for all of them."""
        self._expect_no_capture(operation)
        found = self._pool.decoding()
        if not found:
            raise invalid(
                operation,
                "found no call of the buffer before; expected a low-latency dispatch, which masks are for",
                self._pool.rank,
            )
        return found

    def _expect_no_capture(self, operation: str) -> None:
        """The host reads and writes masks: a graph would do neither when it is replayed."""
        if self._pool.is_capturing():
            raise invalid(
                operation,
                f"{operation}: found a graph being captured; expected this call before the capture, or between "
                "replays, which follow the masks of their time",
                self._pool.rank,
                "call it outside of the capture",
            )

    def _left_out(self) -> list[int]:
        left_out: set[int] = set()
        for communicator in self._pool.decoding():
            try:
                left_out.update(communicator.masked_ranks())
            except errors.UnsupportedError:
                # Only lost ranks are left out there.
                left_out.update(communicator.lost_ranks())
        return sorted(left_out)


make_opaque(Buffer, Hook, EventHandle, EventOverlap)
