// Blocks, warps and threads that post at once on shared queue pairs of a software ConnectX. The model delays
// payloads, requests, records and rings (weak.h). Options are words `name` or `name=value`.
#include "helpers.h"
#include "transport.cuh"

namespace up {
#include "up_device_api.cuh"
}  // namespace up
using Up = up::DeviceApi;
using namespace ty;

constexpr u32 kQueues = 1, kBlocks = 3, kWarps = 2;
// The bytes that a warp sends at once, and the places to which it sends: two that take turns.
constexpr u64 kBytes = 256, kPlaces = 2;

#include "hca.h"

struct Options {
  // `burst`: posts of each of the first `lanes` threads of a warp, by themselves.
  u32 ranks = 2, rounds = 60, burst = 0, lanes = kWave;
  // Only one warp of a rank posts.
  bool alone = false;
  u64 cap_ms = 300'000;
} options;

struct Rank {
  u32 me, ranks;
  u64 bytes = 2 * kPlaces * kBytes * ranks * kBlocks * kWarps + 8 * ranks;
  u8* window = room<u8>(bytes, 4096);
  u64 *totals = room<u64>(1024), *abort = room<u64>(1);
  WaitReport* report = room<WaitReport>(1);
  Links links{};

  // One for each warp and peer; then one for each peer, which threads raise by themselves.
  u32 channels() const { return ranks * kBlocks * kWarps; }
  u32 signals() const { return channels() + ranks; }
  std::vector<HcaWindow> windows() const { return {{window, bytes}}; }
  u64 source(u32 channel, u64 round) const { return (channel * kPlaces + round % kPlaces) * kBytes; }
  u64 target(u32 channel, u64 round) const { return source(channels() + channel, round); }
  u64 word(u32 peer) const { return 2 * kPlaces * kBytes * channels() + 8 * peer; }
};

u32 pattern(u32 from, u32 channel, u64 round, u32 i) { return from << 28 ^ channel << 20 ^ (u32)round << 6 ^ i; }

// The rounds of a warp with one peer: it sends a payload, and waits for the peer's payload. If a payload is not at
// its place when its signal is seen, this reports it.
void send_and_receive(const Rank& r, const Up& up, u32 peer, Guard& guard) {
  u32 number = blockIdx.x * kWarps + wave_id();
  u32 mine = peer * kBlocks * kWarps + number, its = r.me * kBlocks * kWarps + number;
  for (u64 round = 1; round <= options.rounds; round++) {
    if (lane_id() < kBytes / 16) {
      u32 i = lane_id() * 4;
      uint4 value{pattern(r.me, its, round, i), pattern(r.me, its, round, i + 1), pattern(r.me, its, round, i + 2),
                  pattern(r.me, its, round, i + 3)};
      store_16((uint4*)(r.window + r.source(mine, round) + lane_id() * 16), value);
    }
    // Every third round sends the payload and the signal by separate calls.
    At to{0, r.target(its, round)}, from{0, r.source(mine, round)};
    bool ok = true;
    if (round % 3 != 0) {
      ok = up.put_signal(Warp(), 0, peer, to, from, kBytes, Raise{its, 1}, guard);
    } else {
      ok = up.put(Warp(), 0, peer, to, from, kBytes, guard);
      if (lane_id() == 0) ok = ok && up.signal(0, peer, Raise{its, 1}, guard);
    }
    if (lane_id() == 0) ok = ok && wait_signal(up, 0, {1, peer, mine, round}, guard);
    if (!all(ok)) return;
    for (u32 i = lane_id(); i < kBytes / 4; i += kWave) {
      u32 found = ((volatile u32*)(r.window + r.target(mine, round)))[i];
      if (found != pattern(peer, mine, round, i)) fail("a payload came behind its signal, or another one did");
    }
    sync_wave();
  }
}

// Each thread posts by itself, without a pause.
void burst(const Rank& r, const Up& up, u32 peer, Guard& guard) {
  for (u32 i = 0; i < options.burst && lane_id() < options.lanes; i++) {
    bool ok = i % 16 == 0 ? up.signal(0, peer, Raise{r.channels() + r.me, 1}, guard)
                          : up.put_value(0, peer, At{0, r.word(r.me)}, 0x0102030405060708ull + i, guard);
    if (!ok) return;
  }
}

void kernel(const Rank& r) {
  if (options.alone && (blockIdx.x != 0 || wave_id() != 0)) return;
  Up up(r.links.params);
  Guard guard(r.abort, options.cap_ms * 1'000'000, r.report);
  for (u32 peer = 0; peer < r.ranks; peer++) burst(r, up, peer, guard);
  u64 expected = (u64)kBlocks * kWarps * options.lanes * ((options.burst + 15) / 16);
  // In pairs that meet: the peer's peer is this rank.
  for (u32 turn = 0; turn < r.ranks; turn++) send_and_receive(r, up, (turn + r.ranks - r.me) % r.ranks, guard);
  if (options.alone) {
    up.flush(Warp(), 0, guard);
    return;
  }
  sync_block();
  if (threadIdx.x == 0) up.submit(0);
  // Only after all other threads have sent.
  if (threadIdx.x == 0)
    for (u32 peer = 0; peer < r.ranks && expected != 0; peer++)
      wait_signal(up, 0, {1, peer, r.channels() + peer, expected}, guard);
  up.flush(Block(), 0, guard);
}

