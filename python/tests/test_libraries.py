"""Arrays of JAX, views of torch, and worlds of mpi4py. Skipped, one by one, where the library is not installed."""

import gc
import importlib.util
import shutil
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
from oracle import Case
from pool import CONFIG, LIMIT_S
from test_exchange import opened, same

from tokenyard import errors

CASE = Case(2, seed=9, hidden=256)


def needs(library):
    """A test that is skipped where `library` is not installed."""
    missing = importlib.util.find_spec(library) is None
    return pytest.mark.skipif(missing, reason=f"{library} is not installed: its test did not run")


def in_jax(world, dtype):
    import jax
    import jax.numpy as jnp

    me = world.rank
    x = jnp.asarray(CASE.x[me], dtype)
    idx, weights = jnp.asarray(CASE.idx[me]), jnp.asarray(CASE.weights[me])
    rows = CASE.rows(CASE.sources(me)).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    times = np.array([len(CASE.ranks_of(me, t)) for t in range(CASE.tokens[me])])
    with opened(world, CASE) as comm:
        received, handle = comm.dispatch(x, idx, weights)
        mine = jnp.from_dlpack(received.x)
        assert isinstance(mine, jax.Array)
        assert mine.dtype == dtype
        same(np.asarray(mine), rows)
        same(np.asarray(jnp.from_dlpack(received.ids)), CASE.flat(me)[0])
        out, _ = comm.combine(handle, mine * 1)
        found = np.asarray(jnp.from_dlpack(out)).astype(np.float32)
        expected = np.asarray(x).astype(np.float32) * times[:, None]
        np.testing.assert_allclose(found, expected, rtol=2**-8)
        # JAX's array is the last user of the memory, and later operations leave it alone.
        del received, handle, out
        for _ in range(3):
            comm.dispatch(x * 0, idx, weights)
        gc.collect()
        same(np.asarray(mine), rows)


@needs("jax")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_of_jax_go_in_and_come_out(ranks, dtype):
    ranks(2, in_jax, dtype)


def negated_view_of_torch(world):
    import torch

    me = world.rank
    x, idx = torch.from_numpy(CASE.x[me]), torch.from_numpy(CASE.idx[me])
    with opened(world, CASE) as comm:
        with pytest.raises(errors.InvalidInputError if me == 1 else errors.RefusedError) as raised:
            comm.dispatch(torch._neg_view(x) if me == 1 else x, idx)
        assert "a view that is negated when it is read" in str(raised.value)
        received, _ = comm.dispatch(torch._neg_view(x).resolve_neg(), idx)
        same(torch.from_dlpack(received.x).numpy(), -CASE.rows(CASE.sources(me)))


@needs("torch")
def test_a_view_of_torch_that_is_negated_when_it_is_read_is_refused(ranks):
    ranks(2, negated_view_of_torch)


MPI_RANK = """
    import numpy as np
    from mpi4py import MPI
    import tokenyard

    config = tokenyard.Config.parse({config!r}, "test.toml")
    with (
        tokenyard.World.from_mpi(MPI.COMM_WORLD, config=config) as world,
        tokenyard.Communicator(world, config, 4, 2, 64, 8) as comm,
    ):
        x = np.full((3, 64), world.rank + 1, np.float32)
        received, handle = comm.dispatch(x, np.array([[0, 3]] * 3))
        out, _ = comm.combine(handle, received.x)
        # Each of the two ranks has one of a token's experts, and returns the row.
        assert (np.asarray(out) == 2 * x).all()
        # One write, so that the lines of two ranks do not mix.
        print(f"rank {{world.rank}} of {{world.ranks}} is right\\n", end="", flush=True)
"""


MPI_LATE = """
    from mpi4py import MPI
    import tokenyard

    comm = MPI.COMM_WORLD
    config = tokenyard.Config.parse({config!r}, "test.toml")
    if comm.Get_rank() == 0:
        try:
            tokenyard.World.from_mpi(comm, config=config)
        except tokenyard.errors.DeadlineError as error:
            print(error, flush=True)
        comm.send("over", 1)
    else:
        # Behind a rank that has given up, this one ends late, too.
        assert comm.recv(source=0) == "over"
        try:
            tokenyard.World.from_mpi(comm, config=config)
        except tokenyard.errors.DeadlineError as error:
            print(error, flush=True)
"""


def run_on_mpi(tmp_path, text, config):
    program = tmp_path / "rank.py"
    program.write_text(textwrap.dedent(text).format(config=config))
    words = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    words += [sys.executable, str(program)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == 0, ended.stderr
    return sorted(ended.stdout.splitlines())


@needs("mpi4py")
@pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="Open MPI is not installed")
def test_a_communicator_of_mpi4py_is_the_world(tmp_path):
    lines = run_on_mpi(tmp_path, MPI_RANK, CONFIG.format(arena_mib=4))
    assert lines == ["rank 0 of 2 is right", "rank 1 of 2 is right"]


@needs("mpi4py")
@pytest.mark.skipif(shutil.which("mpirun.openmpi") is None, reason="Open MPI is not installed")
def test_a_rank_of_mpi_that_does_not_come_is_waited_for_until_late(tmp_path):
    config = CONFIG.format(arena_mib=4).replace("60000", "500").replace("20000", "500")
    assert config.count(" = 500\n") == 2
    lines = run_on_mpi(tmp_path, MPI_LATE, config)
    assert len(lines) == 2, lines
    says = "rank 0 of 2, world rank 0: MPI's Iallgather did not end within 0.5 s (late_ms)"
    assert any(says in line for line in lines), lines
    assert any("cannot reach rank 0 within 0.5 s" in line for line in lines), lines
