"""The low latency calls of V1: a block of R * M rows for each local expert.

Rows cross once per rank and are spread where they arrive. Weights are first seen at the combine: they go to the owners
beside the rows, which sum in float32, so that a result is rounded once.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import tokenyard

from . import _handles, _routing
from ._arrays import BF16, FLOATS, FP8, Array, Refusal, Tensor, like, read
from ._engine import Engine, Opened, Sizes

_log = logging.getLogger("tokenyard.deep_ep")

Hook = Callable[[], None]


@dataclass
class DispatchCall:
    """The arguments of a dispatch, as they were given."""

    x: Tensor
    topk_idx: Tensor
    tokens: int
    experts: int
    stats: Tensor | None
    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool

    @property
    def cast(self) -> Any:
        if not self.use_fp8:
            return None
        return "fp8_ue8m0" if self.use_ue8m0 else "fp8_round" if self.round_scale else "fp8"


class Blocks:
    """The outputs of a dispatch on this rank. They exist before rows arrive."""

    def __init__(self, call: DispatchCall, ranks: int, x: Array) -> None:
        self.rows = ranks * call.tokens
        self.local = call.experts // ranks
        hidden, groups = x.shape[1], -(-x.shape[1] // 128)
        dtype = FP8 if call.use_fp8 else x.dtype
        self.x = np.zeros((self.local, self.rows, hidden), dtype)
        columns = -(-groups // 4) if call.use_ue8m0 else groups
        scale = np.int32 if call.use_ue8m0 else np.float32
        # Column-major, as DeepEP's GEMMs read them.
        physical = np.zeros((self.local, columns, self.rows), scale)
        self.scales = physical.transpose(0, 2, 1) if call.use_fp8 else None
        self.counts = np.zeros(self.local, np.int32)
        self.source = np.zeros((self.local, self.rows), np.int32)
        self.ranges = np.zeros((self.local, ranks), np.int64)


@dataclass
class Record:
    """What a handle stands for. `native` and `slots` come with the rows."""

    call: DispatchCall
    ids: Array
    blocks_shape: tuple[int, int, int]
    opened: Opened | None = None
    native: tokenyard.Handle | None = None
    # [N, K]: where the copies of each row that arrived lie among all blocks' rows, or -1.
    slots: Array | None = None
    buffer: Array | None = None


def _read_dispatch(engine: Engine, call: DispatchCall) -> tuple[Sizes, tuple[Array, Array]]:
    x = read("x", call.x, FLOATS, (None, None))
    tokens, hidden = x.shape
    ids = read("topk_idx", call.topk_idx, (np.int64,), (tokens, None))
    if not call.tokens > 0 or tokens > call.tokens:
        raise Refusal(
            f"x: found {tokens} tokens; expected at most num_max_dispatch_tokens_per_rank = {call.tokens}"
        )
    if call.experts <= 0 or call.experts % engine.ranks:
        raise Refusal(
            f"num_experts: found {call.experts}; expected a multiple of the {engine.ranks} ranks"
        )
    _routing.check_ids(ids, call.experts)
    if call.use_ue8m0 and not call.round_scale:
        raise Refusal("use_ue8m0: found True without round_scale; expected both")
    if call.stats is not None:
        local = call.experts // engine.ranks
        read("cumulative_local_expert_recv_stats", call.stats, (np.int32,), (local,))
    # Copies: the caller may write its own before the hook is called.
    sizes = Sizes(call.experts, ids.shape[1], hidden, call.tokens)
    return sizes, (np.array(x, order="C"), np.array(ids, order="C"))


def dispatch(
    engine: Engine, call: DispatchCall
) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, tuple[Any, ...], Hook]:
    """The outputs, which the hook fills."""
    made: list[tuple[Blocks, Record]] = []

    def read_once() -> tuple[Sizes, tuple[Array, Array]]:
        sizes, (x, ids) = _read_dispatch(engine, call)
        blocks = Blocks(call, engine.ranks, x)
        made.append((blocks, Record(call, ids, blocks.x.shape)))
        return sizes, (x, ids)

    def send(opened: Opened, arrays: tuple[Array, Array]) -> tokenyard.PendingDispatch:
        return opened.main.dispatch_send(*arrays, cast=call.cast)

    finish = engine.dispatch_send(read_once, send)
    if not made:
        # This rank's input is wrong. The others learn it now, and raise where they receive.
        finish()
    blocks, record = made[0]
    reference = call.x
    source = _handles.anchored(reference, blocks.source, record)

    def receive() -> None:
        record.opened, (received, record.native) = finish()
        _unpack(received, record, blocks, engine.ranks)

    x = like(reference, blocks.x)
    packed = x if blocks.scales is None else (x, like(reference, blocks.scales))
    handle = (
        source,
        like(reference, blocks.ranges),
        call.tokens,
        blocks.x.shape[2],
        call.experts,
    )
    return packed, like(reference, blocks.counts), handle, _once(receive)


def _once(call: Callable[[], None]) -> Hook:
    """A hook: the first call does it, later ones nothing."""
    left = [call]

    def hook() -> None:
        if left:
            left.pop()()

    return hook


def _unpack(received: tokenyard.Received, record: Record, blocks: Blocks, ranks: int) -> None:
    """Spreads flat rows over the blocks, by source rank, then source token."""
    if record.opened is None:
        raise AssertionError("rows come from a communicator")
    most = record.opened.sizes.tokens
    copies = _routing.Expansion(np.asarray(received.ids), blocks.local, 1)
    if len(copies.place) and int(copies.place.max()) >= blocks.rows:
        raise tokenyard.errors.InvalidInputError(
            f"num_max_dispatch_tokens_per_rank: found {record.call.tokens} on this rank, and an expert with "
            f"{int(copies.counts.max())} tokens; expected the same number on all ranks",
            kind="invalid_input",
            operation="low_latency_dispatch",
        )
    expert, place, row = copies.expert, copies.place, copies.row
    blocks.x[expert, place] = np.asarray(received.x).view(blocks.x.dtype)[row]
    if blocks.scales is not None:
        blocks.scales[expert, place] = np.asarray(received.scales)[row]
    origin = np.asarray(received.source)
    blocks.source[expert, place] = (origin % most)[row]
    counts = np.zeros((blocks.local, ranks), np.int64)
    np.add.at(counts, (expert, (origin // most)[row]), 1)
    begins = np.cumsum(counts, axis=1) - counts
    blocks.ranges[:] = counts | begins << 32
    blocks.counts[:] = copies.counts
    record.slots = np.full(np.asarray(received.ids).shape, -1, np.int64)
    record.slots[row, copies.k] = expert * blocks.rows + place
    if record.call.stats is not None:
        stats = read("cumulative_local_expert_recv_stats", record.call.stats, (np.int32,), (None,))
        stats += copies.counts


@dataclass
class CombineCall:
    """The arguments of a combine, as they were given."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    handle: Any
    zero_copy: bool
    out: Tensor | None


