// Rows that cross between domains in runs, so that the exchange inside a domain forwards the first of them while the
// last are not sent yet. Both exchanges of a dispatch are under way at once: the one on the rail waits for nothing that
// is inside, so it ends whether or not the other has begun.
//
// A *run* is 2^shift consecutive rows of a source for one domain. Warps that move rows count each row that they have
// staged; the posting warp of a block puts its runs once they are whole, each with a signal of its own (INV-2). The
// watching warp of a block waits for the signals of its runs from other domains, and stores the exchange's epoch in a
// word of each: the exchange inside reads these words, so it needs no device API of the rail. Metadata are
// gathered ahead of rows. The words of a run grow with epochs, and are never reset.
#pragma once
#include "put_rows.cuh"

namespace ty {

// Rows in a run of a source that has so many.
__device__ inline u32 rows_of_run(const Crossing& x, u32 rows, u32 run) {
  u32 first = run << x.shift;
  return rows > first ? min(1u << x.shift, rows - first) : 0;
}

// Whether an array of `Staged` travels in runs: rows, and with them the scales of rows that are cast.
__device__ inline bool in_runs(const DispatchArgs& a, u32 array) {
  return kRuns && (array == 0 || (array == 1 && a.casts()));
}

// The expected total of the signals of so many rows: of arrays that travel in runs, or of the others.
__device__ inline u64 signals_of_arrays(const DispatchArgs& a, u64 rows, bool runs) {
  Staged staged(a, 0, 0);
  u64 signals = 0;
#pragma unroll
  for (u32 i = 0; i < kStagedArrays; i++)
    if (in_runs(a, i) == runs) signals += signals_of(a.c, rows, staged.width[i]);
  return signals;
}

#if TY_RUNS

// The signal of a run that `source` has sent, in the slot of this operation.
__device__ inline u32 run_signal(const Common& c, const Crossing& x, u32 source, u32 run) {
  return x.signal + (c.slot() * x.most + run) * c.ranks + source;
}

// The queue that a run leaves by, and that its signal is raised on. Records and metadata have the first one, so that
// a record never waits behind rows.
__device__ inline u32 queue_of_run(const Common& c, u32 run) {
  u32 others = (u32)c.state->queues - 1;
  return others == 0 ? 0 : 1 + run % others;
}

// A warp among those that serve runs.
struct Server {
  u32 number, count;
};

// The pairs of a run and a rank that are a warp's, in the order of runs. Lanes of a warp have some of them each, and of
// few ranks always the same, so that a late one holds up its own lanes only.
struct RunPairs {
  u32 ranks, runs, apart;  // runs of a server lie apart by the number of servers
  u32 run, rank;           // of this lane
  u32 runs_on, ranks_on;   // to the lane's next pair

