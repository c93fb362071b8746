// Low latency: rows that are sent without a request, and that show their own arrival.
//
// A row is stored once for each rank that wants it, into a place of that rank's inbox. Its writer and the
// token determine the place. A word of the inbox is 0 until data arrives there. A row travels XORed with its
// *key*, a word that differs from all words of the row, so that no word of it is 0, whatever its bytes are.
// A receiver polls the very words that it takes and stores zeros back: no flag, no fence, one flight over
// the link. The key is in the row's *record*. The words of a record show by an epoch that they have
// arrived; so do the words with the number of rows.
//
// A slot is written again `slots` operations later, which are twice as many as may be open. The sender has
// then received half as many before, so it has received the head that each rank posted behind its receipt
// of this slot (INV-2, INV-8).
#pragma once
#include "decode_rows.cuh"

namespace ty {

// The phases of a kernel.
constexpr u32 kSends = 1, kReceives = 2;
// In kHeadVerdict: this rank has sent rows. kHeadPieces and kHeadRows are of them.
constexpr u32 kSendsRows = 1u << 30;
// In kHeadPieces: its rows may be encoded (logfmt.cuh), and the other bits are their blocks.
constexpr u32 kSendsCoded = 1u << 31;
// Most pieces of 16 bytes of a row that a thread has.
constexpr u32 kMostPieces = 4;

// The portion of a kernel's work that one block does: items `first`, `first + step` and so on.
struct Portion {
  u32 first, step;
};
// The first item of a block that has none. A step behind it does not wrap.
constexpr u32 kNoItem = 1u << 31;

// The work of this block, and how the work is shared. With blocks by role no block polls behind its own
// stores.
struct Part {
  bool sends, receives;
  bool any_receives;  // a block of this kernel
  Portion sending, receiving;
  bool posts;     // this block enters for all of them
  u32 reporting;  // blocks that report counts: not the one that posts heads, if there are others

  __device__ explicit Part(const DecodeArgs& s) {
    bool split = s.senders > 0;
    u32 senders = split ? s.senders : gridDim.x, last = senders - 1;
    sends = (s.phases & kSends) && blockIdx.x < senders;
    any_receives = (s.phases & kReceives) != 0;
    receives = any_receives && (!split || blockIdx.x >= senders);
    posts = sends && blockIdx.x == last;
    // Where blocks have roles, one sends heads and no rows: its rows would be the last ones to leave.
    bool alone = split && last > 0;
    sending = {alone && posts ? kNoItem : blockIdx.x, alone ? last : senders};
    reporting = max(last, 1u);
    // Half of all blocks apart: few tokens are sent by some blocks and received by others, side by side.
    u32 blocks = gridDim.x - s.senders, place = blockIdx.x - s.senders + (split ? 0 : blocks / 2);
    receiving = {place < blocks ? place : place - blocks, blocks};
  }
  // One block posts heads, reports the outcome and has no rows, where there are more blocks than rows of a source. For
  // kernels whose blocks all send and receive.
  __device__ void serve_apart(u32 rows) {
    u32 last = gridDim.x - 1, place = blockIdx.x + last / 2;
    if (gridDim.x <= rows) return;
    receiving.first = blockIdx.x == last ? last : place < last ? place : place - last;
  }
  // The last block of those that send rows.
  __device__ bool ends_sends() const { return sends && sending.first == sending.step - 1; }
  // The block that reports the outcome: the last of its kind, which has the least to do.
  __device__ bool tells() const { return receives && receiving.first == receiving.step - 1; }
  // Whether rows of this rank for itself are not sent: the block that has them in registers finishes them.
  // Equal in all blocks.
  __device__ bool keeps_own() const { return sends && receives; }
};

// The windows of all ranks, with their addresses in shared memory: the first use of each in the table of the
// device API would take as long as a load from memory. They are there behind the next barrier.
template <class Up>
class NearWindows {
 public:
  static constexpr bool kLoadStore = true;

