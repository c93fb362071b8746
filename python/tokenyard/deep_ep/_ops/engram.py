"""Engram of DeepEP 2.1: one layer of entries, whose shape the caller's tensors say."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from tokenyard import errors

from .. import _world
from .._arrays import Refusal, invalid
from .._calls.tensors import expect_tensor
from .._pool import Pool
from .._torch import torch
from .common import fault, tensor_of
from .table import Entries, Shape


class Engram:
    """The table of a buffer, which the first write opens, and one of another shape anew."""

    def __init__(self, pool: Pool, room_bytes: int) -> None:
        """`room_bytes`: those of the buffer that are for what a fetch gives."""
        self._pool, self._room_bytes = pool, room_bytes
        self._entries = Entries(pool, "engram_write")

    def write(self, storage: Any, scales: Any) -> None:
        """Collective."""
        shape, wrong = None, None
        storage, scales = tensor_of(storage), tensor_of(scales)
        try:
            shape = self._shape_of(storage, scales)
        except Refusal as refusal:
            wrong = str(refusal)
        agreed = agree(self._pool, "engram_write", shape, wrong)
        if agreed != self._entries.shape:
            self._entries.open(agreed)
        held = None if scales is None else [scales]
        self._entries.write("engram_write", [storage], held)

    def _shape_of(self, storage: Any, scales: Any) -> Shape:
        expect_tensor("storage", storage)
        if storage.dim() != 2:
            raise Refusal(f"storage: found shape {list(storage.shape)}; expected [n, H]")
        count, hidden = storage.shape
        most = self._room_bytes // max(1, hidden * storage.element_size())
        if most < 1:
            raise Refusal(
                f"num_bytes: found {self._room_bytes} bytes for what a fetch gives; expected room for an entry at "
                "least: give num_bytes and num_cpu_bytes of get_engram_storage_size_hint"
            )
        packs = 0
        if scales is not None:
            expect_tensor("sf", scales)
            if scales.dim() != 2:
                raise Refusal(f"sf: found shape {list(scales.shape)}; expected [R * n, S]")
            packs = scales.shape[1]
        if (storage.dtype == torch.float8_e4m3fn) != (scales is not None):
            found = "none" if scales is None else "some"
            raise Refusal(
                f"sf: found {found} for entries of {storage.dtype}; expected scales of float8_e4m3fn, and of no other "
                "type"
            )
        return Shape((int(count),), int(hidden), storage.dtype, packs, min(most, 2**31 - 1))

    def fetch(self, indices: Any, columns: bool) -> Callable[[], tuple[Any, Any]]:
        return self._entries.fetch("engram_fetch", 0, indices, columns)


def agree(pool: Pool, operation: str, shape: Shape | None, wrong: str | None) -> Shape:
    """The shape that all ranks name, with room for the largest fetch of any. Collective: a rank whose arguments are
    wrong raises what is, and the others RefusedError."""
    pool.expect_usable()
    wrong = wrong or (fault(shape.judge) if shape is not None else None)
    mine = None if wrong or shape is None else {**asdict(shape), "dtype": str(shape.dtype)}
    views = _world.gather_json(pool.world, operation, {"wrong": wrong, "shape": mine})
    if wrong is not None:
        raise invalid(operation, f"{operation}: {wrong}", pool.rank)
    for rank, view in views.items():
        if view["wrong"] is not None:
            text = f"rank {rank} refused its input: {operation}: {view['wrong']}"
            raise errors.RefusedError(text, kind="refused", rank=rank, operation=operation)
    assert shape is not None
    first = views[min(views)]["shape"]
    for rank, view in views.items():
        for name in ("entries", "hidden", "dtype", "packs"):
            if view["shape"][name] != first[name]:
                raise errors.MismatchError(
                    f"{operation}: found {name} = {view['shape'][name]} on rank {rank}; expected {first[name]}, as on "
                    f"rank {min(views)}",
                    kind="mismatch",
                    rank=rank,
                    operation=operation,
                    fix="give storages of the same shape and type on all ranks",
                )
    most = max(view["shape"]["most"] for view in views.values())
    return replace(shape, most=most)
