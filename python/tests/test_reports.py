"""Public reports of faults of libraries of this kind, tried here. docs/public-reports.md lists all of them."""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time

import exact
import numpy as np
import pytest
import sweeps
from exact import Exchange
from pool import LIMIT_S, Pool, free_port
from test_deep_ep_callers import needs_torch
from test_deep_ep_normal import buffer_of

from tokenyard import errors
from tokenyard.deep_ep import ElasticBuffer

# A default run leaves sweeps out that take minutes.
ALL = "TOKENYARD_TEST_ALL" in os.environ
OPERATIONS = 2000


@pytest.fixture(scope="module")
def more_ranks(reports):
    """As `ranks`, for more than four."""
    workers = Pool(16)
    yield workers.run
    workers.close()


def buffers(world, most, **options):
    """A buffer of each kind."""
    buffer = buffer_of(world, **options)
    return buffer, ElasticBuffer(world, num_max_tokens_per_rank=most, explicitly_destroy=True)


@contextlib.contextmanager
def both(world, most):
    """A buffer of each kind, which are destroyed behind the checks."""
    made = buffers(world, most)
    yield made
    for buffer in reversed(made):
        buffer.destroy()


def every_m(world):
    with both(world, max(sweeps.MOST_TOKENS)) as made:
        sweeps.every_m(*made)


def test_every_number_of_tokens_gives_right_rows_for_every_m(ranks):
    ranks(2, every_m)


def growth(world):
    """The other ranks bring three tokens, or none."""
    buffer, elastic = buffers(world, 1024)
    for step in range(12):
        grown = (1 << step) // 2
        it = Exchange((3, grown, 0), experts=6, hidden=16, most=1024)
        exact.normal(buffer, it)()
        exact.elastic(elastic, it, is_expanded=step % 2 == 0)()
    elastic.destroy()
    buffer.destroy()


def test_tokens_may_grow_on_one_rank_alone(ranks):
    ranks(3, growth)


def many_tokens(world):
    with both(world, sweeps.MANY_TOKENS) as made:
        sweeps.many_tokens(*made, both=ALL)


def test_a_rank_may_bring_more_tokens_than_16_bits_count(ranks):
    ranks(2, many_tokens)


def shapes(world):
    with both(world, 5) as made:
        sweeps.shapes(*made)


def test_shapes_that_other_libraries_refuse_are_right(ranks):
    ranks(2, shapes)


def one_expert(world):
    with both(world, 33) as made:
        sweeps.one_expert(*made)


def many_combines(world):
    """All ranks combine, one after the other with rows of every other rank; some bring nothing."""
    with both(world, 3) as made:
        for step in range(3):
            tokens = tuple((rank + step) % 4 for rank in range(world.ranks))
            sizes = {"experts": 2 * world.ranks, "topk": 8, "most": 3, "seed": step}
            sweeps.every_kind(*made, Exchange(tokens, **sizes))


@contextlib.contextmanager
def sixty_four_ranks():
    """Forked from a process that has imported what a buffer needs: 64 imports would take most of the time, and
    gigabytes of memory."""
    multiprocessing.set_forkserver_preload(["pytest", "tokenyard.deep_ep", "torch._dynamo"])
    workers = Pool(64, "forkserver")
    try:
        yield workers.run
    finally:
        workers.close()


@pytest.mark.parametrize("size", [4, 64] if ALL else [4])
def test_one_expert_may_get_all_tokens_and_combines_of_all_ranks_end(size, ranks):
    with sixty_four_ranks() if size > 4 else contextlib.nullcontext(ranks) as run:
        for function in (one_expert, many_combines):
            run(size, function)


