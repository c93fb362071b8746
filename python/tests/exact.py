"""Exchanges of any size whose every value is exact, and checks of what the drop-in gives: rows name their token, and
bfloat16 has their sums. No code of the product is in what is expected."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tokenyard.deep_ep.utils.math import per_token_cast_to_fp8

BF16 = ml_dtypes.bfloat16
# FP8 has them too, whichever of them is the largest of its group.
DIGITS = np.array([-4, -2, -1, 0, 1, 2, 4], np.float32)
PLACES = 8


@dataclass(frozen=True)
class Exchange:
    """The tokens of every rank: each rank knows all of them."""

    tokens: tuple[int, ...]
    experts: int = 8
    topk: int = 3
    hidden: int = 64
    # M, where a call names it.
    most: int = 0
    seed: int = 1
    # All tokens choose the first experts.
    is_skewed: bool = False

    @property
    def local(self):
        return self.experts // len(self.tokens)

    def x(self, rank):
        number = np.arange(self.tokens[rank])[:, None] * len(self.tokens) + rank
        columns = np.arange(self.hidden)
        return DIGITS[number // 7 ** (columns % PLACES) % 7].astype(BF16)

    def ids(self, rank):
        shape = (self.tokens[rank], self.topk)
        random = np.random.default_rng((self.seed, rank))
        first = random.integers(self.experts, size=(shape[0], 1))
        if self.is_skewed:
            return np.broadcast_to(np.arange(self.topk), shape).copy()
        # Distinct, as the steps are: on several ranks, whatever their number.
        ids = (first + np.arange(self.topk) * (self.experts // self.topk)) % self.experts
        return np.where(random.random(shape) < 0.3, -1, ids)

    def rows(self, rank, expert=None):
        """The rows that arrive at a rank, or those of one of its experts: by source, then token."""
        parts = []
        for source in range(len(self.tokens)):
            ids = self.ids(source)
            wanted = (ids >= 0) & (ids // self.local == rank) if expert is None else ids == expert
            parts.append(self.x(source)[wanted.any(axis=1)])
        return np.concatenate(parts)

    def times(self, rank):
        """`[T, 1]`: to how many ranks each token goes; and to how many experts."""
        ids = self.ids(rank)
        owners = np.where(ids >= 0, ids // self.local, -1)
        reached = [(owners == one).any(axis=1) for one in range(len(self.tokens))]
        return np.sum(reached, axis=0)[:, None], (ids >= 0).sum(axis=1)[:, None]


def same(found, expected):
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, expected)


def scaled(x, times):
    return (x.astype(np.float32) * times).astype(BF16)


def values(packed):
    """Rows in bfloat16, of FP8 and scales too."""
    if not isinstance(packed, tuple):
        return packed
    rows, scales = packed
    wide = np.repeat(scales, 128, axis=-1)[..., : rows.shape[-1]]
    return (rows.astype(np.float32) * wide).astype(BF16)


def given(x, use_fp8):
    """Rows as a caller gives them to a dispatch that casts nothing."""
    return per_token_cast_to_fp8(x) if use_fp8 else x


def nothing():
    pass


def low_latency(buffer, it, pause=nothing, use_fp8=False):
    """A dispatch, its combine, and what checks both later."""
    me = buffer.rank
    x, ids = it.x(me), it.ids(me)
    packed, counts, handle, _, hook = buffer.low_latency_dispatch(
        x, ids, it.most, it.experts, use_fp8=use_fp8, return_recv_hook=True
    )
    pause()
    hook()
    pause()
    rows, weights = values(packed), np.ones(ids.shape, np.float32)
    out, _, hook = buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=True)
    pause()
    hook()

    def check():
        for expert in range(it.local):
            expected = it.rows(me, me * it.local + expert)
            assert counts[expert] == len(expected)
            same(rows[expert, : len(expected)], expected)
        same(out, scaled(x, it.times(me)[1]))

    return check


def normal(buffer, it, pause=nothing, use_fp8=False):
    """As `low_latency`, in normal mode, with a cached dispatch."""
    me = buffer.rank
    x, ids = it.x(me), it.ids(me)
    per_rank, per_domain, per_expert, is_in, _ = buffer.get_dispatch_layout(ids, it.experts)
    rows, *_, handle, _ = buffer.dispatch(
        given(x, use_fp8),
        topk_idx=ids,
        topk_weights=np.ones(ids.shape, np.float32),
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_domain,
        num_tokens_per_expert=per_expert,
        is_token_in_rank=is_in,
    )
    pause()
    again, *_ = buffer.dispatch(given(-x, use_fp8), handle=handle)
    pause()
    assert isinstance(rows, tuple) == isinstance(again, tuple) == use_fp8
    out, _, _ = buffer.combine(values(rows), handle)

    def check():
        expected = it.rows(me)
        same(values(rows), expected)
        same(values(again), -expected)
        same(out, scaled(x, it.times(me)[0]))

    return check


def elastic(buffer, it, pause=nothing, is_expanded=False, use_fp8=False):
    """As `low_latency`, of V2: a row for each rank, or expanded for each expert."""
    me = buffer.rank_idx
    x, ids = it.x(me), it.ids(me)
    rows, _, _, handle, _ = buffer.dispatch(
        given(x, use_fp8),
        topk_idx=ids,
        num_experts=it.experts,
        num_max_tokens_per_rank=it.most,
        do_expand=is_expanded,
    )
    pause()
    assert isinstance(rows, tuple) == use_fp8
    out, _, _ = buffer.combine(values(rows), handle)

    def check():
        experts = range(me * it.local, (me + 1) * it.local)
        parts = [it.rows(me, one) for one in experts] if is_expanded else [it.rows(me)]
        same(values(rows), np.concatenate(parts))
        same(out, scaled(x, it.times(me)[1 if is_expanded else 0]))

    return check