// Prints the failure of a rank: the fault record of its device, and the wait that a guard ended.
void report(const Rank& r) {
  const u64* fault = r.links.fault;
  if (fault[0] == 2)
    fprintf(stderr, "rank %u: peer %u, queue pair %#x, request %#x: syndrome %#x (%s)\n", r.me, (u32)(fault[1] >> 32),
            (u32)(fault[2] >> 32), (u32)fault[2], (u32)fault[3] & 0xff, hca_syndrome((u32)fault[3] & 0xff));
  if (r.report->ended == 2)
    fprintf(stderr, "rank %u: an ended wait: phase %u, peer %u, expected %llu, found %llu\n", r.me,
            (u32)r.report->phase, (u32)r.report->peer, r.report->expected, r.report->found);
}

// Whether a queue pair of a rank has an error completion. The host looks at all queue pairs, because kernels look only
// at those that they wait for (INV-7). Reports it once for each rank.
bool is_broken(const Rank& r, std::vector<bool>& reported) {
  for (u32 peer = 0; peer < r.ranks; peer++) {
    const Up::Queue& q = r.links.params.queues[peer];
    auto word = [&](int at) { return model::at((u32*)q.completion + at).load(std::memory_order_acquire); };
    if (word(0) >> 28 != 13) continue;
    if (!reported[r.me])
      fprintf(stderr, "rank %u: peer %u, queue pair %#x: the host finds syndrome %#x (%s)\n", r.me, peer, q.number,
              word(-2) >> 24, hca_syndrome(word(-2) >> 24));
    reported[r.me] = true;
    return true;
  }
  return false;
}

// The first rank whose wait ends, or whose queue pair breaks, ends the waits of all.
void watch(std::vector<Rank>& ranks, const std::atomic<bool>& over) {
  std::vector<bool> reported(ranks.size());
  while (!over) {
    for (Rank& r : ranks)
      if (is_broken(r, reported) || model::at(&r.report->ended).load() == 2)
        for (Rank& other : ranks) model::at(other.abort).store(1);
    model::rest(1000);
  }
}

void run() {
  std::vector<Rank> ranks;
  for (u32 i = 0; i < options.ranks; i++) ranks.push_back(Rank{i, options.ranks});
  std::vector<Rank*> all;
  for (Rank& r : ranks) all.push_back(&r);
  FabricOf<Rank> fabric(all);
  for (Rank& r : ranks) model::weak.push_back({r.window, r.bytes});
  std::atomic<bool> over{false};
  std::thread host([&] { watch(ranks, over); });
  std::vector<std::thread> running;
  for (Rank& r : ranks)
    running.emplace_back([&r] { model::launch(kBlocks, kWarps * kWave, [&r] { kernel(r); }); });
  for (auto& t : running) t.join();
  over = true;
  host.join();
  bool well = true;
  for (Rank& r : ranks) well &= r.report->ended == 0;
  for (Rank& r : ranks) report(r);
  if (!well) fail("it did not end well");
  for (Rank& r : ranks)
    for (u32 peer = 0; peer < r.ranks; peer++) {
      const Up::Queue& q = r.links.params.queues[peer];
      same("requests that are done", q.done, q.reserved);
      if (options.burst == 0) continue;
      u64 word;
      memcpy(&word, r.window + r.word(peer), 8);
      // Eight bytes of one value, never of two (INV-3).
      same("a value's upper bytes", word >> 16, 0x0102030405060708ull >> 16);
    }
  u64 posted = 0;
  for (Rank& r : ranks)
    for (u32 peer = 0; peer < r.ranks; peer++) posted += r.links.params.queues[peer].reserved;
  printf("all is well: %llu requests, %u rings\n", posted, rings.load());
}

int main(int count, char** arguments) {
  for (int i = 1; i < count; i++) {
    std::string word = arguments[i], name = word.substr(0, word.find('='));
    const char* value = name == word ? "" : arguments[i] + name.size() + 1;
    if (name == "ranks") options.ranks = (u32)atoi(value);
    else if (name == "rounds") options.rounds = (u32)atoi(value);
    else if (name == "burst") options.burst = (u32)atoi(value);
    else if (name == "alone") options.alone = true;
    else if (name == "lanes") options.lanes = (u32)atoi(value);
    else if (name == "cap_ms") options.cap_ms = (u64)atoi(value);
    else if (name == "seed") hca_options.seed = (unsigned)atoi(value);
    else if (name == "adaptive") hca_options.adaptive = true;
    else if (name == "host_rings") hca_options.host_rings = true;
    else if (name == "fence_signals") hca_options.fence_signals = true;
    else if (name == "faults") hca_options.faulty = 0, hca_options.faults = value;
    else if (name == "without") model::without = *value;
    else fail("found option " + word);
  }
  run();
}
