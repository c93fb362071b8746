// Summing rows: the rows of a token are read one after the other, and their sum is stored once.
//
// Two ways: bulk copies into rings of rows in shared memory (TMA, sm_90 and later), and vectors.
//
// The summed values are a class of terms:
//   bool kDealt                 whether units are dealt to rings as they come free; see `Dealer`
//   u32 early(token)            lane k's knowledge of its term; loaded ahead of its use
//   bool there(early)           whether lane k has a term
//   u32 token(position)         the token at a position of the order in which sums are made
//   uint2 late(token, early)    the rest of it; loaded ahead of its use, when `early` is known
//   u64 from(early, late)       its row; only where `there`
//   bool come(early, late)      waits until rows may be read; false if that was ended. The whole warp
//   float weight(early)         its factor, where kWeighted
//   u64 bias(i)                 rows of [T, row_bytes] that come before all terms, or 0
//   u8* out                     [T, row_bytes]
// Where sums are counted:
//   bool kCounts                whether `stored` is called
//   void stored(token)          its sum is stored, or a piece of it. The whole warp
#pragma once
#include "route.cuh"
#include "types.cuh"

namespace ty {

// How rows are split into pieces.
struct RowPieces {
  u32 piece_bytes, pieces;
};

// The rows to sum, and the number of tokens.
struct Summing {
  RowPieces p;
  u32 tokens;
  u64 row_bytes;
  u32 stages;       // pieces in flight of a ring
  u32 stage_bytes;
  u64* taken;       // counter of dealt units, or null
  u32 first;        // the first ring that sums: those before serve what returns
};

// Addresses of the biases that exist, in front.
template <class Terms>
struct Biases {
  u64 at[2];
  u32 count;

  __device__ explicit Biases(const Terms& terms) : at{terms.bias(0), terms.bias(1)} {
    if (at[0] == 0) at[0] = at[1], at[1] = 0;
    count = (at[0] != 0) + (at[1] != 0);
  }
  // The row of a token in the bias that comes at `place`, or 0.
  __device__ u64 of(u32 place, u32 token, u64 row_bytes) const {
    return place < count ? (place == 0 ? at[0] : at[1]) + token * row_bytes : 0;
  }
};

#if TY_ROWS_TMA

constexpr u32 kNoUnit = ~0u;

// How often `stored` is called for a row of so many pieces.
__device__ inline u32 sums_of_row(u32 pieces) { return pieces; }

// A ring of pieces of rows: one of its warps loads, the others sum as pieces arrive. A block has two,
// so that one sums while the other waits.
struct Ring {
  static constexpr u32 kMost = 16;
  u64 full[kMost], empty[kMost];
  float weight[kMost];
  // With the first piece of a unit: its token, or kNoUnit behind the last one, its place in the row, and its pieces.
  u32 token[kMost], offset[kMost];
  u8 total[kMost];
};

// The warps of a ring that have stored their part of a sum, for one unit more than a warp can be ahead of another.
struct StoredParts {
  static constexpr u32 kMost = Ring::kMost + 1;
  u32 of[kMost];
};

// Deals units to rings: in turn, or as rings come free, so that no ring waits for the slowest at the end.
// When they are dealt as rings come free, a ring knows its first few units without a memory access. The
// others are counted, and the last ring to ask resets the count to 0. Turns are faster if units take less
// time than such an access, as nearby ones do. One warp.
template <bool kDealt>
class Dealer {
 public:
  static constexpr u32 kKnown = 3;

  __device__ Dealer(const Summing& s, u32 units) : taken_(s.taken), units_(units) {
    rings_ = gridDim.x * kRings - s.first;
    next_ = blockIdx.x * kRings + threadIdx.x / (kRingWarps * kWave) - s.first;
    if (kDealt) ask();
  }
  // The next of the first kKnown units; kNoUnit if there are not as many.
  __device__ u32 known() {
    u32 unit = next_;
    next_ += rings_;
    return unit < units_ ? unit : kNoUnit;
  }
  // The next of the other units. Called until it gives none.
  __device__ u32 take() {
    if constexpr (!kDealt) return known();
    u32 count = shfl(asked_, 0);
    u64 unit = (u64)kKnown * rings_ + count;
    if (unit < units_) {
      ask();
      return (u32)unit;
    }
    u32 counted = units_ > kKnown * rings_ ? units_ - kKnown * rings_ : 0;
    if (lane_id() == 0 && count == counted + rings_ - 1) *taken_ = 0;
    return kNoUnit;
  }

