// The device API of the transport `gin`, over `ncclGin`. See transport.cuh. Compiled by nvcc inside a namespace of its
// level; NCCL's headers come before it, outside of that namespace (TY_UP_PRELUDE). No include guard.
//
// NCCL's own posting spins without an end while a queue is full. So each peer has credits here. A put takes a
// ticket, and goes to NCCL only while fewer than `limit` puts are not known to be settled. That wait has a
// guard (INV-6). Flushes of NCCL show which puts are settled. They end after a few microseconds, whatever
// they have found.

struct DeviceApi {
  struct Params {
    const ncclDevComm* comm;      // in device memory, of the library's own version
    const ncclWindow_t* windows;  // by id
    // For each peer, in device memory: puts that have asked to be posted, that NCCL has taken, and that are settled.
    ty::u64* tickets;
    ty::u64* issued;
    ty::u64* settled;
    ty::u32 limit, me, peers, reserved;
  };
  static constexpr bool kLoadStore = false;
  static constexpr bool kSharedQueues = true;

  const Params& p;
  __device__ explicit DeviceApi(const Params& params) : p(params) {}

  template <class Coop>
  __device__ bool put(Coop coop, ty::u32, ty::u32 peer, ty::At dst, ty::At src, ty::u64 bytes,
                      ty::Guard& guard) const {
    return bytes == 0 || post_all(coop, {kPut, peer, dst, src, bytes, {}}, guard);
  }

  // A weak signal settles its own put alone: all that INV-1 asks for.
  template <class Coop>
  __device__ bool put_signal(Coop coop, ty::u32, ty::u32 peer, ty::At dst, ty::At src, ty::u64 bytes,
                             ty::Raise raise, ty::Guard& guard) const {
    return post_all(coop, {bytes == 0 ? kSignal : kPutSignal, peer, dst, src, bytes, raise}, guard);
  }

  __device__ bool put_value(ty::u32, ty::u32 peer, ty::At dst, ty::u64 value, ty::Guard& guard) const {
    return post({kPutValue, peer, dst, {}, value, {}}, guard);
  }

  __device__ bool signal(ty::u32, ty::u32 peer, ty::Raise raise, ty::Guard& guard) const {
    return post({kSignal, peer, {}, {}, 0, raise}, guard);
  }

  // NCCL posts every put at once: no call asks it to aggregate.
  __device__ void submit(ty::u32) const {}

  __device__ ty::u64 read_signal(ty::u32, ty::u32 id) const { return gin().readSignal(id); }

  // Waits for every put that was posted before, of all blocks. Peers are spread over the threads.
  template <class Coop>
  __device__ bool flush(Coop coop, ty::u32, ty::Guard& guard) const {
    bool ok = true;
    coop.sync();
    for (ty::u32 peer = coop.index(); peer < p.peers && ok; peer += coop.size())
      ok = wait_settled(peer, ty::load_acquire(p.issued + peer), guard);
    coop.sync();
    return ok;
  }

 private:
  // TY_OP_* and TY_PHASE_QUEUE of the plugin ABI.
  static constexpr ty::u32 kPut = 1, kPutSignal = 2, kPutValue = 3, kSignal = 4, kQueue = 6;

  struct Command {
    ty::u32 op, peer;
    ty::At dst, src;
    ty::u64 bytes;  // or the value
    ty::Raise raise;
  };

  // How long one look at a peer's queue may take, in cycles: about 20 us.
  static constexpr uint64_t kLook = 40000;

  // One context, which all blocks share: signals of a context are that context's alone.
  __device__ ncclGin gin() const { return ncclGin(*p.comm, 0, NCCL_GIN_RESOURCE_SHARING_GPU); }

  // Each thread that wrote a part of the source makes it visible to the fabric; then one thread posts for all.
  template <class Coop>
  __device__ bool post_all(Coop coop, const Command& command, ty::Guard& guard) const {
    ty::fence_system_all();
    coop.sync();
    return coop.index() != 0 || post(command, guard);
  }

  __device__ bool post(const Command& command, ty::Guard& guard) const {
    ty::u64 ticket = ty::atomic_add(p.tickets + command.peer, 1ull);
    // The ticket is lost where the guard ends the wait: the communicator ends then, too.
    if (!wait_settled(command.peer, ticket + 1 - p.limit, guard)) return false;
    hand_over(command);
    // Counted after NCCL has taken the put, so that a flush covers every put that is counted.
    ty::add_release(p.issued + command.peer, 1ull);
    return true;
  }

  // The only code that posts to NCCL. NCCL's code is large, so it is compiled once and not inlined. A signal always
  // adds: an increment would not mix with additions.
  __device__ TY_COLD void hand_over(const Command& command) const {
    ncclGin all = gin();
    ncclTeam world = ncclTeamWorld(*p.comm);
    const int peer = (int)command.peer;
    const ncclGin_WeakSignalAdd raise{command.raise.signal, command.raise.add};
    const ncclWindow_t to = p.windows[command.dst.window], from = p.windows[command.src.window];
    switch (command.op) {
      case kPut:
        return all.put(world, peer, to, command.dst.offset, from, command.src.offset, command.bytes, ncclGin_None{},
                       ncclGin_None{}, ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_system);
      case kPutSignal:
        return all.put(world, peer, to, command.dst.offset, from, command.src.offset, command.bytes, raise,
                       ncclGin_None{}, ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_system);
      case kPutValue:
        return all.putValue(world, peer, to, command.dst.offset, (uint64_t)command.bytes);
      default:
        return all.signal(world, peer, raise);
    }
  }

  // Waits until `count` puts to a peer are settled. Counts are compared modulo 2^64.
  __device__ bool wait_settled(ty::u32 peer, ty::u64 count, ty::Guard& guard) const {
    auto enough = [&](ty::u64 found) { return (ty::i64)(found - count) >= 0; };
    if (enough(ty::load_acquire(p.settled + peer))) return true;
    return guard.until({kQueue, peer, 0, count}, [&] { return settle(peer); }, enough);
  }

  // Puts that are settled, as far as a short flush shows. The flush covers all puts that any block issued before it.
  __device__ TY_COLD ty::u64 settle(ty::u32 peer) const {
    ty::u64 issued = ty::load_acquire(p.issued + peer);
    ncclGin all = gin();
    ncclGinRequest_t request;
    all.flushAsync(ncclTeamWorld(*p.comm), peer, &request);
    ncclResult_t result =
        all.wait(request, ncclCoopThread{}, ncclGin_None{}, cuda::memory_order_acquire, kLook);
    if (result == ncclSuccess) raise_to(p.settled + peer, issued);
    return ty::load_acquire(p.settled + peer);
  }

  // Other threads may have stored a larger count meanwhile.
  __device__ static void raise_to(ty::u64* at, ty::u64 count) {
    ty::u64 found = ty::load_relaxed(at);
    while ((ty::i64)(found - count) < 0) {
      ty::u64 before = ty::atomic_cas(at, found, count);
      if (before == found) return;
      found = before;
    }
  }
};
