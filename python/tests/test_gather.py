"""All-gathers: each rank gets the shards of all ranks."""

import pathlib
import signal

import numpy as np
import pytest
from pool import config
from test_exchange import same
from test_pipe import NUMPY, SHAPES, UNREADABLE, Lent, values
from test_refusals import read_only

import tokenyard
from tokenyard import errors


def test_the_example_of_the_documentation_runs(programs, monkeypatch):
    root = pathlib.Path(__file__).parents[2]
    example = (root / "docs/pipes.md").read_text().split("```python\n")[2].split("```")[0]
    monkeypatch.chdir(root)
    ended = programs(example, example, example, head="")
    assert [out for out, *_ in ended] == [["(3,", "2,", "8)", "48.0"]] * 3, ended


def opened(world, max_bytes=1024, **options):
    return tokenyard.Gather(world, config(), max_bytes=max_bytes, **options)


def all_values(world, dtype, shape, seed):
    return np.stack([values(dtype, shape, (seed, rank)) for rank in range(world.ranks)])


def of_numpy(world):
    me = world.rank
    with opened(world, 4096) as gather:
        assert (gather.rank, gather.max_bytes, gather.in_flight) == (me, 4096, 2)
        assert repr(gather) == "tokenyard.Gather(max_bytes=4096, in_flight=2)"
        for dtype in NUMPY:
            for seed, shape in enumerate(SHAPES):
                mine, expected = (
                    values(dtype, shape, (seed, me)),
                    all_values(world, dtype, shape, seed),
                )
                made = gather.all_gather(mine)
                assert (type(made), made.dtype) == (np.ndarray, mine.dtype)
                same(made, expected)
                # Of a library that has DLPack alone, and into memory of the caller, of another shape.
                other = gather.all_gather(Lent(mine))
                assert isinstance(other, tokenyard.Array)
                same(other, expected)
                room = np.zeros(expected.size, dtype)
                assert gather.all_gather(mine, room) is room
                same(room.reshape(expected.shape), expected)
                same(gather.all_gather(other), np.stack([expected] * world.ranks))
        assert len(gather.report()["window_bytes"]) == 1
        assert not gather.closed
    assert gather.closed
    gather.close()
    with pytest.raises(errors.InvalidInputError, match="the gather was closed"):
        gather.all_gather(np.zeros(3, np.uint8))


def test_each_rank_gets_the_arrays_of_all_ranks(ranks):
    ranks(3, of_numpy)
    ranks(1, of_numpy)


def of_torch(world):
    import torch

    with opened(world) as gather:
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64):
            of = [(torch.arange(24).reshape(2, 3, 4) + rank).to(dtype) for rank in range(2)]
            whole = gather.all_gather(of[world.rank])
            assert (whole.dtype, tuple(whole.shape)) == (dtype, (2, 2, 3, 4))
            expected = torch.stack([it.view(torch.uint8) for it in of])
            assert torch.equal(whole.view(torch.uint8), expected)
            assert not whole.requires_grad
        # A view without gaps, into a list, and into an array of another library.
        mine = torch.arange(12, dtype=torch.int32).reshape(3, 4) + world.rank
        (whole,) = gather.all_gather([mine[1:]])
        assert whole.tolist() == [[[4, 5, 6, 7], [8, 9, 10, 11]], [[5, 6, 7, 8], [9, 10, 11, 12]]]
        found = gather.all_gather(mine[1:], np.zeros(64, np.uint8))
        same(found.view(np.int32), whole.flatten().numpy())


def test_tensors_of_torch_are_gathered_bit_for_bit(ranks):
    pytest.importorskip("torch", reason="torch is not installed")
    ranks(2, of_torch)


def of_jax(world):
    import jax.numpy as jnp

    with opened(world) as gather:
        whole = gather.all_gather(jnp.arange(6, dtype=jnp.float32) + world.rank)
        same(whole, np.arange(6, dtype=np.float32) + np.array([[0], [1]]))


