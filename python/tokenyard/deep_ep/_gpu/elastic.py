"""Dispatch and combine of V2 on tensors of torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenyard import errors

from .._arguments import read_bias, read_rows
from .._arrays import Refusal
from .._elastic import CombineCall, DispatchCall, expect_equal
from .._engine import Engine, Opened
from .._routing import check_experts
from .._sizes import Sizes, align, sizes_of
from .._torch import torch
from ..buffers.handle import EPHandle
from ..utils.event import EventOverlap
from .streams import CallStream, Timing
from .tensors import (
    Routed,
    expect_device,
    floats,
    library,
    name_stream,
    read,
    stays_in_arena,
    stream_of,
    take_all,
    typed,
)


@dataclass
class Record:
    """The dispatch that a handle stands for."""

    opened: Opened
    native: Any
    experts: int
    alignment: int
    # M of the dispatch.
    tokens: int
    # Whether the host has waited for counts.
    is_exact: bool
    is_expanded: bool
    # Tokens that arrived, or the most that can.
    flat_rows: int
    device: Any


Result = tuple[Any, Any, Any, EPHandle, EventOverlap]


class Between:
    """A dispatch that was sent, of which the stream waits for an event before it receives."""

    def __init__(self, pending: Any, event: Any, stream: CallStream) -> None:
        self._pending, self._event, self._stream = pending, event, stream

    def recv(self) -> Any:
        wait_for(self._event, self._stream)
        return self._pending.recv()


def wait_for(event: Any, stream: CallStream) -> None:
    """The next work on the stream of a call runs behind an event, if there is one."""
    mark = getattr(event, "event", event)
    if mark is not None and stream.stream is not None:
        mark.wait_on(stream.stream)


def dispatch(engine: Engine, call: DispatchCall, timing: Timing, before_epilogue: Any) -> Result:
    """A dispatch, or one by the routing of a handle."""
    stream = stream_of(call, timing)
    if call.handle is not None:
        return _replay(engine, call, call.handle, stream, before_epilogue)
    if call.has_cpu_sync and stream.is_captured:
        raise errors.InvalidInputError(
            "capture graph: found a dispatch whose sizes the host must know; expected do_cpu_sync=False",
            kind="invalid_input",
            operation="capture graph",
        )
    kept: list[Routed] = []

    def send(opened: Opened, routed: Routed) -> Any:
        kept[:] = [routed]
        name_stream(opened, stream)
        no_sync = not call.has_cpu_sync and opened.takes("without_sync")
        act = opened.communicator.dispatch_send if before_epilogue else opened.communicator.dispatch
        sent = act(
            routed.x,
            routed.ids,
            routed.weights,
            scales=routed.scales,
            layout=call.layout,
            alignment=(call.alignment or 1) if call.is_expanded else 1,
            zero_padding=call.is_expanded,
            worst_case=not call.has_cpu_sync,
            stream=stream.raw,
            without_sync=no_sync,
        )
        return Between(sent, before_epilogue, stream) if before_epilogue else sent

    # Of a call in halves the engine receives the second, which may be refused, too.
    run = engine.dispatch if before_epilogue else engine.dispatch_sent
    with stream.inside():
        opened, (received, native) = run(
            lambda: _read_dispatch(engine, call), send, call.way, lambda: _sizes(engine, call)
        )
        routed = kept[0]
        record = Record(
            opened,
            native,
            experts=call.experts or 0,
            alignment=call.alignment or 1,
            tokens=call.tokens or 0,
            is_exact=call.has_cpu_sync,
            is_expanded=call.is_expanded,
            flat_rows=received.tokens,
            device=routed.x.device,
        )
        places = Places(record, received)
        outputs = _give(call, record, received, routed, stream, places.wanted)
        handle = _make_handle(engine, call, record, received, places)
    return _finish(call, routed, outputs, handle, stream)


def _finish(
    call: DispatchCall, routed: Routed, outputs: Any, handle: EPHandle, stream: CallStream
) -> Result:
    x, ids, weights = outputs
    if not stream.is_async:
        return x, ids, weights, handle, EventOverlap()
    rows = x if isinstance(x, tuple) else (x,)
    given = call.x if isinstance(call.x, tuple) else (call.x,)
    inputs = (*given, call.topk_idx, call.topk_weights, routed.x, routed.scales, routed.ids)
    inputs = (*inputs, routed.weights, call.stats)
    # The ids of a handle may be a copy, made on the stream of the call.
    event = stream.finish(inputs, (*rows, ids, weights, handle.topk_idx, *handle._arrays))
    return x, ids, weights, handle, event


def _read_dispatch(engine: Engine, call: DispatchCall) -> tuple[Sizes, Routed]:
    x, scales = read_rows(library(), call.x, None, None)
    tokens = x.shape[0]
    if call.topk_idx is None or call.experts is None:
        raise Refusal(
            "topk_idx, num_experts: found None without a handle; expected both, or a handle"
        )
    ids = read("topk_idx", call.topk_idx, (torch.int64,), (tokens, None)).contiguous()
    weights = call.topk_weights
    if weights is not None:
        weights = read("topk_weights", weights, (torch.float32,), tuple(ids.shape)).contiguous()
    if call.tokens is None or tokens > call.tokens or call.tokens < 1:
        raise Refusal(
            f"x: found {tokens} tokens; expected at most num_max_tokens_per_rank = {call.tokens}"
        )
    check_experts(call.experts, engine.ranks)
    if call.alignment is None or call.alignment < 1:
        raise Refusal(f"expert_alignment: found {call.alignment}; expected at least 1")
    if call.stats is not None:
        local = call.experts // engine.ranks
        read("cumulative_local_expert_recv_stats", call.stats, (torch.int32,), (local,))
    stats = {"cumulative_local_expert_recv_stats": call.stats}
    expect_device(x, scales=scales, topk_idx=ids, topk_weights=weights, **stats)
    return _sizes(engine, call), Routed(x, scales, ids, weights)


def _sizes(engine: Engine, call: DispatchCall) -> Sizes:
    """The sizes of a dispatch by the looks of its tensors."""
    ids: Any = call.topk_idx
    experts, tokens, sms = call.experts or 0, call.tokens or 0, engine.sms_of(call.chosen_sms)
    return sizes_of(experts, ids.shape[1], call.reference.shape[1], tokens, tokens, sms=sms)


def _replay(
    engine: Engine, call: DispatchCall, handle: EPHandle, stream: CallStream, before_epilogue: Any
) -> Result:
    opened, layout = None, call.layout
    with stream.inside():
        try:
            record = record_of(engine, handle)
            opened, layout = record.opened, record.native.layout
            expect_equal(call, record)
            tokens, topk = record.native.tokens, opened.sizes.topk
            x, scales = read_rows(library(), call.x, tokens, opened.sizes.hidden)
            weights = call.topk_weights
            if weights is not None:
                weights = read("topk_weights", weights, (torch.float32,), (tokens, topk))
                weights = weights.contiguous()
            expect_device(x, scales=scales, topk_weights=weights)
        except Exception as error:
            engine.refuse(opened, "replay", error, layout)
        name_stream(opened, stream)
        no_sync = opened.takes("without_sync") and (not record.is_exact or stream.is_captured)
        comm = opened.communicator
        act = comm.replay_send if before_epilogue else comm.replay
        sent = act(
            record.native, x, weights, scales=scales, stream=stream.raw, without_sync=no_sync
        )
        received = Between(sent, before_epilogue, stream).recv() if before_epilogue else sent
        routed = Routed(x, scales, None, weights)
        outputs = _give(call, record, received, routed, stream, {})
    return _finish(call, routed, outputs, handle, stream)


def record_of(engine: Engine, handle: object) -> Record:
    """The record of a handle. Raises Refusal for what is none of this buffer."""
    if not isinstance(handle, EPHandle) or not isinstance(handle._record, Record):
        raise Refusal(f"handle: found {type(handle).__name__}; expected an EPHandle of this buffer")
    engine.expect_own(handle._record.opened)
    return handle._record


def _give(
    call: DispatchCall,
    record: Record,
    received: Any,
    routed: Routed,
    stream: CallStream,
    wanted: dict[str, Any],
) -> tuple[Any, Any, Any]:
    """The received rows, ids and weights. One call copies them, where they do not stay, and all that is `wanted`."""
    opened, device = record.opened, routed.x.device
    sizes = opened.sizes
    local = sizes.experts // opened.communicator.ranks
    most = opened.most_elements * routed.x.element_size()
    most *= min(sizes.topk, local) if call.is_expanded else 1
    stays = stays_in_arena(opened, stream, call.reference, most)
    x, weights, scales = take_all(received, ("x", "weights", "scales"), routed.x.dtype)
    ids = None
    wanted = dict(wanted)
    if routed.scales is not None and call.is_column_major:
        rows, columns = scales.shape
        # Columns start at multiples of 16 bytes.
        pitch = align(rows, 4)
        memory = torch.empty((columns, pitch), dtype=routed.scales.dtype, device=device)
        wanted["scale_columns"] = memory
        scales = memory.as_strided((rows, columns), (1, pitch))
    elif scales is not None:
        scales = typed(scales, routed.scales.dtype)
    if not stays:
        x = wanted["x"] = torch.empty_like(x)
        if weights is not None:
            weights = wanted["weights"] = torch.empty_like(weights)
        if scales is not None and not call.is_column_major:
            scales = wanted["scales"] = torch.empty_like(scales)
    if not call.is_expanded:
        shape = (received.rows, sizes.topk)
        ids = wanted["wide_ids"] = torch.empty(shape, dtype=torch.int64, device=device)
    if wanted:
        opened.communicator.copy_out(received, stream=stream.raw, **wanted)
    return x if scales is None else (x, scales), ids, weights


class Places:
    """Fields of a handle that are computed where they are read first, from copies of what arrived."""

    def __init__(self, record: Record, received: Any) -> None:
        opened = record.opened
        topk, ranks = opened.sizes.topk, opened.communicator.ranks
        source = received.source
        tokens, local = len(source), opened.sizes.experts // ranks
        lengths = [tokens, tokens * topk, local, ranks]
        if record.is_expanded:
            lengths.append(local)
        # Parts of one allocation.
        memory = torch.empty(sum(lengths), dtype=torch.int32, device=record.device)
        self.arrays = (memory,)
        self.source, places, self.counts, self.source_ends, *rest = memory.split(lengths)
        self.places = places.view(tokens, topk)
        self._expert_ends = rest[0] if rest else None
        self._record = record
        self.wanted = {
            "source": self.source,
            "slots" if record.is_expanded else "ids": self.places,
            "expert_counts": self.counts,
            "source_ends": self.source_ends,
        }
        if record.is_expanded:
            self.wanted["expert_ends"] = self._expert_ends

    def metadata(self) -> Any:
        topk, record = self._record.opened.sizes.topk, self._record
        # [N, K]: local experts, or rows of copies; -1 where a token has none here.
        is_here = self.places >= 0
        numbers = torch.arange(topk, dtype=torch.int32, device=self.source.device)
        last = torch.where(is_here, numbers, -1).amax(dim=1)
        metadata = torch.full(
            (len(self.source), topk + 2), -1, dtype=torch.int32, device=self.source.device
        )
        metadata[:, 0] = self.source
        metadata[:, 1] = self.source.div(record.tokens, rounding_mode="floor") * topk + last
        if record.is_expanded:
            metadata[:, 2:] = self.places
        return metadata

    def aligned(self) -> Any:
        unit = self._record.alignment
        return (self.counts + (unit - 1)).div(unit, rounding_mode="floor") * unit

    def expert_psum(self) -> Any:
        if self._expert_ends is not None:
            return self._expert_ends
        return self.aligned().cumsum(0, dtype=torch.int32)

    def dummy(self) -> Any:
        shape = (self._record.native.tokens, self._record.opened.sizes.topk)
        return torch.full(shape, -1, dtype=torch.int32, device=self.source.device)


def _scaleup_psum(engine: Engine, ends: Any) -> Any:
    """Tokens of each index in a domain, of all domains, inclusive."""
    if engine.domains == 1:
        return ends
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    return counts.view(engine.domains, -1).sum(0).cumsum(0, dtype=torch.int32)


def _make_handle(
    engine: Engine, call: DispatchCall, record: Record, received: Any, places: Places
) -> EPHandle:
    if call.stats is not None:
        call.stats.add_(places.counts)
    per_expert: list[int] = []
    if record.is_exact:
        counts = record.opened.communicator.expert_counts(received)
        per_expert = [align(count, record.alignment) for count in counts]
    ranks, local = engine.ranks, record.experts // engine.ranks
    expanded = sum(per_expert)
    if not record.is_exact:
        most = ranks * record.tokens * min(record.opened.sizes.topk, local)
        expanded = align(most + (record.alignment - 1) * local, record.alignment)
    ids: Any = call.topk_idx
    if call.copies_handle:
        ids = ids.clone()
    lazy: dict[str, Callable[[], Any]] = {
        "psum_num_recv_tokens_per_scaleup_rank": lambda: _scaleup_psum(engine, places.source_ends),
        "psum_num_recv_tokens_per_expert": places.expert_psum,
        "recv_src_metadata": places.metadata,
        "dst_buffer_slot_idx": places.dummy,
    }
    handle = EPHandle(
        record,
        do_expand=call.is_expanded,
        num_experts=record.experts,
        expert_alignment=record.alignment,
        num_max_tokens_per_rank=record.tokens,
        num_sms=call.num_sms,
        topk_idx=ids,
        num_recv_tokens=record.flat_rows,
        num_expanded_tokens=expanded,
        per_expert=per_expert,
        unaligned=places.counts,
        lazy=lazy,
    )
    handle._arrays = places.arrays
    return handle


def combine(
    engine: Engine, call: CombineCall, timing: Timing, before_epilogue: Any
) -> tuple[Any, Any, EventOverlap]:
    """The combine of a dispatch: rows, weights, and the event.

    One kernel sends and sums, so all of it waits for what sums must wait for, copies of biases too.
    """
    stream = stream_of(call, timing)
    opened, out_weights = None, None
    with stream.inside():
        wait_for(before_epilogue, stream)
        try:
            record = record_of(engine, call.handle)
            opened, native = record.opened, record.native
            sizes = opened.sizes
            rows, weights, biases = _read_combine(call, record)
            once = record.is_expanded and not call.rounds_per_rank
            dtype = rows.dtype
            if once and not opened.takes("round_once"):
                # Sums of float32 are rounded nowhere but at the end.
                rows, biases, once = rows.float(), [bias.float() for bias in biases], False
            out = rows.new_empty((native.tokens, sizes.hidden))
            if weights is not None:
                out_weights = weights.new_empty((native.tokens, sizes.topk))
        except Exception as error:
            engine.refuse(opened, "combine", error)
        name_stream(opened, stream)
        opened.communicator.combine(
            native,
            rows,
            weights,
            bias=biases or None,
            round_once=once,
            out=out,
            out_weights=out_weights,
            stream=stream.raw,
            without_sync=opened.takes("without_sync")
            and (stream.is_captured or not record.is_exact),
        )
        out = out.to(dtype)
    if not stream.is_async:
        return out, out_weights, EventOverlap()
    inputs = (call.x, call.topk_weights, rows, weights, *biases)
    return out, out_weights, stream.finish(inputs, (out, out_weights))


def _read_combine(call: CombineCall, record: Record) -> tuple[Any, Any, list[Any]]:
    given, hidden, topk = record.native.rows, record.opened.sizes.hidden, record.opened.sizes.topk
    rows = read("x", call.x, floats(), (given, hidden)).contiguous()
    biases = read_bias(library(), call.bias, rows.dtype, (record.native.tokens, hidden))
    weights = call.topk_weights
    if weights is None:
        return rows, None, biases
    if record.is_expanded and not call.rounds_per_rank:
        raise Refusal(
            "topk_weights: found some with expanded rows and allow_multiple_reduction = False; expected None"
        )
    shape = (given,) if record.is_expanded else (given, topk)
    weights = read("topk_weights", weights, (torch.float32,), shape).contiguous()
    return rows, weights, biases


def barrier(engine: Engine, device: Any, timing: Timing) -> CallStream:
    """Work that is queued on the stream next runs once all ranks have come to the barrier. Collective."""
    # It may refuse in a capture. So the communication stream joins the capture behind it.
    opened = engine.open_counts(1)
    stream = CallStream(device if device.type == "cuda" else None, timing)
    rows = torch.empty((0, opened.sizes.hidden), dtype=torch.float32, device=device)
    ids = torch.empty((0, 1), dtype=torch.int64, device=device)
    no_sync = opened.takes("without_sync")
    opened.communicator.dispatch(
        rows, ids, worst_case=no_sync, stream=stream.raw, without_sync=no_sync
    )
    return stream
