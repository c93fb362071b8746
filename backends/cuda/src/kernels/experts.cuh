// Expert-major and packed on the owner's side: rows arrive at their first expert's place and are spread over the
// others; expert outputs are merged into one partial row per received token before a combine.
#pragma once
#include "types.cuh"

namespace ty {

// A slot that a peer wrote, if it names a row.
__device__ inline i32 slot_of(const i32* slots, u64 token, u32 topk, u64 rows) {
  u32 lane = threadIdx.x % 32;
  i32 slot = lane < topk ? slots[token * topk + lane] : -1;
  return slot >= 0 && (u64)slot < rows ? slot : -1;
}

// One received token. One warp.
__device__ inline void spread_token(const SpreadArgs& a, u64 token) {
  u32 lane = threadIdx.x % 32;
  i32 slot = slot_of(a.slots, token, a.topk, a.rows);
  u32 taken = __ballot_sync(~0u, slot >= 0);
  if (taken == 0) return;
  u64 first = __shfl_sync(~0u, slot, __ffs(taken) - 1);
  if (slot >= 0 && a.weights) a.weights[slot] = a.landed_weights[token * a.topk + lane];
  for (u32 left = taken; left != 0; left &= left - 1) {
    u64 to = __shfl_sync(~0u, slot, __ffs(left) - 1);
    for (u32 i = lane; i < a.scale_words; i += 32)
      a.scales[to * a.scale_words + i] = a.landed_scales[token * a.scale_words + i];
    if (to != first) copy_16(Warp(), a.x + to * a.row_bytes, a.x + first * a.row_bytes, a.row_bytes);
  }
}

// The padding behind one expert's rows. One block.
__device__ inline void zero_padding(const SpreadArgs& a, u32 expert) {
  u64 begin = a.starts[expert] + a.counts[expert], end = min((u64)a.starts[expert + 1], a.rows);
  if (begin >= end) return;
  u64 bytes = (end - begin) * a.row_bytes;
  for (u64 at = (u64)threadIdx.x * 16; at < bytes; at += (u64)blockDim.x * 16)
    *reinterpret_cast<uint4*>(a.x + begin * a.row_bytes + at) = make_uint4(0, 0, 0, 0);
  for (u64 i = begin * a.scale_words + threadIdx.x; i < end * a.scale_words; i += blockDim.x)
    a.scales[i] = 0;
  for (u64 i = begin + threadIdx.x; i < end && a.weights; i += blockDim.x) a.weights[i] = 0.0f;
}

__device__ inline void spread(const SpreadArgs& a) {
  u32 warps = blockDim.x / 32;
  for (u64 token = blockIdx.x * warps + threadIdx.x / 32; token < a.tokens;
       token += gridDim.x * warps)
    spread_token(a, token);
  for (u32 e = blockIdx.x; e < a.local_experts && a.zero_padding; e += gridDim.x) zero_padding(a, e);
}

// One received token: the rows of its copies in k order, and their weights. One warp.
template <class Type>
__device__ void merge_token(const MergeArgs& a, u64 token) {
  u32 lane = threadIdx.x % 32;
  i32 slot = slot_of(a.slots, token, a.topk, a.rows);
  u32 taken = __ballot_sync(~0u, slot >= 0);
  float weight = slot >= 0 && a.dispatch_weights ? a.dispatch_weights[slot] : 1.0f;
  if (a.weights && lane < a.topk)
    a.out_weights[token * a.topk + lane] = slot >= 0 ? a.weights[slot] : 0.0f;
  for (u64 at = lane * 16; at < a.row_bytes + lane * 16; at += Sums<Type>::kBytes) {
    i64 room = (i64)a.row_bytes - (i64)at;
    Sums<Type> sums;
    for (u32 left = taken; left != 0; left &= left - 1) {
      u64 from = __shfl_sync(~0u, slot, __ffs(left) - 1);
      float by = __shfl_sync(~0u, weight, __ffs(left) - 1);
      sums.add((u64)a.x + from * a.row_bytes + at, room, a.dispatch_weights != nullptr, by);
    }
    sums.store(a.out + token * a.row_bytes + at, room);
  }
}

template <class Type>
__device__ void merge(const MergeArgs& a) {
  u32 warps = blockDim.x / 32;
  for (u64 token = blockIdx.x * warps + threadIdx.x / 32; token < a.tokens;
       token += gridDim.x * warps)
    merge_token<Type>(a, token);
}

}  // namespace ty
