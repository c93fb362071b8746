// Rows that come over a rail while they are forwarded, as runs: see runs.cuh. Without such a rail, all rows are there
// when the exchange inside a domain begins.
#pragma once
#include "route.cuh"

namespace ty {

// The count of staged rows of the run that holds a token's row for the rank of selection k, or null.
__device__ inline u64* staged_of_row(const DispatchArgs& a, u32 token, u32 k) {
  u32 packed = a.r.rows[(u64)token * a.c.topk + k], rank = packed >> kPlaceBits;
  if (packed == kNoRow) return nullptr;
  u32 row = row_of(a.c, a.r, token, packed, rank);
  return a.crossing.staged + (u64)rank * a.crossing.most + (row >> a.crossing.shift);
}

#if TY_GROUPED

// The group of a token's row, and the run that holds it.
struct RunOf {
  u32 group, run;

  __device__ RunOf(const DispatchArgs& a, u32 token) : group(group_of(a.c, a.r, token)) {
    run = (token - a.r.group_starts[group]) >> a.crossing.shift;
  }
};

// Whether a word holds this epoch, or a later one.
__device__ inline bool has_come(u64 word, u32 epoch) { return (i32)((u32)word - epoch) >= 0; }

// Waits until a token's row is here; false if the wait was ended. One thread.
__device__ inline bool row_comes(const DispatchArgs& a, u32 token, Guard& guard) {
  if (!a.awaits_rows()) return true;
  RunOf of(a, token);
  const u64* word = a.crossing.here + (u64)of.group * a.crossing.most + of.run;
  u32 epoch = (u32)load_relaxed(&a.c.former->epoch);
  bool ok = guard.until({kPhaseRows, a.c.rank, of.run, epoch}, [&] { return load_acquire(word); },
                        [&](u64 found) { return has_come(found, epoch); });
  publish_places();
  return ok;
}

// The same for consecutive tokens of a group, which lanes share. One warp.
__device__ inline bool rows_come(const DispatchArgs& a, u32 first, u32 end, Guard& guard) {
  if (!a.awaits_rows() || a.beside_words() == 0) return true;
  bool ok = true;
  for (u32 token = first + lane_id(); token < end && ok; token += kWave) ok = row_comes(a, token, guard);
  return all(ok);
}

// The token at a position of the order in which rows are forwarded: first this domain's own, which are here first,
// then a run of each other group in turn, because their rows arrive side by side.
__device__ inline u32 token_in_turn(const DispatchArgs& a, u32 position) {
  // Where rows are staged for puts, a block has the rows of consecutive tokens.
  if (kPuts || !a.awaits_rows()) return position;
  const u32* starts = a.r.group_starts;
  u32 groups = a.c.groups(), mine = a.crossing.mine, shift = a.crossing.shift, begin = 0;
  u32 own = starts[mine + 1] - starts[mine];
  if (position < own) return starts[mine] + position;
  position -= own;
  auto rows = [&](u32 i) {
    u32 g = (mine + 1 + i) % groups;
    return starts[g + 1] - starts[g];
  };
  while (true) {
    // Rounds in which the same groups have a whole run.
    u32 live = 0, end = ~0u;
#pragma unroll 1
    for (u32 i = 0; i + 1 < groups; i++)
      if (u32 has = rows(i); has > begin) live++, end = min(end, (has - begin) >> shift);
    u32 whole = live * end << shift;
    if (position < whole) {
      u32 nth = (position >> shift) % live;
      begin += (position >> shift) / live << shift;
      for (u32 i = 0;; i++)
        if (rows(i) > begin && nth-- == 0) return starts[(mine + 1 + i) % groups] + begin + (position & ((1u << shift) - 1));
    }
    position -= whole, begin += end << shift;
    // One round with runs that are not whole.
#pragma unroll 1
    for (u32 i = 0; i + 1 < groups; i++) {
      u32 has = rows(i), some = has > begin ? min(1u << shift, has - begin) : 0;
      if (position < some) return starts[(mine + 1 + i) % groups] + begin + position;
      position -= some;
    }
    begin += 1u << shift;
  }
}


#else

// Rows are this rank's own.
__device__ inline bool row_comes(const DispatchArgs&, u32, Guard&) { return true; }
__device__ inline bool rows_come(const DispatchArgs&, u32, u32, Guard&) { return true; }
__device__ inline u32 token_in_turn(const DispatchArgs&, u32 position) { return position; }

#endif

}  // namespace ty
