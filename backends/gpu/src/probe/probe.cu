// The capacity of a link: copies between GPUs by their multiprocessors, barriers, counts. Over a device
// API that loads and stores. Defines: TY_ROWS_TMA, TY_OWN_ARGS_BYTES, TY_UP_PARAM_BYTES.
#include "transport.cuh"

namespace up {
#include "up_device_api.cuh"
}

namespace ty {

// The arguments of every kernel. Mirrored in args.rs; TY_OWN_ARGS_BYTES checks the size.
struct ProbeArgs {
  const u64* abort;
  WaitReport* report;
  u64 cap_ns;
  u64* times;      // begun and ended, of block 0
  u8* local;       // [ranks - 1][room_bytes]: the source of pushes, or the target of pulls
  u64* wrong;      // words with a wrong value
  u64 rooms;       // offset of [ranks][room_bytes] in the window: the room of each rank there
  u64 room_bytes;
  u64 left;        // total of a peer's blocks that have left, at which the wait at the end ends
  u32 rows;        // for each peer
  u32 row_bytes;
  u32 pitch;       // shared memory of a row
  u32 pull;        // rows are loaded from peers; else they are stored there
  u32 rank, ranks;
  u32 epoch;       // of the first barrier
  u32 rounds;      // of barriers or counts
  u32 words;       // counts of a rank
  u32 seed;        // seed of the contents of rows
};
#ifdef TY_OWN_ARGS_BYTES
static_assert(sizeof(ProbeArgs) == TY_OWN_ARGS_BYTES, "args.rs and probe.cu differ");
#endif

using Up = up::DeviceApi;
static_assert(Up::kLoadStore, "the probe loads and stores");
static_assert(sizeof(Up::Params) == TY_UP_PARAM_BYTES && alignof(Up::Params) <= 8,
              "the transport passes other parameters than its device API takes");

// Offsets in the window; a line for each rank, then counts: up to kMostWords for each of kMostRanks.
constexpr u64 kEntries = 0, kExits = 72 * 128, kCounts = 2 * 72 * 128;
constexpr u32 kMostWords = 1024;

__device__ inline u64* word(const Up& up, u32 peer, u64 offset) {
  return reinterpret_cast<u64*>(up.peer_ptr(0, peer, offset));
}

// Waits until every rank has reached the same epoch. The first threads raise it, if `raises`.
__device__ inline bool barrier(const ProbeArgs& a, const Up& up, u32 epoch, bool raises,
                               Guard& guard) {
  bool ok = true;
  u32 peer = threadIdx.x;
  if (peer < a.ranks) {
    if (raises) store_release(word(up, peer, kEntries + a.rank * 128), epoch);
    const u64* mine = word(up, a.rank, kEntries + peer * 128);
    ok = guard.until({1, peer, 0, epoch}, [&] { return load_acquire(mine); },
                     [&](u64 found) { return (i32)((u32)found - epoch) >= 0; });
  }
  return sync_block_and(ok);
}

// Every store of this block is complete: reports so to all, and block 0 waits until all have
// reported.
__device__ inline void leave(const ProbeArgs& a, const Up& up, Guard& guard) {
  sync_block();
  u32 peer = threadIdx.x;
  if (peer < a.ranks) {
    add_release(word(up, peer, kExits + a.rank * 128), 1);
    if (blockIdx.x == 0) {
      const u64* mine = word(up, a.rank, kExits + peer * 128);
      guard.until({3, peer, 0, a.left}, [&] { return load_acquire(mine); },
                  [&](u64 found) { return (i64)(found - a.left) >= 0; });
    }
  }
  sync_block();
}

// Rows in the order in which they are taken: peers in turn, row by row.
struct Row {
  u8* there;  // at the peer
  u8* here;
};
__device__ inline Row row_of(const ProbeArgs& a, const Up& up, u32 item) {
  u32 turn = item % (a.ranks - 1), peer = (a.rank + 1 + turn) % a.ranks;
  u64 at = (u64)(item / (a.ranks - 1)) * a.row_bytes;
  return {up.peer_ptr(0, peer, a.rooms + a.rank * a.room_bytes + at),
          a.local + turn * a.room_bytes + at};
}

__device__ inline u32 items(const ProbeArgs& a) { return a.rows * (a.ranks - 1); }

// Each warp takes the next row: 16 bytes a lane, four in flight.
__device__ inline void copy_vectors(const ProbeArgs& a, const Up& up) {
  u32 warps = block_waves(), lane = lane_id(), vectors = a.row_bytes / 16;
  for (u32 item = blockIdx.x * warps + wave_id(); item < items(a); item += gridDim.x * warps) {
    Row row = row_of(a, up, item);
    const uint4* from = reinterpret_cast<const uint4*>(a.pull ? row.there : row.here);
    uint4* to = reinterpret_cast<uint4*>(a.pull ? row.here : row.there);
    for (u32 i = lane; i < vectors; i += 4 * kWave) {
      uint4 v[4];
#pragma unroll
      for (u32 j = 0; j < 4; j++)
        if (i + kWave * j < vectors) v[j] = load_16(from + i + kWave * j);
#pragma unroll
      for (u32 j = 0; j < 4; j++)
        if (i + kWave * j < vectors) store_16(to + i + kWave * j, v[j]);
    }
  }
  fence_system_all();
}

#if TY_ROWS_TMA
constexpr u32 kMostWarps = 16;

// One thread of each warp: loads a row into shared memory and stores it from there. Many warps with a
// row each are faster than few with several.
__device__ inline void copy_bulk(const ProbeArgs& a, const Up& up, u8* shared) {
  __shared__ u64 barriers[kMostWarps];
  if (lane_id() != 0) return;
  u32 warp = wave_id(), warps = block_waves(), parity = 0;
  u32 room = shared_address(shared) + warp * a.pitch, loaded = shared_address(barriers + warp);
  init_barrier(loaded, 1);
  publish_barriers();
  // Loads saw that peers are ready; bulk copies are of another proxy.
  publish_places();
  for (u32 item = blockIdx.x * warps + warp; item < items(a); item += gridDim.x * warps) {
    Row row = row_of(a, up, item);
    bulk_load(room, a.pull ? row.there : row.here, a.row_bytes, loaded);
    wait_barrier(loaded, parity);
    parity ^= 1;
    bulk_store(a.pull ? row.here : row.there, room, a.row_bytes);
    close_stores();
    stores_read();
  }
  stores_done();
}
#endif

template <class Copy>
__device__ void timed(const ProbeArgs& a, const Up& up, Copy copy) {
  Guard guard(a.abort, a.cap_ns, a.report);
  if (!barrier(a, up, a.epoch, blockIdx.x == 0, guard)) return;
  u64 begun = now_ns();
  copy();
  leave(a, up, guard);
  if (blockIdx.x == 0 && threadIdx.x == 0) a.times[0] = begun, a.times[1] = now_ns();
}

// The content, `at` bytes into the row data that `from` has for `to`.
__device__ inline u32 content(const ProbeArgs& a, u32 from, u32 to, u64 at) {
  return (u32)(at / 4) * 2654435761u ^ (from << 20 | to << 8 | (a.seed & 255));
}

// Visits all words that this rank has for its peers, or has received from them.
template <class Visit>
__device__ void each_word(const ProbeArgs& a, const Up& up, bool in_local, bool sent, Visit visit) {
  u64 words = (u64)a.rows * a.row_bytes / 4, all = words * (a.ranks - 1);
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < all;
       i += (u64)gridDim.x * blockDim.x) {
    u32 turn = (u32)(i / words), peer = (a.rank + 1 + turn) % a.ranks;
    u64 at = i % words * 4;
    u8* base = in_local ? a.local + turn * a.room_bytes
                        : up.peer_ptr(0, a.rank, a.rooms + peer * a.room_bytes);
    u32 from = sent ? a.rank : peer, to = sent ? peer : a.rank;
    visit(reinterpret_cast<u32*>(base + at), content(a, from, to, at));
  }
}

}  // namespace ty

