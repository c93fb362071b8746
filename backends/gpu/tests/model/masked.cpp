// Low-latency operations that go on without a rank: it stops in each phase, is masked by hand, and comes back.
#define MODEL_NO_MAIN
#define TY_MASKS 1
#include "decode.cpp"

// Where the rank that is lost stops.
enum class Stop { kBefore, kReports, kRows, kPieces, kCombine, kPartials, kWeights };
constexpr Stop kStops[] = {Stop::kBefore,  Stop::kReports,  Stop::kRows,   Stop::kPieces,
                           Stop::kCombine, Stop::kPartials, Stop::kWeights};

void mask_losses(const Ranks& ranks) {
  for (Rank* r : ranks) {
    u32 n = r->s.ranks;
    r->masking = {room<u32>(n), room<u64>(n), room<u64>(kSlots * kSettled * n), room<u32>(1), ~0ull, r->me, 0};
    r->report->masking = (u64)&r->masking;
  }
}

u32 mask_of(const Rank& r, u32 rank) { return r.masking.masks[rank]; }

// Runs on all ranks but one. Their hosts say that it is lost once one of their kernels waits.
template <class Run>
void without(const Ranks& ranks, u32 lost, Run run) {
  std::atomic<bool> over{false};
  std::thread hosts([&] {
    while (!over) {
      for (Rank* r : ranks)
        if (r->me != lost && model::at(&r->report->waiting).load() != 0)
          model::at(const_cast<u64*>(r->masking.lost) + lost).store(1);
      model::rest(1000);
    }
  });
  std::vector<std::thread> running;
  for (Rank* r : ranks)
    if (r->me != lost) running.emplace_back([&, r] { run(*r, r->me); });
  for (auto& t : running) t.join();
  over = true;
  hosts.join();
}

// The inbox of a rank that a source writes, in all slots.
struct DecodeBy {
  Rank& at;
  DecodeArgs s;
  u32 source;

  u8* row(u32 slot, u32 token) const { return at.control + s.rows + place(slot, token) * s.row_pitch; }
  u8* record(u32 slot, u32 token) const { return at.control + s.records + place(slot, token) * s.record_pitch; }
  u8* words(u32 slot) const {
    return at.control + s.words + 8ull * (slot * at.s.ranks + source) * (s.token_words + at.s.local());
  }
  void clear_rows() const {
    for (u32 slot = 0; slot < kSlots; slot++) memset(row(slot, 0), 0, at.s.most() * s.row_pitch);
  }

 private:
  u64 place(u32 slot, u32 token) const { return ((u64)slot * at.s.ranks + source) * at.s.most() + token; }
};

// Returns true if a token of a source has arrived.
using Came = std::function<bool(u32 source, u32 token)>;

// Takes back what has not arrived of what the lost rank has sent for an operation in a slot.
void lose(const Ranks& ranks, u32 lost, u32 slot, Stop stop) {
  for (Rank* r : ranks) {
    DecodeBy inbox{*r, decode_of(*r, Way::kHalves), lost};
    if (stop == Stop::kReports) memset(inbox.words(slot), 0, 8ull * (inbox.s.token_words + r->s.local()));
    for (u32 t = 1; t < r->s.most() && stop != Stop::kReports; t += 2) {
      if (stop != Stop::kPieces) memset(inbox.record(slot, t), 0, inbox.s.record_pitch);
      memset(inbox.row(slot, t), 0, stop == Stop::kPieces ? 16 : inbox.s.row_pitch);
    }
  }
}

