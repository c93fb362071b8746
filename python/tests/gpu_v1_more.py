"""More of DeepEP on tensors of torch: sums of weights, sizes that change, handles that outlive, the ways to ranks."""

import os
import socket
from unittest import mock

import torch
import torch.distributed as dist
from gpu_common import (
    CASE,
    SMALL,
    Skipped,
    device_of,
    difference,
    inputs,
    is_gpu,
    layout_of,
    on_device,
    output_mode,
    prepare,
    raised,
    rows_of,
    same,
    times,
    v1,
    v2,
)
from gpu_v1 import check_normal

from tokenyard.deep_ep import Buffer, ElasticBuffer
from tokenyard.deep_ep.utils.envs import init_dist


def weights_of_all_ranks(world):
    """As DeepEP's test has it: the places without an id are filled, and every rank with the token counts."""
    buffer = v1(world)
    me = world.rank
    for case in (SMALL, CASE):
        x, idx, weights = inputs(world, case)
        weights = torch.full_like(weights, me + 1)
        recv_x, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, **layout_of(buffer, idx, case.experts)
        )
        largest = recv_weights.amax(dim=1, keepdim=True).expand_as(recv_weights)
        filled = torch.where(recv_idx < 0, largest, recv_weights)
        _, back, _ = buffer.combine(recv_x, handle, topk_weights=filled)
        ranks = torch.from_numpy(times(case, me)).to(x.device)[:, None]
        same(back, (ranks * (me + 1)).float().expand_as(weights).contiguous())
    buffer.destroy()


def more_tokens_than_before(world):
    """One rank brings more tokens than any call had: all open a larger communicator, and old handles stay usable."""
    buffer = v1(world)
    _, recv_x, handle = check_normal(world, buffer, SMALL, torch.bfloat16)
    for tokens in (1500, 100):
        count = tokens if world.rank == 0 else 7
        x = torch.randn(count, SMALL.hidden, device=device_of(world)).bfloat16()
        idx = torch.rand(count, SMALL.experts, device=x.device).topk(SMALL.topk).indices
        weights = torch.rand(count, SMALL.topk, device=x.device)
        layout = layout_of(buffer, idx, SMALL.experts)
        rows, _, _, _, new, _ = buffer.dispatch(x, topk_idx=idx, topk_weights=weights, **layout)
        combined, *_ = buffer.combine(rows, new)
        factors = layout["is_token_in_rank"].sum(1, keepdim=True)
        assert difference(combined, x * factors) < 5e-6
    buffer.combine(recv_x, handle)
    buffer.destroy()


def multiprocessors(world):
    """A number of multiprocessors is one of a call: it opens nothing, and combines of earlier handles go on. A config
    of the environment, as the one in host memory, leaves no choice.
    """
    buffer = v1(world)
    try:
        first = check_normal(world, buffer, SMALL, torch.bfloat16)
        for sms in (8, 24, 8):
            Buffer.set_num_sms(sms)
            check_normal(world, buffer, SMALL, torch.bfloat16)
        buffer.combine(first[1], first[2])
    finally:
        Buffer.num_sms, Buffer._has_chosen_sms = 20, False
    assert len(buffer._pool._opened) == 1
    buffer.destroy()


def process_group(world):
    """The ranks of a process group of torch, NCCL's on GPUs."""
    prepare(world)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1]).encode()
    port = int(world.all_gather("port", port)[0])
    backend = "nccl" if is_gpu() else "gloo"
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=world.rank, world_size=world.ranks)
    try:
        for _ in range(2):
            buffer = on_device(Buffer(dist.group.WORLD, 1 << 20, 0, explicitly_destroy=True))
            assert (buffer.group, buffer.rank, buffer.group_size) == (
                dist.group.WORLD,
                world.rank,
                world.ranks,
            )
            check_normal(world, buffer, SMALL, torch.bfloat16)
            buffer.destroy()
        # The world of the group, whose threads would go on.
        buffer._pool.world.close()
    finally:
        dist.destroy_process_group()


