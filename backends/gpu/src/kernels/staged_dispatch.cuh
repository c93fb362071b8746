// Low-latency dispatch to the packed layout: sends without a request, and spreads the rows that arrive. See
// staging.cuh.
//
// Every block reads all routing as sets of tokens, one per expert and rank, so that counts and places are
// numbers of bits. A source reports which of its tokens are sent, and how many rows each expert gets; each
// block of a receiver reads that once, and knows the place of every row, in order of source ranks, then of
// tokens.
#pragma once
#include "cast.cuh"
#include "staging.cuh"
#include "tables.cuh"

namespace ty {

// The routing of this rank, in shared memory.
struct SentTables {
  u32* sets;    // [E + R, token_words]: the tokens that select an expert, then those that go to a rank
  i32* picks;   // [T, K]: experts, or -1
  u32* scales;  // [H / 128]: of the row that is cast
  u32 words;    // of a set

  __device__ SentTables(const DispatchArgs& a, const Staging& s, u8* shared) : words(s.token_words) {
    sets = reinterpret_cast<u32*>(shared);
    picks = reinterpret_cast<i32*>(sets + (a.c.experts + a.c.ranks) * words);
    scales = reinterpret_cast<u32*>(picks + a.c.max_tokens * a.c.topk);
  }
  // The number of tokens of a set before a given one.
  __device__ u32 before(u32 column, u32 token) const {
    const u32* set = sets + column * words;
    u32 count = popc(set[token / kTallied] & ((1u << token % kTallied) - 1));
    for (u32 w = 0; w < token / kTallied; w++) count += popc(set[w]);
    return count;
  }
  __device__ u32 size(u32 column) const {
    u32 count = 0;
    for (u32 w = 0; w < words; w++) count += popc(sets[column * words + w]);
    return count;
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

// Makes the sets of ranks out of those of their experts: hundreds of selections of few ranks would queue for
// the same words. The whole block.
__device__ inline void join_sets(const Common& c, const SentTables& t) {
  u32 local = c.local_experts();
#pragma unroll 1
  for (u32 i = wave_id(); i < c.ranks * t.words; i += block_waves()) {
    u32 rank = i / t.words, word = i - rank * t.words, set = 0;
#pragma unroll 1
    for (u32 e = lane_id(); e < local; e += kWave) set |= t.sets[(rank * local + e) * t.words + word];
#pragma unroll
    for (u32 other = kWave / 2; other > 0; other /= 2) set |= shfl_xor(set, other);
    if (lane_id() == 0) t.sets[(c.experts + rank) * t.words + word] = set;
  }
  sync_block();
}

// Reads all routing; returns the first problem, as State has it. The whole block.
__device__ TY_INLINED u64 read_routing(const DispatchArgs& a, const SentTables& t, const FirstPicks& first,
                                       u32 tokens) {
  __shared__ u64 problem;
  u32 columns = a.c.experts + a.c.ranks, topk = a.c.topk, pairs = tokens * topk;
  if (threadIdx.x == 0) {
    u32 found = a.tokens && !a.replay ? *a.tokens : 0;
    problem = found > a.c.input_rows ? (u64)found << 16 | kTooMany : ~0ull;
  }
#pragma unroll 1
  for (u32 i = threadIdx.x; i < columns * t.words; i += blockDim.x) t.sets[i] = 0;
  sync_block();
  bool twice = false;
  auto take = [&](u32 i, i64 found) {
    u32 token = i / topk, mine = 1u << token % kTallied, word = token / kTallied;
    bool none = found >= (i64)a.c.experts;
    if (none) atomic_min(&problem, (u64)token << 16 | (i - token * topk) << 8 | kNoExpert);
    i32 expert = none || found < 0 ? -1 : (i32)found;
    t.picks[i] = expert;
    if (expert < 0) return;
    twice |= (atomic_or(&t.sets[expert * t.words + word], mine) & mine) != 0;
  };
#pragma unroll
  for (u32 n = 0; n < FirstPicks::kCount; n++)
    if (FirstPicks::at(n) < pairs) take(FirstPicks::at(n), first.ids[n]);
#pragma unroll 1
  for (u32 i = FirstPicks::at(FirstPicks::kCount); i < pairs; i += blockDim.x) take(i, given_pick(a, i));
  bool any_twice = sync_block_or(twice) != 0;
  join_sets(a.c, t);
  if (!any_twice) return problem;
  // The first of the selections of the same expert counts.
#pragma unroll 1
  for (u32 i = threadIdx.x; i < pairs; i += blockDim.x) {
    u32 token = i / topk, k = i - token * topk;
    for (u32 other = token * topk; other < i; other++)
      if (t.picks[i] >= 0 && t.picks[other] == t.picks[i])
        atomic_min(&problem, (u64)token << 16 | k << 8 | kTwice);
  }
  sync_block();
  return problem;
}

// Pieces of a row without scales, and with them.
__device__ inline u32 row_pieces(const DispatchArgs& a) { return (u32)(a.row_bytes / 16); }
__device__ inline u32 sent_pieces(const DispatchArgs& a) { return row_pieces(a) + (a.scale_words + 3) / 4; }

// Casts 16 channels a thread, 8 threads a group. The whole block.
template <u32 N>
__device__ TY_INLINED void cast_pieces(const DispatchArgs& a, u32 token, const SentTables& t, uint4 (&row)[N]) {
  constexpr u32 kThreads = kGroup / 16;
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    u32 first = piece_at(j) * 16;
    bool inside = first < a.hidden;
    Channels c[2] = {};
#pragma unroll
    for (u32 half = 0; half < 2 && inside; half++) c[half].load(a, (u64)token * a.hidden + first + 8 * half);
    float amax = 1e-4f;
#pragma unroll
    for (u32 i = 0; i < 16; i++) amax = fmaxf(amax, fabsf(c[i / 8].x[i % 8]));
    for (u32 other = kThreads / 2; other > 0; other /= 2) amax = fmaxf(amax, shfl_xor(amax, other));
    float2 factor = group_scale(amax, a.cast);
    if (!inside) continue;
    u32 codes[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++)
      codes[i] = c[i / 2].codes(i % 2 * 2, factor.x) | c[i / 2].codes(i % 2 * 2 + 1, factor.x) << 16;
    row[j] = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    if (piece_at(j) % kThreads != 0) continue;
    u32 group = first / kGroup;
    if (a.cast != kCastUe8m0)
      t.scales[group] = bits_of(factor.y);
    else
      reinterpret_cast<u8*>(t.scales)[group] = (u8)(bits_of(factor.y) >> 23);
  }
  sync_block();
}

// The row of a token, and its scales behind it. The whole block.
template <u32 N>
__device__ TY_INLINED void load_row(const DispatchArgs& a, u32 token, const SentTables& t, uint4 (&row)[N]) {
  u32 pieces = row_pieces(a);
  if (a.cast != 0) {
    cast_pieces(a, token, t, row);
  } else {
    const uint4* from = reinterpret_cast<const uint4*>(a.x + (u64)token * a.row_bytes);
#pragma unroll
    for (u32 j = 0; j < N; j++)
      if (piece_at(j) < pieces) row[j] = load_16(from + piece_at(j));
  }
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    u32 piece = piece_at(j);
    if (piece < pieces || piece >= sent_pieces(a)) continue;
    u32 word[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
      u32 at = 4 * (piece - pieces) + i;
      u64 given = (u64)token * a.scale_stride[0] + (u64)at * a.scale_stride[1];
      word[i] = at >= a.scale_words ? 0 : a.cast != 0 ? t.scales[at] : a.scales[given];
    }
    row[j] = make_uint4(word[0], word[1], word[2], word[3]);
  }
}

// Sends a row and its records to each rank that the token selects. The whole block.
template <u32 N, class Up>
__device__ TY_INLINED void send_row(const StagedDispatchArgs& args, const Up& up, const SentTables& t, u32 token,
                                    const uint4 (&row)[N]) {
  const DispatchArgs& a = args.dispatch;
  u32 lane = lane_id(), topk = a.c.topk, pieces = sent_pieces(a);
  u64 from = (u64)token * topk + lane, place = place_of(a.c, a.c.rank, token);
  i32 expert = lane < topk ? t.picks[from] : -1;
  u32 rank = expert >= 0 ? a.c.rank_of(expert) : 0;
  Lanes leaders = ballot(stands_for(expert >= 0, rank));
  u32 key = key_of(row, pieces);
#pragma unroll 1
  for (Lanes left = leaders; left != 0; left &= left - 1) {
    u32 d = shfl(rank, first_of(left));
    store_staged(staged_row(a.c, args.staging, up, d, place), row, pieces, key);
  }
  if (wave_id() == 0 && lane < topk && !a.replay) a.r.topk[from] = expert;
  if (wave_id() != block_waves() - 1) return;
  float weight = lane < topk && a.weights ? a.weights[from] : 0.0f;
  u32 local = a.c.local_experts(), named = expert >= 0 ? t.before(expert, token) : 0;
  if (expert >= 0) named |= (expert - rank * local) << 16;
#pragma unroll 1
  for (Lanes left = leaders; left != 0; left &= left - 1) {
    u32 d = shfl(rank, first_of(left));
    uint4* record = staged_record(a.c, args.staging, up, d, place);
    if (lane == 0) store_entry(record, a.c.epoch(), key, 0);
    bool here = expert >= 0 && rank == d;
    if (lane < topk) store_entry(record + 1 + lane, a.c.epoch(), here ? named : ~0u, bits_of(weight));
  }
}

// Reports to each rank which tokens are sent, and how many rows each of its experts gets. All blocks
// that send.
template <class Up>
__device__ TY_INLINED void report_counts(const StagedDispatchArgs& args, const Up& up, const SentTables& t,
                                      const Portion& portion) {
  const Common& c = args.dispatch.c;
  u32 words = report_words(c, args.staging), all = c.ranks * words;
#pragma unroll 1
  for (u32 i = portion.first + portion.step * threadIdx.x; i < all; i += portion.step * blockDim.x) {
    u32 d = i / words, w = i - d * words;
    u32 value = w < t.words ? t.sets[(c.experts + d) * t.words + w]
                            : t.size(d * c.local_experts() + w - t.words);
    store_relaxed(staged_word(c, args.staging, up, d, c.rank, w), (u64)c.epoch() << 32 | value);
  }
}

// Loads the first row of a block that sends, before the number of tokens is known. The whole block.
template <u32 N>
__device__ TY_INLINED void load_first_row(const DispatchArgs& a, const Part& part, const SentTables& t,
                                          uint4 (&row)[N]) {
  if (!part.sends) return;
  // A zero behind the last scale stays.
  for (u32 i = threadIdx.x; a.cast != 0 && i < a.scale_words; i += blockDim.x) t.scales[i] = 0;
  sync_block();
  if (part.sending.first < a.c.input_rows) load_row(a, part.sending.first, t, row);
}

// Sends what begins with the row that `load_first_row` has loaded. The whole block.
template <u32 N, class Up>
__device__ TY_INLINED void send_rows(const StagedDispatchArgs& args, const Up& up, const SentTables& t,
                                     const FirstPicks& first, const Part& part, const Heads& heads,
                                     uint4 (&row)[N]) {
  const DispatchArgs& a = args.dispatch;
  u32 tokens = a.c.tokens();
  u64 problem = read_routing(a, t, first, tokens);
  bool enters = problem == ~0ull;
  if (heads.posts()) {
    if (threadIdx.x == 0 && !a.replay) *a.r.note = {a.c.epoch() | (u64)tokens << 32, 0};
    if (!enters) {
      if (threadIdx.x == 0) a.c.state->problem = problem;
      sync_block();
    }
    heads.post(a.c, up, {enters ? kEnter : kRefuseRoute, sent_pieces(a)}, a.topk_idx,
               [&](u32 peer) { return t.size(a.c.experts + peer); });
    if (!enters) {
      sync_block();
      if (threadIdx.x == 0) a.c.state->problem = ~0ull;
    }
  }
  if (!enters) return;
  report_counts(args, up, t, part.sending);
#pragma unroll 1
  for (u32 token = part.sending.first; token < tokens;) {
    send_row(args, up, t, token, row);
    token += part.sending.step;
    if (token < tokens) load_row(a, token, t, row);
  }
}

// The tables of a receiving block about all ranks, in shared memory.
struct ComingTables {
  u32* heard;   // [R, kHead]
  u32* reports; // [R, token_words + El]: as received
  u32* base;    // [R, El]: rows of an expert from the ranks before
  u32* first;   // [R + 1]: first of each source's rows here, then N
  u32 words, local, token_words;

