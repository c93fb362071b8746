"""The calls of Hybrid-EP that do not permute: a row for each token and rank, as V1's without top-k.

A row's experts, and their probabilities, are more than ids of a communicator may be. So they come by a replay: as rows
of their own on the same routes.
"""

from dataclasses import dataclass, replace
from typing import Any

from .. import _handles
from .._arrays import Refusal
from .._sizes import Sizes, sizes_of
from .._torch import torch
from ..utils.math import align
from . import hybrid, hybrid_routing, rows, tensors
from .arguments import MOST_CHOICES
from .call import expect_integer, judge_integers
from .streams import CallStream
from .tensors import expect_device, read


@dataclass
class Record(hybrid.Record):
    """The dispatch that a handle of these calls stands for."""


class DispatchCall(hybrid.HybridDispatchCall):
    """A dispatch without permutation."""

    operation = "HybridEPBuffer.dispatch"
    flags = ("async_finish",)
    instead_of_sync = "num_dispatched_tokens"
    record_type = Record
    permutes = False

    def __init__(self, given: dict[str, Any]) -> None:
        given["num_of_experts_per_rank"] = None
        super().__init__(given)
        own, name = vars(self), "num_dispatched_tokens"
        if own[name] is not None and (wrong := judge_integers(own, (name,))):
            # A wrong one counts as none: the others may make a call that waits.
            self.wrong, own[name] = self.wrong or wrong, None
        self.has_cpu_sync = own[name] is None

    @property
    def experts(self) -> int:
        """By the number of all experts, if the call names it."""
        if self.num_of_experts is None:
            return super().experts
        ranks = self.pool.ranks
        expect_integer("num_of_experts", self.num_of_experts, 1)
        if self.num_of_experts % ranks:
            raise Refusal(
                f"num_of_experts: found {self.num_of_experts}; expected a multiple of the {ranks} ranks"
            )
        return int(self.num_of_experts)

    def is_worst(self, opened: Any) -> bool:
        return not self.has_cpu_sync

    def read(self) -> Sizes:
        return read_ranks(self, self.read_tokens())

    def looks(self) -> Sizes:
        return ranks_by_looks(self)

    def read_again(self, record: rows.Record) -> None:
        assert isinstance(record, Record)
        self.sent_probs = self.read_rows_again(record)


