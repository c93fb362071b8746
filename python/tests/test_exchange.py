"""Dispatch and combine against the oracle, on 1 to 4 processes."""

import numpy as np
import pytest
from oracle import Case
from pool import config

import tokenyard
from tokenyard import errors

CASES = [
    Case(1),
    Case(2, seed=2),
    Case(2, seed=3, tokens=(0, 7)),
    Case(2, seed=4, tokens=(0, 0)),
    Case(4, seed=5, hidden=128),
    Case(4, seed=6, tokens=(12, 0, 1, 5), topk=8),
]
EXPERTS = [f"{case.ranks} ranks {case.tokens}" for case in CASES]
every_case = pytest.mark.parametrize("case", CASES, ids=EXPERTS)


def opened(world, case, **options):
    sizes = (case.experts, case.topk, case.hidden, case.max_tokens)
    return tokenyard.Communicator(world, config(), *sizes, **options)


def same(found, expected):
    np.testing.assert_array_equal(np.asarray(found), expected)


def close(found, expected):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-5)


def flat(world, case):
    me = world.rank
    sources, (ids, weights) = case.sources(me), case.flat(me)
    with opened(world, case) as comm:
        received, handle = comm.dispatch(case.x[me], case.idx[me], case.weights[me])
        assert (received.layout, handle.layout) == ("flat", "flat")
        assert (received.tokens, received.rows, handle.rows) == (len(sources),) * 3
        assert handle.tokens == case.tokens[me]
        same(received.x, case.rows(sources))
        same(received.ids, ids)
        same(received.weights, weights)
        same(received.source, [s * case.max_tokens + t for s, t in sources])
        same(received.source_counts, case.source_counts(me))
        same(received.expert_counts, case.expert_counts(me))
        assert received.slots is None
        assert received.scales is None
        assert received.ranges is None

        # Experts that leave rows as they are: a token comes back once for each rank that had it.
        bias = np.ones((case.tokens[me], case.hidden), np.float32)
        out, out_weights = comm.combine(handle, received.x, received.weights, bias=(bias, bias))
        times = np.array([len(case.ranks_of(me, t)) for t in range(case.tokens[me])])
        close(out, case.x[me] * times[:, None] + 2)
        same(out_weights, np.where(case.idx[me] >= 0, case.weights[me], 0))

        again = comm.replay(handle, 2 * case.x[me])
        same(again.x, 2 * case.rows(sources))


@every_case
def test_flat_rows_ids_and_weights_arrive_in_order_and_come_back(ranks, case):
    ranks(case.ranks, flat, case)


def expert_major(world, case, alignment):
    me = world.rank
    with opened(world, case) as comm:
        options = {"layout": "expert_major", "alignment": alignment, "zero_padding": True}
        received, handle = comm.dispatch(case.x[me], case.idx[me], case.weights[me], **options)
        x, starts = np.asarray(received.x), np.asarray(received.expert_starts)
        weights, slots = np.asarray(received.weights), np.asarray(received.slots)
        sources = case.sources(me)
        assert (received.tokens, received.rows) == (len(sources), len(x))
        assert weights.shape == (len(x),)
        same(received.expert_counts, case.expert_counts(me))
        same(received.source, [s * case.max_tokens + t for s, t in sources])
        y, is_filled = np.zeros_like(x), np.zeros(len(x), bool)
        for expert, start in enumerate(starts):
            assert start % alignment == 0
            for row, (source, token, k) in enumerate(case.expert_rows(me, expert), start):
                same(x[row], case.row(source, token))
                assert weights[row] == case.weights[source][token, k]
                assert slots[sources.index((source, token)), k] == row
                y[row], is_filled[row] = x[row] * (1 + me * case.local + expert), True
        assert is_filled.sum() == sum(case.expert_counts(me)) == (slots >= 0).sum()
        assert not x[~is_filled].any()
        assert not weights[~is_filled].any()

        def scaled(expert, row):
            return row * (1 + expert)

        out, _ = comm.combine(handle, y)
        close(out, case.combined(me, scaled))
        out, out_weights = comm.combine(handle, y, received.weights, weighted=True)
        close(out, case.combined(me, scaled, is_weighted=True))
        same(out_weights, np.where(case.idx[me] >= 0, case.weights[me], 0))


