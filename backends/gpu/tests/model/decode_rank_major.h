// Low-latency dispatches to rank-major rows, and their combines. Included in decode.cpp.

// The place of each source's row at each rank: [source][token][rank], or -1.
Slots places_of(const Ranks& ranks) {
  Shape s = ranks[0]->s;
  Slots places(s.ranks);
  for (Rank* r : ranks) {
    std::vector<i64> next(s.ranks);
    for (u32 t = 0; t < r->tokens; t++) {
      places[r->me].emplace_back(s.ranks, -1);
      for (u32 d : owners_of(*r, t)) places[r->me][t][d] = (i64)r->me * by_rank + next[d]++;
    }
  }
  return places;
}

// The kernel of a combine of rank-major rows: the one for all rows, the one for rows of 16 bits, or ranks differ.
enum class Kernel { kForAll, kNarrow, kEither };

// How a combine of rank-major rows is called.
struct CallByRank {
  Way way = Way::kAtOnce;
  bool narrow = false, returns = false, sums = false, biased = false, no_host_sync = false;
  Kernel kernel = Kernel::kForAll;
};

// Threads of a block of the kernel for rows of 16 bits: enough for the row, and not the same on all ranks.
u32 threads_of(const Rank& r) {
  u32 least = (r.s.row_bytes / 32 + 63) / 64 * 64;
  return std::max(least, (r.operations + r.me) % 2 ? 128 : kWarps * kWave);
}

void launch_by_rank(Rank& r, const DecodeCombineArgs& a, const CallByRank& call, u32 phases) {
  bool either = call.kernel == Kernel::kEither && (r.operations / 2 + r.me) % 2 == 0;
  if (call.kernel == Kernel::kForAll || either || threads_of(r) > kWarps * kWave)
    return launch_combine(r, a, {call.way, call.narrow}, phases);
#if !TY_MASKS
  DecodeCombineArgs part = a;
  part.decode.phases = phases;
  model::launch(blocks_of(part.decode), threads_of(r), [=, &r] { ty_combine_rank_major_bf16(part, r.params()); });
#endif
}

DecodeCombineArgs combine_args(Rank& r, Given& mine, const CallByRank& call) {
  DecodeCombineArgs a{};
  CombineArgs& c = a.combine;
  c.c = r.common(signature(3));
  c.c.no_host_sync = call.no_host_sync, c.c.outcome = call.no_host_sync ? r.late : r.outcome;
  c.r = r.r, c.out = mine.out.data(), c.row_bytes = r.s.row_bytes, c.source_places = by_rank;
  c.bias0 = call.biased ? mine.bias.data() : nullptr;
  c.out_weights = call.returns ? mine.weights.data() : nullptr;
  c.returns_weights = !call.returns ? 0 : call.sums ? kWeightsOfAll : 1;
  MergeArgs& m = a.merge;
  m.x = mine.y.data(), m.weights = call.returns ? mine.back.data() : nullptr;
  m.rows = (u64)r.s.ranks * by_rank, m.row_bytes = r.s.row_bytes, m.topk = r.s.topk;
  a.sources = sources_of(r), a.decode = decode_of(r, call.way);
  return a;
}

void check_sums(const Ranks& ranks, const std::vector<Given>& given, const CallByRank& call) {
  Shape s = ranks[0]->s;
  Elements values{call.narrow};
  u32 width = s.row_bytes / values.bytes();
  Slots places = places_of(ranks);
  for (Rank* r : ranks) {
    const Given& mine = given[r->me];
    for (u32 t = 0; t < r->tokens; t++) {
      std::vector<float> sum(width), back(s.topk);
      bool empty = !call.biased;
      for (u32 i = 0; i < width && call.biased; i++) sum[i] = values.get(mine.bias.data(), (u64)t * width + i);
      for (u32 d : owners_of(*r, t)) {
        u64 at = (u64)places[r->me][t][d];
        for (u32 i = 0; i < width; i++) {
          float y = values.get(given[d].y.data(), at * width + i);
          sum[i] = empty ? y : sum[i] + y;
        }
        empty = false;
        for (u32 k = 0; k < s.topk; k++) {
          i64 e = r->topk[t * s.topk + k];
          if (call.sums || (e >= 0 && e / s.local() == d)) back[k] += given[d].back[at * s.topk + k];
        }
      }
      for (u32 i = 0; i < width; i++)
        same("sum of token " + std::to_string(t), values.get(mine.out.data(), (u64)t * width + i), values.round(sum[i]));
      for (u32 k = 0; k < s.topk && call.returns; k++)
        same("returned weight", mine.weights[t * s.topk + k], back[k]);
    }
    u64 written = (u64)r->tokens * s.row_bytes;
    same("rows behind the last token are left", all_are(0xaa, mine.out.data() + written, mine.out.size() - written), true);
  }
}

