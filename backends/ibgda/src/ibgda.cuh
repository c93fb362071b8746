// The device API of the transport `ibgda`: kernels write the work requests of a ConnectX into send queues
// themselves, and ring its doorbells. One queue pair per peer and queue; this rank itself is a peer. See
// transport.cuh, and `docs.md` beside this crate for the format's sources.
// Compiled inside a namespace of its level; no include guard.
//
// A post has five steps. Several threads, also of several blocks, post on one queue pair at once. Where lanes of a
// warp proceed independently, those that post on one queue pair together take steps 1, 2, 4 and 5 once for all.
//   1. reserve: `reserved` numbers requests. Number modulo 2^16 is the index, modulo the depth the slot.
//   2. room: wait until the slot's last request is done, as the completion queue shows.
//   3. write: stores of 16 bytes into the slot.
//   4. publish: in order of numbers, `turn` counts the requests as ready.
//   5. ring: the doorbell record, then the register, for all requests that are ready. One thread rings at a time, and
//      one more waits to be the next. A thread that finds both leaves its ring to the next one, which has not yet
//      looked how many requests are ready. So no request waits for a later call.
// Counts and the two roles are bits of one word: the exchange that publishes also gives the thread its role. A thread
// whose turn it is, and that finds no thread ringing, rings first and publishes then: no other can ring before that.
//
// Fences, each with the stores that it orders. The NIC reads, in this order, the register (as it is
// stored), the record, the request, the payload.
//   A. `post_all`: payload stores of each thread of the group, before the barrier behind which one thread posts. A
//      thread that posts for itself needs none: B comes behind its stores.
//   B. `publish`: the requests' stores, and payload stores of the posting threads, before the record, and before `turn`
//      counts them. Stores of other lanes come before it, because those lanes meet in front of it. A thread that rings
//      without a wait has read `turn` before it, so it has seen all earlier requests and the ring for them, too. Others
//      have their fence behind them when their turn comes. All changes of `turn` are atomic read-modify-writes:
//      a thread that reads a count has seen what all counts before it cover.
//   C. `ring`: the record, and all that B and F cover, before the register.
//   D. `ring`: the register, before `turn` lets another thread ring. So rings of a queue pair come in order, and no
//      ring meets the record of a later one. Only threads of this GPU ring.
//   E. `advance`: the load of the completion, before the store of `done`. Others read `done` with acquire order:
//      then slots and sources of requests that are done may be written again (INV-4, INV-5).
//   F. `publish`: the requests of other threads that this one rings for, and the ring before this one, before the
//      record.

struct DeviceApi {
  // One queue pair; `DeviceQueue` of device_api.rs. Fields that kernels write have a cache line of their own.
  struct Queue {
    uint4* requests;               // the send queue: `mask` + 1 blocks of 64 bytes
    ty::u32* record;               // the doorbell record; the send queue's word is the second
    ty::u64* doorbell;             // the register, or the word of a thread that rings for kernels
    const ty::u32* completion;     // the last 4 bytes of the collapsed completion
    ty::u32 number, mask;
    ty::u64 unused[3];
    ty::u64 reserved;
    ty::u64 turn;                  // requests that are ready, times 2; and kRings, kNext
    ty::u64 done;
    ty::u64 failed;                // 1 once a thread has seen an error completion
    ty::u64 unused_too[4];
  };
  static_assert(sizeof(Queue) == 128, "the host makes queues of another size");
  // Memory, as requests name it; `MemoryKey` of device_api.rs. The key is big-endian.
  struct Key {
    ty::u64 address;
    ty::u32 key, unused;
  };
  struct Params {
    Queue* queues;           // in device memory: [peer][queue]
    const Key* local;        // this rank's windows
    const Key* remote;       // windows of all ranks: [peer][window]
    const Key* tables;       // signals of all ranks: [peer]
    const ty::u64* totals;   // this rank's signals: [queue][signal]
    Key sink;                // 8 bytes for the values that additions return; never read
    ty::u64* fault;          // in host memory: the first error completion; `FaultRecord` of device_api.rs
    ty::u32 peers, queue_count, windows, signals;
    ty::u32 flags, unused;   // kFenceSignals, kHostRings
  };
  static constexpr bool kLoadStore = false;
  static constexpr bool kSharedQueues = true;

