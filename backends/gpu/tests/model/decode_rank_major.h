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

// How a combine of rank-major rows is called.
struct CallByRank {
  Way way = Way::kAtOnce;
  bool narrow = false, returns = false, sums = false, biased = false, no_host_sync = false;
};

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
  Call how{call.way, call.narrow};
  if (call.way == Way::kHalves) {
    for (u32 i = 0; i < ranks.size(); i++) launch_combine(*ranks[i], args[i], how, kSends);
    on_all(ranks, random, [&](Rank& r, u32 i) { launch_combine(r, args[i], how, kReceives); });
  } else {
    on_all(ranks, random, [&](Rank& r, u32 i) { launch_combine(r, args[i], how, kSends | kReceives); });
  }
  for (Rank* r : ranks) {
    no_ended_wait(*r);
    same("combine", args[r->me].combine.c.cell->code, kGo);
    check_clean(*r, "behind a combine");
  }
  check_sums(ranks, given, call);
}

// One rank refuses a combine, of which the others have sent rows.
void refused_combine_by_rank(const Ranks& ranks, std::mt19937& random) {
  for (Rank* r : ranks) bring(*r, by_rank, random);
  check_packed(ranks, dispatch_all(ranks, random, false, Way::kAtOnce));
  std::vector<Given> given(ranks.size());
  std::vector<DecodeCombineArgs> args;
  for (Rank* r : ranks) {
    given[r->me].y.resize((u64)r->s.ranks * by_rank * r->s.row_bytes, 1);
    given[r->me].out.resize((u64)r->s.max_tokens * r->s.row_bytes);
    args.push_back(combine_args(*r, given[r->me], {}));
  }
  on_all(ranks, random, [&](Rank& r, u32 i) {
    if (i != 1) return launch_combine(r, args[i], {}, kSends | kReceives);
    DecodeRefusalArgs a{args[i].combine.c, args[i].decode};
    a.c.verdict = kRefuseText;
    model::launch(1, kWarps * kWave, [=, &r] { ty_refuse_decode(a, r.params()); });
  });
  for (Rank* r : ranks) {
    same("refused combine", r->outcome->code, kRefused);
    check_clean(*r, "behind a combine that was refused");
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
    refused_combine_by_rank(ranks, random);
    ended_waits(ranks, random);
  }
  by_rank = 0;
#endif
}
