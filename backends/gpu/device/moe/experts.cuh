// Expert-major and packed on the owner's side: rows arrive at their first expert's place and are spread
// over the others. Before a combine, expert outputs are merged into one partial row per received token.
#pragma once
#include "pull.cuh"

namespace ty {

// A slot that a peer wrote, if it names a row.
__device__ inline i32 slot_of(const i32* slots, u64 token, u32 topk, u64 rows) {
  u32 lane = lane_id();
  i32 slot = lane < topk ? slots[token * topk + lane] : -1;
  return slot >= 0 && (u64)slot < rows ? slot : -1;
}

// Copies rows of one warp: each is loaded once and stored to several places. By loads and stores.
class VectorCopier {
 public:
  // Copies to the place that each lane names, if it names one. Bytes are a multiple of 16.
  __device__ void copy(u8* to, const u8* from, u32 bytes) {
    constexpr u32 kAtOnce = 7;  // half a row of FP8 that is 7168 wide
    u64 mine = reinterpret_cast<u64>(to);
    constexpr u32 kApart = kWave * 16;
    Lanes wanted = ballot(mine != 0);
#pragma unroll 1
    for (u32 first = lane_id() * 16; first < bytes + lane_id() * 16;
         first += kAtOnce * kApart) {
      uint4 value[kAtOnce];
#pragma unroll
      for (u32 i = 0; i < kAtOnce; i++)
        if (first + i * kApart < bytes) value[i] = load_16(reinterpret_cast<const uint4*>(from + first + i * kApart));
#pragma unroll 1
      for (Lanes left = wanted; left != 0; left &= left - 1) {
        u64 there = shfl(mine, first_of(left)) + first;
#pragma unroll
        for (u32 i = 0; i < kAtOnce; i++)
          if (first + i * kApart < bytes) store_16(reinterpret_cast<uint4*>(there + i * kApart), value[i]);
      }
    }
  }
  __device__ void finish() {}
};

// Copies rows of one warp by bulk copies, several of which are in flight.
#if TY_ROWS_TMA
class BulkCopier {
 public:
  // Every warp has `stages` of `pitch` bytes, from `shared` on; two are used.
  __device__ BulkCopier(u8* shared, u32 pitch, u32 stages) : pitch_(pitch), stages_(stages) {
    __shared__ u64 barriers[2 * kWarps];
    u32 warp = wave_id();
    rows_ = shared_address(shared) + warp * stages * pitch;
    barriers_ = shared_address(&barriers[2 * warp]);
    if (lane_id() == 0) {
      init_barrier(barriers_, 1);
      init_barrier(barriers_ + 8, 1);
      publish_barriers();
    }
    // Peers stored these rows by other means, too.
    publish_places();
    sync_wave();
  }

