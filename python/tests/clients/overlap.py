"""vLLM's two-batch overlap on the drop-in: its `ubatching`, with two threads and two streams, and the two steps of its
`modular_kernel` around the experts, which run the other thread's hooks.

The calls come from two threads in turn. In high throughput they are on the communication stream, and the rows, which
experts read on the other one, are protected by `record_stream` alone.
"""

import concurrent.futures
import contextlib
import importlib
import threading
import types

import torch
import with_vllm
from common import Layer, close, device, group_of
from gpu_common import is_gpu, output_mode
from gpu_work import on, slow

import deep_ep

LAYERS = 12
MOST = 16
# A first call compiles kernels.
WAIT_S = 60
# About 4 ms.
WORK = 8_000_000
TOLERANCE = with_vllm.TOLERANCE


class Overlap:
    """Two micro-batches of a model, as vLLM's wrapper of a model runs them."""

    def __init__(self):
        self.ubatching = importlib.import_module("vllm.v1.worker.ubatching")
        self.communication, self.device = torch.cuda.Stream(), device()

    def _thread(self, context, model, results):
        try:
            torch.cuda.set_device(self.device)
            with torch.inference_mode(), context:
                results[context.id] = model(context.id)
        except BaseException as error:
            results[context.id] = error

    def run(self, model, compute, graph=None):
        """Calls `model(number)` for either micro-batch, and returns both results. With `graph`, it captures them."""
        ready, results = threading.Barrier(3), {}
        contexts = self.ubatching.make_ubatch_contexts(
            2, compute, self.communication, [object(), object()], ready
        )
        threads = [
            threading.Thread(target=self._thread, args=(context, model, results), daemon=True)
            for context in contexts
        ]
        for thread in threads:
            thread.start()
        ready.wait()
        with graph or contextlib.nullcontext():
            contexts[0].cpu_wait_event.set()
            for thread in threads:
                # Where one fails, the other waits for its turn for ever.
                thread.join(WAIT_S)
        for result in results.values():
            if isinstance(result, BaseException):
                raise result
        assert len(results) == 2, f"a micro-batch does not end; ended have {[*results]}"
        return [results[number] for number in range(2)]


def kernel_of(impl, module, is_fp8):
    """vLLM's class that prepares and finalizes. The experts are ours."""
    kernels = importlib.import_module(f"{with_vllm.FUSED}.modular_kernel")
    experts = types.SimpleNamespace(
        expects_unquantized_inputs=False,
        finalize_weight_and_reduce_impl=module.TopKWeightAndReduceDelegate,
        moe_config=types.SimpleNamespace(moe_parallel_config=None),
        quant_config=with_vllm.vllm_stubs.quant_config(is_fp8),
    )
    return kernels.FusedMoEKernelModularImpl(impl, experts)


def apply(kernel, layer, experts, x, ids, weights):
    """A layer, as the class's own `apply`: `experts` gives the outputs of rows, and their weights."""
    out = torch.full_like(x, torch.nan)
    rows, scales, meta, its_ids, its_weights = kernel._prepare(
        x, weights, ids, layer.experts, None, False
    )
    # They take long, and the rows are dropped before they have begun.
    slow(WORK)
    y, its_weights = experts(rows, scales, meta, its_ids, its_weights)
    del rows, scales, meta
    return kernel._finalize(out, y, x, its_weights, its_ids, False, None, None)


def by_choices(layer):
    """Experts of high throughput."""

    def experts(rows, scales, _, ids, weights):
        is_here = (ids >= layer.first) & (ids < layer.first + layer.local)
        y = with_vllm.by_choices(layer, with_vllm.plain(rows, scales, layer.dtype), ids)
        return y, torch.where(is_here, weights, 0)

    return experts


def by_blocks(layer):
    """Experts of low latency."""

    def experts(rows, scales, _, ids, weights):
        return layer.by_blocks(with_vllm.plain(rows, scales, layer.dtype)), weights

    return experts


def tokens_of(layer, batch, number):
    """T of a micro-batch: unequal, and none in some layers of some ranks."""
    return (5 * number + 7 * batch + 3 * layer.me) % (MOST + 1)


