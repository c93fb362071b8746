"""The world of a group of ranks, and the config: one world per group and process, however many buffers use it."""

import contextlib
import json
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import tokenyard
from tokenyard import errors

from ._arrays import invalid
from ._torch import torch

CONFIG_VARIABLE = "TOKENYARD_CONFIG"
OUTPUT_VARIABLE = "TOKENYARD_OUTPUT"
OUTPUTS = ("auto", "arena", "copy")


@dataclass(frozen=True)
class Waits:
    """How long a buffer waits for the rows of a rank that has called, and for a rank to call. Seconds."""

    deadline: int
    late: int
    # The fault of an argument of the buffer, if one has some: ranks say so where they meet.
    wrong: str | None = None


# DeepEP waits 100 s for a peer's rows, and ranks may be late by half an hour (compilation, checkpoints).
DEFAULT_WAITS = Waits(deadline=100, late=1800)


# Kinds that open in the order of all ranks.
Parkable: TypeAlias = (
    tokenyard.Communicator
    | tokenyard.Pipe
    | tokenyard.Gather
    | tokenyard.Table
    | tokenyard.Replicas
)


class Openings:
    """The communicators, and the operations beside them, of one world, which all ranks open in the same order."""

    def __init__(self) -> None:
        self.count = 0
        # Communicators without users here, by their place in that order.
        self.parked: dict[int, Parkable] = {}

    def park(self, number: int, communicator: Parkable) -> None:
        if not communicator.closed:
            self.parked[number] = communicator


_openings: "weakref.WeakKeyDictionary[tokenyard.World, Openings]" = weakref.WeakKeyDictionary()


def park_after(owner: object, world: tokenyard.World, communicator: Parkable) -> Any:
    """Parks a communicator behind its owner. Ranks collect garbage at different times, so it is not closed then.

    Returns what would park it.
    """
    openings = _openings.setdefault(world, Openings())
    openings.count += 1
    parking = weakref.finalize(owner, openings.park, openings.count, communicator)
    parking.atexit = False
    return parking


class Held:
    """An operation beside communicators that was opened. Behind its buffer it is parked."""

    def __init__(self, world: tokenyard.World, opened: Any) -> None:
        self.opened = opened
        self._parking = park_after(self, world, opened)

    def drop(self) -> None:
        """Drops it, where no rank calls it any more."""
        self._parking.detach()
        del self.opened


def gather_json(world: tokenyard.World, topic: str, mine: Any) -> dict[int, Any]:
    """The values that ranks give, by rank; a lost rank has no item. Collective."""
    # Numbers of callers may be those of numpy.
    gathered = world.all_gather(topic, json.dumps(mine, default=int).encode())
    return {rank: json.loads(part) for rank, part in enumerate(gathered) if part}


def largest(world: tokenyard.World, topic: str, mine: dict[str, int]) -> dict[str, int]:
    """The largest of each number that ranks give. Collective."""
    views = gather_json(world, topic, mine).values()
    return {name: max(view[name] for view in views) for name in mine}


def drop_parked(world: tokenyard.World) -> None:
    """Drops the communicators that no rank uses any more. Collective."""
    parked = _openings.setdefault(world, Openings()).parked
    mine = sorted(parked)
    for number in mine:
        one = parked[number]
        # Others may still wait for what it sends. Messages of a pipe may have no receiver.
        if isinstance(one, tokenyard.Communicator):
            with contextlib.suppress(tokenyard.Error):
                one.flush()
    everywhere = set(mine)
    for theirs in gather_json(world, "parked communicators", mine).values():
        everywhere.intersection_update(theirs)
    for number in everywhere:
        del parked[number]


# A group is held as long as its world: its id would name another one otherwise.
_worlds: dict[int, tuple[object, tokenyard.World]] = {}


def has_own_config() -> bool:
    """Whether the environment names a config."""
    return bool(os.environ.get(CONFIG_VARIABLE))


def chosen_gpu() -> int | None:
    """torch's current GPU, which a config without `device` means. None without one, and where torch uses none yet and
    the config may not either."""
    if not torch.cuda.is_available():
        return None
    if has_own_config() and not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.current_device())


