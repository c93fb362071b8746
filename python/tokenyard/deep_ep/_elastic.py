"""Dispatch and combine of V2: flat rows, or expanded ones, a row per (token, local expert)."""

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

import tokenyard

from . import _routing
from ._arguments import NUMPY, check_tokens, expect_integer, read_bias, read_rows
from ._arrays import FLOATS, Array, Refusal, Tensor, like, read
from ._pool import Opened, Pool, Way, way_of
from ._sizes import Sizes, align
from .buffers.handle import EPHandle


@dataclass
class DispatchCall:
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
    # The number that a handle reports, and the one that the caller has chosen.
    num_sms: int
    chosen_sms: int | None
    copies_handle: bool
    has_cpu_sync: bool
    is_expanded: bool
    is_column_major: bool
    # Of `x`, where the tensors were read and checked; before, they come with it.
    scales: Any = None

    @property
    def reference(self) -> Tensor:
        """A tensor of the library that results are of."""
        return self.x[0] if isinstance(self.x, tuple) else self.x

    @property
    def layout(self) -> Literal["flat", "expert_major", "packed"]:
        return "expert_major" if self.is_expanded else "flat"

    @property
    def way(self) -> Way:
        return way_of(self.layout, self.has_cpu_sync)


class Shaped(Protocol):
    """A record of a dispatch, with the arguments that a cached call may repeat."""

    experts: int
    alignment: int
    tokens: int
    is_expanded: bool


@dataclass
class Record:
    """The dispatch that a handle stands for."""

    opened: Opened
    native: tokenyard.Handle
    experts: int
    alignment: int
    # M of the dispatch.
    tokens: int
    is_exact: bool
    is_expanded: bool
    # Tokens that arrived, and their rows: copies of them with padding, where expanded.
    found: int
    filled: int
    # [N, K]: rows of copies, or -1; where expanded.
    slots: Array | None = None

    @property
    def given(self) -> int:
        """Rows of the outputs: those that arrived, or the most that can."""
        return self.native.rows

    def flat_rows(self, ranks: int) -> int:
        """Rows of flat outputs."""
        return self.found if self.is_exact else ranks * self.tokens

    def expanded_rows(self, ranks: int, aligned: Array) -> int:
        """Rows of expanded outputs; `aligned` counts those of each expert."""
        if self.is_exact:
            return int(aligned.sum())
        local = self.experts // ranks
        most = ranks * self.tokens * min(self.opened.sizes.topk, local)
        return align(most + (self.alignment - 1) * local, self.alignment)


Result = tuple[Any, Tensor | None, Tensor | None, EPHandle]


def dispatch(pool: Pool, call: DispatchCall) -> Result:
    """A dispatch, or one by the routing of a handle."""
    if call.handle is not None:
        return _replay(pool, call, call.handle)
    kept: list[DispatchCall] = []

    def send(opened: Opened, checked: DispatchCall) -> tokenyard.PendingDispatch:
        kept[:] = [checked]
        ids: Any = checked.topk_idx
        return opened.communicator.dispatch_send(
            checked.reference,
            ids,
            checked.topk_weights,
            scales=checked.scales,
            layout=call.layout,
            alignment=(call.alignment or 1) if call.is_expanded else 1,
            zero_padding=call.is_expanded,
            worst_case=not call.has_cpu_sync,
            max_tokens=call.tokens,
        )

    opened, (received, native) = pool.dispatch(lambda: _read_dispatch(pool, call), send, call.way)
    pool.gaps.add_sources(received.lost)
    found, filled = (int(total) for total in np.asarray(received.totals))
    record = Record(
        opened,
        native,
        experts=call.experts or 0,
        alignment=call.alignment or 1,
        tokens=call.tokens or 0,
        is_exact=call.has_cpu_sync,
        is_expanded=call.is_expanded,
        found=found,
        filled=filled,
    )
    if call.stats is not None:
        stats = read("cumulative_local_expert_recv_stats", call.stats, (np.int32,), (None,))
        stats += np.asarray(received.expert_counts)
    handle = _make_handle(pool, call, record, received)
    return (*_give(call, kept[0], record, received), handle)


