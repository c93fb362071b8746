"""The package's own calls on tensors of GPUs, without the drop-in."""

import torch
from gpu_common import SMALL, device_of, flat_of, prepare, raised, rows_of, same

import tokenyard

NEEDS_GPUS = True


def opened(world, case=SMALL, **options):
    prepare(world)
    return tokenyard.Communicator(
        world,
        tokenyard.Config.built_in("nvlink", deadline_ms=20_000),
        experts=case.experts,
        topk=case.topk,
        hidden=case.hidden,
        max_tokens=case.max_tokens,
        **options,
    )


def tensors(world, case=SMALL):
    device = device_of(world)
    x, idx, weights = (
        torch.from_numpy(a[world.rank]).to(device) for a in (case.x, case.idx, case.weights)
    )
    return x, idx, weights


def taken(array):
    return torch.utils.dlpack.from_dlpack(array.__dlpack__(stream=-1))


def round_trip(world):
    """Without a stream: synchronised before, ended after."""
    with opened(world) as comm:
        x, idx, weights = tensors(world)
        torch.cuda.synchronize()
        received, handle = comm.dispatch(x, idx, weights)
        assert comm.works_on_device
        assert received.x.device == f"cuda:{world.rank}"
        same(taken(received.x), rows_of(world, SMALL, SMALL.sources(world.rank), x.dtype))
        ids, expected = flat_of(world, SMALL)
        same(taken(received.ids).long(), ids)
        same(taken(received.weights), expected)
        out = torch.empty_like(x)
        comm.combine(handle, received.x, out=out)
        times = [len(SMALL.ranks_of(world.rank, t)) for t in range(len(x))]
        torch.testing.assert_close(out, x * torch.tensor(times, device=x.device)[:, None])


def in_the_order_of_a_stream(world):
    """On torch's default stream, and on another, behind work that takes long."""
    with opened(world) as comm:
        for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                x, idx, weights = tensors(world)
                torch.cuda._sleep(20_000_000)
                x.add_(1)
                received, handle = comm.dispatch(x, idx, weights, stream=stream.cuda_stream)
                rows = torch.from_dlpack(received.x)
                same(rows, rows_of(world, SMALL, SMALL.sources(world.rank), x.dtype) + 1)
                out = torch.empty_like(x)
                comm.combine(handle, rows, out=out, stream=stream.cuda_stream)
                times = [len(SMALL.ranks_of(world.rank, t)) for t in range(len(x))]
                torch.testing.assert_close(out, x * torch.tensor(times, device=x.device)[:, None])
        comm.flush()


def halves_and_their_output(world):
    """The output has an address before it is received."""
    with opened(world) as comm:
        x, idx, weights = tensors(world)
        stream = torch.cuda.current_stream().cuda_stream
        pending = comm.dispatch_send(x, idx, weights, layout="packed", stream=stream)
        place = pending.output()
        rows = taken(place.x)
        received, _ = pending.recv()
        assert received.x.data_ptr() == place.x.data_ptr() == rows.data_ptr()
        assert taken(received.expert_counts).tolist() == SMALL.expert_counts(world.rank)


def without_sync(world):
    with opened(world) as comm:
        x, idx, weights = tensors(world)
        stream = torch.cuda.current_stream().cuda_stream
        for _ in range(20):
            received, handle = comm.dispatch(
                x, idx, weights, worst_case=True, stream=stream, without_sync=True
            )
            rows = taken(received.x)
            out = torch.empty_like(x)
            comm.combine(handle, rows, out=out, stream=stream, without_sync=True)
        count = len(SMALL.sources(world.rank))
        assert int(taken(received.totals)[0]) == count
        same(rows[:count], rows_of(world, SMALL, SMALL.sources(world.rank), x.dtype))
        comm.flush()


def refused_places(world):
    """Host memory, and memory of another GPU, are refused on all ranks."""
    with opened(world) as comm:
        x, idx, weights = tensors(world)
        other = f"cuda:{1 - world.rank}"
        for wrong in (x.cpu(), x.to(other)):
            given = wrong if world.rank == 0 else x
            error = raised(lambda given=given: comm.dispatch(given, idx, weights))
            assert "memory" in str(error), error
        torch.cuda.synchronize()
        comm.dispatch(x, idx, weights)


def other_libraries(world):
    """CuPy and JAX by DLPack, where they are installed."""
    ran = []
    with opened(world) as comm:
        x, idx, weights = tensors(world)
        torch.cuda.synchronize()
        for name, take in (("cupy", by_cupy), ("jax", by_jax)):
            try:
                given = take(x)
            except ImportError:
                continue
            received, _ = comm.dispatch(given, idx, weights)
            same(taken(received.x), rows_of(world, SMALL, SMALL.sources(world.rank), x.dtype))
            ran.append(name)
    return f"ran with: {', '.join(ran) or 'neither, as none is installed'}"


def by_cupy(x):
    import cupy

    with cupy.cuda.Device(x.device.index):
        array = cupy.from_dlpack(x) + 0
        cupy.cuda.Device().synchronize()
    return array


def by_jax(x):
    import os

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if not any(device.platform == "gpu" for device in jax.devices()):
        raise ImportError("JAX has no GPU")
    # JAX leaves the last of its devices as the current one of the thread.
    torch.cuda.set_device(x.device)
    array = jax.dlpack.from_dlpack(x)
    return array.block_until_ready()


CHECKS = [
    round_trip,
    in_the_order_of_a_stream,
    halves_and_their_output,
    without_sync,
    refused_places,
    other_libraries,
]
