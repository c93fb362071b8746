"""What DeepEP calls a layout, computed from ids. All in numpy, without a message."""

import numpy as np

from ._arrays import Array, Refusal, expect


def check_ids(ids: Array, experts: int) -> None:
    """Refuses ids that no rank could route."""
    if ids.size and int(ids.max()) >= experts:
        token, k = np.argwhere(ids >= experts)[0]
        raise Refusal(
            f"topk_idx: found expert {int(ids[token, k])} at [{token}, {k}]; expected below num_experts = {experts}"
        )


def ranks_of(ids: Array, experts: int, ranks: int) -> Array:
    """`[T, R]` bool: whether a token has an expert on a rank."""
    is_in = np.zeros((len(ids), ranks), bool)
    token, k = np.nonzero(ids >= 0)
    is_in[token, ids[token, k] // (experts // ranks)] = True
    return is_in


def count_experts(ids: Array, experts: int) -> Array:
    """`[E]` int32: how many tokens select each expert."""
    return np.bincount(ids[ids >= 0], minlength=experts).astype(np.int32)


def ids_of_map(is_in: Array, ranks: int) -> Array:
    """Ids that route by a bool map `[T, R]`, one expert per rank."""
    if ranks > 32:
        raise Refusal(f"topk_idx: found None with {ranks} ranks; expected ids above 32 ranks")
    expect("is_token_in_rank", is_in, (np.bool_,), (None, ranks))
    return np.where(is_in, np.arange(ranks, dtype=np.int64), -1)


class Expansion:
    """A row per (token, local expert): grouped by expert, starts aligned, in the order of the flat rows.

    `row`, `k` and `expert` of each copy, `place` among those of its expert, and `slot` among all.
    """

    def __init__(self, ids: Array, local_experts: int, alignment: int) -> None:
        row, k = np.nonzero(ids >= 0)
        expert = ids[row, k]
        order = np.argsort(expert, kind="stable")
        self.row, self.k = row[order], k[order]
        self.expert = expert[order]
        self.counts = count_experts(ids, local_experts)
        aligned = -(-self.counts // alignment) * alignment
        self.aligned = aligned.astype(np.int32)
        self.starts = np.concatenate([[0], np.cumsum(aligned)])[:-1].astype(np.int32)
        first = np.concatenate([[0], np.cumsum(self.counts)])[:-1]
        self.place = np.arange(len(self.row)) - first[self.expert]
        self.slot = self.place + self.starts[self.expert]
        self.rows = int(aligned.sum())

    def slots(self, shape: tuple[int, ...]) -> Array:
        """`[N, K]` int32: the row of each copy, or -1."""
        slots = np.full(shape, -1, np.int32)
        slots[self.row, self.k] = self.slot
        return slots


def sum_copies(rows: Array, slots: Array, weights: Array | None = None) -> Array:
    """`[N, H]` float32: the sum of each token's copies in k order, weighted or not. Slots of -1 are left out."""
    out = np.zeros((len(slots), rows.shape[-1]), np.float32)
    for k in range(slots.shape[1]):
        has = np.flatnonzero(slots[:, k] >= 0)
        terms = rows[slots[has, k]].astype(np.float32)
        if weights is not None:
            terms *= weights[has, k, None]
        out[has] += terms
    return out