TY_SHARED_BYTES(shared);

#if TY_ROWS_TMA
TY_KERNEL_ALONE(512)
    ty_probe_bulk(TY_ARGUMENT ty::ProbeArgs a, TY_ARGUMENT ty::Up::Params p) {
  ty::Up up(p);
  ty::timed(a, up, [&] { ty::copy_bulk(a, up, shared); });
}
#endif

TY_KERNEL_ALONE(1024)
    ty_probe_vectors(TY_ARGUMENT ty::ProbeArgs a,
                     TY_ARGUMENT ty::Up::Params p) {
  ty::Up up(p);
  ty::timed(a, up, [&] { ty::copy_vectors(a, up); });
}

// Barriers, one after the other. One block.
TY_KERNEL_ALONE(128)
    ty_probe_barriers(TY_ARGUMENT ty::ProbeArgs a,
                      TY_ARGUMENT ty::Up::Params p) {
  ty::Up up(p);
  ty::Guard guard(a.abort, a.cap_ns, a.report);
  if (!ty::barrier(a, up, a.epoch, true, guard)) return;
  ty::u64 begun = ty::now_ns();
  for (ty::u32 i = 1; i <= a.rounds; i++)
    if (!ty::barrier(a, up, a.epoch + i, true, guard)) return;
  if (threadIdx.x == 0) a.times[0] = begun, a.times[1] = ty::now_ns();
}

