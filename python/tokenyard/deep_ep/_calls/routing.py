"""The layout, as DeepEP calls it: computed from ids, without a message."""

import numpy as np

import tokenyard
from tokenyard import errors

from .._arrays import Array, Refusal
from .arguments import expect_integer


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
