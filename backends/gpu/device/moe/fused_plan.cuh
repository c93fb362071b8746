// The rows that a combine from expert rows makes, and their order: see fused_combine.cuh.
#pragma once
#include "combine.cuh"

namespace ty {

// A row that is made.
struct MadeRow {
  u64 to;          // where it goes
  bool pushed;     // a partial row for another rank; else the sum of a token of this rank
  u32 source;      // that rank
  u32 unit;        // the unit of its rows that is complete with this one, or kNotLast
  u32 token;       // of a sum
  // Lane k has at most one term: this rank's row of an expert, or the partial row of another rank.
  u64 from;
  float weight;
  Lanes experts, partials;  // the lanes that have one
  u32 place;       // of this rank's partial row among the ranks' partial rows of a sum; kNoPlace: it has none
};
constexpr u32 kNoPlace = ~0u, kNotLast = ~0u;

// Lane k's slot of a received token, as a peer wrote it: loaded ahead of its use, so not looked at yet.
__device__ inline i32 given_slot(const MergeArgs& m, u64 token) {
  return lane_id() < m.topk ? m.slots[token * m.topk + lane_id()] : -1;
}
// The same, if it names a row.
__device__ inline i32 valid_slot(const MergeArgs& m, i32 slot) { return slot >= 0 && (u64)slot < m.rows ? slot : -1; }

// The partial rows that one worker makes for other ranks, in units, in rounds over the sources. It looks up
// every row two rows before the row is needed, because memory accesses take longer than a row.
class PushedRows {
 public:
  __device__ PushedRows(const FusedCombineArgs& f, const CombineTables& t, u32 worker, u32 workers)
      : f_(f), t_(t), number_(worker), workers_(workers), ahead_(f.combine, t, worker) {
    take();
    take();
  }
  // Units of this worker.
  __device__ u32 units() const {
    const CombineArgs& a = f_.combine;
    u32 all = 0, worker = number_ % workers_;
    for (u32 s = 0; s < a.c.ranks; s++)
      if (s != a.c.rank) all += (t_.rows_of(s) + (1u << a.unit_shift) - 1) >> a.unit_shift;
    return all > worker ? (all - worker - 1) / workers_ + 1 : 0;
  }

  // One row; `last` of its unit.
  struct Row {
    u32 source = 0, row = 0;
    bool last = false;
    i32 slot = -1;
    float weight = 1.0f;
  };
  __device__ Row pop() {
    Row row = next_;
    take();
    return row;
  }

 private:
  __device__ void take() {
    const MergeArgs& m = f_.merge;
    next_ = then_;
    next_.slot = valid_slot(m, next_.slot);
    if (m.dispatch_weights) next_.weight = next_.slot >= 0 ? m.dispatch_weights[next_.slot] : 0.0f;
    then_ = Row();
    if (ahead_.rows == 0) return;
    then_.source = ahead_.source, then_.row = ahead_.first;
    then_.slot = given_slot(m, t_.start[ahead_.source] + ahead_.first);
    ahead_.first++;
    then_.last = --ahead_.rows == 0;
    if (!then_.last) return;
    number_ += workers_;
    ahead_ = PushUnit(f_.combine, t_, number_);
  }

  const FusedCombineArgs& f_;
  const CombineTables& t_;
  u32 number_, workers_;
  PushUnit ahead_;  // the rest of it
  Row next_, then_;
};

// This rank's tokens that one worker sums. Each step of the way to a token's rows is a memory access, so it
// is taken one token before the next one.
class SummedTokens {
 public:
  __device__ SummedTokens(const FusedCombineArgs& f, const CombineTables& t, u32 worker, u32 workers)
      : f_(f), t_(t), token_(worker), ahead_(worker), workers_(workers) {
    for (u32 i = 0; i < 4; i++) shift();
  }
  __device__ u32 tokens() const {
    u32 all = f_.combine.c.tokens(), worker = token_ % workers_;
    return all > worker ? (all - worker - 1) / workers_ + 1 : 0;
  }

  // The knowledge that lanes have of a token.
  struct Token {
    u32 packed = kNoRow;  // of Routing::rows
    uint2 base = {0, 0};
    i32 slot = -1;
    float weight = 1.0f;

    __device__ bool there() const { return packed != kNoRow; }
    __device__ u32 rank() const { return packed >> kPlaceBits; }
    // Among this rank's rows from the owner.
    __device__ u32 row() const { return (packed & ((1u << kPlaceBits) - 1)) + base.x + base.y; }
  };
  __device__ u32 token() const { return token_; }
  __device__ const Token& now() const { return now_; }
  // The one behind it, except for its slot.
  __device__ const Token& next() const { return next_; }
  __device__ void pop() {
    token_ += workers_;
    shift();
  }

 private:
  __device__ void shift() {
    const CombineArgs& a = f_.combine;
    const MergeArgs& m = f_.merge;
    now_ = next_;
    now_.slot = valid_slot(m, now_.slot);
    if (m.dispatch_weights) now_.weight = now_.slot >= 0 ? m.dispatch_weights[now_.slot] : 0.0f;
    next_ = then_;
    Lanes own = ballot(next_.there() && next_.rank() == a.c.rank);
    u32 row = shfl(next_.row(), own != 0 ? first_of(own) : 0);
    next_.slot = own != 0 ? given_slot(m, t_.start[a.c.rank] + row) : -1;
    then_ = last_;
    if (then_.there()) {
      u32 span = span_of(a.r, ahead_ - workers_);
      then_.base = make_uint2(a.r.span_ranks[span * a.c.ranks + then_.rank()],
                              a.r.block_ranks[span / kWarps * a.c.ranks + then_.rank()]);
    }
    last_ = Token();
    if (ahead_ < a.c.tokens()) last_.packed = packed_row(a.c, a.r, ahead_);
    ahead_ += workers_;
  }

