"""The interfaces of DeepEP."""

from .allocator import BufferAllocator
from .base import BufferBase
from .bucket import BucketBuffer, BucketSession
from .elastic import ElasticBuffer, EPHandle
from .engram import EngramBuffer
from .ep import EPBuffer
from .hybrid import HybridEPBuffer, indices_to_map
from .legacy import Buffer
from .pp import PPBuffer

__all__ = [
    "BucketBuffer",
    "BucketSession",
    "Buffer",
    "BufferAllocator",
    "BufferBase",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EngramBuffer",
    "HybridEPBuffer",
    "PPBuffer",
    "indices_to_map",
]
