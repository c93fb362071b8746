"""Replicas of experts: weights to slots, and gradients back."""

import pathlib
import random
import threading

import ml_dtypes
import numpy as np
import pytest
from oracle import Case
from pool import CONFIG, config
from test_exchange import same

import tokenyard
from tokenyard import errors
from tokenyard._replicas import memory

MIB = 1 << 20
KEPT = 0xA5
DTYPES = (np.uint8, np.int64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)


def drawn(shape, dtype, *seed):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.random.default_rng(seed).bytes(size), shape, dtype


def made(content):
    data, shape, dtype = content
    return np.frombuffer(data, np.uint8).copy().view(dtype).reshape(shape)


def weights_of(rank, local, shape, dtype, seed):
    return made(drawn((local, *shape), dtype, rank, seed, *shape))


def plan_of(ranks, local, spare, seed):
    """A random plan: some slots are empty, and the last rank has none."""
    draw = random.Random(seed)
    plan = np.full((ranks, spare), -1, np.int32)
    for rank in range(ranks - 1 if ranks > 2 else ranks):
        others = [e for e in range(ranks * local) if e // local != rank]
        chosen = draw.sample(others, min(spare, len(others)))
        for slot, expert in enumerate(chosen):
            if draw.random() < 0.8:
                plan[rank, slot] = expert
    return plan


def untouched(spare, shape, dtype):
    room = np.empty((spare, *shape), dtype)
    room.view(np.uint8)[...] = KEPT
    return room


def as_bytes(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def expect_slots(room, plan, me, local, shape, dtype, seed):
    for slot, expert in enumerate(plan[me]):
        if expert < 0:
            assert (as_bytes(room[slot]) == KEPT).all()
        else:
            owner, place = divmod(int(expert), local)
            same(
                as_bytes(room[slot]), as_bytes(weights_of(owner, local, shape, dtype, seed)[place])
            )


def test_the_example_of_the_documentation_runs(programs, monkeypatch):
    root = pathlib.Path(__file__).parents[2]
    page = (root / "docs/replicas.md").read_text()
    monkeypatch.chdir(root)
    example = page.split("```python\n")[1].split("```")[0]
    ended = programs(example, example, head="")
    assert [out for out, *_ in ended] == [["0", "2.0"], ["5", "1.0"]], ended


# Rows of an expert: their shape, and the most bytes of a message.
WIDTHS = (((64,), 64), ((5, 3, 8), 1 << 10), ((33,), 100), ((1000, 4), 1 << 20), ((0,), 64))


def of_weights(world, local, spare):
    me, ranks = world.rank, world.ranks
    for seed, (shape, most) in enumerate(WIDTHS):
        dtype = DTYPES[seed % len(DTYPES)]
        with tokenyard.Replicas(world, config(), max_bytes=most, in_flight=1 + seed % 3) as opened:
            assert (opened.rank, opened.max_bytes, opened.in_flight) == (me, most, 1 + seed % 3)
            for round in range(3):
                plan = plan_of(ranks, local, spare, (seed * 10 + round))
                mine = weights_of(me, local, shape, dtype, seed)
                other = weights_of(me, local, (7,), np.int32, seed)
                rooms = untouched(spare, shape, dtype), untouched(spare, (7,), np.int32)
                given = plan if round else plan.tolist()
                pending = opened.replicate([mine, other], list(rooms), given)
                pending.recv()
                pending.recv()
                expect_slots(rooms[0], plan, me, local, shape, dtype, seed)
                expect_slots(rooms[1], plan, me, local, (7,), np.int32, seed)
                same(mine, weights_of(me, local, shape, dtype, seed))
        assert opened.closed
        with pytest.raises(errors.InvalidInputError, match="found replicas that were closed"):
            opened.replicate(mine, rooms[0], plan)


@pytest.mark.parametrize(("count", "local", "spare"), [(2, 3, 2), (3, 2, 4), (4, 4, 3)])
def test_slots_get_the_weights_of_their_experts_and_empty_ones_stay(ranks, count, local, spare):
    ranks(count, of_weights, local, spare)


def of_large(world):
    """4 MiB for an expert, more than all credits, and a rank without slots that gives none."""
    me, shape = world.rank, (1024, 1024)
    plan = [[2, 3], [0, 1], [-1, -1]]
    with tokenyard.Replicas(world, config(), max_bytes=256 << 10, in_flight=2) as opened:
        mine = weights_of(me, 2, shape, np.float32, 5)
        room = untouched(2, shape, np.float32)
        opened.replicate(mine, None if me == 2 else room, plan).recv()
        if me < 2:
            expect_slots(room, plan, me, 2, shape, np.float32, 5)
        else:
            assert (as_bytes(room) == KEPT).all()


def test_experts_of_more_bytes_than_the_credits_arrive(ranks):
    ranks(3, of_large)


def of_plans(world):
    """A plan of the planner, as it is; and plans without any replica."""
    plan, _ = tokenyard.plan_replicas([90, 3, 1, 1, 70, 2], world.ranks, 2)
    with tokenyard.Replicas(world, config()) as opened:
        mine = weights_of(world.rank, 3, (16,), np.float32, 1)
        room = untouched(2, (16,), np.float32)
        opened.replicate(mine, room, plan).recv()
        expect_slots(room, np.asarray(plan), world.rank, 3, (16,), np.float32, 1)
        for empty in ([[], []], [[-1], [-1]]):
            opened.replicate(mine, None, empty).recv()
            opened.reduce_replicas(None, mine, empty).recv()
        same(mine, weights_of(world.rank, 3, (16,), np.float32, 1))


def test_a_plan_of_the_planner_is_taken_as_it_is(ranks):
    ranks(2, of_plans)


def of_domains(world):
    """Ranks of other rails, which no link joins: others forward."""
    text = CONFIG.format(arena_mib=4)
    text += '[transport.scale_out]\nuse = "shm"\n[transport.scale_out.shm]\nload_store = false\n'
    two = tokenyard.Config.parse(text + "[topology]\ndomains = 2\n", "domains.toml")
    me, shape = world.rank, (40, 3)
    with tokenyard.Replicas(world, two, max_bytes=64, in_flight=2) as opened:
        for seed in range(6):
            plan = plan_of(world.ranks, 2, 4, seed)
            mine, room = weights_of(me, 2, shape, np.int32, seed), untouched(4, shape, np.int32)
            opened.replicate(mine, room, plan).recv()
            expect_slots(room, plan, me, 2, shape, np.int32, seed)
            expect_sums(opened, me, plan, np.float32, shape, seed)


def test_ranks_of_other_rails_get_replicas_by_forwarding(ranks):
    ranks(4, of_domains)


def terms(rank, spare, shape, dtype, seed):
    values = np.random.default_rng((9, rank, seed)).standard_normal((spare, *shape))
    return (values * 10.0 ** (rank % 3)).astype(dtype)


def expect_sums(opened, me, plan, dtype, shape, seed):
    """The sum in the order of ranks, and then of slots."""
    local, spare = 2, np.shape(plan)[1]
    own = terms(100 + me, local, shape, dtype, seed)
    wide = np.float64 if dtype == np.float64 else np.float32
    sums = own.astype(wide)
    for rank, row in enumerate(np.asarray(plan)):
        for slot, expert in enumerate(row):
            if expert >= 0 and expert // local == me:
                sums[expert % local] += terms(rank, spare, shape, dtype, seed)[slot].astype(wide)
    grads = terms(me, spare, shape, dtype, seed)
    opened.reduce_replicas(grads, own, plan).recv()
    same(own, sums.astype(dtype))
    same(grads, terms(me, spare, shape, dtype, seed))


def of_sums(world):
    with tokenyard.Replicas(world, config(), max_bytes=100, in_flight=2) as opened:
        for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
            for seed, shape in enumerate(((8,), (5, 3, 11), (1,))):
                plan = plan_of(world.ranks, 2, 3, seed)
                expect_sums(opened, world.rank, plan, dtype, shape, seed)
        # Twice on a rank, and on all others.
        plan = [[2, 2], *([[0, 1]] * (world.ranks - 1))]
        expect_sums(opened, world.rank, plan, np.float32, (300,), 7)
        # Calls share what the largest of them needs.
        kept = opened._memories["numpy"]
        assert (len(kept.room), len(kept.wide)) == (96, 48)


@pytest.mark.parametrize("count", [2, 4])
def test_gradients_are_summed_in_the_order_of_ranks_bit_for_bit(ranks, count):
    ranks(count, of_sums)


def of_torch(world):
    import torch

    me, other = world.rank, 1 - world.rank
    plan = torch.tensor([[3, -1], [-1, 0]], dtype=torch.int32)
    with tokenyard.Replicas(world, config()) as opened:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int16):
            of = [(torch.arange(40).view(2, 4, 5) + 40 * rank).to(dtype) for rank in range(2)]
            parameter = torch.nn.Parameter(of[me].clone(), requires_grad=dtype.is_floating_point)
            into = torch.empty(2, 4, 5, dtype=dtype)
            into.view(torch.uint8).fill_(KEPT)
            opened.replicate([parameter], (into,), plan).recv()
            slot = int((plan[me] >= 0).nonzero()[0, 0])
            expected = of[other][int(plan[me, slot]) % 2]
            assert torch.equal(into[slot].view(torch.uint8), expected.view(torch.uint8))
            assert (into[1 - slot].view(torch.uint8) == KEPT).all()
        grads, own = torch.full((2, 6), 0.125).bfloat16(), torch.ones(2, 6).bfloat16()
        opened.reduce_replicas(grads, own, plan).recv()
        # Of rank 0 the first expert has a replica, of rank 1 the second.
        assert (own[me] == 1.125).all()
        assert (own[other] == 1).all()
        for dtype in (torch.bfloat16, torch.float32):
            with torch.inference_mode():
                grads, own = torch.full((2, 6), 2, dtype=dtype), torch.ones(2, 6, dtype=dtype)
            opened.replicate(grads, own, plan).recv()
            opened.reduce_replicas(grads, own, plan).recv()
            assert own.sum() == 6 * (2 + 1) + 6 * 2
        weights = torch.zeros(2, 4)
        for bad, says in (
            (weights.to("meta"), "weights: found a tensor on meta; expected one on cpu"),
            ([weights, weights.numpy()], "weights: found tensors of numpy and torch"),
        ):
            kind = errors.InvalidInputError if me else errors.RefusedError
            with pytest.raises(kind, match=says):
                opened.replicate(bad if me else weights, weights.clone(), plan)


def test_tensors_of_torch_are_replicated_and_summed(ranks):
    pytest.importorskip("torch", reason="torch is not installed")
    ranks(2, of_torch)


def of_overlap(world):
    """Between its halves a dispatch and a combine run."""
    case = Case(2, seed=4)
    me = world.rank
    plan = [[4], [0]]
    mine, room = weights_of(me, 4, (1000,), np.float32, 3), untouched(1, (1000,), np.float32)
    with (
        tokenyard.Communicator(world, config(), case.experts, case.topk, case.hidden, 12) as comm,
        tokenyard.Replicas(world, config(), max_bytes=256, in_flight=1) as opened,
    ):
        pending = opened.replicate(mine, room, plan)
        received, handle = comm.dispatch(case.x[me], case.idx[me], case.weights[me])
        same(received.x, case.rows(case.sources(me)))
        comm.combine(handle, np.asarray(received.x))
        pending.recv()
        expect_slots(room, plan, me, 4, (1000,), np.float32, 3)


def test_a_dispatch_runs_between_the_halves(ranks):
    ranks(2, of_overlap)


# Arguments that are wrong on rank 1, and the words of the message.
GOOD = {"weights": np.zeros((2, 8), np.float32), "plan": [[2, -1], [0, 1]]}
WRONG = (
    ({"plan": [[2, -1], [0, 4]]}, r"plan\[1\]\[1\]: found expert 4; expected -1, or below 4"),
    ({"plan": [[2, -1], [0, 3]]}, r"found expert 3, which rank 1 owns"),
    ({"plan": [[2, -1], [0, -2]]}, "found expert -2"),
    ({"plan": [[2, -1]]}, "plan: found 1 rows; expected one of slots for each of 2 ranks"),
    ({"plan": 7}, "plan: found int"),
    ({"plan": [[2, -1], [0, 1.5]]}, r"plan\[1\]\[1\]: found 1.5; expected an integer"),
    ({"plan": [[2, -1], [0, True]]}, r"plan\[1\]\[1\]: found True; expected an integer"),
    ({"plan": [[2, -1], 5]}, r"plan\[1\]: found int"),
    ({"weights": [1, 2]}, r"weights\[0\]: found int"),
    ({"weights": []}, "weights: found 0 tensors; expected 1 to 64"),
    ({"weights": np.zeros((2, 16), np.float32)[:, ::2]}, r"weights: found a view with gaps"),
    ({"weights": np.array(3, np.float32)}, r"weights: found no dimension"),
    ({"weights": np.zeros((0, 8), np.float32)}, r"weights: found \[0\] experts"),
    ({"into": None}, r"into: found NoneType"),
    ({"into": np.zeros((3, 8), np.float32)}, r"into: found 3 slots; expected the plan's 2"),
    (
        {"into": np.zeros((2, 9), np.float32)},
        r"into: found 36 bytes of an expert; expected 32",
    ),
    ({"into": np.broadcast_to(np.zeros((), "f4"), (2, 8))}, r"into: found a view with gaps"),
    ({"into": [np.zeros((2, 8), np.float32)] * 2}, "into: found 2 tensors; expected 1"),
)


def of_wrong(world):
    is_wrong = world.rank == 1
    with tokenyard.Replicas(world, config()) as opened:

        def call(bad):
            room = np.zeros((2, 8), np.float32)
            return opened.replicate(**{**GOOD, "into": room, **bad})

        read_only = np.zeros((2, 8), np.float32)
        read_only.flags.writeable = False
        for bad, says in (*WRONG, ({"into": read_only}, r"into: found a read-only array")):
            kind = errors.InvalidInputError if is_wrong else errors.RefusedError
            with pytest.raises(kind, match=says) as raised:
                call(bad if is_wrong else {})
            assert raised.value.rank == (None if is_wrong else 1)
            assert raised.value.operation == "replicate"
            call({}).recv()
        for grads, own, says in (
            (np.zeros((2, 8), "i4"), np.zeros((2, 8), "i4"), "found type int32; expected one of"),
            (np.zeros((2, 8), "f2"), np.zeros((2, 4), "f4"), "found type float16; expected float"),
        ):
            right = np.zeros((2, 8), np.float32)
            given = (grads, own) if is_wrong else (right, right.copy())
            with pytest.raises(errors.InvalidInputError if is_wrong else errors.RefusedError) as it:
                opened.reduce_replicas(*given, GOOD["plan"])
            assert says in str(it.value)
        # A call that was not received is in the way of the next one on its rank.
        pending = call({})
        if not is_wrong:
            pending.recv()
        with pytest.raises(errors.InvalidInputError if is_wrong else errors.RefusedError) as it:
            call({})
        assert "found a call that was not received" in str(it.value)
        pending.recv()
        call({}).recv()
    for options in ({"max_bytes": 63}, {"max_bytes": np.int64(63)}, {"max_bytes": 1 << 41},
                    {"max_bytes": 64.0}, {"in_flight": 17}):  # fmt: skip
        with pytest.raises(errors.InvalidInputError if is_wrong else errors.RefusedError):
            tokenyard.Replicas(world, config(), **(options if is_wrong else {}))


def test_what_is_wrong_on_one_rank_is_refused_on_all_and_the_replicas_go_on(ranks):
    ranks(2, of_wrong)


def of_no_room(world):
    """The refusal comes before ranks agree, so they go on."""
    is_wrong = world.rank == 1
    mine, plan = np.ones((2, 8), np.float32), [[2], [0]]
    with tokenyard.Replicas(world, config(), max_bytes=np.int64(64)) as opened:
        assert opened.max_bytes == 64
        for owner, name, raised in (
            (memory.Memory, "fit", MemoryError("no memory")),
            (threading.Thread, "start", RuntimeError("can't start new thread")),
        ):
            kind = errors.InvalidInputError if is_wrong else errors.RefusedError
            with pytest.MonkeyPatch.context() as patch:
                if is_wrong:
                    patch.setattr(owner, name, raising(raised))
                with pytest.raises(kind, match=str(raised)):
                    opened.reduce_replicas(mine[:1], mine.copy(), plan)
            own = mine.copy()
            opened.reduce_replicas(mine[:1], own, plan).recv()
            same(own, np.array([[2] * 8, [1] * 8], np.float32))


def raising(error):
    def act(*given):
        raise error

    return act


def test_memory_or_a_thread_that_the_system_refuses_is_a_refusal(ranks):
    ranks(2, of_no_room)


def of_mismatches(world):
    me = world.rank
    with tokenyard.Replicas(world, config()) as opened:
        mine, room = np.zeros((2, 8), np.float32), untouched(1, (8,), np.float32)
        wide = (np.zeros((2, 9), np.float32), np.zeros((1, 9), np.float32))
        for name, call in (
            ("plan", lambda: opened.replicate(mine, room, [[2], [0], [1 + (me == 1)]])),
            ("bytes", lambda: opened.replicate(*(wide if me else (mine, room)), [[2], [0], [0]])),
            ("call", lambda: getattr(opened, ("replicate", "reduce_replicas")[me == 1])(
                *((room, mine) if me == 1 else (mine, room)), [[2], [0], [0]])),
        ):  # fmt: skip
            with pytest.raises(errors.MismatchError, match=f"found {name} .* on rank 1") as raised:
                call()
            assert raised.value.rank == 1
            assert (as_bytes(room) == KEPT).all()
        opened.replicate(mine, room, [[2], [0], [0]]).recv()
        same(room, mine[:1])


def test_plans_and_sizes_that_ranks_do_not_share_are_an_error_on_all_ranks(ranks):
    ranks(3, of_mismatches)
