"""The device's time of calls in graphs: the drop-in's, beside the package's for the same work. Figures, no limits."""

import functools
import math

import torch
from gpu_common import Skipped, device_of, inputs, layout_of, output_mode, prepare, v1, v2
from gpu_native import time_in_graph
from oracle import Case

import tokenyard
from tokenyard.deep_ep.utils.math import per_token_cast_to_fp8
from tokenyard.deep_ep.utils.testing import _profiled, bench_kineto

NEEDS_GPUS = True
DECODE = Case(2, experts=288, topk=8, hidden=7168, max_tokens=128, tokens=(128, 128), seed=11)
PREFILL = Case(2, experts=256, topk=8, hidden=7168, max_tokens=4096, tokens=(4096, 4096), seed=12)
# The form of the arrays that DeepEP gives.
FORM = {"scale_layout": "column_major", "source_index": "token"}


def line(what, of_drop_in, of_package):
    return f"{what}: drop-in {of_drop_in:.2f} us, package {of_package:.2f} us, ratio {of_drop_in / of_package:.3f}"


def options():
    """A call in the order of torch's current stream, which the host does not wait for."""
    return {"stream": torch.cuda.current_stream().cuda_stream, "without_sync": True}


def of_decoding(world):
    """Both low latency calls of 128 tokens, in graphs."""
    buffer = v1(world, low_latency_mode=True)
    x, idx, weights = inputs(world, DECODE)
    out, most = torch.empty_like(x), (DECODE.max_tokens, DECODE.experts)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, *most, use_fp8=False)
    comm = next(one for one in buffer._pool._opened.values() if one.sizes.decodes).communicator

    def dispatch():
        return comm.dispatch(
            x, idx, layout="packed", cast="fp8", worst_case=True, **FORM, **options()
        )

    plain, native = comm.dispatch(x, idx, layout="packed", worst_case=True, **FORM, **options())

    def combine():
        comm.combine(
            native,
            plain.x,
            weighted=True,
            topk_weights=weights,
            topk_idx=idx,
            round_once=True,
            out=out,
            **options(),
        )

    lines = [
        line(
            "dispatch to FP8",
            time_in_graph(lambda: buffer.low_latency_dispatch(x, idx, *most)),
            time_in_graph(dispatch),
        ),
        line(
            "combine, rounded once",
            time_in_graph(lambda: buffer.low_latency_combine(rows, idx, weights, handle, out=out)),
            time_in_graph(combine),
        ),
    ]
    buffer.destroy()
    return "\n       ".join(lines)


def of_prefill(world):
    """A normal dispatch of 4096 tokens without a wait of the host, its cached one, and its combine."""
    buffer = v1(world)
    x, idx, weights = inputs(world, PREFILL)
    routes = layout_of(buffer, idx, PREFILL.experts)
    routes |= {"topk_idx": idx, "topk_weights": weights}
    routes |= {"num_worst_tokens": PREFILL.ranks * PREFILL.max_tokens}
    rows, _, _, _, handle, _ = buffer.dispatch(x, **routes)
    comm, out = buffer._pool.current.communicator, torch.empty_like(x)

    received, native = comm.dispatch(x, idx, weights, worst_case=True, **options())

    def combine():
        comm.combine(native, received.x, out=out, **options())

    pairs = {
        "dispatch": (
            lambda: buffer.dispatch(x, **routes),
            lambda: comm.dispatch(x, idx, weights, worst_case=True, **options()),
        ),
        "cached dispatch": (
            lambda: buffer.dispatch(x, handle=handle),
            lambda: comm.replay(native, x, **options()),
        ),
        "combine": (lambda: buffer.combine(rows, handle), combine),
    }
    lines = [line(what, *map(time_in_graph, pair)) for what, pair in pairs.items()]
    rows = None
    buffer.destroy()
    return "\n       ".join(lines)


def of_elastic(world):
    """Calls of V2 without CPU sync: flat and expanded, dispatches and combines of 4096 tokens."""
    buffer = v2(world, PREFILL)
    lines = []
    for name, is_expanded in (("flat", False), ("expanded", True)):
        pairs = elastic_pairs(buffer, inputs(world, PREFILL), is_expanded)
        lines += [line(f"{name} {what}", *map(time_in_graph, of)) for what, of in pairs.items()]
        # They hold outputs, which the buffer's end would wait for.
        del pairs
    buffer.destroy()
    return "\n       ".join(lines)


def elastic_pairs(buffer, tensors, is_expanded):
    """Calls of the drop-in, and the package's for the same work."""
    x, idx, weights = tensors
    how = {"do_cpu_sync": False, "do_expand": is_expanded}
    routes = {"topk_idx": idx, "topk_weights": weights, "num_experts": PREFILL.experts}
    layout = {"layout": "expert_major" if is_expanded else "flat", "worst_case": True}
    layout["zero_padding"] = is_expanded
    rows, _, _, handle, _ = buffer.dispatch(x, **routes, **how)
    comm, out = buffer._pool.current.communicator, torch.empty_like(x)
    received, native = comm.dispatch(x, idx, weights, **layout, **options())
    return {
        "dispatch": (
            lambda: buffer.dispatch(x, **routes, **how),
            lambda: comm.dispatch(x, idx, weights, **layout, **options()),
        ),
        "cached dispatch": (
            lambda: buffer.dispatch(x, handle=handle, **how),
            lambda: comm.replay(native, x, **options()),
        ),
        "combine": (
            lambda: buffer.combine(rows, handle),
            lambda: comm.combine(native, received.x, out=out, **options()),
        ),
    }


