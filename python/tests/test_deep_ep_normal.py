"""The drop-in's normal calls of V1 against the oracle, on 1 to 4 processes."""

import gc
import os
import pathlib

import ml_dtypes
import numpy as np
import pytest
from exact import same
from oracle import Case
from pool import CONFIG

import tokenyard
from tokenyard import errors
from tokenyard.deep_ep import Buffer, _world

DOMAINS = """
[transport.scale_out]
use = "shm"
[topology]
use = "auto"
domains = {domains}
"""

CASES = [
    Case(1),
    Case(2, seed=2),
    Case(2, seed=3, tokens=(0, 7)),
    Case(2, seed=4, tokens=(0, 0)),
    Case(4, seed=5, hidden=128),
    Case(4, seed=6, tokens=(12, 0, 1, 5), topk=8),
]
NAMES = [f"{case.ranks} ranks {case.tokens}" for case in CASES]
every_case = pytest.mark.parametrize("case", CASES, ids=NAMES)
every_split = pytest.mark.parametrize("domains", [1, 2], ids=["one domain", "two domains"])


def buffer_of(world, domains=1, **options):
    """A buffer of the drop-in, whose config comes by the environment, as users give it."""
    folder = pathlib.Path(os.environ["TOKENYARD_REPORTS"])
    text = CONFIG.format(arena_mib=64) + (DOMAINS.format(domains=domains) if domains > 1 else "")
    path = folder / f"deep-ep-{domains}-{world.rank}.toml"
    path.write_text(text)
    os.environ["TOKENYARD_CONFIG"] = str(path)
    return Buffer(world, explicitly_destroy=True, **options)


def close(found, expected, tolerance=1e-5):
    np.testing.assert_allclose(
        np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance
    )


def layout_of(buffer, case, idx=None):
    idx = case.idx[buffer.rank] if idx is None else idx
    names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert")
    *counts, is_in, event = buffer.get_dispatch_layout(idx, case.experts)
    assert event.event is None
    return {**dict(zip(names, counts, strict=True)), "is_token_in_rank": is_in}


def times(case, me):
    """How many ranks each token of a rank goes to."""
    return np.array([len(case.ranks_of(me, t)) for t in range(case.tokens[me])], np.int64)


