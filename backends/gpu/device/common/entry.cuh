// How ranks enter an operation: records of words {epoch, value} in each other's control windows.
//
// A word itself says whether it is of this operation, so no fence and no signal is needed. A slot's
// records are written again two operations later at the earliest; by then every rank has entered
// the operation between, so it has read them.
//
// Where the device API only puts, records are staged and put whole, and each comes with a signal.
#pragma once
#include "puts.cuh"

namespace ty {

// How a rank enters behind a former exchange: as that ended. Where it has failed in another way than by a
// refusal, ranks are out of step, and the operation is not entered. Apart, because few operations have a former
// exchange.
constexpr u32 kOutOfStep = ~0u;
__device__ TY_COLD u32 verdict_behind(const Common& c) {
  u32 code = c.former->code;
  if (load_relaxed(c.former_stopped) != 0) return kOutOfStep;
  if (code == kGo) return c.verdict;
  return code == kRefused ? c.former_outcome->verdict : kOutOfStep;
}

// Waits until the former exchange has decided, where it runs beside this one. The whole block.
__device__ inline bool former_is_decided(const Common& c, Guard& guard) {
  if (!c.former || c.former_ticket == 0) return true;
  return sync_block_and(is_decided(c.former, c.former_ticket, c.rank, guard));
}

// The state that thread 0 of a block reads as soon as its kernel starts, so that it is loaded when it
// is needed.
struct LaunchState {
  u64 turn = 0, stopped = 0, made = 0, rows = 0, former_epoch = 0;
  u32 verdict = kEnter;