  // Of so many ranks.
  __device__ RunPairs(const Server& me, const Crossing& x, u32 count)
      : ranks(count), runs(x.most), apart(me.count), run(me.number), rank(lane_id()), runs_on(0) {
    u32 lanes = min(x.lanes, kWave);
    for (u32 taken = count; taken <= lanes; taken += count) runs_on += apart;
    ranks_on = runs_on == 0 ? lanes : 0;
    if (rank >= lanes) run = runs;
    while (rank >= ranks && run < runs) rank -= ranks, run += apart;
    if (runs_on > 0 && run >= me.number + runs_on) run = runs;
  }
  __device__ bool open() const { return run < runs; }
  __device__ void step_on() {
    run += runs_on, rank += ranks_on;
    if (rank >= ranks) rank -= ranks, run += apart;
  }
};

// Puts a run that is staged. One thread.
template <class Up>
__device__ TY_INLINED bool put_run_rows(const DispatchArgs& a, const Up& up, const DispatchTables& t, u32 d, u32 run,
                                        Guard& guard) {
  u32 first = run << a.crossing.shift, end = first + rows_of_run(a.crossing, rows_for(a, t, d), run);
  u32 signal = run_signal(a.c, a.crossing, a.c.rank, run), queue = queue_of_run(a.c, run);
  bool ok = put_rows(a, up, t, landing_at(a, t, d), {0, first, end, queue}, signal, guard);
  if (ok && a.casts()) ok = put_rows(a, up, t, landing_at(a, t, d), {1, first, end, queue}, signal, guard);
  up.submit(queue);
  return ok;
}

// The counts of runs, [R, most]. A run is whole once its count is `each` for each of its rows.
struct RunCounts {
  u64* counts;
  u32 each;
};

// Posts the runs of a server as they become whole: `rows(d)` for each rank, put by `put(d, run)`. Those of this rank
// itself are only announced. One warp.
template <class Rows, class Put>
__device__ TY_INLINED void post_runs(const Common& c, const Crossing& x, const Server& server, const RunCounts& whole,
                                     Rows rows, Put put, Guard& guard) {
  u32 me = c.rank, ranks = c.ranks;
  RunPairs pair(server, x, ranks);
  // The last of phases: a report names a rank that others wait for, if there is one.
  What what{kPhaseDone, me, 0, c.epoch()};
  // One look each turn: lanes whose runs are whole do not wait for the others. True once this lane has no more.
  auto look = [&]() -> u64 {
    if (!pair.open()) return 1;
    u32 d = (me + 1 + pair.rank) % ranks, run = pair.run, some = rows_of_run(x, rows(d), run);
    u64* count = whole.counts + (u64)d * x.most + run;
    if (some > 0 && load_acquire(count) != (u64)some * whole.each) return 0;
    pair.step_on();
    if (some > 0) {
      guard.pass(what);
      store_relaxed(count, 0);
      if (d == me)
        store_release(x.here + (u64)me * x.most + run, c.epoch());
      else if (!put(d, run))
        return 1;
    }
    return !pair.open();
  };
  guard.until(what, look, [](u64 done) { return done != 0; });
}

// Announces the runs of other ranks as they arrive: `rows(source)` of each come, `signals(rows)` for so many. One warp.
template <class Up, class Rows, class Signals>
__device__ TY_INLINED void watch_runs(const Common& c, const Crossing& x, const Up& up, const Server& server, u32 phase,
                                      Rows rows, Signals signals, Guard& guard) {
  u32 ranks = c.ranks;
  if (ranks == 1) return;
  RunPairs pair(server, x, ranks - 1);
  What what{phase, c.rank, 0, 0};
  bool waits = false;
  // As above: one look each turn. True once this lane has no more runs to wait for.
  auto look = [&]() -> u64 {
    if (!pair.open()) return 1;
    u32 source = (c.rank + 1 + pair.rank) % ranks, run = pair.run, some = rows_of_run(x, rows(source), run);
    if (some > 0) {
      if (!waits) {
        u64* total = x.totals + ((u64)c.slot() * ranks + source) * x.most + run;
        *total += signals(some);
        what = {phase, source, run_signal(c, x, source, run), *total};
        waits = true;
      }
      if ((i64)(up.read_signal(queue_of_run(c, run), what.signal) - what.expected) < 0) return 0;
      guard.pass(what);
      waits = false;
      store_release(x.here + (u64)source * x.most + run, c.epoch());
    }
    pair.step_on();
    return !pair.open();
  };
  guard.until(what, look, [](u64 done) { return done != 0; });
}

// Announces that the metadata of a source's rows are here. One warp of the first block, behind `put_metadata`: another
// warp has stored the totals to wait for before it came to the barrier there.
template <class Up>
__device__ TY_INLINED void watch_metadata(const DispatchArgs& a, const Up& up, Guard& guard) {
  const Crossing& x = a.crossing;
  for (u32 s = lane_id(); s < a.c.ranks; s += kWave) {
    if (s == a.c.rank) continue;
    What what{kPhaseRows, s, a.c.rows_signal() - a.c.rank + s, load_device(&a.c.cell->totals[s])};
    if (wait_queues(*a.c.state, up, what, guard)) store_release(x.described + s, a.c.epoch());
  }
}

// Puts the metadata of this rank's rows once all blocks have staged theirs. The whole block: its warps move rows, in
// the same shared memory, once all of them have staged metadata.
template <class Up>
__device__ TY_INLINED void put_metadata(const DispatchArgs& a, const Up& up, const DispatchTables& t, Guard& guard) {
  if (!last_to_come(a.c) || wave_id() != kWarps - 1) return;
  fence_system_all();
  if (lane_id() == 0) store_release(a.crossing.described + a.c.rank, a.c.epoch());
  constexpr u32 kBeside = kStagedArrays - 1;
  for (u32 i = lane_id(); i < (a.c.ranks - 1) * kBeside; i += kWave) {
    u32 d = (a.c.rank + 1 + i / kBeside) % a.c.ranks, array = 1 + i % kBeside;
    if (in_runs(a, array)) continue;
    put_rows(a, up, t, landing_at(a, t, d), {array, 0, rows_for(a, t, d), 0}, a.c.rows_signal(), guard);
  }
  sync_wave();
  if (lane_id() == 0) up.submit(0);
}

// The service of a block beside its movers: its last two warps.
template <class Up>
__device__ TY_INLINED void serve_runs(const DispatchArgs& a, const Up& up, const DispatchTables& t, Guard& guard) {
  Server me{blockIdx.x, blocks_of_runs(a)};
  if (wave_id() == kWarps - 1) {
    RunCounts staged{a.crossing.staged, a.pieces};
    auto rows = [&](u32 d) { return rows_for(a, t, d); };
    auto put = [&](u32 d, u32 run) { return put_run_rows(a, up, t, d, run, guard); };
    post_runs(a.c, a.crossing, me, staged, rows, put, guard);
  }
  if (wave_id() != kWarps - 2) return;
  if (blockIdx.x == 0) watch_metadata(a, up, guard);
  auto rows = [&](u32 source) { return rows_from(a, t.heard, a.c.rank, source); };
  auto signals = [&](u32 some) { return signals_of_arrays(a, some, true); };
  watch_runs(a.c, a.crossing, up, me, kPhaseRows, rows, signals, guard);
}

#endif

}  // namespace ty
