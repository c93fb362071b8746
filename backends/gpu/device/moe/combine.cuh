// Combine: sources read the rows of their tokens, at the owners or where owners push them, and sum
// them.
//
// Sums in f32, in an order that depends on the routing alone: the biases, then ranks in the order
// of their highest selecting k; rounded once.
#pragma once
#include "arrivals.cuh"
#include "push_combine.cuh"

namespace ty {

// The end of this rank's rows at an owner.
__device__ inline u32 rows_end(const CombineArgs& a, u32 d) {
  u32 last = a.c.groups() - 1;
  return a.r.row_base[last * a.c.ranks + d] + a.r.counts[d];
}

// Whether every owner has the rows that this rank's routing names. One warp.
__device__ inline Decision check_owners(const CombineArgs& a, const u32* heard) {
  for (u32 first = 0; first < a.c.ranks; first += kWave) {
    u32 d = first + lane_id();
    Lanes bad = ballot(d < a.c.ranks && rows_end(a, d) > heard[d * kHead + kHeadRows]);
    if (bad != 0) return {kBadRows, first + first_of(bad)};
  }
  return {kGo, a.c.rank};
}

// The places of the rows and weights of this rank's tokens.
struct Returned {
  const u64* first;     // [R]: address of this rank's first row from each owner
  const u64* weights;   // [R]: where the weights of the owners' first rows are
  const u32* row_base;  // the bases of their row numbers; see `base_of`
};

// The partial rows of this rank's tokens. By value, except for the arguments; see Units.
struct Partials {
  static constexpr bool kWeighted = false, kDealt = true, kCounts = kGrouped;
  const CombineArgs& a;
  Returned back;
  Units units;
  Guard* guard;  // of waits for units and runs
  u8* out;
  u32 tokens;
  mutable LastRuns last = {};

