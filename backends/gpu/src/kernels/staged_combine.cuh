// Low-latency combine: owners sum their rows of each token and stage one partial row for its source, which
// sums the partial rows. See staging.cuh.
//
// Sums in f32, in the order of `combine`: experts of one rank in k order, rounded; then the biases and
// ranks in the order of their highest selecting k, rounded. No rank reads rows of another, so no rank waits
// until all have read. Where one kernel sends and receives, this rank's partial rows of its own tokens are made
// where they are needed, and not staged.
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
  __device__ TY_INLINED void round(uint4 (&row)[N]) const {
#pragma unroll
    for (u32 j = 0; j < N; j++) row[j] = sum[j].result();
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
constexpr u32 kTermsAtOnce = N == 1 ? 4 : 1;

// The sum of a token's rows here, rounded: this lane names the row of selection k, or none. Weights are used once
// the rows are on their way. The whole block, each warp by itself.
template <class Type, u32 N>
__device__ TY_INLINED void sum_rows(const MergeArgs& m, i32 slot, uint4 (&row)[N]) {
  constexpr u32 kAtOnce = kTermsAtOnce<N>;
  u32 pieces = (u32)(m.row_bytes / 16);
  bool weighted = m.dispatch_weights != nullptr;
  float weight = weighted && slot >= 0 ? m.dispatch_weights[slot] : 0.0f;
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
  total.round(row);
}

// The rows that this rank has received and sums for their sources, in order of sources from the next rank on;
// rows of its own tokens come last, or, if they are not staged, not at all.
struct SumRange {
  u32 all, rows;
  u32 start;  // the first of the next rank

  __device__ SumRange(const CombineArgs& a, bool keeps_own)
      : all(a.r.source_rows[a.c.ranks]), rows(all), start(a.r.source_rows[a.c.rank + 1]) {
    if (keeps_own) rows -= start - a.r.source_rows[a.c.rank];
  }
  __device__ u32 number(u32 i) const { return start + i < all ? start + i : start + i - all; }
};

// A received token, and this lane's row of it.
struct OwedRow {
  u32 from = ~0u;  // source * M + token
  i32 slot = -1;

  // A handle of a dispatch that failed has any numbers: they are not used, but they may be loaded.
  __device__ void load(const StagedCombineArgs& args, const SumRange& range, u32 i) {
    const Common& c = args.combine.c;
    u32 number = range.number(i);
    if (i >= range.rows || number >= c.ranks * c.max_tokens) return;
    from = args.sources[number];
    slot = slot_of(args.merge.slots, number, args.merge.topk, args.merge.rows);
  }
};

// Stages the sum of a received token's rows for its source. The whole block.
template <class Type, u32 N, class Up>
__device__ TY_INLINED void send_partial(const StagedCombineArgs& args, const Up& up, const OwedRow& owed) {
  const Common& c = args.combine.c;
  const MergeArgs& m = args.merge;
  u32 lane = lane_id(), pieces = (u32)(m.row_bytes / 16);
  u32 source = owed.from / c.max_tokens, token = owed.from - source * c.max_tokens;
  if (source >= c.ranks) return;
  uint4 row[N];
  sum_rows<Type, N>(m, owed.slot, row);
  u32 key = key_of(row, pieces);
  u64 place = place_of(c, c.rank, token);
  store_staged(staged_row(c, args.staging, up, source, place), row, pieces, key);
  if (wave_id() != block_waves() - 1) return;
  uint4* record = staged_record(c, args.staging, up, source, place);
  if (lane == 0) store_entry(record, c.epoch(), key, 0);
  if (!m.weights || lane >= m.topk) return;
  store_entry(record + 1 + lane, c.epoch(), owed.slot >= 0 ? bits_of(m.weights[owed.slot]) : 0, 0);
}

// The whole block. `owed`: the first of them.
template <class Type, u32 N, class Up>
__device__ TY_INLINED void send_partials(const StagedCombineArgs& args, const Up& up, const SumRange& range,
                                         const u32* staged, const Part& part, const Heads& heads, OwedRow owed) {
  const Common& c = args.combine.c;
  if (heads.posts())
    heads.post(c, up, {c.verdict, (u32)(args.merge.row_bytes / 16)}, nullptr, [&](u32 peer) { return staged[peer]; });
#pragma unroll 1
  for (u32 i = part.sending.first; i < range.rows; i += part.sending.step) {
    OwedRow next;
    next.load(args, range, i + part.sending.step);
    send_partial<Type, N>(args, up, owed);
    owed = next;
  }
}

// This lane's selection of a token of this rank, and the row that it has here.
struct OwnSelection {
  i32 expert = -1, slot = -1;

  // Before T is known, the most that it may be.
  __device__ void load(const CombineArgs& a, u32 token) {
    u32 lane = lane_id();
    if (token >= a.c.max_tokens || lane >= a.c.topk) return;
    expert = a.r.topk[(u64)token * a.c.topk + lane];
    slot = (i32)a.r.places[(u64)token * a.c.topk + lane];
  }
};

// Partial rows of a token that are loaded together, with the first reads of them and of their keys.
template <u32 N>
struct Arriving {
  static constexpr u32 kAtOnce = N == 1 ? 4 : 1;
  uint4 seen[kAtOnce][N];
  u64 key[kAtOnce];

  // Of the first of the `left` lanes' owners; those of this rank are not staged if it `keeps` them.
  template <class Up>
  __device__ TY_INLINED void look(const StagedCombineArgs& args, const Up& up, u32 token, u32 owner, Lanes left,
                                  bool keeps) {
    const Common& c = args.combine.c;
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++) {
      u32 rank = shfl(owner, left != 0 ? first_of(left) : 0);
      u64 place = place_of(c, rank, token);
      if (left != 0 && !(keeps && rank == c.rank)) {
        key[i] = load_relaxed(reinterpret_cast<const u64*>(staged_record(c, args.staging, up, c.rank, place)));
        look_at_row(staged_row(c, args.staging, up, c.rank, place), seen[i], (u32)(args.combine.row_bytes / 16));
      }
      left &= left - 1;
    }
  }
};

