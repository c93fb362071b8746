// The device API: the calls of a transport that a kernel may use. Version 2.
//
// A transport hands the kernel set the source of one struct, `DeviceApi`, and a parameter block. The
// source is compiled once per level, inside a namespace of its own, so that one device API may serve both
// levels of a communicator. If the source needs a header outside of that namespace, the define
// TY_UP_PRELUDE=<header.h> names that header, and the include folders of the device API hold it. Kernels
// are templates over device APIs and know no transport. This file needs arch.cuh alone: it compiles with
// NVRTC, nvcc, hiprtc and hipcc.
//
// A device API has the members below, and its kernels use nothing else:
//
//   struct DeviceApi {
//     struct Params;                      // plain data, passed to the kernel by value
//     static constexpr bool kLoadStore;   // peer_ptr works: peers' windows are mapped here
//     static constexpr bool kSharedQueues; // a queue may be used by several blocks at once
//     __device__ explicit DeviceApi(const Params&);
//
//     // Where `offset` of `window` of `peer` is mapped. Only where kLoadStore.
//     u8* peer_ptr(u32 window, u32 peer, u64 offset) const;
//
//     // Copies `bytes` from a window of this rank to one of `peer`. Addresses and lengths are
//     // multiples of 16 where kLoadStore, else of 4. Called by every thread of `coop`, with equal arguments.
//     // The payload is all that these threads have made or observed before, as by a release at the system's scope.
//     template <class Coop>
//     bool put(Coop, u32 queue, u32 peer, At dst, At src, u64 bytes, Guard&) const;
//     // The same, then adds to a signal of `peer`: payload before signal (INV-1).
//     template <class Coop>
//     bool put_signal(Coop, u32 queue, u32 peer, At dst, At src, u64 bytes, Raise, Guard&) const;
//     // Stores 8 bytes, whole (INV-3). One thread.
//     bool put_value(u32 queue, u32 peer, At dst, u64 value, Guard&) const;
//     // Adds to a signal of `peer`. One thread. Where kLoadStore it also carries every plain store
//     // that this thread made or observed before, as a release does.
//     bool signal(u32 queue, u32 peer, Raise, Guard&) const;
//     // Lets go what was posted on the queue: a doorbell may wait for it. One thread, behind a barrier of
//     // those that posted; at the end of every phase.
//     void submit(u32 queue) const;
//     // The total of a signal of this rank, raised by puts on this queue of the ranks that raise it, with
//     // acquire order at system scope. One thread.
//     u64 read_signal(u32 queue, u32 id) const;
//     // Waits until the sources of all puts of the queue are reusable (INV-4).
//     template <class Coop> bool flush(Coop, u32 queue, Guard&) const;
//     // Optional: copies from a window of `peer` to one of this rank.
//     template <class Coop>
//     bool get(Coop, u32 queue, u32 peer, At src, At dst, u64 bytes, Guard&) const;
//   };
//
// Window ids are dense, in order of registration. Signal totals only grow and compare rolling; a waiter
// sums the totals of several queues. An add is 1 to 65,535. A queue belongs to one block unless
// kSharedQueues. A block puts on the queue of its number modulo the queues; records use queue 0. A call
// that can block takes the guard and returns false when the guard ended the wait (INV-6): the kernel then
// returns, and the context lives. A device API that sees an error reports it by Guard::fail. Barriers are
// built above the device API.
//
// Bulk copies (TMA) are another proxy than loads and stores. A device API that stores to a peer in
// bulk completes its own stores (`cp.async.bulk.wait_group 0`, not `.read`) before the block's
// barrier and the signal. Code that reads or overwrites by bulk copies the bytes that a signal
// covers does `fence.proxy.async` after it has seen the signal.
#pragma once
#include "arch.cuh"

#define TY_DEVICE_API_VERSION 2

// Defined as 1 in a program whose operations may go on without ranks: see Masking.
#ifndef TY_MASKS
#define TY_MASKS 0
#endif

