"""The drop-in's names of DeepEP 2.5, on 1 to 4 processes: what differs from the calls of 2.1."""

import contextlib
import inspect
import io

import numpy as np
import pytest
import torch
from test_deep_ep_elastic import BF16, CASES, NAMES, rows_of, summed
from test_deep_ep_normal import buffer_of, same
from test_deep_ep_refusals import raises

import tokenyard.deep_ep
from tokenyard import errors
from tokenyard.deep_ep import ElasticBuffer, EPBuffer, EPHandle, EventOverlap

every_case = pytest.mark.parametrize("case", CASES, ids=NAMES)
DEFER = {"async_with_compute_stream": True, "defer_epilogue": True}


def ep_buffer(world, case, domains=1):
    buffer_of(world, domains).destroy()  # for its config
    return EPBuffer(world, num_max_tokens_per_rank=case.max_tokens, explicitly_destroy=True)


def exchanged(world, case, domains):
    me, buffer = world.rank, ep_buffer(world, case, domains)
    x, idx, weights = case.x[me].astype(BF16), case.idx[me], case.weights[me]
    ids, _ = case.flat(me)
    call = {"topk_idx": idx, "topk_weights": weights, "num_experts": case.experts}
    bias = np.full(x.shape, 0.5, BF16)
    for options in ({}, {"async_with_compute_stream": True}, DEFER):
        results = buffer.dispatch(x, **call, **options)
        if options is DEFER:
            assert isinstance(results, EventOverlap)
            event, results = results, (*results.wait(), None)
            assert event.wait() is None
        recv_x, recv_idx, recv_weights, handle, _ = results
        same(recv_x, rows_of(case, case.sources(me)))
        same(recv_idx, ids.astype(np.int64))
        assert isinstance(handle, EPHandle)
        assert handle.topk_idx is idx
        late = np.zeros_like(bias) if options is DEFER else bias
        results = buffer.combine(recv_x, handle, recv_weights, bias=(late, bias), **options)
        if options is DEFER:
            late[:] = bias
            results = results.current_stream_wait()
        same(results[0], summed(case, me, domains, bias, lambda expert: None))
        same(results[1], np.where(idx >= 0, weights, 0))
        again = buffer.dispatch(-x, handle=handle, **options)
        rows = (again.wait() if options is DEFER else again)[0]
        same(rows, -recv_x)
    buffer.destroy()


@every_case
@pytest.mark.parametrize("domains", [1, 2], ids=["one domain", "two domains"])
def test_rows_come_at_once_and_by_an_event(ranks, case, domains):
    if case.ranks > 1 or domains == 1:
        ranks(case.ranks, exchanged, case, domains)


def watched(world, case):
    me, buffer = world.rank, ep_buffer(world, case)
    x = torch.from_numpy(case.x[me]).bfloat16()
    idx = torch.from_numpy(case.idx[me].copy())
    call = {"topk_idx": idx, "num_experts": case.experts}
    recv_x, _, _, handle, _ = buffer.dispatch(x, **call)
    assert handle.topk_idx is idx
    if me == 1:
        idx.view(-1)[0] += 0
        with pytest.raises(AssertionError, match="must not be modified"):
            assert handle.topk_idx is None
    raises(world, "handle: found other ids in topk_idx", buffer.combine, recv_x, handle)
    raises(world, "handle: found other ids in topk_idx", buffer.dispatch, x, handle=handle)
    # The buffer goes on, also with ids that count no changes.
    with torch.inference_mode():
        frozen = idx.clone()
        recv_x, _, _, handle, _ = buffer.dispatch(x, **{**call, "topk_idx": frozen})
        frozen.view(-1)[:0] += 1
        assert handle.topk_idx is frozen
        buffer.combine(recv_x, handle)
    # In 2.1 the caller's ids may change.
    other = ElasticBuffer(world, num_max_tokens_per_rank=case.max_tokens, explicitly_destroy=True)
    recv_x, _, _, handle, _ = other.dispatch(x, **call, do_handle_copy=False)
    idx.view(-1)[:0] += 1
    other.combine(recv_x, handle)
    other.destroy()
    buffer.destroy()


def test_ids_of_a_handle_must_stay_as_they_are(ranks):
    ranks(2, watched, CASES[1])


def refused(world, case):
    """All ranks learn what one asks for wrongly, at the call or where they wait; the buffer goes on."""
    me, buffer = world.rank, ep_buffer(world, case)
    x = case.x[me].astype(BF16)
    good = {"x": x, "topk_idx": case.idx[me], "num_experts": case.experts}
    recv_x, _, _, handle, _ = buffer.dispatch(**good)
    for says, bad in {
        "do_handle_copy: found True; expected False": {"do_handle_copy": True},
        "defer_epilogue: found True without async": {"defer_epilogue": True},
        "defer_epilogue: found 2; expected True or False": {"defer_epilogue": 2},
    }.items():
        call = {**good, **(bad if me == 1 else {})}
        raises(world, says, lambda call=call: whole(buffer.dispatch(**call)))
    without = {"defer_epilogue": True} if me == 1 else {}
    says = "defer_epilogue: found True without"
    raises(world, says, lambda: whole(buffer.combine(recv_x, handle, **without)))
    raises(world, "x: found shape", lambda: deferred(buffer, {**good, "x": x[0] if me == 1 else x}))
    rows = recv_x[:1] if me == 1 else recv_x
    raises(world, "x: found", lambda: waited(buffer.combine(rows, handle, bias=x, **DEFER)))
    raises(world, "x: found", lambda: waited(buffer.combine(rows, handle, **DEFER)))
    cached = {"handle": 5 if me == 1 else handle, "x": x}
    raises(world, "handle: found int", lambda: deferred(buffer, cached))
    # Another hidden size opens another communicator, where the ranks wait.
    wide = np.repeat(x, 2, axis=1)
    again, *_ = deferred(buffer, {**good, "x": wide})
    same(again, np.repeat(recv_x, 2, axis=1))
    again, *_ = buffer.dispatch(x, handle=handle)
    same(again, recv_x)
    buffer.destroy()


