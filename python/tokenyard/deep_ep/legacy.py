"""DeepEP's first interface, by the name of its module in version 2."""

from ._C import Config
from .buffers.legacy import Buffer

__all__ = ["Buffer", "Config"]
