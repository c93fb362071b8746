"""The low latency calls of V1: a block of R * M rows for each local expert.

On GPUs the host waits for nothing where the kernel set allows it. On the CPU a call is its two halves: `halves.py`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenyard import errors

from .. import _handles
from .._arrays import Refusal, Tensor, invalid
from .._gaps import Gaps
from .._hooks import Hook
from .._missing import missing
from .._pool import Opened, Pool, mode_of
from .._sizes import MOST_DECODE_TOKENS, Sizes, sizes_of
from .._torch import torch
from ..utils.event import EventOverlap
from .arguments import check_experts, check_tokens
from .judged import Judged
from .streams import CallStream
from .tensors import (
    anchored,
    expect,
    expect_device,
    expect_tensor,
    floats,
    gpu_of,
    name_readers,
    name_stream,
    read,
    stream_of,
    take,
    take_all,
)

# The place of the handle's tensor that has the record.
_RANGES = 1

_MODE = mode_of("packed", False)


def _expect_one_end(call: "DispatchCall | CombineCall") -> None:
    """Refuses a call that has an event and a hook: DeepEP's has one of them."""
    if call.is_async and call.has_hook:
        raise Refusal(
            "async_finish: found True with return_recv_hook; expected at most one of them"
        )


@dataclass
class DispatchCall(Judged):
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
    is_async: bool
    has_hook: bool
    wrong: str | None

    @property
    def cast(self) -> Literal["fp8", "fp8_round", "fp8_ue8m0"] | None:
        if not self.use_fp8:
            return None
        return "fp8_ue8m0" if self.use_ue8m0 else "fp8_round" if self.round_scale else "fp8"


@dataclass
class CombineCall(Judged):
    """The arguments of a combine, as they were given."""

    x: Tensor
    topk_idx: Tensor
    topk_weights: Tensor
    handle: Any
    zero_copy: bool
    out: Tensor | None
    is_async: bool
    # Whether the caller may write `x` before the rows are summed.
    has_hook: bool
    wait_stats: Tensor | None
    use_logfmt: bool
    wrong: str | None

    @property
    def compress(self) -> Literal["logfmt10"] | None:
        return "logfmt10" if self.use_logfmt else None

    def check_format(self) -> None:
        """Refuses what DeepEP does not take together."""
        _expect_one_end(self)
        if self.use_logfmt and self.zero_copy:
            raise Refusal("use_logfmt: found True with zero_copy; expected at most one of them")


@dataclass
class Record:
    """The dispatch that a handle stands for. `native` comes with the rows."""

    # On the CPU it comes with the rows, too.
    opened: Any
    ids: Any
    native: Any
    # The shape of the rows.
    blocks: tuple[int, ...] = ()
    # On the CPU: the rows of each local expert.
    counts: list[int] = field(default_factory=list)
    # The input of a combine with `zero_copy`.
    buffer: Any = None


# The arrays of an output. The record of a handle belongs to the last one.
_ARRAYS = ("x", "expert_counts", "source", "scales", "ranges")


def _make(call: DispatchCall, output: Any, stays: bool, record: Record) -> tuple[Any, ...]:
    """The arrays of an output as the caller gets them: in the arena where it stays there, else in memory of torch.

    They exist before rows arrive: `output` may be on its way. The last item is the tensor whose memory the array of
    ranges has: the allocator does not know the latter.
    """
    dtype = torch.float8_e4m3fn if call.use_fp8 else call.x.dtype
    arrays = take_all(output, _ARRAYS, dtype, record if stays else None)
    last = None
    if not stays:
        *others, last = (None if one is None else torch.empty_like(one) for one in arrays)
        arrays = *others, anchored(last, record)
    x, counts, source, scales, ranges = arrays
    record.blocks = x.shape
    if scales is not None and not record.opened.takes("packed_forms"):
        # Column-major, as DeepEP's GEMMs read them.
        scales = scales.new_empty(scales.mT.shape).mT
    return x, counts, source, scales, ranges, last


