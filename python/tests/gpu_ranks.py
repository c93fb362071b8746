"""Checks on tensors of torch, on two ranks: each is named, and prints ok or FAILED.

    python gpu_ranks.py [NAME...]    on two GPUs each rank has one, on one they take turns; without GPUs in host memory

Checks of groups have four ranks, which share two GPUs or have one each. On one GPU no figure of the device is taken.
It needs torch and numpy; the exit code is 1 where a check failed.
"""

import gc
import sys
import time

import gpu_arguments
import gpu_beside
import gpu_captures
import gpu_compile
import gpu_device_time
import gpu_ep
import gpu_epilogue
import gpu_graphs
import gpu_groups
import gpu_growth
import gpu_host_time
import gpu_hybrid
import gpu_kill
import gpu_lifetimes
import gpu_low_latency
import gpu_masks
import gpu_native
import gpu_openings
import gpu_operations
import gpu_reports
import gpu_streams
import gpu_utils
import gpu_v1
import gpu_v1_more
import gpu_v2
import gpu_v2_more
import pool as pools
import torch
from gpu_common import Skipped, share_one_gpu

MODULES = [
    gpu_native,
    gpu_openings,
    gpu_arguments,
    gpu_operations,
    gpu_v1,
    gpu_v1_more,
    gpu_v2,
    gpu_v2_more,
    gpu_ep,
    gpu_hybrid,
    gpu_beside,
    gpu_low_latency,
    gpu_streams,
    gpu_lifetimes,
    gpu_epilogue,
    gpu_graphs,
    gpu_captures,
    gpu_compile,
    gpu_masks,
    gpu_growth,
    gpu_reports,
    gpu_utils,
    gpu_host_time,
    gpu_device_time,
]
KILL, LOST, GROUPS = "kill.", "lost.", "groups."
RANKS = 2
# Seconds for a check on GPUs. The first one compiles kernels.
LIMIT_S = 120


def names(on_host=False):
    """All checks, or those that need no GPU."""
    return [
        f"{module.__name__.removeprefix('gpu_')}.{check.__name__}"
        for module in MODULES
        for check in module.CHECKS
        if not on_host or not needs_gpus(module, check)
    ]


def needs_gpus(module, check):
    """Whether a check runs on GPUs alone: all of some modules, but those that are named there."""
    return getattr(module, "NEEDS_GPUS", False) and check not in getattr(module, "ON_HOST", ())


def find(name):
    """The check of a name."""
    group, _, function = name.partition(".")
    module = sys.modules[f"gpu_{group}"]
    return next(check for check in module.CHECKS if check.__name__ == function)


def run(world, name):
    # Errors hold the frames of earlier checks, with their graphs. torch ends a capture in which it frees a graph.
    gc.collect()
    check = find(name)
    if torch.cuda.device_count() == 1 and is_alone(check):
        return Skipped("it needs a GPU for each rank")
    return check(world)


def is_alone(check):
    """Whether the ranks of a check may not share a GPU."""
    return check in getattr(sys.modules[check.__module__], "NEED_ONE_EACH", ())


def grouped(shape):
    """The notes of a check that has ranks of its own."""
    pool = pools.Pool(gpu_groups.RANKS)
    try:
        port = pools.free_port()
        return [note for note in pool.run(gpu_groups.RANKS, gpu_groups.groups, port, shape) if note]
    finally:
        pool.close()


def main(wanted):
    gpus = torch.cuda.device_count()
    place = f"{gpus} GPUs: {torch.cuda.get_device_name(0)}" if gpus else "host memory, no GPU"
    print(f"{place}; torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    if gpus == 1:
        share_one_gpu()
    failed = []
    if gpus:
        # A check takes some seconds there. A graph whose operations have no order would wait for half an hour.
        pools.LIMIT_S = LIMIT_S
    pool = pools.Pool(RANKS)
    every = names(on_host=not gpus) + [GROUPS + shape for shape in gpu_groups.SHAPES]
    every += [KILL + phase for phase in gpu_kill.phases()]
    if gpus:
        every += [
            f"{LOST}{word}.{phase}" for word in gpu_masks.SIGNALS for phase in gpu_masks.PHASES
        ]
    for name in every:
        if wanted and not any(word in name for word in wanted):
            continue
        start = time.monotonic()
        try:
            if name.startswith(KILL):
                notes = [gpu_kill.killed(name.removeprefix(KILL))]
            elif name.startswith(LOST):
                notes = [gpu_masks.lost(*name.removeprefix(LOST).split("."))]
            elif name.startswith(GROUPS):
                notes = grouped(name.removeprefix(GROUPS))
            else:
                notes = [note for note in pool.run(RANKS, run, name) if note]
            is_skipped = any(isinstance(note, Skipped) for note in notes)
            word = "SKIPPED" if is_skipped else "ok"
            print(f"{word:<6} {name} ({time.monotonic() - start:.1f} s)", flush=True)
            for note in filter(None, notes[:1]):
                print(f"       {note}", flush=True)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failed.append(name)
            print(f"FAILED {name}\n{error or repr(error)}", flush=True)
            pool.close()
            pool = pools.Pool(RANKS)
    pool.close()
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "all ok", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
