// The tables of a dispatch's block about all ranks.
#pragma once
#include "region.cuh"
#include "route.cuh"

namespace ty {

// The tables of a block about all ranks, in shared memory.
struct DispatchTables {
  u64* x;            // [R]: addresses in the ranks' regions
  u64* scales;       // expert-major and packed: the places of scales and weights
  u64* weights;
  u64* ids;          // expert-major and packed: slots
  u64* source;       // packed: where sources land
  u64* needed;       // packed: the places of sources
  u32* row_base;     // [G, R]: see Routing
  u32* tokens;       // [R]: N
  u32* first_row;    // [R]: the first row of each source here
  u32* expert_rows;  // [R]: X; all places, packed
  u32* heard;        // [R, kHead + R * G]
  u32* expert_base;  // [G, E]: this rank's first row of each expert, at its owner; kGrouped: as row_base
  u32* expert_all;   // [E]: rows of each expert from all ranks

  __device__ DispatchTables(u8* shared, const Common& c) {
    u64* wide = reinterpret_cast<u64*>(shared);
    x = wide, scales = x + c.ranks, weights = scales + c.ranks, ids = weights + c.ranks;
    source = ids + c.ranks, needed = source + c.ranks;
    row_base = reinterpret_cast<u32*>(needed + c.ranks);
    tokens = row_base + c.ranks * c.groups(), first_row = tokens + c.ranks;
    expert_rows = first_row + c.ranks;
    heard = expert_rows + c.ranks;
    expert_base = heard + c.ranks * (kHead + c.ranks * c.groups());
    expert_all = expert_base + c.experts * c.groups();
  }
};

// The table by which rows are stored: staged rows are numbered as this rank counts them, where
// groups have rows of others between them.
__device__ inline const u32* named_from(const DispatchArgs& a, const DispatchTables& t) {
  return kGrouped && a.stages_rows() ? nullptr : t.row_base;
}

__device__ inline u32 words_of(const DispatchArgs& a) {
  return kHead + a.c.ranks * a.c.groups();
}

// Rows of a source for `rank`, all groups of them.
__device__ inline u32 rows_from(const DispatchArgs& a, const u32* heard, u32 rank, u32 source) {
  u32 rows = 0, groups = a.c.groups();
  CountedBy by(a.c, source, rank);
#pragma unroll 1
  for (u32 g = 0; g < groups; g++) rows += heard[by.source * words_of(a) + kHead + by.owner * groups + g];
  return rows;
}

// This rank's own region, once it is placed.
__device__ inline Region& own_region() {
  __shared__ Region region;
  return region;
}

// The region of a rank, once the number of its rows is known.
__device__ inline Region region_of(const DispatchArgs& a, const DispatchTables& t, u32 rank) {
  bool packed = a.layout == Layout::kPacked, exact = !packed && !a.worst;
  u64 rows = a.is_flat() ? 0 : !packed && a.worst ? a.worst_experts : t.expert_rows[rank];
  return Region(a.region_shape(), exact ? t.tokens[rank] : a.most_tokens(), rows);
}

// Rows from one expert's start to the next.
__device__ inline u32 room_of(const DispatchArgs& a, u32 rows) {
  if (a.layout == Layout::kPacked) return (u32)a.most_tokens();
  return (rows + a.alignment - 1) / a.alignment * a.alignment;
}

// The sum of the values of the lanes before this one; `all` is the sum of all lanes. One warp.
__device__ inline u32 sum_before(u32 value, u32* all) {
  u32 sum = value;
#pragma unroll 1
  for (u32 step = 1; step < kWave; step *= 2) {
    u32 other = shfl_up(sum, step);
    if (lane_id() >= step) sum += other;
  }
  *all = shfl(sum, kWave - 1);
  return sum - value;
}

// A sum over values of which each lane has one at a time. One warp.
struct RunningSum {
  u32 sum = 0;

  // The sum of all values before this lane's.
  __device__ TY_INLINED u32 add(u32 value) {
    u32 all, before = sum + sum_before(value, &all);
    sum += all;
    return before;
  }
};

// The starts of the rows of each expert of a rank: `each(expert, start)`, by lanes. Returns the end of
// the last expert's rows. One warp, once all rows of experts are known.
template <class Each>
__device__ u32 scan_experts(const DispatchArgs& a, const DispatchTables& t, u32 rank, Each each) {
  u32 local = a.c.local_experts();
  RunningSum rows;
#pragma unroll 1
  for (u32 first = 0; first < local; first += kWave) {
    u32 at = first + lane_id(), e = rank * local + at;
    u32 start = rows.add(at < local ? room_of(a, t.expert_all[e]) : 0);
    if (at < local) each(e, start);
  }
  return rows.sum;
}

}  // namespace ty
