"""Hybrid-EP's interface: `HybridEPBuffer`."""

import warnings
from typing import Any

from .._arrays import Tensor, by_torch, invalid
from .._calls import hybrid, hybrid_by_rank, hybrid_flat
from .._calls.call import judge_flags, judge_integers
from .._calls.hybrid_routing import spread
from .._calls.tensors import on_stream
from .._dynamo import make_opaque
from .._pool import Pool
from .._world import DEFAULT_WAITS, Waits, largest
from .hybrid_config import Configurer, HybridEpConfigInstance, Runtime

_FLAGS = ("use_fp8", "load_cached_kernels", "use_shared_buffer", "enable_custom_allgather")
_SIZES = ("hidden_dim", "max_num_of_tokens_per_rank", "num_local_experts")
# None leaves them to the package.
_CHOICES = (
    "num_sms_dispatch_api",
    "num_sms_combine_api",
    "num_sms_preprocessing_api",
    "num_blocks_permute",
    "num_blocks_unpermute",
    "num_of_hybrid_ep_ranks_per_nvlink_domain",
)


def _judge(given: dict[str, Any]) -> str | None:
    """The fault of the first argument of the constructor that has one."""
    wrong = judge_integers(given, _SIZES)
    chosen = tuple(name for name in _CHOICES if given[name] is not None)
    wrong = wrong or judge_integers(given, chosen)
    flags = _FLAGS if given["use_mnnvl"] is None else (*_FLAGS, "use_mnnvl")
    return wrong or judge_flags(given, flags)


@by_torch
def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """`[T, K]` ids as a map `[T, E]` of bool, and their weights as `[T, E]` float32 or None.

    Ids outside of the experts, such as -1, select nothing.
    """
    assert topk_idx.shape[0] == num_of_tokens, "`topk_idx` must have a row for each token"
    return spread(topk_idx, topk_weights, num_of_experts)


