// Operations that no caller waits for. Included in exchange.cpp.
#pragma once

// The same arguments again and again, as a graph launches them: T and all inputs change, and so do the
// records, signals and totals that are used.
void launches(std::vector<Rank*>& ranks, Layout layout, std::mt19937& random) {
  std::vector<DispatchArgs> args;
  for (Rank* r : ranks) {
    r->tokens = r->s.max_tokens;
    DispatchArgs a = dispatch_args(*r, layout, false);
    a.worst = 1, a.worst_experts = a.most_tokens() * std::min(r->s.topk, r->s.local()) + 64;
    a.tokens = r->tokens_word, a.c.no_host_sync = 1, a.c.outcome = r->late;
    a.host_counts = nullptr;
    args.push_back(a);
  }
  auto launch = [&](std::vector<DispatchArgs> those) {
    for (Rank* r : ranks) memset(r->arena, 0xee, kArenaBytes);
    return dispatch(ranks, those);
  };
  for (u32 turn = 0; turn < 3; turn++) {
    for (Rank* r : ranks) {
      u32 tokens = random() % (r->s.max_tokens + 1);
      bring(*r, turn == 2 ? 0 : tokens, random), *r->tokens_word = r->tokens;
    }
    auto outcomes = launch(args);
    check_all(ranks, args, outcomes);
    bool no_host_sync = turn % 3 != 0, pushes = has_row_per_token(layout) && !TY_PUTS && turn == 1;
    combine(ranks, outcomes, turn % 2, alike(ranks, layout, {no_host_sync, pushes, pushes}));
    // A replay has the T of its handle, whatever value the word has by now.
    std::vector<DispatchArgs> again;
    for (u32 d = 0; d < ranks.size(); d++) {
      *ranks[d]->tokens_word = 1;
      again.push_back(args[d]);
      again[d].c = ranks[d]->common(signature(2, layout)), again[d].replay = 1;
    }
    outcomes = launch(again);
    check_all(ranks, again, outcomes);
  }
  // A failed operation is reported by itself, and no later one is entered: no rank's memory is
  // touched.
  for (u32 problem : {kNoExpert, kTooMany}) {
    for (Rank* r : ranks) bring(*r, r->s.max_tokens, random), *r->tokens_word = r->tokens;
    if (problem == kTooMany) *ranks[0]->tokens_word = ranks[0]->s.max_tokens + 1;
    if (problem == kNoExpert) ranks[0]->topk[1] = ranks[0]->s.experts;
    launch(args);
    *ranks[0]->tokens_word = ranks[0]->tokens, ranks[0]->topk[1] = -1;
    // The state that an older, successful operation leaves.
    for (const DispatchArgs& a : args) a.c.cell->code = kGo;
    launch(args);
    for (const DispatchArgs& a : args) same("the cell of what is not entered", a.c.cell->code, 0u);
    for (Rank* r : ranks) {
      same("a failure", r->late->code, kRefused);
      same("of rank", r->late->rank, 0u);
      same("for its routing", r->late->verdict, kRefuseInput);
      same("the problem", ((u32*)r->late->text)[1] & 0xff, problem);
      same("all stop", r->state->stopped, 1u);
      same("no byte is written", all_are(0xee, r->arena, kStagingAt), true);
      *r->late = {}, r->state->stopped = 0;
    }
  }
}
