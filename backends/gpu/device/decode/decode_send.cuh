// Low-latency dispatch: the sending part. See decode_dispatch.cuh.
#pragma once
#include "cast.cuh"
#include "decode.cuh"

namespace ty {

// The routing of this rank, in shared memory.
struct SentTables {
  u32* sets;     // [E + R, words]: the tokens that select an expert, then those that go to a rank
  i32* picks;    // [T, K]: experts, or -1
  u32* scales;   // one for each group: of the row that is cast
  u64* problem;  // the first problem of the routing, as State has it
  u32 words;     // of a set
  u32 experts, ranks, local;

  __device__ SentTables(const DispatchArgs& a, const DecodeArgs& s, u8* shared)
      : words(s.token_words), experts(a.c.experts), ranks(a.c.ranks), local(a.c.local_experts()) {
    problem = reinterpret_cast<u64*>(shared);
    sets = reinterpret_cast<u32*>(problem + 1);
    picks = reinterpret_cast<i32*>(sets + (experts + ranks) * words);
    scales = reinterpret_cast<u32*>(picks + a.c.max_tokens * a.c.topk);
  }
  // The shared memory behind them.
  __device__ u8* end(const DispatchArgs& a) const { return reinterpret_cast<u8*>(scales + scale_room(a)); }
  __device__ static u32 scale_room(const DispatchArgs& a) { return a.quant().groups(a.hidden); }

  // The whole block, at its start. A zero behind the last scale stays.
  __device__ void clear(const DispatchArgs& a) const {
    if (threadIdx.x == 0) *problem = ~0ull;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < experts * words; i += blockDim.x) sets[i] = 0;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < scale_room(a); i += blockDim.x) scales[i] = 0;
  }

  // The number of tokens of a set before a given one.
  __device__ u32 before(u32 column, u32 token) const {
    const u32* set = sets + column * words;
    u32 count = popc(set[token / kTallied] & ((1u << token % kTallied) - 1));
#pragma unroll 1
    for (u32 w = 0; w < token / kTallied; w++) count += popc(set[w]);
    return count;
  }
  __device__ u32 size(u32 column) const {
    u32 count = 0;
#pragma unroll 1
    for (u32 w = 0; w < words; w++) count += popc(sets[column * words + w]);
    return count;
  }

  // The tokens of one word that go to a rank. Made of the sets of its experts: hundreds of selections of few
  // ranks would queue for the same words. The whole warp.
  __device__ u32 going(u32 rank, u32 word) const {
    u32 set = 0;
#pragma unroll 1
    for (u32 e = lane_id(); e < local; e += kWave) set |= sets[(rank * local + e) * words + word];
#pragma unroll
    for (u32 other = kWave / 2; other > 0; other /= 2) set |= shfl_xor(set, other);
    return set;
  }
  // Makes the sets of ranks, which one block needs. The whole block.
  __device__ void join() const {
#pragma unroll 1
    for (u32 i = wave_id(); i < ranks * words; i += block_waves()) {
      u32 rank = i / words, word = i - rank * words, set = going(rank, word);
      if (lane_id() == 0) sets[(experts + rank) * words + word] = set;
    }
    sync_block();
  }
};

// The selection at a place of the routing that a call names.
__device__ inline i64 given_pick(const DispatchArgs& a, u32 at) {
  return a.replay ? (i64)a.r.topk[at] : (i64)a.topk_idx[at];
}

// The first selections of each thread, loaded before it is known how many there are.
struct FirstPicks {
  static constexpr u32 kCount = 2;
  i64 ids[kCount];

  __device__ FirstPicks(const DispatchArgs& a, bool sends) {
    u32 most = sends ? a.c.input_rows * a.c.topk : 0;
#pragma unroll
    for (u32 n = 0; n < kCount; n++) ids[n] = at(n) < most ? given_pick(a, at(n)) : -1;
  }
  __device__ static u32 at(u32 n) { return threadIdx.x + n * blockDim.x; }
};

