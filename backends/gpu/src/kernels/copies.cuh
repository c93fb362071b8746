// Copies of the small arrays of an output to memory of the caller: all in one kernel, with the conversions that
// callers need. Rows of numbers move by the driver's own copies.
#pragma once
#include "args.cuh"

namespace ty {

constexpr u32 kCopyWide = 1;  // `to` has elements of 8 bytes
constexpr u32 kCopyFill = 2;  // rows behind those that arrived become `fill`

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

struct CopyArgs {
  const u64* totals;  // rows that arrived come first
  u32 count;
  u32 reserved;
  ArrayCopy copies[12];
};

#ifdef TY_ARGS_BYTES
static_assert(sizeof(CopyArgs) == kHostBytes[15], "args.rs and copies.cuh differ");
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

__device__ inline void copy_out(const CopyArgs& a) {
  u64 arrived = *a.totals;
#pragma unroll 1
  for (u32 i = 0; i < a.count; i++) copy_array(a.copies[i], arrived);
}

}  // namespace ty
