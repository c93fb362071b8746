"""The normal calls of V1 on tensors of torch: flat rows, one per token and rank."""

from dataclasses import dataclass
from typing import Any

from tokenyard import errors

from .. import _handles
from .._arguments import DispatchCall, first_tokens, read_bias, read_routing, read_rows
from .._arrays import Refusal
from .._engine import Engine, Opened, Received, Sizes, sizes_of
from .._routing import check_experts
from .._torch import torch
from ..utils.event import EventOverlap
from .streams import CallStream, Timing
from .tensors import (
    Routed,
    adopt,
    adopted,
    device_of,
    expect_device,
    fit,
    floats,
    library,
    name_stream,
    nothing,
    read,
    stays_in_arena,
    take,
)


@dataclass
class Record:
    """The dispatch that a handle stands for."""

    opened: Opened
    native: Any
    # Rows that the caller was given: those that arrived, or `num_worst_tokens`.
    given: int
    # Whether the host has waited for counts.
    has_sync: bool


def layout(
    engine: Engine, topk_idx: Any, experts: int, timing: Timing
) -> tuple[Any, Any, Any, Any, EventOverlap]:
    """Counts per rank, domain and expert, the map of ranks, and the event."""
    try:
        ids = read("topk_idx", adopted(topk_idx), (torch.int64,), (None, None))
        check_experts(experts, engine.ranks)
    except Refusal as refusal:
        # It is local: the others cannot be informed here.
        raise errors.InvalidInputError(
            str(refusal), kind="invalid_input", rank=engine.rank, operation="get_dispatch_layout"
        ) from None
    call = CallStream(ids.device, timing)
    with call.inside():
        counts = _count(engine, ids, experts)
    event = call.finish((ids,), counts)
    return (*counts, event)