@every_case
@pytest.mark.parametrize("alignment", [1, 4])
def test_expert_major_rows_are_grouped_by_expert_and_come_back(ranks, case, alignment):
    ranks(case.ranks, expert_major, case, alignment)


def packed(world, case):
    me, most = world.rank, case.ranks * case.max_tokens
    with opened(world, case) as comm:
        received, handle = comm.dispatch(
            case.x[me], case.idx[me], case.weights[me], layout="packed"
        )
        x, source = np.asarray(received.x), np.asarray(received.source)
        assert x.shape == (case.local, most, case.hidden)
        assert source.shape == np.asarray(received.weights).shape == (case.local, most)
        counts, ranges = np.asarray(received.expert_counts), np.asarray(received.ranges)
        y = np.asarray(comm.combine_input(handle, "float32")).reshape(x.shape)
        for expert in range(case.local):
            rows = case.expert_rows(me, expert)
            assert counts[expert] == len(rows) == (ranges[expert] & 0xFFFFFFFF).sum()
            same(x[expert, : len(rows)], case.rows([row[:2] for row in rows]))
            same(source[expert, : len(rows)], [s * case.max_tokens + t for s, t, _ in rows])
            for rank in range(case.ranks):
                begin, count = ranges[expert, rank] >> 32, ranges[expert, rank] & 0xFFFFFFFF
                assert all(s == rank for s, _, _ in rows[begin : begin + count])
            y[expert] = x[expert] * (1 + me * case.local + expert)
        out, _ = comm.combine(handle, y, weighted=True)
        close(out, case.combined(me, lambda e, row: row * (1 + e), is_weighted=True))


def rank_major(world, case):
    me = world.rank
    with opened(world, case) as comm:
        assert "rank_major" in comm.forms
        options = {"layout": "rank_major", "zero_padding": True}
        received, handle = comm.dispatch(case.x[me], case.idx[me], case.weights[me], **options)
        x, ids, source = (np.asarray(getattr(received, name)) for name in ("x", "ids", "source"))
        weights = np.asarray(received.weights)
        assert x.shape == (case.ranks, case.max_tokens, case.hidden)
        assert ids.shape == weights.shape == (case.ranks, case.max_tokens, case.topk)
        assert source.shape == (case.ranks, case.max_tokens)
        same(received.source_counts, case.source_counts(me))
        same(received.expert_counts, case.expert_counts(me))
        sources, (flat_ids, flat_weights) = case.sources(me), case.flat(me)
        assert (received.tokens, received.rows) == (len(sources), case.ranks * case.max_tokens)
        y = np.full_like(x, np.nan)
        first = 0
        for rank, count in enumerate(case.source_counts(me)):
            rows = slice(first, first + count)
            same(x[rank, :count], case.rows(sources[rows]))
            same(ids[rank, :count], flat_ids[rows])
            same(weights[rank, :count], flat_weights[rows])
            same(source[rank, :count], [s * case.max_tokens + t for s, t in sources[rows]])
            for nothing, behind in ((x, 0), (weights, 0), (ids, -1), (source, -1)):
                same(nothing[rank, count:], behind)
            y[rank, :count] = x[rank, :count]
            first += count
        out, out_weights = comm.combine(handle, y, received.weights)
        times = np.array([len(case.ranks_of(me, t)) for t in range(case.tokens[me])])
        close(out, case.x[me] * times[:, None])
        same(out_weights, np.where(case.idx[me] >= 0, case.weights[me], 0))
        again = comm.replay(handle, 2 * case.x[me])
        same(again.x, 2 * x)
        with pytest.raises(errors.InvalidInputError, match="zero_padding with"):
            comm.dispatch(case.x[me], case.idx[me], layout="rank_major", alignment=4)


@every_case
def test_rank_major_rows_lie_in_the_block_of_their_source_and_come_back(ranks, case):
    ranks(case.ranks, rank_major, case)


