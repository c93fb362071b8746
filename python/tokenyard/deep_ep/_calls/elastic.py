"""Dispatch and combine of V2: flat rows, or expanded ones, a row per (token, local expert)."""

import numbers
from collections.abc import Callable
from typing import Any

from .._arrays import Refusal
from .._pool import Opened, Pool
from .._sizes import Sizes, sizes_of
from .._torch import torch
from ..buffers.handle import EPHandle
from ..utils.event import EventOverlap
from ..utils.math import align
from . import rows
from .arguments import check_experts, check_ids, check_tokens, expect_none, read_rows
from .call import Call, expect_integer, judge_flags
from .rows import Record
from .streams import CallStream
from .tensors import expect_device, read

# The multiprocessors that the package names where the caller names none.
SMS = 20


class _OfBuffer(Call):
    """A call of `ElasticBuffer` with rows."""

    flags: tuple[str, ...] = ("async_with_compute_stream", "allocate_on_comm_stream")
    integers = ("num_sms", "num_qps")
    events = ("previous_event", "previous_event_before_epilogue")

    @property
    def sms(self) -> Any:
        return self.pool.sms_of(0 if self.num_sms == SMS else self.num_sms)

    def record(self) -> Record:
        handle = self.handle
        if not isinstance(handle, EPHandle) or not isinstance(handle._record, Record):
            raise Refusal(
                f"handle: found {type(handle).__name__}; expected an EPHandle of this buffer"
            )
        self.pool.expect_own(handle._record.opened)
        return handle._record