  // Inside a domain, sums are counted for the exchange on the rail beside this one.
  __device__ bool crosses() const { return kGrouped && a.crossing.summed; }
  __device__ u32 token(u32 position) const {
    return crosses() ? sum_in_turn(a.c, a.r, a.crossing, tokens, position) : position;
  }
  __device__ void stored(u32 token) const {
    if (!crosses()) return;
    sync_wave();
    if (lane_id() == 0) add_release_device(summed_of(a.c, a.r, a.crossing, token), 1);
  }
  __device__ u32 early(u32 token) const { return packed_row(a.c, a.r, token); }
  __device__ bool there(u32 packed) const { return packed != kNoRow; }
  __device__ uint2 late(u32 token, u32 packed) const {
    u32 rank = packed >> kPlaceBits, span = token / a.r.span;
    u32 base = kGrouped ? base_of(a.c, a.r, back.row_base, token, rank) : 0;
    return make_uint2(base + a.r.span_ranks[span * a.c.ranks + rank],
                      a.r.block_ranks[span / kWarps * a.c.ranks + rank]);
  }
  // Among this rank's rows from the owner.
  __device__ u32 row(u32 packed, uint2 base) const {
    return (packed & ((1u << kPlaceBits) - 1)) + base.x + base.y;
  }
  __device__ u64 from(u32 packed, uint2 base) const {
    return back.first[packed >> kPlaceBits] + (u64)row(packed, base) * a.row_bytes;
  }
  __device__ bool come(u32 packed, uint2 base) const {
    if constexpr (kRuns) return run_comes(a, there(packed), packed >> kPlaceBits, row(packed, base), last, *guard);
    if (!kMayPush || !units.flags) return true;
    u32 owner = there(packed) ? packed >> kPlaceBits : 0;
    return units.come(there(packed), owner, row(packed, base) >> a.unit_shift, *guard);
  }
  __device__ float weight(u32) const { return 1.0f; }
  __device__ u64 bias(u32 i) const { return (u64)(i == 0 ? a.bias0 : a.bias1); }
};

// The returned weight of lane k's selection: the entry in the owner's row of this token. Or it is the sum of
// the entries of all ranks that have a row of the token, in the order in which rows are summed.
__device__ inline void fetch_weight(const CombineArgs& a, const Returned& from, u32 token) {
  u32 lane = lane_id(), owner = 0;
  i64 row = row_at(a.c, a.r, from.row_base, token, packed_row(a.c, a.r, token), &owner);
  i32 expert = lane < a.c.topk ? a.r.topk[(u64)token * a.c.topk + lane] : -1;
  u32 rank = expert >= 0 ? a.c.rank_of(expert) : ~0u;
  i64 owners = -1;
  bool sums = a.returns_weights == kWeightsOfAll;
  float weight = 0.0f;
  for (u32 k = 0; k < a.c.topk; k++) {
    u32 other = shfl(rank, k), holder = shfl(owner, k);
    i64 at = shfl(row, k);
    if (other == rank && at >= 0) owners = at;
    // The last selection of a rank has its row.
    if (sums && at >= 0 && lane < a.c.topk)
      weight += reinterpret_cast<const float*>(from.weights[holder])[(u64)at * a.c.topk + lane];
  }
  if (lane >= a.c.topk) return;
  if (!sums && expert >= 0)
    weight = reinterpret_cast<const float*>(from.weights[rank])[(u64)owners * a.c.topk + lane];
  a.out_weights[(u64)token * a.c.topk + lane] = weight;
}

// The weights of all tokens, in the order of sums.
__device__ inline void fetch_weights(const Partials& terms, u32 tokens) {
  u32 warps = block_waves(), first = kRuns ? 1 : 0;
  // Some of the first block serve.
  if (blockIdx.x < first) return;
  for (u32 at = (blockIdx.x - first) * warps + wave_id(); at < tokens; at += (gridDim.x - first) * warps) {
    u32 token = terms.token(at);
    if constexpr (kRuns) {
      u32 packed = terms.early(token);
      uint2 more = terms.there(packed) ? terms.late(token, packed) : make_uint2(0, 0);
      if (!terms.come(packed, more)) return;
    }
    fetch_weight(terms.a, terms.back, token);
    terms.stored(token);
  }
}

// Sums this rank's tokens from the rows whose places are in the tables. All blocks.
template <class Type, class Serve>
__device__ void sum_partials(const Partials& terms, u32 tokens, u8* stages, Serve serve) {
  const CombineArgs& a = terms.a;
  sync_block();
  // Weights return in runs, as rows do.
  if (a.out_weights && !kRuns) fetch_weights(terms, tokens);
  Summing summing{{a.piece_bytes, a.pieces}, tokens, a.row_bytes, a.stages, a.stage_bytes,
                  &a.c.state->summed, kRuns ? 1u : 0};
  sum_rows<Type>(terms, summing, stages, serve);
  if (a.out_weights && kRuns) fetch_weights(terms, tokens);
}
template <class Type>
__device__ void sum_partials(const Partials& terms, u32 tokens, u8* stages) {
  sum_partials<Type>(terms, tokens, stages, [] {});
}

// The state for later kernels, until it is known how the operation continues. One thread.
__device__ inline void begin(const CombineArgs& a) {
  a.c.cell->slot = a.c.slot();
  a.c.cell->code = 0;
  if constexpr (kRuns) a.c.cell->epoch = a.c.epoch();
}

// Finds the places of the rows of this rank's tokens, and the targets of the rows that it pushes. True if
// it must wait for some. The whole block.
template <class Up>
__device__ bool place_all(const CombineArgs& a, const Up& up, const CombineTables& t) {
  bool waits = false;
  u32 me = a.c.rank;
  auto at = [&](u32 d, u64 offset) { return reinterpret_cast<u64>(up.peer_ptr(kArena, d, offset)); };
  for (u32 d = threadIdx.x; d < a.c.ranks; d += blockDim.x) {
    const u32* head = &t.heard[d * kHead];
    u64 rows = kGrouped ? 0 : (u64)a.r.row_base[d] * a.row_bytes;
    t.first[d] = at(d, (u64)head[kHeadPlace] * 16 + rows);
    t.weights[d] = at(d, (u64)head[kHeadWeights] * 16);
    if constexpr (!kMayPush) continue;
    bool pushed = (head[kHeadVerdict] & kPushes) && d != me;
    t.flags[d] = pushed ? reinterpret_cast<u64>(unit_flags(a, up, me, d)) : 0;
    waits |= pushed;
    for (u32 w = 0; w < kSummingWarps && pushed; w++) t.seen[w * a.c.ranks + d] = 0;
    if (!a.own) continue;
    if (pushed && a.landing) t.first[d] = at(me, landing_of(a, a.landing, d));
    if (d == me) t.first[d] = reinterpret_cast<u64>(a.own) + rows;
    t.start[d] = a.r.source_rows[d];
    if (d + 1 == a.c.ranks) t.start[d + 1] = a.r.source_rows[d + 1];
    // Into this rank's own arena where the source has no room.
    t.to[d] = head[kHeadLanding] ? at(d, landing_of(a, (u64)head[kHeadLanding] * 16, me))
                      : at(me, a.x + first_of_source(a, t, d) * a.row_bytes);
  }
  return sync_block_or(waits);
}

// Clears the counts of sums, which are left of an operation that was refused on the rail; and stores what is counted
// for a row: for each piece, and for its weights. One block.
__device__ inline void clear_sums(const CombineArgs& a) {
  const Crossing& x = a.crossing;
  u32 words = a.c.groups() * x.most;
  if (!x.summed) return;
  for (u32 i = threadIdx.x; i < words; i += blockDim.x) store_relaxed(x.summed + i, 0);
  if (threadIdx.x == 0) store_relaxed(x.summed + words, sums_of_row(a.pieces) + (a.out_weights != nullptr));
}

// Enters a combine; false if this block has no more to do. The whole block.
template <class Up>
__device__ TY_INLINED bool begin_combine(const CombineArgs& a, const Up& up, const CombineTables& t, Guard& guard) {
  __shared__ Decision decision;
  LaunchState found(a.c, a.r.note, true);
  // As in `dispatch`.
  u64 given_up = blockIdx.x + threadIdx.x == 0 ? load_relaxed(a.c.abort) : 0;
  found.publish();
  sync_block();
  if (a.c.epoch() == 0) {
    if (blockIdx.x == 0) skip_operation(a.c);
    return false;
  }
  // A warp that has no other work until records arrive.
  if (threadIdx.x == blockDim.x - kWave) leave_turn(a.c);
  if (blockIdx.x + threadIdx.x == 0) begin(a);
  if (blockIdx.x == 0) {
    // No block counts before this rank's own record is here.
    if constexpr (kGrouped) clear_sums(a);
    u32 verdict = operation().verdict;
    u32 place = verdict == kEnter ? (u32)(a.x / 16) : a.c.objector_now();
    bool pushes = kMayPush && a.own;
    u32 head[kHead] = {verdict | gridDim.x << 8 | (pushes ? kPushes : 0),
                       (u32)a.c.signature,
                       a.c.origin(),
                       place,
                       (u32)(a.weights / 16),
                       (u32)operation().rows,
                       (u32)(a.c.signature >> 32),
                       pushes ? (u32)(a.landing / 16) : 0};
    // A rank that receives this record may read the rows that earlier kernels wrote here.
    fence_system();
    // As many words as a dispatch, so that ranks that run a dispatch see the mismatch and do not
    // wait.
    post_entry(a.c, up, kHead + a.c.ranks * a.c.groups(), verdict, nullptr, guard,
          [&](u32, u32 w) { return w < kHead ? head[w] : 0; },
          // A read of host memory takes longer than all else before records leave.
          [&] { return !sync_block_or(given_up != 0); });
  }
  if (!poll_entries(a.c, up, kHead, t.heard, guard)) {
    stop_all(a.c);
    if (blockIdx.x + threadIdx.x == 0) decide_beside(a.c, 0);
    return false;
  }
  if (threadIdx.x < kWave) {
    Decision found = decide<false>(a.c, t.heard, kHead);
    // A rank that refuses may have no routing.
    Decision rows = a.c.enters() ? check_owners(a, t.heard) : found;
    if (threadIdx.x == 0) decision = found.code == kGo ? rows : found;
  }
  sync_block();
  Decision d = decision;
  if (blockIdx.x == 0) {
    if (d.code == kGo)
      for (u32 s = threadIdx.x; s < a.c.ranks; s += blockDim.x)
        a.c.expect(a.c.done_totals(), s, (t.heard[s * kHead + kHeadVerdict] & ~kPushes) >> 8);
    sync_block();
    // The first warp is the loading one.
    if (threadIdx.x == blockDim.x - kWave) {
      u64 now = now_ns();
      tell(a.c, up, d, &t.heard[d.rank * kHead], guard);
      decide_beside(a.c, d.code);
      a.c.trace->entered = now;
    }
  }
  return d.code == kGo;
}

// Reports that this block reads no more rows. The whole block.
template <class Up>
__device__ TY_INLINED void end_combine(const CombineArgs& a, const Up& up, u64 begun, Guard& guard) {
  if (!raise_all(a.c, up, a.c.done_signal(), guard)) return stop_all(a.c);
  if (blockIdx.x != 0) return;
  if (threadIdx.x == 0) {
    a.c.trace->begun = a.c.trace->counted = begun;
    a.c.trace->moved = now_ns();
  }
  if (a.at_once) end_at_once(a.c, up, a.c.done_signal() - a.c.rank, kPhaseDone, guard);
}

template <class Type, class Up>
__device__ void combine(const CombineArgs& a, const Up& up, u8* shared) {
  u64 begun = now_ns();
  Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  CombineTables t(shared, a.c.ranks);
  if (!begin_combine(a, up, t, guard)) return;
  bool waits = place_all(a, up, t);
  u8* stages = shared + a.table_bytes;
  if constexpr (kMayPush)
    if (a.own && blockIdx.x < a.pushers) push_rows(a, up, t, stages);
  Partials terms{a, {t.first, t.weights, a.r.row_base}, waits ? Units(a, t) : Units(), &guard, a.out, a.c.tokens()};
  sum_partials<Type>(terms, a.c.tokens(), stages);
  end_combine(a, up, begun, guard);
}

}  // namespace ty
