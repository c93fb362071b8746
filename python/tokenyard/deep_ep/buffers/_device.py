"""The device of torch, for calls without a tensor."""

from typing import Any

from .._engine import Engine
from .._gpu import streams
from .._torch import torch


def gpu_device(engine: Engine) -> Any:
    """The buffer's GPU, whichever is the current one of this thread; the host's memory without GPUs."""
    return torch.device("cpu") if engine.gpu is None else torch.device("cuda", engine.gpu)


def gpu_stream(engine: Engine) -> Any:
    """The stream of asynchronous calls on GPUs."""
    if not engine.on_device or engine.gpu is None:
        return None
    return streams.communication_stream(gpu_device(engine))
