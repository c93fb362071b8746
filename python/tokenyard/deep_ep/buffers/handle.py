"""The handle that a dispatch of V2 leaves behind."""

from typing import Any

from .._arrays import Tensor, to_numpy
from .._dynamo import metaclass_of_opaque_types
from .._torch import torch

# Computed fields, and the methods of `Places` that compute them.
_COMPUTED = {
    # [ranks of a domain] int32: tokens from those up to each, inclusive.
    "psum_num_recv_tokens_per_scaleup_rank": "scaleup_psum",
    # [E / R] int32: sums of aligned counts, inclusive; expanded: the end of each expert's rows.
    "psum_num_recv_tokens_per_expert": "expert_psum",
    # [N, K + 2] int32: source rank * M + token; source rank * K + last k here; expanded rows, or -1.
    "recv_src_metadata": "metadata",
    "dst_buffer_slot_idx": "dummy",
    # [E / R] int32: rows of each local expert, without padding.
    "num_unaligned_recv_tokens_per_expert": "counts",
}


# TorchTitan registers the type, so that its operators take handles in a graph.
class EPHandle(metaclass=metaclass_of_opaque_types()):  # type: ignore[metaclass]
    """The routing of a dispatch. Its tensors may be taken out and put back, as autograd wants it.

    N counts the rows that arrived, X the expanded ones with their padding; without CPU sync both are the most that can
    be. Tensors that only DeepEP's kernels read are dummies.
    """

    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor
    dst_buffer_slot_idx: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor

    def __init__(self, record: Any, places: Any, received: Any, topk_idx: Tensor) -> None:
        # Places compute fields where they are read first, from memory of their own.
        self._record, self._places, self._gives_arrays = record, places, False
        self.do_expand: bool = record.is_expanded
        self.num_experts: int = record.experts
        self.expert_alignment: int = record.alignment
        self.num_max_tokens_per_rank: int = record.tokens
        # [T, K]: a copy, or the caller's own. Of the caller's that must stay as it is, torch's count of changes, too.
        self._topk_idx = topk_idx
        self._version: int | None = None
        self.num_recv_tokens: int = received.tokens
        # Aligned counts; none without CPU sync.
        self.num_recv_tokens_per_expert_list: list[int] = []
        self.num_expanded_tokens, self.num_sms = 0, 0
        self.token_metadata_at_forward: Tensor | None = None
        self.channel_linked_list: Tensor | None = None
        self.cached_recv_src_metadata_before_sort: Tensor | None = None

    @property
    def topk_idx(self) -> Tensor:
        """`[T, K]`: the ids, a copy or the caller's own. Raises AssertionError where they were watched and changed."""
        assert self.has_its_ids(), "`topk_idx` must not be modified while the EP handle is in use"
        return self._topk_idx

    @topk_idx.setter
    def topk_idx(self, topk_idx: Tensor) -> None:
        self._topk_idx, self._version = topk_idx, None

    def watch_ids(self) -> None:
        """From now on the ids must stay as they are. Tensors of inference mode, and arrays, count no changes."""
        ids = self._topk_idx
        if isinstance(ids, torch.Tensor) and not ids.is_inference():
            self._version = ids._version

    def has_its_ids(self) -> bool:
        """Whether ids that are watched are as they were."""
        return self._version is None or self._topk_idx._version == self._version

    def __getattr__(self, name: str) -> Any:
        places = vars(self).get("_places")
        if places is None or name not in _COMPUTED:
            raise AttributeError(f"EPHandle has no {name}")
        value = getattr(places, _COMPUTED[name])()
        if self._gives_arrays:
            value = to_numpy(name, value)
        setattr(self, name, value)
        return value

    def give_arrays(self, topk_idx: Tensor | None) -> None:
        """Its tensors become arrays of numpy, as those of the call that made it; `topk_idx`: the caller's own, if it
        has these."""
        self._gives_arrays = True
        self._topk_idx = to_numpy("topk_idx", self._topk_idx) if topk_idx is None else topk_idx
