"""Warnings of the native module reach people: through `logging`, and so to standard error where nothing is set up."""

import os
import subprocess
import sys

from pool import LIMIT_S, free_port

SCRIPT = """
import logging, sys
import tokenyard
{setup}
text = '[kernels]\\nuse = "cpu"\\n[transport.scale_up]\\nuse = "shm"\\n[kernels.acme]\\nspeed = 1\\n'
config = tokenyard.Config.parse(text, "fabric.toml")
with tokenyard.World(0, 1, exchange=lambda mine: [mine]) as world:
    for _ in range(3):
        tokenyard.Communicator(world, config, experts=2, topk=1, hidden=8, max_tokens=2).close()
"""
WARNING = "fabric.toml:5: no component is called `acme` here; the table [kernels.acme] is not used"


def run(setup=""):
    """The text that a process writes to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(setup=setup)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ,
        check=True,
    )
    return done.stderr


def test_a_warning_is_shown_once_where_logging_is_not_set_up():
    text = run()
    assert text.count(WARNING) == 1, text


def test_a_warning_goes_to_the_logger_of_the_package_with_its_level():
    text = run("logging.basicConfig(format='%(name)s %(levelname)s %(message)s')")
    assert text == f"tokenyard WARNING {WARNING}\n"


def test_a_caller_may_silence_the_warnings():
    assert WARNING not in run("logging.getLogger('tokenyard').setLevel(logging.ERROR)")


JOB = """
import os, time
import tokenyard
text = '[kernels]\\nuse = "cpu"\\n[transport.scale_up]\\nuse = "shm"\\n[kernels.acme]\\nspeed = 1\\n'
with tokenyard.World.from_env() as world:
    for each in range(2):
        if each and world.rank == 1:
            text += '[kernels.only_here]\\nspeed = 1\\n'
        config = tokenyard.Config.parse(text, "fabric.toml")
        tokenyard.Communicator(world, config, experts=2, topk=1, hidden=8, max_tokens=2).close()
    # Rank 1 passes its warnings on before it leaves.
    if world.rank == 1:
        world.close()
        open(os.environ["LEFT"], "w").close()
    else:
        while not os.path.exists(os.environ["LEFT"]):
            time.sleep(0.01)
"""


def test_the_ranks_of_a_world_show_each_warning_once_and_rank_0_shows_those_of_others(tmp_path):
    port = str(free_port())
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", JOB],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ
            | environment
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LEFT": str(tmp_path / "left")},
        )
        for rank in range(2)
    ]
    texts = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], texts
    assert "".join(texts).count(WARNING) == 1, texts
    other = WARNING.replace(":5", ":7").replace("acme", "only_here")
    assert (texts[0].count(f"rank 1: {other}"), texts[1].count(other)) == (1, 0), texts
