"""Time that calls take. On the CPU a call has ended when it returns, so the host's clock says it."""

import time
from collections.abc import Callable
from typing import Any


def bench(
    fn: Callable[[], Any],
    num_warmups: int = 30,
    num_tests: int = 30,
    post_fn: Callable[[], Any] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Seconds of a call on this rank, by the host's clock: mean, least, most. `flush_l2` does nothing."""
    for _ in range(num_warmups):
        fn()
    times = []
    for _ in range(num_tests):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
        if post_fn is not None:
            post_fn()
    return sum(times) / len(times), min(times), max(times)


def bench_kineto(
    fn: Callable[[], Any],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], Any] | None = None,
) -> Any:
    """Calls `fn` once and prints that there is no such kernel. The CPU backend has none, so there is no figure.

    Returns None for each name, or a list of them per period: whoever computes with it raises, and prints no figure that
    was not measured.
    """
    fn()
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    for name in names:
        print(f"{name}: no such kernel: tokenyard runs on the CPU backend", flush=True)
    one = None if num_kernels_per_period == 1 else [None] * num_kernels_per_period
    return one if isinstance(kernel_names, str) else [one] * len(names)