  __device__ ComingTables(const Common& c, const Staging& s, u8* shared)
      : words(report_words(c, s)), local(c.local_experts()), token_words(s.token_words) {
    heard = reinterpret_cast<u32*>(shared);
    reports = heard + c.ranks * kHead, base = reports + c.ranks * words, first = base + c.ranks * local;
  }
  __device__ u32 rows(u32 source, u32 expert) const { return reports[source * words + token_words + expert]; }
};

// One of the rows that arrive.
struct ComingRow {
  u32 source, token;

  // The row that is `row`-th in order of sources, then of tokens.
  __device__ ComingRow(const ComingTables& t, u32 row) : source(0) {
    while (row >= t.first[source + 1]) source++;
    const u32* set = t.reports + source * t.words;
    u32 left = row - t.first[source], w = 0;
    for (u32 count; left >= (count = popc(set[w])); w++) left -= count;
    token = w * kTallied + nth_bit(set[w], left);
  }
};

// A first read of this thread's first word of the reports about rows, which may not have arrived.
template <class Up>
__device__ u64 look_at_counts(const StagedDispatchArgs& args, const Up& up, const ComingTables& t) {
  const Common& c = args.dispatch.c;
  u32 source = threadIdx.x / t.words, w = threadIdx.x - source * t.words;
  return source < c.ranks ? load_relaxed(staged_word(c, args.staging, up, c.rank, source, w)) : 0;
}

// Receives the reports of all ranks about their rows, once a block, and places the rows; `seen` is from
// `look_at_counts`. False if a wait was ended.
template <class Up>
__device__ TY_INLINED bool poll_counts(const StagedDispatchArgs& args, const Up& up, const ComingTables& t,
                                       u64 seen, Guard& guard) {
  const Common& c = args.dispatch.c;
  u32 all = c.ranks * t.words;
  u64 epoch = c.epoch();
#pragma unroll 1
  for (u32 i = threadIdx.x; i < all; i += blockDim.x, seen = 0) {
    u32 source = i / t.words, w = i - source * t.words;
    const u64* at = staged_word(c, args.staging, up, c.rank, source, w);
    t.reports[i] = poll_seen(at, seen, {kPhaseEntry, source, w, epoch}, guard);
  }
  if (!sync_block_and(!guard.ended())) return false;
#pragma unroll 1
  for (u32 e = threadIdx.x; e < t.local; e += blockDim.x)
    for (u32 s = 0, sum = 0; s < c.ranks; s++) t.base[s * t.local + e] = sum, sum += t.rows(s, e);
#pragma unroll 1
  for (u32 s = threadIdx.x; s < c.ranks; s += blockDim.x) {
    u32 rows = 0;
    for (u32 w = 0; w < t.token_words; w++) rows += popc(t.reports[s * t.words + w]);
    t.first[s + 1] = rows;
  }
  sync_block();
  if (threadIdx.x == 0) {
    t.first[0] = 0;
    for (u32 s = 0; s < c.ranks; s++) t.first[s + 1] += t.first[s];
  }
  sync_block();
  return true;
}

// The output of this rank, with memory for all rows that may arrive.
struct PackedOutput {
  u8* base;
  Region at;

