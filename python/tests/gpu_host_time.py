"""The host's time of calls in parts: of the drop-in and torch, of the package, of the driver. Figures, no limits."""

import contextlib
import time

import torch
from gpu_common import CASE, inputs, is_gpu, layout_of, synchronize, v1, v2

from tokenyard._native import _driver_times


class Watched:
    """A communicator, and the nanoseconds that its calls took, with those of operations between their halves."""

    def __init__(self, inner, whole=None):
        self._inner, self._whole, self.ns = inner, whole or self, 0

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args, **keywords):
            start = time.perf_counter_ns()
            try:
                result = found(*args, **keywords)
            finally:
                self._whole.ns += time.perf_counter_ns() - start
            return Watched(result, self._whole) if name.endswith("_send") else result

        # To make it anew would be counted as time of the drop-in.
        setattr(self, name, call)
        return call


def watch(buffer):
    """Watches the communicators that the buffer has."""
    for opened in buffer._pool._opened.values():
        if not isinstance(opened.communicator, Watched):
            opened.communicator = Watched(opened.communicator)
    return [opened.communicator for opened in buffer._pool._opened.values()]


class Spent:
    """The parts of the time of a call, sample by sample, in microseconds."""

    def __init__(self):
        self.all, self.inside, self.driver = [], [], []
        self.kinds = {}

    def measure(self, call, watched):
        before = sum(comm.ns for comm in watched)
        _driver_times(True)
        start = time.perf_counter_ns()
        call()
        self.all.append((time.perf_counter_ns() - start) / 1e3)
        times = _driver_times(False)
        self.inside.append((sum(comm.ns for comm in watched) - before) / 1e3)
        self.driver.append(sum(ns for _, _, ns in times) / 1e3)
        for kind, calls, ns in times:
            self.kinds.setdefault(kind, []).append((calls, ns / 1e3))

    def __str__(self):
        beside = median([a - b for a, b in zip(self.all, self.inside, strict=True)])
        package = median([a - b for a, b in zip(self.inside, self.driver, strict=True)])
        text = f"{median(self.all):.1f} us: drop-in and torch {beside:.1f}, package {package:.1f}"
        text += f", driver {median(self.driver):.1f}"
        kinds = [
            f"{kind} {sum(calls for calls, _ in found) / len(self.all):.1f} x "
            f"{sum(us for _, us in found) / max(1, sum(calls for calls, _ in found)):.1f}"
            for kind, found in self.kinds.items()
        ]
        return f"{text} ({', '.join(kinds)})" if kinds else text


def median(values):
    return sorted(values)[len(values) // 2]


def on_streams():
    """The current stream of torch, which is CUDA's default one, and another."""
    yield "default stream", contextlib.nullcontext()
    if is_gpu():
        yield "another stream", torch.cuda.stream(torch.cuda.Stream())


def calls_of(buffer, x, idx, weights):
    """The calls of the drop-in, by name; each may use what those before it have left."""
    out, state = torch.empty_like(x), {}
    options = layout_of(buffer, idx, CASE.experts)

    def dispatch():
        state["result"] = buffer.low_latency_dispatch(
            x, idx, CASE.max_tokens, CASE.experts, use_fp8=False
        )

    def cast():
        state["cast"] = buffer.low_latency_dispatch(x, idx, CASE.max_tokens, CASE.experts)

    def hooked():
        state["hooked"] = buffer.low_latency_dispatch(
            x, idx, CASE.max_tokens, CASE.experts, return_recv_hook=True
        )
        state["hooked"][4]()

    def combine(has_hook=False):
        rows, _, handle, _, _ = state["result"]
        _, _, hook = buffer.low_latency_combine(
            rows, idx, weights, handle, out=out, return_recv_hook=has_hook
        )
        if has_hook:
            hook()

    def normal():
        state["normal"] = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **options)

    def cached():
        buffer.dispatch(x, handle=state["normal"][4])

    def back():
        recv_x, _, _, _, handle, _ = state["normal"]
        buffer.combine(recv_x, handle)

    return {
        "low latency dispatch": dispatch,
        "low latency dispatch to FP8": cast,
        "low latency dispatch to FP8 and its hook": hooked,
        "low latency combine": combine,
        "low latency combine and its hook": lambda: combine(True),
        "normal dispatch (waits)": normal,
        "cached dispatch (waits)": cached,
        "combine (waits)": back,
        "layout": lambda: layout_of(buffer, idx, CASE.experts),
    }


