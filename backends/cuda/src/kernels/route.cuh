// Counting: which token goes where, in order of tokens, the same on every run.
#pragma once
#include "args.cuh"

namespace ty {

__device__ inline void note_problem(const DispatchArgs& a, u32 token, u32 k, u32 kind) {
  atomicMin(&a.c.state->problem, (u64)token << 16 | k << 8 | kind);
}

// Before a dispatch of grouped tokens counts. One block.
__device__ inline void group(const GroupArgs& a) {
  for (u32 i = threadIdx.x; i < a.words; i += blockDim.x) a.zeros[i] = 0;
  if (threadIdx.x != 0) return;
  u32 start = 0;
  for (u32 g = 0; g < a.groups; g++) {
    a.starts[g] = start;
    start += a.counts[g];
  }
  a.starts[a.groups] = start;
}

// What a warp counts in shared memory: `columns` are the ranks, then the experts.
struct Tally {
  u32* bits;     // [columns]: which of 32 tokens go there
  u32* rows;     // [columns]: how many did before
  u32 columns;

  __device__ Tally(u8* shared, const Common& c) : columns(c.ranks + c.experts) {
    bits = reinterpret_cast<u32*>(shared) + threadIdx.x / 32 * 2 * columns;
    rows = bits + columns;
  }
  // Those of another warp of the block.
  __device__ const u32* rows_of(u32 warp) const {
    return rows + (i64)2 * columns * ((i32)warp - (i32)(threadIdx.x / 32));
  }
  // Adds the 32 tokens from `first` on to what came before.
  __device__ void close(const Common& c, const Routing& r, u32 first) {
    __syncwarp();
    for (u32 i = threadIdx.x % 32; i < columns; i += 32) {
      rows[i] += __popc(bits[i]);
      if constexpr (kGrouped) note_groups(c, r, first, i);
      bits[i] = 0;
    }
    __syncwarp();
  }

 private:
  // Of a column's tokens among the 32: those of each group.
  __device__ void note_groups(const Common& c, const Routing& r, u32 first, u32 column) const {
    for (u32 left = bits[column], g = 0; left != 0; g++) {
      u32 end = r.group_starts[g + 1], inside = end <= first ? 0 : end - first;
      u32 of_group = inside >= 32 ? left : left & ((1u << inside) - 1);
      if (of_group != 0) atomicAdd(&r.group_counts[column * c.groups() + g], __popc(of_group));
      left &= ~of_group;
    }
  }
};

// One token per lane: the experts that it selects in `kBatch` ks from `first` on.
constexpr u32 kBatch = 8;
struct Batch {
  i32 expert[kBatch];

  // Checks them and marks them. A second selection of an expert finds the token's own mark.
  __device__ void take(const DispatchArgs& a, const Tally& t, u32 token, u32 first) {
    i64 found[kBatch];
#pragma unroll
    for (u32 i = 0; i < kBatch; i++) {
      u32 k = first + i;
      found[i] = k < a.c.topk ? a.topk_idx[(u64)token * a.c.topk + k] : -1;
    }
    u32 mine = 1u << threadIdx.x % 32;
#pragma unroll
    for (u32 i = 0; i < kBatch; i++) {
      expert[i] = -1;
      if (found[i] >= (i64)a.c.experts)
        note_problem(a, token, first + i, kNoExpert);
      else if (found[i] >= 0)
        expert[i] = (i32)found[i];
      if (expert[i] >= 0 && (atomicOr(&t.bits[a.c.ranks + expert[i]], mine) & mine) != 0) {
        note_problem(a, token, first + i, kTwice);
        expert[i] = -1;
      }
    }
#pragma unroll
    for (u32 i = 0; i < kBatch; i++)
      if (first + i < a.c.topk) a.r.topk[(u64)token * a.c.topk + first + i] = expert[i];
  }
  // Takes what `take` kept.
  __device__ void again(const DispatchArgs& a, u32 token, u32 first) {
#pragma unroll
    for (u32 i = 0; i < kBatch; i++)
      expert[i] = first + i < a.c.topk ? a.r.topk[(u64)token * a.c.topk + first + i] : -1;
  }
};

// 32 tokens, one per lane, those from `end` on left out.
__device__ inline void count_tokens(const DispatchArgs& a, Tally& t, u32 token, u32 end) {
  u32 lane = threadIdx.x % 32, mine = 1u << lane, before = mine - 1, topk = a.c.topk;
  u32 batches = (topk + kBatch - 1) / kBatch, lasts = 0;
  Batch batch;
  if (token < end)
    for (u32 b = 0; b < batches; b++) batch.take(a, t, token, b * kBatch);
  // From the last k on, so that the first to mark a rank is its last.
  if (token < end)
    for (u32 b = batches; b-- > 0;) {
      if (batches > 1) batch.again(a, token, b * kBatch);
#pragma unroll
      for (u32 i = kBatch; i-- > 0;) {
        if (batch.expert[i] < 0) continue;
        u32 old = atomicOr(&t.bits[a.c.rank_of(batch.expert[i])], mine);
        if ((old & mine) == 0) lasts |= 1u << (b * kBatch + i);
      }
    }
  __syncwarp();
  if (token < end)
    for (u32 b = 0; b < batches; b++) {
      if (batches > 1) batch.again(a, token, b * kBatch);
#pragma unroll
      for (u32 i = 0; i < kBatch; i++) {
        u32 k = b * kBatch + i;
        if (k >= topk) continue;
        u64 at = (u64)token * topk + k;
        i32 expert = batch.expert[i];
        u32 row = kNoRow;
        if (lasts >> k & 1) {
          u32 rank = a.c.rank_of(expert);
          row = rank << kPlaceBits | (t.rows[rank] + __popc(t.bits[rank] & before));
        }
        a.r.rows[at] = row;
        if (a.layout == kFlat) continue;
        u32 column = a.c.ranks + expert;
        a.r.places[at] =
            expert >= 0 ? t.rows[column] + __popc(t.bits[column] & before) : kNoRow;
      }
    }
  t.close(a.c, a.r, token - lane);
}

// Makes of a block's counts of warps the first rows of its spans, and sums them up for the block.
__device__ inline void close_block(const DispatchArgs& a, const Tally& t) {
  const Routing& r = a.r;
  u32 ranks = a.c.ranks, experts = a.c.experts;
  __syncthreads();
  for (u32 i = threadIdx.x; i < t.columns; i += blockDim.x) {
    bool is_rank = i < ranks;
    u32 width = is_rank ? ranks : experts, column = is_rank ? i : i - ranks, sum = 0;
    u32* spans = (is_rank ? r.span_ranks : r.span_experts) + column;
    for (u32 warp = 0; warp < kWarps; warp++) {
      if (is_rank || a.layout != kFlat) spans[(u64)(blockIdx.x * kWarps + warp) * width] = sum;
      sum += t.rows_of(warp)[i];
    }
    (is_rank ? r.block_ranks : r.block_experts)[(u64)blockIdx.x * width + column] = sum;
  }
}

// All blocks: each warp counts a span.
__device__ inline void count(const DispatchArgs& a, u32 tokens, u8* shared) {
  Tally t(shared, a.c);
  for (u32 i = threadIdx.x % 32; i < t.columns; i += 32) t.bits[i] = t.rows[i] = 0;
  __syncwarp();
  u32 first = (blockIdx.x * kWarps + threadIdx.x / 32) * a.r.span;
  u32 end = min(tokens, first + a.r.span);
  for (u32 token = first; token < end; token += 32)
    count_tokens(a, t, token + threadIdx.x % 32, end);
  close_block(a, t);
}

// Counts of blocks become first rows; returns the sum of a column.
__device__ inline u32 scan_column(u32* table, u32 blocks, u32 columns, u32 column) {
  constexpr u32 kAtOnce = 16;
  u32 sum = 0;
  for (u32 first = 0; first < blocks; first += kAtOnce) {
    u32 rows[kAtOnce];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++)
      rows[i] = first + i < blocks ? __ldcg(&table[(u64)(first + i) * columns + column]) : 0;
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++) {
      if (first + i < blocks) table[(u64)(first + i) * columns + column] = sum;
      sum += rows[i];
    }
  }
  return sum;
}

