// Expert-major and packed on the owner's side: rows arrive at their first expert's place and are spread over the
// others; expert outputs are merged into one partial row per received token before a combine.
#pragma once
#include "pull.cuh"

namespace ty {

// A slot that a peer wrote, if it names a row.
__device__ inline i32 slot_of(const i32* slots, u64 token, u32 topk, u64 rows) {
  u32 lane = threadIdx.x % 32;
  i32 slot = lane < topk ? slots[token * topk + lane] : -1;
  return slot >= 0 && (u64)slot < rows ? slot : -1;
}

// The rows of one token's other experts, by bulk copies through this warp's stage.
#if TY_ROWS_TMA
struct Copier {
  u32 stage, barrier, parity = 0;

  __device__ Copier(const SpreadArgs& a, u8* shared, u64* barriers) {
    u32 warp = threadIdx.x / 32;
    stage = shared_address(shared) + warp * a.stage_bytes;
    barrier = shared_address(&barriers[warp]);
    if (threadIdx.x % 32 == 0) {
      init_barrier(barrier, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // Peers stored these rows by other means, too.
    asm volatile("fence.proxy.async;" ::: "memory");
    __syncwarp();
  }
  __device__ void copy(const SpreadArgs& a, i32 slot, u64 first) {
    u32 lane = threadIdx.x % 32;
    for (u64 at = 0; at < a.row_bytes; at += a.stage_bytes) {
      u32 bytes = (u32)min((u64)a.stage_bytes, a.row_bytes - at);
      stores_read();
      __syncwarp();
      if (lane == 0) bulk_load(stage, a.x + first * a.row_bytes + at, bytes, barrier);
      wait_barrier(barrier, parity);
      parity ^= 1;
      if (slot >= 0 && (u64)slot != first) bulk_store(a.x + slot * a.row_bytes + at, stage, bytes);
      close_stores();
    }
  }
  __device__ void finish() { stores_done(); }
};
#else
struct Copier {
  __device__ Copier(const SpreadArgs&, u8*, u64*) {}
  __device__ void copy(const SpreadArgs& a, i32 slot, u64 first) {
    u32 taken = __ballot_sync(~0u, slot >= 0 && (u64)slot != first);
    for (u32 left = taken; left != 0; left &= left - 1) {
      u64 to = __shfl_sync(~0u, slot, __ffs(left) - 1);
      copy_16(Warp(), a.x + to * a.row_bytes, a.x + first * a.row_bytes, a.row_bytes);
    }
  }
  __device__ void finish() {}
};
#endif

// One received token. One warp.
__device__ inline void spread_token(const SpreadArgs& a, u64 token, i32 slot, Copier& rows) {
  u32 lane = threadIdx.x % 32, taken = __ballot_sync(~0u, slot >= 0);
  if (taken == 0) return;
  u64 first = __shfl_sync(~0u, slot, __ffs(taken) - 1);
  if (__popc(taken) > 1) rows.copy(a, slot, first);
  if (slot >= 0 && a.weights) a.weights[slot] = a.landed_weights[token * a.topk + lane];
  for (u32 left = taken; left != 0; left &= left - 1) {
    u64 to = __shfl_sync(~0u, slot, __ffs(left) - 1);
    for (u32 i = lane; i < a.scale_words; i += 32)
      a.scales[to * a.scale_words + i] = a.landed_scales[token * a.scale_words + i];
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

__device__ inline void spread(const SpreadArgs& a, u8* shared) {
  __shared__ u64 barriers[kWarps];
  if (a.cell && a.cell->code != kGo) return;
  u64 tokens = a.totals ? a.totals[0] : a.tokens;
  u32 warp = threadIdx.x / 32, step = gridDim.x * a.movers;
  if (warp < a.movers) {
    Copier rows(a, shared, barriers);
    u64 token = blockIdx.x * a.movers + warp;
    auto look = [&](u64 t) { return t < tokens ? slot_of(a.slots, t, a.topk, a.rows) : -1; };
    for (i32 slot = look(token), next; token < tokens; token += step, slot = next) {
      next = look(token + step);
      spread_token(a, token, slot, rows);
    }
    rows.finish();
  }
  for (u32 e = blockIdx.x; e < a.local_experts && a.zero_padding; e += gridDim.x) zero_padding(a, e);
}

// The rows of a received token's copies.
template <bool Weighted>
struct Copies {
  static constexpr bool kWeighted = Weighted;
  const MergeArgs& a;
  u8* out;

  __device__ u32 early(u32 token) const { return (u32)slot_of(a.slots, token, a.topk, a.rows); }
  __device__ bool there(u32 slot) const { return (i32)slot >= 0; }
  __device__ uint2 late(u32, u32) const { return make_uint2(0, 0); }
  __device__ u64 from(u32 slot, uint2) const { return (u64)a.x + (u64)slot * a.row_bytes; }
  __device__ float weight(u32 slot) const { return a.dispatch_weights[slot]; }
  __device__ u64 bias(u32) const { return 0; }
};

// The weights that travel back.
__device__ inline void merge_weights(const MergeArgs& a, u64 tokens) {
  u64 places = tokens * a.topk;
  for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < places; i += gridDim.x * blockDim.x) {
    i32 slot = a.slots[i];
    a.out_weights[i] = slot >= 0 && (u64)slot < a.rows ? a.weights[slot] : 0.0f;
  }
}

// One partial row per received token: its copies in k order.
template <class Type>
__device__ void merge(const MergeArgs& a, u8* shared) {
  u64 tokens = a.received ? *a.received : a.tokens;
  if (a.weights) merge_weights(a, tokens);
  Summing s{{a.piece_bytes, a.pieces}, (u32)tokens, a.row_bytes, a.stages, a.stage_bytes};
  if (a.dispatch_weights)
    sum_rows<Type>(Copies<true>{a, a.out}, s, shared);
  else
    sum_rows<Type>(Copies<false>{a, a.out}, s, shared);
}

}  // namespace ty
