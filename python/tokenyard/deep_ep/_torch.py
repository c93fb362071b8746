"""torch, imported when the drop-in uses it first: to import the drop-in does not import it."""

import importlib
from typing import Any


class _Torch:
    def __getattr__(self, name: str) -> Any:
        try:
            module = importlib.import_module("torch")
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ModuleNotFoundError(
                "deep_ep: found no torch; expected it, as for DeepEP. Fix: pip install torch"
            ) from error
        value = getattr(module, name)
        setattr(self, name, value)
        return value


torch: Any = _Torch()