// The received rows of all ranks but the lost one. `takes_part`: whether the others have places for its rows.
void check_without(const Ranks& ranks, u32 lost, const std::vector<DecodeDispatchArgs>& args, bool takes_part,
                   const Came& came) {
  Shape s = ranks[0]->s;
  u32 tokens = ranks[lost]->tokens;
  if (!takes_part) ranks[lost]->tokens = 0;
  Slots slots = slots_of(ranks);
  bool all = true;
  for (u32 t = 0; t < ranks[lost]->tokens; t++) all &= came(lost, t);
  for (u32 d = 0; d < ranks.size(); d++) {
    if (d == lost) continue;
    const DispatchArgs& a = args[d].dispatch;
    no_ended_wait(*ranks[d]);
    Outcome outcome = reported_to(*ranks[d], a);
    same("dispatch", outcome.code, kGo);
    u8* base = ranks[d]->arena + a.region;
    Region region = region_of(a, outcome);
    if (all) check_received(inputs_of(ranks), d, a, base, outcome, args[d].decode);
    std::vector<u8> zeros(s.row_bytes + 4 * s.scale_words + 16);
    // None of the rows of a source counts where one of them has not come.
    bool is_torn = false;
    for (u32 t = 0; t < ranks[lost]->tokens; t++) is_torn |= !came(lost, t) && goes(local_ids(*ranks[lost], t, d));
    u32 n = 0;
    for (Rank* source : ranks)
      for (u32 t = 0; t < source->tokens; t++) {
        std::vector<i32> ids = local_ids(*source, t, d);
        if (!goes(ids)) continue;
        bool is_there = source->me != lost || !is_torn;
        for (u32 k = 0; k < s.topk; k++) {
          i64 slot = ids[k] < 0 ? -1 : slots[source->me][t][k];
          same("a slot", ((i32*)(base + region.slots))[n * s.topk + k], is_there ? slot : -1);
          if (slot < 0) continue;
          std::string what = "rank " + std::to_string(d) + ", token " + std::to_string(t) + " of " + std::to_string(source->me);
          u32 from = source->me * args[d].decode.source_step + t;
          same("source of " + what, ((u32*)(base + region.source))[slot], is_there ? from : ~0u);
          same_bytes("row of " + what, base + slot * s.row_bytes, is_there ? source->x + (u64)t * s.row_bytes : zeros.data(), s.row_bytes);
          same_bytes("scales of " + what, scales_at(a, base + region.scales, slot, args[d].decode).data(),
                     is_there ? (u8*)(source->scales.data() + t * s.scale_words) : zeros.data(), 4 * s.scale_words);
          float weight = is_there ? source->weights[t * s.topk + k] : 0;
          same("weight of " + what, ((float*)(base + region.weights))[slot], weight);
        }
        n++;
      }
    for (u32 rank = 0; rank < ranks.size(); rank++)
      same("lost ranks", (base + region.lost)[rank], rank == lost && (is_torn || !takes_part) ? 1 : 0);
  }
  ranks[lost]->tokens = tokens;
}

