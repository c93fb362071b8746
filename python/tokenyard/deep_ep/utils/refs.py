"""The results of dispatch and combine of V2, for scripts that compare: by torch, on the tensors' device, as those of
`math`. Slow, and no code of the product."""

from typing import Any, TypeAlias

from .._arrays import BF16 as BF16
from .._arrays import Tensor, by_torch
from .._torch import torch

Rows: TypeAlias = Tensor | tuple[Tensor, Tensor]

# An expert's output has as many values.
_VALUES = 2039


@by_torch
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
    mine = [*(x if isinstance(x, tuple) else (x,)), topk_idx, topk_weights]
    by_array = [_gather(array) for array in mine]
    inputs = [list(arrays) for arrays in zip(*by_array, strict=True)]
    *rows, ids, weights, sources, counts = arrivals(
        inputs, torch.distributed.get_rank(), num_max_tokens_per_rank, num_experts
    )
    return tuple(rows) if isinstance(x, tuple) else rows[0], ids, weights, sources, counts


def _gather(mine: Any) -> list[Any]:
    """The tensors of all ranks, whose numbers of rows differ."""
    distributed, ranks = torch.distributed, torch.distributed.get_world_size()
    lengths = mine.new_zeros(ranks, dtype=torch.int64)
    distributed.all_gather(list(lengths.split(1)), lengths.new_tensor([len(mine)]))
    # Equal numbers of bytes: backends gather neither other lengths nor all types.
    held = mine.detach().contiguous().view(torch.uint8)
    padded = held.new_zeros((int(lengths.max()), *held.shape[1:]))
    padded[: len(held)] = held
    gathered = [torch.empty_like(padded) for _ in range(ranks)]
    distributed.all_gather(gathered, padded)
    return [
        one[:length].view(mine.dtype)
        for one, length in zip(gathered, lengths.tolist(), strict=True)
    ]


@by_torch
def arrivals(inputs: list[list[Tensor]], me: int, tokens: int, experts: int) -> list[Tensor]:
    """The arrays of all ranks (rows, ..., ids, weights) that arrive at `me`; then sources, and rows per rank."""
    local = experts // len(inputs)
    chosen: list[list[Tensor]] = []
    for rank, (*rows, ids, weights) in enumerate(inputs):
        is_here = (ids >= 0) & (ids // local == me)
        token = is_here.any(1).nonzero()[:, 0]
        here = torch.where(is_here, ids - me * local, -1)
        chosen.append([a[token] for a in (*rows, here, weights)] + [rank * tokens + token])
    joined = [torch.cat(arrays) for arrays in zip(*chosen, strict=True)]
    counts = [len(arrays[-1]) for arrays in chosen]
    return [*joined, joined[-1].new_tensor(counts, dtype=torch.int32)]


@by_torch
def generate_pre_combine_data(
    src_token_global_idx: Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> Tensor:
    """`[n, K, hidden]` bfloat16: an expert's output for each token and k. The same on every rank.

    Numbers of -1 to 1, which depend on the token's number `[n]`, on k and on the column, and on nothing else: so they
    are made by integers.
    """
    token = src_token_global_idx

    def count(most: int) -> Any:
        return torch.arange(most, device=token.device)

    row = token[:, None] * num_topk + count(num_topk)
    first = (row * 7919 + (row >> 3) * 31) % _VALUES
    column = count(hidden) * 104_729 % _VALUES
    # Twice, so that a sum of two remainders is an index.
    table = ((count(2 * _VALUES) % _VALUES).double() / 1019.0 - 1).bfloat16()
    # By k, because indices take four times the memory of the values.
    return torch.stack([table[first[:, k, None] + column] for k in range(num_topk)], 1)


@by_torch
def ordered_accumulate(data: Tensor, initial_value: Tensor | None = None) -> Tensor:
    """`[n, H]` of `[n, K, H]`: the sum over k, in order, in float32, rounded once."""
    return _sum(data, [] if initial_value is None else [initial_value])


@by_torch
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
    local = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    # Numbers below 0 stay below 0.
    owner = topk_idx // local
    if reduce_in_local:
        y = _group(y, owner)
    if reduce_in_scaleup:
        y = _group(y, owner // num_scaleup_ranks)
    biases = bias if isinstance(bias, (tuple, list)) else (bias,)
    return _sum(y, [one for one in biases if one is not None])


def _sum(terms: Any, first: list[Any]) -> Any:
    """The sum of biases `[T, H]`, then of the terms `[T, K, H]` in k order."""
    total = torch.zeros_like(terms[:, 0], dtype=torch.float32)
    for one in (*first, *terms.unbind(1)):
        total = total + one.float()
    return total.to(terms.dtype)


def _group(y: Any, group: Any) -> Any:
    """Sums the entries of each token that are of one group, rounds, and leaves the sum at the last of them."""
    places = torch.arange(group.shape[1], device=group.device)
    is_same = group[:, :, None] == group[:, None, :]
    last = torch.where(is_same, places, 0).amax(2)
    # The zero that changes no number, not even a negative zero.
    sums = -torch.zeros_like(y, dtype=torch.float32)
    for k in range(group.shape[1]):
        token = (group[:, k] >= 0).nonzero()[:, 0]
        slot = last[token, k]
        sums[token, slot] += y[token, k].float()
    is_sum = (group >= 0) & (last == places)
    return torch.where(is_sum[:, :, None], sums.to(y.dtype), torch.zeros_like(y))
