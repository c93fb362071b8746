"""In which order ranks send and receive the parts of experts. Each rank derives its own events; nothing is agreed on.

All receives of all ranks have one order, by their keys. A pipe takes `in_flight` messages of a pair that are not yet
received, so send n of a pair comes behind receive n - in_flight of it, and a forwarded part behind its receive. The
first event of that order that is not done can be done, so some rank always goes on: the order is a proof, and no rank
has to know how far the others are.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

Key: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """A row of a rank that goes to a row of another. Its rows lie at these places on each side."""

    source: int
    source_row: int
    target: int
    target_row: int


@dataclass(frozen=True)
class Part:
    """Bytes of a row of tensor `tensor`, which travel as one message over each hop."""

    key: Key
    transfer: Transfer
    tensor: int
    begin: int
    end: int


@dataclass(frozen=True)
class Event:
    """A send or a receive of this rank, and the other rank of it."""

    part: Part
    peer: int
    is_send: bool


@dataclass
class _Pair:
    """Messages between two ranks so far."""

    received: list[Key] = field(default_factory=list)
    last_send: Key = ()


@dataclass(frozen=True)
class Ranks:
    """Ranks in domains, one after the other. Links join those of a domain, and those of a rail."""

    count: int
    domains: int

    def hops(self, source: int, target: int) -> list[tuple[int, int]]:
        """The links from a rank to another: over the rail first, and then inside of the domain."""
        size = self.count // self.domains
        via = target // size * size + source % size
        return [(a, b) for a, b in ((source, via), (via, target)) if a != b]

    def of(self, me: int, transfers: list[Transfer]) -> list[Transfer]:
        """Those that a rank takes part in."""
        return [it for it in transfers if any(me in hop for hop in self.hops(it.source, it.target))]


def replicating(slots: list[list[int]], local: int) -> list[Transfer]:
    """From owners to slots. `slots`: by rank, the expert of each slot, or -1. `local`: experts of a rank."""
    return [
        Transfer(expert // local, expert % local, rank, slot)
        for rank, row in enumerate(slots)
        for slot, expert in enumerate(row)
        if expert >= 0
    ]


def reducing(slots: list[list[int]], local: int) -> list[Transfer]:
    """From slots to owners."""
    return [
        Transfer(it.target, it.target_row, it.source, it.source_row)
        for it in replicating(slots, local)
    ]


def spread(transfers: list[Transfer], sizes: list[int], most: int, ranks: int) -> list[Part]:
    """Parts in an order in which a rank receives from one source after the other, so that all of them send."""
    counts: dict[tuple[int, int], int] = {}
    parts = []
    for it in transfers:
        pair = (it.source, it.target)
        shift = (it.target - it.source) % ranks
        for tensor, begin, end in _cuts(sizes, most):
            turn = counts[pair] = counts.get(pair, 0) + 1
            parts.append(Part((turn, shift, it.source), it, tensor, begin, end))
    return parts


def in_turn(transfers: list[Transfer], sizes: list[int], most: int) -> list[Part]:
    """Parts in an order in which an owner gets all terms of a sum one after the other, of ascending rank and slot."""
    parts = []
    for it in transfers:
        for tensor, begin, end in _cuts(sizes, most):
            key = (tensor, it.target_row, begin, it.source, it.source_row, it.target)
            parts.append(Part(key, it, tensor, begin, end))
    return parts


def _cuts(sizes: list[int], most: int) -> Iterator[tuple[int, int, int]]:
    """Tensor, begin and end of each part of a row. `sizes`: bytes of a row of each tensor."""
    for tensor, size in enumerate(sizes):
        for begin in range(0, size, most):
            yield tensor, begin, min(size, begin + most)


def events(parts: Iterable[Part], me: int, ranks: Ranks, in_flight: int) -> list[Event]:
    """The sends and receives of this rank, in order."""
    hops = [
        ((*part.key, hop), part, pair)
        for part in parts
        for hop, pair in enumerate(ranks.hops(part.transfer.source, part.transfer.target))
        if me in pair
    ]
    hops.sort(key=lambda it: it[0])
    pairs: dict[tuple[int, int], _Pair] = {}
    found: list[tuple[Key, int, Event]] = []
    for key, part, pair in hops:
        one = pairs.setdefault(pair, _Pair())
        one.received.append(key)
        if pair[1] == me:
            found.append((key, 0, Event(part, pair[0], False)))
            continue
        taken = len(one.received) - 1 - in_flight
        after = one.received[taken] if taken >= 0 else ()
        if part.transfer.source != me:
            # The same part, over the hop before.
            after = max(after, (*key[:-1], key[-1] - 1))
        one.last_send = max(one.last_send, after)
        found.append((one.last_send, 1, Event(part, pair[1], True)))
    found.sort(key=lambda it: it[:2])
    return [event for _, _, event in found]
