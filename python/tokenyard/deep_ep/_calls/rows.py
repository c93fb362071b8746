"""Dispatch and combine of flat or expanded rows: what the normal calls of V1 and those of V2 have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from .._arrays import Refusal
from .._pool import Dispatch, Opened
from .._torch import torch
from ..utils.event import EventOverlap
from ..utils.math import align
from . import tensors
from .arguments import read_bias, read_rows
from .call import Call
from .ordered import Ordered
from .streams import CallStream


@dataclass
class Record:
    """The dispatch that a handle stands for."""

    opened: Opened
    native: Any
    # Rows that the caller was given: those that arrived, or as many as V1's caller has asked for.
    given: int
    # Whether the host has waited for counts.
    has_sync: bool
    # Multiprocessors of its dispatch, and of later calls that name none; 0: the kernel set chooses.
    sms: int = 0
    is_expanded: bool = False
    # The numbers of V2's dispatch; M is `tokens`.
    experts: int = 0
    alignment: int = 1
    tokens: int = 0


class DispatchCall(Call):
    """A dispatch: its arguments as they were given, and as they were read.

    A kind of it says how its arguments are read (`read`, `looks`, `expect_equal`, `record`). Its numbers are M if the
    caller names it (`named_tokens`), and the multiprocessors that it asks for on GPUs (`sms`); 0 leaves the choice to
    the kernel set. It also says whether the host waits for sizes (`has_cpu_sync`), whether outputs have room for the
    most that can arrive (`is_worst`), and whether a caller gets ids (`gives_ids`).
    """

    # Beside the arguments: the dictionary of these would grow.
    __slots__ = ("gives_ids", "has_cpu_sync", "ids", "named_tokens", "rows", "scales", "weights")
    rows: Any
    scales: Any
    ids: Any
    weights: Any
    has_cpu_sync: bool
    gives_ids: bool
    named_tokens: Any
    is_expanded = False
    # Whether scales are given by columns, and whether weights behind the rows that arrived are 0.
    use_tma_aligned_col_major_sf = False
    zeroes_weights = False
    # The argument by which the host need not know sizes.
    instead_of_sync = ""

    @property
    def layout(self) -> Literal["flat", "expert_major"]:
        return "expert_major" if self.is_expanded else "flat"

    @property
    def first(self) -> Any:
        """The rows as they were given, without their scales."""
        return self.x[0] if isinstance(self.x, tuple) else self.x

    def take(self, rows: Any, scales: Any, ids: Any, weights: Any) -> None:
        """Keeps what was read."""
        self.rows, self.scales, self.ids, self.weights = rows, scales, ids, weights

    def cap(self, opened: Opened) -> dict[str, Any]:
        """The most rows that may arrive, where there is such a number, and what happens to others."""
        return {}

    def read_again(self, record: Record) -> None:
        """Reads what a handle's dispatch, made again, takes."""
        self.expect_equal(record)
        tokens, sizes = record.native.tokens, record.opened.sizes
        x, scales = read_rows(self.x, tokens, sizes.hidden)
        weights = self.topk_weights
        if weights is not None:
            shape = (tokens, sizes.topk)
            weights = tensors.read("topk_weights", weights, (torch.float32,), shape).contiguous()
        tensors.expect_device(self.pool, x=x, scales=scales, topk_weights=weights)
        self.take(x, scales, None, weights)


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


def send(call: DispatchCall, stream: CallStream) -> tuple[Opened, Any, Any]:
    """A dispatch without a handle: the communicator, what arrived, and the native handle."""
    return begin(call, stream)()


def begin(call: DispatchCall, stream: CallStream) -> Callable[[], tuple[Opened, Any, Any]]:
    """As `send`, whose results the returned function gives. Rows are sent before, and received by it where the call
    wants something in between."""
    pool, before = call.pool, call.previous_event_before_epilogue
    in_halves = call.defer_epilogue or before is not None
    if call.has_cpu_sync and stream.is_captured:
        raise tensors.sync_in_capture(call.instead_of_sync)

    def send_to(opened: Opened) -> Any:
        tensors.name_stream(opened, stream)
        act = opened.communicator.dispatch_send if in_halves else opened.communicator.dispatch
        sent = act(
            call.rows,
            call.ids,
            call.weights,
            scales=call.scales,
            layout=call.layout,
            alignment=call.expert_alignment if call.is_expanded else 1,
            zero_padding=call.is_expanded,
            worst_case=call.is_worst(opened),
            max_tokens=call.named_tokens if opened.takes("max_tokens") else None,
            stream=stream.raw,
            without_sync=not call.has_cpu_sync and opened.takes("without_sync"),
            sms=call.sms,
            **call.cap(opened),
        )
        return DelayedReceive(sent, before, stream) if in_halves else sent

    sending = Dispatch(call, send_to)

    def receive() -> tuple[Opened, Any, Any]:
        # Of a call in halves the second may be refused, too.
        opened, (received, native) = sending.recv() if in_halves else sending.sent()
        tensors.add_lost(pool, received)
        return opened, received, native

    return receive


