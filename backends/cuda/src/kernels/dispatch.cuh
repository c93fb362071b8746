// Dispatch: counts, enters, and stores every row straight to its place at its
// owner.
//
// Every rank hears every rank's counts, so each derives all places by itself; a record also says
// that the region it names is free. So one exchange is counting, grant and entry barrier at once.
#pragma once
#include "cast.cuh"
#include "entry.cuh"
#include "rows.cuh"

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

__device__ inline u32 words_of(const DispatchArgs& a) { return kHead + a.c.ranks; }

// The experts that a record for `peer` counts: all where every rank must know every start.
struct Counted {
  u32 first, count;

  __device__ Counted(const DispatchArgs& a, u32 peer) {
    u32 local = a.c.local_experts();
    first = a.is_flat() ? peer * local : 0;
    count = a.is_flat() ? local : a.c.experts;
  }
};

template <class Up>
__device__ void enter_dispatch(const DispatchArgs& a, const Up& up) {
  u32 verdict = a.c.verdict;
  // What a count finds stays until the next count: a replay has no routing to refuse.
  if (!a.replay && verdict == kEnter && a.c.state->problem != ~0ull) verdict = kRefuseRoute;
  u32 head[kHead] = {verdict | gridDim.x << 8,  (u32)a.c.signature, a.c.origin,
                     (u32)(a.region / 128),     (u32)(a.capacity / 128), 0,
                     (u32)(a.c.signature >> 32), a.c.text_bytes};
  u32 words = words_of(a) + Counted(a, 0).count;
  enter(a.c, up, words, verdict, a.topk_idx, [&](u32 peer, u32 w) -> u32 {
    if (w < kHead) return head[w];
    if (a.c.verdict != kEnter) return 0;
    w -= kHead;
    if (w < a.c.ranks) return a.r.counts[w];
    return a.r.expert_counts[Counted(a, peer).first + w - a.c.ranks];
  });
}

// Rows that `rank` gets of the ranks before `sources`.
__device__ inline u64 rows_at(const DispatchArgs& a, const u32* heard, u32 rank, u32 sources) {
  u64 rows = 0;
  for (u32 s = 0; s < sources; s++) rows += heard[s * words_of(a) + kHead + rank];
  return rows;
}

// Rows from one expert's start to the next.
__device__ inline u32 room_of(const DispatchArgs& a, u32 rows) {
  if (a.layout == kPacked) return (u32)a.most_tokens();
  return (rows + a.alignment - 1) / a.alignment * a.alignment;
}

// Expert-major and packed: hears all counts of experts and places them. The whole block.
template <class Up>
__device__ bool place_experts(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                              Guard& guard) {
  bool ok = true;
  for (u32 e = threadIdx.x; e < a.c.experts && ok; e += blockDim.x) {
    u32 all = 0, before = 0, value = 0;
    for (u32 s = 0; s < a.c.ranks && ok; s++) {
      if (s == a.c.rank) before = all;
      ok = hear_word(a.c, up, s, words_of(a) + e, guard, &value);
      all += value;
    }
    t.expert_base[e] = before;
    t.expert_all[e] = all;
  }
  if (!__syncthreads_and(ok)) return false;
  u32 local = a.c.local_experts();
  for (u32 d = threadIdx.x; d < a.c.ranks; d += blockDim.x) {
    u32 start = 0;
    for (u32 e = d * local; e < (d + 1) * local; e++) {
      t.expert_base[e] += start;
      start += room_of(a, t.expert_all[e]);
    }
    t.expert_rows[d] = start;
  }
  __syncthreads();
  return true;
}

__device__ inline Region region_of(const DispatchArgs& a, const DispatchTables& t, u32 rank) {
  RegionShape shape = a.region_shape();
  if (a.layout == kPacked) return Region(shape, a.most_tokens(), t.expert_rows[rank]);
  if (a.worst) return Region(shape, a.most_tokens(), a.worst_experts);
  u64 tokens = rows_at(a, t.heard, rank, a.c.ranks);
  return Region(shape, tokens, a.is_flat() ? 0 : t.expert_rows[rank]);
}

