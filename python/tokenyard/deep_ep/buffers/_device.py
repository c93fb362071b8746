"""The device of torch, for calls without a tensor."""

from typing import Any

from .._engine import Engine
from .._gpu import streams


def gpu_stream(engine: Engine) -> Any:
    """The stream of asynchronous calls on GPUs."""
    if not engine.on_device or engine.gpu is None:
        return None
    return streams.communication_stream(engine.device)
