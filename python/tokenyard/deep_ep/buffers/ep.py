"""DeepEP's second interface, by its names of version 2.5: `EPBuffer`."""

from typing import Any

from .._arrays import Tensor
from .._calls import elastic, ep
from .._dynamo import make_opaque
from .._missing import absent
from ..utils.event import EventHandle, EventOverlap
from .base import BufferBase, ExpertBuffer
from .handle import EPHandle


class EPBuffer(ExpertBuffer):
    """Dispatch and combine of DeepEP 2.5.

    To construct it is collective, and so are `dispatch`, `combine`, `barrier`, and to wait for the event of a call with
    `defer_epilogue`: all ranks do the same in the same order. `group` is a process group of torch (or a
    tokenyard.World). Rows always come in the order of their source rank and token, whatever `deterministic` says.
    """

    # Records go between hosts in units of 64 bytes.
    _RECORD_UNIT = 64

    def __init__(
        self,
        group: Any = None,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: Any = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        **others: Any,
    ) -> None:
        others["lb_allocation_plan_or_num_bytes"] = lb_allocation_plan_or_num_bytes
        self._open(locals(), ("num_bytes",))
        self.num_lb_bytes = 0

    @property
    def context(self) -> "BufferBase | None":
        """As `main_context`."""
        return self.main_context

    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
    ) -> None:
        """Returns once all ranks have called it. Collective.

        On GPUs it is in the order of the current stream, and with `wait_comm_stream` behind that of asynchronous calls.
        It returns at once, but for `with_cpu_sync`: then all work of the GPU has ended before it and behind it.
        `sequential`, an order of DeepEP's kernels between levels, makes no difference.
        """
        elastic.barrier(ep.BarrierCall(locals()))

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
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
        **others: Any,
    ) -> tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap] | EventOverlap:
        """As `ElasticBuffer.dispatch`, with two differences.

        - `do_handle_copy` must be False: the handle has the caller's `topk_idx`, which must stay as it is while the
          handle is in use. A call with a handle whose ids were changed is refused, where torch counts changes.
        - `defer_epilogue`, with `async_with_compute_stream`: rows are sent, and only the event is returned. To wait for
          it (`wait()`, or `current_stream_wait()`) receives them, waits for their counts, and returns
          `(recv_x, recv_topk_idx, recv_topk_weights, handle)`; a second time None, or the same error. Until then `x`
          and the others must stay as they are. At most four such events may wait: one more call is refused, and says
          for which of them to wait.

        Errors are those of `ElasticBuffer.dispatch`; with `defer_epilogue` they are raised by the wait, too, also where
        `async_with_compute_stream` is missing.
        """
        return ep.dispatch(ep.DispatchCall(locals()))

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None, EventOverlap] | EventOverlap:
        """As `ElasticBuffer.combine`; with `defer_epilogue` and `async_with_compute_stream` only the event is returned.

        To wait for it makes the combine, raises what is wrong with it, and returns `(combined_x,
        combined_topk_weights)`, a second time None, or the same error. Until then `x` and the others must stay as they
        are, but `bias` may be written.
        """
        return ep.combine(ep.CombineCall(locals()))

    lb_get_theoretical_num_sms = absent("lb_get_theoretical_num_sms", "EPBuffer")
    lb_prefetch_weights = absent("lb_prefetch_weights", "EPBuffer")
    lb_reduce_grads = absent("lb_reduce_grads", "EPBuffer")


make_opaque(EPBuffer, BufferBase, ExpertBuffer, EPHandle, EventHandle, EventOverlap)