  // `follows`: it may be queued behind another exchange.
  __device__ LaunchState(const Common& c, const Note* note, bool follows = false) : verdict(c.verdict) {
    if (threadIdx.x != 0) return;
    turn = load_relaxed(&c.state->turn);
    stopped = load_relaxed(&c.state->stopped);
    if (follows && c.former) {
      verdict = verdict_behind(c);
      former_epoch = load_relaxed(&c.former->epoch);
      if (verdict == kOutOfStep) stopped = 1;
    }
    if (!note) return;
    made = load_relaxed(&note->made);
    rows = load_relaxed(&note->rows);
  }
  // For the block, behind its next barrier. A dispatch that makes its handle is its own origin.
  __device__ void publish(bool makes, u32 tokens) const {
    if (threadIdx.x != 0) return;
    u32 epoch = stopped ? 0 : (u32)turn;
    operation() = {epoch, (u32)(turn >> 32), tokens, makes ? epoch : (u32)made, rows, verdict, (u32)former_epoch};
  }
  __device__ void publish() const { publish(false, (u32)(made >> 32)); }
};

// Passes the turn to the next operation, once all blocks have read this one's. One thread.
__device__ inline void pass_turn(const Common& c) {
  u32 epoch = c.epoch() + 1, slot = c.slot() + 1;
  c.state->turn = (epoch == 0 ? 1 : epoch) | (u64)(slot == c.slots ? 0 : slot) << 32;
}

// Passes the turn where blocks share no barrier: the last of them does so. One thread of each
// block.
__device__ inline void leave_turn(const Common& c) {
  if (atomic_inc(&c.state->arrived, gridDim.x - 1) == gridDim.x - 1) pass_turn(c);
}

// A wait was ended: operations queued behind it must not be entered, because ranks are out of step.
__device__ inline void stop_all(const Common& c) {
  if (threadIdx.x == 0) c.state->stopped = 1;
}

// Reports to the exchange beside this one how this one goes on, once all is stored that the other reads. One thread.
__device__ inline void decide_beside(const Common& c, u32 code) {
  if constexpr (kRuns || kGrouped) store_release(&c.cell->decided, (u64)c.ticket << 32 | code);
}

// An operation that is not entered, because an older one has failed: kernels queued behind it must not
// use the cell of the operation before. One block.
__device__ inline void skip_operation(const Common& c) {
  if (threadIdx.x != 0) return;
  c.cell->code = 0;
  decide_beside(c, 0);
}

// Whether a block is the last of its launch to get here: the stores of all other blocks before this
// call are then visible. No block waits: a block that needs the result of the last one receives
// this rank's own record.
__device__ inline bool last_to_come(const Common& c) {
  __shared__ u32 last;
  sync_block();
  if (threadIdx.x == 0) {
    fence_device();
    last = atomic_inc(&c.state->arrived, gridDim.x - 1) == gridDim.x - 1;
    fence_device();
  }
  sync_block();
  return last;
}

// Word `word` of the record that `source` writes at `peer`; where the device API only puts, this rank is
// one of the two.
template <class Up>
__device__ u64* entry_word(const Common& c, const Up& up, u32 peer, u32 source, u32 word) {
  u64 offset = c.entries() + 8 * ((u64)source * c.entry_words + word);
  if constexpr (!Up::kLoadStore)
    if (peer != c.rank) offset = outbox(c, peer) + 8 * (u64)word;
  return reinterpret_cast<u64*>(reach(c, up, kControl, peer, offset));
}

// Word `word` of a text that this rank passes on, as `poll_text` has stored it.
__device__ TY_COLD u32 passed_word(const Outcome& from, u32 word) {
  const u32* words = reinterpret_cast<const u32*>(from.text);
  if (from.verdict == kRefuseInput) return word < 4 ? words[word] : 0;
  return word == 0 ? from.text_bytes : words[word - 1];
}

// Word `word` of the text of a refusal.
__device__ TY_COLD u32 text_word(const Common& c, u32 verdict, u32 word, const GivenId* topk_idx) {
  if (c.passes_on()) return passed_word(*c.former_outcome, word);
  if (verdict != kRefuseInput) {
    if (word == 0) return c.text_bytes;
    u32 value = 0;
    for (u32 i = 0; i < 4; i++) value |= (u32)c.text[4 * (word - 1) + i] << 8 * i;
    return value;
  }
  u64 problem = c.state->problem, token = problem >> 16, k = problem >> 8 & 0xff;
  bool too_many = (problem & 0xff) == kTooMany;
  i64 found = too_many ? c.input_rows : topk_idx[token * c.topk + k];
  u32 words[] = {(u32)token, (u32)(problem & 0xffff), (u32)found, (u32)((u64)found >> 32)};
  return word < 4 ? words[word] : 0;
}

// Enters at every peer. `word(peer, i)` gives the words of the head and of the rest of the record, `words`
// in all. One block. Other ranks need only their record of all that this kernel has stored. The blocks of
// this rank continue once `goes_on()` is true and its own record has arrived, too; the whole block asks.
template <class Up, class Word, class GoesOn>
__device__ void post_entry(const Common& c, const Up& up, u32 words, u32 verdict,
                      const GivenId* topk_idx, Guard& guard, Word word, GoesOn goes_on) {
  if constexpr (!Up::kLoadStore)
    if (!begin_records(c, up, guard)) return;
  u32 text = verdict == kEnter && c.text_bytes == 0 ? 0 : kTextWords, all = words + text;
  u64 epoch = (u64)c.epoch() << 32;
#pragma unroll 1
  for (u32 own = 0; own < 2; own++) {
    // Blocks of this rank that receive its own record see the counts of its other blocks.
    if (own) fence_device();
    if (own && !goes_on()) return;
    u32 first = own ? 0 : 1, records = own ? 1 : c.ranks - 1;
#pragma unroll 1
    for (u32 i = threadIdx.x; i < records * all; i += blockDim.x) {
      u32 peer = (c.rank + first + i / all) % c.ranks, w = i % all;
      u32 value = w < words ? word(peer, w) : text_word(c, verdict, w - words, topk_idx);
      u32 at = w < words ? w : c.entry_words - kTextWords + w - words;
      store_relaxed(entry_word(c, up, peer, writer_at(c, peer), at), epoch | value);
    }
  }
  if constexpr (!Up::kLoadStore) put_records(c, up, guard);
}
template <class Up, class Word>
__device__ void post_entry(const Common& c, const Up& up, u32 words, u32 verdict,
                      const GivenId* topk_idx, Guard& guard, Word word) {
  post_entry(c, up, words, verdict, topk_idx, guard, word, [] { return true; });
}

// One word of another rank's record, once it has arrived.
template <class Up>
__device__ bool poll_word(const Common& c, const Up& up, u32 source, u32 word, Guard& guard,
                          u32* value) {
  const u64* at = entry_word(c, up, c.rank, source, word);
  u64 seen = 0, epoch = c.epoch();
  bool ok = guard.until({kPhaseEntry, source, word, epoch},
                        [&] { return (seen = load_acquire(at)) >> 32; },
                        [&](u64 found) { return found == epoch; });
  *value = (u32)seen;
  return ok;
}

// Words of a record that lie together.
struct WordRange {
  u32 first, count;
};

// The same words of all ranks' records: `each(i, source, value)` of word `first + i`, in the order of words, then
// of ranks. Words that only count need no order, so they are loaded side by side.
template <class Up, class Each>
__device__ bool poll_words_of_all(const Common& c, const Up& up, WordRange words, Guard& guard, Each each) {
  constexpr u32 kAtOnce = 8;
  const u64* at = entry_word(c, up, c.rank, 0, words.first);
  u32 epoch = c.epoch(), word = 0, source = 0, left = words.count * c.ranks;
  auto take = [&](u32 value) {
    each(word, source, value);
    if (++source == c.ranks) source = 0, word++;
  };
#pragma unroll 1
  while (left > 0) {
    u64 seen[kAtOnce];
    u32 batch = min(left, kAtOnce), ahead_word = word, ahead_source = source;
    bool there = true;
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++) {
      seen[i] = i < batch ? load_relaxed(at + (u64)ahead_source * c.entry_words + ahead_word) : 0;
      if (++ahead_source == c.ranks) ahead_source = 0, ahead_word++;
    }
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++)
      if (i < batch) there &= seen[i] >> 32 == epoch;
    // If a word is late, all of them are loaded one after the other: at worst, the others are loaded again.
#pragma unroll 1
    for (u32 i = 0; i < batch && !there; i++) {
      u32 value;
      if (!poll_word(c, up, source, words.first + word, guard, &value)) return false;
      take(value);
    }
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++)
      if (there && i < batch) take((u32)seen[i]);
    left -= batch;
  }
  return true;
}

