// Dispatch over a device API that only puts: the rows of each rank are staged in the order of tokens, with
// their metadata, and put to their places.
//
// A block stages the rows of consecutive tokens, and puts them as soon as they are staged. In the flat layout
// the rows for one rank are consecutive at both ends, so they are one run. In the other layouts each row is
// put to the place of its first expert. Row metadata is short: the last block to get here puts it, with one
// run for an array and a rank.
#pragma once
#include "rows.cuh"
#include "tables.cuh"

namespace ty {

constexpr u32 kStagedArrays = 5;

// The staged data for one rank: arena offsets of x, scales, weights, ids (or slots) and source, and
// the bytes of a row in each.
struct Staged {
  u64 at[kStagedArrays], width[kStagedArrays], end;

  __device__ Staged(const DispatchArgs& a, u64 base, u64 rows) : end(base) {
    u64 by_k = 4 * (u64)a.c.topk;
    width[0] = a.row_bytes, width[1] = 4 * (u64)a.scale_words, width[2] = a.weights ? by_k : 0;
    width[3] = by_k, width[4] = 4;
    for (u32 i = 0; i < kStagedArrays; i++) {
      at[i] = end;
      end += align_region(rows * width[i]);
    }
  }
  // The offset and the width of an array that is known late. Comparisons find them: an index that is no
  // constant would force the whole table into memory.
  __device__ u64 at_of(u32 array) const { return pick(at, array); }
  __device__ u64 width_of(u32 array) const { return pick(width, array); }

 private:
  __device__ static u64 pick(const u64 (&of)[kStagedArrays], u32 array) {
    u64 found = 0;
#pragma unroll
    for (u32 i = 0; i < kStagedArrays; i++) found |= i == array ? of[i] : 0;
    return found;
  }
};

// Rows that `source` has for `d`, of each group.
__device__ inline const u32* counts_for(const DispatchArgs& a, const DispatchTables& t, u32 source,
                                        u32 d) {
  u32 groups = a.c.groups();
  CountedBy by(a.c, source, d);
  return &t.heard[by.source * (kHead + a.c.ranks * groups) + kHead + by.owner * groups];
}

// Rows that this rank has for `d`.
__device__ inline u32 rows_for(const DispatchArgs& a, const DispatchTables& t, u32 d) {
  u32 rows = 0;
  for (u32 g = 0; g < a.c.groups(); g++) rows += counts_for(a, t, writer_at(a.c, d), d)[g];
  return rows;
}

// The place behind the staged data for the ranks before.
__device__ inline Staged staged_for(const DispatchArgs& a, const DispatchTables& t, u32 d) {
  u64 base = a.staging;
  for (u32 s = 0; s < d; s++) base = Staged(a, base, rows_for(a, t, s)).end;
  return Staged(a, base, rows_for(a, t, d));
}

// Points the tables of rank `d` to the place where its rows are staged, such that row numbers at
// `d` name them.
__device__ inline void aim_at_staging(const DispatchArgs& a, const DispatchTables& t, u32 d) {
  Staged staged = staged_for(a, t, d);
  u64 arena = reinterpret_cast<u64>(a.c.state->windows[kArena]);
  u64 first = kGrouped ? 0 : t.row_base[d];
  u64* tables[kStagedArrays] = {t.x, t.scales, t.weights, t.ids, t.source};
  for (u32 i = 0; i < kStagedArrays; i++)
    tables[i][d] = arena + staged.at[i] - first * staged.width[i];
}

// A rank's region, where rows and their metadata land.
struct Landing {
  u32 rank;
  u64 base;  // arena offset, or address
  Region region;

  // The place of an array of `Staged`.
  __device__ TY_INLINED u64 at(const DispatchArgs& a, u32 array) const {
    bool flat = a.is_flat();
    u64 offset = a.layout == Layout::kPacked ? region.landed_source : region.source;
    if (array == 0) offset = 0;
    if (array == 1) offset = flat ? region.scales : region.landed_scales;
    if (array == 2) offset = flat ? region.weights : region.landed_weights;
    if (array == 3) offset = flat ? region.ids : region.slots;
    return base + offset;
  }
};

// Consecutive rows of the staging for a rank: those from `first` to `end`, and the queue that they leave by.
struct StagedRows {
  u32 array;
  u32 first, end;
  u32 queue;
};

// Puts them, with a run for each group. One thread.
template <class Up>
__device__ TY_INLINED bool put_rows(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                         const Landing& to, const StagedRows& rows, u32 signal, Guard& guard) {
  Staged staged = staged_for(a, t, to.rank);
  u64 width = staged.width_of(rows.array), from = staged.at_of(rows.array);
  const u32* counts = counts_for(a, t, writer_at(a.c, to.rank), to.rank);
  bool ok = true;
  for (u32 g = 0, before = 0; g < a.c.groups() && ok; before += counts[g++]) {
    u32 first = max(rows.first, before), end = min(rows.end, before + counts[g]);
    if (first >= end) continue;
    // The table holds the amount to add to the place of a group's row among all of them.
    u32 row = t.row_base[g * a.c.ranks + to.rank] + first;
    Run run{to.rank, to.at(a, rows.array) + row * width,
            from + first * width, end - first, width};
    ok = put_run(a.c, up, rows.queue, run, signal, guard);
  }
  return ok;
}

__device__ inline Landing landing_at(const DispatchArgs& a, const DispatchTables& t, u32 rank) {
  return {rank, (u64)t.heard[rank * words_of(a) + kHeadPlace] * kRegionAlign, region_of(a, t, rank)};
}

// The target of lane k's selection of a token, in the layouts by experts. All lanes of a warp.
struct Selection {
  u32 rank;   // its owner
  i64 first;  // the row there, if lane k is the token's first for that rank; else -1
  i64 from;   // the token's row among the rows for the rank, in the order of tokens

  __device__ TY_INLINED Selection(const DispatchArgs& a, const DispatchTables& t, u32 token) : from(-1) {
    u32 lane = lane_id(), packed = packed_row(a.c, a.r, token);
    i32 expert = lane < a.c.topk ? a.r.topk[(u64)token * a.c.topk + lane] : -1;
    first = first_expert_row(a, t.expert_base, token, expert, &rank);
    for (u32 k = 0; k < a.c.topk; k++) {
      u32 other = shfl(packed, k);
      if (other != kNoRow && other >> kPlaceBits == rank)
        from = base_of(a.c, a.r, named_from(a, t), token, rank) +
               row_of(a.c, a.r, token, other, rank);
    }
  }
};

// A selection's row, if it is the first. One thread each.
template <class Up>
__device__ TY_INLINED bool put_selection(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                              const Landing& to, const Selection& s, Guard& guard) {
  u64 arena = reinterpret_cast<u64>(a.c.state->windows[kArena]);
  Run run{s.rank, to.base + s.first * a.row_bytes, t.x[s.rank] + s.from * a.row_bytes - arena,
          1, a.row_bytes};
  return put_run(a.c, up, own_queue(a.c), run, a.c.rows_signal(), guard);
}

}  // namespace ty