DECODING = """
[kernels]
use = "cuda"
[kernels.cuda]
decode = "low_latency"
decode_sms = {sms}
[transport.scale_up]
use = "nvlink"
"""


def few_tokens(world):
    """Calls of few tokens where a rank may have 128: with the blocks of so many, and with 16."""
    prepare(world)
    x, idx, weights = inputs(world, DECODE)
    lines = []
    for sms in ('"auto"', 16):
        config = tokenyard.Config.parse(DECODING.format(sms=sms), "few tokens")
        sizes = {name: getattr(DECODE, name) for name in ("experts", "topk", "hidden")}
        with tokenyard.Communicator(world, config, max_tokens=DECODE.max_tokens, **sizes) as comm:
            for tokens in (1, 8, 32):
                lines.append(
                    f"decode_sms {sms}, {tokens}: {times_of(comm, x, idx, weights, tokens)}"
                )
    return "\n       ".join(lines)


def times_of(comm, x, idx, weights, tokens):
    x, idx, weights = x[:tokens], idx[:tokens], weights[:tokens]
    form = {"layout": "packed", "worst_case": True}
    received, handle = comm.dispatch(x, idx, weights, **form, **options())
    out = torch.empty_like(x)
    dispatch = time_in_graph(lambda: comm.dispatch(x, idx, weights, **form, **options()))
    combine = time_in_graph(
        lambda: comm.combine(handle, received.x, weighted=True, out=out, **options())
    )
    return f"dispatch {dispatch:.2f} us, combine {combine:.2f} us"


def time_of(call, calls=20):
    """Microseconds of a call among others in a row, by events: the host's part too, where the GPU waits for it."""
    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / calls


def of_outputs(world):
    """Dispatches of 4096 tokens whose counts the host waits for: outputs in memory of torch, and in the arena."""
    times = {}
    for mode in ("arena", "auto") * 2:
        with output_mode(mode):
            buffer, elastic = v1(world), v2(world, PREFILL)
        for name, call in eager_calls(buffer, elastic, inputs(world, PREFILL)):
            times.setdefault(name, []).append(time_of(call))
        call = None
        elastic.destroy()
        buffer.destroy()
    lines = []
    for name, found in times.items():
        left, copied = min(found[::2]), min(found[1::2])
        lines.append(f"{name}: default {copied:.0f} us, arena {left:.0f} us")
    return "\n       ".join(lines)


def eager_calls(buffer, elastic, tensors):
    x, idx, weights = tensors
    routes = {"topk_idx": idx, "topk_weights": weights}
    of_v1, of_v2 = {**routes, **layout_of(buffer, idx, PREFILL.experts)}, dict(routes)
    of_v2["num_experts"] = PREFILL.experts
    cast = per_token_cast_to_fp8(x)
    yield "V1, BF16", lambda: buffer.dispatch(x, **of_v1)
    yield "V1, FP8", lambda: buffer.dispatch(cast, **of_v1)
    handle = buffer.dispatch(x, **of_v1)[4]
    yield "V1, BF16, with a handle", lambda: buffer.dispatch(x, handle=handle)
    yield "V2, BF16, flat", lambda: elastic.dispatch(x, **of_v2)
    yield "V2, FP8, flat", lambda: elastic.dispatch(cast, **of_v2)
    yield "V2, BF16, expanded", lambda: elastic.dispatch(x, do_expand=True, **of_v2)
    yield "V2, FP8, expanded", lambda: elastic.dispatch(cast, do_expand=True, **of_v2)


def of_named_multiprocessors(world):
    """Calls with one multiprocessor, and with as many as they like: one alone is slower, by several times."""
    elastic, times = v2(world, PREFILL), {}
    x, idx, weights = inputs(world, PREFILL)
    routes = {"topk_idx": idx, "topk_weights": weights, "num_experts": PREFILL.experts}
    for is_expanded in (False, True):
        for sms in (0, 1):
            call = functools.partial(
                elastic.dispatch, x, **routes, do_expand=is_expanded, num_sms=sms
            )
            rows, _, _, handle, _ = call()
            back = functools.partial(elastic.combine, rows, handle, num_sms=sms)
            times[is_expanded, sms] = [time_of(call, 5), time_of(back, 5)]
            del rows, handle, back
    elastic.destroy()
    lines = []
    for (is_expanded, sms), found in times.items():
        dispatch, combine = found
        lines.append(
            f"expanded {is_expanded}, num_sms {sms}: dispatch {dispatch:.0f} us, combine {combine:.0f} us"
        )
        if sms == 1:
            many = times[is_expanded, 0]
            assert all(one > 2 * most for one, most in zip(found, many, strict=True)), times
    return "\n       ".join(lines)


