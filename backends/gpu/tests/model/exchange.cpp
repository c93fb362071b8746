// Dispatches and combines of several ranks over one level.
#include "helpers.h"
#include "exchange.cu"
#include "level.h"
#include "casts.h"

std::vector<Inputs*> inputs_of(const std::vector<Rank*>& ranks) {
  return std::vector<Inputs*>(ranks.begin(), ranks.end());
}

std::vector<Rank*> all_ranks(const Shape& shape) {
  std::vector<Rank*> ranks;
  for (u32 i = 0; i < shape.ranks; i++) ranks.push_back(new Rank(shape, i));
  return ranks;
}

// The outcome that a rank received, or the outcome in its region where no caller waits.
Outcome reported_to(Rank& r, const DispatchArgs& a) {
  if (!a.c.no_host_sync) return *r.outcome;
  Outcome outcome{};
  const u64* totals = (u64*)(r.arena + a.region + region_of(a, outcome).totals);
  outcome.code = a.c.cell->code, outcome.tokens = totals[0];
  outcome.rows = a.layout == Layout::kPacked ? a.c.local_experts() * a.most_tokens() : totals[1];
  return outcome;
}

// Runs on all ranks at once; returns the outcome of each.
std::vector<Outcome> dispatch(std::vector<Rank*>& ranks, std::vector<DispatchArgs> args) {
  std::vector<std::thread> running;
  for (u32 i = 0; i < ranks.size(); i++)
    running.emplace_back([&, i] {
      dispatch_on(*ranks[i], args[i]);
    });
  for (auto& t : running) t.join();
  std::vector<Outcome> outcomes;
  for (u32 i = 0; i < ranks.size(); i++) outcomes.push_back(reported_to(*ranks[i], args[i]));
  return outcomes;
}

// The layouts that kernels have over this device API.
std::vector<Layout> layouts() {
  std::vector<Layout> all = {Layout::kFlat, Layout::kExpertMajor, Layout::kPacked};
  if (kMayFix) all.push_back(kRankMajor);
  return all;
}

// All ranks pass the rows of a layout alike.
std::vector<Combine> alike(const std::vector<Rank*>& ranks, Layout layout, Combine how = {}) {
  if (layout == kRankMajor) how.block = ranks[0]->s.max_tokens;
  return std::vector<Combine>(ranks.size(), how);
}

// Every owner returns rows of its own content; sources sum them. f32.
void combine(std::vector<Rank*>& ranks, const std::vector<Outcome>& outcomes, bool weights,
             std::vector<Combine> how = {}) {
  std::vector<std::thread> running;
  std::vector<std::vector<float>> outs(ranks.size()), out_weights(ranks.size());
  std::vector<std::vector<u8>> given;
  how.resize(ranks.size());
  u32 block = how[0].block;
  for (u32 d = 0; d < ranks.size(); d++) {
    Rank& r = *ranks[d];
    u64 rows = block > 0 ? block * ranks.size() : outcomes[d].tokens, values = rows * r.s.row_bytes / 4;
    for (u64 i = 0; i < values; i++)
      ((float*)(r.arena + kYAt))[i] = (float)((i * 31 + d * 1001) % 4099) / 3;
    float* back = (float*)(r.arena + kYAt + (512 << 10));
    for (u64 i = 0; i < rows * r.s.topk; i++) back[i] = (float)(i + d * 100000);
    given.emplace_back(r.arena + kYAt, r.arena + kYAt + (1 << 20));
    outs[d].assign(r.tokens * r.s.row_bytes / 4 + 4, -1);
    out_weights[d].assign(r.tokens * r.s.topk + 1, -1);
  }
  for (u32 i = 0; i < ranks.size(); i++)
    running.emplace_back([&, i] {
      float* back = weights ? out_weights[i].data() : nullptr;
      combine_on(*ranks[i], outs[i].data(), back, how[i]);
      // Its caller may change its rows now, whatever other ranks do.
      if (TY_PUTS) memset(ranks[i]->arena + kYAt, 0xdd, 1 << 20);
    });
  for (auto& t : running) t.join();
  Rows row = received_rows(inputs_of(ranks), block);
  for (Rank* s : ranks)
    for (u32 t = 0; t < s->tokens; t++) {
      for (u32 k = 0; k < s->s.topk && weights; k++) {
        i64 e = s->topk[t * s->s.topk + k], owner = e < 0 ? 0 : e / s->s.local();
        float* back = (float*)(given[owner].data() + (512 << 10));
        float expected = e < 0 ? 0 : back[row[s->me][t][owner] * s->s.topk + k];
        if (how[s->me].sums) {
          expected = 0;
          for (u32 d : owners_of(*s, t))
            expected += ((float*)(given[d].data() + (512 << 10)))[row[s->me][t][d] * s->s.topk + k];
        }
        same("returned weight", out_weights[s->me][t * s->s.topk + k], expected);
      }
      std::vector<u32> order = owners_of(*s, t);
      for (u32 i = 0; i < s->s.row_bytes / 4; i++) {
        float sum = 0;
        for (u32 o = 0; o < order.size(); o++) {
          u32 d = order[o];
          float term = ((float*)given[d].data())[row[s->me][t][d] * s->s.row_bytes / 4 + i];
          sum = o == 0 ? term : sum + term;
        }
        same("sum of token " + std::to_string(t), outs[s->me][(u64)t * s->s.row_bytes / 4 + i], sum);
      }
    }
}

