// Combine: sources read the rows of their tokens at the owners and sum them.
//
// f32, in an order that depends on the routing alone: the biases, then ranks in the order of their
// highest selecting k; rounded once.
#pragma once
#include "entry.cuh"
#include "route.cuh"
#include "types.cuh"

namespace ty {

// One token's row. One warp; lane k brings the address of the row of selection k, or 0.
template <class Type>
__device__ void sum_row(const CombineArgs& a, u32 token, u64 mine) {
  u32 lane = threadIdx.x % 32, terms = __ballot_sync(~0u, mine != 0);
  u64 row = (u64)token * a.row_bytes;
  for (u64 turn = 0; turn < a.row_bytes; turn += 512) {
    u64 at = turn + lane * 16;
    bool inside = at < a.row_bytes;
    Sum<Type> sum;
    if (inside && a.bias0) sum.add(load_16((u64)a.bias0 + row + at));
    if (inside && a.bias1) sum.add(load_16((u64)a.bias1 + row + at));
    for (u32 left = terms; left != 0; left &= left - 1) {
      u64 from = __shfl_sync(~0u, mine, __ffs(left) - 1);
      if (inside) sum.add(load_16(from + at));
    }
    if (inside) *reinterpret_cast<uint4*>(a.out + row + at) = sum.result();
  }
}

// The weight that came back for lane k's selection, from the owner's row of this token.
template <class Up>
__device__ void fetch_weight(const CombineArgs& a, const Up& up, const u32* heard, u32 token,
                             i64 row) {
  u32 lane = threadIdx.x % 32;
  i32 expert = lane < a.c.topk ? a.r.topk[(u64)token * a.c.topk + lane] : -1;
  u32 rank = expert >= 0 ? a.c.rank_of(expert) : ~0u;
  i64 owners = -1;
  for (u32 k = 0; k < a.c.topk; k++) {
    u32 other = __shfl_sync(~0u, rank, k);
    i64 at = __shfl_sync(~0u, row, k);
    if (other == rank && at >= 0) owners = at;
  }
  if (lane >= a.c.topk) return;
  float weight = 0.0f;
  if (expert >= 0) {
    u64 at = (u64)heard[rank * kHead + 4] * 16 + 4 * ((u64)owners * a.c.topk + lane);
    weight = *reinterpret_cast<const float*>(up.peer_ptr(kArena, rank, at));
  }
  a.out_weights[(u64)token * a.c.topk + lane] = weight;
}

template <class Type, class Up>
__device__ void sum_rows(const CombineArgs& a, const Up& up, const u32* heard) {
  u32 warps = blockDim.x / 32, lane = threadIdx.x % 32;
  for (u32 token = blockIdx.x * warps + threadIdx.x / 32; token < a.c.tokens;
       token += gridDim.x * warps) {
    u32 rank = 0;
    i64 row = lane < a.c.topk ? row_at(a.c, a.r, a.r.row_base, token, lane, &rank) : -1;
    u64 mine = 0;
    if (row >= 0)
      mine = reinterpret_cast<u64>(
          up.peer_ptr(kArena, rank, (u64)heard[rank * kHead + 3] * 16 + row * a.row_bytes));
    sum_row<Type>(a, token, mine);
    if (a.out_weights) fetch_weight(a, up, heard, token, row);
  }
}

// Whether every owner has the rows that this rank's routing names.
__device__ inline Decision check_rows(const CombineArgs& a, const u32* heard) {
  for (u32 d = 0; d < a.c.ranks; d++)
    if (a.r.row_base[d] + a.r.counts[d] > heard[d * kHead + 5]) return {kBadRows, d};
  return {kGo, a.c.rank};
}

template <class Type, class Up>
__device__ void combine(const CombineArgs& a, const Up& up, u8* shared) {
  __shared__ Decision decision;
  Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  u32* heard = reinterpret_cast<u32*>(shared);
  if (blockIdx.x == 0) {
    u32 head[kHead] = {a.c.verdict | gridDim.x << 8, (u32)a.c.signature, a.c.origin,
                       (u32)(a.x / 16),              (u32)(a.weights / 16), (u32)a.rows,
                       (u32)(a.c.signature >> 32),   0};
    // As many words as a dispatch, so that ranks that do one find out and do not wait.
    enter(a.c, up, kHead + a.c.ranks, a.c.verdict, nullptr,
          [&](u32, u32 w) { return w < kHead ? head[w] : 0; });
  }
  if (!hear(a.c, up, kHead, heard, guard)) return;
  if (threadIdx.x == 0) {
    decision = decide(a.c, heard, kHead);
    if (decision.code == kGo) decision = check_rows(a, heard);
  }
  __syncthreads();
  Decision d = decision;
  if (blockIdx.x == 0) {
    if (d.code == kGo)
      for (u32 s = threadIdx.x; s < a.c.ranks; s += blockDim.x)
        a.c.state->done[s] += heard[s * kHead] >> 8;
    __syncthreads();
    if (threadIdx.x == 0) tell(a.c, up, d, &heard[d.rank * kHead], guard);
  }
  if (d.code != kGo) return;
  sum_rows<Type>(a, up, heard);
  raise_all(a.c, up, a.c.ranks + a.c.rank, guard);
}

}  // namespace ty