// A combine without the lost rank, which has stopped at `stop`, or before.
void combine_without(const Ranks& ranks, u32 lost, const std::vector<DecodeDispatchArgs>& dispatched, const Call& call,
                     Stop stop, bool takes_part) {
  Shape s = ranks[0]->s;
  Elements values{call.narrow};
  u32 width = s.row_bytes / values.bytes(), pairs = s.max_tokens * s.topk;
  u64 rows = (u64)s.local() * s.ranks * s.max_tokens;
  std::mt19937 random(rows + (u32)stop);
  std::vector<Given> given(s.ranks);
  std::vector<std::vector<u8>> missing(s.ranks, std::vector<u8>(s.max_tokens, 99));
  std::vector<DecodeCombineArgs> args;
  for (Rank* r : ranks) {
    Given& mine = given[r->me];
    mine.y.resize(rows * s.row_bytes), mine.bias.resize((u64)s.max_tokens * s.row_bytes);
    mine.out.assign((u64)s.max_tokens * s.row_bytes, 0xaa);
    mine.back.resize(rows), mine.weights.assign(pairs, -7), mine.late.resize(pairs), mine.ids.assign(pairs, 1);
    if (call.coded) bring_coded(mine.y.data(), rows, width, random);
    for (u64 i = 0; i < rows * width && !call.coded; i++)
      values.set(mine.y.data(), i, (float)(int)(random() % 4099) / 3 - 600);
    for (float& w : mine.back) w = (float)(random() % 9999);
    for (float& w : mine.late) w = (float)(int)(random() % 199) / 8 - 12;
    args.push_back(decode_combine(*r, dispatched[r->me].dispatch, mine, call));
    args.back().missing = missing[r->me].data();
  }
  u32 slot = (u32)(ranks[(lost + 1) % s.ranks]->state->turn >> 32);
  if (stop == Stop::kPartials) {
    for (Rank* r : ranks) launch_combine(*r, args[r->me], call, kSends);
    lose(ranks, lost, slot, stop);
    without(ranks, lost, [&](Rank& r, u32 i) { launch_combine(r, args[i], call, kReceives); });
  } else {
    without(ranks, lost, [&](Rank& r, u32 i) { launch_combine(r, args[i], call, kSends | kReceives); });
  }
  u32 tokens = ranks[lost]->tokens;
  if (!takes_part) ranks[lost]->tokens = 0;
  Slots slots = slots_of(ranks);
  ranks[lost]->tokens = tokens;
  for (Rank* r : ranks) {
    if (r->me == lost) continue;
    no_ended_wait(*r);
    same("combine", args[r->me].combine.c.cell->code, kGo);
    Rank seen = *r;
    for (u32 t = 0; t < r->tokens; t++) {
      u32 left_out = 0;
      for (u32 k = 0; k < s.topk; k++) {
        i64& e = seen.topk[t * s.topk + k];
        bool is_gone = e >= 0 && e / s.local() == lost && (stop != Stop::kPartials || t % 2 == 1);
        if (is_gone) e = -1, left_out++;
        float weight = e < 0 ? 0 : given[e / s.local()].back[slots[r->me][t][k]];
        if (call.returns) same("returned weight", given[r->me].weights[t * s.topk + k], weight);
      }
      std::string what = " of token " + std::to_string(t) + " of rank " + std::to_string(r->me);
      same("missing" + what, missing[r->me][t], left_out);
      std::vector<float> sum = expected_sum(seen, t, slots, given, call);
      for (u32 i = 0; i < width; i++)
        same("sum" + what, values.get(given[r->me].out.data(), (u64)t * width + i), sum[i]);
    }
  }
}

std::vector<DecodeDispatchArgs> all_args(const Ranks& ranks, bool replay, Way way) {
  std::vector<DecodeDispatchArgs> args;
  for (Rank* r : ranks) {
    memset(r->arena, 0xee, kArenaBytes);
    args.push_back(decode_dispatch(*r, replay, way));
  }
  return args;
}

// A rank is lost, and two more rounds go on without it. Nothing waits for it then, and nothing is sent to it.
void loss(const Ranks& ranks, u32 lost, Stop stop, Way way) {
  std::mt19937 random((u32)stop + lost);
  for (Rank* r : ranks) bring(*r, r->s.max_tokens - r->me % 2, random);
  bool sends = stop == Stop::kReports || stop == Stop::kRows || stop == Stop::kPieces;
  bool in_dispatch = sends || stop == Stop::kBefore, takes_part = stop != Stop::kBefore && stop != Stop::kReports;
  auto args = all_args(ranks, false, sends ? Way::kHalves : way);
  u32 slot = (u32)(ranks[0]->state->turn >> 32);
  if (sends) {
    for (Rank* r : ranks) launch_decode(*r, args[r->me], kSends);
    lose(ranks, lost, slot, stop);
    without(ranks, lost, [&](Rank& r, u32 i) { launch_decode(r, args[i], kReceives); });
  } else if (in_dispatch) {
    without(ranks, lost, [&](Rank& r, u32 i) { launch_decode(r, args[i], kSends | kReceives); });
  } else {
    on_all(ranks, random, [&](Rank& r, u32 i) { launch_decode(r, args[i], kSends | kReceives); });
  }
  check_without(ranks, lost, args, takes_part, [&](u32 source, u32 token) {
    return source != lost || (takes_part && (!in_dispatch || token % 2 == 0));
  });
  Call call{way == Way::kByRole ? Way::kAtOnce : way, true, true, true, true};
  call.late = stop == Stop::kWeights;
  // Rows of whole blocks of 512 channels.
  call.coded = ranks[0]->s.row_bytes % 1024 == 0;
  combine_without(ranks, lost, args, call, stop, takes_part);
  std::vector<u32> waits;
  for (Rank* r : ranks)
    if (r->me != lost) same("a mask", mask_of(*r, lost) & 1, 1u), waits.push_back(mask_of(*r, lost));
  std::vector<u8> before(ranks[lost]->control, ranks[lost]->control + kControlBytes);
  for (bool replay : {false, true}) {
    args = all_args(ranks, replay, way);
    without(ranks, lost, [&](Rank& r, u32 i) { launch_decode(r, args[i], kSends | kReceives); });
    check_without(ranks, lost, args, false, [&](u32 source, u32) { return source != lost; });
    call.narrow = replay, call.late = false, call.once = replay, call.coded = false;
    combine_without(ranks, lost, args, call, Stop::kCombine, false);
  }
  same_bytes("the control window of the lost rank", ranks[lost]->control, before.data(), kControlBytes);
  for (Rank* r : ranks)
    if (r->me != lost) same("waits for the lost rank", mask_of(*r, lost), waits.front()), waits.erase(waits.begin());
}

