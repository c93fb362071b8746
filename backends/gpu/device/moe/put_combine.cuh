// Combine over a device API that only puts: owners put their rows back, and sources sum the returned
// rows.
//
// The rows that an owner has of one source are consecutive, so they move in one run to the place
// that the source wants. Rows of the owner itself are read where they lie, except where groups keep them apart.
// Two kernels, with a wait for the rows between them.
#pragma once
#include "combine.cuh"
#include "runs.cuh"

namespace ty {

// Words of a record behind its head: the first of the owner's rows where they land, and the number of rows of each
// group.
constexpr u32 kReturnFirst = kHead, kReturnCounts = kHead + 1;
__device__ inline u32 return_words(const CombineArgs& a) { return kReturnCounts + a.c.groups(); }

// The number of this rank's rows at the owners before `d`: the first of those from `d`, where they land.
__device__ inline u32 rows_before(const CombineArgs& a, u32 d) {
  u32 rows = 0;
  for (u32 s = 0; s < d; s++) rows += a.r.counts[s];
  return rows;
}

// Rows that this owner has of the groups before `group`, and of this one of the sources before `s`.
__device__ inline u64 owned_before(const CombineArgs& a, const u32* heard, u32 group, u32 s) {
  u64 rows = 0;
  for (u32 i = 0; i < a.c.ranks; i++) {
    const u32* counts = &heard[i * return_words(a) + kReturnCounts];
    for (u32 g = 0; g < group; g++) rows += counts[g];
    if (i < s) rows += counts[group];
  }
  return rows;
}

// Whether every owner has the rows that routings name.
__device__ inline Decision check_returned(const CombineArgs& a, const u32* heard) {
  for (u32 d = 0; d < a.c.ranks; d++) {
    bool there = rows_end(a, d) <= heard[d * return_words(a) + kHeadRows];
    bool here = owned_before(a, heard, a.c.groups() - 1, d + 1) <= operation().rows;
    if (!there || !here) return {kBadRows, d};
  }
  return {kGo, a.c.rank};
}

// Whether this rank reads the rows of its own tokens that it owns where they lie.
__device__ inline bool reads_own(const CombineArgs& a, u32 owner) { return !kGrouped && owner == a.c.rank; }

__device__ inline u64 weight_bytes(const CombineArgs& a) {
  return a.returns_weights ? 4 * (u64)a.c.topk : 0;
}

template <class Up>
__device__ void post_returning_entry(const CombineArgs& a, const Up& up, Guard& guard) {
  u32 verdict = operation().verdict;
  u32 place = verdict == kEnter ? (u32)(a.landing / 16) : a.c.objector_now();
  u32 head[kHead] = {verdict,           (u32)a.c.signature,
                     a.c.origin(),      place,
                     (u32)(a.landing_weights / 16), (u32)operation().rows,
                     (u32)(a.c.signature >> 32),    0};
  // At least as many words as a dispatch, so that ranks that run a dispatch see the mismatch and do
  // not wait.
  u32 groups = a.c.groups(), words = kHead + max(a.c.ranks * groups, groups + 1);
  post_entry(a.c, up, words, verdict, nullptr, guard, [&](u32 peer, u32 w) -> u32 {
    if (w < kHead) return head[w];
    if (!a.c.enters() || w >= return_words(a)) return 0;
    if (w == kReturnFirst) return rows_before(a, peer);
    return kGrouped ? a.r.group_counts[peer * groups + w - kReturnCounts] : a.r.counts[peer];
  });
}

// Rows (even items) or weights (odd items) of one source, on a queue of their own if there are enough
// queues. One thread.
template <class Up>
__device__ bool combine_put_part(const CombineArgs& a, const Up& up, const u32* heard, u32 part,
                                 Guard& guard) {
  u32 source = (a.c.rank + part / 2) % a.c.ranks;
  if (reads_own(a, source)) return true;
  bool weights = part % 2 != 0;
  const u32* head = heard + source * return_words(a);
  u64 width = weights ? weight_bytes(a) : a.row_bytes, from = weights ? a.weights : a.x;
  u64 to = (u64)head[weights ? kHeadWeights : kHeadPlace] * 16 + head[kReturnFirst] * width;
  bool ok = true;
  for (u32 g = 0; g < a.c.groups() && ok; g++) {
    u64 rows = head[kReturnCounts + g];
    Run run{source, to, from + owned_before(a, heard, g, source) * width, rows, width};
    ok = put_run(a.c, up, part % (u32)a.c.state->queues, run, a.c.done_signal(), guard);
    to += rows * width;
  }
  return ok;
}

// The expected total of the signals of an owner's rows.
__device__ inline u64 signals_back(const CombineArgs& a, u32 owner) {
  if (reads_own(a, owner)) return 0;
  u64 rows = 0;
  for (u32 g = 0; g < a.c.groups(); g++)
    rows += kGrouped ? a.r.group_counts[owner * a.c.groups() + g] : a.r.counts[owner];
  return signals_of(a.c, rows, a.row_bytes) + signals_of(a.c, rows, weight_bytes(a));
}

// Enters; whether rows are to be put. `heard`: the records of all ranks. One block.
template <class Up>
__device__ bool begin_returning(const CombineArgs& a, const Up& up, u32* heard, Guard& guard) {
  __shared__ Decision decision;
  if (threadIdx.x == 0) a.c.trace->begun = now_ns();
  if (!former_is_decided(a.c, guard)) {
    stop_all(a.c);
    skip_operation(a.c);
    return false;
  }
  LaunchState(a.c, a.r.note, true).publish();
  sync_block();
  if (a.c.epoch() == 0) {
    skip_operation(a.c);
    return false;
  }
  if (threadIdx.x == 0) {
    pass_turn(a.c);
    begin(a);
  }
  if constexpr (kGrouped) clear_sums(a);
  post_returning_entry(a, up, guard);
  u32 words = return_words(a);
  if (!poll_entries(a.c, up, words, heard, guard)) {
    stop_all(a.c);
    if (threadIdx.x == 0) decide_beside(a.c, 0);
    return false;
  }
  if (threadIdx.x == 0) {
    decision = first_objection<false>(a.c, heard, words);
    if (decision.code == kGo) decision = check_returned(a, heard);
  }
  sync_block();
  Decision d = decision;
  for (u32 s = threadIdx.x; s < a.c.ranks && d.code == kGo; s += blockDim.x)
    a.c.expect(a.c.done_totals(), s, kRuns ? 0 : signals_back(a, s), kRuns ? signals_back(a, s) : 0);
  if (threadIdx.x == 0) {
    a.c.trace->entered = now_ns();
    tell(a.c, up, d, &heard[d.rank * words], guard);
    decide_beside(a.c, d.code);
  }
  return d.code == kGo;
}

// Enters, and puts every source's rows back. One block.
template <class Up>
__device__ void combine_put(const CombineArgs& a, const Up& up, u8* shared) {
  Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  u32* heard = reinterpret_cast<u32*>(shared);
  if (!begin_returning(a, up, heard, guard)) return;
  for (u32 i = threadIdx.x; i < 2 * a.c.ranks; i += blockDim.x)
    combine_put_part(a, up, heard, i, guard);
  sync_block();
  if (threadIdx.x < a.c.state->queues) up.submit(threadIdx.x);
  if (threadIdx.x == 0) a.c.trace->moved = now_ns();
}

// Sums the returned rows. All blocks; `serve()` as in `sum_rows`.
template <class Type, class Serve>
__device__ void sum_returned(const CombineArgs& a, u8* shared, Guard& guard, Serve serve) {
  // A rank that refuses has no routing.
  if (a.c.cell->code != kGo) return;
  u64 made = load_device(&a.r.note->made);
  // Behind the records, which some warps still read where they serve.
  u64* first = reinterpret_cast<u64*>(shared + (4 * a.c.ranks * return_words(a) + 7) / 8 * 8);
  u64* weights = first + a.c.ranks;
  u64 arena = reinterpret_cast<u64>(a.c.state->windows[kArena]);
  for (u32 d = threadIdx.x; d < a.c.ranks; d += blockDim.x) {
    u64 rows = rows_before(a, d);
    first[d] = arena + a.landing + rows * a.row_bytes;
    // Weights are addressed by the owner's own rows, where those of this rank lie together.
    u64 named = kGrouped ? 0 : a.r.row_base[d];
    weights[d] = arena + a.landing_weights + (rows - named) * weight_bytes(a);
    if (!reads_own(a, d)) continue;
    first[d] = arena + a.x + a.r.row_base[d] * a.row_bytes;
    weights[d] = arena + a.weights;
  }
  Returned back{first, weights, kGrouped ? nullptr : a.r.row_base};
  u32 tokens = (u32)(made >> 32);
  sum_partials<Type>({a, back, Units(), &guard, a.out, tokens}, tokens, shared + a.table_bytes, serve);
}

#if TY_RUNS

// Puts the rows and weights of a run of one source. One thread.
template <class Up>
__device__ bool put_returned_run(const CombineArgs& a, const Up& up, const u32* heard, u32 source, u32 run,
                                 Guard& guard) {
  const u32* head = heard + source * return_words(a);
  u32 first = run << a.crossing.shift, rows = rows_of_run(a.crossing, head[kReturnCounts], run);
  u32 signal = run_signal(a.c, a.crossing, a.c.rank, run), queue = queue_of_run(a.c, run);
  bool ok = true;
  for (u32 weights = 0; weights < 2 && ok; weights++) {
    u64 width = weights ? weight_bytes(a) : a.row_bytes, from = weights ? a.weights : a.x;
    u64 to = (u64)head[weights ? kHeadWeights : kHeadPlace] * 16 + ((u64)head[kReturnFirst] + first) * width;
    from += (owned_before(a, heard, 0, source) + first) * width;
    ok = put_run(a.c, up, queue, {source, to, from, rows, width}, signal, guard);
  }
  up.submit(queue);
  return ok;
}

// Puts sums back as the exchange inside makes them, and announces those that return: half of the warps of a ring each.
template <class Up>
__device__ void serve_returns(const CombineArgs& a, const Up& up, const u32* heard, Guard& guard) {
  // The totals of signals are those of the records alone: each run is waited for here.
  constexpr u32 half = kRingWarps / 2;
  bool posts = wave_id() < half;
  Server me{posts ? wave_id() : wave_id() - half, half};
  if (posts) {
    auto rows = [&](u32 d) { return heard[d * return_words(a) + kReturnCounts]; };
    auto put = [&](u32 d, u32 run) { return put_returned_run(a, up, heard, d, run, guard); };
    u32 each = (u32)load_relaxed(a.crossing.summed + a.c.ranks * a.crossing.most);
    post_runs(a.c, a.crossing, me, {a.crossing.summed, each}, rows, put, guard);
  } else {
    auto rows = [&](u32 owner) { return a.r.counts[owner]; };
    auto signals = [&](u32 some) {
      return signals_of(a.c, some, a.row_bytes) + signals_of(a.c, some, weight_bytes(a));
    };
    watch_runs(a.c, a.crossing, up, me, kPhaseCombineRows, rows, signals, guard);
  }
  if (threadIdx.x == 0) a.c.trace->moved = now_ns();
}

// The first ring serves the runs; the others sum what returns. All blocks.
template <class Type, class Up>
__device__ void return_runs(const CombineArgs& a, const Up& up, u8* shared) {
  Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  u32* heard = reinterpret_cast<u32*>(shared);
  if (blockIdx.x == 0) {
    if (!begin_returning(a, up, heard, guard)) return;
    sync_block();
  } else {
    bool ok = is_decided(a.c.cell, a.c.ticket, a.c.rank, guard);
    if (threadIdx.x == 0) operation().epoch = (u32)load_relaxed(&a.c.cell->epoch);
    ok = sync_block_and(ok);
    if (guard.ended()) a.c.state->stopped = 1;
    if (!ok) return;
  }
  sum_returned<Type>(a, shared, guard, [&] { serve_returns(a, up, heard, guard); });
  if (guard.ended()) a.c.state->stopped = 1;
}

#endif

}  // namespace ty
