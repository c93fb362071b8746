// Low-latency combine of rank-major rows of 16-bit numbers. See decode_combine.cuh, and decode_rank_major.cuh.
//
// A rank has one row of a token at most, and that row is its part of the sum: it has no weight, and nothing is rounded
// before the sum. So this kernel needs few registers, and its blocks fit a multiprocessor beside those of the kernel
// ahead. They start while that one runs (`wait_for_kernel_ahead`).
//
// A place fixes the source of its row, so rows are loaded before anything is known about them. No block waits for
// heads, except for the one that reports the outcome: a wait that lasts looks at the head of its source.
//
// Rows and records travel as those of `combine_decode` do: each rank may run either kernel.
#pragma once
#include "decode_combine.cuh"

namespace ty {

// A word that is all ones holds two NaNs. Where a sum has one NaN of its own, another NaN may travel instead: then one
// key serves all rows, and no receiver waits for it.
constexpr bool kOneKey = kNanHasNoSign;
constexpr u32 kTheKey = ~0u;

__device__ inline u32 without_key(u32 word) { return word == kTheKey ? 0x7fff7fffu : word; }

// Where a sending block is: the place `index` of the source that is `next` ranks behind this one. A step counts sources
// first.
struct PushedPlace {
  u32 index, next;

  __device__ u32 source(const Common& c) const {
    u32 behind = c.rank + next;
    return behind < c.ranks ? behind : behind - c.ranks;
  }
  // Rows of this rank for itself come last, if they are sent.
  __device__ PushedPlace after(const Common& c, const Part& part) const {
    bool wraps = next + part.keeps_own() == c.ranks;
    return {index + (wraps ? part.sending.step : 0), wraps ? 1 : next + 1};
  }
};

// A row that is sent: this thread's pieces of it, and its source and token as in DecodeCombineArgs.
template <u32 N>
struct PushedRow {
  u32 from;
  uint4 piece[N];

  // It waits for nothing. A handle of a dispatch that failed has any numbers: they may be loaded, but are not used.
  __device__ TY_INLINED void load(const DecodeCombineArgs& args, const PushedPlace& at) {
    const CombineArgs& a = args.combine;
    u64 place = (u64)at.source(a.c) * a.source_places + at.index;
    from = ~0u;
    if (at.index >= a.source_places || place >= args.merge.rows) return;
    from = args.sources[place];
    load_pieces(args.merge.x + place * a.row_bytes, piece, (u32)(a.row_bytes / 16));
  }
  // The whole block.
  template <class Up>
  __device__ TY_INLINED void send(const DecodeCombineArgs& args, const Up& up, u32 source) {
    const Common& c = args.combine.c;
    u32 token = from - source * c.max_tokens, pieces = (u32)(args.combine.row_bytes / 16), key = kTheKey;
    if (from == ~0u || token >= c.max_tokens) return;
    if constexpr (kOneKey) {
#pragma unroll
      for (u32 j = 0; j < N; j++) {
        uint4& v = piece[j];
        v = make_uint4(without_key(v.x), without_key(v.y), without_key(v.z), without_key(v.w));
      }
    } else {
      key = key_of(piece, pieces);
    }
    u64 place = place_of(c, writer_at(c, source), token);
    store_decode_row(decode_row(c, args.decode, up, source, place), piece, pieces, key);
    if (threadIdx.x == blockDim.x - 1)
      store_relaxed(first_half(decode_record(c, args.decode, up, source, place)), (u64)c.epoch() << 32 | key);
  }
};

// Whether the rows of a source do not come: it has entered, and does not take part in this operation. One thread.
template <class Up>
__device__ inline bool sends_none(const Common& c, const Up& up, u32 source) {
  u32 head[kHead];
#pragma unroll 1
  for (u32 w = 0; w < kHead; w++) {
    u64 seen = load_relaxed(entry_word(c, up, c.rank, source, w));
    if (seen >> 32 != c.epoch()) return false;
    head[w] = (u32)seen;
  }
  return objects(c, head);
}

// A row that arrives.
template <u32 N>
struct PolledRow {
  static constexpr u32 kFewLooks = 1024;
  u64 key;
  uint4 piece[N];