// Receives the first `words` words of every rank's record: `table[source * words + word]`. Each
// block does so for itself.
template <class Up>
__device__ bool poll_entries(const Common& c, const Up& up, u32 words, u32* table, Guard& guard) {
  bool ok = true;
  if constexpr (!Up::kLoadStore) ok = records_come(c, up, guard);
  for (u32 i = threadIdx.x; i < c.ranks * words && ok; i += blockDim.x)
    ok = poll_word(c, up, i / words, i % words, guard, &table[i]);
  // Writes behind the barrier go to places that the records declare free: the threads that received
  // the records did so with acquire order.
  return sync_block_and(ok);
}

// The signature of its rank's call, in a head.
__device__ inline u64 signature_of(const u32* head) {
  return head[kHeadSignature] | (u64)head[kHeadSignatureHigh] << 32;
}

// A signature without M of the call: core's `Signature::of_word` reads the same bits.
__device__ inline u64 without_tokens(u64 signature) {
  constexpr u64 kHasTokens = 1ull << 18, kTokens = kHasTokens | 1ull << 19 | 0x3ffffull << 46;
  bool has_tokens = (signature & 0xf) == 1 && (signature & kHasTokens) != 0;
  return has_tokens ? signature & ~kTokens : signature;
}

struct Decision {
  u32 code;
  u32 rank;
};

// Whether a head says that its rank takes part.
__device__ inline bool takes_part(const u32* head) { return (head[kHeadVerdict] & 0xff) == kEnter; }

// Whether a head holds an objection.
__device__ inline bool objects(const Common& c, const u32* head) {
  return !takes_part(head) || signature_of(head) != c.signature || head[kHeadOrigin] != c.origin();
}

// Whether one word of a head holds an objection; a head that does has such a word.
__device__ inline bool word_objects(const Common& c, u32 word, u32 value) {
  switch (word) {
    case kHeadVerdict: return (value & 0xff) != kEnter;
    case kHeadSignature: return value != (u32)c.signature;
    case kHeadOrigin: return value != c.origin();
    case kHeadSignatureHigh: return value != (u32)(c.signature >> 32);
    default: return false;
  }
}

