"""Warnings of the native module reach people: through `logging`, and so to standard error where nothing is set up."""

import os
import subprocess
import sys

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
        timeout=120,
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