@dataclass
class Filling:
    """The work that is left for the arrays of an output once its rows are there."""

    call: DispatchCall
    opened: Opened
    stays: bool
    arrays: tuple[Any, ...]
    gaps: Gaps

    def run(self, received: Any, stream: CallStream) -> None:
        """Copies what does not stay where it arrived, and makes what kernels do not make."""
        x, counts, source, scales, ranges = self.arrays
        has_forms = self.opened.takes("packed_forms")
        if not self.stays:
            columns = {}
            if has_forms and scales is not None:
                columns["scales"] = scales.mT
            self.opened.communicator.copy_out(
                received,
                x=x,
                expert_counts=counts,
                ranges=ranges,
                source=source,
                stream=stream.raw,
                **columns,
            )
        if not has_forms:
            source.remainder_(self.call.tokens)
            if scales is not None:
                scales.copy_(take(received.scales))
        if self.call.stats is not None and not self.opened.takes("statistics"):
            self.call.stats.add_(counts)
        if self.gaps.is_counted:
            self.gaps.add(take(received.lost))


def _filling(
    call: DispatchCall, opened: Opened, stays: bool, arrays: tuple[Any, ...], gaps: Gaps
) -> Filling | None:
    """The work that is left, if there is some."""
    forms = opened.forms
    is_added = call.stats is None or "statistics" in forms
    if stays and is_added and "packed_forms" in forms and not gaps.is_counted:
        return None
    return Filling(call, opened, stays, arrays, gaps)


def _judge(
    x_type: Any, x_shape: Any, ids_type: Any, ids_shape: Any, tokens: int, experts: int, ranks: int
) -> Sizes:
    """The sizes of a dispatch by the looks of its tensors. Raises Refusal."""
    expect("x", x_type, x_shape, floats(), (None, None))
    found, hidden = x_shape
    expect("topk_idx", ids_type, ids_shape, (torch.int64,), (found, None))
    check_tokens(found, "num_max_dispatch_tokens_per_rank", tokens)
    check_experts(experts, ranks)
    return _sizes(experts, ids_shape[1], hidden, tokens)


def _sizes(experts: int, topk: int, hidden: int, tokens: int) -> Sizes:
    return sizes_of(experts, topk, hidden, tokens, tokens, tokens <= MOST_DECODE_TOKENS)


# Nearly every call looks like one before. Numbers of other types are equal to integers.
_judged = functools.lru_cache(maxsize=256, typed=True)(_judge)


def read_dispatch(pool: Pool, call: DispatchCall) -> tuple[Sizes, tuple[Any, Any]]:
    call.expect_right()
    _expect_one_end(call)
    x, ids, ranks = call.x, call.topk_idx, pool.ranks
    if not (isinstance(x, torch.Tensor) and isinstance(ids, torch.Tensor)):
        expect_tensor("x", x)
        expect_tensor("topk_idx", ids)
    sizes = _judged(x.dtype, x.shape, ids.dtype, ids.shape, call.tokens, call.experts, ranks)
    if call.use_ue8m0 and not call.round_scale:
        raise Refusal("use_ue8m0: found True without round_scale; expected both")
    if call.stats is not None:
        local = call.experts // ranks
        read("cumulative_local_expert_recv_stats", call.stats, (torch.int32,), (local,))
        # The package itself judges where the others lie.
        expect_device(pool, x=x, cumulative_local_expert_recv_stats=call.stats)
    expect_wait_stats(pool, "dispatch", call.wait_stats)
    if x.requires_grad:
        x = x.detach()
    return sizes, (x.contiguous(), ids.contiguous())


def _has_room(opened: Opened, x: Any, tokens: int) -> bool:
    """Whether the arena has room for one more output of a call with this M, beside those that live."""
    sizes = opened.sizes
    # Arrays beside the rows are smaller than an eighth of them.
    most = sizes.experts * tokens * sizes.hidden * x.element_size() * 9 // 8
    return bool(opened.arena_bytes - opened.communicator.held_bytes >= most)


def expect_wait_stats(pool: Pool, operation: str, stats: Any) -> None:
    """Refuses numbers of nanoseconds that are not one for each rank."""
    if stats is not None:
        read(f"{operation}_wait_recv_cost_stats", stats, (torch.int64,), (pool.ranks,))


def _expect_statistics(opened: Opened, operation: str) -> None:
    """Refuses waiting times by name where kernels count none."""
    if not opened.takes("statistics"):
        missing(f"Buffer.low_latency_{operation}", f"{operation}_wait_recv_cost_stats")


