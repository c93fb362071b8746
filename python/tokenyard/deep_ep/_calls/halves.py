"""The low latency calls of V1 over kernels of the CPU: a call is its two halves, of which the hook makes the second."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from .._arrays import Refusal
from .._hooks import Hook
from .._pool import Opened, Pool, mode_of
from .._sizes import Sizes
from .._torch import torch
from ..utils.event import EventOverlap, finished
from ..utils.math import CHANNELS, ceil_div
from .arguments import check_ids
from .low_latency import (
    CombineCall,
    DispatchCall,
    Record,
    arrived,
    expect_wait_stats,
    read_combine,
    read_dispatch,
)
from .tensors import adopt, anchored, expect_device, take, typed

T = TypeVar("T")


class Waits:
    """Adds the nanoseconds that an operation waits for each rank to `[R]` int64, if there is one."""

    def __init__(self, opened: Opened, stats: Any) -> None:
        self._communicator, self._stats = opened.communicator, stats

    def during(self, half: Callable[[], T]) -> T:
        """Makes a half of the operation."""
        if self._stats is None:
            return half()
        before = torch.tensor(self._communicator.waited_ns())
        result = half()
        with torch.inference_mode():
            self._stats.add_(torch.tensor(self._communicator.waited_ns()) - before)
        return result


@dataclass
class Sent:
    """An operation between its halves."""

    pending: Any
    waits: Waits

    def recv(self) -> Any:
        return self.waits.during(self.pending.recv)


def _blocks(call: DispatchCall, ranks: int) -> tuple[Any, ...]:
    """The arrays of an output: rows, their counts, sources, scales, and the ranges of each source. They exist before
    rows arrive."""
    rows, local, hidden = ranks * call.tokens, call.experts // ranks, call.x.shape[1]
    dtype = torch.float8_e4m3fn if call.use_fp8 else call.x.dtype
    groups, scales = ceil_div(hidden, CHANNELS), None
    if call.use_fp8:
        # Column-major, as DeepEP's GEMMs read them.
        columns = ceil_div(groups, 4) if call.use_ue8m0 else groups
        of_scales = torch.int32 if call.use_ue8m0 else torch.float32
        scales = torch.zeros((local, columns, rows), dtype=of_scales).mT
    return (
        torch.zeros((local, rows, hidden), dtype=dtype),
        torch.zeros(local, dtype=torch.int32),
        torch.zeros((local, rows), dtype=torch.int32),
        scales,
        torch.zeros((local, ranks), dtype=torch.int64),
    )


def _fill(arrays: tuple[Any, ...], received: Any, tokens: int) -> list[int]:
    """Copies what arrived, behind which nothing is written, and returns the rows of each expert.

    `tokens` is M of the call.
    """
    x, counts, source, scales, ranges = arrays
    filled_rows: list[int] = np.asarray(received.expert_counts).tolist()
    counts.copy_(take(received.expert_counts))
    ranges.copy_(take(received.ranges))
    rows, sources = typed(take(received.x), x.dtype), take(received.source)
    for expert, count in enumerate(filled_rows):
        filled = expert, slice(count)
        x[filled] = rows[filled]
        source[filled] = sources[filled] % tokens
        if scales is not None:
            scales[filled] = take(received.scales)[filled]
    return filled_rows


def _read_dispatch(pool: Pool, call: DispatchCall) -> tuple[Sizes, tuple[Any, Any]]:
    sizes, (x, ids) = read_dispatch(pool, call)
    expect_device(pool, x=x, topk_idx=ids)
    check_ids(ids.numpy(), call.experts)
    if pool.current is not None:
        pool.current.expect_room(1)
    # Copies: the caller may write its own before the hook is called.
    return sizes, (x.clone(), ids.clone())


def dispatch(
    pool: Pool, call: DispatchCall
) -> tuple[Any, Any, tuple[Any, ...], EventOverlap, Hook | None]:
    """The outputs, which the hook fills."""
    adopt(pool, call)
    kept: list[Any] = []

    def read_once() -> tuple[Sizes, tuple[Any, Any]]:
        sizes, arrays = _read_dispatch(pool, call)
        kept[:] = [arrays[1]]
        return sizes, arrays

    def send(opened: Opened, arrays: tuple[Any, Any]) -> Sent:
        waits = Waits(opened, call.wait_stats)
        act = opened.communicator.dispatch_send
        pending = waits.during(
            lambda: act(*arrays, layout="packed", cast=call.cast, max_tokens=call.tokens)
        )
        return Sent(pending, waits)

    sending = pool.dispatch(read_once, send, mode_of("packed"))
    if not kept:
        # This rank's input is wrong. The others learn it now, and raise where they receive.
        sending.recv()
    arrays = _blocks(call, pool.ranks)
    record = Record(None, kept[0], None, arrays[0].shape)

    def receive() -> None:
        opened, (received, native) = sending.recv()
        # Tensors that were made in this mode cannot be written outside of it, and others can.
        with torch.inference_mode():
            pool.gaps.add(take(received.lost))
            record.counts = _fill(arrays, received, call.tokens)
            if call.stats is not None:
                call.stats.add_(take(received.expert_counts))
        record.opened, record.native = opened, native

    x, counts, source, scales, ranges = arrays
    ranges = anchored(ranges, record)
    hook = pool.hook(receive, pool.current, 1)
    if not call.has_hook:
        hook()
    packed = x if scales is None else (x, scales)
    handle = (source, ranges, call.tokens, x.shape[2], call.experts)
    return packed, counts, handle, finished(call.is_async), hook if call.has_hook else None


def _own_rows(call: CombineCall, record: Record, rows: Any) -> Any:
    """The rows of a combine: copies where the caller may write its own before the hook is called."""
    if call.zero_copy or not call.has_hook:
        return rows
    own = torch.empty_like(rows)
    for expert, count in enumerate(record.counts):
        own[expert, :count] = rows[expert, :count]
    return own


def _expect_same_ids(ids: Any, dispatched: Any) -> None:
    differs = ((ids >= 0) & (ids != dispatched)).nonzero()
    if len(differs):
        token, k = differs[0].tolist()
        raise Refusal(
            f"topk_idx: found expert {int(ids[token, k])} at [{token}, {k}]; expected "
            f"{int(dispatched[token, k])}, as dispatched, or -1 to leave it out"
        )


def combine(pool: Pool, call: CombineCall) -> tuple[Any, EventOverlap, Hook | None]:
    """The output, which the hook fills."""
    adopt(pool, call)
    opened = None
    try:
        record = arrived(call.handle)
        pool.expect_own(record.opened)
        opened = record.opened
        opened.expect_room(2)
        rows, ids, weights, out = read_combine(call, record)
        expect_device(pool, x=rows, topk_idx=ids, topk_weights=weights, out=out)
        _expect_same_ids(ids, record.ids)
        rows = _own_rows(call, record, rows)
        expect_wait_stats(pool, "combine", call.wait_stats)
    except Exception as error:
        pool.refuse(opened, "replay", error, "packed")
    waits, missing = Waits(opened, call.wait_stats), pool.gaps.room(len(ids))
    act, native = opened.communicator.combine_send, record.native
    pending = waits.during(
        lambda: act(
            native,
            rows,
            weighted=True,
            topk_weights=weights,
            topk_idx=ids,
            round_once=not call.use_logfmt,
            compress=call.compress,
            out=out,
            missing=missing,
        )
    )

    def receive() -> None:
        waits.during(pending.recv)
        with torch.inference_mode():
            pool.gaps.add(missing)

    hook = pool.hook(receive, opened, 2)
    if not call.has_hook:
        hook()
    return (
        (out if call.out is None else call.out),
        finished(call.is_async),
        hook if call.has_hook else None,
    )
