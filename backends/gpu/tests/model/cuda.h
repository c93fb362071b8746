// A stand-in for a GPU: blocks, threads and memory for a host compiler; arch.cuh has the words of its
// dialect. A block is a thread of the system, its
// threads are fibers of it that change at barriers and waits. Slow, and it shows no races of threads
// of one block; what it shows is where bytes go, and that every wait ends.
#pragma once
#include <setjmp.h>
#include <time.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
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

// Threads of a warp.
constexpr unsigned kWave = 32;

struct Dim { unsigned x; };

// A group of fibers that meet: each brings a value, and sees those of all.
struct Meeting {
  unsigned size = 0, came = 0, left = 0;
  uint64_t turn = 0;
  std::vector<uint64_t> values;
};

// Contexts start fibers, and jumps change between them: those make no call of the system.
struct Fiber {
  ucontext_t start;
  jmp_buf at;
  std::unique_ptr<char[]> stack;
  bool begun = false, over = false;
  // It looks at memory again and again.
  bool polls = false;
  // It goes on once this is another.
  const uint64_t* turn = nullptr;
  uint64_t last_turn = 0;
};

// A block that runs on this thread of the system.
struct Block {
  Dim block, grid, size;
  std::vector<Fiber> fibers;
  std::vector<Meeting> warps;
  Meeting all;
  unsigned current = 0;
  jmp_buf scheduler;
  std::function<void()> kernel;
};
inline thread_local Block* here = nullptr;

inline Dim thread_index() { return {here->current}; }
inline void yield() {
  Block* block = here;
  if (_setjmp(block->fibers[block->current].at) == 0) _longjmp(block->scheduler, 1);
}
// For a look at what others may not have written yet.
inline void poll() {
  here->fibers[here->current].polls = true;
  yield();
}
// Lets others have the core: a block that has done nothing but look for a while, for longer.
inline void rest(unsigned idle) {
  if (idle < 200) return std::this_thread::yield();
  timespec moment = {0, 20000};
  nanosleep(&moment, nullptr);
}
// Runs a fiber until it yields or is over.
[[gnu::noinline]] inline void resume(Block& block, Fiber& fiber) {
  if (_setjmp(block.scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.at, 1);
  fiber.begun = true;
  setcontext(&fiber.start);
}

// Waits for all fibers of the group; returns their values. The last to leave opens the next round.
inline const std::vector<uint64_t>& meet(Meeting& m, unsigned index, uint64_t value) {
  while (m.left != 0) yield();
  uint64_t turn = m.turn;
  m.values[index] = value;
  if (++m.came == m.size) {
    m.came = 0, m.left = m.size, m.turn++;
  } else {
    Fiber& fiber = here->fibers[here->current];
    fiber.turn = &m.turn, fiber.last_turn = turn;
    yield();
    fiber.turn = nullptr;
  }
  m.left--;
  return m.values;
}
inline const std::vector<uint64_t>& meet_warp(uint64_t value) {
  unsigned i = here->current;
  return meet(here->warps[i / kWave], i % kWave, value);
}
inline const std::vector<uint64_t>& meet_block(uint64_t value) {
  return meet(here->all, here->current, value);
}

inline void entry() {
  Block* block = here;
  block->kernel();
  block->fibers[block->current].over = true;
  _longjmp(block->scheduler, 1);
}

inline void run_block(unsigned index, unsigned grid, unsigned threads, std::function<void()> kernel) {
  Block block{{index}, {grid}, {threads}, std::vector<Fiber>(threads), {}, {}, 0, {}, kernel};
  block.warps.resize(threads / kWave);
  for (auto& w : block.warps) w.size = kWave, w.values.resize(kWave);
  block.all.size = threads, block.all.values.resize(threads);
  here = &block;
  constexpr size_t kStack = 48 << 10;
  for (auto& f : block.fibers) {
    f.stack.reset(new char[kStack]);
    getcontext(&f.start);
    f.start.uc_stack.ss_sp = f.stack.get();
    f.start.uc_stack.ss_size = kStack;
    f.start.uc_link = nullptr;
    makecontext(&f.start, entry, 0);
  }
  for (unsigned left = threads, idle = 0; left > 0;) {
    bool moved = false;
    for (unsigned i = 0; i < threads; i++) {
      Fiber& fiber = block.fibers[i];
      if (fiber.over || (fiber.turn && *fiber.turn == fiber.last_turn)) continue;
      block.current = i;
      fiber.polls = false;
      resume(block, fiber);
      moved |= !fiber.polls;
      if (fiber.over) left--;
    }
    idle = moved ? 0 : idle + 1;
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

#define threadIdx (model::thread_index())
#define blockIdx (model::here->block)
#define blockDim (model::here->size)
#define gridDim (model::here->grid)

template <class A, class B>
auto min(A a, B b) { using C = std::common_type_t<A, B>; return (C)a < (C)b ? (C)a : (C)b; }
template <class A, class B>
auto max(A a, B b) { using C = std::common_type_t<A, B>; return (C)a < (C)b ? (C)b : (C)a; }
