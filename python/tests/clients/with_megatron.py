"""megatron-core on the drop-in: `fused_a2a`, and the flex dispatcher against its own all-to-all dispatcher."""

import contextlib
import importlib
import itertools
import types

import torch
from common import Layer, close, device, group_of, on_path, own_group, replaced
from gpu_common import is_gpu

PACKAGE = "megatron.core.transformer.moe"
STEPS = 50


class HostStream:
    """Stands for a stream of CUDA where the oracle asks for one: the host has done all of its work."""

    def wait_stream(self, stream):
        pass

    def record_event(self):
        return self

    def synchronize(self):
        pass


@contextlib.contextmanager
def cuda_of_the_host():
    """The oracle, megatron's all-to-all dispatcher, asks torch.cuda for streams and the device of its tensors. With a
    GPU it has them."""
    if is_gpu():
        yield
        return
    stream = HostStream()
    with replaced(
        torch.cuda,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda _: contextlib.nullcontext(),
        current_device=lambda: torch.device("cpu"),
    ):
        yield


def config_of(layer, **others):
    config = types.SimpleNamespace(
        cuda_graph_impl="none",
        cuda_graph_modules=[],
        fp4=None,
        fp8=None,
        hidden_size=layer.hidden,
        moe_expert_capacity_factor=None,
        moe_flex_dispatcher_backend="deepep",
        moe_flex_dispatcher_num_sms=None,
        moe_pad_expert_input_to_capacity=False,
        moe_permute_fusion=False,
        moe_router_dtype="fp32",
        moe_router_padding_for_quantization=False,
        moe_router_topk=layer.topk,
        moe_shared_expert_overlap=False,
        num_moe_experts=layer.experts,
        overlap_moe_expert_parallel_comm=False,
        use_transformer_engine_op_fuser=False,
    )
    vars(config).update(others)
    return config


def dispatcher_of(layer, name, **others):
    module = importlib.import_module(f"{PACKAGE}.token_dispatcher")
    groups = types.SimpleNamespace(ep=layer.group, expt_tp=own_group(), tp_ep=layer.group)
    local = list(range(layer.first, layer.first + layer.local))
    return getattr(module, name)(layer.local, local, config_of(layer, **others), groups)


def splits_as_lists(dispatcher):
    """The oracle reads its split sizes from arrays of numpy, into which it copies tensors of CUDA only: with a GPU
    they are arrays here, and stay so."""
    for name in ("input_splits", "output_splits"):
        splits = getattr(dispatcher, name, None)
        if isinstance(splits, torch.Tensor):
            setattr(dispatcher, name, splits.tolist())


def through(dispatcher, layer, x, routing, weights):
    """One pass of a layer through the six calls of a dispatcher."""
    routing_map, probs = routing
    hidden, probs = dispatcher.dispatch_preprocess(x, routing_map, probs)
    splits_as_lists(dispatcher)
    hidden, probs = dispatcher.token_dispatch(hidden, probs)
    rows, counts, probs = dispatcher.dispatch_postprocess(hidden, probs)
    y = layer.by_counts(rows, counts.tolist(), weights) * probs[:, None]
    y = dispatcher.combine_preprocess(y)
    y = dispatcher.token_combine(y)
    return dispatcher.combine_postprocess(y)


def route(x, router, topk):
    probs = (x @ router).softmax(1)
    chosen = torch.zeros_like(probs, dtype=torch.bool).scatter_(
        1, probs.topk(topk, 1).indices, True
    )
    return chosen, probs * chosen


def tokens_of(layer, step):
    """T differs by step and rank; one rank has none now and then."""
    if (step + layer.me) % 7 == 3:
        return 0
    return 8 + (5 * step + 3 * layer.me) % 9


