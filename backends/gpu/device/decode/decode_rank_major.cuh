// Low-latency dispatch to rank-major rows. See decode.cuh.
//
// A source knows the place of each of its rows: the number of the token among its tokens for that rank. So a receiver
// needs no counts before it stores a row, and no block waits for heads. A source sends a record for each of the M
// tokens of the call to each rank. Where a token has no row there, the record says so, and names a place behind the
// rows of the source, which the receiver closes: there are as many such tokens as such places.
//
// A rank that refuses sends nothing. A wait that lasts looks at the head of its source. So rows of all other ranks are
// taken out of the inbox, whatever becomes of the operation.
#pragma once
#include "decode_dispatch.cuh"

namespace ty {

// In the second half of the first entry of a record: the token has no row here, and the other bits are a place.
constexpr u32 kRowless = 1u << 31;

// The output of this rank: M places for each source.
struct RankMajorOutput {
  u8* base;
  Region at;

  __device__ RankMajorOutput(const DispatchArgs& a, u8* region)
      : base(region), at(a.region_shape(), a.most_tokens(), 0) {}
  template <class T>
  __device__ T* array(u64 offset) const { return reinterpret_cast<T*>(base + offset); }
};

// A token of a source, and its place among those of the source; or the place that is closed for it.
struct RankMajorRow {
  u32 source, token, index;

  __device__ u64 place(const DispatchArgs& a) const { return (u64)source * a.call_tokens + index; }
};

// The place that a token of this rank has at a rank, as records have it. `t.join` has run.
__device__ inline u32 place_at(const SentTables& t, u32 rank, u32 token, u32 tokens) {
  u32 column = t.experts + rank;
  bool goes = token < tokens && (t.sets[column * t.words + token / kTallied] >> token % kTallied & 1) != 0;
  if (goes) return t.before(column, token);
  u32 rows = t.size(column);
  return kRowless | (rows + token - (token < tokens ? t.before(column, token) : rows));
}

// Stores a row, and what goes with it; `entry` is of this lane's selection. The whole block, each warp by itself.
template <u32 N>
__device__ TY_INLINED void store_rank_major(const DecodeDispatchArgs& args, const RankMajorOutput& out,
                                            const RankMajorRow& from, const Entry& entry, const uint4 (&row)[N]) {
  const DispatchArgs& a = args.dispatch;
  u32 lane = lane_id(), own = row_pieces(a), pieces = sent_pieces(a);
  u64 at = from.place(a);
  uint4* x = reinterpret_cast<uint4*>(out.base + at * a.row_bytes);
  u32* scales = out.array<u32>(out.at.scales) + at * a.scale_words;
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    u32 piece = piece_at(j), first = 4 * (piece - own);
    if (piece < own) store_16(x + piece, row[j]);
    if (piece < own || piece >= pieces) continue;
    u32 word[4] = {row[j].x, row[j].y, row[j].z, row[j].w};
#pragma unroll
    for (u32 i = 0; i < 4; i++)
      if (first + i < a.scale_words) scales[first + i] = word[i];
  }
  // The last warp has the fewest pieces.
  if (wave_id() != block_waves() - 1) return;
  if (lane < a.c.topk) {
    out.array<u32>(out.at.ids)[at * a.c.topk + lane] = entry.named;
    if (a.weights) out.array<float>(out.at.weights)[at * a.c.topk + lane] = entry.weight;
  }
  if (lane != 0) return;
  out.array<u32>(out.at.source)[at] = from.source * a.call_tokens + from.token;
  args.sources[at] = from.source * a.c.max_tokens + from.token;
}

// Marks a place that has no token, and clears it if the call asks for that. The whole block, each warp by itself.
__device__ inline void close_place(const DecodeDispatchArgs& args, const RankMajorOutput& out,
                                   const RankMajorRow& from) {
  const DispatchArgs& a = args.dispatch;
  u64 at = from.place(a);
  if (a.zero_padding) {
    uint4* x = reinterpret_cast<uint4*>(out.base + at * a.row_bytes);
    for (u32 i = threadIdx.x; i < row_pieces(a); i += blockDim.x) store_16(x + i, make_uint4(0, 0, 0, 0));
    u32* scales = out.array<u32>(out.at.scales) + at * a.scale_words;
    for (u32 i = threadIdx.x; i < a.scale_words; i += blockDim.x) scales[i] = 0;
  }
  if (wave_id() != block_waves() - 1) return;
  u32 lane = lane_id();
  if (lane < a.c.topk) {
    out.array<u32>(out.at.ids)[at * a.c.topk + lane] = ~0u;
    if (a.weights && a.zero_padding) out.array<float>(out.at.weights)[at * a.c.topk + lane] = 0.0f;
  }
  if (lane != 0) return;
  out.array<u32>(out.at.source)[at] = ~0u;
  args.sources[at] = ~0u;
}