  Params p;
  __device__ explicit DeviceApi(const Params& params) : p(params) {}

  template <class Coop>
  __device__ bool put(Coop coop, ty::u32 queue, ty::u32 peer, ty::At dst, ty::At src, ty::u64 bytes,
                      ty::Guard& guard) const {
    return post_all(coop, To{peer, queue}, write(peer, dst, src, bytes), none(), guard);
  }

  template <class Coop>
  __device__ TY_INLINED bool put_signal(Coop coop, ty::u32 queue, ty::u32 peer, ty::At dst, ty::At src,
                             ty::u64 bytes, ty::Raise raise, ty::Guard& guard) const {
    // The responder executes an addition after the earlier writes of the same queue pair, also where it
    // places writes in any order (INV-1).
    return post_all(coop, To{peer, queue}, write(peer, dst, src, bytes), addition(queue, peer, raise), guard);
  }

  __device__ bool put_value(ty::u32 queue, ty::u32 peer, ty::At dst, ty::u64 value, ty::Guard& guard) const {
    Request r{kWrite, 3, remote(p.remote[peer * p.windows + dst.window], dst.offset)};
    // Data of 8 bytes in the request itself, as they lie in memory: one packet (INV-3).
    r.second = make_uint4(big(0x80000008), (ty::u32)value, (ty::u32)(value >> 32), 0);
    return post(To{peer, queue}, r, none(), guard);
  }

  __device__ bool signal(ty::u32 queue, ty::u32 peer, ty::Raise raise, ty::Guard& guard) const {
    return post(To{peer, queue}, addition(queue, peer, raise), none(), guard);
  }

  // A thread rings, or leaves its ring to one that does so at once: nothing waits for a later call.
  __device__ void submit(ty::u32) const {}

  __device__ ty::u64 read_signal(ty::u32 queue, ty::u32 id) const {
    return ty::load_acquire(p.totals + queue * p.signals + id);
  }

  // Threads of the group share the peers. Threads of a wavefront wait in turn. Otherwise a thread that has
  // the lock of a ring would stand still until the others have their locks, and several blocks could wait for
  // each other in a circle.
  template <class Coop>
  __device__ bool flush(Coop coop, ty::u32 queue, ty::Guard& guard) const {
    bool ok = true;
    coop.sync();
    for (ty::u32 peer = coop.index(); peer < p.peers; peer += coop.size()) {
      To to{peer, queue};
      bool done = ty::in_turn([&] { return wait_done(to, ty::load_relaxed(&at(to).reserved), guard); });
      ok = done && ok;
    }
    coop.sync();
    return ok;
  }

  // The copy is there when this returns.
  template <class Coop>
  __device__ bool get(Coop coop, ty::u32 queue, ty::u32 peer, ty::At src, ty::At dst, ty::u64 bytes,
                      ty::Guard& guard) const {
    Request r{kRead, 3, remote(p.remote[peer * p.windows + src.window], src.offset)};
    r.second = data(p.local[dst.window], dst.offset, bytes);
    if (bytes == 0) r.segments = 0;
    bool ok = post_all(coop, To{peer, queue}, r, none(), guard);
    if (coop.index() == 0) ok = ok && wait_done({peer, queue}, ty::load_relaxed(&at({peer, queue}).reserved), guard);
    coop.sync();
    return ok;
  }

 private:
  // TY_PHASE_QUEUE of the plugin ABI.
  static constexpr ty::u32 kQueue = 6;
  // Opcodes, kinds of completions and bits of a request's flags.
  static constexpr ty::u32 kWrite = 0x08, kRead = 0x10, kFetchAdd = 0x12;
  static constexpr ty::u32 kRequestError = 13, kNothing = 15;
  static constexpr ty::u32 kCompletes = 8, kFence = 4 << 5;
  // Bits of Params::flags: additions wait for earlier reads and additions; a thread of the host rings.
  static constexpr ty::u32 kFenceSignals = 1, kHostRings = 2;
  // Bits of Queue::turn: a thread rings; a thread waits until that one has rung, and rings next.
  static constexpr ty::u64 kRings = 1, kNext = 1ull << 63;
  // Beside the index of a request: there is none, because the wait for room was ended.
  static constexpr ty::u32 kNoRoom = 1u << 31;