def batches(layer):
    """The inputs of each layer, for either micro-batch."""
    return [
        [layer.inputs(tokens_of(layer, batch, n), 100 * batch + n) for n in range(LAYERS)]
        for batch in range(2)
    ]


def model_of(kernel, layer, experts, given):
    def model(batch):
        return [apply(kernel, layer, experts, *one) for one in given[batch]]

    return model


def is_wrong(layer, out, given, tolerance):
    x, ids, weights = given
    try:
        close(out, layer.dense(x.float(), ids, weights, layer.weights.float()), tolerance)
    except AssertionError:
        return True
    return False


def wrong(layer, outs, given, tolerance):
    """(micro-batch, layer) of outputs that are not the dense layer's."""
    return [
        (batch, number)
        for batch in range(2)
        for number in range(LAYERS)
        if is_wrong(layer, outs[batch][number], given[batch][number], tolerance)
    ]


def high_throughput_of(layer, folder, is_fp8):
    module = with_vllm.module_of(folder, "prepare_finalize.deepep_ht")
    buffer = deep_ep.Buffer(layer.group, 1 << 20, 0, explicitly_destroy=True)
    impl = module.DeepEPHTPrepareAndFinalize(buffer, layer.ranks, layer.ranks, layer.first)
    return kernel_of(impl, module, is_fp8), buffer


def stays_right(model, layer, given, is_fp8):
    for _ in range(3):
        outs = Overlap().run(model, torch.cuda.current_stream())
        found = wrong(layer, outs, given, TOLERANCE[is_fp8])
        assert not found, f"FP8 {is_fp8}; wrong (micro-batch, layer): {found}"


def overlap_of_high_throughput(world, port, size, folder):
    """Rows that experts still read, dropped: no later dispatch overwrites them."""
    layer = Layer(group_of(world, port, size), 8, 512, 3, torch.bfloat16, seed=71)
    given = batches(layer)
    for is_fp8 in (False, True):
        kernel, buffer = high_throughput_of(layer, folder, is_fp8)
        model = model_of(kernel, layer, by_choices(layer), given)
        stays_right(model, layer, given, is_fp8)
        buffer.destroy()


def overlap_overwrites_rows_of_the_arena(world, port, size, folder):
    """The same with `TOKENYARD_OUTPUT=arena`, where `record_stream` does nothing: so the check above can fail."""
    layer = Layer(group_of(world, port, size), 8, 512, 3, torch.bfloat16, seed=71)
    given = batches(layer)
    with output_mode("arena"):
        kernel, buffer = high_throughput_of(layer, folder, False)
    model = model_of(kernel, layer, by_choices(layer), given)
    found = []
    for _ in range(3):
        outs = Overlap().run(model, torch.cuda.current_stream())
        found += wrong(layer, outs, given, TOLERANCE[False])
    buffer.destroy()
    counts = world.all_gather("wrong outputs", len(found).to_bytes(4, "little"))
    assert any(map(any, counts)), "no rank has found an overwritten row"
    return f"{len(found)} of {3 * 2 * LAYERS} outputs wrong"


def low_latency_of(layer, folder, is_fp8, buffer):
    module = with_vllm.module_of(folder, "prepare_finalize.deepep_ll")
    impl = module.DeepEPLLPrepareAndFinalize(buffer, MOST, layer.ranks, is_fp8)
    return kernel_of(impl, module, is_fp8)


def low_latency_layer(world, port, size, seed):
    # More experts here than choices of a token: no output of another layout is larger.
    layer = Layer(group_of(world, port, size), 16, 2048, 3, torch.bfloat16, seed=seed)
    return layer, with_vllm.low_latency_buffer(layer, MOST)


def overlap_of_low_latency(world, port, size, folder):
    """A thread runs the hook of the other one's dispatch or combine before it begins an operation of its own."""
    layer, buffer = low_latency_layer(world, port, size, 72)
    given = batches(layer)
    for is_fp8 in (False, True):
        kernel = low_latency_of(layer, folder, is_fp8, buffer)
        model = model_of(kernel, layer, by_blocks(layer), given)
        stays_right(model, layer, given, is_fp8)
    buffer.destroy()


