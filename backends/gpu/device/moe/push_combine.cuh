// Combine of rows outside the arena, which peers cannot read: owners push them while others are summed.
//
// The rows of a source are consecutive at their owner and at their target. The target is the source, where
// it has memory for them to land, else the owner's arena, where the source reads them. They travel in
// units, which are taken in rounds over the sources, so that each source gets its rows in the order of its
// tokens. One word per unit at the source holds the epoch of the operation once the unit has arrived, so no
// word is reset (an epoch repeats after 2^32 operations). The next combine's units arrive when its source
// has entered that combine, so it has read these (INV-8).
//
// The first blocks of a rank push, and wait for no rank meanwhile; then they help the others, which sum
// from the start.
#pragma once
#include "entry.cuh"
#include "experts.cuh"

namespace ty {

constexpr u32 kPushes = 1u << 31;  // in the first word of a head: this rank's rows are pushed

// The tables of a combine's block about all ranks, in shared memory.
struct CombineTables {
  u32* heard;    // [R, kHead]
  u64* first;    // [R]: address of this rank's first row from each owner
  u64* weights;  // [R]: the places of the weights of the owners' first rows
  u64* flags;    // [R]: words of the units that an owner pushes; 0: its rows have arrived
  u64* to;       // [R]: the target of the rows of each source, if this rank pushes
  u32* seen;     // [kSummingWarps, R]: units of each owner, all earlier included, that a warp knows here
  u32* start;    // [R + 1]: first of each source's rows among all here, if this rank pushes; then N

  __device__ CombineTables(u8* shared, u32 ranks) {
    heard = reinterpret_cast<u32*>(shared);
    first = reinterpret_cast<u64*>(heard + ranks * kHead);
    weights = first + ranks, flags = weights + ranks, to = flags + ranks;
    seen = reinterpret_cast<u32*>(to + ranks), start = seen + kSummingWarps * ranks;
  }
  __device__ u32 rows_of(u32 source) const { return start[source + 1] - start[source]; }
};

// The place where rows of `owner` land: each owner has memory for as many rows as a source may have
// for it.
__device__ inline u64 landing_of(const CombineArgs& a, u64 landing, u32 owner) {
  return landing + (u64)owner * a.c.max_tokens * a.row_bytes;
}

// The first of the rows that this rank has of a source.
__device__ inline u32 first_of_source(const CombineArgs& a, const CombineTables& t, u32 source) {
  return a.source_places > 0 ? source * a.source_places : t.start[source];
}

// The first word of the units that `owner` pushes to `source`.
template <class Up>
__device__ u64* unit_flags(const CombineArgs& a, const Up& up, u32 source, u32 owner) {
  u64 offset = a.flags + 8 * (u64)owner * a.most_units;
  return reinterpret_cast<u64*>(up.peer_ptr(kControl, source, offset));
}

// A warp's knowledge of the units that owners push to this rank. All by value: the target of a pointer lies
// in local memory, which each read of a word drops from the cache.
struct Units {
  const u64* flags = nullptr;  // as in CombineTables; null where all rows have arrived
  u32* seen = nullptr;         // this warp's
  u32 ranks = 0, most = 0, epoch = 0;

  Units() = default;
  __device__ Units(const CombineArgs& a, const CombineTables& t)
      : flags(t.flags), seen(t.seen + wave_id() * a.c.ranks), ranks(a.c.ranks),
        most(a.most_units), epoch(a.c.epoch()) {}

  // Waits until each lane's unit of its owner has arrived; lanes without `due` do not wait. The whole
  // warp.
  __device__ bool come(bool due, u32 owner, u32 unit, Guard& guard) const {
    due = due && flags[owner] != 0 && unit >= seen[owner];
    if (!any(due)) return true;
    look();
    bool ok = !due || unit < seen[owner] ||
              guard.until({kPhaseCombineRows, owner, unit, epoch},
                          [&] { return load_relaxed(flag(owner, unit)); },
                          [&](u64 found) { return found == epoch; });
    // Rows that are read after this, by bulk copies too, were stored before those words. The fence waits
    // for all requests of this warp, so polls must be few.
    fence_system();
    sync_wave();
    publish_places();
    return all(ok);
  }