  // Copies at most `pitch` bytes to the place that each lane names, if it names one. They are loaded
  // now, and stored when the next copy is in flight.
  __device__ void copy(u8* to, const u8* from, u32 bytes) {
    if (stages_ == 1) flush();
    stores_read();
    sync_wave();
    u32 stage = stages_ == 1 ? 0 : last_ ^ 1;
    if (lane_id() == 0) bulk_load(rows_ + stage * pitch_, from, bytes, barriers_ + 8 * stage);
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
#endif

// The metadata of a received token's row, as far as one lane has it: the weight of its selection, the
// source, and two words of scales.
struct Beside {
  float weight = 0.0f;
  u32 source = 0, low = 0, high = 0;

  // Lane k's copy of the token is at `slot`, if it has one.
  __device__ void load(const SpreadArgs& a, u64 token, i32 slot) {
    u32 lane = lane_id();
    const u32* scales = a.landed_scales + token * a.scale_words;
    if (slot >= 0 && a.weights) weight = a.landed_weights[token * a.topk + lane];
    if (slot >= 0 && a.source) source = a.landed_source[token];
    if (!any(slot >= 0)) return;
    if (lane < a.scale_words) low = scales[lane];
    if (lane + kWave < a.scale_words) high = scales[lane + kWave];
  }
  // Stores to all copies.
  __device__ TY_INLINED void store(const SpreadArgs& a, u64 token, i32 slot, Lanes taken) const {
    u32 lane = lane_id();
    if (slot >= 0 && a.weights) a.weights[slot] = weight;
    if (slot >= 0 && a.source) a.source[slot] = source;
    for (Lanes left = a.scale_words > 0 ? taken : 0; left != 0; left &= left - 1) {
      u32* to = a.scales + (u64)shfl(slot, first_of(left)) * a.scale_words;
      if (lane < a.scale_words) to[lane] = low;
      if (lane + kWave < a.scale_words) to[lane + kWave] = high;
      for (u32 i = lane + 2 * kWave; i < a.scale_words; i += kWave)
        to[i] = a.landed_scales[token * a.scale_words + i];
    }
  }
};

// One received token, whose selection k has its row at `slot` of lane k. One warp.
template <class Copier>
__device__ TY_INLINED void spread_token(const SpreadArgs& a, u64 token, i32 slot, const Beside& beside,
                             Copier& rows) {
  Lanes taken = ballot(slot >= 0);
  if (taken == 0) return;
  u64 first = shfl(slot, first_of(taken));
  bool other = slot >= 0 && (u64)slot != first;
  for (u64 at = 0; at < a.row_bytes && popc(taken) > 1; at += a.stage_bytes)
    rows.copy(other ? a.x + slot * a.row_bytes + at : nullptr, a.x + first * a.row_bytes + at,
              (u32)min((u64)a.stage_bytes, a.row_bytes - at));
  beside.store(a, token, slot, taken);
}

// Tokens `first`, `first + step` and so on. One warp.
template <class Copier>
__device__ TY_INLINED void spread_tokens(const SpreadArgs& a, Copier& rows, u64 first, u32 count, u32 step) {
  // Tokens whose memory accesses are in flight together, first for slots, then for row metadata.
  constexpr u32 kSlots = 8, kBeside = 2;
  for (u32 i = 0; i < count; i += kSlots) {
    i32 slots[kSlots];
    auto token = [&](u32 j) { return first + (u64)(i + j) * step; };
#pragma unroll
    for (u32 j = 0; j < kSlots; j++)
      slots[j] = i + j < count ? slot_of(a.slots, token(j), a.topk, a.rows) : -1;
#pragma unroll
    for (u32 j = 0; j < kSlots; j += kBeside) {
      Beside beside[kBeside];
#pragma unroll
      for (u32 b = 0; b < kBeside; b++) beside[b].load(a, token(j + b), slots[j + b]);
#pragma unroll
      for (u32 b = 0; b < kBeside; b++)
        spread_token(a, token(j + b), slots[j + b], beside[b], rows);
    }
  }
}

// Threads that work together.
struct Threads {
  u32 index, count;
};

// Rows of an output that no rank sends.
__device__ inline void zero_rows(const SpreadArgs& a, u64 begin, u64 end, const Threads& some) {
  end = min(end, a.rows);
  if (begin >= end) return;
  u64 bytes = (end - begin) * a.row_bytes;
  for (u64 at = (u64)some.index * 16; at < bytes; at += (u64)some.count * 16)
    *reinterpret_cast<uint4*>(a.x + begin * a.row_bytes + at) = make_uint4(0, 0, 0, 0);
  for (u64 i = begin * a.scale_words + some.index; i < end * a.scale_words; i += some.count)
    a.scales[i] = 0;
  for (u64 i = begin + some.index; i < end && a.weights; i += some.count) a.weights[i] = 0.0f;
}

__device__ inline void spread(const SpreadArgs& a, u8* shared) {
  if (a.cell && a.cell->code != kGo) return;
  u64 tokens = a.totals ? a.totals[0] : a.tokens;
  u32 warp = wave_id(), step = gridDim.x * a.movers;
  u64 first = blockIdx.x * a.movers + warp;
  if (warp < a.movers && first < tokens) {
#if TY_ROWS_TMA
    BulkCopier rows(shared, a.stage_bytes, a.stages);
#else
    VectorCopier rows;
#endif
    spread_tokens(a, rows, first, (u32)((tokens - first + step - 1) / step), step);
    rows.finish();
  }
  for (u32 e = blockIdx.x; e < a.local_experts && a.zero_padding; e += gridDim.x)
    zero_rows(a, a.starts[e] + a.counts[e], a.starts[e + 1], {threadIdx.x, blockDim.x});
}

// The rows of a received token's copies.
template <bool Weighted>
struct Copies {
  static constexpr bool kWeighted = Weighted, kDealt = false, kCounts = false;
  const MergeArgs& a;
  u8* out;

  __device__ u32 token(u32 position) const { return position; }
  __device__ void stored(u32) const {}
  __device__ u32 early(u32 token) const { return (u32)slot_of(a.slots, token, a.topk, a.rows); }
  __device__ bool there(u32 slot) const { return (i32)slot >= 0; }
  __device__ uint2 late(u32, u32) const { return make_uint2(0, 0); }
  __device__ u64 from(u32 slot, uint2) const { return (u64)a.x + (u64)slot * a.row_bytes; }
  __device__ bool come(u32, uint2) const { return true; }
  __device__ float weight(u32 slot) const { return a.dispatch_weights[slot]; }
  __device__ u64 bias(u32) const { return 0; }
};

// The weights that are returned.
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
  // A kernel behind this one merges the rows.
  if (!a.out) return;
  Summing s{{a.piece_bytes, a.pieces}, (u32)tokens, a.row_bytes, a.stages, a.stage_bytes, nullptr};
  if (a.dispatch_weights)
    sum_rows<Type>(Copies<true>{a, a.out}, s, shared);
  else
    sum_rows<Type>(Copies<false>{a, a.out}, s, shared);
}

}  // namespace ty
