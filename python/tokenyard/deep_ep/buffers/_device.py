"""The device of torch, for calls without a tensor."""

from typing import Any

from .._calls import streams
from .._pool import Pool


def gpu_stream(pool: Pool) -> Any:
    """The stream of asynchronous calls on GPUs."""
    if not pool.on_device or pool.gpu is None:
        return None
    return streams.communication_stream(pool.device)