def native_calls(buffer, x, idx):
    """The package's own calls, and one of torch, for comparison."""
    watch(buffer)
    opened = next(one for one in buffer._pool._opened.values() if one.sizes.decodes)
    comm, state, out = opened.communicator, {}, torch.empty_like(x)
    options = {}
    if is_gpu():
        options = {"stream": torch.cuda.current_stream().cuda_stream, "without_sync": True}

    def dispatch():
        state["result"] = comm.dispatch(x, idx, layout="packed", worst_case=is_gpu(), **options)

    def combine():
        received, handle = state["result"]
        comm.combine(handle, received.x, out=out, **options)

    return {
        "the package's dispatch": dispatch,
        "the package's combine": combine,
        "torch.add": lambda: torch.add(x, 1, out=out),
    }


def native_flat(buffer, x, idx, weights):
    """The package's own flat dispatch, whose counts the host waits for, and its combine."""
    comm, state, out = buffer._pool.current.communicator, {}, torch.empty_like(x)
    options = {"stream": torch.cuda.current_stream().cuda_stream} if is_gpu() else {}

    def dispatch():
        state["result"] = comm.dispatch(x, idx, weights, **options)

    def combine():
        received, handle = state["result"]
        comm.combine(handle, received.x, out=out, **options)

    return dispatch, combine


def elastic_calls(buffer, x, idx, weights):
    """The calls of V2, by name: flat and expanded, each with a cached one and its combine."""
    calls = {}
    for has_sync in (True, False):
        for is_expanded in (False, True):
            name = f"{'expanded' if is_expanded else 'flat'}{' (waits)' if has_sync else ''}"
            state, how = {}, {"do_cpu_sync": has_sync, "do_expand": is_expanded}

            def dispatch(state=state, how=how):
                state["result"] = buffer.dispatch(
                    x, topk_idx=idx, topk_weights=weights, num_experts=CASE.experts, **how
                )

            def cached(state=state, how=how):
                buffer.dispatch(x, handle=state["result"][3], do_expand=how["do_expand"])

            def combine(state=state):
                rows, _, _, handle, _ = state["result"]
                buffer.combine(rows, handle)

            calls |= {f"{name}, dispatch": dispatch, f"{name}, cached dispatch": cached}
            calls |= {f"{name}, combine": combine}
    return calls


def times_of_elastic(world, buffer, tensors, name):
    samples = 300 if is_gpu() else 10
    calls = elastic_calls(buffer, *tensors)
    for call in list(calls.values()) * 3:
        call()
    return measured(world, calls, buffer, samples, name)


def on_each_stream(world, measure, make=lambda world: v1(world, low_latency_mode=True)):
    """The lines of `measure(world, buffer, tensors, name)` on each stream, by its name."""
    buffer = make(world)
    tensors = inputs(world, CASE)
    lines = []
    for name, stream in on_streams():
        with stream:
            lines += measure(world, buffer, tensors, name)
    buffer.destroy()
    return "\n       ".join(lines)


def times_of_each_call(world, buffer, tensors, name):
    samples = 300 if is_gpu() else 20
    calls = calls_of(buffer, *tensors)
    for call in list(calls.values()) * 3:
        call()
    calls |= native_calls(buffer, *tensors[:2])
    return measured(world, calls, buffer, samples, name)


