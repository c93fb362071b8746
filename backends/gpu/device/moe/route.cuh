// Counting: the ranks and experts of each token, in order of tokens, the same on every run.
#pragma once
#include "moe_args.cuh"

namespace ty {

// How this rank enters a dispatch, once its operation is known. Only a dispatch inside one of several domains
// may follow another exchange.
__device__ inline u32 verdict_of(const DispatchArgs& a) {
  if constexpr (kGrouped) return operation().verdict;
  return a.c.verdict;
}

__device__ inline void note_problem(const DispatchArgs& a, u32 token, u32 k, u32 kind) {
  atomic_min(&a.c.state->problem, (u64)token << 16 | k << 8 | kind);
}

// Whether a word holds this epoch, or a later one: at most those of the operations that may be open. A word of a run
// that was not used for 2^31 epochs is older, not later.
constexpr u32 kEpochsAhead = 1 << 16;
__device__ inline bool has_come(u64 word, u32 epoch) { return (u32)word - epoch < kEpochsAhead; }

// Waits until the exchange over the rail goes on, and the metadata of all rows are here. False if it does not. The
// whole block.
__device__ inline bool rows_are_described(const GroupArgs& a) {
  if (!a.described) return true;
  Guard guard(a.abort, a.cap_ns, a.report);
  const Cell* former = a.former;
  bool ok = is_decided(former, a.ticket, a.rank, guard) && (u32)load_relaxed(&former->decided) == kGo;
  u32 epoch = (u32)load_relaxed(&former->epoch);
  for (u32 s = threadIdx.x; s < a.groups && ok; s += blockDim.x)
    ok = guard.until({kPhaseRows, a.rank, s, epoch}, [&] { return load_acquire(a.described + s); },
                     [&](u64 found) { return has_come(found, epoch); });
  return sync_block_and(ok);
}

// Runs before a dispatch of grouped tokens counts. One block.
__device__ inline void group(const GroupArgs& a) {
  if (!rows_are_described(a)) {
    // The kernel behind may count before it learns that no rows come: all are of the first group.
    for (u32 g = threadIdx.x; g <= a.groups; g += blockDim.x) a.starts[g] = g == 0 ? 0 : ~0u;
    return;
  }
  for (u32 i = threadIdx.x; i < a.words; i += blockDim.x) a.zeros[i] = 0;
  if (threadIdx.x != 0) return;
  u32 start = 0;
  for (u32 g = 0; g < a.groups; g++) {
    a.starts[g] = start;
    start += a.counts[g];
  }
  a.starts[a.groups] = start;
}

// Tokens that a warp counts at once, at most: bits of a word.
constexpr u32 kTallied = 8 * sizeof(u32);

// The counts of a warp in shared memory: `columns` are the ranks, then the experts.
//
// Loops here are not unrolled: a kernel's instructions are no longer in any cache when it starts, and
// their fetch takes longer than their execution.
struct Tally {
  u32* bits;     // [columns]: the tokens, of those counted at once, that go there
  u32* rows;     // [columns]: how many went there before
  u32* picks;    // [tokens, K]: the experts that they select
  u32 columns, pitch;

  __device__ Tally(u8* shared, const Common& c, u32 tokens)
      : columns(c.ranks + c.experts), pitch(2 * columns + tokens * c.topk) {
    bits = reinterpret_cast<u32*>(shared) + wave_id() * pitch;
    rows = bits + columns, picks = rows + columns;
#pragma unroll 1
    for (u32 i = lane_id(); i < 2 * columns; i += kWave) bits[i] = 0;
  }
  // The rows of another warp of the block.
  __device__ const u32* rows_of(u32 warp) const {
    return rows + (i64)pitch * ((i32)warp - (i32)(wave_id()));
  }
  // Adds the tokens from `first` on, at most kTallied, to the earlier counts.
  __device__ void close(const Common& c, const Routing& r, u32 first) {
    sync_wave();
#pragma unroll 1
    for (u32 i = lane_id(); i < columns; i += kWave) {
      rows[i] += popc(bits[i]);
      if constexpr (kGrouped) note_groups(c, r, first, i);
      bits[i] = 0;
    }
    sync_wave();
  }

