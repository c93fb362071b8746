// What kernels do over a device API that only puts: records and rows are staged in windows of this rank and
// put from there. A receiver knows how many puts will come and counts their signals (INV-2).
#pragma once
#include "args.cuh"

namespace ty {

// Where an offset of a window of `peer` is; of this rank itself, where the device API only puts.
template <class Up>
__device__ u8* reach(const Common& c, const Up& up, u32 window, u32 peer, u64 offset) {
  if constexpr (Up::kLoadStore)
    return up.peer_ptr(window, peer, offset);
  else
    return c.state->windows[window] + offset;
}

// Puts, and signals, that so many bytes take.
__device__ inline u32 puts_of(const Common& c, u64 bytes) {
  return (u32)((bytes + c.state->longest_put - 1) / c.state->longest_put);
}

// Bytes on their way from this rank's arena to that of a peer.
struct Run {
  u32 peer;
  u64 to, from, bytes;
};

// Puts a run, with a signal each time. One thread; others made visible to the host what they stored.
template <class Up>
__device__ bool put_run(const Common& c, const Up& up, const Run& run, u32 signal, Guard& guard) {
  u64 longest = c.state->longest_put;
  for (u64 at = 0; at < run.bytes; at += longest) {
    u64 bytes = min(longest, run.bytes - at);
    if (!up.put_signal(Thread(), 0, run.peer, At{kArena, run.to + at}, At{kArena, run.from + at},
                       bytes, Raise{signal, 1}, guard))
      return false;
  }
  return true;
}

// The offset in the control window of the record that is staged for a peer.
__device__ inline u64 outbox(const Common& c, u32 peer) {
  return c.state->outbox + c.entries() + 8 * (u64)peer * c.entry_words;
}

// Before records are staged: those of the slot's last operation have left (INV-4), and one more entry
// of everybody is waited for, which this rank's own record tells its other blocks. One block.
template <class Up>
__device__ bool begin_records(const Common& c, const Up& up, Guard& guard) {
  bool ok = sync_block_and(up.flush(Block(), 0, guard));
  if (threadIdx.x == 0 && ok) c.state->entered[c.slot()] += 1;
  sync_block();
  return ok;
}

// Sends the records that were staged. One block.
template <class Up>
__device__ void put_records(const Common& c, const Up& up, Guard& guard) {
  fence_system_all();
  sync_block();
  u64 to = c.entries() + 8 * (u64)c.rank * c.entry_words, bytes = 8 * (u64)c.entry_words;
  for (u32 i = 1 + threadIdx.x; i < c.ranks; i += blockDim.x) {
    u32 peer = (c.rank + i) % c.ranks;
    if (!up.put_signal(Thread(), 0, peer, At{kControl, to}, At{kControl, outbox(c, peer)}, bytes,
                       Raise{c.entry_signal(c.rank), 1}, guard))
      return;
  }
}

// Waits until the records of all ranks are there. The whole block; each block for itself.
template <class Up>
__device__ bool records_come(const Common& c, const Up& up, Guard& guard) {
  u64 record = c.entries() + 8 * (u64)c.rank * c.entry_words;
  const u64* mine = reinterpret_cast<const u64*>(reach(c, up, kControl, c.rank, record));
  u64 epoch = c.epoch();
  bool ok = guard.until({kPhaseEntry, c.rank, 0, epoch}, [&] { return load_acquire(mine) >> 32; },
                        [&](u64 found) { return found == epoch; });
  u64 expected = ok ? load_relaxed(&c.state->entered[c.slot()]) : 0;
  for (u32 s = threadIdx.x; s < c.ranks && ok; s += blockDim.x)
    if (s != c.rank) ok = wait_signal(up, 0, {kPhaseEntry, s, c.entry_signal(s), expected}, guard);
  return sync_block_and(ok);
}

}  // namespace ty
