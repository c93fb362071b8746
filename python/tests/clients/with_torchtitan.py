"""torchtitan's DeepEP module on the drop-in, which calls V2: forward, backward, checkpoints, compiled, expanded."""

import contextlib
import functools

import torch
from common import Layer, by_path, close, group_of
from torch._dynamo.utils import counters
from torch.utils import checkpoint

MOST_TOKENS = 24
# 48 of a layer, most of the module's own; 26 where its buffer is made, too, and nothing goes back.
MOST_FRAMES, MOST_FRAMES_FORWARD = 64, 40


def module_of(folder):
    known = "torchtitan_deepep"
    module = by_path(known, folder / "torchtitan/distributed/deepep/deepep.py")
    if not hasattr(module, "_on_the_host"):
        # The module registers its operators for CUDA alone.
        module._on_the_host = True
        module._lib.impl("dispatch", module._dispatch_op_impl, "CPU")
        module._lib.impl("combine", module._combine_op_impl, "CPU")
    return module


def tokens_of(layer, step):
    """T of each rank, from one token to the most, and none on one rank in one step."""
    most = 1 + (7 * step) % MOST_TOKENS
    tokens = [max(1, most - rank) for rank in range(layer.ranks)]
    if step == 3:
        tokens[1] = 0
    return tokens


def layer_of(world, port, size, folder):
    module = module_of(folder)
    group = group_of(world, port, size)
    layer = Layer(group, experts=8, hidden=128, topk=2, dtype=torch.bfloat16, seed=3)
    module.get_buffer(
        group, hidden=layer.hidden, num_max_tokens_per_rank=MOST_TOKENS, num_topk=layer.topk
    )
    return module, layer


def forward(module, layer, weights, is_graphable, capacity, x, ids, scores):
    rows, counts, state = module.dispatch_tokens(
        x,
        ids,
        scores,
        layer.local,
        layer.experts,
        num_tokens_per_rank=capacity,
        cudagraphable=is_graphable,
    )
    if state.cudagraphable:
        ends = counts.cumsum(0)
        y = layer.by_places(rows, ends - counts, ends)
    else:
        y = layer.by_counts(rows, counts.tolist(), weights)
    out = module.combine_tokens(y, state)
    module.sync_combine()
    return out


def of_weights(layer, tokens_of_ranks, step, weights):
    """The gradient of this rank's experts by a dense layer over the rows of all ranks."""
    total = torch.zeros_like(weights, dtype=torch.float32)
    for rank, tokens in enumerate(tokens_of_ranks):
        there = Layer(layer.group, layer.experts, layer.hidden, layer.topk, layer.dtype, layer.seed)
        there.me = rank
        x, ids, scores = there.inputs(tokens, step, dropped=0.1)
        all_weights = layer.weights.float().requires_grad_()
        out = there.dense(x.float(), ids, scores, all_weights)
        out.backward(gradient(out).float())
        total += all_weights.grad[layer.first : layer.first + layer.local]
    return total


def gradient(out):
    numbers = torch.arange(out.numel(), dtype=torch.float32, device=out.device)
    return torch.sin(numbers).view_as(out).to(out.dtype)


def check_step(layer, run, step):
    """One step against the dense layer: output, and gradients of rows, scores and experts."""
    tokens = tokens_of(layer, step)
    x, ids, scores = layer.inputs(tokens[layer.me], step, dropped=0.1)
    weights = layer.own_weights()
    found = [one.clone().requires_grad_() for one in (x, scores)]
    expected = [one.float().requires_grad_() for one in (x, scores)]
    out = run(weights, max(tokens), found[0], ids, found[1])
    reference = layer.dense(expected[0], ids, expected[1], layer.weights.float())
    close(out, reference, 0.03)
    out.backward(gradient(out))
    reference.backward(gradient(reference))
    close(found[0].grad, expected[0].grad, 0.05)
    close(found[1].grad, torch.where(ids >= 0, expected[1].grad, 0), 0.15)
    close(weights.grad, of_weights(layer, tokens, step, weights), 0.1)
    return out.detach(), [one.grad for one in (*found, weights)]


def steps_are_those_of_a_dense_layer(world, port, size, folder):
    """T varies by step and rank, and M with it; with deterministic algorithms a step gives the same bits again."""
    module, layer = layer_of(world, port, size, folder)
    torch.use_deterministic_algorithms(True)
    try:
        run = functools.partial(forward, module, layer)
        for step in range(6):
            first = check_step(layer, lambda w, m, *args: run(w, False, m, *args), step)
            again = check_step(layer, lambda w, m, *args: run(w, False, m, *args), step)
            assert torch.equal(first[0], again[0])
            assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))
        assert not module._handle_cache
    finally:
        torch.use_deterministic_algorithms(False)


def saves_communication(context, operator, *args, **kwargs):
    kinds = (torch.ops.deepep.dispatch.default, torch.ops.deepep.combine.default)
    policy = checkpoint.CheckpointPolicy
    return policy.MUST_SAVE if operator in kinds else policy.PREFER_RECOMPUTE