namespace ty {

// Whether ranks may be left out. A constant, because the code for it takes registers from every wait.
constexpr bool kMasks = TY_MASKS;

// A place in a window.
struct At {
  u32 window;
  u64 offset;
};

// An amount to add, and the signal to add it to.
struct Raise {
  u32 signal;
  u32 add;
};

// The group of threads that call together: every thread of the group calls, with equal arguments.
struct Thread {
  __device__ u32 index() const { return 0; }
  __device__ u32 size() const { return 1; }
  __device__ void sync() const {}
};
struct Warp {
  __device__ u32 index() const { return lane_id(); }
  __device__ u32 size() const { return kWave; }
  __device__ void sync() const { sync_wave(); }
};
struct Block {
  __device__ u32 index() const { return threadIdx.x; }
  __device__ u32 size() const { return blockDim.x; }
  __device__ void sync() const { sync_block(); }
};

// The host's view of a kernel's waits: in pinned memory, one per communicator. The host only reads it, so
// atomics of the device suffice; some machines have no atomics that both sides see.
struct WaitReport {
  u64 ended;     // not 0: a wait ended without its signal; the fields below say which
  u64 phase;     // TY_PHASE_*
  u64 peer;      // index in the team
  u64 signal;    // signal id, or index of a record's word, a tile or a unit of rows
  u64 expected;
  u64 found;
  u64 waiting;   // a wait that lasts: phase << 32 | peer + 1; 0 if there is none
  u64 wait_signal;    // its signal: a report for people, so a torn value does little harm
  u64 wait_expected;
  u64 wait_found;
  u64 begun;          // number of the last operation that all ranks have entered; kernels store it
  u64 masking;        // address of Masking, where operations go on without ranks; else 0. The host sets it once
};

// The subject of a wait.
struct What {
  u32 phase;
  u32 peer;
  u32 signal;
  u64 expected;
};

// Where an operation goes on without ranks that do not come: see masking.cuh. In device memory, except for
// `lost`.
struct Masking {
  u32* masks;       // [R]: bit 0: the rank is left out; above it, the waits that ended without the rank. Or null
  const u64* lost;  // [R], in pinned memory: not 0 once the host says that a rank is lost
  u64* settled;     // [slots, 3, R]: what the blocks of an operation have settled about each rank
  u32* leaving;     // blocks that have received all of an operation's rows
  u64 after_ns;     // a wait for a rank lasts no longer; all ones: only the host ends it
  u32 rank;         // this one, which is always there
  u32 reserved;
};

// Ends waits (INV-6): when the host raises the abort word, or after the cap. Where ranks are masked, also waits
// for a rank that is, or is to be, left out: those alone.
class Guard {
 public:
  __device__ Guard(const u64* abort, u64 cap_ns, WaitReport* report)
      : abort_(abort), cap_(cap_ns), report_(report), since_(0), looks_(0), state_(0) {}

  __device__ bool ended() const { return (state_ & kEnded) != 0; }
  // Another guard of this block has ended.
  __device__ void end() { state_ |= kEnded; }

  // Whether a wait has ended because its rank is left out, since the last call.
  __device__ bool takes_left_out() {
    if (!kMasks) return false;
    bool was = (state_ & kLeftOut) != 0;
    state_ &= ~kLeftOut;
    return was;
  }

  // Returns true once `ready(found)` is true of a value from `read`; false if the wait was ended, or its rank is
  // left out.
  template <class Read, class Ready>
  __device__ bool until(const What& what, Read read, Ready ready) {
    if (ended()) return false;
    since_ = 0;
    looks_ = 0;
    u64 found = read();
    while (!ready(found)) {
      if (++looks_ % kLooksApart == 0) {
        Lasting wait = look_up(abort_, cap_, report_, what, {since_, found});
        since_ = wait.since;
        state_ |= (u32)wait.found;
        if (wait.found != 0) return false;
      }
      between_looks();
      found = read();
    }
    if (since_ != 0) atomic_cas(&report_->waiting, tag(what), 0ull);
    return true;
  }

  // A wait among several of one `until` is over: the next one lasts from its own beginning.
  __device__ void pass(const What& what) {
    if (since_ != 0) atomic_cas(&report_->waiting, tag(what), 0ull);
    since_ = 0;
  }

  // Ends all waits by this guard, now and later. A device API that sees an error itself calls it. For
  // the first failure the host reads the subject of the wait, and the value that was found.
  __device__ void fail(const What& what, u64 found) {
    end();
    report_end(report_, what, found);
  }

 private:
  __device__ static u64 tag(const What& what) { return (u64)what.phase << 32 | (what.peer + 1); }