def replay(call: DispatchCall, stream: CallStream) -> tuple[Record, Any]:
    """A dispatch by the routing of `call.handle`: its record, and what arrived."""
    return begin_replay(call, stream)()


def begin_replay(call: DispatchCall, stream: CallStream) -> Callable[[], tuple[Record, Any]]:
    """As `replay`, as `begin` is as `send`."""
    pool, before = call.pool, call.previous_event_before_epilogue
    in_halves = call.defer_epilogue or before is not None
    opened: Any = None
    layout = call.layout
    try:
        record = call.record()
        opened, layout = record.opened, record.native.layout
        call.expect_right()
        if call.defer_epilogue:
            pool.deferred.expect_room()
        call.read_again(record)
    except Exception as error:
        pool.refuse(opened or call.usual(), "replay", error, layout)
    tensors.name_stream(opened, stream)
    no_sync = opened.takes("without_sync") and (not record.has_sync or stream.is_captured)
    act: Any = opened.communicator.replay_send if in_halves else opened.communicator.replay
    sent = pool.deferred.start(
        act,
        record.native,
        call.rows,
        call.weights,
        scales=call.scales,
        stream=stream.raw,
        without_sync=no_sync,
        sms=call.sms or record.sms,
    )

    def receive() -> tuple[Record, Any]:
        received = DelayedReceive(sent, before, stream).recv() if in_halves else sent
        tensors.add_lost(pool, received)
        return record, received

    return receive


@dataclass
class Given:
    """The tensors that a caller gets of a dispatch."""

    x: Any = None
    scales: Any = None
    ids: Any = None
    weights: Any = None


# The arrays of an output that may stay where they arrived.
_ARRAYS = ("x", "scales", "weights")
_NOTHING_BESIDE: dict[str, Any] = {"block": None, "parts": ()}


def give(
    call: DispatchCall,
    record: Record,
    received: Any,
    stream: CallStream,
    beside: dict[str, Any] | None = None,
) -> tuple[Given, tuple[Any, ...], list[int] | None]:
    """The tensors of an output that a caller gets. One call copies all that does not stay where it arrived, and what
    the handle wants `beside` it: arguments of `Communicator._give`, which says what else it gives."""
    opened, dtype = record.opened, call.rows.dtype
    stays = tensors.stays_in_arena(opened, stream)
    beside = beside or _NOTHING_BESIDE
    arrived = received.rows
    given, wanted = _room(call, record, arrived, stays, beside["block"])
    names = tuple(name for name in _ARRAYS if getattr(given, name) is None) if stays else ()
    parts, counts = (), None
    if wanted or beside["parts"]:
        arrays, parts, counts = opened.communicator._give(
            tensors.reader(),
            received,
            names=names,
            keeps_fp8=dtype is torch.float8_e4m3fn,
            stream=stream.raw,
            **beside,
            **wanted,
        )
    else:
        arrays = tensors.take_all(received, names, dtype)
    if stays:
        for name, array in zip(names, arrays, strict=True):
            setattr(given, name, array)
        given.x = tensors.typed(given.x, dtype)
        if given.scales is not None:
            given.scales = tensors.typed(given.scales, call.scales.dtype)
    if stays or arrived > record.given:
        for name, tensor in vars(given).items():
            if tensor is not None:
                setattr(given, name, tensors.fit(tensor, record.given))
    if arrived > record.given and not stays and not call.use_tma_aligned_col_major_sf:
        # The caller holds no memory of the rows that it does not get.
        for name, tensor in vars(given).items():
            setattr(given, name, None if tensor is None else tensor.clone())
    if not call.pool.on_device:
        filled = arrived if record.has_sync else int(tensors.take(received.totals)[1])
        tensors.clear_behind((given.x, given.scales, given.weights), filled)
    return given, parts, counts