// Some or all ranks push their rows; of those, some or all have memory for pushed rows.
void push_back(std::vector<Rank*>& ranks, Layout layout, const std::vector<Outcome>& outcomes, std::mt19937& random) {
  if (TY_PUTS) return;
  for (u32 turn = 0; turn < 4; turn++) {
    std::vector<Combine> how = alike(ranks, layout);
    for (Combine& c : how) {
      c.pushes = turn == 0 || random() % 4 != 0;
      c.lands = c.pushes && (turn == 0 || random() % 3 != 0);
      c.sums = turn == 3;
    }
    // Leftovers of an earlier operation must not be taken for rows.
    for (Rank* r : ranks)
      for (u64 at : {kStagingAt, kLandingAt}) memset(r->arena + at, 0xee, 1 << 20);
    combine(ranks, outcomes, turn % 2, how);
  }
}

// The combines of all ranks; the sums are not checked.
void combine_all(std::vector<Rank*>& ranks, const std::vector<Combine>& how) {
  std::vector<std::thread> running;
  std::vector<std::vector<float>> outs(ranks.size());
  for (u32 i = 0; i < ranks.size(); i++) {
    outs[i].assign(ranks[i]->tokens * ranks[i]->s.row_bytes / 4 + 4, -1);
    running.emplace_back([&, i] { combine_on(*ranks[i], outs[i].data(), nullptr, how[i]); });
  }
  for (auto& t : running) t.join();
}

// More ranks than one poll for pushed units has lanes.
void many_ranks(Shape shape) {
  std::vector<Rank*> ranks = all_ranks(shape);
  std::mt19937 random(shape.ranks);
  Fabric fabric(ranks);
  std::vector<DispatchArgs> args;
  for (Rank* r : ranks) bring(*r, r->me % 3 * 4, random), args.push_back(dispatch_args(*r, Layout::kFlat, false));
  auto outcomes = dispatch(ranks, args);
  combine(ranks, outcomes, false, std::vector<Combine>(ranks.size(), {.pushes = true, .lands = true}));
}

// Where one rank refuses, no rank pushes; where one does not push, the ranks that wait for it
// report it.
void no_push(Shape shape) {
  std::vector<Rank*> ranks = all_ranks(shape);
  std::mt19937 random(shape.ranks);
  Fabric fabric(ranks);
  std::vector<DispatchArgs> args;
  for (Rank* r : ranks) bring(*r, shape.max_tokens, random), args.push_back(dispatch_args(*r, Layout::kFlat, false));
  dispatch(ranks, args);
  for (Rank* r : ranks) memset(r->arena + kLandingAt, 0xee, 1 << 20);
  std::vector<Combine> refused(ranks.size(), {.pushes = true, .lands = true, .expected = kRefused});
  refused[1] = {.refuses = true, .expected = kRefused};
  combine_all(ranks, refused);
  for (Rank* r : ranks) same("no row lands", all_are(0xee, r->arena + kLandingAt, 1 << 20), true);
  std::vector<Combine> silent(ranks.size(), {.pushes = true, .lands = true});
  silent[1].silent = true;
  std::thread host([&] {
    // Only once rank 0 waits for rows: until then a rank may be late to enter.
    auto& waiting = model::at(&ranks[0]->report->waiting);
    while (waiting.load() >> 32 != kPhaseCombineRows) model::rest(1000);
    for (Rank* r : ranks) model::at(r->abort).store(1);
  });
  combine_all(ranks, silent);
  host.join();
  same("a wait of rank 0 is ended", ranks[0]->report->ended, 2u);
  same("for rows", ranks[0]->report->phase, kPhaseCombineRows);
  same("of rank", ranks[0]->report->peer, 1u);
  same("nothing more is entered", ranks[0]->state->stopped, 1u);
}