// Exchanges of counts: every rank sends every rank `words` words of {epoch, count}. One block.
TY_KERNEL_ALONE(1024)
    ty_probe_counts(TY_ARGUMENT ty::ProbeArgs a,
                    TY_ARGUMENT ty::Up::Params p) {
  ty::Up up(p);
  ty::Guard guard(a.abort, a.cap_ns, a.report);
  if (!ty::barrier(a, up, a.epoch, true, guard)) return;
  ty::u64 begun = ty::now_ns();
  ty::u32 i = threadIdx.x;
  for (ty::u32 round = 1; round <= a.rounds; round++) {
    ty::u32 epoch = a.epoch + round;
    bool ok = true;
    if (i < a.words) {
      for (ty::u32 turn = 0; turn < a.ranks; turn++) {
        ty::u64 at = ty::kCounts + ((ty::u64)a.rank * ty::kMostWords + i) * 8;
        ty::store_relaxed(ty::word(up, (a.rank + turn) % a.ranks, at), (ty::u64)epoch << 32 | i);
      }
      for (ty::u32 peer = 0; peer < a.ranks && ok; peer++) {
        const ty::u64* at = ty::word(up, a.rank, ty::kCounts + ((ty::u64)peer * ty::kMostWords + i) * 8);
        ok = guard.until({1, peer, i, epoch}, [&] { return ty::load_relaxed(at); },
                         [&](ty::u64 found) { return (ty::i32)((ty::u32)(found >> 32) - epoch) >= 0; });
      }
    }
    if (!ty::sync_block_and(ok)) return;
  }
  if (threadIdx.x == 0) a.times[0] = begun, a.times[1] = ty::now_ns();
}

TY_KERNEL(1024) ty_probe_nothing(TY_ARGUMENT ty::ProbeArgs,
                                            TY_ARGUMENT ty::Up::Params) {}

TY_KERNEL(256)
    ty_probe_fill(TY_ARGUMENT ty::ProbeArgs a, TY_ARGUMENT ty::Up::Params p) {
  ty::each_word(a, ty::Up(p), !a.pull, true, [](ty::u32* at, ty::u32 value) { *at = value; });
}

TY_KERNEL(256)
    ty_probe_check(TY_ARGUMENT ty::ProbeArgs a, TY_ARGUMENT ty::Up::Params p) {
  ty::each_word(a, ty::Up(p), a.pull, false, [&](ty::u32* at, ty::u32 value) {
    if (*at != value) ty::atomic_add(a.wrong, 1ull);
  });
}
