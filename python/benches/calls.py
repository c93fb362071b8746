"""The cost of a call from Python, with nothing to move: host time of dispatch and combine on one rank.

It holds the work of core as well, so it is the most that Python can add to a call from Rust.

    python python/benches/calls.py [--json]
"""

import argparse
import json
import platform
import sys
import time

import numpy as np

import tokenyard

CALLS = 20_000
# The limit for the median of each call, which is an upper bound of what Python adds to a call from Rust.
MOST_US = 30.0

CONFIG = """
[kernels]
use = "cpu"
[kernels.cpu]
threads = 1
arena_mib = 4
[transport.scale_up]
use = "shm"
"""


def measure(comm: tokenyard.Communicator) -> dict[str, dict[str, float]]:
    """Medians and minima of each call, in microseconds."""
    ids = np.array([[0, 1]], np.int64)
    weights = np.ones((1, 2), np.float32)
    x = np.zeros((1, 8), np.float32)
    out = np.zeros((1, 8), np.float32)
    taken = np.zeros((CALLS, 2))
    for call in range(CALLS):
        begin = time.perf_counter()
        received, handle = comm.dispatch(x, ids, weights)
        between = time.perf_counter()
        comm.combine(handle, received.x, out=out)
        taken[call] = between - begin, time.perf_counter() - between
    taken *= 1e6
    return {
        name: {"median_us": float(np.median(column)), "min_us": float(column.min())}
        for name, column in zip(("dispatch", "combine"), taken.T, strict=True)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    arguments = parser.parse_args()
    config = tokenyard.Config.parse(CONFIG, "calls.toml")
    with (
        tokenyard.World(0, 1, exchange=lambda mine: [mine], config=config) as world,
        tokenyard.Communicator(world, config, experts=2, topk=2, hidden=8, max_tokens=1) as comm,
    ):
        times = measure(comm)
    conditions = {"python": platform.python_version(), "machine": platform.machine()}
    if arguments.json:
        print(json.dumps({"command": "calls", "calls": CALLS, **conditions, **times}))
    else:
        print(f"{CALLS} calls, one rank, one token, Python {conditions['python']}")
        for name, found in times.items():
            print(f"{name:9} median {found['median_us']:6.1f} us, least {found['min_us']:6.1f} us")
    return 0 if all(found["median_us"] <= MOST_US for found in times.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
