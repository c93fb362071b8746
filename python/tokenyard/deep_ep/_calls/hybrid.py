"""The calls of Hybrid-EP that permute: rows by expert, as V2's expanded ones, in one operation each.

A token with more experts than a row may have is sent as several rows. Each expert gets one of them, so rows by expert
are the same; the sums of a token's rows are added here.
"""

import numbers
from dataclasses import dataclass, replace
from typing import Any, Literal

from .. import _handles
from .._arrays import Refusal
from .._pool import Opened
from .._sizes import Sizes, sizes_of
from .._torch import torch
from ..utils.math import align
from . import hybrid_routing, rows, tensors
from .call import Call, expect_integer, judge_flags
from .streams import CallStream
from .tensors import dummy, expect_device, read


@dataclass
class Record(rows.Record):
    """The dispatch that a handle stands for."""

    # Of the buffer's memory at the dispatch.
    generation: int = 0
    # T, the rows that each token was sent as, and their ids.
    routed: int = 0
    pieces: int = 1
    ids: Any = None
    slots: int = 0

    @property
    def columns(self) -> Any:
        """The ids of each token, whatever rows it was sent as."""
        return self.ids.view(self.routed, self.pieces * self.opened.sizes.topk)

    @property
    def is_cut(self) -> bool:
        """Whether there are more rows than the caller gets, as the host knows."""
        return self.given < int(self.native.rows)


class OfBuffer(Call):
    """A call of `HybridEPBuffer`. All are in the order of the current stream."""

    record_type: type[Record] = Record
    permutes = True
    events = ()

    def __init__(self, given: dict[str, Any]) -> None:
        # By the names of the other buffers' calls.
        given["x"], given["async_finish"], given["bias"] = given["hidden"], False, None
        super().__init__(given)

    # The communicator of a handle from before: the others replay there.
    of_handle: Any = None

    def usual(self) -> Any:
        last, _ = self.buffer.last_opened.get(self.permutes, (None, None))
        opened = self.of_handle or last
        return None if opened is None or opened.communicator.closed else opened

    @property
    def own_handle(self) -> tuple[Any, ...]:
        """The handle, the caller's object."""
        handle: tuple[Any, ...] = self.as_given.get("handle", self.handle)
        return handle

    def record(self) -> Record:
        record = _handles.record_of(self.handle, Record)
        self.pool.expect_own(record.opened)
        if type(record) is not self.record_type:
            raise Refusal(
                "handle: found one of the other dispatch; expected one of the same kind of call"
            )
        self.of_handle = record.opened
        now = self.buffer.runtime.buffer_generation
        if record.generation != now:
            raise Refusal(
                f"handle: found one of buffer generation {record.generation}; expected one of generation {now}: the "
                "buffer has grown since its dispatch"
            )
        return record


class HybridDispatchCall(OfBuffer, rows.DispatchCall):
    """A dispatch of either kind: what both read."""

    gives_ids = False
    integers = ()
    # M, the most tokens of a rank, where all ranks name it.
    most_named: int | None = None

    @property
    def layout(self) -> Literal["flat", "expert_major"]:
        """Where a handle is none, that of the last dispatch: the others may replay it."""
        if self.handle is None or self.permutes not in self.buffer.last_opened:
            return super().layout
        layout: Literal["flat", "expert_major"] = self.buffer.last_opened[self.permutes][1]
        return layout

    @property
    def sms(self) -> Any:
        return self.pool.sms_of(self.buffer.num_sms_dispatch)

    @property
    def experts(self) -> int:
        """All experts, by the number on each rank that the call names, or else the buffer's."""
        own: Any = self.num_of_experts_per_rank
        if own is None:
            own = self.buffer.configurer.buffer_config.num_of_experts_per_rank
        expect_integer("num_of_experts_per_rank", own, 1)
        return int(own) * int(self.pool.ranks)

    def read_tokens(self) -> int:
        """Reads the rows and the routing. Returns M to open a communicator with."""
        self.expect_right()
        x, scales = hybrid_routing.read_hidden(self, None, None)
        tokens, experts = int(x.shape[0]), self.experts
        hybrid_routing.expect_all_experts(self.num_of_experts, experts, self.pool.ranks)
        self.routing = hybrid_routing.read_routing(self, tokens, experts)
        expect_device(self.pool, hidden=x, scaling_factor=scales, **self.routing.tensors)
        most = tokens
        if self.num_of_tokens_per_rank is not None:
            expect_integer("num_of_tokens_per_rank", self.num_of_tokens_per_rank, 0)
            most = int(self.num_of_tokens_per_rank)
            if most < tokens:
                raise Refusal(
                    f"num_of_tokens_per_rank: found {most}; expected at least the {tokens} tokens of this rank"
                )
        self.slots = max(16, align(most, 16))
        self.take(x, scales, None, None)
        return self.most_tokens(tokens)

    def most_tokens(self, tokens: int) -> int:
        """M to open a communicator with. Ranks name it where the caller does, and where the host does not wait: no rank
        then learns of another that it has more tokens, so the numbers of all are the same."""
        named = self.num_of_tokens_per_rank
        if named is None and self.has_cpu_sync:
            return int(self.buffer.configurer.room_for(tokens))
        self.most_named = max(int(tokens if named is None else named), 1)
        return self.most_named

    def prepare(self, opened: Opened) -> None:
        pieces = opened.sizes.pieces
        self.named_tokens = None if self.most_named is None else self.most_named * pieces

    def grow(self, opened: Opened) -> None:
        """Grows the buffer to what all ranks know of the call, so that handles are from before on all of them."""
        tokens = self.most_named or opened.agreed_tokens
        local = self.routing.experts // self.pool.ranks
        self.buffer.configurer.grow(self.rows.shape[1], tokens, local)
        self.buffer.last_opened[self.permutes] = opened, self.layout

    def expect_no_routing(self) -> None:
        """Refuses weights of ids where a handle has the routing."""
        if self.topk_weights is not None:
            raise Refusal("topk_weights: found some with a handle; expected None, or probs")

    def read_rows_again(self, record: Record) -> Any:
        """Reads rows by the routing of a handle. Returns the probabilities that go beside them, or None."""
        self.expect_no_routing()
        x, scales = hybrid_routing.read_hidden(self, record.routed, record.opened.sizes.hidden)
        probs = hybrid_routing.read_probs(self, record.routed, record.experts)
        expect_device(self.pool, hidden=x, scaling_factor=scales, probs=probs)
        self.take(x, scales, None, None)
        return probs


