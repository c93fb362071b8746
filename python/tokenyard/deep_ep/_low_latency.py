"""The low latency calls of V1: a block of R * M rows for each local expert."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

import tokenyard
from tokenyard import errors

from . import _handles, _routing
from ._arguments import check_tokens
from ._arrays import BF16, FLOATS, FP8, Array, Refusal, Tensor, like, read
from ._hooks import Hook
from ._pool import Opened, Pool, way_of
from ._sizes import Sizes
from .utils.math import CHANNELS, ceil_div

T = TypeVar("T")


@dataclass
class DispatchCall:
    """The arguments of a dispatch, as they were given."""

    x: Tensor
    topk_idx: Tensor
    tokens: int
    experts: int
    stats: Tensor | None
    wait_stats: Tensor | None
    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool

    @property
    def cast(self) -> Literal["fp8", "fp8_round", "fp8_ue8m0"] | None:
        if not self.use_fp8:
            return None
        return "fp8_ue8m0" if self.use_ue8m0 else "fp8_round" if self.round_scale else "fp8"


class Blocks:
    """The outputs of a dispatch on this rank. They exist before rows arrive."""

    def __init__(self, call: DispatchCall, ranks: int, x: Array) -> None:
        rows, local = ranks * call.tokens, call.experts // ranks
        hidden, groups = x.shape[1], ceil_div(x.shape[1], CHANNELS)
        self.x = np.zeros((local, rows, hidden), FP8 if call.use_fp8 else x.dtype)
        columns = -(-groups // 4) if call.use_ue8m0 else groups
        # Column-major, as DeepEP's GEMMs read them.
        physical = np.zeros((local, columns, rows), np.int32 if call.use_ue8m0 else np.float32)
        self.scales = physical.transpose(0, 2, 1) if call.use_fp8 else None
        self.counts = np.zeros(local, np.int32)
        self.source = np.zeros((local, rows), np.int32)
        self.ranges = np.zeros((local, ranks), np.int64)

    def fill(self, received: tokenyard.Received, tokens: int) -> None:
        """Copies what arrived; `tokens` is M of the call."""
        self.counts[:] = np.asarray(received.expert_counts)
        self.ranges[:] = np.asarray(received.ranges)
        x, source = np.asarray(received.x).view(self.x.dtype), np.asarray(received.source)
        for expert, count in enumerate(self.counts):
            filled = expert, slice(count)
            self.x[filled] = x[filled]
            self.source[filled] = source[filled] % tokens
            if self.scales is not None:
                self.scales[filled] = np.asarray(received.scales)[filled]


@dataclass
class Record:
    """The dispatch that a handle stands for. `opened` and `native` come with the rows."""

    call: DispatchCall
    ids: Array
    blocks: tuple[int, int, int]
    # [El]: rows that are filled.
    counts: Array
    opened: Opened | None = None
    native: tokenyard.Handle | None = None
    # The input of a combine with `zero_copy`.
    buffer: Array | None = None


DISPATCH_WAITS = "dispatch_wait_recv_cost_stats"
COMBINE_WAITS = "combine_wait_recv_cost_stats"


def _read_wait_stats(name: str, stats: Tensor | None, ranks: int) -> None:
    if stats is not None:
        read(name, stats, (np.int64,), (ranks,))


class Waits:
    """Adds the nanoseconds that an operation waits for each rank to `[R]` int64, if there is one."""

    def __init__(self, communicator: tokenyard.Communicator, name: str, stats: Tensor | None):
        self._communicator, self._name, self._stats = communicator, name, stats

    def during(self, half: Callable[[], T]) -> T:
        """Makes a half of the operation."""
        if self._stats is None:
            return half()
        before = np.array(self._communicator.waited_ns(), np.int64)
        result = half()
        stats = read(self._name, self._stats, (np.int64,), (len(before),))
        stats += np.array(self._communicator.waited_ns(), np.int64) - before
        return result


@dataclass
class Sent:
    """An operation between its halves."""

    pending: tokenyard.PendingDispatch
    waits: Waits

    def recv(self) -> tuple[tokenyard.Received, tokenyard.Handle]:
        return self.waits.during(self.pending.recv)


def _read_dispatch(pool: Pool, call: DispatchCall) -> tuple[Sizes, tuple[Array, Array]]:
    x = read("x", call.x, FLOATS, (None, None))
    tokens, hidden = x.shape
    ids = read("topk_idx", call.topk_idx, (np.int64,), (tokens, None))
    check_tokens(tokens, "num_max_dispatch_tokens_per_rank", call.tokens)
    _routing.check_experts(call.experts, pool.ranks)
    _routing.check_ids(ids, call.experts)
    if call.use_ue8m0 and not call.round_scale:
        raise Refusal("use_ue8m0: found True without round_scale; expected both")
    if call.stats is not None:
        local = call.experts // pool.ranks
        read("cumulative_local_expert_recv_stats", call.stats, (np.int32,), (local,))
    _read_wait_stats(DISPATCH_WAITS, call.wait_stats, pool.ranks)
    # Copies: the caller may write its own before the hook is called.
    sizes = Sizes(call.experts, ids.shape[1], hidden, call.tokens, call.tokens)
    return sizes, (np.array(x, order="C"), np.array(ids, order="C"))


def dispatch(
    pool: Pool, call: DispatchCall
) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, tuple[Any, ...], Hook]:
    """The outputs, which the hook fills."""
    made: list[tuple[Blocks, Record]] = []

    def read_once() -> tuple[Sizes, tuple[Array, Array]]:
        sizes, (x, ids) = _read_dispatch(pool, call)
        if pool.current is not None:
            pool.current.expect_room(1)
        blocks = Blocks(call, pool.ranks, x)
        made.append((blocks, Record(call, ids, blocks.x.shape, blocks.counts.copy())))
        return sizes, (x, ids)

    def send(opened: Opened, arrays: tuple[Array, Array]) -> Sent:
        waits = Waits(opened.communicator, DISPATCH_WAITS, call.wait_stats)
        pending = waits.during(
            lambda: opened.communicator.dispatch_send(
                *arrays, layout="packed", cast=call.cast, max_tokens=call.tokens
            )
        )
        return Sent(pending, waits)

    finish = pool.dispatch_send(read_once, send, way_of("packed"))
    if not made:
        # This rank's input is wrong. The others learn it now, and raise where they receive.
        finish()
    blocks, record = made[0]
    reference = call.x
    source = _handles.anchored(reference, blocks.source, record)

    def receive() -> None:
        record.opened, (received, record.native) = finish()
        pool.gaps.add_sources(received.lost)
        blocks.fill(received, call.tokens)
        record.counts = blocks.counts.copy()
        if call.stats is not None:
            stats = read("cumulative_local_expert_recv_stats", call.stats, (np.int32,), (None,))
            stats += blocks.counts

    x = like(reference, blocks.x)
    packed = x if blocks.scales is None else (x, like(reference, blocks.scales))
    ranges = like(reference, blocks.ranges)
    handle = (source, ranges, call.tokens, blocks.x.shape[2], call.experts)
    hook = pool.hook(receive, pool.current, 1)
    return packed, like(reference, blocks.counts), handle, hook


@dataclass
class CombineCall:
    """The arguments of a combine, as they were given."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    handle: Any
    zero_copy: bool
    out: Tensor | None
    # Whether the caller may write `x` before the rows are summed.
    has_hook: bool
    wait_stats: Tensor | None = None
    use_logfmt: bool = False

    @property
    def compress(self) -> Literal["logfmt10"] | None:
        return "logfmt10" if self.use_logfmt else None

    def check_format(self) -> None:
        """Refuses what DeepEP does not take together."""
        if self.use_logfmt and self.zero_copy:
            raise Refusal("use_logfmt: found True with zero_copy; expected at most one of them")