// Sums one token of this rank; `own` is its partial row here. The whole block, each warp by itself.
template <class Type, u32 N, class Up>
__device__ TY_INLINED void receive_token(const StagedCombineArgs& args, const Up& up, u32 token, u32 owner,
                                         Lanes owners, bool keeps, const uint4 (&own)[N], Arriving<N>& coming,
                                         Guard& guard) {
  const CombineArgs& a = args.combine;
  const Common& c = a.c;
  u32 pieces = (u32)(a.row_bytes / 16);
  u64 at = (u64)token * a.row_bytes;
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
#pragma unroll
    for (u32 i = 0; i < Arriving<N>::kAtOnce; i++) {
      if (left == 0) break;
      u32 rank = shfl(owner, first_of(left));
      left &= left - 1;
      if (keeps && rank == c.rank) {
        total.add(own, pieces, false, 0.0f);
        continue;
      }
      What what{kPhaseCombineRows, rank, token, c.epoch()};
      u64 place = place_of(c, rank, token);
      const uint4* record = staged_record(c, args.staging, up, c.rank, place);
      uint4* row = staged_row(c, args.staging, up, c.rank, place);
      u32 key = poll_seen(reinterpret_cast<const u64*>(record), coming.key[i], what, guard);
#pragma unroll
      for (u32 j = 0; j < N; j++)
        if (piece_at(j) < pieces)
          coming.seen[i][j] = take_piece(row + piece_at(j), coming.seen[i][j], key, what, guard);
      total.add(coming.seen[i], pieces, false, 0.0f);
    }
    if (left != 0) coming.look(args, up, token, owner, left, keeps);
  }
  uint4 row[N];
  total.round(row);
  uint4* out = reinterpret_cast<uint4*>(a.out + at);
#pragma unroll
  for (u32 j = 0; j < N; j++)
    if (piece_at(j) < pieces && !guard.ended()) store_16(out + piece_at(j), row[j]);
}

