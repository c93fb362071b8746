// Combine from expert-major and packed rows in one kernel. Owners merge the rows of each token and push the
// partial row to its source. At the same time they sum their own tokens. A partial row of this rank never
// leaves registers on its way into a sum.
//
// Partial rows travel as rows outside the arena do (push_combine.cuh): in units of a few rows. A word at the
// source reports each unit. The rows lie in memory of the source or, if the source has no room, of the owner.
//
// Sums are those of `merge` and `combine`, in the same order.
#pragma once
#include "fused_plan.cuh"

namespace ty {

#if TY_ROWS_TMA

// The warps of a ring that sum. One more warp loads, and one more stores the rows that are pushed.
constexpr u32 kFusedSummers = kRingWarps - 2;
constexpr u32 kFusedWarps = kRings * kRingWarps;
constexpr u32 kFusedOut = 2;  // rows of a ring that are being stored

// A ring of rows, and the rows that leave.
struct FusedRing {
  static constexpr u32 kMost = 8;
  // With the first piece of a row.
  struct Made {
    u64 to;
    u32 source, unit;       // as in MadeRow
    u32 bytes;              // 0: no more rows
    u32 experts, partials;  // terms: this rank's rows of experts, then biases and partial rows of ranks
    u32 place;              // of this rank's partial row among the latter, or kNoPlace
    u32 pushed;
  };
  struct Left {
    u64 to;
    u32 source, unit;
    u32 bytes;  // 0: no more rows
  };
  u64 full[kMost], empty[kMost], out_full[kFusedOut], out_empty[kFusedOut];
  float weight[kMost];
  Made made[kMost];
  Left left[kFusedOut];
};

// A ring as one of its warps sees it.
struct FusedView {
  FusedRing& ring;
  u8* stages;      // pieces that arrive, then those that leave
  u32 count, stage_bytes;  // of those that arrive

  __device__ u8* stage(u32 slot) const { return stages + slot * stage_bytes; }
  __device__ u8* out(u32 slot) const { return stage(count + slot); }
};

// A lane asks for its term, as soon as its place is free; places beyond the ring wait for a later call.
__device__ inline void ask(const FusedView& v, const Turn& turn, u32 place, u64 from, float weight,
                           const FusedRing::Made& made) {
  bool due = from != 0 && place < v.count;
  Turn to = turn.plus(due ? place : 0, v.count);
  while (any(due)) {
    if (!due || !is_past(shared_address(&v.ring.empty[to.slot]), to.parity ^ 1)) continue;
    v.ring.weight[to.slot] = weight;
    if (place == 0) v.ring.made[to.slot] = made;
    bulk_load(shared_address(v.stage(to.slot)), reinterpret_cast<const u8*>(from), made.bytes,
              shared_address(&v.ring.full[to.slot]));
    due = false;
  }
}

// A row without terms, or the end.
__device__ inline void mark(const FusedView& v, Turn& turn, const FusedRing::Made& made) {
  if (lane_id() == 0) {
    wait_barrier(shared_address(&v.ring.empty[turn.slot]), turn.parity ^ 1);
    v.ring.made[turn.slot] = made;
    arrive(shared_address(&v.ring.full[turn.slot]));
  }
  sync_wave();
  turn = turn.plus(1, v.count);
}

// One warp.
__device__ inline void load_made(const FusedCombineArgs& f, FusedPlan& plan, const FusedView& v,
                                     Guard& guard) {
  const CombineArgs& a = f.combine;
  u64 bias0 = reinterpret_cast<u64>(a.bias0 ? a.bias0 : a.bias1);
  u64 bias1 = reinterpret_cast<u64>(a.bias0 ? a.bias1 : nullptr);
  u32 lane = lane_id();
  Turn turn;
  // The rows were written by other means than bulk copies.
  publish_places();
  MadeRow row;
  while (plan.next(row, guard)) {
    u32 biases = row.pushed ? 0 : (bias0 != 0) + (bias1 != 0);
    u32 experts = popc(row.experts), total = experts + biases + popc(row.partials);
    bool expert = row.experts >> lane & 1;
    u32 place = expert ? popc(row.experts & lanes_before(lane))
                       : experts + biases + popc(row.partials & lanes_before(lane));
    u64 beside = lane < biases ? (lane == 0 ? bias0 : bias1) + row.token * a.row_bytes : 0;
#pragma unroll 1
    for (u32 piece = 0; piece < a.pieces; piece++) {
      u32 at = piece * a.piece_bytes, own = row.place == kNoPlace ? kNoPlace : biases + row.place;
      bool last = piece + 1 == a.pieces;
      FusedRing::Made made{row.to + at,
                           row.source,
                           last ? row.unit : kNotLast,
                           min(a.piece_bytes, (u32)a.row_bytes - at),
                           experts,
                           total - experts + (own != kNoPlace),
                           own,
                           row.pushed};
      if (total == 0) mark(v, turn, made);
      // At most one time around the ring at once: a barrier can tell only two phases apart.
#pragma unroll 1
      for (u32 first = 0; first < total; first += v.count) {
        if (biases > 0) ask(v, turn, experts + lane - first, beside ? beside + at : 0, 1.0f, made);
        ask(v, turn, place - first, row.from ? row.from + at : 0, expert ? row.weight : 1.0f, made);
        turn = turn.plus(min(total - first, v.count), v.count);
      }
    }
  }
  mark(v, turn, {0, 0, kNotLast, 0, 0, 0, kNoPlace, 0});
}

// The summing threads of a ring.
struct FusedSummer {
  u32 thread = threadIdx.x % (kRingWarps * kWave) - kWave, threads = kFusedSummers * kWave;
  Turn turn, out;

