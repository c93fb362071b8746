// The small arrays of an output: counts of experts on the host, and copies for a caller. Included in exchange.cpp.
#pragma once

// The counts that a kernel gave the host.
void check_host_counts(const Rank& r, const DispatchArgs& a, const Region& region) {
  if (!a.host_counts) return;
  const u32* counts = (const u32*)(r.arena + a.region + region.expert_counts);
  for (u32 e = 0; e < r.s.local(); e++)
    same("rows of an expert, for the host", a.host_counts[e], (u64)a.c.ticket << 32 | counts[e]);
}

// Copies of flat arrays with `extra` more rows than arrived, or than the output has.
void check_copies(Rank& r, const DispatchArgs& a, const Region& region, const Outcome& outcome, u64 extra) {
  u8* base = r.arena + a.region;
  u64 arrived = outcome.tokens, rows = a.worst ? a.most_tokens() : arrived, all = rows + extra;
  u32 topk = r.s.topk;
  std::vector<i64> ids(all * topk + 1, 77);
  std::vector<float> weights(all * topk + 1, 77);
  std::vector<u32> tokens(all + 1, 77), ends(r.s.ranks + 1, 77);
  u32 columns = r.s.scale_words;
  std::vector<u32> scales(columns * all + 1, 77);
  CopyArgs c{(const u64*)(base + region.totals), columns > 0 ? 5u : 4u, 0, {}};
  auto at = [&](u64 offset) { return (const u32*)(base + offset); };
  c.copies[0] = {at(region.ids), (u8*)ids.data(), rows * topk, all * topk, topk, 0, -1, kCopyWide | kCopyFill};
  c.copies[1] = {at(region.weights), (u8*)weights.data(), rows * topk, all * topk, topk, 0, 0, kCopyFill};
  c.copies[2] = {at(region.source), (u8*)tokens.data(), rows, all, 1, r.s.max_tokens, -1, kCopyFill};
  c.copies[3] = {at(region.rank_ends), (u8*)ends.data(), r.s.ranks, r.s.ranks, 1, 0, 0, 0};
  c.copies[4] = {at(region.scales), (u8*)scales.data(), rows * columns, all * columns, columns, 0, 0, kCopyColumns};
  model::launch(2, kWarps * kWave, [=, &r] { ty_copy_out(c, r.params()); });
  for (u64 i = 0; i < all * columns; i++) {
    u64 row = i % all, column = i / all;
    same("a copied scale", scales[i], row < rows ? at(region.scales)[row * columns + column] : 77u);
  }
  same("scales behind the room", scales.back(), 77u);
  for (u64 i = 0; i < all * topk; i++) {
    bool is_there = i < arrived * topk;
    same("a copied id", ids[i], is_there ? (i64)(i32)at(region.ids)[i] : -1);
    same("a copied weight", weights[i], is_there ? ((const float*)at(region.weights))[i] : 0);
  }
  for (u64 i = 0; i < all; i++)
    same("a copied token", tokens[i], i < arrived ? at(region.source)[i] % r.s.max_tokens : ~0u);
  for (u32 s = 0; s < r.s.ranks; s++) same("a copied end", ends[s], at(region.rank_ends)[s]);
  same("ids behind the room", ids.back(), 77);
  same("weights behind the room", weights.back(), 77);
  same("tokens behind the room", tokens.back(), 77u);
  same("ends behind the room", ends.back(), 77u);
}

// Counts of the routing of a rank, with ids that are no experts.
void check_routing_counts(Rank& r) {
  u32 topk = r.s.topk, tokens = r.tokens;
  std::vector<i64> ids(r.topk.begin(), r.topk.begin() + tokens * topk);
  if (tokens > 1) ids[0] = r.s.experts, ids[topk] = -9;
  std::vector<u32> ranks(r.s.ranks + 1), experts(r.s.experts + 1), of_ranks = ranks, of_experts = experts;
  std::vector<u8> is_in(tokens * r.s.ranks + 1, 7), expected(is_in.size() - 1);
  for (u32 i = 0; i < tokens * topk; i++) {
    if (ids[i] < 0 || ids[i] >= r.s.experts) continue;
    of_experts[ids[i]]++;
    u8& there = expected[i / topk * r.s.ranks + ids[i] / r.s.local()];
    of_ranks[ids[i] / r.s.local()] += there == 0;
    there = 1;
  }
  CountArgs c{ids.data(), ranks.data(), experts.data(), is_in.data(), tokens, topk, r.s.experts, r.s.ranks, 0};
  model::launch(2, kWarps * kWave, [=, &r] { ty_count_routing(c, r.params()); });
  same("counts of ranks", ranks == of_ranks, true);
  same("counts of experts", experts == of_experts, true);
  same_bytes("the map of ranks", is_in.data(), expected.data(), expected.size());
  same("the map behind its end", is_in.back(), 7);
}
