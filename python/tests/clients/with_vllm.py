"""vLLM's prepare and finalize on the drop-in: high throughput, low latency, and V2 for prefill and for decode."""

import importlib
import types

import torch
import vllm_stubs
from common import Layer, close, group_of
from deep_ep.utils.math import per_token_cast_back

import deep_ep

FUSED = f"{vllm_stubs.LAYERS}.fused_moe"
TOLERANCE = {False: 0.03, True: 0.1}
_context = None


def module_of(folder, name):
    """A module of vLLM over the stubs."""
    global _context
    if _context is None:
        _context = vllm_stubs.install(folder)
    return importlib.import_module(f"{FUSED}.{name}")


def tokens_of(layer, step):
    """T of each rank. One rank has none in the last step."""
    tokens = [3 + (5 * step + 2 * rank) % 9 for rank in range(layer.ranks)]
    if step == 2:
        tokens[1] = 0
    return tokens


def plain(rows, scales, dtype):
    """The rows that experts compute with."""
    if scales is None:
        return rows
    flat = per_token_cast_back(rows.view(-1, rows.shape[-1]), scales.reshape(-1, scales.shape[-1]))
    return flat.view(rows.shape).to(dtype)


def by_choices(layer, rows, ids):
    """The outputs of vLLM's experts: an output for each row and choice, zeros for a choice of another rank."""
    out = rows.new_zeros((*ids.shape, layer.hidden), dtype=layer.dtype)
    for expert in range(layer.first, layer.first + layer.local):
        y = layer.expert(rows, expert)
        out = torch.where((ids == expert)[:, :, None], y[:, None], out)
    return out


def finish(layer, module, impl, y, is_async, tokens, ids, weights):
    """Finalize, and the output of the layer."""
    out = y.new_full((tokens, layer.hidden), float("nan"))
    reduce = module.TopKWeightAndReduceDelegate()
    arguments = (out, y, weights, ids, False, reduce)
    if not is_async:
        impl.finalize(*arguments)
        return out
    parts = impl.finalize_async(*arguments)
    for part in parts if isinstance(parts, tuple) else (parts,):
        part()
    return out


def prepare(impl, is_async, layer, config, x, ids, weights):
    arguments = (x, weights, ids, layer.experts, None, False, config)
    if not is_async:
        return impl.prepare(*arguments)
    parts = impl.prepare_async(*arguments)
    if isinstance(parts, tuple):
        hook, receive = parts
        hook()
        return receive()
    return parts()


def steps(layer, run, is_fp8):
    """Three steps in both forms, synchronous and asynchronous, against the dense layer."""
    for step in range(3):
        tokens = tokens_of(layer, step)
        x, ids, weights = layer.inputs(tokens[layer.me], step)
        expected = layer.dense(x.float(), ids, weights, layer.weights.float())
        for is_async in (False, True):
            close(run(is_async, max(tokens), x, ids, weights), expected, TOLERANCE[is_fp8])


def high_throughput(world, port, size, folder):
    module = module_of(folder, "prepare_finalize.deepep_ht")
    layer = Layer(group_of(world, port, size), 8, 512, 3, torch.bfloat16, seed=21)
    buffer = deep_ep.Buffer(layer.group, 1 << 20, 0, explicitly_destroy=True)
    impl = module.DeepEPHTPrepareAndFinalize(buffer, layer.ranks, layer.ranks, layer.first)

    def run(is_fp8, is_async, _, x, ids, weights):
        config = vllm_stubs.quant_config(is_fp8)
        rows, scales, meta, its_ids, its_weights = prepare(
            impl, is_async, layer, config, x, ids, weights
        )
        here = (its_ids >= layer.first) & (its_ids < layer.first + layer.local)
        counts = torch.bincount(its_ids[here] - layer.first, minlength=layer.local)
        assert meta.expert_num_tokens.tolist() == counts.tolist()
        y = by_choices(layer, plain(rows, scales, layer.dtype), its_ids)
        # A choice of another rank has weight 0 in vLLM's experts.
        its_weights = torch.where(here, its_weights, 0)
        return finish(layer, module, impl, y, is_async, len(x), its_ids, its_weights)

    for is_fp8 in (False, True):
        steps(layer, lambda *args, fp8=is_fp8: run(fp8, *args), is_fp8)
    buffer.destroy()