  // This warp has finished with the piece of its turn.
  __device__ void pass(const FusedView& v) {
    sync_wave();
    if (lane_id() == 0) arrive(shared_address(&v.ring.empty[turn.slot]));
    turn = turn.plus(1, v.count);
  }
  // The next row that leaves may be written.
  __device__ u8* open(const FusedView& v) const {
    wait_barrier(shared_address(&v.ring.out_empty[out.slot]), out.parity ^ 1);
    return v.out(out.slot);
  }
  __device__ void close(const FusedView& v, const FusedRing::Left& left) {
    if (thread == 0) v.ring.left[out.slot] = left;
    publish_shared();
    sync_wave();
    if (lane_id() == 0) arrive(shared_address(&v.ring.out_full[out.slot]));
    out = out.plus(1, kFusedOut);
  }
};

// Adds the next row that arrives to a thread's N vectors, one after the other: all at once take too many
// registers. `last`: the place of the last one.
template <u32 N, class Type, class Add>
__device__ TY_INLINED void take_row(const FusedView& v, FusedSummer& me, u32 last, Add add) {
  wait_barrier(shared_address(&v.ring.full[me.turn.slot]), me.turn.parity);
  const uint4* row = reinterpret_cast<const uint4*>(v.stage(me.turn.slot));
  float weight = v.ring.weight[me.turn.slot];
#pragma unroll
  for (u32 i = 0; i < N; i++) {
    float f[Type::kLanes];
    Type::widen(load_shared(row + (i + 1 < N ? me.thread + i * me.threads : last)), f);
    add(i, f, weight);
  }
  me.pass(v);
}

// One piece of one row: N vectors of each thread, of `vectors` in all. A thread that has one less sums its
// last one twice and stores it once.
template <u32 N, class Type>
__device__ TY_INLINED void make_piece(const FusedView& v, FusedSummer& me, const FusedRing::Made& made) {
  u32 vectors = made.bytes / 16, last = min(me.thread + (N - 1) * me.threads, vectors - 1);
  auto at = [&](u32 i) { return i + 1 < N ? me.thread + i * me.threads : last; };
  auto store = [&](uint4* to, const uint4 (&row)[N]) {
#pragma unroll
    for (u32 i = 0; i < N; i++)
      if (me.thread + i * me.threads < vectors) to[at(i)] = row[i];
  };
  Sum<Type> sum[N];
  uint4 partial[N];
#pragma unroll 1
  for (u32 r = 0; r < made.experts; r++)
    take_row<N, Type>(v, me, last, [&](u32 i, const float* f, float weight) {
      // A product by 1 is exact.
#pragma unroll
      for (u32 l = 0; l < Type::kLanes; l++) sum[i].value[l] = fma_rn(weight, f[l], sum[i].value[l]);
    });
#pragma unroll
  for (u32 i = 0; i < N; i++) {
    partial[i] = made.experts > 0 ? Type::narrow(sum[i].value) : make_uint4(0, 0, 0, 0);
    sum[i] = {};
  }
  if (made.pushed) {
    store(reinterpret_cast<uint4*>(me.open(v)), partial);
    return me.close(v, {made.to, made.source, made.unit, made.bytes});
  }
#pragma unroll 1
  for (u32 r = 0; r < made.partials; r++) {
    auto add = [&](u32 i, const float* f, float) {
#pragma unroll
      for (u32 l = 0; l < Type::kLanes; l++) sum[i].value[l] = add_rn(sum[i].value[l], f[l]);
    };
    if (r != made.place) {
      take_row<N, Type>(v, me, last, add);
      continue;
    }
#pragma unroll
    for (u32 i = 0; i < N; i++) {
      float f[Type::kLanes];
      Type::widen(partial[i], f);
      add(i, f, 1.0f);
    }
  }
#pragma unroll
  for (u32 i = 0; i < N; i++)
    partial[i] = made.partials > 0 ? Type::narrow(sum[i].value) : make_uint4(0, 0, 0, 0);
  store(reinterpret_cast<uint4*>(made.to), partial);
}

template <class Type>
__device__ TY_INLINED void make_rows(const FusedView& v) {
  FusedSummer me;
  while (true) {
    wait_barrier(shared_address(&v.ring.full[me.turn.slot]), me.turn.parity);
    FusedRing::Made made = v.ring.made[me.turn.slot];
    if (made.bytes == 0) break;
    if (made.experts + made.partials - (made.place != kNoPlace) == 0) me.pass(v);
    u32 vectors = made.bytes / 16;
    // The same for all lanes of a warp.
    u32 first = me.thread / kWave * kWave, mine = first < vectors ? (vectors - 1 - first) / me.threads + 1 : 0;
    switch (mine) {
      case 0:
      case 1: make_piece<1, Type>(v, me, made); break;
      case 2: make_piece<2, Type>(v, me, made); break;
      case 3: make_piece<3, Type>(v, me, made); break;
      case 4: make_piece<4, Type>(v, me, made); break;
      default: make_piece<5, Type>(v, me, made);
    }
  }
  me.open(v);
  me.close(v, {0, 0, kNotLast, 0});
}

// One thread: stores rows to their sources, and reports each unit once it is there.
template <class Up>
__device__ void store_left(const FusedView& v, const CombineArgs& a, const Up& up) {
  Turn turn;
  publish_places();
  while (true) {
    wait_barrier(shared_address(&v.ring.out_full[turn.slot]), turn.parity);
    FusedRing::Left left = v.ring.left[turn.slot];
    if (left.bytes == 0) break;
    bulk_store(reinterpret_cast<u8*>(left.to), shared_address(v.out(turn.slot)), left.bytes);
    close_stores();
    stores_read();
    arrive(shared_address(&v.ring.out_empty[turn.slot]));
    turn = turn.plus(1, kFusedOut);
    if (left.unit == kNotLast) continue;
    stores_done();
    fence_system();
    store_relaxed(unit_flags(a, up, left.source, a.c.rank) + left.unit, a.c.epoch());
  }
  stores_done();
}

// All rows of this block.
template <class Type, class Up>
__device__ TY_INLINED void fuse_rows(const FusedCombineArgs& f, const Up& up, const CombineTables& t, u8* stages,
                                     Guard& guard) {
  __shared__ FusedRing rings[kRings];
  const CombineArgs& a = f.combine;
  constexpr u32 kThreads = kRingWarps * kWave;
  u32 mine = threadIdx.x / kThreads, warp = threadIdx.x % kThreads / kWave;
  FusedView v{rings[mine], stages + mine * (a.stages + kFusedOut) * a.stage_bytes, a.stages, a.stage_bytes};
  if (threadIdx.x % kThreads == 0) {
    for (u32 i = 0; i < a.stages; i++) {
      init_barrier(shared_address(&v.ring.full[i]), 1);
      init_barrier(shared_address(&v.ring.empty[i]), kFusedSummers);
    }
    for (u32 i = 0; i < kFusedOut; i++) {
      init_barrier(shared_address(&v.ring.out_full[i]), kFusedSummers);
      init_barrier(shared_address(&v.ring.out_empty[i]), 1);
    }
    publish_barriers();
  }
  sync_block();
  if (warp == 0) {
    FusedPlan plan(f, t, blockIdx.x * kRings + mine, gridDim.x * kRings);
    load_made(f, plan, v, guard);
  } else if (warp <= kFusedSummers) {
    make_rows<Type>(v);
  } else if (lane_id() == 0) {
    store_left(v, a, up);
  }
  sync_block();
}

#else

constexpr u32 kFusedWarps = kSummingWarps;

// One row. The whole warp.
template <class Type>
__device__ TY_INLINED void make_row(const FusedCombineArgs& f, const MadeRow& row) {
  const CombineArgs& a = f.combine;
  const u8* bias[2] = {a.bias0 ? a.bias0 : a.bias1, a.bias0 ? a.bias1 : nullptr};
  u32 biases = (bias[0] != nullptr) + (bias[1] != nullptr), lane = lane_id();
  u32 terms = biases + popc(row.partials) + (row.place != kNoPlace);
  for (u64 at = lane * 16; at < a.row_bytes + lane * 16; at += Sums<Type>::kBytes) {
    i64 room = (i64)a.row_bytes - (i64)at;
    Sums<Type> partial;
    for (Lanes left = row.experts; left != 0; left &= left - 1) {
      u32 k = first_of(left);
      u64 from = shfl(row.from, k);
      float weight = shfl(row.weight, k);
      partial.add(from + at, room, f.merge.dispatch_weights != nullptr, weight);
    }
    if (row.pushed) {
      partial.store(reinterpret_cast<u8*>(row.to) + at, room);
      continue;
    }
    Sums<Type> sums;
    Lanes left = row.partials;
    for (u32 i = 0; i < terms; i++) {
      if (row.place != kNoPlace && i == biases + row.place) {
        sums.take(partial, room);
      } else if (i < biases) {
        sums.add(reinterpret_cast<u64>(i == 0 ? bias[0] : bias[1]) + row.token * a.row_bytes + at, room, false, 1.0f);
      } else {
        sums.add(shfl(row.from, first_of(left)) + at, room, false, 1.0f);
        left &= left - 1;
      }
    }
    sums.store(reinterpret_cast<u8*>(row.to) + at, room);
  }
}

// All rows of this block: each of its warps makes some.
template <class Type, class Up>
__device__ TY_INLINED void fuse_rows(const FusedCombineArgs& f, const Up& up, const CombineTables& t, u8*,
                                     Guard& guard) {
  const CombineArgs& a = f.combine;
  FusedPlan plan(f, t, blockIdx.x * kFusedWarps + wave_id(), gridDim.x * kFusedWarps);
  MadeRow row;
  while (plan.next(row, guard)) {
    make_row<Type>(f, row);
    if (row.unit == kNotLast) continue;
    sync_wave();
    fence_system();
    if (lane_id() == 0) store_relaxed(unit_flags(a, up, row.source, a.c.rank) + row.unit, a.c.epoch());
  }
}

#endif

template <class Type, class Up>
__device__ TY_INLINED void combine_fused(const FusedCombineArgs& f, const Up& up, u8* shared) {
  const CombineArgs& a = f.combine;
  u64 begun = now_ns();
  Guard guard(a.c.abort, a.c.cap_ns, a.c.report);
  CombineTables t(shared, a.c.ranks);
  if (!begin_combine(a, up, t, guard)) return;
  place_all(a, up, t);
  Returned back{t.first, t.weights, a.r.row_base};
  if (a.out_weights) fetch_weights({a, back, Units(), nullptr, a.out, a.c.tokens()}, a.c.tokens());
  fuse_rows<Type>(f, up, t, shared + a.table_bytes, guard);
  end_combine(a, up, begun, guard);
}

}  // namespace ty