 private:
  // Notes, of a column's tokens among those, the number of each group.
  __device__ void note_groups(const Common& c, const Routing& r, u32 first, u32 column) const {
    for (u32 left = bits[column], g = 0; left != 0; g++) {
      u32 end = r.group_starts[g + 1], inside = end <= first ? 0 : end - first;
      u32 of_group = inside >= kTallied ? left : left & ((1u << inside) - 1);
      if (of_group != 0) atomic_add(&r.group_counts[column * c.groups() + g], popc(of_group));
      left &= ~of_group;
    }
  }
};

// Some pairs (token, k) from `first` on as `Tally::picks`: an expert, kNone, or `experts` for an
// expert that does not exist. One warp.
constexpr u32 kNone = ~0u;
__device__ inline void load_picks(const DispatchArgs& a, const Tally& t, u64 first, u32 pairs) {
  constexpr u32 kAtOnce = 8;
#pragma unroll 1
  for (u32 turn = lane_id(); turn < pairs; turn += kWave * kAtOnce) {
    i64 found[kAtOnce];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++)
      found[i] = turn + kWave * i < pairs ? (i64)a.topk_idx[first + turn + kWave * i] : -1;
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++)
      if (turn + kWave * i < pairs)
        t.picks[turn + kWave * i] = found[i] < 0 ? kNone : (u32)min(found[i], (i64)a.c.experts);
  }
  sync_wave();
}

// A warp's view of a few tokens: their selections lane by lane, no token in two views.
struct Look {
  u32 lane, each, own, k;  // `each`: tokens of a view; `own`: this lane's among them

  __device__ explicit Look(u32 topk)
      : lane(lane_id()), each(kWave / topk), own(lane / topk), k(lane - own * topk) {}
  // The lanes that have the same value for the same token. `column` is below 2^20.
  __device__ Lanes like(bool valid, u32 column) const {
    return match_any(valid ? (i32)(own << kPlaceBits | column) : -1 - (i32)lane);
  }
};

// Up to `tally_tokens` tokens. One warp.
__device__ inline void count_tokens(const DispatchArgs& a, Tally& t, u32 first, u32 count) {
  Look look(a.c.topk);
  u64 base = (u64)first * a.c.topk;
  load_picks(a, t, base, count * a.c.topk);
#pragma unroll 1
  for (u32 turn = 0; turn < count; turn += look.each) {
    u32 token = turn + look.own, at = turn * a.c.topk + look.lane, mine = 1u << token % kTallied;
    bool counts = look.own < look.each && token < count;
    u32 expert = counts ? t.picks[at] : kNone, problem = 0;
    if (expert == a.c.experts) problem = kNoExpert, expert = kNone;
    // The first of the selections of the same expert counts.
    if ((look.like(expert != kNone, expert) & lanes_before(look.lane)) != 0)
      problem = kTwice, expert = kNone;
    if (problem != 0) note_problem(a, first + token, look.k, problem);
    bool valid = expert != kNone;
    u32 rank = valid ? a.c.rank_of(expert) : 0, column = a.c.ranks + expert;
    // The last selection of a rank represents the rank.
    bool last = look.like(valid, rank) >> look.lane == 1 && valid;
    if (valid) atomic_or(&t.bits[column], mine);
    if (last) atomic_or(&t.bits[rank], mine);
    sync_wave();
    if (!counts) continue;
    a.r.topk[base + at] = (i32)expert;
    u32 row = t.rows[rank] + popc(t.bits[rank] & (mine - 1));
    a.r.rows[base + at] = last ? rank << kPlaceBits | row : kNoRow;
    if (a.layout == Layout::kFlat) continue;
    a.r.places[base + at] =
        valid ? t.rows[column] + popc(t.bits[column] & (mine - 1)) : kNoRow;
  }
  t.close(a.c, a.r, first);
}

// Turns a block's counts of warps into the first rows of its spans, and sums them up for the block.
__device__ inline void close_block(const DispatchArgs& a, const Tally& t) {
  const Routing& r = a.r;
  u32 ranks = a.c.ranks, experts = a.c.experts;
  sync_block();
#pragma unroll 1
  for (u32 i = threadIdx.x; i < t.columns; i += blockDim.x) {
    bool is_rank = i < ranks;
    u32 width = is_rank ? ranks : experts, column = is_rank ? i : i - ranks, sum = 0;
    u32* spans = (is_rank ? r.span_ranks : r.span_experts) + column;
#pragma unroll 4
    for (u32 warp = 0; warp < kWarps; warp++) {
      if (is_rank || a.layout != Layout::kFlat) spans[(u64)(blockIdx.x * kWarps + warp) * width] = sum;
      sum += t.rows_of(warp)[i];
    }
    (is_rank ? r.block_ranks : r.block_experts)[(u64)blockIdx.x * width + column] = sum;
  }
}

// Counts tokens: each warp of the first blocks counts a span. The routing says how many blocks
// count.
__device__ inline void count(const DispatchArgs& a, u32 tokens, u8* shared) {
  Tally t(shared, a.c, a.tally_tokens);
  u32 first = (blockIdx.x * kWarps + wave_id()) * a.r.span;
  u32 end = min(tokens, first + a.r.span);
#pragma unroll 1
  for (u32 token = first; token < end; token += a.tally_tokens)
    count_tokens(a, t, token, min(a.tally_tokens, end - token));
  close_block(a, t);
}

