// Rows that come over a rail while they are forwarded, as runs: see runs.cuh. Without such a rail, all rows are there
// when the exchange inside a domain begins.
#pragma once
#include "route.cuh"

namespace ty {

// The count of stored sums of the run that a token's row is in.
__device__ inline u64* summed_of(const Common& c, const Routing& r, const Crossing& x, u32 token) {
  u32 group = group_of(c, r, token), row = token;
  if constexpr (kGrouped) row -= r.group_starts[group];
  return x.summed + (u64)group * x.most + (row >> x.shift);
}

// The last runs that a warp has waited for: of each owner by the lane of its number. Most rows are of the same run as
// the row before.
class LastRuns {
 public:
  // Whether lanes that are `due` have waited for this run of this owner. The whole warp.
  __device__ bool have(bool due, u32 owner, u32 run) const {
    bool is_known = due && owner < kWave;
    return shfl(run_, is_known ? owner : 0) == run && is_known;
  }
  // Each owner is one lane's. The whole warp.
  __device__ void note(bool due, u32 owner, u32 run) {
    for (Lanes left = ballot(due); left != 0; left &= left - 1) {
      u32 from = first_of(left), of = shfl(owner, from), last = shfl(run, from);
      if (lane_id() == of) run_ = last;
    }
  }

 private:
  u32 run_ = ~0u;
};

// On a rail: waits until each lane's returned row of an owner is here; lanes that are not `due` do not wait. The whole
// warp.
__device__ inline bool run_comes(const CombineArgs& a, bool due, u32 owner, u32 row, LastRuns& last, Guard& guard) {
  u32 run = row >> a.crossing.shift;
  bool had = last.have(due, owner, run);
  due = due && !had;
  if (!any(due)) return true;
  last.note(due, owner, run);
  const u64* word = a.crossing.here + (u64)(due ? owner : 0) * a.crossing.most + (due ? run : 0);
  u32 epoch = a.c.epoch();
  What what{kPhaseCombineRows, owner, run, epoch};
  bool ok = !due || guard.until(what, [&] { return load_acquire(word); },
                                [&](u64 found) { return has_come(found, epoch); });
  sync_wave();
  publish_places();
  return all(ok);
}

// The count of staged rows of the run that holds a token's row for the rank of selection k, or null.
__device__ inline u64* staged_of_row(const DispatchArgs& a, u32 token, u32 k) {
  u32 packed = a.r.rows[(u64)token * a.c.topk + k], rank = packed >> kPlaceBits;
  if (packed == kNoRow) return nullptr;
  u32 row = row_of(a.c, a.r, token, packed, rank);
  return a.crossing.staged + (u64)rank * a.crossing.most + (row >> a.crossing.shift);
}

#if TY_GROUPED

// The group of a token's row, and the run that holds it.
struct RunOf {
  u32 group, run;

  __device__ RunOf(const DispatchArgs& a, u32 token) : group(group_of(a.c, a.r, token)) {
    run = (token - a.r.group_starts[group]) >> a.crossing.shift;
  }
};

// Waits until a token's row is here; false if the wait was ended. One thread.
__device__ inline bool row_comes(const DispatchArgs& a, u32 token, Guard& guard) {
  if (!a.awaits_rows()) return true;
  RunOf of(a, token);
  const u64* word = a.crossing.here + (u64)of.group * a.crossing.most + of.run;
  u32 epoch = operation().former_epoch;
  bool ok = guard.until({kPhaseRows, a.c.rank, of.run, epoch}, [&] { return load_acquire(word); },
                        [&](u64 found) { return has_come(found, epoch); });
  publish_places();
  return ok;
}

// The same for consecutive tokens of a group, which lanes share. One warp.
__device__ inline bool rows_come(const DispatchArgs& a, u32 first, u32 end, Guard& guard) {
  if (!a.awaits_rows() || !a.crossing.scales) return true;
  bool ok = true;
  for (u32 token = first + lane_id(); token < end && ok; token += kWave) ok = row_comes(a, token, guard);
  return all(ok);
}

// The tokens of all groups but this domain's own: a run of each in turn, because they cross side by side.
struct OtherGroups {
  const u32* starts;
  u32 groups, mine, shift;

  __device__ OtherGroups(const Common& c, const Routing& r, const Crossing& x)
      : starts(r.group_starts), groups(c.groups()), mine(x.mine), shift(x.shift) {}
  __device__ u32 others() const { return groups - 1; }
  __device__ u32 own() const { return starts[mine + 1] - starts[mine]; }
  __device__ u32 first(u32 i) const { return starts[(mine + 1 + i) % groups]; }
  __device__ u32 rows(u32 i) const { return starts[(mine + 1 + i) % groups + 1] - first(i); }

  // The token at a position, which is below their number.
  __device__ u32 token(u32 position) const {
    u32 begin = 0;
    while (true) {
      // Rounds in which the same groups have a whole run.
      u32 live = 0, end = ~0u;
#pragma unroll 1
      for (u32 i = 0; i + 1 < groups; i++)
        if (u32 has = rows(i); has > begin) live++, end = min(end, (has - begin) >> shift);
      u32 whole = live * end << shift;
      if (position < whole) {
        u32 nth = (position >> shift) % live, i = 0;
        begin += (position >> shift) / live << shift;
        while (rows(i) <= begin || nth-- > 0) i++;
        return first(i) + begin + (position & ((1u << shift) - 1));
      }
      position -= whole, begin += end << shift;
      // One round with runs that are not whole.
#pragma unroll 1
      for (u32 i = 0; i + 1 < groups; i++) {
        u32 has = rows(i), some = has > begin ? min(1u << shift, has - begin) : 0;
        if (position < some) return first(i) + begin + position;
        position -= some;
      }
      begin += 1u << shift;
    }
  }
};

// The token at a position of the order in which rows are forwarded: this domain's own come first, because they are here
// first.
__device__ inline u32 token_in_turn(const DispatchArgs& a, u32 position) {
  // Where rows are staged for puts, a block has the rows of consecutive tokens.
  if (kPuts || !a.awaits_rows()) return position;
  OtherGroups others(a.c, a.r, a.crossing);
  u32 own = others.own();
  return position < own ? others.starts[others.mine] + position : others.token(position - own);
}

// The same of the order in which sums are made. For each run of this domain's own come as many as there are other
// domains, so that the exchange on the rail sums rows all the time, and not behind this one.
__device__ inline u32 sum_in_turn(const Common& c, const Routing& r, const Crossing& x, u32 tokens, u32 position) {
  OtherGroups others(c, r, x);
  u32 own = others.own(), crossing = tokens - own, first_own = others.starts[others.mine], run = 1u << x.shift;
  u32 each = run * others.others(), rounds = min(own >> x.shift, crossing / each), round = position / (each + run);
  if (round < rounds) {
    u32 at = position - round * (each + run);
    return at < each ? others.token(each * round + at) : first_own + run * round + at - each;
  }
  // The rest of both.
  position -= rounds << x.shift;
  return position < crossing ? others.token(position) : first_own + (rounds << x.shift) + position - crossing;
}

#else

// Rows are this rank's own.
__device__ inline bool row_comes(const DispatchArgs&, u32, Guard&) { return true; }
__device__ inline bool rows_come(const DispatchArgs&, u32, u32, Guard&) { return true; }
__device__ inline u32 token_in_turn(const DispatchArgs&, u32 position) { return position; }
__device__ inline u32 sum_in_turn(const Common&, const Routing&, const Crossing&, u32, u32 position) {
  return position;
}

#endif

}  // namespace ty