def dispatch(
    pool: Pool, call: DispatchCall
) -> tuple[Any, Any, tuple[Any, ...], EventOverlap, Hook | None]:
    """The outputs, which are filled in the order of the stream: at once, or when the hook was called."""
    stream = stream_of(pool, call, (None, call.is_async))
    with stream.inside():
        return _dispatch(pool, call, stream)


def _dispatch(
    pool: Pool, call: DispatchCall, stream: CallStream
) -> tuple[Any, Any, tuple[Any, ...], EventOverlap, Hook | None]:
    has_hook = call.has_hook

    def send(opened: Opened, arrays: tuple[Any, Any]) -> Any:
        name_stream(opened, stream)
        if opened.last_rows is not None and not _has_room(opened, arrays[0], call.tokens):
            opened.last_rows = None
        if call.wait_stats is not None:
            _expect_statistics(opened, "dispatch")
        forms = opened.forms
        no_sync, has_forms = "without_sync" in forms, "packed_forms" in forms
        act = opened.communicator.dispatch_send if has_hook else opened.communicator.dispatch
        sent: Any = act(
            *arrays,
            layout="packed",
            cast=call.cast,
            worst_case=no_sync,
            max_tokens=call.tokens if "max_tokens" in forms else None,
            stream=stream.raw,
            without_sync=no_sync,
            expert_totals=call.stats if "statistics" in forms else None,
            waited_ns=call.wait_stats,
            scale_layout="column_major" if has_forms else "row_major",
            source_index="token" if has_forms else "rank_and_token",
        )
        return arrays, sent

    opened, ((x, ids), sent) = pool.dispatch(
        lambda: read_dispatch(pool, call),
        send,
        _MODE,
        lambda: _sizes(call.experts, call.topk_idx.shape[1], call.x.shape[1], call.tokens),
    ).sent()
    received, native = (None, None) if has_hook else sent
    output = sent.output() if has_hook else received
    # The handle keeps the place in the arena in any case.
    stays = output is not None and (opened.output != "copy" or stream.is_captured)
    opened.lends |= stays
    if output is None:
        # Its place is fixed with the receive alone, so it is received now.
        received, native = sent.recv()
    record = Record(opened, ids, native)
    *arrays, memory = _make(call, received or output, stays, record)
    if stays and not stream.is_captured:
        # As in DeepEP, which has two buffers, rows live until the dispatch behind the next, whoever drops them.
        opened.last_rows = arrays[0]
    filling = _filling(call, opened, stays, tuple(arrays), pool.gaps)
    hook = None
    if has_hook:
        hook = _hook(sent, received, filling, record, stream)
    elif filling is not None:
        filling.run(received, stream)
    event = EventOverlap()
    if stream.is_async:
        inputs = (call.x, call.topk_idx, x, ids, call.stats, call.wait_stats)
        event = stream.finish(inputs, (*arrays, memory))
    rows, counts, source, scales, ranges = arrays
    packed = rows if scales is None else (rows, scales)
    handle = (source, ranges, call.tokens, record.blocks[2], call.experts)
    return packed, counts, handle, event, hook


def _hook(
    sent: Any, received: Any, filling: Filling | None, record: Record, stream: CallStream
) -> Hook:
    """Receives, unless that is done, and fills the outputs: on the stream of the send, wherever it is called."""
    if filling is not None:
        stream.remember()

    def receive() -> None:
        arrived = received
        if arrived is None:
            arrived, record.native = sent.recv()
        if filling is not None:
            with stream.resumed():
                filling.run(arrived, stream)

    return Hook(receive)


def arrived(handle: Any) -> Record:
    """The dispatch that a handle stands for. Refuses one whose rows are not there."""
    record = _handles.record_of(handle, Record, _RANGES)
    if record.native is None:
        raise Refusal("handle: found one whose hook was not called; expected its rows")
    return record


def read_combine(call: CombineCall, record: Record) -> tuple[Any, Any, Any, Any]:
    call.expect_right()
    call.check_format()
    shape = record.ids.shape
    ids = read("topk_idx", call.topk_idx, (torch.int64,), shape).contiguous()
    weights = read("topk_weights", call.topk_weights, (torch.float32,), shape).contiguous()
    if call.zero_copy:
        if record.buffer is None:
            raise Refusal(
                "zero_copy: found no buffer; expected get_next_low_latency_combine_buffer before it"
            )
        rows = record.buffer
    else:
        rows = read("x", call.x, floats(), record.blocks).contiguous()
    out_shape = (shape[0], record.blocks[2])
    given = call.out
    out = (
        rows.new_empty(out_shape) if given is None else read("out", given, (rows.dtype,), out_shape)
    )
    return rows, ids, weights, out


