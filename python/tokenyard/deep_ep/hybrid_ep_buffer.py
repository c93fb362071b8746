"""The module in which Hybrid-EP has its buffer."""

from .buffers.hybrid import HybridEPBuffer, indices_to_map
from .buffers.hybrid_config import HybridEpConfigInstance

__all__ = ["HybridEPBuffer", "HybridEpConfigInstance", "indices_to_map"]
