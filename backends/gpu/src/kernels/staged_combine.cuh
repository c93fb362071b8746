// Low-latency combine: owners sum their rows of each token and stage one partial row for its source, which
// sums the partial rows. See staging.cuh.
//
// Sums in f32, in the order of `combine`: experts of one rank in k order, rounded; then the biases and
// ranks in the order of their highest selecting k, rounded. No rank reads rows of another, so no rank waits
// until all have read.
#pragma once
#include "combine.cuh"
#include "staging.cuh"

namespace ty {

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
};

template <u32 N>
__device__ TY_INLINED void load_pieces(const u8* from, uint4 (&row)[N], u32 pieces) {
#pragma unroll
  for (u32 j = 0; j < N; j++)
    if (piece_at(j) < pieces) row[j] = load_16(reinterpret_cast<const uint4*>(from) + piece_at(j));
}

// Rows of one token that are loaded together: two, where registers allow it. Four were no faster: they spill.
template <u32 N>
constexpr u32 kTermsAtOnce = N < kMostPieces ? 2 : 1;

// Stages the sum of a received token's rows for its source. The whole block.
template <class Type, u32 N, class Up>
__device__ TY_INLINED void send_partial(const StagedCombineArgs& args, const Up& up, u32 number) {
  const Common& c = args.combine.c;
  const MergeArgs& m = args.merge;
  u32 lane = lane_id(), pieces = (u32)(m.row_bytes / 16), from = args.sources[number];
  u32 source = from / c.max_tokens, token = from - source * c.max_tokens;
  i32 slot = slot_of(m.slots, number, m.topk, m.rows);
  if (source >= c.ranks) return;
  bool weighted = m.dispatch_weights != nullptr;
  float weight = weighted && slot >= 0 ? m.dispatch_weights[slot] : 0.0f;
  RowSum<Type, N> total;
#pragma unroll 1
  for (Lanes left = ballot(slot >= 0); left != 0;) {
    constexpr u32 kAtOnce = kTermsAtOnce<N>;
    uint4 term[kAtOnce][N];
    float by[kAtOnce];
    bool there[kAtOnce];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++) {
      there[i] = left != 0;
      u32 k = there[i] ? first_of(left) : 0;
      u64 row = (u64)shfl(slot, k);
      by[i] = shfl(weight, k);
      if (there[i]) load_pieces(m.x + row * m.row_bytes, term[i], pieces);
      left &= left - 1;
    }
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++)
      if (there[i]) total.add(term[i], pieces, weighted, by[i]);
  }
  uint4 row[N];
#pragma unroll
  for (u32 j = 0; j < N; j++) row[j] = total.sum[j].result();
  u32 key = key_of(row, pieces);
  u64 place = place_of(c, c.rank, token);
  store_staged(staged_row(c, args.staging, up, source, place), row, pieces, key);
  if (wave_id() != block_waves() - 1) return;
  uint4* record = staged_record(c, args.staging, up, source, place);
  if (lane == 0) store_entry(record, c.epoch(), key, 0);
  if (!m.weights || lane >= m.topk) return;
  store_entry(record + 1 + lane, c.epoch(), slot >= 0 ? bits_of(m.weights[slot]) : 0, 0);
}

// The rows that this rank has received for each source, in order of sources.
struct SumRange {
  u32 rows;   // of all
  u32 start;  // the first of the next rank: sums of this rank's own tokens come last

  __device__ explicit SumRange(const CombineArgs& a)
      : rows(a.r.source_rows[a.c.ranks]), start(a.r.source_rows[a.c.rank + 1]) {}
};

// The whole block.
template <class Type, u32 N, class Up>
__device__ TY_INLINED void send_partials(const StagedCombineArgs& args, const Up& up, const SumRange& range,
                                         const Part& part, const Heads& heads) {
  const Common& c = args.combine.c;
  const u32* first = args.combine.r.source_rows;
  if (heads.posts())
    heads.post(c, up, {c.verdict, (u32)(args.merge.row_bytes / 16)}, nullptr,
               [&](u32 peer) { return first[peer + 1] - first[peer]; });
#pragma unroll 1
  for (u32 i = part.sending.first; i < range.rows; i += part.sending.step) {
    u32 number = range.start + i < range.rows ? range.start + i : range.start + i - range.rows;
    send_partial<Type, N>(args, up, number);
  }
}

// A selection of a token, where this lane has one.
__device__ inline i32 selected(const CombineArgs& a, u32 token) {
  bool has = token < a.c.tokens() && lane_id() < a.c.topk;
  return has ? a.r.topk[(u64)token * a.c.topk + lane_id()] : -1;
}