def is_capturing() -> bool:
    """Whether the current stream of torch captures a graph. Without a context of CUDA, none does."""
    return torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())


def expect_no_capture() -> None:
    """Refuses to make a buffer while a graph is captured: ranks meet then, and memory and kernels are loaded, which
    would end the capture with an error of the driver."""
    if is_capturing():
        raise invalid(
            "make buffer",
            "make buffer: found a capture of a graph on the current stream; expected a buffer that was made before "
            "the capture",
            fix="warm up: make the buffer, and the calls of the capture once, without a capture",
        )


@contextlib.contextmanager
def on_gpu(gpu: int | None) -> Iterator[None]:
    """Inside, it is the current GPU of this thread: for torch, and for the driver, which the kernel set asks."""
    if gpu is None:
        yield
        return
    with torch.cuda.device(gpu):
        # torch passes its choice on to the driver where it has to: a thread's first call may not have been one.
        torch.cuda.mem_get_info(gpu)
        yield


def load_config(waits: Waits, decodes: bool = False) -> tokenyard.Config:
    """The config of the environment, which says itself how long to wait; or the one of GPUs where torch has some.

    `decodes`: for calls of few tokens. A config of the environment is the same for all calls.
    """
    path = os.environ.get(CONFIG_VARIABLE)
    if path:
        return tokenyard.Config.load(path)
    has_gpu = torch.cuda.is_available()
    return _built_in(
        "nvlink" if has_gpu else "cpu",
        waits,
        decode="low_latency" if has_gpu and decodes else "direct",
    )


def _built_in(name: str, waits: Waits, **options: Any) -> tokenyard.Config:
    # Ranks may be late by what DeepEP's hosts may, at least.
    late = max(DEFAULT_WAITS.late, waits.late)
    return tokenyard.Config.built_in(
        name, deadline_ms=1000 * waits.deadline, late_ms=1000 * late, **options
    )


def settings(waits: Waits) -> tuple[tokenyard.Config, str, errors.Error | None]:
    """The config, and `TOKENYARD_OUTPUT`: whether outputs lie in the arena, or in memory of torch. Where one is wrong,
    what is, and settings to meet the other ranks with."""
    config, wrong = _built_in("cpu", DEFAULT_WAITS), None
    try:
        if waits.wrong is not None:
            raise invalid("make buffer", waits.wrong)
        config = load_config(waits)
    except errors.Error as error:
        wrong = error
    mode = os.environ.get(OUTPUT_VARIABLE, OUTPUTS[0])
    if mode not in OUTPUTS:
        text = f"{OUTPUT_VARIABLE}: found {mode!r}; expected auto, arena or copy"
        wrong = wrong or errors.ConfigError(text, kind="config", operation="read environment")
    return config, mode, wrong


def expect_settings(world: tokenyard.World, wrong: errors.Error | None) -> None:
    """Raises what is wrong with the settings of this rank, or that those of another are. Collective."""
    views = gather_json(world, "settings of buffer", str(wrong) if wrong is not None else "")
    if wrong is not None:
        raise wrong
    for rank, text in views.items():
        if text:
            raise errors.RefusedError(
                f"rank {rank} cannot make a buffer: {text}",
                kind="refused",
                rank=rank,
                operation="make buffer",
            )


def world_of(group: Any, comm: Any, config: tokenyard.Config) -> tokenyard.World:
    """Joins the ranks of a group of torch, or of a communicator of mpi4py, or of the environment. Collective."""
    if isinstance(group, tokenyard.World):
        return group
    owner = group if group is not None else comm
    found = _worlds.get(id(owner))
    if found is not None:
        return found[1]
    if group is not None:
        world = tokenyard.World.from_torch(group, config=config)
    elif comm is not None:
        world = tokenyard.World.from_mpi(comm, config=config)
    else:
        world = tokenyard.World.from_env(config)
    _worlds[id(owner)] = (owner, world)
    return world
