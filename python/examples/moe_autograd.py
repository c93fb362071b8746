"""Dispatch and combine of `deep_ep` as functions of torch's autograd: each is the other's backward pass.

Frameworks save the tensors of a handle alone, so the tuple is made anew of them.
"""

import torch


class Dispatch(torch.autograd.Function):
    """Tokens to the ranks of their experts: rows, local ids, weights, and the tensors of the handle."""

    @staticmethod
    def forward(ctx, buffer, x, idx, weights, experts):
        per_rank, per_domain, per_expert, is_in, _ = buffer.get_dispatch_layout(idx, experts)
        recv_x, recv_idx, recv_weights, _, handle, event = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_domain,
            is_token_in_rank=is_in,
            num_tokens_per_expert=per_expert,
            topk_idx=idx,
            topk_weights=weights,
            async_finish=True,
        )
        event.current_stream_wait()
        ctx.buffer = buffer
        ctx.save_for_backward(*handle)
        ctx.mark_non_differentiable(recv_idx, *handle)
        return recv_x, recv_idx, recv_weights, *handle

    @staticmethod
    def backward(ctx, x_grad, _, weights_grad, *__):
        x_grad, weights_grad, event = ctx.buffer.combine(
            x_grad.contiguous(),
            ctx.saved_tensors,
            topk_weights=weights_grad.float().contiguous(),
            async_finish=True,
        )
        event.current_stream_wait()
        return None, x_grad, None, weights_grad, None


class Combine(torch.autograd.Function):
    """Experts' outputs to their tokens, summed."""

    @staticmethod
    def forward(ctx, buffer, x, *handle):
        ctx.buffer = buffer
        ctx.save_for_backward(*handle)
        return buffer.combine(x, handle)[0]

    @staticmethod
    def backward(ctx, grad):
        handle = ctx.saved_tensors  # once: checkpointing recomputes them
        x_grad, *_ = ctx.buffer.dispatch(grad.contiguous(), handle=handle)
        return None, x_grad, *[None] * len(handle)