// The weights that come back with a token's rows. One warp.
template <class Up>
__device__ TY_INLINED void receive_weights(const StagedCombineArgs& args, const Up& up, u32 token,
                                           const OwnSelection& mine, u32 owner, bool keeps, Guard& guard) {
  const CombineArgs& a = args.combine;
  const Common& c = a.c;
  u32 lane = lane_id();
  if (lane >= c.topk) return;
  float weight = 0.0f;
  if (mine.expert >= 0 && keeps && owner == c.rank) {
    weight = args.merge.weights[mine.slot];
  } else if (mine.expert >= 0) {
    const uint4* record = staged_record(c, args.staging, up, c.rank, place_of(c, owner, token));
    What what{kPhaseCombineRows, owner, token, c.epoch()};
    weight = float_of(poll_record(record + 1 + lane, make_uint4(0, 0, 0, 0), what, guard).x);
  }
  if (!guard.ended()) a.out_weights[(u64)token * c.topk + lane] = weight;
}

// The whole block. `mine`: of its first token. The partial row that this rank makes itself is made while the
// heads come.
template <class Type, u32 N, class Up>
__device__ TY_INLINED void receive_partials(const StagedCombineArgs& args, const Up& up, u32* heard, const Part& part,
                                            OwnSelection mine, Guard& guard) {
  const Common& c = args.combine.c;
  bool keeps = part.keeps_own(), entered = false;
  u64 seen = look_at_heads(c, up);
#pragma unroll 1
  for (u32 token = part.receiving.first;; token += part.receiving.step) {
    bool has = token < c.tokens();
    u32 owner = has && mine.expert >= 0 ? c.rank_of(mine.expert) : 0;
    Lanes owners = ballot(stands_for(has && mine.expert >= 0, owner));
    OwnSelection next;
    next.load(args.combine, token + part.receiving.step);
    uint4 own[N];
    bool here = keeps && has && mine.expert >= 0 && owner == c.rank && (u64)(u32)mine.slot < args.merge.rows;
    if (keeps) sum_rows<Type, N>(args.merge, here ? mine.slot : -1, own);
    Arriving<N> coming;
    coming.look(args, up, token, owner, owners, keeps);
    if (!entered) {
      Decision d{};
      if (!poll_heads(c, up, seen, heard, d, guard)) return mend_staging(c, args.staging, up, guard);
      if (d.code != kGo) return end_refused(c, args.staging, up, heard, d, part, guard);
      if (part.tells() && threadIdx.x == 0) {
        u64 now = now_ns();
        tell(c, up, d, &heard[d.rank * kHead], guard);
        c.trace->heard = now;
      }
      entered = true;
    }
    if (!has) break;
    receive_token<Type, N>(args, up, token, owner, owners, keeps, own, coming, guard);
    if (args.combine.out_weights && wave_id() == 0) receive_weights(args, up, token, mine, owner, keeps, guard);
    mine = next;
  }
  mend_staging(c, args.staging, up, guard);
}

template <class Type, u32 N, class Up>
__device__ TY_INLINED void combine_staged(const StagedCombineArgs& args, const Up& far, u8* shared) {
  const CombineArgs& a = args.combine;
  Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  Part part(args.staging);
  Trace& trace = *a.c.trace;
  Heads heads(a.c, part);
  NearWindows<Up> up(a.c, far, shared);
  u32 *heard = reinterpret_cast<u32*>(up.end()), *staged = heard + a.c.ranks * kHead;
  warm(args);
  wait_for_kernel_ahead();
  let_kernel_behind_start();
  if (part.posts() && threadIdx.x == 0) trace.begun = trace.counted = now_ns();
  SumRange range(a, part.keeps_own());
  OwedRow owed;
  OwnSelection mine;
  StagedTurn turn(a.c, args.staging, a.r.note, false, 0, [&] {
    if (part.receives) mine.load(a, part.receiving.first);
#pragma unroll 1
    for (u32 d = threadIdx.x; part.posts() && d < a.c.ranks; d += blockDim.x)
      staged[d] = d == a.c.rank && part.keeps_own() ? 0 : a.r.source_rows[d + 1] - a.r.source_rows[d];
    if (part.sends) owed.load(args, range, part.sending.first);
  });
  if (!StagedTurn::runs(a.c)) return;
  heads.open(a.c);
  if (part.sends) send_partials<Type, N>(args, up, range, staged, part, heads, owed);
  if (part.posts() && threadIdx.x == 0) trace.moved = now_ns();
  if (part.receives) receive_partials<Type, N>(args, up, heard, part, mine, guard);
  turn.leave(a.c);
  if (part.tells() && threadIdx.x == 0) trace.arrived = now_ns();
}

}  // namespace ty