class DispatchCall(HybridDispatchCall):
    """A dispatch that permutes."""

    operation = "HybridEPBuffer.dispatch_with_permute"
    flags = ("async_finish", "non_blocking", "fuse_permute_dispatch")
    instead_of_sync = "non_blocking=True"
    is_expanded = True

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        own = vars(self)
        if own["use_fp8"] is not None:
            self.wrong = judge_flags(own, ("use_fp8",)) or self.wrong
        own["unit"] = 1
        self.has_cpu_sync = not self.non_blocking

    def is_worst(self, opened: Opened) -> bool:
        return not self.has_cpu_sync

    @property
    def expert_alignment(self) -> int:
        return int(self.unit)

    def read(self) -> Sizes:
        tokens = self.read_tokens()
        self.read_room()
        # Where the host does not wait, a rank learns of no other that it has more: then it is what all may have.
        most = self.routing.most() if self.has_cpu_sync else self.routing.limit
        topk, pieces = min(most, hybrid_routing.MOST_EXPERTS), hybrid_routing.rows_per_token(most)
        experts, hidden, named = self.routing.experts, self.rows.shape[1], self.most_named
        return sizes_of(experts, topk, hidden, tokens, named, False, True, pieces)

    def read_room(self) -> None:
        """Reads P and the alignment, and judges the rest."""
        if self.use_fp8 is not None and self.use_fp8 != (self.scales is not None):
            raise Refusal(f"use_fp8: found {self.use_fp8} with hidden of {self.rows.dtype}")
        if self.pad_multiple is not None:
            expect_integer("pad_multiple", self.pad_multiple, 1)
            self.unit = int(self.pad_multiple)
        count = self.num_permuted_tokens
        if self.non_blocking and is_unread(count):
            raise Refusal(
                f"num_permuted_tokens: found a tensor on {count.device} with non_blocking; expected a number, or a "
                "tensor in the host's memory"
            )
        self.room = read_count(count)
        if self.non_blocking and (self.room is None or self.room % self.unit):
            raise Refusal(
                f"num_permuted_tokens: found {self.room} with non_blocking; expected a multiple of pad_multiple = "
                f"{self.unit}"
            )

    def looks(self) -> Sizes:
        tokens, hidden = self.first.shape
        most = self.most_tokens(tokens)
        return sizes_of(self.experts, 1, hidden, most, self.most_named, False, True)

    def prepare(self, opened: Opened) -> None:
        """Ids of as many columns as the communicator takes, for each row of a token."""
        super().prepare(opened)
        topk, self.pieces = opened.sizes.topk, opened.sizes.pieces
        ids, weights, _ = self.routing.columns(self.pieces * topk)
        self.ids = ids.view(-1, topk)
        self.weights = None if weights is None else weights.view(-1, topk)
        self.repeat(self.pieces)

    def cap(self, opened: Opened) -> dict[str, Any]:
        """P, where the kernel set takes it. Where the host waits, more rows are an error of all ranks. Elsewhere there
        is room for all rows, of which a caller gets P."""
        if not self.room or not opened.takes("max_rows"):
            return {}
        return {"max_rows": self.room, "overflow": "error" if self.has_cpu_sync else "drop"}

    def repeat(self, pieces: int) -> None:
        """Each row once for each part of its experts."""
        if pieces > 1 and len(self.rows) != len(self.ids):
            self.rows = self.rows.repeat_interleave(pieces, 0)
            if self.scales is not None:
                self.scales = self.scales.repeat_interleave(pieces, 0)

    def read_again(self, record: rows.Record) -> None:
        assert isinstance(record, Record)
        probs = self.read_rows_again(record)
        self.read_room_again(record)
        self.ids = record.ids
        if probs is not None:
            places = record.columns
            found = probs.gather(1, places.clamp(min=0))
            self.weights = torch.where(places >= 0, found, 0).view(record.ids.shape)
        self.repeat(record.pieces)

    def read_room_again(self, record: Record) -> None:
        """Reads P of a call with a handle, if it names one."""
        count = self.num_permuted_tokens
        if is_unread(count) and (not record.has_sync or self.pool.is_capturing()):
            # To read it the host would wait. The rows are as many as those of the handle's dispatch.
            count = None
        self.room = read_count(count)


