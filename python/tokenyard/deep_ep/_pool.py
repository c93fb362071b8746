"""The communicators behind a buffer.

A communicator has fixed sizes; DeepEP's buffers learn theirs from their calls. So the first dispatch opens one, and a
dispatch of other sizes, or of more tokens, opens another. Ranks agree on it through the one that is open: a rank whose
call does not fit, or is wrong, refuses there, so every rank learns it and gives its own view (`agree`). A good call
costs no message.
"""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NoReturn

import tokenyard
from tokenyard import errors

from . import _world
from ._arrays import Refusal, invalid, reason
from ._deferred import IN_FLIGHT, Deferred
from ._gaps import Gaps
from ._hooks import Hook
from ._sizes import Sizes, grown, sizes_of
from ._torch import torch
from .utils.math import align

HANDLES = 1024
REFUSALS = (errors.InvalidInputError, errors.RefusedError, errors.FullError)


@dataclass(eq=False)
class Opened:
    """A communicator, and what it was opened for. Buffers and handles share it; behind the last it is parked."""

    communicator: tokenyard.Communicator
    sizes: Sizes
    world: tokenyard.World
    # The pool of the buffer that opened it; handles may outlive that.
    owner: "weakref.ref[Pool]"
    arena_bytes: int
    # Calls that it takes of those that not every kernel set takes.
    forms: frozenset[str]
    # Where outputs lie: `auto`, `arena` or `copy`.
    output: str
    # The most tokens of a rank that ranks have agreed on for it. It may have room for more.
    agreed_tokens: int
    # Streams of torch on which calls were made, and on which a graph captured some.
    streams: set[int] = field(default_factory=set)
    captured_streams: set[int] = field(default_factory=set)
    # Whether callers have got outputs that lie in the arena.
    lends: bool = False
    # The hooks of the last low latency operations on the CPU; none for the one with a combine's weights.
    hooks: deque["weakref.ref[Hook] | None"] = field(
        default_factory=lambda: deque(maxlen=IN_FLIGHT)
    )
    # Rows of the last low latency dispatch, if they lie in the arena: the next one goes elsewhere.
    last_rows: Any = None

    def expect_room(self, operations: int) -> None:
        """Refuses a call of low latency where one waits in its place. A dispatch is one operation, a combine two."""
        for place in range(len(self.hooks) + operations - IN_FLIGHT):
            hook = self._hook_at(place)
            if hook is not None and hook.waits:
                raise Refusal(
                    f"return_recv_hook: found a call whose hook waits, {len(self.hooks) - place} operations before "
                    f"this one; expected at most {IN_FLIGHT} from a call to its hook, this call included (on the CPU a "
                    "combine counts as two): call the hook that the earlier call returned first"
                )

    def make_room(self) -> None:
        """Receives the operation in whose place the next one goes, which is a refusal: no other rank waits for it."""
        if len(self.hooks) == IN_FLIGHT and (hook := self._hook_at(0)) is not None:
            hook.settle()

    def _hook_at(self, place: int) -> Hook | None:
        """The hook of one of the last operations, if it has one and the caller has not dropped it."""
        reference = self.hooks[place]
        return None if reference is None else reference()

    def takes(self, form: str) -> bool:
        """Whether it takes a form of calls that not every kernel set takes."""
        return form in self.forms


