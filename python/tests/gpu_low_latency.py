"""More of V1's low-latency calls: scales as exponents, calls under way at once, readers of dropped outputs, waits."""

import time

import torch
from gpu_common import (
    CASE,
    difference,
    inputs,
    is_gpu,
    output_mode,
    raised,
    rows_of,
    same,
    synchronize,
    v1,
)
from gpu_v1 import low_latency
from gpu_work import LONG, in_two_threads, on, side_stream, slow
from oracle import Case

import tokenyard

# With a last word of scales that is not full, and with several.
WIDE = Case(2, experts=8, topk=3, hidden=1280, max_tokens=32, tokens=(32, 29), seed=11)
LATE_S = 0.2


def sources_of(case, me, expert):
    return [(source, token) for source, token, _ in case.expert_rows(me, expert)]


def of_all_sizes(case, rows, sources):
    """Rows by 2^-30 to 2^30, one of them zero, and one whose largest value is the largest of FP8 times a power of 2."""
    powers = [2.0 ** (7 * (source + token) % 61 - 30) for source, token in sources]
    rows = rows.float() * torch.tensor(powers, device=rows.device)[:, None]
    for row, (_, token) in enumerate(sources):
        if token == 1:
            rows[row] = 0
        elif token == 2:
            rows[row] = rows[row].clamp(-1, 1)
            rows[row, ::128] = 448 / 64
    return rows.bfloat16()


