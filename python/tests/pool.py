"""Ranks for the tests: processes that stay, and run one function after the other."""

import multiprocessing
import multiprocessing.connection
import socket
import time
import traceback

import tokenyard

# The one limit of the tests, against a hang that no deadline of the package ends. It is far above what any of them
# takes, because a busy machine takes minutes for thousands of steps.
LIMIT_S = 600

CONFIG = """
[world]
deadline_ms = 20000
late_ms = 60000
[kernels]
use = "cpu"
[kernels.cpu]
threads = 1
arena_mib = {arena_mib}
[transport.scale_up]
use = "shm"
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def config(arena_mib=4):
    return tokenyard.Config.parse(CONFIG.format(arena_mib=arena_mib), "test.toml")


class Pool:
    """Up to `size` ranks. `run(n, f, *args)` calls `f(world, *args)` on n of them and returns what they return.

    `method` says how multiprocessing starts them.
    """

    def __init__(self, size, method="spawn"):
        self.size, self.method = size, method
        self.workers = []

    def _start(self):
        context = multiprocessing.get_context(self.method)
        for _ in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, mine))

    def run(self, ranks, function, *args):
        if not self.workers:
            self._start()
        pipes = [pipe for _, pipe in self.workers[:ranks]]
        for rank, pipe in enumerate(pipes):
            pipe.send((rank, ranks, function, args))
        try:
            results = collect(pipes)
        except BaseException:
            self.close()
            raise
        failures = [
            f"rank {r}:\n{text}" for r, (kind, text) in enumerate(results) if kind == "raised"
        ]
        assert not failures, "\n".join(failures)
        return [value for _, value in results]

    def close(self):
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        self.workers = []


def collect(pipes):
    """The result of every rank. Their gathers pass through here until then."""
    results, gathered = [None] * len(pipes), {}
    end = time.monotonic() + LIMIT_S
    while None in results:
        waiting = [pipe for pipe, result in zip(pipes, results, strict=True) if result is None]
        ready = multiprocessing.connection.wait(waiting, end - time.monotonic())
        if not ready:
            raise TimeoutError(f"ranks do not end; they have {results}")
        for pipe in ready:
            kind, value = pipe.recv()
            if kind == "gather":
                gathered[pipe] = value
            else:
                results[pipes.index(pipe)] = (kind, value)
        if len(gathered) == len(pipes):
            for pipe in pipes:
                pipe.send([gathered[other] for other in pipes])
            gathered = {}
    return results


def serve(pipe):
    """The loop of a rank."""
    while True:
        try:
            rank, ranks, function, args = pipe.recv()
        except EOFError:
            return

        def exchange(mine):
            pipe.send(("gather", mine))
            return pipe.recv()

        try:
            with tokenyard.World(
                rank, ranks, exchange=exchange, local_rank=rank, config=config()
            ) as world:
                pipe.send(("returned", function(world, *args)))
        except BaseException:
            pipe.send(("raised", traceback.format_exc()))
