"""Jobs of three ranks, one of which is killed at a random moment: `killed_jobs.py ROUNDS SEED FOLDER`.

It runs as the first process of namespaces of its own, so that all processes and all names in `/dev/shm` there are of
these jobs. The ranks are forked from one process, because an import costs more than all that they do. All jobs meet at
the same file. The last job is not killed, and its rows are checked.
"""

import contextlib
import importlib
import os
import random
import select
import signal
import sys
import time
import traceback

import exact
from exact import Exchange
from pool import CONFIG, LIMIT_S

import tokenyard
from tokenyard.deep_ep import Buffer, ElasticBuffer

RANKS = 3
# A rank goes through these. The one that is killed has reached one of them.
PHASES = ("forked", "joined", "opened", "stepped", "destroyed")
# Ranks that others miss end sooner than in a job that must go well on a busy machine.
WAITS = {"deadline_ms = 20000": "deadline_ms = 2000", "late_ms = 60000": "late_ms = 4000"}
# How a rank ends that another one's death has ended.
LOST = 3


def config(is_killed):
    text = CONFIG.format(arena_mib=4)
    for long, short in WAITS.items() if is_killed else ():
        text = text.replace(long, short)
    return text


def one_buffer(world, kind, seed, say):
    """A buffer of a kind, some exchanges that are checked, and its end."""
    it = Exchange((5, 0, 3), experts=6, hidden=128, most=8, seed=seed)
    if kind == 2:
        buffer = ElasticBuffer(world, num_max_tokens_per_rank=8, explicitly_destroy=True)
    else:
        buffer = Buffer(world, low_latency_mode=kind == 0, explicitly_destroy=True)
    say("opened")
    for number in range(4):
        (exact.low_latency, exact.normal, exact.elastic)[kind](buffer, it)()
        if number == 1:
            say("stepped")
    buffer.destroy()
    say("destroyed")


def work(rank, folder, seed, buffers, say):
    """Until it is killed, or as many buffers as a job that lives makes."""
    path = f"{folder}/rank-{rank}.toml"
    with open(path, "w") as file:
        file.write(config(buffers is None))
    os.environ |= {
        "TOKENYARD_BOOTSTRAP": f"file://{folder}/meet",
        "TOKENYARD_CONFIG": path,
        "TOKENYARD_LOCAL_RANK": str(rank),
        "TOKENYARD_RANK": str(rank),
    }
    drawn = random.Random(seed)
    with tokenyard.World.from_env(tokenyard.Config.load(path)) as world:
        say("joined")
        while buffers is None or buffers > 0:
            one_buffer(world, drawn.randrange(3), drawn.randrange(1000), say)
            buffers = None if buffers is None else buffers - 1


def start(rank, folder, seed, buffers):
    """A rank's process, and the pipe where it says what it has reached."""
    reads, writes = os.pipe()
    child = os.fork()
    if child:
        os.close(writes)
        return child, reads
    code = 1
    try:
        os.close(reads)
        reached = set()

        def say(phase):
            if phase not in reached:
                reached.add(phase)
                os.write(writes, bytes([PHASES.index(phase)]))

        say("forked")
        work(rank, folder, seed, buffers, say)
        code = 0
    except tokenyard.Error:
        code = LOST
        if buffers is not None:
            traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait_for(phase, pipe, end):
    """Reads what a rank has reached, up to the phase, or to its end."""
    while True:
        assert select.select([pipe], [], [], end - time.monotonic())[0], f"no {phase} in time"
        found = os.read(pipe, 1)
        if not found or found[0] >= PHASES.index(phase):
            return


def ended(children, end):
    """The exit code of each process, negative for a signal."""
    codes = {}
    while len(codes) < len(children):
        child, status = os.waitpid(-1, os.WNOHANG)
        if child:
            codes[child] = os.waitstatus_to_exitcode(status)
        else:
            assert time.monotonic() < end, f"{len(children) - len(codes)} ranks do not end"
            time.sleep(0.005)
    # Another process that ended here was left by a rank.
    assert set(codes) == set(children), (codes, children)
    return [codes[child] for child in children]


def check_nothing_is_left():
    names = os.listdir("/dev/shm")
    assert not names, f"found in /dev/shm: {names}"
    others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    assert not others, f"found processes: {others}"


def job(folder, seed, victim=None, phase=None, delay=0.0):
    """Runs one; kills a rank where one is named, this long after it has reached the phase."""
    end = time.monotonic() + LIMIT_S
    buffers = 6 if victim is None else None
    ranks = [start(rank, folder, seed, buffers) for rank in range(RANKS)]
    try:
        if victim is not None:
            wait_for(phase, ranks[victim][1], end)
            time.sleep(delay)
            os.kill(ranks[victim][0], signal.SIGKILL)
        found = ended([child for child, _ in ranks], end)
    finally:
        for _, pipe in ranks:
            os.close(pipe)
    expected = [0 if victim is None else LOST] * RANKS
    if victim is not None:
        expected[victim] = -signal.SIGKILL
    assert found == expected, f"rank {victim}, {delay} s after {phase}: {found}"
    check_nothing_is_left()


def main(rounds, seed, folder):
    drawn = random.Random(seed)
    # Each rank's first buffer would import it, where torch is installed.
    with contextlib.suppress(ImportError):
        importlib.import_module("torch._dynamo")
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(rounds):
        moment = {"phase": drawn.choice(PHASES), "delay": drawn.random() ** 2 / 50}
        job(folder, drawn.randrange(1000), drawn.randrange(RANKS), **moment)
    job(folder, drawn.randrange(1000))
    assert len(os.listdir("/proc/self/fd")) == files
    print(f"{rounds} jobs had a rank killed; then one went well")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
