"""The normal calls of V1: flat rows, one per token and rank."""

from dataclasses import dataclass, replace
from typing import Any

from tokenyard._native import _routing

from .. import _handles
from .._arrays import Refusal, adopted, invalid
from .._pool import Opened, Pool, mode_of
from .._sizes import Sizes, sizes_of
from .._torch import torch
from ..utils.event import EventOverlap
from . import by_handle
from .arguments import (
    MOST,
    DispatchCall,
    check_experts,
    counts_of,
    first_tokens,
    read_routing,
    read_rows,
)
from .by_handle import CombineCall, Record
from .streams import CallStream, Timing
from .tensors import (
    add_lost,
    clear_behind,
    dummy,
    expect_device,
    fit,
    gpu_of,
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

# Arrays of a flat output that become tensors.
_ARRAYS = ("x", "scales", "weights")
# The arrays that the handle's tensors are made of, in one list.
_PARTS = ("source_tokens", "source_ends")


def layout(
    pool: Pool, topk_idx: Any, experts: int, timing: Timing
) -> tuple[Any, Any, Any, Any, EventOverlap]:
    """Counts per rank, domain and expert, the map of ranks, and the event."""
    try:
        ids = read("topk_idx", adopted(topk_idx), (torch.int64,), (None, None))
        check_experts(experts, pool.ranks)
        expect_device(pool, topk_idx=ids)
        if not pool.on_device:
            return (*_count_on_host(pool, ids, experts), CallStream(None, timing).finish((), ()))
    except Refusal as refusal:
        # It is local: the others cannot be informed here.
        raise invalid("get_dispatch_layout", str(refusal), pool.rank) from None
    call = CallStream(gpu_of(ids), timing)
    with call.inside():
        of_kernel = _counted(pool, ids, experts, call.raw)
        counts = of_kernel or _count(pool, ids, experts)
    event = call.finish((ids,), counts)
    return (*counts, event)


def _counted(pool: Pool, ids: Any, experts: int, raw: int | None) -> Any:
    """The counts by one kernel, if a communicator is open already on GPUs of one domain; else None."""
    opened = pool.current
    if raw is None or opened is None or pool.domains > 1 or opened.communicator.closed:
        return None
    tokens, ranks, device = len(ids), pool.ranks, ids.device
    per_rank = torch.empty(ranks, dtype=torch.int32, device=device)
    per_expert = torch.empty(experts, dtype=torch.int32, device=device)
    is_in = torch.empty((tokens, ranks), dtype=torch.bool, device=device)
    of_bytes = is_in.view(torch.uint8)
    counted = opened.communicator.count_routing(
        ids.contiguous(), per_rank, per_expert, of_bytes, stream=raw
    )
    # Another thread may wait for all ranks inside of the communicator, and a layout waits for none.
    return (per_rank, None, per_expert, is_in) if counted else None


def _count(pool: Pool, ids: Any, experts: int) -> tuple[Any, Any, Any, Any]:
    tokens, ranks = len(ids), pool.ranks
    # The place behind the last stands for no expert, as do ids that the dispatch will refuse.
    known = ids.clamp(-1, experts).remainder_(experts + 1)
    selected = torch.zeros((tokens, experts + 1), dtype=torch.bool, device=ids.device)
    selected = selected.scatter_(1, known, True)[:, :experts]
    per_expert = selected.sum(0, dtype=torch.int32)
    is_in = selected.view(tokens, ranks, experts // ranks).any(dim=2)
    return is_in.sum(0, dtype=torch.int32), _per_domain(pool, is_in), per_expert, is_in


def _per_domain(pool: Pool, is_in: Any) -> Any:
    if pool.domains == 1:
        return None
    in_domain = is_in.view(len(is_in), pool.domains, pool.ranks // pool.domains).any(dim=2)
    return in_domain.sum(0, dtype=torch.int32)


def _count_on_host(pool: Pool, ids: Any, experts: int) -> tuple[Any, Any, Any, Any]:
    """The counts by the package, which looks at each id."""
    counts = counts_of(ids.numpy(), experts, pool.ranks)
    per_rank, per_expert, is_in = map(torch.from_numpy, counts)
    return per_rank, _per_domain(pool, is_in), per_expert, is_in


def _read_dispatch(pool: Pool, call: DispatchCall) -> tuple[Sizes, DispatchCall]:
    call.expect_right()
    sizes, checked = _read_at_once(pool, call) or _read_each(pool, call)
    if not pool.on_device:
        _expect_one_routing(pool, checked, sizes.experts)
    return sizes, checked


def _expect_one_routing(pool: Pool, call: DispatchCall, experts: int) -> None:
    """Refuses tensors of a routing that contradict each other. The host reads them only where it need not wait."""
    is_in: Any = call.is_token_in_rank
    ids: Any = call.topk_idx
    per_rank = read("num_tokens_per_rank", call.num_tokens_per_rank, (torch.int32,), (pool.ranks,))
    expect_device(
        pool, x=call.reference, topk_idx=ids, is_token_in_rank=is_in, num_tokens_per_rank=per_rank
    )
    sums = is_in.sum(0, dtype=torch.int32)
    if not torch.equal(per_rank, sums):
        raise Refusal(
            f"num_tokens_per_rank: found {per_rank.tolist()}; expected the columns' sums of is_token_in_rank, "
            f"{sums.tolist()}"
        )
    _, _, routes = counts_of(ids.numpy(), experts, pool.ranks)
    if not torch.equal(is_in, torch.from_numpy(routes)):
        raise Refusal("is_token_in_rank: found another routing than that of topk_idx")


def _looks(pool: Pool, call: DispatchCall) -> Sizes:
    """The sizes of a dispatch by the looks of its tensors."""
    tokens, hidden = call.reference.shape
    ids: Any = call.topk_idx
    counts: Any = call.num_tokens_per_expert
    most, named = _room(pool, call, tokens)
    return sizes_of(counts.shape[0], ids.shape[1], hidden, most, named)


def _read_at_once(pool: Pool, call: DispatchCall) -> tuple[Sizes, DispatchCall] | None:
    """The arguments, where all are as most callers give them."""
    found = _routing(call, pool.ranks)
    if found is None or call.num_tokens_per_rank is None:
        return None
    alignment, worst = call.expert_alignment, call.num_worst_tokens
    if type(alignment) is not int or type(worst) is not int or not 1 <= alignment <= MOST:
        return None
    tokens, hidden, topk, experts = found
    if worst and not pool.ranks * tokens <= worst <= MOST:
        return None
    most, named = _room(pool, call, tokens)
    sizes = sizes_of(experts, topk, hidden, most, named)
    return sizes, call


def _room(pool: Pool, call: DispatchCall, tokens: int) -> tuple[int, int | None]:
    """M, and M if the caller names it: with worst-case sizes the output has room for R * M rows."""
    worst = call.num_worst_tokens
    named = -(-worst // pool.ranks) if worst and pool.on_device else None
    return named or first_tokens(tokens), named


def _read_each(pool: Pool, call: DispatchCall) -> tuple[Sizes, DispatchCall]:
    x, scales = read_rows(call.x, None, None)
    experts, ids, weights = read_routing(call, len(x), pool.ranks)
    router = "is_token_in_rank" if call.topk_idx is None else "topk_idx"
    expect_device(pool, x=x, scales=scales, **{router: ids}, topk_weights=weights)
    most, named = _room(pool, call, len(x))
    sizes = sizes_of(experts, ids.shape[1], x.shape[1], most, named)
    return sizes, replace(call, x=x, scales=scales, topk_idx=ids, topk_weights=weights)


def dispatch(pool: Pool, call: DispatchCall, timing: Timing) -> tuple[Any, ...]:
    """A dispatch without a handle; the last item is its event."""
    stream = stream_of(pool, call, timing)

    def send(opened: Opened, checked: DispatchCall) -> tuple[DispatchCall, bool, Any]:
        no_sync = bool(call.num_worst_tokens) and opened.takes("without_sync")
        ids: Any = checked.topk_idx
        name_stream(opened, stream)
        sent = opened.communicator.dispatch(
            checked.reference,
            ids,
            checked.topk_weights,
            scales=checked.scales,
            worst_case=no_sync,
            max_tokens=_room(pool, checked, 0)[1] if opened.takes("max_tokens") else None,
            stream=stream.raw,
            without_sync=no_sync,
            sms=call.sms,
        )
        return checked, not no_sync, sent

    if not call.num_worst_tokens and stream.is_captured:
        raise sync_in_capture("num_worst_tokens")
    with stream.inside():
        opened, (checked, has_sync, (received, native)) = pool.dispatch(
            lambda: _read_dispatch(pool, call),
            send,
            mode_of("flat", not call.num_worst_tokens),
            lambda: _looks(pool, call),
        ).sent()
        add_lost(pool, received)
        given = call.num_worst_tokens or received.tokens
        _expect_rows_fit(pool, given, received)
        record = Record(opened, native, given, has_sync, sms=call.sms)
        outputs = _give(pool, call, Arrival(record, received, checked, stream))
        clear_behind(pool, outputs.rows, received.rows)
        handle = _make_handle(pool, call, record, outputs)
        per_expert = _counts_list(pool, call, outputs, stream)
    rows, ids, weights = outputs.rows, outputs.ids, outputs.weights
    inputs = (call.x, call.topk_idx, call.topk_weights, call.is_token_in_rank)
    as_read = (checked.x, checked.scales, checked.topk_idx, checked.topk_weights)
    # The allocator does not know the handle's tensors over `block`.
    event = stream.finish((*inputs, *as_read), (rows, ids, weights, outputs.block, handle))
    return _with_scales(rows), ids, weights, per_expert, handle, event


def _with_scales(rows: tuple[Any, ...]) -> Any:
    """Rows as a caller gets them: alone, or in a tuple with their scales."""
    return rows if len(rows) > 1 else rows[0]


def _expect_rows_fit(pool: Pool, given: int, received: Any) -> None:
    """Refuses a number of rows that is too small for those that arrived, where the host knows how many did."""
    if not pool.on_device and received.tokens > given:
        # Each rank's own tokens were below it, so ranks gave different numbers.
        raise invalid(
            "dispatch",
            f"num_worst_tokens: found {given} on this rank; expected at least the {received.tokens} tokens that "
            "arrived",
            pool.rank,
        )


@dataclass
class Outputs:
    """The tensors that a dispatch gives, and those of its handle."""

    # With their scales, if they have some.
    rows: tuple[Any, ...]
    ids: Any
    weights: Any
    # Source tokens, and the ends of the rows of each source, by which the record is found. Both lie in `block`.
    tokens: Any
    ends: Any
    block: Any
    counts: list[int] | None


@dataclass
class Arrival:
    """A dispatch that was received."""

    record: Record
    received: Any
    checked: DispatchCall
    stream: CallStream


def _give(pool: Pool, call: DispatchCall, arrival: Arrival) -> Outputs:
    """The outputs. One call copies all that do not stay where they arrived."""
    record, received = arrival.record, arrival.received
    checked, stream = arrival.checked, arrival.stream
    opened, given = record.opened, record.given
    # Room for all places that the output has.
    room, x = max(given, received.rows), checked.reference
    stays, is_routed = stays_in_arena(opened, stream), call.topk_idx is not None
    # Copies: a handle may live for long, and holds no rows.
    block = torch.empty(room + pool.ranks, dtype=torch.int32, device=x.device)
    rows, wanted = ((), {}) if stays else _own_rows(checked, room)
    ids, weights = None, None
    if is_routed:
        ids = wanted["ids"] = block.new_empty((room, opened.sizes.topk), dtype=torch.int64)
        if not (stays and given == received.rows and record.has_sync):
            # Behind the rows that arrived is no weight. Their number may be known to the device alone.
            weights = wanted["weights"] = block.new_empty(ids.shape, dtype=torch.float32)
    arrays, (tokens, ends), counts = opened.communicator._give(
        reader(),
        received,
        block,
        _PARTS,
        record=record,
        names=_ARRAYS if stays else (),
        keeps_fp8=x.dtype is torch.float8_e4m3fn,
        columns=pool.ranks if pool.domains == 1 else None,
        counts=is_routed and not call.num_worst_tokens,
        stream=stream.raw,
        **wanted,
    )
    if stays:
        arrived, scales, its_weights = arrays
        rows = _arrived_rows(typed(arrived, x.dtype), scales, checked, room)
        weights = its_weights if weights is None and is_routed else weights
    if room != given:
        rows = tuple(fit(one, given) for one in rows)
        tokens = fit(tokens, given)
        if is_routed:
            ids, weights = fit(ids, given), fit(weights, given)
    return Outputs(rows, ids, weights, tokens, ends, block, counts)


def _arrived_rows(x: Any, scales: Any, checked: DispatchCall, room: int) -> tuple[Any, ...]:
    """The rows where they arrived, and their scales."""
    if scales is None:
        return (fit(x, room),)
    return fit(x, room), fit(typed(scales, checked.scales.dtype), room)


def _own_rows(checked: DispatchCall, room: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Room for rows and their scales, and their names as copies. A subclass of the caller's stays out of it."""
    x, scales = checked.reference, checked.scales
    own = torch.empty((room, x.shape[1]), dtype=x.dtype, device=x.device)
    if scales is None:
        return (own,), {"x": own}
    own_scales = torch.empty((room, scales.shape[1]), dtype=scales.dtype, device=x.device)
    return (own, own_scales), {"x": own, "scales": own_scales}


def _counts_list(pool: Pool, call: DispatchCall, outputs: Outputs, stream: CallStream) -> list[int]:
    """Rows per local expert, rounded up: on the host, which waits for them. None are asked for without CPU sync."""
    if call.num_worst_tokens:
        return []
    counts = outputs.counts
    if counts is None:
        counts = _sum_over_sources(pool, call.num_tokens_per_expert, stream)
    alignment = call.expert_alignment
    if alignment == 1:
        return counts
    return [-(-count // alignment) * alignment for count in counts]


def _sum_over_sources(pool: Pool, counts: Any, stream: CallStream) -> list[int]:
    """Gives each rank the counts of its experts; returns the sums of what came here. Collective."""
    counts = counts.view(pool.ranks, -1)
    local = counts.shape[1]
    opened = pool.open_counts(local)
    rows = counts.new_zeros((pool.ranks, opened.sizes.hidden))
    rows[:, :local] = counts
    ranks = torch.arange(pool.ranks, device=counts.device)[:, None]
    # The words pass untouched, whatever they are called.
    received, _ = opened.communicator.dispatch(rows.view(torch.float32), ranks, stream=stream.raw)
    sums: list[int] = take(received.x).view(torch.int32)[:, :local].sum(0).tolist()
    return sums


def _make_handle(
    pool: Pool, call: DispatchCall, record: Record, outputs: Outputs
) -> tuple[Any, ...]:
    """The tuple of tensors that DeepEP would return. Those that its kernels alone read are dummies of the shape."""
    ranks, tokens, domains = pool.ranks, record.native.tokens, pool.domains
    ends, is_in = outputs.ends, call.is_token_in_rank
    device = ends.device
    if domains == 1:
        # Only this rank's column is known without another exchange, so all are this one.
        channel = dummy(device, ranks, 1)
        return ends, channel, channel, outputs.tokens, is_in, dummy(device, tokens, ranks)
    per_domain, per_rank = dummy(device, domains, 1), dummy(device, ranks, 1)
    domain_ends = ends.view(domains, -1)[:, -1].contiguous()
    before = (is_in, per_domain, per_rank, per_domain, domain_ends, per_rank)
    meta = torch.zeros((record.given, 8), dtype=torch.uint8, device=device)
    heads = dummy(device, tokens, domains)
    return (*before, ends, meta, heads, dummy(device, 0, ranks // domains))


def _own_record(pool: Pool, handle: Any) -> Record:
    record = _handles.record_of(handle, Record)
    pool.expect_own(record.opened)
    return record


def replay(pool: Pool, call: DispatchCall, timing: Timing) -> tuple[Any, Any]:
    """A dispatch by the routing of a handle, and its event."""
    stream = stream_of(pool, call, timing)
    with stream.inside():
        record, checked, received = by_handle.replay(pool, call, _own_record, stream)
        room = max(record.given, received.rows)
        if stays_in_arena(record.opened, stream):
            arrived, its_scales = take_all(received, ("x", "scales"), checked.reference.dtype)
            given = _arrived_rows(arrived, its_scales, checked, room)
        else:
            given, wanted = _own_rows(checked, room)
            record.opened.communicator.copy_out(received, stream=stream.raw, **wanted)
        given = tuple(fit(one, record.given) for one in given)
        clear_behind(pool, given, received.rows)
    return _with_scales(given), stream.finish((call.x, checked.x, checked.scales), given)


def combine(pool: Pool, call: CombineCall, timing: Timing) -> tuple[Any, Any, EventOverlap]:
    """The combine of a dispatch: rows, weights, and the event."""
    return by_handle.combine(pool, call, _own_record, timing)
