"""Arguments of the calls, and the checks of several of them. On GPUs the host reads no values."""

from typing import Any

import numpy as np

import tokenyard
from tokenyard import errors

from .._arrays import Array, Refusal
from .._torch import torch
from .call import Call, expect_integer
from .tensors import floats, read

FIRST_TOKENS = 1024
# Above it, a map of ranks cannot route: its ranks are the choices of a token.
MOST_CHOICES = 32


def read_rows(x: Any, tokens: int | None, hidden: int | None) -> tuple[Any, Any]:
    """Rows that travel as they are, and their scales or None."""
    if isinstance(x, tuple):
        if len(x) != 2:
            raise Refusal(f"x: found {len(x)} tensors; expected one, or rows and their scales")
        rows = read("x", x[0], (torch.float8_e4m3fn, torch.uint8), (tokens, hidden))
        scales = read("scales", x[1], (torch.float32, torch.int32), (rows.shape[0], None))
        return rows.contiguous(), scales
    return read("x", x, floats(), (tokens, hidden)).contiguous(), None


def read_bias(bias: Any, dtype: Any, shape: tuple[int, int]) -> list[Any]:
    """None, one or two biases."""
    if bias is None:
        return []
    listed = list(bias) if isinstance(bias, (tuple, list)) else [bias]
    if len(listed) > 2:
        raise Refusal(f"bias: found {len(listed)} tensors; expected at most 2")
    found = [read("bias", one, (dtype,), shape) for one in listed if one is not None]
    return [one.contiguous() for one in found]


def expect_none(**tensors: Any) -> None:
    """Refuses tensors that a handle stands for."""
    for name, tensor in tensors.items():
        if tensor is not None:
            raise Refusal(f"{name}: found some with a handle; expected None")


def check_tokens(tokens: int, name: str, most: int | None) -> int:
    """M, which the caller names so. Refuses more tokens than that, and what cannot be M."""
    expect_integer(name, most, 1)
    if most is None or tokens > most:
        raise Refusal(f"x: found {tokens} tokens; expected at most {name} = {most}")
    return most


def check_experts(experts: int, ranks: int) -> None:
    """Refuses a number of experts that ranks cannot share."""
    expect_integer("num_experts", experts, 1)
    if experts % ranks:
        raise Refusal(f"num_experts: found {experts}; expected a multiple of the {ranks} ranks")


def check_ids(ids: Array, experts: int) -> None:
    """Refuses ids that no rank could route."""
    if ids.size and int(ids.max()) >= experts:
        token, k = np.argwhere(ids >= experts)[0]
        raise Refusal(
            f"topk_idx: found expert {int(ids[token, k])} at [{token}, {k}]; expected below num_experts = {experts}"
        )


def counts_of(ids: Array, experts: int, ranks: int) -> tuple[Array, Array, Array]:
    """Tokens per rank `[R]` and per expert `[E]`, int32, and the map of ranks `[T, R]`, bool. Refuses bad ids."""
    check_ids(ids, experts)
    try:
        counts = tokenyard.routing_counts(np.ascontiguousarray(ids), experts, ranks)
    except errors.InvalidInputError as error:
        raise Refusal(str(error)) from None
    per_rank, per_expert, is_in = (np.asarray(array) for array in counts)
    return per_rank, per_expert, is_in.view(np.bool_)


def read_routing(call: Call, tokens: int, ranks: int) -> tuple[int, Any, Any]:
    """E, ids and weights of a dispatch. Without ids, the map of ranks says which a token has, as experts."""
    for name in ("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert"):
        if getattr(call, name) is None:
            raise Refusal(f"{name}: found None without a handle; expected get_dispatch_layout's")
    is_in = read("is_token_in_rank", call.is_token_in_rank, (torch.bool,), (tokens, ranks))
    counts = read("num_tokens_per_expert", call.num_tokens_per_expert, (torch.int32,), (None,))
    experts = counts.shape[0]
    if experts == 0 or experts % ranks:
        raise Refusal(
            f"num_tokens_per_expert: found {experts} experts; expected a multiple of the {ranks} ranks"
        )
    expect_integer("expert_alignment", call.expert_alignment, 1)
    worst, least = call.num_worst_tokens, ranks * tokens
    if 0 < worst < least:
        raise Refusal(
            f"num_worst_tokens: found {worst}; expected 0, or at least ranks * tokens = {least}"
        )
    if call.topk_idx is None:
        if call.topk_weights is not None:
            raise Refusal("topk_weights: found some without topk_idx; expected both or neither")
        if worst:
            raise Refusal("num_worst_tokens: found some without topk_idx; expected ids with it")
        if ranks > MOST_CHOICES:
            raise Refusal(
                f"topk_idx: found None with {ranks} ranks; expected ids above {MOST_CHOICES} ranks"
            )
        return ranks, torch.where(is_in, torch.arange(ranks, device=is_in.device), -1), None
    ids = read("topk_idx", call.topk_idx, (torch.int64,), (tokens, None)).contiguous()
    if call.topk_weights is None:
        raise Refusal("topk_weights: found None with topk_idx; expected both or neither")
    weights = read("topk_weights", call.topk_weights, (torch.float32,), tuple(ids.shape))
    return experts, ids, weights.contiguous()


def first_tokens(tokens: int) -> int:
    """M to open a communicator with: callers of normal mode name none, and bring other numbers in every step."""
    return 1 << (max(tokens, FIRST_TOKENS) - 1).bit_length()