def _weigh(record: Record, stream: CallStream, rows: Any, sent: Any, weights: Any) -> Any:
    """Rows times their weights, at the owner: for kernel sets whose combine takes no weights itself.

    A replay brings the weights, NaN where a row is left out; the rows `sent` with them are of no use.
    """
    communicator, native = record.opened.communicator, record.native
    arrived: Any = communicator.replay(
        native,
        sent,
        weights,
        stream=stream.raw,
        without_sync=record.opened.takes("without_sync"),
    )
    factors = take(arrived.weights)[:, :, None]
    # Rows that are left out may hold anything.
    return torch.where(factors.isnan(), 0, rows * factors).to(rows.dtype)


def combine(pool: Pool, call: CombineCall) -> tuple[Any, EventOverlap, Callable[[], None] | None]:
    """The output, filled in the order of the stream: at once, or when the hook was called."""
    stream = stream_of(pool, call, (None, call.is_async))
    with stream.inside():
        return _combine(pool, call, stream)


def _combine(
    pool: Pool, call: CombineCall, stream: CallStream
) -> tuple[Any, EventOverlap, Callable[[], None] | None]:
    opened = None
    try:
        record = arrived(call.handle)
        pool.expect_own(record.opened)
        opened = record.opened
        rows, ids, weights, out = read_combine(call, record)
        expect_wait_stats(pool, "combine", call.wait_stats)
        sends_weights = "packed_sums" in opened.forms or "round_once" in opened.forms
        if not sends_weights:
            # torch works on them, which raises on this rank alone where they lie apart.
            expect_device(pool, x=rows, topk_idx=ids, topk_weights=weights)
            weights = torch.where(ids >= 0, weights, torch.nan)
    except Exception as error:
        # Weights that are sent beside the rows come with them, others come before, by a replay.
        is_one = opened is not None and opened.takes("packed_sums")
        pool.refuse(opened, "combine" if is_one else "replay", error, "packed")
    name_stream(opened, stream)
    if call.wait_stats is not None:
        _expect_statistics(opened, "combine")
    communicator, gaps = opened.communicator, pool.gaps.room(len(ids))
    act: Any = communicator.combine_send if call.has_hook else communicator.combine
    pending = act(
        record.native,
        rows if sends_weights else _weigh(record, stream, rows, out, weights),
        weighted=sends_weights,
        topk_weights=weights if sends_weights else None,
        topk_idx=ids if sends_weights else None,
        round_once=sends_weights and not call.use_logfmt,
        compress=call.compress,
        out=out,
        stream=stream.raw,
        without_sync="without_sync" in opened.forms,
        waited_ns=call.wait_stats,
        missing=gaps,
    )
    if gaps is not None:
        stream.remember()

    def receive() -> None:
        pending.recv()
        with stream.resumed():
            pool.gaps.add(gaps)

    if not call.has_hook:
        pool.gaps.add(gaps)
    event = EventOverlap()
    if stream.is_async:
        inputs = (call.x, call.topk_idx, call.topk_weights, rows, ids, weights, call.wait_stats)
        event = stream.finish(inputs, (out,))
    hook = Hook(receive) if call.has_hook else None
    return (out if call.out is None else call.out), event, hook


def combine_buffer(handle: Any) -> Any:
    """`[El, R*M, H]` bfloat16 that a combine with `zero_copy` reads where it lies: in the arena, if that has room."""
    try:
        record = arrived(handle)
    except Refusal as refusal:
        raise invalid("get_next_low_latency_combine_buffer", str(refusal)) from None
    if record.buffer is None:
        name_readers(record.opened, CallStream(gpu_of(record.ids), (None, False)))
        try:
            memory = record.opened.communicator.combine_input(record.native, "bfloat16")
            record.opened.lends = True
            record.buffer = take(memory).view(record.blocks)
        except errors.FullError:
            # The others do not know, so it is no error. The combine copies it.
            record.buffer = torch.empty(
                record.blocks, dtype=torch.bfloat16, device=record.ids.device
            )
    return record.buffer
