// Reading the partial rows of this rank's tokens at their owners, and summing them.
//
// Two ways: bulk copies into a ring of rows in shared memory (TMA, sm_90 and later), and vectors.
#pragma once
#include "bulk.cuh"
#include "route.cuh"
#include "types.cuh"

namespace ty {

// The weight that came back for lane k's selection, from the owner's row of this token.
template <class Up>
__device__ void fetch_weight(const CombineArgs& a, const Up& up, const u32* heard, u32 token,
                             i64 row) {
  u32 lane = threadIdx.x % 32;
  i32 expert = lane < a.c.topk ? a.r.topk[(u64)token * a.c.topk + lane] : -1;
  u32 rank = expert >= 0 ? a.c.rank_of(expert) : ~0u;
  i64 owners = -1;
  for (u32 k = 0; k < a.c.topk; k++) {
    u32 other = __shfl_sync(~0u, rank, k);
    i64 at = __shfl_sync(~0u, row, k);
    if (other == rank && at >= 0) owners = at;
  }
  if (lane >= a.c.topk) return;
  float weight = 0.0f;
  if (expert >= 0) {
    u64 at = (u64)heard[rank * kHead + 4] * 16 + 4 * ((u64)owners * a.c.topk + lane);
    weight = *reinterpret_cast<const float*>(up.peer_ptr(kArena, rank, at));
  }
  a.out_weights[(u64)token * a.c.topk + lane] = weight;
}

template <class Up>
__device__ void fetch_weights(const CombineArgs& a, const Up& up, const u32* heard) {
  u32 warps = blockDim.x / 32;
  for (u32 token = blockIdx.x * warps + threadIdx.x / 32; token < a.c.tokens;
       token += gridDim.x * warps) {
    u32 rank;
    i64 row = row_at(a.c, a.r, a.r.row_base, token, packed_row(a.c, a.r, token), &rank);
    fetch_weight(a, up, heard, token, row);
  }
}

// The address of the partial row that lane k adds to a token's sum, or 0.
template <class Up>
__device__ u64 partial_of(const CombineArgs& a, const Up& up, const u32* heard, u32 token,
                          u32 packed) {
  u32 rank;
  i64 row = row_at(a.c, a.r, a.r.row_base, token, packed, &rank);
  if (row < 0) return 0;
  u64 base = (u64)heard[rank * kHead + 3] * 16;
  return reinterpret_cast<u64>(up.peer_ptr(kArena, rank, base + row * a.row_bytes));
}

#if TY_ROWS_TMA

// A ring of pieces of rows: one warp loads, the others sum as they arrive.
struct Ring {
  static constexpr u32 kMost = 16;
  u64 full[kMost], empty[kMost];
  u32 note[kMost];  // what a stage is: kFirst, kLast, kNothing, kEnd
  u32 unit[kMost];

