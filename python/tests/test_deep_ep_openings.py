"""A communicator that cannot be opened is an exception on all ranks, and no more: the buffer, others of its group and
new ones go on."""

import resource

import numpy as np
import pytest
from oracle import Case
from test_deep_ep_low_latency import BF16
from test_deep_ep_normal import buffer_of, close, layout_of, times

from tokenyard import errors
from tokenyard.deep_ep import ElasticBuffer

CASE = Case(2, seed=9, tokens=(5, 7))
MANY = Case(2, seed=9, experts=36, topk=33, tokens=(5, 7))


def dispatch_of(case):
    def call(world, buffer, _):
        x, idx, weights = (of[world.rank] for of in (case.x, case.idx, case.weights))
        layout = layout_of(buffer, case)
        return buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **layout)

    return call


def elastic_of(case, topk=None, width=None, max_tokens=12):
    """A dispatch of V2, which judges less before a communicator is opened; on a buffer beside those of V1, as users
    have both."""

    def call(world, _, elastic):
        idx = case.idx[world.rank]
        more = np.full((len(idx), (topk or case.topk) - case.topk), -1, np.int64)
        return elastic.dispatch(
            case.x[world.rank][:, :width].copy(),
            np.concatenate([idx, more], axis=1),
            num_experts=case.experts,
            num_max_tokens_per_rank=max_tokens,
        )

    return call


def without_memory(world, buffer, elastic):
    """More tokens than before, and rank 1 may make no file of the size of its arena."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        dispatch_of(Case(2, seed=3, tokens=(1500, 1500)))(world, buffer, elastic)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


# Each: the call, what all ranks read, and the classes that ranks 0 and 1 raise.
BAD_SHAPE = [errors.InvalidInputError] * 2
OPENINGS = {
    "top-k 33": (elastic_of(MANY), "found topk = 33; expected at most 32", BAD_SHAPE),
    "top-k above E": (elastic_of(CASE, topk=9), "found topk = 9; expected at most 8", BAD_SHAPE),
    "hidden 6": (elastic_of(CASE, width=6), "found hidden = 6; expected rows of", BAD_SHAPE),
    "M = 2^31 - 1": (
        elastic_of(CASE, max_tokens=2**31 - 1),
        "found max_tokens * ranks = 4294967294; expected",
        BAD_SHAPE,
    ),
    "M = 2^31": (
        elastic_of(CASE, max_tokens=2**31),
        "num_max_tokens_per_rank: found 2147483648; expected an integer from 1 to 2147483647",
        [errors.InvalidInputError, errors.RefusedError],
    ),
    "no memory": (
        without_memory,
        "allocate window: the memory cannot be sized",
        [errors.RefusedError, errors.SystemCallError],
    ),
}


def right(world, buffer):
    me = world.rank
    recv_x, *_, handle, _ = dispatch_of(CASE)(world, buffer, None)
    combined, _, _ = buffer.combine(recv_x, handle)
    close(combined, CASE.x[me] * times(CASE, me)[:, None])


def right_of_v2(world, elastic):
    me = world.rank
    recv_x, *_, handle, _ = elastic_of(CASE)(world, None, elastic)
    combined, _, _ = elastic.combine(recv_x, handle)
    close(combined, CASE.x[me] * times(CASE, me)[:, None])


def failed_opening(world, name, is_first):
    call, says, kinds = OPENINGS[name]
    buffer, other = buffer_of(world), buffer_of(world)
    elastic = ElasticBuffer(world, explicitly_destroy=True)
    if not is_first:
        right(world, buffer)
        right(world, other)
        right_of_v2(world, elastic)
    for _ in range(2):
        with pytest.raises(errors.Error) as raised:
            call(world, buffer, elastic)
        assert type(raised.value) is kinds[world.rank], repr(raised.value)
        assert says in str(raised.value), str(raised.value)
    right_of_v2(world, elastic)
    new = buffer_of(world)
    for each in (buffer, other, new):
        right(world, each)
    for each in (buffer, other, new, elastic):
        each.destroy()


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("name", OPENINGS)
def test_buffers_go_on_after_a_communicator_that_cannot_be_opened(ranks, name, is_first):
    ranks(2, failed_opening, name, is_first)


def larger_m_each(world):
    """The M of each call is larger than that of the one before."""
    buffer = buffer_of(world, low_latency_mode=True)
    opened = {}
    for most in range(1, 200):
        case = Case(2, tokens=(min(most, 3), 1), max_tokens=most)
        x, idx = case.x[world.rank].astype(BF16), case.idx[world.rank]
        rows, *_ = buffer.low_latency_dispatch(x, idx, most, case.experts, use_fp8=False)
        assert rows.shape[1] == 2 * most
        current = buffer._pool.current
        opened[id(current)] = current
    assert [one.sizes.tokens for one in opened.values()] == [1, 64, 128, 192, 256]
    buffer.destroy()


def test_m_that_grows_with_each_call_opens_few_communicators(ranks):
    ranks(2, larger_m_each)
