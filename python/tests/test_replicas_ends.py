"""The end of replicas: lost ranks, errors amid a call, and exceptions of the caller."""

import signal

import pytest

# Two ranks with a large exchange.
HEAD = """
import os, signal, sys, time
import numpy as np
import tokenyard
config = tokenyard.Config.parse({config!r}, "test.toml")
world = tokenyard.World.from_env(config)
opened = tokenyard.Replicas(world, config, max_bytes=64, in_flight=1)
mine, room = np.zeros((1, 1 << 16), np.uint8), np.zeros((1, 1 << 16), np.uint8)
plan = [[1], [0]]
"""
WAITS = """
start = time.monotonic()
for _ in range(3):
    try:
        opened.replicate(mine, room, plan).recv()
    except (tokenyard.errors.PeerLostError, tokenyard.errors.DeadlineError) as error:
        print(error.rank, time.monotonic() - start < 40, flush=True)
        break
"""


@pytest.mark.parametrize(
    "ends",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        # Between the message of the hosts and the bytes.
        "opened._exchange = lambda *given: os.kill(os.getpid(), signal.SIGKILL)\n"
        "opened.replicate(mine, room, plan).recv()",
    ],
    ids=["before", "inside"],
)
def test_a_killed_rank_ends_a_call_and_is_named(programs, ends):
    (out, error, code), (_, _, ended) = programs(WAITS, ends, head=HEAD)
    assert (out, code, ended) == (["1", "True"], 0, -signal.SIGKILL), error


def test_an_absent_rank_ends_a_call_by_the_deadline(programs):
    absent = "time.sleep(12)"
    head = HEAD.replace("parse({config!r}", "parse({config!r}.replace('60000', '3000')")
    ended = programs(WAITS + "print(opened.closed)", absent, deadline_ms=2000, head=head)
    out, error, code = ended[0]
    assert (out[-2:], code) == (["True", "True"], 0), error


# Another rank finds this then.
OVER = """
try:
    opened.replicate(mine, room, plan)
except tokenyard.errors.InvalidInputError as error:
    print("MemoryError: no memory" in str(error))
opened.close()
print(opened.closed)
"""


# An error that is none of the pipe's, when some parts have travelled.
AMID = """
class Fails:
    def __init__(self, pipe):
        self.pipe, self.left = pipe, 20
    def __getattr__(self, name):
        return getattr(self.pipe, name)
    def send(self, *given):
        self.left -= 1
        if self.left == 0:
            raise MemoryError("no memory")
        self.pipe.send(*given)
opened._pipe = Fails(opened._pipe)
pending = opened.replicate(mine, room, plan)
"""
# A rank that has the error from `recv`, or from `close`.
SHOWN = """
for _ in range(2):
    try:
        pending.recv()
    except MemoryError as error:
        print(error)
try:
    opened.replicate(mine, room, plan)
except tokenyard.errors.InvalidInputError as error:
    print("that were closed: replicate: MemoryError: no memory" in str(error))
opened.close()
print(opened.closed)
"""
HIDDEN = """
try:
    opened.close()
except MemoryError as error:
    print(error)
opened.close()
print(opened.closed)
"""


@pytest.mark.parametrize(
    ("ends", "prints"),
    [(SHOWN, "no memory no memory True True"), (HIDDEN, "no memory True")],
    ids=["shown", "hidden"],
)
def test_an_error_amid_a_call_ends_the_replicas_of_all_ranks(programs, ends, prints):
    # It stays until its other ranks have learnt the reason.
    ends = AMID + ends + "time.sleep(3)"
    (out, error, code), (theirs, wrong, ended) = programs(WAITS + OVER, ends, head=HEAD)
    assert (out, code) == (["1", "True", "True", "True"], 0), error
    assert (" ".join(theirs), ended) == (prints, 0), wrong


def test_an_exception_in_the_body_of_with_leaves_the_pending_call_to_others(programs):
    takes = """
    mine[...] = 7
    opened.replicate(mine, room, plan).recv()
    print((room == 7).all())
    """
    fails = """
    mine[...] = 7
    try:
        with opened:
            opened.replicate(mine, room, plan)
            raise ZeroDivisionError
    except ZeroDivisionError:
        print((room == 7).all())
        print(opened.closed)
    """
    (out, error, code), (theirs, wrong, ended) = programs(takes, fails, head=HEAD)
    assert (out, code) == (["True"], 0), error
    assert (theirs, ended) == (["True", "True"], 0), wrong


def test_an_exception_in_the_body_of_with_drops_them(programs):
    fails = """
    try:
        with opened:
            opened.replicate(mine, room, plan).recv()
            raise ZeroDivisionError
    except ZeroDivisionError:
        print(opened.closed)
    """
    for out, error, code in programs(fails, fails, head=HEAD):
        assert (out, code) == (["True"], 0), error