@dataclass
class Terms:
    """The inputs of a combine: the rows of all blocks, and of each token its experts and their weights."""

    rows: Array
    ids: Array
    weights: Array
    out: Array


def _arrived(handle: Any) -> tuple[Record, Opened, tokenyard.Handle]:
    """The dispatch that a handle stands for. Refuses one whose rows are not there."""
    record = _handles.record_of(handle, Record)
    if record.opened is None or record.native is None:
        raise Refusal("handle: found one whose hook was not called; expected its rows")
    return record, record.opened, record.native


def _read_combine(call: CombineCall, record: Record) -> Terms:
    call.check_format()
    tokens, topk = record.ids.shape
    ids = read("topk_idx", call.topk_idx, (np.int64,), (tokens, topk))
    weights = read("topk_weights", call.topk_weights, (np.float32,), (tokens, topk))
    differs = np.argwhere((ids >= 0) & (ids != record.ids))
    if len(differs):
        token, k = differs[0]
        raise Refusal(
            f"topk_idx: found expert {int(ids[token, k])} at [{token}, {k}]; expected "
            f"{int(record.ids[token, k])}, as dispatched, or -1 to leave it out"
        )
    rows = _read_blocks(call, record)
    shape = (tokens, record.blocks[2])
    out = np.zeros(shape, rows.dtype)
    if call.out is not None:
        out = read("out", call.out, (rows.dtype,), shape)
    return Terms(rows, np.ascontiguousarray(ids), np.ascontiguousarray(weights), out)