// The first objection in order of ranks, from the fields of heads that do not depend on sizes. A
// refusal may be another rank's that its forwarder passes on; its order is in the field of a region. Combines name no
// M, and have no register for it.
template <bool IsDispatch>
__device__ TY_COLD Decision first_objection(const Common& c, const u32* table, u32 words) {
  for (u32 s = 0; s < c.ranks; s++)
    if ((table[s * words + kHeadSignature] ^ (u32)c.signature) & 0xff) return {kMismatch, s};
  u32 refused = c.ranks;
  for (u32 s = 0; s < c.ranks; s++)
    if (!takes_part(&table[s * words]) &&
        (refused == c.ranks || table[s * words + kHeadPlace] < table[refused * words + kHeadPlace]))
      refused = s;
  if (refused < c.ranks) return {kRefused, refused};
  u64 ours = IsDispatch ? without_tokens(c.signature) : c.signature;
  for (u32 s = 0; s < c.ranks; s++) {
    u64 theirs = signature_of(&table[s * words]);
    if ((IsDispatch ? without_tokens(theirs) : theirs) != ours) return {kMismatch, s};
  }
  for (u32 s = 0; s < c.ranks; s++)
    if (table[s * words + kHeadOrigin] != c.origin()) return {kOrigin, s};
  // Another M alone counts last, so that all ranks find the same kind of difference.
  for (u32 s = 0; s < c.ranks && IsDispatch; s++)
    if (signature_of(&table[s * words]) != c.signature) return {kAnotherM, s};
  return {kGo, c.rank};
}

// The first objection, or kGo. One warp; the first lane has the result.
template <bool IsDispatch>
__device__ inline Decision decide(const Common& c, const u32* table, u32 words) {
  bool against = false;
  for (u32 s = lane_id(); s < c.ranks; s += kWave) against |= objects(c, &table[s * words]);
  against = !all(!against);
  bool looks = against && lane_id() == 0;
  return looks ? first_objection<IsDispatch>(c, table, words) : Decision{kGo, c.rank};
}

// Receives the text that goes with a record. One thread.
template <class Up>
__device__ bool poll_text(const Common& c, const Up& up, u32 source, u32 verdict, Guard& guard) {
  Outcome& o = *c.outcome;
  u32 first = c.entry_words - kTextWords;
  for (u32 w = 0; w < kTextWords; w++) {
    u32 value;
    if (!poll_word(c, up, source, first + w, guard, &value)) return false;
    if (verdict != kRefuseInput && w == 0) o.text_bytes = value;
    u32 at = verdict != kRefuseInput ? w - 1 : w;
    if (at < kTextBytes / 4) reinterpret_cast<u32*>(o.text)[at] = value;
  }
  return true;
}

// The report to the host about an operation that it waits for, or that does not continue. One thread; the
// result is `guard` after it.
template <class Up>
__device__ TY_COLD Guard report_to_host(const Common& c, Up up, Decision d, const u32* head, Guard guard) {
  Outcome& o = *c.outcome;
  o.code = d.code;
  o.rank = d.rank;
  o.verdict = head[kHeadVerdict] & 0xff;
  o.signature = signature_of(head);
  o.own_signature = c.signature;
  o.origin = head[kHeadOrigin];
  o.objector = head[kHeadPlace];
  o.own_origin = c.origin();
  o.text_bytes = 0;
  bool text = d.code == kRefused || (d.code == kFull && head[kHeadText] != 0);
  bool heard = !text || poll_text(c, up, d.rank, o.verdict, guard);
  if (c.no_host_sync || !heard) c.state->stopped = 1;
  if (heard) store_release(&o.epoch, c.ticket);
  return guard;
}

// Reports to the host, with the fields of the head of the rank in question. One thread.
template <class Up>
__device__ void tell(const Common& c, const Up& up, const Decision& d, const u32* head,
                     Guard& guard) {
  c.cell->code = d.code;
  store_relaxed(&c.report->begun, c.epoch());
  if (c.no_host_sync && d.code == kGo) return;
  guard = report_to_host(c, up, d, head, guard);
}