// Finds the first selection of an expert that its token has selected before.
__device__ TY_COLD void find_twice(const SentTables& t, u32 topk, u32 pairs) {
#pragma unroll 1
  for (u32 i = threadIdx.x; i < pairs; i += blockDim.x) {
    u32 token = i / topk, k = i - token * topk;
    for (u32 other = token * topk; other < i; other++)
      if (t.picks[i] >= 0 && t.picks[other] == t.picks[i])
        atomic_min(t.problem, (u64)token << 16 | k << 8 | kTwice);
  }
}

// Reads all routing, behind a barrier; returns the first problem. The whole block.
__device__ TY_INLINED u64 read_routing(const DecodeDispatchArgs& args, const SentTables& t, const FirstPicks& first,
                                       u32 tokens) {
  const DispatchArgs& a = args.dispatch;
  const DecodeArgs& s = args.decode;
  u32 topk = a.c.topk, pairs = tokens * topk;
  bool twice = false;
  auto take = [&](u32 i, i64 found) {
    u32 token = quotient(i, topk, s.topk_factor), mine = 1u << token % kTallied, word = token / kTallied;
    bool none = found >= (i64)t.experts;
    if (none) atomic_min(t.problem, (u64)token << 16 | (i - token * topk) << 8 | kNoExpert);
    i32 expert = none || found < 0 ? -1 : (i32)found;
    // An expert that a mask leaves out: the combine counts it as missing.
    if (expert >= 0 && is_left_out(s, a.c.rank_of((u32)expert))) expert = -2 - expert;
    t.picks[i] = expert;
    if (expert < 0) return;
    twice |= (atomic_or(&t.sets[expert * t.words + word], mine) & mine) != 0;
  };
#pragma unroll
  for (u32 n = 0; n < FirstPicks::kCount; n++)
    if (FirstPicks::at(n) < pairs) take(FirstPicks::at(n), first.ids[n]);
#pragma unroll 1
  for (u32 i = FirstPicks::at(FirstPicks::kCount); i < pairs; i += blockDim.x) take(i, given_pick(a, i));
  if (sync_block_or(twice)) {
    find_twice(t, topk, pairs);
    sync_block();
  }
  return *t.problem;
}

// Pieces of a row without scales, and with them.
__device__ inline u32 row_pieces(const DispatchArgs& a) { return (u32)(a.row_bytes / 16); }
__device__ inline u32 sent_pieces(const DispatchArgs& a) { return row_pieces(a) + (a.scale_words + 3) / 4; }

// A thread's pieces of a row that is sent, with its scales behind it. `load` waits for nothing: what it loads
// comes while the routing is read.
template <u32 N, bool kCast>
struct SentRow {
  // A piece that is cast is made of up to four.
  static constexpr bool kEarly = N == 1;
  uint4 piece[N];
  uint4 raw[kCast && kEarly ? 4 : 1];
  float weight;  // of this lane's selection: in the last warp

  __device__ TY_INLINED void load(const DispatchArgs& a, u32 token) {
    bool weighs = a.weights && lane_id() < a.c.topk && wave_id() == block_waves() - 1;
    weight = weighs ? a.weights[(u64)token * a.c.topk + lane_id()] : 0.0f;
    if constexpr (kCast) {
      if constexpr (kEarly) load_raw(a, token, 0, raw);
    } else {
      const uint4* from = reinterpret_cast<const uint4*>(a.x + (u64)token * a.row_bytes);
#pragma unroll
      for (u32 j = 0; j < N; j++)
        if (piece_at(j) < row_pieces(a)) piece[j] = load_16(from + piece_at(j));
      take_scales(a, [&](u32 at) { return a.scales[(u64)token * a.scale_stride[0] + (u64)at * a.scale_stride[1]]; });
    }
  }
  // The whole block. Threads may still read the scales of the row before, until the block has met.
  __device__ TY_INLINED void finish(const DispatchArgs& a, u32 token, const SentTables& t) {
    if constexpr (kCast) {
#pragma unroll
      for (u32 j = 0; j < N; j++) {
        if constexpr (kEarly) {
          cast_piece(a, j, raw, t);
        } else {
          uint4 given[4];
          load_raw(a, token, j, given);
          cast_piece(a, j, given, t);
        }
      }
      sync_block();
      take_scales(a, [&](u32 at) { return t.scales[at]; });
    }
  }

