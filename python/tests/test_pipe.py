"""Pipes: messages between pairs of ranks."""

import pathlib
import signal

import numpy as np
import pytest
from pool import CONFIG, config
from test_exchange import same
from test_refusals import Broken, Negated, read_only

import tokenyard
from tokenyard import errors

NUMPY = ("float16", "float32", "uint8", "int32", "int64")
SHAPES = ((5,), (), (0, 3), (2, 3, 4, 5), (1, 1), (7, 3))


class Lent:
    """A tensor of a library that has DLPack alone."""

    def __init__(self, array):
        self._array = array

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)


def test_the_example_of_the_documentation_runs(programs, monkeypatch):
    root = pathlib.Path(__file__).parents[2]
    example = (root / "docs/pipes.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(root)
    ended = programs(example, example, example, head="")
    assert [out for out, *_ in ended] == [["1.0"], ["2.0"], ["3.0"]], ended


def opened(world, max_bytes=1024, **options):
    return tokenyard.Pipe(world, config(), max_bytes=max_bytes, **options)


def values(dtype, shape, seed):
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


def of_numpy(world):
    me = world.rank
    after, before = (me + 1) % world.ranks, (me - 1) % world.ranks
    with opened(world) as pipe:
        assert (pipe.rank, pipe.max_bytes, pipe.in_flight, pipe.closed) == (me, 1024, 4, False)
        assert repr(pipe) == "tokenyard.Pipe(max_bytes=1024, in_flight=4)"
        for dtype in NUMPY:
            for seed, shape in enumerate(SHAPES):
                mine = values(dtype, shape, (seed, me))
                pipe.send(mine if seed % 2 else Lent(mine), after)
                mine[...] = 101
                found = np.zeros(shape, dtype)
                pipe.recv(Lent(found) if seed % 2 else found, before)
                same(found, values(dtype, shape, (seed, before)))
        pipe.flush()
        report = pipe.report()
        assert len(report["window_bytes"]) == 1
        assert len(pipe.waited_ns()) == world.ranks
    assert pipe.closed
    pipe.close()
    with pytest.raises(errors.InvalidInputError, match="the pipe was closed"):
        pipe.flush()


def test_arrays_of_all_types_and_shapes_go_round(ranks):
    ranks(3, of_numpy)


def of_torch(world):
    import torch

    other = 1 - world.rank
    with opened(world) as pipe:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64):
            of = [(torch.arange(24).reshape(2, 3, 4) + rank).to(dtype) for rank in range(2)]
            pipe.send(of[world.rank], other)
            found = torch.zeros(2, 3, 4).to(dtype)
            pipe.recv(found, other)
            assert torch.equal(found.view(torch.uint8), of[other].view(torch.uint8))
        # A view without gaps, and bytes of another type and shape.
        whole = torch.arange(12, dtype=torch.int32).reshape(3, 4)
        pipe.send(whole[1:], other)
        found = np.zeros(32, np.uint8)
        pipe.recv(found, other)
        same(found.view(np.int32), np.arange(4, 12))


def test_tensors_of_torch_arrive_bit_for_bit(ranks):
    pytest.importorskip("torch", reason="torch is not installed")
    ranks(2, of_torch)


def goes_on(pipe, other):
    pipe.send(np.full(3, 7, np.uint8), other)
    found = np.zeros(3, np.uint8)
    pipe.recv(found, other)
    same(found, [7, 7, 7])


def of_other_lengths(world):
    other = 1 - world.rank
    with opened(world) as pipe:
        if world.rank == 0:
            pipe.send(np.zeros(8, np.uint8), other)
            call = pipe.flush
        else:
            found = np.zeros(9, np.uint8)

            def call():
                pipe.recv(found, other)

        with pytest.raises(errors.MismatchError, match="8 bytes were sent; 9 were") as raised:
            call()
        assert raised.value.rank == other
        goes_on(pipe, other)


def test_a_length_that_both_sides_do_not_share_is_an_error_on_both_and_the_pipe_goes_on(ranks):
    ranks(2, of_other_lengths)


# Each: what it is, how it is made of a right one, and what the message says.
UNREADABLE = (
    (lambda a: a.tolist(), "tensor: found list; expected a tensor"),
    (lambda a: None, "tensor: found NoneType"),
    (lambda a: a.astype(np.float64), "tensor: found type float64"),
    (lambda a: np.repeat(a, 2)[::2], "expected elements that follow each other"),
    (lambda a: a.reshape(2, 4).T, "expected elements that follow each other"),
    (lambda a: a[::-1], "expected elements that follow each other"),
    (lambda a: np.broadcast_to(a[:1], (2**20, 2**20)), "expected elements that follow each other"),
    (lambda a: np.zeros(2048, np.uint8), "tensor: found 2048 bytes; expected at most 1024"),
    (lambda a: Broken(), "the library failed"),
    (lambda a: Negated(a[None]), "found a view that is negated"),
)


