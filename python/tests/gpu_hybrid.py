"""Hybrid-EP on tensors of torch: `HybridEPBuffer`."""

import hybrid_cases
from gpu_common import on_device, prepare, synchronize
from gpu_work import captured
from hybrid_cases import Case, shifted

from tokenyard.deep_ep import HybridEPBuffer

CASE = Case(2, (64, 61), local=16, hidden=512, most=6, seed=5)
EMPTY = Case(2, (0, 7), hidden=256, seed=3)
# More experts of a token than one row may have.
WIDE = Case(2, (9, 4), local=40, hidden=512, most=70, seed=7)
# A map that has room for as many.
BY_RANK = Case(2, (9, 4), local=40, hidden=512, most=6, seed=7)


def made(world, case):
    prepare(world)
    buffer = on_device(HybridEPBuffer(world, case.hidden, max(case.tokens), case.local))
    return buffer, case.on(buffer._pool.device)


def permuted_rows(world):
    """Rows by expert, with padding and without, by maps and ids, by handles, and their sums."""
    for case, scale in ((CASE, hybrid_cases.scaled), (EMPTY, shifted), (WIDE, shifted)):
        buffer, there = made(world, case)
        for unit in (1, 32):
            hybrid_cases.permuted(buffer, there, unit, scale)


def flat_rows(world):
    """A row for each token and rank, its experts and probabilities, and their sums."""
    for case in (CASE, EMPTY, WIDE):
        hybrid_cases.flat(*made(world, case))


def quantised_rows(world):
    """Rows of 8 bits with scales."""
    hybrid_cases.quantised(*made(world, CASE))


def rows_without_waiting(world):
    """P rows, of which those beyond are dropped."""
    for case in (CASE, EMPTY, BY_RANK):
        hybrid_cases.without_waiting(*made(world, case))


def in_a_graph(world):
    """A dispatch that does not wait, and its combine, replayed with other rows: by expert, and once per rank."""
    for case in (CASE, BY_RANK):
        _replayed(world, *made(world, case))


def _replayed(world, buffer, case):
    places, _ = case.permuted(world.rank, 8)
    x = case.x[world.rank].clone()
    form = {"routing_map": case.maps[world.rank], "probs": case.probs[world.rank]}
    found = {}

    def step():
        found["rows"], found["probs"], _, _, handle = buffer.dispatch_with_permute(
            hidden=x,
            **form,
            pad_multiple=8,
            non_blocking=True,
            num_permuted_tokens=len(places) + 8,
            num_of_tokens_per_rank=max(case.tokens),
        )
        found["out"], _ = buffer.combine_with_unpermute(hidden=found["rows"], handle=handle)

    replay = captured(step)
    ones = case.maps[world.rank].sum(1)[:, None]
    for factor in (1, -1, 2):
        x.copy_(factor * case.x[world.rank])
        replay()
        synchronize()
        expected = hybrid_cases.rows_of(case, places, [factor * one for one in case.x])
        hybrid_cases.same(found["rows"][: len(places)] + 0, expected + 0)
        hybrid_cases.same(found["out"] + 0, (x.float() * ones).to(x.dtype) + 0)


def more_experts_than_before(world):
    """Where the host does not wait, no expert of a token is lost."""
    for case in (CASE, WIDE):
        hybrid_cases.more_experts_than_before(*made(world, case))


CHECKS = [
    permuted_rows,
    flat_rows,
    quantised_rows,
    rows_without_waiting,
    more_experts_than_before,
    in_a_graph,
]
