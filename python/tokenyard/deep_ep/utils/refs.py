"""The results of dispatch and combine of V2, for scripts that compare. Plain numpy, slow, no code of the product."""

import importlib
from typing import Any, TypeAlias

import numpy as np

from .._arrays import BF16, Array, Tensor, like, to_host

Rows: TypeAlias = Tensor | tuple[Tensor, Tensor]


def dispatch(
    x: Rows,
    topk_idx: Tensor,
    topk_weights: Tensor,
    num_max_tokens_per_rank: int,
    num_experts: int,
) -> tuple[Rows, Tensor, Tensor, Tensor, Tensor]:
    """The rows that arrive at this rank, over torch's default group: rows by source rank, then source token.

    Returns rows (and scales, where `x` is a pair), `[N, K]` local ids or -1, `[N, K]` weights as sent, `[N]` source
    rank * `num_max_tokens_per_rank` + source token, and `[R]` rows from each rank. Collective.
    """
    distributed = importlib.import_module("torch.distributed")
    parts = x if isinstance(x, tuple) else (x,)
    mine = [np.ascontiguousarray(to_host("x", part)) for part in parts]
    mine += [to_host("topk_idx", topk_idx), to_host("topk_weights", topk_weights)]
    ranks = distributed.get_world_size()
    gathered: list[list[Array]] = [[] for _ in range(ranks)]
    distributed.all_gather_object(gathered, mine)
    *arrived, counts = arrivals(
        gathered, distributed.get_rank(), num_max_tokens_per_rank, num_experts
    )
    *rows, ids, weights, sources = (like(topk_idx, array) for array in arrived)
    return (
        tuple(rows) if isinstance(x, tuple) else rows[0],
        ids,
        weights,
        sources,
        like(topk_idx, counts),
    )


def arrivals(inputs: list[list[Array]], me: int, tokens: int, experts: int) -> list[Array]:
    """The arrays of all ranks (rows, ..., ids, weights) that arrive at `me`; then sources, and rows per rank."""
    local = experts // len(inputs)
    chosen: list[list[Array]] = []
    for rank, (*rows, ids, weights) in enumerate(inputs):
        is_here = (ids >= 0) & (ids // local == me)
        token = np.flatnonzero(is_here.any(axis=1))
        here = np.where(is_here, ids - me * local, -1)
        chosen.append([a[token] for a in (*rows, here, weights)] + [rank * tokens + token])
    counts = np.array([len(arrays[-1]) for arrays in chosen], np.int32)
    return [np.concatenate(arrays) for arrays in zip(*chosen, strict=True)] + [counts]


def generate_pre_combine_data(
    src_token_global_idx: Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> Tensor:
    """`[n, K, hidden]` bfloat16: an expert's output for each token and k. The same on every rank.

    Numbers of -1 to 1, which depend on the token's number `[n]`, on k and on the column, and on nothing else: so they
    are made by integers.
    """
    token = to_host("src_token_global_idx", src_token_global_idx).astype(np.int64)
    row = token[:, None] * num_topk + np.arange(num_topk)
    mixed = row[:, :, None] * 7919 + np.arange(hidden) * 104_729 + (row[:, :, None] >> 3) * 31
    return like(src_token_global_idx, (mixed % 2039 / 1019.0 - 1).astype(BF16))


def ordered_accumulate(data: Tensor, initial_value: Tensor | None = None) -> Tensor:
    """`[n, H]` of `[n, K, H]`: the sum over k, in order, in float32, rounded once."""
    array = to_host("data", data)
    first = np.zeros((len(array), array.shape[2]), np.float32)
    if initial_value is not None:
        first = first + to_host("initial_value", initial_value).astype(np.float32)
    return like(data, _sum(array.astype(np.float32), first).astype(array.dtype))


def combine(
    y: Tensor,
    topk_idx: Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Tensor | tuple[Tensor, Tensor] | None,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> Tensor:
    """`[T, H]`: the sum of `y` (`[T, K, H]`, zeros where nothing is selected) for this rank's tokens.

    With `reduce_in_local` copies on one rank are summed and rounded first, with `reduce_in_scaleup` then those in one
    domain; each sum takes the place of its last k. The rest is summed from the biases on, in k order.
    """
    array = to_host("y", y)
    ids = to_host("topk_idx", topk_idx)
    ranks = num_scaleout_ranks * num_scaleup_ranks
    owner = np.where(ids >= 0, ids // (num_experts // ranks), -1)
    if reduce_in_local:
        array = _group(array, owner)
    if reduce_in_scaleup:
        array = _group(array, np.where(owner >= 0, owner // num_scaleup_ranks, -1))
    first = np.zeros((len(array), array.shape[2]), np.float32)
    for one in bias if isinstance(bias, (tuple, list)) else (bias,):
        if one is not None:
            first = first + to_host("bias", one).astype(np.float32)
    return like(y, _sum(array.astype(np.float32), first).astype(array.dtype))


def _sum(terms: Array, first: Array) -> Array:
    for k in range(terms.shape[1]):
        first = first + terms[:, k]
    return first


def _group(array: Array, group: Array) -> Array:
    """Sums the entries of each token that are of one group, rounds, and leaves the sum at the last of them."""
    out: Array = np.zeros_like(array)
    for token, groups in enumerate(group):
        for one in set(groups[groups >= 0].tolist()):
            members = np.flatnonzero(groups == one)
            terms = array[token, members].astype(np.float32)
            total: Any = terms[0]
            for term in terms[1:]:
                total = total + term
            out[token, members[-1]] = total.astype(array.dtype)
    return out