def test_arrays_of_jax_are_gathered(ranks):
    pytest.importorskip("jax", reason="jax is not installed")
    ranks(2, of_jax)


KINDS = (("float32", (3, 4)), ("uint8", (5,)), ("int64", (0, 2)), ("int32", ()))


def of_lists(world):
    mine = [values(dtype, shape, (9, world.rank)) for dtype, shape in KINDS]
    expected = [all_values(world, dtype, shape, 9) for dtype, shape in KINDS]
    with opened(world) as gather:
        for shards in (mine, tuple(mine)):
            made = gather.all_gather(shards)
            assert isinstance(made, list)
            for found, wanted in zip(made, expected, strict=True):
                same(found, wanted)
        rooms = tuple(np.zeros_like(it) for it in expected)
        assert gather.all_gather(mine, rooms) is rooms
        for found, wanted in zip(rooms, expected, strict=True):
            same(found, wanted)
        assert gather.all_gather([]) == []
        assert gather.all_gather(()) == []


def test_the_shards_of_a_list_share_a_call(ranks):
    ranks(3, of_lists)


def of_halves(world):
    me = world.rank
    with opened(world, in_flight=3) as gather:
        for seed in range(0, 9, 3):
            pending = []
            for number in range(seed, seed + 3):
                mine = values("float32", (number,), (number, me))
                pending.append(gather.all_gather_send(mine if number % 2 else [mine]))
                mine[...] = 101
            with pytest.raises(errors.InvalidInputError, match="in_flight = 3"):
                gather.all_gather_send([])
            for number in reversed(range(seed, seed + 3)):
                expected = all_values(world, "float32", (number,), number)
                room = np.zeros(expected.shape, np.float32) if number % 3 else None
                found = pending[number - seed].recv(room)
                assert room is None or found is room
                same(found[0] if isinstance(found, list) else found, expected)
        with pytest.raises(errors.InvalidInputError, match="was received before"):
            pending[0].recv()


def test_calls_in_flight_end_in_any_order_and_each_once(ranks):
    ranks(3, of_halves)


def goes_on(gather, world):
    found = gather.all_gather(np.full(3, world.rank, np.uint8))
    same(found, np.repeat(np.arange(world.ranks), 3).reshape(-1, 3))


def of_other_lengths(world):
    me = world.rank
    with opened(world) as gather:
        # Other lengths; as many bytes, which are divided otherwise; and another number of shards.
        for mine in (
            [np.zeros(8 + (me == 1), np.uint8)],
            [np.zeros(4 + (me == 1), np.uint8), np.zeros(4 - (me == 1), np.uint8)],
            [np.zeros(8, np.uint8)] + [np.zeros(0, np.uint8)] * (me == 1),
        ):
            room = [np.full(world.ranks * it.size, 7, np.uint8) for it in mine]
            with pytest.raises(errors.MismatchError, match="of the same lengths") as raised:
                gather.all_gather(mine, room)
            assert raised.value.rank == 1
            assert all((it == 7).all() for it in room), "nothing is written"
            pending = gather.all_gather_send(mine)
            with pytest.raises(errors.MismatchError, match="of the same lengths"):
                pending.recv()
            goes_on(gather, world)


def test_lengths_that_differ_are_an_error_on_all_ranks_and_the_gather_goes_on(ranks):
    ranks(3, of_other_lengths)


def refused(world, text, bad, good):
    """Rank 1 makes the call `bad`, the others `good`."""
    wrong = world.rank == 1
    kind = errors.InvalidInputError if wrong else errors.RefusedError
    with pytest.raises(kind, match=text[:40]) as raised:
        (bad if wrong else good)()
    assert wrong or raised.value.rank == 1


