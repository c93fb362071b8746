"""nemo-automodel's flex dispatcher on the drop-in, in both forms of its dispatch."""

import importlib
import itertools

import torch
from common import Layer, close, group_of, on_path
from torch.utils.checkpoint import checkpoint

PACKAGE = "nemo_automodel.components.moe.megatron"


def check_step(layer, step, is_async, tokens, run):
    """A step of the flex dispatcher, which `run` calls with its arguments, against the dense layer."""
    module = importlib.import_module(f"{PACKAGE}.token_dispatcher")
    config = module.TokenDispatcherConfig(
        moe_router_topk=layer.topk,
        num_moe_experts=layer.experts,
        # The shared one is of the first group that its process made.
        moe_share_token_dispatcher=False,
        moe_deepep_async_dispatch=is_async,
        moe_permute_fusion=False,
    )
    local = list(range(layer.first, layer.first + layer.local))
    dispatcher = module.MoEFlexTokenDispatcher(layer.local, local, config, layer.group)
    x, ids, probs = layer.inputs(tokens, step)
    found, expected = ([one.clone().requires_grad_() for one in (x, probs)] for _ in range(2))
    weights = layer.own_weights()

    def forward(x, probs):
        rows, counts, its_probs = dispatcher.token_permutation2(x, tokens, probs, ids)
        y = layer.by_counts(rows, counts.tolist(), weights) * its_probs.view(-1, 1)
        return dispatcher.token_unpermutation(y)

    out = run(forward, *found)
    reference = layer.dense(expected[0], ids, expected[1])
    close(out, reference, 1e-5)
    place = torch.arange(out.numel(), dtype=torch.float32, device=out.device)
    grad = torch.sin(place).view(out.shape)
    out.backward(grad)
    reference.backward(grad)
    close(found[0].grad, expected[0].grad, 1e-5)
    close(found[1].grad, expected[1].grad, 1e-5)


def forms(layer):
    """At once and asynchronous, each with tokens on all ranks and on all but one: the form, and T of this rank."""
    for is_async, is_empty in itertools.product((False, True), repeat=2):
        yield is_async, 0 if is_empty and layer.me == 1 else 7 + 2 * layer.me


def flex_dispatcher_is_a_dense_layer(world, port, size, folder):
    on_path(folder)
    layer = Layer(group_of(world, port, size), experts=8, hidden=64, topk=3, seed=31)
    for step, form in enumerate(forms(layer)):
        check_step(layer, step, *form, lambda forward, *args: forward(*args))


def checkpoints_replay_the_dispatch(world, port, size, folder):
    """Activation checkpointing, as NeMo sets it up: what is computed again dispatches by the handle of the forward."""
    on_path(folder)
    fused = importlib.import_module(f"{PACKAGE}.fused_a2a")
    layer = Layer(group_of(world, port, size), experts=8, hidden=64, topk=3, seed=32)
    for step, form in enumerate(forms(layer)):
        recorder = fused.DispatchReplayRecorder()
        scopes = [fused.dispatch_replay_scope(recorder, mode) for mode in ("record", "replay")]

        def run(forward, *args, scopes=scopes):
            return checkpoint(forward, *args, use_reentrant=False, context_fn=lambda: scopes)

        check_step(layer, step, *form, run)
        # It was replayed: none is left, and none was missed.
        assert recorder._cursor == len(recorder._records) == 1
        assert recorder.replay_misses == 0


def buffer_is_freed_before_the_group(world, port, size, folder):
    """NeMo frees its buffer before `destroy_process_group`; another use makes a new one."""
    on_path(folder)
    fused = importlib.import_module(f"{PACKAGE}.fused_a2a")
    fused.free_buffer()
    assert fused._buffer is None
    flex_dispatcher_is_a_dense_layer(world, port, size, folder)
    assert fused._buffer is not None
    fused.free_buffer()
