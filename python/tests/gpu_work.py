"""Side streams, slow work, graphs and threads of the checks. In host memory there are no streams, and a graph is its
step, which is made again."""

import contextlib
import threading

import torch
from gpu_common import device_of, is_gpu, synchronize

# About 10 ms.
LONG = 20_000_000


def slow(cycles=LONG):
    """Work that takes long, on the current stream."""
    if is_gpu():
        torch.cuda._sleep(cycles)


_sides = {}


def side_stream(number=0):
    """A stream beside the current one, the same for the same number: torch has a few, which it gives out in turn."""
    if number not in _sides:
        _sides[number] = torch.cuda.Stream() if is_gpu() else None
    return _sides[number]


def on(stream):
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


@contextlib.contextmanager
def branch(stream):
    """Work on a stream, behind the present work of the current one. `join` ends it."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with on(stream):
        yield


def join(stream):
    """The next work on the current stream runs behind the present work of another."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)


def captured(step, pool=None):
    """A call that launches the step, as a graph that was captured once the step had run. Graphs may share a pool of
    memory."""
    step()
    synchronize()
    if not is_gpu():
        return step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph.replay


def in_two_threads(world, work):
    """Calls `work(number, in_turn)` on two threads, each with a stream. `in_turn(call)` calls where it is the thread's
    turn, which the other has next: calls alternate in the same order on all ranks."""
    turns = [threading.Semaphore(1), threading.Semaphore(0)]
    errors = []

    def run(number):
        def in_turn(call):
            assert turns[number].acquire(timeout=60), "the other thread does not end its turn"
            assert not errors, "the other thread has failed"
            try:
                return call()
            finally:
                turns[1 - number].release()

        try:
            if is_gpu():
                torch.cuda.set_device(device_of(world))
            with on(side_stream(number)):
                work(number, in_turn)
        except BaseException as error:
            errors.append(error)
            turns[1 - number].release()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