def cast_by_exponents(rows):
    """FP8 and the exponents of the scales: for each 128 channels that of the least power of two by which the largest
    value becomes no more than 448, in float32."""
    groups = rows.float().view(len(rows), rows.shape[1] // 128, 128)
    largest = groups.abs().amax(2, keepdim=True).clamp(min=1e-4)
    mantissa, exponent = torch.frexp(largest * torch.tensor(1 / 448, dtype=torch.float32))
    exponent = exponent.int() - (mantissa == 0.5).int()
    scaled = groups * ((127 - exponent) << 23).view(torch.float32)
    return scaled.view(rows.shape).to(torch.float8_e4m3fn), exponent[:, :, 0]


def powers_of_two(exponents):
    return ((exponents + 127) << 23).view(torch.float32)


def packed(exponents):
    """Four in a word, the first in its lowest byte; zeros behind the last."""
    rows, columns = exponents.shape
    room = torch.zeros((rows, -(-columns // 4) * 4), dtype=torch.uint8)
    room[:, :columns] = (exponents + 127).to(torch.uint8)
    return room.view(torch.int32)


def scales_of_powers_of_two(world):
    """Bit for bit the casts of an oracle, as float32 and as exponents, at once and in halves."""
    for case in (CASE, WIDE):
        buffer, me = v1(world, low_latency_mode=True), world.rank
        x, idx, _ = inputs(world, case)
        mine = [(me, token) for token in range(len(x))]
        x = of_all_sizes(case, x, mine)
        for use_ue8m0 in (False, True):
            for has_hook in (False, True):
                (rows, scales), counts, _, _, hook = buffer.low_latency_dispatch(
                    x,
                    idx,
                    case.max_tokens,
                    case.experts,
                    round_scale=True,
                    use_ue8m0=use_ue8m0,
                    return_recv_hook=has_hook,
                )
                if has_hook:
                    hook()
                assert counts.tolist() == case.expert_counts(me)
                most, columns = case.ranks * case.max_tokens, scales.shape[2]
                assert scales.stride()[:2] == (most * columns, 1)
                assert columns == 1 or scales.stride()[2] == most
                for expert, count in enumerate(case.expert_counts(me)):
                    sources = sources_of(case, me, expert)
                    every = of_all_sizes(case, rows_of(world, case, sources), sources)
                    codes, exponents = cast_by_exponents(every.cpu())
                    same(rows[expert, :count].cpu(), codes)
                    wanted = packed(exponents) if use_ue8m0 else powers_of_two(exponents)
                    # A column alone counts as contiguous, whatever its stride is.
                    found = scales[expert, :count].cpu()
                    same(found.clone(memory_format=torch.contiguous_format), wanted)
        buffer.destroy()


class Batch:
    """A micro-batch in halves: its rows are those of the case plus a number."""

    def __init__(self, world, buffer, number):
        self.world, self.buffer = world, buffer
        self.x, self.idx, self.weights = inputs(world, CASE)
        self.number = number
        self.x = self.x + number

    def send(self):
        self.rows, self.counts, self.handle, _, hook = self.buffer.low_latency_dispatch(
            self.x, self.idx, CASE.max_tokens, CASE.experts, use_fp8=False, return_recv_hook=True
        )
        return hook

    def check_rows(self):
        me = self.world.rank
        assert self.counts.tolist() == CASE.expert_counts(me)
        for expert, count in enumerate(CASE.expert_counts(me)):
            expected = rows_of(self.world, CASE, sources_of(CASE, me, expert))
            same(self.rows[expert, :count], expected + self.number)

    def give_back(self):
        self.out, _, hook = self.buffer.low_latency_combine(
            self.rows, self.idx, self.weights, self.handle, return_recv_hook=True
        )
        return hook

    def check_sums(self):
        factor = torch.where(self.idx >= 0, self.weights, 0).sum(1, keepdim=True)
        assert difference(self.out, self.x.float() * factor) < 1e-5


def sends_under_way_at_once(world):
    """Two dispatches are sent before the first is received, and two combines so; hooks run in the order of sends."""
    buffer = v1(world, low_latency_mode=True)
    batches = [Batch(world, buffer, number) for number in range(2)]
    for _ in range(5):
        for send, check in ((Batch.send, Batch.check_rows), (Batch.give_back, Batch.check_sums)):
            hooks = [send(batch) for batch in batches]
            for hook in hooks:
                hook()
            for batch in batches:
                check(batch)
    buffer.destroy()


def two_threads(world):
    """Two micro-batches, a thread and a stream each, whose halves alternate."""
    buffer = v1(world, low_latency_mode=True)

    def work(number, in_turn):
        batch = Batch(world, buffer, number)
        for _ in range(10):
            in_turn(in_turn(batch.send))
            batch.check_rows()
            in_turn(in_turn(batch.give_back))
            batch.check_sums()

    in_two_threads(world, work)
    buffer.destroy()


def poisoned_arena(world):
    """Outputs that a side stream still reads when they are dropped, and the next dispatch comes."""
    with output_mode("arena"):
        for way in ({}, {"async_finish": True}, {"return_recv_hook": True}):
            check_poisoned(world, way)


def check_poisoned(world, way):
    buffer, me = v1(world, low_latency_mode=True), world.rank
    x, idx, _ = inputs(world, CASE)
    side = side_stream()

    def dispatch(value):
        rows, _, _, event, hook = buffer.low_latency_dispatch(
            x + value, idx, CASE.max_tokens, CASE.experts, use_fp8=False, **way
        )
        if hook is not None:
            hook()
        elif way:
            event.current_stream_wait()
        return rows

    # The buffer learns of the stream by a call on it.
    with on(side):
        dispatch(0)
    synchronize()
    copies = []
    for value in range(1, 20):
        rows = dispatch(value)
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with on(side):
            slow(LONG // 4)
            copies.append((value, rows.clone()))
        del rows
        # Poison, in the same place if that were free.
        dispatch(-1000)
    synchronize()
    expected = [rows_of(world, CASE, sources_of(CASE, me, e)) for e in range(CASE.local)]
    wrong = [
        value
        for value, copy in copies
        if not all(
            torch.equal(block[: len(rows)], rows + value)
            for block, rows in zip(copy, expected, strict=True)
        )
    ]
    assert not wrong, f"{way}; overwritten before they were read: {wrong}"
    buffer.destroy()


def waited(world, call, stats):
    """The time that a call in halves adds to the waiting times, where rank 1 comes late to it."""
    stats.zero_()
    synchronize()
    world.barrier("together")
    if world.rank == 1:
        time.sleep(LATE_S)
    call()()
    synchronize()
    return stats.tolist()


def check_waits(world, name):
    """Rank 0 has waited for the rank that came late, and that one for none as long. Where kernels count no waits, they
    are refused by name."""
    buffer = v1(world, low_latency_mode=True)
    x, idx, weights = inputs(world, CASE)
    options = {"use_fp8": False, "return_recv_hook": True}
    arguments = (x, idx, CASE.max_tokens, CASE.experts)
    stats = torch.zeros(CASE.ranks, dtype=torch.int64, device=x.device)
    rows, _, handle, _, hook = buffer.low_latency_dispatch(*arguments, **options)
    hook()

    def dispatch():
        return buffer.low_latency_dispatch(
            *arguments, dispatch_wait_recv_cost_stats=stats, **options
        )[-1]

    def combine():
        return buffer.low_latency_combine(
            rows,
            idx,
            weights,
            handle,
            return_recv_hook=True,
            combine_wait_recv_cost_stats=stats,
        )[-1]

    call = {"dispatch": dispatch, "combine": combine}[name]
    if not buffer._pool.current.takes("statistics"):
        error = raised(call)
        assert "waiting times per source rank" in str(error), error
        buffer.destroy()
        return
    # Kernels load where they run first.
    call()()
    found = waited(world, call, stats)
    least = 1e9 * LATE_S / 2
    assert found[1] >= least if world.rank == 0 else found[0] < least, found
    buffer.destroy()


def waits_of_a_dispatch_in_halves(world):
    check_waits(world, "dispatch")


def waits_of_a_combine_in_halves(world):
    check_waits(world, "combine")


def refused_by_the_communicator_of_the_call(world):
    """As in V2: rows of each width have a communicator, and a rank refuses over that of its call. It raises at once;
    where the host waits for nothing, the other rank has gone on, and learns it in a later call."""
    buffer = v1(world, low_latency_mode=True)
    x, idx, weights = inputs(world, CASE)

    def call(ids, width):
        rows_here = x[:, :width].contiguous()
        out = torch.empty_like(rows_here)
        rows, _, handle, _, _ = buffer.low_latency_dispatch(
            rows_here, ids, CASE.max_tokens, CASE.experts, use_fp8=False
        )
        buffer.low_latency_combine(rows, ids, weights, handle, out=out)
        return out

    widths = (CASE.hidden, CASE.hidden // 2)
    for width in widths:
        call(idx, width)
    synchronize()
    start = time.monotonic()
    for width in widths:
        if is_gpu() and world.rank == 0:
            later_error(lambda width=width: call(idx, width))
        else:
            error = raised(lambda width=width: call(idx.float() if world.rank else idx, width))
            assert "topk_idx: found" in str(error), error
    assert time.monotonic() - start < 60
    if not is_gpu():
        total = torch.where(idx >= 0, weights, 0).sum(1, keepdim=True)
        found = call(idx, CASE.hidden)
        torch.testing.assert_close(found.float(), x * total, rtol=0.05, atol=0.05)
        buffer.destroy()
        return
    opened = [each.communicator for each in buffer._pool._opened.values()]
    assert "topk_idx: found" in str(raised(buffer.destroy)), "what ended the first one"
    assert len(opened) == 2
    assert all(each.closed for each in opened)
    buffer.destroy()


def rows_for_two_dispatches(world):
    """Rows that are dropped stay whole until the dispatch behind the next one, as in DeepEP's two buffers. Where the
    arena has no room for that, the next dispatch has their place."""
    buffer = v1(world, low_latency_mode=True)
    x, idx, _ = inputs(world, CASE)

    def dispatch(value):
        rows, *_ = buffer.low_latency_dispatch(
            x + value, idx, CASE.max_tokens, CASE.experts, use_fp8=False
        )
        return rows.data_ptr(), rows

    places = [dispatch(value)[0] for value in range(4)]
    assert len(set(places[:2])) == len(set(places[2:])) == 2, places
    opened = next(one for one in buffer._pool._opened.values() if one.last_rows is not None)
    alive, most = [], CASE.experts * CASE.max_tokens * CASE.hidden * x.element_size() * 9 // 8
    while opened.arena_bytes - opened.communicator.held_bytes >= most:
        alive.append(dispatch(1))
    alive.pop()
    for value in range(3):
        place = dispatch(value)[0]
        assert place not in [place for place, _ in alive]
    alive.clear()
    buffer.destroy()
    assert opened.last_rows is None


def outputs_of_every_mode(world):
    """Packed rows in the arena, as `auto` gives them, or in memory of torch, and their combines."""
    for mode in ("copy", "arena"):
        with output_mode(mode):
            low_latency(world)


def later_error(call):
    """The error of one of several calls, of which the first one fails on the device."""
    for _ in range(100):
        try:
            call()
            synchronize()
        except tokenyard.Error as error:
            return error
    raise AssertionError("no call failed")


CHECKS = [
    refused_by_the_communicator_of_the_call,
    scales_of_powers_of_two,
    sends_under_way_at_once,
    two_threads,
    poisoned_arena,
    rows_for_two_dispatches,
    outputs_of_every_mode,
    waits_of_a_dispatch_in_halves,
    waits_of_a_combine_in_halves,
]