def read_ranks(call: Any, most: int) -> Sizes:
    """Reads the routing of a call as one of ranks. `most` is M to open a communicator with."""
    ranks = call.pool.ranks
    call.sent, call.sent_probs = call.routing.dense()
    is_in = call.sent.view(len(call.rows), ranks, call.routing.experts // ranks).any(2)
    choices = min(ranks, MOST_CHOICES)
    call.ids, _, is_over = hybrid_routing.Routing(ranks, map=is_in).columns(choices)
    if ranks > choices and bool(is_over):
        raise Refusal(
            f"routing_map: found a token for more than {choices} ranks; expected at most as many"
        )
    return sizes_of(ranks, choices, call.rows.shape[1], most, call.most_named, False)


def ranks_by_looks(call: Any) -> Sizes:
    """As `read_ranks`, of a call whose arguments are wrong."""
    tokens, hidden = call.first.shape
    ranks, most = call.pool.ranks, call.most_tokens(tokens)
    return sizes_of(ranks, min(ranks, MOST_CHOICES), hidden, most, call.most_named, False)


Result = tuple[Any, Any, Any, tuple[Any, ...]]


def dispatch(call: DispatchCall, stream: CallStream) -> Result:
    """A dispatch, or one by the routing of a handle."""
    if call.handle is not None:
        record, received = rows.replay(call, stream)
        assert isinstance(record, Record)
        if call.num_dispatched_tokens is not None:
            record = replace(record, given=call.num_dispatched_tokens)
        given, _, _ = rows.give(call, record, received, stream)
        probs, _ = beside(call, record, None, stream, 0)
        return given.x, probs, given.scales, call.own_handle
    arrived = arrive(call, stream, call.num_dispatched_tokens)
    record, given = arrived.record, arrived.given
    config = call.buffer.configurer.template(num_of_tokens_per_rank=record.slots)
    maps = hybrid.maps_of(record, call.pool, call.rows.device)
    handle = (*maps, arrived.count, arrived.map, record.slots, config, record.routed)
    return given.x, arrived.probs, given.scales, handle


@dataclass
class Arrived:
    """A dispatch whose rows came once per rank: what the caller gets of it, the number of rows `[1]`, and the map of
    their own experts."""

    record: Any
    given: rows.Given
    probs: Any
    count: Any
    map: Any


def arrive(call: Any, stream: CallStream, bound: int | None) -> Arrived:
    """Sends rows once per rank. `bound`: as many are given; None for those for which there is room."""
    opened, received, native = rows.send(call, stream)
    call.grow(opened)
    record = call.record_type(
        opened,
        native,
        native.rows if bound is None else bound,
        call.has_cpu_sync,
        call.sms,
        generation=call.buffer.runtime.buffer_generation,
        experts=call.routing.experts,
        routed=call.routing.tokens,
        slots=call.slots,
    )
    pool, device = call.pool, call.rows.device
    block = torch.empty(received.tokens + pool.ranks, dtype=torch.int32, device=device)
    counted = {"block": block, "parts": ("source", "source_ends")}
    given, _, _ = rows.give(call, record, received, stream, counted)
    count = block[-1:].cpu() if call.has_cpu_sync else block[-1:]
    most = record.slots * pool.ranks
    probs, routing_map = beside(call, record, call.sent, stream, max(most, record.given))
    if not call.has_cpu_sync:
        routing_map &= (torch.arange(len(routing_map), device=device) < count)[:, None]
    return Arrived(record, given, probs, count, routing_map)


def beside(
    call: Any, record: Record, sent_map: Any, stream: CallStream, most: int
) -> tuple[Any, Any]:
    """Numbers that come beside the rows: the probabilities of this rank's experts `[rows, experts of a domain]`, or
    None where none are sent; and the map of them, `[most, own experts]`, unless the handle has it."""
    experts, pool = record.experts, call.pool
    local = experts // pool.ranks
    parts = [call.sent_probs, sent_map]
    sent = [one.contiguous().view(torch.uint8) for one in parts if one is not None]
    if not sent:
        return None, None
    own = slice(pool.rank * local, (pool.rank + 1) * local)
    got = _moved(call, record, torch.cat(sent, 1), stream)
    probs = routing_map = None
    if call.sent_probs is not None:
        size = pool.ranks // pool.domains
        first = pool.rank % size * local
        found = got[:, 4 * own.start : 4 * own.stop].contiguous().view(torch.float32)
        probs = found.new_zeros((record.given, size * local))
        probs[:, first : first + local] = tensors.fit(found, record.given)
    if sent_map is not None:
        found = got[:, got.shape[1] - experts :][:, own] != 0
        routing_map = torch.zeros((most, local), dtype=torch.bool, device=found.device)
        routing_map[: len(found)] = found[:most]
    return probs, routing_map


def _moved(call: Any, record: Record, sent: Any, stream: CallStream) -> Any:
    """Bytes of each token, as they arrive at the ranks of its rows. Collective."""
    opened, width, hidden = record.opened, sent.shape[1], record.opened.sizes.hidden
    # Some kernel sets take rows of the communicator's width alone.
    takes_any = opened.takes("round_once")
    unit, columns = (16, align(hidden, 4)) if takes_any else (2 * hidden, hidden)
    padded = torch.nn.functional.pad(sent, (0, align(width, unit) - width))
    words = padded.view(torch.float32 if takes_any else torch.bfloat16)
    no_sync = opened.takes("without_sync") and (not record.has_sync or stream.is_captured)
    found = []
    # Rows of a replay take the place of the dispatch's.
    for part in words.split(columns, 1):
        received = call.pool.deferred.start(
            opened.communicator.replay,
            record.native,
            part.contiguous(),
            stream=stream.raw,
            without_sync=no_sync,
            sms=call.sms or record.sms,
        )
        found.append(tensors.take(received.x).clone())
    return torch.cat(found, 1).view(torch.uint8)[:, :width]


class CombineCall(hybrid.CombineCall):
    """A combine of rows that were not permuted."""

    operation = "HybridEPBuffer.combine"
    flags = ("async_finish",)
    record_type = Record
    permutes = False
    returned: Any = None

    def read_rows(self, record: rows.Record) -> tuple[Any, Any]:
        assert isinstance(record, Record)
        count = record.native.rows
        x = hybrid.read_returned(self, record, min(record.given, count))
        if self.topk_weights is not None:
            pool = self.pool
            local, size = record.experts // pool.ranks, pool.ranks // pool.domains
            shape = (x.shape[0], size * local)
            probs = read("probs", self.topk_weights, (torch.float32,), shape)
            expect_device(pool, hidden=x, probs=probs)
            first = pool.rank % size * local
            self.returned = hybrid.filled(probs[:, first : first + local], count)
        return hybrid.filled(x, count), None


def combine(call: Any, stream: CallStream) -> tuple[Any, Any]:
    """The sums of a dispatch's rows, and the probabilities of all experts or None."""
    x, _, _ = rows.combine(call, stream)
    if call.returned is None:
        return x, None
    record = _handles.record_of(call.handle, Record)
    opened, native, pool = record.opened, record.native, call.pool
    experts, hidden = record.experts, opened.sizes.hidden
    local = experts // pool.ranks
    wide = call.returned.new_zeros((native.rows, align(experts, hidden)))
    wide[:, pool.rank * local : (pool.rank + 1) * local] = call.returned
    sums = []
    # Of each expert one rank has a number, so that the sums are these.
    for part in wide.split(hidden, 1):
        out = part.new_empty((native.tokens, hidden))
        pool.deferred.start(
            opened.communicator.combine,
            native,
            part.contiguous(),
            out=out,
            stream=stream.raw,
            without_sync=opened.takes("without_sync")
            and (stream.is_captured or not record.has_sync),
            sms=call.sms or record.sms,
        )
        sums.append(out)
    return x, torch.cat(sums, 1)[:, :experts].contiguous()
