"""`deep_ep.utils` on tensors of torch: numbers are made where the tensors lie, and are those of the host."""

import contextlib
import time
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from gpu_common import device_of, is_gpu, prepare, same, synchronize

from tokenyard.deep_ep import _arrays
from tokenyard.deep_ep.utils import gate, math, refs

# DeepEP's own sizes on GPUs.
TOKENS, HIDDEN, EXPERTS, TOPK = (4096, 7168, 256, 8) if is_gpu() else (64, 256, 16, 4)


def calls_of_utils(device):
    """Every public function of math, refs and gate, with arguments on a device. Their values are drawn on the host."""
    draw = torch.Generator().manual_seed(3)
    x, ids = torch.randn(6, 256, generator=draw), torch.randint(-1, 8, (6, 3), generator=draw)
    weights = torch.rand(6, 3, generator=draw)
    y = torch.randn(6, 3, 256, generator=draw).bfloat16()
    scores, groups = torch.rand(6, 8, generator=draw), torch.tensor([[0, 1]] * 6)
    token, exponents = torch.arange(6), torch.full((6, 1), 0x7F7F, dtype=torch.int32)
    # Of the host, too: a GPU divides by a constant in another way, so its scales differ in the last bit.
    cast = math.per_token_cast_to_fp8(x)
    tensors = (x, ids, weights, y, scores, groups, token, exponents, *cast)
    x, ids, weights, y, scores, groups, token, exponents, *cast = (
        one.to(device) for one in tensors
    )
    cast = tuple(cast)
    return {
        math.ceil_div: [(7, 2)],
        math.align: [(7, 2)],
        math.safe_div: [(7, 2)],
        math.calc_diff: [(x, x)],
        math.per_token_cast_to_fp8: [(x,), (y[:, 0],)],
        math.per_token_cast_back: [cast, (cast[0], exponents)],
        math.inplace_unique: [(ids.clone(), 8)],
        math.create_grouped_scores: [(scores, groups, 4)],
        math.hash_tensor: [(x,), (y,), cast[:1]],
        math.hash_tensors: [(x, (y, cast))],
        math.count_bytes: [(x, (y, cast))],
        refs.dispatch: [(x, ids, weights, 6, 8), (cast, ids, weights, 6, 8)],
        refs.arrivals: [([[*cast, ids, weights]], 0, 6, 8)],
        refs.generate_pre_combine_data: [(token, 6, 3, 256)],
        refs.ordered_accumulate: [(y,), (y, y[:, 0])],
        refs.combine: [(y, ids, 1, 1, 8, (y[:, 0], None), True, True)],
        gate.get_unbalanced_scores: [(50, 8, 4, 3, 1.5, True), (50, 8, 4, 3, 1.5, False)],
    }


def refuse_the_host(replace):
    """`replace(owner, name, value)` lets every way of a tensor to an array of the host raise."""

    def refuse(*arguments):
        raise AssertionError("a tensor of torch became an array of numpy")

    replace(_arrays, "to_numpy", refuse)
    for name in ("numpy", "cpu", "__array__"):
        replace(torch.Tensor, name, refuse)


def tensors_of(value):
    """The tensors of a result: of one, of a tuple or a list, also of a tuple in it."""
    if isinstance(value, torch.Tensor):
        return [value]
    assert not isinstance(value, np.ndarray)
    parts = value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def results(device):
    """The result of every call, by name, and the argument that a call has written to."""
    found = {}
    for function, of_each in calls_of_utils(device).items():
        for number, arguments in enumerate(of_each):
            # The gate draws on torch's default device. Others look at their tensors.
            is_gate = function.__module__ == gate.__name__
            with torch.device(device) if is_gate else contextlib.nullcontext():
                given = function(*arguments)
            written = arguments[0] if function is math.inplace_unique else None
            found[f"{function.__name__} {number}"] = (given, written)
    return found


def check_same(found, expected, device):
    """Numbers and tensors of the device are those of the host; scores are random, and have their size alone."""
    for name, value in found.items():
        shown = tensors_of(value)
        assert all(one.device.type == device.type for one in shown), name
        if name.startswith("get_unbalanced_scores"):
            assert shown[0].shape == (50, 8)
            continue
        for one, other in zip(shown, tensors_of(expected[name]), strict=True):
            if not one.dtype.is_floating_point:
                same(one.cpu(), other)
                continue
            assert (one.dtype, one.shape) == (other.dtype, other.shape), name
            # Two units in the last place.
            near = 2 * torch.finfo(one.dtype).eps
            torch.testing.assert_close(
                one.cpu().float(), other.float(), rtol=near, atol=near, msg=name
            )
        if not shown:
            assert value == expected[name], name


def seconds(call):
    synchronize()
    start = time.monotonic()
    given = call()
    synchronize()
    return given, time.monotonic() - start


def times(device):
    """Seconds of references at the sizes of DeepEP's tests, of one rank."""
    x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
    with torch.device(device):
        sizes = (TOKENS, EXPERTS, 2, TOPK)
        scores, of_gate = seconds(lambda: gate.get_unbalanced_scores(*sizes, 1.5, True))
    ids = scores.topk(TOPK).indices
    weights = torch.rand(TOKENS, TOPK, device=device)
    cast, of_cast = seconds(lambda: math.per_token_cast_to_fp8(x))
    rows, of_dispatch = seconds(lambda: refs.dispatch(cast, ids, weights, TOKENS, EXPERTS))
    _, of_hash = seconds(lambda: math.hash_tensors(rows))
    token = torch.arange(TOKENS, device=device)
    y, of_data = seconds(lambda: refs.generate_pre_combine_data(token, TOKENS, TOPK, HIDDEN))
    _, of_combine = seconds(lambda: refs.combine(y, ids, 1, 2, EXPERTS, None, True, True))
    return (
        f"{TOKENS} x {HIDDEN}: gate {of_gate:.3f} s, cast {of_cast:.3f}, dispatch {of_dispatch:.3f}, "
        f"hash {of_hash:.3f}, data {of_data:.3f}, combine {of_combine:.3f}"
    )


def utils(world):
    """Every function of math, refs and gate, in a group of this rank alone; then some at DeepEP's sizes."""
    prepare(world)
    device = device_of(world)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        expected = results("cpu")
        with contextlib.ExitStack() as stack:
            refuse_the_host(lambda *one: stack.enter_context(mock.patch.object(*one)))
            found = results(device)
        check_same(found, expected, device)
        return times(device)
    finally:
        dist.destroy_process_group()


CHECKS = [utils]
