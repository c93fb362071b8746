"""The calls of Hybrid-EP that permute, where the host does not wait and a token may have more experts than a row.

Rows come once per rank, as without permutation: R * M are the most, whatever the routing says. Each rank copies them to
the places of its experts, and adds up what comes back.
"""

import numbers
from dataclasses import dataclass, replace
from typing import Any

from .. import _handles
from .._sizes import Sizes
from .._torch import torch
from . import hybrid, hybrid_flat, hybrid_routing, rows, tensors
from .streams import CallStream
from .tensors import expect_device, read


@dataclass
class Record(hybrid_flat.Record):
    """The dispatch that a handle of these calls stands for."""

    # P, the place of each row for each own expert `[N, E / R]`, P where it has none, and the row of each place `[P]`, N
    # where it has none.
    room: int = 0
    places: Any = None
    sources: Any = None


def is_of(handle: Any) -> bool:
    """Whether a handle is one of these calls."""
    try:
        return isinstance(_handles.record_of(handle, hybrid.Record), Record)
    except Exception:
        # It is none of any call: that call refuses it.
        return False


def is_meant(given: dict[str, Any]) -> bool:
    """Whether the arguments of `dispatch_with_permute` are those of such a call. No value is read of any tensor.

    Where an argument is wrong, it is a call as the last one: the others most likely make such a one.
    """
    if given["handle"] is not None:
        return is_of(given["handle"])
    buffer, no_sync = given["self"], given["non_blocking"]
    local, ids = given["num_of_experts_per_rank"], given["topk_idx"]
    if local is None:
        local = buffer.configurer.buffer_config.num_of_experts_per_rank
    shape = list(getattr(ids, "shape", ()))
    has_no_width = given["routing_map"] is None and len(shape) != 2
    is_number = isinstance(local, numbers.Integral) and int(local) > 0
    if not is_number or has_no_width or not isinstance(no_sync, numbers.Integral | None):
        return bool(buffer.last_opened.get(True, (None, ""))[1] == "flat")
    if not no_sync:
        return False
    most = int(local) * buffer.group_size
    if given["routing_map"] is None:
        most = min(most, shape[1])
    return bool(most > hybrid_routing.MOST_EXPERTS)


class DispatchCall(hybrid.DispatchCall):
    """A dispatch of rows once per rank, which are permuted behind it."""

    is_expanded = False
    record_type = Record

    def read(self) -> Sizes:
        most = self.read_tokens()
        self.read_room()
        return hybrid_flat.read_ranks(self, most)

    def looks(self) -> Sizes:
        return hybrid_flat.ranks_by_looks(self)

    def prepare(self, opened: Any) -> None:
        self.named_tokens = self.most_named

    def cap(self, opened: Any) -> dict[str, Any]:
        return {}

    def read_again(self, record: rows.Record) -> None:
        assert isinstance(record, Record)
        self.sent_probs = self.read_rows_again(record)
        self.read_room_again(record)


def dispatch(call: DispatchCall, stream: CallStream) -> hybrid.Result:
    """A dispatch, or one by the routing of a handle."""
    if call.handle is not None:
        replayed, received = rows.replay(call, stream)
        assert isinstance(replayed, Record)
        given, _, _ = rows.give(call, replayed, received, stream)
        probs, _ = hybrid_flat.beside(call, replayed, None, stream, 0)
        found = _permuted(call, replayed, given, probs)
        room = replayed.room if call.room is None else call.room
        x, probs, scales = (None if one is None else tensors.fit(one, room) for one in found)
        return x, probs, scales, None, call.own_handle
    arrived = hybrid_flat.arrive(call, stream, None)
    room, unit = call.room or 0, call.unit
    chosen = arrived.map[: arrived.record.given]
    counts = chosen.sum(0)
    padded = hybrid.aligned(counts, unit)
    starts = padded.cumsum(0) - padded
    overflow = (starts[-1:] + counts[-1:] > room).to(torch.int32)
    places = chosen.cumsum(0).sub_(1).add_(starts)
    # The last place takes what has none.
    places = places.masked_fill_(~chosen | (places >= room), room)
    numbers = torch.arange(len(chosen), device=chosen.device)[:, None].expand_as(places)
    sources = places.new_full((room + 1,), len(chosen))
    sources.scatter_(0, places.flatten(), numbers.flatten())
    record = replace(
        arrived.record, alignment=unit, room=room, places=places, sources=sources[:room]
    )
    x, probs, scales = _permuted(call, record, arrived.given, arrived.probs)
    counts = torch.minimum(counts, (room - starts).clamp(min=0)).to(torch.int32)
    padded = hybrid.aligned(counts, unit).to(torch.int64)
    handle = hybrid.handle_of(call, record, arrived.count, counts, overflow)
    return x, probs, scales, padded, handle


def _permuted(call: DispatchCall, record: Record, given: rows.Given, probs: Any) -> tuple[Any, ...]:
    """Rows, probabilities of the own experts and scales in the places of the experts, zeros in others."""
    sources = record.sources
    is_empty, of = sources >= record.given, sources.clamp(max=record.given - 1)

    def placed(values: Any) -> Any:
        if values is None:
            return None
        as_bytes = values.view(torch.uint8) if values.element_size() == 1 else values
        return as_bytes[of].masked_fill_(is_empty[:, None], 0).view(values.dtype)

    if probs is not None:
        own, places = _own(call.pool, record), record.places
        found = probs.new_zeros(record.room + 1)
        found.scatter_(0, places.flatten(), probs[:, own].flatten())
        probs = found[: record.room]
    return placed(given.x), probs, placed(given.scales)


def _own(pool: Any, record: Record) -> slice:
    """The columns of this rank among the experts of its domain."""
    local = record.experts // pool.ranks
    first = pool.rank % (pool.ranks // pool.domains) * local
    return slice(first, first + local)


class CombineCall(hybrid.CombineCall):
    """A combine of rows that were permuted behind their dispatch."""

    record_type = Record
    returned: Any = None

    def read_rows(self, record: rows.Record) -> tuple[Any, Any]:
        assert isinstance(record, Record)
        x, places, room = (
            hybrid.read_returned(self, record, record.room),
            record.places,
            record.room,
        )
        probs = self.topk_weights
        if probs is not None:
            probs = read("probs", probs, (torch.float32,), (x.shape[0],))
        expect_device(self.pool, hidden=x, probs=probs)
        if probs is not None:
            self.returned = torch.cat([probs[:room], probs.new_zeros(1)])[places]
        x = torch.cat([x[:room], x.new_zeros((1, x.shape[1]))])
        # In the order of the experts. On GPUs an indexed sum has none.
        total = x.new_zeros((len(places), x.shape[1]), dtype=torch.float32)
        for column in places.unbind(1):
            total += x[column]
        return total.to(x.dtype), None


def combine(call: CombineCall, stream: CallStream) -> tuple[Any, Any]:
    """The sums of a dispatch's rows, and their probabilities by experts or None."""
    return hybrid_flat.combine(call, stream)
