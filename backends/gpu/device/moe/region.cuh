// The places of the arrays of an output region: RegionLayout of the host, array by array. This file
// includes no other, so that a test compiles it for the host and compares the two.
#pragma once

#if defined(__CUDACC__)
#define TY_DEVICE __device__
#elif defined(__AMDGCN__)
#define TY_DEVICE __attribute__((device))
#else
#define TY_DEVICE
#endif

namespace ty {

// How received rows are arranged: the codes of the layouts, on the host.
enum class Layout : unsigned {
  kFlat = 1,         // one per token and rank
  kExpertMajor = 2,  // one per token and expert, experts one after the other
  kPacked = 3,       // the same, with R*M places per expert
};

// The alignment of a region, and of its arrays: REGION_ALIGN of the host.
constexpr unsigned kRegionAlign = 128;

TY_DEVICE inline unsigned long long align_region(unsigned long long bytes) {
  return (bytes + kRegionAlign - 1) / kRegionAlign * kRegionAlign;
}

// All inputs of a region's arrays except the number of rows that arrive.
struct RegionShape {
  Layout layout;
  unsigned ranks, topk, local_experts;
  unsigned long long row_bytes;
  unsigned scale_words;
  bool weights;
};

struct Region {
  unsigned long long scales, weights, ids, source, slots, rank_counts, expert_counts, expert_starts;
  unsigned long long expert_ends, rank_ends;
  unsigned long long ranges, landed_scales, landed_weights, landed_source, totals, lost, bytes;

  Region() = default;
  // The region for N tokens and X expert rows.
  TY_DEVICE Region(const RegionShape& s, unsigned long long tokens,
                   unsigned long long expert_rows) {
    bool flat = s.layout == Layout::kFlat, major = s.layout == Layout::kExpertMajor;
    bool packed = s.layout == Layout::kPacked;
    unsigned long long rows = flat ? tokens : expert_rows, by_k = align_region(tokens * s.topk * 4);
    unsigned long long local = s.local_experts;
    scales = align_region(rows * s.row_bytes);
    weights = scales + align_region(rows * s.scale_words * 4);
    unsigned long long weight_bytes = flat ? by_k : align_region(rows * 4);
    ids = weights + (s.weights ? weight_bytes : 0);
    source = ids + (flat ? by_k : 0);
    slots = source + align_region((packed ? rows : tokens) * 4);
    rank_counts = slots + (flat ? 0 : by_k);
    expert_counts = rank_counts + align_region(s.ranks * 4ull);
    expert_starts = expert_counts + align_region(local * 4);
    expert_ends = expert_starts + (major ? align_region((local + 1) * 4) : 0);
    rank_ends = expert_ends + (major ? align_region(local * 4) : 0);
    ranges = rank_ends + align_region(s.ranks * 4ull);
    landed_scales = ranges + (packed ? align_region(local * s.ranks * 8) : 0);
    landed_weights = landed_scales + (flat ? 0 : align_region(tokens * s.scale_words * 4));
    landed_source = landed_weights + (!flat && s.weights ? by_k : 0);
    totals = landed_source + (packed ? align_region(tokens * 4) : 0);
    lost = totals + align_region(2 * 8);
    bytes = lost + align_region(s.ranks);
  }
};

}  // namespace ty