// --- The sending part

// A token of this rank, and this lane's selection of it.
struct RankMajorToken {
  u32 token;
  bool is_there;  // behind T, a token has no rows
  i32 expert = -1;
  u32 rank = 0;

  __device__ RankMajorToken(const DispatchArgs& a, const SentTables& t, u32 token, u32 tokens)
      : token(token), is_there(token < tokens) {
    if (!is_there || lane_id() >= a.c.topk) return;
    expert = t.picks[(u64)token * a.c.topk + lane_id()];
    if (expert >= 0) rank = a.c.rank_of((u32)expert);
  }
  __device__ bool is_at(u32 d) const { return expert >= 0 && rank == d; }
};

// Stores this rank's row for itself at its place, and notes where it is for the combine.
template <u32 N, bool kCast>
__device__ TY_INLINED void keep_own(const DecodeDispatchArgs& args, const SentTables& t, const RankMajorOutput& out,
                                    const RankMajorToken& sent, const SentRow<N, kCast>& row, u32 index) {
  const DispatchArgs& a = args.dispatch;
  u32 me = a.c.rank, lane = lane_id();
  bool here = sent.is_at(me), has_row = (index & kRowless) == 0;
  RankMajorRow from{me, sent.token, index & ~kRowless};
  if (has_row)
    store_rank_major(args, out, from, {here ? sent.expert - me * t.local : ~0u, here ? row.weight : 0.0f}, row.piece);
  else
    close_place(args, out, from);
  // One selection stands for the row, which counts once.
  bool stands = stands_for(here, me);
  if (wave_id() == 0 && sent.is_there && lane < a.c.topk)
    a.r.places[(u64)sent.token * a.c.topk + lane] = stands ? (u32)from.place(a) : ~0u;
}

// Sends a token's rows and records to all ranks. The whole block.
template <u32 N, bool kCast, class Up>
__device__ TY_INLINED void send_rank_major(const DecodeDispatchArgs& args, const Up& up, const SentTables& t,
                                           const RankMajorOutput& out, u32 token, const SentRow<N, kCast>& row) {
  const DispatchArgs& a = args.dispatch;
  const Common& c = a.c;
  u32 lane = lane_id(), tokens = c.tokens(), pieces = sent_pieces(a), epoch = c.epoch();
  RankMajorToken sent(a, t, token, tokens);
  u32 key = sent.is_there ? key_of(row.piece, pieces) : 0;
  bool is_last = wave_id() == block_waves() - 1;
  u32 index = 0;
#pragma unroll 1
  for (u32 next = 0; next < c.ranks; next++) {
    // Peers first, from the next rank on, so that ranks do not all begin with the same one.
    u32 behind = c.rank + 1 + next, d = behind < c.ranks ? behind : behind - c.ranks;
    if (next % kWave == 0) {
      u32 mine = behind + lane;
      index = next + lane < c.ranks ? place_at(t, mine < c.ranks ? mine : mine - c.ranks, token, tokens) : 0;
    }
    u32 at = shfl(index, next % kWave);
    if (d == c.rank) {
      keep_own(args, t, out, sent, row, at);
      continue;
    }
    u64 place = place_of(c, writer_at(c, d), token);
    if (!(at & kRowless)) store_decode_row(decode_row(c, args.decode, up, d, place), row.piece, pieces, key);
    if (!is_last) continue;
    uint4* record = decode_record(c, args.decode, up, d, place);
    if (lane == 0) store_entry(record, epoch, key, at);
    bool here = sent.is_at(d);
    if (!(at & kRowless) && lane < c.topk)
      store_entry(record + 1 + lane, epoch, here ? sent.expert - d * t.local : ~0u, here ? bits_of(row.weight) : 0);
  }
  if (wave_id() == 0 && sent.is_there && lane < c.topk && !a.replay)
    a.r.topk[(u64)token * c.topk + lane] = sent.expert;
}

// Enters at every peer. The block that posts heads, all of it; `t.join` has run if the rank `enters`.
template <class Up>
__device__ TY_INLINED void post_rank_major_heads(const DispatchArgs& a, const Up& up, const SentTables& t,
                                                 const Heads& heads, bool enters) {
  if (threadIdx.x == 0 && !a.replay) *a.r.note = {a.c.epoch() | (u64)a.c.tokens() << 32, 0};
  // Rows of this rank for itself do not pass its inbox.
  heads.post(a.c, up, {enters ? kEnter : kRefuseInput, sent_pieces(a)}, a.topk_idx,
             [&](u32 peer) { return peer == a.c.rank ? 0 : t.size(t.experts + peer); });
}

