// Moving rows: each is loaded once and stored to every rank that wants it, straight to its place. Rows that
// are cast are cast between, and their scales travel with them.
//
// Two ways: bulk copies through shared memory (TMA, sm_90 and later), and vectors of 16 bytes. Lane k
// of a warp stores to the rank of selection k, so that ranks follow the order of the routing.
#pragma once
#include "arrivals.cuh"
#include "cast.cuh"

namespace ty {

// The targets of this rank's rows.
struct Targets {
  const u32* row_base;     // [R]
  const u32* expert_base;  // [E], expert-major and packed
  const u64* x;            // [R]: address of the first received row
  const u64* scales;       // [R]: the same of scales, in the order of received tokens
  u64 own_scales;          // of this rank's own expert rows, where other ranks' rows arrive in tiles
  bool own, others;        // as in Role
};

// Where rows cross in runs: the first blocks, which stage and put them once all blocks have gathered metadata.
__device__ inline u32 blocks_of_runs(const DispatchArgs& a) { return a.pushers > 0 ? a.pushers : gridDim.x; }

// The rows that a block moves. Where some blocks push, they move all rows to other ranks, and the others move
// this rank's own.
struct Role {
  u32 index, blocks;  // of this block among those that move the same rows
  bool own, others;

  __device__ explicit Role(const DispatchArgs& a) {
    if constexpr (kRuns) {
      own = others = true, index = blockIdx.x, blocks = blocks_of_runs(a);
      return;
    }
    bool all = !kMayTile || a.pushers == 0;
    own = all || blockIdx.x >= a.pushers, others = all || !own;
    index = all || others ? blockIdx.x : blockIdx.x - a.pushers;
    blocks = all ? gridDim.x : others ? a.pushers : gridDim.x - a.pushers;
  }
};

// The words of scales that travel with a piece of a row that is cast. Pieces end where words do.
struct PieceScales {
  u32 first, count;

