"""The drop-in's operations beside dispatch and combine, by the names of DeepEP 2.1: messages, all-gathers, entries."""

import contextlib
import io
import time

import numpy as np
import pytest
import torch
from exact import same
from test_deep_ep_normal import buffer_of
from test_deep_ep_refusals import raises

import tokenyard
from tokenyard import errors
from tokenyard.deep_ep import ElasticBuffer, _world

MIB = 1 << 20
# Ranks share the cores.
torch.set_num_threads(1)
TYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.bool, torch.int16)


def elastic(world, **options):
    buffer_of(world).destroy()  # for its config
    return ElasticBuffer(world, explicitly_destroy=True, **options)


def drawn(dtype, shape, *seed):
    """Values of a type, the same wherever they are drawn."""
    numbers = np.random.default_rng(seed).integers(0, 100, shape)
    return torch.from_numpy(numbers).to(dtype)


def equal(found, expected):
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    views = [one.contiguous().view(-1).view(torch.uint8) for one in (found, expected)]
    assert torch.equal(*views)


def messages(world):
    me, ranks = world.rank, world.ranks
    buffer = elastic(world)
    with pytest.raises(errors.InvalidInputError, match="pp_send: found no config; expected pp_set"):
        buffer.pp_send(torch.zeros(8), 0)
    buffer.pp_set_config(4096, 3)
    after, before = (me + 1) % ranks, (me - 1) % ranks
    for seed, dtype in enumerate(TYPES):
        for shape in ((5, 7), (), (0, 3)):
            # As many as may be in flight, to any rank: not to neighbours alone.
            for to in (after, before, (me + 2) % ranks):
                if to != me:
                    sent = drawn(dtype, shape, seed, me, to)
                    buffer.pp_send(sent, to, num_sms=2)
                    sent.zero_()
            for source in (before, after, (me - 2) % ranks):
                if source != me:
                    found = torch.zeros(shape).to(dtype)
                    buffer.pp_recv(found, source)
                    equal(found, drawn(dtype, shape, seed, source, me))
    # Arrays of numpy, and room of another type.
    buffer.pp_send(np.arange(4, dtype=np.float64) + me, after)
    found = np.zeros(8, np.float32)
    buffer.pp_recv(found, before)
    same(found.view(np.float64), np.arange(4) + before)
    buffer.destroy()
    with pytest.raises(errors.InvalidInputError, match="it was destroyed"):
        buffer.pp_send(torch.zeros(8), 0)


@pytest.mark.parametrize("count", [2, 4])
def test_messages_arrive_in_their_order(ranks, count):
    ranks(count, messages)


def wrong_messages(world):
    me, buffer = world.rank, elastic(world)
    for says, bad in {
        "num_max_tensor_bytes: found 0; expected an integer from 1": (0, 2),
        "num_max_tensor_bytes: found 'much'": ("much", 2),
        "num_max_inflight_tensors: found 17; expected an integer from 1 to 16": (64, 17),
    }.items():
        raises(world, says, buffer.pp_set_config, *(bad if me == 1 else (64, 2)))
    with pytest.raises(errors.MismatchError, match="max_bytes"):
        buffer.pp_set_config(64 + me, 2)
    buffer.pp_set_config(64, 1)
    for rank, kind in ((me, "InvalidInput"), (7, "InvalidInput"), ("next", "InvalidInput")):
        with pytest.raises(getattr(errors, f"{kind}Error")):
            buffer.pp_send(torch.zeros(4), rank)
    other = 1 - me
    # Gaps, and a message that is too long, are refused on both sides.
    for bad in (torch.zeros(4, 4)[:, :2], torch.zeros(17), [1, 2]):
        if me == 1:
            with pytest.raises(errors.InvalidInputError, match="tensor: found"):
                buffer.pp_send(bad, other)
        else:
            with pytest.raises(errors.RefusedError, match="tensor: found"):
                buffer.pp_recv(torch.zeros(8), other)
    # A config anew, while a message waits that no rank receives.
    buffer.pp_send(torch.ones(4), other)
    buffer.pp_set_config(128, 2)
    buffer.pp_send(torch.full((32,), float(me)), other)
    found = torch.zeros(32)
    buffer.pp_recv(found, other)
    assert found.tolist() == [float(other)] * 32
    # Nor does the end wait for one.
    buffer.pp_send(torch.ones(4), other)
    buffer.destroy()


