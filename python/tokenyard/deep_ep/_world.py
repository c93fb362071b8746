"""The world of a group of ranks, and the config: one world per group and process, however many buffers use it."""

import os
from typing import Any

import tokenyard

CONFIG_VARIABLE = "TOKENYARD_CONFIG"

# DeepEP waits 100 s for a peer's rows, and ranks may be late by half an hour (compilation, checkpoints).
DEFAULT_CONFIG = """
[world]
deadline_ms = 100000
late_ms = 1800000
[kernels]
use = "cpu"
[transport.scale_up]
use = "shm"
"""

# A group is kept as long as its world: its id would name another one otherwise.
_worlds: dict[int, tuple[object, tokenyard.World]] = {}


def load_config() -> tokenyard.Config:
    path = os.environ.get(CONFIG_VARIABLE)
    if path:
        return tokenyard.Config.load(path)
    return tokenyard.Config.parse(
        DEFAULT_CONFIG, f"the default config ({CONFIG_VARIABLE} names another)"
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
