// Dispatch, flat: counts, enters, and stores every row straight to its place at its owner.
//
// Every rank hears every rank's counts, so each derives all places by itself; a record also says
// that the region it names is free. So one exchange is counting, grant and entry barrier at once.
#pragma once
#include "entry.cuh"
#include "rows.cuh"

namespace ty {

// What a block knows of all ranks, in shared memory.
struct DispatchTables {
  u64* x;         // [R]: addresses in the ranks' regions
  u64* scales;
  u64* weights;
  u64* ids;
  u64* source;
  u32* heard;     // [R, kHead + R]
  u32* row_base;  // [R]

  __device__ DispatchTables(u8* shared, u32 ranks) {
    u64* wide = reinterpret_cast<u64*>(shared);
    x = wide, scales = x + ranks, weights = scales + ranks, ids = weights + ranks;
    source = ids + ranks;
    row_base = reinterpret_cast<u32*>(source + ranks);
    heard = row_base + ranks;
  }
};

// The arrays of a flat region, as RegionLayout of the host lays them out.
struct FlatRegion {
  u64 scales, weights, ids, source, rank_counts, expert_counts, totals, bytes;

  __device__ FlatRegion(const DispatchArgs& a, u64 rows) {
    u64 k_words = align_128(rows * a.c.topk * 4);
    scales = align_128(rows * a.row_bytes);
    weights = scales + align_128(rows * a.scale_words * 4);
    ids = weights + (a.weights ? k_words : 0);
    source = ids + k_words;
    rank_counts = source + align_128(rows * 4);
    expert_counts = rank_counts + align_128((u64)a.c.ranks * 4);
    totals = expert_counts + align_128((u64)a.c.local_experts() * 4);
    bytes = totals + 128;
  }
};

__device__ inline u32 words_of(const DispatchArgs& a) { return kHead + a.c.ranks; }

template <class Up>
__device__ void enter_dispatch(const DispatchArgs& a, const Up& up) {
  u32 local = a.c.local_experts();
  u32 verdict = a.c.verdict;
  if (verdict == kEnter && a.c.state->problem != ~0ull) verdict = kRefuseRoute;
  u32 head[kHead] = {verdict | gridDim.x << 8, a.c.signature, a.c.origin, (u32)(a.region / 128),
                     (u32)(a.capacity / 128), 0, 0, 0};
  enter(a.c, up, words_of(a) + local, verdict, a.topk_idx, [&](u32 peer, u32 w) -> u32 {
    if (w < kHead) return head[w];
    if (a.c.verdict != kEnter) return 0;
    w -= kHead;
    return w < a.c.ranks ? a.r.counts[w] : __ldcg(&a.r.expert_counts[peer * local + w - a.c.ranks]);
  });
}

// Rows that `rank` gets in all.
__device__ inline u64 rows_at(const DispatchArgs& a, const u32* heard, u32 rank, u32 sources) {
  u64 rows = 0;
  for (u32 s = 0; s < sources; s++) rows += heard[s * words_of(a) + kHead + rank];
  return rows;
}

// Fills the tables; the decision of the first rank whose region is too small, if there is one.
template <class Up>
__device__ Decision place(const DispatchArgs& a, const Up& up, const DispatchTables& t) {
  __shared__ u32 full;
  if (threadIdx.x == 0) full = a.c.ranks;
  __syncthreads();
  for (u32 d = threadIdx.x; d < a.c.ranks; d += blockDim.x) {
    u64 all = rows_at(a, t.heard, d, a.c.ranks);
    u64 laid_out = a.worst ? (u64)a.c.ranks * a.c.max_tokens : all;
    const u32* head = &t.heard[d * words_of(a)];
    FlatRegion region(a, laid_out);
    if (region.bytes > (u64)head[4] * 128) atomicMin(&full, d);
    u64 base = reinterpret_cast<u64>(up.peer_ptr(kArena, d, (u64)head[3] * 128));
    t.x[d] = base;
    t.scales[d] = base + region.scales;
    t.weights[d] = base + region.weights;
    t.ids[d] = base + region.ids;
    t.source[d] = base + region.source;
    t.row_base[d] = (u32)rows_at(a, t.heard, d, a.c.rank);
  }
  __syncthreads();
  if (full < a.c.ranks) return {kFull, full};
  return {kGo, a.c.rank};
}

// What this rank's own region says about counts, what its host learns, and what combine needs. One
// block.
template <class Up>
__device__ bool note_counts(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                            Guard& guard) {
  u32 me = a.c.rank, n = words_of(a), local = a.c.local_experts();
  u64 rows = rows_at(a, t.heard, me, a.c.ranks);
  FlatRegion region(a, a.worst ? (u64)a.c.ranks * a.c.max_tokens : rows);
  u8* base = reinterpret_cast<u8*>(t.x[me]);
  for (u32 s = threadIdx.x; s < a.c.ranks; s += blockDim.x) {
    reinterpret_cast<u32*>(base + region.rank_counts)[s] = t.heard[s * n + kHead + me];
    a.c.state->rows[s] += t.heard[s * n] >> 8;
    a.r.row_base[s] = t.row_base[s];
  }
  bool ok = true;
  for (u32 e = threadIdx.x; e < local && ok; e += blockDim.x) {
    u32 sum = 0, value;
    for (u32 s = 0; s < a.c.ranks && ok; s++) {
      ok = hear_word(a.c, up, s, n + e, guard, &value);
      sum += value;
    }
    reinterpret_cast<u32*>(base + region.expert_counts)[e] = sum;
  }
  if (threadIdx.x == 0) {
    reinterpret_cast<u64*>(base + region.totals)[0] = rows;
    reinterpret_cast<u64*>(base + region.totals)[1] = rows;
  }
  return __syncthreads_and(ok);
}

// Ids, weights, sources and scales of the rows that one rank gets of half a chunk: they follow each
// other there, so they are gathered and stored together. One warp.
__device__ inline void move_side(const DispatchArgs& a, const DispatchTables& t, u32 half, u32 rank) {
  u32 lane = threadIdx.x % 32, first = half * 32, token = first + lane;
  i32 last = token < a.c.tokens ? last_k(a.c, a.r, token, rank) : -1;
  u32 goes = __ballot_sync(~0u, last >= 0), count = __popc(goes), topk = a.c.topk;
  if (count == 0) return;
  u32 owner = rank, leader = __ffs(goes) - 1;
  i64 row = last >= 0 ? row_at(a.c, a.r, t.row_base, token, last, &owner) : 0;
  row = __shfl_sync(~0u, row, leader);
  i32* ids = reinterpret_cast<i32*>(t.ids[rank]) + row * topk;
  float* weights = reinterpret_cast<float*>(t.weights[rank]) + row * topk;
  for (u32 i = lane; i < count * topk; i += 32) {
    u64 from = (u64)(first + __fns(goes, 0, i / topk + 1)) * topk + i % topk;
    i32 expert = a.r.topk[from];
    bool here = expert >= 0 && a.c.rank_of(expert) == rank;
    ids[i] = here ? expert - (i32)(rank * a.c.local_experts()) : -1;
    if (a.weights) weights[i] = here ? a.weights[from] : 0.0f;
  }
  for (u32 i = lane; i < count; i += 32)
    reinterpret_cast<u32*>(t.source[rank])[row + i] =
        a.c.rank * a.c.max_tokens + first + __fns(goes, 0, i + 1);
  u32* scales = reinterpret_cast<u32*>(t.scales[rank]) + row * a.scale_words;
  for (u32 i = lane; i < count * a.scale_words; i += 32) {
    i64 from = first + __fns(goes, 0, i / a.scale_words + 1);
    scales[i] = a.scales[from * a.scale_stride[0] + (i64)(i % a.scale_words) * a.scale_stride[1]];
  }
}

__device__ inline void move_sides(const DispatchArgs& a, const DispatchTables& t) {
  u32 warps = blockDim.x / 32, halves = (a.c.tokens + 31) / 32;
  for (u32 i = blockIdx.x * warps + threadIdx.x / 32; i < halves * a.c.ranks;
       i += gridDim.x * warps)
    move_side(a, t, i / a.c.ranks, (a.c.rank + i) % a.c.ranks);
}

template <class Up>
__device__ void dispatch(const DispatchArgs& a, const Up& up, u8* shared) {
  __shared__ Decision decision;
  Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  DispatchTables t(shared, a.c.ranks);
  bool counts = !a.replay && a.c.verdict == kEnter;
  if (counts) count(a);
  bool met = meet(a.c, guard, [&] {
    if (counts) scan(a);
    enter_dispatch(a, up);
  });
  if (!met || !hear(a.c, up, words_of(a), t.heard, guard)) return;
  if (threadIdx.x == 0) decision = decide(a.c, t.heard, words_of(a));
  __syncthreads();
  Decision d = decision;
  if (d.code == kGo) d = place(a, up, t);
  if (blockIdx.x == 0) {
    if (d.code == kGo && !note_counts(a, up, t, guard)) return;
    if (threadIdx.x == 0) {
      const u32* head = &t.heard[d.rank * words_of(a)];
      u64 rows = rows_at(a, t.heard, d.rank, a.c.ranks);
      a.c.outcome->tokens = rows;
      a.c.outcome->needed = FlatRegion(a, a.worst ? (u64)a.c.ranks * a.c.max_tokens : rows).bytes;
      a.c.outcome->capacity = (u64)head[4] * 128;
      tell(a.c, up, d, head[0] & 0xff, guard);
    }
  }
  if (d.code != kGo) return;
  move_sides(a, t);
  move_rows(a, {t.row_base, t.x}, shared + a.table_bytes);
  raise_all(a.c, up, a.c.rank, guard);
}

}  // namespace ty
