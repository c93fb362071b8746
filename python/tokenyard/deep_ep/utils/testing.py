"""Time that calls take. On the CPU a call has ended when it returns, so the host's clock says it."""

import sys
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
    """Seconds of a call on this rank: mean, least, most. By events of CUDA where torch uses a GPU, whose second-level
    cache `flush_l2` empties before each call; else by the host's clock.
    """
    for _ in range(num_warmups):
        fn()
    torch: Any = sys.modules.get("torch")
    has_gpu = torch is not None and torch.cuda.is_initialized()
    cache = (
        torch.empty(64 << 20, dtype=torch.int32, device="cuda") if has_gpu and flush_l2 else None
    )
    times = []
    for _ in range(num_tests):
        if cache is not None:
            cache.zero_()
        times.append(_on_device(torch, fn) if has_gpu else _on_host(fn))
        if post_fn is not None:
            post_fn()
    return sum(times) / len(times), min(times), max(times)


def _on_host(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def _on_device(torch: Any, fn: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    fn()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


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
    """Calls `fn` once and prints that there is no such kernel: tokenyard's have other names. So there is no figure.

    Returns None for each name, or a list of them per period: whoever computes with it raises, and prints no figure that
    was not measured.
    """
    fn()
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    for name in names:
        print(f"{name}: no such kernel in tokenyard", flush=True)
    one = None if num_kernels_per_period == 1 else [None] * num_kernels_per_period
    return one if isinstance(kernel_names, str) else [one] * len(names)
