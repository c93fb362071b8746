"""Routings of Hybrid-EP: maps of experts, or ids, as the ids that a communicator takes."""

from dataclasses import dataclass
from typing import Any

from .._arrays import Refusal
from .._torch import torch
from ..utils.math import ceil_div
from .call import expect_integer
from .tensors import expect_tensor, floats, read

# The most experts that one row is sent to. A token with more is sent as several rows.
MOST_EXPERTS = 32

_ID_TYPES = (torch.int64, torch.int32, torch.int16)


@dataclass
class Routing:
    """The routing of a call as it was given: a map, or ids; and what goes beside it, or None.

    `probs` `[T, E]` is by experts, `weights` `[T, K]` by the columns of ids.
    """

    experts: int
    map: Any = None
    ids: Any = None
    probs: Any = None
    weights: Any = None
    # The columns of ids that were made a map.
    width: int | None = None

    @property
    def tensors(self) -> dict[str, Any]:
        """By the names of the arguments."""
        return {
            "routing_map": self.map,
            "topk_idx": self.ids,
            "probs": self.probs,
            "topk_weights": self.weights,
        }

    @property
    def tokens(self) -> int:
        return len(self.map if self.ids is None else self.ids)

    def most(self) -> int:
        """The most experts of a token. Of a map the host has to read it."""
        if self.ids is not None:
            return max(int(self.ids.shape[1]), 1)
        return max(int(self.map.sum(1).max()), 1) if self.tokens else 1

    @property
    def limit(self) -> int:
        """The most experts that a token may have, by the form of the routing: no value is read."""
        width = self.width if self.ids is None else int(self.ids.shape[1])
        return max(self.experts if width is None else min(width, self.experts), 1)

    def columns(self, count: int) -> tuple[Any, Any, Any]:
        """Ids `[T, count]`, which are -1 where there are no more, their weights or None, and whether a token has more,
        which is None where none can have."""
        if self.ids is not None:
            ids, weights = self.ids, self.weights
            if self.probs is not None:
                found = self.probs.gather(1, ids.clamp(min=0))
                weights = torch.where(ids >= 0, found, 0)
            return _widened(ids, count, -1), _widened(weights, count, 0), None
        # The place behind the last column takes what is not selected, and what finds no column.
        places = self.map.cumsum(1).sub_(1)
        is_over = (places[:, -1:] >= count).any()
        places = places.masked_fill_(~self.map | (places >= count), count)
        numbers = torch.arange(self.experts, device=places.device).expand_as(places)
        ids = _scattered(places, numbers, count, -1)
        weights = None
        if self.probs is not None:
            weights = _scattered(places, self.probs, count, 0)
        return ids, weights, is_over

    def dense(self) -> tuple[Any, Any]:
        """The map `[T, E]`, and the probabilities of all experts or None."""
        if self.ids is None:
            return self.map, self.probs
        routing_map, probs = spread(self.ids, self.weights, self.experts)
        return routing_map, probs if self.probs is None else self.probs


def _widened(columns: Any, count: int, value: int) -> Any:
    if columns is None or columns.shape[1] == count:
        return columns
    return torch.nn.functional.pad(columns, (0, count - columns.shape[1]), value=value)


def _scattered(places: Any, values: Any, count: int, value: int) -> Any:
    room = torch.full((len(places), count + 1), value, dtype=values.dtype, device=places.device)
    return room.scatter_(1, places, values)[:, :count].contiguous()


def spread(ids: Any, weights: Any, experts: int) -> tuple[Any, Any]:
    """The map `[T, E]` of ids, and their weights by experts, or None. Ids outside of the experts select nothing."""
    places = torch.where((ids >= 0) & (ids < experts), ids, experts).long()
    routing_map = torch.zeros((len(ids), experts + 1), dtype=torch.bool, device=ids.device)
    routing_map = routing_map.scatter_(1, places, True)[:, :experts].contiguous()
    if weights is None:
        return routing_map, None
    probs = torch.zeros((len(ids), experts + 1), dtype=torch.float32, device=ids.device)
    return routing_map, probs.scatter_(1, places, weights.float())[:, :experts].contiguous()


def read_routing(call: Any, tokens: int, experts: int) -> Routing:
    """The routing of a call: its map, or else its ids; explicit probabilities, or else weights of ids."""
    probs = read_probs(call, tokens, experts)
    if call.routing_map is not None:
        given = read("routing_map", call.routing_map, (torch.bool,), (tokens, experts))
        if probs is None and call.topk_weights is not None and call.topk_idx is not None:
            # The map says where, and the weights of ids what goes beside.
            _, probs = spread(*_read_ids(call, tokens), experts)
        return Routing(experts, map=given, probs=probs)
    if call.topk_idx is None:
        raise Refusal("topk_idx: found None without routing_map and handle; expected one of these")
    ids, weights = _read_ids(call, tokens)
    if ids.shape[1] > min(experts, MOST_EXPERTS):
        # Some columns of each token select nothing, or a token has more experts than one row may have.
        given, found = spread(ids, weights, experts)
        width = int(ids.shape[1])
        return Routing(experts, given, probs=found if probs is None else probs, width=width)
    ids = torch.where((ids >= 0) & (ids < experts), ids, -1).long()
    return Routing(experts, ids=ids, probs=probs, weights=None if probs is not None else weights)


def read_probs(call: Any, tokens: int, experts: int) -> Any:
    """`probs` of a call, or None."""
    if call.probs is None:
        return None
    return read("probs", call.probs, (torch.float32,), (tokens, experts)).contiguous()


def _read_ids(call: Any, tokens: int) -> tuple[Any, Any]:
    ids = read("topk_idx", call.topk_idx, _ID_TYPES, (tokens, None)).contiguous()
    weights = call.topk_weights
    if weights is not None:
        weights = read("topk_weights", weights, (torch.float32,), tuple(ids.shape)).contiguous()
    return ids, weights


def expect_all_experts(given: Any, experts: int, ranks: int) -> None:
    """Refuses a number of all experts that the ranks' own do not give."""
    if given is not None:
        expect_integer("num_of_experts", given, 1)
        if given != experts:
            raise Refusal(
                f"num_of_experts: found {given}; expected {experts}: {experts // ranks} of each of {ranks} ranks"
            )


def read_hidden(call: Any, tokens: int | None, hidden: int | None) -> tuple[Any, Any]:
    """Rows, and their scales where they have 8 bits."""
    rows, scales = call.x, call.scaling_factor
    eight = (torch.float8_e4m3fn, torch.uint8)
    expect_tensor("hidden", rows)
    if rows.dtype not in eight:
        if scales is not None:
            raise Refusal(f"scaling_factor: found some with hidden of {rows.dtype}; expected None")
        return read("hidden", rows, floats(), (tokens, hidden)).contiguous(), None
    rows = read("hidden", rows, eight, (tokens, hidden)).contiguous()
    if scales is None:
        raise Refusal("scaling_factor: found None with hidden of 8 bits; expected the rows' scales")
    return rows, read("scaling_factor", scales, (torch.float32,), (len(rows), None)).contiguous()


def rows_per_token(most: int) -> int:
    """How many rows a token is sent as, none of them to more experts than a row may have."""
    return ceil_div(most, MOST_EXPERTS)