class CombineCall(OfBuffer, rows.CombineCall):
    """A combine of permuted rows."""

    operation = "HybridEPBuffer.combine_with_unpermute"
    flags: tuple[str, ...] = ("async_finish", "fuse_unpermute_combine")

    def __init__(self, given: dict[str, Any]) -> None:
        given["topk_weights"] = given["probs"]
        super().__init__(given)

    @property
    def sms(self) -> Any:
        return self.pool.sms_of(self.buffer.num_sms_combine)

    def read_rows(self, record: rows.Record) -> tuple[Any, Any]:
        x = read_returned(self, record, min(record.given, record.native.rows))
        probs = self.topk_weights
        if probs is not None:
            probs = read("probs", probs, (torch.float32,), (x.shape[0],)).contiguous()
        return filled(x, record.native.rows), filled(probs, record.native.rows)


def read_returned(call: Any, record: rows.Record, least: int) -> Any:
    """Rows that come back. They are at least those of the dispatch, and there may be more behind."""
    x = read("hidden", call.x, tensors.floats(), (None, record.opened.sizes.hidden)).contiguous()
    if x.shape[0] < least:
        raise Refusal(f"hidden: found {x.shape[0]} rows; expected {least}, those of the dispatch")
    return x


def filled(values: Any, count: int) -> Any:
    """The first of them, with zeros behind: for rows that were dropped."""
    if values is None or len(values) == count:
        return values
    if len(values) > count:
        return values[:count]
    room = values.new_zeros((count, *values.shape[1:]))
    room[: len(values)] = values
    return room


def is_unread(count: Any) -> bool:
    """Whether the host would wait for a device to read it."""
    return isinstance(count, torch.Tensor) and count.device.type != "cpu"


def read_count(count: Any) -> int | None:
    """A number of rows, or a tensor of one number; None as it is."""
    if isinstance(count, torch.Tensor) and not count.dim() and not count.is_floating_point():
        count = int(count)
    if count is None:
        return None
    if not isinstance(count, numbers.Integral):
        raise Refusal(
            f"num_permuted_tokens: found {count!r:.80}; expected an integer, or a 0-d tensor of one"
        )
    expect_integer("num_permuted_tokens", count, 0)
    return int(count)


Result = tuple[Any, Any, Any, Any, tuple[Any, ...]]


def dispatch(call: DispatchCall, stream: CallStream) -> Result:
    """A dispatch, or one by the routing of a handle."""
    if call.handle is not None:
        record, received = rows.replay(call, stream)
        if call.room is not None:
            record = replace(record, given=call.room)
        given, _, _ = rows.give(call, record, received, stream)
        return given.x, given.weights, given.scales, None, call.own_handle
    opened, received, native = rows.send(call, stream)
    call.grow(opened)
    most = native.rows if call.room is None else call.room
    record = Record(
        opened,
        native,
        most,
        call.has_cpu_sync,
        call.sms,
        True,
        alignment=call.unit,
        generation=call.buffer.runtime.buffer_generation,
        experts=call.routing.experts,
        routed=call.routing.tokens,
        pieces=call.pieces,
        ids=call.ids,
        slots=call.slots,
    )
    counts = _Counts(call, record, received)
    given, _, _ = rows.give(call, record, received, stream, counts.beside)
    counts.take()
    return given.x, given.weights, given.scales, counts.padded, counts.handle()


