"""The package's own calls on tensors of GPUs, without the drop-in."""

import torch
from gpu_common import SMALL, Skipped, config, device_of, flat_of, prepare, raised, rows_of, same
from oracle import Case

import tokenyard

NEEDS_GPUS = True


def opened(world, case=SMALL, decode="direct", **options):
    prepare(world)
    return tokenyard.Communicator(
        world,
        config(decode),
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
        assert received.x.device == str(device_of(world))
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


def taken_on_another_stream(world):
    """A library that takes an output on another stream than that of the call reads it behind the call."""
    with opened(world) as comm:
        x, idx, weights = tensors(world)
        own, other = torch.cuda.Stream(), torch.cuda.Stream()
        order = {"without_sync": True, "stream": own.cuda_stream}
        expected = rows_of(world, SMALL, SMALL.sources(world.rank), x.dtype) + 1
        torch.cuda.synchronize()
        with torch.cuda.stream(own):
            torch.cuda._sleep(20_000_000)
            x.add_(1)
            received, handle = comm.dispatch(x, idx, weights, worst_case=True, **order)
        with torch.cuda.stream(other):
            # torch names its current stream to DLPack.
            rows = torch.from_dlpack(received.x)[: len(expected)].clone()
            same(rows, expected)
        comm.combine(handle, received.x, out=torch.empty_like(x), **order)
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


def refused_in_a_capture(world):
    """Arguments that cannot be read, and those that the core refuses, raise on this rank alone, and the capture goes
    on."""
    with opened(world) as comm:
        x, idx, weights = tensors(world)
        out = torch.empty_like(x)
        narrow, bias = x[:, :64], torch.zeros(x.shape, dtype=x.dtype)

        def options():
            stream = torch.cuda.current_stream().cuda_stream
            return {"worst_case": True, "stream": stream, "without_sync": True}

        def step():
            received, handle = comm.dispatch(x, idx, weights, **options())
            comm.combine(handle, received.x, out=out, **order())

        def order():
            return {name: value for name, value in options().items() if name != "worst_case"}

        def wrong_calls():
            """Of each operation, refused by the bindings or by the core. `bias` lies in host memory."""
            received, handle = comm.dispatch(x, idx, weights, **options())
            rows = received.x
            yield lambda: comm.dispatch(x, idx.float(), weights, **options())
            yield lambda: comm.dispatch(x, idx, weights, waited_ns=idx[:2, 0], **options())
            yield lambda: comm.replay(handle, bias, **order())
            yield lambda: comm.combine(handle, rows, out=out, bias=(bias,), **order())
            yield lambda: comm.combine(handle, rows, out=narrow, **order())
            comm.combine(handle, rows, out=out, **order())

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for wrong in wrong_calls():
                if world.rank == 0:
                    error = raised(wrong)
                    assert isinstance(error, tokenyard.errors.InvalidInputError), error
            step()
        out.zero_()
        graph.replay()
        times = [len(SMALL.ranks_of(world.rank, t)) for t in range(len(x))]
        torch.testing.assert_close(out, x * torch.tensor(times, device=x.device)[:, None])
        torch.cuda.synchronize()
        comm.flush()


FORMS = {
    "by rows": {},
    "by columns": {"scale_layout": "column_major"},
    "by columns, tokens": {"scale_layout": "column_major", "source_index": "token"},
}
# Dispatches of a graph, and its launches.
CALLS, LAUNCHES = 10, 50


def packed_forms(world):
    """Scales and sources of a low-latency dispatch in each form, and the time of a dispatch in a graph."""
    case = Case(2, experts=32, topk=8, hidden=7168, max_tokens=128, tokens=(128, 128), seed=9)
    most, lines = case.ranks * case.max_tokens, []
    with opened(world, case, decode="low_latency", in_flight=4, handles=CALLS + 4) as comm:
        assert "packed_forms" in comm.forms
        x, idx, _ = tensors(world, case)
        x = x.bfloat16()

        def dispatch(forms):
            stream = torch.cuda.current_stream().cuda_stream
            options = {"layout": "packed", "cast": "fp8", "worst_case": True, "without_sync": True}
            return comm.dispatch(x, idx, stream=stream, **options, **forms)

        plain, kept = dispatch({})
        expected, source = taken(plain.scales).clone(), taken(plain.source).clone()
        del plain, kept
        for name, forms in FORMS.items():
            received, handle = dispatch(forms)
            scales, columns = taken(received.scales), case.hidden // 128
            by_rows = (most * columns, columns, 1)
            assert scales.stride() == ((most * columns, 1, most) if forms else by_rows)
            for expert, count in enumerate(taken(received.expert_counts).tolist()):
                same(scales[expert, :count], expected[expert, :count])
                tokens = source[expert, :count]
                tokens = tokens % case.max_tokens if "source_index" in forms else tokens
                same(taken(received.source)[expert, :count], tokens)
            del received, handle, scales
            lines.append(f"{name}: {time_in_graph(lambda forms=forms: dispatch(forms)):.2f} us")
        comm.flush()
    return "; ".join(lines)


def time_in_graph(call):
    """Microseconds of a call on the device."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(LAUNCHES):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / (CALLS * LAUNCHES)


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


class Bare:
    """An array of which only CUDA's array interface is known."""

    def __init__(self, array):
        self.__cuda_array_interface__ = array.__cuda_array_interface__
        self._array = array


def arrays_of_cupy(world):
    """CuPy's arrays go in by DLPack and by CUDA's array interface, come out, and are written by a combine."""
    try:
        import cupy
    except ImportError:
        return Skipped("CuPy is not installed")
    me = world.rank
    with opened(world) as comm, cupy.cuda.Device(me):
        # CuPy keeps a current device of its own, which torch does not see.
        x, idx, weights = (cupy.asarray(a[me]) for a in (SMALL.x, SMALL.idx, SMALL.weights))
        assert x.dtype == cupy.float32
        times = [len(SMALL.ranks_of(me, t)) for t in range(len(x))]
        for given in ((x, idx, weights), [Bare(array) for array in (x, idx, weights)]):
            cupy.cuda.Device().synchronize()
            received, handle = comm.dispatch(*given)
            rows = cupy.from_dlpack(received.x)
            assert rows.data.ptr == received.x.data_ptr()
            assert cupy.array_equal(rows, cupy.asarray(SMALL.rows(SMALL.sources(me))))
            ids = cupy.from_dlpack(received.ids)
            assert cupy.array_equal(ids, cupy.asarray(SMALL.flat(me)[0]))
            out = cupy.zeros_like(x)
            doubled = rows * 2
            cupy.cuda.Device().synchronize()
            comm.combine(handle, doubled, out=out)
            cupy.testing.assert_allclose(out, 2 * x * cupy.asarray(times)[:, None], rtol=1e-5)
        # In the order of a stream of CuPy's.
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            received, handle = comm.dispatch(x + 1, idx, stream=stream.ptr)
            rows = cupy.from_dlpack(received.x)
            assert cupy.array_equal(rows, cupy.asarray(SMALL.rows(SMALL.sources(me))) + 1)
        # The stream outlives what its calls gave.
        del rows, received, handle
        comm.flush()
    return f"CuPy {cupy.__version__}"


def arrays_of_jax(world):
    """JAX's arrays by DLPack."""
    try:
        take = by_jax()
    except ImportError as missing:
        return Skipped(str(missing))
    with opened(world) as comm:
        x, idx, weights = tensors(world)
        torch.cuda.synchronize()
        received, _ = comm.dispatch(take(x), idx, weights)
        same(taken(received.x), rows_of(world, SMALL, SMALL.sources(world.rank), x.dtype))


def by_jax():
    """A tensor of torch as an array of JAX."""
    import os

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    if not any(device.platform == "gpu" for device in jax.devices()):
        raise ImportError("JAX has no GPU")

    def take(x):
        # JAX leaves the last of its devices as the current one of the thread.
        torch.cuda.set_device(x.device)
        return jax.dlpack.from_dlpack(x).block_until_ready()

    return take


CHECKS = [
    round_trip,
    in_the_order_of_a_stream,
    taken_on_another_stream,
    refused_in_a_capture,
    halves_and_their_output,
    without_sync,
    packed_forms,
    refused_places,
    arrays_of_cupy,
    arrays_of_jax,
]
# CuPy is given the GPU of a number.
NEED_ONE_EACH = {refused_places, arrays_of_cupy}
