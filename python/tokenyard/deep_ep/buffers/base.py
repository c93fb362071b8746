"""The common part of the buffers of DeepEP's second interface, by the names of its versions 2.1 and 2.5."""

from typing import Any

from .. import _C
from .._arrays import Tensor
from .._calls import elastic, ep, streams
from .._calls.call import MOST_BYTES, judge_flags, judge_integers
from .._missing import refuse_missing
from .._pool import Pool
from .._world import DEFAULT_WAITS, Waits
from ..utils.event import EventHandle
from ..utils.math import align

# Arguments of the constructors that are flags, and those that are numbers of 32 and of 64 bits.
_FLAGS = (
    "use_fp8_dispatch",
    "deterministic",
    "allow_hybrid_mode",
    "allow_multiple_reduction",
    "restrict_rd_atomic",
    "use_cpu_rdma_storage",
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


class BufferBase:
    """The life of a buffer: it is made by all ranks, says what memory it takes, and is destroyed by all ranks."""

    explicitly_destroy: bool
    # Whether its logical domains are the physical ones.
    allow_hybrid_mode: bool
    _pool: Pool

    @property
    def runtime(self) -> "BufferBase":
        """The buffer itself."""
        return self

    @property
    def main_context(self) -> "BufferBase | None":
        """The buffer itself, or None once it was destroyed."""
        return None if self._pool.is_destroyed else self

    def _meet(
        self,
        given: dict[str, Any],
        integers: tuple[str, ...],
        bytes_of: tuple[str, ...],
        wrong: str | None = None,
    ) -> None:
        """Reads the `locals()` of a constructor of 2.5, of which `bytes_of` are numbers of bytes, and meets the other
        ranks. `wrong`: what is known to be. Collective."""
        numbers = (*integers, "num_gpu_timeout_secs")
        flags = tuple(name for name in _FLAGS if name in given)
        wrong = wrong or judge_integers(given, numbers)
        wrong = wrong or judge_integers(given, bytes_of, MOST_BYTES) or judge_flags(given, flags)
        waits = Waits(given["num_gpu_timeout_secs"], DEFAULT_WAITS.late, wrong)
        self._pool = pool = Pool(given["group"], waits=waits)
        self.group = given["group"]
        self.rank_idx, self.num_ranks = pool.rank, pool.ranks
        self.allow_hybrid_mode = given.get("allow_hybrid_mode", True)
        self.explicitly_destroy = given["explicitly_destroy"]

    def print_memory_usage(self) -> None:
        """Prints a line: what memory the buffer takes on this rank, and how much of it its callers hold. Local."""
        pool = self._pool
        pool.expect_usable()
        count, taken, held = pool.memory()
        beside = f" and {pool.beside} operations" if pool.beside else ""
        print(
            f"[tokenyard memory] rank_idx={pool.rank}, num_ranks={pool.ranks}, {count} communicators{beside}: "
            f"{taken / 2**30:.3f} GiB, of which callers hold {held / 2**30:.3f} GiB",
            flush=True,
        )

    def get_comm_stream(self) -> Any:
        """The stream of asynchronous calls; None on the CPU, where there are no streams."""
        return streams.gpu_stream(self._pool)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Domains, and ranks in each."""
        return self._pool.domains, self._pool.ranks // self._pool.domains

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Domains, and ranks in each; one domain of all ranks without `allow_hybrid_mode`."""
        return self.get_physical_domain_size() if self.allow_hybrid_mode else (1, self._pool.ranks)

    def destroy(self) -> None:
        """Closes it on all ranks. Collective."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        self._pool.destroy()


def barrier(
    buffer: BufferBase, wait_comm_stream: bool, with_cpu_sync: bool, sequential: bool
) -> None:
    """The barrier of 2.5, of any buffer. Collective."""
    given = {
        "self": buffer,
        "wait_comm_stream": wait_comm_stream,
        "with_cpu_sync": with_cpu_sync,
        "sequential": sequential,
    }
    elastic.barrier(ep.BarrierCall(given))


def ranks_of(group: Any) -> int:
    """Ranks of a process group of torch, or of a world."""
    return int(group.ranks if hasattr(group, "ranks") else group.size())


class ExpertBuffer(BufferBase):
    """The common part of the buffers of tokens for experts, `ElasticBuffer` of 2.1 and `EPBuffer` of 2.5."""

    # DeepEP's record of a token is a multiple of this many bytes, which its size hint shows.
    _RECORD_UNIT: int

    def _open(
        self, given: dict[str, Any], bytes_of: tuple[str, ...], wrong: str | None = None
    ) -> None:
        """Reads the `locals()` of a constructor, of which `bytes_of` are numbers of bytes, and meets the other ranks.
        `wrong`: what is known to be. Collective.
        """
        refuse_missing(type(self).__name__, given["others"], ())
        num_bytes = given["num_bytes"]
        wrong = wrong or judge_integers(given, _INTEGERS)
        wrong = wrong or judge_integers(given, bytes_of, MOST_BYTES)
        wrong = wrong or judge_flags(given, tuple(name for name in _FLAGS if name in given))
        # DeepEP's hosts wait for its kernels, which wait for the other ranks.
        waits = Waits(given["num_gpu_timeout_secs"], given["num_cpu_timeout_secs"], wrong)
        self._pool = pool = Pool(given["group"], waits=waits)
        self.group = given["group"]
        self.rank_idx, self.num_ranks = pool.rank, pool.ranks
        self.num_max_tokens_per_rank = given["num_max_tokens_per_rank"]
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
        default_qps = 129 if self.num_scaleout_ranks > 1 else 17
        self.num_allocated_qps = given["num_allocated_qps"] or default_qps
        if num_bytes is None:
            num_bytes = self.get_buffer_size_hint(
                pool.world,
                given["num_max_tokens_per_rank"],
                given["hidden"],
                given["num_topk"],
                given["use_fp8_dispatch"],
                allow_multiple_reduction=self.allow_multiple_reduction,
            )
        self.num_bytes = num_bytes
        self.nccl_comm_handle = None

    @property
    def left_out(self) -> Tensor:
        """`[1]` int32, beside the calls' tensors: above 0 once results lack something because a rank was left out.

        A dispatch adds the ranks whose rows it lacks, a combine the experts that its sums lack, in the order of the
        stream, and in each replay of a graph. The caller zeroes it. It stays 0 where a loss is an error
        (`on_failure = "stop"`).
        """
        return self._pool.gaps.count

    @classmethod
    def get_buffer_size_hint(
        cls,
        group: Any,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes that DeepEP would take where NVLink joins all ranks of `group`."""
        ranks = ranks_of(group)
        tokens, topk, row = num_max_tokens_per_rank, num_topk or 32, align(2 * hidden, 32)
        sent = align(hidden, 32) + align(4 * -(-hidden // 32), 32) if use_fp8_dispatch else row
        unit = cls._RECORD_UNIT
        dispatch = ranks * tokens * align(sent + align(4 * (3 * topk + 1), 32), unit)
        copies = min(ranks, topk) if allow_multiple_reduction else topk
        combine = copies * tokens * align(row + align(8 * topk, 32), unit)
        return align(max(dispatch, combine), _C.get_num_allocation_alignment())

    @staticmethod
    def capture() -> EventHandle:
        """An event behind everything that was called."""
        return EventHandle()

    def get_theoretical_num_sms(self, *arguments: Any, **keywords: Any) -> int:
        """Multiprocessors that fill the link between GPUs, whatever the arguments. No call takes any on the CPU."""
        return elastic.SMS

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs that DeepEP would use. No call takes any on the CPU."""
        wanted = num_sms * 16 + 1 if self.num_scaleout_ranks > 1 else min(num_sms, 9)
        return min(wanted, self.num_allocated_qps)


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """Domains of a group, and ranks in each. Collective; of a buffer instead of a group, local."""
    if isinstance(group, BufferBase):
        return group.get_physical_domain_size()
    pool = Pool(group)
    return pool.domains, pool.ranks // pool.domains


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool | None = None) -> tuple[int, int]:
    """Domains of a group, and ranks in each; one domain of all ranks with `allow_hybrid_mode=False`. Collective; of a
    buffer instead of a group, local and by what the buffer was made with."""
    if isinstance(group, BufferBase):
        return group.get_logical_domain_size()
    domains, size = get_physical_domain_size(group)
    return (1, domains * size) if allow_hybrid_mode is False else (domains, size)