def _room(
    call: DispatchCall, record: Record, arrived: int, stays: bool, block: Any
) -> tuple[Given, dict[str, Any]]:
    """Memory of torch for what a caller gets that does not stay in the arena, and its names as copies. A subclass of
    the caller's tensors stays out of it: `block` is the drop-in's own, which costs less to ask than torch."""
    sizes, scales, device = record.opened.sizes, call.scales, call.rows.device
    empty = (tensors.dummy(device, 1) if block is None else block).new_empty
    # Room for all places that the output has.
    rows = max(record.given, arrived)
    given, wanted = Given(), {}
    if not stays:
        given.x = wanted["x"] = empty((rows, sizes.hidden), dtype=call.rows.dtype)
    if scales is not None and call.use_tma_aligned_col_major_sf:
        # Columns start at multiples of 16 bytes.
        pitch = align(rows, 4)
        memory = wanted["scale_columns"] = empty((scales.shape[1], pitch), dtype=scales.dtype)
        given.scales = memory.as_strided((rows, scales.shape[1]), (1, pitch))
    elif scales is not None and not stays:
        given.scales = wanted["scales"] = empty((rows, scales.shape[1]), dtype=scales.dtype)
    if call.gives_ids:
        given.ids = wanted["wide_ids"] = empty((rows, sizes.topk), dtype=torch.int64)
    # The number of rows that arrived may be known to the device alone.
    is_zeroed = call.zeroes_weights and not (rows == arrived and record.has_sync)
    if call.weights is not None and (is_zeroed or not stays):
        shape = (rows,) if call.is_expanded else (rows, sizes.topk)
        given.weights = wanted["weights"] = empty(shape, dtype=torch.float32)
    return given, wanted


def finish(
    call: DispatchCall, given: Given, stream: CallStream, also_read: Any, *outputs: Any
) -> tuple[Any, EventOverlap]:
    """The rows as a caller gets them, alone or with their scales, and the event."""
    x = given.x if given.scales is None else (given.x, given.scales)
    if not stream.is_async:
        return x, EventOverlap()
    return x, stream.finish((*inputs_of(call), also_read), (x, given.ids, given.weights, *outputs))


def inputs_of(call: DispatchCall) -> tuple[Any, ...]:
    """The tensors that a dispatch reads on its stream: as given, and as they were read, if the call came so far."""
    as_read = (getattr(call, name, None) for name in ("rows", "scales", "ids", "weights"))
    return call.x, call.topk_idx, call.topk_weights, *as_read


class CombineCall(Call):
    """A combine."""

    # Whether the copies on one rank are rounded before they are sent.
    rounds_per_rank = True
    # Whether weights are summed over the ranks that got the token.
    sums_weights = False
    # Whether the rows behind those that arrived may be left out.
    takes_fewer_rows = False

    def read_rows(self, record: Record) -> tuple[Any, Any]:
        """Rows and their weights, as many as arrived. Those behind them are left out."""
        count, sizes = record.native.rows, record.opened.sizes
        expected = None if self.takes_fewer_rows else record.given
        rows = tensors.read("x", self.x, tensors.floats(), (expected, sizes.hidden))
        found = rows.shape[0]
        if found not in (record.given, count):
            raise Refusal(
                f"x: found {found} rows; expected {record.given}, the rows of the dispatch"
            )
        weights = self.topk_weights
        if weights is not None:
            if record.is_expanded and not self.rounds_per_rank:
                raise Refusal(
                    "topk_weights: found some with expanded rows and allow_multiple_reduction = False; expected None"
                )
            shape = (found,) if record.is_expanded else (found, sizes.topk)
            weights = tensors.read("topk_weights", weights, (torch.float32,), shape)
            weights = tensors.fit(weights.contiguous(), count)
        return tensors.fit(rows.contiguous(), count), weights


def combine(call: CombineCall, stream: CallStream) -> tuple[Any, Any, EventOverlap]:
    """The combine of a dispatch: rows, weights, and the event."""
    opened: Any = None
    pool, out_weights, ordered = call.pool, None, None
    # One kernel sends and sums, so all of it waits for the event, copies of biases too.
    wait_for(call.previous_event_before_epilogue, stream)
    try:
        record = call.record()
        opened, native = record.opened, record.native
        call.expect_right()
        rows, weights = call.read_rows(record)
        shape = (native.tokens, opened.sizes.hidden)
        biases = read_bias(call.bias, rows.dtype, shape)
        tensors.expect_device(pool, x=rows, topk_weights=weights)
        out = rows.new_empty(shape)
        if record.is_expanded and not call.rounds_per_rank:
            ordered = Ordered(rows, call.handle._places.slots(), biases, out)
        if weights is not None:
            out_weights = weights.new_empty((native.tokens, opened.sizes.topk))
    except Exception as error:
        pool.refuse(opened or call.usual(), "combine", error)
    tensors.name_stream(opened, stream)
    # Otherwise each weight is that of its expert's rank: the same where masked ones are 0, as dispatch gives them.
    sums_weights = call.sums_weights and weights is not None and opened.takes("sum_weights")
    missing = None if pool.on_device else pool.gaps.room(native.tokens)

    def bring(rows: Any, out: Any, biases: Any = None) -> None:
        pool.deferred.start(
            opened.communicator.combine,
            native,
            rows,
            weights,
            bias=biases,
            sum_weights=sums_weights,
            out=out,
            out_weights=out_weights,
            stream=stream.raw,
            without_sync=opened.takes("without_sync")
            and (stream.is_captured or not record.has_sync),
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
