"""The drop-in's calls of V2 against the oracle, on 1 to 4 processes. Sums are compared bit for bit."""

import ml_dtypes
import numpy as np
import pytest
from oracle import Case
from test_deep_ep_normal import buffer_of, same
from test_deep_ep_refusals import raises

from tokenyard import errors
from tokenyard.deep_ep import ElasticBuffer, EventOverlap
from tokenyard.deep_ep.buffers.handle import EPHandle

BF16 = ml_dtypes.bfloat16
F32 = np.float32
CASES = [
    Case(1),
    Case(2, seed=2, topk=6),
    Case(2, seed=3, tokens=(0, 7)),
    Case(4, seed=5, hidden=128, topk=6),
    Case(4, seed=6, tokens=(12, 0, 1, 5), topk=8),
]
NAMES = [f"{case.ranks} ranks {case.tokens}" for case in CASES]
every_case = pytest.mark.parametrize("case", CASES, ids=NAMES)


def elastic(world, case, domains=1, **options):
    buffer_of(world, domains).destroy()  # for its config
    return ElasticBuffer(
        world,
        num_max_tokens_per_rank=case.max_tokens,
        hidden=case.hidden,
        num_topk=case.topk,
        explicitly_destroy=True,
        **options,
    )


def aligned(count, alignment):
    return -(-count // alignment) * alignment


def rows_of(case, sources, scale=1):
    return (scale * case.rows(sources)).astype(BF16)


def last_k(case, me, source, token):
    return max(k for k, _ in case.selections(me, source, token))


def flat(world, case, domains, has_sync):
    me, buffer = world.rank, elastic(world, case, domains)
    sources, (ids, weights) = case.sources(me), case.flat(me)
    found, most = len(sources), case.ranks * case.max_tokens
    stats = np.full(case.local, 7, np.int32)
    x, idx = case.x[me].astype(BF16), case.idx[me]
    recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(
        x,
        topk_idx=idx,
        topk_weights=case.weights[me],
        cumulative_local_expert_recv_stats=stats,
        num_experts=case.experts,
        expert_alignment=4,
        do_cpu_sync=has_sync,
    )
    assert isinstance(event, EventOverlap)
    assert event.event is None
    given = found if has_sync else most
    assert len(recv_x) == len(recv_idx) == len(recv_weights) == handle.num_recv_tokens == given
    same(recv_x[:found], rows_of(case, sources))
    same(recv_idx[:found], ids.astype(np.int64))
    assert (recv_idx[found:] == -1).all()
    same(np.where(ids >= 0, recv_weights[:found], 0), weights)
    counts = np.array(case.expert_counts(me))
    same(stats, 7 + counts)
    per_expert = [aligned(count, 4) for count in counts]
    assert handle.num_recv_tokens_per_expert_list == (per_expert if has_sync else [])
    same(handle.psum_num_recv_tokens_per_expert, np.cumsum(per_expert))
    same(handle.num_unaligned_recv_tokens_per_expert, counts)
    by_source = np.array(case.source_counts(me)).reshape(domains, -1).sum(axis=0)
    same(handle.psum_num_recv_tokens_per_scaleup_rank, np.cumsum(by_source))
    metadata = handle.recv_src_metadata
    assert (metadata.shape, metadata.dtype) == ((given, case.topk + 2), np.int32)
    assert (metadata[found:] == -1).all()
    same(metadata[:found, 0], [s * case.max_tokens + t for s, t in sources])
    same(metadata[:found, 1], [s * case.topk + last_k(case, me, s, t) for s, t in sources])
    assert handle.topk_idx is not idx
    same(handle.topk_idx, idx)

    bias = np.full(x.shape, 0.5, BF16)
    combined, back, _ = buffer.combine(recv_x, handle, recv_weights, bias=(bias, bias))
    same(combined, summed(case, me, domains, bias, lambda expert: None))
    same(back, np.where(idx >= 0, case.weights[me], 0))

    again, ids_again, none, same_handle, event = buffer.dispatch(
        -x, handle=handle, num_sms=4, async_with_compute_stream=True
    )
    assert same_handle is handle
    assert none is None
    assert event.event is not None
    same(again, -recv_x)
    same(ids_again, recv_idx)
    buffer.destroy()


def summed(case, me, domains, bias, scale):
    """Copies of a rank in k order, then ranks (or domains of them) by their last k. Rounded once per level.

    `scale(expert)` is what a copy is multiplied by, or None where rows are flat.
    """
    size = case.ranks // domains
    out = np.zeros((case.tokens[me], case.hidden), BF16)
    for token in range(case.tokens[me]):
        row = case.row(me, token).astype(BF16).astype(F32)
        partials, last = {}, {}
        for k, e in enumerate(case.idx[me][token]):
            if e < 0:
                continue
            rank, factor = int(e) // case.local, scale(int(e))
            last[rank] = k
            if factor is None:
                partials[rank] = row
            else:
                copy = (row * F32(factor)).astype(BF16).astype(F32)
                partials[rank] = partials[rank] + copy if rank in partials else copy
        partials = {r: p.astype(BF16).astype(F32) for r, p in partials.items()}
        order = sorted(last, key=last.get)
        if domains > 1:
            merged, last_of = {}, {}
            for rank in order:
                domain = rank // size
                merged[domain] = merged.get(domain, F32(0)) + partials[rank]
                last_of[domain] = last[rank]
            partials = {d: m.astype(BF16).astype(F32) for d, m in merged.items()}
            order = sorted(last_of, key=last_of.get)
        total = np.zeros(case.hidden, F32) if bias is None else 2 * bias[token].astype(F32)
        for key in order:
            total = total + partials[key]
        out[token] = total.astype(BF16)
    return out


def summed_in_k_order(case, me, bias, scale, dtype):
    """One sum in float32 of a third of each copy, rounded once."""
    out = np.zeros((case.tokens[me], case.hidden), F32)
    for token in range(case.tokens[me]):
        row = case.row(me, token).astype(BF16).astype(F32)
        if bias is not None:
            out[token] = bias[token].astype(F32) + bias[token].astype(F32)
        for e in case.idx[me][token]:
            if e >= 0:
                copy = (row * F32(scale(int(e)))).astype(BF16).astype(F32)
                out[token] += (copy / F32(3)).astype(dtype).astype(F32)
    return out.astype(dtype)


@every_case
@pytest.mark.parametrize("has_sync", [True, False], ids=["sync", "no sync"])
@pytest.mark.parametrize("domains", [1, 2], ids=["one domain", "two domains"])
def test_flat_rows_arrive_in_order_and_come_back(ranks, case, domains, has_sync):
    if case.ranks > 1 or domains == 1:
        ranks(case.ranks, flat, case, domains, has_sync)


def expanded(world, case, domains, alignment, has_sync):
    me, buffer = world.rank, elastic(world, case, domains)
    sources = case.sources(me)
    x = case.x[me].astype(BF16)
    recv_x, none, weights, handle, _ = buffer.dispatch(
        x,
        topk_idx=case.idx[me],
        topk_weights=case.weights[me],
        num_experts=case.experts,
        expert_alignment=alignment,
        do_expand=True,
        do_zero_padding=True,
        do_cpu_sync=has_sync,
        do_handle_copy=False,
    )
    assert none is None
    assert handle.topk_idx is case.idx[me]
    counts = case.expert_counts(me)
    rows = sum(aligned(count, alignment) for count in counts)
    if not has_sync:
        most = case.ranks * case.max_tokens * min(case.topk, case.local)
        rows = aligned(most + (alignment - 1) * case.local, alignment)
    assert recv_x.shape == (rows, case.hidden)
    assert weights.shape == (rows,)
    assert handle.num_expanded_tokens == rows
    start, y, filled = 0, np.zeros_like(recv_x), np.zeros(rows, bool)
    slots = handle.recv_src_metadata[:, 2:]
    for expert, count in enumerate(counts):
        for row, (source, token, k) in enumerate(case.expert_rows(me, expert), start):
            same(recv_x[row], case.row(source, token).astype(BF16))
            assert weights[row] == case.weights[source][token, k]
            assert slots[sources.index((source, token)), k] == row
            factor = F32(1 + (me * case.local + expert) / 16)
            y[row], filled[row] = (recv_x[row].astype(F32) * factor).astype(BF16), True
        assert handle.psum_num_recv_tokens_per_expert[expert] == start + count
        start += aligned(count, alignment)
    assert (slots >= 0).sum() == filled.sum() == sum(counts)
    assert not recv_x[~filled].any()
    assert not weights[~filled].any()

    def scale(expert):
        return 1 + expert / 16

    bias = np.full(x.shape, 0.5, BF16)
    combined, back, _ = buffer.combine(y, handle, weights, bias=(bias, bias))
    same(combined, summed(case, me, domains, bias, scale))
    same(back, np.where(case.idx[me] >= 0, case.weights[me], 0))
    again, none, other, _, _ = buffer.dispatch(
        2 * x, topk_weights=2 * case.weights[me], handle=handle, do_expand=True
    )
    same(again, 2 * recv_x)
    same(other, 2 * weights)
    buffer.destroy()

    buffer = elastic(world, case, domains, allow_multiple_reduction=False)
    _, _, _, handle, _ = buffer.dispatch(
        x,
        topk_idx=case.idx[me],
        num_experts=case.experts,
        expert_alignment=alignment,
        do_expand=True,
        do_cpu_sync=has_sync,
    )
    # In float32 nearly each order of a sum has bits of its own.
    for dtype in (F32, BF16):
        thirds = (y.astype(F32) / F32(3)).astype(dtype)
        for bias in (None, np.full(x.shape, 0.1, dtype)):
            both = None if bias is None else (bias, bias)
            combined, back, _ = buffer.combine(thirds, handle, bias=both)
            assert back is None
            same(combined, summed_in_k_order(case, me, bias, scale, dtype))
    raises(world, "allow_multiple_reduction = False", buffer.combine, y, handle, weights)
    buffer.destroy()


@every_case
@pytest.mark.parametrize("has_sync", [True, False], ids=["sync", "no sync"])
@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("domains", [1, 2], ids=["one domain", "two domains"])
def test_expanded_rows_are_grouped_by_expert_and_come_back(
    ranks, case, domains, alignment, has_sync
):
    if case.ranks > 1 or domains == 1:
        ranks(case.ranks, expanded, case, domains, alignment, has_sync)


def quantised(world, case):
    me, buffer = world.rank, elastic(world, case, use_fp8_dispatch=True)
    tokens = case.tokens[me]
    x = case.x[me].astype(ml_dtypes.float8_e4m3fn)
    scales = np.arange(tokens * 3, dtype=np.int32).reshape(3, tokens).T
    for do_expand in (False, True):
        (recv_x, recv_scales), *_, handle, _ = buffer.dispatch(
            (x, scales),
            topk_idx=case.idx[me],
            num_experts=case.experts,
            do_expand=do_expand,
            use_tma_aligned_col_major_sf=True,
        )
        rows = len(recv_x)
        assert recv_scales.shape == (rows, 3)
        if rows > 1:
            assert recv_scales.strides == (4, 4 * aligned(rows, 4))
        for n, (source, token) in enumerate(case.sources(me)):
            first = np.arange(case.tokens[source] * 3, dtype=np.int32).reshape(3, -1)[:, token]
            slots = handle.recv_src_metadata[n, 2:]
            for row in slots[slots >= 0] if do_expand else [n]:
                same(recv_scales[row], first)
                expected = case.row(source, token).astype(x.dtype)
                same(recv_x[row].view(np.uint8), expected.view(np.uint8))
    buffer.destroy()


@every_case
def test_quantised_rows_bring_their_scales_column_major(ranks, case):
    ranks(case.ranks, quantised, case)


def smaller_m(world, case):
    """A decoding step names its own M, below the buffer's."""
    me = world.rank
    buffer = elastic(world, Case(case.ranks, max_tokens=2000, topk=case.topk))
    assert buffer.num_bytes % (2 << 20) == 0
    seen = set()
    for tokens in (1, 4, 8, 4):
        idx = np.full((tokens, case.topk), -1)
        idx[:, 0] = np.arange(tokens) % case.experts
        x = np.full((tokens, case.hidden), me + 1, BF16)
        recv_x, recv_idx, _, handle, _ = buffer.dispatch(
            x,
            topk_idx=idx,
            num_experts=case.experts,
            num_max_tokens_per_rank=tokens,
            do_cpu_sync=False,
        )
        assert len(recv_x) == len(recv_idx) == case.ranks * tokens
        assert set(handle.recv_src_metadata[:, 0]) <= {-1, *range(case.ranks * tokens)}
        assert handle.num_max_tokens_per_rank == tokens
        combined, _, _ = buffer.combine(recv_x, handle)
        same(combined, x)
        seen.add(id(buffer._pool.current))
    assert len(seen) == 1
    buffer.destroy()


def test_a_call_may_name_fewer_tokens_than_the_buffer(ranks):
    ranks(2, smaller_m, CASES[1])


def saved(world, case):
    """Autograd saves tensors alone: they are taken out of the handle and put back."""
    me, buffer = world.rank, elastic(world, case)
    x = case.x[me].astype(BF16)
    recv_x, _, _, handle, _ = buffer.dispatch(x, topk_idx=case.idx[me], num_experts=case.experts)
    names = ["topk_idx", *EPHandle.__annotations__]
    assert len(names) == 6
    tensors = [getattr(handle, name) for name in names]
    assert all(isinstance(tensor, np.ndarray) for tensor in tensors)
    for name in names:
        setattr(handle, name, None)
    for name, tensor in zip(names, tensors, strict=True):
        setattr(handle, name, tensor.copy())
    gradient, _, _ = buffer.combine(recv_x, handle)
    same(gradient, summed(case, me, 1, None, lambda expert: None))
    again, *_ = buffer.dispatch(x, handle=handle)
    same(again, recv_x)
    handles = [handle]
    for layer in range(300):
        handles.append(
            buffer.dispatch(
                x * BF16(layer), topk_idx=case.idx[me], num_experts=case.experts, do_expand=True
            )[3]
        )
    buffer.barrier()
    expanded, *_ = buffer.dispatch(x, handle=handles[150], do_expand=True)
    again, *_ = buffer.dispatch(x * BF16(7), handle=handles[150], do_expand=True)
    same(again, expanded * BF16(7))
    again, *_ = buffer.dispatch(x, handle=handle)
    same(again, recv_x)
    buffer.destroy()


def test_tensors_of_a_handle_may_be_taken_out_and_hundreds_live(ranks):
    ranks(2, saved, CASES[1])


def refused(world, case):
    me, buffer = world.rank, elastic(world, case)
    x, idx = case.x[me].astype(BF16), case.idx[me]
    good = {"x": x, "topk_idx": idx, "num_experts": case.experts}
    big = {"x": np.zeros((13, 64), BF16), "topk_idx": np.full((13, case.topk), -1)}
    for says, bad in {
        "x: found 13 tokens; expected at most num_max_tokens_per_rank = 12": big,
        "topk_idx, num_experts: found None": {"topk_idx": None},
        "num_experts: found 7": {"num_experts": 7},
        "expert_alignment: found 0": {"expert_alignment": 0},
        "topk_idx: found expert 8": {"topk_idx": np.full_like(idx, 8)},
        "topk_weights: found shape": {"topk_weights": np.zeros((1, 1), np.float32)},
        "recv_stats: found shape": {"cumulative_local_expert_recv_stats": np.zeros(9, np.int32)},
    }.items():
        raises(world, says, buffer.dispatch, **{**good, **(bad if me == 1 else {})})
        recv_x, _, _, handle, _ = buffer.dispatch(**good)
    cached = {"x": x, "handle": handle}
    for says, bad in {
        "x: found shape": {"x": x[:1]},
        "topk_idx: found some with a handle": {"topk_idx": idx},
        "expert_alignment: found 3; expected 1": {"expert_alignment": 3},
        "do_expand: found True; expected False": {"do_expand": True},
        "handle: found int": {"handle": 5},
    }.items():
        raises(world, says, buffer.dispatch, **{**cached, **(bad if me == 1 else {})})
    for says, bad in {
        "x: found shape": (recv_x[:1], handle),
        "handle: found int": (recv_x, 5),
        "bias: found shape": (recv_x, handle, None, x[:1]),
        "topk_weights: found shape": (recv_x, handle, np.zeros((1, 1), np.float32)),
    }.items():
        raises(world, says, buffer.combine, *(bad if me == 1 else (recv_x, handle)))
    again, *_ = buffer.dispatch(**cached)
    same(again, recv_x)
    assert buffer.get_physical_domain_size() == (1, 2)
    assert buffer.get_theoretical_num_qps(buffer.get_theoretical_num_sms(8, 2)) == 9
    buffer.destroy()


def test_bad_calls_of_v2_are_refused_on_all_ranks(ranks):
    ranks(2, refused, CASES[1])


def another_m(world, case):
    """Ranks that bound their tokens differently all learn it, and the buffer goes on."""
    me, buffer = world.rank, elastic(world, case)
    x, idx = case.x[me].astype(BF16), case.idx[me]
    good = {"x": x, "topk_idx": idx, "num_experts": case.experts}
    for most in (7 + me, None, 7 + me):
        if most is None:
            recv_x, *_, handle, _ = buffer.dispatch(**good)
            same(buffer.combine(recv_x, handle)[0], summed(case, me, 1, None, lambda expert: None))
            continue
        few = {**good, "x": x[:7], "topk_idx": idx[:7], "num_max_tokens_per_rank": most}
        with pytest.raises(errors.InvalidInputError, match="max_tokens = 8 on rank 1; expected 7"):
            buffer.dispatch(**few)
    recv_x, *_ = buffer.dispatch(**good)
    same(recv_x, rows_of(case, case.sources(me)))
    buffer.destroy()


def test_ranks_that_name_different_most_tokens_get_an_error_and_the_buffer_goes_on(ranks):
    ranks(2, another_m, CASES[1])
