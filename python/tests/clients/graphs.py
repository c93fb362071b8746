"""Decode paths in CUDA graphs: vLLM's and SGLang's low latency and V2, and TorchTitan's inference.

Graphs of several M or T share a buffer and a pool of memory. They are launched in any order, with other values and
another routing each time: balanced, all tokens to one rank, choices left out, and none at all. Each result is compared
with a dense layer and, bit for bit, with the same call outside of graphs.
"""

import random
import types

import torch
import with_sglang
import with_torchtitan
import with_vllm
from common import Layer, close, device, group_of
from gpu_common import is_gpu, raised, same
from gpu_work import captured

import deep_ep

LAUNCHES = 12
ROUTINGS = ("balanced", "to one rank", "with gaps", "balanced", "none")
SIZES = (1, 2, 4, 8)
HIDDEN = 2048
TOLERANCE = with_vllm.TOLERANCE


def routed(layer, tokens, step):
    """Inputs of this rank, routed in another way in each step, and not as on the other ranks."""
    how = ROUTINGS[(step + layer.me) % len(ROUTINGS)]
    x, ids, weights = layer.inputs(tokens, step, dropped=0.4 if how == "with gaps" else 0.0)
    if how == "to one rank":
        # Experts of a rank have consecutive numbers.
        first = torch.arange(tokens, device=ids.device)[:, None]
        ids = (first + torch.arange(layer.topk, device=ids.device)) % layer.local
    elif how == "none":
        ids, weights = torch.full_like(ids, -1), torch.zeros_like(weights)
    return x, ids, weights


class Decode:
    """A step of a client in a graph of its own. `step(x, ids, weights)` gives the output."""

    def __init__(self, layer, tokens, step, pool):
        self.layer, self.tokens, self.step = layer, tokens, step
        self.given = layer.inputs(tokens)
        self.out = torch.empty_like(self.given[0])
        self.launch = captured(lambda: self.out.copy_(step(*self.given)), pool)

    def check(self, number, tolerance):
        x, ids, weights = routed(self.layer, self.tokens, number)
        for static, value in zip(self.given, (x, ids, weights), strict=True):
            static.copy_(value)
        self.out.fill_(torch.nan)
        self.launch()
        expected = self.layer.dense(x.float(), ids, weights, self.layer.weights.float())
        close(self.out, expected, tolerance)
        same(self.step(x, ids, weights), self.out)


def check_launches(decodes, tolerance):
    """Launches them in any order, which all ranks draw alike."""
    draw = random.Random(7)
    for number in range(LAUNCHES):
        draw.choice(decodes).check(number, tolerance)


def new_pool():
    return torch.cuda.graph_pool_handle() if is_gpu() else None


def fewer(layer, most):
    """T of this rank: fewer on the later ranks, and none on some where M is 1."""
    return most >> layer.me


def low_latency_of_vllm(layer, folder, most, is_fp8, buffer):
    module = with_vllm.module_of(folder, "prepare_finalize.deepep_ll")
    impl = module.DeepEPLLPrepareAndFinalize(buffer, most, layer.ranks, is_fp8)

    def step(x, ids, weights):
        config = with_vllm.vllm_stubs.quant_config(is_fp8)
        rows, scales, *_ = with_vllm.prepare(impl, False, layer, config, x, ids, weights)
        y = layer.by_blocks(with_vllm.plain(rows, scales, layer.dtype))
        return with_vllm.finish(layer, module, impl, y, False, len(x), ids, weights)

    return step


def vllm_low_latency(world, port, size, folder):
    """A graph for each M, as for batches of 1 to 8 tokens, over one buffer."""
    layer = Layer(group_of(world, port, size), 8, HIDDEN, 3, torch.bfloat16, seed=61)
    buffer = with_vllm.low_latency_buffer(layer, max(SIZES))
    for is_fp8 in (False, True):
        pool = new_pool()
        decodes = [
            Decode(
                layer,
                fewer(layer, most),
                low_latency_of_vllm(layer, folder, most, is_fp8, buffer),
                pool,
            )
            for most in SIZES
        ]
        check_launches(decodes, TOLERANCE[is_fp8])
    buffer.destroy()


def vllm_elastic(world, port, size, folder):
    """V2 for decode, whose M is the batch rounded up to a power of two."""
    module = with_vllm.module_of(folder, "prepare_finalize.deepep_v2")
    layer = Layer(group_of(world, port, size), 8, 512, 3, torch.bfloat16, seed=62)
    buffer = deep_ep.ElasticBuffer(
        layer.group,
        num_max_tokens_per_rank=max(SIZES),
        hidden=layer.hidden,
        num_topk=layer.topk,
        explicitly_destroy=True,
    )

    def step_of(most, is_fp8):
        impl = with_vllm.elastic_impl(module, buffer, layer, is_fp8, True)

        def step(x, ids, weights):
            with_vllm.name_tokens(layer, most)
            config = with_vllm.vllm_stubs.quant_config(is_fp8)
            rows, scales, meta, its_ids, its_weights = with_vllm.prepare(
                impl, False, layer, config, x, ids, weights
            )
            its_ids = with_vllm.global_ids(impl, meta, its_ids)
            y = with_vllm.by_choices(layer, with_vllm.plain(rows, scales, layer.dtype), its_ids)
            its_weights = torch.where(its_ids >= 0, its_weights, 0)
            return with_vllm.finish(layer, module, impl, y, False, len(x), its_ids, its_weights)

        return step

    for is_fp8 in (False, True):
        pool = new_pool()
        decodes = [Decode(layer, fewer(layer, m), step_of(m, is_fp8), pool) for m in SIZES]
        check_launches(decodes, TOLERANCE[is_fp8])
    buffer.destroy()


