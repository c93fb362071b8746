// What a block of a dispatch knows of all ranks.
#pragma once
#include "region.cuh"
#include "route.cuh"

namespace ty {

// What a block knows of all ranks, in shared memory.
struct DispatchTables {
  u64* x;            // [R]: addresses in the ranks' regions
  u64* scales;       // expert-major: where scales and weights land
  u64* weights;
  u64* ids;          // expert-major and packed: slots
  u64* source;
  u32* row_base;     // [R]
  u32* expert_rows;  // [R]: X; all places, packed
  u32* heard;        // [R, kHead + R]
  u32* expert_base;  // [E]: this rank's first row of each expert, at its owner
  u32* expert_all;   // [E]: rows of each expert from all ranks

  __device__ DispatchTables(u8* shared, const Common& c) {
    u64* wide = reinterpret_cast<u64*>(shared);
    x = wide, scales = x + c.ranks, weights = scales + c.ranks, ids = weights + c.ranks;
    source = ids + c.ranks;
    row_base = reinterpret_cast<u32*>(source + c.ranks);
    expert_rows = row_base + c.ranks;
    heard = expert_rows + c.ranks;
    expert_base = heard + c.ranks * (kHead + c.ranks);
    expert_all = expert_base + c.experts;
  }
};

}  // namespace ty