// A second dispatch is sent before the first is received: it has a slot, a region and staging of its own.
void two_at_once(std::vector<Rank*>& ranks) {
  std::vector<DispatchArgs> first, second;
  for (Rank* r : ranks) {
    memset(r->arena, 0xee, kArenaBytes);
    first.push_back(dispatch_args(*r, Layout::kFlat, false));
    second.push_back(dispatch_args(*r, Layout::kFlat, true));
    second.back().region = 2 << 20, second.back().staging = kStagingAt + (1 << 20);
    first.back().capacity = second.back().capacity = 2 << 20;
    first.back().at_once = second.back().at_once = 0;
  }
  std::vector<Outcome> outcomes(ranks.size());
  std::vector<std::thread> running;
  for (u32 i = 0; i < ranks.size(); i++)
    running.emplace_back([&, i] {
      Rank& r = *ranks[i];
      for (DispatchArgs a : {first[i], second[i]})
        model::launch(kBlocks, kWarps * kWave, [=, &r] { ty_dispatch(a, r.params()); });
      outcomes[i] = *r.outcome;
      r.arrive(first[i].c, true);
      r.arrive(second[i].c, true);
    });
  for (auto& t : running) t.join();
  for (u32 d = 0; d < ranks.size(); d++)
    for (const auto* args : {&first, &second})
      check_received(inputs_of(ranks), d, (*args)[d], ranks[d]->arena + (*args)[d].region, outcomes[d]);
}

void refusals(std::vector<Rank*>& ranks) {
  std::vector<DispatchArgs> args;
  for (Rank* r : ranks) args.push_back(dispatch_args(*r, Layout::kFlat, false));
  const char text[] = "no rows today";
  args[1].c.verdict = kRefuseText, args[1].c.text_bytes = sizeof text, args[1].staged = 0;
  memcpy(args[1].c.text, text, sizeof text);
  for (const Outcome& o : dispatch(ranks, args)) {
    same("refused", o.code, kRefused);
    same("by rank", o.rank, 1u);
    same_bytes("text", o.text, text, sizeof text);
  }
  args.clear();
  for (Rank* r : ranks) args.push_back(dispatch_args(*r, Layout::kFlat, false));
  args[0].capacity = 128, args[0].c.text_bytes = 3;
  for (const Outcome& o : dispatch(ranks, args)) {
    same("full", o.code, kFull);
    same("at rank", o.rank, 0u);
  }
  args.clear();
  for (Rank* r : ranks) args.push_back(dispatch_args(*r, Layout::kFlat, false));
  i64 good = std::exchange(ranks[0]->topk[1], ranks[0]->s.experts);
  for (const Outcome& o : dispatch(ranks, args)) {
    same("a bad routing", o.code, kRefused);
    same("for its routing", o.verdict, kRefuseInput);
  }
  ranks[0]->topk[1] = good;
  args.clear();
  for (Rank* r : ranks) args.push_back(dispatch_args(*r, Layout::kFlat, false));
  // In the bits of M of a call: each rank finds it, and the next operation finds nothing of this one.
  args[1].c.signature |= 1ull << 18 | 5ull << 46;
  for (u32 d = 0; const Outcome& o : dispatch(ranks, args)) {
    same("another M", o.code, kAnotherM);
    same("at rank", o.rank, d++ == 1 ? 0u : 1u);
  }
  if (ranks.size() < 3) return;
  // One rank differs in its type, too: all ranks find that, though some differ in M alone from others.
  args.clear();
  for (Rank* r : ranks) args.push_back(dispatch_args(*r, Layout::kFlat, false));
  args[1].c.signature |= 1ull << 18 | 5ull << 46;
  args[2].c.signature ^= 1ull << 8;
  for (const Outcome& o : dispatch(ranks, args)) same("another type", o.code, kMismatch);
}

#include "copies.h"

void check_all(std::vector<Rank*>& ranks, const std::vector<DispatchArgs>& args,
               const std::vector<Outcome>& outcomes) {
  for (u32 d = 0; d < ranks.size(); d++) {
    check_received(inputs_of(ranks), d, args[d], ranks[d]->arena + args[d].region, outcomes[d]);
    const u64* tiles = (const u64*)(ranks[d]->control + args[d].tiles);
    u32 count = args[d].tile_rows ? ranks.size() * args[d].tiles_of_source() : 0;
    for (u32 i = 0; i < count; i++) same("count of a tile", tiles[i], 0u);
    Region region = region_of(args[d], outcomes[d]);
    check_host_counts(*ranks[d], args[d], region);
    check_routing_counts(*ranks[d]);
    if (args[d].layout == Layout::kFlat && !args[d].rank_major) check_copies(*ranks[d], args[d], region, outcomes[d], d % 3);
  }
}