def no_barrier(world):
    """Each rank sleeps when it likes, and what it got is looked at when all is over: nothing brings ranks together."""
    buffer, elastic = buffers(world, 24)
    asleep, drawn = random.Random(world.rank), random.Random(5)

    def pause():
        if asleep.random() < 0.3:
            time.sleep(asleep.random() / 500)

    checks = []
    for number in range(OPERATIONS // 2):
        tokens = tuple(drawn.randrange(25) for _ in range(world.ranks))
        it = Exchange(tokens, experts=3 * world.ranks, hidden=16, most=24, seed=number)
        call = (
            lambda it: exact.low_latency(buffer, it, pause),
            lambda it: exact.normal(buffer, it, pause),
            lambda it: exact.elastic(elastic, it, pause),
            lambda it: exact.elastic(elastic, it, pause, is_expanded=True),
        )[drawn.randrange(4)]
        checks.append(call(it))
        pause()
    for check in checks:
        check()
    elastic.destroy()
    buffer.destroy()


@pytest.mark.parametrize("size", range(3, 9) if ALL else (3,))
def test_ranks_that_meet_in_no_barrier_overwrite_no_rows_of_each_other(size, ranks, more_ranks):
    (ranks if size <= 4 else more_ranks)(size, no_barrier)


def many_experts(world):
    buffer = buffer_of(world, low_latency_mode=True)
    it = Exchange((7,) * world.ranks, experts=256, topk=8, hidden=7168, most=8)
    exact.low_latency(buffer, it, use_fp8=True)()
    buffer.destroy()


@pytest.mark.parametrize("size", [4, 16] if ALL else [4])
def test_fp8_rows_of_256_experts_arrive(size, ranks, more_ranks):
    (ranks if size <= 4 else more_ranks)(size, many_experts)


def memory(world):
    """Where the memory of windows lies."""
    buffer = buffer_of(world)
    exact.normal(buffer, Exchange((3, 2)))()
    with open("/proc/self/maps") as file:
        maps = file.read()
    assert "/memfd:tokenyard" in maps
    assert "/dev/shm/tokenyard" not in maps
    buffer.destroy()


def test_memory_that_ranks_share_has_no_name_that_a_killed_rank_could_leave(ranks):
    ranks(2, memory)


def open_hooks(world):
    """Three batches under way at once, whose hooks come in any order. A fifth operation is refused. A combine counts
    twice on the CPU: its weights travel in an operation of their own."""
    me, buffer, refused = world.rank, buffer_of(world), "call the hook that the earlier call"
    batches = [Exchange((5, 3), most=8, seed=seed) for seed in range(3)]

    def dispatch(it):
        return buffer.low_latency_dispatch(
            it.x(me), it.ids(me), it.most, it.experts, use_fp8=False, return_recv_hook=True
        )

    def combine(number):
        rows, _, handle, _, _ = sent[number]
        ids = batches[number].ids(me)
        weights = np.ones(ids.shape, np.float32)
        return buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=True)

    for order in ((0, 1, 2), (2, 0, 1)):
        sent = [dispatch(it) for it in batches]
        for number in order:
            sent[number][4]()
        combined = [combine(0), combine(1)]
        with pytest.raises((errors.InvalidInputError, errors.RefusedError), match=refused):
            combine(2)
        for _, _, hook in reversed(combined):
            hook()
        combined.append(combine(2))
        combined[2][2]()
        for it, (out, _, _) in zip(batches, combined, strict=True):
            exact.same(out, exact.scaled(it.x(me), it.times(me)[1]))
    sent = [dispatch(it) for it in (*batches, batches[0])]
    # Rank 1 alone has a hook too many, twice: it does not run the hook that the first refusal names.
    if me == 0:
        sent[0][4]()
    for _ in range(2):
        if me == 0:
            over = dispatch(batches[0])
            with pytest.raises(errors.RefusedError, match=refused):
                over[4]()
        else:
            with pytest.raises(errors.InvalidInputError, match=refused):
                dispatch(batches[0])
    for one in sent:
        one[4]()
    exact.low_latency(buffer, batches[1])()
    buffer.destroy()


