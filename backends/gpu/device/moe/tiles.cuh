// Expert-major and packed over loads and stores: rows are spread over the other experts of their
// tokens while others still arrive.
//
// The rows that one source has for another rank are split into tiles. A source adds to a tile's count, at
// the rank, for every piece of a row and for a row's metadata, each when it is complete there. Warps take
// shares of tiles in the order of arrival, wait for them, and spread them: first the warps that move no
// rows, unless their block pushes, then those that have moved theirs. A warp that has rows to move waits
// for no rank, so no two ranks wait for each other. While rows are moved, others are spread by loads and
// stores: bulk copies of a block queue behind those that the link delays. Where all multiprocessors take
// part, as many blocks as the link needs move rows to other ranks, and the others move this rank's own
// and spread.
//
// The rows that a rank has for itself are in no tile: the warp that loads them stores them to all
// their places.
#pragma once
#include "experts.cuh"
#include "puts.cuh"
#include "tables.cuh"

namespace ty {

// The count of a tile of `source` at `rank`. The lower half counts pieces and metadata of rows that are
// complete, the upper half counts shares that are spread. Zero between operations.
template <class Up>
__device__ u64* tile_count(const DispatchArgs& a, const Up& up, u32 rank, u32 source, u32 tile) {
  u64 offset = a.tiles + 8 * ((u64)source * a.tiles_of_source() + tile);
  return reinterpret_cast<u64*>(reach(a.c, up, kControl, rank, offset));
}

// The count of the tile that holds a token's row at the rank of selection k, or null: each rank has one k.
template <class Up>
__device__ u64* count_of_row(const DispatchArgs& a, const Up& up, u32 token, u32 k) {
  u32 packed = a.r.rows[(u64)token * a.c.topk + k], rank = packed >> kPlaceBits;
  if (packed == kNoRow || rank == a.c.rank) return nullptr;
  u32 row = row_of(a.c, a.r, token, packed, rank);
  return tile_count(a, up, rank, a.c.rank, row / a.tile_rows);
}

// Reports to a rank that the metadata of this many of this rank's rows there is complete. One warp.
template <class Up>
__device__ void count_metadata(const DispatchArgs& a, const Up& up, u32 rank, u32 first, u32 rows) {
  sync_wave();
  // A unit has fewer rows than as many tiles as there are lanes.
  u32 tile = first / a.tile_rows + lane_id();
  u32 begin = max(first, tile * a.tile_rows), end = min(first + rows, (tile + 1) * a.tile_rows);
  if (begin < end)
    add_release(tile_count(a, up, rank, a.c.rank, tile), end - begin);
}

// A share of a tile that arrives here.
struct TilePart {
  u32 source, tile, first, rows;  // `first` among the rows of the source
  u32 expected, parts;            // of the tile

