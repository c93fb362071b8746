"""The drop-in's low latency calls against the oracle, on 1 to 4 processes."""

import threading
import time
import types

import ml_dtypes
import numpy as np
import pytest
import torch
from oracle import Case
from pool import LIMIT_S
from test_deep_ep_normal import NARROW, buffer_of, close, layout_of, same, times
from test_deep_ep_refusals import raises

import tokenyard.deep_ep
from tokenyard import errors
from tokenyard.deep_ep import Buffer
from tokenyard.deep_ep._pool import Pool

BF16 = ml_dtypes.bfloat16
CASES = [
    Case(1, hidden=256),
    Case(2, seed=2, hidden=256),
    Case(2, seed=3, hidden=512, tokens=(0, 7)),
    Case(4, seed=5, hidden=512),
    Case(4, seed=6, hidden=128, tokens=(12, 0, 1, 5), topk=8),
]
NAMES = [f"{case.ranks} ranks {case.tokens}" for case in CASES]
every_case = pytest.mark.parametrize("case", CASES, ids=NAMES)

# The cast, and how far values may be off: e4m3 has 3 bits behind the point.
CASTS = {
    "bf16": ({"use_fp8": False}, 0.0),
    "fp8": ({"use_fp8": True}, 2**-4),
    "rounded": ({"use_fp8": True, "round_scale": True}, 2**-4),
    "ue8m0": ({"use_fp8": True, "round_scale": True, "use_ue8m0": True}, 2**-4),
}


def rows_of(case, rank):
    return case.x[rank].astype(BF16)