  __device__ PieceScales(const DispatchArgs& a, u32 piece) {
    u32 channels = a.quant().word_channels();
    first = piece * a.piece_bytes / channels;
    count = (piece + 1 < a.pieces ? (piece + 1) * a.piece_bytes / channels : a.scale_words) - first;
  }
};

// Where a lane stores a piece of a row, and its scales if it is cast; or null.
struct Destinations {
  u8 *row, *scales;
};

// The words of a token that lanes need to find the target of its row: one for each k.
__device__ inline const u32* aims_of(const DispatchArgs& a, u64 token) {
  const u32* all = a.by_token() ? a.r.rows : reinterpret_cast<const u32*>(a.r.topk);
  return all + token * a.c.topk;
}

// Expert-major and packed: a row goes to the place of its first expert at each rank. All lanes of a
// warp.
__device__ inline i64 first_expert_row(const DispatchArgs& a, const u32* expert_base, u32 token,
                                       i32 expert, u32* rank) {
  u32 lane = lane_id();
  *rank = expert >= 0 ? a.c.rank_of(expert) : 0;
  Lanes same = match_any(expert >= 0 ? (i32)*rank : -1 - (i32)lane);
  // A row that stays on this rank goes to all its places at once, where others' rows arrive in
  // tiles.
  bool every = a.in_tiles() && *rank == a.c.rank;
  if (expert < 0 || !(every || first_of(same) == lane)) return -1;
  return expert_row(a.c, a.r, expert_base, token, lane, expert);
}

// The place for the scales of a row that is cast. They arrive in the order of tokens, except that this
// rank's own go to all their places at once, as its rows do. `row`: of lane k at `rank`, if `by_token` or
// its own.
template <bool kTiles>
__device__ inline u64 scales_target(const DispatchArgs& a, const Targets& to, u32 token, u32 packed,
                                    bool by_token, i64 row, u32 rank) {
  u64 bytes = 4 * (u64)a.scale_words;
  if (kTiles && row >= 0 && rank == a.c.rank) return to.own_scales + row * bytes;
  if (!by_token) row = row_at(a.c, a.r, to.row_base, token, packed, &rank);
  bool none = row < 0 || (kTiles && (rank == a.c.rank || !to.others));
  return none ? 0 : to.scales[rank] + row * bytes;
}

// Where lane k stores a piece of a token's row. `packed`: of Routing::rows. All lanes of a warp.
template <bool kTiles>
__device__ inline Destinations target(const DispatchArgs& a, const Targets& to, u32 token, u32 piece,
                                u32 aimed, u32 packed) {
  u32 rank = 0;
  // Kernels that may take tiles move all other rows in the order of tokens.
  bool by_token = kMayTile ? !kTiles : a.by_token();
  i64 row = by_token ? row_at(a.c, a.r, to.row_base, token, aimed, &rank)
                         : first_expert_row(a, to.expert_base, token, (i32)aimed, &rank);
  if (kTiles && row >= 0 && !(rank == a.c.rank ? to.own : to.others)) row = -1;
  Destinations places{nullptr, nullptr};
  if (row >= 0)
    places.row = reinterpret_cast<u8*>(to.x[rank]) + row * a.row_bytes + (u64)piece * a.piece_bytes;
  if (!a.casts()) return places;
  u64 scales = scales_target<kTiles>(a, to, token, packed, by_token, row, rank);
  if (scales != 0)
    places.scales = reinterpret_cast<u8*>(scales) + 4 * PieceScales(a, piece).first;
  return places;
}

__device__ inline u32 piece_length(const DispatchArgs& a, u32 piece) {
  u64 left = a.row_bytes - (u64)piece * a.piece_bytes;
  return left < a.piece_bytes ? (u32)left : a.piece_bytes;
}

// The count of the tile or of the run that a token's row is in, at the rank of selection k; or null.
template <class Up>
__device__ u64* count_for(const DispatchArgs& a, const Up& up, u32 token, u32 k) {
  if constexpr (kRuns) return staged_of_row(a, token, k);
  else return count_of_row(a, up, token, k);
}

// Ahead of the count of a stored row. The warp that posts a run makes its rows visible to the NIC; a tile is counted at
// another rank.
__device__ inline void publish_staged() {
  if (kRuns) fence_device();
  else fence_system();
}

// The pieces of rows that belong to a warp from the start. If rows are staged, these are all of the warp's
// share of its block's tokens, so that the staged data of a block lies together. Otherwise they are the first
// ones, before others are dealt. Rows that this rank has for itself take all warps equally long, so they are
// not dealt.
struct Share {
  u32 first, end, step;
  bool dealt = !kPuts || kRuns;

  __device__ explicit Share(const DispatchArgs& a) {
    if constexpr (kPuts && !kRuns) {
      BlockTokens own(a);
      first = own.first * a.pieces + wave_id(), end = own.end * a.pieces, step = a.movers;
    } else {
      Role role(a);
      first = role.index * a.movers + wave_id(), end = a.c.tokens() * a.pieces;
      step = role.blocks * a.movers, dealt = role.others;
    }
  }
};

#if TY_ROWS_TMA

// One warp's stages, each with a piece of a row, the identity of the piece, and the words that give
// its targets.
//
// The first pieces of each warp are its own, and are loaded before the targets of rows are known. All
// functions except `prime` and `drop` need the targets.
class Stages {
 public:
  __device__ Stages(const DispatchArgs& a, u8* shared, Guard& guard)
      : a_(a), share_(a), guard_(guard) {
    __shared__ u64 barriers[64];
    u32 first = wave_id() * a.stages;
    pitch_ = a.stage_bytes;
    stages_ = shared + a.table_bytes + first * pitch_;
    rows_ = shared_address(stages_);
    barriers_ = shared_address(barriers) + first * 8;
    notes_ = reinterpret_cast<u32*>(shared + a.notes_at) + first * words();
    if (wave_id() < a.movers && lane() == 0) {
#pragma unroll 1
      for (u32 s = 0; s < a.stages; s++) init_barrier(barriers_ + 8 * s, 1);
      publish_barriers();
    }
    publish_places();
    sync_wave();
  }

  // Number of loads that run ahead of stores: one group of stores still reads shared memory while
  // the next row arrives.
  __device__ u32 ahead() const { return a_.stages > 1 ? a_.stages - 1 : 1; }