// Sends what begins with the row that is loaded. The whole block.
template <u32 N, bool kCast, class Up>
__device__ TY_INLINED void send_all_rank_major(const DecodeDispatchArgs& args, const Up& up, const SentTables& t,
                                               const FirstPicks& first, const Part& part, const Heads& heads,
                                               SentRow<N, kCast>& row) {
  const DispatchArgs& a = args.dispatch;
  u32 tokens = a.c.tokens();
  u64 problem = read_routing(args, t, first, tokens);
  bool enters = problem == ~0ull;
  if (enters) {
    t.join();
  } else if (heads.posts()) {
    if (threadIdx.x == 0) a.c.state->problem = problem;
    sync_block();
  }
  if (heads.posts()) post_rank_major_heads(a, up, t, heads, enters);
  if (!enters) {
    sync_block();
    if (heads.posts() && threadIdx.x == 0) a.c.state->problem = ~0ull;
    return;
  }
  if (part.sending.first < part.reporting) report_counts(args, up, t, {part.sending.first, part.reporting});
  RankMajorOutput out(a, up.own_arena(a.region));
#pragma unroll 1
  for (u32 token = part.sending.first; token < a.call_tokens;) {
    if (token < tokens) row.finish(a, token, t);
    send_rank_major(args, up, t, out, token, row);
    token += part.sending.step;
    if (token < tokens) row.load(a, token);
  }
}

// --- The receiving part

// M of the call that a head names; 0 where its rank does not send rows of this operation.
__device__ inline u32 tokens_of(const DispatchArgs& a, const u32* head) {
  u64 signature = signature_of(head), own = without_tokens(a.c.signature);
  if (!takes_part(head) || without_tokens(signature) != own || head[kHeadOrigin] != a.c.origin()) return 0;
  if (signature == a.c.signature) return a.call_tokens;
  return signature == own ? a.c.max_tokens : (u32)(signature >> 46) << 1 | (u32)(signature >> 19 & 1);
}

// Whether a token's record does not come: its source has entered, and does not send it. One thread.
template <class Up>
__device__ TY_COLD bool never_comes(const DispatchArgs& a, Up up, u32 source, u32 token) {
  const Common& c = a.c;
  u32 head[kHead];
  for (u32 w = 0; w < kHead; w++) {
    u64 seen = load_relaxed(entry_word(c, up, c.rank, source, w));
    if (seen >> 32 != c.epoch()) return false;
    head[w] = (u32)seen;
  }
  return token >= tokens_of(a, head);
}

// A token of a source, as it arrives.
template <u32 N>
struct ArrivingRankMajor {
  static constexpr u32 kLooksApart = 256;
  u32 source, token;
  uint4 first;  // of its record
  uint4 piece[N];
  SeenEntry entry;
  bool comes;

  __device__ bool is_known(u32 epoch) const { return first.y == epoch && first.w == epoch; }
  __device__ bool has_row() const { return comes && !(first.z & kRowless); }