#include "launches.h"

void run(const Shape& shape, std::vector<u32> tokens) {
  std::vector<Rank*> ranks = all_ranks(shape);
  std::mt19937 random(shape.ranks * 100 + shape.topk);
  Fabric fabric(ranks);
  for (Layout layout : layouts()) {
    for (Rank* r : ranks) bring(*r, tokens[(r->me + (u32)layout) % tokens.size()], random);
    for (bool replay : {false, true}) {
      std::vector<DispatchArgs> args;
      for (Rank* r : ranks) {
        memset(r->arena, 0xee, kArenaBytes);
        args.push_back(dispatch_args(*r, layout, replay));
      }
      auto outcomes = dispatch(ranks, args);
      for (u32 d = 0; d < shape.ranks; d++) same("dispatch", outcomes[d].code, kGo);
      check_all(ranks, args, outcomes);
      combine(ranks, outcomes, replay, alike(ranks, layout));
      if (has_row_per_token(layout)) push_back(ranks, layout, outcomes, random);
    }
    // Before records of refused operations are sent.
    if (layout == Layout::kFlat) check_counters(ranks);
    if (layout == Layout::kFlat && ranks.size() > 1) refusals(ranks);
    if (layout == Layout::kFlat) two_at_once(ranks);
    // Where a model of it is not too slow.
    if (shape.max_tokens < 100 || layout == Layout::kFlat) launches(ranks, layout, random);
  }
}

// Rows are cast as they move, in every layout.
void cast(const Shape& shape, Cast how, DType dtype) {
  std::vector<Rank*> ranks = all_ranks(shape);
  std::mt19937 random((u32)how * 10 + (u32)dtype);
  Fabric fabric(ranks);
  for (Layout layout : layouts())
    for (bool replay : {false, true}) {
      std::vector<std::vector<u32>> raw(shape.ranks);
      std::vector<DispatchArgs> args;
      for (Rank* r : ranks) {
        if (!replay) bring(*r, shape.max_tokens - r->me, random);
        raw[r->me] = bring_raw(*r, how, dtype, random);
        memset(r->arena, 0xee, kArenaBytes);
        args.push_back(dispatch_args(*r, layout, replay));
        cast_from(args.back(), raw[r->me], how, dtype);
      }
      auto outcomes = dispatch(ranks, args);
      for (u32 d = 0; d < shape.ranks; d++) same("dispatch", outcomes[d].code, kGo);
      check_all(ranks, args, outcomes);
    }
}

// All pairs of casts and types, or three of them: of both lengths, or of one that the pair picks. Some rows have
// several pieces, and the last piece ends within a group. Other rows are shorter than a group, and their scales are not
// stored in bulk.
void casts(u32 ranks, bool all, bool both) {
  for (Cast how : kCasts)
    for (DType dtype : {DType::kBf16, DType::kFp16, DType::kFp32})
      for (u32 hidden : {48u, how == Cast::kFp8Ue8m0 ? 2048u : 1104u}) {
        if (!all && (u32)how != (u32)dtype) continue;
        if (!both && (hidden == 48) != (((u32)how + (u32)dtype + ranks) % 2 == 0)) continue;
        cast({ranks, ranks * 4, 3, hidden, cast_words(how, hidden), 19, 1 << 20}, how, dtype);
      }
}

// Small; even so, lanes put more at once than a ring of the lockstep has slots.
constexpr Shape kLeast = {3, 12, 4, 80, 3, 10, 48};
// Lanes look at the counts of several experts each, or of one, or of none, and leave an expert between two looks.
constexpr Shape kManyExperts = {3, 219, 3, 16, 0, 12, 1 << 20};