  struct To {
    ty::u32 peer, queue;
  };
  // The fields of a queue that kernels only read. They are read once for a post, beside the first access to the others.
  struct Fixed {
    uint4* requests;
    ty::u32* record;
    ty::u64* doorbell;
    ty::u32 number, mask;
  };
  __device__ static Fixed fixed(const Queue& q) { return {q.requests, q.record, q.doorbell, q.number, q.mask}; }

  // A request of one block, without the fields that depend on its place. No segments: no request.
  struct Request {
    ty::u32 opcode, segments;
    uint4 first, second, third;
  };

  __device__ static ty::u32 big(ty::u32 value) { return ty::swap_bytes(value); }
  __device__ static uint4 remote(const Key& of, ty::u64 offset) {
    ty::u64 address = of.address + offset;
    return make_uint4(big((ty::u32)(address >> 32)), big((ty::u32)address), of.key, 0);
  }
  __device__ static uint4 data(const Key& of, ty::u64 offset, ty::u64 bytes) {
    ty::u64 address = of.address + offset;
    return make_uint4(big((ty::u32)bytes), of.key, big((ty::u32)(address >> 32)), big((ty::u32)address));
  }
  __device__ static Request none() { return Request{}; }

  // An empty payload is no request: 0 bytes would mean 2^31.
  __device__ Request write(ty::u32 peer, ty::At dst, ty::At src, ty::u64 bytes) const {
    if (bytes == 0) return none();
    Request r{kWrite, 3, remote(p.remote[peer * p.windows + dst.window], dst.offset)};
    r.second = data(p.local[src.window], src.offset, bytes);
    return r;
  }
  __device__ Request addition(ty::u32 queue, ty::u32 peer, ty::Raise raise) const {
    Request r{kFetchAdd, 4, remote(p.tables[peer], 8 * ((ty::u64)queue * p.signals + raise.signal))};
    r.second = make_uint4(0, big(raise.add), 0, 0);
    r.third = data(p.sink, 0, 8);
    return r;
  }

  __device__ Queue& at(To to) const { return p.queues[to.peer * p.queue_count + to.queue]; }

  template <class Coop>
  __device__ TY_INLINED bool post_all(Coop coop, To to, const Request& first, const Request& second,
                                      ty::Guard& guard) const {
    if (coop.size() > 1) {
      // A.
      ty::fence_system_all();
      coop.sync();
    }
    return coop.index() != 0 || post(to, first, second, guard);
  }

  // In turn, because a request waits for those with lower numbers.
  __device__ TY_INLINED bool post(To to, const Request& first, const Request& second, ty::Guard& guard) const {
    return ty::in_turn([&] { return post_together(to, first, second, guard); });
  }

  // A wait that the guard ends leaves a hole in the numbers, and no later request is ever published: the
  // communicator is closed then.
  __device__ TY_INLINED bool post_together(To to, const Request& first, const Request& second,
                                           ty::Guard& guard) const {
    ty::u32 count = (first.segments != 0) + (second.segments != 0);
    if (count == 0) return true;
    Queue& q = at(to);
    const Fixed f = fixed(q);
    // Lanes that post as many requests each, on one queue pair.
    const ty::Lanes lanes = ty::lanes_with(reinterpret_cast<const ty::u8*>(&q) + count);
    const ty::Lanes earlier = lanes & ty::lanes_before(ty::lane_id());
    const ty::u32 before = count * ty::popc(earlier), total = count * ty::popc(lanes);
    const bool leads = earlier == 0;
    ty::u64 number = 0, turn = 0;
    bool ok = true;
    if (leads) {
      // Both are under way at once.
      turn = ty::load_relaxed(&q.turn);
      number = ty::atomic_add(&q.reserved, (ty::u64)total);
      const ty::u64 end = number + total, depth = f.mask + 1ull;
      ok = end <= depth || wait_done(to, end - depth, guard);
    }
    // An index has 16 bits, and slots are fewer.
    const ty::u32 begin = ty::from_first(lanes, ((ty::u32)number & 0xffff) | (ok ? 0u : kNoRoom));
    if ((begin & kNoRoom) != 0) return false;
    if (first.segments != 0) store(f, begin + before, first, before + 1 == total);
    if (second.segments != 0) store(f, begin + before + count - 1, second, before + count == total);
    ty::sync_lanes(lanes);
    if (leads) ok = publish(to, f, {number, number + total, turn}, guard);
    return ty::ballot_of(lanes, !ok) == 0;
  }

