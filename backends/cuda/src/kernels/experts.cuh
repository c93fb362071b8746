// Expert-major and packed on the owner's side: rows arrive at their first expert's place and are spread
// over the others; expert outputs are merged into one partial row per received token before a combine.
#pragma once
#include "pull.cuh"

namespace ty {

// A slot that a peer wrote, if it names a row.
__device__ inline i32 slot_of(const i32* slots, u64 token, u32 topk, u64 rows) {
  u32 lane = threadIdx.x % 32;
  i32 slot = lane < topk ? slots[token * topk + lane] : -1;
  return slot >= 0 && (u64)slot < rows ? slot : -1;
}

// Copies rows of one warp: each is loaded once and stored to several places.
#if TY_ROWS_TMA
class Copier {
 public:
  // Every warp has `stages` of `pitch` bytes, from `shared` on; two are used.
  __device__ Copier(u8* shared, u32 pitch, u32 stages) : pitch_(pitch), stages_(stages) {
    __shared__ u64 barriers[2 * kWarps];
    u32 warp = threadIdx.x / 32;
    rows_ = shared_address(shared) + warp * stages * pitch;
    barriers_ = shared_address(&barriers[2 * warp]);
    if (threadIdx.x % 32 == 0) {
      init_barrier(barriers_, 1);
      init_barrier(barriers_ + 8, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // Peers stored these rows by other means, too.
    publish_places();
    __syncwarp();
  }

  // Copies at most `pitch` bytes to where each lane wants them, if it does. They are loaded now, and
  // stored when the next copy is under way.
  __device__ void copy(u8* to, const u8* from, u32 bytes) {
    if (stages_ == 1) flush();
    stores_read();
    __syncwarp();
    u32 stage = stages_ == 1 ? 0 : last_ ^ 1;
    if (threadIdx.x % 32 == 0) bulk_load(rows_ + stage * pitch_, from, bytes, barriers_ + 8 * stage);
    flush();
    last_ = stage, to_ = to, bytes_ = bytes;
  }
  __device__ void finish() {
    flush();
    stores_done();
  }

 private:
  __device__ void flush() {
    if (bytes_ == 0) return;
    wait_barrier(barriers_ + 8 * last_, parity_ >> last_ & 1);
    parity_ ^= 1u << last_;
    if (to_) bulk_store(to_, rows_ + last_ * pitch_, bytes_);
    close_stores();
    bytes_ = 0;
  }

  u32 pitch_, stages_, rows_, barriers_, parity_ = 0, last_ = 0, bytes_ = 0;
  u8* to_ = nullptr;
};
#else
class Copier {
 public:
  __device__ Copier(u8*, u32, u32) {}
  __device__ void copy(u8* to, const u8* from, u32 bytes) {
    u64 mine = reinterpret_cast<u64>(to);
    for (u32 left = __ballot_sync(~0u, mine != 0); left != 0; left &= left - 1) {
      u64 there = __shfl_sync(~0u, mine, __ffs(left) - 1);
      copy_16(Warp(), reinterpret_cast<u8*>(there), from, bytes);
    }
  }
  __device__ void finish() {}
};
#endif

// What goes beside the rows of one received token. Its words are loaded ahead of their use: a lane
// holds two of the scales.
class Beside {
 public:
  // One warp; `slot` is lane k's.
  __device__ void load(const SpreadArgs& a, u64 token, i32 slot) {
    u32 lane = threadIdx.x % 32;
    if (!__any_sync(~0u, slot >= 0)) return;
    if (slot >= 0 && a.weights) weight_ = a.landed_weights[token * a.topk + lane];
    if (slot >= 0 && a.source) source_ = a.landed_source[token];
    from_ = a.landed_scales + token * a.scale_words;
    load_scales(a, lane);
  }
  // To all its rows.
  __device__ void store(const SpreadArgs& a, i32 slot) {
    if (slot >= 0 && a.weights) a.weights[slot] = weight_;
    if (slot >= 0 && a.source) a.source[slot] = source_;
    u32 lane = threadIdx.x % 32, taken = __ballot_sync(~0u, slot >= 0);
    for (u32 first = 0; first < a.scale_words; first += 64) {
      u32 i = first + lane;
      if (first > 0) load_scales(a, i);
      for (u32 left = taken; left != 0; left &= left - 1) {
        u32* to = a.scales + (u64)__shfl_sync(~0u, slot, __ffs(left) - 1) * a.scale_words;
        if (i < a.scale_words) to[i] = scale_[0];
        if (i + 32 < a.scale_words) to[i + 32] = scale_[1];
      }
    }
  }

 private:
  __device__ void load_scales(const SpreadArgs& a, u32 i) {
    if (i < a.scale_words) scale_[0] = from_[i];
    if (i + 32 < a.scale_words) scale_[1] = from_[i + 32];
  }

  const u32* from_ = nullptr;
  u32 scale_[2], source_;
  float weight_;
};

// The row of one received token, whose selection k has its row at `slot` of lane k. One warp.
__device__ inline void spread_row(const SpreadArgs& a, i32 slot, Copier& rows) {
  u32 taken = __ballot_sync(~0u, slot >= 0);
  if (__popc(taken) < 2) return;
  u64 first = __shfl_sync(~0u, slot, __ffs(taken) - 1);
  bool other = slot >= 0 && (u64)slot != first;
  for (u64 at = 0; at < a.row_bytes; at += a.stage_bytes)
    rows.copy(other ? a.x + slot * a.row_bytes + at : nullptr, a.x + first * a.row_bytes + at,
              (u32)min((u64)a.stage_bytes, a.row_bytes - at));
}

// Tokens `first`, `first + step` and so on. One warp.
__device__ inline void spread_tokens(const SpreadArgs& a, Copier& rows, u64 first, u32 count,
                                     u32 step) {
  constexpr u32 kAtOnce = 4;  // looks at memory that are under way together
  for (u32 i = 0; i < count; i += kAtOnce) {
    i32 slots[kAtOnce];
    Beside beside[kAtOnce];
    auto token = [&](u32 j) { return first + (u64)(i + j) * step; };
#pragma unroll
    for (u32 j = 0; j < kAtOnce; j++)
      slots[j] = i + j < count ? slot_of(a.slots, token(j), a.topk, a.rows) : -1;
#pragma unroll
    for (u32 j = 0; j < kAtOnce; j++) beside[j].load(a, token(j), slots[j]);
#pragma unroll
    for (u32 j = 0; j < kAtOnce; j++) {
      spread_row(a, slots[j], rows);
      beside[j].store(a, slots[j]);
    }
  }
}

// Rows of an output that nobody sends. One block.
__device__ inline void zero_rows(const SpreadArgs& a, u64 begin, u64 end) {
  end = min(end, a.rows);
  if (begin >= end) return;
  u64 bytes = (end - begin) * a.row_bytes;
  for (u64 at = (u64)threadIdx.x * 16; at < bytes; at += (u64)blockDim.x * 16)
    *reinterpret_cast<uint4*>(a.x + begin * a.row_bytes + at) = make_uint4(0, 0, 0, 0);
  for (u64 i = begin * a.scale_words + threadIdx.x; i < end * a.scale_words; i += blockDim.x)
    a.scales[i] = 0;
  for (u64 i = begin + threadIdx.x; i < end && a.weights; i += blockDim.x) a.weights[i] = 0.0f;
}

__device__ inline void spread(const SpreadArgs& a, u8* shared) {
  if (a.cell && a.cell->code != kGo) return;
  u64 tokens = a.totals ? a.totals[0] : a.tokens;
  u32 warp = threadIdx.x / 32, step = gridDim.x * a.movers;
  u64 first = blockIdx.x * a.movers + warp;
  if (warp < a.movers && first < tokens) {
    Copier rows(shared, a.stage_bytes, a.stages);
    spread_tokens(a, rows, first, (u32)((tokens - first + step - 1) / step), step);
    rows.finish();
  }
  for (u32 e = blockIdx.x; e < a.local_experts && a.zero_padding; e += gridDim.x)
    zero_rows(a, a.starts[e] + a.counts[e], a.starts[e + 1]);
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
