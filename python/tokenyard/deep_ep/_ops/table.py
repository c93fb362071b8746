"""Entries that each rank reads from all ranks: engram."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenyard

from .._arrays import Refusal, arrays_of, has_array, invalid
from .._calls.call import expect_integer
from .._calls.tensors import read
from .._pool import Pool
from .._torch import torch
from ..utils.math import align
from .common import Refused, Slot, bytes_of, fault, record, settle, tensor_of

MOST_LAYERS = 128
MOST_FETCHES = 32
MOST_ENTRIES = 1 << 32
# Columns of scales begin at multiples of so many of them.
_COLUMN = 4


def entry_types() -> tuple[Any, ...]:
    """The types of entries. Those of the second one have scales."""
    return torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Shape:
    """The shape of a table, as DeepEP's callers name it."""

    # Of a rank, in each layer.
    entries: tuple[int, ...]
    hidden: int
    dtype: Any
    # Scales of an entry, of 4 bytes each.
    packs: int
    # The most entries of a fetch of one layer.
    most: int

    @staticmethod
    def of(entries: Any, hidden: Any, dtype: Any, packs: Any, most: tuple[Any, Any]) -> "Shape":
        """The shape that a caller names. Raises Refusal."""
        if not isinstance(entries, (list, tuple)):
            found = type(entries).__name__
            raise Refusal(f"num_entries_per_layer: found {found}; expected a list of integers")
        for name, count in (
            *(("num_entries_per_layer", count) for count in entries),
            ("hidden", hidden),
            ("num_max_tokens", most[0]),
            ("num_entries_per_token", most[1]),
        ):
            expect_integer(name, count, 1)
        expect_integer("num_sf_packs", packs, 0)
        counts = tuple(int(count) for count in entries)
        return Shape(counts, int(hidden), dtype, int(packs), int(most[0]) * int(most[1]))

    @property
    def entry_bytes(self) -> int:
        return int(self.hidden * self.dtype.itemsize)

    def judge(self) -> None:
        """Raises Refusal for what makes no table."""
        if not 1 <= len(self.entries) <= MOST_LAYERS:
            raise Refusal(
                f"num_entries_per_layer: found {len(self.entries)} layers; expected 1 to {MOST_LAYERS}"
            )
        for count in self.entries:
            expect_integer("num_entries_per_layer", count, 1, MOST_ENTRIES)
        expect_integer("hidden", self.hidden, 1)
        if self.dtype not in entry_types():
            raise Refusal(
                f"dtype: found {self.dtype}; expected torch.bfloat16 or torch.float8_e4m3fn"
            )
        expect_integer("num_sf_packs", self.packs, 0)
        has_scales = self.dtype == torch.float8_e4m3fn
        if bool(self.packs) != has_scales:
            wanted = "at least 1 for float8_e4m3fn" if has_scales else "0 for bfloat16"
            raise Refusal(f"num_sf_packs: found {self.packs}; expected {wanted}")
        expect_integer("num_max_tokens * num_entries_per_token", self.most, 1)


