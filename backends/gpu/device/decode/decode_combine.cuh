// Low-latency combine: owners sum their rows of each token and send one partial row for its source, which
// sums the partial rows. See decode.cuh.
//
// Sums in f32, in the order of `combine`: experts of one rank in k order, rounded; then the biases and
// ranks in the order of their highest selecting k, rounded. No rank reads rows of another, so no rank waits
// until all have read. Where one kernel sends and receives, this rank's partial rows of its own tokens are made
// where they are needed, and not sent. Partial rows are of the type of the rows, or, where sums are rounded once,
// f32: then a row has two parts, of the first and of the second half of each 16 bytes.
//
// Where a call has weights and ids of its own, sources send them to the owners first. A rank that refuses sends none,
// so owners wait for the heads before.
#pragma once
#include "decode_sums.cuh"

namespace ty {

// Shared memory for the longest partial row.
constexpr u32 kOwnPartBytes = 16 * kMostPieces * kWarps * kWave;

// Sends the weights of this call, and the selections that count, to the owners of this rank's tokens. The whole
// block, each warp a token.
template <class Up>
__device__ TY_INLINED void send_weights(const DecodeCombineArgs& args, const Up& up, const Part& part) {
  const Common& c = args.combine.c;
  u32 lane = lane_id(), step = part.sending.step;
  u64 epoch = (u64)c.epoch() << 32;
#pragma unroll 1
  for (u32 token = part.sending.first + wave_id() * step; token < c.tokens(); token += block_waves() * step) {
    i32 expert = lane < c.topk ? args.combine.r.topk[(u64)token * c.topk + lane] : -1;
    u32 owner = expert >= 0 ? c.rank_of(expert) : 0;
    GivenTerm term(args, token);
    u32 bits = (u32)ballot(term.counts);
    bool is_sent = expert >= 0 && !(part.keeps_own() && owner == c.rank) && !is_left_out(args.decode, owner);
#pragma unroll 1
    for (Lanes left = ballot(stands_for(is_sent, owner)); left != 0; left &= left - 1) {
      u32 d = shfl(owner, first_of(left));
      uint4* record = decode_record(c, args.decode, up, d, place_of(c, writer_at(c, d), token));
      if (lane == 0) store_relaxed(second_half(record), epoch | bits);
      if (lane < c.topk) store_relaxed(second_half(record + 1 + lane), epoch | bits_of(term.weight));
    }
  }
}

// The rows that this rank has received and sums for their sources, in order of sources from the next rank on;
// rows of its own tokens come last, or, if they are not sent, not at all.
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
  __device__ void load(const DecodeCombineArgs& args, const SumRange& range, u32 i) {
    const Common& c = args.combine.c;
    u32 number = range.number(i), rows_each = args.is_rank_major() ? 1 : c.local_experts();
    if (i >= range.rows || (u64)number * rows_each >= args.merge.rows) return;
    from = args.sources[number];
    if (!args.is_rank_major())
      slot = slot_of(args.merge.slots, number, args.merge.topk, args.merge.rows);
    else if (lane_id() == 0 && from != ~0u)
      slot = (i32)number;
  }
};

// The bits of the weight that this lane returns with a row: of rank-major rows, each has one for each selection. One
// warp.
__device__ TY_INLINED u32 returned_weight(const DecodeCombineArgs& args, const OwedRow& owed) {
  const MergeArgs& m = args.merge;
  i64 at = owed.slot;
  if (args.is_rank_major()) at = (i64)shfl(owed.slot, 0) * m.topk + lane_id();
  return lane_id() < m.topk && at >= 0 ? bits_of(m.weights[at]) : 0;
}

// Stores a partial row in an inbox, and returns its key. The whole block.
template <class Partial, u32 P, u32 M>
__device__ TY_INLINED u32 send_partial(uint4* to, uint4 (&row)[M], u32 pieces) {
  if constexpr (kCodes<Partial>) {
    GroupWords<Partial, M> words;
    encode_row(row, words, pieces);
    u32 key = key_of_coded(row, words, pieces);
    store_coded(to, row, words, pieces, key);
    return key;
  } else {
    // Rows of f32 are not rounded, so their words depend on what the compiler makes of an addition.
    u32 key = kNanHasNoSign && Partial::kLanes == 8 ? ~0u : key_of<P>(row, pieces);
    store_decode_row<P>(to, row, pieces, key);
    return key;
  }
}

