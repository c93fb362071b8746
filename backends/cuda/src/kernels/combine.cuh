// Combine: sources read the rows of their tokens at the owners and sum them.
//
// f32, in an order that depends on the routing alone: the biases, then ranks in the order of their
// highest selecting k; rounded once.
#pragma once
#include "entry.cuh"
#include "pull.cuh"

namespace ty {

// Whether every owner has the rows that this rank's routing names.
__device__ inline Decision check_rows(const CombineArgs& a, const u32* heard) {
  for (u32 d = 0; d < a.c.ranks; d++)
    if (a.r.row_base[d] + a.r.counts[d] > heard[d * kHead + 5]) return {kBadRows, d};
  return {kGo, a.c.rank};
}

template <class Type, class Up>
__device__ void combine(const CombineArgs& a, const Up& up, u8* shared) {
  __shared__ Decision decision;
  if (blockIdx.x == 0 && threadIdx.x == 0) stamp(&a.c.trace->begun);
  Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  u32* heard = reinterpret_cast<u32*>(shared);
  if (blockIdx.x == 0) {
    u32 head[kHead] = {a.c.verdict | gridDim.x << 8, (u32)a.c.signature, a.c.origin,
                       (u32)(a.x / 16),              (u32)(a.weights / 16), (u32)a.rows,
                       (u32)(a.c.signature >> 32),   0};
    // Who hears this record may read the rows that earlier kernels wrote here.
    __threadfence_system();
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
        a.c.done_totals()[s] += heard[s * kHead] >> 8;
    __syncthreads();
    if (threadIdx.x == 0) {
      stamp(&a.c.trace->heard);
      tell(a.c, up, d, &heard[d.rank * kHead], guard);
    }
  }
  if (d.code != kGo) return;
  if (a.out_weights) fetch_weights(a, up, heard);
  sum_rows<Type>(a, up, heard, shared);
  raise_all(a.c, up, a.c.done_signal(), guard);
  if (blockIdx.x == 0 && threadIdx.x == 0) stamp(&a.c.trace->moved);
}

}  // namespace ty