  static constexpr u32 kFirst = 1, kLast = 2, kNothing = 4, kEnd = 8;
};

// Gives the next stage a piece, or a note alone. Lane 0.
__device__ inline void offer(Ring& ring, const CombineArgs& a, u8* stages, u32 at, u64 from,
                             u32 note, u32 unit) {
  u32 slot = at % a.stages, turn = at / a.stages;
  wait_barrier(shared_address(&ring.empty[slot]), (turn & 1) ^ 1);
  ring.note[slot] = note;
  ring.unit[slot] = unit;
  u32 barrier = shared_address(&ring.full[slot]), piece = unit % a.pieces;
  u64 left = a.row_bytes - (u64)piece * a.piece_bytes;
  u32 bytes = left < a.piece_bytes ? (u32)left : a.piece_bytes;
  if (from != 0)
    bulk_load(shared_address(stages + (u64)slot * a.stage_bytes),
              reinterpret_cast<const u8*>(from + (u64)piece * a.piece_bytes), bytes, barrier);
  else
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

template <class Up>
__device__ void load_rows(const CombineArgs& a, const Up& up, const u32* heard, Ring& ring,
                          u8* stages) {
  u32 lane = threadIdx.x % 32, at = 0, units = a.c.tokens * a.pieces;
  // What is read was written by other means than bulk copies.
  asm volatile("fence.proxy.async;" ::: "memory");
  // Where the rows of the next unit lie is found out while those of this one are asked for.
  auto look = [&](u32 unit) { return unit < units ? packed_row(a.c, a.r, unit / a.pieces) : kNoRow; };
  auto find = [&](u32 unit, u32 packed) {
    return unit < units ? partial_of(a, up, heard, unit / a.pieces, packed) : 0;
  };
  u32 step = gridDim.x, packed = look(blockIdx.x + step);
  u64 next = find(blockIdx.x, look(blockIdx.x));
  for (u32 unit = blockIdx.x; unit < units; unit += step) {
    u32 token = unit / a.pieces;
    u64 row = (u64)token * a.row_bytes, mine = next;
    next = find(unit + step, packed);
    packed = look(unit + 2 * step);
    u64 bias[] = {a.bias0 ? (u64)a.bias0 + row : 0, a.bias1 ? (u64)a.bias1 + row : 0};
    u32 rows = __ballot_sync(~0u, mine != 0);
    u32 count = __popc(rows) + (bias[0] != 0) + (bias[1] != 0), done = 0;
    auto add = [&](u64 from) {
      u32 note = (done == 0 ? Ring::kFirst : 0) | (done + 1 == count ? Ring::kLast : 0);
      if (lane == 0) offer(ring, a, stages, at, from, note, unit);
      at++, done++;
    };
    for (u32 i = 0; i < 2; i++)
      if (bias[i] != 0) add(bias[i]);
    for (; rows != 0; rows &= rows - 1) add(__shfl_sync(~0u, mine, __ffs(rows) - 1));
    if (count == 0) {
      if (lane == 0) offer(ring, a, stages, at, 0, Ring::kNothing, unit);
      at++;
    }
  }
  if (lane == 0) offer(ring, a, stages, at, 0, Ring::kEnd, 0);
}

// Every thread but those of the loading warp: vectors of its own of every piece.
template <class Type>
__device__ void sum_stages(const CombineArgs& a, Ring& ring, const u8* stages) {
  constexpr u32 kVectors = 5;
  u32 thread = threadIdx.x - 32, threads = blockDim.x - 32;
  float sum[kVectors][Type::kLanes];
  for (u32 at = 0;; at++) {
    u32 slot = at % a.stages;
    wait_barrier(shared_address(&ring.full[slot]), at / a.stages & 1);
    u32 note = ring.note[slot], unit = ring.unit[slot], piece = unit % a.pieces;
    if (note & Ring::kEnd) return;
    u64 offset = (u64)(unit / a.pieces) * a.row_bytes + (u64)piece * a.piece_bytes;
    u64 left = a.row_bytes - (u64)piece * a.piece_bytes;
    u32 vectors = (u32)((left < a.piece_bytes ? left : a.piece_bytes) / 16);
    const uint4* row = reinterpret_cast<const uint4*>(stages + (u64)slot * a.stage_bytes);
#pragma unroll
    for (u32 v = 0; v < kVectors; v++) {
      u32 i = v * threads + thread;
      if (i >= vectors) continue;
      float f[Type::kLanes] = {};
      if (!(note & Ring::kNothing)) Type::widen(row[i], f);
      bool first = note & (Ring::kFirst | Ring::kNothing);
      for (u32 l = 0; l < Type::kLanes; l++) sum[v][l] = first ? f[l] : __fadd_rn(sum[v][l], f[l]);
      if (note & (Ring::kLast | Ring::kNothing))
        reinterpret_cast<uint4*>(a.out + offset)[i] = Type::narrow(sum[v]);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0)
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&ring.empty[slot]))
                   : "memory");
  }
}

template <class Type, class Up>
__device__ void sum_rows(const CombineArgs& a, const Up& up, const u32* heard, u8* shared) {
  __shared__ Ring ring;
  u8* stages = shared + a.table_bytes;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < a.stages; i++) {
      init_barrier(shared_address(&ring.full[i]), 1);
      init_barrier(shared_address(&ring.empty[i]), blockDim.x / 32 - 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x < 32)
    load_rows(a, up, heard, ring, stages);
  else
    sum_stages<Type>(a, ring, stages);
  __syncthreads();
}

#else

template <class Type, class Up>
__device__ void sum_rows(const CombineArgs& a, const Up& up, const u32* heard, u8*) {
  u32 warps = blockDim.x / 32, lane = threadIdx.x % 32;
  for (u32 token = blockIdx.x * warps + threadIdx.x / 32; token < a.c.tokens;
       token += gridDim.x * warps) {
    u64 mine = partial_of(a, up, heard, token, packed_row(a.c, a.r, token));
    u64 row = (u64)token * a.row_bytes;
    u32 terms = __ballot_sync(~0u, mine != 0);
    for (u64 at = lane * 16; at < a.row_bytes + lane * 16; at += Sums<Type>::kBytes) {
      i64 room = (i64)a.row_bytes - (i64)at;
      Sums<Type> sums;
      if (a.bias0) sums.add((u64)a.bias0 + row + at, room, false, 0.0f);
      if (a.bias1) sums.add((u64)a.bias1 + row + at, room, false, 0.0f);
      for (u32 left = terms; left != 0; left &= left - 1)
        sums.add(__shfl_sync(~0u, mine, __ffs(left) - 1) + at, room, false, 0.0f);
      sums.store(a.out + row + at, room);
    }
  }
}

#endif

}  // namespace ty
