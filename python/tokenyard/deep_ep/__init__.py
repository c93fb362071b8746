"""DeepEP's Python interface, on tokenyard. See docs/deep_ep.md of the repository.

`import deep_ep` is this package where the distribution tokenyard-deep-ep is installed, or after
`tokenyard.alias_deep_ep()`. It needs torch, numpy and ml_dtypes; to import it takes no GPU. The repository tests it by
`python/tests/test_deep_ep_*.py`, `gpu_*.py` and `clients`.
"""

import tokenyard

from . import _C, comm
from ._C import (
    Config,
    get_num_allocation_alignment,
    get_num_rdma_alignment,
    get_num_tma_alignment,
    topk_idx_t,
)
from .buffers import (
    BucketBuffer,
    BucketSession,
    Buffer,
    BufferAllocator,
    BufferBase,
    ElasticBuffer,
    EngramBuffer,
    EPBuffer,
    EPHandle,
    HybridEPBuffer,
    PPBuffer,
    indices_to_map,
)
from .buffers.base import get_logical_domain_size, get_physical_domain_size
from .comm import destroy_all_managed_nccl_comm
from .utils import EventHandle, EventOverlap

_is_tokenyard = True
__version__ = f"2.1.0+tokenyard.{tokenyard.__version__}"

__all__ = [
    "_C",
    "BucketBuffer",
    "BucketSession",
    "Buffer",
    "BufferAllocator",
    "BufferBase",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EngramBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "PPBuffer",
    "__version__",
    "comm",
    "destroy_all_managed_nccl_comm",
    "get_logical_domain_size",
    "get_num_allocation_alignment",
    "get_num_rdma_alignment",
    "get_num_tma_alignment",
    "get_physical_domain_size",
    "indices_to_map",
    "topk_idx_t",
]
