"""Messages between two ranks of a buffer: pipeline-parallel send and receive."""

from typing import Any

import tokenyard

from .._pool import Pool
from ..utils.math import align
from .common import Slot, bytes_of, range_fault, settle

# Limits of a pipe.
MOST_BYTES = 1 << 40
MOST_IN_FLIGHT = 16


def judge(max_bytes: Any, in_flight: Any) -> str | None:
    """The fault of the numbers of a config, by their names in DeepEP; None without one."""
    return range_fault("num_max_tensor_bytes", max_bytes, MOST_BYTES) or range_fault(
        "num_max_inflight_tensors", in_flight, MOST_IN_FLIGHT
    )


def size_hint(max_bytes: int, in_flight: int, unit: int) -> int:
    """Bytes that DeepEP would take: slots for both directions to the neighbours before and after."""
    return align(align(max_bytes, 32) * in_flight * 4, unit)


class Messages:
    """The pipe of a buffer. It reaches any rank that the transports reach, not the neighbours in a ring alone."""

    def __init__(self, pool: Pool, setter: str) -> None:
        self._slot: Slot[tokenyard.Pipe] = Slot(pool, setter)

    def set_config(self, max_bytes: Any, in_flight: Any) -> None:
        """Opens it on all ranks. Collective."""

        def make(world: tokenyard.World, config: tokenyard.Config) -> tokenyard.Pipe:
            return tokenyard.Pipe(world, config, max_bytes=int(max_bytes), in_flight=int(in_flight))

        self._slot.open(judge(max_bytes, in_flight), make)

    def send(self, operation: str, tensor: Any, rank: Any) -> None:
        """Sends the bytes of a tensor, which may be changed afterwards."""
        pipe, message = self._slot.use(operation), bytes_of(tensor)
        settle(operation, [message])
        pipe.send(message, rank)

    def recv(self, operation: str, tensor: Any, rank: Any) -> None:
        """Waits for the next message of a rank, and writes it to a tensor of as many bytes."""
        pipe, room = self._slot.use(operation), bytes_of(tensor)
        settle(operation, [room])
        pipe.recv(room, rank)
