"""The shape that a communicator is opened for."""

import functools
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sizes:
    """The shape that a communicator is opened for. `tokens` is the most that a rank may bring.

    `max_tokens` is M of a call that names one: the same on all ranks.
    """

    experts: int
    topk: int
    hidden: int
    tokens: int
    max_tokens: int | None
    # Whether it is for few tokens, of which each counts.
    decodes: bool
    # Whether `topk` is the least that the call needs: its routing may have any number of experts for a token.
    takes_more_topk: bool = False
    # Rows that each token is sent as, where it has more experts than a row may have.
    pieces: int = 1

    @functools.cached_property
    def key(self) -> tuple[int, int, int]:
        return self.experts, 0 if self.takes_more_topk else self.topk, self.hidden

    def has_room_for(self, other: "Sizes") -> bool:
        """Whether calls of other sizes with the same key fit."""
        return (
            other.tokens <= self.tokens and other.topk <= self.topk and other.pieces <= self.pieces
        )

    @functools.cached_property
    def named_key(self) -> tuple[int, ...]:
        """As `key`, where calls that name M have communicators of their own. Graphs may have captured them."""
        return (*self.key, int(self.max_tokens is not None), int(self.decodes))


# The same object for the same sizes: a call then computes no key of them again.
sizes_of = functools.lru_cache(maxsize=256)(Sizes)

# The largest M of calls for low latency. Above it, rows of the packed layout are not staged.
MOST_DECODE_TOKENS = 1024


def grown(sizes: Sizes, before: Sizes) -> Sizes:
    """Sizes with room for a larger M than the one asked for, at most a quarter: callers whose M grows in each step
    open few communicators. `before`: those that had too little room for it."""
    if sizes.tokens <= before.tokens:
        # It is K that grows.
        return replace(sizes, tokens=before.tokens)
    topk, pieces = max(sizes.topk, before.topk), max(sizes.pieces, before.pieces)
    sizes = replace(sizes, topk=topk, pieces=pieces)
    tokens = sizes.tokens
    # No communicator takes as many: what is refused is what the caller has named.
    if tokens >= 1 << 24:
        return sizes
    step = max(64, 1 << max(tokens.bit_length() - 3, 0))
    most = -(-tokens // step) * step
    if sizes.decodes:
        most = min(most, MOST_DECODE_TOKENS)
    return replace(sizes, tokens=max(most, tokens))