  template <class Up>
  __device__ DecodePlace place(const DecodeDispatchArgs& args, const Up& up) const {
    const Common& c = args.dispatch.c;
    return {c, args.decode, up, place_of(c, source, token), sent_pieces(args.dispatch)};
  }
  // First reads, of what may not have arrived.
  template <class Up>
  __device__ TY_INLINED void look(const DecodeDispatchArgs& args, const Up& up, u32 from, u32 number) {
    source = from, token = number, comes = true;
    DecodePlace at = place(args, up);
    first = load_16_relaxed(at.record);
    entry.is_mine = wave_id() == block_waves() - 1 && lane_id() < args.dispatch.c.topk;
    entry.look(at.record, 0);
#pragma unroll
    for (u32 j = 0; j < N; j++)
      if (piece_at(j) < at.pieces) piece[j] = load_16_relaxed(at.row + piece_at(j));
  }
  template <class Up>
  __device__ TY_INLINED void poll(const DecodeDispatchArgs& args, const Up& up, const DecodePlace& at, Guard& guard) {
    const Common& c = args.dispatch.c;
    u32 epoch = c.epoch(), looks = 0;
    auto look_again = [&]() -> u64 {
      if (!is_known(epoch)) first = load_16_relaxed(at.record);
      if (is_known(epoch) && (first.z & kRowless)) return epoch;
      bool there = entry.is_there(at.record, epoch) && is_known(epoch);
#pragma unroll
      for (u32 j = 0; j < N; j++)
        if (piece_at(j) < at.pieces && !has_come(piece[j])) piece[j] = load_16_relaxed(at.row + piece_at(j));
#pragma unroll
      for (u32 j = 0; j < N; j++) there &= piece_at(j) >= at.pieces || has_come(piece[j]);
      if (there) return epoch;
      bool asks = ++looks % kLooksApart == 0 && !is_known(epoch);
      if (asks && never_comes(args.dispatch, up, source, token)) comes = false;
      return comes ? 0 : epoch;
    };
    guard.until({kPhaseRows, source, token, epoch}, look_again, [&](u64 found) { return found == epoch; });
  }
  // Takes the token out of the inbox. The whole block, each warp by itself.
  template <class Up>
  __device__ TY_INLINED void receive(const DecodeDispatchArgs& args, const Up& up, const RankMajorOutput& out,
                                     Guard& guard) {
    DecodePlace at = place(args, up);
    poll(args, up, at, guard);
    bool ended = !all(!guard.ended());
    if (ended || !all(comes)) return;
    RankMajorRow from{source, token, first.z & ~kRowless};
    // A source that names a larger M than this rank has places of its own.
    bool is_place = from.index < args.dispatch.call_tokens;
    if (!has_row() && is_place) close_place(args, out, from);
    if (!has_row()) return;
#pragma unroll
    for (u32 j = 0; j < N; j++) {
      if (piece_at(j) >= at.pieces) continue;
      store_16_relaxed(at.row + piece_at(j), make_uint4(0, 0, 0, 0));
      piece[j] = with_key(piece[j], first.x);
    }
    if (is_place) store_rank_major(args, out, from, {entry.seen.x, float_of(entry.seen.z)}, piece);
  }
};

// Writes the counts into this rank's region, and the facts for its handle; then reports to the host. One block.
template <class Up>
__device__ void note_rank_major(const DecodeDispatchArgs& args, const Up& up, const ComingTables& t,
                                const RankMajorOutput& out, const Decision& d, Guard& guard) {
  const DispatchArgs& a = args.dispatch;
  u32 ranks = t.ranks, *ends = out.array<u32>(out.at.rank_ends), *counts = out.array<u32>(out.at.expert_counts);
  u64 heard = now_ns();
#pragma unroll 1
  for (u32 e = threadIdx.x; e < t.local; e += blockDim.x) {
    u32 rows = 0;
    for (u32 s = 0; s < ranks; s++) rows += t.rows(s, e);
    counts[e] = rows;
    if (args.decode.expert_totals) args.decode.expert_totals[e] += rows;
  }
  if (threadIdx.x >= kWave) return;
  RunningSum all;
#pragma unroll 1
  for (u32 from = 0; from < ranks; from += kWave) {
    u32 s = from + lane_id(), rows = 0;
    for (u32 w = 0; w < t.token_words && s < ranks; w++) rows += popc(t.set(s)[w]);
    u32 before = all.add(rows);
    if (s >= ranks) continue;
    out.array<u32>(out.at.rank_counts)[s] = a.r.counts[s] = rows;
    ends[s] = before + rows;
    a.r.source_rows[s] = s * a.call_tokens;
  }
  if (threadIdx.x != 0) return;
  // A combine may name each place.
  u32 places = ranks * a.call_tokens;
  u64* totals = out.array<u64>(out.at.totals);
  totals[0] = totals[1] = all.sum;
  a.r.source_rows[ranks] = places;
  a.r.note->rows = places;
  if (!a.c.no_host_sync) a.c.outcome->tokens = all.sum, a.c.outcome->rows = 0;
  tell(a.c, up, d, &t.heard[d.rank * kHead], guard);
  a.c.trace->entered = heard;
}

// The operation does not continue. Rows of ranks that name a larger M than this one are taken out of the inbox here.
// The whole block.
template <u32 N, class Up>
__device__ TY_COLD Guard end_rank_major(const DecodeDispatchArgs& args, Up up, const u32* heard, Decision d,
                                        RankMajorOutput out, Guard guard) {
  const Common& c = args.dispatch.c;
  if (threadIdx.x == 0) tell(c, up, d, &heard[d.rank * kHead], guard);
#pragma unroll 1
  for (u32 s = 0; s < c.ranks; s++) {
    if (s == c.rank) continue;
    u32 most = min(tokens_of(args.dispatch, &heard[s * kHead]), c.max_tokens);
#pragma unroll 1
    for (u32 token = args.dispatch.call_tokens; token < most; token++) {
      ArrivingRankMajor<N> coming;
      coming.look(args, up, s, token);
      DecodePlace at = coming.place(args, up);
      coming.poll(args, up, at, guard);
      for (u32 piece = threadIdx.x; piece < at.pieces && coming.has_row(); piece += blockDim.x)
        store_16_relaxed(at.row + piece, make_uint4(0, 0, 0, 0));
    }
  }
  return guard;
}