def rank_major_forms(world, case):
    me, topk = world.rank, case.topk
    call = {"layout": "rank_major", "cast": "fp8", "max_tokens": case.max_tokens}
    above = Case(case.ranks, max_tokens=2 * case.max_tokens, hidden=case.hidden, topk=topk)
    with opened(world, above) as comm:
        # Blocks have M rows of the call, exact or not, and what is behind the counts names nothing without a request.
        for worst_case in (False, True):
            received, handle = comm.dispatch(
                case.x[me], case.idx[me], case.weights[me], worst_case=worst_case, **call
            )
            counts, block = case.source_counts(me), (case.ranks, case.max_tokens)
            same(received.totals, [sum(counts)] * 2)
            same(received.source_counts, counts)
            same(received.source_ends, np.cumsum(counts))
            assert received.rows == handle.rows == case.ranks * case.max_tokens
            assert np.asarray(received.scales).shape == (*block, -(-case.hidden // 128))
            ids, source = np.asarray(received.ids), np.asarray(received.source)
            for rank, count in enumerate(counts):
                same(ids[rank, count:], -1)
                same(source[rank, count:], -1)
                assert (source[rank, :count] // case.max_tokens == rank).all()
        room = {
            "scales": np.zeros((*block, received.scales.shape[2]), np.float32),
            "ids": np.full((*block, topk), 7, np.int64),
            "weights": np.full((*block, topk), 7, np.float32),
            "source": np.full(block, 7, np.int32),
            "source_tokens": np.full(block, 7, np.int32),
        }
        comm.copy_out(received, **room)
        tokens = np.where(source >= 0, source % case.max_tokens, -1)
        for name, copied in room.items():
            expected = tokens if name == "source_tokens" else np.asarray(getattr(received, name))
            for rank, count in enumerate(counts):
                same(copied[rank, :count], expected[rank, :count])
            if name in ("ids", "source", "source_tokens"):
                same(copied, expected)
        y = np.asarray(comm.combine_input(handle, "float32")).reshape(*block, case.hidden)
        y[:] = np.nan
        for rank, count in enumerate(counts):
            y[rank, :count] = rank + 1
        out, _ = comm.combine(handle, y)
        times = np.array([len(case.ranks_of(me, t)) for t in range(case.tokens[me])])
        close(out, np.repeat(times[:, None] * (me + 1), case.hidden, axis=1))
        del received, y
        if me == 1:
            with pytest.raises(errors.InvalidInputError, match="found 3; expected 4"):
                comm.refuse("dispatch", "found 3; expected 4", layout="rank_major")
        else:
            with pytest.raises(errors.RefusedError, match="found 3; expected 4") as raised:
                comm.dispatch(case.x[me], case.idx[me], **call)
            assert raised.value.rank == 1
        for wrong, says in (
            ({"weighted": True}, "rank-major rows are merged already"),
            ({"round_once": True}, "rank-major rows are merged already"),
        ):
            with pytest.raises(errors.InvalidInputError, match=says):
                comm.combine(handle, np.zeros((*block, case.hidden), np.float32), **wrong)
        comm.dispatch(case.x[me], case.idx[me], **call)


@pytest.mark.parametrize("case", [CASES[1], CASES[5]])
def test_rank_major_rows_have_the_forms_of_others_and_may_be_copied_out(ranks, case):
    ranks(case.ranks, rank_major_forms, case)


def packed_forms(world, case):
    me, most = world.rank, case.ranks * case.max_tokens
    with opened(world, case) as comm:
        assert "packed_forms" in comm.forms
        call = {"layout": "packed", "cast": "fp8"}
        plain, first = comm.dispatch(case.x[me], case.idx[me], **call)
        # Ranks need not agree.
        forms = {"scale_layout": "column_major", "source_index": "token"} if me % 2 == 0 else {}
        received, handle = comm.dispatch(case.x[me], case.idx[me], **call, **forms)
        again = comm.replay(handle, case.x[me], cast="fp8", **forms)
        pending = comm.dispatch_send(case.x[me], case.idx[me], **call, **forms)
        arriving = pending.output()
        late, _ = pending.recv()
        columns = plain.scales.shape[2]
        for found in (received, again, arriving, late):
            assert found.scales.shape == (case.local, most, columns)
            strides = (columns * most, 1, most) if forms else (columns * most, columns, 1)
            assert found.scales.stride() == strides
            scales, expected = np.asarray(found.scales), np.asarray(plain.scales)
            assert scales.strides == tuple(4 * stride for stride in strides)
            for expert, count in enumerate(np.asarray(plain.expert_counts)):
                same(scales[expert, :count], expected[expert, :count])
                source = np.asarray(plain.source)[expert, :count]
                source = source % case.max_tokens if forms else source
                same(np.asarray(found.source)[expert, :count], source)
        room = np.zeros((case.local, columns, most), np.float32)
        if forms:
            comm.copy_out(received, scales=room)
            same(room.transpose(0, 2, 1), np.asarray(received.scales))
        del plain, first, received, handle, again, arriving, late
        for wrong, says in (
            ({"scale_layout": "column_major"}, "scale_layout: found column-major with flat rows"),
            ({"source_index": "token"}, "source_index: found tokens alone with flat rows"),
            ({"scale_layout": "columns"}, 'scale_layout: found "columns"; expected'),
        ):
            with pytest.raises((errors.InvalidInputError, errors.RefusedError)) as raised:
                comm.dispatch(case.x[me], case.idx[me], **(wrong if me == 0 else {}))
            assert says in str(raised.value)


@pytest.mark.parametrize("case", [*CASES[1:4], CASES[5], Case(2, seed=7, hidden=320)])
def test_packed_scales_lie_by_columns_and_sources_are_tokens_where_a_rank_asks(ranks, case):
    ranks(case.ranks, packed_forms, case)


@every_case
def test_packed_rows_lie_in_a_block_for_each_expert_and_come_back(ranks, case):
    ranks(case.ranks, packed, case)


def forms(world, case):
    me = world.rank
    kept = (np.arange(case.tokens[me])[:, None] + np.arange(case.topk)) % 3 != 0
    late = case.weights[me][:, ::-1].copy()
    ids = np.where(kept, case.idx[me], -1)
    expected = np.zeros((case.tokens[me], case.hidden), np.float32)
    for token in range(case.tokens[me]):
        for k in np.flatnonzero(ids[token] >= 0):
            expected[token] += case.x[me][token] * late[token, k]
    for layout in ("expert_major", "packed"):
        with opened(world, case) as comm:
            received, handle = comm.dispatch(case.x[me], case.idx[me], layout=layout)
            out, _ = comm.combine(
                handle,
                received.x,
                weighted=True,
                topk_weights=late,
                topk_idx=ids,
                round_once=True,
            )
            close(out, expected)
            pending = comm.combine_send(handle, received.x, weighted=True, topk_weights=late)
            del handle, received
            pending.recv()
            with pytest.raises(tokenyard.errors.InvalidInputError, match="no streams"):
                comm.release_after([0])


# Their weights are wider than their rows.
SMALL = [Case(2, seed=8, experts=64, topk=32, hidden=32), Case(4, seed=8, topk=8, hidden=4)]


@pytest.mark.parametrize("case", [*CASES, *SMALL])
def test_a_combine_may_bring_weights_and_leave_experts_out(ranks, case):
    ranks(case.ranks, forms, case)


def sums_of_weights(world, case):
    me = world.rank
    with opened(world, case) as comm:
        received, handle = comm.dispatch(case.x[me], case.idx[me], case.weights[me])
        same(received.source_ends, np.cumsum(case.source_counts(me)))
        ones = np.ones(np.asarray(received.weights).shape, np.float32)
        _, summed = comm.combine(handle, received.x, ones, sum_weights=True)
        times = [len(case.ranks_of(me, t)) for t in range(case.tokens[me])]
        same(summed, np.repeat(np.float32(times)[:, None], case.topk, axis=1))


@every_case
def test_returned_weights_may_be_sums_over_all_ranks_that_had_the_token(ranks, case):
    ranks(case.ranks, sums_of_weights, case)


def call_tokens(world, case):
    me, most = world.rank, max(1, *case.tokens)
    sizes = (case.experts, case.topk, case.hidden, 4 * case.max_tokens)
    with tokenyard.Communicator(world, config(), *sizes) as comm:
        received, _ = comm.dispatch(case.x[me], case.idx[me], layout="packed", max_tokens=most)
        assert received.x.shape == (case.local, case.ranks * most, case.hidden)
        flat, _ = comm.dispatch(case.x[me], case.idx[me], worst_case=True, max_tokens=most)
        sources = case.sources(me)
        assert flat.rows == case.ranks * most
        same(np.asarray(flat.source)[: len(sources)], [s * most + t for s, t in sources])
        same(np.asarray(flat.ids)[len(sources) :], -1)


@every_case
def test_a_call_may_bound_its_tokens_below_the_communicator(ranks, case):
    ranks(case.ranks, call_tokens, case)


def test_a_routing_is_counted_without_a_message():
    ids = np.array([[0, 1], [3, -1], [-1, -1]], np.int64)
    per_rank, per_expert, is_in = tokenyard.routing_counts(ids, 4, 2)
    same(per_rank, [1, 1])
    same(per_expert, [1, 1, 0, 1])
    same(is_in, [[1, 0], [0, 1], [0, 0]])
    with pytest.raises(tokenyard.errors.InvalidInputError, match="expert 4"):
        tokenyard.routing_counts(ids + 1, 4, 2)


def test_replicas_of_busy_experts_are_planned_without_a_message():
    slots, loads = tokenyard.plan_replicas([90, 0, 0, 0, 0, 0], 3, 1)
    same(slots, [[-1], [0], [0]])
    assert loads == [30.0, 30.0, 30.0]
    for wrong in [[1, 2, 3], [], [-1, 1], "many", None]:
        with pytest.raises(tokenyard.errors.InvalidInputError, match="loads: found"):
            tokenyard.plan_replicas(wrong, 2, 1)


def halves(world, case):
    me = world.rank
    with opened(world, case) as comm:
        first = comm.dispatch_send(case.x[me], case.idx[me], case.weights[me])
        second = comm.dispatch_send(-case.x[me], case.idx[me])
        received, handle = first.recv()
        other, _ = second.recv()
        same(other.x, -np.asarray(received.x))
        with pytest.raises(tokenyard.errors.InvalidInputError, match="received before"):
            first.recv()
        out = np.empty((case.tokens[me], case.hidden), np.float32)
        replayed = comm.replay_send(handle, 3 * case.x[me]).recv()
        back = comm.combine_send(handle, replayed.x, out=out).recv()
        assert back[0] is out
        assert back[1] is None
        times = np.array([len(case.ranks_of(me, t)) for t in range(case.tokens[me])])
        close(out, 3 * case.x[me] * times[:, None])


@pytest.mark.parametrize("case", CASES[1:3], ids=EXPERTS[1:3])
def test_halves_of_two_operations_may_be_in_flight_at_once(ranks, case):
    ranks(case.ranks, halves, case)


def masks_with_an_open_operation(world, case):
    """Taking ranks back is refused where an operation is open, and the others do not wait for that rank."""
    with opened(world, case) as comm:
        me = world.rank
        pending = comm.dispatch_send(case.x[me], case.idx[me])
        if me:
            pending.recv()
        error = errors.InvalidInputError if me == 0 else errors.UnsupportedError
        with pytest.raises(error):
            comm.clear_masks()
        if me == 0:
            pending.recv()
        comm.dispatch(case.x[me], case.idx[me])


def test_a_rank_that_cannot_take_others_back_leaves_none_waiting(ranks):
    ranks(2, masks_with_an_open_operation, CASES[1])


COPIES = "x", "weights", "source", "expert_counts", "ranges"


def copies_of_packed(world, case):
    """Arrays of a packed output go to arrays of their shapes."""
    me = world.rank
    with opened(world, case) as comm:
        received, _ = comm.dispatch(case.x[me], case.idx[me], case.weights[me], layout="packed")
        arrays = {name: np.asarray(getattr(received, name)) for name in COPIES}
        copies = {name: np.full_like(array, 7) for name, array in arrays.items()}
        comm.copy_out(received, **copies)
        for name in COPIES[3:]:
            same(copies[name], arrays[name])
        for expert, count in enumerate(case.expert_counts(me)):
            for name in COPIES[:3]:
                same(copies[name][expert, :count], arrays[name][expert, :count])


@pytest.mark.parametrize("case", CASES[1:3], ids=EXPERTS[1:3])
def test_packed_outputs_are_copied_to_arrays_of_their_shapes(ranks, case):
    ranks(case.ranks, copies_of_packed, case)


def worst_case(world, case):
    me = world.rank
    with opened(world, case) as comm:
        received, handle = comm.dispatch(case.x[me], case.idx[me], worst_case=True)
        sources = case.sources(me)
        assert received.rows == case.ranks * case.max_tokens
        same(received.totals, [len(sources), len(sources)])
        same(np.asarray(received.x)[: len(sources)], case.rows(sources))
        copy = np.zeros((received.rows, case.hidden), np.float32)
        ids = np.zeros((received.rows, case.topk), np.int32)
        comm.copy_out(received, x=copy, ids=ids)
        same(copy[: len(sources)], case.rows(sources))
        same(ids, received.ids)
        wide = np.zeros((received.rows + 1, case.topk), np.int64)
        comm.copy_out(received, ids=wide)
        same(wide[:-1], np.where(np.arange(len(ids))[:, None] < len(sources), ids, -1))
        same(wide[-1], -1)
        tokens = np.zeros((received.rows, 1), np.int32)
        again = np.zeros((received.rows, case.topk), np.int64)
        comm.copy_out(received, source_tokens=tokens, wide_ids=again)
        same(again, wide[:-1])
        same(tokens[: len(sources), 0], [token for _, token in sources])
        same(tokens[len(sources) :], -1)
        assert comm.expert_counts(received) == np.asarray(received.expert_counts).tolist()
        comm.combine(handle, copy)


@pytest.mark.parametrize("case", CASES[1:2], ids=EXPERTS[1:2])
def test_worst_case_outputs_have_room_for_all_and_can_be_copied_out(ranks, case):
    ranks(case.ranks, worst_case, case)


def capped_flat(world, case, caps, worst_case):
    me = world.rank
    left = case.capped(me, caps[me])
    with opened(world, case) as comm:
        assert "max_rows" in comm.forms
        options = {"max_rows": caps[me], "overflow": "drop", "worst_case": worst_case}
        received, handle = comm.dispatch(case.x[me], case.idx[me], case.weights[me], **options)
        room = min(caps[me], case.ranks * case.max_tokens) if worst_case else len(left)
        assert (received.tokens, received.rows, handle.rows) == (room,) * 3
        x, ids = np.asarray(received.x), np.asarray(received.ids)
        same(x[: len(left)], case.rows(left))
        same(ids[: len(left)], case.flat(me)[0][: len(left)])
        same(ids[len(left) :], -1)
        counts = [int((ids == expert).sum()) for expert in range(case.local)]
        same(received.expert_counts, counts)
        same(received.dropped, np.array(case.expert_counts(me)) - counts)
        same(received.overflow, [len(left) < len(case.sources(me))])
        same(received.totals, [len(left)] * 2)

        # Each rank that has left the token's row adds it once.
        taken = [set(case.capped(rank, caps[rank])) for rank in range(case.ranks)]
        times = [sum((me, t) in rows for rows in taken) for t in range(case.tokens[me])]
        y = np.where(np.arange(room)[:, None] < len(left), x, np.nan)
        out, out_weights = comm.combine(handle, y, received.weights)
        close(out, case.x[me] * np.array(times).reshape(-1, 1))
        is_left = set().union(*(case.is_left(r, caps[r]) for r in range(case.ranks)))
        same(out_weights, kept_weights(case, me, is_left))

        again = comm.replay(handle, 2 * case.x[me])
        same(np.asarray(again.x)[: len(left)], 2 * case.rows(left))
        same(again.dropped, np.asarray(received.dropped))


def kept_weights(case, me, is_left):
    """The weights of this rank's copies that no cap has dropped; 0 for the others."""
    weights = np.zeros_like(case.weights[me])
    for source, token, k in is_left:
        if source == me:
            weights[token, k] = case.weights[me][token, k]
    return weights


def capped_by_expert(world, case, caps, worst_case):
    me, alignment = world.rank, 4
    left = case.capped(me, caps[me], alignment)
    with opened(world, case) as comm:
        options = {"layout": "expert_major", "alignment": alignment, "worst_case": worst_case}
        options |= {"max_rows": caps[me], "overflow": "drop"}
        received, handle = comm.dispatch(case.x[me], case.idx[me], case.weights[me], **options)
        x, weights = np.asarray(received.x), np.asarray(received.weights)
        assert len(x) == len(weights) <= caps[me]
        same(received.expert_starts, [start for _, start in left])
        same(received.expert_counts, [len(rows) for rows, _ in left])
        same(received.expert_ends, [start + len(rows) for rows, start in left])
        counts = np.array([len(rows) for rows, _ in left])
        same(received.dropped, np.array(case.expert_counts(me)) - counts)
        same(received.overflow, [counts.sum() < sum(case.expert_counts(me))])
        dropped, flag = np.zeros((case.local, 1), "i4"), np.zeros((1, 1), "i4")
        comm.copy_out(received, dropped=dropped, overflow=flag)
        same(dropped[:, 0], received.dropped)
        same(flag[:, 0], received.overflow)
        y = np.full_like(x, np.nan)
        for expert, (rows, start) in enumerate(left):
            for row, (source, token, k) in enumerate(rows, start):
                same(x[row], case.row(source, token))
                assert weights[row] == case.weights[source][token, k]
                y[row] = x[row] * (1 + me * case.local + expert)
        slots, sources = np.asarray(received.slots)[: len(case.sources(me))], case.sources(me)
        named = {
            (*sources[n], k): slots[n, k] for n, k in zip(*np.nonzero(slots >= 0), strict=True)
        }
        placed = {row: start + n for rows, start in left for n, row in enumerate(rows)}
        assert {(s, t, int(k)): int(slot) for (s, t, k), slot in named.items()} == placed
        out, out_weights = comm.combine(handle, y, received.weights, weighted=True)
        all_left = set().union(*(case.is_left(r, caps[r], alignment) for r in range(case.ranks)))
        expected = np.zeros((case.tokens[me], case.hidden))
        for source, token, k in all_left:
            if source == me:
                factor = case.weights[me][token, k] * (1 + int(case.idx[me][token, k]))
                expected[token] += factor * case.row(me, token)
        close(out, expected)
        same(out_weights, kept_weights(case, me, all_left))


CAPS = [(1, 3, 9, 2), (6, 400, 5, 8), (400, 400, 400, 400)]


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[5]], ids=lambda case: str(case.tokens))
@pytest.mark.parametrize("caps", CAPS, ids=str)
@pytest.mark.parametrize("worst_case", [False, True])
def test_rows_beyond_the_cap_of_a_rank_are_dropped_and_add_nothing(ranks, case, caps, worst_case):
    ranks(case.ranks, capped_flat, case, caps, worst_case)
    ranks(case.ranks, capped_by_expert, case, caps, worst_case)


def too_many(world, case):
    me = world.rank
    with opened(world, case) as comm:
        arguments = case.x[me], case.idx[me], case.weights[me]
        needed = len(case.sources(0))
        cap = {"max_rows": needed - 1} if me == 0 else {}
        with pytest.raises(errors.FullError, match=f"{needed} rows come.* at most {needed - 1}"):
            comm.dispatch(*arguments, **cap)
        cap = {"max_rows": needed} if me == 0 else {}
        received, handle = comm.dispatch(*arguments, **cap)
        assert (received.dropped is None) == (received.overflow is None) == (me != 0)
        comm.combine(handle, received.x)
        for wrong, text in (
            ({"max_rows": 0}, "max_rows: found 0"),
            ({"max_rows": 4, "layout": "packed"}, "max_rows: found 4 with packed rows"),
            ({"max_rows": 4, "worst_case": True}, "with worst-case sizes"),
            ({"max_rows": 4, "overflow": "cut"}, "overflow: found .cut."),
        ):
            with pytest.raises(errors.InvalidInputError, match=text):
                comm.dispatch(*arguments, **wrong)


def test_a_cap_without_drops_is_an_error_on_all_ranks_and_the_next_call_works(ranks):
    ranks(2, too_many, CASES[1])


def known_before(world, case, domains):
    sizes = (case.experts, case.topk, case.hidden, case.max_tokens)
    kinds = {"in_flight": 3, "handles": 5}
    # The config of the tests names no domains.
    needed = tokenyard.memory_needed(config(), case.ranks, *sizes, **kinds)
    with opened(world, case, **kinds) as comm:
        assert sorted(comm.report()["window_bytes"]) == sorted([needed["control"], needed["arena"]])
    more = tokenyard.memory_needed(config(), case.ranks, *sizes, in_flight=3, handles=10)
    assert more["handles"] == 2 * needed["handles"] > 0
    with pytest.raises(tokenyard.errors.InvalidInputError, match="divisor of the 2 ranks"):
        tokenyard.memory_needed(config(), case.ranks, *sizes, domains=domains)
    text = '[kernels]\nuse = "cuda"\ncuda.arena_mib = 64\n[transport.scale_up]\nuse = "nvlink"\n'
    gpu = tokenyard.Config.parse(text, "gpu.toml")
    on_gpu = tokenyard.memory_needed(gpu, case.ranks, *sizes)
    assert (on_gpu["arena"], on_gpu["host"]) == (64 << 20, 0)
    assert on_gpu["control"] > 0
    both = text + '[transport.scale_out]\nuse = "verbs"\n'
    between = tokenyard.memory_needed(
        tokenyard.Config.parse(both, "verbs.toml"), case.ranks, *sizes, domains=case.ranks
    )
    assert between["arena"] == 64 << 20
    assert between["host"] > 0
    other = tokenyard.Config.parse(text.replace("cuda", "theirs"), "other.toml")
    with pytest.raises(tokenyard.errors.UnsupportedError, match="found the kernel set `theirs`"):
        tokenyard.memory_needed(other, case.ranks, *sizes)


def test_what_a_communicator_costs_is_known_before_it_is_opened(ranks):
    ranks(2, known_before, CASES[1], 3)


def describe(world, case):
    with opened(world, case, in_flight=1, handles=3) as comm:
        found = (comm.rank, comm.ranks, comm.experts, comm.topk, comm.hidden, comm.max_tokens)
        assert found == (
            world.rank,
            case.ranks,
            case.experts,
            case.topk,
            case.hidden,
            case.max_tokens,
        )
        report = comm.report()
        assert report["kernels"] == "cpu"
        assert report["scale_up"]["transport"] == "shm"
        assert len(report["places"]) == case.ranks
        choices = tokenyard.survey(world, config())
        assert choices.pop("works_on_device") is False
        assert choices == {key: report[key] for key in choices}
        assert comm.lost_ranks() == []
        assert not comm.works_on_device
        assert not comm.closed
    assert comm.closed
    comm.close()
    gathered = world.all_gather("names", b"%d" % world.rank)
    world.barrier("end")
    return gathered


def test_a_communicator_says_what_it_is_and_a_survey_says_it_before(ranks):
    assert ranks(2, describe, Case(2)) == [[b"0", b"1"]] * 2


def seen_before_the_rows(world):
    me = world.rank
    with opened(world, CASES[1]) as comm:
        x, idx, weights = CASES[1].x[me], CASES[1].idx[me], CASES[1].weights[me]
        pending = comm.dispatch_send(x, idx, weights)
        place = pending.output()
        received, _ = pending.recv()
        with pytest.raises(ValueError, match="received before"):
            pending.output()
        if place is not None:
            assert place.x.data_ptr() == received.x.data_ptr()
            with pytest.raises(ValueError, match="not received yet"):
                comm.copy_out(place, x=np.zeros_like(x))
            same(place.x, np.asarray(received.x))
        held = comm.held_bytes
        assert held == received.x.nbytes
        known = {
            "max_tokens",
            "round_once",
            "sum_weights",
            "packed_forms",
            "logfmt10",
            "rank_major",
            "max_rows",
        }
        assert set(comm.forms) == known
        with pytest.raises(ValueError, match="without_sync: found True without a stream"):
            comm.dispatch(x, idx, weights, without_sync=True)
        with pytest.raises(ValueError, match="sms: found 24 without a stream"):
            comm.dispatch(x, idx, weights, sms=24)
        del place, received
        assert comm.held_bytes == 0


def test_an_output_has_a_place_before_it_is_received(ranks):
    ranks(2, seen_before_the_rows)
