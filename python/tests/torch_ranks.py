"""Ranks that call the drop-in with torch's CPU tensors, as frameworks do. It needs torch."""

import gc
import os
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gpu_common import SMALL, inputs, output_mode, v1
from gpu_compile import check_compiled, check_compiled_constructors
from gpu_reports import check_no_rows
from gradients import check_gradients
from oracle import Case
from pool import CONFIG
from test_deep_ep_normal import buffer_of, times
from test_exchange import opened

import tokenyard
from tokenyard import errors
from tokenyard._native import _Reader, _record_at
from tokenyard.deep_ep import Buffer, ElasticBuffer
from tokenyard.deep_ep.utils import envs, refs
from tokenyard.deep_ep.utils.gate import get_unbalanced_scores
from tokenyard.deep_ep.utils.math import per_token_cast_to_fp8

CASE = Case(2, seed=2, hidden=256)

# Ranks share the cores.
torch.set_num_threads(1)


def tensors(case, me, dtype=torch.float32):
    x, idx, weights = map(torch.from_numpy, (case.x[me], case.idx[me], case.weights[me]))
    return x.to(dtype), idx, weights


def layout_of(buffer, idx, experts):
    per_rank, per_domain, per_expert, is_in, _ = buffer.get_dispatch_layout(idx, experts)
    return {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_domain,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": is_in,
    }


def normal(world, case):
    me, buffer = world.rank, buffer_of(world)
    assert torch.equal(buffer.left_out, torch.zeros(1, dtype=torch.int32))
    for dtype in (torch.float32, torch.bfloat16):
        x, idx, weights = tensors(case, me, dtype)
        recv_x, recv_idx, recv_weights, per_expert, handle, _ = buffer.dispatch(
            x.requires_grad_(),
            topk_idx=idx,
            topk_weights=weights,
            **layout_of(buffer, idx, case.experts),
        )
        assert (recv_x.dtype, recv_idx.dtype) == (dtype, torch.int64)
        assert recv_weights.dtype == torch.float32
        assert all(isinstance(tensor, torch.Tensor) for tensor in handle)
        assert per_expert == case.expert_counts(me)
        expected = torch.from_numpy(case.rows(case.sources(me))).to(dtype)
        assert torch.equal(recv_x, expected)
        combined, back, _ = buffer.combine(recv_x, handle, recv_weights)
        assert torch.equal(combined, (x * torch.from_numpy(times(case, me))[:, None]).to(dtype))
        assert torch.equal(back, torch.where(idx >= 0, weights, 0))
        with pytest.raises(ValueError, match="found a tensor on meta; expected one on cpu"):
            buffer.dispatch(x.to("meta"), handle=handle)
    buffer.destroy()


def gradients(world, with_checkpoint, case):
    buffer = buffer_of(world)
    check_gradients(buffer, case, tensors(case, world.rank), with_checkpoint)
    buffer.destroy()


def low_latency(world, case):
    me, buffer = world.rank, buffer_of(world, low_latency_mode=True)
    x, idx, weights = tensors(case, me, torch.bfloat16)
    (recv_x, scales), counts, handle, _, hook = buffer.low_latency_dispatch(
        x, idx, case.max_tokens, case.experts, return_recv_hook=True
    )
    hook()
    assert recv_x.dtype == torch.float8_e4m3fn
    assert scales.stride() == (scales[0].numel(), 1, scales.shape[1])
    assert counts.tolist() == case.expert_counts(me)
    y = recv_x.float() * scales.repeat_interleave(128, dim=2)
    combined, _, hook = buffer.low_latency_combine(
        y.bfloat16(), idx, weights, handle, return_recv_hook=True
    )
    hook()
    expected = x.float() * torch.where(idx >= 0, weights, 0).sum(1, keepdim=True)
    torch.testing.assert_close(combined.float(), expected, rtol=0.1, atol=0.1)
    memory = buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_()
    assert memory.numel() == 0
    buffer.destroy()