// Sends the sum of a received token's rows for its source. The whole block.
template <class Type, class Partial, u32 N, class Up>
__device__ TY_INLINED void send_partial(const DecodeCombineArgs& args, const Up& up, const OwedRow& owed,
                                        Guard& guard) {
  constexpr u32 P = kParts<Type, Partial>;
  const Common& c = args.combine.c;
  const MergeArgs& m = args.merge;
  u32 lane = lane_id(), pieces = (u32)(m.row_bytes / 16);
  if (owed.from == ~0u) return;
  u32 source = quotient(owed.from, c.max_tokens, args.decode.tokens_factor), token = owed.from - source * c.max_tokens;
  if (source >= c.ranks || is_left_out(args.decode, source)) return;
  i32 slot = owed.slot;
  float weight = dispatched_weight(args, slot);
  if (args.topk_weights) {
    uint4* given = decode_record(c, args.decode, up, c.rank, place_of(c, source, token));
    What what{kPhaseCombineRows, source, token, c.epoch()};
    u32 bits = poll_seen(second_half(given), 0, what, guard);
    if (lane < m.topk) weight = float_of(poll_seen(second_half(given + 1 + lane), 0, what, guard));
    if (lane >= m.topk || !(bits >> lane & 1)) slot = -1;
    if (!has_row(args.decode, guard)) return leave_out(source);
  }
  uint4 row[N * P];
  sum_rows<Type, Partial, N>(args, slot, weight, row);
  u64 place = place_of(c, writer_at(c, source), token), epoch = (u64)c.epoch() << 32;
  u32 key = send_partial<Partial, P>(decode_row(c, args.decode, up, source, place), row, pieces);
  if (wave_id() != block_waves() - 1) return;
  uint4* record = decode_record(c, args.decode, up, source, place);
  if (lane == 0) store_relaxed(first_half(record), epoch | key);
  if (!m.weights) return;
  u32 back = returned_weight(args, owed);
  if (lane < m.topk) store_relaxed(first_half(record + 1 + lane), epoch | back);
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

// The partial row that this rank makes itself of a token of its own: in shared memory until it is added, as registers
// would spill. Each thread reads what it has written.
template <class Partial, u32 N, u32 P>
struct OwnPart {
  static constexpr u32 M = N * P;
  uint4* pieces;  // [M, threads], then words of groups

  __device__ TY_INLINED void store(const uint4 (&row)[M], const GroupWords<Partial, N>& words) const {
#pragma unroll
    for (u32 j = 0; j < M; j++) pieces[piece_at(j)] = row[j];
    if constexpr (kCodes<Partial>) {
#pragma unroll
      for (u32 j = 0; j < N; j++) group_words()[piece_at(j)] = words.of[j];
    }
  }
  __device__ TY_INLINED void load(uint4 (&row)[M], GroupWords<Partial, N>& words) const {
#pragma unroll
    for (u32 j = 0; j < M; j++) row[j] = pieces[piece_at(j)];
    if constexpr (kCodes<Partial>) {
#pragma unroll
      for (u32 j = 0; j < N; j++) words.of[j] = group_words()[piece_at(j)];
    }
  }

 private:
  __device__ u32* group_words() const { return reinterpret_cast<u32*>(pieces + M * blockDim.x); }
};

// The whole block.
template <class Type, class Partial, u32 N, u32 P>
__device__ TY_INLINED void make_own(const DecodeCombineArgs& args, u32 token, const OwnSelection& mine,
                                    const OwnPart<Partial, N, P>& own) {
  const Common& c = args.combine.c;
  bool here = token < c.tokens() && mine.expert >= 0 && c.rank_of(mine.expert) == c.rank;
  i32 slot = here && (u64)(u32)mine.slot < args.merge.rows ? mine.slot : -1;
  float weight = dispatched_weight(args, slot);
  if (args.topk_weights) {
    GivenTerm term(args, token);
    weight = term.weight;
    if (!term.counts) slot = -1;
  }
  uint4 row[N * P];
  GroupWords<Partial, N> words;
  sum_rows<Type, Partial, N>(args, slot, weight, row);
  // Its values are those of a row that travels: sums do not depend on where they are made.
  if constexpr (kCodes<Partial>) encode_row(row, words, (u32)(args.combine.row_bytes / 16));
  own.store(row, words);
}

// The whole block. `owed`: the first of them; `mine`: of the first token that this block receives. Its own part is made
// behind the first row, while that is on its way: loads wait behind the stores of their multiprocessor.
template <class Type, class Partial, u32 N, u32 P, class Up>
__device__ TY_INLINED void send_partials(const DecodeCombineArgs& args, const Up& up, const SumRange& range,
                                         const Part& part, OwedRow owed, const OwnSelection& mine,
                                         const OwnPart<Partial, N, P>& own, Guard& guard) {
  u32 step = part.sending.step;
#pragma unroll 1
  for (u32 i = part.sending.first;; i += step) {
    OwedRow next;
    next.load(args, range, i + step);
    if (i < range.rows) send_partial<Type, Partial, N>(args, up, owed, guard);
    if (i == part.sending.first && part.keeps_own()) make_own<Type>(args, part.receiving.first, mine, own);
    if (i + step >= range.rows) return;
    owed = next;
  }
}

// A partial row that arrives: N pieces of each of the P parts of a row. Two rows at once spill 150 bytes more.
template <class Partial, u32 N, u32 P, bool = kCodes<Partial>>
struct ArrivingPart : Arriving<N * P, P, NoEntry> {
  GroupWords<Partial, N> words;

  // Takes the row out of the inbox, once it is there.
  __device__ TY_INLINED void receive(const DecodePlace& at, const What& what, Guard& guard) {
    this->poll(at, what, guard);
    this->take(at);
  }
};
template <class Partial, u32 N, u32 P>
struct ArrivingPart<Partial, N, P, true> {
  uint4 piece[N];
  GroupWords<Partial, N> words;
  u64 key;

  __device__ TY_INLINED void look(const DecodePlace& at) {
    key = load_relaxed(first_half(at.record));
    look_at_coded(at.row, piece, words, at.pieces);
  }
  __device__ TY_INLINED void receive(const DecodePlace& at, const What& what, Guard& guard) {
    u32 word = poll_seen(first_half(at.record), key, what, guard);
    take_coded(at.row, piece, words, at.pieces, word, what, guard);
  }
};

// The place of a partial row of a rank.
template <class Up>
__device__ DecodePlace place_of_part(const DecodeCombineArgs& args, const Up& up, u32 token, u32 rank) {
  const Common& c = args.combine.c;
  return {c, args.decode, up, place_of(c, rank, token), (u32)(args.combine.row_bytes / 16)};
}

// First reads of the partial row of the first of the `left` lanes' owners; those of this rank are not sent if it
// `keeps` them.
template <class Coming, class Up>
__device__ TY_INLINED void look_first(Coming& coming, const DecodeCombineArgs& args, const Up& up, u32 token,
                                      u32 owner, Lanes left, bool keeps) {
  if (left == 0) return;
  u32 rank = shfl(owner, first_of(left));
  if (keeps && rank == args.combine.c.rank) return;
  coming.look(place_of_part(args, up, token, rank));
}

template <class Partial, class Type, u32 N, u32 M>
__device__ TY_INLINED void add_partial(RowSum<Type, N>& total, const uint4 (&row)[M],
                                       const GroupWords<Partial, N>& words) {
  if constexpr (kCodes<Partial>)
    add_coded(total, row, words);
  else
    total.template add_partial<Partial>(row);
}

// Sums one token of this rank. The whole block, each warp by itself.
template <class Type, class Partial, u32 N, u32 P, class Up>
__device__ TY_INLINED void receive_token(const DecodeCombineArgs& args, const Up& up, u32 token, u32 owner,
                                         Lanes owners, bool keeps, const OwnPart<Partial, N, P>& own,
                                         ArrivingPart<Partial, N, P>& coming, Guard& guard) {
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
    u32 rank = shfl(owner, first_of(left));
    left &= left - 1;
    if (keeps && rank == c.rank) {
      uint4 row[N * P];
      GroupWords<Partial, N> words;
      own.load(row, words);
      add_partial<Partial>(total, row, words);
    } else {
      What what{kPhaseCombineRows, rank, token, c.epoch()};
      coming.receive(place_of_part(args, up, token, rank), what, guard);
      if (has_row(args.decode, guard))
        add_partial<Partial>(total, coming.piece, coming.words);
      else
        leave_out(rank);
    }
    look_first(coming, args, up, token, owner, left, keeps);
  }
  uint4 row[N];
  total.template round<Type>(row);
  uint4* out = reinterpret_cast<uint4*>(a.out + at);
#pragma unroll
  for (u32 j = 0; j < N; j++)
    if (piece_at(j) < pieces && !guard.ended()) store_16(out + piece_at(j), row[j]);
}

