// Low-latency dispatch to rank-major rows: the routing as sets of tokens by ranks alone. See decode_rank_major.cuh.
//
// A thread has a token, and a warp gives the tokens of a rank by one ballot, before the barrier of the turn. So there
// is no barrier behind it. One block alone counts rows by experts: the one that reports them, together with its heads.
// Routings that are wrong, and those that do not fit a thread, are read as sets by experts, which find the problem.
#pragma once
#include "decode_send.cuh"

namespace ty {

// Most selections of a token, and most ranks, of which a thread has all.
constexpr u32 kMostBallotPicks = 8, kMostBallotRanks = 32;

__device__ inline bool takes_ballots(const Common& c) {
  return c.topk <= kMostBallotPicks && c.ranks <= kMostBallotRanks;
}

// The selections of a thread's token. Loads wait for nothing.
struct BallotPicks {
  i64 ids[kMostBallotPicks];

  __device__ TY_INLINED void load(const DispatchArgs& a, u32 token, u32 tokens) {
#pragma unroll
    for (u32 k = 0; k < kMostBallotPicks; k++)
      ids[k] = token < tokens && k < a.c.topk ? given_pick(a, token * a.c.topk + k) : -1;
  }
  // Stores them as `picks`, counts them by experts if this block `counts`, and returns the ranks; `bad`: there is an
  // expert that does not exist, or one twice. `tokens`: T, of which `load` may not know.
  __device__ TY_INLINED u32 take(const DispatchArgs& a, const SentTables& t, u32 token, u32 tokens, bool counts,
                                 bool& bad) const {
    u32 ranks = 0;
    bad = false;
    if (token >= tokens) return 0;
#pragma unroll
    for (u32 k = 0; k < kMostBallotPicks; k++) {
      bad |= ids[k] >= (i64)t.experts;
#pragma unroll
      for (u32 other = 0; other < k; other++) bad |= ids[k] >= 0 && ids[k] == ids[other];
      bool has = ids[k] >= 0 && ids[k] < (i64)t.experts;
      u32 expert = has ? (u32)ids[k] : 0;
      if (k < a.c.topk) t.picks[token * a.c.topk + k] = has ? (i32)expert : -1;
      if (!has) continue;
      ranks |= 1u << a.c.rank_of(expert);
      if (counts) atomic_add(&t.sets[expert], 1u);
    }
    return ranks;
  }
};

// Makes the sets of ranks, and the problem is not all ones if the routing is bad; they are there behind the next
// barrier. `first`: of the token of this thread's number. The whole block, behind a barrier that follows `clear`.
__device__ TY_INLINED void read_by_ballots(const DispatchArgs& a, const SentTables& t, const BallotPicks& first,
                                           u32 tokens, bool counts) {
  constexpr u32 kWords = kWave / kTallied;
  u32 all = t.words * kTallied;
#pragma unroll 1
  for (u32 from = wave_id() * kWave; from < all; from += blockDim.x) {
    u32 token = from + lane_id();
    bool bad;
    BallotPicks more = first;
    if (token != threadIdx.x) more.load(a, token, tokens);
    u32 ranks = more.take(a, t, token, tokens, counts, bad);
    if (bad) atomic_min(t.problem, 0ull);
#pragma unroll 1
    for (u32 d = 0; d < t.ranks; d++) {
      Lanes going = ballot(ranks >> d & 1);
      u32 word = from / kTallied + lane_id();
      if (lane_id() < kWords && word < t.words)
        t.sets[(t.experts + d) * t.words + word] = (u32)(going >> (lane_id() * kTallied) % kWave);
    }
  }
}

// Reads the routing as sets by experts, makes those of ranks, and returns the first problem. The whole block, behind a
// barrier.
__device__ TY_COLD u64 read_by_experts(const DecodeDispatchArgs& args, SentTables t, u32 tokens, u32 found) {
  const DispatchArgs& a = args.dispatch;
  sync_block();
  t.clear(a);
  if (threadIdx.x == 0 && found > a.c.input_rows) *t.problem = (u64)found << 16 | kTooMany;
  sync_block();
  u64 problem = read_routing(args, t, FirstPicks(a, true), tokens);
  if (problem == ~0ull) t.join();
  return problem;
}

// Reports to each rank which tokens are sent, and how many rows each of its experts gets. The block that posts heads,
// all of it.
template <class Up>
__device__ TY_INLINED void report_all(const DecodeDispatchArgs& args, const Up& up, const SentTables& t, bool counted) {
  const Common& c = args.dispatch.c;
  u64 epoch = (u64)c.epoch() << 32;
  auto report = [&](u32 d, u32 word, u32 value) {
    store_relaxed(decode_word(c, args.decode, up, d, writer_at(c, d), word), epoch | value);
  };
#pragma unroll 1
  for (u32 e = threadIdx.x; e < t.experts; e += blockDim.x) {
    u32 d = c.rank_of(e);
    report(d, t.words + e - d * t.local, counted ? t.sets[e] : t.size(e));
  }
#pragma unroll 1
  for (u32 i = threadIdx.x; i < t.ranks * t.words; i += blockDim.x) {
    u32 d = quotient(i, t.words, args.decode.words_factor);
    report(d, i - d * t.words, t.sets[t.experts * t.words + i]);
  }
}

}  // namespace ty
