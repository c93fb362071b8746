// Dispatch: counts, enters, and stores every row straight to its place at its
// owner.
//
// Every rank receives the counts of every rank, so each derives all places by itself; a record also
// states that the region it names is free. So one exchange is counting, grant and entry barrier at
// once.
#pragma once
#include "entry.cuh"
#include "runs.cuh"
#include "metadata.cuh"
#include "rank_major.cuh"

namespace ty {

// The experts that a record for `peer` counts: all where every rank must know every start.
struct Counted {
  u32 first, count;

  __device__ Counted(const DispatchArgs& a, u32 peer) {
    u32 local = a.c.local_experts();
    first = a.is_flat() ? peer * local : 0;
    count = a.is_flat() ? local : a.c.experts;
  }
};

// The contents of records, in shared memory: the head, then rows for ranks, then for experts.
struct EntryHeader {
  u32* words;

  __device__ EntryHeader(const DispatchArgs& a, u8* shared)
      : words(reinterpret_cast<u32*>(shared + a.table_bytes)) {}
  __device__ u32* counts() const { return words + kHead; }
};

// The head. One thread. `bad`: the routing is refused.
__device__ inline void write_head(const DispatchArgs& a, const EntryHeader& header, bool bad) {
  u32 verdict = bad ? kRefuseInput : verdict_of(a);
  u32 objector = kGrouped ? a.c.objector_now() : a.c.objector;
  u32 place = verdict == kEnter ? (u32)(a.region / kRegionAlign) : objector;
  u32* head = header.words;
  head[kHeadVerdict] = verdict | gridDim.x << 8;
  head[kHeadSignature] = (u32)a.c.signature;
  head[kHeadOrigin] = a.c.origin();
  head[kHeadPlace] = place;
  head[kHeadCapacity] = (u32)(a.capacity / kRegionAlign);
  head[kHeadRows] = 0;
  head[kHeadSignatureHigh] = (u32)(a.c.signature >> 32);
  head[kHeadText] = a.c.text_bytes;
}

template <class Up>
__device__ void post_dispatch_entry(const DispatchArgs& a, const Up& up, const EntryHeader& header, Guard& guard) {
  u32 words = words_of(a) + Counted(a, 0).count * a.c.groups();
  post_entry(a.c, up, words, header.words[kHeadVerdict] & 0xff, a.topk_idx, guard, [&](u32 peer, u32 w) -> u32 {
    if (w < kHead) return header.words[w];
    if (verdict_of(a) != kEnter) return 0;
    w -= kHead;
    u32 ranks = a.c.ranks * a.c.groups(), first = Counted(a, peer).first * a.c.groups();
    if (w >= ranks) w += first;
    if constexpr (kGrouped) return a.r.group_counts[w];
    return header.counts()[w];
  });
}

// Fills the tables that depend on the number of rows for a rank.
__device__ inline void place_rows(const DispatchArgs& a, const DispatchTables& t, u32 d) {
  u32 groups = a.c.groups(), me = a.c.rank, first = 0, own = 0, writer = writer_at(a.c, d);
#pragma unroll 1
  for (u32 g = 0; g < groups; g++)
#pragma unroll 1
    for (u32 s = 0; s < a.c.ranks; s++) {
      u32 rows = counts_for(a, t, s, d)[g];
      if (s == writer) {
        t.row_base[g * a.c.ranks + d] = a.rank_major ? a.source_first : first - own;
        if constexpr (kGrouped) own += rows;
      }
      if (d == me) t.first_row[s] = first;
      first += rows;
    }
  t.tokens[d] = first;
}

// Expert-major and packed: receives all counts of experts and places the experts. The whole block.
template <class Up>
__device__ bool place_experts(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                              Guard& guard) {
  bool ok = true;
  u32 groups = a.c.groups();
#pragma unroll 1
  for (u32 e = threadIdx.x; e < a.c.experts && ok; e += blockDim.x) {
    u32 all = 0, own = 0;
    WordRange of_expert{words_of(a) + e * groups, groups};
    ok = poll_words_of_all(a.c, up, of_expert, guard, [&](u32 g, u32 source, u32 rows) {
      if (source == a.c.rank) {
        t.expert_base[g * a.c.experts + e] = all - own;
        if constexpr (kGrouped) own += rows;
      }
      all += rows;
    });
    t.expert_all[e] = all;
  }
  if (!sync_block_and(ok)) return false;
  // One warp for each rank, because starts are sums over its experts.
#pragma unroll 1
  for (u32 d = wave_id(); d < a.c.ranks; d += kWarps) {
    u32 rows = scan_experts(a, t, d, [&](u32 e, u32 start) {
      for (u32 g = 0; g < groups; g++) t.expert_base[g * a.c.experts + e] += start;
    });
    if (lane_id() == 0) t.expert_rows[d] = rows;
  }
  sync_block();
  return true;
}

// Fills the tables that name places in arenas; returns the decision of the first rank whose region
// is too small, if there is one.
__device__ inline Decision place(const DispatchArgs& a, const DispatchTables& t) {
  __shared__ u32 full;
  if (threadIdx.x == 0) full = a.c.ranks;
  sync_block();
#pragma unroll 1
  for (u32 d = threadIdx.x; d < a.c.ranks; d += blockDim.x) {
    const u32* head = &t.heard[d * words_of(a)];
    place_rows(a, t, d);
    Region region = region_of(a, t, d);
    if (d == a.c.rank) own_region() = region;
    t.needed[d] = region.bytes;
    if (region.bytes > (u64)head[kHeadCapacity] * kRegionAlign) atomic_min(&full, d);
    if (a.stages_rows() && !(d == a.c.rank && a.keeps_own())) {
      aim_at_staging(a, t, d);
      continue;
    }
    Landing to{d, t.x[d] + (u64)head[kHeadPlace] * kRegionAlign, region};
    t.x[d] = to.at(a, 0);
    t.scales[d] = to.at(a, 1);
    t.weights[d] = to.at(a, 2);
    t.ids[d] = to.at(a, 3);
    t.source[d] = to.at(a, 4);
  }
  sync_block();
  if (full < a.c.ranks) return {kFull, full};
  return {kGo, a.c.rank};
}

// Puts the rows that this block has staged. The whole block.
template <class Up>
__device__ TY_INLINED void put_own_rows(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                             Guard& guard) {
  BlockTokens own(a);
  if (a.is_flat()) {
    for (u32 i = threadIdx.x; i < a.c.ranks; i += blockDim.x) {
      u32 d = (a.c.rank + i) % a.c.ranks;
      if (i == 0 && a.keeps_own()) continue;
      StagedRows rows{0, rows_before(a, own.first, d), rows_before(a, own.end, d), own_queue(a.c)};
      put_rows(a, up, t, landing_at(a, t, d), rows, a.c.rows_signal(), guard);
    }
    return;
  }
  u32 warps = block_waves();
  for (u32 token = own.first + wave_id(); token < own.end; token += warps) {
    Selection s(a, t, token);
    if (s.first >= 0) put_selection(a, up, t, landing_at(a, t, s.rank), s, guard);
    sync_wave();
  }
}

// Puts the staged data: each block puts its rows, and the last block also puts the row metadata of all. If
// a wait is ended, the waits behind it end too.
template <class Up>
__device__ TY_INLINED void put_staged(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                           Guard& guard) {
  fence_system_all();
  // Rows that were not waited for are not staged.
  if (!sync_block_and(!guard.ended())) return;
  put_own_rows(a, up, t, guard);
  submit_block(up, own_queue(a.c));
  if (!last_to_come(a.c)) return;
  fence_system_all();
  constexpr u32 kBeside = kStagedArrays - 1;
  for (u32 i = threadIdx.x; i < a.c.ranks * kBeside; i += blockDim.x) {
    u32 d = (a.c.rank + i / kBeside) % a.c.ranks;
    if (d == a.c.rank && a.keeps_own()) continue;
    StagedRows rows{1 + i % kBeside, 0, rows_for(a, t, d), own_queue(a.c)};
    put_rows(a, up, t, landing_at(a, t, d), rows, a.c.rows_signal(), guard);
  }
  submit_block(up, own_queue(a.c));
}

// Rows of this rank's local experts as their own ranks count them: counts that no block has received.
// One warp; all lanes hold `sum`. A lane has experts that lie together, so that several of their words are in flight
// at once: each look takes almost a microsecond.
template <class Up>
__device__ bool poll_experts(const DispatchArgs& a, const Up& up, u8* base, u32* sum, Guard& guard) {
  u32 local = a.c.local_experts(), groups = a.c.groups(), share = (local + kWave - 1) / kWave;
  u32 first = min(lane_id() * share, local), end = min(first + share, local), all_rows = 0, mine = 0;
  u32* counts = reinterpret_cast<u32*>(base + own_region().expert_counts);
  u64* ranges = reinterpret_cast<u64*>(base + own_region().ranges) + (u64)first * groups * a.c.ranks;
  u32 word = a.is_flat() ? first : a.c.rank * local + first;
  WordRange of_lane{words_of(a) + word * groups, (end - first) * groups};
  bool ok = poll_words_of_all(a.c, up, of_lane, guard, [&](u32 i, u32 source, u32 rows) {
    if (source == 0 && i % groups == 0) all_rows = 0;
    if (a.layout == Layout::kPacked) ranges[(u64)i * a.c.ranks + source] = rows | (u64)all_rows << 32;
    all_rows += rows;
    mine += rows;
    if (source + 1 == a.c.ranks) counts[first + i / groups] = all_rows;
  });
  sum_before(mine, sum);
  return all(ok);
}

// Rows of this rank's local experts, and where they start; returns their number, padding included,
// through `rows`. One warp.
template <class Up>
__device__ bool note_experts(const DispatchArgs& a, const Up& up, const DispatchTables& t, u8* base,
                             u32* rows, Guard& guard) {
  if (a.layout != Layout::kExpertMajor) return poll_experts(a, up, base, rows, guard);
  u32* counts = reinterpret_cast<u32*>(base + own_region().expert_counts);
  u32* starts = reinterpret_cast<u32*>(base + own_region().expert_starts);
  u32* ends = reinterpret_cast<u32*>(base + own_region().expert_ends);
  u32 local = a.c.local_experts(), first = a.c.rank * local;
  *rows = scan_experts(a, t, a.c.rank, [&](u32 e, u32 start) {
    starts[e - first] = start;
    counts[e - first] = t.expert_all[e];
    ends[e - first] = start + t.expert_all[e];
  });
  if (lane_id() == 0) starts[local] = *rows;
  return true;
}

// The rows of each local expert, for the host: words that are whole (INV-3), and say whose they are. One warp.
__device__ TY_COLD void tell_counts(const DispatchArgs& a, const u32* counts) {
  sync_wave();
#pragma unroll 1
  for (u32 e = lane_id(); e < a.c.local_experts(); e += kWave)
    store_relaxed(a.host_counts + e, (u64)a.c.ticket << 32 | counts[e]);
}

// Writes into this rank's own region the counts, and the data that combine needs. One warp.
template <class Up>
__device__ bool note_counts(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                            Guard& guard) {
  u32 lane = lane_id(), me = a.c.rank, n = words_of(a), rows = 0;
  u64 tokens = t.tokens[me];
  u8* base = reach(a.c, up, kArena, me, (u64)t.heard[me * n + kHeadPlace] * kRegionAlign);
  u32* ends = reinterpret_cast<u32*>(base + own_region().rank_ends);
  // Rows of several domains lie in the order of world ranks.
  if (kGrouped && lane == 0) {
    u32 end = 0;
#pragma unroll 1
    for (u32 at = 0; at < a.c.groups() * a.c.ranks; at++) {
      end += counts_for(a, t, at % a.c.ranks, me)[at / a.c.ranks];
      ends[at] = end;
    }
  }
#pragma unroll 1
  for (u32 s = lane; s < a.c.ranks; s += kWave) {
    const u32* counts = counts_for(a, t, s, me);
#pragma unroll 1
    for (u32 g = 0; g < a.c.groups(); g++) {
      u32 at = g * a.c.ranks + s;
      reinterpret_cast<u32*>(base + own_region().rank_counts)[at] = counts[g];
      a.r.row_base[at] = t.row_base[at];
    }
    if constexpr (!kGrouped) {
      a.r.source_rows[s] = t.first_row[s];
      ends[s] = t.first_row[s] + counts[0];
    }
    // Rows in tiles have all been received when this kernel ends.
    u64 signals = a.in_tiles() ? 0 : t.heard[s * n + kHeadVerdict] >> 8;
    u64 apart = 0;
    if (a.stages_rows()) {
      u32 rows = s == me && a.keeps_own() ? 0 : rows_from(a, t.heard, me, s);
      signals = signals_of_arrays(a, rows, false), apart = kRuns ? signals_of_arrays(a, rows, true) : 0;
    }
    a.c.expect(a.c.rows_totals(), s, signals, apart);
  }
  bool ok = note_experts(a, up, t, base, &rows, guard);
  if (ok && a.host_counts) tell_counts(a, reinterpret_cast<u32*>(base + own_region().expert_counts));
  if (lane == 0) {
    u64* totals = reinterpret_cast<u64*>(base + own_region().totals);
    totals[0] = tokens;
    totals[1] = a.is_flat() ? tokens : rows;
    a.r.note->rows = tokens;
    if constexpr (!kGrouped) a.r.source_rows[a.c.ranks] = (u32)tokens;
  }
  return ok;
}

// The report for the host: sizes of this rank, or of the rank that has no room. One thread.
template <class Up>
__device__ void report_sizes(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                           const Decision& d, Guard& guard) {
  const u32* head = &t.heard[d.rank * words_of(a)];
  if (d.code == kGo || d.code == kFull) {
    a.c.outcome->tokens = t.tokens[d.rank];
    a.c.outcome->rows = a.is_flat() ? 0 : t.expert_rows[d.rank];
    a.c.outcome->needed = t.needed[d.rank];
    a.c.outcome->capacity = (u64)head[kHeadCapacity] * kRegionAlign;
  }
  tell(a.c, up, d, head, guard);
}

// T. A replay has the T of its handle.
__device__ inline u32 tokens_of(const DispatchArgs& a) {
  if (a.replay) return (u32)(load_device(&a.r.note->made) >> 32);
  return a.tokens ? min(load_device(a.tokens), a.c.input_rows) : a.c.input_rows;
}

// Counts the share of this block, if it has one. Where the former exchange was refused, there are no rows to count.
__device__ inline void prepare(const DispatchArgs& a, u32 tokens, u8* shared) {
  if (a.c.verdict != kEnter) return;
  if constexpr (kGrouped)
    if (a.c.former && load_device(&a.c.former->code) != kGo) return;
  if (!a.replay && blockIdx.x < a.r.blocks) count(a, tokens, shared);
  u32 found = a.tokens && blockIdx.x + threadIdx.x == 0 ? *a.tokens : 0;
  if (found > a.c.input_rows) note_problem(a, found, 0, kTooMany);
}

// The state for later kernels, until it is known how the operation continues. One thread.
__device__ inline void begin(const DispatchArgs& a, bool counted) {
  a.c.state->dealt = a.c.state->taken = a.c.state->gathered = a.c.state->summed = 0;
  pass_turn(a.c);
  a.c.cell->slot = a.c.slot();
  a.c.cell->code = 0;
  if constexpr (kRuns) a.c.cell->epoch = a.c.epoch();
  if (counted) *a.r.note = {a.c.epoch() | (u64)a.c.tokens() << 32, 0};
}

// The last block that has prepared enters for all, unless the host has aborted while the kernel
// waited behind another; the first block has looked for that.
template <class Up>
__device__ void post_last_entry(const DispatchArgs& a, const Up& up, u8* shared, Guard& guard) {
  if (!last_to_come(a.c) || a.c.epoch() == 0) return;
  u64 now = now_ns();
  EntryHeader header(a, shared);
  bool counted = !a.replay && verdict_of(a) == kEnter;
  // The same answer for all threads, although another block may be aborting now.
  bool given_up = sync_block_or(load_relaxed(&a.c.state->stopped) != 0);
  if (threadIdx.x == 0) {
    begin(a, counted);
    write_head(a, header, counted && a.c.state->problem != ~0ull);
  }
  scan(a, header.counts(), counted);
  if (!given_up) post_dispatch_entry(a, up, header, guard);
  sync_block();
  if (threadIdx.x == 0) {
    a.c.state->problem = ~0ull;
    a.c.trace->counted = now;
  }
}

// Moves all rows of this rank, and their metadata.
template <bool kTiles, class Up>
__device__ TY_INLINED void move_all(const DispatchArgs& a, const Up& up, const DispatchTables& t, Stages& stages,
                         u8* shared, Guard& guard) {
  move_metadata<kTiles>(a, up, t, shared + a.metadata_at, guard);
  if constexpr (kRuns) {
    put_metadata(a, up, t, guard);
    if (blockIdx.x >= blocks_of_runs(a)) return;
  }
  if constexpr (kMayFix && !kTiles)
    if (a.rank_major) close_blocks(a, t);
  Role role(a);
  Targets to{named_from(a, t), t.expert_base, t.x, t.scales, 0, role.own, role.others};
  if constexpr (kTiles) to.own_scales = t.x[a.c.rank] + own_region().scales;
  Mover<kTiles, Up> mover(a, up, to, stages, guard);
  if constexpr (kTiles) {
    spread_tiles(a, up, t, mover, shared + a.table_bytes, guard);
  } else {
    mover.move();
    if constexpr (kRuns)
      serve_runs(a, up, t, guard);
    else if constexpr (Up::kLoadStore)
      raise_all(a.c, up, a.c.rows_signal(), guard);
    else
      put_staged(a, up, t, guard);
  }
}

// Receives the records of all ranks and places their rows; code 0 if a wait was ended. The whole
// block.
template <class Up>
__device__ Decision settle(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                           Guard& guard) {
  __shared__ Decision decision;
  if (!poll_entries(a.c, up, words_of(a), t.heard, guard)) return {0, a.c.rank};
  if (threadIdx.x < kWave) {
    Decision found = decide<true>(a.c, t.heard, words_of(a));
    if (threadIdx.x == 0) decision = found;
  }
  sync_block();
  Decision d = decision;
  if (d.code != kGo) return d;
  if (!a.is_flat() && !place_experts(a, up, t, guard)) return {0, a.c.rank};
  return place(a, t);
}

// Reports the decision to this rank's host, and notes it in the region: two warps of the first block, side by
// side, because each takes microseconds, and signals of the block's rows wait for both.
template <class Up>
__device__ void note(const DispatchArgs& a, const Up& up, const DispatchTables& t, const Decision& d,
                     Guard& guard) {
  u64 heard = now_ns();
  bool noted = true;
  if (wave_id() != kWarps - 1) {
    // If a wait of the other warp ends, the host learns that by itself.
    if (lane_id() == 0) report_sizes(a, up, t, d, guard);
    if (lane_id() == 0 && d.code != kGo) decide_beside(a.c, d.code);
  } else if (d.code == kGo) {
    noted = note_counts(a, up, t, guard);
  }
  sync_wave();
  if (lane_id() != 0 || wave_id() != kWarps - 1) return;
  if (!noted) a.c.state->stopped = 1;
  a.c.trace->entered = heard;
  if (d.code != kGo) return;
  a.c.cell->code = kGo;
  decide_beside(a.c, noted ? kGo : 0);
}

template <class Up>
__device__ TY_INLINED void dispatch(const DispatchArgs& a, const Up& up, u8* shared) {
  bool notes = blockIdx.x == 0 && wave_id() >= kWarps - 2;
  u64 begun = now_ns();
  Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  DispatchTables t(shared, a.c);
  LaunchState found(a.c, a.replay ? a.r.note : nullptr, kGrouped);
  // One block asks for all: a read of host memory takes a microsecond, and such reads do not
  // overlap.
  u64 given_up = blockIdx.x + threadIdx.x == 0 ? load_relaxed(a.c.abort) : 0;
  // Looked up now, because it takes longer than anything else before rows move.
  for (u32 d = threadIdx.x; d < a.c.ranks; d += blockDim.x)
    t.x[d] = reinterpret_cast<u64>(reach(a.c, up, kArena, d, 0));
  u32 tokens = tokens_of(a);
  prepare(a, tokens, shared + a.table_bytes);
  found.publish(!a.replay, tokens);
  if (given_up != 0) stop_all(a.c);
  post_last_entry(a, up, shared, guard);
  // Blocks that started before an older operation failed know another epoch.
  if (a.c.epoch() == 0) return skip_operation(a.c);
  Stages stages(a, shared, guard);
  bool moves = !kRuns || blockIdx.x < blocks_of_runs(a);
  if (moves && verdict_of(a) == kEnter) stages.prime();
  Decision d = settle(a, up, t, guard);
  if (d.code == 0) {
    stop_all(a.c);
    if (blockIdx.x + threadIdx.x == 0) decide_beside(a.c, 0);
  }
  if (d.code != 0 && notes) note(a, up, t, d, guard);
  sync_wave();
  if (d.code != kGo) return stages.drop();
  // Tiles number the rows of a source consecutively. Rows of several groups have no such numbers.
  if constexpr (kMayTile) {
    if (a.in_tiles())
      move_all<true>(a, up, t, stages, shared, guard);
    else
      move_all<false>(a, up, t, stages, shared, guard);
  } else {
    move_all<false>(a, up, t, stages, shared, guard);
  }
  if (blockIdx.x != 0) return;
  if (threadIdx.x == 0) {
    a.c.trace->begun = begun;
    a.c.trace->moved = now_ns();
  }
  if constexpr (Up::kLoadStore)
    if (a.at_once) end_at_once(a.c, up, a.c.rows_signal() - a.c.rank, kPhaseRows, guard);
}

}  // namespace ty