  __device__ NearWindows(const Common& c, const Up& far, u8* shared)
      : far_(far), first_(reinterpret_cast<u64*>(shared)), ranks_(c.ranks) {
#pragma unroll 1
    for (u32 d = threadIdx.x; d < c.ranks; d += blockDim.x) first_[d] = (u64)far.peer_ptr(kControl, d, 0);
    if (threadIdx.x == blockDim.x - 1) first_[c.ranks] = (u64)far.peer_ptr(kArena, c.rank, 0);
  }
  __device__ u8* peer_ptr(u32 window, u32 peer, u64 offset) const {
    return window == kControl ? reinterpret_cast<u8*>(first_[peer]) + offset : far_.peer_ptr(window, peer, offset);
  }
  // A place in the arena of this rank.
  __device__ u8* own_arena(u64 offset) const { return reinterpret_cast<u8*>(first_[ranks_]) + offset; }
  // The shared memory behind the addresses.
  __device__ u8* end() const { return reinterpret_cast<u8*>(first_ + ranks_ + 1); }

 private:
  const Up& far_;
  u64* first_;  // [R]: of control windows, then this rank's arena
  u32 ranks_;
};

// --- How a kernel begins

// Loads the arguments of a kernel into the cache for them, each warp one line: a first use of each in turn would
// take as long as a load from memory. All warps.
template <class Arguments>
__device__ inline void warm(const Arguments& arguments) {
  constexpr u32 kLine = 64;
  const u32* words = reinterpret_cast<const u32*>(&arguments);
#pragma unroll 1
  for (u32 at = wave_id() * kLine; at < sizeof(Arguments); at += block_waves() * kLine) use(words[at / 4]);
}

// This block's part in the turn of an operation.
class DecodeTurn {
 public:
  // Learns the turn, or, where the operation was sent before, its identity. The whole block, with a barrier.
  // `makes`: the operation makes its handle, of `tokens`. `meanwhile` runs while the turn is loaded.
  template <class Meanwhile>
  __device__ TY_INLINED DecodeTurn(const Common& c, const DecodeArgs& s, const Note* note, bool makes, u32 tokens,
                             Meanwhile meanwhile)
      : came_(~0u) {
    bool sends = s.phases & kSends;
    if (sends) {
      LaunchState found(c, makes ? nullptr : note);
      meanwhile();
      makes ? found.publish(true, tokens) : found.publish();
    } else {
      meanwhile();
      if (threadIdx.x == 0) {
        u64 made = load_relaxed(&note->made);
        operation() = {(u32)c.cell->epoch, c.cell->slot, (u32)(made >> 32), (u32)made, load_relaxed(&note->rows)};
      }
    }
    sync_block();
    if (!runs(c)) skip(c, sends);
    // No barrier waits for the answer.
    if (runs(c) && sends && threadIdx.x == blockDim.x - kWave) came_ = atomic_inc(&c.state->arrived, gridDim.x - 1);
  }
  // Whether there is work.
  __device__ static bool runs(const Common& c) { return c.epoch() != 0; }
  // At the end of the kernel: the last of the blocks to have read the turn passes it.
  __device__ void leave(const Common& c) const {
    if (came_ == gridDim.x - 1) pass_turn(c);
  }

 private:
  __device__ static void skip(const Common& c, bool sends) {
    if (!sends || blockIdx.x != 0) return;
    skip_operation(c);
    if (threadIdx.x == 0) c.cell->epoch = 0;
  }

  u32 came_;  // in one thread: the blocks that had read the turn before
};

// --- Heads

// This rank's statement in its head.
struct DecodeHead {
  u32 verdict;
  u32 pieces;  // of a row
};

// The posting of heads by one block, in steps, so that none of them is waited for. Peers that have a head may
// overwrite what this rank had received before. No fence is needed for that: the end of a kernel makes its stores
// visible to every observer before the next kernel of its stream begins (INV-8).
class Heads {
 public:
  // At the start of the kernel, and before the kernel ahead of it has ended: a read of host memory takes longer
  // than all else. The last thread waits for it.
  __device__ Heads(const Common& c, const DecodeArgs& s, const Part& part) : decode_(s), part_(part), given_up_(0) {
    if (part.posts && last()) given_up_ = load_relaxed(c.abort);
  }