// A dispatch of each layout, and its combine.
void run_once(const Shape& shape, std::vector<u32> tokens) {
  std::vector<Rank*> ranks = all_ranks(shape);
  std::mt19937 random(shape.ranks);
  Fabric fabric(ranks);
  for (Layout layout : layouts()) {
    std::vector<DispatchArgs> args;
    for (Rank* r : ranks) {
      bring(*r, tokens[(r->me + (u32)layout) % tokens.size()], random);
      memset(r->arena, 0xee, kArenaBytes);
      args.push_back(dispatch_args(*r, layout, false));
    }
    auto outcomes = dispatch(ranks, args);
    check_all(ranks, args, outcomes);
    combine(ranks, outcomes, has_row_per_token(layout), alike(ranks, layout));
    if (has_row_per_token(layout)) combine(ranks, outcomes, true, alike(ranks, layout, {.sums = true}));
  }
}

void pushes() {
  many_ranks({33, 66, 3, 16, 0, 8, 1 << 20});
  no_push({2, 8, 3, 64, 0, 72, 1 << 20});
}

int main(int count, char** arguments) {
  std::string what = count > 1 ? arguments[1] : "";
  if (what == "waits") fault = Fault::kWaits, model::mutant = 1;
  if (what == "least" || what == "waits") {
    run_once(kLeast, {0, 10, 7});
    puts("all is well");
    return 0;
  }
  // The shapes that differ in how lanes share the work.
  if (what == "few" || what == "few puts" || what == "other puts") {
    if (what != "few puts") run({2, 8, 3, 1040, 1, 40, 1 << 20}, {40, 33});
    if (what != "other puts") run({3, 12, 4, 272, 3, 40, 112}, {0, 40, 7});
    if (what != "few puts") run({2, 64, 32, 16, 1, 33, 1 << 20}, {33, 32});
    if (what != "other puts") run(kManyExperts, {12, 5});
    puts("all is well");
    return 0;
  }
  if (what == "pushes") {
    pushes();
    puts("all is well");
    return 0;
  }
  if (what == "few casts") {
    casts(2, false, true);
    puts("all is well");
    return 0;
  }
  // Each pair of a cast and a type, of a length and a number of ranks.
  if (what == "casts") {
    bool all = model::runs_all();
    for (u32 count : {1u, 2u, 3u}) casts(count, count == 2, all || count == 2);
    const Shape eight{8, 32, 3, 1104, cast_words(Cast::kFp8, 1104), 19, 1 << 20};
    all ? casts(8, false, true) : cast(eight, Cast::kFp8, DType::kFp16);
    puts("all is well");
    return 0;
  }
  // A change to the kernels is switched on.
  if (what == "mutant") {
    model::mutant = 1;
    run({2, 8, 3, 64, 0, 72, 1 << 20}, {70, 33});
    puts("nothing was noticed");
    return 0;
  }
  // Rows that shared memory holds fewer stages of.
  if (what == "long") {
    run_once({2, 8, 3, 1040, 1, 40, 1 << 20}, {40, 33});
    puts("all is well");
    return 0;
  }
  if (what == "eight") {
    run_once({8, 16, 4, 48, 1, 24, 1 << 20}, {24, 9, 0});
    puts("all is well");
    return 0;
  }
  // A fault of the transport must be noticed at once, by as many ranks as the second argument says.
  if (count > 2) {
    fault = Fault(atoi(arguments[1]));
    switch (atoi(arguments[2])) {
      case 2: run({2, 8, 3, 64, 0, 72, 1 << 20}, {70, 33}); break;
      case 3: run({3, 12, 4, 272, 3, 40, 1 << 20}, {0, 40, 7}); break;
      case 8: run({8, 16, 4, 48, 1, 24, 1 << 20}, {24, 9, 0}); break;
      default: fail("a fault takes 2, 3 or 8 ranks");
    }
    puts("nothing was noticed");
    return 0;
  }
  run({2, 8, 3, 64, 0, 72, 1 << 20}, {70, 33});
  const Shape eight{8, 16, 4, 48, 1, 24, 1 << 20};
  if (TY_PUTS) model::runs_all() ? run(eight, {24, 9, 0}) : run_once(eight, {24, 9, 0});
  // Puts that are shorter than a row, scales, a rank without tokens.
  run({3, 12, 4, 272, 3, 40, 112}, {0, 40, 7});
  run({1, 4, 2, 48, 1, 8, 1 << 20}, {8});
  // More selections of a token than a lane looks up at once, and the maximum.
  run({2, 24, 11, 32, 2, 40, 1 << 20}, {40, 37});
  run({2, 64, 32, 16, 1, 33, 1 << 20}, {33, 32});
  run(kManyExperts, {12, 5});
  // Tokens that several blocks count.
  run({2, 4, 2, 16, 1, 600, 64}, {600, 555});
  if (!TY_PUTS) pushes();
  puts("all is well");
}
