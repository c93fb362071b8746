"""The two interfaces of DeepEP."""

from .elastic import ElasticBuffer, EPHandle
from .legacy import Buffer

__all__ = ["Buffer", "EPHandle", "ElasticBuffer"]
