"""torch.compile: Dynamo calls the drop-in as it is, between two graphs. It traces nothing inside of it."""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from ._torch import torch

_opaque: set[type] = set()


def make_opaque(buffer: Any, *kinds: type) -> None:
    """Dynamo breaks its graph where a buffer of this class is made, and at calls of it and of these classes.

    A call then takes 0.5 us longer. The first buffer does so: to ask imports the compiler.
    """
    construct = buffer.__init__

    @functools.wraps(construct)
    def first(self: Any, *arguments: Any, **keywords: Any) -> None:
        # A torch that is half imported has no compiler yet: a later buffer finds it.
        disable = getattr(getattr(torch, "compiler", None), "disable", None)
        if disable is None:
            construct(self, *arguments, **keywords)
            return
        # A compiled function may make the first buffer. Dynamo would look at each frame of this, too.
        disable(_disable_calls)(disable, {buffer, *kinds} - _opaque)
        buffer.__init__ = disable(construct)
        buffer.__init__(self, *arguments, **keywords)

    buffer.__init__ = first


def _disable_calls(disable: Callable[[Any], Any], kinds: set[type]) -> None:
    for kind in kinds:
        for name, member in list(vars(kind).items()):
            if name.startswith("_") and name not in ("__call__", "__getattr__"):
                continue
            if isinstance(member, (staticmethod, classmethod)):
                setattr(kind, name, type(member)(disable(member.__func__)))
            elif inspect.isfunction(member):
                setattr(kind, name, disable(member))
        _opaque.add(kind)


def metaclass_of_opaque_types() -> Any:
    """torch's metaclass of types that custom operators may take and give as they are, where it has one; else that of
    all types."""
    for module in ("torch._custom_class_base", "torch._opaque_base"):
        with contextlib.suppress(ImportError):
            found = importlib.import_module(module)
            return getattr(found, "CustomClassBaseMeta", None) or found.OpaqueBaseMeta
    return type
