// Dispatch: counts, enters, and stores every row straight to its place at its
// owner.
//
// Every rank hears every rank's counts, so each derives all places by itself; a record also says
// that the region it names is free. So one exchange is counting, grant and entry barrier at once.
#pragma once
#include "cast.cuh"
#include "entry.cuh"
#include "put_rows.cuh"
#include "sides.cuh"

namespace ty {

// The experts that a record for `peer` counts: all where every rank must know every start.
struct Counted {
  u32 first, count;

  __device__ Counted(const DispatchArgs& a, u32 peer) {
    u32 local = a.c.local_experts();
    first = a.is_flat() ? peer * local : 0;
    count = a.is_flat() ? local : a.c.experts;
  }
};

// `bad`: the routing is refused.
template <class Up>
__device__ void enter_dispatch(const DispatchArgs& a, const Up& up, bool bad, Guard& guard) {
  u32 verdict = bad ? kRefuseRoute : a.c.verdict;
  u32 place = verdict == kEnter ? (u32)(a.region / 128) : a.c.objector;
  u32 head[kHead] = {verdict | gridDim.x << 8, (u32)a.c.signature, a.c.origin(),
                     place,                     (u32)(a.capacity / 128), 0,
                     (u32)(a.c.signature >> 32), a.c.text_bytes};
  u32 words = words_of(a) + Counted(a, 0).count * a.c.groups();
  enter(a.c, up, words, verdict, a.topk_idx, guard, [&](u32 peer, u32 w) -> u32 {
    if (w < kHead) return head[w];
    if (a.c.verdict != kEnter) return 0;
    w -= kHead;
    u32 ranks = a.c.ranks * a.c.groups(), first = Counted(a, peer).first * a.c.groups();
    if constexpr (kGrouped) return a.r.group_counts[w < ranks ? w : w + first];
    if (w < ranks) return a.r.counts[w];
    return a.r.expert_counts[first + w - ranks];
  });
}

// Fills the row bases of one rank.
__device__ inline void place_rows(const DispatchArgs& a, const DispatchTables& t, u32 d) {
  if constexpr (!kGrouped) {
    t.row_base[d] = (u32)rows_at(a, t.heard, d, a.c.rank);
    return;
  }
  u32 groups = a.c.groups(), first = 0, own = 0;
  for (u32 g = 0; g < groups; g++)
    for (u32 s = 0; s < a.c.ranks; s++) {
      u32 rows = t.heard[s * words_of(a) + kHead + d * groups + g];
      if (s == a.c.rank) {
        t.row_base[g * a.c.ranks + d] = first - own;
        own += rows;
      }
      first += rows;
    }
}

// Expert-major and packed: hears all counts of experts and places them. The whole block.
template <class Up>
__device__ bool place_experts(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                              Guard& guard) {
  bool ok = true;
  u32 groups = a.c.groups();
  for (u32 e = threadIdx.x; e < a.c.experts && ok; e += blockDim.x) {
    u32 all = 0, own = 0;
    for (u32 g = 0; g < groups && ok; g++)
      ok = hear_word_of_all(a.c, up, words_of(a) + e * groups + g, guard, [&](u32 source, u32 rows) {
        if (source == a.c.rank) {
          t.expert_base[g * a.c.experts + e] = all - own;
          if constexpr (kGrouped) own += rows;
        }
        all += rows;
      });
    t.expert_all[e] = all;
  }
  if (!__syncthreads_and(ok)) return false;
  u32 local = a.c.local_experts();
  for (u32 d = threadIdx.x; d < a.c.ranks; d += blockDim.x) {
    u32 start = 0;
    for (u32 e = d * local; e < (d + 1) * local; e++) {
      for (u32 g = 0; g < groups; g++) t.expert_base[g * a.c.experts + e] += start;
      start += room_of(a, t.expert_all[e]);
    }
    t.expert_rows[d] = start;
  }
  __syncthreads();
  return true;
}

// Fills the tables, which know where arenas are; the decision of the first rank whose region is too
// small, if there is one.
__device__ inline Decision place(const DispatchArgs& a, const DispatchTables& t) {
  __shared__ u32 full;
  if (threadIdx.x == 0) full = a.c.ranks;
  __syncthreads();
  for (u32 d = threadIdx.x; d < a.c.ranks; d += blockDim.x) {
    const u32* head = &t.heard[d * words_of(a)];
    Region region = region_of(a, t, d);
    if (region.bytes > (u64)head[4] * 128) atomicMin(&full, d);
    place_rows(a, t, d);
    if (a.staged) {
      aim_at_staging(a, t, d);
      continue;
    }
    Landing to{d, t.x[d] + (u64)head[3] * 128, region};
    t.x[d] = to.at(a, 0);
    t.scales[d] = to.at(a, 1);
    t.weights[d] = to.at(a, 2);
    t.ids[d] = to.at(a, 3);
    t.source[d] = to.at(a, 4);
  }
  __syncthreads();
  if (full < a.c.ranks) return {kFull, full};
  return {kGo, a.c.rank};
}

__device__ inline Landing landing_at(const DispatchArgs& a, const DispatchTables& t, u32 rank) {
  return {rank, (u64)t.heard[rank * words_of(a) + 3] * 128, region_of(a, t, rank)};
}

// The last block to come puts what all have staged. Where a wait is ended, so are those behind it.
template <class Up>
__device__ void put_staged(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                           Guard& guard) {
  __threadfence_system();
  if (!last_to_come(a.c)) return;
  __threadfence_system();
  for (u32 i = threadIdx.x; i < a.c.ranks * kStagedArrays; i += blockDim.x) {
    u32 d = (a.c.rank + i / kStagedArrays) % a.c.ranks;
    put_array(a, up, t, landing_at(a, t, d), i % kStagedArrays, guard);
  }
  if (a.is_flat()) return;
  u32 warps = blockDim.x / 32, tokens = a.c.tokens();
  for (u32 token = threadIdx.x / 32; token < tokens; token += warps) {
    Selection s(a, t, token);
    if (s.first >= 0) put_selection(a, up, t, landing_at(a, t, s.rank), s, guard);
    __syncwarp();
  }
}

// Rows of this rank's local experts, and where they start. One warp.
template <class Up>
__device__ bool note_experts(const DispatchArgs& a, const Up& up, const DispatchTables& t, u8* base,
                             const Region& region, Guard& guard) {
  u32 lane = threadIdx.x % 32, local = a.c.local_experts(), first = a.c.rank * local;
  u32* counts = reinterpret_cast<u32*>(base + region.expert_counts);
  u32* starts = reinterpret_cast<u32*>(base + region.expert_starts);
  u64* ranges = reinterpret_cast<u64*>(base + region.ranges);
  if (a.layout == kExpertMajor && lane == 0) {
    u32 start = 0;
    for (u32 e = 0; e < local; e++) {
      starts[e] = start;
      start += room_of(a, t.expert_all[first + e]);
    }
    starts[local] = start;
  }
  bool ok = true;
  if (a.staged)
    for (u32 s = lane; s < a.c.ranks; s += 32)
      a.c.expect(a.c.rows_totals(), s, puts_of_rows(a, counts_for(a, t, s, a.c.rank)));
  u32 groups = a.c.groups();
  for (u32 e = lane; e < local && ok; e += 32) {
    u32 sum = 0, word = words_of(a) + (a.is_flat() ? e : first + e) * groups;
    for (u32 g = 0; g < groups && ok; g++)
      ok = hear_word_of_all(a.c, up, word + g, guard, [&](u32 source, u32 rows) {
        u32 place = (e * groups + g) * a.c.ranks + source;
        if (a.layout == kPacked) ranges[place] = rows | (u64)sum << 32;
        sum += rows;
      });
    counts[e] = sum;
  }
  return ok;
}

// Rows of all local experts, without padding.
__device__ inline u64 copies_at(const DispatchArgs& a, const DispatchTables& t) {
  u32 local = a.c.local_experts();
  u64 rows = 0;
  for (u32 e = 0; e < local; e++) rows += t.expert_all[a.c.rank * local + e];
  return rows;
}

// What this rank's own region says about counts, and what combine needs. One warp.
template <class Up>
__device__ bool note_counts(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                            Guard& guard) {
  u32 lane = threadIdx.x % 32, me = a.c.rank, n = words_of(a);
  u64 tokens = rows_at(a, t.heard, me, a.c.ranks);
  Region region = region_of(a, t, me);
  u8* base = reach(a.c, up, kArena, me, (u64)t.heard[me * n + 3] * 128);
  for (u32 s = lane; s < a.c.ranks; s += 32) {
    for (u32 g = 0; g < a.c.groups(); g++) {
      u32 at = g * a.c.ranks + s;
      reinterpret_cast<u32*>(base + region.rank_counts)[at] = counts_for(a, t, s, me)[g];
      a.r.row_base[at] = t.row_base[at];
    }
    // What comes in tiles has been heard when this kernel ends.
    if (!a.staged) a.c.expect(a.c.rows_totals(), s, a.tile_rows > 0 ? 0 : t.heard[s * n] >> 8);
  }
  bool ok = note_experts(a, up, t, base, region, guard);
  if (lane == 0) {
    u64* totals = reinterpret_cast<u64*>(base + region.totals);
    totals[0] = tokens;
    totals[1] = a.layout == kExpertMajor ? t.expert_rows[me] : tokens;
    if (a.layout == kPacked) totals[1] = copies_at(a, t);
    a.r.note->rows = tokens;
  }
  return __all_sync(~0u, ok);
}

// What the host learns: sizes of this rank, or of the rank that has no room. One thread.
template <class Up>
__device__ void tell_sizes(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                           const Decision& d, Guard& guard) {
  const u32* head = &t.heard[d.rank * words_of(a)];
  if (d.code == kGo || d.code == kFull) {
    a.c.outcome->tokens = rows_at(a, t.heard, d.rank, a.c.ranks);
    a.c.outcome->rows = a.is_flat() ? 0 : t.expert_rows[d.rank];
    a.c.outcome->needed = region_of(a, t, d.rank).bytes;
    a.c.outcome->capacity = (u64)head[4] * 128;
  }
  tell(a.c, up, d, head, guard);
}

// T. A replay has that of its handle.
__device__ inline u32 tokens_of(const DispatchArgs& a) {
  if (a.replay) return (u32)(__ldcg(&a.r.note->made) >> 32);
  return a.tokens ? min(__ldcg(a.tokens), a.c.brought) : a.c.brought;
}

// Counts what this block has to, and casts its rows.
__device__ inline void prepare(const DispatchArgs& a, u32 tokens, u8* shared) {
  if (a.c.verdict != kEnter) return;
  if (!a.replay) count(a, tokens, shared);
  if (a.cast != 0) cast_rows(a, tokens);
  u32 found = a.tokens && blockIdx.x + threadIdx.x == 0 ? *a.tokens : 0;
  if (found > a.c.brought) note_problem(a, found, 0, kTooMany);
}

// What those behind find, until it is known how the operation goes on. One thread.
__device__ inline void begin(const DispatchArgs& a, bool counted) {
  a.c.state->dealt = a.c.state->taken = a.c.state->gathered = 0;
  pass_turn(a.c);
  a.c.cell->slot = a.c.slot();
  a.c.cell->code = 0;
  if (counted) *a.r.note = {a.c.epoch() | (u64)a.c.tokens() << 32, 0};
}

// The last block to have prepared enters for all; not where the host has given up while the kernel
// waited behind another, which the first block has found.
template <class Up>
__device__ void enter_last(const DispatchArgs& a, const Up& up, Guard& guard) {
  if (!last_to_come(a.c) || a.c.epoch() == 0) return;
  u64 now = now_ns();
  bool counted = !a.replay && a.c.verdict == kEnter, bad = counted && a.c.state->problem != ~0ull;
  bool given_up = load_relaxed(&a.c.state->stopped) != 0;
  if (threadIdx.x == 0) begin(a, counted);
  if (counted) scan(a);
  if (!given_up) enter_dispatch(a, up, bad, guard);
  __syncthreads();
  if (threadIdx.x == 0) {
    a.c.state->problem = ~0ull;
    a.c.trace->counted = now;
  }
}

template <class Up>
__device__ void dispatch(const DispatchArgs& a, const Up& up, u8* shared) {
  __shared__ Decision decision;
  bool scribe = blockIdx.x == 0 && threadIdx.x / 32 == kWarps - 1;
  u64 begun = now_ns();
  Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  DispatchTables t(shared, a.c);
  Found found(a.c, a.replay ? a.r.note : nullptr);
  // One block asks for all: a look at host memory takes a microsecond, and looks follow each other.
  u64 given_up = blockIdx.x + threadIdx.x == 0 ? load_relaxed(a.c.abort) : 0;
  // Looked up now, as it takes longer than anything else before rows move.
  for (u32 d = threadIdx.x; d < a.c.ranks; d += blockDim.x)
    t.x[d] = reinterpret_cast<u64>(reach(a.c, up, kArena, d, 0));
  u32 tokens = tokens_of(a);
  prepare(a, tokens, shared + a.table_bytes);
  found.publish(!a.replay, tokens);
  if (given_up != 0) stop_all(a.c);
  enter_last(a, up, guard);
  if (a.c.epoch() == 0) {
    if (blockIdx.x == 0) enter_nothing(a.c);
    return;
  }
  if (!hear(a.c, up, words_of(a), t.heard, guard)) return stop_all(a.c);
  if (threadIdx.x < 32) {
    Decision found = decide(a.c, t.heard, words_of(a));
    if (threadIdx.x == 0) decision = found;
  }
  __syncthreads();
  Decision d = decision;
  if (d.code == kGo && !a.is_flat() && !place_experts(a, up, t, guard)) return stop_all(a.c);
  if (d.code == kGo) d = place(a, t);
  if (scribe) {
    u64 heard = now_ns();
    bool noted = d.code != kGo || note_counts(a, up, t, guard);
    if (threadIdx.x % 32 == 0) {
      if (noted)
        tell_sizes(a, up, t, d, guard);
      else
        a.c.state->stopped = 1;
      a.c.trace->heard = heard;
    }
    __syncwarp();
  }
  if (d.code != kGo) return;
  move_sides(a, up, t, shared + a.side_at);
  Mover<Up> mover(a, up, {named_from(a, t), t.expert_base, t.x}, shared);
  if (a.tile_rows == 0) {
    mover.move(~0u);
    if constexpr (Up::kLoadStore)
      raise_all(a.c, up, a.c.rows_signal(), guard);
    else
      put_staged(a, up, t, guard);
  }
  // Tiles number the rows of a source one after the other, which those of several groups are not.
  if constexpr (!kGrouped)
    if (a.tile_rows > 0) spread_tiles(a, up, t, mover, shared + a.table_bytes, guard);
  if (blockIdx.x != 0) return;
  if (threadIdx.x == 0) {
    a.c.trace->begun = begun;
    a.c.trace->moved = now_ns();
  }
  if constexpr (Up::kLoadStore)
    if (a.at_once) end_at_once(a.c, up, a.c.rows_signal() - a.c.rank, kPhaseRows, guard);
}

}  // namespace ty