def train(layer, dispatcher):
    """The losses of 50 steps, and the router and expert weights after them."""
    draw = torch.Generator().manual_seed(7)
    # Drawn on the host, as the layer's numbers are.
    router = torch.randn(layer.hidden, layer.experts, generator=draw).to(device()).requires_grad_()
    wanted = torch.randn(layer.hidden, layer.hidden, generator=draw) / layer.hidden**0.5
    wanted = wanted.to(device())
    weights, losses = layer.own_weights(), []
    for step in range(STEPS):
        x, _, _ = layer.inputs(tokens_of(layer, step), step)
        x.requires_grad_()
        out = through(dispatcher, layer, x, route(x, router, layer.topk), weights)
        tokens = layer.sum_of_ranks(torch.tensor(len(x), device=device()))
        loss = (out - torch.tanh(x.detach() @ wanted)).square().sum() / tokens
        loss.backward()
        losses.append(layer.sum_of_ranks(loss).item())
        with torch.no_grad():
            weights -= 0.5 * weights.grad
            router -= 0.5 * layer.sum_of_ranks(router.grad)
        weights.grad = router.grad = None
    return torch.tensor(losses), router.detach(), weights.detach()


def trains_as_its_own_all_to_all(world, port, size, folder):
    on_path(folder)
    layer = Layer(group_of(world, port, size), experts=8, hidden=32, topk=3, seed=11)
    return compare_with_its_own(layer, dispatcher_of(layer, "MoEFlexTokenDispatcher"))


def compare_with_its_own(layer, dispatcher):
    """Trains over a dispatcher, and over megatron's own all to all. Returns how far their losses are apart."""
    losses, router, weights = train(layer, dispatcher)
    with cuda_of_the_host():
        of_oracle = train(layer, dispatcher_of(layer, "MoEAlltoAllTokenDispatcher"))
    # Sums of a token's rows are in another order, so that bits differ: docs/semantics.md. Training carries that on.
    close(losses[0], of_oracle[0][0], 1e-6)
    close(losses, of_oracle[0], 1e-4)
    close(router, of_oracle[1], 1e-3)
    close(weights, of_oracle[2], 1e-3)
    assert losses[-10:].mean() < 0.8 * losses[:10].mean()
    return (losses - of_oracle[0]).abs().max().item()


def gradient(out):
    return torch.sin(torch.arange(out.numel(), dtype=torch.float32, device=out.device)).view_as(out)


def fused_calls_are_a_dense_layer(world, port, size, folder):
    """`fused_dispatch` and `fused_combine`, forward and backward: at once and asynchronous, each with tokens on all
    ranks, on all but one, and on none."""
    on_path(folder)
    fused = importlib.import_module(f"{PACKAGE}.fused_a2a")
    layer = Layer(group_of(world, port, size), experts=8, hidden=32, topk=3, seed=5)
    without_tokens = ((), (1,), range(layer.ranks))
    for step, (is_async, empty) in enumerate(itertools.product((False, True), without_tokens)):
        tokens = 0 if layer.me in empty else 6 + layer.me
        x, ids, probs = layer.inputs(tokens, step, dropped=0.2)
        found, expected = ([one.clone().requires_grad_() for one in (x, probs)] for _ in range(2))
        options = {"async_finish": is_async, "allocate_on_comm_stream": is_async}
        rows, local, its_probs, counts, handle = fused.fused_dispatch(
            found[0], ids, found[1], layer.experts, layer.group, **options
        )
        assert counts.tolist() == torch.bincount(local[local >= 0], minlength=layer.local).tolist()
        y = torch.zeros_like(rows)
        for expert in range(layer.local):
            scale = torch.where(local == expert, its_probs, 0).sum(1, keepdim=True)
            y = y + scale * layer.expert(rows, layer.first + expert)
        out, _ = fused.fused_combine(y, layer.group, handle, **options)
        reference = layer.dense(expected[0], ids, expected[1])
        close(out, reference, 1e-5)
        grad = gradient(out)
        out.backward(grad)
        reference.backward(grad)
        close(found[0].grad, expected[0].grad, 1e-5)
        close(found[1].grad, torch.where(ids >= 0, expected[1].grad, 0), 1e-5)
