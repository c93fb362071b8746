"""Tables: each rank reads entries of any rank."""

import pathlib
import signal

import numpy as np
import pytest
from pool import config
from test_exchange import same
from test_pipe import Lent
from test_refusals import read_only

import tokenyard
from tokenyard import errors

MOST = 10
UNREADABLE = ("no tensor", None, np.zeros(2))


def test_the_example_of_the_documentation_runs(programs, monkeypatch):
    root = pathlib.Path(__file__).parents[2]
    example = (root / "docs/pipes.md").read_text().split("```python\n")[4].split("```")[0]
    monkeypatch.chdir(root)
    ended = programs(example, example, example, head="")
    assert [out for out, *_ in ended] == [["[0.", "1.", "2.]"]] * 3, ended


def opened(world, **options):
    sizes = {"entry_bytes": 8, "max_entries": MOST, "max_indices": 64, **options}
    return tokenyard.Table(world, config(), **sizes)


def entries(rank, layer, seed=0, width=4):
    """Another number of entries of each rank and layer."""
    count = (10, 3, 0)[(rank + layer) % 3]
    drawn = np.random.default_rng((rank, layer, seed))
    return drawn.integers(0, 30_000, (count, width)).astype(np.int16).view(np.uint8)


def all_entries(ranks, layer, indices, seed=0, width=4):
    of = {rank: entries(rank, layer, seed, width) for rank in range(ranks)}
    return np.stack([of[i // MOST][i % MOST] for i in indices])


INDICES = [12, 0, 9, 10, 11, 12, 5, 5]


def of_numpy(world):
    me = world.rank
    with opened(world, scale_bytes=4, layers=2) as table:
        assert (table.rank, table.entry_bytes, table.scale_bytes) == (me, 8, 4)
        assert (table.max_entries, table.max_indices, table.layers, table.in_flight) == (
            10,
            64,
            2,
            2,
        )
        assert repr(table) == (
            "tokenyard.Table(entry_bytes=8, max_entries=10, max_indices=64, scale_bytes=4, layers=2, in_flight=2)"
        )
        for seed in range(3):
            values = [entries(me, layer, seed) for layer in range(2)]
            scales = [entries(me, layer, seed + 100, 2) for layer in range(2)]
            table.write([values[0], Lent(values[1])], tuple(scales))
            for array in values + scales:
                array[...] = 255
            for layer, indices in ((0, INDICES), (1, [0, 1, 2]), (0, [])):
                for dtype in (np.int32, np.int64):
                    found = np.zeros((len(indices), 8), np.uint8)
                    beside = np.zeros((len(indices), 4), np.uint8)
                    table.fetch(np.array(indices, dtype), Lent(found), beside, layer=layer)
                    if indices:
                        same(found, all_entries(world.ranks, layer, indices, seed))
                        same(beside, all_entries(world.ranks, layer, indices, seed + 100, 2))
        assert len(table.report()["window_bytes"]) == 1
    assert table.closed
    table.close()
    with pytest.raises(errors.InvalidInputError, match="the table was closed"):
        table.fetch(np.zeros(1, np.int32), np.zeros(8, np.uint8))


def test_each_rank_reads_the_entries_that_its_indices_name(ranks):
    ranks(2, of_numpy)


def halves(world):
    with opened(world, in_flight=3) as table:
        table.write(entries(world.rank, 0))
        lists = ([12, 0], INDICES, [9])
        pending = [table.fetch_send(np.array(indices, np.int32)) for indices in lists]
        with pytest.raises(errors.InvalidInputError, match="in_flight = 3"):
            table.fetch_send(np.zeros(1, np.int32))
        with pytest.raises(errors.InvalidInputError, match="3 fetches that were sent and not"):
            table.write(entries(world.rank, 0))
        for at in (2, 0, 1) if world.rank else (1, 2, 0):
            found = np.zeros((len(lists[at]), 8), np.uint8)
            with pytest.raises(errors.InvalidInputError, match="values: found"):
                pending[at].recv("no tensor")
            pending[at].recv(found)
            same(found, all_entries(2, 0, lists[at]))
            with pytest.raises(errors.InvalidInputError, match="was received before"):
                pending[at].recv(found)


def test_halves_are_received_in_any_order_and_once(ranks):
    ranks(2, halves)


def of_torch(world):
    import torch

    with opened(world, entry_bytes=64) as table:
        of = [(torch.arange(64).reshape(2, 32) + rank).to(torch.bfloat16) for rank in range(2)]
        table.write(of[world.rank])
        found = torch.zeros(2, 2, 32, dtype=torch.bfloat16)
        table.fetch(torch.tensor([[11, 0], [1, 10]]), found)
        assert torch.equal(
            found, torch.stack([of[1][1], of[0][0], of[0][1], of[1][0]]).reshape(2, 2, 32)
        )


def test_tensors_of_torch_are_read_bit_for_bit(ranks):
    pytest.importorskip("torch", reason="torch is not installed")
    ranks(2, of_torch)


def wrong(world):
    with opened(world) as table:
        table.write(entries(world.rank, 0))
        room = np.zeros((1, 8), np.uint8)
        one = np.zeros(1, np.int32)
        if world.rank == 1:
            for index in (13, 20, -1, 2**31 - 1):
                with pytest.raises(errors.InvalidInputError, match=f"index {index} is "):
                    table.fetch(np.array([index], np.int32), room)
            for indices in (one.astype(np.float32), np.zeros((2, 2), np.int32)[:, 0], *UNREADABLE):
                with pytest.raises(errors.InvalidInputError, match="indices: found"):
                    table.fetch(indices, room)
            for values in (room[:, :7], room[:, ::2], read_only(room), np.zeros(9, np.uint8)):
                with pytest.raises(errors.InvalidInputError, match="values"):
                    table.fetch(one, values)
            with pytest.raises(errors.InvalidInputError, match="scales: found 8 bytes; expected 0"):
                table.fetch(one, room, room)
            with pytest.raises(
                errors.InvalidInputError, match="layer: found 1; expected less than 1"
            ):
                table.fetch(one, room, layer=1)
            assert not room.any()
        table.fetch(one, room)
        same(room, all_entries(2, 0, [0]))


def test_a_fetch_that_cannot_be_made_is_an_error_of_its_rank_and_the_table_goes_on(ranks):
    ranks(2, wrong)


def refused(world):
    with opened(world) as table:
        good = entries(world.rank, 0)
        table.write(good)
        bad = [np.zeros(7, np.uint8), np.zeros((11, 8), np.uint8), [good, good], [], *UNREADABLE]
        for values in bad:
            kind = errors.InvalidInputError if world.rank else errors.RefusedError
            with pytest.raises(kind) as raised:
                table.write(values if world.rank else entries(0, 0, 7))
            assert "expected" in str(raised.value), str(raised.value)
        found = np.zeros((2, 8), np.uint8)
        table.fetch(np.array([12, 0]), found)
        same(found, all_entries(2, 0, [12, 0]))


def test_entries_that_one_rank_cannot_write_are_refused_on_all_and_the_old_ones_stay(ranks):
    ranks(2, refused)


def test_a_killed_rank_ends_the_write_of_the_other(programs):
    body = """
table = tokenyard.Table(world, config, entry_bytes=8, max_entries=2, max_indices=4)
values = np.full((2, 8), world.rank, np.uint8)
table.write(values)
if world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    for _ in range(1000):
        table.write(values)
    say("no error")
except tokenyard.Error as error:
    say(error.kind, error.rank, table.closed)
"""
    (out, _, code), (*_, killed) = programs(body, body)
    assert (out, code) == (["peer_lost", "1", "True"], 0)
    assert killed == -signal.SIGKILL