def arrays_of_any_kind(world, case):
    """Read-only, reversed and mixed inputs count as their copies; behind the rows that arrived are zeros."""
    me, buffer = world.rank, buffer_of(world)
    x, idx, weights = tensors(case, me)
    options = layout_of(buffer, idx, case.experts) | {"topk_weights": weights.numpy()}
    expected, *_ = buffer.dispatch(x, topk_idx=idx.numpy(), **options)
    frozen = x.numpy().copy()
    frozen.flags.writeable = False
    for given in (frozen, x.numpy()[::-1].copy()[::-1], x.numpy()):
        rows, *_ = buffer.dispatch(given, topk_idx=idx, **options)
        assert isinstance(rows, np.ndarray)
        assert np.array_equal(rows, expected.numpy())
    worst = case.ranks * case.max_tokens
    rows, ids, *_ = buffer.dispatch(x, topk_idx=idx, num_worst_tokens=worst, **options)
    assert torch.equal(rows[: len(expected)], expected)
    assert not rows[len(expected) :].any()
    assert (ids[len(expected) :] == -1).all()
    with pytest.raises(errors.InvalidInputError, match="topk_idx: found a tensor on meta"):
        buffer.get_dispatch_layout(idx.to("meta"), case.experts)
    buffer.destroy()


def halves_apart(world, case):
    """A hook outside of the mode that its call was made in; counts that the caller writes; statistics that cannot be
    written."""
    me, buffer = world.rank, buffer_of(world, low_latency_mode=True)
    x, idx, weights = tensors(case, me, torch.bfloat16)
    options = {"use_fp8": False, "return_recv_hook": True}
    call = (x, idx, case.max_tokens, case.experts)
    with torch.inference_mode():
        stats = torch.zeros(case.experts // case.ranks, dtype=torch.int32)
        rows, counts, handle, _, hook = buffer.low_latency_dispatch(
            *call, cumulative_local_expert_recv_stats=stats, **options
        )
    hook()
    assert stats.tolist() == counts.tolist() == case.expert_counts(me)
    combined, _, hook = buffer.low_latency_combine(
        rows, idx, weights, handle, return_recv_hook=True
    )
    hook()
    with torch.inference_mode():
        counts.zero_()
    again, _, hook = buffer.low_latency_combine(rows, idx, weights, handle, return_recv_hook=True)
    hook()
    assert torch.equal(combined, again)
    frozen = np.zeros(len(counts), np.int32)
    frozen.flags.writeable = False
    with pytest.raises(tokenyard.Error, match="found a read-only numpy array of int32"):
        buffer.low_latency_dispatch(*call, cumulative_local_expert_recv_stats=frozen)
    buffer.destroy()


def elastic(world, case):
    me = world.rank
    buffer_of(world).destroy()
    buffer = ElasticBuffer(world, num_max_tokens_per_rank=case.max_tokens, explicitly_destroy=True)
    x, idx, weights = tensors(case, me, torch.bfloat16)
    recv_x, _, recv_weights, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=case.experts, do_expand=True
    )
    names = [name for name, value in vars(handle).items() if isinstance(value, torch.Tensor)]
    saved = [getattr(handle, name) for name in names]
    for name in names:
        setattr(handle, name, None)
    for name, tensor in zip(names, saved, strict=True):
        setattr(handle, name, tensor)
    combined, back, _ = buffer.combine(recv_x, handle, recv_weights)
    assert torch.equal(back, torch.where(idx >= 0, weights, 0))
    times_selected = (idx >= 0).sum(1, keepdim=True)
    torch.testing.assert_close(combined.float(), x.float() * times_selected, rtol=0.02, atol=0.02)
    buffer.destroy()


