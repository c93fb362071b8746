// The calls of kernels over a device API that only puts: records and rows are staged in windows of this
// rank and put from there. A receiver knows how many puts will arrive and counts their signals (INV-2).
#pragma once
#include "args.cuh"

namespace ty {

// The address of an offset of a window of `peer`; of this rank itself, where the device API only
// puts.
template <class Up>
__device__ u8* reach(const Common& c, const Up& up, u32 window, u32 peer, u64 offset) {
  if constexpr (Up::kLoadStore)
    return up.peer_ptr(window, peer, offset);
  else
    return c.state->windows[window] + offset;
}

// The most that a put adds to a signal.
constexpr u64 kMostAdd = 65535;

// The most bytes of a put. Rows are shorter than 2 GiB, and a division of 64 bits takes long.
__device__ inline u32 largest_put(const Common& c) { return (u32)min(c.state->largest_put, 1ull << 31); }

// The expected total of the signals of this many rows. A row counts one, or one for each put if it is longer
// than a put may be. So the total does not depend on how a sender groups rows into puts.
__device__ inline u64 signals_of(const Common& c, u64 rows, u64 width) {
  u32 largest = largest_put(c);
  return rows * (((u32)width + largest - 1) / largest);
}

// Rows that move from this rank's arena to that of a peer, and are consecutive at both ends.
struct Run {
  u32 peer;
  u64 to, from, rows, width;
};

// The queue that this block puts on.
__device__ inline u32 own_queue(const Common& c) { return blockIdx.x % (u32)c.state->queues; }

// Puts a run, with a signal each time. One thread, to which the rows are visible.
template <class Up>
__device__ TY_INLINED bool put_run(const Common& c, const Up& up, u32 queue, const Run& run, u32 signal,
                        Guard& guard) {
  if (run.width == 0) return true;
  u64 largest = largest_put(c), at_once = min((u64)((u32)largest / (u32)run.width), kMostAdd);
  u64 step = max(at_once, 1ull);
  for (u64 row = 0; row < run.rows; row += step) {
    u64 rows = min(step, run.rows - row), at = row * run.width, end = at + rows * run.width;
    u32 add = at_once == 0 ? 1 : (u32)rows;
    for (; at < end; at += largest)
      if (!up.put_signal(Thread(), queue, run.peer, At{kArena, run.to + at},
                         At{kArena, run.from + at}, min(largest, end - at),
                         Raise{signal_at(c, signal, run.peer), add}, guard))
        return false;
  }
  atomic_add(&c.state->put_bytes[run.peer], run.rows * run.width);
  return true;
}

// Submits the puts of this block on a queue.
template <class Up>
__device__ void submit_block(const Up& up, u32 queue) {
  sync_block();
  if (threadIdx.x == 0) up.submit(queue);
}

// Waits until the sources of this rank's puts may be overwritten (INV-4). One block.
template <class Up>
__device__ void flush_queues(const State& state, const Up& up, Guard& guard) {
  u32 queues = Up::kLoadStore ? 1 : (u32)state.queues;
  for (u32 queue = 0; queue < queues; queue++) up.flush(Block(), queue, guard);
}

// The total of a signal over all queues.
template <class Up>
__device__ TY_INLINED u64 total_of_queues(const State& state, const Up& up, u32 signal) {
  u64 sum = 0;
  for (u32 queue = 0; queue < (u32)state.queues; queue++) sum += up.read_signal(queue, signal);
  return sum;
}

// Waits for a total over all queues; totals compare rolling.
template <class Up>
__device__ TY_INLINED bool wait_queues(const State& state, const Up& up, const What& what, Guard& guard) {
  if constexpr (Up::kLoadStore) return wait_signal(up, 0, what, guard);
  return guard.until(what, [&] { return total_of_queues(state, up, what.signal); },
                     [&](u64 found) { return (i64)(found - what.expected) >= 0; });
}

// The offset in the control window of the record that is staged for a peer.
__device__ inline u64 outbox(const Common& c, u32 peer) {
  return c.state->outbox + c.entries() + 8 * (u64)peer * c.entry_words;
}

// Before records are staged: those of the slot's last operation have left (INV-4). One more entry of
// each rank is then expected; this rank's own record reports that to its other blocks. One block.
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
  u64 bytes = 8 * (u64)c.entry_words;
  bool ok = true;
  for (u32 i = 1 + threadIdx.x; i < c.ranks && ok; i += blockDim.x) {
    u32 peer = (c.rank + i) % c.ranks, writer = writer_at(c, peer);
    u64 to = c.entries() + bytes * writer;
    ok = up.put_signal(Thread(), 0, peer, At{kControl, to}, At{kControl, outbox(c, peer)}, bytes,
                       Raise{c.entry_signal(writer), 1}, guard);
    atomic_add(&c.state->put_bytes[peer], bytes);
  }
  submit_block(up, 0);
}

// Waits until the records of all ranks have arrived. The whole block; each block for itself.
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
