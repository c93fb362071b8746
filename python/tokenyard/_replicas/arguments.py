"""Arguments of calls with replicas, and their checks."""

from typing import Any

from .tensors import NARROW, WIDE, Refusal, Rows

# Tensors of a call.
MOST_TENSORS = 64


def read_tensors(
    given: tuple[tuple[str, Any], ...],
    plan: tuple[str, list[list[int]], int],
    is_sum: bool,
    on_device: bool,
) -> tuple[list[Rows], list[Rows]]:
    """The tensors of experts, and of slots, which `given` names in this order. Raises Refusal.

    `plan`: its name, the slots of all ranks, and this rank.
    """
    (name, experts), (of_slots, rooms) = given
    owned = _rows(name, experts, on_device, is_sum)
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
    found = _rows(of_slots, rooms, on_device, not is_sum)
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


def _rows(name: str, value: Any, on_device: bool, is_written: bool) -> list[Rows]:
    if not isinstance(value, (list, tuple)):
        return [Rows.read(name, value, on_device, is_written)]
    listed = list(value)
    if not 1 <= len(listed) <= MOST_TENSORS:
        raise Refusal(f"{name}: found {len(listed)} tensors; expected 1 to {MOST_TENSORS}")
    return [
        Rows.read(f"{name}[{place}]", one, on_device, is_written)
        for place, one in enumerate(listed)
    ]


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
            if not hasattr(expert, "__index__") or isinstance(expert, bool):
                raise Refusal(f"plan[{rank}][{slot}]: found {expert!r}; expected an integer")
            row[slot] = int(expert)
    return slots


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
