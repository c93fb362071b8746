"""DeepEP's Python interface, on tokenyard. See docs/deep_ep.md of the repository.

`import deep_ep` is this package where the distribution tokenyard-deep-ep is installed, or after
`tokenyard.alias_deep_ep()`. It needs torch, numpy and ml_dtypes; to import it takes no GPU. The repository tests it by
`python/tests/test_deep_ep_*.py`, `gpu_*.py` and `clients`.
"""

import tokenyard

from . import _C
from ._C import Config, topk_idx_t
from .buffers import Buffer, ElasticBuffer, EPHandle
from .buffers.elastic import get_logical_domain_size, get_physical_domain_size
from .utils import EventHandle, EventOverlap

_is_tokenyard = True
__version__ = f"2.1.0+tokenyard.{tokenyard.__version__}"

__all__ = [
    "_C",
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "__version__",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
]