def measured(world, calls, buffer, samples, name):
    spent = {called: Spent() for called in calls}
    for _ in range(samples):
        for called, call in calls.items():
            synchronize()
            # Ranks come at one time.
            world.barrier("measure")
            spent[called].measure(call, watch(buffer))
    return [f"{name}: {called} {times}" for called, times in spent.items()]


def times_of_steps(world, buffer, tensors, name):
    steps = 600 if is_gpu() else 60
    calls = calls_of(buffer, *tensors)
    dispatch, combine = calls["low latency dispatch"], calls["low latency combine"]
    # First calls open communicators.
    dispatch()
    calls["normal dispatch (waits)"]()
    native = native_calls(buffer, *tensors[:2])
    of_package = native["the package's dispatch"], native["the package's combine"]
    pairs = {"torch.add twice": (native["torch.add"],) * 2}
    pairs |= {"package": of_package, "drop-in": (dispatch, combine)}
    # Their own time is what lies beside the package's calls, which wait for the device.
    waiting = [
        calls[f"{what} (waits)"] for what in ("normal dispatch", "cached dispatch", "combine")
    ]
    pairs["package, flat"] = native_flat(buffer, *tensors)
    pairs |= {"normal": (waiting[0], waiting[2]), "cached": (waiting[1], waiting[2])}
    lines = []
    for what, pair in pairs.items():
        lines += in_a_row(world, f"{name}, {what}", pair, watch(buffer), steps)
    return lines


def times_of_elastic_steps(world, buffer, tensors, name):
    steps = 600 if is_gpu() else 60
    calls = elastic_calls(buffer, *tensors)
    for call in calls.values():
        call()
    lines = []
    for what in ("flat", "expanded", "flat (waits)", "expanded (waits)"):
        combine = calls[f"{what}, combine"]
        for kind in ("dispatch", "cached dispatch"):
            pair = (calls[f"{what}, {kind}"], combine)
            lines += in_a_row(world, f"{name}, {what}, {kind}", pair, watch(buffer), steps)
    return lines


def of_each_call(world):
    """Each call behind a wait for the device."""
    return on_each_stream(world, times_of_each_call)


def of_each_call_of_v2(world):
    """As `of_each_call`."""
    return on_each_stream(world, times_of_elastic, lambda world: v2(world, CASE))


def of_steps_in_a_row(world):
    """A dispatch and a combine, many times in a row: whether calls become slower, and where."""
    return on_each_stream(world, times_of_steps)


def of_steps_of_v2_in_a_row(world):
    """As `of_steps_in_a_row`."""
    return on_each_stream(world, times_of_elastic_steps, lambda world: v2(world, CASE))


def in_a_row(world, name, pair, watched, steps):
    # First calls load kernels and allocate.
    for call in pair * 20:
        call()
    synchronize()
    world.barrier("measure")
    begun = time.perf_counter()
    thirds = []
    for _ in range(3):
        spent = [Spent(), Spent()]
        for _ in range(steps // 3):
            for one, call in zip(spent, pair, strict=True):
                one.measure(call, watched)
        thirds.append(spent)
    queued = time.perf_counter() - begun
    synchronize()
    taken = time.perf_counter() - begun
    medians = [" + ".join(f"{median(one.all):.1f}" for one in spent) for spent in thirds]
    lines = [
        f"{name}: a step {1e6 * queued / steps:.1f} us of the host, {1e6 * taken / steps:.1f} us with the device; "
        f"medians by thirds {', '.join(medians)} us"
    ]
    lines += [
        f"  {which} of the last third {one}"
        for which, one in zip(("first", "second"), thirds[-1], strict=True)
    ]
    return lines


CHECKS = [of_each_call, of_each_call_of_v2, of_steps_in_a_row, of_steps_of_v2_in_a_row]
# On a shared GPU a call waits for the turn of its rank.
NEED_ONE_EACH = set(CHECKS)