def refused_dispatches(world):
    """Rank 1 refuses an operation where it is called. Rank 0 calls the hook of a later one first, or only that one."""
    me, buffer, it = world.rank, buffer_of(world), Exchange((5, 3), most=8)

    def dispatch(is_bad=False):
        ids = it.experts if is_bad else it.ids(me)
        return buffer.low_latency_dispatch(
            it.x(me), ids, it.most, it.experts, use_fp8=False, return_recv_hook=True
        )

    exact.low_latency(buffer, it)()
    for is_dropped in (False, True):
        if me == 1:
            with pytest.raises(errors.InvalidInputError, match="topk_idx"):
                dispatch(is_bad=True)
            dispatch()[4]()
        elif is_dropped:
            dispatch()
            dispatch()[4]()
        else:
            bad, good = dispatch(), dispatch()
            good[4]()
            with pytest.raises(errors.RefusedError, match="topk_idx"):
                bad[4]()
            bad[4]()
    exact.low_latency(buffer, it)()
    buffer.destroy()


def test_a_hook_that_is_called_before_that_of_a_refused_operation_keeps_no_rank_waiting(ranks):
    # Without an end of its own it takes late_ms, a minute here, and then raises.
    ranks(2, refused_dispatches)


def test_three_batches_may_be_open_at_once_and_a_fifth_operation_is_refused(ranks):
    ranks(2, open_hooks)


@needs_torch
def test_tensors_of_torch_without_rows_have_no_memory_and_are_taken(ranks):
    import torch_ranks

    ranks(2, torch_ranks.no_rows)


# Buffers of a group that is not the first, and counts its ranks in another order.
LIVE = """
import os, signal, sys, time
import numpy as np
import torch
import torch.distributed as dist
from tokenyard.deep_ep import Buffer, ElasticBuffer
torch.set_num_threads(1)
rank, *ports = map(int, sys.argv[1:])
idx, weights = torch.tensor([[0, 3]] * 3), torch.ones(3, 2)
def start(port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    # Before any group of all ranks: others count from 0 in it, too.
    dist.new_group([0])
    group = dist.new_group([1, 0], sort_ranks=False)
    return Buffer(group), ElasticBuffer(group, num_max_tokens_per_rank=3, explicitly_destroy=True)
def step(buffer, elastic):
    x = torch.ones(3, 64)
    rows, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, 3, 4, use_fp8=False)
    out, *_ = buffer.low_latency_combine(rows, idx, weights, handle)
    rows, _, _, handle, _ = elastic.dispatch(x, topk_idx=idx, num_experts=4)
    assert out.eq(2).all() and elastic.combine(rows, handle)[0].eq(2).all()
"""
# In either order with the group. Then one program is gone, and the other has no one to say goodbye to.
ORDERS = """
buffer, elastic = start(ports[0])
step(buffer, elastic)
del buffer
elastic.destroy()
dist.destroy_process_group()
buffer, elastic = start(ports[1])
step(buffer, elastic)
dist.destroy_process_group()
step(buffer, elastic)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.5)
# From here on the interpreter ends. All processes of a host have this clock.
print(time.monotonic(), flush=True)
"""
# An end that waits for its peer takes a deadline, which is at least that of DeepEP here. An end without a wait has no
# limit: a busy machine is slow.
DEADLINE_S = 100


@needs_torch
def test_a_program_ends_with_live_buffers_in_either_order_with_its_group_and_after_its_peer(
    monkeypatch, reports
):
    monkeypatch.delenv("TOKENYARD_CONFIG", raising=False)
    ports = [str(free_port()) for _ in range(2)]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", LIVE + ORDERS, str(rank), *ports],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed, of_first = started[0].communicate(timeout=LIMIT_S)
    took = time.monotonic() - float(printed or "nan")
    _, of_other = started[1].communicate(timeout=LIMIT_S)
    codes = [process.returncode for process in started]
    assert codes == [0, -signal.SIGKILL], f"{of_first}\n{of_other}"
    assert took < DEADLINE_S, f"the interpreter has ended after {took:.1f} s"
