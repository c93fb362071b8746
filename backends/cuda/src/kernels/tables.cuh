// What a block of a dispatch knows of all ranks.
#pragma once
#include "region.cuh"
#include "route.cuh"

namespace ty {

// What a block knows of all ranks, in shared memory.
struct DispatchTables {
  u64* x;            // [R]: addresses in the ranks' regions
  u64* scales;       // expert-major and packed: where scales and weights land
  u64* weights;
  u64* ids;          // expert-major and packed: slots
  u64* source;       // packed: where sources land
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

__device__ inline u32 words_of(const DispatchArgs& a) {
  return kHead + a.c.ranks * a.c.groups();
}

// Rows that `rank` gets of the ranks before `sources`, all groups of them.
__device__ inline u64 rows_at(const DispatchArgs& a, const u32* heard, u32 rank, u32 sources) {
  u64 rows = 0;
  for (u32 s = 0; s < sources; s++)
    for (u32 g = 0; g < a.c.groups(); g++)
      rows += heard[s * words_of(a) + kHead + rank * a.c.groups() + g];
  return rows;
}

__device__ inline Region region_of(const DispatchArgs& a, const DispatchTables& t, u32 rank) {
  RegionShape shape = a.region_shape();
  if (a.layout == kPacked) return Region(shape, a.most_tokens(), t.expert_rows[rank]);
  if (a.worst) return Region(shape, a.most_tokens(), a.worst_experts);
  u64 tokens = rows_at(a, t.heard, rank, a.c.ranks);
  return Region(shape, tokens, a.is_flat() ? 0 : t.expert_rows[rank]);
}

// Rows from one expert's start to the next.
__device__ inline u32 room_of(const DispatchArgs& a, u32 rows) {
  if (a.layout == kPacked) return (u32)a.most_tokens();
  return (rows + a.alignment - 1) / a.alignment * a.alignment;
}

}  // namespace ty
