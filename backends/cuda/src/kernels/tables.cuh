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
  u32* row_base;     // [G, R]: see Routing
  u32* expert_rows;  // [R]: X; all places, packed
  u32* heard;        // [R, kHead + R * G]
  u32* expert_base;  // [G, E]: this rank's first row of each expert, at its owner; kGrouped: as row_base
  u32* expert_all;   // [E]: rows of each expert from all ranks

  __device__ DispatchTables(u8* shared, const Common& c) {
    u64* wide = reinterpret_cast<u64*>(shared);
    x = wide, scales = x + c.ranks, weights = scales + c.ranks, ids = weights + c.ranks;
    source = ids + c.ranks;
    row_base = reinterpret_cast<u32*>(source + c.ranks);
    expert_rows = row_base + c.ranks * c.groups();
    heard = expert_rows + c.ranks;
    expert_base = heard + c.ranks * (kHead + c.ranks * c.groups());
    expert_all = expert_base + c.experts * c.groups();
  }
};

// The table by which rows are stored: those that are staged are numbered as this rank counts them,
// where groups have rows of others between them.
__device__ inline const u32* named_from(const DispatchArgs& a, const DispatchTables& t) {
  return kGrouped && a.staged ? nullptr : t.row_base;
}

}  // namespace ty