class HybridEPBuffer:
    """Dispatch and combine of Hybrid-EP, by the names of DeepEP's branch `hybrid-ep`.

    To construct it is collective, and so are `dispatch`, `combine` and their relatives: all ranks make the same calls
    in the same order, on the current stream. `group` is a process group of torch (or a tokenyard.World). Ranks may have
    other numbers of tokens; where the host does not wait, with `num_of_tokens_per_rank` alone. Sizes are the largest of
    the ranks', and grow with the calls; a handle from before is refused then, on all ranks.
    """

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        given = locals()
        wrong = _judge(given)
        waits = Waits(DEFAULT_WAITS.deadline, DEFAULT_WAITS.late, wrong)
        self._pool = pool = Pool(group, waits=waits)
        self.group, self.rank, self.group_size = group, pool.rank, pool.ranks
        size = pool.ranks // pool.domains
        self.num_of_nodes, self.num_of_hybrid_ep_ranks_per_nvlink_domain = pool.domains, size
        self.node_rank, self.local_rank = divmod(pool.rank, size)
        self.num_sms_dispatch = given["num_sms_dispatch_api"] or 0
        self.num_sms_combine = given["num_sms_combine_api"] or 0
        # The communicators of the last dispatches and their layouts, by whether they permute.
        self.last_opened: dict[bool, tuple[Any, str]] = {}
        self.runtime = Runtime()
        sizes = largest(pool.world, "sizes of buffer", {name: given[name] for name in _SIZES})
        chosen = {name: given[name] for name in _CHOICES[:-1] if given[name] is not None}
        config = HybridEpConfigInstance(
            hidden_dim=sizes["hidden_dim"],
            max_num_of_tokens_per_rank=sizes["max_num_of_tokens_per_rank"],
            num_of_experts_per_rank=sizes["num_local_experts"],
            num_of_ranks_per_node=size,
            num_of_nodes=pool.domains,
            token_data_type="UINT8" if given["use_fp8"] else "UINT16",
            **chosen,
        )
        self.configurer = Configurer(self.runtime, config)

    @property
    def left_out(self) -> Tensor:
        """As `ElasticBuffer.left_out`."""
        return self._pool.gaps.count

    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **kwargs: Any,
    ) -> HybridEpConfigInstance:
        """Grows the buffer to these sizes, and returns a config of them; other keywords become its fields.

        All ranks name the same sizes. Raises InvalidInputError.
        """
        own = self.configurer.buffer_config
        sizes = {
            "hidden_dim": hidden_dim,
            "num_of_tokens_per_rank": num_of_tokens_per_rank,
            "num_local_experts": num_local_experts,
            "pad_multiple": pad_multiple,
        }
        flags: dict[str, Any] = {"use_fp8": use_fp8, "fuse_permute_dispatch": fuse_permute_dispatch}
        named = tuple(name for name, value in sizes.items() if value is not None)
        wrong = judge_integers(sizes, named) or judge_flags(flags, tuple(flags))
        if wrong is not None:
            raise invalid("update_template_config", wrong, self.rank)
        hidden, tokens = sizes["hidden_dim"] or own.hidden_dim, sizes["num_of_tokens_per_rank"]
        local = sizes["num_local_experts"] or own.num_of_experts_per_rank
        if tokens is None:
            tokens = own.max_num_of_tokens_per_rank
        self.configurer.grow(hidden, tokens, local)
        fields: dict[str, Any] = {
            "hidden_dim": hidden,
            "num_of_tokens_per_rank": max(16, -(-tokens // 16) * 16),
            "num_of_experts_per_rank": local,
            "pad_multiple": sizes["pad_multiple"] or 0,
        }
        if use_fp8 is not None:
            fields["token_data_type"] = "UINT8" if flags["use_fp8"] else "UINT16"
        return self.configurer.template(**fields, **kwargs)

    def dispatch(
        self,
        hidden: Tensor,
        scaling_factor: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts: int | None = None,
        probs: Tensor | None = None,
        routing_map: Tensor | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: tuple[Any, ...] | None = None,
        num_of_tokens_per_rank: int | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, tuple[Any, ...]]:
        """Sends tokens to the ranks of their experts; with `handle`, by the routing of an earlier dispatch.

        - `hidden`: `[T, H]` bfloat16, float16 or float32; or 8 bits (uint8 or FP8) with `scaling_factor` `[T, S]`
          float32, which pass as they are.
        - `routing_map` `[T, E]` bool; or `topk_idx` `[T, K]` integers, of which those outside of the experts select
          nothing. A map wins.
        - `probs` `[T, E]` float32, or `topk_weights` `[T, K]` float32. Explicit probabilities win.
        - `num_of_tokens_per_rank`: the same on all ranks, at least the T of each; the sizes of a handle and of the
          buffer are then its. Without it, and where the host does not wait, all T are the same.
        - `num_dispatched_tokens`: give as many rows, at least those that arrive. The host then does not wait for them.

        Returns `(rows, probs, scales, handle)`: a row for each token and rank, by source rank, then token; `probs`
        `[N, experts of a domain]`, of which the own experts' are written. Collective. Raises InvalidInputError here and
        RefusedError elsewhere, FullError: nothing was moved.
        """
        return on_stream(hybrid_flat.dispatch, hybrid_flat.DispatchCall(locals()))

    def combine(
        self, hidden: Tensor, probs: Tensor | None = None, handle: tuple[Any, ...] | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Brings rows of `dispatch` back and sums them per token, unweighted: `([T, H], [T, E] float32 or None)`.

        - `hidden`: the rows of the dispatch, `[N, H]` bfloat16, float16 or float32, summed in float32 in the order of
          the ranks; `probs`: as `dispatch` gives them.

        Collective. Errors are those of `dispatch`.
        """
        return on_stream(hybrid_flat.combine, hybrid_flat.CombineCall(locals()))

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, tuple[Any, ...]]:
        """As `dispatch`, with a row for each token and expert, grouped by expert.

        - `pad_multiple`: each expert's rows begin at a multiple of it; the padding is zero.
        - `num_permuted_tokens`: P, a number or a tensor of one: give as many rows. More are a FullError on all ranks
          where the kernel set takes a most of rows; elsewhere the last field of the handle becomes 1.
        - `non_blocking`: the host waits for nothing. It needs P, a multiple of `pad_multiple`; rows from P on are
          dropped, of the last experts first, and the last field of the handle becomes 1.
        - `fuse_permute_dispatch` makes no difference: it is one operation in any case.

        Returns `(rows, probs [P], scales, padded counts of the experts, handle)`: counts `[E / R]` int64 on the host,
        or on the device with `non_blocking`; None with a handle.
        """
        _warn_of(num_dispatched_tokens, "num_dispatched_tokens")
        if use_host_meta is not None:
            _warn_of(use_host_meta, "use_host_meta")
            non_blocking = use_host_meta is False
        given = locals()
        if hybrid_by_rank.is_meant(given):
            return on_stream(hybrid_by_rank.dispatch, hybrid_by_rank.DispatchCall(given))
        return on_stream(hybrid.dispatch, hybrid.DispatchCall(given))

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple[Any, ...] | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As `combine`, of rows of `dispatch_with_permute`, and `probs` `[P]`.

        Rows of a rank's experts are summed in their order, and rounded; then ranks. Rows that were dropped count as
        zeros. `pad_multiple` and `fuse_unpermute_combine` make no difference.
        """
        _warn_of(num_dispatched_tokens, "num_dispatched_tokens")
        given = locals()
        if hybrid_by_rank.is_of(handle):
            return on_stream(hybrid_by_rank.combine, hybrid_by_rank.CombineCall(given))
        return on_stream(hybrid.combine, hybrid.CombineCall(given))


def _warn_of(value: Any, name: str) -> None:
    if value is not None:
        warnings.warn(f"{name} is deprecated in Hybrid-EP, and means nothing", stacklevel=3)


make_opaque(HybridEPBuffer)
