"""`Replicas`: weights of experts to the slots of other ranks, and gradients of slots back to the owners."""

import contextlib
import functools
import hashlib
import json
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tokenyard import errors
from tokenyard._native import Config, Pipe, World

from . import schedule
from .arguments import integer_of, read_tensors, slots_of
from .memory import Memory, Summing
from .tensors import NARROW, UNIT, Refusal, Rows, of_torch
from .worker import Worker

LEAST_BYTES, MOST_BYTES = 64, 1 << 40
# All ranks raise one of these where one refuses a call, or they differ.
SHARED = (errors.InvalidInputError, errors.RefusedError, errors.MismatchError)


def invalid(operation: str, text: str, fix: str | None = None) -> errors.InvalidInputError:
    """The error of an argument of this rank."""
    return errors.InvalidInputError(text, kind="invalid_input", operation=operation, fix=fix)


class PendingReplicas:
    """A call whose bytes travel on a thread of its own."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.is_received = False
        self._is_shown = False

    def settle(self) -> BaseException | None:
        """As `recv`. Returns an error that `recv` has not raised yet."""
        self._worker.join()
        self.is_received = True
        return None if self._is_shown else self._worker.error

    def recv(self) -> None:
        """Waits until this rank has sent and received everything: then its slots, or its sums, are complete, and the
        tensors of the call may be changed. Again is no error, or the same one.

        Raises DeadlineError, PeerLostError, TransportError, or what torch or numpy has raised: they end these replicas.
        """
        self.settle()
        self._is_shown = True
        if self._worker.error is not None:
            raise self._worker.error


class Prepared:
    """A call of this rank, with all memory and its thread, before ranks agree: it is begun, or dropped."""

    def __init__(self, worker: Worker, start: Callable[[list[list[int]]], None]) -> None:
        self._worker, self._start = worker, start

    def begin(self, slots: list[list[int]]) -> PendingReplicas:
        """Begins, with the slots that ranks have agreed on."""
        self._worker.begin(functools.partial(self._start, slots))
        return PendingReplicas(self._worker)

    def drop(self) -> None:
        """Ends it."""
        self._worker.cancel()


class Replicas:
    """Sends experts' weights to the ranks that have a replica, and sums gradients of replicas at the owners.

    `Replicas(world, config)` opens it on all ranks of `world`, with a pipe of its own. Collective. `config` is a Config
    or the path of a TOML file. Rows of more than `max_bytes` (64 to 2**40) travel in parts; `in_flight`, 1 to 16, is
    how many parts of one rank to another may be sent and not yet received. Both are equal on all ranks. Raises
    InvalidInputError, and RefusedError on the other ranks; UnsupportedError as a Pipe does.

    A **plan** names the expert of each slot of each rank, `[R, C]` integers, or -1: the first result of
    `plan_replicas`, an array, a tensor, or a list of R lists. Rank r has the experts from `r * E / R` on. Each call may
    have another plan, which all ranks share. A plan on a GPU is read by the host, which waits for it.

    **Calls** are collective: all ranks make the same ones in the same order. One may be pending at a time. Ranks first
    meet in a small message through the hosts. A wrong argument of one rank raises InvalidInputError there and
    RefusedError elsewhere; plans, numbers of experts, bytes or types that differ raise MismatchError on all ranks.
    Nothing was moved then, and the replicas go on. Any other error ends them: the other ranks learn it, and later calls
    raise InvalidInputError. Close it on all ranks, best as a context manager. Between a call and its `recv` no thread
    of this process may capture a graph.
    """

    def __init__(
        self,
        world: World,
        config: Config | str,
        *,
        max_bytes: int = 1 << 20,
        in_flight: int = 4,
    ) -> None:
        try:
            if not LEAST_BYTES <= integer_of("max_bytes", max_bytes) <= MOST_BYTES:
                world._refuse(
                    f"max_bytes: found {max_bytes}; expected {LEAST_BYTES} to {MOST_BYTES}"
                )
        except Refusal as refusal:
            world._refuse(str(refusal))
        self._world = world
        self._pipe = Pipe(world, config, max_bytes=max_bytes, in_flight=in_flight)
        report = self._pipe.report()
        self._ranks = schedule.Ranks(world.ranks, report["domains"])
        # The GPU in whose memory tensors lie; None for host memory.
        self.device = self._pipe.device
        self._most = self._pipe.max_bytes // UNIT * UNIT
        self._memories: dict[str, Memory] = {}
        self._last: PendingReplicas | None = None
        # Why it has ended.
        self._failure: str | None = None

    @property
    def rank(self) -> int:
        """This rank."""
        return self._pipe.rank

    @property
    def max_bytes(self) -> int:
        """The most bytes of a message."""
        return self._pipe.max_bytes

    @property
    def in_flight(self) -> int:
        """How many messages from one rank to another may be sent and not yet received."""
        return self._pipe.in_flight

    @property
    def closed(self) -> bool:
        """Whether it has ended."""
        return self._pipe.closed

    def report(self) -> dict[str, Any]:
        """The components that were chosen, with the reasons, and the bytes of its windows."""
        return self._pipe.report()

    def replicate(self, weights: Any, into: Any, plan: Any) -> PendingReplicas:
        """Sends the weights of each expert of the plan to the slots that it names. Returns what waits for them.

        - `weights`: this rank's experts, `[E / R, ...]`, or a list of up to 64 such tensors.
        - `into`: its slots, `[C, ...]`, or a list of as many tensors, with as many bytes for each expert. None where
          the plan leaves all slots of this rank empty. Slots of -1 stay as they are.

        Tensors are contiguous, of torch or numpy, of any type and shape. They must stay as they are, and `into` must
        not be read, until `recv()` of the result. On a GPU the bytes are read behind the work that is queued on the
        current stream of torch. Collective.
        """
        return self._call("replicate", (("weights", weights), ("into", into)), plan)

    def reduce_replicas(self, gradients: Any, own: Any, plan: Any) -> PendingReplicas:
        """Adds the gradients of slots to those of the owners. Returns what waits for the sums.

        - `gradients`: of this rank's slots, `[C, ...]`, or a list of up to 64 such tensors; None where the plan leaves
          them all empty. They stay as they are.
        - `own`: of this rank's experts, `[E / R, ...]`, or a list of as many tensors, of the same types: float32,
          float64, bfloat16 or float16.

        `own` becomes `own + g0 + g1 + ...`, in the order of ranks and of the slots of a rank, so all runs have the same
        bits. Terms of bfloat16 and float16 are added in float32, and the sum is rounded once. Everything else is as of
        `replicate`. Collective.
        """
        return self._call("reduce_replicas", (("gradients", gradients), ("own", own)), plan)

    def close(self) -> None:
        """Waits for a pending call, and closes it on all ranks together. After a failed call it ends on this rank, and
        the error is raised unless `recv` has raised it."""
        last = self._last
        hidden = last.settle() if last is not None else None
        if self._failure is None:
            self._pipe.close()
            return
        self._drop()
        if last is not None and hidden is not None:
            last.recv()

    def __enter__(self) -> "Replicas":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        if kind is None:
            self.close()
            return
        # Other ranks receive the pending call.
        if self._last is not None:
            self._last.settle()
        self._drop()

    def _drop(self) -> None:
        """Ends the pipe on this rank alone."""
        self._pipe.__exit__(RuntimeError, RuntimeError(self._failure), None)

    def expect_open(self, operation: str) -> None:
        """Raises InvalidInputError where these have ended: no rank meets in a call of them any more."""
        if self._failure is None and not self._pipe.closed:
            return
        why = f": {self._failure}" if self._failure is not None else ""
        raise invalid(
            operation,
            f"{operation}: found replicas that were closed{why}; expected open ones",
            fix="open new ones on all ranks",
        )

    def _call(
        self, operation: str, given: tuple[tuple[str, Any], tuple[str, Any]], plan: Any
    ) -> PendingReplicas:
        """Reads the tensors of a call, agrees with the other ranks, and begins."""
        self.expect_open(operation)
        is_sum = operation == "reduce_replicas"
        mine: dict[str, Any] = {"call": operation}
        prepared: Prepared | None = None
        wrong: str | None = None
        try:
            if self._last is not None and not self._last.is_received:
                raise Refusal("found a call that was not received; expected its recv() before")
            self._expect_no_capture()
            slots = slots_of(plan, self._ranks.count)
            owned, slotted = read_tensors(
                given[::-1] if is_sum else given, ("plan", slots, self.rank), is_sum, self.device
            )
            mine["plan"] = hashlib.blake2b(json.dumps(slots).encode(), digest_size=16).hexdigest()
            mine |= looks_of(owned, is_sum)
            prepared = self.prepare(operation, (owned, slotted))
        except Refusal as refusal:
            wrong = f"{operation}: {refusal}"
        except Exception as error:
            # No memory, no thread, or an object of another library that fails.
            wrong = f"{operation}: {type(error).__name__}: {error}"

        def agree() -> list[list[int]]:
            self._agree(operation, mine, wrong)
            return slots

        return self.begin(operation, prepared, agree)

    def _agree(self, operation: str, mine: dict[str, Any], wrong: str | None) -> None:
        """Raises what is wrong on any rank. Collective."""
        view = {"wrong": wrong} if wrong is not None else mine
        views = [json.loads(it) for it in self._world.all_gather("replicas", _packed(view))]
        if wrong is not None:
            raise invalid(operation, wrong)
        for rank, it in enumerate(views):
            if "wrong" in it:
                raise errors.RefusedError(
                    f"rank {rank} refused its input: {it['wrong']}",
                    kind="refused",
                    rank=rank,
                    operation=operation,
                )
        for rank, it in enumerate(views):
            for name, value in it.items():
                if views[0].get(name) != value:
                    raise errors.MismatchError(
                        f"{operation}: found {name} {value} on rank {rank}; expected {views[0].get(name)}, as on "
                        "rank 0",
                        kind="mismatch",
                        rank=rank,
                        operation=operation,
                        fix="make the same call with the same plan on all ranks",
                    )

    def prepare(
        self,
        operation: str,
        rows: tuple[list[Rows], list[Rows]],
        behind: Any = None,
    ) -> Prepared:
        """A call with all that it needs. Anything that fails here is a refusal; behind it, the end of these replicas.

        `rows`: of experts, and of slots. `behind`: an event of torch that the host waits for, in place of the work of
        the current stream.
        """
        owned, slotted = rows
        is_sum = operation == "reduce_replicas"
        memory, local = self._memory_for(owned, is_sum), owned[0].count
        mark, like = behind, owned[0].flat
        if mark is None and of_torch(like) and like.is_cuda:
            torch = sys.modules["torch"]
            mark = torch.cuda.Event()
            mark.record(torch.cuda.current_stream(like.device))

        def move(slots: list[list[int]]) -> None:
            if mark is not None:
                mark.synchronize()
            sizes, most = [one.size for one in owned], self._most
            moved = (schedule.reducing if is_sum else schedule.replicating)(slots, local)
            mine = self._ranks.of(self.rank, moved)
            if is_sum:
                sums = Summing(owned, memory)
                self._exchange(schedule.in_turn(mine, sizes, most), (slotted, owned), memory, sums)
                sums.finish()
            else:
                parts = schedule.spread(mine, sizes, most, self._ranks.count)
                self._exchange(parts, (owned, slotted), memory, None)

        def work(slots: list[list[int]]) -> None:
            try:
                with memory.writing():
                    move(slots)
            except BaseException as error:
                self._fail(operation, error)
                raise

        return Prepared(Worker(), work)

    def begin(
        self, operation: str, prepared: Prepared | None, agree: Callable[[], list[list[int]]]
    ) -> PendingReplicas:
        """Begins a call once `agree` has given the slots of all ranks. Where that raises, nothing is moved; other ranks
        may have begun only where it is none of the errors that all ranks raise."""
        try:
            slots = agree()
            assert prepared is not None
            self._last = prepared.begin(slots)
        except BaseException as error:
            if prepared is not None:
                prepared.drop()
            if not isinstance(error, SHARED):
                self._fail(operation, error)
            raise
        return self._last

    def _memory_for(self, owned: list[Rows], is_sum: bool) -> Memory:
        """Memory for the parts of a call, where its first tensor lies."""
        like, room, wide = owned[0].flat, 0, 0
        for own in owned:
            part = min(own.size, self._most)
            if is_sum or self._ranks.domains > 1:
                room = max(room, part)
            if is_sum and own.dtype in NARROW:
                # Narrow types have two bytes.
                wide = max(wide, part // 2)
        where = str(like.device) if of_torch(like) else "numpy"
        memory = self._memories.get(where)
        if memory is None:
            memory = self._memories[where] = Memory(like)
        memory.fit(room, wide)
        return memory

    def _fail(self, operation: str, error: BaseException) -> None:
        """Ends these after an error amid a call: ranks are out of step, and the others learn it at once."""
        self._failure = f"{operation}: {type(error).__name__}: {error}"
        # One of the pipe has ended it.
        with contextlib.suppress(errors.Error):
            self._pipe._fail(self._failure)

    def _exchange(
        self,
        parts: list[schedule.Part],
        rows: tuple[list[Rows], list[Rows]],
        memory: Memory,
        sums: Summing | None,
    ) -> None:
        """Sends and receives all parts, in the order of all ranks. `rows`: those that are sent, and those that are
        written. A part that is forwarded leaves right behind its arrival, so one room is enough."""
        me, pipe, (sent, written) = self.rank, self._pipe, rows
        for event in schedule.events(parts, me, self._ranks, self.in_flight):
            part, it = event.part, event.part.transfer
            length = part.end - part.begin
            if event.is_send:
                message = memory.room[:length]
                if it.source == me:
                    message = sent[part.tensor].part(it.source_row, part.begin, part.end)
                pipe.send(message, event.peer)
            elif it.target == me and sums is None:
                room = written[part.tensor].part(it.target_row, part.begin, part.end)
                pipe.recv(room, event.peer)
            else:
                pipe.recv(memory.room[:length], event.peer)
                if it.target == me and sums is not None:
                    sums.add(part.tensor, it.target_row, part.begin, part.end)

    def _expect_no_capture(self) -> None:
        """Raises Refusal where a graph is captured on the current stream."""
        torch = sys.modules.get("torch")
        if self.device is None or torch is None or not torch.cuda.is_initialized():
            return
        with torch.cuda.device(self.device):
            is_capturing = torch.cuda.is_current_stream_capturing()
        if is_capturing:
            raise Refusal(
                "found a capture of a graph on the current stream; expected none, because ranks meet in this call: "
                "call it between launches of graphs"
            )


def looks_of(owned: list[Rows], is_sum: bool) -> dict[str, Any]:
    """Facts on the experts of this rank, which ranks compare."""
    found: dict[str, Any] = {
        "experts of a rank": owned[0].count,
        "bytes of an expert": [one.size for one in owned],
    }
    if is_sum:
        found["types"] = [one.dtype for one in owned]
    return found


def _packed(view: dict[str, Any]) -> bytes:
    return json.dumps(view).encode()
