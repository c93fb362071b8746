"""Dispatch and combine of V2: flat rows, or expanded ones, a row per (token, local expert)."""

from dataclasses import dataclass
from typing import Any

import numpy as np

import tokenyard

from . import _routing
from ._arrays import FLOATS, Array, Refusal, Tensor, like, read
from ._engine import Engine, Opened, Sizes, align
from ._normal import Rows, read_bias, read_rows
from .buffers.handle import EPHandle


@dataclass
class DispatchCall:
    """The arguments of a dispatch, as they were given, with defaults filled in."""

    x: Tensor | tuple[Tensor, Tensor]
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    stats: Tensor | None
    experts: int | None
    tokens: int | None
    alignment: int | None
    handle: EPHandle | None
    num_sms: int
    copies_handle: bool
    has_cpu_sync: bool
    is_expanded: bool
    is_column_major: bool

    @property
    def reference(self) -> Tensor:
        """A tensor of the library that results are of."""
        return self.x[0] if isinstance(self.x, tuple) else self.x


@dataclass
class Routed:
    """The arguments of a dispatch, read and checked."""

    rows: Rows
    ids: Array
    weights: Array | None


@dataclass
class Record:
    """What a handle stands for."""

    opened: Opened
    native: tokenyard.Handle
    # [T, K] of this rank, and [N, K] of the rows that arrived, local or -1.
    ids: Array
    recv_ids: Array
    experts: int
    alignment: int
    tokens: int
    is_exact: bool

    @property
    def copies(self) -> _routing.Expansion:
        local = self.experts // self.opened.world.ranks
        return _routing.Expansion(self.recv_ids, local, self.alignment)

    def flat_rows(self) -> int:
        """Rows of flat outputs: those that arrived, or the most that can."""
        return len(self.recv_ids) if self.is_exact else self.opened.world.ranks * self.tokens

    def expanded_rows(self, copies: _routing.Expansion) -> int:
        """Rows of expanded outputs."""
        if self.is_exact:
            return copies.rows
        ranks, topk = self.opened.world.ranks, self.ids.shape[1]
        local = self.experts // ranks
        most = ranks * self.tokens * min(topk, local) + (self.alignment - 1) * local
        return align(most, self.alignment)


Result = tuple[Any, Tensor | None, Tensor | None, EPHandle]


def dispatch(engine: Engine, call: DispatchCall) -> Result:
    """A dispatch, or one by the routing of a handle."""
    if call.handle is not None:
        return _replay(engine, call, call.handle)
    kept: list[Routed] = []

    def send(opened: Opened, routed: Routed) -> tokenyard.PendingDispatch:
        kept[:] = [routed]
        rows = routed.rows
        return opened.main.dispatch_send(rows.x, routed.ids, routed.weights, scales=rows.scales)

    opened, (received, native) = engine.dispatch(lambda: _read_dispatch(engine, call), send)
    routed = kept[0]
    record = Record(
        opened,
        native,
        routed.ids.copy(),
        np.array(np.asarray(received.ids), np.int64),
        call.experts or 0,
        call.alignment or 1,
        call.tokens or 0,
        call.has_cpu_sync,
    )
    copies = record.copies
    if call.stats is not None:
        stats = read("cumulative_local_expert_recv_stats", call.stats, (np.int32,), (None,))
        stats += copies.counts
    handle = _make_handle(engine, call, record, copies, received)
    return (*_give(call, record, copies, received, routed.rows), handle)


