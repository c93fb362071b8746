"""The low latency calls of V1: a block of R * M rows for each local expert.

On GPUs the host waits for nothing where the kernel set allows it. On the CPU a call is its two halves, of which the
hook makes the second: the dispatch is in `halves.py`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from tokenyard import errors

from .. import _handles
from .._arrays import Refusal, has_array, invalid
from .._hooks import Hook
from .._missing import OF_OVERLAP, missing
from .._pool import Dispatch, Opened, Pool
from .._sizes import MOST_DECODE_TOKENS, Sizes, sizes_of
from .._torch import torch
from ..utils.event import EventOverlap
from . import tensors
from .arguments import check_experts, check_ids, check_tokens
from .call import Call
from .streams import CallStream

T = TypeVar("T")
Results = tuple[Any, Any, tuple[Any, ...], EventOverlap, Hook | None]

# The place of the handle's tensor that has the record.
_RANGES = 1


class _LowLatencyCall(Call):
    events = ()

    def expect_right(self) -> None:
        """As of any call. Refuses one that has an event and a hook, too: DeepEP's has one of them."""
        if self.wrong is not None:
            raise Refusal(self.wrong)
        if self.is_async and self.return_recv_hook:
            raise Refusal(
                "async_finish: found True with return_recv_hook; expected at most one of them"
            )


