"""DeepEP V2 on tensors of torch: the assertions of its own tests, in our words."""

import dataclasses

import torch
from gpu_common import CASE, EMPTY, SMALL, flat_of, inputs, rows_of, same, v2

from tokenyard.deep_ep.utils import refs
from tokenyard.deep_ep.utils.math import align, per_token_cast_to_fp8


def metadata_of(case, me):
    """The first two columns."""
    rows = []
    for source, token in case.sources(me):
        last = max(k for k, _ in case.selections(me, source, token))
        rows.append([source * case.max_tokens + token, source * case.topk + last])
    return rows


def flat(world):
    for case in (SMALL, CASE, EMPTY):
        for is_synced in (True, False):
            check_flat(world, case, is_synced)


def check_flat(world, case, is_synced):
    me, buffer = world.rank, v2(world, case)
    x, idx, weights = inputs(world, case)
    stats = torch.zeros(case.local, dtype=torch.int32, device=x.device)
    recv_x, recv_idx, recv_weights, handle, _ = buffer.dispatch(
        x,
        topk_idx=idx,
        topk_weights=weights,
        num_experts=case.experts,
        cumulative_local_expert_recv_stats=stats,
        do_cpu_sync=is_synced,
        expert_alignment=8,
    )
    found = len(case.sources(me))
    given = found if is_synced else case.ranks * case.max_tokens
    assert (len(recv_x), handle.num_recv_tokens) == (given, given)
    ids, expected_weights = flat_of(world, case)
    same(recv_x[:found], rows_of(world, case, case.sources(me)))
    same(recv_idx[:found], ids)
    is_here = ids >= 0
    same(recv_weights[:found][is_here], expected_weights[is_here])
    counts = torch.tensor(case.expert_counts(me))
    aligned = (counts + 7) // 8 * 8
    assert stats.tolist() == counts.tolist()
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts.tolist()
    assert handle.num_recv_tokens_per_expert_list == (aligned.tolist() if is_synced else [])
    assert handle.psum_num_recv_tokens_per_expert.tolist() == aligned.cumsum(0).tolist()
    ends = torch.tensor(case.source_counts(me)).cumsum(0)
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == ends.tolist()
    assert handle.recv_src_metadata[:found, :2].tolist() == metadata_of(case, me)
    again, ids_again, _, same_handle, _ = buffer.dispatch(x + 1, handle=handle)
    assert same_handle is handle
    same(again[:found], recv_x[:found] + 1)
    same(ids_again[:found], ids)
    back = check_combine(world, case, buffer, (x, idx), (recv_x, recv_idx, handle, recv_weights))
    same(back, torch.where(idx >= 0, weights, 0))
    buffer.destroy()


def pre_combine(case, rows, ids, me, is_local):
    """The experts' outputs of tokens, `[n, K, H]`, 0 where an id is -1."""
    y = refs.generate_pre_combine_data(rows, case.max_tokens, case.topk, case.hidden)
    assert y.device == ids.device
    y[ids < 0] = 0
    return y


def check_combine(world, case, buffer, sent, received):
    """Bit for bit as the references, with no, one and two biases."""
    me = world.rank
    (x, idx), (recv_x, recv_idx, handle, recv_weights) = sent, received
    found = len(case.sources(me))
    tokens = me * case.max_tokens + torch.arange(len(x), device=x.device)
    whole = pre_combine(case, tokens, idx, me, False)
    sources = handle.recv_src_metadata[:found, 0].long()
    local = pre_combine(case, sources, recv_idx[:found], me, True)
    rows = torch.full_like(recv_x, torch.nan)
    rows[:found] = refs.ordered_accumulate(local)
    bias = torch.ones_like(x)
    for given in (None, bias, (bias, bias)):
        two = given if isinstance(given, tuple) else (given, None)
        expected = refs.combine(whole, idx, 1, world.ranks, case.experts, two, True, False)
        combined, back, _ = buffer.combine(rows, handle, topk_weights=recv_weights, bias=given)
        same(combined, expected)
    return back


def expanded(world):
    for case in (SMALL, CASE):
        for is_synced in (True, False):
            check_expanded(world, case, is_synced, alignment=16)


def check_expanded(world, case, is_synced, alignment):
    me, buffer = world.rank, v2(world, case)
    x, idx, weights = inputs(world, case)
    options = {"do_cpu_sync": is_synced, "do_expand": True, "expert_alignment": alignment}
    recv_x, recv_idx, recv_weights, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=case.experts, **options
    )
    assert recv_idx is None
    start = 0
    for expert, count in enumerate(case.expert_counts(me)):
        wanted = case.expert_rows(me, expert)
        same(recv_x[start : start + count], rows_of(world, case, [(s, t) for s, t, _ in wanted]))
        expected = torch.tensor([case.weights[s][t, k] for s, t, k in wanted])
        same(recv_weights[start : start + count].cpu(), expected.float())
        end = align(start + count, alignment)
        assert not bool(recv_x[start + count : end].any())
        assert int(handle.psum_num_recv_tokens_per_expert[expert]) == start + count
        start = end
    if is_synced:
        assert (len(recv_x), handle.num_expanded_tokens) == (start, start)
    else:
        assert len(recv_x) == handle.num_expanded_tokens
    found = len(case.sources(me))
    slots = handle.recv_src_metadata[:found, 2:].long()
    sources = handle.recv_src_metadata[:found, 0].long()
    local = refs.generate_pre_combine_data(sources, case.max_tokens, case.topk, case.hidden)
    assert local.device == x.device
    rows = torch.zeros_like(recv_x)
    rows[slots[slots >= 0]] = local[slots >= 0]
    tokens = me * case.max_tokens + torch.arange(len(x), device=x.device)
    whole = pre_combine(case, tokens, idx, me, False)
    expected = refs.combine(whole, idx, 1, world.ranks, case.experts, (None, None), True, False)
    combined, back, _ = buffer.combine(rows, handle, topk_weights=recv_weights)
    same(combined, expected)
    same(back, torch.where(idx >= 0, weights, 0))
    again, *_ = buffer.dispatch(x, topk_weights=weights, handle=handle, do_expand=True)
    same(again[:start], recv_x[:start])
    buffer.destroy()


