"""The device of torch, for calls without a tensor."""

from typing import Any

from .._engine import Engine
from .._gpu import streams
from .._torch import torch


def gpu_device() -> Any:
    """The device of torch on which calls without a tensor run; that of the host's memory without GPUs."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def gpu_stream(engine: Engine) -> Any:
    """The stream of asynchronous calls on GPUs."""
    if not engine.on_device or not torch.cuda.is_available():
        return None
    return streams.communication_stream(gpu_device())
