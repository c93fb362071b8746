// Row metadata: ids or slots, weights, sources and scales. Rows of consecutive tokens for one rank lie
// together at that rank, so their metadata is gathered in shared memory and stored at once. A *unit* is up
// to `metadata_tokens` consecutive tokens, for one rank; the last kMetadataWarps warps of every block take
// units, each with memory for one.
#pragma once
#include "arrivals.cuh"
#include "tiles.cuh"

namespace ty {

// Shared memory of a unit. Tokens of it that do not go to the rank have no place.
struct MetadataRoom {
  i32* ids;        // [metadata_tokens, K]
  float* weights;  // [metadata_tokens, K]
  u8* scales;      // [metadata_tokens, scale_words]
  u32* tokens;     // [metadata_tokens]: the token at each place, counted from the unit's first

  __device__ MetadataRoom(const DispatchArgs& a, u8* at) {
    u32 by_k = (a.metadata_tokens * a.c.topk * 4 + 15) / 16 * 16;
    ids = reinterpret_cast<i32*>(at);
    weights = reinterpret_cast<float*>(at + by_k);
    tokens = reinterpret_cast<u32*>(at + 2 * by_k);
    scales = at + 2 * by_k + 128;
  }
};

// Stores data from shared memory, in bulk if possible. One warp. Addresses and lengths are
// multiples of 4.
__device__ inline void store_gathered(u64 to, const void* from, u32 bytes) {
  u32 lane = lane_id();
#if TY_ROWS_TMA
  if (((to | bytes) & 15) == 0) {
    if (lane == 0) bulk_store(reinterpret_cast<u8*>(to), shared_address(from), bytes);
    return;
  }
#endif
#pragma unroll 1
  for (u32 i = lane; i < bytes / 4; i += kWave)
    reinterpret_cast<u32*>(to)[i] = reinterpret_cast<const u32*>(from)[i];
}

// Whether row metadata is that of the flat layout.
template <bool kTiles>
__device__ bool flat_metadata(const DispatchArgs& a) {
  return kMayTile ? !kTiles : a.is_flat();
}

// The ids and weights of a unit's `count` tokens at a rank. Lanes take pairs of token and k side by side, a
// few at once, and do each step for all of these before the next: each memory access takes a microsecond.
// One warp.
template <bool kTiles>
__device__ TY_INLINED void gather_ids(const DispatchArgs& a, const DispatchTables& t, u32 rank, u32 first,
                           u32 count, const MetadataRoom& room) {
  constexpr u32 kAtOnce = 4;
  u32 topk = a.c.topk, local = a.c.local_experts(), pairs = count * topk;
#pragma unroll 1
  for (u32 at = lane_id(); at < pairs; at += kWave * kAtOnce) {
    u32 token[kAtOnce], k[kAtOnce];
    i32 expert[kAtOnce], id[kAtOnce];
    float weight[kAtOnce];
    // Lanes behind the last pair look it up again, and drop the result.
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++) {
      u32 pair = min(at + kWave * i, pairs - 1), place = pair / topk;
      token[i] = first + room.tokens[place], k[i] = pair - place * topk;
    }
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++) {
      u64 from = (u64)token[i] * topk + k[i];
      expert[i] = a.r.topk[from];
      weight[i] = a.weights ? a.weights[from] : 0.0f;
    }
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++) {
      bool here = expert[i] >= 0 && (u32)expert[i] - rank * local < local;
      // For a selection of another rank, a valid expert is looked up and dropped, which needs no
      // branch.
      u32 some = here ? (u32)expert[i] : rank * local;
      id[i] = flat_metadata<kTiles>(a) ? (i32)(some - rank * local)
                                    : (i32)expert_row(a.c, a.r, t.expert_base, token[i], k[i], some);
      if (!here) id[i] = -1, weight[i] = 0.0f;
    }
#pragma unroll
    for (u32 i = 0; i < kAtOnce; i++) {
      u32 pair = at + kWave * i;
      if (pair >= pairs) continue;
      room.ids[pair] = id[i];
      if (a.weights) room.weights[pair] = weight[i];
    }
  }
}

// Bytes of scales that are copied at once: 16 if all rows allow it, else 4.
__device__ inline u32 scale_vector(const DispatchArgs& a) {
  u64 all = (u64)a.scales | (u64)a.scale_stride[0] * 4 | (u64)a.scale_words * 4;
  return a.scale_stride[1] == 1 && (all & 15) == 0 ? 16 : 4;
}