def _count(engine: Engine, ids: Any, experts: int) -> tuple[Any, Any, Any, Any]:
    tokens, ranks = len(ids), engine.ranks
    # The place behind the last stands for no expert, as do ids that the dispatch will refuse.
    known = torch.where((ids >= 0) & (ids < experts), ids, experts)
    owner = known.div(experts // ranks, rounding_mode="floor")
    is_in = torch.zeros((tokens, ranks + 1), dtype=torch.bool, device=ids.device)
    is_in = is_in.scatter_(1, owner, True)[:, :ranks].contiguous()
    per_expert = torch.zeros(experts + 1, dtype=torch.int32, device=ids.device)
    ones = torch.ones((), dtype=torch.int32, device=ids.device).expand(ids.numel())
    per_expert = per_expert.scatter_add_(0, known.flatten(), ones)[:experts].contiguous()
    per_domain = None
    if engine.domains > 1:
        in_domain = is_in.view(tokens, engine.domains, ranks // engine.domains).any(dim=2)
        per_domain = in_domain.sum(0, dtype=torch.int32)
    return is_in.sum(0, dtype=torch.int32), per_domain, per_expert, is_in


def _read_dispatch(engine: Engine, call: DispatchCall) -> tuple[Sizes, Routed]:
    x, scales = read_rows(library(), call.x, None, None)
    tokens, hidden = x.shape
    routing = read_routing(library(), call, tokens, engine.ranks)
    # With worst-case sizes the output has room for R * M rows, so M follows from it.
    worst = call.num_worst_tokens
    named = -(-worst // engine.ranks) if worst else None
    most = named or first_tokens(tokens)
    if routing.ids is None:
        ranks = torch.arange(engine.ranks, device=x.device)
        ids = torch.where(routing.is_in, ranks, -1)
        sizes = sizes_of(engine.ranks, engine.ranks, hidden, most, sms=call.sms)
        expect_device(x, scales=scales, is_token_in_rank=routing.is_in)
        return sizes, Routed(x, scales, ids, None)
    ids, weights = routing.ids, routing.weights
    expect_device(x, scales=scales, topk_idx=ids, topk_weights=weights)
    sizes = sizes_of(routing.experts, ids.shape[1], hidden, most, named, sms=call.sms)
    return sizes, Routed(x, scales, ids, weights)


def dispatch(engine: Engine, call: DispatchCall, timing: Timing) -> tuple[Any, ...]:
    """A dispatch without a handle; the last item is its event."""
    stream = CallStream(device_of(adopt(call).reference), timing)
    kept: list[tuple[Routed, bool]] = []

    def send(opened: Opened, routed: Routed) -> Received:
        no_sync = bool(call.num_worst_tokens) and opened.takes("without_sync")
        kept[:] = [(routed, not no_sync)]
        name_stream(opened, stream)
        return Received(
            opened.communicator.dispatch(
                routed.x,
                routed.ids,
                routed.weights,
                scales=routed.scales,
                worst_case=no_sync,
                stream=stream.raw,
                without_sync=no_sync,
            )
        )

    if not call.num_worst_tokens and stream.is_captured:
        raise errors.InvalidInputError(
            "capture graph: found a dispatch whose sizes the host must know; expected num_worst_tokens",
            kind="invalid_input",
            operation="capture graph",
        )
    with stream.inside():
        opened, (received, native) = engine.dispatch(
            lambda: _read_dispatch(engine, call), send, "flat"
        )
        routed, has_sync = kept[0]
        given = call.num_worst_tokens or received.tokens
        record = Record(opened, native, given, has_sync)
        outputs = _give(call, record, received, routed, stream)
        handle = _make_handle(engine, call, record, received)
        per_expert = _counts_list(engine, call, received, stream)
    rows, ids, weights = outputs
    given_rows = rows if isinstance(rows, tuple) else (rows,)
    event = stream.finish(
        (*_tensors(call), routed.x, routed.scales, routed.ids, routed.weights),
        (*given_rows, ids, weights, *handle),
    )
    return rows, ids, weights, per_expert, handle, event


def _tensors(call: DispatchCall) -> tuple[Any, ...]:
    rows = call.x if isinstance(call.x, tuple) else (call.x,)
    return (*rows, call.topk_idx, call.topk_weights, call.is_token_in_rank)


def _give(
    call: DispatchCall, record: Record, received: Any, routed: Routed, stream: CallStream
) -> tuple[Any, Any, Any]:
    """Rows, ids and weights."""
    given = record.given
    stays = _stays(record.opened, call, stream, routed.x)
    rows = _rows(record, received, routed, stays, stream)
    if call.topk_idx is None:
        return rows, None, None
    ids = take(received.ids).long()
    weights = take(received.weights)
    weights = weights if stays else weights.clone()
    if not call.num_worst_tokens:
        return rows, ids, weights
    # Behind those that arrived is no id. Their number may be known to the device alone.
    ids, weights = fit(ids, given), fit(weights, given)
    is_behind = torch.arange(given, device=ids.device) >= take(received.totals)[0]
    ids.masked_fill_(is_behind[:, None], -1)
    weights.masked_fill_(is_behind[:, None], 0)
    return rows, ids, weights


def _stays(opened: Opened, call: DispatchCall, stream: CallStream, x: Any) -> bool:
    # A call without counts asks for more than arrives, so more may not be left.
    most = opened.sizes.tokens * opened.communicator.ranks * x.shape[1] * x.element_size()
    return stays_in_arena(opened, stream, call.reference, most)


def _rows(record: Record, received: Any, routed: Routed, stays: bool, stream: CallStream) -> Any:
    """The received rows, and their scales."""
    x = take(received.x, routed.x.dtype)
    scales = None if routed.scales is None else take(received.scales, routed.scales.dtype)
    if stays:
        x, scales = fit(x, record.given), scales if scales is None else fit(scales, record.given)
        return x if scales is None else (x, scales)
    count = max(record.given, x.shape[0])
    own = x.new_empty((count, x.shape[1]))
    wanted = {"x": own}
    own_scales = None
    if scales is not None:
        own_scales = scales.new_empty((count, scales.shape[1]))
        wanted["scales"] = own_scales
    record.opened.communicator.copy_out(received, stream=stream.raw, **wanted)
    own = fit(own, record.given)
    return own if own_scales is None else (own, fit(own_scales, record.given))


def _counts_list(
    engine: Engine, call: DispatchCall, received: Any, stream: CallStream
) -> list[int]:
    """Rows per local expert, rounded up: on the host, which waits for them. None are asked for without CPU sync."""
    if call.num_worst_tokens:
        return []
    if call.topk_idx is not None:
        counts = take(received.expert_counts).tolist()
    else:
        counts = _sum_over_sources(engine, call.num_tokens_per_expert, stream)
    alignment = call.expert_alignment
    return [-(-count // alignment) * alignment for count in counts]


def _sum_over_sources(engine: Engine, counts: Any, stream: CallStream) -> list[int]:
    """Gives each rank the counts of its experts; returns the sums of what came here. Collective."""
    counts = counts.view(engine.ranks, -1)
    local = counts.shape[1]
    opened = engine.open_counts(local)
    rows = counts.new_zeros((engine.ranks, opened.sizes.hidden))
    rows[:, :local] = counts
    ranks = torch.arange(engine.ranks, device=counts.device)[:, None]
    # The words pass untouched, whatever they are called.
    received, _ = opened.communicator.dispatch(rows.view(torch.float32), ranks, stream=stream.raw)
    sums: list[int] = take(received.x).view(torch.int32)[:, :local].sum(0).tolist()
    return sums


def _make_handle(
    engine: Engine, call: DispatchCall, record: Record, received: Any
) -> tuple[Any, ...]:
    """The tuple of tensors that DeepEP would return. Those that its kernels alone read are dummies of the shape."""
    ranks, tokens = engine.ranks, record.native.tokens
    ends = take(received.source_ends)
    source = fit(take(received.source), record.given) % record.opened.sizes.tokens
    is_in = call.is_token_in_rank

    def dummy(*shape: int) -> Any:
        return nothing(ends.device).expand(shape)

    # A copy: a handle may live for long, and holds no rows.
    ends = ends.clone()
    if engine.domains == 1:
        # Only this rank's column is known without another exchange, so all are this one.
        anchor = _handles.anchored_tensor(ends[:, None].expand(ranks, ranks), record)
        channel = dummy(ranks, 1)
        return anchor, channel, channel, source, is_in, dummy(tokens, ranks)
    domains = engine.domains
    per_domain, per_rank = dummy(domains, 1), dummy(ranks, 1)
    domain_ends = ends.view(domains, -1)[:, -1].contiguous()
    before = (is_in, per_domain, per_rank, per_domain, domain_ends, per_rank)
    anchor = _handles.anchored_tensor(ends, record)
    meta = torch.zeros((record.given, 8), dtype=torch.uint8, device=ends.device)
    return (*before, anchor, meta, dummy(tokens, domains), dummy(0, ranks // domains))


def _own_record(engine: Engine, handle: Any) -> Record:
    record = _handles.record_of(handle, Record)
    engine.expect_own(record.opened)
    return record


def replay(engine: Engine, call: DispatchCall, handle: Any, timing: Timing) -> tuple[Any, Any]:
    """A dispatch by the routing of a handle, and its event."""
    stream = CallStream(device_of(adopt(call).reference), timing)
    opened = None
    with stream.inside():
        try:
            record = _own_record(engine, handle)
            opened = record.opened
            for name in ("topk_idx", "topk_weights"):
                if getattr(call, name) is not None:
                    raise Refusal(f"{name}: found some with a handle; expected None")
            x, scales = read_rows(library(), call.x, record.native.tokens, opened.sizes.hidden)
            expect_device(x, scales=scales)
        except Refusal as refusal:
            engine.refuse(opened, "replay", refusal)
        name_stream(opened, stream)
        no_sync = not record.has_sync or stream.is_captured
        received = opened.communicator.replay(
            record.native, x, scales=scales, stream=stream.raw, without_sync=no_sync
        )
        routed = Routed(x, scales, None, None)
        stays = _stays(opened, call, stream, x)
        rows = _rows(record, received, routed, stays, stream)
    given = rows if isinstance(rows, tuple) else (rows,)
    return rows, stream.finish((*_tensors(call), x, scales), given)


@dataclass
class CombineCall:
    """The arguments of a combine, as they were given."""

    x: Any
    handle: Any
    topk_weights: Any
    bias: Any


def combine(engine: Engine, call: CombineCall, timing: Timing) -> tuple[Any, Any, EventOverlap]:
    """The combine of a dispatch: rows, weights, and the event."""
    stream = CallStream(device_of(adopt(call).x), timing)
    opened, weights, out_weights = None, None, None
    with stream.inside():
        try:
            record = _own_record(engine, call.handle)
            opened, native = record.opened, record.native
            sizes = opened.sizes
            rows = read("x", call.x, floats(), (record.given, sizes.hidden)).contiguous()
            rows = fit(rows, native.rows)
            if call.topk_weights is not None:
                shape = (record.given, sizes.topk)
                weights = read("topk_weights", call.topk_weights, (torch.float32,), shape)
                weights = fit(weights.contiguous(), native.rows)
            biases = read_bias(library(), call.bias, rows.dtype, (native.tokens, sizes.hidden))
            expect_device(call.x, topk_weights=weights)
        except Refusal as refusal:
            engine.refuse(opened, "combine", refusal)
        out = rows.new_empty((native.tokens, sizes.hidden))
        if weights is not None:
            out_weights = weights.new_empty((native.tokens, sizes.topk))
        name_stream(opened, stream)
        opened.communicator.combine(
            native,
            rows,
            weights,
            bias=biases or None,
            # Otherwise each weight is that of its expert's rank: the same where masked ones are 0, as dispatch
            # gives them.
            sum_weights=weights is not None and opened.takes("sum_weights"),
            out=out,
            out_weights=out_weights,
            stream=stream.raw,
            without_sync=stream.is_captured or not record.has_sync,
        )
    inputs = (call.x, call.topk_weights, rows, weights, *biases)
    return out, out_weights, stream.finish(inputs, (out, out_weights))