// The weights that come back with a token's rows. One warp.
template <class Up>
__device__ TY_INLINED void receive_weights(const DecodeCombineArgs& args, const Up& up, u32 token,
                                           const OwnSelection& mine, u32 owner, bool keeps, Guard& guard) {
  const CombineArgs& a = args.combine;
  const Common& c = a.c;
  u32 lane = lane_id();
  if (lane >= c.topk) return;
  float weight = 0.0f;
  if (mine.expert >= 0 && keeps && owner == c.rank) {
    weight = args.merge.weights[mine.slot];
  } else if (mine.expert >= 0 && !is_left_out(args.decode, owner)) {
    uint4* record = decode_record(c, args.decode, up, c.rank, place_of(c, owner, token));
    What what{kPhaseCombineRows, owner, token, c.epoch()};
    weight = float_of(poll_seen(first_half(record + 1 + lane), 0, what, guard));
    if (guard.takes_left_out()) weight = 0.0f;
  }
  if (!guard.ended()) a.out_weights[(u64)token * c.topk + lane] = weight;
}

// The same for rank-major rows, whose weights may be summed over the owners. One warp.
template <class Up>
__device__ TY_INLINED void receive_weights_by_row(const DecodeCombineArgs& args, const Up& up, u32 token,
                                                  const OwnSelection& mine, u32 owner, bool keeps, Guard& guard) {
  const CombineArgs& a = args.combine;
  const Common& c = a.c;
  u32 lane = lane_id();
  bool sums = a.returns_weights == kWeightsOfAll;
  Lanes own = ballot(mine.expert >= 0 && owner == c.rank && (u64)(u32)mine.slot < args.merge.rows);
  u64 own_row = own != 0 ? (u64)shfl((u32)mine.slot, first_of(own)) : 0;
  float weight = 0.0f;
#pragma unroll 1
  for (Lanes left = ballot(stands_for(mine.expert >= 0, owner)); left != 0; left &= left - 1) {
    u32 rank = shfl(owner, first_of(left));
    if (lane >= c.topk || !(sums || (mine.expert >= 0 && owner == rank))) continue;
    uint4* record = decode_record(c, args.decode, up, c.rank, place_of(c, rank, token));
    What what{kPhaseCombineRows, rank, token, c.epoch()};
    float term = keeps && rank == c.rank ? args.merge.weights[own_row * c.topk + lane]
                                         : float_of(poll_seen(first_half(record + 1 + lane), 0, what, guard));
    weight = sums ? add_rn(weight, term) : term;
  }
  if (lane < c.topk && !guard.ended()) a.out_weights[(u64)token * c.topk + lane] = weight;
}