  // The pieces of them that are loaded before others are dealt: none where rows are still to come, or metadata come
  // first in the same memory.
  __device__ u32 early() const { return kRuns || a_.awaits_rows() ? 0 : ahead(); }

  // Loads this warp's own pieces, if it moves rows.
  __device__ void prime() {
    u32 unit = wave_id() < a_.movers ? share_.first : share_.end;
#pragma unroll 1
    for (; primed_ < early() && unit < share_.end; unit += share_.step) start(unit, primed_++);
    sync_wave();
  }
  // For an operation that does not move rows: waits for the loads, because the block ends.
  __device__ void drop() {
#pragma unroll 1
    for (u32 s = 0; s < primed_; s++) wait_barrier(barriers_ + 8 * s, 0);
  }
  __device__ void deal() {
    if (!share_.dealt)
      dealt_ = share_.first + share_.step * (early() + taken_++);
    else
      dealt_ = lane() == 0 ? (u32)atomic_add(&a_.c.state->dealt, 1ull) + share_.step * early() : 0;
  }

  // Pieces that are left for each warp once the piece that is dealt to this one is taken.
  __device__ u32 left() const {
    u32 dealt = shfl(dealt_, 0);
    return dealt < share_.end ? (share_.end - dealt) / share_.step : 0;
  }

  // Loads the next piece of this warp, if there is one. First come its own pieces, then pieces that are dealt
  // as warps come free, so that no block waits for the slowest at the end.
  __device__ bool load() {
    u32* note = notes_ + fill_ * words();
    if (aimed_ < primed_) {
      aimed_++;
    } else {
      u32 unit = shfl(dealt_, 0);
      if (unit >= share_.end) return false;
      start(unit, fill_);
      deal();
      sync_wave();
      // The wait for a row was ended.
      if (kGrouped && any(guard_.ended())) return false;
    }
    if (lane() < a_.c.topk) {
      copy_async(note + kNoteAims + lane(), aims_of(a_, note[kNoteToken]) + lane(), 4);
      u64 pair = (u64)note[kNoteToken] * a_.c.topk + lane();
      if (a_.casts()) copy_async(note + kNoteAims + a_.c.topk + lane(), a_.r.rows + pair, 4);
    }
    fill_ = fill_ + 1 == a_.stages ? 0 : fill_ + 1;
    return true;
  }

  // Stores the oldest piece to every rank that wants it; returns its token. `arrived()` is called as soon
  // as the piece is there.
  template <bool kTiles, class Arrived>
  __device__ u32 store(const Targets& to, Arrived arrived) {
    copies_done();
    sync_wave();
    const u32* note = notes_ + slot_ * words();
    u32 token = note[kNoteToken], piece = note[kNotePiece];
    bool selects = lane() < a_.c.topk, casts = a_.casts();
    Destinations there = target<kTiles>(a_, to, token, piece, selects ? note[kNoteAims + lane()] : kNoRow,
                                  casts && selects ? note[kNoteAims + a_.c.topk + lane()] : kNoRow);
    wait_barrier(barriers_ + 8 * slot_, parity_ >> slot_ & 1);
    parity_ ^= 1u << slot_;
    arrived();
    if (casts) cast(stages_ + slot_ * pitch_, piece);
    if (there.row) bulk_store(there.row, rows_ + slot_ * pitch_, piece_length(a_, piece));
    if (casts) store_scales(there.scales, slot_ * pitch_ + a_.stage_scales, 4 * PieceScales(a_, piece).count);
    close_stores();
    slot_ = slot_ + 1 == a_.stages ? 0 : slot_ + 1;
    return token;
  }