 private:
  __device__ TY_INLINED static void load_raw(const DispatchArgs& a, u32 token, u32 j, uint4 (&given)[4]) {
    u32 first = piece_at(j) * kCastChannels;
    if (first >= a.hidden) return;
    u64 at = ((u64)token * a.hidden + first) * bytes_of(a.dtype);
    const uint4* from = reinterpret_cast<const uint4*>(a.raw + at);
    given[0] = load_16(from), given[1] = load_16(from + 1);
    if (a.dtype == DType::kFp32) given[2] = load_16(from + 2), given[3] = load_16(from + 3);
  }
  __device__ TY_INLINED void cast_piece(const DispatchArgs& a, u32 j, const uint4 (&given)[4], const SentTables& t) {
    u32 first = piece_at(j) * kCastChannels;
    bool inside = first < a.hidden;
    CastLane lane{};
    if (inside && a.dtype == DType::kFp32) {
      lane.half[0].widen(DType::kFp32, given[0], given[1]);
      lane.half[1].widen(DType::kFp32, given[2], given[3]);
    } else if (inside) {
      lane.half[0].widen(a.dtype, given[0], given[0]);
      lane.half[1].widen(a.dtype, given[1], given[1]);
    }
    uint2 codes[2];
    float scale = lane.cast(a.quant(), codes);
    if (!inside) return;
    piece[j] = make_uint4(codes[0].x, codes[0].y, codes[1].x, codes[1].y);
    if (piece_at(j) % kGroupLanes<CastRows> == 0)
      store_scale(a.quant(), reinterpret_cast<u8*>(t.scales), first / CastRows::group, scale);
  }
  template <class Word>
  __device__ TY_INLINED void take_scales(const DispatchArgs& a, Word word_at) {
    u32 pieces = row_pieces(a);
#pragma unroll
    for (u32 j = 0; j < N; j++) {
      u32 at = piece_at(j);
      if (at < pieces || at >= sent_pieces(a)) continue;
      u32 word[4];
#pragma unroll
      for (u32 i = 0; i < 4; i++) {
        u32 w = 4 * (at - pieces) + i;
        word[i] = w >= a.scale_words ? 0 : word_at(w);
      }
      piece[j] = make_uint4(word[0], word[1], word[2], word[3]);
    }
  }
};

// The tokens of this rank whose rows for itself stay in registers: the last one of each block.
struct KeptTokens {
  u32 first;  // of them, up to T

  __device__ KeptTokens(const Part& part, u32 tokens)
      : first(!part.keeps_own() ? tokens : tokens > part.sending.step ? tokens - part.sending.step : 0) {}
};

// A token, and whether this rank's row of it stays in registers.
struct SentToken {
  u32 token;
  bool kept;
};

// Sends a row and its records to each rank that the token selects, except for this one if it is kept. The
// whole block.
template <u32 N, bool kCast, class Up>
__device__ TY_INLINED void send_row(const DecodeDispatchArgs& args, const Up& up, const SentTables& t,
                                    const SentToken& sent, const SentRow<N, kCast>& row) {
  const DispatchArgs& a = args.dispatch;
  u32 lane = lane_id(), topk = a.c.topk, pieces = sent_pieces(a);
  u32 token = sent.token;
  u64 from = (u64)token * topk + lane;
  i32 expert = lane < topk ? t.picks[from] : -1;
  u32 rank = expert >= 0 ? a.c.rank_of((u32)expert) : 0;
  Lanes leaders = ballot(stands_for(expert >= 0 && !(sent.kept && rank == a.c.rank), rank));
  u32 key = key_of(row.piece, pieces);
#pragma unroll 1
  for (Lanes left = leaders; left != 0; left &= left - 1) {
    u32 d = shfl(rank, first_of(left));
    u64 place = place_of(a.c, writer_at(a.c, d), token);
    store_decode_row(decode_row(a.c, args.decode, up, d, place), row.piece, pieces, key);
  }
  if (wave_id() == 0 && lane < topk && !a.replay) a.r.topk[from] = expert;
  if (wave_id() != block_waves() - 1) return;
  u32 named = expert >= 0 ? (expert - rank * t.local) << 16 | t.before(expert, token) : 0;
#pragma unroll 1
  for (Lanes left = leaders; left != 0; left &= left - 1) {
    u32 d = shfl(rank, first_of(left));
    uint4* record = decode_record(a.c, args.decode, up, d, place_of(a.c, writer_at(a.c, d), token));
    if (lane == 0) store_entry(record, a.c.epoch(), key, 0);
    bool here = expert >= 0 && rank == d;
    if (lane < topk) store_entry(record + 1 + lane, a.c.epoch(), here ? named : ~0u, bits_of(row.weight));
  }
}

