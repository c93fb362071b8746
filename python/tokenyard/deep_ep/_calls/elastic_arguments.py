"""The arguments of V2's calls."""

from dataclasses import dataclass
from typing import Any, Literal

from .._arrays import Refusal, Tensor
from .._pool import Mode, mode_of
from ..buffers.handle import EPHandle
from .arguments import expect_none


@dataclass
class DispatchCall:
    """The arguments of a dispatch: as they were given, with defaults filled in, and as they were read."""

    x: Tensor | tuple[Tensor, Tensor]
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    stats: Tensor | None
    experts: int | None
    # M of the call, and that of the buffer, which communicators are opened with.
    tokens: int | None
    most_tokens: int
    alignment: int | None
    handle: EPHandle | None
    # The number that a handle reports, and the one that the caller has chosen.
    num_sms: int
    chosen_sms: int | None
    copies_handle: bool
    has_cpu_sync: bool
    is_expanded: bool
    is_column_major: bool
    # Of `x`, where the tensors were read and checked; before, they come with it.
    scales: Any = None

    @property
    def reference(self) -> Tensor:
        """The rows, without their scales."""
        return self.x[0] if isinstance(self.x, tuple) else self.x

    @property
    def layout(self) -> Literal["flat", "expert_major", "packed"]:
        return "expert_major" if self.is_expanded else "flat"

    @property
    def mode(self) -> Mode:
        return mode_of(self.layout, self.has_cpu_sync)

    def expect_equal(self, record: Any) -> None:
        """Arguments that a cached call may repeat must equal those of the handle."""
        for name, found, expected in (
            ("num_experts", self.experts, record.experts),
            ("expert_alignment", self.alignment, record.alignment),
            ("num_max_tokens_per_rank", self.tokens, record.tokens),
            ("do_expand", self.is_expanded, record.is_expanded),
        ):
            if found is not None and found != expected:
                raise Refusal(f"{name}: found {found}; expected {expected}, that of the handle")
        expect_none(topk_idx=self.topk_idx, cumulative_local_expert_recv_stats=self.stats)