// The scales of `count` tokens on their way into shared memory. One warp.
__device__ inline void gather_scales(const DispatchArgs& a, u32 first, u32 count,
                                     const MetadataRoom& room) {
  u32 vector = scale_vector(a), words = vector / 4, width = a.scale_words / words;
  for (u32 i = lane_id(); i < count * width; i += kWave) {
    u32 row = i / width, column = i % width * words;
    const u32* from = a.scales + (i64)(first + room.tokens[row]) * a.scale_stride[0] +
                      (i64)column * a.scale_stride[1];
    copy_async(room.scales + 4 * (row * a.scale_words + column), from, vector);
  }
}

// Moves the scales of `count` tokens from memory to memory, for scales that are too wide.
__device__ inline void move_scales(const DispatchArgs& a, u64 to, u32 first, u32 count,
                                   const MetadataRoom& room) {
  u32* scales = reinterpret_cast<u32*>(to);
#pragma unroll 1
  for (u32 i = lane_id(); i < count * a.scale_words; i += kWave) {
    i64 token = first + room.tokens[i / a.scale_words];
    scales[i] = a.scales[token * a.scale_stride[0] +
                         (i64)(i % a.scale_words) * a.scale_stride[1]];
  }
}

// The tokens of one unit, or those of the unit that are of one group.
struct MetadataTokens {
  u32 first, end;
};

// Rows of one rank that are consecutive there.
struct MetadataRows {
  u32 first, count;
};

// The value of Routing::rows for one lane's token and a rank, or kNoRow.
__device__ inline u32 packed_for(const DispatchArgs& a, u32 token, u32 rank) {
  constexpr u32 kAtOnce = 8;
  const u32* rows = a.r.rows + (u64)token * a.c.topk;
  u32 packed = kNoRow;
#pragma unroll 1
  for (u32 first = 0; first < a.c.topk; first += kAtOnce) {
    u32 found[kAtOnce];
#pragma unroll
    for (u32 k = 0; k < kAtOnce; k++) found[k] = first + k < a.c.topk ? rows[first + k] : kNoRow;
#pragma unroll
    for (u32 k = 0; k < kAtOnce; k++)
      if (found[k] >> kPlaceBits == rank) packed = found[k];
  }
  return packed;
}

// One unit for one rank; returns its rows. One warp.
template <bool kTiles>
__device__ TY_INLINED MetadataRows move_metadata(const DispatchArgs& a, const DispatchTables& t,
                                                 const MetadataTokens& unit, u32 rank,
                                                 const MetadataRoom& room) {
  u32 lane = lane_id(), first = unit.first, token = first + lane, topk = a.c.topk;
  u32 packed = token < unit.end ? packed_for(a, token, rank) : kNoRow;
  Lanes goes = ballot(packed != kNoRow);
  u32 count = popc(goes);
  if (count == 0) return {0, 0};
  u32 place = popc(goes & lanes_before(lane)), row = 0;
  if (packed != kNoRow) {
    room.tokens[place] = lane;
    row = base_of(a.c, a.r, named_from(a, t), token, rank) + row_of(a.c, a.r, token, packed, rank);
  }
  sync_wave();
  bool gathered = a.beside_words() > 0 && a.metadata_scales;
  // The scales are in flight while ids are looked up.
  if (gathered) gather_scales(a, first, count, room);
  gather_ids<kTiles>(a, t, rank, first, count, room);
  row = shfl(row, first_of(goes));
  copies_done();
  publish_shared();
  sync_wave();
  store_gathered(t.ids[rank] + (u64)row * topk * 4, room.ids, count * topk * 4);
  if (a.weights)
    store_gathered(t.weights[rank] + (u64)row * topk * 4, room.weights, count * topk * 4);
  u64 scales = t.scales[rank] + (u64)row * a.scale_words * 4;
  if (gathered)
    store_gathered(scales, room.scales, count * a.scale_words * 4);
  else if (a.beside_words() > 0)
    move_scales(a, scales, first, count, room);
  if (lane < count)
    reinterpret_cast<u32*>(t.source[rank])[row + lane] =
        a.source(first + room.tokens[lane]);
  return {row, count};
}