  __device__ bool posts() const { return part_.posts; }

  // Once the operation is known: names it for the kernels behind it. The block that reports the outcome stores
  // all values of `code`, so they need no order among blocks.
  __device__ void open(const Common& c) const {
    if (threadIdx.x != 0) return;
    if (part_.tells() || !part_.any_receives) c.cell->code = 0;
    if (!posts()) return;
    c.cell->slot = c.slot();
    c.cell->epoch = c.epoch();
  }

  // Enters at every peer, as other operations do, so that ranks whose calls differ see the mismatch;
  // `rows_for(peer)`: the number of rows for that peer. The blocks of this rank continue unless its host had
  // aborted before: their own head then lacks its first word. Other ranks need only this head of all that
  // this kernel has stored.
  template <class Up, class RowsFor>
  __device__ TY_INLINED void post(const Common& c, const Up& up, const DecodeHead& h, const GivenId* topk_idx,
                                  RowsFor rows_for) const {
    // As many words as a dispatch, so that ranks that run a dispatch see the mismatch and do not wait.
    u32 words = kHead + c.ranks, text = h.verdict == kEnter && c.text_bytes == 0 ? 0 : kTextWords;
    u32 all = words + text;
    u64 epoch = (u64)c.epoch() << 32;
    // Peers first; word 0 of the own head comes last.
#pragma unroll 1
    for (u32 next = wave_id(); next < c.ranks; next += block_waves()) {
      u32 behind = c.rank + 1 + next, peer = behind < c.ranks ? behind : behind - c.ranks;
      if (is_left_out(decode_, peer)) continue;
#pragma unroll 1
      for (u32 w = lane_id(); w < all; w += kWave) {
        u32 value = w < words ? head_word(c, h, w, peer, rows_for) : text_word(c, h.verdict, w - words, topk_idx);
        u32 at = w < words ? w : c.entry_words - kTextWords + w - words;
        if (peer != c.rank || w != 0) store_relaxed(entry_word(c, up, peer, writer_at(c, peer), at), epoch | value);
      }
    }
    if (last() && given_up_ == 0)
      store_relaxed(entry_word(c, up, c.rank, c.rank, 0), epoch | head_word(c, h, 0, c.rank, rows_for));
  }

 private:
  template <class RowsFor>
  __device__ static u32 head_word(const Common& c, const DecodeHead& h, u32 word, u32 peer, RowsFor rows_for) {
    switch (word) {
      case kHeadVerdict: return h.verdict | (h.verdict == kEnter ? kSendsRows : 0);
      case kHeadSignature: return (u32)c.signature;
      case kHeadOrigin: return c.origin();
      case kHeadPlace: return c.objector;
      case kHeadPieces: return h.pieces;
      case kHeadRows: return h.verdict == kEnter ? rows_for(peer) : 0;
      case kHeadSignatureHigh: return (u32)(c.signature >> 32);
      case kHeadText: return c.text_bytes;
      default: return 0;
    }
  }

  __device__ static bool last() { return threadIdx.x == blockDim.x - 1; }