  // The last request asks for a completion, so that everything before it is known to be done.
  __device__ void store(const Fixed& f, ty::u32 number, const Request& r, bool completes) const {
    uint4* slot = f.requests + 4 * (number & f.mask);
    ty::u32 flags = completes ? kCompletes : 0;
    if (r.opcode == kFetchAdd && (p.flags & kFenceSignals)) flags |= kFence;
    uint4 control = make_uint4(big((number & 0xffff) << 8 | r.opcode), big(f.number << 8 | r.segments),
                               flags << 24, 0);
    ty::store_16_relaxed(slot, control);
    ty::store_16_relaxed(slot + 1, r.first);
    ty::store_16_relaxed(slot + 2, r.second);
    if (r.segments == 4) ty::store_16_relaxed(slot + 3, r.third);
  }

  // Requests of one post: their numbers, and what `turn` was before they had them.
  struct Posted {
    ty::u64 begin, end, turn;
  };
  __device__ static ty::u64 ready_of(ty::u64 turn) { return (turn & ~kNext) >> 1; }
  __device__ static ty::u64 roles_of(ty::u64 turn) { return turn & (kRings | kNext); }
  // The roles once one more thread has published: it rings, or rings next, or leaves its ring to the next.
  __device__ static ty::u64 one_more(ty::u64 roles) {
    return roles == 0 ? kRings : roles == kRings ? kRings | kNext : roles;
  }

  // Publishes requests in order of numbers, and rings, unless another thread will.
  __device__ TY_INLINED bool publish(To to, const Fixed& f, Posted posted, ty::Guard& guard) const {
    Queue& q = at(to);
    // B.
    ty::fence_system();
    // It is this thread's turn, and no thread rings: none can, until this one publishes. So it rings before that.
    if (posted.turn == posted.begin << 1) {
      ring(q, f, posted.end, (posted.end - posted.begin) << 1);
      return true;
    }
    ty::u64 roles = roles_of(posted.turn);
    if (!take_turn(to, posted, roles, guard)) return false;
    if ((roles & kNext) != 0) return true;
    if (roles == kRings) posted.end = be_next(q);
    // F.
    ty::fence_system();
    ring(q, f, posted.end, 0 - kRings);
    return true;
  }

  // Waits until all requests with lower numbers are published, and publishes these. `roles` are a guess at first, and
  // then those that were found.
  __device__ bool take_turn(To to, Posted posted, ty::u64& roles, ty::Guard& guard) const {
    Queue& q = at(to);
    ty::What what{kQueue, to.peer, to.queue, posted.begin};
    bool taken = false, failed = false;
    ty::u32 looks = 0;
    auto exchange = [&] {
      const ty::u64 from = posted.begin << 1 | roles, to = posted.end << 1 | one_more(roles);
      const ty::u64 found = ty::atomic_cas(&q.turn, from, to);
      taken = found == from;
      // The threads that are still ahead change the roles, too.
      if (!taken) roles = ready_of(found) == posted.begin ? roles_of(found) : one_more(roles_of(found));
      return ready_of(found);
    };
    bool ok = guard.until(what, exchange, [&](ty::u64) {
      if (taken) return true;
      // Seldom, as the look takes as long as the exchange.
      failed = ++looks % 64 == 0 && ty::load_relaxed(&q.failed) != 0;
      return failed;
    });
    // The thread that saw the failure first has written its cause.
    if (failed) guard.fail(what, posted.begin);
    return ok && !failed;
  }