// The rows of a unit that are of one group: only those lie together at a rank.
__device__ inline MetadataTokens of_group(const DispatchArgs& a, const MetadataTokens& unit, u32 group) {
  const u32* starts = a.r.group_starts + group;
  return {max(unit.first, starts[0]), min(unit.end, starts[1])};
}

// The metadata of the rows that this rank has for itself, which are in no tile: goes to all their
// copies. One warp, behind `move_metadata`.
__device__ inline void spread_metadata(const DispatchArgs& a, const SpreadArgs& s, const MetadataRoom& room,
                                   u32 first, u32 count) {
  u32 lane = lane_id(), topk = a.c.topk, words = a.beside_words();
  bool gathered = words > 0 && a.metadata_scales, whole = false;
#if TY_ROWS_TMA
  whole = gathered && words % 4 == 0;
#endif
  for (u32 i = lane; i < count * topk; i += kWave) {
    i32 slot = room.ids[i];
    if (slot < 0) continue;
    if (s.weights) s.weights[slot] = room.weights[i];
    if (s.source) s.source[slot] = a.source(first + room.tokens[i / topk]);
#if TY_ROWS_TMA
    if (whole)
      bulk_store(reinterpret_cast<u8*>(s.scales + (u64)slot * words),
                 shared_address(room.scales + 4 * (i / topk * words)), 4 * words);
#endif
  }
  for (u32 i = 0; i < count * topk && words > 0 && !whole; i++) {
    i32 slot = room.ids[i];
    i64 token = first + room.tokens[i / topk];
    const u32* near = reinterpret_cast<const u32*>(room.scales) + i / topk * words;
    const u32* far = a.scales + token * a.scale_stride[0];
    for (u32 w = lane; w < words && slot >= 0; w += kWave)
      s.scales[(u64)slot * words + w] = gathered ? near[w] : far[(i64)w * a.scale_stride[1]];
  }
}

// The next unit that a warp takes: its first lane has it. Units are dealt as warps come free, because
// two warps of the first block, those of `note`, have other work first.
__device__ inline u32 take_metadata(const DispatchArgs& a) {
  return lane_id() == 0 ? (u32)atomic_add(&a.c.state->gathered, 1ull) : 0;
}

// Units of all tokens and ranks. Some warps of a block do this, before they move rows, if they move any.
template <bool kTiles, class Up>
__device__ TY_INLINED void move_metadata(const DispatchArgs& a, const Up& up, const DispatchTables& t, u8* shared,
                                         Guard& guard) {
  constexpr u32 kFirst = kWarps - kMetadataWarps;
  if (wave_id() < kFirst) return;
  MetadataRoom room(a, shared + (wave_id() - kFirst) * a.metadata_bytes);
  u32 units = (a.c.tokens() + a.metadata_tokens - 1) / a.metadata_tokens * a.c.ranks;
  u32 next = take_metadata(a);
  SpreadArgs s = {};
  if constexpr (kTiles) s = spread_of(a, up, t);
  // Loads saw that the places are free; bulk stores are of another proxy.
  publish_places();
  while (true) {
    u32 i = shfl(next, 0);
    if (i >= units) break;
    next = take_metadata(a);
    u32 first = i / a.c.ranks * a.metadata_tokens, rank = (a.c.rank + i) % a.c.ranks;
    MetadataTokens unit{first, min(first + a.metadata_tokens, a.c.tokens())};
    for (u32 g = 0; g < a.c.groups(); g++) {
      MetadataTokens part = unit;
      if constexpr (kGrouped) part = of_group(a, unit, g);
      if (kGrouped && part.first >= part.end) continue;
      // Scales may come with the rows.
      if constexpr (kGrouped)
        if (!rows_come(a, part.first, part.end, guard)) return stores_done();
      MetadataRows rows = move_metadata<kTiles>(a, t, part, rank, room);
      bool own = rank == a.c.rank;
      if constexpr (kTiles)
        if (own) spread_metadata(a, s, room, part.first, rows.count);
      close_stores();
      if (kTiles && !own) {
        stores_done();
        if constexpr (kTiles) count_metadata(a, up, rank, rows.first - t.row_base[rank], rows.count);
      } else {
        stores_read();
      }
      sync_wave();
    }
  }
  stores_done();
}

}  // namespace ty
