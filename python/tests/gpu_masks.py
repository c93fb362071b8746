"""Ranks that low-latency calls and graphs leave out: by hand, and since they were killed or stopped."""

import contextlib
import os
import pathlib
import signal
import tempfile
import time

import torch
from gpu_common import CASE, device_of, difference, inputs, raised, rows_of, same, shared, v1
from gpu_kill import answers_of_others
from oracle import Case

import tokenyard
from tokenyard import errors

NEEDS_GPUS = True
# Ranks share GPUs and take turns, so an operation of all of them takes long.
WORLD = 'on_failure = "mask"\ndeadline_ms = 6000\nlate_ms = 120000'
FOUR = Case(4, experts=32, topk=6, hidden=512, max_tokens=64, tokens=(64, 61, 0, 33), seed=7)
LOST = 1
# How late a live rank comes, and how long the other waits for it.
LATE_S = 2
MASK_AFTER = "mask_after_ms = 300"
PHASES = ("idle", "dispatch_send", "dispatch_recv", "combine_send", "combine_recv", "graph")
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
# After a loss: until all ranks have left the lost one out.
STEPS = 4


@contextlib.contextmanager
def masking(world, folder, keys=""):
    """A world of the same ranks whose losses are masked, and its config in the environment, with more keys of the
    kernels."""
    path, before = pathlib.Path(folder) / f"{world.rank}.toml", os.environ.get("TOKENYARD_CONFIG")
    path.write_text(shared("low_latency", device_of(world).index, WORLD, keys))
    os.environ["TOKENYARD_CONFIG"] = str(path)
    try:
        with tokenyard.World(
            world.rank,
            world.ranks,
            exchange=lambda mine: world.all_gather("masking world", mine),
            local_rank=world.rank,
            config=tokenyard.Config.load(path),
        ) as its:
            yield its
    finally:
        del os.environ["TOKENYARD_CONFIG"]
        if before is not None:
            os.environ["TOKENYARD_CONFIG"] = before


