// Low-latency dispatch to the packed layout: sends without a request, and spreads the rows that arrive. See
// decode.cuh.
//
// Every block reads all routing as sets of tokens, one per expert, so that counts and places are numbers of
// bits. A source reports which of its tokens are sent, and how many rows each expert gets; each block of a
// receiver reads that once, and knows the place of every row, in order of source ranks, then of tokens.
//
// Where one kernel sends and receives, the last row of each block is not sent to this rank: it is still in
// registers when the places are known, and is spread while rows of others are loaded.
#pragma once
#include "decode_send.cuh"
#include "tables.cuh"

namespace ty {

// A head holds an objection, or the wait for it was ended.
constexpr u32 kAgainst = 1u << 31;

// The tables of a receiving block about all ranks, in shared memory.
struct ComingTables {
  u32* pending; // heads' words that have not come, and kAgainst
  u32* heard;   // [R, kHead]
  u32* reports; // [R, token_words + El]: as received
  u32* base;    // [R, El]: rows of an expert from the ranks before
  u32* first;   // [R + 1]: first of each source's rows here, then N
  u32* arriving;  // [token_words * R + 1]: rows that arrive before each set of ComingRows, then all of them
  u32 ranks, words, local, token_words;

  __device__ ComingTables(const SentTables& t, u8* shared)
      : ranks(t.ranks), words(t.words + t.local), local(t.local), token_words(t.words) {
    pending = reinterpret_cast<u32*>(shared);
    heard = pending + 1;
    reports = heard + ranks * kHead, base = reports + ranks * words, first = base + ranks * local;
    arriving = first + ranks + 1;
  }
  __device__ u32 rows(u32 source, u32 expert) const { return reports[source * words + token_words + expert]; }
  __device__ const u32* set(u32 source) const { return reports + source * words; }
  // Rows of a source for this rank whose tokens are before a given one.
  __device__ u32 before(u32 source, u32 token) const {
    u32 count = 0, word = token / kTallied;
#pragma unroll 1
    for (u32 w = 0; w < word; w++) count += popc(set(source)[w]);
    return count + popc(set(source)[word] & ((1u << token % kTallied) - 1));
  }
};

// One of the rows for this rank.
struct ComingRow {
  u32 source, token;

  // Its number in order of sources, then of tokens.
  __device__ u32 number(const ComingTables& t) const { return t.first[source] + t.before(source, token); }
};

// The rows that are sent here, about in the order in which they come: by words of tokens, then by sources. All
// sources send their first tokens first.
struct ComingRows {
  const ComingTables& t;
  u32 me, kept;  // rows of this rank from token `kept` on are in registers
  u32 ranks_factor;

  __device__ u32 words() const { return t.token_words * t.ranks; }
  __device__ u32 rows() const { return t.arriving[words()]; }
  // The rows before each word of each source. One warp.
  __device__ TY_INLINED void count() const {
    RunningSum rows;
#pragma unroll 1
    for (u32 from = 0; from < words(); from += kWave) {
      u32 at = from + lane_id(), before = rows.add(at < words() ? popc(set(at)) : 0);
      if (at < words()) t.arriving[at] = before;
    }
    if (lane_id() == 0) t.arriving[words()] = rows.sum;
  }
  // The whole warp.
  __device__ TY_INLINED ComingRow at(u32 number) const {
    u32 at = 0;
#pragma unroll 1
    for (u32 from = 0; from < words(); from += kWave) {
      u32 next = from + lane_id() + 1, before = popc(ballot(next < words() && t.arriving[next] <= number));
      at += before;
      if (before < kWave) break;
    }
    u32 word = quotient(at, t.ranks, ranks_factor), found = set(at);
    return {at - word * t.ranks, word * kTallied + nth_bit(found, number - t.arriving[at])};
  }