def _read_dispatch(engine: Engine, call: DispatchCall) -> tuple[Sizes, Routed]:
    rows = read_rows(call.x, None, None)
    tokens, hidden = rows.x.shape
    if call.topk_idx is None or call.experts is None:
        raise Refusal(
            "topk_idx, num_experts: found None without a handle; expected both, or a handle"
        )
    ids = read("topk_idx", call.topk_idx, (np.int64,), (tokens, None))
    weights = None
    if call.topk_weights is not None:
        weights = read("topk_weights", call.topk_weights, (np.float32,), ids.shape)
        weights = np.ascontiguousarray(weights)
    if call.tokens is None or tokens > call.tokens or call.tokens < 1:
        raise Refusal(
            f"x: found {tokens} tokens; expected at most num_max_tokens_per_rank = {call.tokens}"
        )
    if call.experts <= 0 or call.experts % engine.ranks:
        raise Refusal(
            f"num_experts: found {call.experts}; expected a multiple of the {engine.ranks} ranks"
        )
    if call.alignment is None or call.alignment < 1:
        raise Refusal(f"expert_alignment: found {call.alignment}; expected at least 1")
    _routing.check_ids(ids, call.experts)
    if call.stats is not None:
        local = call.experts // engine.ranks
        read("cumulative_local_expert_recv_stats", call.stats, (np.int32,), (local,))
    sizes = Sizes(call.experts, ids.shape[1], hidden, call.tokens)
    return sizes, Routed(rows, np.ascontiguousarray(ids), weights)


def _replay(engine: Engine, call: DispatchCall, handle: EPHandle) -> Result:
    opened = None
    try:
        record = record_of(handle)
        opened = record.opened
        _expect_equal(call, record)
        rows = read_rows(call.x, len(record.ids), opened.sizes.hidden)
        weights = None
        if call.topk_weights is not None:
            weights = read("topk_weights", call.topk_weights, (np.float32,), record.ids.shape)
            weights = np.ascontiguousarray(weights)
    except Refusal as refusal:
        engine.refuse(opened, "replay", refusal)
    received = opened.main.replay(record.native, rows.x, weights, scales=rows.scales)
    return (*_give(call, record, record.copies, received, rows), handle)


def _expect_equal(call: DispatchCall, record: Record) -> None:
    """What a cached call may repeat must be what the handle has."""
    for name, found, expected in (
        ("num_experts", call.experts, record.experts),
        ("expert_alignment", call.alignment, record.alignment),
        ("num_max_tokens_per_rank", call.tokens, record.tokens),
    ):
        if found is not None and found != expected:
            raise Refusal(f"{name}: found {found}; expected {expected}, that of the handle")
    for name, given in (
        ("topk_idx", call.topk_idx),
        ("cumulative_local_expert_recv_stats", call.stats),
    ):
        if given is not None:
            raise Refusal(f"{name}: found some with a handle; expected None")


def record_of(handle: object) -> Record:
    """The record of a handle. Raises Refusal for what is none."""
    if not isinstance(handle, EPHandle):
        raise Refusal(f"handle: found {type(handle).__name__}; expected an EPHandle")
    return handle._record


def _give(
    call: DispatchCall,
    record: Record,
    copies: _routing.Expansion,
    received: tokenyard.Received,
    rows: Rows,
) -> tuple[Any, Tensor | None, Tensor | None]:
    """The received rows, ids and weights, copied out of the arena and arranged."""
    reference, found = call.reference, len(record.recv_ids)
    given = record.expanded_rows(copies) if call.is_expanded else record.flat_rows()
    to, source = (copies.slot, copies.row) if call.is_expanded else (slice(found), slice(None))

    def arrange(output: Any, dtype: Any, is_column_major: bool = False) -> Array:
        array = np.asarray(output).view(dtype)
        if is_column_major:
            # Columns start at multiples of 16 bytes.
            out = np.zeros((array.shape[1], align(given, 4)), dtype).T[:given]
        else:
            out = np.zeros((given, array.shape[1]), dtype)
        out[to] = array[source]
        return out

    x: Any = like(reference, arrange(received.x, rows.x.dtype))
    if rows.scales is not None:
        scales = arrange(received.scales, rows.scales.dtype, call.is_column_major)
        x = (x, like(reference, scales))
    ids, weights = None, None
    if not call.is_expanded:
        ids = np.full((given, record.ids.shape[1]), -1, np.int64)
        ids[:found] = record.recv_ids
    if received.weights is not None:
        given_weights = np.asarray(received.weights)
        if call.is_expanded:
            weights = np.zeros(given, np.float32)
            weights[copies.slot] = given_weights[copies.row, copies.k]
        else:
            weights = arrange(given_weights, np.float32)
    return (
        x,
        None if ids is None else like(reference, ids),
        None if weights is None else like(reference, weights),
    )