def of_unreadable(world):
    good = np.arange(8, dtype=np.float32)
    with opened(world) as gather:
        for spoil, of_message in UNREADABLE:
            bad, text = spoil(good), of_message.removeprefix("tensor: ")
            if "bytes" in text:
                text = "shards: found 2048 bytes; expected at most 1024"
            elif isinstance(bad, list):
                text = r"shards\[0\]: found float; expected a tensor"
            refused(
                world, text, lambda bad=bad: gather.all_gather(bad), lambda: gather.all_gather(good)
            )
            refused(
                world,
                text,
                lambda bad=bad: gather.all_gather_send(bad),
                lambda: gather.all_gather_send(good).recv(),
            )
            goes_on(gather, world)
        # One of a list, and outputs of a whole call.
        room = np.zeros((world.ranks, 8), np.float32)
        for shards, outs, text in (
            ([good, good[::2]], None, r"shards\[1\]: found shape \[4\]"),
            ([good, None], None, r"shards\[1\]: found NoneType; expected a tensor"),
            (good, 7, "outs: found int; expected a tensor"),
            (good, [room, None], r"outs\[1\]: found NoneType"),
            (good, [room, room], "outs: found 2; expected 1"),
            (good, room[0], "out: found 32 bytes; expected"),
            (good, read_only(room), "outs: found memory that may only be read"),
        ):
            others = [good] * 2 if isinstance(shards, list) else good
            refused(
                world,
                text,
                lambda given=(shards, outs): gather.all_gather(*given),
                lambda others=others: gather.all_gather(others),
            )
            goes_on(gather, world)
        # An array that may only be read can be gathered.
        same(gather.all_gather(read_only(good)), np.stack([good] * world.ranks))


def test_what_cannot_be_gathered_is_refused_on_all_ranks_and_the_gather_goes_on(ranks):
    ranks(3, of_unreadable)


def of_wrong_outputs(world):
    good = np.arange(8, dtype=np.float32)
    with opened(world) as gather:
        for outs, text in (
            (7, "outs: found int; expected a tensor"),
            (np.zeros(8, np.float32), "out: found 32 bytes; expected 64"),
            (read_only(np.zeros(16, np.float32)), "may only be read"),
        ):
            pending = gather.all_gather_send(good)
            if world.rank == 1:
                with pytest.raises(errors.InvalidInputError, match=text):
                    pending.recv(outs)
            else:
                same(pending.recv(), np.stack([good] * 2))
            goes_on(gather, world)


def test_outputs_that_cannot_be_written_end_a_sent_call_on_their_rank_alone(ranks):
    ranks(2, of_wrong_outputs)


class NoRoom:
    """A tensor whose library makes no other one."""

    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__

    def new_empty(self, shape):
        raise MemoryError(f"no room for {shape}")


def of_no_room(world):
    good = np.arange(8, dtype=np.float32)
    with opened(world) as gather:
        refused(
            world,
            "outs: cannot be made: MemoryError",
            lambda: gather.all_gather(NoRoom(good)),
            lambda: gather.all_gather(good),
        )
        goes_on(gather, world)


def test_a_library_without_memory_for_outputs_is_a_refusal(ranks):
    ranks(2, of_no_room)


def on_a_stream(world):
    mine = np.full(4, world.rank, np.uint8)
    first = world.rank == 0
    refusal = errors.InvalidInputError if first else errors.RefusedError
    with opened(world) as gather:
        with pytest.raises(refusal, match="the kernel set has no streams"):
            gather.all_gather(mine, stream=16 if first else None)
        with pytest.raises(refusal, match="the kernel set has no streams"):
            gather.all_gather_send(mine, stream=16 if first else None).recv()
        same(gather.all_gather(mine, stream=None), np.repeat(np.uint8([[0], [1]]), 4, axis=1))


def test_a_stream_is_refused_on_all_ranks_where_the_kernel_set_has_none(ranks):
    ranks(2, on_a_stream)