def summed_in_k_order(world):
    """Without multiple reduction expanded rows have one sum in k order, rounded once: bit for bit in float32, where
    nearly each order of a sum has bits of its own."""
    case, me = CASE, world.rank
    buffer = v2(world, case, allow_multiple_reduction=False)
    x, idx, _ = inputs(world, case)
    for is_synced in (True, False):
        recv_x, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=idx, num_experts=case.experts, do_cpu_sync=is_synced, do_expand=True
        )
        found = len(case.sources(me))
        slots = handle.recv_src_metadata[:found, 2:].long()
        sources = handle.recv_src_metadata[:found, 0].long()
        tokens = me * case.max_tokens + torch.arange(len(x), device=x.device)
        for dtype in (torch.float32, x.dtype):
            rows = torch.full_like(recv_x, torch.nan, dtype=dtype)
            rows[slots[slots >= 0]] = thirds(case, sources)[slots >= 0].to(dtype)
            terms = thirds(case, tokens).to(dtype).float()
            bias = torch.full_like(x, 0.1, dtype=dtype)
            for biases in (None, (bias, bias)):
                expected = torch.zeros(x.shape, device=x.device)
                if biases is not None:
                    expected += bias.float() + bias.float()
                for k in range(case.topk):
                    expected += torch.where(idx[:, k : k + 1] >= 0, terms[:, k], 0)
                combined, *_ = buffer.combine(rows, handle, bias=biases)
                same(combined, expected.to(dtype))
    buffer.destroy()


def thirds(case, tokens):
    """Rows for the selections of tokens, `[n, K, H]` float32: thirds of whole numbers below 256."""
    k = torch.arange(case.topk, device=tokens.device)[None, :, None]
    h = torch.arange(case.hidden, device=tokens.device)[None, None, :]
    return ((tokens[:, None, None] * 37 + k * 101 + h * 11) % 256).float() / 3


def fp8(world):
    """FP8 with scales, row-major and column-major."""
    case, me = CASE, world.rank
    buffer = v2(world, case, use_fp8_dispatch=True)
    x, idx, weights = inputs(world, case)
    expected = per_token_cast_to_fp8(rows_of(world, case, case.sources(me)))
    for is_column_major in (False, True):
        (recv_x, scales), *_ = buffer.dispatch(
            per_token_cast_to_fp8(x),
            topk_idx=idx,
            topk_weights=weights,
            num_experts=case.experts,
            use_tma_aligned_col_major_sf=is_column_major,
        )
        same(recv_x, expected[0])
        same(scales.contiguous(), expected[1])
        if is_column_major:
            assert scales.stride() == (1, align(len(scales), 4))
    buffer.destroy()


def handle_tensors(world):
    """Tensors of the handle can be taken out and put back. The caller's ids stay where the call asks so."""
    case = SMALL
    buffer = v2(world, case)
    x, idx, _ = inputs(world, case)
    for is_copy in (True, False):
        recv_x, _, _, handle, _ = buffer.dispatch(
            x, topk_idx=idx, num_experts=case.experts, do_handle_copy=is_copy
        )
        assert (handle.topk_idx.data_ptr() == idx.data_ptr()) == (not is_copy and idx.numel() > 0)
        names = ["recv_src_metadata", "psum_num_recv_tokens_per_expert", "dst_buffer_slot_idx"]
        saved = [getattr(handle, name) for name in names]
        for name in names:
            setattr(handle, name, None)
        for name, tensor in zip(names, saved, strict=True):
            setattr(handle, name, tensor)
        buffer.combine(recv_x, handle)
    buffer.destroy()


def tokens_of_each_call(world):
    """M of a call below that of the buffer, as a decode step names it."""
    case = with_tokens(SMALL, 16)
    buffer = v2(world, CASE)
    x, idx, weights = inputs(world, case)
    for is_synced in (True, False, False):
        recv_x, _, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=idx,
            topk_weights=weights,
            num_experts=case.experts,
            num_max_tokens_per_rank=16,
            do_cpu_sync=is_synced,
        )
        found = len(case.sources(world.rank))
        same(recv_x[:found], rows_of(world, case, case.sources(world.rank)))
        sources = [s * 16 + t for s, t in case.sources(world.rank)]
        assert handle.recv_src_metadata[:found, 0].tolist() == sources
        assert is_synced or len(recv_x) == 32
    buffer.barrier()
    buffer.barrier(use_comm_stream=False, with_cpu_sync=True)
    buffer.destroy()


def with_tokens(case, most):
    """The same exchange with another M."""
    return dataclasses.replace(case, max_tokens=most)


CHECKS = [flat, expanded, summed_in_k_order, fp8, handle_tensors, tokens_of_each_call]
