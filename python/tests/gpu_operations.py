"""How many operations of torch, and calls of the package, each call of the drop-in makes: their host time is its own.

An operation of torch takes the host 8 to 11 us on the machines with GPUs. Tensors over outputs are no operations; they
are made by calls of the native module, as arguments are checked.
"""

import contextlib
import sys
from collections import Counter

import torch
from gpu_common import CASE, inputs, is_gpu, layout_of, v1, v2
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """The names of the operations that torch dispatches."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(str(operation).removeprefix("aten."))
        return operation(*args, **(kwargs or {}))


@contextlib.contextmanager
def native_calls():
    """The names of functions and methods of the native module that are called inside of it."""
    names = []

    def note(frame, event, function):
        owner = getattr(function, "__self__", None)
        modules = getattr(function, "__module__", None), type(owner).__module__
        if event == "c_call" and any(module in NATIVE for module in modules):
            names.append(function.__name__)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(before)


# Its classes name the package.
NATIVE = ("tokenyard", "tokenyard._native")


class Counting:
    """A communicator whose calls are counted."""

    def __init__(self, inner, calls):
        self._inner, self._calls = inner, calls

    def __getattr__(self, name):
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args, **keywords):
            self._calls[name] += 1
            return found(*args, **keywords)

        return call


@contextlib.contextmanager
def counted(buffer):
    """The operations of torch, the calls of communicators and those of the native module inside of it."""
    calls = Counter()
    opened = list(buffer._pool._opened.values())
    inner = [one.communicator for one in opened]
    for one in opened:
        one.communicator = Counting(one.communicator, calls)
    try:
        with Operations() as operations, native_calls() as native:
            yield operations.names, calls, native
    finally:
        for one, communicator in zip(opened, inner, strict=True):
            one.communicator = communicator


# Operations of torch, calls of communicators, and calls of the native module, which include those. In host memory,
# where a call needs no fewer than on GPUs.
EXPECTED = {
    "layout": (9, 1, 2) if is_gpu() else (9, 0, 1),
    "dispatch": (4, 2, 3),
    "dispatch, FP8": (5, 2, 9),
    "dispatch, num_worst_tokens": (4, 2, 3),
    "cached dispatch": (1, 2, 4),
    "combine": (1, 1, 3),
    "combine with weights": (2, 1, 4),
    "low latency dispatch": (0, 1, 2),
    "low latency dispatch to FP8": (0, 1, 2),
    "low latency dispatch, statistics": (1, 1, 3),
    "low latency combine": (0, 1, 6),
    "V2 dispatch": (5, 3, 6),
    "V2 dispatch, no CPU sync": (5, 2, 5),
    "V2 expanded dispatch": (4, 3, 6),
    "V2 expanded dispatch, FP8": (6, 3, 7),
    "V2 cached dispatch": (2, 2, 3),
    "V2 combine": (1, 1, 2),
    "V2 expanded combine": (1, 1, 2),
}


def calls_of_v1(buffer, x, idx, weights):
    state, out = {}, torch.empty_like(x)
    options = layout_of(buffer, idx, CASE.experts)
    options |= {"topk_idx": idx, "topk_weights": weights}
    scaled = x.to(torch.float8_e4m3fn), torch.ones((len(x), 4), device=x.device)
    stats = torch.zeros(CASE.local, dtype=torch.int32, device=x.device)
    of_model = CASE.max_tokens, CASE.experts

    def keep(name, call):
        def kept(*args, **keywords):
            state[name] = call(*args, **keywords)

        return kept

    low, normal = keep("low", buffer.low_latency_dispatch), keep("normal", buffer.dispatch)
    back = buffer.combine
    return {
        # On GPUs without a kernel of torch.
        "layout": lambda: buffer.get_dispatch_layout(idx, CASE.experts),
        "dispatch, FP8": lambda: buffer.dispatch(scaled, **options),
        "dispatch, num_worst_tokens": lambda: buffer.dispatch(x, num_worst_tokens=128, **options),
        "dispatch": lambda: normal(x, **options),
        "cached dispatch": lambda: buffer.dispatch(x, handle=state["normal"][4]),
        "combine": lambda: back(state["normal"][0], state["normal"][4]),
        "combine with weights": lambda: back(
            state["normal"][0], state["normal"][4], topk_weights=state["normal"][2]
        ),
        "low latency dispatch to FP8": lambda: buffer.low_latency_dispatch(x, idx, *of_model),
        "low latency dispatch, statistics": lambda: buffer.low_latency_dispatch(
            x, idx, *of_model, stats, use_fp8=False
        ),
        "low latency dispatch": lambda: low(x, idx, *of_model, use_fp8=False),
        "low latency combine": lambda: buffer.low_latency_combine(
            state["low"][0], idx, weights, state["low"][2], out=out
        ),
    }


def calls_of_v2(buffer, x, idx, weights):
    state = {}
    options = {"topk_idx": idx, "topk_weights": weights, "num_experts": CASE.experts, "num_sms": 8}

    def expanded():
        state["expanded"] = buffer.dispatch(x, do_expand=True, **options)

    scaled = x.to(torch.float8_e4m3fn), torch.ones((len(x), 4), device=x.device)
    columns = {"use_tma_aligned_col_major_sf": True, "do_expand": True}

    def flat():
        state["flat"] = buffer.dispatch(x, **options)

    return {
        "V2 expanded dispatch": expanded,
        "V2 expanded dispatch, FP8": lambda: buffer.dispatch(scaled, **options, **columns),
        "V2 expanded combine": lambda: buffer.combine(state["expanded"][0], state["expanded"][3]),
        "V2 dispatch, no CPU sync": lambda: buffer.dispatch(x, do_cpu_sync=False, **options),
        "V2 dispatch": flat,
        "V2 cached dispatch": lambda: buffer.dispatch(x, handle=state["flat"][3], num_sms=8),
        "V2 combine": lambda: buffer.combine(state["flat"][0], state["flat"][3]),
    }


def each_call_makes_no_more_operations(world):
    lines, wrong = [], []
    for make, calls_of in ((v1, calls_of_v1), (lambda w: v2(w, CASE), calls_of_v2)):
        buffer = make(world)
        calls = calls_of(buffer, *inputs(world, CASE))
        # First calls open communicators.
        for call in list(calls.values()) * 2:
            call()
        for name, call in calls.items():
            with counted(buffer) as (operations, of_package, native):
                call()
            found = len(operations), sum(of_package.values()), len(native)
            counts = [dict(Counter(names)) for names in (operations, of_package, native)]
            lines.append(f"{name}: {found}, {counts}")
            expected = EXPECTED[name]
            is_more = any(one > most for one, most in zip(found, expected, strict=True))
            # On GPUs some need fewer.
            if is_more or (not is_gpu() and found != expected):
                wrong.append(f"{lines[-1]}; expected {expected}")
        buffer.destroy()
    assert not wrong, "\n".join(wrong)
    return "\n       ".join(lines)


CHECKS = [each_call_makes_no_more_operations]
