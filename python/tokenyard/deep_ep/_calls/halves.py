"""The low latency dispatch of V1 over kernels of the CPU, in its two halves, of which the hook makes the second."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._pool import Dispatch, Opened
from .._torch import torch
from ..utils.math import CHANNELS, ceil_div
from .low_latency import DispatchCall, Record, Results, outputs_of, waited
from .streams import CallStream
from .tensors import anchored, take, typed


@dataclass
class Sent:
    """An operation between its halves."""

    pending: Any
    opened: Opened
    wait_stats: Any

    def recv(self) -> Any:
        return waited(self.opened, self.wait_stats, self.pending.recv)


def _blocks(call: DispatchCall, ranks: int) -> tuple[Any, ...]:
    """The arrays of an output: rows, their counts, sources, scales, and the ranges of each source. They exist before
    rows arrive."""
    rows, local, hidden = ranks * call.tokens, call.num_experts // ranks, call.x.shape[1]
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


def dispatch(call: DispatchCall, stream: CallStream) -> Results:
    """The outputs, which the hook fills."""
    pool, stats = call.pool, call.cumulative_local_expert_recv_stats

    def send(opened: Opened) -> Sent:
        wait_stats, act = call.dispatch_wait_recv_cost_stats, opened.communicator.dispatch_send

        def half() -> Any:
            cast, most = call.cast, call.tokens
            return act(call.rows, call.ids, layout="packed", cast=cast, max_tokens=most)

        return Sent(waited(opened, wait_stats, half), opened, wait_stats)

    sending = Dispatch(call, send)
    if sending.is_refused:
        # This rank's input is wrong. The others learn it now, and raise where they receive.
        sending.recv()
    arrays = _blocks(call, pool.ranks)
    record = Record(None, call.ids, None, arrays[0].shape)

    def receive() -> None:
        opened, (received, native) = sending.recv()
        # Tensors that were made in this mode cannot be written outside of it, and others can.
        with torch.inference_mode():
            pool.gaps.add(take(received.lost))
            record.counts = _fill(arrays, received, call.tokens)
            if stats is not None:
                stats.add_(take(received.expert_counts))
        record.opened, record.native = opened, native

    *others, ranges = arrays
    hook = pool.hook(receive, pool.current, 1)
    given = [*others, anchored(ranges, record)]
    outputs = outputs_of(call, record, given, stream.finish((), ()), hook)
    if call.return_recv_hook:
        return outputs
    hook()
    return *outputs[:-1], None
