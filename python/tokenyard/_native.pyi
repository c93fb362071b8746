"""Types of the native module. The documentation is in the module itself: help(tokenyard.Communicator)."""

from collections.abc import Callable, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Protocol, TypeAlias, final

__version__: str
_SCALED_CHANNELS: int
__all__ = [
    "_SCALED_CHANNELS",
    "Array",
    "Communicator",
    "Config",
    "Gather",
    "Handle",
    "PendingCombine",
    "PendingDispatch",
    "PendingFetch",
    "PendingGather",
    "PendingReduce",
    "PendingReplay",
    "Pipe",
    "Received",
    "Table",
    "World",
    "_Anchor",
    "_Reader",
    "__version__",
    "_driver_times",
    "_fits",
    "_record_at",
    "_routing",
    "_set_plugin_folder",
    "components",
    "memory_needed",
    "plan_replicas",
    "routing_counts",
    "survey",
]

class _DLPack(Protocol):
    def __dlpack__(self) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

class _CudaArray(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

class _HostArray(Protocol):
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

_Tensor: TypeAlias = Array | _DLPack | _CudaArray | _HostArray
_Tensors: TypeAlias = _Tensor | list[_Tensor] | tuple[_Tensor, ...]
_Layout: TypeAlias = Literal["flat", "expert_major", "packed", "rank_major"]
_Cast: TypeAlias = Literal["fp8", "fp8_round", "fp8_ue8m0"]
_Path: TypeAlias = str | PathLike[str]

def components() -> list[dict[str, Any]]: ...
def memory_needed(
    config: Config | _Path,
    ranks: int,
    experts: int,
    topk: int,
    hidden: int,
    max_tokens: int,
    *,
    domains: int = 1,
    in_flight: int = 2,
    handles: int = 8,
) -> dict[str, int]: ...
def plan_replicas(loads: list[int], ranks: int, spare: int) -> tuple[Array, list[float]]: ...
def routing_counts(topk_idx: _Tensor, experts: int, ranks: int) -> tuple[Array, Array, Array]: ...
def survey(world: World, config: Config | _Path) -> dict[str, Any]: ...
def _driver_times(is_measured: bool) -> list[tuple[str, int, int]]: ...
def _set_plugin_folder(folder: _Path) -> None: ...
def _fits(tensor: Any, dtypes: tuple[Any, ...], shape: tuple[int | None, ...]) -> bool: ...
def _record_at(address: int) -> Any: ...
def _routing(call: object, ranks: int) -> tuple[int, int, int, int] | None: ...

@final
class Config:
    @staticmethod
    def load(path: _Path) -> Config: ...
    @staticmethod
    def parse(text: str, name: str = "config") -> Config: ...
    @staticmethod
    def built_in(
        name: str,
        *,
        deadline_ms: int = 30_000,
        late_ms: int = 1_800_000,
        decode: Literal["direct", "low_latency"] = "direct",
        sms: int | None = None,
    ) -> Config: ...
    @property
    def name(self) -> str: ...
    @property
    def on_failure(self) -> Literal["stop", "mask"]: ...

@final
class World:
    def __new__(
        cls,
        rank: int,
        ranks: int,
        *,
        exchange: Callable[[bytes], Sequence[bytes]],
        local_rank: int | None = None,
        config: Config | _Path | None = None,
    ) -> World: ...
    @staticmethod
    def from_env(config: Config | _Path | None = None) -> World: ...
    @staticmethod
    def from_torch(group: object = None, *, config: Config | _Path | None = None) -> World: ...
    @staticmethod
    def from_mpi(comm: object, *, config: Config | _Path | None = None) -> World: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def local_rank(self) -> int: ...
    def all_gather(self, topic: str, mine: bytes) -> list[bytes]: ...
    def barrier(self, topic: str) -> None: ...
    def _refuse(self, why: str) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> World: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None: ...

@final
class Communicator:
    def __new__(
        cls,
        world: World,
        config: Config | _Path,
        experts: int,
        topk: int,
        hidden: int,
        max_tokens: int,
        *,
        in_flight: int = 2,
        handles: int = 8,
    ) -> Communicator: ...
    def dispatch(
        self,
        x: _Tensor,
        topk_idx: _Tensor,
        topk_weights: _Tensor | None = None,
        *,
        scales: _Tensor | None = None,
        layout: _Layout = "flat",
        alignment: int = 1,
        zero_padding: bool = False,
        cast: _Cast | None = None,
        worst_case: bool = False,
        max_tokens: int | None = None,
        stream: int | None = None,
        without_sync: bool = False,
        sms: int = 0,
        expert_totals: _Tensor | None = None,
        waited_ns: _Tensor | None = None,
        scale_layout: Literal["row_major", "column_major"] = "row_major",
        source_index: Literal["rank_and_token", "token"] = "rank_and_token",
        max_rows: int | None = None,
        overflow: Literal["error", "drop"] = "error",
    ) -> tuple[Received, Handle]: ...
    def dispatch_send(
        self,
        x: _Tensor,
        topk_idx: _Tensor,
        topk_weights: _Tensor | None = None,
        *,
        scales: _Tensor | None = None,
        layout: _Layout = "flat",
        alignment: int = 1,
        zero_padding: bool = False,
        cast: _Cast | None = None,
        worst_case: bool = False,
        max_tokens: int | None = None,
        stream: int | None = None,
        without_sync: bool = False,
        sms: int = 0,
        expert_totals: _Tensor | None = None,
        waited_ns: _Tensor | None = None,
        scale_layout: Literal["row_major", "column_major"] = "row_major",
        source_index: Literal["rank_and_token", "token"] = "rank_and_token",
        max_rows: int | None = None,
        overflow: Literal["error", "drop"] = "error",
    ) -> PendingDispatch: ...
    def replay(
        self,
        handle: Handle,
        x: _Tensor,
        topk_weights: _Tensor | None = None,
        *,
        scales: _Tensor | None = None,
        cast: _Cast | None = None,
        stream: int | None = None,
        without_sync: bool = False,
        sms: int = 0,
        scale_layout: Literal["row_major", "column_major"] = "row_major",
        source_index: Literal["rank_and_token", "token"] = "rank_and_token",
    ) -> Received: ...
    def replay_send(
        self,
        handle: Handle,
        x: _Tensor,
        topk_weights: _Tensor | None = None,
        *,
        scales: _Tensor | None = None,
        cast: _Cast | None = None,
        stream: int | None = None,
        without_sync: bool = False,
        sms: int = 0,
        scale_layout: Literal["row_major", "column_major"] = "row_major",
        source_index: Literal["rank_and_token", "token"] = "rank_and_token",
    ) -> PendingReplay: ...
    def combine(
        self,
        handle: Handle,
        x: _Tensor,
        weights: _Tensor | None = None,
        *,
        bias: _Tensor | Sequence[_Tensor] | None = None,
        weighted: bool = False,
        topk_weights: _Tensor | None = None,
        topk_idx: _Tensor | None = None,
        round_once: bool = False,
        sum_weights: bool = False,
        compress: Literal["logfmt10"] | None = None,
        out: _Tensor | None = None,
        out_weights: _Tensor | None = None,
        missing: _Tensor | None = None,
        stream: int | None = None,
        without_sync: bool = False,
        sms: int = 0,
        waited_ns: _Tensor | None = None,
    ) -> tuple[Any, Any | None]: ...
    def combine_send(
        self,
        handle: Handle,
        x: _Tensor,
        weights: _Tensor | None = None,
        *,
        bias: _Tensor | Sequence[_Tensor] | None = None,
        weighted: bool = False,
        topk_weights: _Tensor | None = None,
        topk_idx: _Tensor | None = None,
        round_once: bool = False,
        sum_weights: bool = False,
        compress: Literal["logfmt10"] | None = None,
        out: _Tensor | None = None,
        out_weights: _Tensor | None = None,
        missing: _Tensor | None = None,
        stream: int | None = None,
        without_sync: bool = False,
        sms: int = 0,
        waited_ns: _Tensor | None = None,
    ) -> PendingCombine: ...
    def refuse(
        self,
        operation: Literal["dispatch", "replay", "combine"],
        why: str,
        *,
        layout: _Layout = "flat",
        alignment: int = 1,
        zero_padding: bool = False,
    ) -> None: ...
    def combine_input(self, handle: Handle, dtype: object) -> Array: ...
    def copy_out(
        self, received: Received, *, stream: int | None = None, **outputs: _Tensor
    ) -> None: ...
    def count_routing(
        self,
        topk_idx: _Tensor,
        rank_tokens: _Tensor,
        expert_tokens: _Tensor,
        is_token_in_rank: _Tensor,
        *,
        stream: int,
    ) -> bool: ...
    def _give(
        self,
        reader: _Reader,
        received: Received,
        block: _Tensor | None,
        parts: tuple[str, ...],
        *,
        names: tuple[str, ...],
        record: object = None,
        keeps_fp8: bool = False,
        columns: int | None = None,
        counts: bool = False,
        copied: tuple[_Tensor, _Tensor] | None = None,
        stream: int | None = None,
        **outputs: _Tensor,
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], list[int] | None]: ...
    def expert_counts(self, received: Received) -> list[int]: ...
    def release_after(self, streams: Sequence[int]) -> None: ...
    def flush(self) -> None: ...
    def report(self) -> dict[str, Any]: ...
    def lost_ranks(self) -> list[int]: ...
    def masked_ranks(self) -> list[int]: ...
    def mask_rank(self, rank: int) -> None: ...
    def unmask_rank(self, rank: int) -> None: ...
    def clear_masks(self) -> None: ...
    def waited_ns(self) -> list[int]: ...
    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def topk(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def works_on_device(self) -> bool: ...
    @property
    def forms(self) -> list[str]: ...
    @property
    def held_bytes(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def __enter__(self) -> Communicator: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None: ...

@final
class Pipe:
    def __new__(
        cls, world: World, config: Config | _Path, *, max_bytes: int, in_flight: int = 4
    ) -> Pipe: ...
    def send(self, tensor: _Tensor, to: int) -> None: ...
    def recv(self, tensor: _Tensor, source: int) -> None: ...
    def flush(self) -> None: ...
    def report(self) -> dict[str, Any]: ...
    def waited_ns(self) -> list[int]: ...
    def _fail(self, why: str) -> None: ...
    @property
    def device(self) -> int | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def max_bytes(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def __enter__(self) -> Pipe: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None: ...

@final
class Gather:
    def __new__(
        cls,
        world: World,
        config: Config | _Path,
        *,
        max_bytes: int,
        in_flight: int = 2,
        reduces: bool = False,
    ) -> Gather: ...
    def all_gather(
        self, shards: _Tensors, outs: _Tensors | None = None, *, stream: int | None = None
    ) -> Any: ...
    def all_gather_send(self, shards: _Tensors, *, stream: int | None = None) -> PendingGather: ...
    def reduce_scatter(
        self,
        tensors: _Tensors,
        outs: _Tensors | None = None,
        *,
        precision: Literal["fp32", "bf16"] = "fp32",
        scale: float = 1.0,
    ) -> Any: ...
    def reduce_scatter_send(
        self,
        tensors: _Tensors,
        *,
        precision: Literal["fp32", "bf16"] = "fp32",
        scale: float = 1.0,
    ) -> PendingReduce: ...
    def all_reduce(
        self,
        tensors: _Tensors,
        outs: _Tensors | None = None,
        *,
        precision: Literal["fp32", "bf16"] = "fp32",
        scale: float = 1.0,
    ) -> Any: ...
    def all_reduce_send(
        self,
        tensors: _Tensors,
        *,
        precision: Literal["fp32", "bf16"] = "fp32",
        scale: float = 1.0,
    ) -> PendingReduce: ...
    def report(self) -> dict[str, Any]: ...
    @property
    def rank(self) -> int: ...
    @property
    def max_bytes(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def reduces(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def __enter__(self) -> Gather: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None: ...

@final
class PendingGather:
    def recv(self, outs: _Tensors | None = None) -> Any: ...

@final
class PendingReduce:
    def recv(self, outs: _Tensors | None = None) -> Any: ...

@final
class Table:
    def __new__(
        cls,
        world: World,
        config: Config | _Path,
        *,
        entry_bytes: int,
        max_entries: int,
        max_indices: int,
        scale_bytes: int = 0,
        layers: int = 1,
        in_flight: int = 2,
    ) -> Table: ...
    def write(self, values: _Tensors, scales: _Tensors | None = None) -> None: ...
    def fetch(
        self, indices: _Tensor, values: _Tensor, scales: _Tensor | None = None, *, layer: int = 0
    ) -> None: ...
    def fetch_send(self, indices: _Tensor, *, layer: int = 0) -> PendingFetch: ...
    def report(self) -> dict[str, Any]: ...
    @property
    def rank(self) -> int: ...
    @property
    def entry_bytes(self) -> int: ...
    @property
    def scale_bytes(self) -> int: ...
    @property
    def max_entries(self) -> int: ...
    @property
    def max_indices(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def __enter__(self) -> Table: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None: ...

@final
class PendingFetch:
    def recv(self, values: _Tensor, scales: _Tensor | None = None) -> None: ...

@final
class PendingDispatch:
    def recv(self) -> tuple[Received, Handle]: ...
    def output(self) -> Received | None: ...

@final
class PendingReplay:
    def recv(self) -> Received: ...
    def output(self) -> Received | None: ...

@final
class PendingCombine:
    def recv(self) -> tuple[Any, Any | None]: ...

@final
class Received:
    @property
    def layout(self) -> _Layout: ...
    @property
    def tokens(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def x(self) -> Array: ...
    @property
    def scales(self) -> Array | None: ...
    @property
    def ids(self) -> Array | None: ...
    @property
    def weights(self) -> Array | None: ...
    @property
    def source(self) -> Array | None: ...
    @property
    def slots(self) -> Array | None: ...
    @property
    def expert_counts(self) -> Array | None: ...
    @property
    def expert_starts(self) -> Array | None: ...
    @property
    def expert_ends(self) -> Array | None: ...
    @property
    def source_counts(self) -> Array | None: ...
    @property
    def source_ends(self) -> Array | None: ...
    @property
    def ranges(self) -> Array | None: ...
    @property
    def totals(self) -> Array | None: ...
    @property
    def dropped(self) -> Array | None: ...
    @property
    def overflow(self) -> Array | None: ...
    @property
    def lost(self) -> Array | None: ...
    def lost_ranks(self) -> list[int]: ...

@final
class _Anchor:
    def __new__(cls, address: int, record: object) -> _Anchor: ...

@final
class _Reader:
    def __new__(
        cls, kind: type, from_capsule: Callable[[Any], Any], reads_fp8: bool
    ) -> _Reader: ...
    def array(self, array: Array) -> Any: ...
    def output(
        self,
        received: Received,
        names: tuple[str, ...],
        keeps_fp8: bool = False,
        record: object = None,
    ) -> tuple[Any, ...]: ...
    def anchored(self, tensor: Any, record: object) -> Any: ...

@final
class Handle:
    @property
    def layout(self) -> _Layout: ...
    @property
    def tokens(self) -> int: ...
    @property
    def rows(self) -> int: ...

@final
class Array:
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    def data_ptr(self) -> int: ...
    def stride(self) -> tuple[int, ...]: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __len__(self) -> int: ...