def values(packed, hidden):
    """Rows as float32."""
    if not isinstance(packed, tuple):
        return packed.astype(np.float32)
    x, scales = packed
    if scales.dtype == np.int32:
        columns = np.ascontiguousarray(scales).view(np.uint8).astype(np.uint32) << 23
        scales = columns.view(np.float32)[..., : -(-hidden // 128)]
    return x.astype(np.float32) * np.repeat(scales, 128, axis=-1)[..., :hidden]


def check(case, me, packed, counts, handle, tolerance):
    """Rows, counts and ranges, from a view of all ranks."""
    most = case.ranks * case.max_tokens
    source, ranges, *numbers = handle
    assert numbers == [case.max_tokens, case.hidden, case.experts]
    assert source.shape == (case.local, most)
    assert (source.dtype, ranges.dtype, counts.dtype) == (np.int32, np.int64, np.int32)
    same(counts, case.expert_counts(me))
    x = values(packed, case.hidden)
    assert x.shape == (case.local, most, case.hidden)
    for expert in range(case.local):
        rows = case.expert_rows(me, expert)
        same(source[expert, : len(rows)], np.array([t for _, t, _ in rows], np.int32))
        for rank in range(case.ranks):
            count, begin = ranges[expert, rank] & 0xFFFFFFFF, ranges[expert, rank] >> 32
            assert count == sum(s == rank for s, _, _ in rows)
            assert all(s == rank for s, _, _ in rows[begin : begin + count])
        for row, (s, token, _) in enumerate(rows):
            expected = rows_of(case, s)[token].astype(np.float32)
            # A value is off by a part of itself, or of the smallest step of its 128 channels.
            least = np.abs(expected).reshape(-1, 128).max(axis=1).repeat(128) * 2**-9
            off = np.abs(x[expert, row] - expected)
            assert (off <= tolerance * np.maximum(np.abs(expected), least)).all()
    return x


def weighted(case, me, scale):
    """The weighted sum of `scale(expert) * row`."""
    out = np.zeros((case.tokens[me], case.hidden))
    for token in range(case.tokens[me]):
        for k, e in enumerate(case.idx[me][token]):
            if e >= 0:
                row = rows_of(case, me)[token].astype(np.float64)
                out[token] += case.weights[me][token, k] * scale(int(e)) * row
    return out


def exchange(world, case, cast, with_hook, domains):
    me, buffer = world.rank, buffer_of(world, domains, low_latency_mode=True)
    options, tolerance = CASTS[cast]
    stats = np.full(case.local, 100, np.int32)
    x, idx, weights = rows_of(case, me), case.idx[me].copy(), case.weights[me]
    for turn in range(3):
        packed, counts, handle, event, hook = buffer.low_latency_dispatch(
            x,
            idx,
            case.max_tokens,
            case.experts,
            cumulative_local_expert_recv_stats=stats,
            return_recv_hook=with_hook,
            async_finish=not with_hook,
            **options,
        )
        assert (hook is not None, event.event is not None) == (with_hook, not with_hook)
        if with_hook:
            # The sent tensors are the caller's again, and the outputs are there before their rows.
            assert not counts.any()
            x[:], idx[:] = 0, 0
            hook()
            hook()
            x[:], idx[:] = rows_of(case, me), case.idx[me]
        check(case, me, packed, counts, handle, tolerance)
        same(stats, 100 + (turn + 1) * np.array(case.expert_counts(me)))

        y = np.full((case.local, case.ranks * case.max_tokens, case.hidden), np.nan, BF16)
        for expert in range(case.local):
            for row, (s, token, _) in enumerate(case.expert_rows(me, expert)):
                y[expert, row] = (1 + me * case.local + expert) * rows_of(case, s)[token].astype(
                    np.float32
                )
        expected = weighted(case, me, lambda e: 1 + e)
        out = np.zeros((case.tokens[me], case.hidden), BF16)
        combined, _, hook = buffer.low_latency_combine(
            y, idx, weights, handle, out=out, return_recv_hook=with_hook
        )
        if with_hook:
            y[:] = 0
            hook()
        assert combined is out
        close(out, expected, 2**-6)
        written = buffer.get_next_low_latency_combine_buffer(handle)
        assert written.dtype == BF16
        written[:] = np.nan
        for expert in range(case.local):
            for row, (s, token, _) in enumerate(case.expert_rows(me, expert)):
                written[expert, row] = rows_of(case, s)[token]
        combined, event, none = buffer.low_latency_combine(
            y, idx, weights, handle, zero_copy=True, async_finish=True
        )
        assert none is None
        event.current_stream_wait()
        close(combined, weighted(case, me, lambda e: 1), 2**-6)
    buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.experts)
    buffer.destroy()


@every_case
@pytest.mark.parametrize("with_hook", [False, True], ids=["at once", "hook"])
@pytest.mark.parametrize("cast", CASTS)
def test_rows_lie_in_a_block_for_each_expert_and_come_back(ranks, case, cast, with_hook):
    ranks(case.ranks, exchange, case, cast, with_hook, 1)


def narrow(world, case):
    """Rows whose ids and weights are wider than they are."""
    me, buffer = world.rank, buffer_of(world)
    x, idx, weights = case.x[me], case.idx[me], case.weights[me]
    packed, _, handle, _, _ = buffer.low_latency_dispatch(
        x, idx, case.max_tokens, case.experts, use_fp8=False
    )
    for expert in range(case.local):
        expected = case.rows([(s, t) for s, t, _ in case.expert_rows(me, expert)])
        same(packed[expert, : len(expected)], expected)
    combined, _, _ = buffer.low_latency_combine(packed, idx, weights, handle)
    close(combined, x * np.where(idx >= 0, weights, 0).sum(axis=1, keepdims=True))
    buffer.destroy()


@pytest.mark.parametrize("case", NARROW, ids=["H = K", "H < K"])
def test_rows_may_be_narrower_than_their_choices(ranks, case):
    ranks(case.ranks, narrow, case)


def test_rows_cross_between_domains_too(ranks):
    ranks(4, exchange, CASES[3], "fp8", True, 2)


def masked(world, case):
    me, buffer = world.rank, buffer_of(world)
    x, idx, weights = rows_of(case, me), case.idx[me], case.weights[me]
    packed, _, handle, _, _ = buffer.low_latency_dispatch(
        x, idx, case.max_tokens, case.experts, use_fp8=False
    )
    kept = idx.copy()
    kept[::2, 0] = -1
    combined, _, _ = buffer.low_latency_combine(packed, kept, weights, handle)
    sums = np.where(kept >= 0, weights, 0).sum(axis=1, keepdims=True)
    close(combined, x.astype(np.float64) * sums, 2**-6)

    def spoilt(good, bad):
        return bad if me == 1 else good

    other = np.where(idx >= 0, (idx + 1) % case.experts, -1)
    for says, arguments in {
        "as dispatched, or -1": (packed, spoilt(idx, other), weights, handle),
        "x: found shape": (spoilt(packed, packed[0]), idx, weights, handle),
        "topk_weights: found type": (packed, idx, spoilt(weights, weights.astype(float)), handle),
        "handle: found int": (packed, idx, weights, spoilt(handle, 3)),
    }.items():
        raises(world, says, buffer.low_latency_combine, *arguments)
    other = buffer_of(world)
    foreign = other.low_latency_dispatch(x, idx, case.max_tokens, case.experts)[2]
    says = "handle: found one of another buffer"
    raises(world, says, buffer.low_latency_combine, packed, idx, weights, spoilt(handle, foreign))
    early = buffer.low_latency_dispatch(
        x, idx, case.max_tokens, case.experts, return_recv_hook=True
    )
    with pytest.raises(errors.InvalidInputError, match="whose hook was not called"):
        buffer.get_next_low_latency_combine_buffer(early[2])
    early[4]()
    raises(
        world,
        "zero_copy: found no buffer",
        buffer.low_latency_combine,
        *(packed, idx, weights, handle),
        zero_copy=me == 1,
    )
    combined, _, _ = buffer.low_latency_combine(packed, kept, weights, handle)
    close(combined, x.astype(np.float64) * sums, 2**-6)
    other.destroy()
    buffer.destroy()


def test_experts_that_are_masked_at_the_combine_are_left_out(ranks):
    ranks(2, masked, CASES[1])


def keywords_of_forks(world, case):
    """UCCL's `is_intranode`, and what SGLang always passes: without `overlap` it describes nothing."""
    me, buffer = world.rank, buffer_of(world, low_latency_mode=True, is_intranode=True)
    x, idx, weights = case.x[me].astype(BF16), case.idx[me], case.weights[me]
    packed, _, handle, _, _ = buffer.low_latency_dispatch(
        x, idx, case.max_tokens, case.experts, use_fp8=False
    )
    plain, _, _ = buffer.low_latency_combine(packed, idx, weights, handle)
    off = {"overlap": False, "block_m": 64, "threshold": 9, "num_sms": 3}
    off |= {"packed_recv_count": np.ones(2), "comp_signal": np.ones(2)}
    for keywords in (off, {"num_sms": 3}):
        combined, _, _ = buffer.low_latency_combine(packed, idx, weights, handle, **keywords)
        same(combined, plain)
    for name, keywords in {
        "overlap": {**off, "overlap": True},
        "block_m": {"block_m": 64},
        "src_signals": {**off, "src_signals": np.ones(2)},
    }.items():
        with pytest.raises(NotImplementedError, match=f"found {name};"):
            buffer.low_latency_combine(packed, idx, weights, handle, **keywords)
    with pytest.raises(TypeError, match="blocks"):
        buffer.low_latency_combine(packed, idx, weights, handle, blocks=1)
    buffer.destroy()


def test_keywords_of_forks_that_ask_for_nothing_are_taken(ranks):
    ranks(2, keywords_of_forks, CASES[1])


def refused(world, case, with_hook):
    me, buffer = world.rank, buffer_of(world)
    good = (rows_of(case, me), case.idx[me], case.max_tokens, case.experts)
    bad = {
        "x: found 12 tokens; expected at most num_max_dispatch_tokens_per_rank = 3": (
            np.zeros((12, case.hidden), BF16),
            np.full((12, case.topk), -1),
            3,
            case.experts,
        ),
        "topk_idx: found expert 99": (good[0], np.full_like(good[1], 99), *good[2:]),
        "num_experts: found 7": (*good[:3], 7),
        "x: found list": ([1], *good[1:]),
    }
    for says, arguments in bad.items():

        def call(*arguments):
            *_, hook = buffer.low_latency_dispatch(*arguments, return_recv_hook=with_hook)
            if with_hook:
                hook()

        raises(world, says, call, *(arguments if me == 1 else good))
        call(*good)
    # More tokens than the communicator takes: all ranks open another one, within the hook.
    tokens = 1600
    idx = np.full((tokens, case.topk), -1)
    idx[:, 0] = np.arange(tokens) % case.experts
    x = np.ones((tokens, case.hidden), BF16)
    _, counts, _, _, hook = buffer.low_latency_dispatch(
        x, idx, tokens, case.experts, return_recv_hook=True
    )
    # The call is sent anew in the hook; what it was given is the caller's again since the send.
    x[:], idx[:] = 0, -1
    hook()
    same(counts, np.full(case.local, case.ranks * tokens // case.experts))
    buffer.destroy()


@pytest.mark.parametrize("with_hook", [False, True], ids=["at once", "hook"])
def test_bad_low_latency_calls_are_refused_on_all_ranks(ranks, with_hook):
    ranks(2, refused, CASES[1], with_hook)


def other_calls(world, case):
    buffer = buffer_of(world, num_rdma_bytes=256, enable_shrink=True)
    memory = buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True)
    assert (memory.shape, memory.dtype) == ((256,), torch.int8)
    status = np.full(case.ranks, 7, np.int32)
    buffer.low_latency_query_mask_buffer(status)
    same(status, np.zeros(case.ranks, np.int32))
    with pytest.raises(errors.InvalidInputError, match="found no call of the buffer before"):
        buffer.low_latency_update_mask_buffer(1, True)
    # Numbers may be those of numpy. A query between a send and its hook concerns neither.
    sizes = np.int64(case.max_tokens), np.int32(case.experts)
    hook = buffer.low_latency_dispatch(
        case.x[world.rank].astype(BF16), case.idx[world.rank], *sizes, return_recv_hook=True
    )[4]
    status[:] = 7
    buffer.low_latency_query_mask_buffer(status)
    same(status, np.zeros(case.ranks, np.int32))
    hook()
    with pytest.raises(NotImplementedError, match="NVFP4"):
        buffer.low_latency_dispatch(None, None, 1, 1, use_nvfp4=True)
    with pytest.raises(errors.InvalidInputError, match="handle: found"):
        buffer.get_next_low_latency_combine_buffer((1, 2))
    assert buffer.runtime.get_num_rdma_ranks() == 1
    buffer.destroy()


def test_what_else_low_latency_callers_ask_for(ranks):
    ranks(2, other_calls, CASES[1])


def coded(world, case):
    """Sums that travel in ten bits a value: below 1, so that most chunks of 512 channels are encoded."""
    me, buffer = world.rank, buffer_of(world)
    x = (case.x[me] / (1 + np.abs(case.x[me]).max(initial=1))).astype(BF16)
    idx, weights = case.idx[me], case.weights[me]
    weights = weights / (1 + np.abs(weights).sum(axis=1, keepdims=True))
    packed, _, handle, _, _ = buffer.low_latency_dispatch(
        x, idx, case.max_tokens, case.experts, use_fp8=False
    )
    plain, _, _ = buffer.low_latency_combine(packed, idx, weights, handle)
    for with_hook in (False, True):
        combined, _, hook = buffer.low_latency_combine(
            packed, idx, weights, handle, use_logfmt=True, return_recv_hook=with_hook
        )
        if with_hook:
            hook()
        # A step is at most 4.5 %, and each rank's sum is rounded to bfloat16 before.
        scale = np.abs(plain.astype(np.float64)).max(initial=0)
        off = np.abs(combined.astype(np.float64) - plain.astype(np.float64))
        assert (off <= 2**-5 * scale).all()
        assert (off > 0).any() == bool((idx >= 0).any())
    buffer.get_next_low_latency_combine_buffer(handle)
    raises(
        world,
        "use_logfmt: found True with zero_copy",
        buffer.low_latency_combine,
        *(packed, idx, weights, handle),
        use_logfmt=True,
        zero_copy=me == 1,
    )
    with pytest.raises(errors.InvalidInputError, match="LogFMT-10 of rows of fp32"):
        buffer.low_latency_combine(packed.astype(np.float32), idx, weights, handle, use_logfmt=True)
    combined, _, _ = buffer.low_latency_combine(packed, idx, weights, handle)
    same(combined, plain)
    buffer.destroy()


def test_sums_may_travel_in_ten_bits_a_value(ranks):
    ranks(2, coded, CASES[2])
    ranks(4, coded, CASES[3])


def unencodable(world, case):
    """Rows whose channels are no multiple of 512, and, between domains, all rows."""
    for domains, says in ((1, "LogFMT-10 of 256 channels"), (2, "LogFMT-10 \\(one domain")):
        me, buffer = world.rank, buffer_of(world, domains)
        idx, weights = case.idx[me], case.weights[me]
        call = (rows_of(case, me), idx, case.max_tokens, case.experts)
        packed, _, handle, _, _ = buffer.low_latency_dispatch(*call, use_fp8=False)
        with pytest.raises(errors.Error, match=says):
            buffer.low_latency_combine(packed, idx, weights, handle, use_logfmt=True)
        buffer.low_latency_combine(packed, idx, weights, handle)
        buffer.destroy()


def test_sums_that_cannot_travel_in_ten_bits_are_refused_by_name(ranks):
    ranks(4, unencodable, Case(4, seed=5, hidden=256))


class Masking:
    """A stand-in for a communicator whose kernels leave out ranks: none runs without a GPU."""

    closed = False

    def __init__(self):
        self.masked = set()

    def mask_rank(self, rank):
        self.masked.add(rank)

    def unmask_rank(self, rank):
        self.masked.remove(rank)

    def clear_masks(self):
        self.masked = set()

    def masked_ranks(self):
        return sorted(self.masked)


def test_masks_hold_for_the_low_latency_calls_of_every_m_and_for_no_others():
    def opened(decodes):
        return types.SimpleNamespace(
            communicator=Masking(), sizes=types.SimpleNamespace(decodes=decodes)
        )

    parts = [opened(True), opened(False), opened(True)]
    buffer, pool = object.__new__(Buffer), object.__new__(Pool)
    pool._opened, pool.current = dict(enumerate(parts)), parts[1]
    pool.on_device, pool.rank, pool.masked = False, 0, set()
    buffer._pool, buffer.enable_shrink = pool, True
    buffer.low_latency_update_mask_buffer(3, True)
    buffer.low_latency_update_mask_buffer(1, True)
    buffer.low_latency_update_mask_buffer(3, False)
    assert [part.communicator.masked for part in parts] == [{1}, set(), {1}]
    # A wait of one of them has lasted too long.
    parts[2].communicator.masked.add(2)
    status = np.zeros(4, np.int32)
    buffer.low_latency_query_mask_buffer(status)
    same(status, np.array([0, 1, 1, 0], np.int32))
    buffer.low_latency_clean_mask_buffer()
    buffer.low_latency_query_mask_buffer(status)
    same(status, np.zeros(4, np.int32))
    # An error has closed all of them: the next one has the masks that were set by hand.
    buffer.low_latency_update_mask_buffer(1, True)
    pool._opened, pool.current = {}, None
    later = opened(True)
    pool._mask_as_before(later)
    assert later.communicator.masked == {1}


def slow_rank(world, case):
    """Rank 1 comes late to each call: rank 0 has waited for it, and less for itself."""
    me, buffer = world.rank, buffer_of(world, low_latency_mode=True)
    x, idx, weights = rows_of(case, me), case.idx[me], case.weights[me]
    arguments = (x, idx, case.max_tokens, case.experts)
    buffer.low_latency_dispatch(*arguments)
    waits = [np.full(case.ranks, 7, np.int64) for _ in range(2)]
    late = 0.2 if me == 1 else 0
    world.barrier("start")
    time.sleep(late)
    (rows, _), _, handle, _, _ = buffer.low_latency_dispatch(
        *arguments, dispatch_wait_recv_cost_stats=waits[0]
    )
    rows = rows.astype(BF16)
    world.barrier("dispatched")
    time.sleep(late)
    _, _, hook = buffer.low_latency_combine(
        rows, idx, weights, handle, combine_wait_recv_cost_stats=waits[1], return_recv_hook=True
    )
    hook()
    if me == 0:
        for found in waits:
            # At least half of what rank 1 slept, in nanoseconds.
            assert found[1] > 0.1e9, waits
            assert 7 <= found[0] < found[1], waits
    wrong = np.zeros(3, np.int64)
    given = {"dispatch_wait_recv_cost_stats": wrong if me == 1 else waits[0]}
    raises(world, "found shape [3]", buffer.low_latency_dispatch, *arguments, **given)
    buffer.destroy()


def test_the_time_that_a_call_waits_is_counted_for_the_rank_that_comes_late(ranks):
    ranks(2, slow_rank, CASES[1])


def two_batches(world, case):
    """Two micro-batches in turn: while one is under way, the other is computed."""
    me, buffer = world.rank, buffer_of(world)
    idx, weights = case.idx[me], case.weights[me]

    def send(scale):
        x = (scale * case.x[me]).astype(BF16)
        return buffer.low_latency_dispatch(
            x, idx, case.max_tokens, case.experts, use_fp8=False, return_recv_hook=True
        )

    def give_back(sent):
        return buffer.low_latency_combine(sent[0], idx, weights, sent[2], return_recv_hook=True)

    sums = np.where(idx >= 0, weights, 0).sum(axis=1, keepdims=True)
    for _ in range(3):
        first = send(1)
        second = send(2)
        first[4]()
        one = give_back(first)
        second[4]()
        one[2]()
        other = give_back(second)
        other[2]()
        for combined, scale in ((one[0], 1), (other[0], 2)):
            close(combined, (scale * case.x[me]).astype(BF16).astype(np.float64) * sums, 2**-6)
    buffer.destroy()


def test_two_batches_may_be_under_way_in_turn(ranks):
    ranks(2, two_batches, CASES[1])


def two_threads(world, case):
    """Dual batches with a thread each: one computes while the other calls, in the same turn on all ranks."""
    me, buffer = world.rank, buffer_of(world)
    idx, weights = case.idx[me], case.weights[me]
    layout = layout_of(buffer, case)
    sums = np.where(idx >= 0, weights, 0).sum(axis=1, keepdims=True)
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    failures = []

    def pass_on(batch):
        turns[1 - batch].release()
        assert turns[batch].acquire(timeout=LIMIT_S)

    def run(batch):
        assert turns[batch].acquire(timeout=LIMIT_S)
        x = ((1 + batch) * case.x[me]).astype(BF16)
        for _ in range(20):
            sent = buffer.low_latency_dispatch(
                x, idx, case.max_tokens, case.experts, use_fp8=False, return_recv_hook=True
            )
            pass_on(batch)
            sent[4]()
            combined, _, hook = buffer.low_latency_combine(
                sent[0], idx, weights, sent[2], return_recv_hook=True
            )
            pass_on(batch)
            hook()
            close(combined, x.astype(np.float64) * sums, 2**-6)
            # Two handles of normal calls are alive at once, too.
            recv_x, *_, handle, _ = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **layout)
            pass_on(batch)
            combined, _, _ = buffer.combine(recv_x, handle)
            close(combined, x.astype(np.float64) * times(case, me)[:, None], 2**-6)
        turns[1 - batch].release()

    def guarded(batch):
        try:
            run(batch)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(n,), daemon=True) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), "a deadlock"
    assert not failures
    buffer.destroy()