def of_unreadable(world):
    other, good = 1 - world.rank, np.arange(8, dtype=np.float32)
    with opened(world) as pipe:
        for spoil, text in UNREADABLE:
            bad = spoil(good)
            for is_sender in (True, False):
                if world.rank == 1:
                    call, kind = (pipe.send if is_sender else pipe.recv), errors.InvalidInputError
                    with pytest.raises(kind, match=text):
                        call(bad, other)
                else:
                    call = (lambda: pipe.recv(good, other)) if is_sender else pipe.flush
                    if not is_sender:
                        pipe.send(good, other)
                    with pytest.raises(errors.RefusedError, match=text[:40]) as raised:
                        call()
                    assert raised.value.rank == 1
        # An array that may only be read can be sent.
        if world.rank == 1:
            pipe.send(read_only(good), other)
            with pytest.raises(errors.InvalidInputError, match="may only be read"):
                pipe.recv(read_only(good), other)
        else:
            pipe.recv(np.zeros(8, np.float32), other)
            pipe.send(good, other)
            with pytest.raises(errors.RefusedError, match="may only be read"):
                pipe.flush()
        goes_on(pipe, other)


def test_a_tensor_that_cannot_be_passed_is_refused_on_both_sides_and_the_pipe_goes_on(ranks):
    ranks(2, of_unreadable)


def of_wrong_ranks(world):
    other = 1 - world.rank
    with opened(world) as pipe:
        for rank in (world.rank, 2, 2**32 - 1, -1, "0", None):
            for call in (pipe.send, pipe.recv):
                with pytest.raises(errors.InvalidInputError, match="found"):
                    call(np.zeros(3, np.uint8), rank)
        goes_on(pipe, other)


def test_a_wrong_rank_is_refused_on_this_rank_alone(ranks):
    ranks(2, of_wrong_ranks)


def of_options(world):
    for options in (
        {"max_bytes": 0},
        {"max_bytes": 2**40 + 1},
        {"in_flight": 0},
        {"in_flight": 17},
    ):
        wrong = world.rank == 1
        with pytest.raises(errors.InvalidInputError if wrong else errors.RefusedError):
            opened(world, **(options if wrong else {}))
    with pytest.raises(errors.MismatchError, match="max_bytes"):
        opened(world, max_bytes=64 + world.rank)
    with opened(world, in_flight=16) as pipe:
        assert pipe.in_flight == 16


def test_options_that_make_no_pipe_are_refused_on_all_ranks_and_the_world_goes_on(ranks):
    ranks(2, of_options)


def of_no_links(world):
    """Rank r has links to the ranks of its domain and of its rail."""
    text = CONFIG.format(arena_mib=4)
    text += '[transport.scale_out]\nuse = "shm"\n[transport.scale_out.shm]\nload_store = false\n'
    two = tokenyard.Config.parse(text + "[topology]\ndomains = 2\n", "domains.toml")
    across, x = 3 - world.rank, np.zeros(3, np.uint8)
    with tokenyard.Pipe(world, two, max_bytes=64) as pipe:
        for call in (pipe.send, pipe.recv):
            with pytest.raises(errors.UnsupportedError, match=f"rank {across}"):
                call(x, across)
        for other in (world.rank ^ 1, world.rank ^ 2):
            goes_on(pipe, other)


def test_a_rank_that_no_link_leads_to_is_an_error_and_the_pipe_goes_on(ranks):
    ranks(4, of_no_links)


def of_exceptions(world):
    other = 1 - world.rank
    pipe = opened(world)
    # It is never taken: to close the pipe would wait until it is late.
    pipe.send(np.zeros(3, np.uint8), other)
    with pytest.raises(ZeroDivisionError), pipe:
        raise ZeroDivisionError
    assert pipe.closed
    with pytest.raises(errors.InvalidInputError, match="the pipe was closed"):
        pipe.flush()
    with opened(world) as pipe:
        goes_on(pipe, other)


def test_an_exception_in_the_body_of_with_drops_a_pipe_and_does_not_close_it(ranks):
    ranks(2, of_exceptions)


# As `HEAD`, with a pipe alone.
HEAD = """
import os, signal, sys, threading, time
import numpy as np
import tokenyard
config = tokenyard.Config.parse({config!r}, "test.toml")
world = tokenyard.World.from_env(config)
pipe = tokenyard.Pipe(world, config, max_bytes=64, in_flight=1)
other, x = 1 - world.rank, np.zeros(8, np.uint8)
def say(*words):
    print(*words, flush=True)
"""

LOST = """
start = time.monotonic()
try:
    pipe.send(x, other)
except tokenyard.errors.PeerLostError:
    pass
for _ in range(2):
    try:
        {call}
    except tokenyard.errors.PeerLostError as error:
        say(error.rank, pipe.closed, time.monotonic() - start < 19)
"""


