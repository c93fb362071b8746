// Moving rows: each is loaded once and stored to every rank that wants it, straight to its place.
//
// Two ways: bulk copies through shared memory (TMA, sm_90 and later), and vectors of 16 bytes. Lane k
// of a warp stores to the rank of selection k, so that ranks are taken in the order of the routing.
#pragma once
#include "bulk.cuh"
#include "route.cuh"

namespace ty {

// Where the rows of this rank go.
struct Targets {
  const u32* row_base;     // [R]
  const u32* expert_base;  // [E], expert-major and packed
  const u64* x;            // [R]: address of the first received row
};

// What lane k needs to know of a token before it can tell where the row goes. It is loaded early.
__device__ inline u32 aim(const DispatchArgs& a, u32 token) {
  if (a.by_token()) return packed_row(a.c, a.r, token);
  u32 lane = threadIdx.x % 32;
  return lane < a.c.topk ? (u32)a.r.topk[(u64)token * a.c.topk + lane] : kNoRow;
}

// Expert-major and packed: a row goes to the place of its first expert at each rank. All lanes of a warp.
__device__ inline i64 first_expert_row(const DispatchArgs& a, const Targets& to, u32 token,
                                       i32 expert, u32* rank) {
  u32 lane = threadIdx.x % 32;
  *rank = expert >= 0 ? a.c.rank_of(expert) : 0;
  u32 same = __match_any_sync(~0u, expert >= 0 ? (i32)*rank : -1 - (i32)lane);
  if (expert < 0 || __ffs(same) - 1 != lane) return -1;
  return expert_row(a.c, a.r, to.expert_base, token, lane, expert);
}

// Where lane k stores a piece of a token's row, or null. All lanes of a warp.
__device__ inline u8* target(const DispatchArgs& a, const Targets& to, u32 token, u32 piece,
                             u32 aimed) {
  u32 rank = 0;
  i64 row = a.by_token() ? row_at(a.c, a.r, to.row_base, token, aimed, &rank)
                         : first_expert_row(a, to, token, (i32)aimed, &rank);
  if (row < 0) return nullptr;
  return reinterpret_cast<u8*>(to.x[rank]) + row * a.row_bytes + (u64)piece * a.piece_bytes;
}

__device__ inline u32 piece_length(const DispatchArgs& a, u32 piece) {
  u64 left = a.row_bytes - (u64)piece * a.piece_bytes;
  return left < a.piece_bytes ? (u32)left : a.piece_bytes;
}

#if TY_ROWS_TMA

// The stages of one warp: `load` runs ahead of `store` by stages - 1, so that one group of stores
// is still reading shared memory while the next row arrives.
__device__ inline void move_rows(const DispatchArgs& a, const Targets& to, u8* shared) {
  __shared__ u64 barriers[64];
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= a.movers) return;
  u32 pitch = (a.piece_bytes + 127) / 128 * 128;
  u32 stage = shared_address(shared) + warp * a.stages * pitch;
  u32 barrier = shared_address(barriers) + warp * a.stages * 8;
  if (lane == 0) {
    for (u32 s = 0; s < a.stages; s++) init_barrier(barrier + 8 * s, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    // The places were said to be free by loads; the stores below are of another proxy.
  }
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncwarp();
  u64 units = (u64)a.c.tokens * a.pieces, step = (u64)gridDim.x * a.movers;
  u64 next = (u64)blockIdx.x * a.movers + warp, loaded = next;
  u32 slot = 0, fill = 0, parity = 0;
  auto load = [&] {
    if (lane == 0) {
      u32 token = (u32)(loaded / a.pieces), piece = (u32)(loaded % a.pieces);
      bulk_load(stage + fill * pitch,
                a.x + token * a.row_bytes + (u64)piece * a.piece_bytes, piece_length(a, piece),
                barrier + 8 * fill);
    }
    loaded += step;
    fill = fill + 1 == a.stages ? 0 : fill + 1;
  };
  u32 ahead = a.stages > 1 ? a.stages - 1 : 1;
  for (u32 i = 0; i < ahead && loaded < units; i++) load();
  u32 aimed = next < units ? aim(a, (u32)(next / a.pieces)) : kNoRow;
  for (u64 unit = next; unit < units; unit += step) {
    u32 token = (u32)(unit / a.pieces), piece = (u32)(unit % a.pieces);
    u8* there = target(a, to, token, piece, aimed);
    if (unit + step < units) aimed = aim(a, (u32)((unit + step) / a.pieces));
    wait_barrier(barrier + 8 * slot, parity >> slot & 1);
    parity ^= 1u << slot;
    if (there) bulk_store(there, stage + slot * pitch, piece_length(a, piece));
    close_stores();
    slot = slot + 1 == a.stages ? 0 : slot + 1;
    if (loaded < units) {
      if (a.stages > 1)
        stores_read_but_one();
      else
        stores_read();
      __syncwarp();
      load();
    }
  }
  stores_done();
}

#else

__device__ inline void move_rows(const DispatchArgs& a, const Targets& to, u8*) {
  u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp >= a.movers) return;
  u64 units = (u64)a.c.tokens * a.pieces, step = (u64)gridDim.x * a.movers;
  for (u64 unit = (u64)blockIdx.x * a.movers + warp; unit < units; unit += step) {
    u32 token = (u32)(unit / a.pieces), piece = (u32)(unit % a.pieces);
    u64 mine = reinterpret_cast<u64>(target(a, to, token, piece, aim(a, token)));
    u32 wanted = __ballot_sync(~0u, mine != 0), bytes = piece_length(a, piece);
    const u8* from = a.x + token * a.row_bytes + (u64)piece * a.piece_bytes;
    // Whole turns of the warp, so that every lane takes part in every shuffle.
    for (u32 turn = 0; turn < bytes; turn += 512) {
      u32 at = turn + lane * 16;
      uint4 value = {};
      if (at < bytes) value = *reinterpret_cast<const uint4*>(from + at);
      for (u32 left = wanted; left != 0; left &= left - 1) {
        u64 there = __shfl_sync(~0u, mine, __ffs(left) - 1);
        if (at < bytes) *reinterpret_cast<uint4*>(there + at) = value;
      }
    }
  }
}

#endif

}  // namespace ty