  template <class Up>
  __device__ PackedOutput(const DispatchArgs& a, const Up& up)
      : base(up.peer_ptr(kArena, a.c.rank, a.region)),
        at(a.region_shape(), a.most_tokens(), (u64)a.c.local_experts() * a.most_tokens()) {}
  template <class T>
  __device__ T* array(u64 offset) const { return reinterpret_cast<T*>(base + offset); }
};

// Writes the counts into this rank's region, and the facts for its handle; then reports to the host. One
// block.
template <class Up>
__device__ void note_coming(const DispatchArgs& a, const Up& up, const ComingTables& t, const PackedOutput& out,
                            const Decision& d, Guard& guard) {
  u32 ranks = a.c.ranks, tokens = t.first[ranks];
  u64* totals = out.array<u64>(out.at.totals);
  u32* counts = out.array<u32>(out.at.expert_counts);
  u64* ranges = out.array<u64>(out.at.ranges);
  for (u32 s = threadIdx.x; s < ranks; s += blockDim.x) {
    out.array<u32>(out.at.rank_counts)[s] = t.first[s + 1] - t.first[s];
    out.array<u32>(out.at.rank_ends)[s] = t.first[s + 1];
    a.r.source_rows[s] = t.first[s];
  }
  for (u32 i = threadIdx.x; i < ranks * t.local; i += blockDim.x) {
    u32 e = i / ranks, s = i - e * ranks, before = t.base[s * t.local + e];
    ranges[i] = t.rows(s, e) | (u64)before << 32;
    if (s + 1 == ranks) counts[e] = before + t.rows(s, e);
  }
  if (threadIdx.x >= kWave) return;
  u32 mine = 0, rows;
  for (u32 e = lane_id(); e < t.local; e += kWave)
    mine += t.base[(ranks - 1) * t.local + e] + t.rows(ranks - 1, e);
  sum_before(mine, &rows);
  if (threadIdx.x != 0) return;
  totals[0] = tokens, totals[1] = rows;
  a.r.source_rows[ranks] = tokens;
  a.r.note->rows = tokens;
  u64 heard = now_ns();
  if (!a.c.no_host_sync) {
    a.c.outcome->tokens = tokens;
    a.c.outcome->rows = (u64)t.local * a.most_tokens();
  }
  tell(a.c, up, d, &t.heard[d.rank * kHead], guard);
  a.c.trace->heard = heard;
}

// A row that arrives, with the first reads of it and of its record.
template <u32 N>
struct SeenRow {
  u32 number, source, token;
  uint4 row[N], key, entry;