def references(world, port, case):
    """DeepEP's own comparison of V2, in our words: bit for bit, with what scripts compute by `deep_ep.utils.refs`."""
    me = world.rank
    buffer_of(world).destroy()
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=me, world_size=world.ranks
    )
    buffer = ElasticBuffer(world, num_max_tokens_per_rank=case.max_tokens, explicitly_destroy=True)
    try:
        x, idx, weights = tensors(case, me, torch.bfloat16)
        bias = torch.ones_like(x)
        for rows in (x, per_token_cast_to_fp8(x)):
            ref_x, ref_idx, ref_weights, sources, counts = refs.dispatch(
                rows, idx, weights, case.max_tokens, case.experts
            )
            recv_x, recv_idx, recv_weights, handle, _ = buffer.dispatch(
                rows, topk_idx=idx, topk_weights=weights, num_experts=case.experts
            )
            pairs = (
                zip(recv_x, ref_x, strict=True) if isinstance(rows, tuple) else [(recv_x, ref_x)]
            )
            for found, expected in pairs:
                assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
            assert torch.equal(recv_idx, ref_idx)
            is_here = ref_idx >= 0
            assert torch.equal(recv_weights[is_here], ref_weights[is_here])
            assert torch.equal(handle.recv_src_metadata[:, 0].long(), sources)
            assert torch.equal(handle.psum_num_recv_tokens_per_scaleup_rank, counts.cumsum(0).int())
        # The experts' outputs, on the owner's side and on the source's.
        sizes = (case.max_tokens, case.topk, case.hidden)
        y = refs.generate_pre_combine_data(me * case.max_tokens + torch.arange(len(x)), *sizes)
        y[idx < 0] = 0
        expected = refs.combine(y, idx, 1, world.ranks, case.experts, (bias, bias), True, False)
        local = refs.generate_pre_combine_data(sources, *sizes)
        local[recv_idx < 0] = 0
        combined, *_ = buffer.combine(refs.ordered_accumulate(local), handle, bias=(bias, bias))
        assert torch.equal(combined, expected)
        _, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=idx, num_experts=case.experts, do_expand=True
        )
        slots = handle.recv_src_metadata[:, 2:].long()
        expanded = torch.zeros(handle.num_expanded_tokens, case.hidden, dtype=torch.bfloat16)
        expanded[slots[slots >= 0]] = local[slots >= 0]
        combined, *_ = buffer.combine(expanded, handle, bias=(bias, bias))
        assert torch.equal(combined, expected)
        scores = get_unbalanced_scores(64, case.experts, world.ranks, 2, 1.5, True)
        assert (scores.dtype, scores.shape) == (torch.float32, (64, case.experts))
    finally:
        buffer.destroy()
        dist.destroy_process_group()


def in_group(world, port, case):
    """The world is made by the drop-in, from a process group."""
    buffer_of(world).destroy()
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.ranks
    )
    try:
        group = dist.new_group(list(range(world.ranks)))
        for _ in range(2):
            buffer = Buffer(group, 1 << 20, 0, explicitly_destroy=True)
            assert (buffer.group, buffer.rank, buffer.group_size) == (group, world.rank, 2)
            x, idx, weights = tensors(case, world.rank)
            options = layout_of(buffer, idx, case.experts)
            recv_x, *_ = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **options)
            assert torch.equal(recv_x, torch.from_numpy(case.rows(case.sources(world.rank))))
            buffer.destroy()
    finally:
        dist.destroy_process_group()


def wrong_settings(world, port, case):
    """Settings of rank 1 are wrong where the drop-in makes the world, too; the cause is what it reads."""
    buffer_of(world).destroy()
    os.environ.pop("TOKENYARD_CONFIG", None)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.ranks
    )
    is_wrong = world.rank == 1
    try:
        for name, value, kind, says in (
            ("TOKENYARD_OUTPUT", "heap", errors.ConfigError, "found 'heap'; expected auto, arena"),
            ("TOKENYARD_CONFIG", "/no/such.toml", errors.ConfigError, "/no/such.toml"),
        ):
            group = dist.new_group(list(range(world.ranks)))
            if is_wrong:
                os.environ[name] = value
            with pytest.raises(kind if is_wrong else errors.RefusedError, match=says):
                Buffer(group, 1 << 20, 0, explicitly_destroy=True)
            os.environ.pop(name, None)
            buffer = Buffer(group, 1 << 20, 0, explicitly_destroy=True)
            assert buffer.group_size == world.ranks
            buffer.destroy()
        group = dist.new_group(list(range(world.ranks)))
        given = {"num_cpu_timeout_secs": "long"} if is_wrong else {}
        kind = errors.InvalidInputError if is_wrong else errors.RefusedError
        with pytest.raises(kind, match="num_cpu_timeout_secs: found 'long'; expected an integer"):
            ElasticBuffer(group, explicitly_destroy=True, **given)
    finally:
        dist.destroy_process_group()


