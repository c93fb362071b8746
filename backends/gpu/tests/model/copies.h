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
  CopyArgs c{(const u64*)(base + region.totals), 4, 0, {}};
  auto at = [&](u64 offset) { return (const u32*)(base + offset); };
  c.copies[0] = {at(region.ids), (u8*)ids.data(), rows * topk, all * topk, topk, 0, -1, kCopyWide | kCopyFill};
  c.copies[1] = {at(region.weights), (u8*)weights.data(), rows * topk, all * topk, topk, 0, 0, kCopyFill};
  c.copies[2] = {at(region.source), (u8*)tokens.data(), rows, all, 1, r.s.max_tokens, -1, kCopyFill};
  c.copies[3] = {at(region.rank_ends), (u8*)ends.data(), r.s.ranks, r.s.ranks, 1, 0, 0, 0};
  model::launch(2, kWarps * kWave, [=, &r] { ty_copy_out(c, r.params()); });
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