def layouts(world, case, domains):
    me, buffer = world.rank, buffer_of(world, domains)
    found = layout_of(buffer, case)
    reached = [case.ranks_of(me, token) for token in range(case.tokens[me])]
    same(found["num_tokens_per_rank"], [sum(r in to for to in reached) for r in range(case.ranks)])
    size = case.ranks // domains
    if domains == 1:
        assert found["num_tokens_per_rdma_rank"] is None
    else:
        expected = [sum(d in {r // size for r in to} for to in reached) for d in range(domains)]
        same(found["num_tokens_per_rdma_rank"], expected)
    same(
        found["num_tokens_per_expert"],
        [(case.idx[me] == expert).sum() for expert in range(case.experts)],
    )
    expected = np.zeros((case.tokens[me], case.ranks), bool)
    for token, to in enumerate(reached):
        expected[token, to] = True
    same(found["is_token_in_rank"], expected)
    assert {
        found[name].dtype for name in found if name.startswith("num") and found[name] is not None
    } == {np.dtype(np.int32)}
    buffer.destroy()


@every_case
def test_a_layout_counts_tokens_once_per_rank_and_domain(ranks, case):
    for domains in (1, 2) if case.ranks > 1 else (1,):
        ranks(case.ranks, layouts, case, domains)


def exchange(world, case, domains):
    me, buffer = world.rank, buffer_of(world, domains)
    sources, (ids, weights) = case.sources(me), case.flat(me)
    x, idx, given = case.x[me], case.idx[me], case.weights[me]
    layout = layout_of(buffer, case)
    options = {**layout, "topk_idx": idx, "topk_weights": given, "expert_alignment": 4}
    recv_x, recv_idx, recv_weights, per_expert, handle, event = buffer.dispatch(x, **options)
    assert event.event is None
    same(recv_x, case.rows(sources))
    same(recv_idx, ids.astype(np.int64))
    assert recv_idx.dtype == np.int64
    same(recv_weights, weights)
    assert per_expert == [-(-count // 4) * 4 for count in case.expert_counts(me)]
    ends = np.cumsum(case.source_counts(me))
    if domains == 1:
        assert len(handle) == 6
        same(handle[0][:, me], ends)
        same(handle[3], np.array([token for _, token in sources], np.int32))
        same(handle[4], layout["is_token_in_rank"])
    else:
        assert len(handle) == 10
        same(handle[-4], ends)
        same(handle[0], layout["is_token_in_rank"])

    # Weights come back from all ranks that got the token, selected there or not.
    combined, back, _ = buffer.combine(recv_x, handle, np.ones_like(recv_weights))
    close(combined, x * times(case, me)[:, None])
    same(back, np.repeat(times(case, me)[:, None], case.topk, axis=1).astype(np.float32))
    _, back, _ = buffer.combine(recv_x, handle, recv_weights)
    same(back, np.where(idx >= 0, given, 0))
    bias = np.full_like(x, 2)
    combined, none, event = buffer.combine(recv_x, handle, bias=(bias, bias), async_finish=True)
    assert none is None
    event.current_stream_wait()
    close(combined, x * times(case, me)[:, None] + 4)

    again, *nothing, event = buffer.dispatch(3 * x, handle=handle, async_finish=True)
    assert nothing == [None] * 4
    assert event.event is not None
    same(again, 3 * case.rows(sources))

    worst = case.ranks * max(*case.tokens, 1)
    padded_x, padded_idx, padded_weights, empty, handle, _ = buffer.dispatch(
        x, **{**options, "num_worst_tokens": worst}
    )
    assert (empty, len(padded_x)) == ([], worst)
    same(padded_x[: len(sources)], recv_x)
    same(padded_idx[: len(sources)], recv_idx)
    same(padded_weights[: len(sources)], recv_weights)
    assert (padded_idx[len(sources) :] == -1).all()
    combined, back, _ = buffer.combine(padded_x, handle, padded_weights)
    close(combined, x * times(case, me)[:, None])
    same(back, np.where(idx >= 0, given, 0))
    buffer.destroy()


# Their ids and weights are wider than their rows.
NARROW = [Case(2, seed=8, experts=64, topk=32, hidden=32), Case(4, seed=8, topk=8, hidden=4)]


@pytest.mark.parametrize("case", [*CASES, *NARROW], ids=[*NAMES, "H = K", "H < K"])
@every_split
def test_rows_ids_and_weights_arrive_in_order_and_come_back(ranks, case, domains):
    if case.ranks > 1 or domains == 1:
        ranks(case.ranks, exchange, case, domains)


def without_topk(world, case, domains):
    me, buffer = world.rank, buffer_of(world, domains)
    recv_x, ids, weights, per_expert, handle, _ = buffer.dispatch(
        case.x[me], **layout_of(buffer, case)
    )
    assert (ids, weights) == (None, None)
    same(recv_x, case.rows(case.sources(me)))
    assert per_expert == case.expert_counts(me)
    combined, _, _ = buffer.combine(recv_x, handle)
    close(combined, case.x[me] * times(case, me)[:, None])
    buffer.destroy()


@every_case
def test_without_ids_the_map_of_ranks_routes(ranks, case):
    ranks(case.ranks, without_topk, case, 1)


def fp8(world, case):
    me, buffer = world.rank, buffer_of(world)
    tokens, groups = case.tokens[me], 2
    x = case.x[me].astype(ml_dtypes.float8_e4m3fn)
    # Column-major, as quantisers leave them.
    scales = np.arange(tokens * groups, dtype=np.float32).reshape(groups, tokens).T + 100 * me
    options = {**layout_of(buffer, case), "topk_idx": case.idx[me]}
    (recv_x, recv_scales), *_ = buffer.dispatch(
        (x, scales), topk_weights=case.weights[me], **options
    )
    sources = case.sources(me)
    expected = case.rows(sources).astype(ml_dtypes.float8_e4m3fn)
    same(recv_x.view(np.uint8), expected.view(np.uint8))
    for row, (source, token) in enumerate(sources):
        first = np.arange(case.tokens[source] * groups).reshape(groups, -1)[:, token]
        same(recv_scales[row], first + np.float32(100 * source))
    assert recv_scales.flags.c_contiguous
    buffer.destroy()


@every_case
def test_quantised_rows_bring_their_scales(ranks, case):
    ranks(case.ranks, fp8, case)


def growing(world, case):
    me, buffer = world.rank, buffer_of(world)
    old = buffer.dispatch(
        case.x[me], topk_idx=case.idx[me], topk_weights=case.weights[me], **layout_of(buffer, case)
    )
    # More than the first communicator takes, on one rank alone, and then another hidden size on all.
    tokens = 1100 if me == 0 else 3
    for hidden in (case.hidden, 2 * case.hidden):
        idx = np.full((tokens, case.topk), -1, np.int64)
        idx[:, 0] = (np.arange(tokens) + me) % case.experts
        x = np.arange(tokens * hidden, dtype=np.float32).reshape(tokens, hidden)
        options = {**layout_of(buffer, case, idx), "topk_idx": idx}
        recv_x, _, _, _, handle, _ = buffer.dispatch(
            x, topk_weights=np.ones(idx.shape, np.float32), **options
        )
        combined, _, _ = buffer.combine(recv_x, handle)
        same(combined, x)
    # The handle of the first one still works, although its communicator was replaced.
    combined, _, _ = buffer.combine(old[0], old[4])
    close(combined, case.x[me] * times(case, me)[:, None])
    again, *_ = buffer.dispatch(case.x[me], handle=old[4])
    same(again, old[0])
    buffer.destroy()


def test_more_tokens_and_other_sizes_are_agreed_on_by_all_ranks(ranks):
    ranks(2, growing, CASES[1])


def many_handles(world, case):
    me, buffer = world.rank, buffer_of(world)
    options = {"topk_idx": case.idx[me], "topk_weights": case.weights[me]}
    options |= layout_of(buffer, case)
    kept = []
    for layer in range(300):
        recv_x, _, _, _, handle, _ = buffer.dispatch(case.x[me] * layer, **options)
        # Only tensors are saved, as autograd does, and not the tuple.
        kept.append((recv_x, list(handle)))
    for layer, (recv_x, handle) in reversed(list(enumerate(kept))):
        combined, _, _ = buffer.combine(recv_x, tuple(handle))
        close(combined, layer * case.x[me] * times(case, me)[:, None])
    copied = tuple(tensor.copy() for tensor in kept[0][1])
    lost = "copies of them" if me == 0 else "rank 0 refused"
    with pytest.raises(tokenyard.Error, match=lost):
        buffer.combine(kept[0][0], copied if me == 0 else tuple(kept[0][1]))
    del kept, handle, copied
    gc.collect()
    # All are free again: another 1000 would not fit beside 300.
    kept = [buffer.dispatch(case.x[me], **options)[4] for _ in range(1000)]
    with pytest.raises(errors.FullError, match="1024 handles"):
        kept += [buffer.dispatch(case.x[me], **options)[4] for _ in range(100)]
    del kept
    gc.collect()
    buffer.dispatch(case.x[me], **options)
    buffer.destroy()


def test_hundreds_of_handles_live_as_long_as_their_tensors(ranks):
    ranks(2, many_handles, CASES[1])


def made_anew(world, case):
    """Megatron makes its buffer anew when rows get wider, also between a dispatch and its backward pass."""
    me, buffer = world.rank, buffer_of(world)
    options = {"topk_idx": case.idx[me], "topk_weights": case.weights[me]}
    options |= layout_of(buffer, case)
    recv_x, *_, handle, _ = buffer.dispatch(case.x[me], **options)
    for _ in range(3):
        buffer = Buffer(world, num_nvl_bytes=1 << 20, explicitly_destroy=True)
        combined, _, _ = buffer.combine(recv_x, handle)
        close(combined, case.x[me] * times(case, me)[:, None])
        again, *_ = buffer.dispatch(case.x[me], handle=handle)
        same(again, recv_x)
        buffer.dispatch(case.x[me], **options)
    del handle
    gc.collect()
    # Communicators without users are dropped when all ranks meet next.
    parked = _world._openings[world].parked
    assert len(parked) == 1
    other = Buffer(world, explicitly_destroy=True)
    assert not parked
    # While both live, a handle is of one of them alone.
    handle = other.dispatch(case.x[me], **options)[4]
    with pytest.raises(tokenyard.Error, match="handle: found one of another buffer"):
        buffer.combine(recv_x, handle)
    other.destroy()
    buffer.destroy()


def test_handles_outlive_their_buffer_which_is_dropped_where_all_ranks_meet(ranks):
    ranks(2, made_anew, CASES[1])
