"""Ids of copies of experts, and dispatches to them."""

import numpy as np
import pytest
from oracle import Case
from pool import config
from test_exchange import same
from test_replicas import plan_of

import tokenyard
from tokenyard import errors


def copies_of(plan, experts):
    """By expert, the ids of its copies, with their ranks."""
    ranks, spare = np.shape(plan)
    local = experts // ranks
    copies = [[] for _ in range(experts)]
    for rank in range(ranks):
        for place in range(local + spare):
            own = rank * local + place if place < local else plan[rank][place - local]
            if own >= 0:
                copies[own].append((rank * (local + spare) + place, rank))
    return copies


LIBRARIES = ("numpy", "torch")


@pytest.mark.parametrize("library", LIBRARIES)
def test_ids_of_copies_take_turns_by_token(library):
    of = pytest.importorskip(library, reason=f"{library} is not installed")
    ids = np.random.default_rng(3).integers(-1, 8, (50, 3)).astype(np.int32)
    for spare in (0, 1, 3):
        plan = plan_of(4, 2, spare, 5)
        copies = copies_of(plan, 8)
        given = (ids, plan) if library == "numpy" else (of.from_numpy(ids), of.from_numpy(plan))
        for rank in range(4):
            found = np.asarray(tokenyard.physical_ids(*given, experts=8, rank=rank))
            assert found.dtype == np.int32
            for token, row in enumerate(ids):
                for k, expert in enumerate(row):
                    if expert < 0:
                        assert found[token, k] == -1
                    else:
                        turn = (token + rank) % len(copies[expert])
                        assert found[token, k] == copies[expert][turn][0]


@pytest.mark.parametrize("library", LIBRARIES)
def test_ids_of_copies_by_locality_are_the_nearest_ones(library):
    of = pytest.importorskip(library, reason=f"{library} is not installed")
    ids = np.random.default_rng(4).integers(-1, 8, (40, 3))
    plan = plan_of(4, 2, 3, 6)
    copies = copies_of(plan, 8)
    given = (ids, plan) if library == "numpy" else (of.from_numpy(ids), of.from_numpy(plan))
    seen = set()
    for rank in range(4):
        options = {"experts": 8, "by": "locality", "rank": rank, "domain_ranks": 2}
        found = np.asarray(tokenyard.physical_ids(*given, **options))
        for token, row in enumerate(ids):
            for k, expert in enumerate(row):
                if expert < 0:
                    assert found[token, k] == -1
                    continue
                all_of = copies[expert]
                own = [one for one in all_of if one[1] == rank]
                near = [one for one in all_of if one[1] // 2 == rank // 2]
                chosen = own or near or all_of
                seen.add(len(own) * 100 + len(near) * 10 + len(all_of))
                assert found[token, k] == chosen[(token + rank) % len(chosen)][0]
    assert len(seen) > 4


def test_what_makes_no_ids_of_copies_is_refused():
    ids, plan = np.zeros((2, 2), np.int64), [[1], [0]]
    for given, options, says in (
        ((ids, plan), {"experts": 3}, "experts: found 3"),
        ((ids, plan), {"by": "rank"}, "by: found 'rank'"),
        ((ids, plan), {"rank": 2}, "rank: found 2"),
        ((ids, plan), {"domain_ranks": 3}, "domain_ranks: found 3"),
        ((ids[0], plan), {}, r"topk_idx: found shape \[2\]"),
        ((ids, [1, 0]), {}, r"plan: found shape \[2\]"),
        ((ids, [[1], []]), {}, "plan: cannot be read"),
        ((ids, [[1.5], [0]]), {}, "plan: found type float64"),
        ((ids.tolist(), plan), {}, "topk_idx: found list"),
        ((ids * 0.5, plan), {}, "topk_idx: found type float64; expected integers"),
        ((ids, plan), {"rank": 0.0}, "rank: found 0.0; expected an integer"),
        ((ids, plan), {"experts": True}, "experts: found True; expected an integer"),
        (
            (ids.astype(np.int8), [[1] * 63, [0] * 63]),
            {},
            "found type int8; expected one that holds 128",
        ),
    ):
        with pytest.raises(errors.InvalidInputError, match=says):
            tokenyard.physical_ids(*given, **{"experts": 2, **options})
    # No dispatch takes what is no expert.
    assert tokenyard.physical_ids(np.array([[2, 0]]), plan, experts=2).min() == 0
    assert tokenyard.physical_ids(np.array([[2, 0]]), plan, experts=2).max() >= 4


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_no_id_of_an_expert_becomes_none_of_a_copy(library):
    of = pytest.importorskip(library, reason=f"{library} is not installed")
    plan, options = [[2], [0]], {"experts": np.int64(4), "rank": np.int32(1)}
    for dtype in (np.int8, np.int32, np.int64):
        most = int(np.iinfo(dtype).max)
        given = np.array([[3, 4, 5, 6, most, -1, -7, -most - 1]], dtype)
        ids = given if library == "numpy" else of.from_numpy(given)
        found = np.asarray(tokenyard.physical_ids(ids, plan, **options))
        assert found.dtype == dtype
        assert found.tolist() == [[4, 6, 6, 6, most, -1, -7, -most - 1]]
    unsigned = np.array([[1, 2**64 - 1]], np.uint64)
    assert tokenyard.physical_ids(unsigned, plan, **options).tolist() == [[1, 2**64 - 1]]


def of_dispatches(world):
    """Rows reach replicas: the sum over copies is that over experts."""
    case = Case(2, seed=8)
    # Of whole numbers, sums in any order are equal.
    case.x = [np.round(8 * x) for x in case.x]
    me, local, spare = world.rank, case.experts // 2, 2
    plan = [[4, 6], [0, 3]]
    physical = 2 * (local + spare)
    logical = [*range(4), 4, 6, *range(4, 8), 0, 3]
    with tokenyard.Communicator(world, config(), physical, case.topk, case.hidden, 12) as comm:
        for by in ("token", "locality"):
            ids = tokenyard.physical_ids(
                case.idx[me], plan, experts=case.experts, by=by, rank=me, domain_ranks=1
            )
            received, handle = comm.dispatch(
                case.x[me], ids, case.weights[me], layout="expert_major"
            )
            counts = np.asarray(received.expert_counts)
            x = np.asarray(received.x)
            scaled, at = np.zeros_like(x), 0
            for place, count in enumerate(counts):
                factor = 1 + logical[me * (local + spare) + place]
                scaled[at : at + count] = x[at : at + count] * factor
                at += count
            out, _ = comm.combine(handle, scaled, weighted=False)
            factors = np.where(case.idx[me] >= 0, case.idx[me] + 1, 0).sum(1)
            same(np.asarray(out), case.x[me] * factors[:, None].astype(x.dtype))


def test_a_dispatch_to_ids_of_copies_reaches_the_same_experts(ranks):
    ranks(2, of_dispatches)
