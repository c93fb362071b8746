"""The rows that must arrive, from a global view of all ranks. No code of the product is in it."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Case:
    """One exchange: what every rank brings is made of the seed, so each rank knows all of it."""

    ranks: int
    experts: int = 8
    topk: int = 3
    hidden: int = 64
    max_tokens: int = 12
    tokens: tuple = ()
    seed: int = 1

    def __post_init__(self):
        random = np.random.default_rng(self.seed)
        self.local = self.experts // self.ranks
        if not self.tokens:
            self.tokens = tuple(random.integers(1, self.max_tokens + 1, self.ranks).tolist())
        self.x, self.idx, self.weights = [], [], []
        for tokens in self.tokens:
            self.x.append(random.standard_normal((tokens, self.hidden)).astype(np.float32))
            shuffled = [random.permutation(self.experts)[: self.topk] for _ in range(tokens)]
            idx = np.array(shuffled, dtype=np.int64).reshape(tokens, self.topk)
            idx[random.random(idx.shape) < 0.3] = -1
            self.idx.append(idx)
            self.weights.append(random.random(idx.shape, dtype=np.float32))

    def sources(self, rank):
        """The (source rank, token) that arrive at `rank`, in order."""
        return [
            (source, token)
            for source in range(self.ranks)
            for token in range(self.tokens[source])
            if any(e >= 0 and e // self.local == rank for e in self.idx[source][token])
        ]

    def row(self, source, token):
        return self.x[source][token]

    def selections(self, rank, source, token):
        """(k, local expert) of the selections of a token that live on `rank`."""
        return [
            (k, int(e) % self.local)
            for k, e in enumerate(self.idx[source][token])
            if e >= 0 and e // self.local == rank
        ]

    def expert_rows(self, rank, expert):
        """(source, token, k) of the rows of a local expert, in order."""
        return [
            (source, token, k)
            for source, token in self.sources(rank)
            for k, local in self.selections(rank, source, token)
            if local == expert
        ]

    def flat(self, rank):
        sources = self.sources(rank)
        ids = np.full((len(sources), self.topk), -1, np.int32)
        weights = np.zeros((len(sources), self.topk), np.float32)
        for row, (source, token) in enumerate(sources):
            for k, local in self.selections(rank, source, token):
                ids[row, k] = local
                weights[row, k] = self.weights[source][token, k]
        return ids, weights

    def rows(self, sources):
        rows = [self.row(*source) for source in sources]
        return np.array(rows, np.float32).reshape(len(rows), self.hidden)

    def source_counts(self, rank):
        return [sum(s == source for s, _ in self.sources(rank)) for source in range(self.ranks)]

    def expert_counts(self, rank):
        return [len(self.expert_rows(rank, expert)) for expert in range(self.local)]

    def capped(self, rank, most, alignment=None):
        """The rest on `rank` with a cap: sources of flat rows, or each expert's rows and the first row."""
        if alignment is None:
            return self.sources(rank)[:most]
        experts, start = [], 0
        for expert in range(self.local):
            rows = self.expert_rows(rank, expert)
            experts.append((rows[: max(0, most - start)], min(start, most)))
            start += -(-len(rows) // alignment) * alignment
        return experts

    def is_left(self, rank, most, alignment=None):
        """The (source, token, k) whose copy on `rank` a cap leaves."""
        left = self.capped(rank, most, alignment)
        if alignment is None:
            return {(*row, k) for row in left for k, _ in self.selections(rank, *row)}
        return {row for rows, _ in left for row in rows}

    def combined(self, me, expert, is_weighted=False):
        """Sums `expert(global expert, row)` over the selections of every token of `me`, per rank first."""
        out = np.zeros((self.tokens[me], self.hidden), np.float64)
        for token in range(self.tokens[me]):
            for k, e in enumerate(self.idx[me][token]):
                if e >= 0:
                    weight = self.weights[me][token, k] if is_weighted else 1.0
                    out[token] += weight * expert(int(e), self.row(me, token))
        return out

    def ranks_of(self, me, token):
        """The ranks that a token goes to."""
        return sorted({int(e) // self.local for e in self.idx[me][token] if e >= 0})
