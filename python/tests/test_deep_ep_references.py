"""The references that `deep_ep.utils` gives scripts that compare, beside plain loops over the same numbers."""

import ml_dtypes
import numpy as np
import pytest
from exact import same
from oracle import Case

from tokenyard.deep_ep.utils import math, refs

BF16, FP8, F32 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32
LARGEST, LEAST, CHANNELS = F32(448), F32(1e-4), 128


def test_a_cast_row_and_its_scales_are_those_of_a_loop_over_groups():
    x = np.random.default_rng(1).normal(size=(4, 300)).astype(F32)
    x[0] *= 1000
    x[1] = 0
    rows, scales = math.per_token_cast_to_fp8(x)
    back = math.per_token_cast_back(rows, scales)
    assert scales.shape == (4, 3)
    for token in range(len(x)):
        for group in range(3):
            at = slice(CHANNELS * group, min(300, CHANNELS * (group + 1)))
            largest = max(LEAST, max(abs(value) for value in x[token, at]))
            assert scales[token, group] == largest / LARGEST
            same(rows[token, at], (x[token, at] * (LARGEST / largest)).astype(FP8))
            same(back[token, at], (rows[token, at].astype(F32) * scales[token, group]).astype(BF16))


def summed(y, owners, bias, groups):
    """The sum of one token, after those of each group of ranks that `groups` names."""
    for group_of in groups:
        places = {}
        for k, owner in enumerate(owners):
            if owner >= 0:
                places.setdefault(group_of(owner), []).append(k)
        partial = np.zeros_like(y)
        for members in places.values():
            total = F32(-0.0)
            for k in members:
                total = total + y[k].astype(F32)
            partial[members[-1]] = total.astype(BF16)
        y = partial
    total = np.zeros(y.shape[1], F32)
    for term in (*bias, *y):
        total = total + term.astype(F32)
    return total.astype(BF16)


@pytest.mark.parametrize("in_local", [False, True])
@pytest.mark.parametrize("in_domain", [False, True])
def test_sums_of_tokens_are_those_of_a_loop_over_k(in_local, in_domain):
    random = np.random.default_rng(3)
    tokens, topk, hidden, experts, domains, size = 12, 5, 8, 16, 2, 4
    y = random.normal(size=(tokens, topk, hidden)).astype(BF16)
    ids = random.integers(-1, experts, (tokens, topk))
    y[ids < 0] = 0
    bias = [random.normal(size=(tokens, hidden)).astype(BF16) for _ in range(2)]
    found = refs.combine(y, ids, domains, size, experts, tuple(bias), in_local, in_domain)
    owners = ids // (experts // (domains * size))
    groups = [lambda owner: owner] if in_local else []
    groups += [lambda owner: owner // size] if in_domain else []
    for token in range(tokens):
        same(
            found[token],
            summed(y[token], owners[token], [one[token] for one in bias], groups),
        )


def test_arrivals_are_those_of_a_loop_over_sources():
    case = Case(4, seed=6, tokens=(5, 0, 12, 1))
    inputs = [[case.x[r], case.idx[r], case.weights[r]] for r in range(4)]
    local = case.experts // 4
    for me in range(4):
        rows, ids, weights, sources, counts = refs.arrivals(
            inputs, me, case.max_tokens, case.experts
        )
        at = 0
        for source, (x, chosen, given) in enumerate(inputs):
            before = at
            for token in range(len(x)):
                here = [
                    e - me * local if e >= 0 and e // local == me else -1 for e in chosen[token]
                ]
                if max(here) < 0:
                    continue
                same(rows[at], x[token])
                assert ids[at].tolist() == here
                same(weights[at], given[token])
                assert sources[at] == source * case.max_tokens + token
                at += 1
            assert counts[source] == at - before
        assert at == len(rows) == len(sources)


def test_a_hash_is_the_sum_of_words():
    array = np.random.default_rng(2).integers(-(1 << 31), 1 << 31, 37).astype(np.int32)
    assert math.hash_tensor(array) == sum(int(word) for word in array)
    odd = np.arange(200, 207, dtype=np.uint8)
    assert math.hash_tensor(odd) == sum(int(byte) for byte in odd)
