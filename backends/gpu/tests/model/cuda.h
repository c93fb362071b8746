// A stand-in for a GPU: blocks, threads and memory for a host compiler; arch.cuh has the words of its
// dialect. A block is a thread of the system, and its threads are fibers that switch at barriers and
// waits. It is slow, and it shows no races of threads of one block; it shows where bytes go, and that
// every wait ends.
#pragma once
#include <time.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__ static thread_local

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace model {

// Threads of a warp: 32 of CUDA's, 64 of a wavefront of CDNA.
#ifndef MODEL_WAVE
#define MODEL_WAVE 32
#endif
constexpr unsigned kWave = MODEL_WAVE;

// Whether warps run in lockstep, as wavefronts do: see `word`.
#ifndef MODEL_LOCKSTEP
#define MODEL_LOCKSTEP 0
#endif
constexpr bool kLockstep = MODEL_LOCKSTEP != 0;

// The change to the kernels that a test switches on; 0: none. See exchange.rs.
inline int mutant = 0;

struct Dim { unsigned x; };

// A meeting of a group of fibers: each has a value, and sees the values of all.
struct Meeting {
  unsigned size = 0;
  std::vector<uint64_t> values;
  // Of the values that are not 0: their number, and the first 64 members that have one.
  unsigned set = 0;
  uint64_t members = 0;
};

// Whether the run has all that is left out of a default run (`cargo xtask test --all`).
inline bool runs_all() { return getenv("TOKENYARD_TEST_ALL") != nullptr; }

// A group of fibers that meet again and again. Two meetings take turns: a member may still read the last one while
// others come to the next, and none comes to the one behind that before all have come to the next.
struct Group {
  Meeting meetings[2];
  unsigned came = 0;
  uint64_t turn = 0;

  explicit Group(unsigned size) {
    for (Meeting& m : meetings) m.size = size, m.values.resize(size);
  }
};

// A store that is held back: to memory, or to a register of another device.
struct Held {
  unsigned char* to;
  unsigned bytes;
  bool is_register;
  unsigned char value[16];
};

// A place in the program: the addresses of the calls that lead to it, the innermost one first. Equal places have
// equal sums.
struct Place {
  uint64_t sum = 0;
  unsigned depth = 0;
  uintptr_t calls[kLockstep ? 64 : 1];

  // Empty places are behind all others.
  [[gnu::optimize("O2")]] bool is_behind(const Place& other) const {
    if (sum == other.sum) return false;
    unsigned both = std::min(depth, other.depth);
    for (unsigned i = 1; i <= both; i++)
      if (calls[depth - i] != other.calls[other.depth - i]) return calls[depth - i] < other.calls[other.depth - i];
    return depth < other.depth;
  }
};

// The memory of the compiler's own jump. It makes no system call, and the compiler saves the registers that are in use.
using Jump = void*[5];

// A context starts fibers, and jumps switch between them. The first members are those that a switch reads of other
// fibers.
struct Fiber {
  bool begun = false, over = false;
  // It polls memory again and again.
  bool polls = false;
  // It continues once this value has changed.
  const uint64_t* turn = nullptr;
  uint64_t last_turn = 0;
  // In lockstep. Empty before its first word.
  Place where{};
  char* stack = nullptr;
  Jump at{};
  // Stores that other devices do not see yet, where memory is weak (weak.h).
  std::vector<Held> held{};

  bool waits() const { return turn && *turn == last_turn; }
};

// The turns of the threads of a warp.
struct Turns {
  uint64_t count = 0;
  bool taken = false;
};

// A block that runs on this thread of the system.
struct Block {
  Dim block, grid, size;
  std::vector<Fiber> fibers;
  std::vector<Group> warps;
  // Of each warp: stores that other devices do not see yet, and that its lanes know of since they met.
  std::vector<std::vector<Held>> shared;
  std::vector<Turns> turns;
  Group all;
  std::function<void()> kernel;
  unsigned current = 0;
  // Of the round that runs, in which each fiber has a turn: whether one did more than poll.
  bool moved = false;
  // Fibers that are not over.
  unsigned left = size.x;
  Jump scheduler{};
  // Starts one fiber after the other: to fill in a context for each costs a system call.
  ucontext_t start{};
};
inline thread_local Block* here = nullptr;
constexpr size_t kStack = kLockstep ? 192 << 10 : 48 << 10;
// The distance of stacks. Stacks a multiple of pages apart would share a few lines of the cache.
constexpr size_t kPitch = kStack + 5 * 64;

inline Dim thread_index() { return {here->current}; }
// Defined below.
[[noreturn]] void run_next(Block& block, unsigned first);
// Lets the fibers behind this one continue, then those of the next round.
inline void yield() {
  Block* block = here;
  Fiber& fiber = block->fibers[block->current];
  if (__builtin_setjmp(fiber.at) != 0) return;
  block->moved |= !fiber.polls;
  run_next(*block, block->current + 1);
}
// Whether a fiber may continue where warps run in lockstep: no other of its warp is further behind. So
// lanes that have left a loop wait for those that have not, as where control flow of a wavefront joins
// again. Lanes that wait for each other are at one place, and lanes that are over have no place.
[[gnu::optimize("O2")]] inline bool is_last(const Block& block, unsigned index) {
  if (!kLockstep) return true;
  unsigned first = index / kWave * kWave;
  for (unsigned i = first; i < first + kWave; i++) {
    const Fiber& other = block.fibers[i];
    if (!other.over && !other.waits() && other.where.is_behind(block.fibers[index].where)) return false;
  }
  return true;
}
// Notes the place of the calling fiber. In a function that is compiled without optimisation, code that runs
// later lies behind code that runs earlier, except for the jump back to a loop's start. So compare two lanes
// in the outermost function in which they differ: the lane with the lower address is behind.
[[gnu::noinline, gnu::optimize("O2", "no-omit-frame-pointer")]] inline void note_place(Fiber& fiber) {
  Place& where = fiber.where;
  where.sum = 1, where.depth = 0;
  const uintptr_t low = (uintptr_t)fiber.stack, high = low + kStack - 2 * sizeof(uintptr_t);
  const uintptr_t* frame = (const uintptr_t*)__builtin_frame_address(0);
  while ((uintptr_t)frame > low && (uintptr_t)frame < high) {
    if (where.depth == std::size(where.calls)) abort();
    where.calls[where.depth++] = frame[1];
    where.sum = (where.sum ^ frame[1]) * 0x9e3779b97f4a7c15;
    if (frame[0] <= (uintptr_t)frame) break;
    frame = (const uintptr_t*)frame[0];
  }
}
// Before each access to memory that other devices see. In lockstep, lanes that are behind come
// first.
inline void word() {
  if (!kLockstep) return;
  note_place(here->fibers[here->current]);
  while (!is_last(*here, here->current)) yield();
}
// Defined in weak.h.
inline void drain();
inline void drain_some();
// For a read of a word that others may not have written yet.
inline void poll() {
  drain_some();
  if (kLockstep) note_place(here->fibers[here->current]);
  here->fibers[here->current].polls = true;
  yield();
}
// Yields the core: for longer, if a block has only polled for a while.
inline void rest(unsigned idle) {
  if (idle < 20) return std::this_thread::yield();
  timespec moment = {0, 20000 * std::min(1 + (long)idle / 50, 20l)};
  nanosleep(&moment, nullptr);
}
// Whether a rank refuses the operation that runs.
inline std::atomic<bool> refuses{false};
// Holds this thread back for a moment, if it is of rank 0; for longer where a rank refuses, since that one has to find
// the rest meanwhile. Other threads of the block go on.
inline void hold_back(unsigned rank) {
  auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(refuses ? 40 : 2);
  while (rank == 0 && std::chrono::steady_clock::now() < end) yield();
}
// The same for the first thread of each block, while a change to the kernels is switched on.
inline void come_late(unsigned rank) {
  if (mutant != 0 && here->current == 0 && !refuses) hold_back(rank);
}
inline void entry();
[[noreturn]] inline void start(Block& block, const Fiber& fiber) {
  block.start.uc_stack.ss_sp = fiber.stack;
  block.start.uc_stack.ss_size = kStack;
  block.start.uc_link = nullptr;
  makecontext(&block.start, entry, 0);
  setcontext(&block.start);
  abort();
}
// Continues the first fiber from `first` that need not wait; where there is none, the round is over.
[[gnu::noinline]] inline void run_next(Block& block, unsigned first) {
  for (unsigned i = first; i < block.size.x; i++) {
    Fiber& fiber = block.fibers[i];
    if (fiber.over || fiber.waits() || !is_last(block, i)) continue;
    block.current = i;
    fiber.polls = false;
    // The stack of a later one is in the cache when its turn comes.
    if (i + 4 < block.size.x) __builtin_prefetch(block.fibers[i + 4].at[2]);
    if (fiber.begun) __builtin_longjmp(fiber.at, 1);
    fiber.begun = true;
    start(block, fiber);
  }
  __builtin_longjmp(block.scheduler, 1);
}
// Gives each fiber a turn.
[[gnu::noinline]] inline void run_round(Block& block) {
  block.moved = false;
  if (__builtin_setjmp(block.scheduler) == 0) run_next(block, 0);
}

// Rounds of all blocks in which a fiber did more than poll.
inline std::atomic<uint64_t> moves{0};
// Ends the process, with a message, once no fiber of any block has moved for 5 seconds.
inline void fail_when_all_wait(void (*fail)()) {
  std::thread([=] {
    uint64_t seen = 0;
    for (unsigned still = 0; still < 10; still++) {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      if (seen != moves) still = 0;
      seen = moves;
    }
    fail();
  }).detach();
}

// Waits for all fibers of the group. The result holds until this fiber comes to the next meeting.
inline const Meeting& meet(Group& group, unsigned index, uint64_t value) {
  Fiber& fiber = here->fibers[here->current];
  if (kLockstep) note_place(fiber);
  uint64_t turn = group.turn;
  Meeting& m = group.meetings[turn % 2];
  if (group.came == 0) m.set = 0, m.members = 0;
  m.values[index] = value;
  m.set += value != 0;
  if (value != 0 && index < 64) m.members |= 1ull << index;
  if (++group.came == m.size) {
    group.came = 0, group.turn++;
    return m;
  }
  fiber.turn = &group.turn, fiber.last_turn = turn;
  yield();
  fiber.turn = nullptr;
  return m;
}
inline const Meeting& meet_warp(uint64_t value) {
  unsigned i = here->current;
  return meet(here->warps[i / kWave], i % kWave, value);
}
inline const Meeting& meet_block(uint64_t value) {
  return meet(here->all, here->current, value);
}

// Runs a body of the lanes that call it in turn, as a wavefront does.
template <class Body>
bool in_turn(Body body) {
  if (!kLockstep) return body();
  word();
  Turns& turns = here->turns[here->current / kWave];
  Fiber& fiber = here->fibers[here->current];
  while (turns.taken) {
    fiber.turn = &turns.count, fiber.last_turn = turns.count;
    yield();
    fiber.turn = nullptr;
  }
  turns.taken = true;
  bool well = body();
  turns.taken = false, turns.count++;
  return well;
}

inline void entry() {
  Block* block = here;
  block->kernel();
  drain();
  block->fibers[block->current].over = true;
  block->moved = true, block->left--;
  run_next(*block, block->current + 1);
}

// Stacks of the fibers of a block. Those of blocks that are over serve later ones: fresh memory takes long.
class Stacks {
 public:
  explicit Stacks(unsigned fibers) : bytes_(fibers * kPitch) {
    std::lock_guard lock(mutex());
    std::vector<Memory>& free = of(bytes_);
    if (free.empty()) {
      memory_.reset(new char[bytes_]);
    } else {
      memory_ = std::move(free.back());
      free.pop_back();
    }
  }
  ~Stacks() {
    std::lock_guard lock(mutex());
    of(bytes_).push_back(std::move(memory_));
  }
  char* operator[](unsigned fiber) const { return memory_.get() + fiber * kPitch; }

 private:
  using Memory = std::unique_ptr<char[]>;
  static std::mutex& mutex() {
    static std::mutex mutex;
    return mutex;
  }
  static std::vector<Memory>& of(size_t bytes) {
    static std::map<size_t, std::vector<Memory>> all;
    return all[bytes];
  }

  size_t bytes_;
  Memory memory_;
};

inline void run_block(unsigned index, unsigned grid, unsigned threads, std::function<void()> kernel) {
  unsigned warps = threads / kWave;
  Block block{.block = {index},
              .grid = {grid},
              .size = {threads},
              .fibers = std::vector<Fiber>(threads),
              .warps = std::vector<Group>(warps, Group(kWave)),
              .shared = std::vector<std::vector<Held>>(warps),
              .turns = std::vector<Turns>(warps),
              .all = Group(threads),
              .kernel = std::move(kernel)};
  here = &block;
  Stacks stacks(threads);
  for (unsigned i = 0; i < threads; i++) block.fibers[i].stack = stacks[i];
  getcontext(&block.start);
  for (unsigned idle = 0; block.left > 0;) {
    run_round(block);
    idle = block.moved ? 0 : idle + 1;
    if (block.moved) moves++;
    // Also where it has moved: blocks take turns, which lets a missing wait show.
    rest(idle);
  }
  here = nullptr;
}

// Runs a kernel to its end.
inline void launch(unsigned blocks, unsigned threads, std::function<void()> kernel) {
  std::vector<std::thread> running;
  for (unsigned b = 0; b < blocks; b++)
    running.emplace_back([=] { run_block(b, blocks, threads, kernel); });
  for (auto& t : running) t.join();
}

template <class T>
std::atomic<T>& at(T* word) { return *reinterpret_cast<std::atomic<T>*>(word); }

// A pointer as a kernel sees it.
template <class T>
std::atomic<T>& seen(T* word) {
  model::word();
  return at(word);
}

inline uint32_t bf16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t bf16x2(float low, float high) { return bf16(low) | bf16(high) << 16; }
inline float from_f16(uint16_t bits) {
  _Float16 half;
  memcpy(&half, &bits, 2);
  return (float)half;
}
inline uint32_t f16x2(float low, float high) {
  _Float16 halves[2] = {(_Float16)low, (_Float16)high};
  uint32_t bits;
  memcpy(&bits, halves, 4);
  return bits;
}

}  // namespace model

#include "weak.h"

#define threadIdx (model::thread_index())
#define blockIdx (model::here->block)
#define blockDim (model::here->size)
#define gridDim (model::here->grid)

template <class A, class B>
auto min(A a, B b) { using C = std::common_type_t<A, B>; return (C)a < (C)b ? (C)a : (C)b; }
template <class A, class B>
auto max(A a, B b) { using C = std::common_type_t<A, B>; return (C)a < (C)b ? (C)b : (C)a; }
