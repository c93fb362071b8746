// The device API of the transport `paced`, which stands in for a NIC: it only puts, on several queues.
// Kernels write requests of 64 bytes into queues in device memory, and the engine (engine.cu) beside them on the
// same GPU carries them out. See transport.cuh.
// Compiled inside a namespace of its level, behind request.cuh and a namespace `inner` with the device API
// that reads signals; no include guard.

struct DeviceApi {
  // One queue; `DeviceQueue` of queues.rs.
  struct Queue {
    Request* requests;      // `mask` + 1 slots
    ty::u64* head;          // requests so far
    const ty::u64* done;    // requests that are done, all earlier ones included
    const ty::u64* failed;  // in host memory: not 0 once the engine has given up
  };
  struct Params {
    inner::DeviceApi::Params inner;
    const Queue* queues;
    ty::u32 mask, signals, me, reserved;
  };
  static constexpr bool kLoadStore = false;
  static constexpr bool kSharedQueues = true;

  Params p;
  __device__ explicit DeviceApi(const Params& params) : p(params) {}

  template <class Coop>
  __device__ bool put(Coop coop, ty::u32 queue, ty::u32 peer, ty::At dst, ty::At src, ty::u64 bytes,
                      ty::Guard& guard) const {
    return post_all(coop, queue, {kPut, peer, place(src), place(dst), bytes}, guard);
  }
  template <class Coop>
  __device__ bool put_signal(Coop coop, ty::u32 queue, ty::u32 peer, ty::At dst, ty::At src, ty::u64 bytes,
                             ty::Raise raise, ty::Guard& guard) const {
    return post_all(coop, queue,
                    {kPutSignal, peer, place(src), place(dst), bytes, id(queue, raise.signal), raise.add}, guard);
  }
  __device__ bool put_value(ty::u32 queue, ty::u32 peer, ty::At dst, ty::u64 value, ty::Guard& guard) const {
    return post(queue, {kPutValue, peer, 0, place(dst), value}, guard);
  }
  __device__ bool signal(ty::u32 queue, ty::u32 peer, ty::Raise raise, ty::Guard& guard) const {
    return post(queue, {kSignal, peer, 0, 0, 0, id(queue, raise.signal), raise.add}, guard);
  }

  // The engine sees requests as they are written.
  __device__ void submit(ty::u32) const {}

  __device__ ty::u64 read_signal(ty::u32 queue, ty::u32 signal) const {
    return inner::DeviceApi(p.inner).read_signal(0, id(queue, signal));
  }

  // Waits for all requests of the queue that were numbered before, of all blocks.
  template <class Coop>
  __device__ bool flush(Coop coop, ty::u32 queue, ty::Guard& guard) const {
    bool ok = true;
    coop.sync();
    if (coop.index() == 0) ok = wait_done(queue, ty::load_relaxed(p.queues[queue].head), guard);
    coop.sync();
    return ok;
  }

 private:
  // TY_PHASE_QUEUE of the plugin ABI.
  static constexpr ty::u32 kQueue = 6;

  __device__ static ty::u64 place(ty::At at) { return (ty::u64)at.window << kWindowShift | at.offset; }
  // The transport below knows no queues: each has signals of its own there.
  __device__ ty::u32 id(ty::u32 queue, ty::u32 signal) const { return queue * p.signals + signal; }

  __device__ bool wait_done(ty::u32 queue, ty::u64 count, ty::Guard& guard) const {
    const Queue& q = p.queues[queue];
    ty::What what{kQueue, p.me, queue, count};
    bool failed = false;
    ty::u32 looks = 0;
    bool ok = guard.until(what, [&] { return ty::load_acquire(q.done); }, [&](ty::u64 done) {
      if ((ty::i64)(done - count) >= 0) return true;
      // The word lies in the host's memory, where a look takes a microsecond.
      return ++looks % 4096 == 0 && (failed = ty::load_relaxed(q.failed) != 0);
    });
    if (ok && failed) guard.fail(what, ty::load_relaxed(q.done));
    return ok && !failed;
  }

  // Each thread that wrote a portion of the source makes it visible to the engine; then one thread posts for
  // all.
  template <class Coop>
  __device__ bool post_all(Coop coop, ty::u32 queue, const Request& request, ty::Guard& guard) const {
    ty::fence_system_all();
    coop.sync();
    return coop.index() != 0 || post(queue, request, guard);
  }

  // In turn, because a request that is numbered for a full queue waits for the requests before it.
  __device__ bool post(ty::u32 queue, const Request& request, ty::Guard& guard) const {
    return ty::in_turn([&] { return post_one(queue, request, guard); });
  }
  __device__ bool post_one(ty::u32 queue, const Request& request, ty::Guard& guard) const {
    const Queue& q = p.queues[queue];
    ty::u64 number = ty::atomic_add(q.head, 1ull);
    if (number > p.mask && !wait_done(queue, number - p.mask, guard)) return false;
    Request* slot = q.requests + (number & p.mask);
    const ty::u64* from = reinterpret_cast<const ty::u64*>(&request);
    ty::u64* to = reinterpret_cast<ty::u64*>(slot);
    for (ty::u32 i = 0; i < 6; i++) ty::store_relaxed(to + i, from[i]);
    ty::store_relaxed(&slot->posted, ty::now_ns());
    ty::store_release(&slot->sequence, number + 1);
    return true;
  }
};
