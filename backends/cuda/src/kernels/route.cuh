// Counting: which token goes where, in order of tokens, the same on every run.
#pragma once
#include "args.cuh"

namespace ty {

__device__ inline void note_problem(const DispatchArgs& a, u32 token, u32 k, u32 kind) {
  atomicMin(&a.c.state->problem, (u64)token << 16 | kind << 8 | k);
}

// Lane k takes selection k of a token: checks it, keeps it, and counts it for its expert.
__device__ inline void take_token(const DispatchArgs& a, u32 token, i64 found, u32* counts) {
  u32 lane = threadIdx.x % 32;
  i32 expert = -1;
  if (found >= (i64)a.c.experts)
    note_problem(a, token, lane, 1);
  else if (found >= 0)
    expert = (i32)found;
  // Lanes without an expert are alone with a value of their own.
  u32 same = __match_any_sync(~0u, expert >= 0 ? expert : -1 - (i32)lane);
  if (expert >= 0 && (same & ((1u << lane) - 1)) != 0) {
    note_problem(a, token, lane, 2);
    expert = -1;
  }
  if (lane < a.c.topk) {
    u64 at = (u64)token * a.c.topk + lane;
    a.r.topk[at] = expert;
    a.r.rows[at] = -1;
    a.r.places[at] = expert >= 0 ? (i32)counts[expert]++ : -1;
  }
  __syncwarp();
}

// The last k with which a token selects a rank, or -1.
__device__ inline i32 last_k(const Common& c, const Routing& r, u32 token, u32 rank) {
  i32 last = -1;
  for (u32 k = 0; k < c.topk; k++) {
    i32 expert = r.topk[(u64)token * c.topk + k];
    if (expert >= 0 && c.rank_of(expert) == rank) last = k;
  }
  return last;
}

// A warp takes a chunk of tokens: places within the chunk, and how many rows each rank and expert
// gets of it. `counts` is room for one number per expert.
__device__ inline void count_chunk(const DispatchArgs& a, u32 chunk, u32* counts) {
  u32 lane = threadIdx.x % 32, topk = a.c.topk, first = chunk * kChunk;
  u32 end = min(a.c.tokens, first + kChunk);
  for (u32 e = lane; e < a.c.experts; e += 32) counts[e] = 0;
  __syncwarp();
  auto load = [&](u32 t) { return lane < topk && t < end ? a.topk_idx[(u64)t * topk + lane] : -1; };
  i64 next = load(first);
  for (u32 t = first; t < end; t++) {
    i64 found = next;
    next = load(t + 1);
    take_token(a, t, found, counts);
  }
  for (u32 e = lane; e < a.c.experts; e += 32)
    a.r.chunk_experts[(u64)chunk * a.c.experts + e] = counts[e];
  for (u32 rank = 0; rank < a.c.ranks; rank++) {
    u32 count = 0;
    for (u32 token = first + lane; token < first + kChunk + lane; token += 32) {
      i32 last = token < end ? last_k(a.c, a.r, token, rank) : -1;
      u32 goes = __ballot_sync(~0u, last >= 0);
      if (last >= 0) a.r.rows[(u64)token * topk + last] = count + __popc(goes & ((1u << lane) - 1));
      count += __popc(goes);
    }
    if (lane == 0) a.r.chunk_base[(u64)chunk * a.c.ranks + rank] = count;
  }
}

__device__ inline u32 chunks_of(const Common& c) { return (c.tokens + kChunk - 1) / kChunk; }

// All blocks: counts every chunk. `shared` is room for one number per warp and expert.
__device__ inline void count(const DispatchArgs& a, u8* shared) {
  u32 warps = blockDim.x / 32, warp = threadIdx.x / 32;
  u32* counts = reinterpret_cast<u32*>(shared) + warp * a.c.experts;
  for (u32 chunk = blockIdx.x * warps + warp; chunk < chunks_of(a.c); chunk += gridDim.x * warps)
    count_chunk(a, chunk, counts);
}

// Counts of chunks become first rows: `table[chunk][columns]`; returns the sum of a column.
__device__ inline u32 scan_column(u32* table, u32 chunks, u32 columns, u32 column) {
  u32 sum = 0;
  for (u32 chunk = 0; chunk < chunks; chunk++) {
    u32* at = &table[(u64)chunk * columns + column];
    u32 rows = __ldcg(at);
    *at = sum;
    sum += rows;
  }
  return sum;
}

// One block, after all have counted.
__device__ inline void scan(const DispatchArgs& a) {
  u32 chunks = chunks_of(a.c);
  for (u32 i = threadIdx.x; i < a.c.ranks + a.c.experts; i += blockDim.x) {
    if (i < a.c.ranks)
      a.r.counts[i] = scan_column(a.r.chunk_base, chunks, a.c.ranks, i);
    else
      a.r.expert_counts[i - a.c.ranks] =
          scan_column(a.r.chunk_experts, chunks, a.c.experts, i - a.c.ranks);
  }
  __syncthreads();
}

// The row of a token at the rank of its selection k, or -1 if another k stands for that rank.
__device__ inline i64 row_at(const Common& c, const Routing& r, const u32* row_base, u32 token,
                             u32 k, u32* rank) {
  i32 place = r.rows[(u64)token * c.topk + k];
  if (place < 0) return -1;
  *rank = c.rank_of(r.topk[(u64)token * c.topk + k]);
  return (i64)row_base[*rank] + r.chunk_base[(u64)(token / kChunk) * c.ranks + *rank] + place;
}

// The expert-major row of a token's selection k, which selects `expert`.
__device__ inline u32 expert_row(const Common& c, const Routing& r, const u32* expert_base,
                                 u32 token, u32 k, u32 expert) {
  return expert_base[expert] + r.chunk_experts[(u64)(token / kChunk) * c.experts + expert] +
         (u32)r.places[(u64)token * c.topk + k];
}

}  // namespace ty