class DispatchCall(_OfBuffer, rows.DispatchCall):
    """A dispatch."""

    operation = "ElasticBuffer.dispatch"
    flags = (
        *_OfBuffer.flags,
        "do_handle_copy",
        "do_expand",
        "do_zero_padding",
        "use_tma_aligned_col_major_sf",
    )
    instead_of_sync = "do_cpu_sync=False"

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        own, wrong = vars(self), None
        if own["do_cpu_sync"] is not None:
            wrong = judge_flags(own, ("do_cpu_sync",))
            # A wrong one is the default: the others may make a call that waits for what this rank says of it.
            own["do_cpu_sync"] = None if wrong else own["do_cpu_sync"]
        if own["handle"] is None:
            # Of one that is no number, the operation says so.
            tokens = own["num_max_tokens_per_rank"]
            if tokens is None or (type(tokens) is int and not tokens):
                own["num_max_tokens_per_rank"] = self.buffer.num_max_tokens_per_rank
            if own["expert_alignment"] is None:
                own["expert_alignment"] = 1
        self.wrong = self.wrong or wrong
        self.is_expanded, self.gives_ids = self.do_expand, not self.do_expand
        self.has_cpu_sync = self.do_cpu_sync is not False
        self.named_tokens = self.num_max_tokens_per_rank

    def is_worst(self, opened: Opened) -> bool:
        return not self.has_cpu_sync

    def expect_equal(self, record: Record) -> None:
        """Arguments that a cached call may repeat must equal those of the handle."""
        if self.do_cpu_sync:
            raise Refusal(
                "do_cpu_sync: found True with a handle; expected None or False: its sizes are known"
            )
        for name, expected in (
            ("num_experts", record.experts),
            ("expert_alignment", record.alignment),
            ("num_max_tokens_per_rank", record.tokens),
            ("do_expand", record.is_expanded),
        ):
            found = getattr(self, name)
            # An array would be compared by its elements.
            is_equal = isinstance(found, numbers.Integral) and found == expected
            if not (found is None or is_equal):
                raise Refusal(f"{name}: found {found}; expected {expected}, that of the handle")
        stats = self.cumulative_local_expert_recv_stats
        expect_none(topk_idx=self.topk_idx, cumulative_local_expert_recv_stats=stats)

    def read(self) -> Sizes:
        self.expect_right()
        x, scales = read_rows(self.x, None, None)
        tokens, experts = x.shape[0], self.num_experts
        if self.topk_idx is None or experts is None:
            raise Refusal(
                "topk_idx, num_experts: found None without a handle; expected both, or a handle"
            )
        ids = read("topk_idx", self.topk_idx, (torch.int64,), (tokens, None)).contiguous()
        weights = self.topk_weights
        if weights is not None:
            weights = read("topk_weights", weights, (torch.float32,), tuple(ids.shape)).contiguous()
        check_tokens(tokens, "num_max_tokens_per_rank", self.num_max_tokens_per_rank)
        check_experts(experts, self.pool.ranks)
        expect_integer("expert_alignment", self.expert_alignment, 1)
        stats = {"cumulative_local_expert_recv_stats": self.cumulative_local_expert_recv_stats}
        for name, tensor in stats.items():
            if tensor is not None:
                read(name, tensor, (torch.int32,), (experts // self.pool.ranks,))
        expect_device(self.pool, x=x, scales=scales, topk_idx=ids, topk_weights=weights, **stats)
        if not self.pool.on_device:
            check_ids(ids.numpy(), experts)
        self.take(x, scales, ids, weights)
        return self.looks()

    def looks(self) -> Sizes:
        experts, tokens = self.num_experts or 0, self.num_max_tokens_per_rank or 0
        is_apart, most = self.pool.opens_each_m, self.buffer.num_max_tokens_per_rank
        most = tokens if is_apart else max(tokens, most)
        return sizes_of(experts, self.topk_idx.shape[1], self.first.shape[1], most, tokens, False)


class CombineCall(_OfBuffer, rows.CombineCall):
    """A combine."""

    operation = "ElasticBuffer.combine"

    @property
    def rounds_per_rank(self) -> bool:  # type: ignore[override]
        return bool(self.buffer.allow_multiple_reduction)


class BarrierCall(Call):
    """A barrier."""

    flags = ("use_comm_stream", "with_cpu_sync", "sequential")


Result = tuple[Any, Any, Any, EPHandle, EventOverlap]


def dispatch(call: DispatchCall, stream: CallStream) -> Result:
    """A dispatch, or one by the routing of a handle."""
    return begin(call, stream)()


def begin(call: DispatchCall, stream: CallStream) -> Callable[[], Result]:
    """As `dispatch`, whose results the returned function gives: see `rows.begin`."""
    if call.handle is None:
        receive = rows.begin(call, stream)
        return lambda: _finish(call, stream, *_arrived(call, stream, receive))
    replayed = rows.begin_replay(call, stream)

    def again() -> Result:
        record, received = replayed()
        given, _, _ = rows.give(call, record, received, stream)
        return _finish(call, stream, given, call.handle)

    return again


def _finish(call: DispatchCall, stream: CallStream, given: rows.Given, handle: EPHandle) -> Result:
    stats = call.cumulative_local_expert_recv_stats
    # The ids of a handle may be a copy, made on the stream of the call.
    x, event = rows.finish(call, given, stream, stats, handle._topk_idx, handle._places.memory)
    if call.handle is None and call.is_of_arrays:
        handle.give_arrays(None if call.do_handle_copy else call.as_given["topk_idx"])
    return x, given.ids, given.weights, handle, event


def _arrived(
    call: DispatchCall, stream: CallStream, receive: Callable[[], tuple[Opened, Any, Any]]
) -> tuple[rows.Given, EPHandle]:
    opened, received, native = receive()
    numbers_of_v2 = call.num_experts, call.expert_alignment, call.num_max_tokens_per_rank
    has_sync = call.has_cpu_sync
    record = Record(
        opened, native, native.rows, has_sync, call.sms, call.is_expanded, *numbers_of_v2
    )
    places = Places(call.pool, record, received, call.rows.device)
    beside = {"block": places.memory, "parts": places.parts}
    if call.do_handle_copy:
        places.ids = torch.empty_like(call.ids)
        beside["copied"] = (call.ids, places.ids)
    given, _, _ = rows.give(call, record, received, stream, beside)
    return given, _make_handle(call, record, received, places)


# Copies of what arrived that fields of a handle are computed from, in one list.
_FLAT_PARTS = ("source", "ids", "expert_counts", "source_ends")
_EXPANDED_PARTS = ("source", "slots", "expert_counts", "source_ends", "expert_ends")


class Places:
    """Fields of a handle that are computed where they are read first, from copies of what arrived."""

    def __init__(self, pool: Pool, record: Record, received: Any, device: Any) -> None:
        sizes = record.opened.sizes
        ranks, tokens, local = pool.ranks, received.tokens, sizes.experts // pool.ranks
        # Not the pool: a handle may outlive its buffer.
        self._domains, self._record = pool.domains, record
        # The handle's copy of the ids, where it has one.
        self.ids: Any = None
        self._lengths = [tokens, tokens * sizes.topk, local, ranks]
        if record.is_expanded:
            self._lengths.append(local)
        self.parts = _EXPANDED_PARTS if record.is_expanded else _FLAT_PARTS
        self.memory = torch.empty(sum(self._lengths), dtype=torch.int32, device=device)

    def _part(self, number: int) -> Any:
        return self.memory.split(self._lengths)[number]

    def counts(self) -> Any:
        """Rows of each local expert."""
        return self._part(2)

    def slots(self) -> Any:
        """`[N, K]`: local experts, or where expanded rows of copies; -1 where a token has none here."""
        places = self._part(1).view(-1, self._record.opened.sizes.topk)
        return self._arrived(places)

    def _arrived(self, of_tokens: Any) -> Any:
        """`[N, n]`, with -1 behind the tokens that arrived, where they are unspecified."""
        if self._record.has_sync:
            return of_tokens
        numbers = torch.arange(len(of_tokens), device=of_tokens.device)
        return torch.where((numbers < self._part(3)[-1])[:, None], of_tokens, -1)

    def metadata(self) -> Any:
        topk, record, source = self._record.opened.sizes.topk, self._record, self._part(0)
        places = self.slots()
        numbers = torch.arange(topk, dtype=torch.int32, device=source.device)
        last = torch.where(places >= 0, numbers, -1).amax(dim=1)
        metadata = torch.full((len(source), topk + 2), -1, dtype=torch.int32, device=source.device)
        metadata[:, 0] = source
        metadata[:, 1] = source.div(record.tokens, rounding_mode="floor") * topk + last
        if record.is_expanded:
            metadata[:, 2:] = places
        return self._arrived(metadata)

    def expert_psum(self) -> Any:
        if self._record.is_expanded:
            return self._part(4)
        unit = self._record.alignment
        aligned = (self.counts() + (unit - 1)).div(unit, rounding_mode="floor") * unit
        return aligned.cumsum(0, dtype=torch.int32)

    def scaleup_psum(self) -> Any:
        ends = self._part(3)
        if self._domains == 1:
            return ends
        # Tokens of each index in a domain, of all domains, inclusive.
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        return counts.view(self._domains, -1).sum(0).cumsum(0, dtype=torch.int32)

    def dummy(self) -> Any:
        shape = (self._record.native.tokens, self._record.opened.sizes.topk)
        return torch.full(shape, -1, dtype=torch.int32, device=self.memory.device)


def _make_handle(call: DispatchCall, record: Record, received: Any, places: Places) -> EPHandle:
    stats = call.cumulative_local_expert_recv_stats
    if stats is not None:
        # Tensors that were made in this mode cannot be written outside of it.
        with torch.inference_mode():
            stats.add_(places.counts())
    ids = call.topk_idx if places.ids is None else places.ids
    handle, unit = EPHandle(record, places, received, ids), record.alignment
    handle.num_sms = call.num_sms or SMS
    if record.has_sync:
        counts = record.opened.communicator.expert_counts(received)
        handle.num_recv_tokens_per_expert_list = [align(count, unit) for count in counts]
        handle.num_expanded_tokens = sum(handle.num_recv_tokens_per_expert_list)
    else:
        ranks, local = call.pool.ranks, record.experts // call.pool.ranks
        most = ranks * record.tokens * min(record.opened.sizes.topk, local)
        handle.num_expanded_tokens = align(most + (unit - 1) * local, unit)
    return handle


def barrier(call: BarrierCall) -> None:
    """Returns once all ranks have called it, or queues a wait for that on the current stream. Collective."""
    pool = call.pool
    if not pool.on_device:
        if call.wrong is not None:
            pool.world._refuse(call.wrong)
        pool.barrier()
        return
    device = pool.device
    is_gpu = device.type == "cuda"
    if call.with_cpu_sync and is_gpu:
        torch.cuda.synchronize(device)
    # It may refuse in a capture. So the communication stream joins the capture behind it.
    opened = pool.open_counts(1)
    if call.wrong is not None:
        opened.communicator.refuse("dispatch", call.wrong)
    stream = CallStream(device if is_gpu else None, call.is_async)
    x = torch.empty((0, opened.sizes.hidden), dtype=torch.float32, device=device)
    ids = torch.empty((0, 1), dtype=torch.int64, device=device)
    no_sync = opened.takes("without_sync")
    opened.communicator.dispatch(
        x, ids, worst_case=no_sync, stream=stream.raw, without_sync=no_sync
    )
    if is_gpu:
        torch.cuda.current_stream(device).wait_stream(stream.stream)
    if call.with_cpu_sync and is_gpu:
        torch.cuda.synchronize(device)
