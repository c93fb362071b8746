// Moving rows: each is loaded once and stored to every rank that wants it, straight to its place.
//
// Two ways: bulk copies through shared memory (TMA, sm_90 and later), and vectors of 16 bytes. Lane k
// of a warp stores to the rank of selection k, so that ranks are taken in the order of the routing.
#pragma once
#include "tiles.cuh"

namespace ty {

// Where the rows of this rank go.
struct Targets {
  const u32* row_base;     // [R]
  const u32* expert_base;  // [E], expert-major and packed
  const u64* x;            // [R]: address of the first received row
};

// What lanes must know of a token before they can tell where its row goes: a word for each k.
__device__ inline const u32* aims_of(const DispatchArgs& a, u64 token) {
  const u32* all = a.by_token() ? a.r.rows : reinterpret_cast<const u32*>(a.r.topk);
  return all + token * a.c.topk;
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

// One warp's stages, each with a piece of a row, what the piece is, and the words that tell its way.
class Stages {
 public:
  __device__ Stages(const DispatchArgs& a, u8* shared)
      : a_(a), units_((u64)a.c.tokens() * a.pieces) {
    __shared__ u64 barriers[64];
    u32 first = threadIdx.x / 32 * a.stages;
    pitch_ = (a.piece_bytes + 127) / 128 * 128;
    rows_ = shared_address(shared + a.table_bytes) + first * pitch_;
    barriers_ = shared_address(barriers) + first * 8;
    notes_ = reinterpret_cast<u32*>(shared + a.notes_at) + first * words();
    if (lane() == 0) {
      for (u32 s = 0; s < a.stages; s++) init_barrier(barriers_ + 8 * s, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    publish_places();
    __syncwarp();
    deal();
  }

  // Loads the next piece that is dealt to this warp, if there is one. Pieces are dealt as warps come
  // free, so that no block waits for the slowest at the end.
  __device__ bool load() {
    u64 unit = __shfl_sync(~0u, dealt_, 0);
    if (unit >= units_) return false;
    u64 token = unit / a_.pieces;
    u32 piece = (u32)(unit - token * a_.pieces);
    u32* note = notes_ + fill_ * words();
    if (lane() < a_.c.topk) copy_async(note + 2 + lane(), aims_of(a_, token) + lane(), 4);
    if (lane() == 0) {
      note[0] = (u32)token, note[1] = piece;
      bulk_load(rows_ + fill_ * pitch_,
                a_.x + token * a_.row_bytes + (u64)piece * a_.piece_bytes, piece_length(a_, piece),
                barriers_ + 8 * fill_);
    }
    deal();
    fill_ = fill_ + 1 == a_.stages ? 0 : fill_ + 1;
    return true;
  }

  // Stores the oldest piece to every rank that wants it; returns its token.
  __device__ u32 store(const Targets& to) {
    copies_done();
    __syncwarp();
    const u32* note = notes_ + slot_ * words();
    u32 token = note[0], piece = note[1];
    u8* there = target(a_, to, token, piece, lane() < a_.c.topk ? note[2 + lane()] : kNoRow);
    wait_barrier(barriers_ + 8 * slot_, parity_ >> slot_ & 1);
    parity_ ^= 1u << slot_;
    if (there) bulk_store(there, rows_ + slot_ * pitch_, piece_length(a_, piece));
    close_stores();
    slot_ = slot_ + 1 == a_.stages ? 0 : slot_ + 1;
    return token;
  }

 private:
  __device__ static u32 lane() { return threadIdx.x % 32; }
  // Of a note: token, piece, and a word for each k.
  __device__ u32 words() const { return 2 + a_.c.topk; }
  __device__ void deal() { dealt_ = lane() == 0 ? atomicAdd(&a_.c.state->dealt, 1ull) : 0; }

  const DispatchArgs& a_;
  u64 units_;
  u32 pitch_, rows_, barriers_, slot_ = 0, fill_ = 0, parity_ = 0;
  u32* notes_;
  u64 dealt_ = 0;
};

// Pieces that a warp has stored and not counted. They are counted a few at a time: to make stores seen
// by others takes as long as to move a piece.
class Uncounted {
 public:
  // Takes note of the piece that was stored last. All older ones are complete, or nearly so.
  template <class Up>
  __device__ void add(const DispatchArgs& a, const Up& up, u32 token) {
    u32 packed = packed_row(a.c, a.r, token);
#pragma unroll
    for (u32 i = 0; i < kMost; i++)
      if (i == held_) token_[i] = token, packed_[i] = packed;
    if (++held_ < kMost) return;
    stores_done_but_one();
    count(a, up, kMost - 1);
    token_[0] = token, packed_[0] = packed;
    held_ = 1;
  }
  // All stores of this warp are complete.
  template <class Up>
  __device__ void finish(const DispatchArgs& a, const Up& up) {
    if (held_ > 0) count(a, up, held_);
  }

 private:
  static constexpr u32 kMost = 9;

  template <class Up>
  __device__ void count(const DispatchArgs& a, const Up& up, u32 pieces) {
    __syncwarp();
    __threadfence_system();
#pragma unroll
    for (u32 i = 0; i < kMost; i++)
      if (i < pieces) count_piece(a, up, token_[i], packed_[i]);
  }

  u32 token_[kMost], packed_[kMost], held_ = 0;
};

// Loads run ahead of stores by stages - 1, so that one group of stores is still reading shared
// memory while the next row arrives.
template <class Up>
__device__ void move_rows(const DispatchArgs& a, const Up& up, const Targets& to, u8* shared) {
  if (threadIdx.x / 32 >= a.movers) return;
  Stages stages(a, shared);
  Uncounted stored;
  u32 ahead = a.stages > 1 ? a.stages - 1 : 1, loaded = 0;
  bool more = true;
  while (loaded < ahead && (more = stages.load())) loaded++;
  for (; loaded > 0; loaded--) {
    u32 token = stages.store(to);
    if (a.tile_rows > 0) stored.add(a, up, token);
    if (!more) continue;
    if (a.stages > 1)
      stores_read_but_one();
    else
      stores_read();
    __syncwarp();
    more = stages.load();
    loaded += more;
  }
  stores_done();
  stored.finish(a, up);
}

#else

template <class Up>
__device__ void move_rows(const DispatchArgs& a, const Up& up, const Targets& to, u8*) {
  u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (warp >= a.movers) return;
  u64 units = (u64)a.c.tokens() * a.pieces, step = (u64)a.mover_blocks * a.movers;
  for (u64 unit = (u64)blockIdx.x * a.movers + warp; unit < units; unit += step) {
    u32 token = (u32)(unit / a.pieces), piece = (u32)(unit % a.pieces);
    u32 aimed = lane < a.c.topk ? aims_of(a, token)[lane] : kNoRow;
    u64 mine = reinterpret_cast<u64>(target(a, to, token, piece, aimed));
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
    if (a.tile_rows > 0) {
      __syncwarp();
      __threadfence_system();
      count_piece(a, up, token, packed_row(a.c, a.r, token));
    }
  }
}

#endif

}  // namespace ty
