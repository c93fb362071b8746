"""Scores of routers for scripts that measure: how much more goes to rank 0 than to the others is chosen."""

import contextlib
import importlib

import numpy as np

from .._arrays import Array, Tensor
from .math import ceil_div

_STEPS = 24


def get_unbalanced_scores(
    num_tokens: int,
    num_experts: int,
    num_ranks: int,
    num_topk: int,
    ratio: float,
    precise: bool,
) -> Tensor:
    """`[T, E]` float32, 0 to 2, whose top `num_topk` send `ratio` times as many tokens to rank 0 as to another.

    A token counts once for each rank. With `precise` the numbers are as near as whole tokens allow, and others get
    equal ones; otherwise scores are random, and those of rank 0's experts raised until the mean of the others fits.
    Where every token goes to rank 0 before the ratio is reached, there is no more. Of numpy's random numbers: torch's
    tensor where torch is installed, else numpy's array.
    """
    sizes = (num_tokens, num_experts, num_ranks, num_topk)
    scores = _precise(*sizes, ratio) if precise else _random(*sizes, ratio)
    with contextlib.suppress(ImportError):
        torch = importlib.import_module("torch")
        return torch.from_numpy(scores).to(torch.get_default_device())
    return scores


def _random(tokens: int, experts: int, ranks: int, topk: int, ratio: float) -> Array:
    base = np.random.random((tokens, experts)).astype(np.float32)
    if ratio == 1 or ranks == 1:
        return base
    raised = np.zeros(experts, np.float32)
    raised[: experts // ranks] = 1
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        reached = _reached(base + middle * raised, ranks, topk)
        if reached[0] > ratio * reached[1:].mean():
            high = middle
        else:
            low = middle
    return np.asarray(base + np.float32(high) * raised)


def _reached(scores: Array, ranks: int, topk: int) -> Array:
    """`[R]`: tokens that go to each rank."""
    best = np.argpartition(-scores, topk - 1, axis=1)[:, :topk] // (scores.shape[1] // ranks)
    return np.array([(best == rank).any(axis=1).sum() for rank in range(ranks)])


def _precise(tokens: int, experts: int, ranks: int, topk: int, ratio: float) -> Array:
    local = experts // ranks
    # Ranks of each token: as many as leave room for the ratio, and have experts enough.
    least = max(1, ceil_div(topk, local))
    spread = max(least, min(ranks, topk, int((ratio + ranks - 1) / ratio)))
    # To rank 0, and to all others together.
    first = min(tokens, round(ratio * tokens * spread / (ratio + ranks - 1)))
    has_first = np.zeros(tokens, bool)
    has_first[np.random.permutation(tokens)[:first]] = True
    scores = np.random.random((tokens, experts)).astype(np.float32)
    turn = 0
    for token in range(tokens):
        wanted = spread - has_first[token]
        chosen = [0] if has_first[token] else []
        if ranks > 1:
            chosen += [1 + (turn + i) % (ranks - 1) for i in range(min(wanted, ranks - 1))]
            turn += wanted
        own = np.array([rank * local + np.random.permutation(local) for rank in chosen])
        # One expert of each rank, then any others of these.
        rest = np.random.permutation(own[:, 1:].ravel())[: topk - len(own)]
        scores[token, np.concatenate([own[:, 0], rest])] += 1
    return scores
