// The probe of several ranks on the model of a GPU: copies, barriers and counts, over the device API of NVLink.
#include "cuda.h"
#include "probe.cu"

#include <string>

using namespace ty;

constexpr u32 kRanks = 3, kRows = 7, kRowBytes = 384, kBlocks = 2, kRooms = 1 << 20;
constexpr u64 kRoom = 4096;

[[noreturn]] void fail(const std::string& what) {
  fprintf(stderr, "%s\n", what.c_str());
  _exit(1);
}

struct Rank {
  u32 me;
  std::vector<u8> window = std::vector<u8>(kRooms + kRanks * kRoom);
  std::vector<u8> local = std::vector<u8>((kRanks - 1) * kRoom);
  u64 abort = 0, wrong = 0, times[2] = {};
  WaitReport report{};
};
Rank ranks[kRanks];
u64 windows[kRanks], signals[kRanks];

Up::Params params(const Rank& r) { return {windows, signals, kRanks, r.me, 8, 0}; }
ProbeArgs arguments(Rank& r) {
  ProbeArgs a{};
  a.abort = &r.abort, a.report = &r.report, a.cap_ns = 300'000'000'000, a.times = r.times;
  a.local = r.local.data(), a.wrong = &r.wrong, a.rooms = kRooms, a.room_bytes = kRoom;
  a.rows = kRows, a.row_bytes = kRowBytes, a.rank = r.me, a.ranks = kRanks;
  return a;
}

// Every rank at once, as processes are.
void all(std::function<void(Rank&)> run) {
  std::vector<std::thread> running;
  for (Rank& r : ranks) running.emplace_back([&] { run(r); });
  for (auto& t : running) t.join();
  for (Rank& r : ranks)
    if (r.report.ended) fail("rank " + std::to_string(r.me) + " has waited in vain");
}

u64 wrong(ProbeArgs (*of)(Rank&), u32 seed) {
  u64 sum = 0;
  for (Rank& r : ranks) {
    ProbeArgs a = of(r);
    a.seed = seed, r.wrong = 0;
    model::launch(1, 64, [&] { ty_probe_check(a, params(r)); });
    sum += r.wrong;
  }
  return sum;
}

ProbeArgs pushes(Rank& r) { return arguments(r); }
ProbeArgs combine_tiling(Rank& r) {
  ProbeArgs a = arguments(r);
  a.pull = 1;
  return a;
}

void copies(ProbeArgs (*of)(Rank&), u32 seed, u32& epoch, u64& left) {
  for (Rank& r : ranks) {
    ProbeArgs a = of(r);
    a.seed = seed;
    model::launch(1, 64, [&] { ty_probe_fill(a, params(r)); });
  }
  if (wrong(of, seed) == 0) fail("what was not copied is right");
  for (u32 launch = 0; launch < 2; launch++) {
    epoch++, left += kBlocks;
    all([&](Rank& r) {
      ProbeArgs a = of(r);
      a.epoch = epoch, a.left = left, a.seed = seed;
      model::launch(kBlocks, 64, [=, &r] { ty_probe_vectors(a, params(r)); });
    });
  }
  if (wrong(of, seed) != 0) fail("copies of seed " + std::to_string(seed) + " are wrong");
  if (wrong(of, seed + 1) == 0) fail("other rows are taken for these");
  for (Rank& r : ranks)
    if (r.times[1] <= r.times[0]) fail("a copy took no time");
}

int main() {
  for (u32 r = 0; r < kRanks; r++) ranks[r].me = r, windows[r] = (u64)ranks[r].window.data();
  u32 epoch = 0;
  u64 left = 0;
  copies(pushes, 1, epoch, left);
  copies(combine_tiling, 2, epoch, left);
  copies(pushes, 3, epoch, left);
  // One word of one row, at its receiver.
  ranks[1].window[kRooms + 2 * kRoom + 5 * kRowBytes + 8] ^= 1;
  if (wrong(pushes, 3) != 1) fail("one wrong word was counted as another number of them");

  // Few: each wait may cost a slice of a busy machine.
  constexpr u32 kRounds = 2, kWords = 3;
  all([&](Rank& r) {
    ProbeArgs a = arguments(r);
    a.epoch = epoch + 1, a.rounds = kRounds;
    model::launch(1, 64, [=, &r] { ty_probe_barriers(a, params(r)); });
  });
  epoch += 1 + kRounds;
  all([&](Rank& r) {
    ProbeArgs a = arguments(r);
    a.epoch = epoch + 1, a.rounds = kRounds, a.words = kWords;
    model::launch(1, 64, [=, &r] { ty_probe_counts(a, params(r)); });
  });
  for (Rank& r : ranks)
    for (u32 from = 0; from < kRanks; from++)
      for (u32 i = 0; i < kWords; i++) {
        u64 found = *word(Up(params(r)), r.me, kCounts + ((u64)from * kMostWords + i) * 8);
        if (found != ((u64)(epoch + 1 + kRounds) << 32 | i)) fail("a count did not arrive");
      }
  return 0;
}