// The masks are cleared by hand, between operations: what the lost rank had sent meanwhile is removed.
void come_back(const Ranks& ranks, u32 lost) {
  for (Rank* r : ranks) {
    for (Rank* source : ranks) {
      DecodeBy inbox{*r, decode_of(*r, Way::kAtOnce), source->me};
      if (source->me == lost || r->me == lost) inbox.clear_rows();
    }
    memset(r->masking.masks, 0, 4 * r->s.ranks);
    const_cast<u64*>(r->masking.lost)[lost] = 0;
  }
  ranks[lost]->state->turn = ranks[(lost + 1) % ranks.size()]->state->turn;
}

// All blocks follow the decision that one block has made about a source. With `is_out` that block has decided
// that the source is left out, although all its words have arrived. Otherwise it has decided that the source
// takes part, although its mask is set.
void settled(const Ranks& ranks, u32 round, bool is_out) {
  std::mt19937 random(round);
  for (Rank* r : ranks) bring(*r, r->s.max_tokens, random);
  auto args = all_args(ranks, false, Way::kHalves);
  for (Rank* r : ranks) launch_decode(*r, args[r->me], kSends);
  Rank& first = *ranks[0];
  u64 epoch = args[0].dispatch.c.cell->epoch, slot = args[0].dispatch.c.cell->slot;
  for (u32 at = is_out ? round : 0; at <= round; at++)
    first.masking.settled[(slot * kSettled + at) * ranks.size() + 1] = epoch << 1 | is_out;
  first.masking.masks[1] = !is_out;
  launch_decode(first, args[0], kReceives);
  u32 tokens = ranks[1]->tokens;
  if (is_out) ranks[1]->tokens = 0;
  no_ended_wait(first);
  check_received(inputs_of(ranks), 0, args[0].dispatch, first.arena + args[0].dispatch.region, *first.outcome,
                 args[0].decode);
  ranks[1]->tokens = tokens;
  first.masking.masks[1] = 0;
  for (Rank* r : ranks)
    for (Rank* source : ranks) DecodeBy{*r, decode_of(*r, Way::kAtOnce), source->me}.clear_rows();
}

void settle_everything(const Ranks& ranks) {
  for (u32 round : {kByHeads, kByReports})
    for (bool is_out : {true, false}) settled(ranks, round, is_out);
}

// A rank is masked by hand between a dispatch and its combine: nothing waits for it.
void by_hand(const Ranks& ranks) {
  std::mt19937 random(11);
  for (Rank* r : ranks) bring(*r, r->s.max_tokens, random);
  auto args = all_args(ranks, false, Way::kAtOnce);
  on_all(ranks, random, [&](Rank& r, u32 i) { launch_decode(r, args[i], kSends | kReceives); });
  check_packed(ranks, args);
  for (Rank* r : ranks) r->masking.masks[1] = r->me != 1;
  combine_without(ranks, 1, args, Call{}, Stop::kCombine, true);
  for (Rank* r : ranks) same("waits for a masked rank", mask_of(*r, 1), r->me != 1 ? 1u : 0u);
}