// An operation without rows: the findings of each host, and the first objection. One block.
template <class Up>
__device__ void agree(const Common& c, const Up& up, u8* shared) {
  Guard guard(c.abort, c.cap_ns, c.report);
  u32* heard = reinterpret_cast<u32*>(shared);
  if (!former_is_decided(c, guard)) return stop_all(c);
  LaunchState(c, nullptr, true).publish();
  sync_block();
  // An exchange may follow before any host knows the outcome of this one.
  if (threadIdx.x == 0) c.cell->code = 0;
  if (c.epoch() == 0) return;
  if (threadIdx.x == 0) pass_turn(c);
  u32 verdict = operation().verdict;
  u32 head[kHead] = {verdict, (u32)c.signature, 0, c.objector_now(),
                     0,       0,                (u32)(c.signature >> 32), 0};
  // As many words as a dispatch, so that ranks that run a dispatch see the mismatch and do not
  // wait.
  post_entry(c, up, kHead + c.ranks * c.groups(), verdict, nullptr, guard,
        [&](u32, u32 w) { return w < kHead ? head[w] : 0; });
  if (!poll_entries(c, up, kHead, heard, guard)) return stop_all(c);
  if (threadIdx.x != 0) return;
  Decision d = first_objection<true>(c, heard, kHead);
  tell(c, up, d, &heard[d.rank * kHead], guard);
}

// The signals that are waited for from every rank: signals of a slot from `first` on.
struct Arrival {
  const Cell* cell;
  const State* state;
  u32 rank, ranks, first, phase;
};

// Waits for a signal of every rank. One block.
template <class Up>
__device__ TY_INLINED void arrive(const Arrival& a, const Up& up, Guard& guard) {
  bool waits = a.cell->code == kGo;
  for (u32 s = threadIdx.x; s < a.ranks; s += blockDim.x) {
    // Loaded together with the others.
    u64 total = a.cell->totals[s], all = a.cell->totals[a.ranks + s];
    u64 own = a.cell->totals[a.ranks + a.rank];
    if (!waits) continue;
    // No kernel waits for these stores. This rank has raised its signals at all ranks as it has at
    // itself.
    PeerCounters& counters = a.state->counters[s * a.state->counters_step];
    if constexpr (Up::kLoadStore)
      store_relaxed(&counters.raised, own);
    else
      store_relaxed(&counters.bytes, load_device(&a.state->put_bytes[s]));
    store_relaxed(&counters.expected, all);
    if (wait_queues(*a.state, up, {a.phase, s, a.first + s, total}, guard))
      store_relaxed(&counters.received, all);
  }
}

// The same for an operation that is received by the kernel that has sent it.
template <class Up>
__device__ TY_INLINED void end_at_once(const Common& c, const Up& up, u32 first, u32 phase, Guard& guard) {
  // One warp of the block has written the totals that the whole block waits for, and one the cell's code.
  sync_block();
  arrive({c.cell, c.state, c.rank, c.ranks, first, phase}, up, guard);
  if (guard.ended()) c.state->stopped = 1;
  sync_block();
  if (threadIdx.x == 0) c.trace->arrived = now_ns();
}

// Raises a signal of every rank by one, after everything that this block stored: a device API that stores
// has a release behind the barrier. Does nothing if a wait of one of its threads was ended.
template <class Up>
__device__ TY_INLINED bool raise_all(const Common& c, const Up& up, u32 signal, Guard& guard) {
  if constexpr (!Up::kLoadStore) fence_system_all();
  bool ok = sync_block_and(!guard.ended());
  for (u32 i = threadIdx.x; i < c.ranks && ok; i += blockDim.x) {
    u32 peer = (c.rank + i) % c.ranks;
    ok = up.signal(0, peer, {signal_at(c, signal, peer), 1}, guard);
  }
  ok = sync_block_and(ok);
  if (threadIdx.x == 0) up.submit(0);
  return ok;
}

}  // namespace ty