def deferred(buffer, call):
    return waited(buffer.dispatch(**call, **DEFER))


def waited(event):
    return event.wait()


def whole(results):
    """Results, of which there may be an event alone where the call asks wrongly for one."""
    return results.wait() if isinstance(results, EventOverlap) else results


def test_bad_calls_of_2_5_are_refused_on_all_ranks(ranks):
    ranks(2, refused, CASES[1])


def described(world, case):
    buffer = ep_buffer(world, case)
    buffer.dispatch(
        case.x[world.rank].astype(BF16), topk_idx=case.idx[world.rank], num_experts=case.experts
    )
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        buffer.print_memory_usage()
    about = (buffer.num_lb_bytes, buffer.nccl_comm_handle, buffer.runtime is buffer)
    assert about == (0, None, True)
    assert buffer.context is buffer.main_context is buffer
    sizes = tokenyard.deep_ep.get_physical_domain_size, tokenyard.deep_ep.get_logical_domain_size
    assert [size(buffer) for size in sizes] == [(1, 2), (1, 2)]
    buffer.barrier()
    buffer.barrier(wait_comm_stream=False, with_cpu_sync=True)
    buffer.destroy()
    assert buffer.context is buffer.main_context is None
    with pytest.raises(errors.InvalidInputError, match="it was destroyed"):
        buffer.print_memory_usage()
    return printed.getvalue()


def test_a_buffer_says_what_memory_it_takes(ranks):
    for rank, line in enumerate(ranks(2, described, CASES[1])):
        assert line.startswith(f"[tokenyard memory] rank_idx={rank}, num_ranks=2, 1 communicators:")
        # The arena that the config of the test names, and its control window.
        assert 64 / 1024 <= float(line.split("communicators: ")[1].split()[0]) < 0.1
        assert line.count("\n") == 1


def test_the_end_of_a_with_waits_for_an_event_once():
    seen = []
    event = EventOverlap(tokenyard.deep_ep.EventHandle())
    event.register_hook_after_wait(lambda: seen.append("waited"))
    with event(release_handle=True) as entered:
        assert (entered, seen) == (event, [])
    assert (event.event, seen) == (None, ["waited"])
    with event:
        pass
    assert seen == ["waited"]
    event = EventOverlap(tokenyard.deep_ep.EventHandle())
    event.register_hook_after_wait(lambda: 7)
    assert [event.wait(), event.wait()] == [7, None]


def test_hints_of_2_5_have_records_of_64_bytes():
    class Group:
        ranks = 8

    # FP8: 7168 bytes, 224 scales, 25 numbers; then twice as many bytes and 8 weights and ids.
    dispatch, combine = 7168 + 896 + 128, 14336 + 64
    hint = EPBuffer.get_buffer_size_hint(Group, 4096, 7168, 8, use_fp8_dispatch=True)
    assert hint == 8 * 4096 * combine
    # 2 * 7168 bytes and 19 numbers, in units of 32, are no multiple of 64.
    assert 8 * 4096 * dispatch < hint
    kinds = (ElasticBuffer, EPBuffer)
    hints = [kind.get_buffer_size_hint(Group, 16384, 7168, 6) for kind in kinds]
    assert hints == [8 * 16384 * 14432, 8 * 16384 * 14464]
    one = EPBuffer.get_buffer_size_hint(Group, 64, 256, 4, allow_multiple_reduction=False)
    assert one == 2 << 20
    names = ("allocation", "rdma", "tma")
    units = [getattr(tokenyard.deep_ep, f"get_num_{name}_alignment")() for name in names]
    assert units == [2 << 20, 64, 32]


def test_the_calls_have_the_arguments_of_2_5():
    constructor = (
        "group num_bytes num_max_tokens_per_rank hidden num_topk use_fp8_dispatch lb_allocation_plan_or_num_bytes "
        "deterministic allow_hybrid_mode allow_multiple_reduction prefer_overlap_with_compute sl_idx num_allocated_qps "
        "num_cpu_timeout_secs num_gpu_timeout_secs explicitly_destroy"
    )
    dispatch = (
        "x topk_idx topk_weights cumulative_local_expert_recv_stats num_experts num_max_tokens_per_rank "
        "expert_alignment num_sms num_qps previous_event async_with_compute_stream allocate_on_comm_stream handle "
        "do_handle_copy do_cpu_sync do_expand do_zero_padding use_tma_aligned_col_major_sf defer_epilogue"
    )
    combine = (
        "x handle topk_weights bias num_sms num_qps previous_event async_with_compute_stream allocate_on_comm_stream "
        "defer_epilogue"
    )
    barrier = "wait_comm_stream with_cpu_sync sequential"
    for call, names in {
        EPBuffer.__init__: constructor,
        EPBuffer.dispatch: dispatch,
        EPBuffer.combine: combine,
        EPBuffer.barrier: barrier,
    }.items():
        found = [name for name in inspect.signature(call).parameters if name != "others"]
        assert found == ["self", *names.split()]
    with pytest.raises(TypeError, match="previous_event_before_epilogue"):
        EPBuffer.dispatch(None, None, previous_event_before_epilogue=None)