// A rank that is not lost does not come in time.
void too_late(const Ranks& ranks) {
  std::mt19937 random(9);
  for (Rank* r : ranks) bring(*r, r->s.max_tokens, random), r->masking.after_ns = 100'000'000;
  auto args = all_args(ranks, false, Way::kAtOnce);
  std::vector<std::thread> running;
  for (Rank* r : ranks)
    if (r->me != 1) running.emplace_back([&, r] { launch_decode(*r, args[r->me], kSends | kReceives); });
  for (auto& t : running) t.join();
  check_without(ranks, 1, args, false, [&](u32 source, u32) { return source != 1; });
  for (Rank* r : ranks) r->masking.after_ns = ~0ull;
}

// Holds rank 1 back until the last blocks of all others have begun and wait for words of operations, and a moment
// longer. Their reports may name any rank: where the lanes of a wavefront wait in one loop, the wait of a lane that has
// ended is reported until those of the others end.
void come_last(const Ranks& ranks, const Rank& rank, const std::atomic<u32>& begun) {
  if (rank.me != 1) return;
  // The last block of a rank measures the time.
  while (begun < ranks.size() - 1) model::rest(1000);
  for (Rank* other : ranks)
    while (other != &rank && model::at(&other->report->waiting).load() >> 32 != kPhaseEntry) model::rest(1000);
  // Far longer than what is expected of the others: a busy machine may hold the block that measures off its core.
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
}

// A rank that is late shows in the statistics of the others, and rows of experts add up.
void statistics(const Ranks& ranks) {
  std::mt19937 random(13);
  u32 n = ranks[0]->s.ranks, local = ranks[0]->s.local();
  std::vector<std::vector<i64>> waited(n, std::vector<i64>(n)), later(n, std::vector<i64>(n));
  std::vector<std::vector<u32>> totals(n, std::vector<u32>(local)), expected = totals;
  for (Rank* r : ranks) bring(*r, r->s.max_tokens, random);
  for (u32 turn = 0; turn < 2; turn++) {
    auto args = all_args(ranks, turn == 1, Way::kAtOnce);
    for (u32 i = 0; i < n; i++)
      args[i].decode.waited_ns = waited[i].data(), args[i].decode.expert_totals = totals[i].data();
    std::vector<std::thread> running;
    std::atomic<u32> begun{0};
    for (Rank* r : ranks)
      running.emplace_back([&, r] {
        come_last(ranks, *r, begun);
        launch_decode(*r, args[r->me], kSends | kReceives, Late{kBlocks - 1, [&] { begun++; }});
      });
    for (auto& t : running) t.join();
    check_packed(ranks, args);
    for (Rank* r : ranks)
      for (u32 t = 0; t < r->tokens; t++)
        for (u32 k = 0; k < r->s.topk; k++) {
          i64 e = r->topk[t * r->s.topk + k];
          if (e >= 0) expected[e / local][e % local]++;
        }
    if (turn == 1) continue;
    std::vector<Given> given(n);
    std::vector<DecodeCombineArgs> combines;
    for (Rank* r : ranks) {
      given[r->me].y.resize((u64)local * n * r->s.max_tokens * r->s.row_bytes, 1);
      given[r->me].out.resize((u64)r->s.max_tokens * r->s.row_bytes);
      combines.push_back(decode_combine(*r, args[r->me].dispatch, given[r->me], Call{}));
      combines.back().decode.waited_ns = later[r->me].data();
    }
    on_all(ranks, random, [&](Rank& r, u32 i) { launch_combine(r, combines[i], Call{}, kSends | kReceives); });
    for (Rank* r : ranks)
      for (u32 i = 0; i < n; i++) same("a time of a combine", later[r->me][i] > 0, true);
  }
  for (Rank* r : ranks) {
    if (r->me != 1) same("a late rank is waited for", waited[r->me][1] >= 200'000'000, true);
    for (u32 e = 0; e < local; e++) same("rows of an expert", totals[r->me][e], expected[r->me][e]);
  }
}

