"""Jobs with a rank that is killed leave nothing on their machine, and later jobs go well there. Public report llm-d 352
is of a `/dev/shm` that was full after restarts."""

import os
import pathlib
import subprocess
import sys

import namespaces
from pool import LIMIT_S

# A default run leaves the rounds out that take minutes.
ROUNDS = 500 if "TOKENYARD_TEST_ALL" in os.environ else 20
SEED = 7
# The configs of the ranks, reports of their errors, and a folder that torch makes where it is imported. A rank 0 that
# is killed while it writes the file where ranks meet leaves that one: docs/security.md.
FILES = ("rank-", "reports", "torchinductor", "meet.")


def test_jobs_that_are_killed_at_any_moment_leave_no_names_and_no_processes(tmp_path):
    kinds = ("pid", "mnt")
    namespaces.check_permitted(kinds)
    program = pathlib.Path(__file__).with_name("killed_jobs.py")
    words = [sys.executable, str(program), str(ROUNDS), str(SEED), str(tmp_path)]
    env = {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "TOKENYARD_RANKS": "3",
        "TOKENYARD_REPORTS": str(tmp_path / "reports"),
        "TOKENYARD_SECRET": "a secret of this test alone",
    }
    (tmp_path / "reports").mkdir()
    done = subprocess.run(
        namespaces.behind(kinds, 0, words),
        env=env,
        capture_output=True,
        text=True,
        # The program ends each job that hangs.
        timeout=LIMIT_S * (1 + ROUNDS // 20),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"{ROUNDS} jobs had a rank killed; then one went well" in done.stdout
    left = [name for name in os.listdir(tmp_path) if not name.startswith(FILES)]
    assert not left, left