@contextlib.contextmanager
def counted_dispatches(module):
    """Inside, the list that each dispatch of the module's buffer adds to."""
    calls, buffer = [], module._buffer
    dispatch = buffer.dispatch
    buffer.dispatch = lambda *args, **kwargs: calls.append(1) or dispatch(*args, **kwargs)
    try:
        yield calls
    finally:
        del buffer.dispatch


def checkpointed(body, *args):
    contexts = functools.partial(
        checkpoint.create_selective_checkpoint_contexts, saves_communication
    )
    return checkpoint.checkpoint(body, *args, use_reentrant=False, context_fn=contexts)


def checkpoints_save_the_communication(world, port, size, folder):
    """Selective activation checkpointing, as torchtitan sets it up: operators of communication are not run again."""
    module, layer = layer_of(world, port, size, folder)

    def run(weights, capacity, *args):
        body = functools.partial(forward, module, layer, weights, False, capacity)
        return checkpointed(body, *args)

    with counted_dispatches(module) as calls:
        for step in range(3):
            check_step(layer, run, step)
            # One of the forward, and one of the backward of the combine.
            assert len(calls) == 2 * (step + 1)


@contextlib.contextmanager
def compiled_graphs(most_frames):
    """Graphs were compiled inside, and Dynamo looked at few frames. Gives a list, which gets the numbers as text."""
    torch._dynamo.reset()
    counters.clear()
    text = []
    yield text
    frames, graphs = counters["frames"], counters["stats"]["unique_graphs"]
    text.append(f"{graphs} graphs of {frames['ok']} frames")
    # Frames without a tensor are counted as ok, too.
    assert frames["ok"] > 0, frames
    assert graphs > 0, frames
    assert frames["total"] <= most_frames, frames


def compiles_around_a_layer(world, port, size, folder, backend="aot_eager"):
    """The module registers its operators without what they give: Dynamo breaks its graph there, and then compiles the
    module's own functions, up to the calls of the buffer."""
    module, layer = layer_of(world, port, size, folder)

    def run(weights, capacity, x, ids, scores):
        body = functools.partial(forward, module, layer, weights, False, capacity)
        return torch.compile(lambda x, scores: body(x, ids, scores), backend=backend)(x, scores)

    with compiled_graphs(MOST_FRAMES) as numbers:
        for step in range(2):
            check_step(layer, run, step)
    return numbers[0]


def compiles_by_inductor(world, port, size, folder):
    """Not in every test run: inductor takes most of a minute."""
    return compiles_around_a_layer(world, port, size, folder, "inductor")


def checkpoints_save_the_communication_of_a_compiled_layer(world, port, size, folder):
    """Around a layer that is compiled, as torchtitan compiles the parts of a block that it has wrapped."""
    module, layer = layer_of(world, port, size, folder)

    def run(weights, capacity, x, ids, scores):
        body = functools.partial(forward, module, layer, weights, False, capacity)
        layer_of_graphs = torch.compile(lambda x, scores: body(x, ids, scores), backend="aot_eager")
        return checkpointed(layer_of_graphs, x, scores)

    with counted_dispatches(module) as calls, compiled_graphs(MOST_FRAMES) as numbers:
        check_step(layer, run, 1)
        assert len(calls) == 2
    return numbers[0]


def makes_its_buffer_in_a_compiled_function(world, port, size, folder):
    """Dynamo breaks its graph at the constructor, and looks at nothing inside of it."""
    module, layer = layer_of(world, port, size, folder)
    weights = layer.own_weights().detach()
    tokens = tokens_of(layer, 1)
    x, ids, scores = layer.inputs(tokens[layer.me], 1, dropped=0.1)

    def step(x, scores):
        module._buffer = None
        module.get_buffer(
            layer.group,
            hidden=layer.hidden,
            num_max_tokens_per_rank=MOST_TOKENS,
            num_topk=layer.topk,
        )
        return forward(module, layer, weights, False, max(tokens), x, ids, scores)

    with torch.no_grad(), compiled_graphs(MOST_FRAMES_FORWARD) as numbers:
        # Where graphs break does not depend on the backend. This one takes the least time.
        out = torch.compile(step, backend="eager")(x, scores)
    close(out, layer.dense(x.float(), ids, scores, layer.weights.float()), 0.03)
    return numbers[0]


def inference_has_the_values_of_training(world, port, size, folder):
    """`cudagraphable`: the expanded layout, without a wait of the host for counts."""
    module, layer = layer_of(world, port, size, folder)
    weights = layer.own_weights().detach()
    with torch.no_grad():
        for step in range(6):
            tokens = tokens_of(layer, step)
            x, ids, scores = layer.inputs(tokens[layer.me], step, dropped=0.1)
            out = forward(module, layer, weights, True, max(tokens), x, ids, scores)
            close(out, layer.dense(x.float(), ids, scores, layer.weights.float()), 0.03)
        assert not module._handle_cache
