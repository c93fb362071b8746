"""The calls by a handle that V1 and V2 have in common: the dispatch with an earlier routing, and the combine."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from .._arrays import Refusal
from .._pool import Opened, Pool
from .._torch import torch
from ..utils.event import EventOverlap
from .arguments import read_bias, read_rows
from .judged import Judged
from .ordered import Ordered
from .streams import CallStream, Timing
from .tensors import add_lost, expect_device, fit, floats, name_stream, read, stream_of


@dataclass
class Record:
    """The dispatch that a handle stands for."""

    opened: Opened
    native: Any
    # Rows that the caller was given: those that arrived, or as many as V1's caller has asked for.
    given: int
    # Whether the host has waited for counts.
    has_sync: bool
    is_expanded: bool = False
    # Multiprocessors of its dispatch, and of later calls that name none; 0: the kernel set chooses.
    sms: int = 0

    @property
    def rows(self) -> int | None:
        """Rows that a combine needs, where it takes no other number."""
        return None


Kind = TypeVar("Kind", bound=Record)
# Finds the record of a handle. Raises Refusal for what is none of this buffer.
RecordOf = Callable[[Pool, Any], Kind]


def wait_for(event: Any, stream: CallStream) -> None:
    """The next work on the stream of a call runs behind an event, if there is one."""
    mark = getattr(event, "event", event)
    if mark is not None and stream.stream is not None:
        mark.wait_on(stream.stream)


@dataclass
class DelayedReceive:
    """An operation that was sent, of which the stream waits for an event before it receives."""

    pending: Any
    event: Any
    stream: CallStream

    def recv(self) -> Any:
        wait_for(self.event, self.stream)
        return self.pending.recv()


def replay(
    pool: Pool, call: Any, record_of: RecordOf[Kind], stream: CallStream, before: Any = None
) -> tuple[Kind, Any, Any]:
    """A dispatch by the routing of `call.handle`: its record, the call with its tensors as they were read, and what
    arrived. `before`: an event that the stream waits for between the halves."""
    opened, layout = None, call.layout
    try:
        record = record_of(pool, call.handle)
        opened, layout = record.opened, record.native.layout
        call.expect_right()
        call.expect_equal(record)
        tokens, sizes = record.native.tokens, opened.sizes
        x, scales = read_rows(call.x, tokens, sizes.hidden)
        weights = call.topk_weights
        if weights is not None:
            shape = (tokens, sizes.topk)
            weights = read("topk_weights", weights, (torch.float32,), shape).contiguous()
        expect_device(pool, x=x, scales=scales, topk_weights=weights)
    except Exception as error:
        pool.refuse(opened, "replay", error, layout)
    name_stream(opened, stream)
    no_sync = opened.takes("without_sync") and (not record.has_sync or stream.is_captured)
    act: Any = opened.communicator.replay_send if before else opened.communicator.replay
    sent = act(
        record.native,
        x,
        weights,
        scales=scales,
        stream=stream.raw,
        without_sync=no_sync,
        sms=call.sms or record.sms,
    )
    received = DelayedReceive(sent, before, stream).recv() if before else sent
    add_lost(pool, received)
    return record, replace(call, x=x, scales=scales, topk_weights=weights), received


@dataclass
class CombineCall(Judged):
    """The arguments of a combine, as they were given."""

    x: Any
    handle: Any
    topk_weights: Any
    bias: Any
    # Whether the copies on one rank are rounded before they are sent.
    rounds_per_rank: bool = True
    # Whether weights are summed over the ranks that got the token.
    sums_weights: bool = False
    wrong: str | None = None
    # Multiprocessors that the caller has asked for; 0: those of the handle.
    sms: int = 0


def _read_rows(call: CombineCall, record: Record) -> tuple[Any, Any]:
    """Rows and their weights, as many as arrived. Those behind them are left out."""
    count, sizes = record.native.rows, record.opened.sizes
    rows = read("x", call.x, floats(), (record.rows, sizes.hidden))
    if len(rows) not in (record.given, count):
        raise Refusal(
            f"x: found {len(rows)} rows; expected {record.given}, the rows of the dispatch"
        )
    weights = call.topk_weights
    if weights is not None:
        if record.is_expanded and not call.rounds_per_rank:
            raise Refusal(
                "topk_weights: found some with expanded rows and allow_multiple_reduction = False; expected None"
            )
        shape = (len(rows),) if record.is_expanded else (len(rows), sizes.topk)
        weights = read("topk_weights", weights, (torch.float32,), shape)
        weights = fit(weights.contiguous(), count)
    return fit(rows.contiguous(), count), weights


def combine(
    pool: Pool, call: CombineCall, record_of: RecordOf[Kind], timing: Timing, before: Any = None
) -> tuple[Any, Any, EventOverlap]:
    """The combine of a dispatch: rows, weights, and the event.

    One kernel sends and sums, so all of it waits for `before`, copies of biases too.
    """
    stream = stream_of(pool, call, timing)
    opened, out_weights, ordered = None, None, None
    with stream.inside():
        wait_for(before, stream)
        try:
            record = record_of(pool, call.handle)
            opened, native = record.opened, record.native
            call.expect_right()
            rows, weights = _read_rows(call, record)
            shape = (native.tokens, opened.sizes.hidden)
            biases = read_bias(call.bias, rows.dtype, shape)
            expect_device(pool, x=rows, topk_weights=weights)
            out = rows.new_empty(shape)
            if record.is_expanded and not call.rounds_per_rank:
                ordered = Ordered(rows, call.handle._places.slots(), biases, out)
            if weights is not None:
                out_weights = weights.new_empty((native.tokens, opened.sizes.topk))
        except Exception as error:
            pool.refuse(opened, "combine", error)
        name_stream(opened, stream)
        no_sync = opened.takes("without_sync") and (stream.is_captured or not record.has_sync)
        missing = None if pool.on_device else pool.gaps.room(native.tokens)

        def bring(rows: Any, out: Any, biases: Any = None) -> None:
            record.opened.communicator.combine(
                native,
                rows,
                weights,
                bias=biases,
                # Otherwise each weight is that of its expert's rank: the same where masked ones are 0, as dispatch
                # gives them.
                sum_weights=call.sums_weights
                and weights is not None
                and record.opened.takes("sum_weights"),
                out=out,
                out_weights=out_weights,
                stream=stream.raw,
                without_sync=no_sync,
                sms=call.sms or record.sms,
                missing=missing,
            )

        if ordered is None:
            bring(rows, out, biases or None)
        else:
            out.copy_(ordered.sum(bring))
        # Of several combines each says it of all k, and later ones of more ranks.
        pool.gaps.add(missing)
    memory = None if ordered is None else call.handle._places.memory
    inputs = (call.x, call.topk_weights, rows, weights, *biases, memory)
    return out, out_weights, stream.finish(inputs, (out, out_weights))