def test_wrong_messages_are_refused_and_the_buffer_goes_on(ranks):
    ranks(2, wrong_messages)


def gathers(world):
    me, ranks = world.rank, world.ranks
    buffer = elastic(world)
    with pytest.raises(errors.InvalidInputError, match="expected agrs_set_config before"):
        buffer.create_agrs_session()
    # Six calls of a session, of which four travel at once.
    shapes = [(3, 5), (7,), (0, 2), (1, 1, 4)]
    most = ElasticBuffer.get_agrs_num_max_session_bytes(world, shapes, torch.float64)
    buffer.agrs_set_config(6 * most, 6)
    for turn in range(2):
        with buffer.agrs_new_session():
            waiting = []
            for seed, dtype in enumerate(TYPES):
                parts = [drawn(dtype, shape, turn, seed, me) for shape in shapes]
                *found, handle = buffer.all_gather(parts)
                waiting.append((seed, dtype, found, handle))
            one, handle = buffer.all_gather(np.arange(3, dtype=np.int64) + me)
            order = waiting[::-1] if turn else waiting
            for seed, dtype, found, wait in order:
                wait()
                for shape, whole in zip(shapes, found, strict=True):
                    every = [drawn(dtype, shape, turn, seed, rank) for rank in range(ranks)]
                    equal(whole, torch.stack(every))
                # A second time changes nothing.
                wait()
            handle()
            same(one, np.arange(3) + np.arange(ranks)[:, None])
    with buffer.agrs_new_session(enabled=False):
        pass
    buffer.create_agrs_session()
    mine = buffer.agrs_get_inplace_tensor([(2, 3), (4,)], torch.float32)
    assert isinstance(mine, tuple)
    for part in mine:
        part.fill_(me)
    first, second, handle = buffer.all_gather(mine)
    single = buffer.agrs_get_inplace_tensor((5,), torch.bfloat16)
    single.fill_(me)
    third, _ = buffer.all_gather(single)
    # The end of the session receives the calls whose handles were not called.
    buffer.destroy_agrs_session()
    assert third[:, 0].tolist() == list(range(ranks))
    handle()
    for whole, part in ((first, mine[0]), (second, mine[1]), (third, single)):
        # In place: this rank's part is that of the result.
        assert whole[me].data_ptr() == part.data_ptr()
        rank = torch.arange(ranks, dtype=whole.dtype).view(-1, *[1] * part.dim())
        equal(whole, rank.expand(whole.shape))
    buffer.destroy()


@pytest.mark.parametrize("count", [2, 4])
def test_sessions_gather_the_tensors_of_all_ranks(ranks, count):
    ranks(count, gathers)


def wrong_gathers(world):
    me, buffer = world.rank, elastic(world)
    for says, bad in {
        "num_max_session_bytes: found 0; expected": (0, 2),
        "num_max_all_gathers_per_session: found 33; expected an integer from 1 to 32": (64, 33),
    }.items():
        raises(world, says, buffer.agrs_set_config, *(bad if me == 1 else (64, 2)))
    buffer.agrs_set_config(128, 2)
    for call in (lambda: buffer.all_gather(torch.zeros(4)), buffer.destroy_agrs_session):
        with pytest.raises(errors.InvalidInputError, match="found no open session"):
            call()
    buffer.create_agrs_session()
    for call in (buffer.create_agrs_session, lambda: buffer.agrs_set_config(64, 2)):
        with pytest.raises(errors.InvalidInputError, match="found an open session"):
            call()
    x = torch.full((4,), me)
    # Too much on one rank, and gaps: the others learn it at the handle.
    raises(world, "found 256 bytes of results", gathered, buffer, torch.zeros(32 if me else 4))
    raises(world, "found shape", gathered, buffer, torch.zeros(4, 4)[:, :1] if me else x)
    with pytest.raises(errors.InvalidInputError, match="found 2 calls of this session"):
        buffer.all_gather(x)
    buffer.destroy_agrs_session()
    with contextlib.suppress(ZeroDivisionError), buffer.agrs_new_session():
        buffer.all_gather(x)
        raise ZeroDivisionError
    with buffer.agrs_new_session():
        assert gathered(buffer, x).tolist() == [[0] * 4, [1] * 4]
    buffer.destroy()