  const FusedCombineArgs& f_;
  const CombineTables& t_;
  u32 token_, ahead_, workers_;
  Token now_, next_, then_, last_;
};

// The rows of one worker, a warp: partial rows for others and sums in turn, in proportion to their numbers.
// A sum whose partial rows have not arrived gives way to the next unit for others. So a worker waits only
// when it has nothing left to push, and no two ranks wait for each other.
class FusedPlan {
 public:
  __device__ FusedPlan(const FusedCombineArgs& f, const CombineTables& t, u32 worker, u32 workers)
      : f_(f), t_(t), pushed_(f, t, worker, workers), summed_(f, t, worker, workers),
        units_(pushed_.units()), tokens_(summed_.tokens()) {}

  // The next row; false behind the last, and where a wait was ended. The whole warp.
  __device__ TY_INLINED bool next(MadeRow& made, Guard& guard) {
    bool push = open_ || units_made_ < units_;
    bool sum = !open_ && sums_made_ < tokens_ &&
               (!push || (u64)sums_made_ * units_ < (u64)units_made_ * tokens_);
    if (sum && come(!push, guard)) {
      make_sum(made);
      return true;
    }
    if (push) make_partial(made);
    return push;
  }

 private:
  __device__ const u64* flag(u32 owner, u32 row) const {
    return reinterpret_cast<const u64*>(t_.flags[owner]) + (row >> f_.combine.unit_shift);
  }
  // Whether the other ranks' partial rows of the next token have arrived; if it `waits`, false only if the
  // wait was ended.
  __device__ TY_INLINED bool come(bool waits, Guard& guard) {
    // A look takes longer than most of what a row takes, so it is for two tokens, if lanes are enough.
    if (known_) {
      known_ = false;
      return true;
    }
    const CombineArgs& a = f_.combine;
    constexpr u32 kHalf = kWave / 2;
    bool two = a.c.topk <= kHalf, second = two && lane_id() >= kHalf;
    auto owner_of = [&](const SummedTokens::Token& token) { return token.there() ? token.rank() : a.c.rank; };
    u32 owner = owner_of(summed_.now()), row = summed_.now().row();
    u32 its_owner = shfl(owner_of(summed_.next()), lane_id() % kHalf);
    u32 its_row = shfl(summed_.next().row(), lane_id() % kHalf);
    if (second) owner = its_owner, row = its_row;
    bool due = owner != a.c.rank && t_.flags[owner] != 0;
    u64 epoch = a.c.epoch();
    bool ok = !due || load_acquire(flag(owner, row)) == epoch;
    Lanes late = ballot(!ok), first = two ? lanes_before(kHalf) : kAllLanes;
    if ((late & first) != 0) {
      if (!waits) return false;
      ok = ok || second ||
           guard.until({kPhaseCombineRows, owner, row >> a.unit_shift, epoch},
                       [&] { return load_acquire(flag(owner, row)); },
                       [&](u64 found) { return found == epoch; });
      if (!all(ok)) return false;
    }
    known_ = two && late == 0;
    // An observation of one lane holds for all, and for bulk copies.
    sync_wave();
    publish_places();
    return true;
  }
  __device__ u64 expert_row(i32 slot) const {
    return slot >= 0 ? reinterpret_cast<u64>(f_.merge.x) + (u64)slot * f_.merge.row_bytes : 0;
  }
  __device__ void make_partial(MadeRow& made) {
    const CombineArgs& a = f_.combine;
    PushedRows::Row row = pushed_.pop();
    open_ = !row.last;
    units_made_ += row.last;
    made.to = t_.to[row.source] + row.row * a.row_bytes;
    made.source = row.source, made.unit = row.last ? row.row >> a.unit_shift : kNotLast;
    made.pushed = true, made.token = 0, made.place = kNoPlace;
    made.from = expert_row(row.slot), made.weight = row.weight;
    made.experts = ballot(row.slot >= 0), made.partials = 0;
  }
  __device__ void make_sum(MadeRow& made) {
    const CombineArgs& a = f_.combine;
    const SummedTokens::Token& token = summed_.now();
    bool other = token.there() && token.rank() != a.c.rank;
    Lanes own = ballot(token.there() && !other);
    made.token = summed_.token();
    made.to = reinterpret_cast<u64>(a.out) + made.token * a.row_bytes;
    made.source = 0, made.unit = kNotLast, made.pushed = false;
    // A lane has one term at most, for any slots that a peer wrote.
    made.experts = ballot(token.slot >= 0 && !other), made.partials = ballot(other);
    made.from = other ? t_.first[token.rank()] + token.row() * a.row_bytes : expert_row(token.slot);
    made.weight = token.weight;
    made.place = own != 0 ? popc(made.partials & lanes_before(first_of(own))) : kNoPlace;
    sums_made_++;
    summed_.pop();
  }

  const FusedCombineArgs& f_;
  const CombineTables& t_;
  PushedRows pushed_;
  SummedTokens summed_;
  u32 units_, tokens_, units_made_ = 0, sums_made_ = 0;
  bool open_ = false;   // a unit is begun
  bool known_ = false;  // the rows of the next token have arrived
};

}  // namespace ty