  const DecodeArgs& decode_;
  Part part_;
  u64 given_up_;
};

// --- Failures

// The first token of `source` of which a piece of its row has arrived, or none. One thread.
template <class Up>
__device__ u32 find_row(const Common& c, const DecodeArgs& s, const Up& up, u32 source, Guard& guard) {
  u32 token = 0;
  auto look = [&]() -> u64 {
    for (token = 0; token < c.max_tokens; token++) {
      uint4 v = load_16_relaxed(decode_row(c, s, up, c.rank, place_of(c, source, token)));
      if ((v.x | v.y | v.z | v.w) != 0) return 1;
    }
    return 0;
  };
  bool found = guard.until({kPhaseRows, source, 0, 1}, look, [](u64 there) { return there != 0; });
  return found ? token : ~0u;
}

// See decode_coded.cuh.
template <class Up>
__device__ void drain_coded(const Common& c, const DecodeArgs& s, const Up& up, u32 source, u32 token, u32 blocks,
                            Guard& guard);

// Where an operation is refused, ranks that have not yet received the refusal have sent rows that no rank
// wants: removes them. All blocks that receive; the result is `guard` after it. `AnyFormat`: rows may be encoded.
template <bool AnyFormat, class Up>
__device__ TY_COLD Guard drain(const Common& c, const DecodeArgs& s, Up up, const u32* heard, Portion portion,
                               Guard guard) {
  __shared__ u32 found;
#pragma unroll 1
  for (u32 source = portion.first; source < c.ranks; source += portion.step) {
    const u32* head = &heard[source * kHead];
    u32 rows = takes_part(head) && (head[kHeadVerdict] & kSendsRows) ? head[kHeadRows] : 0;
    u32 pieces = min(head[kHeadPieces], (u32)(s.row_pitch / 16));
#pragma unroll 1
    for (; rows > 0; rows--) {
      if (threadIdx.x == 0) found = find_row(c, s, up, source, guard);
      sync_block();
      u32 token = found;
      if (token == ~0u) break;
      if (AnyFormat && (head[kHeadPieces] & kSendsCoded)) {
        drain_coded(c, s, up, source, token, head[kHeadPieces] & ~kSendsCoded, guard);
        sync_block();
        continue;
      }
      uint4* row = decode_row(c, s, up, c.rank, place_of(c, source, token));
#pragma unroll 1
      for (u32 piece = threadIdx.x; piece < pieces; piece += blockDim.x) {
        auto look = [&]() -> u64 { return has_come(load_16_relaxed(row + piece)); };
        guard.until({kPhaseRows, source, token, 1}, look, [](u64 there) { return there != 0; });
        store_16_relaxed(row + piece, make_uint4(0, 0, 0, 0));
      }
      sync_block();
    }
  }
  return guard;
}

// Where a wait was ended: no more operations are entered, and received data of this operation is no row of
// the next one in its slot. The whole block, after all its other work.
template <class Up>
__device__ TY_COLD void empty_inbox(const Common& c, const DecodeArgs& s, Up up) {
  stop_all(c);
  uint4* rows = decode_row(c, s, up, c.rank, place_of(c, 0, 0));
  u64 pieces = (u64)c.ranks * c.max_tokens * s.row_pitch / 16;
#pragma unroll 1
  for (u64 i = threadIdx.x; i < pieces; i += blockDim.x) store_16_relaxed(rows + i, make_uint4(0, 0, 0, 0));
}
template <class Up>
__device__ void empty_inbox_if_ended(const Common& c, const DecodeArgs& s, const Up& up, const Guard& guard) {
  if (sync_block_or(guard.ended())) empty_inbox(c, s, up);
}

// A word {epoch, value}, once it has arrived; `seen`: a first read of it, which may not have arrived. One thread.
__device__ TY_INLINED u32 poll_seen(const u64* at, u64 seen, const What& what, Guard& guard) {
  guard.until(
      what,
      [&]() -> u64 {
        if (seen >> 32 != what.expected) seen = load_relaxed(at);
        return seen >> 32;
      },
      [&](u64 found) { return found == what.expected; });
  return (u32)seen;
}

// A first read of this thread's first word of the heads, which may not have arrived.
template <class Up>
__device__ u64 look_at_heads(const Common& c, const Up& up) {
  u32 source = threadIdx.x / kHead, word = threadIdx.x % kHead;
  return source < c.ranks ? load_relaxed(entry_word(c, up, c.rank, source, word)) : 0;
}

// The decision, once all heads are in the table and a barrier has followed; all threads hold it. The whole block.
template <bool IsDispatch>
__device__ TY_INLINED Decision decide_together(const Common& c, const u32* heard) {
  __shared__ Decision found;
  bool against = false;
#pragma unroll 1
  for (u32 s = lane_id(); s < c.ranks; s += kWave) against |= objects(c, &heard[s * kHead]);
  // Every warp has read the same heads.
  if (all(!against)) return {kGo, c.rank};
  if (threadIdx.x == 0) found = first_objection<IsDispatch>(c, heard, kHead);
  sync_block();
  return found;
}

// Receives the heads of all ranks that take part; those of the others agree with everything. False if a wait was
// ended. The whole block.
template <class Up>
__device__ TY_COLD bool poll_masked_heads(const Common& c, const DecodeArgs& s, Up up, u32* heard) {
  Guard guard(c.abort, c.cap_ns, c.report);
  poll_present(c, s, {kByHeads, kHead, heard}, guard, [&](u32 source, u32 word, bool is_there) -> u32 {
    What what{kPhaseEntry, source, word, c.epoch()};
    if (is_there) {
      u32 value = poll_seen(entry_word(c, up, c.rank, source, word), 0, what, guard);
      if (word == kHeadVerdict) note_wait(s, source);
      return value;
    }
    switch (word) {
      case kHeadVerdict: return kEnter;
      case kHeadSignature: return (u32)c.signature;
      case kHeadOrigin: return c.origin();
      case kHeadSignatureHigh: return (u32)(c.signature >> 32);
      default: return 0;
    }
  });
  return !guard.ended();
}

// Receives the heads of all ranks; `seen` is from `look_at_heads`. False if a wait was ended. The whole block.
// Later kernels do what a head allows, so these loads order nothing.
template <bool IsDispatch, class Up>
__device__ TY_INLINED bool poll_heads(const Common& c, const DecodeArgs& s, const Up& up, u64 seen, u32* heard,
                                      Decision& decision, Guard& guard) {
  u64 epoch = c.epoch();
  if (masks(s) && !poll_masked_heads(c, s, up, heard)) guard.end();
#pragma unroll 1
  for (u32 i = threadIdx.x; i < c.ranks * kHead && !masks(s); i += blockDim.x, seen = 0) {
    u32 source = i / kHead, word = i % kHead;
    const u64* at = entry_word(c, up, c.rank, source, word);
    heard[i] = poll_seen(at, seen, {kPhaseEntry, source, word, epoch}, guard);
    if (word == kHeadVerdict) note_wait(s, source);
  }
  if (!sync_block_and(!guard.ended())) return false;
  decision = decide_together<IsDispatch>(c, heard);
  return true;
}

// An operation that does not continue. The whole block. Ranks may name another M of dispatches alone: the combines have
// no register for that question.
template <bool IsDispatch, bool AnyFormat = false, class Up>
__device__ void end_refused(const Common& c, const DecodeArgs& s, const Up& up, const u32* heard, const Decision& d,
                            const Part& part, Guard& guard) {
  if (part.tells() && threadIdx.x == 0) tell(c, up, d, &heard[d.rank * kHead], guard);
  // The rows of ranks that are out of step are unknown; those ranks do not continue. Ranks that name another M do.
  bool continues = d.code == kRefused || (IsDispatch && d.code == kAnotherM);
  if (continues) guard = drain<AnyFormat>(c, s, up, heard, part.receiving, guard);
  empty_inbox_if_ended(c, s, up, guard);
}

// This rank refuses. One block.
template <class Up>
__device__ void refuse_decode(const DecodeRefusalArgs& a, const Up& up, u8* shared) {
  Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  u32* heard = reinterpret_cast<u32*>(shared);
  Part part(a.decode);
  Heads heads(a.c, a.decode, part);
  learn_masks(a.c, a.decode);
  LaunchState(a.c, nullptr).publish();
  sync_block();
  if (a.c.epoch() == 0) return;
  if (threadIdx.x == 0) pass_turn(a.c);
  heads.open(a.c);
  heads.post(a.c, up, {a.c.verdict, 0}, nullptr, [](u32) { return 0; });
  Decision d{};
  if (!poll_heads<true>(a.c, a.decode, up, 0, heard, d, guard)) return empty_inbox_if_ended(a.c, a.decode, up, guard);
  end_refused<true, true>(a.c, a.decode, up, heard, d, part, guard);
}

}  // namespace ty