def test_dual_batches_may_have_a_thread_each(ranks):
    ranks(2, two_threads, CASES[1])


def another_m(world, case):
    assert case.max_tokens == 12
    me, buffer = world.rank, buffer_of(world)
    for more in (0, me, 0):
        call = (rows_of(case, me), case.idx[me], case.max_tokens + more, case.experts)
        if world.all_gather("more", b"%d" % more) == [b"0", b"0"]:
            packed, counts, handle, _, _ = buffer.low_latency_dispatch(*call)
            check(case, me, packed, counts, handle, 2**-4)
            continue
        with pytest.raises(
            errors.InvalidInputError, match="max_tokens = 13 on rank 1; expected 12"
        ):
            buffer.low_latency_dispatch(*call)
    buffer.destroy()


def test_ranks_that_name_different_most_tokens_get_an_error_and_the_buffer_goes_on(ranks):
    ranks(2, another_m, CASES[1])


def destroy_with_an_open_send(world):
    case = Case(2, hidden=256)
    buffer = buffer_of(world, low_latency_mode=True)
    x, idx = rows_of(case, world.rank), case.idx[world.rank]
    sent = [
        buffer.low_latency_dispatch(
            x[:, :hidden],
            idx,
            case.max_tokens,
            case.experts,
            use_fp8=False,
            return_recv_hook=is_last,
        )
        # A call that has received leaves no earlier one open: the open one is the last, on the first communicator.
        for hidden, is_last in ((256, False), (128, False), (256, False), (256, True))
    ]
    opened = [each.communicator for each in buffer._pool._opened.values()]
    assert len(opened) == 2
    # A rank that destroys its buffer fails the sends of others.
    world.barrier("all have sent")
    with pytest.raises(tokenyard.Error, match="was sent and not received"):
        buffer.destroy()
    assert all(each.closed for each in opened)
    del sent
    buffer.destroy()


def test_destroy_closes_everything_and_raises_what_ended_a_communicator(ranks):
    ranks(2, destroy_with_an_open_send)
