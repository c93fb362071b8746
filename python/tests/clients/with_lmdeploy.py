"""LMDeploy's three dispatchers on the drop-in: one buffer serves normal and low latency calls."""

import importlib

import torch
from common import Layer, close, group_of, on_path
from deep_ep.utils.math import per_token_cast_back

MODULE = "lmdeploy.pytorch.backends.cuda.token_dispatcher"
MOST = 16


def set_up(world, port, size, folder, kind, **options):
    on_path(folder)
    module = importlib.import_module(MODULE)
    layer = Layer(group_of(world, port, size), 8, 256, 3, torch.bfloat16, seed=41)
    buffers = module.DeepEPBuffer
    if buffers._buffer_common is not None and buffers._buffer_common.group != layer.group:
        # It keeps one buffer for its process, whatever the group: a group of another size is another process.
        buffers._buffer_common.destroy()
        buffers._buffer_common = None
    buffers._explicitly_destroy = True
    dispatcher = getattr(module, kind)(
        layer.group,
        layer.experts,
        layer.local,
        layer.hidden,
        layer.dtype,
        num_max_dispatch_tokens_per_rank=MOST,
        **options,
    )
    return module, layer, dispatcher


def inputs_of(layer, step):
    tokens = 0 if step == 2 and layer.me == 1 else 5 + 3 * ((step + layer.me) % 3)
    x, ids, weights = layer.inputs(tokens, step)
    expected = layer.dense(x.float(), ids, weights, layer.weights.float())
    return x, ids, weights, expected


def plain_dispatcher(world, port, size, folder):
    _, layer, dispatcher = set_up(world, port, size, folder, "DeepEPTokenDispatcher")
    # It takes the global number of experts for the columns of a map of local ids: one rank's are a part of them.
    weights = layer.own_weights().detach()
    for step in range(3):
        x, ids, scores, expected = inputs_of(layer, step)
        rows, _, _, counts = dispatcher.dispatch(x, ids.int(), scores)
        y = layer.by_counts(rows, counts.tolist(), weights)
        close(dispatcher.combine(y), expected, 0.03)
        dispatcher.release()


def normal_dispatcher(world, port, size, folder):
    """Ids and weights come with the rows; counts are rounded up to the experts' alignment."""
    _, layer, dispatcher = set_up(world, port, size, folder, "DeepEPTokenDispatcherNormal")
    for step in range(3):
        x, ids, scores, expected = inputs_of(layer, step)
        for is_async in (False, True):
            if is_async:
                rows, local, its, counts, handle, event = dispatcher.dispatch_normal_async(
                    x, ids, scores, previous_event=dispatcher.get_buffer().capture()
                )
                event.current_stream_wait()
            else:
                rows, local, its, counts = dispatcher.dispatch(x, ids, scores)
            exact = torch.bincount(local[local >= 0], minlength=layer.local)
            assert counts == (-(-exact // 128) * 128).tolist()
            y = torch.zeros_like(rows, dtype=torch.float32)
            for expert in range(layer.local):
                scale = torch.where(local == expert, its, 0).sum(1, keepdim=True)
                y += scale * layer.expert(rows, layer.first + expert).float()
            if is_async:
                out, event = dispatcher.combine_normal_async(y.bfloat16(), handle)
                event.current_stream_wait()
            else:
                out = dispatcher.combine(y.bfloat16())
            close(out, expected, 0.03)


def low_latency_dispatcher(world, port, size, folder):
    """Rows of FP8, with hooks and with events, after normal calls of the same buffer, which it cleans between."""
    for has_hook in (True, False):
        module, layer, dispatcher = set_up(
            world, port, size, folder, "DeepEPTokenDispatcherLowLatency", return_recv_hook=has_hook
        )
        mode = module.DeepEPMode
        module.DeepEPBuffer.set_deepep_mode(mode.NORMAL)
        module.DeepEPBuffer.set_deepep_mode(mode.LOW_LATENCY)
        for step in range(3):
            x, ids, scores, expected = inputs_of(layer, step)
            packed, ids, scores, counts, expected_m = dispatcher.dispatch(
                x, ids, scores, layer.experts
            )
            rows, scales = (module.DisposibleTensor.maybe_unwrap(one) for one in packed)
            assert expected_m >= 1
            y = torch.zeros(rows.shape, dtype=torch.bfloat16, device=rows.device)
            for expert, count in enumerate(counts.tolist()):
                own = per_token_cast_back(rows[expert, :count], scales[expert, :count].contiguous())
                y[expert, :count] = layer.expert(own.bfloat16(), layer.first + expert)
            close(dispatcher.combine(y, ids, scores), expected, 0.1)
