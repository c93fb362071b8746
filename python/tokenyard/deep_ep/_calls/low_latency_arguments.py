"""The arguments of V1's low latency calls."""

from dataclasses import dataclass
from typing import Any, Literal

from .._arrays import Refusal, Tensor


@dataclass
class DispatchCall:
    """The arguments of a dispatch, as they were given."""

    x: Tensor
    topk_idx: Tensor
    tokens: int
    experts: int
    stats: Tensor | None
    wait_stats: Tensor | None
    use_fp8: bool
    round_scale: bool
    use_ue8m0: bool

    @property
    def cast(self) -> Literal["fp8", "fp8_round", "fp8_ue8m0"] | None:
        if not self.use_fp8:
            return None
        return "fp8_ue8m0" if self.use_ue8m0 else "fp8_round" if self.round_scale else "fp8"


@dataclass
class CombineCall:
    """The arguments of a combine, as they were given."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    handle: Any
    zero_copy: bool
    out: Tensor | None
    # Whether the caller may write `x` before the rows are summed.
    has_hook: bool
    wait_stats: Tensor | None = None
    use_logfmt: bool = False

    @property
    def compress(self) -> Literal["logfmt10"] | None:
        return "logfmt10" if self.use_logfmt else None

    def check_format(self) -> None:
        """Refuses what DeepEP does not take together."""
        if self.use_logfmt and self.zero_copy:
            raise Refusal("use_logfmt: found True with zero_copy; expected at most one of them")
