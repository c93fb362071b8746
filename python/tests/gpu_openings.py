"""Errors that all ranks get, and behind which their buffers go on: shapes that cannot be, a GPU without memory for an
arena, and another M."""

import functools

import torch
from gpu_common import (
    CASE,
    SMALL,
    device_of,
    inputs,
    layout_of,
    raised,
    rows_of,
    same,
    synchronize,
    v1,
    v2,
)
from oracle import Case

from tokenyard import errors

NEEDS_GPUS = True
# More than its rows: 4096 of 14 KiB.
LARGE = Case(2, experts=32, topk=6, hidden=7168, max_tokens=4096, tokens=(4096, 4096), seed=11)
# Enough for what torch takes before the arena.
LEFT = 32 << 20
MANY = Case(2, seed=9, experts=36, topk=33, hidden=256, tokens=(5, 7))
# Of each: the case, the numbers that are other ones, and the message.
SHAPES = {
    "top-k 33": (MANY, {}, "found topk = 33; expected at most 32"),
    "top-k above E": (SMALL, {"topk": 9}, "found topk = 9; expected at most 8"),
    "hidden 6": (CASE, {"hidden": 6}, "found hidden = 6; expected rows of"),
    "M = 2^31 - 1": (CASE, {"max_tokens": 2**31 - 1}, "found max_tokens * ranks = 4294967294"),
    "M = 2^31": (CASE, {"max_tokens": 2**31}, "num_max_tokens_per_rank: found 2147483648"),
}


def right(world, buffer):
    """A dispatch that has its rows."""
    x, idx, weights = inputs(world, CASE)
    options = layout_of(buffer, idx, CASE.experts)
    rows, *_ = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **options)
    same(rows, rows_of(world, CASE, CASE.sources(world.rank)))


def of_shape(world, elastic, case, topk=None, hidden=None, max_tokens=64):
    """A dispatch of V2, which judges less before a communicator is opened."""
    x, idx, _ = inputs(world, case)
    more = idx.new_full((len(idx), (topk or case.topk) - case.topk), -1)
    return elastic.dispatch(
        x[:, :hidden].contiguous(),
        torch.cat([idx, more], dim=1),
        num_experts=case.experts,
        num_max_tokens_per_rank=max_tokens,
    )


def shapes_that_cannot_be(world):
    """The buffer, another one and a new one go on, whether or not a communicator was open before."""
    for is_first in (True, False):
        buffer, elastic = v1(world), v2(world, CASE)
        if not is_first:
            right(world, buffer)
            of_shape(world, elastic, CASE)
        for case, numbers, says in SHAPES.values():
            for _ in range(2):
                call = functools.partial(of_shape, world, elastic, case, **numbers)
                error = raised(call)
                assert isinstance(error, (errors.InvalidInputError, errors.RefusedError))
                assert says in str(error), error
        new = v1(world)
        for each in (buffer, new):
            right(world, each)
        rows = of_shape(world, elastic, CASE)[0]
        same(rows, rows_of(world, CASE, CASE.sources(world.rank)))
        for each in (buffer, new, elastic):
            each.destroy()


def filled(device):
    """The rest of a GPU's memory."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return torch.empty(free - LEFT, dtype=torch.uint8, device=device)


def an_arena_without_memory(world):
    """Rank 1 has none: it says so, rank 0 learns it, and the buffer, another one and a new one go on."""
    buffer, other = v1(world), v1(world)
    for each in (buffer, other):
        right(world, each)
    x, idx, weights = inputs(world, LARGE)
    options = layout_of(buffer, idx, LARGE.experts)

    def dispatch():
        buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **options)

    synchronize()
    held = filled(device_of(world)) if world.rank == 1 else None
    expected = (errors.RefusedError, errors.SystemCallError)[world.rank]
    for _ in range(2):
        error = raised(dispatch)
        assert type(error) is expected, repr(error)
        assert "OUT_OF_MEMORY" in str(error), str(error)
    del held
    torch.cuda.empty_cache()
    new = v1(world)
    for each in (buffer, other, new):
        right(world, each)
    for each in (buffer, other, new):
        each.destroy()
    return str(error).splitlines()[0][:200]


def ranks_that_name_different_m(world):
    """Of two M that calls had before, each rank names one: all get an error that names both, and the buffer goes on."""
    buffer = v2(world, CASE)
    x, idx, _ = inputs(world, CASE)
    me = world.rank

    def call(most):
        return buffer.dispatch(
            x[:8], topk_idx=idx[:8], num_experts=CASE.experts, num_max_tokens_per_rank=most
        )[0]

    for most in (12, 13):
        call(most)
    for _ in range(2):
        error = raised(lambda: call(12 + me))
        assert "max_tokens = 13 on rank 1; expected 12" in str(error), error
        expected = [one for one in CASE.sources(me) if one[1] < 8]
        same(call(13), rows_of(world, CASE, expected))
    buffer.destroy()


CHECKS = [shapes_that_cannot_be, an_arena_without_memory, ranks_that_name_different_m]
# Ranks that share a GPU share its memory.
NEED_ONE_EACH = {an_arena_without_memory}
