"""Expert-parallel communication: dispatch and combine the tokens of Mixture-of-Experts models.

    import tokenyard

    config = tokenyard.Config.load("cpu.toml")
    with (
        tokenyard.World.from_env(config) as world,
        tokenyard.Communicator(
            world, config, experts=64, topk=8, hidden=4096, max_tokens=1024
        ) as communicator,
    ):
        received, handle = communicator.dispatch(x, topk_idx, topk_weights)
        y = experts(received)  # the caller's: [received.rows, hidden]
        out, _ = communicator.combine(handle, y)

To import this package needs no GPU, no CUDA and no other Python package. See docs/python.md of the repository.
"""

from pathlib import Path as _Path

from tokenyard._alias import alias_deep_ep
from tokenyard._native import (
    Array,
    Communicator,
    Config,
    Gather,
    Handle,
    PendingCombine,
    PendingDispatch,
    PendingFetch,
    PendingGather,
    PendingReduce,
    PendingReplay,
    Pipe,
    Received,
    Table,
    World,
    __version__,
    _set_plugin_folder,
    components,
    memory_needed,
    plan_replicas,
    routing_counts,
    survey,
)
from tokenyard._replicas import PendingReplicas, Replicas, physical_ids
from tokenyard.errors import Error

# Plugins of the wheel. One that was built from a checkout has none.
_PLUGINS = _Path(__file__).resolve().parent / "plugins"
if _PLUGINS.is_dir():
    _set_plugin_folder(_PLUGINS)

__all__ = [
    "Array",
    "Communicator",
    "Config",
    "Error",
    "Gather",
    "Handle",
    "PendingCombine",
    "PendingDispatch",
    "PendingFetch",
    "PendingGather",
    "PendingReduce",
    "PendingReplay",
    "PendingReplicas",
    "Pipe",
    "Received",
    "Replicas",
    "Table",
    "World",
    "__version__",
    "alias_deep_ep",
    "components",
    "memory_needed",
    "physical_ids",
    "plan_replicas",
    "routing_counts",
    "survey",
]