def low_latency_buffer(layer, most):
    """A buffer as vLLM makes it."""
    nbytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        most, layer.hidden, layer.ranks, layer.experts
    )
    return deep_ep.Buffer(
        layer.group,
        0,
        nbytes,
        low_latency_mode=True,
        num_qps_per_rank=layer.local,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=True,
    )


def low_latency(world, port, size, folder):
    module = module_of(folder, "prepare_finalize.deepep_ll")
    # The least hidden size that vLLM takes.
    layer = Layer(group_of(world, port, size), 8, 2048, 3, torch.bfloat16, seed=22)
    most = 16
    buffer = low_latency_buffer(layer, most)

    def run(impl, is_fp8, is_async, _, x, ids, weights):
        config = vllm_stubs.quant_config(is_fp8)
        rows, scales, meta, _, _ = prepare(impl, is_async, layer, config, x, ids, weights)
        rows = plain(rows, scales, layer.dtype)
        assert rows.shape == (layer.local, layer.ranks * most, layer.hidden)
        y = torch.zeros_like(rows)
        for expert, count in enumerate(meta.expert_num_tokens.tolist()):
            y[expert, :count] = layer.expert(rows[expert, :count], layer.first + expert)
        return finish(layer, module, impl, y, is_async, len(x), ids, weights)

    for is_fp8 in (False, True):
        impl = module.DeepEPLLPrepareAndFinalize(buffer, most, layer.ranks, is_fp8)
        steps(layer, lambda *args, i=impl, fp8=is_fp8: run(i, fp8, *args), is_fp8)
    buffer.destroy()


def elastic_impl(module, buffer, layer, is_fp8, is_decode):
    """The class for V2. On a GPU it makes ids global by its own kernel; without one the experts do."""
    impl = module.DeepEPV2PrepareAndFinalize(
        buffer,
        layer.ranks,
        layer.ranks,
        layer.first,
        layer.experts,
        layer.topk,
        is_fp8,
        use_cudagraph=is_decode,
    )
    impl.defer_globalize = is_decode and not torch.cuda.is_available()
    return impl


def name_tokens(layer, most):
    """The batch of this step: the most tokens of a rank."""
    counts = torch.tensor([most] * layer.ranks)
    _context.dp_metadata = types.SimpleNamespace(num_tokens_across_dp_cpu=counts)


def global_ids(impl, meta, ids):
    """As vLLM's experts make ids global where that is left to them: rows behind the last one are garbage."""
    if not impl.defer_globalize:
        return ids
    has_arrived = torch.arange(len(ids), device=ids.device) < meta.psum_recv_per_rank[-1]
    return torch.where(has_arrived[:, None] & (ids >= 0), ids + meta.rank_expert_offset, -1)


def elastic(world, port, size, folder):
    """V2: expanded with counts for prefill; for decode in the order of arrival, with M rounded up to a power of two."""
    module = module_of(folder, "prepare_finalize.deepep_v2")
    layer = Layer(group_of(world, port, size), 8, 512, 3, torch.bfloat16, seed=23)
    buffer = deep_ep.ElasticBuffer(
        layer.group,
        num_max_tokens_per_rank=16,
        hidden=layer.hidden,
        num_topk=layer.topk,
        explicitly_destroy=True,
    )

    def run(is_decode, is_fp8, is_async, most, x, ids, weights):
        impl = elastic_impl(module, buffer, layer, is_fp8, is_decode)
        name_tokens(layer, most)
        config = vllm_stubs.quant_config(is_fp8)
        rows, scales, meta, its_ids, its_weights = prepare(
            impl, is_async, layer, config, x, ids, weights
        )
        if is_decode:
            its_ids = global_ids(impl, meta, its_ids)
        else:
            assert its_ids.shape == (int(meta.expert_num_tokens.sum()), 1)
        y = by_choices(layer, plain(rows, scales, layer.dtype), its_ids)
        its_weights = torch.where(its_ids >= 0, its_weights, 0)
        return finish(layer, module, impl, y, is_async, len(x), its_ids, its_weights)

    for is_decode in (False, True):
        for is_fp8 in (False, True):
            steps(layer, lambda *args, d=is_decode, fp8=is_fp8: run(d, fp8, *args), is_fp8)
    buffer.destroy()