 private:
  __device__ static u32 lane() { return lane_id(); }
  // Words of a note: token, piece, and a word for each k, or two where rows are cast.
  static constexpr u32 kNoteToken = 0, kNotePiece = 1, kNoteAims = 2;
  __device__ u32 words() const { return kNoteAims + (a_.casts() ? 2 : 1) * a_.c.topk; }
  __device__ void start(u32 unit, u32 stage) {
    if (lane() != 0) return;
    u32* note = notes_ + stage * words();
    u32 position = unit / a_.pieces, piece = unit - position * a_.pieces, token = token_in_turn(a_, position);
    note[kNoteToken] = token, note[kNotePiece] = piece;
    if (!row_comes(a_, token, guard_)) return;
    u32 width = a_.casts() ? bytes_of(a_.dtype) : 1;
    const u8* from = a_.casts() ? a_.raw : a_.x;
    bulk_load(rows_ + stage * pitch_,
              from + (token * a_.row_bytes + (u64)piece * a_.piece_bytes) * width,
              piece_length(a_, piece) * width, barriers_ + 8 * stage);
  }

  // Of a group that is cast.
  static constexpr u32 kLanes = kGroupLanes<CastRows>;
  // Half `h` of a lane's channels, in the order in which neither loads nor stores of lanes meet in a bank.
  __device__ static u32 channel(u32 h) {
    u32 group = lane() / kLanes;
    return group * CastRows::group + (h ^ (group & 1)) * (CastRows::group / 2) + lane() % kLanes * 8;
  }
  // Casts a piece in place: its codes take the front of the stage. Each turn loads all its channels before
  // it stores, and what it stores lies in front of what later turns load.
  __device__ void cast(u8* stage, u32 piece) const {
    constexpr u32 kTurns = 2;
    u32 length = piece_length(a_, piece), width = bytes_of(a_.dtype);
    u8* scales = stage + a_.stage_scales;
    if (a_.quant().packing == Packing::kExponents) {
      // Bytes behind the last group.
      for (u32 i = lane(); i < PieceScales(a_, piece).count; i += kWave)
        reinterpret_cast<u32*>(scales)[i] = 0;
      sync_wave();
    }
#pragma unroll 1
    for (u32 first = 0; first < length; first += kTurns * kWaveChannels) {
      CastLane mine[kTurns];
#pragma unroll
      for (u32 i = 0; i < 2 * kTurns; i++) {
        u32 at = first + i / 2 * kWaveChannels + channel(i % 2);
        uint4 low = make_uint4(0, 0, 0, 0), high = low;
        if (at < length) {
          const uint4* from = reinterpret_cast<const uint4*>(stage + at * width);
          low = load_shared(from);
          if (width == 4) high = load_shared(from + 1);
        }
        mine[i / 2].half[i % 2].widen(a_.dtype, low, high);
      }
      sync_wave();
#pragma unroll
      for (u32 i = 0; i < kTurns; i++) {
        u32 at = first + i * kWaveChannels, group = at / CastRows::group + lane() / kLanes;
        uint2 codes[2];
        float scale = mine[i].cast(a_.quant(), codes);
#pragma unroll
        for (u32 h = 0; h < 2; h++)
          if (at + channel(h) < length) *reinterpret_cast<uint2*>(stage + at + channel(h)) = codes[h];
        if (lane() % kLanes == 0 && group * CastRows::group < length) store_scale(a_.quant(), scales, group, scale);
      }
    }
    publish_shared();
    sync_wave();
  }
  // Stores scales from shared memory to the place that each lane names, if it names one: in bulk if
  // possible.
  __device__ void store_scales(u8* to, u32 from, u32 bytes) const {
    bool bulk = ((reinterpret_cast<u64>(to) | bytes) & 15) == 0;
    if (to && bulk) bulk_store(to, rows_ + from, bytes);
    const u32* near = reinterpret_cast<const u32*>(stages_ + from);
    for (Lanes left = ballot(to && !bulk); left != 0; left &= left - 1) {
      u32* there = reinterpret_cast<u32*>(shfl(reinterpret_cast<u64>(to), first_of(left)));
      for (u32 i = lane(); i < bytes / 4; i += kWave) there[i] = near[i];
    }
  }

  const DispatchArgs& a_;
  Share share_;
  Guard& guard_;
  u32 dealt_ = 0, taken_ = 0, primed_ = 0, aimed_ = 0;
  u32 pitch_, rows_, barriers_, slot_ = 0, fill_ = 0, parity_ = 0;
  u8* stages_;
  u32* notes_;
};

// Tokens of pieces that a warp has stored and not counted, one per lane. They are counted a few at a
// time: to make stores visible to others takes as long as to move a piece.
class Uncounted {
 public:
  static constexpr u32 kMost = 14;

