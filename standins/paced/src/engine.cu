// The engine of `paced`: carries out requests at the pace of a link. Behind request.cuh and jobs.cuh.
// Defines: TY_ROWS_TMA.
//
// A block serves the queues of its number modulo the blocks. One warp takes requests and books the wire for them,
// one raises signals, the others copy. A warp copies every chunk whose number is its own modulo the warps, so that
// none asks another. All blocks end a launch together, once none has had a request for a while: see resident.rs.

namespace ty {

// One block of the engine.
class Pacer {
 public:
  __device__ Pacer(const PacerArgs& args, const Up& windows, Shared& shared)
      : a(args), up(windows), s(shared), begun(load_relaxed(&args.wire->begun)) {
    lines = blockIdx.x < a.queues ? (a.queues - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
  }

  // The warp that takes requests.
  __device__ void take() {
    u32 depth = kWave / (lines == 0 ? 1 : lines), line = lane_id() / depth, k = lane_id() % depth;
    bool is_used = line < lines;
    // In registers: the acquire of each look empties the nearest cache.
    const Line mine = a.lines[is_used ? queue_of(line) : 0];
    u64 taken = is_used ? load_relaxed(mine.taken) : 0, start = now();
    u32 made = 0, turn = 0;
    for (u32 looks = 1;; looks++) {
      u32 count = is_leaving(looks, start) ? 0 : take_some(mine.requests, taken, {depth, line, k}, is_used, made, turn);
      made += count;
      turn += count != 0 ? 1 : 0;
      if (left_ && all_free()) break;
    }
    if (is_used && k == 0) store_relaxed(mine.taken, taken);
    sync_wave();
    if (lane_id() != 0) return;
    s.quit = 1;
    // The block that is last sees what the others of this launch have stored.
    fence_device();
    // Behind the last block, whose launch has no reader of these words left.
    if (atomic_add(&a.wire->left, 1ull) + 1 != gridDim.x) return;
    store_relaxed(&a.wire->left, 0);
    store_relaxed(&a.wire->leaving, 0);
  }

  // A warp that copies.
  __device__ void copy(u32 warp, u8* room, u64* barrier) {
    u32 parity = 0;
    for (u32 number = 0;;) {
      // One lane looks for all: a warp leaves together.
      u32 some = shfl((u32)s.made, 0) - number;
      if (some == 0) {
        if (shfl((u32)s.quit, 0) != 0) return;
        continue;
      }
      fence_block();
      some = some < kWave ? some : kWave;
      const Job& seen = s.jobs[(number + lane_id()) % kJobs];
      bool has_mine = lane_id() < some && first_chunk(warp, seen.first) < seen.chunks;
      Lanes mine = ballot(has_mine);
      // A job with a chunk for this warp stays until that is copied, and no other is looked at again.
      if (lane_id() == 0) s.at[warp] = number + some;
      while (mine != 0) {
        Lanes rest = copy_small(mine, number, room, barrier, parity);
        if (rest != mine) {
          mine = rest;
          continue;
        }
        Job& job = s.jobs[(number + first_of(mine)) % kJobs];
        u32 chunks = job.chunks;
        for (u32 c = first_chunk(warp, job.first); c < chunks; c += kCopyWarps)
          copy_chunk(job, c, room, barrier, parity);
        mine &= mine - 1;
      }
      number += some;
    }
  }

  // The warp that raises signals, and counts what is done.
  __device__ void raise() {
    u64 shown = lane_id() < lines ? s.done[lane_id()] : 0;
    bool counts = false;
    while (true) {
      u32 quit = shfl((u32)s.quit, 0);
      bool ends = end_jobs();
      sync_wave();
      // A request counts behind those before it, so one that counts may let others count.
      if (ends || counts) counts = count_done();
      u64 done = lane_id() < lines ? s.done[lane_id()] : 0;
      if (done != shown) store_release(a.lines[queue_of(lane_id())].done, shown = done);
      if (quit != 0) return;
    }
  }

 private:
  struct Place {
    u32 depth, line, k;  // lanes of a queue; this lane's queue, and its place behind that queue's head
  };

  // The first chunk of a job that is this warp's.
  __device__ static u32 first_chunk(u32 warp, u32 first) {
    return (warp + kCopyWarps - first % kCopyWarps) % kCopyWarps;
  }
  // The ends of a request's bytes, and the word of its signal, where it has some.
  struct Ends {
    u8* dst;
    const u8* src;
    u64* signal;
  };
  // The number of a request in its queue, and its time on the wire.
  struct Turn {
    u64 number, begin, lasts;
    u32 line;
    bool is_copied;  // by the warp that takes requests
  };
  // The bytes of a short put. To hand it to a warp that copies would take longer than the latency of a link.
  struct Payload {
    u64 word[kShort / 8];
    u32 words = 0;

    __device__ void load(const u8* src, u32 bytes) {
      words = bytes / 8;
      for (u32 i = 0; i < kShort / 8; i++)
        if (i < words) word[i] = load_relaxed(reinterpret_cast<const u64*>(src) + i);
    }
    __device__ void store(u8* dst) const {
      for (u32 i = 0; i < kShort / 8; i++)
        if (i < words) store_relaxed(reinterpret_cast<u64*>(dst) + i, word[i]);
    }
  };

  __device__ u32 queue_of(u32 line) const { return blockIdx.x + line * gridDim.x; }
  __device__ u64 now() const { return now_ns() - begun; }

  // Whether this block takes no more. One block ends the launch for all: else the queues of a block that ends would
  // wait for the others. It does so where the host stops, the launch has lasted, or no block has had a request for
  // long; a request that has the wire is not done.
  __device__ bool is_leaving(u32 looks, u64 start) {
    if (left_ || looks % kLook != 0) return left_;
    u64 t = shfl(now(), 0);
    bool is_idle = all_free();
    if (lane_id() == 0 && !is_idle) store_relaxed(&a.wire->busy, t);
    bool ends = load_relaxed(&a.wire->leaving) != 0;
    if (looks % kLongLook == 0) {
      u64 busy = load_relaxed(&a.wire->busy);
      busy = busy > start ? busy : start;
      bool decides = t > start + a.most || (is_idle && t > busy + a.idle) || load_relaxed(a.stop) != 0;
      if (decides && lane_id() == 0) store_relaxed(&a.wire->leaving, 1);
      ends = ends || decides;
    }
    left_ = shfl((u32)ends, 0) != 0;
    return left_;
  }

  __device__ bool all_free() const {
    bool busy = false;
    for (u32 i = lane_id(); i < kJobs; i += kWave) busy |= s.jobs[i].state != kFree;
    return ballot(busy) == 0;
  }

  // Jobs that may be made now: free slots in a row, which every copying warp has left.
  __device__ u32 room(u32 made) const {
    u32 slowest = lane_id() < kCopyWarps ? made - s.at[lane_id()] : 0;
    for (u32 bits = 1; bits < kWave; bits *= 2) {
      u32 other = shfl_xor(slowest, bits);
      slowest = other > slowest ? other : slowest;
    }
    u32 most = kJobs - slowest < kWave ? kJobs - slowest : kWave;
    Lanes taken = ballot(s.jobs[(made + lane_id()) % kJobs].state != kFree);
    u32 in_a_row = taken == 0 ? kWave : first_of(taken);
    return in_a_row < most ? in_a_row : most;
  }

  // Makes jobs of the requests that are there, one of each queue in turn; the number of jobs.
  __device__ u32 take_some(const Request* requests, u64& taken, Place place, bool is_used, u32 made, u32 turn) {
    const Request* request = requests + ((taken + place.k) & a.mask);
    bool is_there = is_used && load_acquire(&request->sequence) == taken + place.k + 1;
    Lanes there = ballot(is_there);
    if (there == 0) return 0;
    u32 run = run_of(there, place), rank = 0, all = 0;
    for (u32 line = 0; line < lines; line++) {
      u32 of_line = shfl(run, line * place.depth);
      bool earlier = (line + lines - turn % lines) % lines < (place.line + lines - turn % lines) % lines;
      u32 before = place.k + (earlier ? 1 : 0);
      rank += of_line < before ? of_line : before;
      all += of_line;
    }
    u32 free = room(made), count = all < free ? all : free;
    is_there = is_used && place.k < run && rank < count;
    u64 cost = 0, posted = 0, begin = 0;
    Ends ends{};
    if (is_there) {
      u64 bytes = request->op == kPutValue || request->op == kSignal ? 0 : request->bytes;
      cost = bytes * a.byte_cost >> 10;
      cost = cost < a.message_cost ? a.message_cost : cost;
      // The first launch may begin behind the post.
      posted = request->posted > begun ? request->posted - begun : request->posted == 0 ? now() : 0;
    }
    // Looked up and loaded while the wire is booked.
    Payload payload;
    if (is_there) ends = ends_of(*request);
    if (is_there && is_short(*request, ends)) payload.load(ends.src, (u32)request->bytes);
    count = book(is_there, rank, count, cost, posted, begin);
    is_there = is_there && rank < count;
    Job& job = s.jobs[(made + rank) % kJobs];
    if (is_there) payload.store(ends.dst);
    if (is_there) make(job, *request, ends, {taken + place.k, begin, cost >> 10, place.line, payload.words != 0});
    number_chunks(made, count);
    Lanes mine_taken = ballot(is_there) >> (place.line * place.depth % kWave);
    taken += is_used ? popc(mine_taken & mask_of(place.depth)) : 0;
    fence_block();
    sync_wave();
    if (lane_id() == 0) s.made = made + count;
    return count;
  }

  __device__ static Lanes mask_of(u32 lanes) { return lanes >= kWave ? kAllLanes : (Lanes(1) << lanes) - 1; }

  // Requests of this lane's queue that are there without a gap.
  __device__ static u32 run_of(Lanes there, Place place) {
    u32 shift = place.line * place.depth;
    if (shift >= kWave) return 0;
    Lanes gaps = ~(there >> shift) & mask_of(place.depth);
    return gaps == 0 ? place.depth : first_of(gaps);
  }

  // Books the wire for the first requests; how many. Other blocks book, too.
  __device__ u32 book(bool is_there, u32 rank, u32 count, u64 cost, u64 posted, u64& begin) {
    if (a.byte_cost == 0 && a.message_cost == 0) {
      begin = posted;
      return count;
    }
    // The last known word is tried first: mostly no other block has booked since.
    u64& seen = free_;
    while (true) {
      u64 most = shfl(now() + kAhead, 0) << 10, free = seen;
      if (free > most) return 0;
      u32 booked = 0;
      for (; booked < count && (booked == 0 || free <= most); booked++) {
        u32 lane = first_of(ballot(is_there && rank == booked));
        u64 from = shfl(posted << 10, lane);
        from = from > free ? from : free;
        if (is_there && rank == booked) begin = from >> 10;
        free = from + shfl(cost, lane);
      }
      u64 found = lane_id() == 0 ? atomic_cas(&a.wire->free, seen, free) : 0;
      found = shfl(found, 0);
      bool is_ours = found == seen;
      seen = is_ours ? free : found;
      if (is_ours) return booked;
    }
  }

  __device__ static bool moves(const Request& request) {
    return request.op == kPut || request.op == kPutSignal || request.op == kGet;
  }

  __device__ static bool raises(const Request& request) {
    return request.op == kPutSignal || request.op == kSignal;
  }

  __device__ Ends ends_of(const Request& request) const {
    u32 me = up.p.me, from = request.op == kGet ? request.peer : me, to = request.op == kGet ? me : request.peer;
    constexpr u64 kOffset = (u64(1) << kWindowShift) - 1;
    Ends ends{};
    if (request.op != kSignal)
      ends.dst = up.peer_ptr((u32)(request.dst >> kWindowShift), to, request.dst & kOffset);
    if (moves(request)) ends.src = up.peer_ptr((u32)(request.src >> kWindowShift), from, request.src & kOffset);
    if (raises(request)) ends.signal = word_of(request.peer, request.signal);
    return ends;
  }

  __device__ u64* word_of(u32 peer, u32 signal) const {
    if (a.fault == kWrongQueue) signal = (signal + a.signals) % (a.signals * a.queues);
    return reinterpret_cast<u64*>(up.p.signals[peer] + (u64)signal * up.p.spacing);
  }

  // Whether the warp that takes a request copies its bytes, too.
  __device__ bool is_short(const Request& request, const Ends& ends) const {
    bool is_aligned = (((u64)ends.dst | (u64)ends.src | request.bytes) & 7) == 0;
    return a.fault == kNone && moves(request) && request.bytes <= kShort && is_aligned;
  }

  __device__ void make(Job& job, const Request& request, const Ends& ends, const Turn& turn) const {
    job.dst = ends.dst;
    job.src = ends.src;
    job.bytes = request.bytes;
    job.begin = turn.begin;
    u64 draw = drawn(a.seed, turn.number * a.queues + queue_of(turn.line));
    job.due = turn.begin + turn.lasts + a.latency + (a.spread == 0 ? 0 : draw % a.spread);
    job.number = turn.number;
    job.signal = ends.signal;
    job.add = raises(request) ? request.add : 0;
    job.line = turn.line;
    job.op = request.op;
    job.chunks = moves(request) && !turn.is_copied ? (u32)((request.bytes + kChunk - 1) / kChunk) : 0;
    if (request.op == kPutSignal) spoil(job, draw);
    job.left = job.chunks;
    job.is_counted = 0;
    fence_block();
    // A signal alone has no payload to order.
    job.state = request.op == kSignal ? kThere : kMoving;
  }

  // Breaks the one promise that the config names.
  __device__ void spoil(Job& job, u64 draw) const {
    if (a.fault == kLost && draw % kLostOf == 0) job.chunks = job.add = 0;
    if (a.fault == kSignalFirst || a.fault == kDoneEarly) job.begin += kWrongHalf;
  }

  // Chunks are numbered on over all jobs.
  __device__ void number_chunks(u32 made, u32 count) {
    sync_wave();
    u32 lane = lane_id();
    Job& job = s.jobs[(made + lane) % kJobs];
    u32 own = lane < count ? job.chunks : 0, sum = own;
    for (u32 by = 1; by < kWave; by *= 2) {
      u32 before = shfl_up(sum, by);
      sum += lane >= by ? before : 0;
    }
    if (lane < count) job.first = chunks_ + sum - own;
    chunks_ += shfl(sum, kWave - 1);
    sync_wave();
  }

  __device__ void copy_chunk(Job& job, u32 chunk, u8* room, u64* barrier, u32& parity) {
    u64 at = (u64)chunk * kChunk, rest = job.bytes - at;
    u32 bytes = rest < kChunk ? (u32)rest : kChunk;
    u64 turn = job.begin + (at * a.byte_cost >> 20);
    while (now() + kLead < turn) pause_ns(20);
    sync_wave();
    u8* dst = job.dst + at;
    const u8* src = job.src + at;
    bool is_aligned = (((u64)dst | (u64)src | bytes) & 15) == 0;
    if (is_aligned) {
      copy_aligned(dst, src, bytes, room, barrier, parity);
      fence_block();
    } else if ((((u64)dst | (u64)src | bytes) & 3) == 0) {
      for (u32 i = 4 * lane_id(); i < bytes; i += 4 * kWave)
        *reinterpret_cast<u32*>(dst + i) = *reinterpret_cast<const volatile u32*>(src + i);
    } else {
      for (u32 i = lane_id(); i < bytes; i += kWave) dst[i] = const_cast<const volatile u8*>(src)[i];
    }
    // Bulk stores are complete here, and the fence of `end_jobs` covers them (INV-1).
    if (!is_aligned || !TY_ROWS_TMA) fence_system_all();
    sync_wave();
    if (lane_id() == 0) atomic_add(const_cast<u32*>(&job.left), ~0u);
  }

#if TY_ROWS_TMA
  // Copies the first one or two of the jobs, where each is one small chunk: a lane each. The others are left.
  __device__ Lanes copy_small(Lanes jobs, u32 number, u8* room, u64* barrier, u32& parity) {
    Lanes behind = jobs & (jobs - 1);
    u32 lane = lane_id();
    Job& job = s.jobs[(number + first_of(lane == 1 && behind != 0 ? behind : jobs)) % kJobs];
    bool is_small = lane < kSmall && (lane == 0 || behind != 0) && job.chunks == 1 &&
                    job.bytes <= kChunk / kSmall && (((u64)job.dst | (u64)job.src | job.bytes) & 15) == 0 &&
                    now() + kLead >= job.begin;
    Lanes small = ballot(is_small);
    if ((small & 1) == 0) return jobs;
    if (is_small) {
      bulk_copy(job.dst, job.src, (u32)job.bytes, room + lane * (kChunk / kSmall), barrier + lane, parity);
      parity ^= 1;
      fence_block();
      atomic_add(const_cast<u32*>(&job.left), ~0u);
    }
    sync_wave();
    return (small & 2) != 0 ? behind & (behind - 1) : behind;
  }
  // One thread.
  __device__ void bulk_copy(u8* dst, const u8* src, u32 bytes, u8* room, u64* barrier, u32 parity) {
    publish_places();
    bulk_load(shared_address(room), src, bytes, shared_address(barrier));
    wait_barrier(shared_address(barrier), parity);
    bulk_store(dst, shared_address(room), bytes);
    close_stores();
    stores_done();
  }
  __device__ void copy_aligned(u8* dst, const u8* src, u32 bytes, u8* room, u64* barrier, u32& parity) {
    if (lane_id() == 0) {
      bulk_copy(dst, src, bytes, room, barrier, parity);
      parity ^= 1;
    }
    sync_wave();
  }
#else
  __device__ Lanes copy_small(Lanes jobs, u32, u8*, u64*, u32&) { return jobs; }
  __device__ void copy_aligned(u8* dst, const u8* src, u32 bytes, u8*, u64*, u32&) {
    copy_16(Warp(), dst, src, bytes);
  }
#endif

  // Ends jobs whose payload is there and whose time has come: raises their signals. One fence for all payloads that
  // have come orders them first (INV-1), mostly before their time. Whether some request may count as done now.
  __device__ bool end_jobs() {
    u32 come = 0;
    bool ends = a.fault == kDoneEarly;
    for (u32 k = 0; k < kJobs / kWave; k++) {
      const Job& job = s.jobs[lane_id() + k * kWave];
      if (job.state != kMoving) continue;
      fence_block();
      if (job.left == 0) come |= 1u << k;
    }
    if (ballot(come != 0) != 0) fence_system();
    for (u32 k = 0; k < kJobs / kWave; k++) {
      Job& job = s.jobs[lane_id() + k * kWave];
      if ((come >> k & 1) != 0) job.state = kThere;
      bool is_early = a.fault == kSignalFirst && job.state == kMoving;
      if (job.state != kThere && !is_early) continue;
      fence_block();
      if (now() < job.due) continue;
      end(job);
      ends = true;
    }
    return ballot(ends) != 0;
  }

  __device__ void end(Job& job) {
    bool is_there = job.state == kThere;
    if (is_there && job.op == kPutValue) store_relaxed(reinterpret_cast<u64*>(job.dst), job.bytes);
    if (job.add != 0) {
      u64 late = now() - job.due;
      add_relaxed(job.signal, job.add);
      job.add = 0;
      add_relaxed(&a.wire->raised, 1);
      add_relaxed(&a.wire->late, late);
      if (late > latest_) raise_to(&a.wire->latest, latest_ = late);
    }
    if (is_there) job.state = kArrived;
  }

  // Whether the request of a job counts as done.
  __device__ bool is_done(const Job& job) const {
    if (job.state == kArrived) return true;
    return a.fault == kDoneEarly && job.state == kMoving && job.op == kPutSignal && now() >= job.due;
  }

  // Raises a word to a value, if it is lower.
  __device__ static void raise_to(u64* at, u64 value) {
    u64 seen = load_relaxed(at);
    while (seen < value) {
      u64 found = atomic_cas(at, seen, value);
      if (found == seen) return;
      seen = found;
    }
  }

  // Counts requests that are done, in the order of their queue, and frees the slots of their jobs. Whether some
  // counted.
  __device__ bool count_done() {
    bool counts_some = false;
    for (u32 line = 0; line < lines; line++) {
      // Requests behind the first one that is not counted: bit k stands for the one with k before it.
      u64 base = s.done[line], there = 0;
      for (u32 i = lane_id(); i < kJobs; i += kWave) {
        const Job& job = s.jobs[i];
        if (job.state == kFree) continue;
        fence_block();
        bool is_new = job.is_counted == 0 && is_done(job) && job.line == line;
        if (is_new && job.number - base < kBits) there |= 1ull << (job.number - base);
      }
      if (ballot(there != 0) == 0) continue;
      for (u32 bits = 1; bits < kWave; bits *= 2) there |= shfl_xor(there, bits);
      u32 count = 0;
      while (count < kBits && (there >> count & 1) != 0) count++;
      for (u32 i = lane_id(); i < kJobs; i += kWave) {
        Job& job = s.jobs[i];
        if (job.state == kFree) continue;
        fence_block();
        bool counts = job.is_counted == 0 && job.line == line && job.number - base < count;
        if (counts) job.is_counted = 1;
      }
      if (lane_id() == 0) s.done[line] = base + count;
      counts_some |= count != 0;
    }
    fence_block();
    for (u32 i = lane_id(); i < kJobs; i += kWave) {
      Job& job = s.jobs[i];
      if (job.is_counted != 0 && job.state == kArrived) job.state = kFree;
    }
    sync_wave();
    return counts_some;
  }

  const PacerArgs& a;
  const Up& up;
  Shared& s;
  u64 begun, latest_ = 0, free_ = 0;
  u32 lines, chunks_ = 0;
  bool left_ = false;
};

}  // namespace ty

// One launch of the engine.
TY_KERNEL_ALONE((ty::kCopyWarps + 2) * ty::kWave)
ty_paced(TY_ARGUMENT ty::PacerArgs a, TY_ARGUMENT ty::Up::Params p) {
  using namespace ty;
  TY_SHARED_BYTES(bytes);
  Shared& shared = *reinterpret_cast<Shared*>(bytes);
  __shared__ u64 barriers[kCopyWarps * kSmall];
  u32 thread = threadIdx.x, warp = wave_id();
  if (thread == 0) {
    atomic_cas(&a.wire->begun, 0ull, now_ns());
    shared.made = 0;
    shared.quit = 0;
#if TY_ROWS_TMA
    for (u32 i = 0; i < kCopyWarps * kSmall; i++) init_barrier(shared_address(&barriers[i]), 1);
    publish_barriers();
#endif
  }
  if (thread < kJobs) {
    shared.jobs[thread].state = kFree;
    shared.jobs[thread].is_counted = 0;
  }
  if (thread < kCopyWarps) shared.at[thread] = 0;
  u32 queue = blockIdx.x + thread * gridDim.x;
  if (thread < kWave && queue < a.queues) shared.done[thread] = load_relaxed(a.lines[queue].taken);
  sync_block();
  Up up(p);
  Pacer engine(a, up, shared);
  if (warp == kCopyWarps) engine.take();
  else if (warp == kCopyWarps + 1) engine.raise();
  else engine.copy(warp, bytes + kOwnBytes + warp * kChunk, &barriers[warp * kSmall]);
}
