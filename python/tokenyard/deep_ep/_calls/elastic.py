"""Dispatch and combine of V2: flat rows, or expanded ones, a row per (token, local expert)."""

import numbers
from dataclasses import dataclass, replace
from typing import Any, Literal

from .._arrays import Refusal, Tensor
from .._pool import Mode, Opened, Pool, mode_of
from .._sizes import Sizes, sizes_of
from .._torch import torch
from ..buffers.handle import EPHandle
from ..utils.event import EventOverlap
from ..utils.math import align
from . import by_handle
from .arguments import check_experts, check_ids, check_tokens, expect_none, read_rows
from .by_handle import CombineCall, DelayedReceive
from .judged import Judged, expect_integer
from .streams import CallStream, Timing
from .tensors import (
    add_lost,
    clear_behind,
    expect_device,
    name_stream,
    read,
    reader,
    stays_in_arena,
    stream_of,
    sync_in_capture,
    take,
    take_all,
    typed,
)


@dataclass
class DispatchCall(Judged):
    """The arguments of a dispatch: as they were given, with defaults filled in, and as they were read."""

    x: Tensor | tuple[Tensor, Tensor]
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    stats: Tensor | None
    experts: int | None
    # M of the call, and that of the buffer, which communicators are opened with.
    tokens: int | None
    most_tokens: int
    alignment: int | None
    handle: EPHandle | None
    # The number that a handle reports.
    num_sms: int
    # As in the calls of V1.
    sms: int
    copies_handle: bool
    # The choice of the caller, if it has one.
    asked_cpu_sync: bool | None
    is_expanded: bool
    is_column_major: bool
    wrong: str | None
    # Of `x`, where the tensors were read and checked; before, they come with it.
    scales: Any = None

    @property
    def reference(self) -> Tensor:
        """The rows, without their scales."""
        return self.x[0] if isinstance(self.x, tuple) else self.x

    @property
    def has_cpu_sync(self) -> bool:
        return self.asked_cpu_sync is not False

    @property
    def layout(self) -> Literal["flat", "expert_major", "packed"]:
        return "expert_major" if self.is_expanded else "flat"

    @property
    def mode(self) -> Mode:
        return mode_of(self.layout, self.has_cpu_sync)

    def expect_equal(self, record: Any) -> None:
        """Arguments that a cached call may repeat must equal those of the handle."""
        if self.asked_cpu_sync:
            raise Refusal(
                "do_cpu_sync: found True with a handle; expected None or False: its sizes are known"
            )
        for name, found, expected in (
            ("num_experts", self.experts, record.experts),
            ("expert_alignment", self.alignment, record.alignment),
            ("num_max_tokens_per_rank", self.tokens, record.tokens),
            ("do_expand", self.is_expanded, record.is_expanded),
        ):
            # An array would be compared by its elements.
            is_equal = isinstance(found, numbers.Integral) and found == expected
            if not (found is None or is_equal):
                raise Refusal(f"{name}: found {found}; expected {expected}, that of the handle")
        expect_none(topk_idx=self.topk_idx, cumulative_local_expert_recv_stats=self.stats)


@dataclass
class Record(by_handle.Record):
    """The dispatch that a handle stands for."""

    experts: int = 0
    alignment: int = 1
    # M of the dispatch.
    tokens: int = 0
    device: Any = None

    @property
    def rows(self) -> int:
        return self.given


Result = tuple[Any, Any, Any, EPHandle, EventOverlap]
# The arrays of an output that may stay where they arrived.
_ARRAYS = ("x", "weights", "scales")


@dataclass
class Given:
    """The tensors that a caller gets of a dispatch."""

    x: Any = None
    scales: Any = None
    ids: Any = None
    weights: Any = None


def dispatch(pool: Pool, call: DispatchCall, timing: Timing, before_epilogue: Any) -> Result:
    """A dispatch, or one by the routing of a handle."""
    stream = stream_of(pool, call, timing)
    if call.handle is not None:
        return _replay(pool, call, stream, before_epilogue)
    if call.has_cpu_sync and stream.is_captured:
        raise sync_in_capture("do_cpu_sync=False")
    kept: list[DispatchCall] = []

    def send(opened: Opened, checked: DispatchCall) -> Any:
        kept[:] = [checked]
        ids: Any = checked.topk_idx
        name_stream(opened, stream)
        no_sync = not call.has_cpu_sync and opened.takes("without_sync")
        act = opened.communicator.dispatch_send if before_epilogue else opened.communicator.dispatch
        sent = act(
            checked.reference,
            ids,
            checked.topk_weights,
            scales=checked.scales,
            layout=call.layout,
            alignment=(call.alignment or 1) if call.is_expanded else 1,
            zero_padding=call.is_expanded,
            worst_case=not call.has_cpu_sync,
            max_tokens=call.tokens if opened.takes("max_tokens") else None,
            stream=stream.raw,
            without_sync=no_sync,
            sms=call.sms,
        )
        return DelayedReceive(sent, before_epilogue, stream) if before_epilogue else sent

    with stream.inside():
        sending = pool.dispatch(
            lambda: _read_dispatch(pool, call), send, call.mode, lambda: _sizes(pool, call)
        )
        # Of a call in halves the second may be refused, too.
        opened, (received, native) = sending.recv() if before_epilogue else sending.sent()
        add_lost(pool, received)
        checked = kept[0]
        record = Record(
            opened,
            native,
            native.rows,
            call.has_cpu_sync,
            call.is_expanded,
            call.sms,
            experts=call.experts or 0,
            alignment=call.alignment or 1,
            tokens=call.tokens or 0,
            device=checked.reference.device,
        )
        places = Places(pool, record, received)
        given = _give(checked, record, received, stream, places)
        if not record.has_sync:
            _clear_rest(pool, given, received)
        handle = _make_handle(pool, call, record, received, places)
    return _finish(call, checked, given, handle, stream)


