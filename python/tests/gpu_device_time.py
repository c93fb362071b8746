"""The device's time of calls in graphs: the drop-in's, beside the package's for the same work. Figures, no limits."""

import math

import torch
from gpu_common import Skipped, device_of, inputs, layout_of, prepare, v1, v2
from gpu_native import time_in_graph
from oracle import Case

import tokenyard
from tokenyard.deep_ep.utils.testing import bench_kineto

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
    comm = next(one for one in buffer._engine._opened.values() if one.sizes.decodes).communicator

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
    comm, out = buffer._engine.current.communicator, torch.empty_like(x)

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
    comm, out = buffer._engine.current.communicator, torch.empty_like(x)
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


CHECKS = [of_decoding, of_prefill, of_elastic, few_tokens, by_profiler]