def gathered(buffer, tensor):
    whole, handle = buffer.all_gather(tensor)
    handle()
    return whole


def test_wrong_gathers_are_refused_on_all_ranks_and_the_session_goes_on(ranks):
    ranks(2, wrong_gathers)


def entries(world, dtype):
    me, ranks = world.rank, world.ranks
    count, hidden, tokens, each, packs = 9, 16, 5, 3, 2
    gpu, cpu = ElasticBuffer.get_engram_storage_size_hint(count, hidden, tokens * each, dtype)
    buffer = elastic(world, num_bytes=gpu + cpu, num_cpu_bytes=cpu)
    is_fp8 = dtype == torch.float8_e4m3fn
    with pytest.raises(errors.InvalidInputError, match="expected engram_write before"):
        buffer.engram_fetch(torch.zeros((1, 1), dtype=torch.int32))
    for seed, rows in enumerate((count, count, count + 1)):
        of = [drawn(dtype, (rows, hidden), seed, rank) for rank in range(ranks)]
        whole = torch.cat([one.view(torch.uint8) for one in of]).view(dtype)
        sf = drawn(torch.float32, (ranks * rows, packs), seed, 100) if is_fp8 else None
        mine = of[me].clone()
        buffer.engram_write(mine, sf)
        mine.view(torch.uint8).zero_()
        draws = np.random.default_rng((seed, me)).integers(0, ranks * rows, (2, tokens, each))
        hooks = []
        for ids in torch.from_numpy(draws).int():
            given = ids.clone()
            hooks.append((ids.reshape(-1).long(), buffer.engram_fetch(given, 4, seed == 1)))
            given.zero_()
        for flat, hook in hooks[::-1]:
            data, scales = hook()
            expected = whole.view(torch.uint8)[flat].view(dtype).view(tokens, each * hidden)
            equal(data, expected)
            if is_fp8:
                equal(scales, sf[flat].view(tokens, each * packs))
                assert scales.stride() == ((1, 8) if seed == 1 else (each * packs, 1))
            else:
                assert scales is None
            assert hook()[0] is data
        world.barrier("all have fetched")
    data, _ = buffer.engram_fetch(np.zeros((0, each), np.int32))()
    assert isinstance(data, np.ndarray)
    assert data.shape == (0, each * hidden)
    buffer.destroy()


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_each_rank_reads_entries_of_all(ranks, count, dtype):
    ranks(count, entries, dtype)