  // Waits until the thread that rings has rung, and takes its place: returns the requests that are ready then, at
  // least those of this thread. A thread that rings only stores, so this wait ends.
  __device__ ty::u64 be_next(Queue& q) const {
    while ((ty::load_relaxed(&q.turn) & kRings) != 0) {
    }
    return ready_of(ty::atomic_add(&q.turn, kRings - kNext));
  }

  // Rings for the requests before `end`. By one thread at a time; `freed` is added to `turn` to let others ring.
  __device__ void ring(Queue& q, const Fixed& f, ty::u64 end, ty::u64 freed) const {
    if (p.flags & kHostRings) {
      // The thread of the host reads the word with acquire order, and does the rest.
      ty::store_release(f.doorbell, end);
    } else {
      ty::u32 index = (ty::u32)end & 0xffff;
      ty::store_relaxed(f.record + 1, big(index));
      // C.
      ty::fence_system();
      ty::store_mmio(f.doorbell, (ty::u64)big(f.number << 8) << 32 | big(index << 8));
    }
    // D.
    ty::add_release_device(&q.turn, freed);
  }

  // Waits until `count` requests of a queue pair are done.
  __device__ bool wait_done(To to, ty::u64 count, ty::Guard& guard) const {
    Queue& q = at(to);
    ty::What what{kQueue, to.peer, to.queue, count};
    auto enough = [&](ty::u64 done) { return (ty::i64)(done - count) >= 0; };
    bool failed = false;
    bool ok = guard.until(what, [&] { return look(q, enough, failed); },
                          [&](ty::u64 done) { return failed || enough(done); });
    if (failed) fail(to, what, guard);
    return ok && !failed;
  }

  // Requests that are done. Reads memory of the host only where the stored count does not suffice.
  template <class Enough>
  __device__ ty::u64 look(Queue& q, Enough enough, bool& failed) const {
    ty::u64 done = ty::load_acquire(&q.done);
    if (enough(done)) return done;
    ty::u32 word = ty::load_relaxed(q.completion);
    ty::u32 kind = word >> 28;
    // Checked before the index: flushed requests overwrite the completion with the last index that was posted.
    failed = kind == kRequestError;
    if (failed || kind == kNothing) return done;
    ty::u32 index = (word & 0xff) << 8 | (word >> 8 & 0xff);
    ty::u32 more = (index + 1 - (ty::u32)done) & 0xffff;
    // An index older than `done` is far ahead of it, modulo 2^16.
    return more == 0 || more > q.mask + 1 ? done : advance(q, done, done + more);
  }

  __device__ ty::u64 advance(Queue& q, ty::u64 done, ty::u64 to) const {
    // E.
    ty::fence_device();
    while ((ty::i64)(to - done) > 0) {
      ty::u64 found = ty::atomic_cas(&q.done, done, to);
      if (found == done) return to;
      done = found;
    }
    return done;
  }

  // Writes to the host's memory which queue pair failed and how: once, by the first thread that sees it.
  __device__ void fail(To to, const ty::What& what, ty::Guard& guard) const {
    Queue& q = at(to);
    // Bytes 52 to 55 of the completion, and 60 to 63.
    ty::u32 reason = big(ty::load_relaxed(q.completion - 2)), word = ty::load_relaxed(q.completion);
    ty::store_relaxed(&q.failed, 1);
    if (ty::atomic_cas(p.fault, 0ull, 1ull) == 0) {
      ty::store_relaxed(p.fault + 1, (ty::u64)to.peer << 32 | to.queue);
      ty::store_relaxed(p.fault + 2, (ty::u64)q.number << 32 | (word & 0xff) << 8 | (word >> 8 & 0xff));
      ty::store_relaxed(p.fault + 3, reason & 0xffff);
      ty::store_release(p.fault, 2);
    }
    guard.fail(what, reason & 0xff);
  }
};