class DispatchCall(_LowLatencyCall):
    """A dispatch: its arguments as they were given, and as they were read."""

    operation = "Buffer.low_latency_dispatch"
    flags = ("async_finish", "use_fp8", "round_scale", "use_ue8m0", "return_recv_hook")
    layout = "packed"
    has_cpu_sync = False
    rows: Any = None
    ids: Any = None

    @property
    def cast(self) -> Literal["fp8", "fp8_round", "fp8_ue8m0"] | None:
        if not self.use_fp8:
            return None
        return "fp8_ue8m0" if self.use_ue8m0 else "fp8_round" if self.round_scale else "fp8"

    @property
    def tokens(self) -> int:
        """M."""
        return self.num_max_dispatch_tokens_per_rank  # type: ignore[no-any-return]

    def looks(self) -> Sizes:
        """The sizes by the looks of the tensors."""
        return _sizes(self.num_experts, self.topk_idx.shape[1], self.x.shape[1], self.tokens)

    def read(self) -> Sizes:
        """Reads the arguments. Raises Refusal."""
        self.expect_right()
        x, ids, ranks, experts = self.x, self.topk_idx, self.pool.ranks, self.num_experts
        if not (isinstance(x, torch.Tensor) and isinstance(ids, torch.Tensor)):
            tensors.expect_tensor("x", x)
            tensors.expect_tensor("topk_idx", ids)
        sizes = _judged(x.dtype, x.shape, ids.dtype, ids.shape, self.tokens, experts, ranks)
        if self.use_ue8m0 and not self.round_scale:
            raise Refusal("use_ue8m0: found True without round_scale; expected both")
        stats = self.cumulative_local_expert_recv_stats
        if stats is not None:
            name = "cumulative_local_expert_recv_stats"
            tensors.read(name, stats, (torch.int32,), (experts // ranks,))
            # The package itself judges where the others lie.
            tensors.expect_device(self.pool, x=x, cumulative_local_expert_recv_stats=stats)
        _expect_wait_stats(self.pool, "dispatch", self.dispatch_wait_recv_cost_stats)
        if x.requires_grad:
            x = x.detach()
        self.rows, self.ids = x.contiguous(), ids.contiguous()
        if not self.pool.on_device:
            self._look_and_copy()
        return sizes

    def _look_and_copy(self) -> None:
        """On the CPU the host looks at values. The caller may write its tensors before the hook is called."""
        tensors.expect_device(self.pool, x=self.rows, topk_idx=self.ids)
        check_ids(self.ids.numpy(), self.num_experts)
        if self.pool.current is not None:
            self.pool.current.expect_room(1)
        self.rows, self.ids = self.rows.clone(), self.ids.clone()


class CombineCall(_LowLatencyCall):
    """A combine."""

    operation = "Buffer.low_latency_combine"
    ignored = ("num_sms", *OF_OVERLAP)
    flags = ("async_finish", "use_logfmt", "zero_copy", "return_recv_hook")


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
    arrays = tensors.take_all(output, _ARRAYS, dtype, record if stays else None)
    last = None
    if not stays:
        *others, last = (None if one is None else torch.empty_like(one) for one in arrays)
        arrays = *others, tensors.anchored(last, record)
    x, counts, source, scales, ranges = arrays
    record.blocks = x.shape
    if scales is not None and not record.opened.takes("packed_forms"):
        # Column-major, as DeepEP's GEMMs read them.
        scales = scales.new_empty(scales.mT.shape).mT
    return x, counts, source, scales, ranges, last


def _fill(
    call: DispatchCall, opened: Opened, arrays: tuple[Any, ...], copied_on: Any, received: Any
) -> None:
    """Copies what does not stay where it arrived, and makes what kernels do not make. `copied_on`: the stream of the
    copies, if there are some."""
    x, counts, source, scales, ranges = arrays
    has_forms, stats = opened.takes("packed_forms"), call.cumulative_local_expert_recv_stats
    if copied_on is not None:
        columns = {"scales": scales.mT} if has_forms and scales is not None else {}
        copies = {"x": x, "expert_counts": counts, "ranges": ranges, "source": source, **columns}
        opened.communicator.copy_out(received, stream=copied_on.raw, **copies)
    if not has_forms:
        source.remainder_(call.tokens)
        if scales is not None:
            scales.copy_(tensors.take(received.scales))
    if stats is not None and not opened.takes("statistics"):
        stats.add_(counts)
    if call.pool.gaps.is_counted:
        call.pool.gaps.add(tensors.take(received.lost))


def _judge(
    x_type: Any, x_shape: Any, ids_type: Any, ids_shape: Any, tokens: int, experts: int, ranks: int
) -> Sizes:
    """The sizes of a dispatch by the looks of its tensors. Raises Refusal."""
    tensors.expect("x", x_type, x_shape, tensors.floats(), (None, None))
    found, hidden = x_shape
    tensors.expect("topk_idx", ids_type, ids_shape, (torch.int64,), (found, None))
    check_tokens(found, "num_max_dispatch_tokens_per_rank", tokens)
    check_experts(experts, ranks)
    return _sizes(experts, ids_shape[1], hidden, tokens)


def _sizes(experts: int, topk: int, hidden: int, tokens: int) -> Sizes:
    return sizes_of(experts, topk, hidden, tokens, tokens, tokens <= MOST_DECODE_TOKENS)


# Nearly every call looks like one before. Numbers of other types are equal to integers.
_judged = functools.lru_cache(maxsize=256, typed=True)(_judge)


def _has_room(opened: Opened, x: Any, tokens: int) -> bool:
    """Whether the arena has room for one more output of a call with this M, beside those that live."""
    sizes = opened.sizes
    # Arrays beside the rows are smaller than an eighth of them.
    most = sizes.experts * tokens * sizes.hidden * x.element_size() * 9 // 8
    return bool(opened.arena_bytes - opened.communicator.held_bytes >= most)


def _expect_wait_stats(pool: Pool, operation: str, stats: Any) -> None:
    """Refuses numbers of nanoseconds that are not one for each rank."""
    if stats is not None:
        tensors.read(f"{operation}_wait_recv_cost_stats", stats, (torch.int64,), (pool.ranks,))


def _expect_statistics(opened: Opened, operation: str) -> None:
    """Refuses waiting times by name where kernels count none."""
    if not opened.takes("statistics"):
        missing(f"Buffer.low_latency_{operation}", f"{operation}_wait_recv_cost_stats")


def dispatch(call: DispatchCall, stream: CallStream) -> Results:
    """The outputs, which are filled in the order of the stream: at once, or when the hook was called."""
    has_hook, stats = call.return_recv_hook, call.cumulative_local_expert_recv_stats
    wait_stats, tokens = call.dispatch_wait_recv_cost_stats, call.tokens

    def send(opened: Opened) -> Any:
        tensors.name_stream(opened, stream)
        if opened.last_rows is not None and not _has_room(opened, call.rows, tokens):
            opened.last_rows = None
        if wait_stats is not None:
            _expect_statistics(opened, "dispatch")
        forms = opened.forms
        no_sync, has_forms = "without_sync" in forms, "packed_forms" in forms
        act = opened.communicator.dispatch_send if has_hook else opened.communicator.dispatch
        return act(
            call.rows,
            call.ids,
            layout="packed",
            cast=call.cast,
            worst_case=no_sync,
            max_tokens=tokens if "max_tokens" in forms else None,
            stream=stream.raw,
            without_sync=no_sync,
            expert_totals=stats if "statistics" in forms else None,
            waited_ns=wait_stats,
            scale_layout="column_major" if has_forms else "row_major",
            source_index="token" if has_forms else "rank_and_token",
        )

    opened, sent = Dispatch(call, send).sent()
    received, native = (None, None) if has_hook else sent
    output = sent.output() if has_hook else received
    # The handle keeps the place in the arena in any case.
    stays = output is not None and (opened.output != "copy" or stream.is_captured)
    opened.lends |= stays
    if output is None:
        # Its place is fixed with the receive alone, so it is received now.
        received, native = sent.recv()
    record = Record(opened, call.ids, native)
    *arrays, memory = _make(call, received or output, stays, record)
    if stays and not stream.is_captured:
        # As in DeepEP, which has two buffers, rows live until the dispatch behind the next, whoever drops them.
        opened.last_rows = arrays[0]
    fill, hook, forms = None, None, opened.forms
    is_added = stats is None or "statistics" in forms
    if not (stays and is_added and "packed_forms" in forms) or call.pool.gaps.is_counted:
        fill = functools.partial(_fill, call, opened, tuple(arrays), None if stays else stream)
    if has_hook:
        hook = _hook(sent, received, record, stream, fill)
    elif fill is not None:
        fill(received)
    event = EventOverlap()
    if stream.is_async:
        inputs = (call.x, call.topk_idx, call.rows, call.ids, stats, wait_stats)
        event = stream.finish(inputs, (*arrays, memory))
    return outputs_of(call, record, arrays, event, hook)


def outputs_of(
    call: DispatchCall, record: Record, arrays: list[Any], event: EventOverlap, hook: Hook | None
) -> Results:
    """The arrays of an output as the caller gets them, with a handle."""
    x, counts, source, scales, ranges = arrays
    packed = x if scales is None else (x, scales)
    handle = (source, ranges, call.tokens, record.blocks[2], call.num_experts)
    return packed, counts, handle, event, hook


def _hook(sent: Any, received: Any, record: Record, stream: CallStream, fill: Any) -> Hook:
    """Receives, unless that is done, and fills the outputs: on the stream of the send, wherever it is called."""
    if fill is not None:
        stream.remember()

    def receive() -> None:
        arrived = received
        if arrived is None:
            arrived, record.native = sent.recv()
        if fill is not None:
            with stream.resumed():
                fill(arrived)

    return Hook(receive)


def arrived(handle: Any) -> Record:
    """The dispatch that a handle stands for. Refuses one whose rows are not there."""
    record = _handles.record_of(handle, Record, _RANGES)
    if record.native is None:
        raise Refusal("handle: found one whose hook was not called; expected its rows")
    return record


def _read_combine(call: CombineCall, record: Record) -> tuple[Any, Any, Any, Any]:
    call.expect_right()
    if call.use_logfmt and call.zero_copy:
        # DeepEP does not take them together.
        raise Refusal("use_logfmt: found True with zero_copy; expected at most one of them")
    shape = record.ids.shape
    ids = tensors.read("topk_idx", call.topk_idx, (torch.int64,), shape).contiguous()
    weights = tensors.read("topk_weights", call.topk_weights, (torch.float32,), shape).contiguous()
    if call.zero_copy:
        if record.buffer is None:
            raise Refusal(
                "zero_copy: found no buffer; expected get_next_low_latency_combine_buffer before it"
            )
        rows = record.buffer
    else:
        rows = tensors.read("x", call.x, tensors.floats(), record.blocks).contiguous()
    out_shape = (shape[0], record.blocks[2])
    given = call.out
    out = (
        rows.new_empty(out_shape)
        if given is None
        else tensors.read("out", given, (rows.dtype,), out_shape)
    )
    if not call.pool.on_device:
        tensors.expect_device(call.pool, x=rows, topk_idx=ids, topk_weights=weights, out=out)
        _expect_same_ids(ids, record.ids)
        if call.return_recv_hook and not call.zero_copy:
            rows = _copy_of_rows(record, rows)
    _expect_wait_stats(call.pool, "combine", call.combine_wait_recv_cost_stats)
    return rows, ids, weights, out


def _expect_same_ids(ids: Any, dispatched: Any) -> None:
    differs = ((ids >= 0) & (ids != dispatched)).nonzero()
    if len(differs):
        token, k = differs[0].tolist()
        raise Refusal(
            f"topk_idx: found expert {int(ids[token, k])} at [{token}, {k}]; expected "
            f"{int(dispatched[token, k])}, as dispatched, or -1 to leave it out"
        )


def _copy_of_rows(record: Record, rows: Any) -> Any:
    """The rows of a combine on the CPU: the caller may write its own before the hook is called."""
    own = torch.empty_like(rows)
    for expert, count in enumerate(record.counts):
        own[expert, :count] = rows[expert, :count]
    return own


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
    factors = tensors.take(arrived.weights)[:, :, None]
    # Rows that are left out may hold anything.
    return torch.where(factors.isnan(), 0, rows * factors).to(rows.dtype)


def waited(opened: Opened, stats: Any, half: Callable[[], T]) -> T:
    """Makes a half of an operation on the CPU. Adds the nanoseconds that it waits for each rank to `[R]` int64, if
    there is one."""
    if stats is None:
        return half()
    before = torch.tensor(opened.communicator.waited_ns())
    result = half()
    with torch.inference_mode():
        stats.add_(torch.tensor(opened.communicator.waited_ns()) - before)
    return result


def _read_or_refuse(call: CombineCall) -> tuple[Record, tuple[Any, ...], bool]:
    """The record, the tensors as they were read, and whether the combine sends weights."""
    opened: Any = None
    pool = call.pool
    try:
        record = arrived(call.handle)
        pool.expect_own(record.opened)
        opened = record.opened
        if not pool.on_device:
            opened.expect_room(2)
        rows, ids, weights, out = _read_combine(call, record)
        sends_weights = "packed_sums" in opened.forms or "round_once" in opened.forms
        if not sends_weights:
            # torch works on them, which raises on this rank alone where they lie apart.
            tensors.expect_device(pool, x=rows, topk_idx=ids, topk_weights=weights)
            weights = torch.where(ids >= 0, weights, torch.nan)
    except Exception as error:
        # Weights that are sent beside the rows come with them, others come before, by a replay.
        is_one = opened is not None and opened.takes("packed_sums")
        pool.refuse(opened, "combine" if is_one else "replay", error, "packed")
    return record, (rows, ids, weights, out), sends_weights


def combine(call: CombineCall, stream: CallStream) -> tuple[Any, EventOverlap, Hook | None]:
    """The output, filled in the order of the stream: at once, or when the hook was called."""
    pool, wait_stats = call.pool, call.combine_wait_recv_cost_stats
    record, (rows, ids, weights, out), sends_weights = _read_or_refuse(call)
    opened = record.opened
    tensors.name_stream(opened, stream)
    if pool.on_device and wait_stats is not None:
        _expect_statistics(opened, "combine")
    communicator = opened.communicator
    gaps = pool.gaps.room(len(ids)) if pool.gaps.is_counted else None
    in_halves = call.return_recv_hook or not pool.on_device
    act: Any = communicator.combine_send if in_halves else communicator.combine
    on_host = None if pool.on_device else wait_stats
    sent = rows if sends_weights else _weigh(record, stream, rows, out, weights)

    def send() -> Any:
        return act(
            record.native,
            sent,
            weighted=sends_weights,
            topk_weights=weights if sends_weights else None,
            topk_idx=ids if sends_weights else None,
            round_once=sends_weights and not call.use_logfmt,
            compress="logfmt10" if call.use_logfmt else None,
            out=out,
            stream=stream.raw,
            without_sync="without_sync" in opened.forms,
            waited_ns=wait_stats if pool.on_device else None,
            missing=gaps,
        )

    pending = waited(opened, on_host, send)
    if gaps is not None:
        stream.remember()

    def receive() -> None:
        waited(opened, on_host, pending.recv)
        with stream.resumed():
            pool.gaps.add(gaps)

    hook = None
    if in_halves:
        hook = pool.hook(receive, opened, 2)
        if not call.return_recv_hook:
            hook = hook()
    else:
        pool.gaps.add(gaps)
    event = EventOverlap()
    if stream.is_async:
        inputs = (call.x, call.topk_idx, call.topk_weights, rows, ids, weights, wait_stats)
        event = stream.finish(inputs, (out,))
    given = out if call.out is None else call.out
    if not pool.on_device and has_array(call.as_given.get("out")):
        given = call.as_given["out"]
    return given, event, hook


def combine_buffer(handle: Any) -> Any:
    """`[El, R*M, H]` bfloat16 that a combine with `zero_copy` reads where it lies: in the arena, if that has room."""
    try:
        record = arrived(handle)
    except Refusal as refusal:
        raise invalid("get_next_low_latency_combine_buffer", str(refusal)) from None
    if record.buffer is None:
        tensors.name_readers(record.opened, CallStream(tensors.gpu_of(record.ids)))
        try:
            memory = record.opened.communicator.combine_input(record.native, "bfloat16")
            record.opened.lends = True
            record.buffer = tensors.take(memory).view(record.blocks)
        except errors.FullError:
            # The others do not know, so it is no error. The combine copies it.
            record.buffer = torch.empty(
                record.blocks, dtype=torch.bfloat16, device=record.ids.device
            )
    return record.buffer
