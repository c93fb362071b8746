"""The common part of these operations: how they open and end, how a rank refuses, and tensors as their bytes."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import numpy as np

import tokenyard

from .. import _world
from .._arrays import Refusal, adopted, can_share, invalid
from .._calls.call import expect_integer
from .._hooks import Hook
from .._pool import Pool
from .._torch import torch

T = TypeVar("T", tokenyard.Pipe, tokenyard.Gather, tokenyard.Table, tokenyard.Replicas)
R = TypeVar("R")


class Refused:
    """Stands in the place of a wrong tensor: the operation reads it, so all ranks that meet there learn why."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __dlpack_device__(self) -> tuple[int, int]:
        raise Refusal(self._why)

    def __dlpack__(self, **options: Any) -> object:
        raise Refusal(self._why)


def fault(check: Callable[..., Any], *arguments: Any) -> str | None:
    """The fault that a check finds; None without one."""
    try:
        check(*arguments)
    except Refusal as refusal:
        return str(refusal)
    return None


def range_fault(name: str, value: Any, most: int) -> str | None:
    """The fault of a number that is to be from 1 to `most`; None without one."""
    return fault(expect_integer, name, value, 1, most)


class Slot(Generic[T]):
    """Where a buffer has one of these operations, once it was configured. To configure it again opens another one."""

    def __init__(self, pool: Pool, setter: str) -> None:
        """`setter`: the call that configures it."""
        self.pool, self._setter = pool, setter
        self._held: _world.Held | None = None

    def open(self, wrong: str | None, make: Callable[[tokenyard.World, tokenyard.Config], T]) -> T:
        """Opens what `make` makes, on all ranks. Collective: where this rank's arguments are wrong, it raises what is,
        and the others RefusedError; what was open stays."""
        pool = self.pool
        pool.expect_usable()
        if pool.is_capturing():
            raise invalid(
                self._setter,
                f"{self._setter}: found a capture of a graph on the current stream; expected none, because ranks meet "
                "in this call",
                fix="call it before the capture",
            )
        made = pool.open_beside(wrong, make)
        before, self._held = self._held, made
        if before is not None:
            # All ranks have met in the opening, so none calls the old one any more.
            pool.drop_beside(before)
        opened: T = made.opened
        return opened

    @property
    def is_open(self) -> bool:
        """Whether it was configured."""
        return self._held is not None

    def use(self, operation: str) -> T:
        """The operation that is open, for a call."""
        self.pool.expect_usable()
        if self._held is None:
            raise invalid(
                operation,
                f"{operation}: found no config; expected {self._setter} before it",
                fix=f"call {self._setter} on all ranks first",
            )
        opened: T = self._held.opened
        return opened


def gpu_of(tensors: list[Any]) -> Any:
    """The GPU of the first tensor of torch that lies on one; None where all lie in the host's memory."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            return tensor.device
    return None


def settle(operation: str, tensors: list[Any]) -> None:
    """Waits until work that is queued on tensors of a GPU has ended: these operations read and write them at once."""
    device = gpu_of(tensors)
    if device is None:
        return
    if torch.cuda.is_current_stream_capturing():
        raise invalid(
            operation,
            f"{operation}: found a capture of a graph on the current stream; expected none, because the host waits for "
            "other ranks in this call",
            fix="call it between launches of graphs",
        )
    torch.cuda.current_stream(device).synchronize()


def record(tensors: Iterable[Any]) -> None:
    """Lets torch give memory of a GPU to others only behind what the current stream has queued on it, where it was made
    for another stream."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def tensor_of(value: Any) -> Any:
    """An array of another library as a tensor of torch over its memory; as it is, where torch cannot share it."""
    if isinstance(value, np.ndarray) and not can_share(value):
        return value
    return adopted(value)


def bytes_of(value: Any) -> Any:
    """A tensor as its bytes, so that it may be of any type. One with gaps is left: the operation refuses it."""
    tensor = tensor_of(value)
    is_plain = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
    if not is_plain or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
        return tensor
    return tensor.detach().reshape(-1).view(torch.uint8)


class Sent:
    """A call that was sent. To call this receives it, once: then the current stream finds its outputs."""

    def __init__(self, receive: Callable[[], Any], outputs: list[Any]) -> None:
        self.hook = Hook(receive)
        self._device = gpu_of(outputs)
        is_on_host = self._device is None
        self._stream = None if is_on_host else torch.cuda.current_stream(self._device)
        self._outputs = [] if is_on_host else outputs

    def __call__(self) -> None:
        self.hook()
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._device)
        if current != self._stream:
            current.wait_stream(self._stream)
            record(self._outputs)


class Flight:
    """The calls of a gather. Call n has the place of call n - most, which must be received before it is sent.

    Calls count that this rank refused, too: they have a number on all ranks. So do those that were received: in which
    order a caller does it makes no other call take their place.
    """

    def __init__(self, most: int) -> None:
        # The last calls; None where there is nothing to receive.
        self._last: deque[Hook | None] = deque(maxlen=most)

    def send(self, send: Callable[[], R], receive: Callable[[R], Any], outputs: list[Any]) -> Sent:
        """Sends a call, behind the one whose place it takes. `receive`: the second half of what `send` gives, which
        writes the outputs."""
        self._make_room()
        try:
            pending = send()
        except Exception as error:
            # An error before the start of a call leaves its number to the next one.
            if getattr(error, "operation", None) != "start gather":
                self._last.append(None)
            raise
        sent = Sent(lambda: receive(pending), outputs)
        # Not all of what was sent: that would hold its outputs. Where the caller drops it, the call is received still.
        self._last.append(sent.hook)
        return sent

    def _make_room(self) -> None:
        """Receives the call whose place the next one takes. All ranks do, as they make the same calls. An error of that
        is raised where its handle is called."""
        if len(self._last) == self._last.maxlen and (hook := self._last[0]) is not None:
            hook.settle()

    def settle(self) -> None:
        """Receives all."""
        for place, hook in enumerate(self._last):
            self._last[place] = None
            if hook is not None:
                hook.settle()