// One block, after all have counted.
__device__ inline void scan(const DispatchArgs& a) {
  for (u32 i = threadIdx.x; i < a.c.ranks + a.c.experts; i += blockDim.x) {
    if (i < a.c.ranks)
      a.r.counts[i] = scan_column(a.r.block_ranks, gridDim.x, a.c.ranks, i);
    else
      a.r.expert_counts[i - a.c.ranks] =
          scan_column(a.r.block_experts, gridDim.x, a.c.experts, i - a.c.ranks);
  }
  __syncthreads();
}

// Where the row that `packed` of Routing::rows stands for lies among this rank's rows for `rank`.
__device__ inline u32 row_of(const Common& c, const Routing& r, u32 token, u32 packed, u32 rank) {
  u32 span = token / r.span;
  return (packed & ((1u << kPlaceBits) - 1)) + r.span_ranks[span * c.ranks + rank] +
         r.block_ranks[span / kWarps * c.ranks + rank];
}

// What is to be added to a token's place among this rank's rows for a rank. kGrouped: nothing where
// there is no table.
__device__ inline u32 base_of(const Common& c, const Routing& r, const u32* row_base, u32 token,
                              u32 rank) {
  if constexpr (!kGrouped) return row_base[rank];
  return row_base ? row_base[group_of(c, r, token) * c.ranks + rank] : 0;
}

// The row of a token at the rank of its selection k, or -1 if another k stands for that rank.
__device__ inline i64 row_at(const Common& c, const Routing& r, const u32* row_base, u32 token,
                             u32 packed, u32* rank) {
  if (packed == kNoRow) return -1;
  *rank = packed >> kPlaceBits;
  return base_of(c, r, row_base, token, *rank) + row_of(c, r, token, packed, *rank);
}

// What Routing::rows has for a token and lane k. All lanes of a warp.
__device__ inline u32 packed_row(const Common& c, const Routing& r, u32 token) {
  u32 lane = threadIdx.x % 32;
  return lane < c.topk ? r.rows[(u64)token * c.topk + lane] : kNoRow;
}

// The expert-major row of a token's selection k, which selects `expert`.
__device__ inline u32 expert_row(const Common& c, const Routing& r, const u32* expert_base,
                                 u32 token, u32 k, u32 expert) {
  u32 span = token / r.span;
  if constexpr (kGrouped) expert_base += group_of(c, r, token) * c.experts;
  return expert_base[expert] + r.span_experts[(u64)span * c.experts + expert] +
         r.block_experts[(u64)(span / kWarps) * c.experts + expert] +
         r.places[(u64)token * c.topk + k];
}

}  // namespace ty