  // First reads, of what may not have arrived.
  __device__ TY_INLINED void look(const DecodePlace& at) {
    if constexpr (!kOneKey) key = load_relaxed(first_half(at.record));
#pragma unroll
    for (u32 j = 0; j < N; j++)
      if (piece_at(j) < at.pieces) piece[j] = load_16_relaxed(at.row + piece_at(j));
  }
  // Looks again for what was not there.
  __device__ TY_INLINED bool is_there(const DecodePlace& at, u32 epoch) {
    bool there = true;
    if constexpr (!kOneKey) {
      if (key >> 32 != epoch) key = load_relaxed(first_half(at.record));
      there = key >> 32 == epoch;
    }
#pragma unroll
    for (u32 j = 0; j < N; j++)
      if (piece_at(j) < at.pieces && !has_come(piece[j])) piece[j] = load_16_relaxed(at.row + piece_at(j));
#pragma unroll
    for (u32 j = 0; j < N; j++) there = there && (piece_at(j) >= at.pieces || has_come(piece[j]));
    return there;
  }
  // Looks for it a number of times, and takes it out of the inbox once it is there; false if it is late. Each thread by
  // itself.
  __device__ TY_INLINED bool receive(const DecodePlace& at, u32 epoch) {
#pragma unroll 1
    for (u32 looks = 0; !is_there(at, epoch); looks++) {
      if (looks == kFewLooks) return false;
      between_looks();
    }
#pragma unroll
    for (u32 j = 0; j < N; j++) {
      if (piece_at(j) >= at.pieces) continue;
      store_16_relaxed(at.row + piece_at(j), make_uint4(0, 0, 0, 0));
      piece[j] = with_key(piece[j], kOneKey ? kTheKey : (u32)key);
    }
    return true;
  }
};

// A row that has not come.
struct LateRow {
  DecodePlace at;
  u32 rank, token;
};
// How a wait for it ends.
constexpr u32 kCame = 0, kNeverComes = 1, kWaitEnded = 2;

// Waits for this thread's pieces of it. Few waits last, and in this kernel a guard has no registers before they do.
template <u32 N, class Up>
__device__ TY_COLD u32 wait_for(const Common& c, Up up, LateRow late) {
  constexpr u32 kHeadsApart = 256;
  Guard guard(c.abort, c.cap_ns, c.report);
  u32 epoch = c.epoch(), looks = 0;
  bool comes = true;
  PolledRow<N> coming;
  coming.look(late.at);
  auto look = [&]() -> u64 {
    bool there = coming.is_there(late.at, epoch);
    if (!there && ++looks % kHeadsApart == 0) comes = !sends_none(c, up, late.rank);
    return there || !comes ? epoch : 0;
  };
  guard.until({kPhaseCombineRows, late.rank, late.token, epoch}, look, [&](u64 found) { return found == epoch; });
  return guard.ended() ? kWaitEnded : comes ? kCame : kNeverComes;
}

// This rank's own row of a token: in shared memory until it is added. Each thread reads what it has copied itself.
template <u32 N>
struct OwnRow {
  uint4* pieces;  // [N, threads]

  // The whole block.
  __device__ TY_INLINED void fetch(const DecodeCombineArgs& args, const OwnSelection& mine) const {
    const Common& c = args.combine.c;
    bool here = mine.expert >= 0 && c.rank_of(mine.expert) == c.rank && (u64)(u32)mine.slot < args.merge.rows;
    Lanes has = ballot(here);
    if (has == 0) return;
    const u8* row = args.merge.x + (u64)(u32)shfl(mine.slot, first_of(has)) * args.combine.row_bytes;
#pragma unroll
    for (u32 j = 0; j < N; j++)
      if (piece_at(j) < (u32)(args.combine.row_bytes / 16))
        copy_async(pieces + piece_at(j), reinterpret_cast<const uint4*>(row) + piece_at(j), 16);
  }
};

// This thread's sums of a token. Each has a term, or all have none.
template <class Type, u32 N>
struct ThreadSums {
  float value[N][Type::kLanes];

