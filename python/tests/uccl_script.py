"""The calls of UCCL-EP's benchmarks, in our words: `python -m tokenyard.uccl uccl_script.py` on each rank.

The tensors lie on the GPU that `utils` chooses, or without one in host memory.
"""

import argparse
import os

import torch
import torch.distributed as dist
from buffer import Buffer
from uccl import ep
from uccl.ep import Config, EventHandle
from utils import (
    EventOverlap,
    bench,
    bench_kineto,
    calc_diff,
    destroy_uccl,
    detect_ib_hca,
    hash_tensor,
    init_dist_under_torchrun,
    initialize_uccl,
    inplace_unique,
    per_token_cast_back,
    per_token_cast_to_fp8,
)


def low_latency(buffer, group, args):
    """Dispatch and combine by hooks and by events, in bf16 and FP8, with and without the buffer's own memory."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens, hidden, experts, topk = args.num_tokens, args.hidden, args.num_experts, args.num_topk
    x = torch.full((tokens, hidden), float(rank - 128), dtype=torch.bfloat16)
    x[:, -128:] = torch.arange(tokens).to(torch.bfloat16).view(-1, 1)
    scores = torch.rand((tokens, experts), dtype=torch.float32)
    idx = torch.topk(scores, topk, dim=-1).indices
    idx[0, 0] = -1
    weights = torch.rand((tokens, topk), dtype=torch.float32)
    every = [torch.empty_like(idx) for _ in range(ranks)]
    dist.all_gather(every, idx, group=group)
    every = torch.stack(every)
    local, value = experts // ranks, 0
    kinds = [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]
    for with_hook in (False, True):
        for use_fp8, round_scale, use_ue8m0 in kinds:
            stats = torch.zeros(local, dtype=torch.int)
            received, counts, handle, event, hook = buffer.low_latency_dispatch(
                x,
                idx,
                tokens,
                experts,
                use_fp8=use_fp8,
                round_scale=round_scale,
                use_ue8m0=use_ue8m0,
                cumulative_local_expert_recv_stats=stats,
                async_finish=not with_hook,
                return_recv_hook=with_hook,
            )
            hook() if with_hook else event.current_stream_wait()
            wanted = [int((every == rank * local + expert).sum()) for expert in range(local)]
            assert counts.tolist() == stats.tolist() == wanted
            rows = received
            if use_fp8:
                flat = (
                    received[0].view(-1, hidden),
                    received[1].contiguous().view(-1, hidden // 128),
                )
                rows = per_token_cast_back(*flat).view(received[0].shape)
            for expert, count in enumerate(wanted):
                value ^= hash_tensor(rows[expert, :count])
            for zero_copy in (False, True):
                if zero_copy:
                    buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = rows
                out = torch.empty_like(x)
                combined, event, hook = buffer.low_latency_combine(
                    rows,
                    idx,
                    weights,
                    handle,
                    zero_copy=zero_copy,
                    async_finish=not with_hook,
                    return_recv_hook=with_hook,
                    out=out,
                )
                hook() if with_hook else event.current_stream_wait()
                sums = weights.masked_fill(idx == -1, 0).sum(dim=1).view(-1, 1)
                difference = calc_diff(x * sums, combined)
                assert difference < (9e-4 if use_fp8 else 1e-5), (difference, use_fp8)
    return value


def normal(buffer, group, args):
    """Layout, dispatch, a cached dispatch and a combine, behind an event of the current stream."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tokens, experts = args.num_tokens, args.num_experts
    x = torch.full((tokens, args.hidden), float(rank), dtype=torch.bfloat16)
    idx = torch.topk(torch.rand((tokens, experts), dtype=torch.float32), args.num_topk).indices
    weights = torch.ones((tokens, args.num_topk), dtype=torch.float32) * rank
    owners = idx // (experts // ranks)
    inplace_unique(owners, ranks)
    per_rank, _, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(idx, experts)
    assert per_rank.tolist() == [int((owners == one).sum()) for one in range(ranks)]
    config = Config(24, 8, 256)
    fp8 = per_token_cast_to_fp8(x)
    for rows in (x, (fp8[0], fp8[1].T.contiguous().T)):
        received, _, back, counts, handle, event = buffer.dispatch(
            x=rows,
            topk_idx=idx,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            config=config,
            async_finish=True,
            previous_event=buffer.capture(),
        )
        event.current_stream_wait()
        totals = per_expert.clone()
        dist.all_reduce(totals, group=group)
        assert totals.view(ranks, -1)[rank].tolist() == counts
        plain = per_token_cast_back(*received) if isinstance(received, tuple) else received
        start = 0
        for source, end in enumerate(handle[0][:, rank if handle[0].shape[1] > 1 else 0].tolist()):
            assert bool((plain[start:end] == source).all())
            start = end
        again, *_ = buffer.dispatch(x=rows, handle=handle, config=config)
        again = per_token_cast_back(*again) if isinstance(again, tuple) else again
        assert torch.equal(again, plain)
        combined, _, _ = buffer.combine(plain, handle, topk_weights=back, config=config)
        times = is_in_rank.sum(dim=1).unsqueeze(1)
        assert calc_diff(combined.float() / times, x) < 5e-6