class Entries:
    """The table of a buffer, and the scales that each rank has of all ranks' entries."""

    def __init__(self, pool: Pool, setter: str) -> None:
        self._pool, self._setter = pool, setter
        self._slot: Slot[tokenyard.Table] = Slot(pool, setter)
        self.shape: Shape | None = None
        self._scales: list[Any] | None = None
        self._is_written = False

    def open(self, shape: Shape | None, wrong: str | None = None) -> Shape:
        """Opens a table of this shape on all ranks. Collective. `wrong`: why there is none."""

        def make(world: tokenyard.World, config: tokenyard.Config) -> tokenyard.Table:
            assert shape is not None
            layers = len(shape.entries)
            return tokenyard.Table(
                world,
                config,
                entry_bytes=shape.entry_bytes,
                max_entries=max(shape.entries),
                max_indices=shape.most,
                layers=layers,
                in_flight=min(layers + 1, MOST_FETCHES),
            )

        if shape is not None:
            wrong = wrong or fault(shape.judge)
        self._slot.open(wrong, make)
        assert shape is not None
        self.shape, self._scales, self._is_written = shape, None, False
        return shape

    def expect_open(self, operation: str) -> None:
        """Raises where it is not open."""
        self._slot.use(operation)

    def write(self, operation: str, storages: Any, scales: Any = None) -> None:
        """Writes this rank's entries of all layers. Collective. Scales are held as they are."""
        table = self._slot.use(operation)
        try:
            values, held = self._read(storages, scales)
        except Refusal as refusal:
            table.write([Refused(f"{operation}: {refusal}")])
            raise AssertionError("a refusal always raises") from refusal
        settle(operation, values)
        table.write([bytes_of(one) for one in values])
        self._scales, self._is_written = held, True

    def _read(self, storages: Any, scales: Any) -> tuple[list[Any], list[Any] | None]:
        shape = self.shape
        assert shape is not None
        values = _list_of("storages", storages, len(shape.entries))
        for layer, count in enumerate(shape.entries):
            name = f"storages[{layer}]"
            values[layer] = read(name, values[layer], (shape.dtype,), (count, shape.hidden))
            _expect_dense(name, values[layer])
        if not shape.packs:
            if scales is not None:
                raise Refusal("sfs: found some; expected None for bfloat16")
            return values, None
        held = _list_of("sfs", scales, len(shape.entries))
        for layer, count in enumerate(shape.entries):
            name = f"sfs[{layer}]"
            rows = self._pool.ranks * count
            types = (torch.float32, torch.int32)
            held[layer] = read(name, held[layer], types, (rows, shape.packs))
        return values, held

    def fetch(
        self, operation: str, layer: int, indices: Any, columns: bool, room: Any = None
    ) -> Callable[[], tuple[Any, Any]]:
        """Sends the fetch of an entry for each of `indices`, `[T, G]`. Returns what receives it: `[T, G * H]`, and
        scales or None.

        `columns`: whether scales have the layout of columns. `room`: memory of the entries, in which those that an
        index of no entry names stay; without it such an index is an error. This rank alone.
        """
        table, shape = self._slot.use(operation), self.shape
        assert shape is not None
        if not self._is_written:
            raise invalid(
                operation, f"{operation}: found no entries; expected a write on all ranks before"
            )
        is_of_arrays = has_array(indices)
        ids = self._ids(operation, indices, shape)
        tokens, each = ids.shape
        # Before their values are looked at, and behind work on them.
        settle(operation, [ids])
        flat, is_there = self._places(ids.reshape(-1), layer, room is not None)
        rows = _rows(room, flat, shape)
        # Copies as well are there before the call ends: they are read on the stream of the hook.
        flat = Fetch.held(table, layer, flat)
        ids_of_scales = ids.reshape(-1).clone() if shape.packs else None
        settle(operation, [flat])
        send = Fetch(table, layer, flat, rows, is_there)

        def receive() -> tuple[Any, Any]:
            send.receive(operation)
            record([rows, ids_of_scales])
            data = rows.view(tokens, each * shape.hidden)
            scales = self._scales_of(layer, ids_of_scales, (tokens, each), columns)
            return arrays_of((data, scales)) if is_of_arrays else (data, scales)

        return _once(receive)

    def _ids(self, operation: str, indices: Any, shape: Shape) -> Any:
        try:
            ids = read("indices", tensor_of(indices), (torch.int32, torch.int64), (None, None))
            _expect_dense("indices", ids)
            if ids.numel() > shape.most:
                raise Refusal(
                    f"indices: found {list(ids.shape)}, {ids.numel()} entries; expected at most {shape.most}, "
                    f"for which {self._setter} has made room"
                )
        except Refusal as refusal:
            raise invalid(operation, f"{operation}: {refusal}") from refusal
        return ids

    def _places(self, flat: Any, layer: int, may_lack: bool) -> tuple[Any, Any]:
        """The table's indices for those of DeepEP; and which of them name an entry, where some may not and do not."""
        shape = self.shape
        assert shape is not None
        count, most = shape.entries[layer], max(shape.entries)
        is_there = None
        if may_lack:
            is_there = (flat >= 0) & (flat < self._pool.ranks * count)
            if bool(is_there.all()):
                is_there = None
            else:
                # Each rank has a first entry. It is fetched in their place.
                flat = torch.where(is_there, flat, 0)
        if count == most:
            return flat, is_there
        wide = flat.long()
        owners = torch.div(wide, count, rounding_mode="floor")
        return owners * most + (wide - owners * count), is_there

    def _scales_of(self, layer: int, ids: Any, shape: tuple[int, int], columns: bool) -> Any:
        if ids is None or self._scales is None:
            return None
        held = self._scales[layer]
        tokens, each = shape
        ids = ids.long().clamp(0, len(held) - 1).to(held.device)
        found = held.index_select(0, ids).view(tokens, each * held.shape[1])
        if not columns:
            return found
        room = found.new_empty((found.shape[1], align(tokens, _COLUMN)))[:, :tokens].t()
        return room.copy_(found)