def _read_combine(call: CombineCall, record: Record) -> tuple[Array, Array]:
    """Rows of all blocks, and what goes to their owners: K weights per token, and a bit for each that counts."""
    if record.opened is None or record.native is None:
        raise Refusal("handle: found one whose hook was not called; expected its rows")
    shape = record.blocks_shape
    if call.zero_copy:
        if record.buffer is None:
            raise Refusal(
                "zero_copy: found no buffer; expected get_next_low_latency_combine_buffer before it"
            )
        x = record.buffer
    else:
        x = np.ascontiguousarray(read("x", call.x, FLOATS, shape))
    tokens, topk = record.ids.shape
    ids = read("topk_idx", call.topk_idx, (np.int64,), (tokens, topk))
    weights = read("topk_weights", call.topk_weights, (np.float32,), (tokens, topk))
    is_kept = ids >= 0
    differs = np.argwhere(is_kept & (ids != record.ids))
    if len(differs):
        token, k = differs[0]
        raise Refusal(
            f"topk_idx: found expert {int(ids[token, k])} at [{token}, {k}]; expected "
            f"{int(record.ids[token, k])}, as dispatched, or -1 to leave it out"
        )
    if call.out is not None:
        read("out", call.out, (x.dtype,), (tokens, shape[2]))
    beside = np.zeros((tokens, record.opened.side_width), np.float32)
    beside[:, :topk] = weights
    bits = (is_kept.astype(np.uint32) << np.arange(topk, dtype=np.uint32)).sum(
        axis=1, dtype=np.uint32
    )
    # The words pass untouched, whatever they are called.
    beside[:, topk] = bits.view(np.float32)
    return x.reshape(-1, shape[2]), beside


def combine(engine: Engine, call: CombineCall) -> tuple[Tensor, Hook]:
    """The output, which the hook fills."""
    opened = None
    try:
        record = _handles.record_of(call.handle, Record)
        opened = record.opened
        rows, beside = _read_combine(call, record)
    except Refusal as refusal:
        engine.refuse_beside(opened, refusal)
    if opened is None or record.slots is None or record.native is None:
        raise AssertionError("the record was read")
    topk = record.ids.shape[1]
    received, _ = opened.side.dispatch(beside, record.ids)
    words = np.asarray(received.x)
    bits = np.ascontiguousarray(words[:, topk]).view(np.uint32)
    is_kept = (bits[:, None] >> np.arange(topk, dtype=np.uint32)) & 1 == 1
    slots = np.where(is_kept, record.slots, -1)
    partial = _routing.sum_copies(rows, slots, words[:, :topk])
    pending = opened.main.combine_send(record.native, partial)
    reference = call.x
    if call.out is not None:
        out, result = read("out", call.out, (rows.dtype,), (None, None)), call.out
    else:
        out = np.zeros((len(record.ids), rows.shape[1]), rows.dtype)
        result = like(reference, out)

    def receive() -> None:
        summed, _ = pending.recv()
        out[:] = np.asarray(summed).astype(rows.dtype)

    return result, _once(receive)


def combine_buffer(handle: Any) -> Tensor:
    """`[El, R*M, H]` bfloat16 that a combine with `zero_copy` reads."""
    try:
        record = _handles.record_of(handle, Record)
    except Refusal as refusal:
        raise tokenyard.errors.InvalidInputError(
            str(refusal), kind="invalid_input", operation="get_next_low_latency_combine_buffer"
        ) from None
    if record.buffer is None:
        record.buffer = np.zeros(record.blocks_shape, BF16)
    return like(record.call.x, record.buffer)


_said: set[str] = set()


def say_once(text: str) -> None:
    """Tells the log what is done in another way than asked for."""
    if text not in _said:
        _said.add(text)
        _log.warning(text)
