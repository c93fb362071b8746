"""The normal calls of V1: flat rows, one per token and rank."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import tokenyard
from tokenyard import errors

from . import _arguments, _handles, _routing
from ._arguments import NUMPY, DispatchCall, first_tokens, read_rows
from ._arrays import FLOATS, Array, Refusal, Tensor, like, read, to_numpy
from ._pool import Opened, Pool, way_of
from ._sizes import Sizes


@dataclass
class Record:
    """The dispatch that a handle stands for."""

    opened: Opened
    native: tokenyard.Handle
    # Rows that arrived, and rows that the caller was given.
    rows: int
    given_rows: int


def layout(
    pool: Pool, topk_idx: Tensor, num_experts: int
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Counts per rank, domain and expert, and the map of ranks."""
    try:
        ids = read("topk_idx", topk_idx, (np.int64,), (None, None))
        _routing.check_experts(num_experts, pool.ranks)
        per_rank, per_expert, is_in = _routing.counts_of(ids, num_experts, pool.ranks)
    except Refusal as refusal:
        # It is local: the others cannot be informed here.
        raise errors.InvalidInputError(
            str(refusal), kind="invalid_input", rank=pool.rank, operation="get_dispatch_layout"
        ) from None
    per_domain = None
    if pool.domains > 1:
        in_domain = is_in.reshape(len(ids), pool.domains, pool.ranks // pool.domains).any(axis=2)
        per_domain = like(topk_idx, in_domain.sum(axis=0, dtype=np.int32))
    return (
        like(topk_idx, per_rank),
        per_domain,
        like(topk_idx, per_expert),
        like(topk_idx, is_in),
    )


def _read_dispatch(pool: Pool, call: DispatchCall) -> tuple[Sizes, DispatchCall]:
    x, scales = read_rows(NUMPY, call.x, None, None)
    tokens, hidden = x.shape
    routing = _arguments.read_routing(NUMPY, call, tokens, pool.ranks)
    sums = routing.is_in.sum(axis=0)
    per_rank = read("num_tokens_per_rank", call.num_tokens_per_rank, (np.int32,), (pool.ranks,))
    if not np.array_equal(per_rank, sums):
        raise Refusal(
            f"num_tokens_per_rank: found {per_rank.tolist()}; expected the columns' sums of is_token_in_rank, "
            f"{sums.tolist()}"
        )
    most = first_tokens(tokens)
    checked = replace(call, x=x, scales=scales, num_tokens_per_expert=routing.expert_counts)
    if routing.ids is None:
        ids = _routing.ids_of_map(routing.is_in, pool.ranks)
        sizes = Sizes(pool.ranks, pool.ranks, hidden, most)
        return sizes, replace(checked, topk_idx=ids)
    ids, experts = routing.ids, routing.experts
    _, _, routes = _routing.counts_of(ids, experts, pool.ranks)
    if not np.array_equal(routing.is_in, routes):
        raise Refusal("is_token_in_rank: found another routing than that of topk_idx")
    checked = replace(checked, topk_idx=ids, topk_weights=routing.weights)
    return Sizes(experts, ids.shape[1], hidden, most), checked


def dispatch(
    pool: Pool, call: DispatchCall
) -> tuple[Any, Tensor | None, Tensor | None, list[int], tuple[Any, ...]]:
    """A dispatch without a handle."""
    kept: list[DispatchCall] = []

    def send(opened: Opened, checked: DispatchCall) -> tokenyard.PendingDispatch:
        kept[:] = [checked]
        ids: Any = checked.topk_idx
        return opened.communicator.dispatch_send(
            checked.reference, ids, checked.topk_weights, scales=checked.scales
        )

    opened, (received, native) = pool.dispatch(
        lambda: _read_dispatch(pool, call), send, way_of("flat")
    )
    pool.gaps.add_sources(received.lost)
    checked = kept[0]
    found, worst = received.tokens, call.num_worst_tokens
    if worst and found > worst:
        # Each rank's own tokens were below it, so ranks gave different numbers.
        raise errors.InvalidInputError(
            f"num_worst_tokens: found {worst} on this rank; expected at least the {found} tokens that arrived",
            kind="invalid_input",
            rank=pool.rank,
            operation="dispatch",
        )
    given = worst or found
    record = Record(opened, native, found, given)
    ids, weights = None, None
    if call.topk_idx is not None:
        counts = np.asarray(received.expert_counts)
        ids = np.full((given, opened.sizes.topk), -1, np.int64)
        weights = np.zeros(ids.shape, np.float32)
        opened.communicator.copy_out(received, ids=ids, weights=weights)
    else:
        own_counts: Any = checked.num_tokens_per_expert
        counts = pool.sum_over_sources(own_counts.reshape(pool.ranks, -1))
    alignment = call.expert_alignment
    per_expert = [] if worst else [-(-int(count) // alignment) * alignment for count in counts]
    rows = give_rows(call, checked, received, given)
    handle = make_handle(pool, call, received, record)
    reference = call.reference
    return (
        rows,
        None if ids is None else like(reference, ids),
        None if weights is None else like(reference, weights),
        per_expert,
        handle,
    )


def give_rows(
    call: DispatchCall, checked: DispatchCall, received: tokenyard.Received, given: int
) -> Tensor | tuple[Tensor, Tensor]:
    """The received rows, copied out of the arena; behind them up to `given` is nothing."""
    reference = call.reference

    def take(output: Any, dtype: Any) -> Tensor:
        array = np.asarray(output).view(dtype)
        if given == len(array):
            return like(reference, array.copy())
        out = np.zeros((given, array.shape[1]), dtype)
        out[: len(array)] = array
        return like(reference, out)

    x = take(received.x, checked.reference.dtype)
    if checked.scales is None:
        return x
    return x, take(received.scales, checked.scales.dtype)


def make_handle(
    pool: Pool, call: DispatchCall, received: tokenyard.Received, record: Record
) -> tuple[Any, ...]:
    """The tuple of tensors that DeepEP would return. Those that its kernels alone read are dummies of the shape."""
    reference, ranks = call.reference, pool.ranks
    rows, tokens = record.given_rows, record.native.tokens
    ends = np.array(received.source_ends)
    source = np.full(rows, -1, np.int32)
    source[: record.rows] = np.asarray(received.source) % record.opened.sizes.tokens
    is_in = to_numpy("is_token_in_rank", call.is_token_in_rank).copy()
    if pool.domains == 1:
        # Only this rank's column is known without another exchange.
        prefix = np.zeros((ranks, ranks), np.int32)
        prefix[:, pool.rank] = ends
        channel = np.zeros((ranks, 1), np.int32)
        send_head = np.where(is_in, 0, -1).astype(np.int32)
        return (
            _handles.anchored(reference, prefix, record),
            *(like(reference, array) for array in (channel, channel.copy(), source, is_in)),
            like(reference, send_head),
        )
    domains = pool.domains
    per_domain = np.zeros((domains, 1), np.int32)
    per_rank = np.zeros((ranks, 1), np.int32)
    domain_ends = ends.reshape(domains, -1)[:, -1].copy()
    meta = np.zeros((rows, 8), np.uint8)
    heads = np.zeros((tokens, domains), np.int32)
    forwarded = np.zeros((0, ranks // domains), np.int32)
    before = (is_in, per_domain, per_rank, per_domain.copy(), domain_ends, per_rank.copy())
    return (
        *(like(reference, array) for array in before),
        _handles.anchored(reference, ends, record),
        *(like(reference, array) for array in (meta, heads, forwarded)),
    )


def _own_record(pool: Pool, handle: Any) -> Record:
    record = _handles.record_of(handle, Record)
    pool.expect_own(record.opened)
    return record


def replay(pool: Pool, call: DispatchCall, handle: Any) -> Any:
    """A dispatch by the routing of a handle."""
    opened = None
    try:
        record = _own_record(pool, handle)
        opened = record.opened
        for name in ("topk_idx", "topk_weights"):
            if getattr(call, name) is not None:
                raise Refusal(f"{name}: found some with a handle; expected None")
        x, scales = read_rows(NUMPY, call.x, record.native.tokens, opened.sizes.hidden)
    except Exception as error:
        pool.refuse(opened, "replay", error)
    received = opened.communicator.replay(record.native, x, scales=scales)
    pool.gaps.add_sources(received.lost)
    checked = replace(call, x=x, scales=scales)
    return give_rows(call, checked, received, record.given_rows)


def read_combine_rows(x: Tensor, record: Record) -> Array:
    """Rows for a combine: as many as arrived, or as were given."""
    rows = read("x", x, FLOATS, (None, record.opened.sizes.hidden))
    if len(rows) not in (record.rows, record.given_rows):
        raise Refusal(
            f"x: found {len(rows)} rows; expected {record.given_rows}, the rows of the dispatch"
        )
    return np.ascontiguousarray(rows[: record.rows])


def combine(
    pool: Pool, x: Tensor, handle: Any, topk_weights: Tensor | None, bias: Any
) -> tuple[Tensor, Tensor | None]:
    """The combine of a dispatch."""
    opened, weights = None, None
    try:
        record = _own_record(pool, handle)
        opened = record.opened
        rows = read_combine_rows(x, record)
        sizes = opened.sizes
        if topk_weights is not None:
            shape = (len(to_numpy("x", x)), sizes.topk)
            weights = read("topk_weights", topk_weights, (np.float32,), shape)
            weights = np.ascontiguousarray(weights[: record.rows])
        biases = _arguments.read_bias(NUMPY, bias, rows.dtype, (record.native.tokens, sizes.hidden))
    except Exception as error:
        pool.refuse(opened, "combine", error)
    missing = pool.gaps.room(record.native.tokens)
    out, summed = opened.communicator.combine(
        record.native,
        rows,
        weights,
        bias=biases or None,
        sum_weights=weights is not None,
        missing=missing,
    )
    pool.gaps.add_experts(missing)
    combined = like(x, np.asarray(out).view(rows.dtype))
    return combined, None if summed is None else like(topk_weights, np.asarray(summed))
