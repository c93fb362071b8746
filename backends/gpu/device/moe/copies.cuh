// Copies of the small arrays of an output to memory of the caller: all in one kernel, with the conversions that
// callers need. Rows of numbers move by the driver's own copies. And counts of a routing, before anything is sent.
#pragma once
#include "moe_args.cuh"

namespace ty {

constexpr u32 kCopyWide = 1;  // `to` has elements of 8 bytes
constexpr u32 kCopyFill = 2;  // rows behind those that arrived become `fill`
constexpr u32 kCopyColumns = 4;  // columns of `from` become rows

// See TyCopy of the plugin ABI.
struct ArrayCopy {
  const u32* from;
  u8* to;
  u64 elements;
  u64 room;
  u32 columns;
  u32 modulus;
  i32 fill;
  u32 flags;
};

// See TyRoutingCounts of the plugin ABI. The counts start as zeros.
struct CountArgs {
  const i64* topk_idx;    // [T, K]
  u32* rank_tokens;       // [R]
  u32* expert_tokens;     // [E]
  u8* is_token_in_rank;   // [T, R]
  u64 tokens;
  u32 topk;
  u32 experts;
  u32 ranks;
  u32 reserved;
};

struct CopyArgs {
  const u64* totals;  // rows that arrived come first
  u32 count;
  u32 reserved;
  ArrayCopy copies[13];
};

#ifdef TY_ARGS_BYTES
static_assert(sizeof(CopyArgs) == kHostBytes[15] && sizeof(CountArgs) == kHostBytes[16],
              "args.rs and copies.cuh differ");
#endif

// One array. The whole grid.
__device__ inline void copy_array(const ArrayCopy& c, u64 arrived) {
  bool fills = c.flags & kCopyFill, wide = c.flags & kCopyWide;
  u64 there = fills ? min(c.elements, arrived * c.columns) : c.elements, end = fills ? c.room : c.elements;
  u64 step = (u64)gridDim.x * blockDim.x;
#pragma unroll 1
  for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < end; at += step) {
    i32 value = at < there ? (i32)c.from[at] : c.fill;
    // A source that is left out stays -1.
    if (c.modulus != 0 && value >= 0) value = (i32)((u32)value % c.modulus);
    if (wide)
      reinterpret_cast<i64*>(c.to)[at] = value;
    else
      reinterpret_cast<i32*>(c.to)[at] = value;
  }
}

// The same by columns. Neighbouring threads store to neighbouring places. Each loads one row, word by word.
__device__ inline void copy_columns(const ArrayCopy& c) {
  u64 rows = c.elements / c.columns, pitch = c.room / c.columns, step = (u64)gridDim.x * blockDim.x;
#pragma unroll 1
  for (u64 row = (u64)blockIdx.x * blockDim.x + threadIdx.x; row < rows; row += step) {
    const u32* from = c.from + row * c.columns;
    u32* to = reinterpret_cast<u32*>(c.to) + row;
#pragma unroll 4
    for (u32 column = 0; column < c.columns; column++) to[column * pitch] = from[column];
  }
}

__device__ inline void copy_out(const CopyArgs& a) {
  u64 arrived = *a.totals;
#pragma unroll 1
  for (u32 i = 0; i < a.count; i++)
    if (a.copies[i].flags & kCopyColumns)
      copy_columns(a.copies[i]);
    else
      copy_array(a.copies[i], arrived);
}

// A thread for each token.
__device__ inline void count_routing(const CountArgs& a) {
  u32 local = a.experts / a.ranks;
  u64 step = (u64)gridDim.x * blockDim.x;
#pragma unroll 1
  for (u64 token = (u64)blockIdx.x * blockDim.x + threadIdx.x; token < a.tokens; token += step) {
    u8* is_in = a.is_token_in_rank + token * a.ranks;
    for (u32 r = 0; r < a.ranks; r++) is_in[r] = 0;
#pragma unroll 1
    for (u32 k = 0; k < a.topk; k++) {
      u64 expert = (u64)a.topk_idx[token * a.topk + k];
      // Negative ones are large.
      if (expert >= a.experts) continue;
      atomic_add(&a.expert_tokens[expert], 1u);
      u32 rank = (u32)expert / local;
      if (is_in[rank] == 0) atomic_add(&a.rank_tokens[rank], 1u);
      is_in[rank] = 1;
    }
  }
}

}  // namespace ty
