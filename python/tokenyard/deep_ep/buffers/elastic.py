"""DeepEP's second interface, by its names of version 2.1: `ElasticBuffer`."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from .. import _C
from .._arrays import Tensor
from .._calls import elastic, rows
from .._calls.tensors import on_stream
from .._dynamo import make_opaque
from .._ops import engram, gather, pipe
from .._torch import torch
from ..utils.event import EventHandle, EventOverlap
from ..utils.math import align
from .base import BufferBase, ExpertBuffer, ranks_of
from .base import get_logical_domain_size as get_logical_domain_size
from .base import get_physical_domain_size as get_physical_domain_size
from .handle import EPHandle as EPHandle


class ElasticBuffer(ExpertBuffer):
    """Dispatch and combine of DeepEP V2, and its operations beside them: messages, all-gathers, and entries.

    To construct it is collective, and so are `dispatch`, `combine` and `barrier`: all ranks make the same calls in the
    same order. `group` is a process group of torch (or a tokenyard.World). Rows always come in the order of their
    source rank and token, whatever `deterministic` says. Other operations have memory of their own, from their first
    call on.
    """

    # Rows of a record are multiples of 32 bytes.
    _RECORD_UNIT = 32

    def __init__(
        self,
        group: Any = None,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        **others: Any,
    ) -> None:
        given = locals()
        self._open(given, ("num_bytes", "num_cpu_bytes"))
        self._messages = pipe.Messages(self._pool, "pp_set_config")
        self._gathers = gather.Gathers(self._pool)
        self._engram = engram.Engram(self._pool, self.num_bytes - given["num_cpu_bytes"])

    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """Returns once all ranks have called it. Collective.

        On GPUs it is in the order of a stream, that of asynchronous calls or the current one, which waits for it in
        both cases. It returns at once, but for `with_cpu_sync`: then all work of the GPU has ended before it and
        behind it.
        `sequential`, an order of DeepEP's kernels between levels, makes no difference.
        """
        elastic.barrier(elastic.BarrierCall(locals()))

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        **others: Any,
    ) -> tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Sends tokens to the ranks of their experts; with `handle`, by the routing of an earlier dispatch.

        - `x`: `[T, H]` bfloat16, float16 or float32, or (FP8 `[T, H]`, scales `[T, S]` of 4 bytes, any strides).
        - `topk_idx` `[T, K]` int64; `topk_weights` `[T, K]` float32, also with a handle.
        - `num_max_tokens_per_rank`: M of this call, equal on all ranks; else that of the buffer.
        - `do_expand`: a row per (token, local expert), grouped by expert, starts at multiples of `expert_alignment`,
          padding zero; else a row per token with ids, local or -1.
        - `do_cpu_sync=False`: outputs have room for the most that can arrive.
        - `num_sms`: multiprocessors of the dispatch on GPUs, and of the calls of its handle that name none; 0, or the
          number of `get_theoretical_num_sms`, names none: the kernel set chooses.

        Returns `(recv_x, recv_topk_idx, recv_topk_weights, handle, event)`: ids None where expanded, and weights `[X]`.
        Collective. Raises InvalidInputError here and RefusedError elsewhere, FullError: nothing was moved.
        """
        return on_stream(elastic.dispatch, elastic.DispatchCall(locals()))

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Brings rows back and sums them per token, unweighted: `(combined_x, combined_topk_weights, event)`.

        - `x`: as many rows as the dispatch gave, flat or expanded; `bias`: none, one or two `[T, H]`, added first.
        - `topk_weights`: `[N, K]`, or `[X]` expanded; they go back to their tokens, `[T, K]`, 0 where the id is -1.
        - `num_sms`: multiprocessors of this combine on GPUs; 0 means those of its dispatch.

        Copies on one rank are summed in k order and rounded, then ranks in the order of their last k; without
        `allow_multiple_reduction` expanded rows have one sum in k order, which takes a combine for each k.
        Collective; errors are those of `dispatch`.
        """
        return on_stream(rows.combine, elastic.CombineCall(locals()))

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Bytes that DeepEP would take for `pp_send` and `pp_recv`."""
        unit = _C.get_num_allocation_alignment()
        return pipe.size_hint(num_max_tensor_bytes, num_max_inflight_tensors, unit)

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Makes room for messages between two ranks, of which 1 to 16 may be sent and not received. Collective.

        Another call replaces what was there, and messages that were not received. Equal on all ranks.
        """
        self._messages.set_config(num_max_tensor_bytes, num_max_inflight_tensors)

    def pp_send(self, t: Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Sends a contiguous tensor of any type to any other rank, in the order of calls. It may be changed afterwards.

        The host waits: for the work that is queued on `t`, and while as many messages as may be are not received.
        """
        self._messages.send("pp_send", t, dst_rank_idx)

    def pp_recv(self, t: Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Waits on the host for the next message of a rank, and writes it to `t`, contiguous, of as many bytes."""
        self._messages.recv("pp_recv", t, src_rank_idx)

    @staticmethod
    def get_agrs_num_max_session_bytes(group: Any, shapes: Any, dtype: Any) -> int:
        """Bytes of a session's results for tensors of these shapes, or of this one."""
        return gather.session_bytes(ranks_of(group), shapes, dtype)

    @staticmethod
    def get_agrs_buffer_size_hint(group: Any, num_max_session_bytes: int) -> int:
        """Bytes that DeepEP would take for sessions."""
        return align(num_max_session_bytes, _C.get_num_allocation_alignment())

    def agrs_set_config(
        self, num_max_session_bytes: int, num_max_all_gathers_per_session: int
    ) -> None:
        """Makes room for sessions of at most 32 all-gathers, outside of any. Collective; equal on all ranks."""
        self._gathers.set_config(num_max_session_bytes, num_max_all_gathers_per_session)

    def create_agrs_session(self) -> None:
        """Begins a session: `all_gather` is called inside of one. All ranks do."""
        self._gathers.create()

    def destroy_agrs_session(self) -> None:
        """Ends a session. Waits for the results whose handles were not called."""
        self._gathers.destroy()

    def agrs_new_session(self, enabled: bool = True) -> AbstractContextManager[None]:
        """A session for `with`. Without `enabled` it does nothing."""
        return self._gathers.session(enabled)

    def agrs_get_inplace_tensor(self, shapes: Any, dtype: Any) -> Any:
        """A tensor, or for several shapes a tuple: this rank's parts of results, to fill before their `all_gather`."""
        return self._gathers.in_place(shapes, dtype)

    def all_gather(self, t: Tensor | Sequence[Tensor]) -> tuple[Any, ...]:
        """Gives each rank the tensors of all: `(gathered, handle)`, or for a sequence `(*gathered, handle)`.

        Collective, and in a session.
        `gathered` has the shape `[R, *shape]`, and is there once `handle()` was called, for the stream that is current
        then. `t` is contiguous, of any type, and stays as it is until then.
        """
        return self._gathers.all_gather(t)

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int, hidden: int, num_max_tokens_per_rank: int, dtype: Any = torch.bfloat16
    ) -> tuple[int, int]:
        """Bytes of `num_bytes` that are for what a fetch gives, and those that are `num_cpu_bytes`."""
        unit, entry = _C.get_num_allocation_alignment(), align(hidden * dtype.itemsize, 32)
        return align(entry * num_max_tokens_per_rank, unit), align(entry * num_entries, unit)

    def engram_write(self, storage: Tensor, sf: Tensor | None = None) -> None:
        """Writes this rank's entries, `[n, H]` of bfloat16 or float8_e4m3fn, in place of those before. Collective.

        - All ranks give as many entries of the same length and type, while none has a fetch that waits.
        - `sf`: for FP8 the scales of all ranks' entries, `[R * n, S]` of float32 or int32, held as they are.
        """
        self._engram.write(storage, sf)

    def engram_fetch(
        self, indices: Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
    ) -> Callable[[], tuple[Tensor, Tensor | None]]:
        """Reads entries of any rank: index `rank * n + entry`, `[T, G]` int32. This rank alone.

        Returns a hook, which waits and gives `(data, sf)`: `[T, G * H]`, and for FP8 scales `[T, G * S]`, else None.
        `use_tma_aligned_col_major_sf` gives these the strides `(1, T)`, with T rounded up to 4.
        """
        return self._engram.fetch(indices, bool(use_tma_aligned_col_major_sf))


make_opaque(ElasticBuffer, BufferBase, ExpertBuffer, EPHandle, EventHandle, EventOverlap)