// Sums one token of this rank. The whole block, each warp by itself.
template <class Type, u32 N, class Up>
__device__ TY_INLINED void receive_token(const StagedCombineArgs& args, const Up& up, u32 token, i32 expert,
                                         Guard& guard) {
  const CombineArgs& a = args.combine;
  const Common& c = a.c;
  u32 lane = lane_id(), pieces = (u32)(a.row_bytes / 16);
  u64 at = (u64)token * a.row_bytes;
  u32 owner = expert >= 0 ? c.rank_of(expert) : 0;
  Lanes owners = ballot(stands_for(expert >= 0, owner));
  RowSum<Type, N> total;
  const u8* biases[] = {a.bias0, a.bias1};
#pragma unroll
  for (const u8* bias : biases) {
    uint4 term[N];
    if (!bias) continue;
    load_pieces(bias + at, term, pieces);
    total.add(term, pieces, false, 0.0f);
  }
#pragma unroll 1
  for (Lanes left = owners; left != 0;) {
    constexpr u32 kAtOnce = kTermsAtOnce<N>;
    uint4* row[kAtOnce];
    uint4 seen[kAtOnce][N], look[kAtOnce];
    u32 rank[kAtOnce];
    bool there[kAtOnce];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++) {
      there[i] = left != 0;
      rank[i] = shfl(owner, there[i] ? first_of(left) : 0);
      u64 place = place_of(c, rank[i], token);
      row[i] = staged_row(c, args.staging, up, c.rank, place);
      if (there[i]) look[i] = load_16_relaxed(staged_record(c, args.staging, up, c.rank, place));
      if (there[i]) look_at_row(row[i], seen[i], pieces);
      left &= left - 1;
    }
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++) {
      if (!there[i]) continue;
      What what{kPhaseCombineRows, rank[i], token, c.epoch()};
      const uint4* record = staged_record(c, args.staging, up, c.rank, place_of(c, rank[i], token));
      u32 key = poll_record(record, look[i], what, guard).x;
#pragma unroll
      for (u32 j = 0; j < N; j++)
        if (piece_at(j) < pieces) seen[i][j] = take_piece(row[i] + piece_at(j), seen[i][j], key, what, guard);
      total.add(seen[i], pieces, false, 0.0f);
    }
  }
  uint4* out = reinterpret_cast<uint4*>(a.out + at);
#pragma unroll
  for (u32 j = 0; j < N; j++)
    if (piece_at(j) < pieces && !guard.ended()) store_16(out + piece_at(j), total.sum[j].result());
  if (!a.out_weights || wave_id() != 0 || lane >= c.topk) return;
  float weight = 0.0f;
  if (expert >= 0) {
    const uint4* record = staged_record(c, args.staging, up, c.rank, place_of(c, owner, token));
    What what{kPhaseCombineRows, owner, token, c.epoch()};
    weight = float_of(poll_record(record + 1 + lane, make_uint4(0, 0, 0, 0), what, guard).x);
  }
  if (!guard.ended()) a.out_weights[(u64)token * c.topk + lane] = weight;
}

// The whole block.
template <class Type, u32 N, class Up>
__device__ TY_INLINED void receive_partials(const StagedCombineArgs& args, const Up& up, u8* shared,
                                            const Part& part, Guard& guard) {
  const Common& c = args.combine.c;
  u32* heard = reinterpret_cast<u32*>(shared);
  u32 step = part.receiving.step, token = part.receiving.first;
  i32 expert = selected(args.combine, token);
  u64 seen = look_at_heads(c, up);
  Decision d{};
  if (!poll_heads(c, up, seen, heard, d, guard)) return mend_staging(c, args.staging, up, guard);
  if (d.code != kGo) return end_refused(c, args.staging, up, heard, d, part, guard);
  if (part.tells() && threadIdx.x == 0) {
    u64 now = now_ns();
    tell(c, up, d, &heard[d.rank * kHead], guard);
    c.trace->heard = now;
  }
#pragma unroll 1
  for (; token < c.tokens(); token += step) {
    i32 next = selected(args.combine, token + step);
    receive_token<Type, N>(args, up, token, expert, guard);
    expert = next;
  }
  mend_staging(c, args.staging, up, guard);
}

template <class Type, u32 N, class Up>
__device__ TY_INLINED void exchange_partials(const StagedCombineArgs& args, const Up& up, u8* shared) {
  const CombineArgs& a = args.combine;
  Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  Part part(args.staging);
  Trace& trace = *a.c.trace;
  if (part.posts() && threadIdx.x == 0) trace.begun = trace.counted = now_ns();
  Heads heads(a.c, part);
  warm(args);
  SumRange range(a);
  if (!begin_staged(a.c, args.staging, a.r.note, false, 0, [] {})) return;
  heads.open(a.c);
  if (part.sends) send_partials<Type, N>(args, up, range, part, heads);
  if (part.posts() && threadIdx.x == 0) trace.moved = now_ns();
  if (part.receives) receive_partials<Type, N>(args, up, shared, part, guard);
  if (part.tells() && threadIdx.x == 0) trace.arrived = now_ns();
}

template <class Type, class Up>
__device__ TY_INLINED void combine_staged(const StagedCombineArgs& args, const Up& up, u8* shared) {
  u32 each = (u32)(args.combine.row_bytes / 16 + blockDim.x - 1) / blockDim.x;
  if (each <= 1)
    exchange_partials<Type, 1>(args, up, shared);
  else if (each == 2)
    exchange_partials<Type, 2>(args, up, shared);
  else
    exchange_partials<Type, kMostPieces>(args, up, shared);
}

}  // namespace ty
