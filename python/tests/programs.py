"""Programs of ranks: each test that asks for `programs` has processes of its own, which may end as they like."""

import os
import subprocess
import sys
import textwrap

import namespaces
import pytest
from pool import CONFIG, LIMIT_S

# Every program starts with this, where a test names no other: `world` and `comm` of rank sys.argv[1] of two.
HEAD = """
import os, signal, sys, threading, time
import numpy as np
import tokenyard
config = tokenyard.Config.parse({config!r}, "test.toml")
world = tokenyard.World.from_env(config)
comm = tokenyard.Communicator(world, config, 4, 2, 64, 8, in_flight=4)
x, idx = np.ones((3, 64), np.float32), np.array([[0, 3]] * 3)
me = world.rank
def say(*words):
    print(*words, flush=True)
"""


@pytest.fixture
def programs(tmp_path):
    """`programs(text, ...)` runs a program per rank, and returns what they printed and how they ended. Each is in own
    namespaces of the kinds `within`."""
    started = []

    def run(*texts, deadline_ms=20000, head=HEAD, within=()):
        settings = CONFIG.format(arena_mib=4).replace("20000", str(deadline_ms))
        for rank, text in enumerate(texts):
            env = {
                **os.environ,
                "TOKENYARD_BOOTSTRAP": f"file://{tmp_path}/meet",
                "TOKENYARD_SECRET": "a secret of this test alone",
                "TOKENYARD_RANK": str(rank),
                "TOKENYARD_RANKS": str(len(texts)),
                "TOKENYARD_LOCAL_RANK": str(rank),
                "TOKENYARD_REPORTS": str(tmp_path),
            }
            program = head.format(config=settings) + textwrap.dedent(text)
            words = [sys.executable, "-c", program]
            if within:
                words = namespaces.behind(within, rank, words)
            pipe = subprocess.PIPE
            started.append(subprocess.Popen(words, env=env, stdout=pipe, stderr=pipe, text=True))
        ended = [process.communicate(timeout=LIMIT_S) for process in started]
        codes = [process.returncode for process in started]
        return [(out.split(), error, code) for (out, error), code in zip(ended, codes, strict=True)]

    yield run
    for process in started:
        process.kill()
        process.communicate()
