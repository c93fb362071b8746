"""Time that calls and kernels take. On the CPU a call has ended when it returns, so the host's clock says it."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .._torch import torch


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
    has_gpu = torch.cuda.is_initialized()
    cache = (
        torch.empty(64 << 20, dtype=torch.int32, device="cuda") if has_gpu and flush_l2 else None
    )
    times = []
    for _ in range(num_tests):
        if cache is not None:
            cache.zero_()
        times.append(_on_device(fn) if has_gpu else _on_host(fn))
        if post_fn is not None:
            post_fn()
    return sum(times) / len(times), min(times), max(times)


def _on_host(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def _on_device(fn: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    fn()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


# Beginnings of the names of kernels that do the work of each of DeepEP's: first that of the one which each operation
# has, then those of others beside it. None notifies, and none reduces by itself.
_DISPATCH = ("ty_dispatch", "ty_group", "ty_spread")
_COMBINE = ("ty_combine", "ty_merge", "ty_return")
_KERNELS = {
    "dispatch": _DISPATCH,
    "dispatch_impl": _DISPATCH,
    "dispatch_copy_epilogue_impl": ("ty_copy_out",),
    "barrier": _DISPATCH,
    "combine": _COMBINE,
    "combine_impl": _COMBINE,
}
# The first round warms the profiler up. In the second a call more than asked for goes ahead, and does not count: ranks
# start their profilers at different times, and kernels wait for each other.
_ROUNDS = 2
# Cycles for which the GPU sleeps before a call, so that all ranks have queued it.
_SLEEP = 20_000_000


@dataclass(frozen=True)
class Kernel:
    """A run of a kernel on the GPU: its name, when it began, and how long it took."""

    name: str
    start: float
    seconds: float


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
    """Seconds that the kernels of an operation take on this rank's GPU, by the profiler of torch; `inf` where there are
    none.

    `kernel_names` are DeepEP's; the figure is that of all kernels of tokenyard that do their work, from the start of
    each, which may be ahead of the end of the one before. A call of `fn` may make several operations: the figure is
    their mean. With `num_kernels_per_period` it is a list: of each kernel in turn. With `barrier_comm_profiling` the
    ranks of torch's group meet before each call. Without a GPU `fn` is called once.
    """
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    fn()
    has_gpu = torch.cuda.is_initialized()
    kernels: list[Kernel] = []
    if has_gpu:

        def step() -> None:
            if flush_l2:
                torch.empty(64 << 20, dtype=torch.int32, device="cuda").zero_()
            if barrier_comm_profiling and torch.distributed.is_initialized():
                torch.distributed.barrier()
            if barrier_comm_profiling or barrier is not None:
                torch.cuda._sleep(_SLEEP)
            if barrier is not None:
                barrier()
            fn()

        kernels = _profiled(step, num_tests + 1, trace_path)
    figures = [_figure(kernels, name, num_tests, num_kernels_per_period) for name in names]
    for name, figure in zip(names, figures, strict=True):
        if not suppress_kineto_output and math.inf in (
            figure if isinstance(figure, list) else [figure]
        ):
            print(f"{name}: no such kernel", flush=True)
    return figures[0] if isinstance(kernel_names, str) else figures


def _profiled(step: Callable[[], Any], calls: int, trace_path: str | None) -> list[Kernel]:
    profiler = torch.profiler
    schedule = profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    activities = [profiler.ProfilerActivity.CUDA]
    with profiler.profile(activities=activities, schedule=schedule) as found:
        for _ in range(_ROUNDS):
            for _ in range(calls):
                step()
            torch.cuda.synchronize()
            found.step()
    if trace_path is not None:
        found.export_chrome_trace(trace_path)
    on_gpu = torch.autograd.DeviceType.CUDA
    return [
        Kernel(event.name, event.time_range.start, event.time_range.elapsed_us() / 1e6)
        for event in found.events()
        if event.device_type == on_gpu
    ]


def _figure(kernels: list[Kernel], name: str, num_tests: int, per_period: int) -> Any:
    """The time of an operation in the kernels of a name; of each in turn where a period has several."""
    beginnings = _KERNELS.get(name, (name,))
    its = sorted(
        (kernel for kernel in kernels if kernel.name.startswith(beginnings)),
        key=lambda kernel: kernel.start,
    )
    # The kernels of the first call do not count, where all calls have as many.
    ahead, rest = divmod(len(its), num_tests + 1)
    its = its[ahead if rest == 0 else 0 :]
    if per_period == 1:
        operations = sum(kernel.name.startswith(beginnings[0]) for kernel in its)
        return sum(kernel.seconds for kernel in its) / operations if operations else math.inf
    if not its or len(its) % per_period:
        return [math.inf] * per_period
    periods = len(its) // per_period
    return [sum(one.seconds for one in its[i::per_period]) / periods for i in range(per_period)]
