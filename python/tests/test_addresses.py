"""Where ranks of a process group meet: on the network on which `MASTER_ADDR` is, which the test makes."""

import os
import pathlib
import subprocess
import sys

import pytest
from pool import LIMIT_S

import tokenyard

# The functions of torch that `World.from_torch` calls, with a gather through files: to import torch takes seconds.
TORCH = """
import os, pathlib, time

def is_initialized(): return False
def get_rank(group=None): return int(os.environ["RANK"])
def get_world_size(group=None): return 2
def get_backend(group=None): return "gloo"

def all_gather_object(all, mine, group=None):
    folder = pathlib.Path(__file__).parent
    name = folder / f"mine-{get_rank()}"
    name.with_suffix(".new").write_bytes(mine)
    name.with_suffix(".new").rename(name)
    for rank in range(2):
        while not (folder / f"mine-{rank}").exists():
            time.sleep(0.01)
        all[rank] = (folder / f"mine-{rank}").read_bytes()
"""
RANK = """
import os
import tokenyard
with tokenyard.World.from_torch() as world:
    ranks = world.all_gather("ranks", str(world.rank).encode())
    # In one piece: the other rank writes to the same pipe.
    os.write(1, b" ".join(ranks) + b"\\n")
"""
# Root of a network may add an address to it. Without a search for duplicates the address is there at once. Without the
# loopback address, where ranks of one host meet by default, they have no other.
NETWORK = """
ip link set lo up && ip address add fe80::1/64 dev lo nodad && ip address del 127.0.0.1/8 dev lo || exit 9
RANK=1 "$@" & RANK=0 "$@"; first=$?; wait $! && exit $first
"""


@pytest.mark.parametrize("address", ["fe80::1%lo", "[fe80::1%lo]"])
def test_ranks_of_a_group_meet_at_the_link_local_address_of_its_master(tmp_path, address):
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("")
    for name in ("distributed", "cuda"):
        (package / f"{name}.py").write_text(TORCH)
    installed = pathlib.Path(tokenyard.__file__).parents[1]
    done = subprocess.run(
        ["unshare", "-rn", "sh", "-c", NETWORK, "sh", sys.executable, "-c", RANK],
        env=os.environ
        | {
            "MASTER_ADDR": address,
            "PYTHONPATH": f"{tmp_path}:{installed}",
            "TOKENYARD_SECRET": "of-a-test-" * 4,
        },
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if "unshare failed" in done.stderr:
        pytest.skip(f"no network of its own: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 1\n0 1\n", done.stderr