  __device__ u32 held() const { return held_; }
  __device__ void add(u32 token) {
    if (lane_id() == held_) token_ = token;
    held_++;
  }
  // Counts all but the `last` newest, 0 or 1. `complete()` returns once their stores are complete.
  template <class Up, class Complete>
  __device__ void count(const DispatchArgs& a, const Up& up, u32 last, Complete complete) {
    constexpr u32 kAtOnce = 3;
    u32 due = held_ - last, topk = a.c.topk, pairs = due * topk;
#pragma unroll 1
    for (u32 first = 0; first < pairs; first += kWave * kAtOnce) {
      u64* counts[kAtOnce];
#pragma unroll
      for (u32 i = 0; i < kAtOnce; i++) {
        u32 pair = first + kWave * i + lane_id(), which = pair / topk;
        u32 token = shfl(token_, which);
        counts[i] = pair < pairs ? count_for(a, up, token, pair - which * topk) : nullptr;
      }
      // This comes behind the reads for counts, because those take a microsecond.
      if (first == 0) {
        complete();
        sync_wave();
        publish_staged();
      }
#pragma unroll
      for (u32 i = 0; i < kAtOnce; i++)
        if (counts[i]) add_relaxed(counts[i], 1);
    }
    token_ = shfl(token_, due);
    held_ = last;
  }

 private:
  u32 token_ = 0, held_ = 0;
};

// One warp's way of moving rows.
template <bool kTiles, class Up>
class Mover {
 public:
  __device__ Mover(const DispatchArgs& a, const Up& up, const Targets& to, Stages& stages, Guard&)
      : a_(a), up_(up), to_(to), stages_(stages) {
    // Loads saw that the places are free; bulk stores are of another proxy.
    publish_places();
    if (wave_id() < a.movers) stages_.deal();
  }

  // Moves the pieces that are dealt to this warp: then all are stored, and counted. Loads run ahead of
  // stores by stages - 1, so that one group of stores is still reading shared memory while the next row
  // arrives.
  __device__ void move() {
    if (wave_id() >= a_.movers) return;
    u32 ahead = stages_.ahead(), loaded = 0;
    // The next piece arrives while one is cast.
    bool early = a_.casts() && a_.stages > 1;
    while (loaded < ahead && load()) loaded++;
    for (; loaded > 0; loaded--) {
      u32 token = stages_.template store<kTiles>(to_, [&] {
        if (!early || !more_) return;
        stores_read();
        sync_wave();
        loaded += load();
      });
      if (counts()) note(token);
      if (early || !more_) continue;
      if (a_.stages > 1)
        stores_read_but_one();
      else
        stores_read();
      sync_wave();
      loaded += load();
    }
    if (counts()) uncounted_.count(a_, up_, 0, [] { stores_done(); });
    stores_done();
  }

 private:
  __device__ bool counts() const { return kRuns || (kTiles && to_.others); }
  __device__ bool load() { return more_ = stages_.load(); }
  // Notes the piece that was stored last. All older pieces are complete, or nearly so. Towards the
  // end fewer notes are held back, so that few tiles arrive late.
  __device__ void note(u32 token) {
    uncounted_.add(token);
    // A run leaves once its last row is counted.
    u32 due = min(stages_.left(), kRuns ? 1 : Uncounted::kMost - 1);
    if (uncounted_.held() <= max(due, 1u)) return;
    uncounted_.count(a_, up_, 1, [] { stores_done_but_one(); });
  }

  const DispatchArgs& a_;
  const Up& up_;
  Targets to_;
  Stages& stages_;
  Uncounted uncounted_;
  bool more_ = true;
};

#else

// Vectors pass through registers: no piece is loaded ahead.
class Stages {
 public:
  __device__ Stages(const DispatchArgs&, u8*, Guard&) {}
  __device__ void prime() {}
  __device__ void drop() {}
};

template <bool kTiles, class Up>
class Mover {
 public:
  __device__ TY_INLINED Mover(const DispatchArgs& a, const Up& up, const Targets& to, Stages&, Guard& guard)
      : a_(a), up_(up), to_(to), share_(a), guard_(guard) {
    if (wave_id() < a.movers) deal();
  }