// Notes how many selections of a token are left out of its sum. One warp.
__device__ TY_INLINED void note_missing(const DecodeCombineArgs& args, u32 token, i32 expert, u32 owner) {
  bool is_missing = expert < -1 || (expert >= 0 && is_left_out(args.decode, owner));
  u32 count = popc(ballot(is_missing));
  if (lane_id() == 0) args.missing[token] = (u8)count;
}

// Receives all heads. False if the operation does not continue: then it is ended here, if this block receives. The
// whole block.
template <bool Codes, class Up>
__device__ TY_INLINED bool poll_all_heads(const DecodeCombineArgs& args, const Up& up, u64 seen, u32* heard,
                                      const Part& part, Guard& guard) {
  const Common& c = args.combine.c;
  Decision d{};
  if (!poll_heads<false>(c, args.decode, up, seen, heard, d, guard)) {
    empty_inbox_if_ended(c, args.decode, up, guard);
    return false;
  }
  if (d.code != kGo) {
    if (part.receives) end_refused<false, Codes>(c, args.decode, up, heard, d, part, guard);
    return false;
  }
  if (part.tells() && threadIdx.x == 0) {
    u64 now = now_ns();
    tell(c, up, d, &heard[d.rank * kHead], guard);
    c.trace->entered = now;
  }
  return true;
}