def overlap_of_low_latency_in_a_graph(world, port, size, folder):
    """Both threads' work in one graph, as vLLM captures it, launched with other inputs."""
    layer, buffer = low_latency_layer(world, port, size, 73)
    given = batches(layer)
    kernel = low_latency_of(layer, folder, False, buffer)
    model = model_of(kernel, layer, by_blocks(layer), given)
    overlap, compute = Overlap(), torch.cuda.Stream()

    def warm(batch):
        # As in vLLM, the handles of cuBLAS exist before the capture: later threads take them over.
        torch.cuda.current_blas_handle()
        return model(batch)

    compute.wait_stream(torch.cuda.current_stream())
    overlap.run(warm, compute)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    outs = overlap.run(model, compute, torch.cuda.graph(graph, stream=compute))
    for launch in range(4):
        for number in range(LAYERS):
            for batch in range(2):
                fresh = layer.inputs(tokens_of(layer, batch, number), launch * 1000 + number)
                for static, value in zip(given[batch][number], fresh, strict=True):
                    static.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        found = wrong(layer, outs, given, TOLERANCE[False])
        assert not found, f"launch {launch}; wrong (micro-batch, layer): {found}"
    buffer.destroy()


def combine_while_a_hook_is_open(world, port, size, folder):
    """Beyond what vLLM does: each thread begins its combine while the hook of the other's operation is open, and runs
    the other's hooks, on streams of their own."""
    layer, buffer = low_latency_layer(world, port, size, 74)
    module = with_vllm.module_of(folder, "prepare_finalize.deepep_ll")
    config = with_vllm.vllm_stubs.quant_config(False)
    impls = [module.DeepEPLLPrepareAndFinalize(buffer, MOST, layer.ranks, False) for _ in range(2)]
    streams = [torch.cuda.Stream() if is_gpu() else None for _ in range(2)]
    threads, gpu = [concurrent.futures.ThreadPoolExecutor(1) for _ in range(2)], device()

    def act(thread, call, *arguments):
        def inside():
            if is_gpu():
                torch.cuda.set_device(gpu)
            with on(streams[thread]):
                return call(*arguments)

        return threads[thread].submit(inside).result()

    def begin(batch, x, ids, weights):
        return impls[batch].prepare_async(x, weights, ids, layer.experts, None, False, config)

    def combine(batch, receive, ids, weights):
        rows, *_ = receive()
        slow(WORK)
        out = rows.new_full((len(ids), layer.hidden), torch.nan)
        reduce = module.TopKWeightAndReduceDelegate()
        y = layer.by_blocks(rows)
        hook, _ = impls[batch].finalize_async(out, y, weights, ids, False, reduce)
        return out, hook

    for number in range(LAYERS):
        given = [layer.inputs(tokens_of(layer, b, number), 100 * b + number) for b in range(2)]
        if is_gpu():
            torch.cuda.synchronize()
        first, receive_first = act(0, begin, 0, *given[0])
        second, receive_second = act(1, begin, 1, *given[1])
        act(1, first)
        # The second dispatch waits for its hook.
        out_first, combined_first = act(0, combine, 0, receive_first, *given[0][1:])
        act(0, second)
        # The first combine waits for its hook.
        out_second, combined_second = act(1, combine, 1, receive_second, *given[1][1:])
        act(1, combined_first)
        act(0, combined_second)
        if is_gpu():
            torch.cuda.synchronize()
        for batch, out in enumerate((out_first, out_second)):
            assert not is_wrong(layer, out, given[batch], TOLERANCE[False]), (number, batch)
    for thread in threads:
        thread.shutdown()
    buffer.destroy()


CHECKS = [
    overlap_of_low_latency,
    overlap_of_high_throughput,
    overlap_overwrites_rows_of_the_arena,
    overlap_of_low_latency_in_a_graph,
    combine_while_a_hook_is_open,
]
NEED_GPUS = {*CHECKS} - {combine_while_a_hook_is_open}