def _read_dispatch(pool: Pool, call: DispatchCall) -> tuple[Sizes, DispatchCall]:
    x, scales = read_rows(NUMPY, call.x, None, None)
    tokens, hidden = x.shape
    if call.topk_idx is None or call.experts is None:
        raise Refusal(
            "topk_idx, num_experts: found None without a handle; expected both, or a handle"
        )
    ids = read("topk_idx", call.topk_idx, (np.int64,), (tokens, None))
    weights = None
    if call.topk_weights is not None:
        weights = read("topk_weights", call.topk_weights, (np.float32,), ids.shape)
        weights = np.ascontiguousarray(weights)
    named = check_tokens(tokens, "num_max_tokens_per_rank", call.tokens)
    _routing.check_experts(call.experts, pool.ranks)
    expect_integer("expert_alignment", call.alignment, 1)
    _routing.check_ids(ids, call.experts)
    if call.stats is not None:
        local = call.experts // pool.ranks
        read("cumulative_local_expert_recv_stats", call.stats, (np.int32,), (local,))
    most = max(named, call.most_tokens)
    sizes = Sizes(call.experts, ids.shape[1], hidden, most, named)
    ids = np.ascontiguousarray(ids)
    return sizes, replace(call, x=x, scales=scales, topk_idx=ids, topk_weights=weights)


def _replay(pool: Pool, call: DispatchCall, handle: EPHandle) -> Result:
    opened, layout = None, call.layout
    try:
        record = record_of(pool, handle)
        opened, layout = record.opened, record.native.layout
        expect_equal(call, record)
        tokens, topk = record.native.tokens, opened.sizes.topk
        x, scales = read_rows(NUMPY, call.x, tokens, opened.sizes.hidden)
        weights = None
        if call.topk_weights is not None:
            weights = read("topk_weights", call.topk_weights, (np.float32,), (tokens, topk))
            weights = np.ascontiguousarray(weights)
    except Exception as error:
        pool.refuse(opened, "replay", error, layout)
    received = opened.communicator.replay(record.native, x, weights, scales=scales)
    pool.gaps.add_sources(received.lost)
    checked = replace(call, x=x, scales=scales, topk_weights=weights)
    return (*_give(call, checked, record, received), handle)


def expect_equal(call: DispatchCall, record: Shaped) -> None:
    """Arguments that a cached call may repeat must equal those of the handle."""
    for name, found, expected in (
        ("num_experts", call.experts, record.experts),
        ("expert_alignment", call.alignment, record.alignment),
        ("num_max_tokens_per_rank", call.tokens, record.tokens),
        ("do_expand", call.is_expanded, record.is_expanded),
    ):
        if found is not None and found != expected:
            raise Refusal(f"{name}: found {found}; expected {expected}, that of the handle")
    for name, given in (
        ("topk_idx", call.topk_idx),
        ("cumulative_local_expert_recv_stats", call.stats),
    ):
        if given is not None:
            raise Refusal(f"{name}: found some with a handle; expected None")


def record_of(pool: Pool, handle: object) -> Record:
    """The record of a handle. Raises Refusal for what is none of this buffer."""
    if not isinstance(handle, EPHandle):
        raise Refusal(f"handle: found {type(handle).__name__}; expected an EPHandle")
    record: Record = handle._record
    pool.expect_own(record.opened)
    return record


def _give(
    call: DispatchCall, checked: DispatchCall, record: Record, received: tokenyard.Received
) -> tuple[Any, Tensor | None, Tensor | None]:
    """The received rows, ids and weights, copied out of the arena. Behind those that arrived are zeros."""
    reference, given, filled = call.reference, record.given, record.filled

    def take(output: Any, dtype: Any, is_column_major: bool = False) -> Array:
        array = np.asarray(output).view(dtype)[:filled]
        if is_column_major:
            # Columns start at multiples of 16 bytes.
            out = np.zeros((array.shape[1], align(given, 4)), dtype).T[:given]
        else:
            out = np.zeros((given, *array.shape[1:]), dtype)
        out[:filled] = array
        return out

    x: Any = like(reference, take(received.x, checked.reference.dtype))
    if checked.scales is not None:
        scales = take(received.scales, checked.scales.dtype, call.is_column_major)
        x = (x, like(reference, scales))
    ids, weights = None, None
    if not record.is_expanded:
        ids = np.empty((given, record.opened.sizes.topk), np.int64)
        record.opened.communicator.copy_out(received, ids=ids)
        ids = like(reference, ids)
    if received.weights is not None:
        weights = like(reference, take(received.weights, np.float32))
    return x, ids, weights