 private:
  // The tokens of a word of a source.
  __device__ u32 set(u32 at) const {
    u32 word = quotient(at, t.ranks, ranks_factor), source = at - word * t.ranks, first = word * kTallied;
    u32 found = t.set(source)[word];
    if (source != me || kept >= first + kTallied) return found;
    return kept <= first ? 0 : found & ((1u << (kept - first)) - 1);
  }
};

// Receives heads and reports. Refused operations have no reports, so those are waited for without end only once all
// heads are there without an objection. False if one is not there. Warps by role: those that poll reports wait for
// those that poll heads.
template <class Up>
__device__ TY_INLINED bool look_at_entries(const DecodeDispatchArgs& args, const Up& up, const ComingTables& t,
                                           Guard& guard) {
  const Common& c = args.dispatch.c;
  u32 heads = c.ranks * kHead, waves = min((heads + kWave - 1) / kWave, block_waves() - 1), limit = waves * kWave;
  u64 epoch = c.epoch();
  bool there = true;
  if (threadIdx.x < limit) {
#pragma unroll 1
    for (u32 i = threadIdx.x; i < heads; i += limit) {
      u32 source = i / kHead, word = i % kHead;
      const u64* at = entry_word(c, up, c.rank, source, word);
      u32 value = poll_seen(at, 0, {kPhaseEntry, source, word, epoch}, guard);
      t.heard[i] = value;
      if (word == kHeadVerdict) note_wait(args.decode, source);
      if (guard.ended() || word_objects(c, word, value)) atomic_or(t.pending, kAgainst);
      atomic_add(t.pending, ~0u);
    }
    return true;
  }
#pragma unroll 1
  for (u32 i = threadIdx.x - limit; i < c.ranks * t.words; i += blockDim.x - limit) {
    u32 source = quotient(i, t.words, args.decode.report_factor), w = i - source * t.words;
    const u64* at = decode_word(c, args.decode, up, c.rank, source, w);
    u64 seen = load_relaxed(at);
    u32 pending = kAgainst;
    while (seen >> 32 != epoch && ((pending = atomic_or(t.pending, 0u)) & ~kAgainst) != 0) seen = load_relaxed(at);
    t.reports[i] = (u32)seen;
    if (pending == 0) t.reports[i] = poll_seen(at, seen, {kPhaseEntry, source, w, epoch}, guard);
    there &= pending == 0 || seen >> 32 == epoch;
  }
  return there;
}

// Receives the reports of the ranks that take part, where masks may be. The whole block.
template <class Up>
__device__ TY_COLD Guard poll_masked_reports(const DecodeDispatchArgs& args, Up up, ComingTables t, Guard guard) {
  const Common& c = args.dispatch.c;
  auto ask = [&](u32 source, u32 w, bool is_there) -> u32 {
    const u64* at = decode_word(c, args.decode, up, c.rank, source, w);
    return is_there ? poll_seen(at, 0, {kPhaseEntry, source, w, c.epoch()}, guard) : 0;
  };
  poll_present(c, args.decode, {kByReports, t.words, t.reports}, guard, ask);
  return guard;
}

// Places the rows of all ranks. The whole block.
__device__ TY_INLINED void place_rows(const ComingTables& t, const ComingRows& coming) {
#pragma unroll 1
  for (u32 e = threadIdx.x; e < t.local; e += blockDim.x)
    for (u32 s = 0, sum = 0; s < t.ranks; s++) t.base[s * t.local + e] = sum, sum += t.rows(s, e);
  if (wave_id() == block_waves() - 1) {
    RunningSum all;
#pragma unroll 1
    for (u32 from = 0; from < t.ranks; from += kWave) {
      u32 s = from + lane_id(), rows = 0;
      for (u32 w = 0; w < t.token_words && s < t.ranks; w++) rows += popc(t.set(s)[w]);
      u32 before = all.add(rows);
      if (s < t.ranks) t.first[s] = before;
    }
    if (lane_id() == 0) t.first[t.ranks] = all.sum;
  }
  if (wave_id() == block_waves() - 2) coming.count();
  sync_block();
}

// The output of this rank, with memory for all rows that may arrive.
struct PackedOutput {
  u8* base;
  Region at;