 private:
  __device__ const u64* flag(u32 owner, u32 unit) const {
    return reinterpret_cast<const u64*>(flags[owner]) + unit;
  }
  // Polls the next units of all owners at once, each lane some of them: a poll for one takes as long.
  __device__ void look() const {
    constexpr u32 kAtOnce = 8;
    u32 lane = lane_id(), each = kWave / min(ranks, kWave), leader = lane / each * each;
    for (u32 first = 0; first < ranks; first += kWave / each) {
      u32 owner = first + lane / each, there = 0;
      bool mine = lane / each < kWave / each && owner < ranks && flags[owner] != 0;
      u32 begin = mine ? seen[owner] + lane % each * kAtOnce : most;
      u64 words[kAtOnce];
#pragma unroll
      for (u32 i = 0; i < kAtOnce; i++)
        words[i] = begin + i < most ? load_relaxed(flag(owner, begin + i)) : 0;
#pragma unroll
      for (u32 i = 0; i < kAtOnce; i++) there += there == i && words[i] == epoch;
      // The units that have arrived without a gap: of lanes that have found all theirs, and of the
      // next one.
      u32 lanes = min(first_of(~(ballot(there == kAtOnce) >> leader)), each);
      u32 rest = shfl(there, leader + min(lanes, each - 1));
      if (mine && lane == leader) seen[owner] += lanes * kAtOnce + (lanes < each ? rest : 0);
      sync_wave();
    }
  }
};

// Consecutive rows for one source that travel together; none behind the last unit.
struct PushUnit {
  u32 source, first, rows = 0;  // `first` among the rows of the source

  // Unit number `at` of this rank: round n holds the n-th units of all sources that have as many,
  // those behind this rank first.
  __device__ PushUnit(const CombineArgs& a, const CombineTables& t, u32 at) {
    u32 ranks = a.c.ranks, begin = 0;
    if (ranks == 2) {
      // All rounds hold the other rank.
      source = 1 - a.c.rank, first = at << a.unit_shift;
      u32 all = t.rows_of(source);
      rows = all > first ? min(1u << a.unit_shift, all - first) : 0;
      return;
    }
    auto units = [&](u32 s) { return (t.rows_of(s) + (1u << a.unit_shift) - 1) >> a.unit_shift; };
    while (true) {
      // Rounds that hold the same sources.
      u32 live = 0, end = ~0u;
#pragma unroll 1
      for (u32 i = 1; i < ranks; i++) {
        u32 has = units((a.c.rank + i) % ranks);
        if (has > begin) live++, end = min(end, has);
      }
      if (live == 0) return;
      if (at < live * (end - begin)) break;
      at -= live * (end - begin), begin = end;
    }
    u32 live = 0;
    for (u32 i = 1; i < ranks; i++) live += units((a.c.rank + i) % ranks) > begin;
    u32 nth = at % live;
    first = (begin + at / live) << a.unit_shift, source = a.c.rank;
    do {
      source = source + 1 == ranks ? 0 : source + 1;
    } while (units(source) <= begin || nth-- > 0);
    rows = min(1u << a.unit_shift, t.rows_of(source) - first);
  }
};

// A warp's path through its units, in pieces of some bytes.
class PushWalk {
 public:
  __device__ PushWalk(const CombineArgs& a, const CombineTables& t)
      : a_(a), t_(t), number_(blockIdx.x * a.push_warps + wave_id()), unit_(a, t, number_) {}