  __device__ ThreadSums() {
#pragma unroll
    for (u32 i = 0; i < N * Type::kLanes; i++) value[i / Type::kLanes][i % Type::kLanes] = kNothing;
  }
  __device__ TY_INLINED void add(u32 j, const uint4& term) {
    float f[Type::kLanes];
    Type::widen(term, f);
#pragma unroll
    for (u32 i = 0; i < Type::kLanes; i++) value[j][i] = add_rn(value[j][i], f[i]);
  }
  // Shared memory holds them while a thread waits for long: a call would spill them to memory in every case. The places
  // of a thread lie together, so that one register names them.
  __device__ TY_INLINED void put(float* stash) const {
#pragma unroll
    for (u32 i = 0; i < N * Type::kLanes; i++)
      stash[threadIdx.x * N * Type::kLanes + i] = value[i / Type::kLanes][i % Type::kLanes];
  }
  __device__ TY_INLINED void take(const float* stash) {
#pragma unroll
    for (u32 i = 0; i < N * Type::kLanes; i++)
      value[i / Type::kLanes][i % Type::kLanes] = stash[threadIdx.x * N * Type::kLanes + i];
  }
};

// The shared memory of a block.
template <class Type, u32 N>
struct SumRoom {
  OwnRow<N> own;
  float* stash;
  u8* end;

  __device__ explicit SumRoom(u8* shared)
      : own{reinterpret_cast<uint4*>(shared)},
        stash(reinterpret_cast<float*>(shared + 16 * N * blockDim.x)),
        end(shared + (16 + 4 * Type::kLanes) * N * blockDim.x) {}
};

// Sums one token of this rank; false if a wait was ended. The whole block, each thread by itself.
template <class Type, u32 N, class Up>
__device__ TY_INLINED bool sum_rank_major(const DecodeCombineArgs& args, const Up& up, u32 token,
                                          const OwnSelection& mine, bool keeps, const SumRoom<Type, N>& room) {
  const CombineArgs& a = args.combine;
  const Common& c = a.c;
  u32 pieces = (u32)(a.row_bytes / 16), owner = mine.expert >= 0 ? c.rank_of(mine.expert) : 0;
  Lanes owners = ballot(stands_for(mine.expert >= 0, owner));
  Lanes polled = owners & ~ballot(keeps && mine.expert >= 0 && owner == c.rank);
  PolledRow<N> coming;
  if (polled != 0) coming.look(place_of_part(args, up, token, shfl(owner, first_of(polled))));
  ThreadSums<Type, N> total;
  u64 at = (u64)token * a.row_bytes;
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    if (piece_at(j) >= pieces) continue;
    if (a.bias0) total.add(j, load_16(reinterpret_cast<const uint4*>(a.bias0 + at) + piece_at(j)));
    if (a.bias1) total.add(j, load_16(reinterpret_cast<const uint4*>(a.bias1 + at) + piece_at(j)));
  }
  u32 end = kCame;
#pragma unroll 1
  for (Lanes left = owners; left != 0; left &= left - 1) {
    if ((left & ~(left - 1) & polled) == 0) {
      copies_done();
#pragma unroll
      for (u32 j = 0; j < N; j++) total.add(j, room.own.pieces[piece_at(j)]);
      continue;
    }
    u32 rank = shfl(owner, first_of(polled));
    if (end == kNeverComes) end = kCame;
#pragma unroll 1
    while (end == kCame && !coming.receive(place_of_part(args, up, token, rank), c.epoch())) {
      total.put(room.stash);
      end = wait_for<N>(c, up, {place_of_part(args, up, token, rank), rank, token});
      total.take(room.stash);
      if (end == kCame) coming.look(place_of_part(args, up, token, rank));
    }
#pragma unroll
    for (u32 j = 0; j < N && end == kCame; j++) total.add(j, coming.piece[j]);
    polled &= polled - 1;
    if (polled != 0) coming.look(place_of_part(args, up, token, shfl(owner, first_of(polled))));
  }
  if (end == kWaitEnded) return false;
  bool none = owners == 0 && !a.bias0 && !a.bias1;
  uint4* out = reinterpret_cast<uint4*>(a.out + at);
#pragma unroll
  for (u32 j = 0; j < N; j++)
    if (piece_at(j) < pieces) store_16(out + piece_at(j), none ? make_uint4(0, 0, 0, 0) : Type::narrow(total.value[j]));
  return true;
}

