"""torch, which the drop-in needs as DeepEP does."""

import importlib
from typing import Any


def _imported() -> Any:
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            "deep_ep: found no torch; expected it, as for DeepEP. Fix: pip install torch"
        ) from error


torch: Any = _imported()