def events():
    """Events of streams that are given by their addresses."""
    stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_initialized() else 0
    event = EventHandle(stream)
    event.current_stream_wait(stream)
    event.current_stream_wait()
    EventOverlap(EventHandle()).current_stream_wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-tokens", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--num-topk", type=int, default=4)
    parser.add_argument("--num-experts", type=int, default=16)
    args = parser.parse_args()
    assert ep.is_sm90_compiled()
    assert detect_ib_hca() is None or isinstance(detect_ib_hca(), str)
    local_rank, local_ranks = (int(os.environ[f"LOCAL_{it}"]) for it in ("RANK", "WORLD_SIZE"))
    rank, ranks, group = init_dist_under_torchrun(local_rank, local_ranks)
    torch.manual_seed(rank)
    sizes = args.num_tokens, args.hidden, ranks, args.num_experts
    num_rdma_bytes = Buffer.get_low_latency_rdma_size_hint(*sizes)
    scratch = torch.zeros(64, dtype=torch.uint8)
    # Scripts of 2025, which hold the memory of rows.
    proxies, workers = initialize_uccl(scratch, num_rdma_bytes, rank, ranks, group)
    buffer = Buffer(
        group,
        scratch.data_ptr(),
        1 << 20,
        num_rdma_bytes,
        low_latency_mode=True,
        num_qps_per_rank=args.num_experts // ranks,
        explicitly_destroy=True,
    )
    buffer.connect_atomic_buffer(proxies[0])
    for proxy in proxies:
        proxy.calculate_and_set_dispatch_recv_data_offset(*sizes[:2], args.num_experts)
        proxy.set_atomic_buffer_ptr(proxies[0].get_atomic_buffer_ptr())
    value = low_latency(buffer, group, args)
    print(f"[rank {rank}] hash {value}, bytes {buffer.num_rdma_bytes}", flush=True)
    group.barrier()
    buffer.destroy()
    destroy_uccl(proxies, workers)
    # Later ones.
    buffer = Buffer(group, 1 << 20, 0, explicitly_destroy=True, is_intranode=True)
    normal(buffer, group, args)
    events()
    idx = torch.zeros((1, 1), dtype=torch.int64)
    mean, *_ = bench(lambda: buffer.get_dispatch_layout(idx, args.num_experts), 2, 3)
    figures = bench_kineto(lambda: None, ("dispatch", "notify"), suppress_kineto_output=True)
    assert (mean > 0, len(figures)) == (True, 2)
    buffer.reset_rdma_buffer()
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()
    print(f"[rank {rank}] all right", flush=True)


if __name__ == "__main__":
    main()