def late_to_gather(world, port, case):
    """Rank 1 does not come; it lets the gather of rank 0 end afterwards, so that torch ends, too."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.ranks
    )
    try:
        if world.rank == 0:
            text = CONFIG.format(arena_mib=4).replace("20000", "300").replace("60000", "300")
            late = tokenyard.Config.parse(text, "late.toml")
            with pytest.raises(errors.DeadlineError) as caught:
                tokenyard.World.from_torch(config=late)
            assert "rank 0 of 2, world rank 0: torch's all_gather_object did not end" in str(
                caught.value
            )
            assert "within 0.3 s (late_ms)" in str(caught.value)
        world.barrier("rank 0 has given up")
        if world.rank == 1:
            dist.all_gather_object([None, None], b"late")
        world.barrier("the gather has ended")
    finally:
        dist.destroy_process_group()


class Collecting:
    """A tensor that collects garbage where the package reads it: inside of a native call."""

    is_cuda, device = False, torch.device("cpu")

    def __init__(self, tensor):
        self.tensor, self.dtype, self.shape = tensor, tensor.dtype, tensor.shape

    def data_ptr(self):
        gc.collect()
        return self.tensor.data_ptr()

    def stride(self):
        return self.tensor.stride()


class Owner:
    """An object with weak references."""


def freed_inside_of_a_call(world, case):
    owner = Owner()
    was_freed = weakref.ref(owner)
    reader = _Reader(torch.Tensor, torch._C._from_dlpack, False)
    garbage = [reader.anchored(torch.ones(2), owner)]
    garbage.append(garbage)
    gc.disable()
    del garbage, owner
    assert was_freed() is not None
    reader.anchored(Collecting(torch.ones(2)), None)
    gc.enable()
    assert was_freed() is None


def without_room(world, case):
    """Room of another type or form, or too little, is refused by name; then the call gives all."""
    reader, record, me = _Reader(torch.Tensor, torch._C._from_dlpack, False), Owner(), world.rank
    sources = case.sources(me)
    most = len(sources) + case.ranks
    with opened(world, case) as comm:
        received, _ = comm.dispatch(*tensors(case, me))

        def give(block, parts=("source_tokens", "source_ends"), names=("x", "weights"), **rest):
            return comm._give(reader, received, block, parts, record=record, names=names, **rest)

        wrong = {
            "block: found None": None,
            "block: found shape": torch.zeros(2 * most, dtype=torch.int32)[::2],
            "found shape": torch.zeros(1, most, dtype=torch.int32),
            "source_tokens: found type": torch.zeros(most),
            "source_tokens: found shape": torch.zeros(most - 1, dtype=torch.int32),
        }
        for message, block in wrong.items():
            with pytest.raises(errors.InvalidInputError, match=message):
                give(block)
        with pytest.raises(errors.InvalidInputError, match="rows: found a name of no array"):
            give(torch.zeros(most, dtype=torch.int32), rows=torch.zeros(1))
        with pytest.raises(errors.InvalidInputError, match="names: found y"):
            give(torch.zeros(most, dtype=torch.int32), names=("y",))
        for parts, message in {
            ("y",): "y: found a name of no array",
            ("x",): "parts: found x; expected ids",
            ("source", "slots"): "parts: found slots, which the output does not have",
        }.items():
            with pytest.raises(errors.InvalidInputError, match=message):
                give(torch.zeros(most, dtype=torch.int32), parts=parts)
        ids, copy = tensors(case, me)[1], torch.zeros((1, case.topk), dtype=torch.int64)
        with pytest.raises(errors.InvalidInputError, match="topk_idx: found shape"):
            give(torch.zeros(most, dtype=torch.int32), copied=(torch.cat((ids, ids, ids)), copy))
        copy, block = torch.zeros_like(ids), torch.full((most,), 7, dtype=torch.int32)
        (x, weights), (tokens, ends), counts = give(
            block, columns=3, counts=True, copied=(ids, copy)
        )
        assert torch.equal(copy, ids)
        assert torch.equal(x, torch.from_numpy(case.rows(sources)))
        assert weights.shape == (len(sources), case.topk)
        assert tokens.tolist() == [token for _, token in sources] == block[:-2].tolist()
        of_sources = case.source_counts(me)
        wanted = [of_sources[0], sum(of_sources)]
        assert ends.tolist() == [[end] * 3 for end in wanted]
        assert counts == case.expert_counts(me)
        assert _record_at(ends.data_ptr()) is record
        del x, weights, block, tokens, ends
        assert give(torch.zeros(most, dtype=torch.int32))[2] is None


def compiled(world, case):
    check_compiled_constructors(world, inputs(world, SMALL))
    buffer = buffer_of(world, low_latency_mode=True)
    elastic = ElasticBuffer(
        world, num_max_tokens_per_rank=SMALL.max_tokens, explicitly_destroy=True
    )
    x, *others = tensors(SMALL, world.rank, torch.bfloat16)
    check_compiled(buffer, elastic, (x, *others))
    elastic.destroy()
    buffer.destroy()


class Subclass(torch.Tensor):
    """As a library's own tensors, whose operations give its class."""