class Dispatch:
    """A dispatch until all ranks make it: where one cannot, all raise, or open what fits and try again.

    Where the call has no `has_cpu_sync`, a rank does not wait for what the others say of it: one that refuses raises at
    once, because the others have gone on, and learn it in a later call.
    """

    def __init__(self, call: Any, send: Callable[[Opened], Any]) -> None:
        """The first half: reads the call, and sends it. `send` takes what was opened, and may find that it cannot.

        `call` has a `pool`. It gives its sizes as it is read (`read`), or by the looks of its tensors (`looks`): where
        it is wrong, the others call the communicator of these.
        The tensors of the call must not be written until the second half, `recv`, which raises what is wrong.
        """
        self._pool: Pool = call.pool
        self._call, self._send = call, send
        self._pool.expect_usable()
        self._sizes: Sizes | None = None
        self._refused: str | None = None
        self._pending: Any = None
        try:
            self._sizes = call.read()
        except Exception as error:
            self._refused = reason(error)
            # Anything may be given in the place of tensors: the call says which argument is wrong.
            with contextlib.suppress(Exception):
                self._sizes = call.looks()
        self._enter()

    @property
    def is_refused(self) -> bool:
        """Whether the arguments of this rank are wrong."""
        return self._refused is not None

    def sent(self) -> tuple[Opened, Any]:
        """Returns what `send` gave, once all ranks make the call."""
        while self._pending is None:
            self._end()
            self._enter()
        return self._opened, self._pending

    def recv(self) -> tuple[Opened, Any]:
        """The second half of what `send` gave: its `recv`."""
        while True:
            opened, pending = self.sent()
            try:
                return opened, pending.recv()
            except REFUSALS as error:
                self._pending = None
                self._take(error)

    def _enter(self) -> None:
        """Sends, or refuses: then it says why."""
        pool = self._pool
        opened = pool.called(self._sizes)
        if opened is None:
            # No rank has one, so no rank can refuse.
            opened = pool.agree(self._sizes, self._refused, False)
        self._opened, self._why, self._is_full = opened, self._refused, False
        fits = self._refused is None and pool.fits(opened, self._sizes)
        if fits and (wrong := self._prepare(opened)) is not None:
            self._why = self._refused = wrong
            fits = False
        try:
            if fits:
                self._pending = pool.deferred.start(self._send, opened)
            elif pool.is_capturing():
                # No other rank waits in a capture, and none could learn a refusal.
                pool.raise_in_capture(self._sizes, self._refused, False)
            else:
                why = self._refused or f"sizes to agree on: {self._sizes}"
                opened.make_room()
                refuse, layout = opened.communicator.refuse, self._call.layout
                pool.deferred.start(refuse, "dispatch", why, layout=layout)
        except REFUSALS as error:
            # It has the number of an operation.
            opened.hooks.append(None)
            if fits:
                self._take(error)

    def _prepare(self, opened: Opened) -> str | None:
        """Makes the call ready for a communicator. Returns why it cannot: the others must learn it."""
        try:
            self._call.prepare(opened)
        except Exception as error:
            return reason(error)
        return None

    def _take(self, error: errors.Error) -> None:
        """The reason why this rank refused an operation; none where another rank refused it."""
        self._is_full = isinstance(error, errors.FullError)
        if self._is_full or isinstance(error, errors.InvalidInputError):
            self._why = str(error)

    def _end(self) -> None:
        """Raises what this rank alone has found, where the others have gone on; else agrees with them."""
        pool, opened = self._pool, self._opened
        is_left = not self._call.has_cpu_sync and opened.takes("without_sync")
        # Of sizes that do not fit, no rank has sent.
        if self._why is not None and is_left and pool.fits(opened, self._sizes):
            pool.raise_refused(pool.rank, self._why, self._is_full)
        pool.agree(self._sizes, self._why, self._is_full)


