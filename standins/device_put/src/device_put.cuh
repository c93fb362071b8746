// The device API of the transport `device-put`, a tool for tests: it only puts, on several queues. Kernels
// write commands into rings in host memory, one ring for each queue, and a host thread executes them late
// and in another order. See transport.cuh.
// Compiled inside a namespace of its level, behind a namespace `inner` with the device API that reads
// signals; no include guard.

struct DeviceApi {
  // One command; `RingCommand` of ring.rs.
  struct Command {
    ty::u32 op, peer, signal, add, src_window, dst_window;
    ty::u64 src_offset, dst_offset, bytes, value;
    ty::u64 sequence;  // number of the command + 1, stored last
  };
  static_assert(sizeof(Command) == 64, "the host takes commands of another size");
  // One queue; `DeviceRing` of ring.rs.
  struct Ring {
    ty::u64* head;       // in device memory: number of commands so far
    Command* commands;   // in host memory: `mask` + 1 slots
    ty::u64* submitted;  // in host memory: commands that the host may take
    const ty::u64* done;    // in host memory: number of commands that are done, all earlier ones included
    const ty::u64* failed;  // in host memory: not 0 once the host has given up
  };
  struct Params {
    inner::DeviceApi::Params inner;
    const Ring* rings;
    ty::u32 mask, signals, me, reserved;
  };
  static constexpr bool kLoadStore = false;
  static constexpr bool kSharedQueues = true;

  Params p;
  __device__ explicit DeviceApi(const Params& params) : p(params) {}

  template <class Coop>
  __device__ bool put(Coop coop, ty::u32 queue, ty::u32 peer, ty::At dst, ty::At src, ty::u64 bytes,
                      ty::Guard& guard) const {
    return post_all(coop, queue, {kPut, peer, 0, 0, src.window, dst.window, src.offset, dst.offset, bytes},
                    guard);
  }
  template <class Coop>
  __device__ bool put_signal(Coop coop, ty::u32 queue, ty::u32 peer, ty::At dst, ty::At src, ty::u64 bytes,
                             ty::Raise raise, ty::Guard& guard) const {
    return post_all(coop, queue, {kPutSignal, peer, id(queue, raise.signal), raise.add, src.window, dst.window,
                                  src.offset, dst.offset, bytes},
                    guard);
  }
  __device__ bool put_value(ty::u32 queue, ty::u32 peer, ty::At dst, ty::u64 value, ty::Guard& guard) const {
    return post(queue, {kPutValue, peer, 0, 0, 0, dst.window, 0, dst.offset, 0, value}, guard);
  }
  __device__ bool signal(ty::u32 queue, ty::u32 peer, ty::Raise raise, ty::Guard& guard) const {
    return post(queue, {kSignal, peer, id(queue, raise.signal), raise.add}, guard);
  }

  // Until then the host takes none of the posted commands.
  __device__ void submit(ty::u32 queue) const {
    const Ring& ring = p.rings[queue];
    ty::u64 head = ty::load_relaxed(ring.head), seen = ty::load_relaxed(ring.submitted);
    // Other threads submit at the same time.
    while ((ty::i64)(head - seen) > 0) {
      ty::u64 found = ty::atomic_cas(ring.submitted, seen, head);
      if (found == seen) return;
      seen = found;
    }
  }

  __device__ ty::u64 read_signal(ty::u32 queue, ty::u32 signal) const {
    return inner::DeviceApi(p.inner).read_signal(0, id(queue, signal));
  }

  // Waits for all commands of the queue that were numbered before, of all blocks.
  template <class Coop>
  __device__ bool flush(Coop coop, ty::u32 queue, ty::Guard& guard) const {
    bool ok = true;
    coop.sync();
    if (coop.index() == 0) ok = wait_done(queue, ty::load_relaxed(p.rings[queue].head), guard);
    coop.sync();
    return ok;
  }

 private:
  // TY_OP_* and TY_PHASE_QUEUE of the plugin ABI.
  static constexpr ty::u32 kPut = 1, kPutSignal = 2, kPutValue = 3, kSignal = 4, kQueue = 6;

  // The transport below knows no queues: each has signals of its own there.
  __device__ ty::u32 id(ty::u32 queue, ty::u32 signal) const { return queue * p.signals + signal; }

  __device__ bool wait_done(ty::u32 queue, ty::u64 count, ty::Guard& guard) const {
    const Ring& ring = p.rings[queue];
    ty::What what{kQueue, p.me, queue, count};
    bool failed = false;
    bool ok = guard.until(what, [&] { return ty::load_acquire(ring.done); }, [&](ty::u64 done) {
      if ((ty::i64)(done - count) >= 0) return true;
      return failed = ty::load_relaxed(ring.failed) != 0;
    });
    if (ok && failed) guard.fail(what, ty::load_relaxed(ring.done));
    return ok && !failed;
  }

  // Each thread that wrote a portion of the source makes it visible to the host; then one thread
  // posts for all.
  template <class Coop>
  __device__ bool post_all(Coop coop, ty::u32 queue, const Command& command, ty::Guard& guard) const {
    ty::fence_system_all();
    coop.sync();
    return coop.index() != 0 || post(queue, command, guard);
  }

  // In turn, because a command that is numbered for a full ring waits for the commands before it.
  __device__ bool post(ty::u32 queue, const Command& command, ty::Guard& guard) const {
    return ty::in_turn([&] { return post_one(queue, command, guard); });
  }
  __device__ bool post_one(ty::u32 queue, const Command& command, ty::Guard& guard) const {
    const Ring& ring = p.rings[queue];
    ty::u64 number = ty::atomic_add(ring.head, 1ull);
    if (number > p.mask) {
      // The host must take commands of a full ring before a slot is free.
      submit(queue);
      if (!wait_done(queue, number - p.mask, guard)) return false;
    }
    Command* slot = ring.commands + (number & p.mask);
    const ty::u64* from = reinterpret_cast<const ty::u64*>(&command);
    ty::u64* to = reinterpret_cast<ty::u64*>(slot);
    for (ty::u32 i = 0; i < 7; i++) ty::store_relaxed(to + i, from[i]);
    ty::store_release(&slot->sequence, number + 1);
    return true;
  }
};