def subclass(world, case):
    """Outputs are torch's own, wherever they lie; a view that only says that it is negated is read negated."""
    buffer = v1(world)
    x, idx, weights = inputs(world, case)
    options = layout_of(buffer, idx, case.experts)
    plain, ids, *_ = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **options)
    for mode in ("auto", "copy"):
        with output_mode(mode):
            other = v1(world)
        given = [one.as_subclass(Subclass) for one in (x, idx, weights)]
        rows, its_ids, its_weights, _, _, _ = other.dispatch(
            given[0], topk_idx=given[1], topk_weights=given[2], **options
        )
        assert [type(one) for one in (rows, its_ids, its_weights)] == [torch.Tensor] * 3
        assert torch.equal(rows, plain)
        assert torch.equal(its_ids, ids)
        negated = torch._neg_view(x)
        rows, *_ = other.dispatch(negated, topk_idx=idx, topk_weights=weights, **options)
        assert torch.equal(rows, -plain)
        other.destroy()
    buffer.destroy()


def seeds(world, port):
    """The seeds of scripts, and the first numbers that torch and numpy draw from them."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.ranks
    )
    try:
        envs.init_seed(7)
        drawn = torch.randint(1 << 30, (1,)).item(), int(np.random.randint(1 << 30))
        return envs.get_global_seed(), envs.get_local_seed(), *drawn
    finally:
        dist.destroy_process_group()


def domain_sizes(world, port):
    """Domains and their ranks, of a group of torch: physical, logical, and logical where all ranks are one domain."""
    buffer_of(world, 2).destroy()  # for its config
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=world.rank, world_size=world.ranks
    )
    try:
        group = dist.new_group(list(range(world.ranks)))
        return (
            envs.get_physical_domain_size(group),
            envs.get_logical_domain_size(group),
            envs.get_logical_domain_size(group, allow_hybrid_mode=False),
        )
    finally:
        dist.destroy_process_group()


def no_rows(world):
    buffer = buffer_of(world, low_latency_mode=True)
    elastic = ElasticBuffer(world, num_max_tokens_per_rank=4, explicitly_destroy=True)
    check_no_rows(buffer, elastic, "cpu")
    elastic.destroy()
    buffer.destroy()