  // A wait that lasts: since when, and the value that was found; or as the result, whether it was ended.
  struct Lasting {
    u64 since, found;
  };
  static constexpr u32 kEnded = 1, kLeftOut = 2;

  // The report names the wait with the lowest phase and peer of those that last: the other
  // peers may wait for a rank that itself waits for that peer.
  //
  // It lies in the host's memory, and all threads of a kernel may wait. Their atomics on one word there take turns of
  // a microsecond, which make a wait that lasts end late by milliseconds. If waits of milliseconds lasted, the other
  // ranks would in turn wait as long for this one, and so on for ever. So waits last from `kLooksApart` on, and a
  // claim is a load and a store: a name that one of them loses is there again with the next look of its thread.
  __device__ static void claim(WaitReport* report, u64 mine) {
    u64 named = load_relaxed(&report->waiting);
    if (named == 0 || named > mine) store_relaxed(&report->waiting, mine);
  }

  // Waits are in many places of a kernel, and few last: this code is there once.
  __device__ TY_COLD static void report_end(WaitReport* report, What what, u64 found) {
    if (atomic_cas(&report->ended, 0ull, 1ull) != 0) return;
    report->phase = what.phase;
    report->peer = what.peer;
    report->signal = what.signal;
    report->expected = what.expected;
    report->found = found;
    fence_system_all();
    store_release(&report->ended, 2);
  }

  // Whether a wait for a rank goes on without it. The first such wait masks the rank for all later ones.
  __device__ TY_COLD static bool leaves_out(const WaitReport* report, u32 peer, u64 lasted) {
    const Masking* masking = reinterpret_cast<const Masking*>(load_relaxed(&report->masking));
    if (!masking || peer == masking->rank) return false;
    u32* mask = masking->masks + peer;
    bool is_masked = (load_relaxed(mask) & 1) != 0;
    if (!is_masked && load_relaxed(masking->lost + peer) == 0 && lasted < masking->after_ns) return false;
    atomic_or(mask, 1u);
    atomic_add(mask, 2u);
    return true;
  }

  __device__ TY_COLD static Lasting look_up(const u64* abort, u64 cap, WaitReport* report, What what, Lasting wait) {
    u64 now = now_ns(), since = wait.since == 0 ? now : wait.since;
    claim(report, tag(what));
    if (load_relaxed(&report->waiting) == tag(what)) {
      store_relaxed(&report->wait_signal, what.signal);
      store_relaxed(&report->wait_expected, what.expected);
      store_relaxed(&report->wait_found, wait.found);
    }
    bool ends = load_relaxed(abort) != 0 || now - since >= cap;
    if (kMasks && !ends && leaves_out(report, what.peer, now - since)) {
      atomic_cas(&report->waiting, tag(what), 0ull);
      return {since, kLeftOut};
    }
    if (!ends) return {since, 0};
    report_end(report, what, wait.found);
    return {since, kEnded};
  }

  const u64* abort_;
  u64 cap_;
  WaitReport* report_;
  u64 since_;
  u32 looks_;
  u32 state_;
};

// Waits for a total; totals compare rolling.
template <class DeviceApi>
__device__ TY_INLINED bool wait_signal(const DeviceApi& device_api, u32 queue, const What& what, Guard& guard) {
  return guard.until(
      what, [&] { return device_api.read_signal(queue, what.signal); },
      [&](u64 found) { return (i64)(found - what.expected) >= 0; });
}

// Copies multiples of 16 bytes by loads and stores, with four of a thread in flight.
template <class Coop>
__device__ void copy_16(Coop coop, u8* dst, const u8* src, u64 bytes) {
  u64 step = (u64)coop.size() * 16, at = (u64)coop.index() * 16;
  for (; at + 3 * step < bytes; at += 4 * step) {
    uint4 value[4];
#pragma unroll
    for (u32 i = 0; i < 4; i++) value[i] = load_16(reinterpret_cast<const uint4*>(src + at + i * step));
#pragma unroll
    for (u32 i = 0; i < 4; i++) store_16(reinterpret_cast<uint4*>(dst + at + i * step), value[i]);
  }
  for (; at < bytes; at += step)
    store_16(reinterpret_cast<uint4*>(dst + at), load_16(reinterpret_cast<const uint4*>(src + at)));
}

}  // namespace ty