void combine_by_rank(const Ranks& ranks, std::mt19937& random, const CallByRank& call) {
  Shape s = ranks[0]->s;
  Elements values{call.narrow};
  u64 rows = (u64)s.ranks * by_rank, width = s.row_bytes / values.bytes();
  std::vector<Given> given(s.ranks);
  std::vector<DecodeCombineArgs> args;
  for (Rank* r : ranks) {
    Given& mine = given[r->me];
    mine.y.resize(rows * s.row_bytes), mine.bias.resize((u64)s.max_tokens * s.row_bytes);
    mine.out.assign((u64)s.max_tokens * s.row_bytes, 0xaa);
    mine.back.resize(rows * s.topk), mine.weights.assign((u64)s.max_tokens * s.topk, -7);
    for (u64 i = 0; i < rows * width; i++) values.set(mine.y.data(), i, (float)(int)(random() % 4099) / 3 - 600);
    for (u64 i = 0; i < s.max_tokens * width; i++) values.set(mine.bias.data(), i, (float)(random() % 77));
    for (float& w : mine.back) w = (float)(random() % 9999);
    args.push_back(combine_args(*r, mine, call));
  }
  if (call.way == Way::kHalves) {
    for (u32 i = 0; i < ranks.size(); i++) launch_by_rank(*ranks[i], args[i], call, kSends);
    on_all(ranks, random, [&](Rank& r, u32 i) { launch_by_rank(r, args[i], call, kReceives); });
  } else {
    on_all(ranks, random, [&](Rank& r, u32 i) { launch_by_rank(r, args[i], call, kSends | kReceives); });
  }
  for (Rank* r : ranks) {
    no_ended_wait(*r);
    same("combine", args[r->me].combine.c.cell->code, kGo);
    check_clean(*r, "behind a combine");
  }
  check_sums(ranks, given, call);
}

// One rank refuses a combine, of which the others have sent rows.
void refused_combine_by_rank(const Ranks& ranks, std::mt19937& random, const CallByRank& call) {
  for (Rank* r : ranks) bring(*r, by_rank, random);
  check_packed(ranks, dispatch_all(ranks, random, false, Way::kAtOnce));
  std::vector<Given> given(ranks.size());
  std::vector<DecodeCombineArgs> args;
  for (Rank* r : ranks) {
    given[r->me].y.resize((u64)r->s.ranks * by_rank * r->s.row_bytes, 1);
    given[r->me].out.resize((u64)r->s.max_tokens * r->s.row_bytes);
    args.push_back(combine_args(*r, given[r->me], call));
  }
  on_all(ranks, random, [&](Rank& r, u32 i) {
    if (i != 1) return launch_by_rank(r, args[i], call, kSends | kReceives);
    DecodeRefusalArgs a{args[i].combine.c, args[i].decode};
    a.c.verdict = kRefuseText;
    model::launch(1, kWarps * kWave, [=, &r] { ty_refuse_decode(a, r.params()); });
  });
  for (Rank* r : ranks) {
    same("refused combine", r->outcome->code, kRefused);
    check_clean(*r, "behind a combine that was refused");
  }
}