// Reports to each rank which tokens are sent, and how many rows each of its experts gets: this block's share.
template <class Up>
__device__ TY_INLINED void report_counts(const DecodeDispatchArgs& args, const Up& up, const SentTables& t,
                                         const Portion& portion) {
  const Common& c = args.dispatch.c;
  u64 epoch = (u64)c.epoch() << 32;
  auto report = [&](u32 d, u32 word, u32 value) {
    if (is_left_out(args.decode, d)) return;
    store_relaxed(decode_word(c, args.decode, up, d, writer_at(c, d), word), epoch | value);
  };
#pragma unroll 1
  for (u32 e = portion.first + portion.step * threadIdx.x; e < t.experts; e += portion.step * blockDim.x) {
    u32 d = c.rank_of(e);
    report(d, t.words + e - d * t.local, t.size(e));
  }
  u32 wave = block_waves() - 1 - wave_id();
#pragma unroll 1
  for (u32 i = portion.first + portion.step * wave; i < t.ranks * t.words; i += portion.step * block_waves()) {
    u32 d = quotient(i, t.words, args.decode.words_factor), word = i - d * t.words, set = t.going(d, word);
    if (lane_id() == 0) report(d, word, set);
  }
}

// Enters at every peer. The block that posts heads, all of it.
template <class Up>
__device__ TY_INLINED void post_heads(const DispatchArgs& a, const Up& up, const SentTables& t, const Heads& heads,
                                      const KeptTokens& kept, u32 tokens, u64 problem) {
  bool enters = problem == ~0ull;
  if (threadIdx.x == 0 && !a.replay) *a.r.note = {a.c.epoch() | (u64)tokens << 32, 0};
  if (!enters) {
    if (threadIdx.x == 0) a.c.state->problem = problem;
    sync_block();
  } else {
    t.join();
  }
  heads.post(a.c, up, {enters ? kEnter : kRefuseInput, sent_pieces(a)}, a.topk_idx, [&](u32 peer) {
    u32 column = t.experts + peer;
    return peer == a.c.rank && kept.first < tokens ? t.before(column, kept.first) : t.size(column);
  });
  if (enters) return;
  sync_block();
  if (threadIdx.x == 0) a.c.state->problem = ~0ull;
}

// Sends what begins with the row that is loaded; at the end, `row` is that of the block's last token. False if the
// routing is bad. The whole block.
template <u32 N, bool kCast, class Up>
__device__ TY_INLINED bool send_rows(const DecodeDispatchArgs& args, const Up& up, const SentTables& t,
                                     const FirstPicks& first, const Part& part, const Heads& heads,
                                     SentRow<N, kCast>& row) {
  const DispatchArgs& a = args.dispatch;
  u32 tokens = a.c.tokens();
  KeptTokens kept(part, tokens);
  u64 problem = read_routing(args, t, first, tokens);
  if (heads.posts()) post_heads(a, up, t, heads, kept, tokens, problem);
  if (problem != ~0ull) return false;
  if (part.sending.first < part.reporting) report_counts(args, up, t, {part.sending.first, part.reporting});
#pragma unroll 1
  for (u32 token = part.sending.first; token < tokens;) {
    row.finish(a, token, t);
    send_row(args, up, t, {token, token >= kept.first}, row);
    token += part.sending.step;
    if (token < tokens) row.load(a, token);
  }
  return true;
}

}  // namespace ty