  // Number `unit` in the order in which shares are taken: other ranks in turn, from this one on.
  __device__ TilePart(const DispatchArgs& a, const DispatchTables& t, u32 unit) {
    u32 ranks = a.c.ranks, each = a.tile_rows / a.part_rows, turn = unit / (ranks - 1);
    source = (a.c.rank + 1 + unit % (ranks - 1)) % ranks;
    tile = turn / each;
    first = turn * a.part_rows;
    u32 all = t.heard[source * (kHead + ranks) + kHead + a.c.rank];
    u32 begin = tile * a.tile_rows, length = all > begin ? min(a.tile_rows, all - begin) : 0;
    rows = all > first ? min(a.part_rows, all - first) : 0;
    expected = length * (a.pieces + 1);
    parts = (length + a.part_rows - 1) / a.part_rows;
  }
};

// Shares of all tiles that arrive here, those without rows among them.
__device__ inline u32 parts_of(const DispatchArgs& a, const DispatchTables& t) {
  u32 most = 0, words = kHead + a.c.ranks;
#pragma unroll 1
  for (u32 s = 0; s < a.c.ranks; s++)
    if (s != a.c.rank) most = max(most, t.heard[s * words + kHead + a.c.rank]);
  return (most + a.part_rows - 1) / a.part_rows * (a.c.ranks - 1);
}

// The arguments of `spread` for this rank's region.
template <class Up>
__device__ SpreadArgs spread_of(const DispatchArgs& a, const Up& up, const DispatchTables& t) {
  u32 me = a.c.rank;
  u8* base = reach(a.c, up, kArena, me, (u64)t.heard[me * words_of(a) + kHeadPlace] * kRegionAlign);
  const Region& region = own_region();
  SpreadArgs s = {};
  s.x = reinterpret_cast<u8*>(t.x[me]);
  s.scales = reinterpret_cast<u32*>(base + region.scales);
  s.weights = a.weights ? reinterpret_cast<float*>(base + region.weights) : nullptr;
  s.source = a.layout == Layout::kPacked ? reinterpret_cast<u32*>(base + region.source) : nullptr;
  s.slots = reinterpret_cast<const i32*>(t.ids[me]);
  s.landed_scales = reinterpret_cast<const u32*>(t.scales[me]);
  s.landed_weights = reinterpret_cast<const float*>(t.weights[me]);
  s.landed_source = reinterpret_cast<const u32*>(t.source[me]);
  s.rows = t.expert_rows[me];
  s.row_bytes = a.row_bytes;
  s.stage_bytes = a.stage_bytes;
  s.scale_words = a.scale_words;
  s.topk = a.c.topk;
  s.local_experts = a.c.local_experts();
  return s;
}

// The padding behind the rows of every expert. The warps that move row metadata.
__device__ inline void zero_paddings(const DispatchArgs& a, const DispatchTables& t,
                                     const SpreadArgs& s) {
  u32 first = a.c.rank * s.local_experts, start = 0;
  Threads some{threadIdx.x - (kWarps - kMetadataWarps) * kWave, kMetadataWarps * kWave};
  for (u32 e = 0; e < s.local_experts; e++) {
    u32 rows = t.expert_all[first + e], room = room_of(a, rows);
    if (e % gridDim.x == blockIdx.x) zero_rows(s, start + rows, start + room, some);
    start += room;
  }
}

// Waits until a tile has arrived. One warp.
template <class Up>
__device__ bool poll_tile(const DispatchArgs& a, const Up& up, const TilePart& p, Guard& guard) {
  bool ok = true;
  if (lane_id() == 0) {
    const u64* count = tile_count(a, up, a.c.rank, p.source, p.tile);
    auto look = [&] {
      u64 found = load_acquire(count);
      // Every warp of the rank may be polling, and sources are adding.
      if ((u32)found != p.expected) pause_ns(200);
      return found;
    };
    ok = guard.until({kPhaseRows, p.source, p.tile, p.expected}, look,
                     [&](u64 found) { return (u32)found == p.expected; });
  }
  return shfl(ok, 0);
}

// A share is spread: the last one of a tile makes its count ready for the next operation. One warp.
template <class Up>
__device__ void leave_tile(const DispatchArgs& a, const Up& up, const TilePart& p) {
  sync_wave();
  if (lane_id() != 0) return;
  u64* count = tile_count(a, up, a.c.rank, p.source, p.tile);
  if (atomic_add(count, 1ull << 32) >> 32 == p.parts - 1) store_relaxed(count, 0);
}

// The next share that a warp takes: its first lane has it.
__device__ inline u32 take_part(const DispatchArgs& a) {
  return lane_id() == 0 ? (u32)atomic_add(&a.c.state->taken, 1ull) : 0;
}

// Spreads rows as they arrive, until all have. True unless a wait was ended. One warp of those that
// spread.
template <class Up, class Copier>
__device__ TY_INLINED bool spread_parts(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                             const SpreadArgs& s, Copier& rows, Guard& guard) {
  u32 parts = parts_of(a, t), unit = take_part(a);
  while (true) {
    unit = shfl(unit, 0);
    if (unit >= parts) return true;
    TilePart p(a, t, unit);
    unit = take_part(a);
    if (p.rows == 0) continue;
    if (!poll_tile(a, up, p, guard)) return false;
    // An observation of one lane holds for all.
    sync_wave();
    // Peers stored these rows by other means than bulk copies that may read them.
    publish_places();
    spread_tokens(s, rows, (u64)t.first_row[p.source] + p.first, p.rows, 1);
    leave_tile(a, up, p);
  }
}

// All blocks.
template <class Up, class Mover>
__device__ TY_INLINED void spread_tiles(const DispatchArgs& a, const Up& up, const DispatchTables& t,
                             Mover& mover, u8* stages, Guard& guard) {
  u32 warp = wave_id();
  SpreadArgs s = spread_of(a, up, t);
  bool moves = warp < a.movers, ok = true;
  if (moves) mover.move();
  if (a.zero_padding && warp >= kWarps - kMetadataWarps) zero_paddings(a, t, s);
#if TY_ROWS_TMA
  if (moves) {
    BulkCopier rows(stages, a.stage_bytes, a.stages);
    ok = spread_parts(a, up, t, s, rows, guard);
    // Loads into shared memory must have ended before the block ends.
    rows.finish();
  } else
#endif
  {
    // Beside copies that the link delays, these would queue behind them.
    bool pushes = !moves && blockIdx.x < a.pushers;
    VectorCopier rows;
    ok = pushes || spread_parts(a, up, t, s, rows, guard);
  }
  if (!ok && lane_id() == 0) a.c.state->stopped = 1;
}

}  // namespace ty
