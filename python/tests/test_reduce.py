"""Sums over all ranks: reduce-scatter and all-reduce of a gather."""

import pathlib

import numpy as np
import pytest
from pool import config
from test_exchange import same

import tokenyard
from tokenyard import errors


def test_the_example_of_the_documentation_runs(programs, monkeypatch):
    root = pathlib.Path(__file__).parents[2]
    example = (root / "docs/pipes.md").read_text().split("```python\n")[3].split("```")[0]
    monkeypatch.chdir(root)
    ended = programs(example, example, example, head="")
    assert [out for out, *_ in ended] == [["1.0", "3.0"]] * 3, ended


def opened(world, max_bytes=1024, **options):
    return tokenyard.Gather(world, config(), max_bytes=max_bytes, reduces=True, **options)


def numbers(rank, shape, seed=0):
    """Numbers whose sum depends on the order of its terms."""
    drawn = np.random.default_rng((seed, rank)).standard_normal(shape) * 1000
    return drawn.astype(np.float32)


def total(ranks, shape, seed=0, scale=1.0):
    sums = numbers(0, shape, seed)
    for rank in range(1, ranks):
        sums = sums + numbers(rank, shape, seed)
    return sums * np.float32(scale)


def of_numpy(world):
    me, ranks = world.rank, world.ranks
    with opened(world, 4096) as gather:
        assert gather.reduces
        # As docs/pipes.md says, where peers are mapped.
        assert gather.report()["window_bytes"] == [2 * 2 * (ranks * (256 + 4096) + 256)]
        assert repr(gather) == "tokenyard.Gather(max_bytes=4096, in_flight=2, reduces=True)"
        for seed, shape in enumerate([(ranks, 5), (2 * ranks, 3, 2), (3, ranks), (ranks,), (0, 4)]):
            mine, sums = numbers(me, shape, seed), total(ranks, shape, seed, 0.7)
            flat = sums.reshape(ranks, -1)[me]
            made = gather.reduce_scatter(mine, scale=0.7)
            divides = shape[0] % ranks == 0
            same(made, flat.reshape(shape[0] // ranks, *shape[1:]) if divides else flat)
            same(gather.all_reduce(mine, scale=0.7), sums)
            # Into memory of another shape; by halves; and in place.
            room = np.zeros(flat.size, np.float32)
            assert gather.reduce_scatter(mine, room, scale=0.7) is room
            same(room, flat)
            pending = gather.all_reduce_send(mine, scale=0.7)
            changed = mine.copy()
            mine[...] = 9
            assert pending.recv(mine) is mine
            same(mine, sums)
            assert gather.all_reduce(changed, changed, scale=0.7) is changed
            same(changed, sums)
            with pytest.raises(errors.InvalidInputError, match="received before"):
                pending.recv()


def test_each_rank_gets_the_sums_in_the_order_of_ranks(ranks):
    ranks(3, of_numpy)
    ranks(1, of_numpy)


def of_lists(world):
    with opened(world) as gather:
        shapes = [(4, 2), (2,), (2, 0)]
        mine = [numbers(world.rank, shape, seed) for seed, shape in enumerate(shapes)]
        sums = [total(2, shape, seed) for seed, shape in enumerate(shapes)]
        made = gather.all_reduce(tuple(mine))
        assert isinstance(made, list)
        for found, wanted in zip(made, sums, strict=True):
            same(found, wanted)
        # Several under way, with a gather between, received in another order.
        parts, whole = gather.reduce_scatter_send(mine), gather.all_gather_send(mine[0])
        same(whole.recv(), np.stack([numbers(rank, (4, 2)) for rank in range(2)]))
        same(parts.recv()[0], sums[0][2 * world.rank :][:2])
        parts = gather.reduce_scatter(mine, [it[: len(it) // 2] for it in mine])
        same(parts[0], sums[0][2 * world.rank :][:2])


def test_lists_of_tensors_share_a_call_and_calls_overlap(ranks):
    ranks(2, of_lists)


def of_torch(world):
    import torch

    with opened(world) as gather:
        mine = (torch.arange(24).reshape(2, 3, 4) * 1.1 + world.rank).to(torch.bfloat16)
        both = [
            (torch.arange(24).reshape(2, 3, 4) * 1.1 + rank).to(torch.bfloat16) for rank in (0, 1)
        ]
        sums = ((both[0].float() + both[1].float()) * 0.5).to(torch.bfloat16)
        assert torch.equal(gather.all_reduce(mine, scale=0.5), sums)
        part = gather.reduce_scatter(mine, precision="bf16", scale=0.5)
        assert (part.dtype, tuple(part.shape)) == (torch.bfloat16, (1, 3, 4))
        assert torch.equal(part, sums[world.rank :][:1])
        # Parts that travel as bfloat16 are near, and numbers of bfloat16 exact.
        x = torch.full((256,), 1.001 + world.rank)
        near = gather.all_reduce(x, precision="bf16")
        assert not torch.equal(near, torch.full((256,), 1.001 + 2.001))
        assert torch.allclose(near, torch.full((256,), 3.002), rtol=8e-3)
        exact = gather.all_reduce(torch.full((6,), 1.5 + world.rank), precision="bf16")
        assert exact.tolist() == [4.0] * 6


def test_tensors_of_torch_are_summed_and_rounded_once(ranks):
    pytest.importorskip("torch", reason="torch is not installed")
    ranks(2, of_torch)


def whole(gather, name, tensors, options):
    """A call, with its second half where it has one."""
    made = getattr(gather, name)(tensors, **options)
    return made.recv() if name.endswith("_send") else made


def of_wrong(world):
    good = np.ones(8, np.float32)
    with opened(world) as gather:
        for bad, options, text in (
            (np.ones(9, np.float32), {}, "found 9 elements; expected a multiple of the 2 ranks"),
            (np.ones(8, np.int32), {}, "found i32; expected bf16 or fp32"),
            (np.ones(514, np.float32), {}, "found 1028 bytes for each rank; expected at most 1024"),
            (good[::-1], {}, "expected elements that follow each other"),
            ([good, None], {}, r"tensors\[1\]: found NoneType"),
            (good, {"precision": "fp8"}, "precision: found .fp8.; expected"),
            (good, {"scale": "1"}, "scale: found '1'; expected a number"),
            (good, {"scale": float("inf")}, "scale: found inf; expected a finite number"),
            (good, {"scale": 1e300}, "scale: found inf; expected a finite number"),
        ):
            for name in ("reduce_scatter", "all_reduce", "reduce_scatter_send", "all_reduce_send"):
                is_bad = world.rank == 1
                kind = errors.InvalidInputError if is_bad else errors.RefusedError
                given = (bad, options) if is_bad else (good, {})
                with pytest.raises(kind, match=text):
                    whole(gather, name, *given)
            assert gather.all_reduce(good).tolist() == [2.0] * 8
        with pytest.raises(errors.MismatchError, match="the same types, precision and scale"):
            gather.all_reduce(good, scale=1.0 + world.rank)
        with pytest.raises(errors.MismatchError, match="the same call"):
            (gather.all_reduce, gather.reduce_scatter)[world.rank](good)
        with pytest.raises(errors.MismatchError, match="the same call"):
            (gather.all_gather, gather.reduce_scatter)[world.rank](good)
        for call in (gather.reduce_scatter_send, gather.all_reduce_send):
            pending = call(good)
            if world.rank == 1:
                with pytest.raises(errors.InvalidInputError, match="outs: found int"):
                    pending.recv(7)
            elif call == gather.all_reduce_send:
                room = np.zeros(8, np.float32)
                with pytest.raises(errors.RefusedError, match="outs: found int"):
                    pending.recv(room)
                # The part of this rank is written by then, and no other.
                assert room.tolist() == [2.0] * 4 + [0.0] * 4
            else:
                assert pending.recv().tolist() == [2.0] * 4
        assert gather.all_reduce(good).tolist() == [2.0] * 8
    with tokenyard.Gather(world, config(), max_bytes=64) as plain:
        assert not plain.reduces
        with pytest.raises(errors.InvalidInputError, match="reduces = true"):
            plain.all_reduce(good)


def test_what_cannot_be_summed_is_refused_on_all_ranks_and_the_gather_goes_on(ranks):
    ranks(2, of_wrong)
