"""Calls of the drop-in in functions that torch.compile compiles: they give what they give without it."""

import torch
from gpu_common import SMALL, Skipped, inputs, is_gpu, layout_of, prepare, same, v1, v2
from torch._dynamo.utils import counters

from tokenyard.deep_ep import Buffer, ElasticBuffer, EPHandle

# Inductor takes minutes on a CPU.
BACKENDS = ("aot_eager", "inductor") if is_gpu() else ("aot_eager",)
MOST_FRAMES = 12
MOST_FRAMES_OF_BUFFERS = 32


def layer_of_v1(buffer):
    """A normal layer, with its layout and an event."""

    def step(x, idx, weights):
        options = layout_of(buffer, idx, SMALL.experts)
        rows, _, its_weights, counts, handle, _ = buffer.dispatch(
            x * 2, topk_idx=idx, topk_weights=weights, **options
        )
        again, _, _, _, _, event = buffer.dispatch(
            x * 2, handle=handle, previous_event=buffer.capture(), async_finish=True
        )
        event.current_stream_wait()
        combined, back, _ = buffer.combine((rows + again) * 3, handle, topk_weights=its_weights)
        return combined + 1, back, sum(counts)

    return step


def layer_of_low_latency(buffer):
    """In halves, cast to FP8 and back."""

    def step(x, idx, weights):
        most = SMALL.max_tokens, SMALL.experts
        (cast, scales), counts, _, _, _ = buffer.low_latency_dispatch(x * 2, idx, *most)
        rows, _, handle, _, hook = buffer.low_latency_dispatch(
            x * 2, idx, *most, use_fp8=False, return_recv_hook=True
        )
        hook()
        out, _, hook = buffer.low_latency_combine(
            rows * 3, idx, weights, handle, return_recv_hook=True
        )
        hook()
        return out + 1, counts * 2, cast.shape, scales.stride()

    return step


def layer_of_v2(buffer, is_expanded):
    """With fields of its handle."""

    def step(x, idx, weights):
        rows, _, its_weights, handle, event = buffer.dispatch(
            x * 2,
            topk_idx=idx,
            topk_weights=weights,
            num_experts=SMALL.experts,
            do_expand=is_expanded,
            async_with_compute_stream=True,
        )
        event.current_stream_wait()
        ends = handle.psum_num_recv_tokens_per_expert + 1
        combined, back, _ = buffer.combine(rows * 3, handle, topk_weights=its_weights)
        return combined + 1, back, ends, handle.num_recv_tokens

    return step


def layer_of_new_buffers(world):
    """With buffers of its own, that it makes and destroys."""

    def step(x, idx, weights):
        buffer = Buffer(world, explicitly_destroy=True)
        combined, back, _ = layer_of_v1(buffer)(x, idx, weights)
        buffer.destroy()
        most = SMALL.max_tokens
        elastic = ElasticBuffer(world, num_max_tokens_per_rank=most, explicitly_destroy=True)
        again, _, ends, _ = layer_of_v2(elastic, False)(x, idx, weights)
        elastic.destroy()
        return combined, back, again, ends

    return step


def check_compiled_constructors(world, tensors):
    """Dynamo traces no constructor of a buffer, also of the first one of a process."""
    prepare(world)
    step = layer_of_new_buffers(world)
    torch._dynamo.reset()
    counters.clear()
    found = torch.compile(step, backend=BACKENDS[0])(*tensors)
    assert counters["stats"]["unique_graphs"] > 0, counters
    assert counters["frames"]["total"] <= MOST_FRAMES_OF_BUFFERS, counters["frames"]
    for one, other in zip(found, step(*tensors), strict=True):
        same(one, other)


def check_compiled(buffer, elastic, tensors):
    """Every form of a layer: Dynamo breaks its graph at the calls, and traces nothing inside of them."""
    for step in (
        layer_of_v1(buffer),
        layer_of_low_latency(buffer),
        layer_of_v2(elastic, False),
        layer_of_v2(elastic, True),
    ):
        # First calls open communicators.
        expected = step(*tensors)
        for backend in BACKENDS:
            torch._dynamo.reset()
            counters.clear()
            compiled = torch.compile(step, backend=backend)
            for _ in range(2):
                for one, other in zip(compiled(*tensors), expected, strict=True):
                    if isinstance(other, torch.Tensor):
                        same(one, other)
                    else:
                        assert one == other
            # The function, and what is left of it behind each call.
            assert counters["frames"]["total"] <= MOST_FRAMES, counters
            assert counters["stats"]["unique_graphs"] > 0, counters


def in_compiled_functions(world):
    check_compiled_constructors(world, inputs(world, SMALL))
    buffer, elastic = v1(world, low_latency_mode=True), v2(world, SMALL)
    check_compiled(buffer, elastic, inputs(world, SMALL))
    elastic.destroy()
    buffer.destroy()


def handle_in_a_graph(world):
    """A custom operator takes a handle, as TorchTitan's do: one graph, without a break."""
    try:
        from torch._library.opaque_object import get_opaque_type_name, register_opaque_type
    except ImportError:
        return Skipped("this torch has no opaque types")
    register_opaque_type(EPHandle, typ="reference")
    buffer = v2(world, SMALL)

    def combine(rows: torch.Tensor, handle: EPHandle, tokens: int) -> torch.Tensor:
        return buffer.combine(rows, handle)[0]

    kind = get_opaque_type_name(EPHandle)
    schema = f"(Tensor rows, {kind} handle, int tokens) -> Tensor"
    operator = torch.library.custom_op(
        "tokenyard_test::combine", combine, mutates_args=(), schema=schema
    )
    operator.register_fake(lambda rows, handle, tokens: rows.new_empty((tokens, rows.shape[1])))
    x, idx, _ = inputs(world, SMALL)
    rows, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=SMALL.experts)

    def step(rows, handle, tokens):
        return operator(rows * 2, handle, tokens) + 1

    expected = step(rows, handle, len(x))
    for backend in BACKENDS:
        torch._dynamo.reset()
        same(torch.compile(step, backend=backend, fullgraph=True)(rows, handle, len(x)), expected)
    buffer.destroy()
    return None


CHECKS = [in_compiled_functions, handle_in_a_graph]