def _make_handle(
    pool: Pool, call: DispatchCall, record: Record, received: tokenyard.Received
) -> EPHandle:
    reference, ranks = call.reference, pool.ranks
    found, topk = record.found, record.opened.sizes.topk
    flat_rows = record.flat_rows(ranks)
    source = np.asarray(received.source)[:found]
    # [N, K]: local experts, or rows of copies; -1 where a token has none here.
    places = np.asarray(received.slots if call.is_expanded else received.ids)[:found]
    metadata = np.full((flat_rows, topk + 2), -1, np.int32)
    metadata[:found, 0] = source
    last = topk - 1 - np.argmax(places[:, ::-1] >= 0, axis=1)
    metadata[:found, 1] = source // record.tokens * topk + last
    if call.is_expanded:
        metadata[:found, 2:] = places
        record.slots = places.copy()
    counts = np.array(received.expert_counts)
    aligned = -(-counts // record.alignment) * record.alignment
    expert_psum = np.array(received.expert_ends) if call.is_expanded else np.cumsum(aligned)
    by_rank = np.asarray(received.source_counts).reshape(pool.domains, -1)
    ids = call.topk_idx
    if call.copies_handle:
        ids = like(reference, read("topk_idx", call.topk_idx, (np.int64,), (None, None)).copy())
    return EPHandle(
        record,
        do_expand=call.is_expanded,
        num_experts=record.experts,
        expert_alignment=record.alignment,
        num_max_tokens_per_rank=record.tokens,
        num_sms=call.num_sms,
        topk_idx=ids,
        num_recv_tokens=flat_rows,
        num_expanded_tokens=record.expanded_rows(ranks, aligned),
        per_expert=aligned.tolist() if record.is_exact else [],
        scaleup_psum=like(reference, np.cumsum(by_rank.sum(axis=0), dtype=np.int32)),
        expert_psum=like(reference, expert_psum.astype(np.int32)),
        counts=like(reference, counts),
        metadata=like(reference, metadata),
        dummy=like(reference, np.full((record.native.tokens, topk), -1, np.int32)),
    )


@dataclass
class CombineCall:
    """The arguments of a combine, as they were given."""

    x: Tensor
    handle: EPHandle
    topk_weights: Tensor | None
    bias: Any
    # Whether the copies on one rank are rounded before they are sent.
    rounds_per_rank: bool


@dataclass
class Terms:
    """The arguments of a combine, read and checked."""

    rows: Array
    weights: Array | None
    biases: list[Array]


def _read_combine(call: CombineCall, record: Record) -> Terms:
    given, hidden, topk = record.given, record.opened.sizes.hidden, record.opened.sizes.topk
    rows = np.ascontiguousarray(read("x", call.x, FLOATS, (given, hidden)))
    biases = read_bias(NUMPY, call.bias, rows.dtype, (record.native.tokens, hidden))
    if call.topk_weights is None:
        return Terms(rows, None, biases)
    if record.is_expanded and not call.rounds_per_rank:
        raise Refusal(
            "topk_weights: found some with expanded rows and allow_multiple_reduction = False; expected None"
        )
    shape = (given,) if record.is_expanded else (given, topk)
    weights = read("topk_weights", call.topk_weights, (np.float32,), shape)
    return Terms(rows, np.ascontiguousarray(weights), biases)


def combine(pool: Pool, call: CombineCall) -> tuple[Tensor, Tensor | None]:
    """The combine of a dispatch."""
    opened = None
    try:
        record = record_of(pool, call.handle)
        opened = record.opened
        terms = _read_combine(call, record)
    except Exception as error:
        pool.refuse(opened, "combine", error)
    if record.slots is not None and not call.rounds_per_rank:
        return like(call.x, _sum_in_k_order(pool, record, record.slots, terms)), None
    missing = pool.gaps.room(record.native.tokens)
    out, weights = opened.communicator.combine(
        record.native, terms.rows, terms.weights, bias=terms.biases or None, missing=missing
    )
    pool.gaps.add_experts(missing)
    combined = like(call.x, np.asarray(out).view(terms.rows.dtype))
    return combined, None if weights is None else like(call.x, np.asarray(weights))


def _sum_in_k_order(pool: Pool, record: Record, slots: Array, terms: Terms) -> Array:
    """Sums of float32 in k order, rounded once: a combine for each k, of that k's rows alone.

    One combine sums the rows of a rank before it adds those of the next rank. Of one k a token has one row at most, so
    the combine only moves it.
    """
    sums = np.zeros((record.native.tokens, terms.rows.shape[1]), np.float32)
    for bias in terms.biases:
        sums += bias.astype(np.float32)
    part, missing = np.zeros_like(terms.rows), pool.gaps.room(record.native.tokens)
    for of_k in slots.T:
        its = of_k[of_k >= 0]
        part[its] = terms.rows[its]
        moved, _ = record.opened.communicator.combine(record.native, part, missing=missing)
        sums += np.asarray(moved).view(part.dtype).astype(np.float32)
        part[its] = 0
    # Each combine says it of all k, and later ones of more ranks.
    pool.gaps.add_experts(missing)
    return np.asarray(sums.astype(part.dtype))
