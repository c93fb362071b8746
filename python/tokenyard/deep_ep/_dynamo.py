"""torch.compile: Dynamo calls the drop-in as it is, between two graphs. It traces nothing inside of it."""

import importlib
import inspect
import sys
from typing import Any

_opaque: set[type] = set()


def make_opaque(*kinds: type) -> None:
    """Dynamo breaks its graph at calls of these classes, once torch is there. A call then takes 0.5 us longer.

    torch cannot be asked earlier: to import this package does not import it.
    """
    torch = sys.modules.get("torch")
    # A torch that is half imported has no compiler yet: a later buffer finds it.
    disable = getattr(getattr(torch, "compiler", None), "disable", None)
    if disable is None:
        return
    for kind in set(kinds) - _opaque:
        for name, member in list(vars(kind).items()):
            if name.startswith("_") and name not in ("__call__", "__getattr__"):
                continue
            if isinstance(member, staticmethod):
                setattr(kind, name, staticmethod(disable(member.__func__)))
            elif inspect.isfunction(member):
                setattr(kind, name, disable(member))
        _opaque.add(kind)


def metaclass_of_opaque_types() -> Any:
    """torch's metaclass of types that custom operators may take and give as they are, where torch was imported and has
    one; else that of all types."""
    if "torch" in sys.modules:
        for module in ("torch._custom_class_base", "torch._opaque_base"):
            try:
                found = importlib.import_module(module)
            except ImportError:
                continue
            return getattr(found, "CustomClassBaseMeta", None) or found.OpaqueBaseMeta
    return type
