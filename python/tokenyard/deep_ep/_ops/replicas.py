"""Redundant experts of DeepEP 2.5: weights of experts to slots of other ranks, and gradients of the slots back."""

import hashlib
import json
from typing import Any

import tokenyard
from tokenyard import errors
from tokenyard._replicas.arguments import read_tensors
from tokenyard._replicas.calls import looks_of
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
        self._pool.expect_usable()
        self.settle()
        if not self._slot.is_open:
            self._slot.open(None, _make)
        replicas = self._slot.use(call.operation)
        replicas.expect_open(call.operation)
        mine: dict[str, Any] = {"call": call.operation}
        slots: list[list[int]] = []
        prepared, wrong = None, None
        try:
            self._expect_no_capture()
            mark = getattr(call.previous_event, "event", call.previous_event)
            behind = getattr(mark, "_event", None)
            slots, rows = self._read(call, replicas.device, behind)
            digest = hashlib.blake2b(json.dumps(slots).encode(), digest_size=16)
            mine["redundancy_mapping"] = digest.hexdigest()
            mine |= looks_of(rows[0], call.native == "reduce_replicas")
            prepared = replicas.prepare(call.native, rows, behind)
        except Exception as error:
            wrong = str(error) if isinstance(error, Unfit) else reason(error)

        def agree() -> list[list[int]]:
            self._agree(call.operation, mine, wrong)
            return self._of_all_domains(slots, mine["experts of a rank"])

        self._last = pending = replicas.begin(call.operation, prepared, agree)
        event = EventOverlap(EventHandle())
        event.register_hook_after_wait(pending.recv)
        return event

    def settle(self) -> None:
        """Receives the last call. An error of that is raised where its event is waited for."""
        last, self._last = self._last, None
        if last is not None:
            last.settle()

    def _expect_no_capture(self) -> None:
        if self._pool.is_capturing():
            raise Refusal(
                "found a capture of a graph on the current stream; expected none, because ranks meet in this call: "
                "call it between launches of graphs"
            )

    def _read(
        self, call: PrefetchCall, device: int | None, behind: Any
    ) -> tuple[list[list[int]], tuple[list[Rows], list[Rows]]]:
        """The mapping, and the tensors of experts and of slots. Raises what is wrong on this rank alone."""
        call.expect_right()
        pool = self._pool
        domain = pool.ranks // pool.domains
        name = "redundancy_mapping"
        mapping = read(name, tensor_of(call.redundancy_mapping), (torch.int32,), (domain, None))
        if not mapping.is_contiguous():
            raise Refusal(f"{name}: found strides {list(mapping.stride())}; expected contiguous")
        if behind is not None and mapping.is_cuda:
            # The current stream, which the host's copy is on, need not be behind the event.
            behind.synchronize()
        slots: list[list[int]] = mapping.tolist()
        given = tuple((one, _tensors_of(one, getattr(call, one))) for one in call.tensors)
        is_sum = call.native == "reduce_replicas"
        return slots, read_tensors(given, (name, slots, pool.rank % domain), is_sum, device)

    def _agree(self, operation: str, mine: dict[str, Any], wrong: str | None) -> None:
        """Collective: a rank whose arguments are wrong raises what is, and the others RefusedError; where ranks differ,
        all raise MismatchError."""
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
                # A mapping is of a domain, and a digest says nothing to a reader.
                is_mapping = name == "redundancy_mapping"
                like = rank // domain * domain if is_mapping else 0
                expected = views[like].get(name)
                if expected != value:
                    shown = "" if is_mapping else f": {value} and {expected}"
                    raise errors.MismatchError(
                        f"{operation}: found another {name} on rank {rank}; expected that of rank {like}{shown}",
                        kind="mismatch",
                        rank=rank,
                        operation=operation,
                        fix="give the same mapping, and experts of the same size, on all ranks",
                    )

    def _of_all_domains(self, slots: list[list[int]], local: int) -> list[list[int]]:
        """The mapping of this rank's domain among empty ones: bytes of other domains do not come by this rank."""
        pool = self._pool
        domain = pool.ranks // pool.domains
        begin = pool.rank // domain * domain
        found: list[list[int]] = [[] for _ in range(pool.ranks)]
        for rank, row in enumerate(slots, begin):
            found[rank] = [expert if expert < 0 else begin * local + expert for expert in row]
        return found


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
