"""The hooks that low latency calls return."""

from collections.abc import Callable
from typing import Any


class Hook:
    """The second half of a call of low latency. The first call makes it, later ones do nothing.

    Halves are made in the order of their calls: one before it that waits is made first, and raises what is wrong where
    its own hook is called. Otherwise a rank that refuses an operation waits for the hook of that operation here, and
    this rank waits for that one in a later hook.
    """

    def __init__(self, half: Callable[[], Any], before: "Hook | None" = None) -> None:
        self._left = [half]
        self._before = before
        self._raised: list[Exception] = []

    @property
    def waits(self) -> bool:
        """Whether its half was not made."""
        return bool(self._left)

    def settle(self) -> None:
        """Makes the half, behind those before it, and keeps what it raises."""
        before, self._before = self._before, None
        if before is not None:
            before.settle()
        if self._left:
            half = self._left.pop()
            try:
                half()
            except Exception as error:
                self._raised.append(error)

    def __call__(self) -> None:
        self.settle()
        if self._raised:
            raise self._raised.pop()
