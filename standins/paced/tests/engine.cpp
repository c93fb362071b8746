// The engine of `paced` on the model of a GPU: a rank puts to itself, and threads of the host write the requests.
// The argument names a case. Exit code 1: the engine broke a promise.
#include "cuda.h"
#include "transport.cuh"
#include "request.cuh"
#include "jobs.cuh"
#include "engine.cu"

#include <unistd.h>

#include <random>
#include <string>

using namespace ty;

constexpr u32 kQueues = 5, kBlocks = 3, kRequests = 256;
constexpr u64 kHalf = 1 << 22, kRoom = kHalf / kQueues, kMs = 1000000;

alignas(64) u8 window_of_all[2 * kHalf];
u64 signals_of_all[kQueues];
u64 windows[1] = {(u64)window_of_all}, signals[1] = {(u64)signals_of_all};
Request requests[kQueues][kRequests];
u64 done[kQueues], taken[kQueues], stop_word;
Line lines[kQueues];
Wire wire;
std::atomic<u32> launches{0};

[[noreturn]] void fail(const std::string& what) {
  fprintf(stderr, "%s\n", what.c_str());
  _exit(1);
}

u64 now_done(u32 queue) { return __atomic_load_n(&done[queue], __ATOMIC_ACQUIRE); }

void wait_for(const u64* word, u64 count) {
  u64 since = now_ns();
  while (__atomic_load_n(word, __ATOMIC_ACQUIRE) < count) {
    if (now_ns() - since > 20000 * kMs) fail("the engine stands still");
    usleep(50);
  }
}
void wait_done(u32 queue, u64 count) { wait_for(&done[queue], count); }

void post(u32 queue, u64 number, u64 dst, u64 src, u64 bytes) {
  Request r{kPutSignal, 0, src, dst, bytes, queue, 1, 0, now_ns(), 0};
  Request* slot = &requests[queue][number % kRequests];
  memcpy(slot, &r, offsetof(Request, sequence));
  __atomic_store_n(&slot->sequence, number + 1, __ATOMIC_RELEASE);
}

PacerArgs arguments() {
  PacerArgs a{};
  a.stop = &stop_word, a.lines = lines, a.wire = &wire;
  a.latency = 4000, a.idle = 2 * kMs, a.most = 60000 * kMs, a.seed = 7;
  a.queues = kQueues, a.mask = kRequests - 1, a.signals = 1;
  return a;
}

// Puts of any length between any offsets: each arrives whole before its signal, and nothing else changes.
//
// A put is there once its signal is, and before it counts as done (INV-1): so a look behind both would miss a signal
// that comes first. Where a fault concerns the signal itself, the end of the put says that it is there.
void check_queue(u32 queue, u32 puts, u32 fault) {
  bool by_signal = fault == kNone || fault == kSignalFirst;
  std::mt19937 random(queue);
  u64 base = queue * kRoom;
  std::vector<u8> expected(kRoom);
  for (u32 i = 0; i < puts; i++) {
    u64 bytes = random() % 3 == 0 ? random() % 200 : random() % 40000;
    u64 src = random() % (kRoom - bytes), dst = random() % (kRoom - bytes);
    if (random() % 2) src &= ~15ull, dst &= ~15ull, bytes &= ~15ull;
    for (u64 k = 0; k < bytes; k++) expected[dst + k] = window_of_all[base + src + k] = (u8)random();
    post(queue, i, kHalf + base + dst, base + src, bytes);
    wait_for(by_signal ? &signals_of_all[queue] : &done[queue], i + 1);
    if (memcmp(window_of_all + kHalf + base, expected.data(), kRoom) != 0) fail("a put is not there, or more is");
    wait_done(queue, i + 1);
    bool is_raised = __atomic_load_n(&signals_of_all[queue], __ATOMIC_ACQUIRE) > i;
    if (fault == kWrongQueue && !is_raised) fail("a signal is not there");
    if (random() % 20 == 0) usleep(5000);
  }
}

void random_puts(u32 puts, u32 fault) {
  std::vector<std::thread> threads;
  // Signals of another queue would hide that those of this one are missing.
  u32 queues = fault == kWrongQueue ? 1 : kQueues;
  for (u32 q = 0; q < queues; q++) threads.emplace_back([=] { check_queue(q, puts, fault); });
  for (auto& t : threads) t.join();
  if (fault != kNone) return;
  if (wire.raised != kQueues * puts) fail("signals were not counted");
}

// Rows of all queues, many at once.
void rows() {
  constexpr u64 kRow = 7168, kRows = kRoom / kRow;
  std::mt19937 random(3);
  for (u64 k = 0; k < kHalf; k++) window_of_all[k] = (u8)random();
  for (u64 i = 0; i < kRows; i++)
    for (u32 q = 0; q < kQueues; q++) {
      u64 at = q * (kRoom & ~15ull) + i * kRow;
      post(q, i, kHalf + at, at, kRow);
    }
  for (u32 q = 0; q < kQueues; q++) {
    wait_for(&signals_of_all[q], kRows);
    u64 at = q * (kRoom & ~15ull);
    if (memcmp(window_of_all + kHalf + at, window_of_all + at, kRows * kRow) != 0) fail("a row is not there");
    wait_done(q, kRows);
  }
}

// A block without a request for long, beside one that always has some, still takes its own.
void quiet_queue() {
  std::atomic<bool> is_over{false};
  std::thread busy([&] {
    for (u64 i = 0; !is_over; i++) post(0, i, kHalf, 0, 64), wait_done(0, i < 32 ? 0 : i - 32);
  });
  usleep(300000);
  u64 since = now_ns();
  post(1, 0, kHalf + kRoom, kRoom, 64);
  while (now_done(1) == 0)
    if (now_ns() - since > 5000 * kMs) fail("a quiet queue waits for the blocks of others");
  is_over = true;
  busy.join();
}

// A launch does not end while a put has the wire for longer than a launch waits for work.
void long_put() {
  u64 before = launches;
  post(0, 0, kHalf, 0, 60000);
  usleep(400000);
  post(0, 1, kHalf, 0, 64);
  wait_done(0, 2);
  if (launches != before) fail("a launch has ended while a put had the wire");
}

int main(int, char** names) {
  std::string name = names[1];
  for (u32 q = 0; q < kQueues; q++) lines[q] = {requests[q], &done[q], &taken[q]};
  PacerArgs a = arguments();
  if (name == "paced") a.byte_cost = 1 << 20, a.spread = 20000;
  if (name == "short_launches") a.most = 3 * kMs;
  // 10 us a byte: 0.6 s of a put.
  if (name == "long_put") a.byte_cost = 10000ull << 20, a.idle = 200 * kMs;
  if (name == "signal_first") a.fault = kSignalFirst;
  if (name == "lost") a.fault = kLost;
  if (name == "done_early") a.fault = kDoneEarly;
  if (name == "wrong_queue") a.fault = kWrongQueue;
  std::atomic<bool> is_over{false};
  std::thread engine([&] {
    while (!is_over) {
      model::launch(kBlocks, (kCopyWarps + 2) * kWave, [&] { ty_paced(a, Up::Params{windows, signals, 1, 0, 8, 0}); });
      launches++;
      if (wire.left != 0 || wire.leaving != 0) fail("a launch does not end as the next one begins");
    }
  });
  if (name == "quiet_queue") quiet_queue();
  else if (name == "rows") rows();
  else if (name == "long_put") long_put();
  else random_puts(60, a.fault);
  is_over = true;
  engine.join();
  return 0;
}
