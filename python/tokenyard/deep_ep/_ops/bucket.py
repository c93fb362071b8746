"""All-gathers and sums of one group of a bucket."""

import functools
from collections.abc import Callable
from typing import Any

import tokenyard
from tokenyard import errors

from .._arrays import reason
from .._pool import Pool
from .._torch import torch
from ..utils.event import EventHandle, EventOverlap
from ..utils.math import align, ceil_div
from .common import Flight, Refused, Sent, Slot, bytes_of, gpu_of, record, settle

# Calls that travel at once, such as the gather of one layer and the sums of another.
IN_FLIGHT = 2
# Tensors of a call.
MOST_TENSORS = 64
PRECISIONS = ("fp32", "bf16")


class Bucket:
    """The gather of a group, and its calls."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._slot: Slot[tokenyard.Gather] = Slot(pool, "BucketBuffer")
        self._flight = Flight(IN_FLIGHT)
        # Makes the error of sums, where the kernel set has none. An error that is raised twice would hold the frames of
        # both calls, and their tensors.
        self._no_sums: Callable[[], errors.UnsupportedError] | None = None

    def open(self, num_bytes: int, wrong: str | None) -> None:
        """Opens it for calls over so many bytes of storage. Collective. `wrong`: why this rank refuses."""

        def make(world: tokenyard.World, config: tokenyard.Config) -> tokenyard.Gather:
            # Each tensor of an all-reduce may have a part that is filled up.
            most = align(ceil_div(num_bytes, world.ranks), 8) + MOST_TENSORS * 8
            options: Any = {"max_bytes": most, "in_flight": IN_FLIGHT}
            try:
                return tokenyard.Gather(world, config, reduces=True, **options)
            except errors.UnsupportedError as error:
                # On all ranks: their kernel sets are equal.
                self._no_sums = _maker_of(error)
                return tokenyard.Gather(world, config, **options)

        self._slot.open(wrong, make)

    def all_gather(self, shards: list[Any], rooms: list[Any], wrong: str | None) -> Sent:
        """Sends shards; what is returned writes those of all ranks to the rooms. Collective."""
        gather = self._slot.use("all_gather")
        given = [Refused(wrong)] if wrong else [bytes_of(shard) for shard in shards]
        outs = [bytes_of(room) for room in rooms]
        device = gpu_of(given)
        stream = None if device is None else torch.cuda.current_stream(device).cuda_stream

        def receive(pending: tokenyard.PendingGather) -> None:
            pending.recv(outs)
            # Shards live until then.
            given.clear()

        record([*given, *outs])
        return self._flight.send(
            lambda: gather.all_gather_send(given, stream=stream), receive, outs
        )

    def reduce_scatter(
        self, tensors: list[Any], wrong: str | None, scale: float, precision: str
    ) -> Sent:
        """Sends tensors to sum; what is returned writes this rank's part of each sum to its place. Collective."""
        gather = self._summing("reduce_scatter")
        given = [Refused(wrong)] if wrong else [one.detach().view(-1) for one in tensors]
        how: Any = "fp32" if wrong else precision
        outs = [] if wrong else [self.own_part(one) for one in given]
        settle("reduce_scatter", given)
        return self._sum(
            "reduce_scatter",
            lambda: gather.reduce_scatter_send(given, precision=how, scale=scale),
            outs,
        )

    def all_reduce(self, tensors: list[Any], wrong: str | None, scale: float) -> Sent:
        """Sends tensors to sum; what is returned writes the sums in their place. Collective."""
        gather = self._summing("all_reduce")
        flat = [one.detach().view(-1) for one in tensors]
        rooms: list[Any] = []
        given = rooms
        try:
            rooms += map(self._filled, flat)
        except Exception as error:
            # No memory, on this rank alone.
            wrong = wrong or reason(error)
        if wrong:
            given = [Refused(wrong)]
        settle("all_reduce", rooms)

        def write() -> None:
            for one, room in zip(flat, rooms, strict=True):
                if room is not one:
                    one.copy_(room[: one.numel()])

        return self._sum(
            "all_reduce", lambda: gather.all_reduce_send(given, scale=scale), rooms, write
        )

    def _summing(self, name: str) -> tokenyard.Gather:
        gather = self._slot.use(name)
        if self._no_sums is not None:
            raise self._no_sums()
        return gather

    def _sum(
        self,
        name: str,
        send: Callable[[], tokenyard.PendingReduce],
        outs: list[Any],
        then: Callable[[], None] = lambda: None,
    ) -> Sent:
        def receive(pending: tokenyard.PendingReduce) -> None:
            settle(name, outs)
            pending.recv(outs)
            then()

        return self._flight.send(send, receive, outs)

    def own_part(self, flat: Any) -> Any:
        """This rank's part of a tensor."""
        each = flat.numel() // self.pool.ranks
        return flat.narrow(0, self.pool.rank * each, each)

    def _filled(self, flat: Any) -> Any:
        """The tensor, or a longer copy where its elements have no equal parts."""
        more = -flat.numel() % self.pool.ranks
        return torch.nn.functional.pad(flat, (0, more)) if more else flat


def _maker_of(error: errors.UnsupportedError) -> Callable[[], errors.UnsupportedError]:
    """Makes errors that say the same."""
    return functools.partial(
        errors.UnsupportedError,
        *error.args,
        kind=error.kind,
        rank=error.rank,
        operation=error.operation,
        fix=error.fix,
    )


def event_of(sent: Sent, results: Any) -> EventOverlap:
    """The event of a call, whose wait gives its results."""

    def receive() -> Any:
        sent()
        return results

    event: Any = EventOverlap(EventHandle())
    event.register_hook_after_wait(receive)
    # Multiprocessors that the call holds.
    event.num_sms = 0
    overlap: EventOverlap = event
    return overlap
