"""Scores of routers for scripts that measure: how much more goes to rank 0 than to the others is chosen."""

from typing import Any

from .._arrays import Tensor
from .._torch import torch
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
    Where every token goes to rank 0 before the ratio is reached, there is no more. On torch's default device, of its
    random numbers.
    """
    scores = torch.rand((num_tokens, num_experts), dtype=torch.float32)
    make = _precise if precise else _raised
    return make(scores, num_ranks, num_topk, ratio)


def _best(scores: Any, topk: int) -> Any:
    """`[T, K]`: the experts with the highest scores."""
    return torch.argsort(-scores, 1)[:, :topk]


def _raised(base: Any, ranks: int, topk: int, ratio: float) -> Any:
    if ratio == 1 or ranks == 1:
        return base
    local = base.shape[1] // ranks
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        owners = _best(_with(base, local, middle), topk) // local
        reached = [int((owners == rank).any(1).sum()) for rank in range(ranks)]
        if reached[0] * (ranks - 1) > ratio * sum(reached[1:]):
            high = middle
        else:
            low = middle
    return _with(base, local, high)


def _with(base: Any, local: int, more: float) -> Any:
    """Scores, with more for the experts of rank 0."""
    scores = base.clone()
    scores[:, :local] += more
    return scores


def _precise(scores: Any, ranks: int, topk: int, ratio: float) -> Any:
    tokens, experts = scores.shape
    local = experts // ranks
    # Ranks of each token: as many as leave room for the ratio, and have experts enough.
    least = max(1, ceil_div(topk, local))
    spread = max(least, min(ranks, topk, int((ratio + ranks - 1) / ratio)))
    # To rank 0, and to all others together, which take turns.
    first = min(tokens, round(ratio * tokens * spread / (ratio + ranks - 1)))
    device = scores.device
    has_first = torch.zeros(tokens, dtype=torch.int64, device=device)
    has_first[torch.rand(tokens, device=device).argsort()[:first]] = 1
    wanted = spread - has_first
    turn = wanted.cumsum(0) - wanted
    others = torch.arange(ranks - 1, device=device)
    has_other = (others - turn[:, None]) % max(1, ranks - 1) < wanted[:, None]
    chosen = torch.cat([has_first[:, None] > 0, has_other], 1)[:, :, None]
    # One expert of each rank, then any others of these.
    groups = torch.rand((tokens, ranks, local), dtype=torch.float32, device=device)
    is_own = groups.argmax(2)[:, :, None] == torch.arange(local, device=device)
    order = groups + chosen * 1 + (chosen & is_own) * 1
    return scores.scatter_add_(1, _best(order.view(tokens, experts), topk), torch.ones_like(scores))
