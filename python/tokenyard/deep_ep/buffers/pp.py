"""Pipeline-parallel send and receive of DeepEP 2.5: `PPBuffer`."""

from typing import Any

from .._arrays import Tensor
from .._dynamo import make_opaque
from .._ops import pipe
from .base import BufferBase


class PPBuffer(BufferBase):
    """Messages between two ranks, such as the activations of one pipeline stage for the next.

    To construct it is collective. `group` is a process group of torch (or a tokenyard.World). Messages of up to
    `num_max_tensor_bytes` from one rank to another arrive in the order in which they were sent, and
    `num_max_inflight_tensors` of them, 1 to 16, may be sent and not received. Both are equal on all ranks.
    """

    def __init__(
        self,
        group: Any,
        num_max_tensor_bytes: int,
        num_max_inflight_tensors: int,
        sl_idx: int | None = None,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        wrong = pipe.judge(num_max_tensor_bytes, num_max_inflight_tensors)
        self._meet(locals(), ("sl_idx",), (), wrong)
        self._messages = pipe.Messages(self._pool, "PPBuffer")
        self._messages.set_config(num_max_tensor_bytes, num_max_inflight_tensors)
        # The slots lie in memory that torch does not know.
        self.storage = None

    def send(self, x: Tensor, dst_rank_idx: int, num_sms: int | None = None) -> None:
        """Sends a contiguous tensor of any type to any other rank. It may be changed afterwards.

        The host waits: for the work that is queued on `x`, and while as many messages as may be are not received.
        """
        self._messages.send("PPBuffer.send", x, dst_rank_idx)

    def recv(self, x: Tensor, src_rank_idx: int, num_sms: int | None = None) -> None:
        """Waits on the host for the next message of a rank, and writes it to `x`, contiguous, of as many bytes."""
        self._messages.recv("PPBuffer.recv", x, src_rank_idx)


make_opaque(PPBuffer, BufferBase)
