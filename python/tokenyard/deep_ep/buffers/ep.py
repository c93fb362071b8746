"""DeepEP's second interface, by its names of version 2.5: `EPBuffer`."""

from collections.abc import Sequence
from typing import Any

from .. import _C, _world
from .._arrays import Refusal, Tensor, invalid, reason
from .._calls import elastic, ep
from .._calls.call import MOST_BYTES, expect_integer
from .._dynamo import make_opaque
from .._ops.replicas import PrefetchCall, ReduceCall, Redundancy
from .._torch import torch
from ..utils.event import EventHandle, EventOverlap
from .allocator import BufferAllocator
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
        lb_allocation_plan_or_num_bytes: BufferAllocator | int = 0,
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
        plan, wrong = lb_allocation_plan_or_num_bytes, None
        try:
            self.num_lb_bytes = _lb_bytes(plan)
        except Refusal as refusal:
            wrong = str(refusal)
        self._open(locals(), ("num_bytes",), wrong)
        self._redundancy = Redundancy(self._pool)
        # Of redundant experts, which may lie anywhere else, too.
        self.lb_storage = self._make_lb_storage()
        if isinstance(plan, BufferAllocator):
            plan.materialize(self.lb_storage)

    def _make_lb_storage(self) -> Tensor:
        """Memory of torch. Collective: where a rank has none left, all raise."""
        storage, failure = None, None
        try:
            storage = torch.empty(self.num_lb_bytes, dtype=torch.uint8, device=self._pool.device)
        except Exception as error:
            failure = invalid("make buffer", f"lb_allocation_plan_or_num_bytes: {reason(error)}")
        _world.expect_settings(self._pool.world, failure)
        return storage

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

    def lb_get_theoretical_num_sms(self) -> int:
        """0: no multiprocessor is held while weights travel."""
        return 0

    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Tensor | Sequence[Tensor],
        expert_weights: Tensor | Sequence[Tensor],
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: EventHandle | None = None,
    ) -> EventOverlap:
        """Copies weights of experts to the slots of other ranks of their domain. Collective.

        - `redundant_expert_weights`: this rank's slots, `[C, ...]`, or a list of up to 64 such tensors.
        - `expert_weights`: of its experts, `[El, ...]`, or a list of as many tensors, with as many bytes for each
          expert. Tensors are contiguous, of any type.
        - `redundancy_mapping`: `[ranks of a domain, C]` int32, the same on all of these: the expert of each slot,
          `owner * El + i`, of another rank of the domain; or -1 for a slot that stays as it is. The host reads it.
        - `num_sms`: ignored.

        The wait for the event receives: until then tensors must stay as they are. Bytes are read behind
        `previous_event`, or else behind the current stream. A call whose event was not waited for is received by the
        next one, and by `destroy`.
        """
        return self._redundancy.begin(PrefetchCall(locals()))

    def lb_reduce_grads(
        self,
        redundant_expert_grads: Tensor | Sequence[Tensor],
        expert_grads: Tensor | Sequence[Tensor],
        redundancy_mapping: Tensor,
        num_sms: int = 0,
        previous_event: EventHandle | None = None,
    ) -> EventOverlap:
        """Adds the gradients of slots to those of the ranks that own the experts. Collective.

        `expert_grads` become the sums, by ascending rank and slot: the same bits in every run. Types are float32,
        float64, and bfloat16 and float16 with sums in float32; `redundant_expert_grads` are of the same types and stay
        as they are. Everything else is as of `lb_prefetch_weights`.
        """
        return self._redundancy.begin(ReduceCall(locals()))

    def destroy(self) -> None:
        """Closes it on all ranks. Collective. Tensors of `lb_storage` stay."""
        if self.explicitly_destroy:
            self._redundancy.settle()
        super().destroy()


def _lb_bytes(plan: Any) -> int:
    """Bytes of the storage of redundant experts. Raises Refusal."""
    name, unit = "lb_allocation_plan_or_num_bytes", _C.get_num_allocation_alignment()
    if isinstance(plan, BufferAllocator):
        if plan.materialized:
            raise Refusal(
                f"{name}: found a plan that a buffer has used; expected one that none has"
            )
        return plan.num_bytes
    expect_integer(name, plan, 0, MOST_BYTES)
    if int(plan) % unit:
        raise Refusal(f"{name}: found {plan}; expected a multiple of {unit}")
    return int(plan)


make_opaque(EPBuffer, BufferBase, ExpertBuffer, EPHandle, EventHandle, EventOverlap)
