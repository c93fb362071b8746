"""DeepEP's Python interface, on tokenyard. See docs/deep_ep.md of the repository.

`import deep_ep` is this package where the distribution tokenyard-deep-ep is installed, or after
`tokenyard.alias_deep_ep()`. To import it takes no GPU; it needs numpy and ml_dtypes.
"""

import tokenyard

from . import _C
from ._C import Config, topk_idx_t
from .buffers import Buffer
from .utils import EventHandle, EventOverlap

_is_tokenyard = True
__version__ = f"2.1.0+tokenyard.{tokenyard.__version__}"

__all__ = [
    "_C",
    "Buffer",
    "Config",
    "EventHandle",
    "EventOverlap",
    "__version__",
    "topk_idx_t",
]
