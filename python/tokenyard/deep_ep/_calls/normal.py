"""The normal calls of V1: flat rows, one per token and rank."""

from typing import Any

from tokenyard._native import _routing

from .. import _handles
from .._arrays import Refusal, adopted, invalid
from .._pool import Opened, Pool
from .._sizes import Sizes, sizes_of
from .._torch import torch
from ..utils.event import EventOverlap
from ..utils.math import align
from . import rows
from .arguments import (
    check_experts,
    counts_of,
    expect_none,
    first_tokens,
    read_routing,
    read_rows,
)
from .call import MOST, Call, expect_integer
from .rows import Record
from .streams import CallStream
from .tensors import dummy, expect_device, fit, gpu_of, read, take

# The arrays that the handle's tensors are made of, in one list: source tokens, and the ends of the rows of each source.
_PARTS = ("source_tokens", "source_ends")


class LayoutCall(Call):
    """The counts of a routing."""


def layout(call: LayoutCall) -> tuple[Any, Any, Any, Any, EventOverlap]:
    """Counts per rank, domain and expert, the map of ranks, and the event."""
    pool, experts = call.pool, call.num_experts
    try:
        call.expect_right()
        ids = read("topk_idx", adopted(call.topk_idx), (torch.int64,), (None, None))
        check_experts(experts, pool.ranks)
        on_host = None
        if not pool.on_device:
            expect_device(pool, topk_idx=ids)
            # The package looks at each id.
            on_host = [*map(torch.from_numpy, counts_of(ids.numpy(), experts, pool.ranks))]
    except Refusal as refusal:
        # It is local: the others cannot be informed here.
        raise invalid("get_dispatch_layout", str(refusal), pool.rank) from None
    stream = CallStream(gpu_of(ids), call.is_async, call.previous_event)
    with stream.inside():
        counted = on_host or _counted(pool, ids, experts, stream.raw)
        per_rank, per_expert, is_in = counted or _count(pool, ids, experts)
        per_domain, domains = None, pool.domains
        if domains > 1:
            in_domain = is_in.view(len(is_in), domains, pool.ranks // domains).any(dim=2)
            per_domain = in_domain.sum(0, dtype=torch.int32)
    counts = per_rank, per_domain, per_expert, is_in
    return call.given_back((*counts, stream.finish((ids,), counts)))


# Tokens per rank and per expert, int32, and the map of ranks.
Counts = tuple[Any, Any, Any]


def _counted(pool: Pool, ids: Any, experts: int, raw: int | None) -> Counts | None:
    """The counts by one kernel, if a communicator is open already on GPUs of one domain; else None."""
    opened = pool.current
    if raw is None or opened is None or pool.domains > 1 or opened.communicator.closed:
        return None
    tokens, ranks, device = ids.shape[0], pool.ranks, ids.device
    per_rank = torch.empty(ranks, dtype=torch.int32, device=device)
    per_expert = torch.empty(experts, dtype=torch.int32, device=device)
    is_in = torch.empty((tokens, ranks), dtype=torch.bool, device=device)
    of_bytes = is_in.view(torch.uint8)
    counted = opened.communicator.count_routing(
        ids.contiguous(), per_rank, per_expert, of_bytes, stream=raw
    )
    # Another thread may wait for all ranks inside of the communicator, and a layout waits for none.
    return (per_rank, per_expert, is_in) if counted else None


def _count(pool: Pool, ids: Any, experts: int) -> Counts:
    tokens, ranks = ids.shape[0], pool.ranks
    # The place behind the last stands for no expert, as do ids that the dispatch will refuse.
    known = ids.clamp(-1, experts).remainder_(experts + 1)
    selected = torch.zeros((tokens, experts + 1), dtype=torch.bool, device=ids.device)
    selected = selected.scatter_(1, known, True)[:, :experts]
    is_in = selected.view(tokens, ranks, experts // ranks).any(dim=2)
    return is_in.sum(0, dtype=torch.int32), selected.sum(0, dtype=torch.int32), is_in


class _OfBuffer(Call):
    """A call of `Buffer` with rows."""

    @property
    def sms(self) -> Any:
        return self.buffer._chosen_sms()

    def record(self) -> Record:
        record = _handles.record_of(self.handle, Record)
        self.pool.expect_own(record.opened)
        return record


class DispatchCall(_OfBuffer, rows.DispatchCall):
    """A dispatch."""

    operation = "Buffer.dispatch"
    # It decides which communicator the call is for: one that cannot be is as none.
    integers = ("num_worst_tokens",)
    zeroes_weights = True
    instead_of_sync = "num_worst_tokens"

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__(given)
        worst, pool = self.num_worst_tokens, self.pool
        self.has_cpu_sync, self.gives_ids = not worst, self.topk_idx is not None
        # With worst-case sizes the output has room for R * M rows.
        self.named_tokens = -(-worst // pool.ranks) if worst and pool.on_device else None

    def is_worst(self, opened: Opened) -> bool:
        return not self.has_cpu_sync and opened.takes("without_sync")

    def expect_equal(self, record: Record) -> None:
        expect_none(topk_idx=self.topk_idx, topk_weights=self.topk_weights)
        expect_integer("expert_alignment", self.expert_alignment, 1)

    def read(self) -> Sizes:
        self.expect_right()
        sizes = self._read_at_once() or self._read_each()
        if not self.pool.on_device:
            self._expect_one_routing(sizes.experts)
        return sizes

    def looks(self) -> Sizes:
        experts = self.num_tokens_per_expert.shape[0]
        return self._sizes(experts, self.topk_idx.shape[1], *self.first.shape)

    def _sizes(self, experts: int, topk: int, tokens: int, hidden: int) -> Sizes:
        named = self.named_tokens
        return sizes_of(experts, topk, hidden, named or first_tokens(tokens), named, False)

    def _read_at_once(self) -> Sizes | None:
        """Takes the arguments, where all are as most callers give them."""
        ranks, alignment = self.pool.ranks, self.expert_alignment
        found = _routing(self, ranks)
        if found is None or self.num_tokens_per_rank is None:
            return None
        tokens, hidden, topk, experts = found
        if type(alignment) is not int or not 1 <= alignment <= MOST:
            return None
        if 0 < self.num_worst_tokens < ranks * tokens:
            return None
        self.take(self.x, None, self.topk_idx, self.topk_weights)
        return self._sizes(experts, topk, tokens, hidden)

    def _read_each(self) -> Sizes:
        x, scales = read_rows(self.x, None, None)
        experts, ids, weights = read_routing(self, len(x), self.pool.ranks)
        router = "is_token_in_rank" if self.topk_idx is None else "topk_idx"
        expect_device(self.pool, x=x, scales=scales, **{router: ids}, topk_weights=weights)
        self.take(x, scales, ids, weights)
        return self._sizes(experts, ids.shape[1], *x.shape)

    def _expect_one_routing(self, experts: int) -> None:
        """Refuses tensors of a routing that contradict each other. The host reads them only where it need not wait."""
        is_in, ranks = self.is_token_in_rank, self.pool.ranks
        per_rank = read("num_tokens_per_rank", self.num_tokens_per_rank, (torch.int32,), (ranks,))
        given = {"is_token_in_rank": is_in, "num_tokens_per_rank": per_rank}
        expect_device(self.pool, x=self.rows, topk_idx=self.ids, **given)
        sums = is_in.sum(0, dtype=torch.int32)
        if not torch.equal(per_rank, sums):
            raise Refusal(
                f"num_tokens_per_rank: found {per_rank.tolist()}; expected the columns' sums of is_token_in_rank, "
                f"{sums.tolist()}"
            )
        _, _, routes = counts_of(self.ids.numpy(), experts, ranks)
        if not torch.equal(is_in, torch.from_numpy(routes)):
            raise Refusal("is_token_in_rank: found another routing than that of topk_idx")


class CombineCall(_OfBuffer, rows.CombineCall):
    """A combine."""

    operation = "Buffer.combine"
    sums_weights = True
    takes_fewer_rows = True


Result = tuple[Any, Any, Any, Any, Any, EventOverlap]


def dispatch(call: DispatchCall, stream: CallStream) -> Result:
    """A dispatch without a handle."""
    opened, received, native = rows.send(call, stream)
    pool, wanted = call.pool, call.num_worst_tokens or received.tokens
    if not pool.on_device and received.tokens > wanted:
        # Each rank's own tokens were below it, so ranks gave different numbers.
        raise invalid(
            "dispatch",
            f"num_worst_tokens: found {wanted} on this rank; expected at least the {received.tokens} tokens that "
            "arrived",
            pool.rank,
        )
    record = Record(opened, native, wanted, not call.is_worst(opened), call.sms)
    # Copies: a handle may live for long, and holds no rows.
    length, device = max(wanted, received.rows) + pool.ranks, call.rows.device
    block = dummy(device, pool.ranks, 1).new_empty(length)
    # The record is found by the memory of the ends.
    beside = {
        "block": block,
        "parts": _PARTS,
        "record": record,
        "columns": pool.ranks if pool.domains == 1 else None,
        "counts": call.gives_ids and call.has_cpu_sync,
    }
    given, (sources, ends), counts = rows.give(call, record, received, stream, beside)
    handle = _make_handle(call, record, fit(sources, wanted), ends)
    per_expert: list[int] = []
    if call.has_cpu_sync:
        if counts is None:
            counts = _sum_over_sources(pool, call.num_tokens_per_expert, stream)
        unit = call.expert_alignment
        per_expert = counts if unit == 1 else [align(count, unit) for count in counts]
    # The allocator does not know the handle's tensors over `block`.
    x, event = rows.finish(call, given, stream, call.is_token_in_rank, block, handle)
    weights = given.weights if call.gives_ids else None
    return x, given.ids, weights, per_expert, handle, event


def replay(call: DispatchCall, stream: CallStream) -> Result:
    """A dispatch by the routing of a handle."""
    record, received = rows.replay(call, stream)
    given, _, _ = rows.give(call, record, received, stream)
    x, event = rows.finish(call, given, stream, None)
    return x, None, None, None, None, event


def _sum_over_sources(pool: Pool, counts: Any, stream: CallStream) -> list[int]:
    """Gives each rank the counts of its experts; returns the sums of what came here. Collective."""
    counts = counts.view(pool.ranks, -1)
    local = counts.shape[1]
    opened = pool.open_counts(local)
    padded = counts.new_zeros((pool.ranks, opened.sizes.hidden))
    padded[:, :local] = counts
    ranks = torch.arange(pool.ranks, device=counts.device)[:, None]
    # The words pass untouched, whatever they are called.
    received, _ = opened.communicator.dispatch(padded.view(torch.float32), ranks, stream=stream.raw)
    sums: list[int] = take(received.x).view(torch.int32)[:, :local].sum(0).tolist()
    return sums


def _make_handle(call: DispatchCall, record: Record, sources: Any, ends: Any) -> tuple[Any, ...]:
    """The tuple of tensors that DeepEP would return. Those that its kernels alone read are dummies of the shape."""
    pool, tokens, is_in, device = (
        call.pool,
        record.native.tokens,
        call.is_token_in_rank,
        ends.device,
    )
    ranks, domains = pool.ranks, pool.domains
    if domains == 1:
        # Only this rank's column is known without another exchange, so all are this one.
        channel = dummy(device, ranks, 1)
        return ends, channel, channel, sources, is_in, dummy(device, tokens, ranks)
    per_domain, per_rank = dummy(device, domains, 1), dummy(device, ranks, 1)
    domain_ends = ends.view(domains, -1)[:, -1].contiguous()
    before = (is_in, per_domain, per_rank, per_domain, domain_ends, per_rank)
    meta = torch.zeros((record.given, 8), dtype=torch.uint8, device=device)
    heads = dummy(device, tokens, domains)
    return (*before, ends, meta, heads, dummy(device, 0, ranks // domains))
