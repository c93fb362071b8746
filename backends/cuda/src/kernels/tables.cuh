// What a block of a dispatch knows of all ranks, and how regions are laid out.
#pragma once
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

// The arrays of a region, as RegionLayout of the host lays them out.
struct Region {
  u64 scales, weights, ids, source, slots, rank_counts, expert_counts, expert_starts, ranges;
  u64 landed_scales, landed_weights, totals, bytes;

  // For N tokens and X expert rows.
  __device__ Region(const DispatchArgs& a, u64 tokens, u64 expert_rows) {
    bool flat = a.is_flat(), major = a.layout == kExpertMajor, packed = a.layout == kPacked;
    u64 rows = flat ? tokens : expert_rows, by_k = align_128(tokens * a.c.topk * 4);
    u64 local = a.c.local_experts();
    scales = align_128(rows * a.row_bytes);
    weights = scales + align_128(rows * a.scale_words * 4);
    u64 weight_bytes = flat ? by_k : align_128(rows * 4);
    ids = weights + (a.weights ? weight_bytes : 0);
    source = ids + (flat ? by_k : 0);
    slots = source + align_128((packed ? rows : tokens) * 4);
    rank_counts = slots + (flat ? 0 : by_k);
    expert_counts = rank_counts + align_128((u64)a.c.ranks * 4);
    expert_starts = expert_counts + align_128(local * 4);
    ranges = expert_starts + (major ? align_128((local + 1) * 4) : 0);
    landed_scales = ranges + (packed ? align_128(local * a.c.ranks * 8) : 0);
    landed_weights = landed_scales + (major ? align_128(tokens * a.scale_words * 4) : 0);
    totals = landed_weights + (major && a.weights ? by_k : 0);
    bytes = totals + 128;
  }
};

}  // namespace ty