  __device__ PackedOutput(const DispatchArgs& a, u8* region)
      : base(region),
        at(a.region_shape(), a.most_tokens(), (u64)a.c.local_experts() * a.most_tokens()) {}
  template <class T>
  __device__ T* array(u64 offset) const { return reinterpret_cast<T*>(base + offset); }
  // The first word of the scales of row `row` of a block of `most` rows, the first of which is `block`.
  __device__ u32* scales(const DecodeDispatchArgs& args, u64 block, u64 row) const {
    return array<u32>(at.scales) + block * args.dispatch.scale_words + row * args.decode.scale_stride[0];
  }
};

// Writes the counts into this rank's region, and the facts for its handle; then reports to the host. One
// block.
template <class Up>
__device__ void note_coming(const DecodeDispatchArgs& args, const Up& up, const ComingTables& t,
                            const PackedOutput& out, const Decision& d, Guard& guard) {
  const DispatchArgs& a = args.dispatch;
  u32 ranks = t.ranks, tokens = t.first[ranks];
  u64* totals = out.array<u64>(out.at.totals);
  u32* counts = out.array<u32>(out.at.expert_counts);
  u64* ranges = out.array<u64>(out.at.ranges);
#pragma unroll 1
  for (u32 s = threadIdx.x; s < ranks; s += blockDim.x) {
    out.array<u32>(out.at.rank_counts)[s] = t.first[s + 1] - t.first[s];
    out.array<u32>(out.at.rank_ends)[s] = t.first[s + 1];
    if (masks(args.decode)) out.array<u8>(out.at.lost)[s] = is_left_out(args.decode, s);
    a.r.source_rows[s] = t.first[s];
  }
#pragma unroll 1
  for (u32 i = threadIdx.x; i < ranks * t.local; i += blockDim.x) {
    u32 e = i / ranks, s = i - e * ranks, before = t.base[s * t.local + e];
    ranges[i] = t.rows(s, e) | (u64)before << 32;
    if (s + 1 != ranks) continue;
    counts[e] = before + t.rows(s, e);
    if (args.decode.expert_totals) args.decode.expert_totals[e] += counts[e];
  }
  if (threadIdx.x >= kWave) return;
  u32 mine = 0, rows;
#pragma unroll 1
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
  a.c.trace->entered = heard;
}

// The expert and place of a lane's selection as records have it, here, and its weight.
struct Entry {
  u32 named;  // the expert << 16 | the place among the rows of its source; ~0 if it is not here
  float weight;
};

// Stores a row, and its metadata, for each of its experts. The whole block.
template <u32 N>
__device__ TY_INLINED void spread_row(const DecodeDispatchArgs& args, const ComingTables& t, const PackedOutput& out,
                                      const ComingRow& from, const Entry& entry, const uint4 (&row)[N]) {
  const DispatchArgs& a = args.dispatch;
  u32 lane = lane_id(), topk = a.c.topk, own = row_pieces(a), pieces = sent_pieces(a), most = (u32)a.most_tokens();
  u32 expert = entry.named >> 16;
  u32 at = expert < t.local ? t.base[from.source * t.local + expert] + (entry.named & 0xffff) : most;
  i32 slot = at < most ? (i32)(expert * most + at) : -1;
  Lanes copies = ballot(slot >= 0);
  // Pieces that are stored as they are: those of scales, too, if these lie by rows.
  const u32(&stride)[2] = args.decode.scale_stride;
  bool by_rows = stride[0] == a.scale_words && stride[1] == 1 && a.scale_words % 4 == 0;
  u32 limit = by_rows ? pieces : own;
#pragma unroll 1
  for (Lanes left = copies; left != 0; left &= left - 1) {
    u64 to = (u64)shfl(slot, first_of(left));
    uint4* x = reinterpret_cast<uint4*>(out.base + to * a.row_bytes);
    uint4* scales = out.array<uint4>(out.at.scales) + to * (a.scale_words / 4) - own;
#pragma unroll
    for (u32 j = 0; j < N; j++)
      if (piece_at(j) < limit) store_16((piece_at(j) < own ? x : scales) + piece_at(j), row[j]);
  }
  // Few warps have scales.
#pragma unroll
  for (u32 j = 0; j < N && limit == own; j++) {
    u32 piece = piece_at(j);
    bool has = piece >= own && piece < pieces;
    if (!any(has)) continue;
    u32 word[4] = {row[j].x, row[j].y, row[j].z, row[j].w}, step = args.decode.scale_stride[1];
#pragma unroll 1
    for (Lanes left = copies; left != 0; left &= left - 1) {
      u32 to = (u32)shfl(slot, first_of(left)), block = shfl(expert, first_of(left)) * most;
      u32* scales = out.scales(args, block, to - block) + (u64)4 * (piece - own) * step;
#pragma unroll
      for (u32 i = 0; i < 4; i++)
        if (has && 4 * (piece - own) + i < a.scale_words) scales[(u64)i * step] = word[i];
    }
  }
  // The last warp has the fewest pieces.
  if (wave_id() != block_waves() - 1) return;
  u32 source = from.source * a.c.max_tokens + from.token, number = from.number(t);
  if (lane < topk) out.array<i32>(out.at.slots)[(u64)number * topk + lane] = slot;
  // The rows of an own token, for the combine that sums them here.
  if (lane < topk && from.source == a.c.rank) a.r.places[(u64)from.token * topk + lane] = (u32)slot;
  if (lane == 0) out.array<u32>(out.at.landed_source)[number] = source;
  if (slot < 0) return;
  out.array<u32>(out.at.source)[slot] = from.source * args.decode.source_step + from.token;
  if (a.weights) out.array<float>(out.at.weights)[slot] = entry.weight;
}

// A row of a source that has stopped midway, and is left out. Its places are not known. The whole block.
__device__ TY_COLD void miss_row(const DecodeDispatchArgs& args, u8* region, u32 number, u32 from) {
  const Common& c = args.dispatch.c;
  PackedOutput out(args.dispatch, region);
  if (threadIdx.x != 0) return;
  out.array<u32>(out.at.landed_source)[number] = from;
  u32 source = quotient(from, c.max_tokens, args.decode.tokens_factor);
  store_relaxed(settled_word(c, args.decode, kGaps, source), (u64)c.epoch());
}

// Clears the places of a source that has stopped midway: none of its rows counts. One block, behind all others.
__device__ TY_COLD void clear_rows(const DecodeDispatchArgs& args, const ComingTables& t, const PackedOutput& out,
                                   u32 source) {
  const DispatchArgs& a = args.dispatch;
  u32 most = (u32)a.most_tokens(), topk = a.c.topk;
#pragma unroll 1
  for (u32 i = t.first[source] * topk + threadIdx.x; i < t.first[source + 1] * topk; i += blockDim.x)
    out.array<i32>(out.at.slots)[i] = -1;
#pragma unroll 1
  for (u32 e = 0; e < t.local; e++) {
    u32 from = e * most + t.base[source * t.local + e], end = from + t.rows(source, e);
#pragma unroll 1
    for (u32 slot = from; slot < end; slot++) {
      uint4* x = reinterpret_cast<uint4*>(out.base + (u64)slot * a.row_bytes);
      for (u32 i = threadIdx.x; i < row_pieces(a); i += blockDim.x) store_16(x + i, make_uint4(0, 0, 0, 0));
      u32* scales = out.scales(args, (u64)e * most, slot - e * most);
      for (u32 i = threadIdx.x; i < a.scale_words; i += blockDim.x) scales[(u64)i * args.decode.scale_stride[1]] = 0;
      if (threadIdx.x != 0) continue;
      out.array<u32>(out.at.source)[slot] = ~0u;
      if (a.weights) out.array<float>(out.at.weights)[slot] = 0.0f;
    }
  }
  if (threadIdx.x == 0) out.array<u8>(out.at.lost)[source] = 1;
}

// The last block looks for sources that have stopped midway; `tables` is the shared memory of the routing. The whole
// block.
__device__ TY_COLD void clear_stopped_sources(const DecodeDispatchArgs& args, u8* tables, u8* region, u32 blocks) {
  if (!last_to_receive(args.decode, blocks)) return;
  SentTables sent(args.dispatch, args.decode, tables);
  ComingTables t(sent, sent.end(args.dispatch));
  PackedOutput out(args.dispatch, region);
#pragma unroll 1
  for (u32 s = 0; s < t.ranks; s++)
    if (load_relaxed(settled_word(args.dispatch.c, args.decode, kGaps, s)) == args.dispatch.c.epoch())
      clear_rows(args, t, out, s);
}

// A row that arrives, with its entries.
template <u32 N>
struct SeenRow {
  ComingRow from;
  Arriving<N, 1, SeenEntry> coming;