class Steps:
    """A dispatch and its combine, in calls and in a graph that was captured when no rank was left out."""

    def __init__(self, world, case):
        self.world, self.case = world, case
        self.buffer = v1(world, low_latency_mode=True, enable_shrink=True)
        self.x, self.idx, self.weights = inputs(world, case)
        self.out = torch.empty_like(self.x)
        for _ in range(3):
            self.step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        self.seen = torch.full_like(self.buffer.left_out, -1)
        with torch.cuda.graph(self.graph):
            self.captured = self.step()
            # A graph may act on what its own operations lack.
            self.seen.copy_(self.buffer.left_out)

    def step(self, at=lambda phase: None):
        """Calls `at` where the step enters a phase."""
        at("dispatch_send")
        rows, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            self.x,
            self.idx,
            self.case.max_tokens,
            self.case.experts,
            use_fp8=False,
            return_recv_hook=True,
        )
        at("dispatch_recv")
        hook()
        at("combine_send")
        _, _, hook = self.buffer.low_latency_combine(
            rows, self.idx, self.weights, handle, out=self.out, return_recv_hook=True
        )
        at("combine_recv")
        hook()
        at("idle")
        return rows, counts

    def replay(self):
        self.graph.replay()
        return self.captured

    def left_out(self):
        status = torch.full((self.world.ranks,), 7, dtype=torch.int32, device=self.x.device)
        self.buffer.low_latency_query_mask_buffer(status)
        return status.tolist()

    def check(self, sources):
        """Rows of these ranks only, and sums of their experts only."""
        assert self.left_out() == [int(r not in sources) for r in range(self.world.ranks)]
        for call in (self.step, self.replay, self.step, self.replay):
            self.out.fill_(torch.nan)
            self.buffer.left_out.zero_()
            self.check_step(sources, *call())
            assert self.buffer.left_out.item() == self.gaps(sources)
            if call == self.replay:
                assert self.seen.item() == self.gaps(sources)
        torch.cuda.synchronize()

    def gaps(self, sources):
        """The number of ranks that the step's dispatch lacks, and of experts that its sums lack."""
        others = [rank for rank in range(self.world.ranks) if rank not in sources]
        rank_of = torch.where(self.idx >= 0, self.idx // self.case.local, -1)
        return len(others) + sum(int((rank_of == rank).sum()) for rank in others)

    def check_step(self, sources, rows, counts):
        self.check_rows(sources, rows, counts)
        self.check_sums(sources)

    def check_rows(self, sources, rows, counts):
        case, me = self.case, self.world.rank
        wanted = [
            [(source, token) for source, token, _ in case.expert_rows(me, e) if source in sources]
            for e in range(case.local)
        ]
        assert counts.tolist() == [len(of_expert) for of_expert in wanted]
        for expert, of_expert in enumerate(wanted):
            same(rows[expert, : len(of_expert)], rows_of(self.world, case, of_expert))

    def check_sums(self, sources):
        rank_of = torch.where(self.idx >= 0, self.idx // self.case.local, -1)
        factors = sum(torch.where(rank_of == rank, self.weights, 0) for rank in sources)
        assert difference(self.out, self.x.float() * factors.sum(1, keepdim=True)) < 1e-5


def by_hand(world):
    """The other rank is left out; both ranks then take it back, together or each the other."""
    with tempfile.TemporaryDirectory() as folder, masking(world, folder) as its:
        steps = Steps(its, CASE)
        everyone, other = set(range(its.ranks)), 1 - its.rank
        for take_back in (
            steps.buffer.low_latency_clean_mask_buffer,
            lambda: steps.buffer.low_latency_update_mask_buffer(other, False),
        ):
            steps.check(everyone)
            its.barrier("everyone")
            steps.buffer.low_latency_update_mask_buffer(other, True)
            steps.check({its.rank})
            its.barrier("alone")
            take_back()
        steps.check(everyone)
        check_queries(steps, other)
        check_wrong_ranks(steps, other)
        steps.captured = None
        steps.buffer.destroy()


def check_queries(steps, other):
    """A query between a send and its hook tells the masks of now. In a capture all of it is refused, and the capture
    goes on."""
    steps.step(at=lambda phase: steps.left_out() if phase.endswith("recv") else None)
    x, case, buffer = steps.x, steps.case, steps.buffer
    status, found = torch.zeros(steps.world.ranks, dtype=torch.int32, device=x.device), x * 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in (
            lambda: buffer.low_latency_query_mask_buffer(status),
            lambda: buffer.low_latency_update_mask_buffer(other, True),
            buffer.low_latency_clean_mask_buffer,
        ):
            error = raised(call)
            assert "found a graph being captured" in str(error), error
        found.add_(x)
    graph.replay()
    torch.cuda.synchronize()
    same(found, x)
    steps.check(set(range(case.ranks)))


def check_wrong_ranks(steps, other):
    """No rank that cannot be is masked, here, or taken back, on both ranks; and nothing else changes."""
    update = steps.buffer.low_latency_update_mask_buffer
    for wrong in (-1, 2, 2**70, 1.5, "4"):
        error = raised(lambda wrong=wrong: update(wrong, True))
        assert isinstance(error, errors.InvalidInputError), repr(error)
        error = raised(lambda wrong=wrong: update(wrong if steps.world.rank == 1 else other, False))
        expected = (errors.RefusedError, errors.InvalidInputError)[steps.world.rank]
        assert isinstance(error, expected), repr(error)
    assert "mask: found 'yes'" in str(raised(lambda: update(other, "yes")))
    steps.check(set(range(steps.case.ranks)))


def too_late(world):
    """A live rank comes later than `mask_after_ms`. The other goes on without it, and then it without the other; both
    take each other back together."""
    everyone = set(range(world.ranks))
    with tempfile.TemporaryDirectory() as folder, masking(world, folder, MASK_AFTER) as its:
        steps = Steps(its, CASE)

        def check_together():
            for call in (steps.step, steps.replay, steps.step, steps.replay):
                steps.out.fill_(torch.nan)
                torch.cuda.synchronize()
                its.barrier("together")
                steps.check_step(everyone, *call())
            assert not any(steps.left_out())

        # While kernels were loaded, one may have been late already.
        its.barrier("warm")
        steps.buffer.low_latency_clean_mask_buffer()
        check_together()
        for _ in range(2):
            check_without_the_late(steps)
            its.barrier("apart")
            steps.buffer.low_latency_clean_mask_buffer()
            check_together()
        steps.captured = None
        steps.buffer.destroy()


def check_without_the_late(steps):
    world, case = steps.world, steps.case
    is_late = world.rank == LOST
    torch.cuda.synchronize()
    world.barrier("apart")
    start = time.monotonic()
    if is_late:
        time.sleep(LATE_S)
    rows, counts, handle, _, _ = steps.buffer.low_latency_dispatch(
        steps.x, steps.idx, case.max_tokens, case.experts, use_fp8=False
    )
    torch.cuda.synchronize()
    took = time.monotonic() - start
    # The other had sent before it waited, so the late rank misses none yet.
    sources = {0, 1} if is_late else {world.rank}
    assert steps.left_out() == [int(rank not in sources) for rank in range(world.ranks)]
    assert is_late or 0.2 < took < LATE_S / 2, took
    steps.check_rows(sources, rows, counts)
    steps.out.fill_(torch.nan)
    steps.buffer.low_latency_combine(rows, steps.idx, steps.weights, handle, out=steps.out)
    torch.cuda.synchronize()
    # The other sends it no sums any more: it waits for them in vain, and leaves the other out as well.
    assert steps.left_out() == [int(rank != world.rank) for rank in range(world.ranks)]
    steps.check_sums({world.rank})


def lose(world, word, phase, folder):
    """One of four ranks fails in a phase; the others leave it out and go on. Returns the error of a resumed rank."""
    with masking(world, folder) as its:
        steps = Steps(its, FOUR)
        everyone = set(range(its.ranks))
        steps.check(everyone)
        its.barrier("everyone")

        def at(entered):
            if its.rank == LOST and entered == phase:
                torch.cuda.synchronize()
                os.kill(os.getpid(), SIGNALS[word])

        def summed(call):
            """Every sum is made, whoever is lost meanwhile. On the lost rank only a call raises: a graph just ends."""
            steps.out.fill_(torch.nan)
            call()
            torch.cuda.synchronize()
            assert its.rank == LOST or not bool(steps.out.isnan().any())

        def fail_and_go_on():
            summed(lambda: steps.step(at))
            at("graph")
            summed(steps.replay)
            for _ in range(STEPS):
                summed(steps.step)

        if its.rank == LOST:
            error = raised(fail_and_go_on)
            return f"{type(error).__name__}: {error}"
        fail_and_go_on()
        steps.check(everyone - {LOST})
        return ""


def lost(word, phase):
    """A rank that was stopped, and runs again, learns that the others go on without it."""
    with tempfile.TemporaryDirectory() as folder:
        is_stopped = word == "stopped"
        answers = answers_of_others(FOUR.ranks, lose, (word, phase, folder), is_resumed=is_stopped)
    if not is_stopped:
        return ""
    assert answers[LOST].startswith("PeerLostError"), answers[LOST]
    return answers[LOST]


CHECKS = [by_hand, too_late]
