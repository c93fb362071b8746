"""nemo-automodel's flex dispatcher on the drop-in, in both forms of its dispatch."""

import importlib

import torch
from common import Layer, close, group_of, on_path

PACKAGE = "nemo_automodel.components.moe.megatron"


def flex_dispatcher_is_a_dense_layer(world, port, size, folder):
    on_path(folder)
    module = importlib.import_module(f"{PACKAGE}.token_dispatcher")
    layer = Layer(group_of(world, port, size), experts=8, hidden=64, topk=3, seed=31)
    local = list(range(layer.first, layer.first + layer.local))
    for step, is_async in enumerate((False, True, True)):
        config = module.TokenDispatcherConfig(
            moe_router_topk=layer.topk,
            num_moe_experts=layer.experts,
            # The shared one is of the first group that its process made.
            moe_share_token_dispatcher=False,
            moe_deepep_async_dispatch=is_async,
            moe_permute_fusion=False,
        )
        dispatcher = module.MoEFlexTokenDispatcher(layer.local, local, config, layer.group)
        tokens = 0 if step == 2 and layer.me == 1 else 7 + 2 * layer.me
        x, ids, probs = layer.inputs(tokens, step)
        found, expected = ([one.clone().requires_grad_() for one in (x, probs)] for _ in range(2))
        weights = layer.own_weights()
        rows, counts, its_probs = dispatcher.token_permutation2(found[0], tokens, found[1], ids)
        y = layer.by_counts(rows, counts.tolist(), weights) * its_probs.view(-1, 1)
        out = dispatcher.token_unpermutation(y)
        reference = layer.dense(expected[0], ids, expected[1])
        close(out, reference, 1e-5)
        place = torch.arange(out.numel(), dtype=torch.float32, device=out.device)
        grad = torch.sin(place).view(out.shape)
        out.backward(grad)
        reference.backward(grad)
        close(found[0].grad, expected[0].grad, 1e-5)
        close(found[1].grad, expected[1].grad, 1e-5)


def buffer_is_freed_before_the_group(world, port, size, folder):
    """NeMo frees its buffer before `destroy_process_group`; another use makes a new one."""
    on_path(folder)
    fused = importlib.import_module(f"{PACKAGE}.fused_a2a")
    fused.free_buffer()
    assert fused._buffer is None
    flex_dispatcher_is_a_dense_layer(world, port, size, folder)
    assert fused._buffer is not None
    fused.free_buffer()