  template <class Up>
  __device__ TY_INLINED void look(const StagedDispatchArgs& args, const Up& up, const ComingTables& t, u32 which) {
    const Common& c = args.dispatch.c;
    ComingRow coming(t, which);
    number = which, source = coming.source, token = coming.token;
    u64 place = place_of(c, source, token);
    const uint4* record = staged_record(c, args.staging, up, c.rank, place);
    key = load_16_relaxed(record);
    entry = lane_id() < c.topk ? load_16_relaxed(record + 1 + lane_id()) : make_uint4(0, 0, 0, 0);
    look_at_row(staged_row(c, args.staging, up, c.rank, place), row, sent_pieces(args.dispatch));
  }
};

// Rows that a block receives together: two, where registers allow it.
template <u32 N>
constexpr u32 kRowsAtOnce = N < kMostPieces ? 2 : 1;

// Removes a row from staging and stores it for each of its experts. The whole block.
template <u32 N, class Up>
__device__ TY_INLINED void receive_row(const StagedDispatchArgs& args, const Up& up, const ComingTables& t,
                                       const PackedOutput& out, SeenRow<N>& coming, Guard& guard) {
  const DispatchArgs& a = args.dispatch;
  u32 lane = lane_id(), topk = a.c.topk, own = row_pieces(a), pieces = sent_pieces(a), most = (u32)a.most_tokens();
  u32 number = coming.number;
  u64 place = place_of(a.c, coming.source, coming.token);
  uint4* row = staged_row(a.c, args.staging, up, a.c.rank, place);
  uint4(&seen)[N] = coming.row;
  const uint4* record = staged_record(a.c, args.staging, up, a.c.rank, place);
  What what{kPhaseRows, coming.source, coming.token, a.c.epoch()};
  u32 key = poll_record(record, coming.key, what, guard).x;
  uint2 entry = make_uint2(~0u, 0);
  if (lane < topk) entry = poll_record(record + 1 + lane, coming.entry, what, guard);
  u32 expert = entry.x >> 16;
  bool here = expert < t.local && !guard.ended();
  u32 at = here ? t.base[coming.source * t.local + expert] + (entry.x & 0xffff) : most;
  i32 slot = at < most ? (i32)(expert * most + at) : -1;
  Lanes copies = ballot(slot >= 0);
#pragma unroll
  for (u32 j = 0; j < N; j++)
    if (piece_at(j) < pieces) seen[j] = take_piece(row + piece_at(j), seen[j], key, what, guard);
  bool well = !guard.ended();
#pragma unroll 1
  for (Lanes left = copies; left != 0; left &= left - 1) {
    u64 to = (u64)shfl(slot, first_of(left));
    uint4* x = reinterpret_cast<uint4*>(out.base + to * a.row_bytes);
    u32* scales = out.array<u32>(out.at.scales) + to * a.scale_words;
#pragma unroll
    for (u32 j = 0; j < N; j++) {
      u32 piece = piece_at(j);
      if (piece < own && well) store_16(x + piece, seen[j]);
      if (piece < own || piece >= pieces || !well) continue;
      u32 word[4] = {seen[j].x, seen[j].y, seen[j].z, seen[j].w};
#pragma unroll
      for (u32 i = 0; i < 4; i++)
        if (4 * (piece - own) + i < a.scale_words) scales[4 * (piece - own) + i] = word[i];
    }
  }
  if (wave_id() != 0 || !well) return;
  u32 source = coming.source * a.c.max_tokens + coming.token;
  if (lane < topk) out.array<i32>(out.at.slots)[(u64)number * topk + lane] = slot;
  if (lane == 0) out.array<u32>(out.at.landed_source)[number] = source;
  if (slot < 0) return;
  out.array<u32>(out.at.source)[slot] = source;
  if (a.weights) out.array<float>(out.at.weights)[slot] = float_of(entry.y);
}

// The whole block.
template <u32 N, class Up>
__device__ TY_INLINED void receive_rows(const StagedDispatchArgs& args, const Up& up, u8* shared, const Part& part,
                                        Guard& guard) {
  const DispatchArgs& a = args.dispatch;
  ComingTables t(a.c, args.staging, shared);
  u64 heads = look_at_heads(a.c, up), counts = look_at_counts(args, up, t);
  Decision d{};
  if (!poll_heads(a.c, up, heads, t.heard, d, guard)) return mend_staging(a.c, args.staging, up, guard);
  if (d.code != kGo) return end_refused(a.c, args.staging, up, t.heard, d, part, guard);
  if (!poll_counts(args, up, t, counts, guard)) return mend_staging(a.c, args.staging, up, guard);
  PackedOutput out(a, up);
  if (part.tells()) note_coming(a, up, t, out, d, guard);
  u32 rows = t.first[a.c.ranks], step = part.receiving.step;
  constexpr u32 kAtOnce = kRowsAtOnce<N>;
#pragma unroll 1
  for (u32 row = part.receiving.first; row < rows; row += kAtOnce * step) {
    SeenRow<N> coming[kAtOnce];
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++)
      if (row + i * step < rows) coming[i].look(args, up, t, row + i * step);
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++)
      if (row + i * step < rows) receive_row<N>(args, up, t, out, coming[i], guard);
  }
  mend_staging(a.c, args.staging, up, guard);
}