def of_one_sum(world):
    """Combines of expanded rows: with multiple reduction, and with one sum in k order."""
    lines = []
    for is_multiple in (True, False):
        buffer = v2(world, PREFILL, allow_multiple_reduction=is_multiple)
        x, idx, _ = inputs(world, PREFILL)
        rows, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=idx, num_experts=PREFILL.experts, do_expand=True
        )
        took = time_of(lambda buffer=buffer, rows=rows, handle=handle: buffer.combine(rows, handle))
        lines.append(f"allow_multiple_reduction={is_multiple}: {took:.0f} us")
        del rows, handle
        buffer.destroy()
    return "\n       ".join(lines)


def barriers(world):
    """As DeepEP's script takes it: the figure is that of one barrier, whatever a call makes of them."""
    buffer = v2(world, DECODE)

    def loop():
        for _ in range(1000):
            buffer.barrier()

    found = bench_kineto(
        loop, "barrier", num_tests=3, suppress_kineto_output=True, barrier=buffer.barrier
    )
    if found == math.inf:
        return Skipped("the profiler sees no kernel")
    assert 1e-6 < found < 1e-3, found
    by_events = time_of(loop, 3) / 1000
    buffer.destroy()
    return f"a barrier: kernel {1e6 * found:.1f} us, in a row {by_events:.1f} us"


def one_kernel_for_each(world):
    """A profiler shows one kernel with `dispatch` in its name and one with `combine`, as DeepEP's scripts want it."""
    buffer, names = v1(world, low_latency_mode=True), {}
    x, idx, weights = inputs(world, DECODE)
    most = (DECODE.max_tokens, DECODE.experts)
    routes = {**layout_of(buffer, idx, DECODE.experts), "topk_idx": idx, "topk_weights": weights}

    def low_latency(has_hook, is_cast):
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, *most, use_fp8=is_cast, return_recv_hook=has_hook
        )
        if has_hook:
            hook()
        _, _, hook = buffer.low_latency_combine(
            torch.empty((rows[0] if is_cast else rows).shape, dtype=x.dtype, device=x.device),
            idx,
            weights,
            handle,
            return_recv_hook=has_hook,
        )
        if has_hook:
            hook()

    def normal():
        rows, _, _, _, handle, _ = buffer.dispatch(x, **routes)
        buffer.combine(rows, handle)

    elastic = v2(world, DECODE)

    def of_v2(is_expanded, has_sync):
        rows, _, _, handle, _ = elastic.dispatch(
            x, idx, weights, None, DECODE.experts, do_expand=is_expanded, do_cpu_sync=has_sync
        )
        elastic.combine(rows, handle)

    steps = {"normal": normal}
    for how in ((False, True), (False, False), (True, True), (True, False)):
        steps["V2, expanded {}, CPU sync {}".format(*how)] = functools.partial(of_v2, *how)
    for has_hook in (False, True):
        for is_cast in (False, True):
            steps[f"low latency, hook {has_hook}, FP8 {is_cast}"] = functools.partial(
                low_latency, has_hook, is_cast
            )
    for what, step in steps.items():
        step()
        torch.cuda.synchronize()
        names[what] = {kernel.name for kernel in _profiled(step, 3, None)}
        if not names[what]:
            return Skipped("the profiler sees no kernel")
        for word in ("dispatch", "combine"):
            assert sum(word in name for name in names[what]) == 1, (what, names[what])
    elastic.destroy()
    buffer.destroy()
    return None


def by_profiler(world):
    """The helper of DeepEP's scripts finds the kernels of a dispatch and of a combine by DeepEP's names."""
    prepare(world)
    one = torch.ones(8, device=device_of(world))
    if bench_kineto(lambda: one + 1, "void at::native", 2, suppress_kineto_output=True) == math.inf:
        return Skipped("the profiler sees no kernel of torch either")
    buffer = v1(world, low_latency_mode=True)
    x, idx, weights = inputs(world, DECODE)
    most = (DECODE.max_tokens, DECODE.experts)

    def step():
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, *most, use_fp8=False)
        buffer.low_latency_combine(rows, idx, weights, handle)

    found = bench_kineto(step, ("dispatch", "combine"), num_tests=10, suppress_kineto_output=True)
    # A kernel of these takes microseconds, and waits for the other rank.
    assert all(1e-6 < seconds < 1e-2 for seconds in found), found
    buffer.destroy()
    return "kernels by the profiler: " + ", ".join(f"{1e6 * seconds:.1f} us" for seconds in found)


CHECKS = [
    of_decoding,
    of_prefill,
    of_elastic,
    of_outputs,
    of_named_multiprocessors,
    of_one_sum,
    few_tokens,
    by_profiler,
    one_kernel_for_each,
    barriers,
]
NEED_ONE_EACH = set(CHECKS)