 private:
  __device__ void ask() { asked_ = lane_id() == 0 ? (u32)atomic_add(taken_, 1ull) : 0; }

  u64* taken_;
  u32 units_, rings_, next_, asked_;
};

// The place of a thread in the ring.
struct Turn {
  u32 slot = 0, parity = 0;

  // This many stages on, at most one time around.
  __device__ Turn plus(u32 by, u32 stages) const {
    u32 to = slot + by;
    return to < stages ? Turn{to, parity} : Turn{to - stages, parity ^ 1};
  }
};

struct Unit {
  u32 token, offset, bytes;

  __device__ Unit(const RowPieces& p, u64 row_bytes, u32 unit) {
    token = p.pieces == 1 ? unit : unit / p.pieces;
    offset = (unit - token * p.pieces) * p.piece_bytes;
    bytes = min(p.piece_bytes, (u32)row_bytes - offset);
  }
};

// The request of a lane: a row, or none (0), for a place in the ring counted from the warp's turn.
struct Asked {
  u32 place;
  u64 from;
  float weight;
  u32 total;  // of the unit
};

// Every lane of a warp asks as soon as its place is free; places beyond the ring wait for a later
// call.
template <class Terms>
__device__ void ask(const Summing& s, Ring& ring, u8* stages, const Turn& turn, const Unit& u,
                    const Asked& row) {
  bool due = row.from != 0 && row.place < s.stages;
  Turn to = turn.plus(due ? row.place : 0, s.stages);
  while (any(due)) {
    if (!due || !is_past(shared_address(&ring.empty[to.slot]), to.parity ^ 1)) continue;
    if (Terms::kWeighted) ring.weight[to.slot] = row.weight;
    if (row.place == 0) ring.token[to.slot] = u.token, ring.offset[to.slot] = u.offset, ring.total[to.slot] = row.total;
    bulk_load(shared_address(stages + to.slot * s.stage_bytes),
              reinterpret_cast<const u8*>(row.from + u.offset), u.bytes,
              shared_address(&ring.full[to.slot]));
    due = false;
  }
}

// A unit without terms, or the end. One warp.
__device__ inline void mark(const Summing& s, Ring& ring, Turn& turn, u32 token, u32 offset) {
  if (lane_id() == 0) {
    wait_barrier(shared_address(&ring.empty[turn.slot]), turn.parity ^ 1);
    ring.token[turn.slot] = token, ring.offset[turn.slot] = offset, ring.total[turn.slot] = 0;
    arrive(shared_address(&ring.full[turn.slot]));
  }
  sync_wave();
  turn = turn.plus(1, s.stages);
}

// One warp: every lane asks for the row of its own term.
template <class Terms>
__device__ void load_rows(const Terms& terms, const Summing& s, Ring& ring, u8* stages) {
  u32 lane = lane_id();
  Dealer<Terms::kDealt> dealer(s, s.tokens * s.p.pieces);
  Biases<Terms> biases(terms);
  Turn turn;
  // The rows were written by other means than bulk copies.
  publish_places();
  auto token_of = [&](u32 unit) { return unit != kNoUnit ? terms.token(Unit(s.p, s.row_bytes, unit).token) : kNoUnit; };
  auto early = [&](u32 token) { return token != kNoUnit ? terms.early(token) : 0; };
  auto late = [&](u32 token, u32 known) {
    return token != kNoUnit && terms.there(known) ? terms.late(token, known) : make_uint2(0, 0);
  };
  // Two units ahead, because a memory access takes longer than a unit.
  u32 unit = dealer.known(), second = dealer.known(), last = dealer.known();
  u32 token = token_of(unit), second_token = token_of(second), last_token = token_of(last);
  u32 known = early(token), next = early(second_token), third = early(last_token);
  uint2 more = late(token, known), then = late(second_token, next);
  bool open = true;
  while (unit != kNoUnit) {
    Unit u(s.p, s.row_bytes, unit);
    u.token = token;
    bool mine = terms.there(known);
    Lanes rows = ballot(mine);
    u32 total = biases.count + popc(rows);
    u32 place = biases.count + popc(rows & lanes_before(lane));
    u64 from = mine ? terms.from(known, more) : 0;
    float weight = Terms::kWeighted && mine ? terms.weight(known) : 0.0f;
    u32 waited = known;
    uint2 where = more;
    u32 fourth = open ? dealer.take() : kNoUnit;
    open = fourth != kNoUnit;
    unit = second, second = last, last = fourth;
    token = second_token, second_token = last_token, last_token = token_of(last);
    known = next, next = third, more = then;
    then = late(second_token, next);
    third = early(last_token);
    if (!terms.come(waited, where)) return mark(s, ring, turn, kNoUnit, 0);
    if (total == 0) mark(s, ring, turn, u.token, u.offset);
    // At most one time around the ring at once: a barrier can tell only two phases apart.
    for (u32 first = 0; first < total; first += s.stages) {
      u64 bias = biases.of(lane, u.token, s.row_bytes);
      if (biases.count > 0) ask<Terms>(s, ring, stages, turn, u, {lane - first, bias, 0.0f, total});
      ask<Terms>(s, ring, stages, turn, u, {place - first, from, weight, total});
      turn = turn.plus(min(total - first, s.stages), s.stages);
    }
  }
  while (open) open = dealer.take() != kNoUnit;
  mark(s, ring, turn, kNoUnit, 0);
}

// The summing threads of a ring: every warp but the loading one.
struct Summer {
  u32 thread = threadIdx.x % (kRingWarps * kWave) - kWave, threads = (kRingWarps - 1) * kWave;
  Turn turn;
  u32 count = 0;  // that the unit is counted in

