"""The drop-in's gathers where ranks refuse calls, wait for them in other orders, or leave sessions by exceptions."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_deep_ep_buckets import half_of
from test_deep_ep_normal import buffer_of
from test_deep_ep_operations import elastic, equal, gathered
from test_deep_ep_refusals import raises

import tokenyard
from tokenyard import errors
from tokenyard.deep_ep import BucketBuffer
from tokenyard.deep_ep._ops import common
from tokenyard.deep_ep._ops.bucket import Bucket


def bucket_of(world, num_bytes=4096):
    buffer_of(world).destroy()  # for its config
    return BucketBuffer(world, num_bytes, explicitly_destroy=True)


def shard(world, call, count=4):
    """The shard of a rank in a call."""
    return torch.full((count,), 10.0 * call + world.rank)


def whole(world, call, count=4):
    """The result of all ranks then."""
    return torch.cat([torch.full((count,), 10.0 * call + rank) for rank in range(world.ranks)])


def sent(world, buffer, call):
    return buffer.all_gather(shard(world, call), torch.zeros(4 * world.ranks))


def waits_out_of_order(world):
    ranks = world.ranks
    bucket = bucket_of(world)
    grads = torch.arange(8.0 * ranks) + world.rank
    total = ranks * torch.arange(8.0 * ranks) + ranks * (ranks - 1) / 2
    for turn in range(3):
        sums = bucket.reduce_scatter(grads.clone())
        first = sent(world, bucket, turn)
        equal(first.wait(), whole(world, turn))
        # The sums are received by the next call, in whose place they are.
        second = sent(world, bucket, turn + 1)
        equal(sums.wait(), total[8 * world.rank :][:8])
        third = sent(world, bucket, turn + 2)
        equal(third.wait(), whole(world, turn + 2))
        equal(second.wait(), whole(world, turn + 1))
    bucket.destroy()
    buffer = elastic(world)
    buffer.agrs_set_config(4096, 16)
    with buffer.agrs_new_session():
        waiting = []
        for call in range(16):
            waiting.append((call, *buffer.all_gather(shard(world, call))))
            if call % 3 == 2:
                # The earliest of the last three stays.
                for _ in range(2):
                    done, found, handle = waiting.pop()
                    handle()
                    equal(found.view(-1), whole(world, done))
        for done, found, handle in waiting:
            handle()
            equal(found.view(-1), whole(world, done))
    buffer.destroy()


@pytest.mark.parametrize("count", [2, 4])
def test_calls_are_waited_for_in_any_order(ranks, count):
    ranks(count, waits_out_of_order)


def refusals_beside_open_calls(world):
    me, bucket = world.rank, bucket_of(world)
    for call in range(3):
        opened = sent(world, bucket, call)
        if me == 1:
            with pytest.raises(errors.InvalidInputError, match="found 7 tensors"):
                bucket.all_gather(shard(world, 0), [torch.zeros(8)] * 7)
        else:
            refused = sent(world, bucket, 0)
        later = [sent(world, bucket, call + 1), sent(world, bucket, call + 2)]
        equal(opened.wait(), whole(world, call))
        for place, event in enumerate(later):
            equal(event.wait(), whole(world, call + 1 + place))
        if me != 1:
            with pytest.raises(errors.RefusedError, match="found 7 tensors"):
                refused.wait()
    bucket.destroy()
    buffer = elastic(world)
    buffer.agrs_set_config(4096, 16)
    with buffer.agrs_new_session():
        waiting = []
        for call in range(12):
            if call % 5 == 1:
                # Refused by the operation itself.
                tensor = torch.zeros(4, 2)[:, 0] if me == 1 else shard(world, call)
                if me == 1:
                    with pytest.raises(errors.InvalidInputError, match="found shape"):
                        buffer.all_gather(tensor)
                else:
                    buffer.all_gather(tensor)
                continue
            waiting.append((call, *buffer.all_gather(shard(world, call))))
        for call, found, handle in waiting:
            handle()
            equal(found.view(-1), whole(world, call))
    buffer.destroy()


@pytest.mark.parametrize("count", [2, 4])
def test_a_refused_call_leaves_those_beside_it_as_they_are(ranks, count):
    ranks(count, refusals_beside_open_calls)


def left(world, buffer, calls):
    with buffer.agrs_new_session():
        for call in range(calls):
            buffer.all_gather(shard(world, call))
        raise ZeroDivisionError


def left_sessions(world):
    buffer = elastic(world)
    buffer.agrs_set_config(4096, 8)
    for calls in (1, 3, 6):
        with pytest.raises(ZeroDivisionError):
            left(world, buffer, calls)
        # More than travel at once.
        with buffer.agrs_new_session():
            for call in range(7):
                equal(gathered(buffer, shard(world, call)).view(-1), whole(world, call))
    buffer.destroy()


def test_an_exception_in_a_session_leaves_the_gather_as_good_as_new(ranks):
    ranks(2, left_sessions)


class NoRoom(torch.Tensor):
    """A tensor beside which no memory is left."""

    def new_empty(self, *shape, **options):
        raise MemoryError("none is left")


def results_without_room(world):
    """A failure on one rank beside the operation itself."""
    me, bucket = world.rank, bucket_of(world)
    for dsts in (torch.zeros(33, dtype=torch.uint8)[1:], [torch.zeros(8).to_sparse()]):
        call = bucket.all_gather
        raises(world, "dsts", waited, call, shard(world, 1), dsts if me else torch.zeros(8))
    equal(sent(world, bucket, 1).wait(), whole(world, 1))
    bucket.destroy()
    buffer = elastic(world)
    buffer.agrs_set_config(4096, 16)
    with buffer.agrs_new_session():
        x = shard(world, 1)
        raises(world, "none is left", gathered, buffer, x.as_subclass(NoRoom) if me else x)
        raises(world, "t[0]: found list; expected a tensor", gathered, buffer, [[1]] if me else x)
        # torch shares no array that is read alone.
        array = np.array(x)
        array.flags.writeable = not me
        assert gathered(buffer, array).tolist() == whole(world, 1).view(2, 4).tolist()
        equal(gathered(buffer, x).view(-1), whole(world, 1))
    buffer.destroy()


def waited(call, *arguments, **options):
    return call(*arguments, **options).wait()


def test_results_without_room_are_refused_on_all_ranks(ranks):
    ranks(2, results_without_room)


def storage_that_ends(world):
    """On one rank alone, which has taken more of it."""
    me, bucket = world.rank, bucket_of(world)
    for name in ("all_gather", "all_reduce", "reduce_scatter"):
        call = getattr(bucket, name)
        with bucket.session() as session:
            if me == 1:
                session.allocate((4000,), torch.uint8)
                with pytest.raises(RuntimeError, match="session out of storage: found") as raised:
                    call(torch.ones(64))
                assert type(raised.value) is RuntimeError
                with pytest.raises(RuntimeError, match="session out of storage: found") as raised:
                    session.allocate((64,))
                assert type(raised.value) is RuntimeError
            else:
                with pytest.raises(errors.RefusedError, match="session out of storage: found"):
                    call(torch.ones(64)).wait()
            equal(sent(world, bucket, 1).wait(), whole(world, 1))
    bucket.destroy()


def test_storage_that_ends_on_one_rank_is_refused_on_the_others(ranks):
    ranks(2, storage_that_ends)


def wrong_groups(world):
    """A wrong argument in one group is an error in all of them, at once."""
    buffer_of(world).destroy()  # for its config
    half, me = half_of(world), world.rank
    start = time.monotonic()
    for groups in ([half, world], [world, half]):
        with pytest.raises((errors.InvalidInputError, errors.RefusedError)) as raised:
            BucketBuffer(groups, 0 if me == 3 else 64)
        assert "allocation_plan_or_num_bytes: found 0; expected" in str(raised.value)
        # Of a size that differs, ranks learn in the opening.
        with pytest.raises((errors.MismatchError, errors.RefusedError), match="max_bytes"):
            BucketBuffer(groups, 8192 if me == 3 else 64)
        with pytest.raises(errors.InvalidInputError, match="found 10 groups; expected 1 to 8"):
            BucketBuffer(groups * 5, 64)
        bucket = BucketBuffer(groups, 64, explicitly_destroy=True)
        for group in groups:
            x = torch.ones(4)
            assert bucket.all_reduce(x, group=group).wait().tolist() == [group.ranks] * 4
        destroy = bucket.contexts[0]._pool.destroy
        bucket.contexts[0]._pool.destroy = fail
        with pytest.raises(ZeroDivisionError):
            bucket.destroy()
        assert [context._pool.is_destroyed for context in bucket.contexts] == [False, True]
        destroy()
    # No rank waits until late_ms, a minute.
    assert time.monotonic() - start < 45


def fail():
    raise ZeroDivisionError


def test_what_is_wrong_in_a_group_is_an_error_in_all_groups_of_a_bucket(ranks):
    ranks(4, wrong_groups)


def test_sums_that_are_not_supported_raise_errors_of_their_own(monkeypatch):
    """One that is raised twice holds the frames of both calls, and their tensors."""

    def gather(world, config, *, reduces=False, **options):
        if reduces:
            raise errors.UnsupportedError("no sums", kind="unsupported", fix="use others")
        return "a gather"

    class Slot:
        def open(self, wrong, make):
            make(SimpleNamespace(ranks=2), None)

        def use(self, operation):
            if operation == "all_reduce":
                raise errors.InvalidInputError("it was destroyed")

    monkeypatch.setattr(tokenyard, "Gather", gather)
    bucket = Bucket(None)
    bucket._slot = Slot()
    bucket.open(64, None)
    raised = []
    for _ in range(2):
        with pytest.raises(errors.UnsupportedError, match="no sums") as found:
            bucket.reduce_scatter([], None, 1.0, "fp32")
        raised.append(found.value)
    assert raised[0] is not raised[1]
    assert (raised[1].kind, raised[1].fix) == ("unsupported", "use others")
    with pytest.raises(errors.InvalidInputError, match="it was destroyed"):
        bucket.all_reduce([], None, 1.0)


def test_outputs_are_recorded_on_the_stream_that_reads_them(monkeypatch):
    class Stream:
        def __init__(self):
            self.waits = []

        def wait_stream(self, other):
            self.waits.append(other)

    class OnGpu:
        is_cuda, device = True, 0

        def __init__(self):
            self.streams = []

        def record_stream(self, stream):
            self.streams.append(stream)

    sends, reads = Stream(), Stream()
    current = [sends]
    cuda = SimpleNamespace(current_stream=lambda device: current[0])
    monkeypatch.setattr(common, "torch", SimpleNamespace(Tensor=OnGpu, cuda=cuda))
    shard, output = OnGpu(), OnGpu()
    common.record([shard, None])
    assert shard.streams == [sends]
    handle = common.Flight(1).send(lambda: "pending", lambda pending: None, [output])
    handle()
    assert (sends.waits, output.streams) == ([], [])
    current[0] = reads
    handle()
    assert (reads.waits, output.streams) == ([sends], [reads])
