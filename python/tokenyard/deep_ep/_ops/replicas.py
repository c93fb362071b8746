"""Redundant experts of DeepEP 2.5: weights of experts to slots of other ranks, and gradients of the slots back."""

import json
from typing import Any

import tokenyard
from tokenyard import errors
from tokenyard._replicas.arguments import read_tensors
from tokenyard._replicas.tensors import Refusal as Unfit
from tokenyard._replicas.tensors import Rows

from .. import _world
from .._arrays import Refusal, invalid, reason
from .._calls.call import Call
from .._calls.tensors import read
from .._pool import Pool
from .._torch import torch
from ..utils.event import EventHandle, EventOverlap
from .common import Slot, tensor_of

# Bytes of a part of an expert, and parts that travel at once between two ranks.
PART_BYTES, IN_FLIGHT = 1 << 20, 4


class PrefetchCall(Call):
    """Weights for slots."""

    operation = "EPBuffer.lb_prefetch_weights"
    flags = ()
    integers = ("num_sms",)
    tensors = ("expert_weights", "redundant_expert_weights")
    native = "replicate"


class ReduceCall(PrefetchCall):
    """Gradients of slots."""

    operation = "EPBuffer.lb_reduce_grads"
    tensors = ("expert_grads", "redundant_expert_grads")
    native = "reduce_replicas"


class Redundancy:
    """The replicas of a buffer, which its first call opens."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._slot: Slot[tokenyard.Replicas] = Slot(pool, "EPBuffer")
        self._last: tokenyard.PendingReplicas | None = None

    def begin(self, call: PrefetchCall) -> EventOverlap:
        """Begins a call, whose event receives it. Collective."""
        self._expect_no_capture(call)
        self.settle()
        if not self._slot.is_open:
            self._slot.open(None, _make)
        replicas = self._slot.use(call.operation)
        mine: dict[str, Any] = {"call": call.operation}
        start, wrong = None, None
        try:
            mapping, rows = self._read(call, replicas.works_on_device)
            mark = getattr(call.previous_event, "event", call.previous_event)
            start = replicas.prepared(call.native, rows, getattr(mark, "_event", None))
            mine["redundancy_mapping"], mine["experts of a rank"] = mapping, rows[0][0].count
            mine["bytes of an expert"] = [one.size for one in rows[0]]
            if call.native == "reduce_replicas":
                mine["types"] = [one.dtype for one in rows[0]]
        except Exception as error:
            wrong = str(error) if isinstance(error, Unfit) else reason(error)
        slots = self._agree(call.operation, mine, wrong)
        assert start is not None
        self._last = pending = start(slots)
        event = EventOverlap(EventHandle())
        event.register_hook_after_wait(pending.recv)
        return event

    def settle(self) -> None:
        """Receives the last call. An error of that is raised where its event is waited for."""
        last, self._last = self._last, None
        if last is not None:
            last.settle()

    def _expect_no_capture(self, call: PrefetchCall) -> None:
        self._pool.expect_usable()
        if self._pool.is_capturing():
            raise invalid(
                call.operation,
                f"{call.operation}: found a capture of a graph on the current stream; expected none, because ranks "
                "meet in this call",
                fix="call it between launches of graphs",
            )

    def _read(
        self, call: PrefetchCall, on_device: bool
    ) -> tuple[list[list[int]], tuple[list[Rows], list[Rows]]]:
        """The mapping, and the tensors of experts and of slots. Raises what is wrong on this rank alone."""
        call.expect_right()
        pool = self._pool
        domain = pool.ranks // pool.domains
        name = "redundancy_mapping"
        mapping = read(name, tensor_of(call.redundancy_mapping), (torch.int32,), (domain, None))
        if not mapping.is_contiguous():
            raise Refusal(f"{name}: found strides {list(mapping.stride())}; expected contiguous")
        slots: list[list[int]] = mapping.tolist()
        given = tuple((one, _tensors_of(one, getattr(call, one))) for one in call.tensors)
        is_sum = call.native == "reduce_replicas"
        rows = read_tensors(given, (name, slots, pool.rank % domain), is_sum, on_device)
        return slots, rows

    def _agree(self, operation: str, mine: dict[str, Any], wrong: str | None) -> list[list[int]]:
        """The expert of each slot of all ranks. Collective: a rank whose arguments are wrong raises what is, and the
        others RefusedError; where ranks differ, all raise MismatchError."""
        pool = self._pool
        view = {"wrong": wrong} if wrong is not None else mine
        views = _world.gather_json(pool.world, "redundant experts", view)
        if wrong is not None:
            raise invalid(operation, f"{operation}: {wrong}", pool.rank)
        for rank, it in views.items():
            if "wrong" in it:
                text = f"rank {rank} refused its input: {operation}: {it['wrong']}"
                raise errors.RefusedError(text, kind="refused", rank=rank, operation=operation)
        domain = pool.ranks // pool.domains
        for rank, it in views.items():
            for name, value in it.items():
                # A mapping is of a domain.
                like = rank // domain * domain if name == "redundancy_mapping" else 0
                if views[like].get(name) != value:
                    raise errors.MismatchError(
                        f"{operation}: found another {name} on rank {rank}; expected that of rank {like}: "
                        f"{json.dumps(value)[:80]} and {json.dumps(views[like].get(name))[:80]}",
                        kind="mismatch",
                        rank=rank,
                        operation=operation,
                        fix="give the same mapping, and experts of the same size, on all ranks",
                    )
        local = mine["experts of a rank"]
        slots = []
        for rank, it in views.items():
            first = rank // domain * domain * local
            row = it["redundancy_mapping"][rank % domain]
            slots.append([expert if expert < 0 else first + expert for expert in row])
        return slots


def _make(world: tokenyard.World, config: tokenyard.Config) -> tokenyard.Replicas:
    return tokenyard.Replicas(world, config, max_bytes=PART_BYTES, in_flight=IN_FLIGHT)


def _tensors_of(name: str, value: Any) -> Any:
    """A tensor, or several; arrays as tensors over their memory."""
    if value is None:
        return None
    is_list = isinstance(value, (list, tuple))
    found = [tensor_of(one) for one in (value if is_list else [value])]
    for one in found:
        if not hasattr(one, "dtype"):
            what = (
                f"{type(one).__name__} in a {type(value).__name__}"
                if is_list
                else type(one).__name__
            )
            raise Refusal(f"{name}: found {what}; expected a tensor of torch, or a list of such")
    return found if is_list else found[0]
