"""`kill -9` of a rank in each phase: the other raises an exception of Python, and its process and GPU live."""

import multiprocessing.connection
import os
import signal
import time

import torch
from gpu_common import CASE, device_of, inputs, is_gpu, layout_of, synchronize, v1, v2
from pool import Pool

import tokenyard

PHASES = ["idle", "dispatch", "dispatch_halves", "combine", "combine_halves"]
PHASES += ["normal", "normal_cached", "normal_combine", "graph"]
# Of V2.
PHASES += ["elastic", "elastic_combine", "elastic_no_sync", "elastic_no_sync_combine"]
# Longer than any deadline of the ranks.
LIMIT_S = 150


def die(world, phase):
    """Rank 1 dies in a phase; rank 0 returns the error that it got."""
    begin, step = (elastic_calls if phase.startswith("elastic") else v1_calls)(world, phase)
    end = time.monotonic() + LIMIT_S
    is_begun = False
    while time.monotonic() < end:
        try:
            if not is_begun:
                is_begun = True
                begin()
                if world.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            step()
            synchronize()
        except tokenyard.Error as error:
            # The context is alive.
            assert float(torch.ones(8, device=device_of(world)).sum()) == 8
            return f"{type(error).__name__}: {error}"
    raise AssertionError("no error came")


def v1_calls(world, phase):
    """Makes the calls of both ranks before one dies; returns the step that the other makes then."""
    buffer = v1(world, low_latency_mode=True)
    x, idx, weights = inputs(world, CASE)
    options = {**layout_of(buffer, idx, CASE.experts), "topk_idx": idx, "topk_weights": weights}

    def low_latency():
        rows, _, handle, _, _ = buffer.low_latency_dispatch(
            x, idx, CASE.max_tokens, CASE.experts, use_fp8=False
        )
        buffer.low_latency_combine(rows, idx, weights, handle)

    def normal():
        recv_x, _, _, _, handle, _ = buffer.dispatch(x, **options)
        buffer.combine(recv_x, handle)

    low_latency()
    synchronize()
    graph = None
    if phase == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            low_latency()
    # It waits for the counts of all ranks: none dies while another one still captures.
    normal()
    synchronize()

    def step():
        if graph is not None:
            graph.replay()
            synchronize()
        (normal if "normal" in phase else low_latency)()

    return lambda: begin_v1(buffer, phase, (x, idx, options)), step


def begin_v1(buffer, phase, given):
    x, idx, options = given
    # The other rank dies while this one is in the call.
    is_inside = buffer.rank == 0
    if phase in ("dispatch_halves", "combine", "combine_halves"):
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x, idx, CASE.max_tokens, CASE.experts, use_fp8=False, return_recv_hook=True
        )
        if phase == "dispatch_halves":
            return
        hook()
        synchronize()
        if phase == "combine_halves":
            # Both have sent. This one receives once the other is dead.
            *_, hook = buffer.low_latency_combine(
                rows, idx, options["topk_weights"], handle, return_recv_hook=True
            )
            synchronize()
            if is_inside:
                time.sleep(1)
                hook()
        elif is_inside:
            buffer.low_latency_combine(rows, idx, options["topk_weights"], handle)
    elif phase in ("normal_cached", "normal_combine"):
        recv_x, _, _, _, handle, _ = buffer.dispatch(x, **options)
        synchronize()
        if is_inside and phase == "normal_cached":
            buffer.dispatch(x, handle=handle)
        elif is_inside:
            buffer.combine(recv_x, handle)
    elif phase == "dispatch" and is_inside:
        buffer.low_latency_dispatch(x, idx, CASE.max_tokens, CASE.experts, use_fp8=False)


def elastic_calls(world, phase):
    """As `v1_calls`, of V2."""
    buffer = v2(world, CASE)
    x, idx, _ = inputs(world, CASE)

    def dispatch():
        rows, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=idx, num_experts=CASE.experts, do_cpu_sync="no_sync" not in phase
        )
        return rows, handle

    def step():
        buffer.combine(*dispatch())

    def begin():
        if phase.endswith("combine"):
            received = dispatch()
            synchronize()
            if world.rank == 0:
                buffer.combine(*received)

    step()
    synchronize()
    return begin, step


def killed(phase):
    """Runs the phase with ranks of its own. Returns the error of rank 0."""
    return answers_of_others(2, die, (phase,))[0]


def answers_of_others(ranks, function, arguments, is_resumed=False):
    """Runs `function` on ranks of its own, of which rank 1 is killed, or is resumed once all others have ended. Returns
    the answers by rank."""
    pool = Pool(ranks)
    pool._start()
    pipes = [pipe for _, pipe in pool.workers]
    for rank, pipe in enumerate(pipes):
        pipe.send((rank, ranks, function, arguments))
    try:
        answers = collect(pipes, {1})
        if is_resumed:
            os.kill(pool.workers[1][0].pid, signal.SIGCONT)
            answers |= collect(pipes, set(answers))
        return answers
    finally:
        pool.close()


def collect(pipes, others):
    """The answers of all ranks but `others`. Gathers of all ranks pass through here."""
    gathered, answers, alive = {}, {}, list(pipes)
    wanted = set(range(len(pipes))) - others
    end = time.monotonic() + 2 * LIMIT_S
    while set(answers) != wanted and time.monotonic() < end:
        for pipe in multiprocessing.connection.wait(alive, 1):
            rank = pipes.index(pipe)
            try:
                kind, value = pipe.recv()
            except EOFError:
                alive.remove(pipe)
                assert rank in others, f"rank {rank} died, too"
                continue
            if kind == "gather":
                gathered[pipe] = value
            else:
                assert (kind, rank in wanted) == ("returned", True), f"rank {rank}: {value}"
                answers[rank] = value
        if len(gathered) == len(pipes):
            for pipe in pipes:
                pipe.send([gathered[other] for other in pipes])
            gathered = {}
    assert set(answers) == wanted, f"ranks do not end: found answers of {sorted(answers)}"
    return answers


def phases():
    return [phase for phase in PHASES if is_gpu() or phase != "graph"]
