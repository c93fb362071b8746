"""The shape that a communicator is opened for."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """The shape that a communicator is opened for. `tokens` is the most that a rank may bring.

    `max_tokens` is M of a call that names one: the same on all ranks.
    """

    experts: int
    topk: int
    hidden: int
    tokens: int
    max_tokens: int | None = None
    # Whether it is for few tokens, of which each counts.
    decodes: bool = False
    # Multiprocessors that an operation takes, where the caller has chosen their number.
    sms: int | None = None

    @functools.cached_property
    def key(self) -> tuple[int, int, int, int]:
        return self.experts, self.topk, self.hidden, self.sms or 0

    @functools.cached_property
    def named_key(self) -> tuple[int, ...]:
        """As `key`, where calls that name M have communicators of their own. Graphs may have captured them."""
        return (*self.key, int(self.max_tokens is not None), int(self.decodes))


_same_sizes = functools.lru_cache(maxsize=256)(Sizes)


def sizes_of(
    experts: int,
    topk: int,
    hidden: int,
    tokens: int,
    max_tokens: int | None = None,
    decodes: bool = False,
    sms: int | None = None,
) -> Sizes:
    """The same object for the same sizes: a call then computes no key of them again."""
    return _same_sizes(experts, topk, hidden, tokens, max_tokens, decodes, sms)


def by_looks(looks: Callable[[], Sizes] | None) -> Sizes | None:
    """The sizes that a refused call has by the looks of its tensors, if they have any."""
    # Anything may be given in their place: the call says which argument is wrong.
    with contextlib.suppress(Exception):
        return looks and looks()
    return None