@with_sglang.properties_of_a_gpu()
def sglang_low_latency(world, port, size, folder):
    """One M, and a graph for each T, asynchronous as SGLang's decode without two batches."""
    layer = Layer(group_of(world, port, size), 8, 512, 3, torch.bfloat16, seed=63)
    for is_fp8 in (False, True):
        dispatcher, combine_input = with_sglang.low_latency_of(folder, layer, is_fp8)

        def step(x, ids, weights, dispatcher=dispatcher, combine_input=combine_input):
            routed = types.SimpleNamespace(topk_ids=ids, topk_weights=weights)
            got = dispatcher.dispatch(x, routed)
            rows = with_vllm.plain(got.hidden_states, got.hidden_states_scale, layer.dtype)
            y = layer.by_blocks(rows)
            return dispatcher.combine(combine_input(y, got.topk_ids, got.topk_weights))

        pool = new_pool()
        decodes = [Decode(layer, fewer(layer, tokens), step, pool) for tokens in SIZES]
        check_launches(decodes, TOLERANCE[is_fp8])
    with_sglang.drop_buffers()


def elastic_of_sglang(layer, folder, is_fp8):
    dispatcher, combine_input = with_sglang.elastic_of(folder, layer, is_fp8)

    def step(x, ids, weights):
        routed = types.SimpleNamespace(topk_ids=ids, topk_weights=weights)
        got = dispatcher.dispatch(x, routed)
        return dispatcher.combine(combine_input(with_sglang.expanded(layer, got), None))

    return step


def sglang_elastic(world, port, size, folder):
    """V2: expanded rows, without a wait of the host."""
    layer = Layer(group_of(world, port, size), 8, 256, 3, torch.bfloat16, seed=64)
    for is_fp8 in (False, True):
        step = elastic_of_sglang(layer, folder, is_fp8)
        pool = new_pool()
        decodes = [Decode(layer, fewer(layer, tokens), step, pool) for tokens in SIZES]
        check_launches(decodes, TOLERANCE[is_fp8])
        with_sglang.drop_buffers()


def check_refused_in_a_capture(call):
    """A first use in a capture is an error that says so. The capture ends as if it had not been."""
    graph, counter = torch.cuda.CUDAGraph(), torch.zeros(1, device=device())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        counter.add_(1)
        error = raised(call)
        counter.add_(1)
    assert "before the capture" in str(error), error
    graph.replay()
    assert counter.item() == 2


def vllm_first_use_in_a_capture(world, port, size, folder):
    """Low latency, whose buffer vLLM makes before: the buffer goes on, and its graph is right once it is warm."""
    layer = Layer(group_of(world, port, size), 8, HIDDEN, 3, torch.bfloat16, seed=65)
    buffer = with_vllm.low_latency_buffer(layer, 8)
    step = low_latency_of_vllm(layer, folder, 8, False, buffer)
    given = layer.inputs(4)
    check_refused_in_a_capture(lambda: step(*given))
    Decode(layer, 4, step, None).check(1, TOLERANCE[False])
    buffer.destroy()


def sglang_first_use_in_a_capture(world, port, size, folder):
    """SGLang makes its buffer in the first call. In a capture that call is refused; the next one is right."""
    layer = Layer(group_of(world, port, size), 8, 256, 3, torch.bfloat16, seed=66)
    step = elastic_of_sglang(layer, folder, False)
    given = layer.inputs(4)
    check_refused_in_a_capture(lambda: step(*given))
    Decode(layer, 4, step, None).check(1, TOLERANCE[False])
    with_sglang.drop_buffers()


def torchtitan_inference(world, port, size, folder):
    """`cudagraphable` under no_grad, with an M for each graph; with gradients the same call is one of training."""
    module, layer = with_torchtitan.layer_of(world, port, size, folder)
    weights = layer.own_weights().detach()

    def step_of(most):
        def step(x, ids, scores):
            return with_torchtitan.forward(module, layer, weights, True, most, x, ids, scores)

        return step

    with torch.no_grad():
        pool = new_pool()
        decodes = [Decode(layer, fewer(layer, most), step_of(most), pool) for most in SIZES]
        check_launches(decodes, TOLERANCE[False])
    for number in range(3):
        with_torchtitan.check_step(
            layer,
            lambda *given: with_torchtitan.forward(module, layer, given[0], True, *given[1:]),
            number,
        )
    assert not module._handle_cache


CHECKS = {
    "vllm": [vllm_low_latency, vllm_elastic, vllm_first_use_in_a_capture],
    "sglang": [sglang_low_latency, sglang_elastic, sglang_first_use_in_a_capture],
    "torchtitan": [torchtitan_inference],
}
