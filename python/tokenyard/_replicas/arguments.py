"""Arguments of calls with replicas, and their checks."""

import operator
from typing import Any

from .tensors import NARROW, WIDE, Refusal, Rows, of_torch

# Tensors of a call.
MOST_TENSORS = 64


def read_tensors(
    given: tuple[tuple[str, Any], ...],
    plan: tuple[str, list[list[int]], int],
    is_sum: bool,
    device: int | None,
) -> tuple[list[Rows], list[Rows]]:
    """The tensors of experts, and of slots, which `given` names in this order. Raises Refusal.

    `plan`: its name, the slots of all ranks, and this rank. `device`: the GPU of the pipe; None for host memory.
    """
    (name, experts), (of_slots, rooms) = given
    owned = _rows(name, experts, device, is_sum)
    name_of_plan, slots, me = plan
    counts = [one.count for one in owned]
    if counts[0] < 1 or any(count != counts[0] for count in counts):
        raise Refusal(f"{name}: found {counts} experts; expected one number of at least 1")
    _expect_plan(name_of_plan, slots, counts[0])
    for own in owned:
        if is_sum and own.dtype not in (*WIDE, *NARROW):
            wanted = ", ".join((*WIDE, *NARROW))
            raise Refusal(f"{own.name}: found type {own.dtype}; expected one of {wanted}")
    mine = slots[me]
    if rooms is None and all(expert < 0 for expert in mine):
        return owned, []
    found = _rows(of_slots, rooms, device, not is_sum)
    if len(found) != len(owned):
        raise Refusal(
            f"{of_slots}: found {len(found)} tensors; expected {len(owned)}, as of {name}"
        )
    for own, room in zip(owned, found, strict=True):
        what = room.name
        if room.count != len(mine):
            raise Refusal(f"{what}: found {room.count} slots; expected the plan's {len(mine)}")
        if mine and room.size != own.size:
            raise Refusal(
                f"{what}: found {room.size} bytes of an expert; expected {own.size}, as of {own.name}"
            )
        if is_sum and room.dtype != own.dtype:
            raise Refusal(
                f"{what}: found type {room.dtype}; expected {own.dtype}, as of {own.name}"
            )
    return owned, found


def _rows(name: str, value: Any, device: int | None, is_written: bool) -> list[Rows]:
    if not isinstance(value, (list, tuple)):
        return [Rows.read(name, value, device, is_written)]
    listed = list(value)
    if not 1 <= len(listed) <= MOST_TENSORS:
        raise Refusal(f"{name}: found {len(listed)} tensors; expected 1 to {MOST_TENSORS}")
    libraries = sorted({"torch" if of_torch(one) else type(one).__module__ for one in listed})
    found = [
        Rows.read(f"{name}[{place}]", one, device, is_written) for place, one in enumerate(listed)
    ]
    if len(libraries) > 1:
        raise Refusal(
            f"{name}: found tensors of {' and '.join(libraries)}; expected those of one library"
        )
    return found


def slots_of(plan: Any, ranks: int) -> list[list[int]]:
    """A plan as lists. Raises Refusal."""
    if not isinstance(plan, (list, tuple)):
        plan = _listed(plan)
    if not isinstance(plan, (list, tuple)) or len(plan) != ranks:
        found = f"{len(plan)} rows" if isinstance(plan, (list, tuple)) else type(plan).__name__
        raise Refusal(f"plan: found {found}; expected one of slots for each of {ranks} ranks")
    slots = [list(row) if isinstance(row, (list, tuple)) else _listed(row) for row in plan]
    for rank, row in enumerate(slots):
        if not isinstance(row, list):
            raise Refusal(f"plan[{rank}]: found {type(row).__name__}; expected a list of experts")
        for slot, expert in enumerate(row):
            row[slot] = integer_of(f"plan[{rank}][{slot}]", expert)
    return slots


def integer_of(name: str, value: Any) -> int:
    """An integer of Python, numpy or torch. Raises Refusal for any other value, and a truth value."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise Refusal(f"{name}: found {value!r}; expected an integer")


def _listed(value: Any) -> Any:
    """An array as lists; all else as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__array_interface__"):
        import numpy

        return numpy.asarray(value).tolist()
    return value


def _expect_plan(name: str, slots: list[list[int]], local: int) -> None:
    """Raises Refusal for a plan that ranks of so many experts do not fit."""
    experts = local * len(slots)
    for rank, row in enumerate(slots):
        for slot, expert in enumerate(row):
            if not -1 <= expert < experts:
                raise Refusal(
                    f"{name}[{rank}][{slot}]: found expert {expert}; expected -1, or below {experts}, the experts of "
                    "all ranks"
                )
            if expert >= 0 and expert // local == rank:
                raise Refusal(
                    f"{name}[{rank}][{slot}]: found expert {expert}, which rank {rank} owns; expected one of another "
                    "rank"
                )
