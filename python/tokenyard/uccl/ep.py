"""UCCL's native module `uccl.ep`: the names that its scripts use."""

from typing import Any, NoReturn

from tokenyard.deep_ep import Config as Config
from tokenyard.deep_ep._C import get_low_latency_rdma_size_hint as get_low_latency_rdma_size_hint
from tokenyard.deep_ep._C import is_sm90_compiled as is_sm90_compiled
from tokenyard.deep_ep._torch import torch
from tokenyard.deep_ep.utils.event import EventHandle as _EventHandle


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"uccl.ep: found no {name}; expected Config, EventHandle, is_sm90_compiled or get_low_latency_rdma_size_hint: "
        "tokenyard has none of UCCL's functions on raw addresses. Fix: call buffer.Buffer and utils"
    )


def _stream_of(stream: Any) -> Any:
    """torch's object of a stream that is given by its address, as UCCL's C++ does. On the CPU there are none."""
    if not isinstance(stream, int):
        return stream
    if not torch.cuda.is_initialized():
        return None
    # torch would make a stream of its own of 0, which is the default one.
    return torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()


class EventHandle(_EventHandle):
    """A point in the order of a stream, which may be given by its address; without one of the current stream."""

    def __init__(self, stream: Any = None) -> None:
        super().__init__(_stream_of(stream))

    def current_stream_wait(self, stream: Any = None) -> None:
        """Work that is queued next on the stream, or on the current one, runs behind the event."""
        if stream is None:
            super().current_stream_wait()
        else:
            self.wait_on(_stream_of(stream))