class _Counts:
    """The numbers of a dispatch that a caller gets: on the host, or where the host must not wait, on the device."""

    def __init__(self, call: DispatchCall, record: Record, received: Any) -> None:
        self._call, self._record, self._received = call, record, received
        local = record.experts // call.pool.ranks
        self._lengths = (received.tokens, local, call.pool.ranks)
        block = torch.empty(sum(self._lengths), dtype=torch.int32, device=call.rows.device)
        self.beside: dict[str, Any] = {
            "block": block,
            "parts": ("source", "expert_counts", "source_ends"),
        }

    def take(self) -> None:
        """Computes them from copies of what arrived."""
        record, unit = self._record, self._record.alignment
        source, counts, ends = self.beside["block"].split(self._lengths)
        device = counts.device
        self.overflow = torch.zeros(1, dtype=torch.int32, device=device)
        if record.has_sync and not record.is_cut:
            on_host = record.opened.communicator.expert_counts(self._received)
            padded = [align(it, unit) for it in on_host]
            # Checks of the code for GPUs run without one, too.
            is_pinned = self._call.pool.on_device and torch.cuda.is_available()
            self.padded = torch.tensor(padded, dtype=torch.int64, pin_memory=is_pinned)
        else:
            padded = aligned(counts, unit)
            starts = padded.cumsum(0) - padded
            self.overflow |= starts[-1] + counts[-1] > record.given
            if self._call.cap(record.opened):
                # The counts are of what is left.
                self.overflow |= tensors.take(self._received.overflow)
            counts = torch.minimum(counts, (record.given - starts).clamp(min=0)).to(torch.int32)
            self.padded = aligned(counts, unit).to(torch.int64)
        self.counts, self.arrived = counts, ends[-1:]
        if record.pieces > 1:
            self.arrived = self._whole(source, ends)
        if record.has_sync:
            self.arrived, self.padded = self.arrived.cpu(), self.padded.cpu()

    def _whole(self, source: Any, ends: Any) -> Any:
        """Tokens that arrived, of which several rows of one count once. They come by source rank and token, and all
        ranks send a token as the same number of rows, of which M is a multiple."""
        tokens = source.div(self._record.pieces, rounding_mode="floor")
        is_new = torch.ones(len(source), dtype=torch.bool, device=ends.device)
        is_new[1:] = tokens[1:] != tokens[:-1]
        is_new &= torch.arange(len(source), device=ends.device) < ends[-1]
        return is_new.sum(dtype=torch.int32).view(1)

    def handle(self) -> tuple[Any, ...]:
        return handle_of(self._call, self._record, self.arrived, self.counts, self.overflow)


def handle_of(
    call: DispatchCall, record: Record, arrived: Any, counts: Any, overflow: Any
) -> tuple[Any, ...]:
    """The tuple that DeepEP would return. Fields that its kernels alone read are dummies."""
    pool, device, local = call.pool, counts.device, len(counts)
    return (
        *maps_of(record, pool, device),
        arrived,
        dummy(device, record.slots * pool.ranks, local),
        dummy(device, record.slots * pool.ranks // 16),
        dummy(device, record.slots * pool.ranks, local),
        counts,
        record.slots,
        call.buffer.configurer.template(num_of_tokens_per_rank=record.slots),
        record.routed,
        overflow,
    )


def maps_of(record: Record, pool: Any, device: Any) -> tuple[Any, Any, Any]:
    """The first three fields of a handle, by the first of which the record is found."""
    size = pool.ranks // pool.domains
    anchor = torch.empty((record.slots * pool.domains, size), dtype=torch.int32, device=device)
    others = (
        dummy(device, record.slots, pool.domains),
        dummy(device, record.slots, pool.domains - 1),
    )
    return tensors.anchored(anchor, record), *others


def aligned(counts: Any, unit: int) -> Any:
    """Each number, up to the next multiple of `unit`."""
    return (counts + (unit - 1)).div(unit, rounding_mode="floor") * unit


def combine(call: CombineCall, stream: CallStream) -> tuple[Any, Any]:
    """The sums of a dispatch's rows, and their probabilities by experts or None."""
    x, weights, _ = rows.combine(call, stream)
    record = call.record()
    if record.pieces > 1:
        parts = x.view(record.routed, record.pieces, x.shape[1]).float()
        # In the order of the experts.
        total = parts[:, 0]
        for piece in range(1, record.pieces):
            total = total + parts[:, piece]
        x = total.to(x.dtype)
    if weights is None:
        return x, None
    places = record.columns
    _, probs = hybrid_routing.spread(places, weights.view(places.shape), record.experts)
    return x, probs