// Learns how the operation goes on, and reports it. One block.
template <u32 N, class Up>
__device__ TY_INLINED void settle_rank_major(const DecodeDispatchArgs& args, const Up& up, const ComingTables& t,
                                             const RankMajorOutput& out, Guard& guard) {
  bool there = look_at_entries(args, up, t, guard);
  there = sync_block_and(there && !guard.ended());
  if (!there && sync_block_or(guard.ended())) return;
  Decision d = decide_together<true>(args.dispatch.c, t.heard);
  if (d.code == kGo)
    note_rank_major(args, up, t, out, d, guard);
  else
    guard = end_rank_major<N>(args, up, t.heard, d, out, guard);
}

// The whole block.
template <u32 N, class Up>
__device__ TY_INLINED void receive_rank_major(const DecodeDispatchArgs& args, const Up& up, const ComingTables& t,
                                              const Part& part, Guard& guard) {
  const DispatchArgs& a = args.dispatch;
  const Common& c = a.c;
  RankMajorOutput out(a, up.own_arena(a.region));
  constexpr u32 kAtOnce = kRowsAtOnce<N>;
#pragma unroll 1
  for (u32 token = part.receiving.first; token < a.call_tokens; token += part.receiving.step) {
#pragma unroll 1
    for (u32 next = 1; next < c.ranks; next += kAtOnce) {
      ArrivingRankMajor<N> coming[kAtOnce];
#pragma unroll
      for (u32 n = 0; n < kAtOnce; n++) {
        u32 from = c.rank + next + n;
        if (next + n < c.ranks) coming[n].look(args, up, from < c.ranks ? from : from - c.ranks, token);
      }
#pragma unroll
      for (u32 n = 0; n < kAtOnce; n++)
        if (next + n < c.ranks) coming[n].receive(args, up, out, guard);
    }
  }
  if (part.tells()) settle_rank_major<N>(args, up, t, out, guard);
  empty_inbox_if_ended(c, args.decode, up, guard);
}

template <u32 N, bool kCast, class Up>
__device__ TY_INLINED void dispatch_rank_major(const DecodeDispatchArgs& args, const Up& far, u8* shared) {
  const DispatchArgs& a = args.dispatch;
  Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  Part part(args.decode);
  Trace& trace = *a.c.trace;
  Heads heads(a.c, args.decode, part);
  NearWindows<Up> up(a.c, far, shared);
  SentTables sent(a, args.decode, up.end());
  ComingTables coming(sent, sent.end(a));
  if (part.sends) sent.clear(a);
  if (threadIdx.x == 0) *coming.pending = a.c.ranks * kHead;
  warm(args);
  wait_for_kernel_ahead();
  let_kernel_behind_start();
  if (part.posts && threadIdx.x == 0) trace.begun = now_ns();
  // The block that reports the outcome receives heads.
  if (threadIdx.x == 0) begun_ns() = args.decode.waited_ns && part.tells() ? now_ns() : 0;
  FirstPicks first(a, part.sends);
  SentRow<N, kCast> row;
  u32 found = a.tokens && !a.replay ? load_device(a.tokens) : a.c.input_rows;
  DecodeTurn turn(a.c, args.decode, a.r.note, !a.replay, a.replay ? 0 : min(found, a.c.input_rows), [&] {
    if (part.sends && part.sending.first < a.c.input_rows) row.load(a, part.sending.first);
    if (part.sends && threadIdx.x == 0 && found > a.c.input_rows) *sent.problem = (u64)found << 16 | kTooMany;
  });
  if (!DecodeTurn::runs(a.c)) return;
  heads.open(a.c);
  if (part.sends) send_all_rank_major(args, up, sent, first, part, heads, row);
  if (part.posts && threadIdx.x == 0) trace.counted = now_ns();
  if (part.ends_sends() && threadIdx.x == 0) trace.moved = now_ns();
  if (part.receives) receive_rank_major<N>(args, up, coming, part, guard);
  turn.leave(a.c);
  if (part.tells() && threadIdx.x == 0) trace.arrived = now_ns();
}

}  // namespace ty
