"""Frameworks' dispatchers over Hybrid-EP on the drop-in: megatron-core's, NeMo's and torchtitan's."""

import contextlib
import importlib
import logging

import torch
from common import Layer, by_path, close, device, group_of, on_path, replaced, stub
from gpu_common import is_gpu
from with_megatron import compare_with_its_own, dispatcher_of, gradient, route, through

# Their config has these fields for Hybrid-EP.
FIELDS = {
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_expert_rank_capacity_factor": None,
    "moe_hybridep_num_blocks_permute": None,
    "moe_hybridep_num_blocks_unpermute": None,
    "moe_hybridep_num_sms_preprocessing": None,
    "moe_hybridep_pad_uneven_dispatch_inputs": False,
    "moe_permute_fusion_into_hybridep": False,
}


@contextlib.contextmanager
def without_cuda():
    """They name the device `cuda` for a flag, and wait for it once. With a GPU it is there."""
    if is_gpu():
        yield
        return
    zeros = torch.zeros

    def on_the_host(*shape, **options):
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return zeros(*shape, **options)

    with (
        replaced(torch, zeros=on_the_host),
        replaced(torch.cuda, synchronize=lambda *_: None),
    ):
        yield


def megatron_of(layer, **others):
    """megatron's dispatcher, whose buffer is made for this layer by its first dispatch."""
    importlib.import_module("megatron.core.transformer.moe.fused_a2a").reset_hybrid_ep_buffer()
    with without_cuda():
        return dispatcher_of(layer, "MoEFlexTokenDispatcher", **{**FIELDS, **others})


def hybrid_ep_trains_as_its_own_all_to_all(world, port, size, folder):
    """Ranks have other numbers of tokens, and their tensors are not padded for it."""
    on_path(folder)
    layer = Layer(group_of(world, port, size), experts=8, hidden=32, topk=3, seed=11)
    return compare_with_its_own(layer, megatron_of(layer))


def hybrid_ep_keeps_to_its_budget(world, port, size, folder):
    """A budget of rows, for which the host does not wait: with room for all, a dense layer; without, the flag of rows
    that were dropped, and the sums of the others."""
    on_path(folder)
    layer = Layer(group_of(world, port, size), experts=8, hidden=32, topk=3, seed=12)
    x, _, _ = layer.inputs(10)
    draw = torch.Generator().manual_seed(3)
    router = torch.randn(layer.hidden, layer.experts, generator=draw).to(device())
    routing = route(x, router, layer.topk)
    ids = routing[1].topk(layer.topk, 1)
    dense = layer.dense(x, ids.indices, ids.values)
    for fused in (False, True):
        for factor in (layer.ranks, 0.1):
            dispatcher = megatron_of(
                layer,
                moe_expert_rank_capacity_factor=factor,
                moe_permute_fusion_into_hybridep=fused,
                # Without a format it divides by 0.
                fp8="hybrid",
                fp8_recipe="delayed",
            )
            given = x.clone().requires_grad_()
            out = through(dispatcher, layer, given, routing, layer.own_weights())
            assert bool(dispatcher.check_over_budget()) == (factor < 1)
            out.backward(gradient(out))
            if factor < 1:
                assert not torch.equal(out, dense)
            else:
                close(out, dense, 1e-5)


def hybrid_ep_is_a_dense_layer(world, port, size, folder):
    """Its dispatcher, forward and backward, with checkpoints that replay the dispatch by a handle."""
    on_path(folder)
    fused = importlib.import_module("nemo_automodel.components.moe.megatron.fused_a2a")
    layer = Layer(group_of(world, port, size), experts=8, hidden=64, topk=3, seed=31)
    fused.reset_hybrid_ep_buffer()
    with without_cuda():
        for step, tokens in enumerate((7 + 2 * layer.me, 0 if layer.me == 1 else 5)):
            x, ids, weights = layer.inputs(tokens, step)
            probs = torch.zeros(tokens, layer.experts, device=x.device).scatter_(1, ids, weights)
            expected = [one.clone().requires_grad_() for one in (x, weights)]
            reference = layer.dense(expected[0], ids, expected[1])
            reference.backward(gradient(reference))
            for is_fused in (False, True):
                found = [one.clone().requires_grad_() for one in (x, probs)]
                recorder = fused.HybridEPDispatchReplayRecorder()
                modes = ("record", "replay")
                scopes = [fused.hybridep_dispatch_replay_scope(recorder, mode) for mode in modes]

                def forward(x, probs, ids=ids, is_fused=is_fused):
                    rows, its_probs, _, counts, handle = fused.hybrid_ep_dispatch(
                        x=x,
                        routing_map=None,
                        topk_idx=ids,
                        probs=probs,
                        num_experts=layer.experts,
                        group=layer.group,
                        num_local_experts=layer.local,
                        fuse_permute=is_fused,
                    )
                    y = layer.by_counts(rows, counts.tolist(), layer.weights[layer.first :])
                    y = y * its_probs[:, None]
                    return fused.hybrid_ep_combine(
                        x=y, handle=handle, num_permuted_tokens=int(counts.sum()), pad_multiple=None
                    )

                with scopes[0]:
                    out = forward(*found)
                recorder.finalize()
                close(out, reference, 1e-5)
                out.backward(gradient(out))
                close(found[0].grad, expected[0].grad, 1e-5)
                close(found[1].grad.gather(1, ids), expected[1].grad, 1e-5)
                with scopes[1]:
                    again = forward(*found)
                assert torch.equal(again, out)
                assert recorder.replay_misses == 0


def torchtitan_of(folder):
    stub("torchtitan.tools")
    stub("torchtitan.tools.logging", logger=logging.getLogger("torchtitan"))
    path = folder / "torchtitan/distributed/deepep/hybridep.py"
    module = by_path("torchtitan_hybridep", path)
    if not hasattr(module, "_on_the_host"):
        # The module registers its operators for CUDA alone.
        module._on_the_host = True
        for name in ("_dispatch_impl", "_combine_impl", "_dispatch_bwd_impl", "_combine_bwd_impl"):
            operator = getattr(module, name)
            operator.register_kernel("cpu")(operator._init_fn)
    return module


def hybrid_ep_is_dense(world, port, size, folder):
    """Forward and backward, with padding and without; where the host waits for rows, and where it does not."""
    module = torchtitan_of(folder)
    group = group_of(world, port, size)
    layer = Layer(group, experts=8, hidden=128, topk=2, seed=3)
    module.get_buffer(group, layer.hidden, 24, layer.local)
    for step, (capacity, multiple) in enumerate(((None, None), (None, 8), (1.0, 8), (1.0, None))):
        x, ids, scores = layer.inputs(24 if capacity else 5 + 9 * layer.me, step)
        weights = layer.own_weights()
        found = [one.clone().requires_grad_() for one in (x, scores)]
        expected = [one.clone().requires_grad_() for one in (x, scores)]
        rows, counts, state = module.dispatch_tokens(
            found[0],
            ids,
            found[1],
            layer.local,
            layer.experts,
            group,
            non_blocking_expert_capacity_factor=capacity,
            pad_multiple=multiple,
        )
        y = layer.by_counts(rows, counts.tolist(), weights)
        out = module.combine_tokens(y, state, multiple)
        reference = layer.dense(expected[0], ids, expected[1])
        close(out, reference, 1e-5)
        out.backward(gradient(out))
        reference.backward(gradient(reference))
        close(found[0].grad, expected[0].grad, 1e-5)
        close(found[1].grad, expected[1].grad, 1e-4)