def of_options(world):
    for options in (
        {"max_bytes": 0},
        {"max_bytes": 2**40 + 1},
        {"in_flight": 0},
        {"in_flight": 33},
    ):
        wrong = world.rank == 1
        with pytest.raises(errors.InvalidInputError if wrong else errors.RefusedError):
            opened(world, **(options if wrong else {}))
    with pytest.raises(errors.MismatchError, match="max_bytes"):
        opened(world, max_bytes=64 + world.rank)
    with opened(world, in_flight=32) as gather:
        assert gather.in_flight == 32


def test_options_that_make_no_gather_are_refused_on_all_ranks_and_the_world_goes_on(ranks):
    ranks(2, of_options)


def of_exceptions(world):
    gather = opened(world)
    # To close it would raise: a call is open.
    gather.all_gather_send([])
    with pytest.raises(ZeroDivisionError), gather:
        raise ZeroDivisionError
    assert gather.closed
    with opened(world) as gather:
        goes_on(gather, world)


def test_an_exception_in_the_body_of_with_drops_a_gather(ranks):
    ranks(2, of_exceptions)


# As `HEAD` of other programs, with a gather alone.
HEAD = """
import os, signal, sys, threading, time
import numpy as np
import tokenyard
config = tokenyard.Config.parse({config!r}, "test.toml")
world = tokenyard.World.from_env(config)
gather = tokenyard.Gather(world, config, max_bytes=64)
x = np.zeros(8, np.uint8)
def say(*words):
    print(*words, flush=True)
"""


@pytest.mark.parametrize("call", ["gather.all_gather(x)", "gather.all_gather_send(x).recv()"])
def test_a_killed_peer_ends_the_wait_and_is_named(programs, call):
    lost = f"""
    start = time.monotonic()
    for _ in range(2):
        try:
            {call}
        except tokenyard.errors.PeerLostError as error:
            say(error.rank, gather.closed, time.monotonic() - start < 19)
    """
    killed = "os.kill(os.getpid(), signal.SIGKILL)"
    first, (_, _, ended), third = programs(lost, killed, lost, head=HEAD)
    for out, error, code in (first, third):
        assert (out, code) == (["1", "True", "True"] * 2, 0), error
    assert ended == -signal.SIGKILL


def test_a_gather_with_an_open_call_is_not_closed(programs):
    leaves = """
    pending = gather.all_gather_send(x)
    try:
        gather.close()
    except tokenyard.errors.InvalidInputError as error:
        say("sent and not received" in str(error), gather.closed)
    """
    waits = """
    try:
        gather.all_gather(x)
        gather.close()
    except tokenyard.errors.PeerLostError as error:
        say(error.rank, "sent and not received" in str(error))
    """
    (out, error, code), (lines, trouble, _) = programs(leaves, waits, head=HEAD)
    assert (out, code) == (["True", "True"], 0), error
    assert lines == ["0", "True"], trouble


def test_the_gil_is_free_while_a_rank_waits_and_exit_ends_the_wait(programs):
    waits_in_a_thread = """
    threading.Thread(target=lambda: gather.all_gather(x), daemon=True).start()
    time.sleep(0.5)
    say("end")
    """
    waits = """
    time.sleep(1)
    try:
        gather.all_gather(x)
        gather.all_gather(x)
    except tokenyard.errors.PeerLostError as error:
        say(error.rank, "the interpreter of this rank ends" in str(error))
    """
    (out, error, code), (lines, trouble, _) = programs(waits_in_a_thread, waits, head=HEAD)
    assert (out, code) == (["end"], 0), error
    assert lines == ["0", "True"], trouble


def test_a_forked_child_may_not_use_a_gather(programs):
    forks = """
    pending = gather.all_gather_send(x)
    child = os.fork()
    if child == 0:
        refused = 0
        for call in (
            lambda: gather.all_gather(x), pending.recv, gather.close, lambda: gather.rank
        ):
            try:
                call()
            except RuntimeError as error:
                refused += "forked from" in str(error)
        say("refused", refused)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    pending.recv()
    gather.close()
    """
    for out, error, code in programs(forks, forks, head=HEAD):
        assert (out, code) == (["refused", "4"], 0), error