template <u32 N, class Up>
__device__ TY_INLINED void exchange_rows(const StagedDispatchArgs& args, const Up& up, u8* shared) {
  const DispatchArgs& a = args.dispatch;
  Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  Part part(args.staging);
  Trace& trace = *a.c.trace;
  if (part.posts() && threadIdx.x == 0) trace.begun = now_ns();
  Heads heads(a.c, part);
  warm(args);
  FirstPicks first(a, part.sends);
  SentTables t(a, args.staging, shared);
  uint4 row[N];
  u32 tokens = a.replay ? 0 : a.tokens ? min(load_device(a.tokens), a.c.input_rows) : a.c.input_rows;
  bool runs = begin_staged(a.c, args.staging, a.r.note, !a.replay, tokens,
                           [&] { load_first_row(a, part, t, row); });
  if (!runs) return;
  heads.open(a.c);
  if (part.sends) send_rows(args, up, t, first, part, heads, row);
  sync_block();
  if (part.posts() && threadIdx.x == 0) trace.counted = trace.moved = now_ns();
  if (part.receives) receive_rows<N>(args, up, shared, part, guard);
  if (part.tells() && threadIdx.x == 0) trace.arrived = now_ns();
}

template <class Up>
__device__ TY_INLINED void dispatch_staged(const StagedDispatchArgs& args, const Up& up, u8* shared) {
  u32 each = (sent_pieces(args.dispatch) + blockDim.x - 1) / blockDim.x;
  if (each <= 1)
    exchange_rows<1>(args, up, shared);
  else if (each == 2)
    exchange_rows<2>(args, up, shared);
  else
    exchange_rows<kMostPieces>(args, up, shared);
}

}  // namespace ty