@pytest.mark.parametrize("call", ["pipe.recv(x, other)", "pipe.send(x, other)", "pipe.flush()"])
def test_a_killed_peer_ends_the_wait_and_is_named(programs, call):
    killed = "os.kill(os.getpid(), signal.SIGKILL)"
    (out, error, code), (_, _, ended) = programs(LOST.format(call=call), killed, head=HEAD)
    assert (out, code, ended) == (["1", "True", "True"] * 2, 0, -signal.SIGKILL), error


def test_the_gil_is_free_while_a_rank_waits_for_a_message(programs):
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
    pipe.recv(x, other)
    after = count
    is_over = True
    thread.join()
    say(after - before > 100, pipe.waited_ns()[other] > 500_000_000)
    pipe.close()
    """
    late = "time.sleep(1)\npipe.send(x, other)\npipe.close()"
    (out, error, code), _ = programs(waits, late, head=HEAD)
    assert (out, code) == (["True", "True"], 0), error


def test_exit_ends_the_wait_of_a_daemon_thread_and_tells_the_others(programs):
    waits_in_a_thread = """
    threading.Thread(target=lambda: pipe.recv(x, other), daemon=True).start()
    time.sleep(0.5)
    say("end")
    """
    waits = """
    try:
        pipe.recv(x, other)
    except tokenyard.errors.PeerLostError as error:
        say(error.rank, "the interpreter of this rank ends" in str(error))
    """
    (out, error, code), (lines, trouble, _) = programs(waits_in_a_thread, waits, head=HEAD)
    assert (out, code) == (["end"], 0), error
    assert lines == ["0", "True"], trouble


def test_exit_ends_a_close_that_waits_in_a_daemon_thread(programs):
    closes_in_a_thread = """
    pipe.send(x, other)
    threading.Thread(target=pipe.close, daemon=True).start()
    time.sleep(0.5)
    say("end")
    """
    takes_nothing = """
    pipe.send(x, other)
    try:
        pipe.flush()
    except tokenyard.errors.PeerLostError as error:
        say(error.rank, "the interpreter of this rank ends" in str(error))
    """
    ended = programs(closes_in_a_thread, takes_nothing, head=HEAD)
    (out, error, code), (lines, trouble, _) = ended
    assert (out, code) == (["end"], 0), error
    assert lines == ["0", "True"], trouble


# A world that masks losses. Its users are opened by the programs.
MASKS = """
import numpy as np
import tokenyard
text = {config!r}.replace("[world]", '[world]\\non_failure = "mask"')
config = tokenyard.Config.parse(text, "test.toml")
world = tokenyard.World.from_env(config)
"""


@pytest.mark.parametrize("name", ["Pipe", "Gather"])
def test_what_would_mask_losses_is_not_opened_and_the_world_goes_on(programs, name):
    opens = f"""
    try:
        tokenyard.{name}(world, config, max_bytes=64)
    except tokenyard.errors.UnsupportedError as error:
        print("cannot go on without a lost rank" in str(error))
    with tokenyard.Communicator(world, config, 4, 2, 64, 8) as comm:
        print(comm.rank)
    """
    for rank, (out, error, code) in enumerate(programs(opens, opens, head=MASKS)):
        assert (out, code) == (["True", str(rank)], 0), error


def test_a_second_close_waits_for_the_first(programs):
    closes_twice = """
    pipe.send(x, other)
    thread = threading.Thread(target=pipe.close)
    thread.start()
    time.sleep(0.2)
    start = time.monotonic()
    pipe.close()
    say(time.monotonic() - start > 0.3, pipe.closed)
    thread.join()
    """
    late = "time.sleep(1)\npipe.recv(x, other)\npipe.close()"
    (out, error, code), _ = programs(closes_twice, late, head=HEAD)
    assert (out, code) == (["True", "True"], 0), error


def test_a_close_with_a_refused_message_raises_it_and_the_others_learn_of_that(programs):
    sends = """
    pipe.send(x, other)
    try:
        pipe.close()
    except tokenyard.errors.RefusedError as error:
        say(error.rank, "found list" in str(error), pipe.closed)
    """
    refuses = """
    try:
        pipe.recv([1], other)
    except tokenyard.errors.InvalidInputError:
        pass
    try:
        pipe.close()
    except tokenyard.errors.PeerLostError as error:
        say(error.rank, "found list" in str(error), pipe.closed)
    """
    (out, error, code), (lines, trouble, _) = programs(sends, refuses, head=HEAD)
    assert (out, code) == (["1", "True", "True"], 0), error
    assert lines == ["0", "True", "True"], trouble


def test_a_forked_child_may_not_use_a_pipe(programs):
    forks = """
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (
            lambda: pipe.send(x, other), lambda: pipe.recv(x, other), pipe.flush, pipe.close, lambda: pipe.rank
        ):
            try:
                call()
            except RuntimeError as error:
                refused += "forked from" in str(error)
        say("refused", refused)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    pipe.send(x, other)
    pipe.recv(x, other)
    pipe.close()
    """
    for out, error, code in programs(forks, forks, head=HEAD):
        assert (out, code) == (["refused", "5"], 0), error
