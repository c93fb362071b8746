// A fabric of software ConnectX devices, one per rank, for kernels over the device API `ibgda` (Up): queue
// pairs of all ranks to all ranks, in weak memory. The devices are a stand-in for hardware.
#pragma once
#include "model.h"

// Requests that a queue pair has room for.
constexpr ty::u32 kDepth = 64;

struct HcaOptions {
  bool adaptive = false, host_rings = false, fence_signals = false;
  unsigned seed = 1, faulty = ~0u;
  const char* faults = nullptr;
};
inline HcaOptions hca_options;
inline HcaWorld* hca = nullptr;
inline std::atomic<unsigned> rings;

// A window of a rank. Windows are the same on all ranks.
struct HcaWindow {
  ty::u8* at;
  ty::u64 bytes;
};

// The part of the fabric that a rank uses.
struct Links {
  Up::Params params{};
  ty::u64* fault = room<ty::u64>(4);
};

// All memory of the queues of one rank.
struct HcaQueues {
  static constexpr ty::u64 kPage = 4096, kRegister = 0x800, kLine = 64;
  ty::u32 ranks, queues;
  ty::u8* slab = room<ty::u8>(bytes(), kPage);

  HcaQueues(ty::u32 ranks, ty::u32 queues) : ranks(ranks), queues(queues) {
    // A completion filled with 0xff means that nothing has completed.
    for (ty::u32 i = 0; i < ranks * queues; i++) memset(completion(i), 0xff, kLine);
  }
  // Registers; then records, completions and words of the host's thread, a line each; then requests.
  ty::u64 bytes() const { return kPage + ranks * queues * (3 * kLine + 64ull * kDepth); }
  ty::u8* lines(ty::u32 i) const { return slab + kPage + 3 * kLine * i; }
  ty::u8* record(ty::u32 i) const { return lines(i); }
  ty::u8* completion(ty::u32 i) const { return lines(i) + kLine; }
  ty::u8* word(ty::u32 i) const { return lines(i) + 2 * kLine; }
  ty::u8* requests(ty::u32 i) const { return slab + kPage + 3 * kLine * ranks * queues + 64ull * kDepth * i; }
};

inline void ring_hca(void* at, uint64_t value) {
  rings++;
  hca_ring(hca, (uint64_t)at, value);
}

// The thread of the host that rings for kernels, with `HOST_RINGS`.
struct HostRinger {
  std::vector<HcaQueues*> all;
  std::vector<std::vector<unsigned>> numbers;
  std::atomic<bool> stop{false};
  std::thread thread;

  void run() {
    std::vector<std::vector<uint64_t>> posted(all.size());
    for (size_t r = 0; r < all.size(); r++) posted[r].resize(numbers[r].size());
    while (!stop) {
      bool moved = false;
      for (size_t r = 0; r < all.size(); r++)
        for (unsigned i = 0; i < numbers[r].size(); i++) {
          uint64_t ready = model::at((uint64_t*)all[r]->word(i)).load(std::memory_order_acquire);
          if (ready == posted[r][i]) continue;
          posted[r][i] = ready, moved = true;
          unsigned next = ready & 0xffff;
          model::at((unsigned*)all[r]->record(i) + 1).store(__builtin_bswap32(next));
          uint64_t value = (uint64_t)__builtin_bswap32(numbers[r][i] << 8) << 32 | __builtin_bswap32(next << 8);
          ring_hca(all[r]->slab + HcaQueues::kRegister, value);
        }
      if (!moved) std::this_thread::yield();
    }
  }
};

// `Rank` has `me`, `links`, `totals` (signals of all queues), `signals()` of a queue, and `windows()`.
template <class Rank>
struct FabricOf {
  std::vector<HcaQueues*> all;
  HostRinger ringer;