def _finish(
    call: DispatchCall, checked: DispatchCall, given: Given, handle: EPHandle, stream: CallStream
) -> Result:
    ids, weights = given.ids, given.weights
    x = given.x if given.scales is None else (given.x, given.scales)
    inputs = (call.x, call.topk_idx, call.topk_weights, call.stats)
    as_read = (checked.x, checked.scales, checked.topk_idx, checked.topk_weights)
    # The ids of a handle may be a copy, made on the stream of the call.
    outputs = (x, ids, weights, handle.topk_idx, handle._places.memory)
    event = stream.finish((*inputs, *as_read), outputs)
    return x, ids, weights, handle, event


def _read_dispatch(pool: Pool, call: DispatchCall) -> tuple[Sizes, DispatchCall]:
    call.expect_right()
    x, scales = read_rows(call.x, None, None)
    tokens = x.shape[0]
    if call.topk_idx is None or call.experts is None:
        raise Refusal(
            "topk_idx, num_experts: found None without a handle; expected both, or a handle"
        )
    ids = read("topk_idx", call.topk_idx, (torch.int64,), (tokens, None)).contiguous()
    weights = call.topk_weights
    if weights is not None:
        weights = read("topk_weights", weights, (torch.float32,), tuple(ids.shape)).contiguous()
    check_tokens(tokens, "num_max_tokens_per_rank", call.tokens)
    check_experts(call.experts, pool.ranks)
    expect_integer("expert_alignment", call.alignment, 1)
    if call.stats is not None:
        local = call.experts // pool.ranks
        read("cumulative_local_expert_recv_stats", call.stats, (torch.int32,), (local,))
    stats = {"cumulative_local_expert_recv_stats": call.stats}
    expect_device(pool, x=x, scales=scales, topk_idx=ids, topk_weights=weights, **stats)
    if not pool.on_device:
        check_ids(ids.numpy(), call.experts)
    checked = replace(call, x=x, scales=scales, topk_idx=ids, topk_weights=weights)
    return _sizes(pool, call), checked


def _sizes(pool: Pool, call: DispatchCall) -> Sizes:
    """The sizes of a dispatch by the looks of its tensors."""
    ids: Any = call.topk_idx
    experts, tokens = call.experts or 0, call.tokens or 0
    most = tokens if pool.opens_each_m else max(tokens, call.most_tokens)
    return sizes_of(experts, ids.shape[1], call.reference.shape[1], most, tokens)


def _replay(pool: Pool, call: DispatchCall, stream: CallStream, before_epilogue: Any) -> Result:
    with stream.inside():
        record, checked, received = by_handle.replay(pool, call, record_of, stream, before_epilogue)
        given = _give(checked, record, received, stream)
        if not record.has_sync:
            _clear_rest(pool, given, received)
    handle: Any = call.handle
    return _finish(call, checked, given, handle, stream)


def record_of(pool: Pool, handle: object) -> Record:
    """The record of a handle. Raises Refusal for what is none of this buffer."""
    if not isinstance(handle, EPHandle) or not isinstance(handle._record, Record):
        raise Refusal(f"handle: found {type(handle).__name__}; expected an EPHandle of this buffer")
    pool.expect_own(handle._record.opened)
    return handle._record


def _give(
    checked: DispatchCall,
    record: Record,
    received: Any,
    stream: CallStream,
    places: "Places | None" = None,
) -> Given:
    """The received rows, ids and weights. One call copies them, where they do not stay, and what `places` wants."""
    opened = record.opened
    stays = stays_in_arena(opened, stream)
    given, wanted = _room(checked, record, received, stays)
    names = _ARRAYS[: 3 if given.scales is None else 2] if stays else ()
    copied = None
    if places is not None and checked.copies_handle:
        ids: Any = checked.topk_idx
        places.ids = torch.empty_like(ids)
        copied = (ids, places.ids)
    if not wanted and places is None:
        arrays = take_all(received, names, checked.reference.dtype)
    else:
        arrays, _, _ = opened.communicator._give(
            reader(),
            received,
            None if places is None else places.memory,
            () if places is None else places.parts,
            names=names,
            keeps_fp8=checked.reference.dtype is torch.float8_e4m3fn,
            copied=copied,
            stream=stream.raw,
            **wanted,
        )
    for name, array in zip(names, arrays, strict=True):
        setattr(given, name, array)
    given.x = typed(given.x, checked.reference.dtype)
    if given.scales is not None:
        given.scales = typed(given.scales, checked.scales.dtype)
    return given


