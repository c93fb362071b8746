"""All-gathers and sums over storage that groups share, of DeepEP 2.5: `BucketBuffer`."""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tokenyard import errors

from .. import _C
from .._arrays import Refusal, Tensor, invalid, reason
from .._calls.call import MOST_BYTES, expect_integer
from .._dynamo import make_opaque
from .._ops.bucket import MOST_TENSORS, PRECISIONS, Bucket, event_of
from .._ops.common import Sent
from .._torch import torch
from ..utils.event import EventHandle, EventOverlap
from ..utils.math import align
from .allocator import BufferAllocator
from .base import BufferBase, barrier

MOST_GROUPS = 8
_CALLS = ("all_gather", "reduce_scatter", "all_reduce")


class BucketContext(BufferBase):
    """A group of a bucket."""

    def __init__(self, given: dict[str, Any], wrong: str | None) -> None:
        self._meet(given, ("sl_idx",), (), wrong)
        self._bucket = Bucket(self._pool)

    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
    ) -> None:
        """As `EPBuffer.barrier`. Collective in its group."""
        barrier(self, wait_comm_stream, with_cpu_sync, sequential)


class BucketBuffer(BufferBase):
    """All-gathers and sums in one or more groups, over storage of torch, such as of parameters and their gradients.

    To construct it is collective, and so are its calls: the ranks of a group make the same ones in the same order.
    `group` is a process group of torch (or a tokenyard.World), or a list of up to 8, in the same order on all ranks of
    each. Calls take a tensor, or a list of up to 64, and return an event: its `wait()` gives the results.
    """

    def __init__(
        self,
        group: Any,
        allocation_plan_or_num_bytes: BufferAllocator | int,
        sl_idx: int | None = None,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        given = locals()
        self.groups = list(group) if isinstance(group, (list, tuple)) else [group]
        plan = allocation_plan_or_num_bytes
        num_bytes = plan.num_bytes if isinstance(plan, BufferAllocator) else plan
        self.contexts: list[BucketContext] = []
        failures: list[Exception] = []
        self._meet_all(given, self._fault(plan, num_bytes), failures)
        self._open_all(num_bytes, failures)
        if failures:
            # Their frames hold the list.
            error = failures[0]
            failures.clear()
            self.contexts.clear()
            try:
                raise error
            finally:
                del error
        self._pool = self.contexts[0]._pool
        self.group = self.groups[0]
        self.allow_hybrid_mode, self.explicitly_destroy = True, explicitly_destroy
        self.nccl_comm_handles: list[None] = [None] * len(self.groups)
        self._session: BucketSession | None = None
        if isinstance(plan, BufferAllocator):
            plan.materialize(self.storage)

    def _meet_all(
        self, given: dict[str, Any], wrong: str | None, failures: list[Exception]
    ) -> None:
        """Meets the ranks of all groups. Where one fails, those of later groups wait too: they learn why."""
        for group in self.groups:
            try:
                self.contexts.append(BucketContext({**given, "group": group}, wrong))
            except Exception as error:
                failures.append(error)
                wrong = wrong or str(error)

    def _open_all(self, num_bytes: Any, failures: list[Exception]) -> None:
        """Opens the gathers of the groups that were met, or refuses that where something has failed."""
        if not failures:
            self.num_bytes, device = int(num_bytes), self.contexts[0]._pool.device
            try:
                self.storage = torch.empty(self.num_bytes, dtype=torch.uint8, device=device)
            except Exception as error:
                failures.append(error)
        for context in self.contexts:
            wrong = reason(failures[0]) if failures else None
            try:
                context._bucket.open(num_bytes, wrong)
            except Exception as error:
                failures.append(error)

    def _fault(self, plan: Any, num_bytes: Any) -> str | None:
        name = "allocation_plan_or_num_bytes"
        if not 1 <= len(self.groups) <= MOST_GROUPS:
            # In which of them the others wait is not known.
            raise invalid(
                "make buffer",
                f"group: found {len(self.groups)} groups; expected 1 to {MOST_GROUPS}",
            )
        if isinstance(plan, BufferAllocator) and plan.materialized:
            return f"{name}: found a plan that a buffer has used; expected one that none has"
        try:
            expect_integer(name, num_bytes, 1, MOST_BYTES)
        except Refusal as refusal:
            return str(refusal)
        return None

    def get_context_idx(self, group: Any = None) -> int:
        """The place of a group in the list; 0 for None, where there is one."""
        if group is None and len(self.groups) == 1:
            return 0
        for place, one in enumerate(self.groups):
            if one is group:
                return place
        found = "None" if group is None else "a group that it does not have"
        raise invalid(
            "find group",
            f"group: found {found}; expected one of the {len(self.groups)} groups of this buffer",
        )

    def get_theoretical_num_sms(self, op: str, group: Any = None) -> int:
        """0: no multiprocessor is held while bytes travel."""
        if op not in _CALLS:
            raise NotImplementedError(f"op: found {op!r}; expected one of {', '.join(_CALLS)}")
        return 0

    def session(self) -> "BucketSession":
        """For `with`: inside, calls take tensors that lie elsewhere than in the storage, and leave them as they are."""
        return BucketSession(self)

    def barrier(
        self,
        wait_comm_stream: bool = True,
        with_cpu_sync: bool = False,
        sequential: bool = True,
        group: Any = None,
    ) -> None:
        """As `EPBuffer.barrier`, of a group. Collective."""
        context = self.contexts[self.get_context_idx(group)]
        context.barrier(wait_comm_stream, with_cpu_sync, sequential)

    def all_gather(
        self,
        srcs: Tensor | Sequence[Tensor],
        dsts: Tensor | Sequence[Tensor] | None = None,
        group: Any = None,
        num_sms: int | None = None,
    ) -> EventOverlap:
        """Gives each rank the tensors of all, in order of ranks. Collective.

        - `srcs`: contiguous, of any type; they stay as they are until the wait.
        - `dsts`: R times their bytes each. Without it each of `srcs` is this rank's part of its result in the storage.

        Results are `[R * n]`, of the types of `srcs`.
        """
        bucket, session = self._enter(group)
        shards: list[Any] = []
        rooms: list[Any] = []
        results: Any = None
        fault: _Fault | None = None
        try:
            shards = _list_of("srcs", srcs)
            rooms = self._rooms(shards, dsts, bucket, session)
            if session is not None and dsts is not None:
                results = dsts
            else:
                results = [_as(*one) for one in zip(shards, rooms, strict=True)]
                results = results[0] if isinstance(srcs, torch.Tensor) else results
        except Exception as error:
            fault = _Fault.of(error)
        sent = _sent(
            lambda wrong: bucket.all_gather(shards, rooms, wrong), "BucketBuffer.all_gather", fault
        )
        return event_of(sent, results)

    def reduce_scatter(
        self,
        srcs: Tensor | Sequence[Tensor],
        comm_precision: str = "fp32",
        scale: float = 1.0,
        group: Any = None,
        num_sms: int | None = None,
    ) -> EventOverlap:
        """Sums over all ranks, times `scale`: each rank gets its part of R equal ones, in its place. Collective.

        - `srcs`: float32 or bfloat16; in a session those outside of the storage stay as they are.
        - `comm_precision`: "fp32", or "bf16", by which parts of float32 travel as half as many bytes.

        Sums are in float32, in the order of ranks. Results are `[n / R]`.
        """
        bucket, session = self._enter(group)
        rooms, fault = self._staged(srcs, session)
        if fault is None and comm_precision not in PRECISIONS:
            fault = _Fault(f"comm_precision: found {comm_precision!r}; expected fp32 or bf16")
        sent = _sent(
            lambda wrong: bucket.reduce_scatter(rooms, wrong, scale, comm_precision),
            "BucketBuffer.reduce_scatter",
            fault,
        )
        results = [bucket.own_part(room.view(-1)) for room in rooms]
        return event_of(sent, results[0] if isinstance(srcs, torch.Tensor) else results)

    def all_reduce(
        self,
        srcs: Tensor | Sequence[Tensor],
        scale: float = 1.0,
        group: Any = None,
        num_sms: int | None = None,
    ) -> EventOverlap:
        """Sums over all ranks, times `scale`, in place: all ranks get all sums. Collective.

        As `reduce_scatter`, with any number of elements. Results are `[n]`.
        """
        bucket, session = self._enter(group)
        rooms, fault = self._staged(srcs, session)
        sent = _sent(
            lambda wrong: bucket.all_reduce(rooms, wrong, scale), "BucketBuffer.all_reduce", fault
        )
        results = [room.view(-1) for room in rooms]
        return event_of(sent, results[0] if isinstance(srcs, torch.Tensor) else results)

    def print_memory_usage(self) -> None:
        """Prints a line for each group. Local."""
        for context in self.contexts:
            context.print_memory_usage()

    def destroy(self) -> None:
        """Closes it on all ranks. Collective. Tensors of the storage stay."""
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"
        with contextlib.ExitStack() as closing:
            # The last callback runs first. Behind an error the others run: ranks of other groups wait there.
            for context in reversed(self.contexts):
                closing.callback(context._pool.destroy)

    def _enter(self, group: Any) -> tuple[Bucket, "BucketSession | None"]:
        place = self.get_context_idx(group)
        if self._session is not None:
            self._session._expect_group(place)
        return self.contexts[place]._bucket, self._session

    def _rooms(
        self, shards: list[Tensor], dsts: Any, bucket: Bucket, session: "BucketSession | None"
    ) -> list[Tensor]:
        """The rooms for the results of an all-gather."""
        if dsts is None:
            return [
                self._whole(f"srcs[{place}]", shard, bucket, session)
                for place, shard in enumerate(shards)
            ]
        rooms, ranks = _list_of("dsts", dsts), bucket.pool.ranks
        if len(rooms) != len(shards):
            raise Refusal(f"dsts: found {len(rooms)} tensors; expected {len(shards)}, as of srcs")
        for place, (shard, room) in enumerate(zip(shards, rooms, strict=True)):
            if room.nbytes != ranks * shard.nbytes:
                raise Refusal(
                    f"dsts[{place}]: found {room.nbytes} bytes; expected {ranks * shard.nbytes}, {ranks} times those "
                    f"of srcs[{place}]"
                )
        return rooms

    def _whole(
        self, name: str, shard: Tensor, bucket: Bucket, session: "BucketSession | None"
    ) -> Tensor:
        """The room for the result of a tensor that lies there as this rank's part, or else of the session."""
        pool, begin = bucket.pool, self._place_of(shard)
        length = pool.ranks * shard.nbytes
        if begin is not None:
            begin -= pool.rank * shard.nbytes
            if 0 <= begin <= self.num_bytes - length:
                return self.storage.narrow(0, begin, length)
        if begin is None and session is not None:
            return session._room(length)
        raise Refusal(
            f"{name}: found a tensor that is no part of a result in the storage; expected this rank's part of one, "
            "dsts, or a session"
        )

    def _place_of(self, tensor: Tensor) -> int | None:
        """Where a tensor begins in the storage; None elsewhere."""
        begin = tensor.data_ptr() - self.storage.data_ptr()
        is_inside = tensor.device == self.storage.device and 0 <= begin < self.num_bytes
        return int(begin) if is_inside else None

    def _staged(
        self, srcs: Any, session: "BucketSession | None"
    ) -> tuple[list[Tensor], "_Fault | None"]:
        """Tensors to sum in place, in a session copies of those that lie elsewhere; and what is wrong with them."""
        rooms = []
        try:
            for place, one in enumerate(_list_of("srcs", srcs)):
                if one.dtype not in (torch.float32, torch.bfloat16):
                    raise Refusal(
                        f"srcs[{place}]: found type {one.dtype}; expected float32 or bfloat16"
                    )
                room = one
                if session is not None and self._place_of(one) is None:
                    room = session._room(one.nbytes).view(one.dtype).view(one.shape)
                    room.copy_(one.detach())
                rooms.append(room)
        except Exception as error:
            return [], _Fault.of(error)
        return rooms, None


class _NoStorage(Refusal):
    """A session has no storage left for what a call or its caller asks for."""


@dataclass(frozen=True)
class _Fault:
    """The reason why a call is refused on this rank. The exception itself would hold its frames, and their tensors."""

    text: str
    # Whether the storage of a session has ended.
    is_storage: bool = False

    @staticmethod
    def of(error: Exception) -> "_Fault":
        return _Fault(reason(error), isinstance(error, _NoStorage))


class BucketSession:
    """Calls of one group with tensors that lie anywhere.

    Copies and results lie in the storage, from its begin on: what lay there before is overwritten.
    """

    def __init__(self, buffer: BucketBuffer) -> None:
        self.buffer = buffer
        self.alignment = _C.get_num_rdma_alignment()
        self.num_allocated_bytes = 0
        self.context_idx: int | None = None

    def __enter__(self) -> "BucketSession":
        if self.buffer._session is not None:
            raise invalid(
                "begin session",
                "begin session: found one that is open; expected none inside of another",
            )
        self.num_allocated_bytes, self.context_idx = 0, None
        self.buffer._session = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.buffer._session = None

    def allocate(
        self, shapes: Any, dtype: Any = torch.float32, group: Any = None
    ) -> Tensor | tuple[Tensor, ...]:
        """A tensor of the storage, or for a list of shapes a tuple. RuntimeError where none is left. Local."""
        self._expect_group(self.buffer.get_context_idx(group))
        is_list = bool(len(shapes)) and isinstance(shapes[0], (tuple, list))
        try:
            made = [
                self._room(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
                for shape in (shapes if is_list else [shapes])
            ]
        except _NoStorage as error:
            raise RuntimeError(str(error)) from None
        return tuple(made) if is_list else made[0]

    def _room(self, length: int) -> Tensor:
        """So many bytes. Raises _NoStorage."""
        begin, most = self.num_allocated_bytes, self.buffer.num_bytes
        if begin + length > most:
            raise _NoStorage(
                f"BucketBuffer session out of storage: found {begin + length} bytes; expected at most {most}. Fix: "
                "make the buffer larger, or more sessions"
            )
        self.num_allocated_bytes = align(begin + length, self.alignment)
        return self.buffer.storage.narrow(0, begin, length)

    def _expect_group(self, place: int) -> None:
        if self.context_idx not in (None, place):
            raise invalid(
                "use session",
                f"group: found group {place} of the buffer; expected {self.context_idx}, as of the calls of this "
                "session before",
            )
        self.context_idx = place


def _sent(send: Callable[[str | None], Sent], operation: str, fault: _Fault | None) -> Sent:
    """Sends a call, or refuses it with its fault on this rank, so that the others learn it. Raises RuntimeError then
    where the storage of a session has ended, as DeepEP does."""
    wrong = None if fault is None else f"{operation}: {fault.text}"
    try:
        return send(wrong)
    except errors.InvalidInputError as error:
        if fault is not None and fault.is_storage:
            raise RuntimeError(fault.text) from error
        raise


def _as(shard: Tensor, room: Tensor) -> Tensor:
    """A room as elements of the type of its shard."""
    flat = room.detach().view(-1).view(torch.uint8)
    if flat.storage_offset() % shard.dtype.itemsize:
        raise Refusal(
            f"dsts: found one that begins {flat.storage_offset()} bytes into its memory; expected a multiple of "
            f"{shard.dtype.itemsize}, as elements of {shard.dtype} do"
        )
    return flat.view(shard.dtype)


def _list_of(name: str, given: Any) -> list[Tensor]:
    """The tensors of an argument, which are contiguous."""
    tensors = list(given) if isinstance(given, (list, tuple)) else [given]
    if len(tensors) > MOST_TENSORS:
        raise Refusal(f"{name}: found {len(tensors)} tensors; expected at most {MOST_TENSORS}")
    for place, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            found = type(tensor).__name__
            raise Refusal(f"{name}[{place}]: found {found}; expected a tensor of torch")
        if not tensor.is_contiguous():
            raise Refusal(
                f"{name}[{place}]: found strides {list(tensor.stride())}; expected a contiguous tensor"
            )
    return tensors


make_opaque(BucketBuffer, BufferBase, BucketSession, EventHandle, EventOverlap)
