"""Threads, forks, exits and kills. Each test has processes of its own, which may end as they like."""

import pathlib
import signal
import threading
import time

import numpy as np
import pytest
from oracle import Case
from pool import CONFIG, LIMIT_S, config

import tokenyard

WAITS = """
start = time.monotonic()
try:
    comm.dispatch(x, idx)
except tokenyard.errors.PeerLostError as error:
    assert isinstance(error, ConnectionError)
    say(type(error).__name__, error.rank, time.monotonic() - start < 19)
"""
LOST = ["PeerLostError", "1", "True"]


def test_the_example_of_the_documentation_runs(programs, monkeypatch):
    root = pathlib.Path(__file__).parents[2]
    text = (root / "docs/python.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(root)
    for out, error, code in programs(example, example, head=""):
        assert (" ".join(out), code) == ("[2. 2. 2. 2.]", 0), error


def test_a_rank_that_exits_with_an_open_operation_keeps_no_other_waiting(programs):
    (out, error, code), (lines, _, other) = programs(
        WAITS, "pending = comm.dispatch_send(x, idx)\nsay('sent')\nsys.exit(3)"
    )
    assert (lines, other) == (["sent"], 3)
    # It sent its half of one dispatch, so that one may go well; the next one does not.
    if not out:
        assert code == 0, error
    else:
        assert out == LOST, error


def test_a_rank_that_exits_instead_of_an_operation_is_named_on_the_others(programs):
    (out, error, code), _ = programs(WAITS, "say('gone')")
    assert (out, code) == (LOST, 0), error


def test_a_rank_that_is_killed_is_named_on_the_others(programs):
    (out, error, code), (_, _, killed) = programs(WAITS, "os.kill(os.getpid(), signal.SIGKILL)")
    assert (out, code, killed) == (LOST, 0, -signal.SIGKILL), error


def test_a_rank_that_is_stopped_ends_the_waits_of_the_others_at_the_deadline(programs):
    stops = """
    if os.fork() == 0:
        time.sleep(4)
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
    """
    (out, error, code), _ = programs(WAITS, stops, deadline_ms=1000)
    assert (out, code) == (LOST, 0), error


MASKS = """
import os, pathlib, signal, sys
import numpy as np
import tokenyard
from tokenyard.deep_ep import Buffer
me = int(os.environ["TOKENYARD_RANK"])
path = pathlib.Path(os.environ["TOKENYARD_REPORTS"]) / f"{{me}}.toml"
path.write_text({config!r}.replace("[world]", "[world]\\non_failure = 'mask'"))
os.environ["TOKENYARD_CONFIG"] = str(path)
world = tokenyard.World.from_env(tokenyard.Config.load(path))
x, idx = np.full((3, 64), 1 + me, np.float32), np.array([[0, 2, 4]] * 3)
def sources(buffer, most):
    rows, counts, *_ = buffer.low_latency_dispatch(x, idx, most, 6, use_fp8=False)
    found = [row[0] for row in rows[0][: counts[0]]]
    print(*found, flush=True)
buffer = Buffer(world, low_latency_mode=True)
sources(buffer, 3)
world.barrier("all")
"""


def test_a_masked_loss_leaves_the_others_able_to_call_with_another_m_and_to_make_a_buffer(
    programs,
):
    goes_on = """
    sources(buffer, 3)
    sources(buffer, 5)
    other = Buffer(world, low_latency_mode=True)
    sources(other, 9)
    """
    # Rank 0 has all rows of the experts 0 and 1.
    ended = programs(goes_on, "os.kill(os.getpid(), signal.SIGKILL)", goes_on, head=MASKS)
    (out, error, code), (_, _, killed), (_, error_2, code_2) = ended
    assert (code, code_2, killed) == (0, 0, -signal.SIGKILL), error + error_2
    everyone, others = ["1.0"] * 3 + ["2.0"] * 3 + ["3.0"] * 3, ["1.0"] * 3 + ["3.0"] * 3
    assert out == everyone + 3 * others, error


COUNTS = """
from tokenyard.deep_ep import ElasticBuffer
weights = np.ones(idx.shape, np.float32)
elastic = ElasticBuffer(world, num_max_tokens_per_rank=3)
exact = ElasticBuffer(world, num_max_tokens_per_rank=3, allow_multiple_reduction=False)
def gaps(of, result):
    print(int(of.left_out[0]), flush=True)
    of.left_out[:] = 0
    return result
def steps():
    rows, _, handle, _, hook = buffer.low_latency_dispatch(x, idx, 3, 6, use_fp8=False, return_recv_hook=True)
    gaps(buffer, hook())
    *_, hook = buffer.low_latency_combine(rows, idx, weights, handle, return_recv_hook=True)
    gaps(buffer, hook())
    per_rank, _, per_expert, is_in, _ = buffer.get_dispatch_layout(idx, 6)
    rows, *_, handle, _ = gaps(buffer, buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert,
        is_token_in_rank=is_in,
    ))
    gaps(buffer, buffer.dispatch(x, handle=handle))
    gaps(buffer, buffer.combine(rows, handle))
    for of, form in ((elastic, False), (exact, True)):
        rows, _, _, handle, _ = gaps(of, of.dispatch(x, topk_idx=idx, num_experts=6, do_expand=form))
        gaps(of, of.dispatch(x, handle=handle, do_expand=form))
        gaps(of, of.combine(rows, handle))
steps()
world.barrier("all, again")
"""


def test_a_buffer_counts_what_its_operations_leave_out(programs):
    """Each of three tokens has an expert on each of three ranks."""
    goes_on, ends = COUNTS + "steps()", COUNTS + "os.kill(os.getpid(), signal.SIGKILL)"
    ended = programs(goes_on, ends, goes_on, head=MASKS)
    dispatch, replay, combine = "1", "1", "3"
    without = [dispatch, combine] + 3 * [dispatch, replay, combine]
    for rank in (0, 2):
        out, error, code = ended[rank]
        assert code == 0, error
        assert out[-2 * len(without) :] == ["0"] * len(without) + without, (rank, out, error)


def test_an_exception_in_the_body_of_with_is_reported_to_the_others(programs):
    raises = """
    try:
        with world, comm:
            raise RuntimeError("no more memory")
    except RuntimeError:
        say("raised")
    time.sleep(1)
    """
    waits = """
    try:
        comm.dispatch(x, idx)
    except tokenyard.Error as error:
        say("no more memory" in str(error), error.rank)
    """
    (out, error, code), (lines, _, _) = programs(waits, raises)
    assert (out, code, lines) == (["True", "1"], 0, ["raised"]), error


def test_exit_ends_the_wait_of_a_daemon_thread_and_tells_the_others(programs):
    waits_in_a_thread = """
    thread = threading.Thread(target=lambda: comm.dispatch(x, idx), daemon=True)
    thread.start()
    time.sleep(0.5)
    say("end")
    """
    waits = """
    try:
        world.barrier("end")
    except tokenyard.errors.PeerLostError as error:
        say(error.rank, "the interpreter of this rank ends" in str(error))
    """
    (out, error, code), (lines, trouble, _) = programs(waits_in_a_thread, waits)
    assert (out, code) == (["end"], 0), error
    assert lines == ["0", "True"], trouble


def test_a_forked_child_may_use_nothing_and_harms_nothing(programs):
    forks = """
    received, handle = comm.dispatch(x, idx)
    rows = np.from_dlpack(received.x)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in [
            lambda: comm.dispatch(x, idx),
            lambda: comm.combine(handle, received.x),
            lambda: comm.close(),
            lambda: world.barrier("child"),
            lambda: tokenyard.Communicator(world, config, 4, 2, 64, 8),
            lambda: handle.tokens,
            lambda: comm.rank,
        ]:
            try:
                call()
            except RuntimeError as error:
                refused += "forked from" in str(error) and "spawn" in error.fix
        say("refused", refused)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (rows == 1).all()
    out, _ = comm.combine(handle, received.x)
    say(float(np.asarray(out)[0, 0]))
    comm.close()
    """
    for out, error, code in programs(forks, forks):
        assert (out, code) == (["refused", "7", "2.0"], 0), error


def test_a_child_that_a_library_forks_drops_nothing_of_its_parent(programs):
    forks = """
    import ctypes
    received, handle = comm.dispatch(x, idx)
    child = ctypes.CDLL(None).fork()
    if child == 0:
        try:
            comm.dispatch(x, idx)
        except RuntimeError as error:
            say("forked from" in str(error))
        # They are the parent's.
        del received, handle, comm, world
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    out, _ = comm.combine(handle, received.x)
    say(float(np.asarray(out)[0, 0]))
    comm.close()
    """
    for out, error, code in programs(forks, forks):
        assert (out, code) == (["True", "2.0"], 0), error


def test_a_hook_of_a_fork_that_was_there_before_drops_nothing_of_its_parent(programs):
    forks = """
    held = [comm]
    received, handle = comm.dispatch(x, idx)
    del comm
    os.register_at_fork(after_in_child=held.clear)
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    out, _ = held[0].combine(handle, received.x)
    say(float(np.asarray(out)[0, 0]))
    held[0].close()
    """
    for out, error, code in programs(forks, forks):
        assert (out, code) == (["2.0"], 0), error


# As `HEAD`, for the drop-in: `buffer` of two ranks, and what its calls take.
DEEP_EP = """
import os, signal, sys, time
import numpy as np
rank = os.environ["TOKENYARD_RANK"]
os.environ["TOKENYARD_CONFIG"] = os.path.join(os.environ["TOKENYARD_REPORTS"], rank + ".toml")
with open(os.environ["TOKENYARD_CONFIG"], "w") as file:
    file.write({config!r})
import tokenyard
from tokenyard.deep_ep import Buffer
buffer = Buffer(explicitly_destroy=True)
x, idx = np.ones((3, 64), np.float32), np.array([[0, 3]] * 3)
def dispatch():
    counts = buffer.get_dispatch_layout(idx, 4)
    return buffer.dispatch(
        x, None, *counts[:2], counts[3], counts[2], topk_idx=idx, topk_weights=np.ones((3, 2), np.float32)
    )
def say(*words):
    print(*words, flush=True)
"""


def test_a_buffer_that_is_not_destroyed_ends_with_its_program(programs):
    text = """
    recv_x, *_, handle, _ = dispatch()
    out, *_ = buffer.combine(recv_x, handle)
    say(float(out[0, 0]))
    if buffer.rank == 0:
        time.sleep(1)
    """
    for out, error, code in programs(text, text, head=DEEP_EP):
        assert (out, code) == (["2.0"], 0), error


def test_a_communicator_that_an_error_has_closed_says_so(programs):
    ends = """
    try:
        comm.dispatch(x, np.array([[0, 4]] * 3))
    except tokenyard.errors.InvalidInputError:
        say(comm.closed)
    """
    waits = """
    try:
        comm.dispatch(x, idx)
    except tokenyard.errors.RefusedError:
        say(comm.closed)
    for call in [lambda: comm.dispatch(x, idx)] * 2 + [comm.close]:
        try:
            call()
        except tokenyard.errors.PeerLostError as error:
            say(comm.closed, error.rank)
    comm.close()
    """
    (out, error, code), (lines, _, _) = programs(waits, ends)
    assert (out, code) == (["False"] + ["True", "1"] * 3, 0), error
    assert lines == ["False"]


def test_a_buffer_that_an_error_has_closed_raises_at_once(programs):
    text = """
    dispatch()
    if buffer.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        start = time.monotonic()
        try:
            dispatch()
        except tokenyard.errors.PeerLostError as error:
            say(error.rank, time.monotonic() - start < 19)
    """
    (out, error, code), _ = programs(text, text, head=DEEP_EP)
    assert (out, code) == (["1", "True"] * 3, 0), error


def test_a_rank_that_exits_before_its_hook_keeps_no_other_waiting(programs):
    text = """
    *_, hook = buffer.low_latency_dispatch(x, idx, 8, 4, use_fp8=False, return_recv_hook=True)
    start = time.monotonic()
    if buffer.rank == 1:
        sys.exit(3)
    try:
        hook()
        dispatch()
    except tokenyard.errors.PeerLostError as error:
        say(error.rank, time.monotonic() - start < 19)
    """
    (out, error, code), (_, _, other) = programs(text, text, head=DEEP_EP)
    assert (out, code, other) == (["1", "True"], 0, 3), error


def test_a_forked_child_may_not_use_a_buffer(programs):
    text = """
    recv_x, *_, handle, _ = dispatch()
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (dispatch, lambda: buffer.combine(recv_x, handle), Buffer):
            try:
                call()
            except RuntimeError as error:
                refused += "forked from" in str(error)
        say("refused", refused)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    out, *_ = buffer.combine(recv_x, handle)
    say(float(out[0, 0]))
    buffer.destroy()
    """
    for out, error, code in programs(text, text, head=DEEP_EP):
        assert (out, code) == (["refused", "3", "2.0"], 0), error


def test_a_communicator_that_is_garbage_is_dropped_and_not_closed(programs):
    drops = """
    import gc
    comm.dispatch(x, idx)
    world.barrier("both")
    if me == 0:
        start = time.monotonic()
        del comm
        gc.collect()
        say(time.monotonic() - start < 15)
        world.barrier("dropped")
    else:
        world.barrier("dropped")
        say(True)
    """
    for out, error, code in programs(drops, drops):
        assert (out, code) == (["True"], 0), error


def test_the_gil_is_free_while_a_rank_waits(programs):
    waits = """
    count, is_over = 0, False
    def work():
        global count
        while not is_over:
            count += 1
            time.sleep(0.001)
    thread = threading.Thread(target=work)
    thread.start()
    before = count
    comm.dispatch(x, idx)
    after = count
    is_over = True
    thread.join()
    say(after - before > 100)
    comm.close()
    """
    late = "time.sleep(1)\ncomm.dispatch(x, idx)\ncomm.close()"
    (out, error, code), _ = programs(waits, late)
    assert (out, code) == (["True"], 0), error


def rank_thread(rank, meeting, case, failures):
    try:
        with tokenyard.World(rank, case.ranks, exchange=meeting(rank), config=config()) as world:
            sizes = (case.experts, case.topk, case.hidden, case.max_tokens)
            with tokenyard.Communicator(world, config(), *sizes, handles=64) as comm:
                expected, kept = case.rows(case.sources(rank)), []
                for _ in range(100):
                    received, handle = comm.dispatch(case.x[rank], case.idx[rank])
                    out, _ = comm.combine(handle, received.x)
                    kept.append(np.from_dlpack(received.x))
                    np.testing.assert_array_equal(kept[0], expected)
                    assert np.asarray(out).shape == case.x[rank].shape
                    if len(kept) > 20:
                        # Another thread frees them, while this one is in a call.
                        old, kept = kept, []
                        threading.Thread(target=old.clear).start()
                        del old
    except BaseException as error:
        failures.append(error)
        raise


def test_ranks_that_are_threads_of_one_process_never_wait_for_the_gil_and_a_lock_at_once():
    case = Case(2, seed=10, tokens=(6, 9))
    barrier, given, failures = threading.Barrier(2), [None, None], []

    def meeting(rank):
        def exchange(mine):
            given[rank] = mine
            barrier.wait(LIMIT_S)
            return list(given)

        return exchange

    is_over = False

    def noise():
        while not is_over:
            sum(range(1000))

    noises = [threading.Thread(target=noise, daemon=True) for _ in range(2)]
    threads = [
        threading.Thread(target=rank_thread, args=(rank, meeting, case, failures), daemon=True)
        for rank in range(2)
    ]
    for thread in noises + threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a deadlock"
    is_over = True
    assert not failures


def test_two_threads_of_a_rank_take_turns():
    world = tokenyard.World(0, 1, exchange=lambda mine: [mine])
    case = Case(1, seed=11, tokens=(5,))
    comm = tokenyard.Communicator(world, config(), 8, 3, 64, 12, handles=32)
    done = []

    def work():
        for _ in range(200):
            received, handle = comm.dispatch(case.x[0], case.idx[0])
            comm.combine(handle, received.x)
        done.append(True)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + LIMIT_S
    for thread in threads:
        thread.join(end - time.monotonic())
    assert done == [True] * 3
    comm.close()


def test_the_environment_names_the_interface_where_no_config_does(monkeypatch):
    monkeypatch.setenv("TOKENYARD_INTERFACE", "nowhere0")
    with pytest.raises(tokenyard.errors.InvalidInputError, match='found no interface "nowhere0"'):
        tokenyard.World(0, 1, exchange=lambda mine: [mine])
    monkeypatch.setenv("TOKENYARD_INTERFACE", "lo")
    tokenyard.World(0, 1, exchange=lambda mine: [mine]).close()
    text = CONFIG.format(arena_mib=4).replace("[world]", '[world]\ninterface = "lo"')
    named = tokenyard.Config.parse(text, "named.toml")
    monkeypatch.setenv("TOKENYARD_INTERFACE", "nowhere0")
    tokenyard.World(0, 1, exchange=lambda mine: [mine], config=named).close()