def _clear_rest(pool: Pool, given: Given, received: Any) -> None:
    if not pool.on_device:
        filled = int(take(received.totals)[1])
        clear_behind(pool, (given.x, given.scales, given.weights), filled)


def _room(
    checked: DispatchCall, record: Record, received: Any, stays: bool
) -> tuple[Given, dict[str, Any]]:
    """Memory of torch for what a caller gets that does not stay in the arena, and its names as copies."""
    sizes, rows, device = record.opened.sizes, received.rows, checked.reference.device
    given, wanted = Given(), {}
    if not stays:
        shape: tuple[int, ...] = (rows, sizes.hidden)
        given.x = wanted["x"] = torch.empty(shape, dtype=checked.reference.dtype, device=device)
        if checked.topk_weights is not None:
            shape = (rows,) if checked.is_expanded else (rows, sizes.topk)
            given.weights = torch.empty(shape, dtype=torch.float32, device=device)
            wanted["weights"] = given.weights
    if checked.scales is not None and checked.is_column_major:
        columns = checked.scales.shape[1]
        # Columns start at multiples of 16 bytes.
        pitch = align(rows, 4)
        memory = torch.empty((columns, pitch), dtype=checked.scales.dtype, device=device)
        given.scales = memory.as_strided((rows, columns), (1, pitch))
        wanted["scale_columns"] = memory
    elif checked.scales is not None and not stays:
        shape = (rows, checked.scales.shape[1])
        given.scales = torch.empty(shape, dtype=checked.scales.dtype, device=device)
        wanted["scales"] = given.scales
    if not checked.is_expanded:
        shape = (rows, sizes.topk)
        given.ids = torch.empty(shape, dtype=torch.int64, device=device)
        wanted["wide_ids"] = given.ids
    return given, wanted


# Copies of what arrived that fields of a handle are computed from, in one list.
_FLAT_PARTS = ("source", "ids", "expert_counts", "source_ends")
_EXPANDED_PARTS = ("source", "slots", "expert_counts", "source_ends", "expert_ends")


class Places:
    """Fields of a handle that are computed where they are read first, from copies of what arrived."""

    def __init__(self, pool: Pool, record: Record, received: Any) -> None:
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
        self.memory = torch.empty(sum(self._lengths), dtype=torch.int32, device=record.device)

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


def _make_handle(
    pool: Pool, call: DispatchCall, record: Record, received: Any, places: Places
) -> EPHandle:
    if call.stats is not None:
        # Tensors that were made in this mode cannot be written outside of it.
        with torch.inference_mode():
            call.stats.add_(places.counts())
    per_expert: list[int] = []
    if record.has_sync:
        counts = record.opened.communicator.expert_counts(received)
        per_expert = [align(count, record.alignment) for count in counts]
    expanded = sum(per_expert)
    if not record.has_sync:
        ranks, local = pool.ranks, record.experts // pool.ranks
        most = ranks * record.tokens * min(record.opened.sizes.topk, local)
        expanded = align(most + (record.alignment - 1) * local, record.alignment)
    return EPHandle(
        record,
        do_expand=call.is_expanded,
        num_experts=record.experts,
        expert_alignment=record.alignment,
        num_max_tokens_per_rank=record.tokens,
        num_sms=call.num_sms,
        topk_idx=call.topk_idx if places.ids is None else places.ids,
        num_recv_tokens=received.tokens,
        num_expanded_tokens=expanded,
        per_expert=per_expert,
        places=places,
    )


def combine(
    pool: Pool, call: CombineCall, timing: Timing, before_epilogue: Any
) -> tuple[Any, Any, EventOverlap]:
    """The combine of a dispatch: rows, weights, and the event."""
    return by_handle.combine(pool, call, record_of, timing, before_epilogue)


def host_barrier(pool: Pool, wrong: str | None) -> None:
    """A barrier of the hosts. Collective."""
    if wrong is None:
        pool.barrier()
    else:
        pool.world._refuse(wrong)


def barrier(pool: Pool, device: Any, timing: Timing, wrong: str | None) -> CallStream:
    """Work that is queued on the stream next runs once all ranks have come to the barrier. Collective."""
    # It may refuse in a capture. So the communication stream joins the capture behind it.
    opened = pool.open_counts(1)
    if wrong is not None:
        opened.communicator.refuse("dispatch", wrong)
    stream = CallStream(device if device.type == "cuda" else None, timing)
    rows = torch.empty((0, opened.sizes.hidden), dtype=torch.float32, device=device)
    ids = torch.empty((0, 1), dtype=torch.int64, device=device)
    no_sync = opened.takes("without_sync")
    opened.communicator.dispatch(
        rows, ids, worst_case=no_sync, stream=stream.raw, without_sync=no_sync
    )
    return stream