def _read_blocks(call: CombineCall, record: Record) -> Array:
    if call.zero_copy:
        if record.buffer is None:
            raise Refusal(
                "zero_copy: found no buffer; expected get_next_low_latency_combine_buffer before it"
            )
        return record.buffer
    x = read("x", call.x, FLOATS, record.blocks)
    if not call.has_hook:
        return np.ascontiguousarray(x)
    own = np.empty(x.shape, x.dtype)
    for expert, count in enumerate(record.counts):
        own[expert, :count] = x[expert, :count]
    return own


def combine(pool: Pool, call: CombineCall) -> tuple[Tensor, Hook]:
    """The output, which the hook fills."""
    opened = None
    try:
        record, of_handle, native = _arrived(call.handle)
        pool.expect_own(of_handle)
        opened = of_handle
        opened.expect_room(2)
        terms = _read_combine(call, record)
        _read_wait_stats(COMBINE_WAITS, call.wait_stats, pool.ranks)
    except Exception as error:
        pool.refuse(opened, "replay", error, "packed")
    communicator = opened.communicator
    waits = Waits(communicator, COMBINE_WAITS, call.wait_stats)
    missing = pool.gaps.room(len(terms.ids))
    pending = waits.during(
        lambda: communicator.combine_send(
            native,
            terms.rows,
            weighted=True,
            topk_weights=terms.weights,
            topk_idx=terms.ids,
            round_once=not call.use_logfmt,
            compress=call.compress,
            out=terms.out,
            missing=missing,
        )
    )

    def receive() -> None:
        waits.during(pending.recv)
        pool.gaps.add_experts(missing)

    result = like(call.x, terms.out) if call.out is None else call.out
    return result, pool.hook(receive, opened, 2)


def combine_buffer(handle: Any) -> Tensor:
    """`[El, R*M, H]` bfloat16 that a combine with `zero_copy` reads where it lies: in the arena, if that has room."""
    try:
        record, opened, native = _arrived(handle)
    except Refusal as refusal:
        raise errors.InvalidInputError(
            str(refusal), kind="invalid_input", operation="get_next_low_latency_combine_buffer"
        ) from None
    if record.buffer is None:
        try:
            memory = opened.communicator.combine_input(native, "bfloat16")
            record.buffer = np.asarray(memory).view(BF16).reshape(record.blocks)
        except errors.FullError:
            # The others do not know, so it is no error. The combine copies it.
            record.buffer = np.empty(record.blocks, BF16)
    return like(record.call.x, record.buffer)