def wrong_entries(world):
    me = world.rank
    buffer = elastic(world, num_bytes=2 * MIB, num_cpu_bytes=0)
    good = torch.full((4, 8), float(me), dtype=torch.bfloat16)

    def spoilt(bad):
        return bad if me == 1 else good

    fp8 = good.to(torch.float8_e4m3fn)
    # Before the first write, and behind one.
    for _ in range(2):
        for says, bad in {
            "storage: found list; expected": ([1],),
            "found shape [4, 8, 1]; expected [n, H]": (good[..., None],),
            "dtype: found torch.float32; expected torch.bfloat16 or": (good.float(),),
            "sf: found none for entries of torch.float8_e4m3fn": (fp8,),
            "sf: found some for entries of torch.bfloat16": (good, torch.zeros(8, 1)),
            "num_entries_per_layer: found 0; expected": (good[:0],),
        }.items():
            raises(world, says, buffer.engram_write, *(bad if me == 1 else (good,)))
        buffer.engram_write(good)
    raises(
        world,
        "expected a contiguous tensor",
        buffer.engram_write,
        spoilt(good.t().contiguous().t()),
    )
    with pytest.raises(errors.MismatchError, match=r"found entries = \[5\] on rank 1; expected"):
        buffer.engram_write(torch.zeros((4 + me, 8), dtype=torch.bfloat16))
    for bad, says in (
        (torch.zeros(3), "indices: found type float32; expected int32 or int64"),
        (torch.zeros(3, dtype=torch.int32), "indices: found shape"),
        (torch.zeros((1, 2), dtype=torch.int32).t()[:, ::1].repeat(1, 2)[:, ::2], "strides"),
        (torch.full((1, 1), 8, dtype=torch.int32), "8"),
        (torch.full((1, 1), -1, dtype=torch.int32), "-1"),
        (torch.zeros((1 << 18, 1), dtype=torch.int32), "at most 131072"),
    ):
        with pytest.raises(errors.InvalidInputError, match=says):
            buffer.engram_fetch(bad)()
    data, _ = buffer.engram_fetch(torch.tensor([[7, 0]]))()
    assert data[0, ::8].tolist() == [1.0, 0.0]
    buffer.destroy()
    small = elastic(world)
    with pytest.raises(tokenyard.Error, match="give num_bytes and num_cpu_bytes of"):
        small.engram_write(good)
    small.destroy()


def test_wrong_entries_are_refused_on_all_ranks_and_wrong_fetches_on_their_own(ranks):
    ranks(2, wrong_entries)


def beside_a_dispatch(world):
    """Operations have memory of their own, which the end of the buffer gives back, and garbage is no harm."""
    me, buffer = world.rank, elastic(world, num_bytes=4 * MIB)
    buffer.pp_set_config(1024, 2)
    buffer.agrs_set_config(1024, 2)
    buffer.engram_write(torch.zeros((4, 8), dtype=torch.bfloat16))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        buffer.print_memory_usage()
    assert "0 communicators and 3 operations: 0.0" in printed.getvalue()
    x, ids = torch.ones((3, 64), dtype=torch.bfloat16), torch.zeros((3, 1), dtype=torch.int64)
    rows, *_ = buffer.dispatch(x, topk_idx=ids, num_experts=2, num_max_tokens_per_rank=4)
    assert len(rows) == (0 if me else 6)
    buffer.pp_send(x, 1 - me)
    parked = _world._openings[world].parked
    start = time.monotonic()
    assert not parked
    del buffer, rows, _
    beside = {tokenyard.Pipe, tokenyard.Gather, tokenyard.Table}
    assert {type(one) for one in parked.values()} == {tokenyard.Communicator, *beside}
    world.barrier("all have dropped it")
    again = elastic(world)
    assert not parked
    # No rank waits until late_ms, a minute, for the receiver of that message.
    assert time.monotonic() - start < 45
    again.pp_set_config(64, 1)
    again.destroy()


def test_operations_live_as_long_as_their_buffer(ranks):
    ranks(2, beside_a_dispatch)


def test_hints_are_those_of_deep_ep():
    class Group:
        ranks = 4

    hint = ElasticBuffer.get_pp_buffer_size_hint
    assert hint(4096 * 7168 * 2, 4) == 4096 * 7168 * 2 * 16
    assert hint(33, 1) == 2 * MIB
    session = ElasticBuffer.get_agrs_num_max_session_bytes
    assert session(Group, (3, 5), torch.bfloat16) == 128
    assert session(Group, [(3, 5), torch.Size([2])], torch.float32) == 256 + 32
    assert ElasticBuffer.get_agrs_buffer_size_hint(Group, 2 * MIB + 1) == 4 * MIB
    found = ElasticBuffer.get_engram_storage_size_hint(524288, 128, 512 * 24)
    assert found == (4 * MIB, 128 * MIB)
    fp8 = ElasticBuffer.get_engram_storage_size_hint(1, 40, 1 << 16, torch.float8_e4m3fn)
    assert fp8 == (4 * MIB, 2 * MIB)
