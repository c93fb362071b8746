// Low-latency combines whose partial rows travel in LogFMT-10, over rows of whole and of single chunks. Included in
// decode.cpp.
#pragma once

void coded_rounds(const Ranks& ranks, std::mt19937& random, std::vector<u32> tokens, Way way, bool no_host_sync) {
  for (u32 turn = 0; turn < 3; turn++) {
    for (Rank* r : ranks) bring(*r, tokens[(r->me + turn) % tokens.size()], random);
    auto args = dispatch_all(ranks, random, false, way, no_host_sync);
    check_packed(ranks, args);
    Call call{way, true, turn == 0, turn != 1, turn == 2, no_host_sync};
    call.coded = true;
    combine_all(ranks, random, args, call);
    call.weighted = call.late = true;
    combine_all(ranks, random, args, call);
    // Plain rows find a free inbox behind encoded ones.
    call.coded = false;
    combine_all(ranks, random, args, call);
  }
}

void run_coded(const Shape& shape, std::vector<u32> tokens, bool all) {
  Ranks ranks = all_ranks(shape);
  std::mt19937 random(shape.ranks * 100 + shape.topk);
  Fabric fabric(ranks);
  coded_rounds(ranks, random, tokens, Way::kAtOnce, false);
  coded_rounds(ranks, random, tokens, Way::kHalves, true);
  if (!all) return;
  coded_rounds(ranks, random, tokens, Way::kAtOnce, true);
  for (bool late : {false, true}) refused_combine(ranks, random, late, true);
  coded_rounds(ranks, random, tokens, Way::kHalves, true);
}

void main_coded(const std::string& what) {
  if (what == "values") return convert_rows();
  if (what == "few") {
    run_coded({2, 8, 3, 1024, 1, 3, 1 << 20}, {3, 2}, true);
    run_coded({2, 4, 2, 4096, 1, 2, 1 << 20}, {2, 1}, false);
    return;
  }
  if (what == "least") return run_coded({2, 8, 3, 1024, 1, 2, 1 << 20}, {2, 1}, false);
  run_coded({3, 12, 4, 3072, 1, 8, 1 << 20}, {8, 0, 5}, true);
  run_coded({2, 8, 3, 4096, 1, 6, 1 << 20}, {5, 6}, true);
  if (model::mutant != 0) return;
  // More pieces than a block has threads: two of some threads.
  run_coded({2, 4, 2, 14336, 1, 3, 1 << 20}, {3, 2}, true);
  run_coded({2, 4, 2, 16384, 1, 2, 1 << 20}, {2, 2}, false);
  run_coded({1, 4, 2, 1024, 1, 5, 1 << 20}, {5}, false);
}
