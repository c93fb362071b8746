"""`Replicas`: weights of experts to the slots of other ranks, and gradients of slots back to the owners."""

import functools
import hashlib
import json
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tokenyard import errors
from tokenyard._native import Config, Pipe, World

from . import schedule
from .arguments import read_tensors, slots_of
from .tensors import UNIT, Refusal, Rows, Summing, of_torch, room_like

LEAST_BYTES, MOST_BYTES = 64, 1 << 40


def invalid(operation: str, text: str, fix: str | None = None) -> errors.InvalidInputError:
    """The error of an argument of this rank."""
    return errors.InvalidInputError(text, kind="invalid_input", operation=operation, fix=fix)


class PendingReplicas:
    """A call whose bytes travel on a thread of its own."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work
        self._error: Exception | None = None
        self.is_received = False
        self._thread = threading.Thread(target=self._run, name="tokenyard replicas", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            work()
        except Exception as error:
            # Its frames hold the tensors of the call.
            self._error = error.with_traceback(None)

    def settle(self) -> None:
        """As `recv`, and keeps its error."""
        self._thread.join()
        self.is_received = True

    def recv(self) -> None:
        """Waits until this rank has sent and received everything: then its slots, or its sums, are complete, and the
        tensors of the call may be changed. Again is no error, or the same one.

        Raises DeadlineError, PeerLostError, TransportError, which close the pipe of these replicas.
        """
        self.settle()
        if self._error is not None:
            raise self._error


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
    Nothing was moved then, and the replicas go on. Close it on all ranks, best as a context manager.
    """

    def __init__(
        self,
        world: World,
        config: Config | str,
        *,
        max_bytes: int = 1 << 20,
        in_flight: int = 4,
    ) -> None:
        if type(max_bytes) is int and max_bytes < LEAST_BYTES:
            world._refuse(f"max_bytes: found {max_bytes}; expected {LEAST_BYTES} to {MOST_BYTES}")
        self._world = world
        self._pipe = Pipe(world, config, max_bytes=max_bytes, in_flight=in_flight)
        report = self._pipe.report()
        self._ranks = schedule.Ranks(world.ranks, report["domains"])
        self.works_on_device: bool = report["works_on_device"]
        self._most = max_bytes // UNIT * UNIT
        self._last: PendingReplicas | None = None

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
        """Waits for a pending call, and closes it on all ranks together."""
        if self._last is not None:
            self._last.recv()
        self._pipe.close()

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
        else:
            self._pipe.__exit__(kind, value, traceback)

    def _call(
        self, operation: str, given: tuple[tuple[str, Any], tuple[str, Any]], plan: Any
    ) -> PendingReplicas:
        """Reads the tensors of a call, agrees with the other ranks, and begins."""
        is_sum = operation == "reduce_replicas"
        mine: dict[str, Any] = {"call": operation}
        begin: Callable[[], PendingReplicas] | None = None
        wrong: str | None = None
        try:
            if self._last is not None and not self._last.is_received:
                raise Refusal("found a call that was not received; expected its recv() before")
            slots = slots_of(plan, self._ranks.count)
            owned, slotted = read_tensors(
                given[::-1] if is_sum else given,
                ("plan", slots, self.rank),
                is_sum,
                self.works_on_device,
            )
            local = owned[0].count
            start = self.prepared(operation, (owned, slotted))
            begin = functools.partial(start, slots)
            mine["plan"] = hashlib.blake2b(json.dumps(slots).encode(), digest_size=16).hexdigest()
            mine["experts of a rank"], mine["bytes of an expert"] = local, [o.size for o in owned]
            if is_sum:
                mine["types"] = [one.dtype for one in owned]
        except Refusal as refusal:
            wrong = f"{operation}: {refusal}"
        except Exception as error:
            # No memory, or an object of another library that fails.
            wrong = f"{operation}: {type(error).__name__}: {error}"
        self._agree(operation, mine, wrong)
        assert begin is not None
        return begin()

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

    def prepared(
        self,
        operation: str,
        rows: tuple[list[Rows], list[Rows]],
        behind: Any = None,
    ) -> Callable[[list[list[int]]], PendingReplicas]:
        """A function that begins a call, with the slots that all ranks have agreed on. It has all memory of the call.

        `rows`: of experts, and of slots. `behind`: an event of torch that the host waits for, in place of the work of
        the current stream.
        """
        owned, slotted = rows
        is_sum = operation == "reduce_replicas"
        like, local = owned[0].flat, owned[0].count
        _expect_no_capture(like)
        sums = Summing(owned, self._most) if is_sum else None

        def work(slots: list[list[int]], mark: Any) -> None:
            if mark is not None:
                mark.synchronize()
            sizes, most = [one.size for one in owned], self._most
            moved = (schedule.reducing if is_sum else schedule.replicating)(slots, local)
            mine = self._ranks.of(self.rank, moved)
            if sums is not None:
                sums.prepare()
                parts = schedule.in_turn(mine, sizes, most)
                self._exchange(parts, (slotted, owned), sums, like)
                sums.finish()
            else:
                parts = schedule.spread(mine, sizes, most, self._ranks.count)
                self._exchange(parts, (owned, slotted), None, like)

        def begin(slots: list[list[int]]) -> PendingReplicas:
            mark = behind
            if mark is None and of_torch(like) and like.is_cuda:
                torch = sys.modules["torch"]
                mark = torch.cuda.Event()
                mark.record(torch.cuda.current_stream(like.device))
            self._last = PendingReplicas(lambda: work(slots, mark))
            return self._last

        return begin

    def _exchange(
        self,
        parts: list[schedule.Part],
        rows: tuple[list[Rows], list[Rows]],
        sums: Summing | None,
        like: Any,
    ) -> None:
        """Sends and receives all parts, in the order of all ranks. `rows`: those that are sent, and those that are
        written. Parts that are only forwarded get memory where `like` lies."""
        me, pipe, (sent, written) = self.rank, self._pipe, rows
        held: dict[schedule.Part, Any] = {}
        for event in schedule.events(parts, me, self._ranks, self.in_flight):
            part, it = event.part, event.part.transfer
            length = part.end - part.begin
            if event.is_send:
                message = held.pop(part, None)
                if message is None:
                    message = sent[part.tensor].part(it.source_row, part.begin, part.end)
                pipe.send(message, event.peer)
            elif it.target != me:
                held[part] = room_like(like, length)
                pipe.recv(held[part], event.peer)
            elif sums is None:
                room = written[part.tensor].part(it.target_row, part.begin, part.end)
                pipe.recv(room, event.peer)
            else:
                pipe.recv(sums.room[:length], event.peer)
                sums.add(part.tensor, it.target_row, part.begin, part.end)


def _expect_no_capture(like: Any) -> None:
    """Raises Refusal where a graph is captured on the current stream."""
    if of_torch(like) and like.is_cuda and sys.modules["torch"].cuda.is_current_stream_capturing():
        raise Refusal(
            "found a capture of a graph on the current stream; expected none, because ranks meet in this call: call it "
            "between launches of graphs"
        )


def _packed(view: dict[str, Any]) -> bytes:
    return json.dumps(view).encode()