  template <class Up>
  __device__ DecodePlace place(const DecodeDispatchArgs& args, const Up& up) const {
    const Common& c = args.dispatch.c;
    return {c, args.decode, up, place_of(c, from.source, from.token), sent_pieces(args.dispatch)};
  }
  template <class Up>
  __device__ TY_INLINED void look(const DecodeDispatchArgs& args, const Up& up, const ComingRow& row) {
    from = row;
    coming.entry.is_mine = lane_id() < args.dispatch.c.topk;
    coming.look(place(args, up));
  }
  // Removes the row from the inbox, and spreads it. The whole block.
  template <class Up>
  __device__ TY_INLINED void receive(const DecodeDispatchArgs& args, const Up& up, const ComingTables& t,
                                     const PackedOutput& out, Guard& guard) {
    const DispatchArgs& a = args.dispatch;
    DecodePlace at = place(args, up);
    coming.poll(at, {kPhaseRows, from.source, from.token, a.c.epoch()}, guard);
    coming.take(at);
    if (!has_row(args.decode, guard)) {
      miss_row(args, out.base, from.number(t), from.source * a.c.max_tokens + from.token);
      return;
    }
    uint4 found = coming.entry.is_mine ? coming.entry.seen : make_uint4(~0u, 0, 0, 0);
    if (all(!guard.ended())) spread_row(args, t, out, from, {found.x, float_of(found.z)}, coming.piece);
  }
};

// Rows that a block receives together: two, where registers allow it.
template <u32 N>
constexpr u32 kRowsAtOnce = N < kMostPieces ? 2 : 1;

// The row of this rank for itself that a block has kept in registers: the last one that it has sent.
template <u32 N, bool kCast>
struct KeptRow {
  const SentRow<N, kCast>& row;
  u32 token;
  bool is_here;
  u32 named;  // as in Entry