// A combine with weights of its own waits for a late rank in its sending half.
void statistics_in_halves(const Ranks& ranks) {
  std::mt19937 random(14);
  u32 n = ranks[0]->s.ranks;
  std::vector<std::vector<i64>> waited(n, std::vector<i64>(n));
  for (Rank* r : ranks) bring(*r, r->s.max_tokens, random);
  auto args = dispatch_all(ranks, random, false, Way::kAtOnce);
  check_packed(ranks, args);
  Call call{Way::kHalves};
  call.late = true;
  std::vector<Given> given(n);
  std::vector<DecodeCombineArgs> combines;
  for (Rank* r : ranks) {
    Given& mine = given[r->me];
    mine.y.resize((u64)r->s.local() * n * r->s.max_tokens * r->s.row_bytes, 1);
    mine.out.resize((u64)r->s.max_tokens * r->s.row_bytes);
    mine.late.assign((u64)r->s.max_tokens * r->s.topk, 1), mine.ids.assign(r->topk.begin(), r->topk.end());
    combines.push_back(decode_combine(*r, args[r->me].dispatch, mine, call));
    combines.back().decode.waited_ns = waited[r->me].data();
  }
  std::atomic<u32> begun{0};
  on_all(ranks, random, [&](Rank& r, u32 i) {
    come_last(ranks, r, begun);
    launch_combine(r, combines[i], call, kSends, Late{blocks_of(combines[i].decode) - 1, [&] { begun++; }});
  });
  on_all(ranks, random, [&](Rank& r, u32 i) { launch_combine(r, combines[i], call, kReceives); });
  for (Rank* r : ranks) {
    no_ended_wait(*r);
    if (r->me != 1) same("a late rank is waited for where rows are sent", waited[r->me][1] >= 100'000'000, true);
  }
}

void run_masked(const Shape& shape, bool all) {
  Ranks ranks = all_ranks(shape);
  std::mt19937 random(shape.ranks);
  Fabric fabric(ranks);
  if (model::mutant != 0) {
    // Some changes are noticed here alone, and others by a loss.
    mask_losses(ranks);
    by_hand(ranks);
    come_back(ranks, 1);
    settle_everything(ranks);
  } else {
    statistics(ranks);
    statistics_in_halves(ranks);
    mask_losses(ranks);
    statistics(ranks);
    statistics_in_halves(ranks);
    rounds(ranks, random, {shape.max_tokens, 3}, Way::kAtOnce, false);
  }
  u32 lost = 0;
  for (Stop stop : kStops) {
    loss(ranks, lost, stop, (u32)stop % 2 ? Way::kAtOnce : Way::kByRole);
    come_back(ranks, lost);
    lost = (lost + 1) % ranks.size();
    rounds(ranks, random, {shape.max_tokens}, Way::kHalves, true, only((u32)stop % 3));
  }
  if (!all) return;
  by_hand(ranks);
  come_back(ranks, 1);
  too_late(ranks);
  come_back(ranks, 1);
  refusals(ranks, random);
  settle_everything(ranks);
}

int main(int count, char** arguments) {
  std::string what = count > 1 ? arguments[1] : "";
  const Shape least{2, 8, 3, 80, 1, 5, 1 << 20}, coded{3, 12, 4, 1024, 1, 4, 1 << 20};
  if (what == "few") {
    run_masked(least, true);
    // Minutes in lockstep, where `coded.h` has the same kernels.
    if (!model::kLockstep) run_masked(coded, false);
    puts("all is well");
    return 0;
  }
  if (count > 1) fault = Fault::kWaits, model::mutant = atoi(arguments[1]);
  run_masked({3, 12, 4, 272, 3, 9, 1 << 20}, true);
  if (count > 1) {
    puts("nothing was noticed");
    return 0;
  }
  if (model::runs_all()) run_masked({4, 16, 5, 64, 0, 34, 1 << 20}, false);
  run_masked(least, true);
  run_masked(coded, false);
  puts("all is well");
}