  __device__ bool open() const { return unit_.rows > 0; }
  __device__ const PushUnit& unit() const { return unit_; }
  __device__ u64 bytes() const { return unit_.rows * a_.row_bytes; }
  __device__ u32 piece() const { return (u32)min((u64)a_.push_bytes, bytes() - at_); }
  __device__ const u8* from() const {
    return a_.own + (first_of_source(a_, t_, unit_.source) + unit_.first) * a_.row_bytes + at_;
  }
  __device__ u8* to() const {
    return reinterpret_cast<u8*>(t_.to[unit_.source]) + unit_.first * a_.row_bytes + at_;
  }
  // True if the piece was the last of a unit.
  __device__ bool step() {
    at_ += piece();
    if (at_ < bytes()) return false;
    at_ = 0, number_ += a_.pushers * a_.push_warps;
    unit_ = PushUnit(a_, t_, number_);
    return true;
  }

 private:
  const CombineArgs& a_;
  const CombineTables& t_;
  u32 number_;
  u64 at_ = 0;
  PushUnit unit_;
};

template <class Up>
__device__ u64* flag_of(const CombineArgs& a, const Up& up, const PushUnit& unit) {
  return unit_flags(a, up, unit.source, a.c.rank) + (unit.first >> a.unit_shift);
}

#if TY_ROWS_TMA

constexpr u32 kPushStages = 3;  // pieces of a warp in shared memory

// One thread of each warp that pushes. Loads run ahead of stores; a unit is reported when its stores
// are complete, which is checked behind the first piece of the next unit.
template <class Up>
__device__ void push_units(const CombineArgs& a, const Up& up, const CombineTables& t, u8* stages) {
  __shared__ u64 barriers[kSummingWarps * kPushStages];
  if (lane_id() != 0) return;
  u32 warp = wave_id(), full = shared_address(&barriers[warp * kPushStages]);
  u32 rows = shared_address(stages) + warp * kPushStages * a.push_bytes;
  for (u32 i = 0; i < kPushStages; i++) init_barrier(full + 8 * i, 1);
  publish_barriers();
  publish_places();
  PushWalk ahead(a, t), walk(ahead);
  u64* done_flag = nullptr;
  u32 fill = 0, slot = 0, parity = 0, loaded = 0;
  auto load = [&] {
    if (!ahead.open()) return;
    bulk_load(rows + fill * a.push_bytes, ahead.from(), ahead.piece(), full + 8 * fill);
    ahead.step();
    fill = fill + 1 == kPushStages ? 0 : fill + 1, loaded++;
  };
  for (u32 i = 1; i < kPushStages; i++) load();
  while (loaded > 0) {
    wait_barrier(full + 8 * slot, parity >> slot & 1);
    parity ^= 1u << slot;
    bulk_store(walk.to(), rows + slot * a.push_bytes, walk.piece());
    close_stores();
    slot = slot + 1 == kPushStages ? 0 : slot + 1, loaded--;
    if (done_flag) {
      stores_done_but_one();
      fence_system();
      store_relaxed(done_flag, a.c.epoch());
    }
    u64* flag = flag_of(a, up, walk.unit());
    done_flag = walk.step() ? flag : nullptr;
    stores_read_but_one();
    load();
  }
  stores_done();
  fence_system();
  if (done_flag) store_relaxed(done_flag, a.c.epoch());
}

#else

template <class Up>
__device__ void push_units(const CombineArgs& a, const Up& up, const CombineTables& t, u8*) {
  for (PushWalk walk(a, t); walk.open();) {
    VectorCopier().copy(lane_id() == 0 ? walk.to() : nullptr, walk.from(), walk.piece());
    u64* flag = flag_of(a, up, walk.unit());
    if (!walk.step()) continue;
    sync_wave();
    fence_system();
    if (lane_id() == 0) store_relaxed(flag, a.c.epoch());
  }
}

#endif

// Pushes this rank's rows to the ranks that sum them. The blocks that push.
template <class Up>
__device__ void push_rows(const CombineArgs& a, const Up& up, const CombineTables& t, u8* stages) {
  if (wave_id() < a.push_warps) push_units(a, up, t, stages);
  sync_block();
}

}  // namespace ty