// Learns how the operation goes on, and reports it; false if a wait was ended. One block.
template <class Up>
__device__ TY_COLD bool settle_combine(const DecodeCombineArgs& args, Up up, u32* heard) {
  const Common& c = args.combine.c;
  Guard guard(c.abort, c.cap_ns, c.report);
  Decision d{};
  if (!poll_heads<false>(c, args.decode, up, look_at_heads(c, up), heard, d, guard)) return false;
  u64 now = now_ns();
  if (threadIdx.x == 0) tell(c, up, d, &heard[d.rank * kHead], guard);
  if (threadIdx.x == 0 && d.code == kGo) c.trace->entered = now;
  // Ranks that take part in another operation have sent rows that nothing takes: no more operations are entered.
#pragma unroll 1
  for (u32 s = threadIdx.x; s < c.ranks && d.code == kRefused; s += blockDim.x)
    if (takes_part(&heard[s * kHead]) && objects(c, &heard[s * kHead])) guard.end();
  return !guard.ended();
}

template <class Type, u32 N, class Up>
__device__ TY_INLINED void combine_rank_major(const DecodeCombineArgs& args, const Up& far, u8* shared) {
  const CombineArgs& a = args.combine;
  const Common& c = a.c;
  Part part(args.decode);
  part.serve_apart(a.source_places);
  Trace& trace = *c.trace;
  Heads heads(c, args.decode, part);
  SumRoom<Type, N> room(shared);
  NearWindows<Up> up(c, far, room.end);
  u32 *heard = reinterpret_cast<u32*>(up.end()), *promised = heard + c.ranks * kHead;
  warm(args);
  wait_for_kernel_ahead();
  let_kernel_behind_start();
  if (part.posts && threadIdx.x == 0) trace.begun = trace.counted = now_ns();
  if (threadIdx.x == 0) begun_ns() = args.decode.waited_ns && part.tells() ? now_ns() : 0;
  PushedPlace at{part.sending.first, 1}, behind = at;
  if (part.keeps_own() && c.ranks == 1) at.index = kNoItem;
  PushedRow<N> row, next;
  OwnSelection mine;
  DecodeTurn turn(c, args.decode, a.r.note, false, 0, [&] {
    if (part.receives) mine.load(a, part.receiving.first);
    if (part.sends) {
      row.load(args, at);
      behind = at.after(c, part);
      next.load(args, behind);
    }
#pragma unroll 1
    for (u32 d = threadIdx.x; part.posts && d < c.ranks; d += blockDim.x)
      promised[d] = d == c.rank && part.keeps_own() ? 0 : a.r.counts[d];
  });
  if (!DecodeTurn::runs(c)) return;
  heads.open(c);
  // Loads wait behind the stores of their multiprocessor.
  if (part.keeps_own()) room.own.fetch(args, mine);
  if (part.posts)
    heads.post(c, up, {c.verdict, (u32)(a.row_bytes / 16)}, nullptr, [&](u32 peer) { return promised[peer]; });
#pragma unroll 1
  for (; part.sends && at.index < a.source_places;) {
    row.send(args, up, at.source(c));
    row = next, at = behind, behind = at.after(c, part);
    next.load(args, behind);
  }
  if (part.posts && threadIdx.x == 0) trace.moved = now_ns();
  bool ended = false;
#pragma unroll 1
  for (u32 token = part.receiving.first; part.receives && token < c.tokens();) {
    if (part.keeps_own() && token != part.receiving.first) room.own.fetch(args, mine);
    ended |= !sum_rank_major<Type, N>(args, up, token, mine, part.keeps_own(), room);
    token += part.receiving.step;
    if (token < c.tokens()) mine.load(a, token);
  }
  if (part.tells()) ended |= !settle_combine(args, up, heard);
  if (part.receives && sync_block_or(ended)) empty_inbox(c, args.decode, up);
  turn.leave(c);
  if (part.tells() && threadIdx.x == 0) trace.arrived = now_ns();
}

}  // namespace ty