  // Moves the pieces that are dealt to this warp: then all are stored, and counted.
  __device__ TY_INLINED void move() {
    while (dealt_ < share_.end) {
      u32 unit = (u32)dealt_;
      deal();
      u32 token = token_in_turn(a_, unit / a_.pieces);
      // One lane waits, so that few look.
      if (kGrouped && !all(lane_id() != 0 || row_comes(a_, token, guard_))) return;
      if (kGrouped) sync_wave();
      move_piece(token, unit % a_.pieces);
    }
  }

 private:
  __device__ TY_INLINED void deal() {
    if (!share_.dealt) {
      dealt_ = share_.first + (u64)share_.step * taken_++;
    } else {
      dealt_ = lane_id() == 0 ? atomic_add(&a_.c.state->dealt, 1ull) : 0;
      dealt_ = shfl(dealt_, 0);
    }
  }
  __device__ TY_INLINED void move_piece(u32 token, u32 piece) const {
    u32 lane = lane_id();
    bool selects = lane < a_.c.topk, casts = a_.casts();
    u32 aimed = selects ? aims_of(a_, token)[lane] : kNoRow;
    u32 packed = casts ? packed_row(a_.c, a_.r, token) : kNoRow;
    Destinations there = target<kTiles>(a_, to_, token, piece, aimed, packed);
    u64 from = token * a_.row_bytes + (u64)piece * a_.piece_bytes;
    if (casts)
      cast_piece(there, from, piece);
    else
      VectorCopier().copy(there.row, a_.x + from, piece_length(a_, piece));
    if (!kRuns && (!kTiles || !to_.others)) return;
    sync_wave();
    publish_staged();
    u64* count = lane < a_.c.topk ? count_for(a_, up_, token, lane) : nullptr;
    if (count) add_relaxed(count, 1);
  }
  // Copies and casts a piece, whose channels start at `from`.
  __device__ TY_INLINED void cast_piece(const Destinations& to, u64 from, u32 piece) const {
    u32 lane = lane_id(), length = piece_length(a_, piece), groups = a_.quant().groups(length);
    Lanes rows = ballot(to.row != nullptr), scales = ballot(to.scales != nullptr);
    u64 row = reinterpret_cast<u64>(to.row), beside = reinterpret_cast<u64>(to.scales);
#pragma unroll 1
    for (u32 first = 0; first < length; first += kWaveChannels) {
      u32 at = first + lane * kCastChannels;
      CastLane mine = {};
      const u8* raw = a_.raw + (from + at) * bytes_of(a_.dtype);
      for (u32 h = 0; h < 2 && at < length; h++) mine.half[h].load(a_.dtype, raw + 8 * h * bytes_of(a_.dtype));
      uint2 codes[2];
      float scale = mine.cast(a_.quant(), codes);
      for (Lanes left = rows; left != 0; left &= left - 1) {
        uint4* there = reinterpret_cast<uint4*>(shfl(row, first_of(left)) + at);
        if (at < length) store_16(there, make_uint4(codes[0].x, codes[0].y, codes[1].x, codes[1].y));
      }
      for (Lanes left = scales; left != 0; left &= left - 1) {
        u8* there = reinterpret_cast<u8*>(shfl(beside, first_of(left)));
        if (at < length && at % CastRows::group == 0) store_scale(a_.quant(), there, at / CastRows::group, scale);
      }
    }
    // Bytes behind the last group.
    u32 bytes = a_.quant().packing == Packing::kExponents ? 4 * PieceScales(a_, piece).count : 0;
    for (Lanes left = scales; left != 0; left &= left - 1) {
      u8* there = reinterpret_cast<u8*>(shfl(beside, first_of(left)));
      if (groups + lane < bytes) there[groups + lane] = 0;
    }
  }

  const DispatchArgs& a_;
  const Up& up_;
  Targets to_;
  Share share_;
  Guard& guard_;
  u64 dealt_ = ~0ull;
  u32 taken_ = 0;
};

#endif

}  // namespace ty