// The whole block. `mine`: of its first token, whose own part is made; `entered`: it has received the heads.
template <class Type, class Partial, u32 N, u32 P, class Up>
__device__ TY_INLINED void receive_partials(const DecodeCombineArgs& args, const Up& up, u32* heard, const Part& part,
                                            OwnSelection mine, const OwnPart<Partial, N, P>& own, bool entered,
                                            Guard& guard) {
  const Common& c = args.combine.c;
  bool keeps = part.keeps_own();
  u64 seen = look_at_heads(c, up);
#pragma unroll 1
  for (u32 token = part.receiving.first;; token += part.receiving.step) {
    bool has = token < c.tokens();
    if (!has && entered) break;
    u32 owner = has && mine.expert >= 0 ? c.rank_of(mine.expert) : 0;
    bool is_owed = has && mine.expert >= 0 && !is_left_out(args.decode, owner);
    Lanes owners = ballot(stands_for(is_owed, owner));
    OwnSelection next;
    next.load(args.combine, token + part.receiving.step);
    if (keeps && token != part.receiving.first) make_own<Type>(args, token, mine, own);
    ArrivingPart<Partial, N, P> coming;
    look_first(coming, args, up, token, owner, owners, keeps);
    if (!entered && !poll_all_heads<kCodes<Partial>>(args, up, seen, heard, part, guard)) return;
    entered = true;
    if (!has) break;
    receive_token<Type, Partial, N, P>(args, up, token, owner, owners, keeps, own, coming, guard);
    if (args.combine.out_weights && wave_id() == 0) {
      if (args.is_rank_major())
        receive_weights_by_row(args, up, token, mine, owner, keeps, guard);
      else
        receive_weights(args, up, token, mine, owner, keeps, guard);
    }
    if (kMasks && args.missing && wave_id() == 0) note_missing(args, token, mine.expert, owner);
    mine = next;
  }
  empty_inbox_if_ended(c, args.decode, up, guard);
}

// Posts heads and, where the call has weights of its own, sends them and waits for the heads of all. False if the
// operation does not continue. The whole block.
template <class Type, class Partial, class Up>
__device__ TY_INLINED bool begin_sums(const DecodeCombineArgs& args, const Up& up, u32* heard, const u32* promised,
                                      const Part& part, const Heads& heads, Guard& guard) {
  const Common& c = args.combine.c;
  u32 pieces = (u32)(args.merge.row_bytes / 16) * kParts<Type, Partial>;
  if (kCodes<Partial>) pieces = kSendsCoded | pieces / kBlockPieces;
  if (heads.posts())
    heads.post(c, up, {c.verdict, pieces}, nullptr, [&](u32 peer) { return promised[peer]; });
  if (!args.topk_weights) return true;
  send_weights(args, up, part);
  return poll_all_heads<kCodes<Partial>>(args, up, look_at_heads(c, up), heard, part, guard);
}

template <class Type, class Partial, u32 N, class Up>
__device__ TY_INLINED void combine_decode(const DecodeCombineArgs& args, const Up& far, u8* shared) {
  const CombineArgs& a = args.combine;
  Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  Part part(args.decode);
  Trace& trace = *a.c.trace;
  Heads heads(a.c, args.decode, part);
  OwnPart<Partial, N, kParts<Type, Partial>> own{reinterpret_cast<uint4*>(shared)};
  NearWindows<Up> up(a.c, far, shared + kOwnPartBytes);
  u32 *heard = reinterpret_cast<u32*>(up.end()), *promised = heard + a.c.ranks * kHead;
  warm(args);
  wait_for_kernel_ahead();
  let_kernel_behind_start();
  if (part.posts && threadIdx.x == 0) trace.begun = trace.counted = now_ns();
  learn_masks(a.c, args.decode);
  SumRange range(a, part.keeps_own());
  OwedRow owed;
  OwnSelection mine;
  DecodeTurn turn(a.c, args.decode, a.r.note, false, 0, [&] {
    if (part.receives) mine.load(a, part.receiving.first);
    // A head announces the rows that are sent even if the operation is refused.
#pragma unroll 1
    for (u32 d = threadIdx.x; part.posts && d < a.c.ranks; d += blockDim.x) {
      bool none = args.topk_weights || (d == a.c.rank && part.keeps_own());
      u32 places = a.r.source_rows[d + 1] - a.r.source_rows[d];
      promised[d] = none ? 0 : args.is_rank_major() ? a.r.counts[d] : places;
    }
    if (part.sends) owed.load(args, range, part.sending.first);
  });
  if (!DecodeTurn::runs(a.c)) return;
  heads.open(a.c);
  bool goes = !part.sends || begin_sums<Type, Partial>(args, up, heard, promised, part, heads, guard);
  if (goes && part.sends) send_partials<Type>(args, up, range, part, owed, mine, own, guard);
  if (part.posts && threadIdx.x == 0) trace.moved = now_ns();
  bool entered = part.sends && args.topk_weights;
  if (goes && part.receives)
    receive_partials<Type>(args, up, heard, part, mine, own, entered, guard);
  else if (goes && entered)
    empty_inbox_if_ended(a.c, args.decode, up, guard);
  turn.leave(a.c);
  if (part.tells() && threadIdx.x == 0) trace.arrived = now_ns();
}

}  // namespace ty