  // The whole block, before the places of rows are known.
  __device__ TY_INLINED KeptRow(const DispatchArgs& a, const SentTables& sent, const SentRow<N, kCast>& last,
                                const Part& part)
      : row(last), named(~0u) {
    u32 lane = lane_id(), tokens = a.c.tokens(), step = part.sending.step;
    KeptTokens kept(part, tokens);
    // The first tokens are those of the first blocks, and it is seldom that there are more.
    u32 before = kept.first == 0 ? 0 : kept.first % step;
    token = kept.first + part.sending.first - before + (part.sending.first < before ? step : 0);
    bool has = part.keeps_own() && token < tokens;
    i32 expert = has && lane < a.c.topk ? sent.picks[token * a.c.topk + lane] : -1;
    u32 local = (u32)expert - a.c.rank * sent.local;
    if (expert >= 0 && local < sent.local) named = local << 16 | sent.before(expert, token);
    is_here = ballot(named != ~0u) != 0;
  }
  // The whole block.
  __device__ TY_INLINED void spread(const DecodeDispatchArgs& args, const ComingTables& t,
                                    const PackedOutput& out) const {
    u32 me = args.dispatch.c.rank;
    spread_row(args, t, out, {me, token}, {named, row.weight}, row.piece);
  }
};

// `own`: what this block has kept. The whole block.
template <u32 N, bool kCast, class Up>
__device__ TY_INLINED void receive_rows(const DecodeDispatchArgs& args, const Up& up, const ComingTables& t,
                                        KeptRow<N, kCast> own, const Part& part, Guard& guard) {
  const DispatchArgs& a = args.dispatch;
  const Common& c = a.c;
  bool there = false;
  if (!masks(args.decode))
    there = look_at_entries(args, up, t, guard);
  else if (!poll_masked_heads(c, args.decode, up, t.heard))
    guard.end();
  there = sync_block_and(there && !guard.ended());
  if (!there && sync_block_or(guard.ended())) return empty_inbox_if_ended(c, args.decode, up, guard);
  Decision d = decide_together<true>(c, t.heard);
  if (d.code != kGo) return end_refused<true>(c, args.decode, up, t.heard, d, part, guard);
  if (masks(args.decode)) {
    guard = poll_masked_reports(args, up, t, guard);
    if (sync_block_or(guard.ended())) return empty_inbox_if_ended(c, args.decode, up, guard);
  }
  ComingRows rows{t, c.rank, KeptTokens(part, c.tokens()).first, args.decode.ranks_factor};
  place_rows(t, rows);
  PackedOutput out(a, up.own_arena(a.region));
  if (part.tells()) note_coming(args, up, t, out, d, guard);
  u32 step = part.receiving.step, all = rows.rows();
  constexpr u32 kAtOnce = kRowsAtOnce<N>;
#pragma unroll 1
  for (u32 i = part.receiving.first; i < all || own.is_here; i += kAtOnce * step) {
    SeenRow<N> coming[kAtOnce];
#pragma unroll
    for (u32 n = 0; n < kAtOnce; n++)
      if (i + n * step < all) coming[n].look(args, up, rows.at(i + n * step));
    if (own.is_here) own.spread(args, t, out);
    own.is_here = false;
#pragma unroll
    for (u32 n = 0; n < kAtOnce; n++)
      if (i + n * step < all) coming[n].receive(args, up, t, out, guard);
  }
  if (masks(args.decode)) clear_stopped_sources(args, up.end(), out.base, part.receiving.step);
  empty_inbox_if_ended(c, args.decode, up, guard);
}

template <u32 N, bool kCast, class Up>
__device__ TY_INLINED void dispatch_decode(const DecodeDispatchArgs& args, const Up& far, u8* shared) {
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
  learn_masks(a.c, args.decode);
  FirstPicks first(a, part.sends);
  SentRow<N, kCast> row;
  u32 found = a.tokens && !a.replay ? load_device(a.tokens) : a.c.input_rows;
  DecodeTurn turn(a.c, args.decode, a.r.note, !a.replay, a.replay ? 0 : min(found, a.c.input_rows), [&] {
    if (part.sends && part.sending.first < a.c.input_rows) row.load(a, part.sending.first);
    if (part.sends && threadIdx.x == 0 && found > a.c.input_rows) *sent.problem = (u64)found << 16 | kTooMany;
  });
  if (!DecodeTurn::runs(a.c)) return;
  heads.open(a.c);
  if (part.sends) send_rows(args, up, sent, first, part, heads, row);
  if (part.posts && threadIdx.x == 0) trace.counted = now_ns();
  if (part.ends_sends() && threadIdx.x == 0) trace.moved = now_ns();
  if (part.receives) receive_rows<N, kCast>(args, up, coming, {a, sent, row, part}, part, guard);
  turn.leave(a.c);
  if (part.tells() && threadIdx.x == 0) trace.arrived = now_ns();
}

}  // namespace ty