// Counts of blocks become first rows, if `wanted`; returns the sum of a column.
__device__ inline u32 scan_column(u32* table, u32 columns, u32 blocks, bool wanted) {
  constexpr u32 kAtOnce = 16;
  u32 sum = 0;
#pragma unroll 1
  for (u32 left = blocks; left > 0;) {
    u32 rows[kAtOnce], some = min(left, kAtOnce);
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++) rows[i] = i < some ? load_device(&table[i * columns]) : 0;
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++) {
      if (i < some && wanted) table[i * columns] = sum;
      sum += rows[i];
    }
    left -= some, table += some * columns;
  }
  return sum;
}

// Sums up the counts, so that `totals` in shared memory has the rows for ranks and experts. One
// block, after all have counted, or for a routing that was counted before.
__device__ inline void scan(const DispatchArgs& a, u32* totals, bool counted) {
  u32 ranks = a.c.ranks, experts = a.c.experts;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < ranks + experts && verdict_of(a) == kEnter; i += blockDim.x) {
    bool is_rank = i < ranks;
    u32 width = is_rank ? ranks : experts, column = is_rank ? i : i - ranks;
    u32* counts = (is_rank ? a.r.counts : a.r.expert_counts) + column;
    u32* table = (is_rank ? a.r.block_ranks : a.r.block_experts) + column;
    if (counted) *counts = scan_column(table, width, a.r.blocks, is_rank || a.layout != Layout::kFlat);
    totals[i] = *counts;
  }
  sync_block();
}

// The span of a token: spans are powers of two, which need no division.
__device__ inline u32 span_of(const Routing& r, u32 token) { return token >> popc(r.span - 1); }

// The place, among this rank's rows for `rank`, of the row that `packed` of Routing::rows names.
__device__ inline u32 row_of(const Common& c, const Routing& r, u32 token, u32 packed, u32 rank) {
  u32 span = span_of(r, token);
  return (packed & ((1u << kPlaceBits) - 1)) + r.span_ranks[span * c.ranks + rank] +
         r.block_ranks[span / kWarps * c.ranks + rank];
}

// This rank's rows for `rank` of the tokens before `token`, which starts a span, or is behind the last one.
__device__ inline u32 rows_before(const DispatchArgs& a, u32 token, u32 rank) {
  if (token >= a.c.tokens()) return a.r.counts[rank];
  return row_of(a.c, a.r, token, 0, rank);
}

// The tokens whose rows this block moves, where rows are staged. These are whole spans. So one access
// gives the places of all its rows among those of this rank.
struct BlockTokens {
  u32 first, end;

  __device__ explicit BlockTokens(const DispatchArgs& a) {
    u32 tokens = a.c.tokens(), spans = (tokens + a.r.span - 1) / a.r.span;
    u64 block = blockIdx.x;
    first = (u32)(spans * block / gridDim.x) * a.r.span;
    end = min((u32)(spans * (block + 1) / gridDim.x) * a.r.span, tokens);
  }
};

// The amount to add to a token's place among this rank's rows for a rank. kGrouped: 0 where there
// is no table.
__device__ inline u32 base_of(const Common& c, const Routing& r, const u32* row_base, u32 token,
                              u32 rank) {
  if constexpr (!kGrouped) return row_base[rank];
  return row_base ? row_base[group_of(c, r, token) * c.ranks + rank] : 0;
}

// The row of a token at the rank of its selection k, or -1 if another k represents that rank.
__device__ inline i64 row_at(const Common& c, const Routing& r, const u32* row_base, u32 token,
                             u32 packed, u32* rank) {
  if (packed == kNoRow) return -1;
  *rank = packed >> kPlaceBits;
  return base_of(c, r, row_base, token, *rank) + row_of(c, r, token, packed, *rank);
}

// The value of Routing::rows for a token and lane k. All lanes of a warp.
__device__ inline u32 packed_row(const Common& c, const Routing& r, u32 token) {
  u32 lane = lane_id();
  return lane < c.topk ? r.rows[(u64)token * c.topk + lane] : kNoRow;
}

// The expert-major row of a token's selection k, which selects `expert`.
__device__ inline u32 expert_row(const Common& c, const Routing& r, const u32* expert_base,
                                 u32 token, u32 k, u32 expert) {
  u32 span = span_of(r, token);
  if constexpr (kGrouped) expert_base += group_of(c, r, token) * c.experts;
  return expert_base[expert] + r.span_experts[(u64)span * c.experts + expert] +
         r.block_experts[(u64)(span / kWarps) * c.experts + expert] +
         r.places[(u64)token * c.topk + k];
}

}  // namespace ty
