// Counting: which token goes where, in order of tokens, the same on every run.
#pragma once
#include "args.cuh"

namespace ty {

__device__ inline void note_problem(const DispatchArgs& a, u32 token, u32 k, u32 kind) {
  atomicMin(&a.c.state->problem, (u64)token << 16 | kind << 8 | k);
}

// Checks one token's experts and keeps them.
__device__ inline void take_token(const DispatchArgs& a, u32 token) {
  u64 row = (u64)token * a.c.topk;
  for (u32 k = 0; k < a.c.topk; k++) {
    i64 found = a.topk_idx[row + k];
    i32 expert = found < 0 ? -1 : (i32)found;
    if (found >= (i64)a.c.experts) {
      note_problem(a, token, k, 1);
      expert = -1;
    }
    for (u32 j = 0; j < k && expert >= 0; j++)
      if (a.r.topk[row + j] == expert) {
        note_problem(a, token, k, 2);
        expert = -1;
      }
    a.r.topk[row + k] = expert;
    a.r.rows[row + k] = -1;
    if (expert >= 0) atomicAdd(&a.r.expert_counts[expert], 1u);
  }
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

// A warp takes a chunk of tokens: places within the chunk, and how many rows each rank gets of it.
__device__ inline void count_chunk(const DispatchArgs& a, u32 chunk) {
  u32 lane = threadIdx.x % 32, first = chunk * kChunk + lane;
  for (u32 t = first; t < min(a.c.tokens, (chunk + 1) * kChunk); t += 32) take_token(a, t);
  __syncwarp();
  for (u32 rank = 0; rank < a.c.ranks; rank++) {
    u32 count = 0;
    for (u32 half = 0; half < kChunk; half += 32) {
      u32 token = first + half;
      i32 last = token < a.c.tokens ? last_k(a.c, a.r, token, rank) : -1;
      u32 goes = __ballot_sync(~0u, last >= 0);
      if (last >= 0)
        a.r.rows[(u64)token * a.c.topk + last] = count + __popc(goes & ((1u << lane) - 1));
      count += __popc(goes);
    }
    if (lane == 0) a.r.chunk_base[(u64)chunk * a.c.ranks + rank] = count;
  }
}

__device__ inline u32 chunks_of(const Common& c) { return (c.tokens + kChunk - 1) / kChunk; }

// All blocks: counts every chunk.
__device__ inline void count(const DispatchArgs& a) {
  u32 warps = blockDim.x / 32;
  for (u32 chunk = blockIdx.x * warps + threadIdx.x / 32; chunk < chunks_of(a.c);
       chunk += gridDim.x * warps)
    count_chunk(a, chunk);
}

// One block, after all have counted: counts of chunks become first rows.
__device__ inline void scan(const DispatchArgs& a) {
  for (u32 rank = threadIdx.x; rank < a.c.ranks; rank += blockDim.x) {
    u32 sum = 0;
    for (u32 chunk = 0; chunk < chunks_of(a.c); chunk++) {
      u32* at = &a.r.chunk_base[(u64)chunk * a.c.ranks + rank];
      u32 rows = __ldcg(at);
      *at = sum;
      sum += rows;
    }
    a.r.counts[rank] = sum;
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

}  // namespace ty
