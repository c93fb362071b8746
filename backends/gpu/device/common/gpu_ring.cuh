// The device API of a transport that has none: kernels write commands into a ring in host memory, and
// a thread of the host posts them (core's `gpu_ring`). See transport.cuh.
// Compiled inside a namespace of its level; no include guard.

struct DeviceApi {
  // One command; TyGpuRingCommand of the plugin ABI.
  struct Command {
    ty::u32 op, peer, signal, add, src_window, dst_window;
    ty::u64 src_offset, dst_offset, bytes, value;
    ty::u64 sequence;  // number of the command + 1, stored last
  };
  static_assert(sizeof(Command) == 64, "the host takes commands of another size");
  struct Params {
    // In device memory: the number of commands so far, how many of them are known to be done, and
    // whether a thread is asking the host.
    ty::u64* head;
    // In host memory: `mask` + 1 slots.
    Command* commands;
    // In host memory: the number of commands that are done, all earlier ones included.
    const ty::u64* done;
    // In host memory: the totals of this rank's signals.
    const ty::u64* totals;
    ty::u32 mask;
    ty::u32 me;
  };
  static constexpr bool kLoadStore = false;
  static constexpr bool kSharedQueues = true;

  Params p;
  __device__ explicit DeviceApi(const Params& params) : p(params) {}

  template <class Coop>
  __device__ bool put(Coop coop, ty::u32, ty::u32 peer, ty::At dst, ty::At src, ty::u64 bytes,
                      ty::Guard& guard) const {
    return post_all(coop, {kPut, peer, 0, 0, src.window, dst.window, src.offset, dst.offset, bytes},
                    guard);
  }

  template <class Coop>
  __device__ TY_INLINED bool put_signal(Coop coop, ty::u32, ty::u32 peer, ty::At dst, ty::At src, ty::u64 bytes,
                             ty::Raise raise, ty::Guard& guard) const {
    return post_all(coop, {kPutSignal, peer, raise.signal, raise.add, src.window, dst.window,
                           src.offset, dst.offset, bytes},
                    guard);
  }

  __device__ bool put_value(ty::u32, ty::u32 peer, ty::At dst, ty::u64 value,
                            ty::Guard& guard) const {
    return post({kPutValue, peer, 0, 0, 0, dst.window, 0, dst.offset, 0, value}, guard);
  }

  __device__ bool signal(ty::u32, ty::u32 peer, ty::Raise raise, ty::Guard& guard) const {
    return post({kSignal, peer, raise.signal, raise.add}, guard);
  }

  // No post is deferred.
  __device__ void submit(ty::u32) const {}

  __device__ ty::u64 read_signal(ty::u32, ty::u32 id) const { return ty::load_acquire(p.totals + id); }

  // Waits for all commands that were numbered before, of all blocks: there is one ring.
  template <class Coop>
  __device__ bool flush(Coop coop, ty::u32, ty::Guard& guard) const {
    bool ok = true;
    coop.sync();
    if (coop.index() == 0) {
      ty::u64 head = ty::load_relaxed(p.head);
      ok = wait_done(head, guard);
    }
    coop.sync();
    return ok;
  }

 private:
  // TY_OP_* and TY_PHASE_QUEUE of the plugin ABI.
  static constexpr ty::u32 kPut = 1, kPutSignal = 2, kPutValue = 3, kSignal = 4, kQueue = 6;

  __device__ bool wait_done(ty::u64 count, ty::Guard& guard) const {
    auto enough = [&](ty::u64 done) { return (ty::i64)(done - count) >= 0; };
    return guard.until({kQueue, p.me, 0, count}, [&] { return known_done(enough); }, enough);
  }

  // A word of the host can be read about a million times a second, independent of the number of threads
  // that ask. So one thread asks for all, and only when the known value does not suffice.
  template <class Enough>
  __device__ ty::u64 known_done(Enough enough) const {
    ty::u64 *known = p.head + 1, *asking = p.head + 2;
    ty::u64 done = ty::load_acquire(known);
    if (enough(done) || ty::atomic_cas(asking, 0ull, 1ull) != 0) return done;
    done = ty::load_acquire(p.done);
    // A thread that learns the value here may overwrite slots and sources as if it had asked the host
    // itself (INV-4, INV-5).
    ty::fence_device();
    ty::store_relaxed(known, done);
    ty::store_relaxed(asking, 0ull);
    return done;
  }

  // Each thread that wrote a portion of the source makes it visible to the host; then one thread
  // posts for all.
  template <class Coop>
  __device__ TY_INLINED bool post_all(Coop coop, const Command& command, ty::Guard& guard) const {
    ty::fence_system_all();
    coop.sync();
    return coop.index() != 0 || post(command, guard);
  }

  // In turn, because a command that is numbered for a full ring waits for the commands before it.
  __device__ TY_INLINED bool post(const Command& command, ty::Guard& guard) const {
    return ty::in_turn([&] { return post_one(command, guard); });
  }
  // An aborted wait leaves a hole in the ring. No command passes the hole: the communicator is then
  // closed.
  __device__ TY_INLINED bool post_one(const Command& command, ty::Guard& guard) const {
    ty::u64 number = ty::atomic_add(p.head, 1ull);
    if (number > p.mask && !wait_done(number - p.mask, guard)) return false;
    Command* slot = p.commands + (number & p.mask);
    const ty::u64* from = reinterpret_cast<const ty::u64*>(&command);
    ty::u64* to = reinterpret_cast<ty::u64*>(slot);
    for (ty::u32 i = 0; i < 7; i++) ty::store_relaxed(to + i, from[i]);
    ty::store_release(&slot->sequence, number + 1);
    return true;
  }
};
