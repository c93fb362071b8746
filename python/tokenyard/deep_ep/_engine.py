"""The communicators behind a buffer.

A communicator has fixed sizes; DeepEP's buffers learn theirs from their calls. So the first dispatch opens one, and a
dispatch of other sizes, or of more tokens, opens another. Ranks agree on it through the one that is open: a rank whose
call does not fit, or is wrong, refuses there, so every rank learns it and gives its own view (`_agree`). A good call
costs no message.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np

import tokenyard
from tokenyard import errors

from . import _world
from ._arrays import Array, Refusal

T = TypeVar("T")

HANDLES = 1024
FIRST_TOKENS = 1024
REFUSALS = (errors.InvalidInputError, errors.RefusedError, errors.FullError)


@dataclass(frozen=True)
class Sizes:
    """What a communicator is opened for. `tokens` is the most that a rank may bring."""

    experts: int
    topk: int
    hidden: int
    tokens: int

    def fits(self, other: "Sizes") -> bool:
        same = (self.experts, self.topk, self.hidden) == (other.experts, other.topk, other.hidden)
        return same and other.tokens <= self.tokens


def power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def align(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class Opened:
    """A communicator, and a narrow one for what goes beside rows: up to K + 1 words per token."""

    def __init__(self, world: tokenyard.World, config: tokenyard.Config, sizes: Sizes) -> None:
        self.world = world
        self.config = config
        self.sizes = sizes
        self.main = self._open(sizes.hidden)
        self._side: tokenyard.Communicator | None = None

    def _open(self, hidden: int) -> tokenyard.Communicator:
        sizes = self.sizes
        return tokenyard.Communicator(
            self.world,
            self.config,
            experts=sizes.experts,
            topk=sizes.topk,
            hidden=hidden,
            max_tokens=sizes.tokens,
            handles=HANDLES,
        )

    @property
    def side_width(self) -> int:
        return align(self.sizes.topk + 1, 4)

    @property
    def side(self) -> tokenyard.Communicator:
        """Collective on first use."""
        if self._side is None or self._side.closed:
            self._side = self._open(self.side_width)
        return self._side

    def close(self) -> None:
        for communicator in (self.main, self._side):
            if communicator is not None:
                communicator.close()


# Reads the arguments, and sends them: both may find that they cannot.
Read: TypeAlias = Callable[[], tuple[Sizes, T]]
Send: TypeAlias = Callable[[Opened, T], tokenyard.PendingDispatch]


@dataclass
class Attempt:
    """A dispatch between its halves, or why it cannot be."""

    opened: Opened
    refused: str | None
    is_full: bool = False
    pending: tokenyard.PendingDispatch | None = None

    def take(self, error: errors.Error) -> None:
        """What this rank has to say of an operation that was refused. Of another's refusal it is nothing."""
        self.is_full = isinstance(error, errors.FullError)
        if self.is_full or isinstance(error, errors.InvalidInputError):
            self.refused = str(error)


