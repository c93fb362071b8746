// Low latency: the sum of a token's rows. See decode_combine.cuh.
#pragma once
#include "combine.cuh"
#include "decode_coded.cuh"

namespace ty {

// Parts of a partial row.
template <class Type, class Partial>
constexpr u32 kParts = Type::kLanes / Partial::kLanes;

// Sums of a thread's pieces of a row.
template <class Type, u32 N>
struct RowSum {
  Sum<Type> sum[N];

  __device__ TY_INLINED void add(const uint4 (&term)[N], u32 pieces, bool weighted, float weight) {
#pragma unroll
    for (u32 j = 0; j < N; j++) {
      if (piece_at(j) >= pieces) continue;
      if (weighted)
        sum[j].add_weighted(term[j], weight);
      else
        sum[j].add(term[j]);
    }
  }
  // A partial row, which has no weight.
  template <class Partial, u32 M>
  __device__ TY_INLINED void add_partial(const uint4 (&term)[M]) {
    constexpr u32 kLanes = Partial::kLanes;
#pragma unroll
    for (u32 j = 0; j < N; j++) {
#pragma unroll
      for (u32 part = 0; part < M / N; part++) {
        float f[kLanes];
        Partial::widen(term[j + part * N], f);
        float* value = sum[j].value + part * kLanes;
#pragma unroll
        for (u32 i = 0; i < kLanes; i++) value[i] = add_rn(value[i], f[i]);
      }
      sum[j].empty = false;
    }
  }
  template <class Partial, u32 M>
  __device__ TY_INLINED void round(uint4 (&row)[M]) const {
#pragma unroll
    for (u32 j = 0; j < M; j++) {
      const Sum<Type>& from = sum[j % N];
      row[j] = from.empty ? make_uint4(0, 0, 0, 0) : Partial::narrow(from.value + j / N * Partial::kLanes);
    }
  }
};

template <u32 N>
__device__ TY_INLINED void load_pieces(const u8* from, uint4 (&row)[N], u32 pieces) {
#pragma unroll
  for (u32 j = 0; j < N; j++)
    if (piece_at(j) < pieces) row[j] = load_16(reinterpret_cast<const uint4*>(from) + piece_at(j));
}

// Rows of one token that are loaded together, as registers allow.
template <u32 N>
constexpr u32 kTermsAtOnce = N < kMostPieces ? 2 : 1;

// The sum of a token's rows here, rounded: this lane names the row of selection k and its weight, or none. Weights
// are used once the rows are on their way. The whole block, each warp by itself.
template <class Type, class Partial, u32 N, u32 M>
__device__ TY_INLINED void sum_rows(const DecodeCombineArgs& args, i32 slot, float weight, uint4 (&row)[M]) {
  constexpr u32 kAtOnce = kTermsAtOnce<N>;
  const MergeArgs& m = args.merge;
  u32 pieces = (u32)(m.row_bytes / 16);
  bool weighted = args.weighted();
  RowSum<Type, N> total;
#pragma unroll 1
  for (Lanes left = ballot(slot >= 0); left != 0;) {
    uint4 term[kAtOnce][N];
    Lanes these = left;
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++) {
      if (left != 0) load_pieces(m.x + (u64)shfl(slot, first_of(left)) * m.row_bytes, term[i], pieces);
      left &= left - 1;
    }
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++) {
      if (these != 0) total.add(term[i], pieces, weighted, shfl(weight, first_of(these)));
      these &= these - 1;
    }
  }
  total.template round<Partial>(row);
}

// The weight that came with a row in its dispatch.
__device__ inline float dispatched_weight(const DecodeCombineArgs& args, i32 slot) {
  return args.merge.dispatch_weights && slot >= 0 ? args.merge.dispatch_weights[slot] : 0.0f;
}

// This lane's selection of a token of this rank in a call that has weights and ids of its own.
struct GivenTerm {
  float weight = 0.0f;
  bool counts = false;

  __device__ GivenTerm(const DecodeCombineArgs& args, u32 token) {
    const Common& c = args.combine.c;
    u64 at = (u64)token * c.topk + lane_id();
    if (token >= c.tokens() || lane_id() >= c.topk) return;
    weight = args.topk_weights[at];
    counts = !args.topk_idx || args.topk_idx[at] >= 0;
  }
};

}  // namespace ty