def _make_handle(
    engine: Engine,
    call: DispatchCall,
    record: Record,
    copies: _routing.Expansion,
    received: tokenyard.Received,
) -> EPHandle:
    reference = call.reference
    found, topk = record.recv_ids.shape
    most = record.opened.sizes.tokens
    origin = np.asarray(received.source).astype(np.int64)
    rank, token = origin // most, origin % most
    metadata = np.full((record.flat_rows(), topk + 2), -1, np.int32)
    metadata[:found, 0] = rank * record.tokens + token
    last = topk - 1 - np.argmax(record.recv_ids[:, ::-1] >= 0, axis=1)
    metadata[:found, 1] = rank * topk + last
    if call.is_expanded:
        metadata[:found, 2:] = copies.slots(record.recv_ids.shape)
    per_domain = engine.ranks // engine.domains
    by_scaleup = np.asarray(received.source_counts).reshape(engine.domains, per_domain).sum(axis=0)
    expert_psum = copies.starts + copies.counts if call.is_expanded else np.cumsum(copies.aligned)
    ids = call.topk_idx if not call.copies_handle else like(reference, record.ids.copy())
    return EPHandle(
        record,
        do_expand=call.is_expanded,
        num_experts=record.experts,
        expert_alignment=record.alignment,
        num_max_tokens_per_rank=record.tokens,
        num_sms=call.num_sms,
        topk_idx=ids,
        num_recv_tokens=record.flat_rows(),
        num_expanded_tokens=record.expanded_rows(copies),
        per_expert=copies.aligned.tolist() if record.is_exact else [],
        scaleup_psum=like(reference, np.cumsum(by_scaleup).astype(np.int32)),
        expert_psum=like(reference, expert_psum.astype(np.int32)),
        unaligned=like(reference, copies.counts),
        metadata=like(reference, metadata),
        dummy=like(reference, np.full(record.ids.shape, -1, np.int32)),
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
class Partial:
    """A row per token that arrived, and the weights of its copies."""

    rows: Array
    weights: Array | None
    biases: list[Array]


def _read_combine(call: CombineCall, record: Record) -> Partial:
    is_expanded = call.handle.do_expand
    copies = record.copies
    given = record.expanded_rows(copies) if is_expanded else record.flat_rows()
    hidden, topk = record.opened.sizes.hidden, record.ids.shape[1]
    x = np.ascontiguousarray(read("x", call.x, FLOATS, (given, hidden)))
    biases = read_bias(call.bias, x.dtype, (len(record.ids), hidden))
    weights = None
    if call.topk_weights is not None:
        if is_expanded and not call.rounds_per_rank:
            raise Refusal(
                "topk_weights: found some with expanded rows and allow_multiple_reduction = False; expected None"
            )
        shape = (given,) if is_expanded else (given, topk)
        weights = read("topk_weights", call.topk_weights, (np.float32,), shape)
    found = len(record.recv_ids)
    if not is_expanded:
        return Partial(x[:found], None if weights is None else weights[:found].copy(), biases)
    slots = copies.slots(record.recv_ids.shape)
    rows = _routing.sum_copies(x, slots)
    if call.rounds_per_rank:
        rows = rows.astype(x.dtype)
    else:
        biases = [bias.astype(np.float32) for bias in biases]
    if weights is not None:
        weights = np.where(slots >= 0, weights[slots], 0).astype(np.float32)
    return Partial(rows, weights, biases)


def combine(engine: Engine, call: CombineCall) -> tuple[Tensor, Tensor | None]:
    """The combine of a dispatch."""
    opened = None
    try:
        record = record_of(call.handle)
        opened = record.opened
        partial = _read_combine(call, record)
    except Refusal as refusal:
        engine.refuse(opened, "combine", refusal)
    out, weights = opened.main.combine(
        record.native, partial.rows, partial.weights, bias=partial.biases or None
    )
    dtype = partial.rows.dtype
    rows = np.asarray(out).view(dtype)
    wanted = read("x", call.x, FLOATS, (None, None)).dtype
    combined = like(call.x, rows.astype(wanted, copy=False))
    return combined, None if weights is None else like(call.x, np.asarray(weights))
