// Low-latency operations that go on without ranks that do not come.
//
// A rank is left out once its mask is set: by the host, or by the first wait for it that ends in vain (see Guard).
// Then no rows are sent to it, and no block waits for it. Ranks need not agree about masks. The blocks of one rank must
// agree about the sources of an operation, because together they give places to the rows. So the first block that
// knows about a source decides for all blocks whether the source takes part. If a source takes part and stops midway,
// some of its places stay empty. The last block fills them with zeros.
#pragma once
#include "decode_args.cuh"
#include "entry.cuh"

namespace ty {

// Most ranks of which some may be masked.
constexpr u32 kMostMasked = 128;
// Facts that are settled about the sources of an operation: by their heads, by their reports, and whether rows are
// missing.
constexpr u32 kByHeads = 0, kByReports = 1, kGaps = 2, kSettled = 3;

// The ranks that are left out of this operation, as far as this block knows.
struct LeftOut {
  u8 ranks[kMostMasked];
  u8 late[kGaps][kMostMasked];  // ranks whose words this block has not received
};
__device__ inline LeftOut& left_out() {
  __shared__ LeftOut out;
  return out;
}

__device__ inline bool masks(const DecodeArgs& s) { return kMasks && s.masking.masks != nullptr; }
__device__ inline bool is_left_out(const DecodeArgs& s, u32 rank) { return masks(s) && left_out().ranks[rank] != 0; }
__device__ inline u64* settled_word(const Common& c, const DecodeArgs& s, u32 round, u32 rank) {
  return s.masking.settled + ((u64)c.slot() * kSettled + round) * c.ranks + rank;
}

// When this block began, if it is the one that notes waits, else 0. In shared memory: kernels that receive have no
// registers to spare.
__device__ inline u64& begun_ns() {
  __shared__ u64 begun;
  return begun;
}
// Adds to the time until a rank had entered, if the call asks for that. By the thread that has received the first word
// of its head.
__device__ TY_INLINED void note_wait(const DecodeArgs& s, u32 rank) {
  if (s.waited_ns && begun_ns() != 0) s.waited_ns[rank] += (i64)(now_ns() - begun_ns());
}

// Reads the masks, and the clock; they are there behind the next barrier. Once the kernel ahead has ended.
__device__ TY_INLINED void learn_masks(const Common& c, const DecodeArgs& s) {
  // The last block receives heads in every kernel that does.
  if (s.waited_ns && threadIdx.x == 0) begun_ns() = blockIdx.x == gridDim.x - 1 ? now_ns() : 0;
  if (!masks(s) || wave_id() != block_waves() - 1) return;
#pragma unroll 1
  for (u32 rank = lane_id(); rank < c.ranks; rank += kWave) {
    LeftOut& out = left_out();
    out.ranks[rank] = load_relaxed(s.masking.masks + rank) & 1;
    out.late[kByHeads][rank] = out.late[kByReports][rank] = 0;
  }
}

// Leaves a rank out of what this block does from now on. The whole block.
__device__ TY_INLINED void leave_out(u32 rank) {
  sync_block();
  if (threadIdx.x == 0) left_out().ranks[rank] = 1;
  sync_block();
}

// Settles which ranks are left out: all blocks of this rank get the same answer. The whole block.
__device__ TY_COLD void settle(const Common& c, const DecodeArgs& s, u32 round) {
  LeftOut& out = left_out();
  sync_block();
#pragma unroll 1
  for (u32 rank = threadIdx.x; rank < c.ranks; rank += blockDim.x) {
    u64* word = settled_word(c, s, round, rank);
    u64 epoch = c.epoch(), old = load_relaxed(word), mine = epoch << 1 | out.late[round][rank];
    if (old >> 1 != epoch) {
      u64 found = atomic_cas(word, old, mine);
      old = found == old ? mine : found;
    }
    out.ranks[rank] = old & 1;
  }
  sync_block();
}

// Words that every rank sends: the round that they belong to, their number, and the table that they go to.
struct Polled {
  u32 round, words;
  u32* table;
};

// Receives words of the ranks that take part. `ask(source, word, is_there)` waits for one, or gives what stands for
// a word of a rank that is left out. The whole block.
template <class Ask>
__device__ inline void poll_present(const Common& c, const DecodeArgs& s, const Polled& p, Guard& guard, Ask ask) {
  LeftOut& out = left_out();
#pragma unroll 1
  for (u32 i = threadIdx.x; i < c.ranks * p.words; i += blockDim.x) {
    u32 source = i / p.words;
    bool waits = out.ranks[source] == 0;
    if (waits) p.table[i] = ask(source, i - source * p.words, true);
    if (!waits || guard.takes_left_out()) out.late[p.round][source] = 1;
  }
  settle(c, s, p.round);
#pragma unroll 1
  for (u32 i = threadIdx.x; i < c.ranks * p.words; i += blockDim.x) {
    u32 source = i / p.words, word = i - source * p.words;
    bool is_there = out.ranks[source] == 0;
    if (is_there && out.late[p.round][source] == 0) continue;
    // Another block has seen all words of a source that takes part, so they are there.
    do p.table[i] = ask(source, word, is_there);
    while (guard.takes_left_out());
  }
  sync_block();
}

// Whether the pieces of a row, for which all threads of the block have waited, are there. The whole block.
__device__ TY_INLINED bool has_row(const DecodeArgs& s, Guard& guard) {
  return !masks(s) || !sync_block_or(guard.takes_left_out());
}

// Whether this block is the last one to have received all of its rows: it sees what the others have stored. The
// whole block.
__device__ TY_INLINED bool last_to_receive(const DecodeArgs& s, u32 blocks) {
  __shared__ u32 last;
  sync_block();
  if (threadIdx.x == 0) {
    fence_device();
    last = atomic_inc(s.masking.leaving, blocks - 1) == blocks - 1;
    fence_device();
  }
  sync_block();
  return last != 0;
}

}  // namespace ty
