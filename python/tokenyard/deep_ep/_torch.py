"""torch, imported when it is first used: the package itself needs numpy alone."""

import importlib
from typing import Any


class _Torch:
    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module("torch"), name)
        setattr(self, name, value)
        return value


torch: Any = _Torch()