// A rank does not send its rows of a combine: the waits of the others are ended.
void ended_combine_by_rank(const Ranks& ranks, std::mt19937& random, const CallByRank& call) {
  // Each token has a row at each rank.
  for (Rank* r : ranks) {
    bring(*r, by_rank, random);
    for (u32 i = 0; i < r->tokens * r->s.topk; i++) r->topk[i] = i % r->s.topk % r->s.ranks * r->s.local() + i % r->s.topk / r->s.ranks;
  }
  check_packed(ranks, dispatch_all(ranks, random, false, Way::kAtOnce));
  std::vector<Given> given(ranks.size());
  std::vector<DecodeCombineArgs> args;
  for (Rank* r : ranks) {
    given[r->me].y.resize((u64)r->s.ranks * by_rank * r->s.row_bytes, 1);
    given[r->me].out.resize((u64)r->s.max_tokens * r->s.row_bytes);
    args.push_back(combine_args(*r, given[r->me], call));
  }
  std::thread host([&] {
    auto& waiting = model::at(&ranks[0]->report->waiting);
    while (waiting.load() == 0) model::rest(1000);
    for (Rank* r : ranks) model::at(r->abort).store(1);
  });
  on_all(ranks, random, [&](Rank& r, u32 i) {
    if (i != 1) launch_by_rank(r, args[i], call, kSends | kReceives);
  });
  host.join();
  for (Rank* r : ranks) {
    if (r->me != 1) {
      same("a wait of a combine is ended", r->report->ended, 2u);
      same("for a row or a head", r->report->phase == kPhaseCombineRows || r->report->phase == kPhaseEntry, true);
      same("of rank", r->report->peer, 1u);
      same("nothing more is entered", r->state->stopped, 1u);
    }
    // Rows may come behind a wait that was ended.
    DecodeArgs s = decode_of(*r, Way::kAtOnce);
    memset(r->control + s.rows, 0, (u64)kSlots * r->s.ranks * r->s.most() * s.row_pitch);
    ranks[1]->state->turn = ranks[0]->state->turn;
    *r->report = {}, *r->abort = 0, r->state->stopped = 0;
  }
}

void rounds_by_rank(const Ranks& ranks, std::mt19937& random, const std::vector<u32>& tokens, Way way,
                    bool no_host_sync) {
  for (u32 turn = 0; turn < 3; turn++) {
    for (Rank* r : ranks) {
      bring(*r, std::min(by_rank, tokens[(r->me + turn) % tokens.size()]), random);
      for (u32 i = 0; i < r->tokens * r->s.topk && turn == 1; i++) r->topk[i] = i % r->s.topk;
      if (turn == 2) bring_anything(*r, random);
    }
    auto args = dispatch_all(ranks, random, false, way, no_host_sync);
    check_packed(ranks, args);
    bool odd = turn % 2;
    combine_by_rank(ranks, random, {way, odd, turn > 0, turn == 2, !odd, no_host_sync});
    args = dispatch_all(ranks, random, true, way, no_host_sync);
    check_packed(ranks, args);
    combine_by_rank(ranks, random, {way, !odd, !odd, odd, odd, no_host_sync});
    for (Kernel kernel : {Kernel::kNarrow, Kernel::kEither})
      combine_by_rank(ranks, random, {way, true, false, false, (kernel == Kernel::kNarrow) == odd, no_host_sync, kernel});
  }
}

// The same operations with rank-major rows, by calls of two M.
void run_by_rank(const Ranks& ranks, std::mt19937& random, const std::vector<u32>& tokens, bool all) {
#if !TY_MASKS
  // The first change that concerns these operations.
  constexpr int kFirst = 19;
  if (model::mutant != 0 && model::mutant < kFirst) return;
  u32 most = ranks[0]->s.max_tokens;
  for (u32 m : {most, most > 2 ? most - 2 : most}) {
    by_rank = m;
    rounds_by_rank(ranks, random, tokens, Way::kAtOnce, m != most);
    rounds_by_rank(ranks, random, tokens, Way::kHalves, true);
  }
  by_rank = most;
  if (all && ranks.size() > 1) {
    late_blocks(ranks, random);
    two_at_once(ranks, random);
    refusals(ranks, random);
    another_m(ranks, random);
    refused_combine_by_rank(ranks, random, {});
    CallByRank narrow{.narrow = true, .kernel = Kernel::kNarrow};
    refused_combine_by_rank(ranks, random, narrow);
    ended_waits(ranks, random);
    ended_combine_by_rank(ranks, random, narrow);
  }
  by_rank = 0;
#endif
}