class Fetch:
    """A fetch that was sent; where as many as may be are sent, one that is made where it is received."""

    def __init__(
        self, table: tokenyard.Table, layer: int, flat: Any, rows: Any, is_there: Any
    ) -> None:
        self._table, self._layer = table, layer
        self._rows, self._is_there = rows, is_there
        self._pending: tokenyard.PendingFetch | None = None
        if self._is_sent(table, layer):
            self._pending = table.fetch_send(flat, layer=layer)
        else:
            self._flat = flat

    @staticmethod
    def _is_sent(table: tokenyard.Table, layer: int) -> bool:
        # One place is for those that are made later.
        return layer < table.in_flight - 1

    @staticmethod
    def held(table: tokenyard.Table, layer: int, flat: Any) -> Any:
        """The indices, or a copy where the fetch is made later: the caller may change them until then."""
        return flat if Fetch._is_sent(table, layer) else flat.clone()

    def receive(self, operation: str) -> None:
        rows = self._rows if self._is_there is None else torch.empty_like(self._rows)
        settle(operation, [rows])
        if self._pending is not None:
            self._pending.recv(bytes_of(rows))
        else:
            self._table.fetch(self._flat, bytes_of(rows), layer=self._layer)
        if self._is_there is not None:
            # Of bytes: torch places no rows of FP8.
            record([self._is_there])
            mine, found = self._rows.view(torch.uint8), rows.view(torch.uint8)
            mine.copy_(torch.where(self._is_there[:, None], found, mine))


def _rows(room: Any, flat: Any, shape: Shape) -> Any:
    """Memory for as many entries as there are indices."""
    if room is not None:
        return room[: flat.numel()]
    return torch.empty((flat.numel(), shape.hidden), dtype=shape.dtype, device=flat.device)


def _once(receive: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    """Receives at the first call. Later ones give the same."""
    found: list[tuple[Any, Any]] = []

    def hook() -> tuple[Any, Any]:
        if not found:
            found.append(receive())
        return found[0]

    return hook


def _list_of(name: str, given: Any, count: int) -> list[Any]:
    if not isinstance(given, (list, tuple)) or len(given) != count:
        found = (
            f"{len(given)} tensors" if isinstance(given, (list, tuple)) else type(given).__name__
        )
        raise Refusal(
            f"{name}: found {found}; expected a list of {count} tensors, one for each layer"
        )
    return [tensor_of(one) for one in given]


def _expect_dense(name: str, tensor: Any) -> None:
    if not tensor.is_contiguous():
        raise Refusal(
            f"{name}: found strides {list(tensor.stride())}; expected a contiguous tensor: call contiguous()"
        )