def scripts_of_deep_ep(world):
    """`init_dist`: tensors without a device lie on the rank's GPU, sums of them go through the group, and both buffers
    take it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1]).encode()
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": world.all_gather("port", port)[0].decode(),
    }
    address |= {"WORLD_SIZE": "1", "RANK": "0"}
    prepare(world)
    with mock.patch.dict(os.environ, address):
        rank, ranks, group = init_dist(world.rank, world.ranks)
    try:
        assert (rank, ranks) == (world.rank, world.ranks)
        total = torch.ones(3)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [ranks] * 3
        if is_gpu():
            assert (total.dtype, total.device) == (torch.bfloat16, device_of(world))
        buffer = on_device(Buffer(group, low_latency_mode=True, explicitly_destroy=True))
        check_normal(world, buffer, SMALL, torch.bfloat16)
        buffer.destroy()
        buffer = on_device(
            ElasticBuffer(group, num_max_tokens_per_rank=64, explicitly_destroy=True)
        )
        x, idx, _ = inputs(world, SMALL)
        recv_x, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=SMALL.experts)
        same(recv_x, rows_of(world, SMALL, SMALL.sources(world.rank)))
        assert handle.recv_src_metadata.dtype == torch.int32
        buffer.combine(recv_x, handle)
        buffer.destroy()
        buffer._pool.world.close()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        dist.destroy_process_group()


def made_anew(world):
    """A handle of V2 outlives its buffer, as Megatron needs it, and so do its fields."""
    buffer = v2(world, SMALL)
    x, idx, _ = inputs(world, SMALL)
    recv_x, _, _, handle, _ = buffer.dispatch(x, topk_idx=idx, num_experts=SMALL.experts)
    buffer = v2(world, SMALL)
    first, _, _ = buffer.combine(recv_x, handle)
    again, _, _, _, _ = buffer.dispatch(x, handle=handle)
    same(again, recv_x)
    same(buffer.combine(recv_x, handle)[0], first)
    assert handle.recv_src_metadata.shape[0] == len(recv_x)
    del handle
    buffer.destroy()


def local_memory(world):
    buffer = v1(world, num_rdma_bytes=1024, enable_shrink=True)
    memory = buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_()
    assert (memory.numel(), memory.device) == (1024, device_of(world))
    buffer.destroy()


def outputs_of_every_mode(world):
    """In memory of torch, or in the arena where that is asked for: the arena's are counted while they live."""
    for mode in ("copy", "arena", "auto"):
        with output_mode(mode):
            buffer = v1(world)
        _, recv_x, handle = check_normal(world, buffer, CASE, torch.float32)
        opened = buffer._pool.current
        assert (opened.communicator.held_bytes > 0) == (mode == "arena")
        del recv_x, handle
        assert opened.communicator.held_bytes == 0
        buffer.destroy()
    with output_mode("elsewhere"):
        error = raised(lambda: v1(world))
        assert "expected auto, arena or copy" in str(error), error


def arrays_of_another_library(world):
    """Arrays of CuPy, in host memory those of numpy, in place of torch's tensors: outputs are torch's."""
    take = torch.Tensor.numpy
    if is_gpu():
        try:
            import cupy
        except ImportError:
            return Skipped("CuPy is not installed")
        take = cupy.from_dlpack
    buffer = v1(world, low_latency_mode=True)
    me, case = world.rank, SMALL
    x, idx, weights = inputs(world, case, torch.float32)
    given, ids, factors = take(x), take(idx), take(weights)
    options = layout_of(buffer, ids, case.experts)
    recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(
        given, topk_idx=ids, topk_weights=factors, **options
    )
    same(recv_x, rows_of(world, case, case.sources(me), torch.float32))
    bias = torch.ones_like(x)
    combined, back, _ = buffer.combine(
        take(recv_x), handle, topk_weights=take(recv_weights), bias=(take(bias), take(bias))
    )
    ranks = torch.from_numpy(times(case, me)).to(x.device)[:, None]
    assert difference(combined, x * ranks + 2) < 5e-6
    same(back, torch.where(idx >= 0, weights, 0))
    rows, counts, packed, _, _ = buffer.low_latency_dispatch(
        given, ids, case.max_tokens, case.experts, use_fp8=False
    )
    assert counts.tolist() == case.expert_counts(me)
    out = torch.zeros_like(x)
    found, *_ = buffer.low_latency_combine(take(rows), ids, factors, packed, out=take(out))
    total = torch.where(idx >= 0, weights, 0).sum(1, keepdim=True)
    for sums in (found, out):
        torch.testing.assert_close(sums, x * total, rtol=1e-4, atol=1e-4)
    # An object that is no array is refused on all ranks, and the buffer goes on.
    wrong = object() if me == 1 else given
    error = raised(lambda: buffer.dispatch(wrong, topk_idx=ids, topk_weights=factors, **options))
    assert "x: found object" in str(error), error
    check_normal(world, buffer, case, torch.bfloat16)
    buffer.destroy()
    return None


CHECKS = [
    weights_of_all_ranks,
    more_tokens_than_before,
    multiprocessors,
    process_group,
    outputs_of_every_mode,
    scripts_of_deep_ep,
    made_anew,
    local_memory,
    arrays_of_another_library,
]
# NCCL takes no two ranks on one GPU, and the config by which they share it decides for all calls of a buffer.
NEED_ONE_EACH = {more_tokens_than_before, multiprocessors, process_group, scripts_of_deep_ep}