class Engine:
    """Opens communicators, and runs dispatches on the one that fits."""

    def __init__(self, group: Any, comm: Any) -> None:
        self.config = _world.load_config()
        self.world = _world.world_of(group, comm, self.config)
        self.rank, self.ranks = self.world.rank, self.world.ranks
        # What is where is known to communicators alone: the smallest one says it, and that the config works.
        with tokenyard.Communicator(
            self.world, self.config, experts=self.ranks, topk=1, hidden=8, max_tokens=1, handles=1
        ) as communicator:
            if communicator.works_on_device:
                raise errors.UnsupportedError(
                    'open buffer: found a config for GPUs; expected [kernels] use = "cpu": the drop-in for '
                    "deep_ep runs on the CPU backend"
                )
            self.domains = int(communicator.report()["domains"])
        self._opened: dict[tuple[int, int, int], Opened] = {}
        self._counts: tokenyard.Communicator | None = None
        self.current: Opened | None = None
        self.is_destroyed = False

    def dispatch(self, read: Read[T], send: Send[T]) -> tuple[Opened, Any]:
        """Sends what `read` gives, and receives. Where a rank cannot, all raise, or open what fits and try again."""
        return self.dispatch_send(read, send)()

    def dispatch_send(self, read: Read[T], send: Send[T]) -> Callable[[], tuple[Opened, Any]]:
        """The first half of `dispatch`; calling what it returns is the second, which raises what is wrong.

        The tensors of the call must not be written until then.
        """
        self._expect_usable()
        sizes, call, refused = None, None, None
        try:
            sizes, call = read()
        except Refusal as refusal:
            refused = str(refusal)
        first = self._enter(sizes, call, refused, send)

        def finish() -> tuple[Opened, Any]:
            attempt = first
            while True:
                if attempt.pending is not None:
                    try:
                        return attempt.opened, attempt.pending.recv()
                    except REFUSALS as error:
                        attempt.take(error)
                self._agree(sizes, attempt.refused, attempt.is_full)
                attempt = self._enter(sizes, call, refused, send)

        return finish

    def _enter(self, sizes: Sizes | None, call: Any, refused: str | None, send: Any) -> Attempt:
        """Sends, or refuses: then the attempt says why."""
        opened = self._usable()
        if opened is None:
            # Nobody has one, so nobody can refuse.
            self._agree(sizes, refused, False)
            opened = self._expect_opened()
        attempt = Attempt(opened, refused)
        try:
            if refused is None and sizes is not None and opened.sizes.fits(sizes):
                attempt.pending = send(opened, call)
            else:
                opened.main.refuse("dispatch", refused or f"another size: {sizes}")
        except REFUSALS as error:
            if sizes is not None and opened.sizes.fits(sizes):
                attempt.take(error)
        return attempt

    def _expect_opened(self) -> Opened:
        if self.current is None:
            raise AssertionError("ranks that agree have a communicator")
        return self.current

    def _expect_usable(self) -> None:
        if self.is_destroyed:
            raise errors.InvalidInputError("use buffer: it was destroyed; expected a new one")

    def _usable(self) -> Opened | None:
        """The communicator that all ranks would call now, if an error has not closed it."""
        if self.current is not None and self.current.main.closed:
            self._opened = {key: it for key, it in self._opened.items() if not it.main.closed}
            self.current = None
        return self.current

    def _agree(self, sizes: Sizes | None, refused: str | None, is_full: bool) -> None:
        """Gathers what every rank wants. Opens it, or raises on all ranks. Collective."""
        mine = {"sizes": sizes and vars(sizes), "refused": refused, "full": is_full}
        gathered = self.world.all_gather("agree on sizes", json.dumps(mine).encode())
        views = [json.loads(view) for view in gathered]
        for full in (True, False):
            for rank, view in enumerate(views):
                if view["refused"] is not None and view["full"] == full:
                    self._raise_refused(rank, view["refused"], full)
        wanted = [Sizes(**view["sizes"]) for view in views]
        first = wanted[0]
        for rank, other in enumerate(wanted):
            for name in ("experts", "topk", "hidden"):
                if getattr(other, name) != getattr(first, name):
                    raise errors.InvalidInputError(
                        f"dispatch: found {name} = {getattr(other, name)} on rank {rank}; expected "
                        f"{getattr(first, name)}, as on rank 0",
                        kind="invalid_input",
                        rank=rank,
                        operation="dispatch",
                    )
        tokens = max(FIRST_TOKENS, power_of_two(max(sizes.tokens for sizes in wanted)))
        self.current = self._open(Sizes(first.experts, first.topk, first.hidden, tokens))

    def _raise_refused(self, rank: int, text: str, is_full: bool) -> NoReturn:
        if is_full:
            raise errors.FullError(text, kind="full", rank=rank, operation="dispatch")
        if rank == self.rank:
            raise errors.InvalidInputError(
                text, kind="invalid_input", rank=rank, operation="dispatch"
            )
        raise errors.RefusedError(
            f"rank {rank} refused its input: {text}",
            kind="refused",
            rank=rank,
            operation="dispatch",
        )

    def _open(self, sizes: Sizes) -> Opened:
        key = (sizes.experts, sizes.topk, sizes.hidden)
        found = self._opened.get(key)
        if found is None or found.main.closed or not found.sizes.fits(sizes):
            # The old one lives on while handles of it do.
            found = Opened(self.world, self.config, sizes)
            self._opened[key] = found
        return found

    def refuse(self, opened: Opened | None, operation: Any, why: Refusal) -> NoReturn:
        """Refuses a replay or a combine: raises here, and on the other ranks in their call."""
        self._expect_refusable(opened, why).main.refuse(operation, str(why))
        raise AssertionError("a refusal always raises")

    def refuse_beside(self, opened: Opened | None, why: Refusal) -> NoReturn:
        """Refuses an operation that begins with a dispatch of what goes beside rows."""
        self._expect_refusable(opened, why).side.refuse("dispatch", str(why))
        raise AssertionError("a refusal always raises")

    def _expect_refusable(self, opened: Opened | None, why: Refusal) -> Opened:
        self._expect_usable()
        opened = opened or self._usable()
        if opened is None:
            raise errors.InvalidInputError(str(why), kind="invalid_input")
        return opened

    def sum_over_sources(self, counts: Array) -> Array:
        """Gives row r of `counts` (`[R, n]` int32) to rank r; returns the sum of what came here. Collective."""
        width = align(counts.shape[1], 4)
        if self._counts is None or self._counts.closed or self._counts.hidden < width:
            self._counts = tokenyard.Communicator(
                self.world,
                self.config,
                experts=self.ranks,
                topk=1,
                hidden=width,
                max_tokens=self.ranks,
                handles=1,
            )
        rows = np.zeros((self.ranks, self._counts.hidden), np.int32)
        rows[:, : counts.shape[1]] = counts
        ranks = np.arange(self.ranks, dtype=np.int64)[:, None]
        # The words pass untouched, whatever they are called.
        received, _ = self._counts.dispatch(rows.view(np.float32), ranks)
        gathered = np.asarray(received.x).view(np.int32)[:, : counts.shape[1]]
        return np.asarray(gathered.sum(axis=0))

    def barrier(self) -> None:
        self._expect_usable()
        self.world.barrier("buffer barrier")

    def destroy(self) -> None:
        """Closes everything. Collective; again is no error."""
        if self.is_destroyed:
            return
        self.is_destroyed = True
        for opened in self._opened.values():
            opened.close()
        if self._counts is not None:
            self._counts.close()
        self._opened, self._counts, self.current = {}, None, None
