"""`python -m tokenyard demo`: ranks of this machine exchange tokens through the CPU backend, and each checks its sums.

It needs the package alone: no Rust, no GPU, no launcher and no numpy.
"""

import array
import ctypes
import multiprocessing
import os
import queue
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import tokenyard

RANKS, EXPERTS, TOPK, HIDDEN, TOKENS, STEPS = 2, 8, 2, 256, 64, 20
# Seconds until a rank that has not answered counts as lost. The library itself reports a lost peer after 30 s.
PATIENCE = 60


class _Matrix:
    """Numbers of this process, as the package reads arrays."""

    def __init__(self, code: str, values: list[Any], columns: int) -> None:
        self._values = array.array(code, values)
        self.__array_interface__ = {
            "version": 3,
            "shape": (len(values) // columns, columns),
            "typestr": {"f": "<f4", "q": "<i8"}[code],
            "data": (self._values.buffer_info()[0], False),
        }


def _floats(rows: Any) -> Any:
    """The float32 elements of an array of the package, in its memory."""
    about = rows.__array_interface__
    count = 1
    for length in about["shape"]:
        count *= length
    return (ctypes.c_float * count).from_address(about["data"][0]) if count else []


def _experts(comm: tokenyard.Communicator, rank: int, received: Any, handle: Any) -> Any:
    """Expert e multiplies its rows by e + 1, so a row at the wrong expert gives a wrong sum."""
    answers = comm.combine_input(handle, "float32")
    x, y, start = _floats(received.x), _floats(answers), 0
    for local, rows in enumerate(comm.expert_counts(received)):
        factor = rank * (EXPERTS // RANKS) + local + 1
        end = start + rows * HIDDEN
        for at in range(start, end):
            y[at] = x[at] * factor
        start = end
    return answers


def _steps(rank: int) -> float:
    """The median time of a dispatch and its combine, in microseconds."""
    config = tokenyard.Config.built_in("cpu")
    sizes = {"experts": EXPERTS, "topk": TOPK, "hidden": HIDDEN, "max_tokens": TOKENS}
    chance, times = random.Random(rank), []
    with (
        tokenyard.World.from_env(config) as world,
        tokenyard.Communicator(world, config, **sizes) as comm,
    ):
        for _ in range(STEPS):
            x = [float(chance.randrange(-8, 9)) for _ in range(TOKENS * HIDDEN)]
            chosen = [chance.sample(range(EXPERTS), TOPK) for _ in range(TOKENS)]
            rows = _Matrix("f", x, HIDDEN)
            ids = _Matrix("q", [expert for token in chosen for expert in token], TOPK)
            weights = _Matrix("f", [0.5] * (TOKENS * TOPK), TOPK)
            start = time.perf_counter()
            received, handle = comm.dispatch(rows, ids, weights, layout="expert_major")
            between = time.perf_counter()
            answers = _experts(comm, rank, received, handle)
            again = time.perf_counter()
            out, _ = comm.combine(handle, answers, weighted=True)
            times.append(time.perf_counter() - again + between - start)
            for at, found in enumerate(_floats(out)):
                expected = x[at] * sum(0.5 * (expert + 1) for expert in chosen[at // HIDDEN])
                if found != expected:
                    raise ValueError(f"element {at}: found {found}, expected {expected}")
    return 1e6 * sorted(times)[STEPS // 2]


def _rank(rank: int, rendezvous: str, results: Any) -> None:
    os.environ["TOKENYARD_BOOTSTRAP"] = rendezvous
    os.environ["TOKENYARD_RANK"] = os.environ["TOKENYARD_LOCAL_RANK"] = str(rank)
    os.environ["TOKENYARD_RANKS"] = str(RANKS)
    try:
        results.put((rank, _steps(rank), None))
    except Exception as error:
        results.put((rank, 0.0, f"{type(error).__name__}: {error}"))


def main() -> int:
    """Runs the ranks; 0 if all sums are right."""
    print(
        f"{RANKS} ranks of this machine, {TOKENS} tokens each, float32 rows of {HIDDEN}, "
        f"top-{TOPK} of {EXPERTS} experts, {STEPS} steps"
    )
    # Not `fork`: a child would share the threads' locks of whatever runs here.
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        ranks = [
            context.Process(target=_rank, args=(rank, rendezvous, results), daemon=True)
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        for _ in ranks:
            try:
                rank, median, error = results.get(timeout=PATIENCE)
            except queue.Empty:
                print(f"a rank did not answer in {PATIENCE} s")
                return 1
            wrong += error is not None
            print(
                f"rank {rank}: {error or f'all sums are right; dispatch and combine {median:.0f} us'}"
            )
        for process in ranks:
            process.join()
    print("check: " + ("failed" if wrong else "passed"))
    return int(wrong > 0)
