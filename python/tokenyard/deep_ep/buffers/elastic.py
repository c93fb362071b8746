"""DeepEP's second interface: `ElasticBuffer`."""

from typing import Any

from .. import _C
from .._arrays import Tensor
from .._calls import elastic, rows, streams
from .._calls.call import MOST_BYTES, judge_flags, judge_integers
from .._calls.tensors import on_stream
from .._dynamo import make_opaque
from .._missing import absent, refuse_missing
from .._pool import Pool
from .._world import Waits
from ..utils.event import EventHandle, EventOverlap
from ..utils.math import align
from .handle import EPHandle as EPHandle

# Arguments of the constructor that are flags, and those that are numbers of 32 and of 64 bits.
_FLAGS = (
    "use_fp8_dispatch",
    "deterministic",
    "allow_hybrid_mode",
    "allow_multiple_reduction",
    "prefer_overlap_with_compute",
    "explicitly_destroy",
)
_INTEGERS = (
    "num_max_tokens_per_rank",
    "hidden",
    "num_topk",
    "sl_idx",
    "num_allocated_qps",
    "num_cpu_timeout_secs",
    "num_gpu_timeout_secs",
)
_BYTES = ("num_bytes", "num_cpu_bytes")


class ElasticBuffer:
    """Dispatch and combine of DeepEP V2.

    To construct it is collective, and so are `dispatch`, `combine` and `barrier`: all ranks make the same calls in the
    same order. `group` is a process group of torch (or a tokenyard.World). Rows always come in the order of their
    source rank and token, whatever `deterministic` says.
    """

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
        refuse_missing("ElasticBuffer", others, ())
        given = locals()
        wrong = judge_integers(given, _INTEGERS) or judge_integers(given, _BYTES, MOST_BYTES)
        wrong = wrong or judge_flags(given, _FLAGS)
        # DeepEP's hosts wait for its kernels, which wait for the other ranks.
        waits = Waits(num_gpu_timeout_secs, num_cpu_timeout_secs, wrong)
        self._pool = pool = Pool(group, waits=waits)
        self.group = group
        self.rank_idx, self.num_ranks = pool.rank, pool.ranks
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic = given["deterministic"]
        self.allow_hybrid_mode = given["allow_hybrid_mode"]
        self.allow_multiple_reduction = given["allow_multiple_reduction"]
        self.prefer_overlap_with_compute = given["prefer_overlap_with_compute"]
        self.explicitly_destroy = given["explicitly_destroy"]
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(
            self.rank_idx, self.num_scaleup_ranks
        )
        self.num_allocated_qps = num_allocated_qps or (129 if self.num_scaleout_ranks > 1 else 17)
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(
                pool.world,
                num_max_tokens_per_rank,
                hidden,
                num_topk,
                given["use_fp8_dispatch"],
                allow_multiple_reduction=self.allow_multiple_reduction,
            )
        self.num_bytes = num_bytes
        self.nccl_comm_handle = None

    @property
    def runtime(self) -> "ElasticBuffer":
        """The buffer itself."""
        return self

    @property
    def left_out(self) -> Tensor:
        """`[1]` int32, beside the calls' tensors: above 0 once results lack something because a rank was left out.

        A dispatch adds the ranks whose rows it lacks, a combine the experts that its sums lack, in the order of the
        stream, and in each replay of a graph. The caller zeroes it. It stays 0 where a loss is an error
        (`on_failure = "stop"`).
        """
        return self._pool.gaps.count

    def destroy(self) -> None:
        """Closes it on all ranks. Collective."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self._pool.destroy()

    @staticmethod
    def get_buffer_size_hint(
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes that DeepEP would take where NVLink joins all ranks of `group`."""
        ranks = group.ranks if hasattr(group, "ranks") else group.size()
        tokens, topk, row = num_max_tokens_per_rank, num_topk or 32, align(2 * hidden, 32)
        sent = align(hidden, 32) + align(4 * -(-hidden // 32), 32) if use_fp8_dispatch else row
        dispatch = ranks * tokens * (sent + align(4 * (3 * topk + 1), 32))
        copies = min(ranks, topk) if allow_multiple_reduction else topk
        combine = copies * tokens * (row + align(8 * topk, 32))
        return align(max(dispatch, combine), _C.get_elastic_buffer_alignment())

    @staticmethod
    def capture() -> EventHandle:
        """An event behind everything that was called."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """The stream of asynchronous calls; None on the CPU, where there are no streams."""
        return streams.gpu_stream(self._pool)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Domains, and ranks in each."""
        return self._pool.domains, self._pool.ranks // self._pool.domains

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Domains, and ranks in each; one domain of all ranks without `allow_hybrid_mode`."""
        return self.get_physical_domain_size() if self.allow_hybrid_mode else (1, self.num_ranks)

    def get_theoretical_num_sms(self, *arguments: Any, **keywords: Any) -> int:
        """Multiprocessors that fill the link between GPUs, whatever the arguments. No call takes any on the CPU."""
        return elastic.SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs that DeepEP would use. No call takes any on the CPU."""
        wanted = num_sms * 16 + 1 if self.num_scaleout_ranks > 1 else min(num_sms, 9)
        return min(wanted, self.num_allocated_qps)

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

    get_engram_storage_size_hint = absent("get_engram_storage_size_hint")
    get_pp_buffer_size_hint = absent("get_pp_buffer_size_hint")
    get_agrs_num_max_session_bytes = absent("get_agrs_num_max_session_bytes")
    get_agrs_buffer_size_hint = absent("get_agrs_buffer_size_hint")
    engram_write = absent("engram_write")
    engram_fetch = absent("engram_fetch")
    pp_set_config = absent("pp_set_config")
    pp_send = absent("pp_send")
    pp_recv = absent("pp_recv")
    create_agrs_session = absent("create_agrs_session")
    destroy_agrs_session = absent("destroy_agrs_session")
    agrs_new_session = absent("agrs_new_session")
    agrs_set_config = absent("agrs_set_config")
    agrs_get_inplace_tensor = absent("agrs_get_inplace_tensor")
    all_gather = absent("all_gather")


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """Domains of a group, and ranks in each. Collective."""
    pool = Pool(group)
    return pool.domains, pool.ranks // pool.domains


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Domains of a group, and ranks in each; one domain of all ranks without `allow_hybrid_mode`. Collective."""
    domains, size = get_physical_domain_size(group)
    return (domains, size) if allow_hybrid_mode else (1, domains * size)


make_opaque(ElasticBuffer, EPHandle, EventHandle, EventOverlap)