// Fills the tables; the decision of the first rank whose region is too small, if there is one.
template <class Up>
__device__ Decision place(const DispatchArgs& a, const Up& up, const DispatchTables& t) {
  __shared__ u32 full;
  if (threadIdx.x == 0) full = a.c.ranks;
  __syncthreads();
  for (u32 d = threadIdx.x; d < a.c.ranks; d += blockDim.x) {
    const u32* head = &t.heard[d * words_of(a)];
    Region region = region_of(a, t, d);
    if (region.bytes > (u64)head[4] * 128) atomicMin(&full, d);
    u64 base = reinterpret_cast<u64>(up.peer_ptr(kArena, d, (u64)head[3] * 128));
    bool major = a.layout == kExpertMajor;
    t.x[d] = base;
    t.scales[d] = base + (major ? region.landed_scales : region.scales);
    t.weights[d] = base + (major ? region.landed_weights : region.weights);
    t.ids[d] = base + (a.is_flat() ? region.ids : region.slots);
    t.source[d] = base + region.source;
    t.row_base[d] = (u32)rows_at(a, t.heard, d, a.c.rank);
  }
  __syncthreads();
  if (full < a.c.ranks) return {kFull, full};
  return {kGo, a.c.rank};
}

// Rows of this rank's local experts, and where they start.
template <class Up>
__device__ bool note_experts(const DispatchArgs& a, const Up& up, const DispatchTables& t, u8* base,
                             const Region& region, Guard& guard) {
  u32 local = a.c.local_experts(), first = a.c.rank * local;
  u32* counts = reinterpret_cast<u32*>(base + region.expert_counts);
  u32* starts = reinterpret_cast<u32*>(base + region.expert_starts);
  u64* ranges = reinterpret_cast<u64*>(base + region.ranges);
  if (a.layout == kExpertMajor && threadIdx.x == 0) {
    u32 start = 0;
    for (u32 e = 0; e < local; e++) {
      starts[e] = start;
      start += room_of(a, t.expert_all[first + e]);
    }
    starts[local] = start;
  }
  bool ok = true;
  for (u32 e = threadIdx.x; e < local && ok; e += blockDim.x) {
    u32 sum = 0, value = 0;
    for (u32 s = 0; s < a.c.ranks && ok; s++) {
      ok = hear_word(a.c, up, s, words_of(a) + (a.is_flat() ? e : first + e), guard, &value);
      if (a.layout == kPacked) ranges[e * a.c.ranks + s] = value | (u64)sum << 32;
      sum += value;
    }
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

// What this rank's own region says about counts, and what combine needs. One block.
template <class Up>
__device__ bool note_counts(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                            Guard& guard) {
  u32 me = a.c.rank, n = words_of(a);
  u64 tokens = rows_at(a, t.heard, me, a.c.ranks);
  Region region = region_of(a, t, me);
  u8* base = reinterpret_cast<u8*>(t.x[me]);
  for (u32 s = threadIdx.x; s < a.c.ranks; s += blockDim.x) {
    reinterpret_cast<u32*>(base + region.rank_counts)[s] = t.heard[s * n + kHead + me];
    a.c.rows_totals()[s] += t.heard[s * n] >> 8;
    a.r.row_base[s] = t.row_base[s];
  }
  bool ok = note_experts(a, up, t, base, region, guard);
  if (threadIdx.x == 0) {
    u64* totals = reinterpret_cast<u64*>(base + region.totals);
    totals[0] = tokens;
    totals[1] = a.layout == kExpertMajor ? t.expert_rows[me] : tokens;
    if (a.layout == kPacked) totals[1] = copies_at(a, t);
  }
  return __syncthreads_and(ok);
}

// Packed: weight, source and scales of one copy, at its own place.
__device__ inline void move_copy(const DispatchArgs& a, const DispatchTables& t, u32 rank,
                                 u32 token, u32 k, u32 slot) {
  if (a.weights)
    reinterpret_cast<float*>(t.weights[rank])[slot] = a.weights[(u64)token * a.c.topk + k];
  reinterpret_cast<u32*>(t.source[rank])[slot] = a.c.rank * a.c.max_tokens + token;
  u32* scales = reinterpret_cast<u32*>(t.scales[rank]) + (u64)slot * a.scale_words;
  for (u32 i = 0; i < a.scale_words; i++)
    scales[i] = a.scales[(i64)token * a.scale_stride[0] + (i64)i * a.scale_stride[1]];
}

// Flat and expert-major: sources and scales of the rows that a rank gets of half a chunk.
__device__ inline void move_rows_side(const DispatchArgs& a, const DispatchTables& t, u32 rank,
                                      u32 first, u32 goes, i64 row) {
  u32 lane = threadIdx.x % 32, count = __popc(goes);
  for (u32 i = lane; i < count; i += 32)
    reinterpret_cast<u32*>(t.source[rank])[row + i] =
        a.c.rank * a.c.max_tokens + first + __fns(goes, 0, i + 1);
  u32* scales = reinterpret_cast<u32*>(t.scales[rank]) + row * a.scale_words;
  for (u32 i = lane; i < count * a.scale_words; i += 32) {
    i64 from = first + __fns(goes, 0, i / a.scale_words + 1);
    scales[i] = a.scales[from * a.scale_stride[0] + (i64)(i % a.scale_words) * a.scale_stride[1]];
  }
}

// Ids or slots, weights, sources and scales of the rows that one rank gets of half a chunk: they
// follow each other there, so they are gathered and stored together. One warp.
__device__ inline void move_side(const DispatchArgs& a, const DispatchTables& t, u32 half, u32 rank) {
  u32 lane = threadIdx.x % 32, first = half * 32, token = first + lane, topk = a.c.topk;
  i32 last = token < a.c.tokens ? last_k(a.c, a.r, token, rank) : -1;
  u32 goes = __ballot_sync(~0u, last >= 0), count = __popc(goes);
  if (count == 0) return;
  u32 owner = rank;
  i64 row = last >= 0 ? row_at(a.c, a.r, t.row_base, token, last, &owner) : 0;
  row = __shfl_sync(~0u, row, __ffs(goes) - 1);
  i32* ids = reinterpret_cast<i32*>(t.ids[rank]) + row * topk;
  float* weights = reinterpret_cast<float*>(t.weights[rank]) + row * topk;
  for (u32 i = lane; i < count * topk; i += 32) {
    u32 of = first + __fns(goes, 0, i / topk + 1), k = i % topk;
    i32 expert = a.r.topk[(u64)of * topk + k], id = -1;
    bool here = expert >= 0 && a.c.rank_of(expert) == rank;
    if (here)
      id = a.is_flat() ? expert - (i32)(rank * a.c.local_experts())
                       : (i32)expert_row(a.c, a.r, t.expert_base, of, k, expert);
    ids[i] = id;
    if (a.layout == kPacked && here) move_copy(a, t, rank, of, k, id);
    if (a.layout != kPacked && a.weights)
      weights[i] = here ? a.weights[(u64)of * topk + k] : 0.0f;
  }
  if (a.layout != kPacked) move_rows_side(a, t, rank, first, goes, row);
}

__device__ inline void move_sides(const DispatchArgs& a, const DispatchTables& t) {
  u32 warps = blockDim.x / 32, halves = (a.c.tokens + 31) / 32;
  for (u32 i = blockIdx.x * warps + threadIdx.x / 32; i < halves * a.c.ranks;
       i += gridDim.x * warps)
    move_side(a, t, i / a.c.ranks, (a.c.rank + i) % a.c.ranks);
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

template <class Up>
__device__ void dispatch(const DispatchArgs& a, const Up& up, u8* shared) {
  __shared__ Decision decision;
  Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  DispatchTables t(shared, a.c);
  bool counts = !a.replay && a.c.verdict == kEnter;
  if (counts) count(a, shared + a.table_bytes);
  if (a.cast != 0 && a.c.verdict == kEnter) cast_rows(a);
  bool met = meet(a.c, guard, [&] {
    if (counts) scan(a);
    enter_dispatch(a, up);
  });
  if (!met || !hear(a.c, up, words_of(a), t.heard, guard)) return;
  if (threadIdx.x == 0) decision = decide(a.c, t.heard, words_of(a));
  __syncthreads();
  Decision d = decision;
  if (d.code == kGo && !a.is_flat() && !place_experts(a, up, t, guard)) return;
  if (d.code == kGo) d = place(a, up, t);
  if (blockIdx.x == 0) {
    if (d.code == kGo && !note_counts(a, up, t, guard)) return;
    if (threadIdx.x == 0) tell_sizes(a, up, t, d, guard);
  }
  if (d.code != kGo) return;
  move_sides(a, t);
  move_rows(a, {t.row_base, t.expert_base, t.x}, shared + a.table_bytes);
  raise_all(a.c, up, a.c.rows_signal(), guard);
}

}  // namespace ty