  explicit FabricOf(std::vector<Rank*> ranks) {
    unsigned count = (unsigned)ranks.size();
    hca = hca_world(count, hca_options.adaptive, hca_options.seed, hca_options.faulty, hca_options.faults);
    if (hca == nullptr) fail("no world");
    model::weak.clear();
    model::ring = ring_hca;
    for (Rank* r : ranks) {
      all.push_back(new HcaQueues(count, kQueues));
      model::weak.push_back({all.back()->slab, all.back()->bytes()});
      make(*r, count);
    }
    for (Rank* r : ranks)
      for (Rank* peer : ranks) connect(*r, *peer);
    hca_start(hca);
    if (hca_options.host_rings) ringer.all = all, ringer.thread = std::thread([this] { ringer.run(); });
  }
  ~FabricOf() {
    ringer.stop = true;
    if (ringer.thread.joinable()) ringer.thread.join();
    hca_end(hca);
    hca = nullptr;
    model::weak.clear();
    for (HcaQueues* queues : all) free(queues->slab), delete queues;
  }

  // A key of the device, in the form in which requests name it.
  static Up::Key key(unsigned rank, const void* at, uint64_t bytes) {
    unsigned key = hca_register(hca, rank, (uint64_t)at, bytes);
    if (key == 0) fail("memory is refused");
    return {(uint64_t)at, __builtin_bswap32(key), 0};
  }

  void make(Rank& r, unsigned count) {
    HcaQueues& queues = *all[r.me];
    auto* made = room<Up::Queue>(count * kQueues);
    ringer.numbers.emplace_back();
    for (unsigned i = 0; i < count * kQueues; i++) {
      HcaQueueMemory at{(uint64_t)queues.requests(i), (uint64_t)queues.record(i), (uint64_t)queues.completion(i),
                        (uint64_t)queues.slab + HcaQueues::kRegister, kDepth};
      unsigned number = hca_queue(hca, r.me, &at);
      if (number == 0) fail("a queue pair is refused");
      ringer.numbers.back().push_back(number);
      ty::u8* bell = hca_options.host_rings ? queues.word(i) : (ty::u8*)at.register_;
      made[i] = Up::Queue{(uint4*)at.requests, (ty::u32*)at.record, (ty::u64*)bell,
                          (const ty::u32*)(at.completion + 60), number, kDepth - 1, {}, 0, 0, 0, 0, {}};
    }
    auto windows = r.windows();
    auto* local = room<Up::Key>(windows.size());
    for (size_t w = 0; w < windows.size(); w++) local[w] = key(r.me, windows[w].at, windows[w].bytes);
    Up::Params& p = r.links.params;
    p.queues = made, p.local = local;
    p.remote = room<Up::Key>(count * windows.size()), p.tables = room<Up::Key>(count);
    p.totals = r.totals;
    p.sink = key(r.me, room<ty::u64>(1), 8), p.fault = r.links.fault;
    p.peers = count, p.queue_count = kQueues, p.windows = (ty::u32)windows.size(), p.signals = r.signals();
    p.flags = (hca_options.fence_signals ? 1 : 0) | (hca_options.host_rings ? 2 : 0);
  }

  // Gives `r` the keys of a peer, and connects its queue pairs to the peer.
  void connect(Rank& r, Rank& peer) {
    Up::Params& p = r.links.params;
    const Up::Params& theirs = peer.links.params;
    auto* tables = const_cast<Up::Key*>(p.tables);
    auto* remote = const_cast<Up::Key*>(p.remote);
    tables[peer.me] = key(peer.me, peer.totals, 8ull * kQueues * peer.signals());
    for (unsigned w = 0; w < p.windows; w++) remote[peer.me * p.windows + w] = theirs.local[w];
    for (unsigned q = 0; q < kQueues; q++) {
      unsigned mine = p.queues[peer.me * kQueues + q].number, its = theirs.queues[r.me * kQueues + q].number;
      if (!hca_connect(hca, r.me, mine, peer.me, its)) fail("a connection is refused");
    }
  }
};