  // This warp has finished with the piece of its turn.
  __device__ void pass(const Summing& s, Ring& ring) {
    sync_wave();
    if (lane_id() == 0) arrive(shared_address(&ring.empty[turn.slot]));
    turn = turn.plus(1, s.stages);
  }

  // Whether this warp is the last of the ring to store its part of a unit's sum; what the others have stored is then
  // visible to it.
  __device__ bool is_last(StoredParts& stored) {
    constexpr u32 kMost = kRingWarps - 2;
    sync_wave();
    fence_block();
    u32 others = lane_id() == 0 ? atomic_inc(&stored.of[count], kMost) : 0;
    count = count + 1 == StoredParts::kMost ? 0 : count + 1;
    bool last = shfl(others, 0) == kMost;
    fence_block();
    return last;
  }
};

// One piece of one token's sum: N vectors of each thread, of `vectors` in all. A thread that has one
// less sums its last one twice and stores it once.
template <u32 N, class Type, class Terms>
__device__ void sum_unit(const Summing& s, Ring& ring, const u8* stages, Summer& me, u32 vectors,
                         u32 biases, u32 total, uint4* out) {
  Sum<Type> sum[N];
  u32 last = min(me.thread + (N - 1) * me.threads, vectors - 1);
  auto at = [&](u32 v) { return v + 1 < N ? me.thread + v * me.threads : last; };
  for (u32 r = 0; r < total; r++) {
    wait_barrier(shared_address(&ring.full[me.turn.slot]), me.turn.parity);
    const uint4* row = reinterpret_cast<const uint4*>(stages + me.turn.slot * s.stage_bytes);
    uint4 term[N];
#pragma unroll
    for (u32 v = 0; v < N; v++) term[v] = load_shared(row + at(v));
    // A product by 1 is exact.
    float weight = Terms::kWeighted && r >= biases ? ring.weight[me.turn.slot] : 1.0f;
    me.pass(s, ring);
#pragma unroll
    for (u32 v = 0; v < N; v++) {
      float f[Type::kLanes];
      Type::widen(term[v], f);
#pragma unroll
      for (u32 l = 0; l < Type::kLanes; l++) sum[v].value[l] = fma_rn(weight, f[l], sum[v].value[l]);
    }
  }
#pragma unroll
  for (u32 v = 0; v < N; v++)
    if (me.thread + v * me.threads < vectors)
      out[at(v)] = total > 0 ? Type::narrow(sum[v].value) : make_uint4(0, 0, 0, 0);
}

template <class Type, class Terms>
__device__ void sum_stages(const Terms& terms, const Summing& s, Ring& ring, const u8* stages, StoredParts& stored) {
  u32 biases = Biases<Terms>(terms).count;
  Summer me;
  while (true) {
    wait_barrier(shared_address(&ring.full[me.turn.slot]), me.turn.parity);
    u32 token = ring.token[me.turn.slot], offset = ring.offset[me.turn.slot], total = ring.total[me.turn.slot];
    if (token == kNoUnit) return;
    u32 vectors = min(s.p.piece_bytes, (u32)s.row_bytes - offset) / 16;
    if (total == 0) me.pass(s, ring);
    uint4* out = reinterpret_cast<uint4*>(terms.out + token * s.row_bytes + offset);
    // The same for all lanes of a warp.
    u32 first = me.thread / kWave * kWave, mine = first < vectors ? (vectors - 1 - first) / me.threads + 1 : 0;
    switch (mine) {
      case 0:
      case 1: sum_unit<1, Type, Terms>(s, ring, stages, me, vectors, biases, total, out); break;
      case 2: sum_unit<2, Type, Terms>(s, ring, stages, me, vectors, biases, total, out); break;
      case 3: sum_unit<3, Type, Terms>(s, ring, stages, me, vectors, biases, total, out); break;
      case 4: sum_unit<4, Type, Terms>(s, ring, stages, me, vectors, biases, total, out); break;
      default: sum_unit<5, Type, Terms>(s, ring, stages, me, vectors, biases, total, out);
    }
    if (Terms::kCounts && me.is_last(stored)) terms.stored(token);
  }
}

// `serve()` is for the warps of a ring that does not sum.
template <class Type, class Terms, class Serve>
__device__ void sum_rows(const Terms& terms, const Summing& s, u8* stages, Serve serve) {
  __shared__ Ring rings[kRings];
  __shared__ StoredParts stored[Terms::kCounts ? kRings : 1];
  u32 mine = threadIdx.x / (kRingWarps * kWave);
  Ring& ring = rings[mine];
  stages += mine * s.stages * s.stage_bytes;
  if (threadIdx.x % (kRingWarps * kWave) == 0) {
    for (u32 i = 0; i < s.stages; i++) {
      init_barrier(shared_address(&ring.full[i]), 1);
      init_barrier(shared_address(&ring.empty[i]), kRingWarps - 1);
    }
    if constexpr (Terms::kCounts)
      for (u32& warps : stored[mine].of) warps = 0;
    publish_barriers();
  }
  sync_block();
  if (blockIdx.x * kRings + mine < s.first)
    serve();
  else if (threadIdx.x % (kRingWarps * kWave) < kWave)
    load_rows(terms, s, ring, stages);
  else
    sum_stages<Type>(terms, s, ring, stages, stored[Terms::kCounts ? mine : 0]);
  sync_block();
}

#else

__device__ inline u32 sums_of_row(u32) { return 1; }

template <class Type, class Terms, class Serve>
__device__ void sum_rows(const Terms& terms, const Summing& s, u8*, Serve serve) {
  u32 warps = block_waves(), lane = lane_id(), serving = s.first * kRingWarps;
  if (blockIdx.x * warps + wave_id() < serving) return serve();
  Biases<Terms> biases(terms);
  u32 first = blockIdx.x * warps + wave_id() - serving, step = gridDim.x * warps - serving;
  for (u32 position = first; position < s.tokens; position += step) {
    u32 token = terms.token(position), known = terms.early(token);
    bool mine = terms.there(known);
    uint2 more = mine ? terms.late(token, known) : make_uint2(0, 0);
    u64 from = mine ? terms.from(known, more) : 0;
    if (!terms.come(known, more)) return;
    u64 row = (u64)token * s.row_bytes;
    float weight = Terms::kWeighted && mine ? terms.weight(known) : 1.0f;
    Lanes rows = ballot(mine);
    for (u64 at = lane * 16; at < s.row_bytes + lane * 16; at += Sums<Type>::kBytes) {
      i64 room = (i64)s.row_bytes - (i64)at;
      Sums<Type> sums;
      for (u32 i = 0; i < biases.count; i++) sums.add(biases.of(i, token, s.row_bytes) + at, room, false, 0.0f);
      for (Lanes left = rows; left != 0; left &= left - 1) {
        u32 k = first_of(left);
        u64 term = shfl(from, k);
        float by = shfl(weight, k);
        sums.add(term + at, room, Terms::kWeighted, by);
      }
      sums.store(terms.out + row + at, room);
    }
    terms.stored(token);
  }
}

#endif

template <class Type, class Terms>
__device__ void sum_rows(const Terms& terms, const Summing& s, u8* stages) {
  sum_rows<Type>(terms, s, stages, [] {});
}

}  // namespace ty