class Pool:
    """Opens communicators, and runs dispatches on the one that fits."""

    def __init__(
        self, group: Any, comm: Any = None, waits: _world.Waits = _world.DEFAULT_WAITS
    ) -> None:
        _world.expect_no_capture()
        self.config, self.output, wrong = _world.settings(waits)
        self._waits = waits
        try:
            self.world = _world.world_of(group, comm, self.config)
        except tokenyard.Error as error:
            # The settings to meet with may differ from the others'; then the wrong ones are the cause.
            if wrong is not None:
                raise wrong from error
            raise
        self.rank, self.ranks = self.world.rank, self.world.ranks
        _world.expect_settings(self.world, wrong)
        _world.drop_parked(self.world)
        # Later calls may come from threads that chose no GPU.
        self.gpu = _world.chosen_gpu()
        with _world.on_gpu(self.gpu):
            choices = tokenyard.survey(self.world, self.config)
        # Whether calls take tensors of torch, whose values the host does not read.
        self.on_device: bool = choices["works_on_device"]
        # A config of the environment has a number of its own, or leaves the choice to the kernel set.
        self._can_choose_sms = self.on_device and not _world.has_own_config()
        self.domains: int = choices["domains"]
        # Whether each M that calls name has a communicator: among domains, GPUs take no M of a call.
        self.opens_each_m: bool = self.on_device and self.domains > 1
        if self.gpu is None and self.on_device and torch.cuda.is_available():
            self.gpu = int(torch.cuda.current_device())
        self.gaps = Gaps(self.config, self.device)
        # By sizes but M; by M as well where each M has a communicator.
        self._opened: dict[tuple[int, ...], Opened] = {}
        # Those that one with a larger M has replaced, and that graphs may have captured.
        self._captured: list[Opened] = []
        self._counts: Opened | None = None
        # Operations beside dispatch and combine.
        self._beside: list[_world.Held] = []
        # M of calls so far, which ranks have agreed on. On the CPU a new one is agreed on before it is used; on GPUs
        # ranks compare M in each call.
        self._agreed_tokens: set[int | None] = set()
        self.current: Opened | None = None
        # The hook of the last low latency call on the CPU.
        self._last_hook: Hook | None = None
        self.deferred = Deferred()
        # Ranks that the caller leaves out of low-latency calls, also where an error has closed the communicator.
        self.masked: set[int] = set()
        self.is_destroyed = False

    @property
    def device(self) -> Any:
        """torch's device of the buffer, whichever GPU is the current one of this thread; the host's memory where
        kernels run on the CPU."""
        if self.gpu is None or not self.on_device:
            return torch.device("cpu")
        return torch.device("cuda", self.gpu)

    def sms_of(self, chosen: int) -> int:
        """The multiprocessors that a caller has chosen for a call, where such a choice counts; else 0."""
        return chosen if self._can_choose_sms else 0

    def _key(self, sizes: Sizes) -> tuple[int, ...]:
        """Calls with this key have one communicator."""
        if not self.on_device:
            return sizes.key
        if self.opens_each_m and sizes.max_tokens is not None:
            return (*sizes.named_key, sizes.tokens)
        return sizes.named_key

    def fits(self, opened: Opened, sizes: Sizes | None) -> bool:
        """Whether a communicator takes calls of these sizes, and no rank need be asked."""
        if sizes is None or not (self.on_device or sizes.max_tokens in self._agreed_tokens):
            return False
        own = opened.sizes
        is_same = own is sizes or self._key(own) == self._key(sizes)
        return is_same and own.has_room_for(sizes)

    def called(self, sizes: Sizes | None) -> Opened | None:
        """The communicator that all ranks call now, if there is one. On GPUs, that of calls which name M: all ranks
        name one, so all have it or none has."""
        if sizes is not None and sizes.max_tokens is not None and self.on_device:
            found = self._opened.get(self._key(sizes))
            if found is not None and not found.communicator.closed:
                return found
        return self._usable()

    def expect_usable(self) -> None:
        if self.is_destroyed:
            raise invalid("use buffer", "use buffer: it was destroyed; expected a new one")

    def _usable(self) -> Opened | None:
        """The communicator that all ranks would call now, if an error has not closed it."""
        if self.current is not None and self.current.communicator.closed:
            self._opened = {k: it for k, it in self._opened.items() if not it.communicator.closed}
            self.current = None
        return self.current

    def agree(self, sizes: Sizes | None, refused: str | None, is_full: bool) -> Opened:
        """Gathers what every rank wants. Opens it, or raises on all ranks. Collective."""
        if self.is_capturing():
            self.raise_in_capture(sizes, refused, is_full)
        wanted_here = asdict(sizes) if sizes is not None and refused is None else None
        found = self._opened.get(self._key(sizes)) if sizes is not None else None
        is_captured = found is not None and bool(found.captured_streams)
        mine = {"sizes": wanted_here, "refused": refused, "full": is_full, "captured": is_captured}
        views = _world.gather_json(self.world, "agree on sizes", mine)
        for full in (True, False):
            for rank, view in views.items():
                if view["refused"] is not None and view["full"] == full:
                    self.raise_refused(rank, view["refused"], full)
        wanted = {rank: Sizes(**view["sizes"]) for rank, view in views.items()}
        first_rank, first = next(iter(wanted.items()))
        for rank, other in wanted.items():
            for name in ("experts", "topk", "hidden", "max_tokens", "decodes"):
                if name == "topk" and first.takes_more_topk and other.takes_more_topk:
                    continue
                if getattr(other, name) != getattr(first, name):
                    raise invalid(
                        "dispatch",
                        f"dispatch: found {name} = {getattr(other, name)} on rank {rank}; expected "
                        f"{getattr(first, name)}, as on rank {first_rank}",
                        rank,
                    )
        tokens, topk, pieces = (
            max(getattr(it, name) for it in wanted.values())
            for name in ("tokens", "topk", "pieces")
        )
        named = first.max_tokens if self.on_device else None
        self.current = self._open(
            sizes_of(
                first.experts,
                topk,
                first.hidden,
                tokens,
                named,
                first.decodes and named is not None,
                first.takes_more_topk,
                pieces,
            ),
            any(view["captured"] for view in views.values()),
        )
        # Not of a communicator that cannot be opened: the next call agrees again.
        self._agreed_tokens.add(first.max_tokens)
        return self.current

    def decoding(self) -> list[tokenyard.Communicator]:
        """The communicators of low-latency calls, in the order in which all ranks have opened them; where there are
        none for these calls alone, the one of all calls so far."""
        current = self._usable()
        opened = [one for one in self._opened.values() if one.sizes.decodes]
        if not opened and current is not None:
            opened = [current]
        return [one.communicator for one in opened if not one.communicator.closed]

    def is_capturing(self) -> bool:
        """Whether the current stream captures a graph: nothing can be agreed on then."""
        return self.on_device and _world.is_capturing()

    def raise_in_capture(self, sizes: Sizes | None, refused: str | None, is_full: bool) -> NoReturn:
        if refused is not None:
            self.raise_refused(self.rank, refused, is_full)
        raise invalid(
            "capture graph",
            f"capture graph: found sizes that no call had before, {sizes}; expected a call of each kind before "
            "the capture",
            fix="warm up: make the same calls once without a capture",
        )

    def raise_refused(self, rank: int, text: str, is_full: bool) -> NoReturn:
        if is_full:
            raise errors.FullError(text, kind="full", rank=rank, operation="dispatch")
        if rank == self.rank:
            raise invalid("dispatch", text, rank)
        raise errors.RefusedError(
            f"rank {rank} refused its input: {text}",
            kind="refused",
            rank=rank,
            operation="dispatch",
        )

    def _open(self, sizes: Sizes, is_captured: bool) -> Opened:
        """Opens what takes calls of these sizes, unless it is open. `is_captured`: whether a graph of any rank may have
        captured the one with these sizes but a smaller M or K."""
        key = self._key(sizes)
        found = self._opened.get(key)
        if found is not None and found.communicator.closed:
            found = None
        if found is None or not found.sizes.has_room_for(sizes):
            opened = self._open_new(sizes if found is None else grown(sizes, found.sizes))
            before = 0 if found is None else found.agreed_tokens
            opened.agreed_tokens = max(sizes.tokens, before)
            self._mask_as_before(opened)
            # The old one lives on while handles of it do; where graphs have captured it, as long as the buffer.
            if found is not None and is_captured:
                self._captured.append(found)
            found = self._opened[key] = opened
        return found

    def _mask_as_before(self, opened: Opened) -> None:
        """Masks of low-latency calls hold for each of their communicators."""
        if not opened.sizes.decodes:
            return
        masked = set(self.masked)
        with contextlib.suppress(errors.UnsupportedError):
            masked.update(rank for other in self.decoding() for rank in other.masked_ranks())
        for rank in sorted(masked):
            opened.communicator.mask_rank(rank)

    def _open_new(self, sizes: Sizes, handles: int = HANDLES) -> Opened:
        _world.drop_parked(self.world)
        with _world.on_gpu(self.gpu):
            communicator = tokenyard.Communicator(
                self.world,
                _world.load_config(self._waits, sizes.decodes and self.domains == 1),
                experts=sizes.experts,
                topk=sizes.topk,
                hidden=sizes.hidden,
                max_tokens=sizes.tokens * sizes.pieces,
                # On the CPU one more: with it the operation beyond the bound is refused on all ranks.
                in_flight=IN_FLIGHT if self.on_device else IN_FLIGHT + 1,
                handles=handles,
            )
        arena = max(communicator.report()["window_bytes"])
        forms = frozenset(communicator.forms)
        owner = weakref.ref(self)
        tokens = sizes.tokens
        opened = Opened(communicator, sizes, self.world, owner, arena, forms, self.output, tokens)
        _world.park_after(opened, self.world, communicator)
        return opened

    def hook(self, half: Callable[[], Any], opened: Opened | None, operations: int) -> Hook:
        """The hook of a call of low latency. On the CPU a dispatch is one operation, a combine two."""
        if self.on_device:
            return Hook(half)
        hook = Hook(half, self._last_hook)
        self._last_hook = hook
        if opened is not None:
            opened.hooks.extend([None] * (operations - 1) + [weakref.ref(hook)])
        return hook

    def expect_own(self, opened: Opened) -> None:
        """Refuses what belongs to another buffer. One that is gone leaves its handles to the others of its group.

        Megatron makes its buffer anew when rows get wider, between a dispatch and its backward pass.
        """
        owner = opened.owner()
        if owner is self or (owner is None and opened.world is self.world):
            return
        raise Refusal("handle: found one of another buffer; expected one of this buffer")

    def refuse(
        self,
        opened: Opened | None,
        operation: Literal["replay", "combine"],
        error: Exception,
        layout: Literal["flat", "expert_major", "packed"] = "flat",
    ) -> NoReturn:
        """Refuses a replay or a combine whose arguments cannot be read: raises here, and on the other ranks in their
        call.

        A combine that brings weights is a replay first. `layout` is that of the handle.
        """
        self.expect_usable()
        opened, why = opened or self._usable(), reason(error)
        if opened is None or self.is_capturing():
            raise invalid(operation, why)
        opened.make_room()
        opened.hooks.append(None)
        self.deferred.start(opened.communicator.refuse, operation, why, layout=layout)
        raise AssertionError("a refusal always raises")

    def open_counts(self, numbers: int) -> Opened:
        """A communicator for rows of this many numbers, one from each rank to each. Collective."""
        width = align(numbers, 8)
        opened = self._counts
        if opened is None or opened.communicator.closed or opened.sizes.hidden < width:
            sizes = Sizes(self.ranks, 1, width, self.ranks, None, False)
            if self.is_capturing():
                self.raise_in_capture(sizes, None, False)
            opened = self._open_new(sizes, handles=4)
            self._counts = opened
        return opened

    def open_beside(
        self,
        wrong: str | None,
        make: Callable[[tokenyard.World, tokenyard.Config], Any],
    ) -> _world.Held:
        """Opens an operation beside dispatch and combine, with a session of its own. Collective. `wrong`: why this rank
        refuses."""
        _world.drop_parked(self.world)
        if wrong is not None:
            self.world._refuse(wrong)
        with _world.on_gpu(self.gpu):
            made = make(self.world, _world.load_config(self._waits))
        held = _world.Held(self.world, made)
        self._beside.append(held)
        return held

    def drop_beside(self, held: _world.Held) -> None:
        """Drops it on this rank, where no rank calls it any more."""
        self._beside.remove(held)
        held.drop()

    @property
    def beside(self) -> int:
        """Operations beside dispatch and combine that are open."""
        return sum(not held.opened.closed for held in self._beside)

    def _end_beside(self) -> None:
        """Drops all behind a barrier. Their own end would wait for messages that no rank receives."""
        try:
            self.world.barrier("end of operations")
        finally:
            for held in list(self._beside):
                self.drop_beside(held)

    def memory(self) -> tuple[int, int, int]:
        """Communicators that are open, the bytes of their windows on this rank and of those of other operations, and
        the bytes that callers hold."""
        every = [*self._captured, *self._opened.values(), *filter(None, (self._counts,))]
        found = [one.communicator for one in every if not one.communicator.closed]
        windows = [*found, *(one.opened for one in self._beside if not one.opened.closed)]
        taken = sum(sum(one.report()["window_bytes"]) for one in windows)
        return len(found), taken, sum(one.held_bytes for one in found)

    def barrier(self) -> None:
        self.expect_usable()
        self.world.barrier("buffer barrier")

    def destroy(self) -> None:
        """Closes everything. Collective; again is no error. Calls whose events were not waited for are received.

        Raises what ended a communicator before, once all are closed.
        """
        if self.is_destroyed:
            return
        self.deferred.settle()
        self.is_destroyed = True
        opened = [*self._captured, *self._opened.values()]
        if self._counts is not None:
            opened.append(self._counts)
        self._captured, self._opened, self._counts, self.current = [], {}, None, None
        self._last_hook = None
        for one in opened:
            one.last_rows = None
        with contextlib.ExitStack() as closing:
            # The last callback runs first: all ranks close in the order in which they opened.
            for each in reversed(opened):
                closing.callback(each.communicator.close)
            if self._beside:
                closing.callback(self._end_beside)
