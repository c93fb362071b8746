// A stand-in for a GPU: CUDA's words for a host compiler. A block is a thread of the system, its
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
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace model {

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
  return meet(here->warps[i / 32], i % 32, value);
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
  block.warps.resize(threads / 32);
  for (auto& w : block.warps) w.size = 32, w.values.resize(32);
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

inline void __syncthreads() { model::meet_block(0); }
inline int __syncthreads_and(int ok) {
  int all = 1;
  for (uint64_t v : model::meet_block(ok != 0)) all &= (int)v;
  return all;
}
inline int __syncthreads_or(int any) { return !__syncthreads_and(!any); }
inline void __syncwarp() { model::meet_warp(0); }
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = model::meet_warp(bits)[lane % 32];
  memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  unsigned lane = model::here->current % 32;
  return __shfl_sync(mask, value, (int)(lane < by ? lane : lane - by));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int other) {
  return __shfl_sync(mask, value, (int)(model::here->current % 32) ^ other);
}
inline unsigned __ballot_sync(unsigned, int set) {
  unsigned bits = 0;
  const auto& values = model::meet_warp(set != 0);
  for (unsigned i = 0; i < 32; i++) bits |= (unsigned)values[i] << i;
  return bits;
}
inline int __any_sync(unsigned, int set) { return __ballot_sync(~0u, set) != 0; }
inline int __all_sync(unsigned, int set) { return __ballot_sync(~0u, set) == ~0u; }
inline unsigned __match_any_sync(unsigned, int value) {
  unsigned bits = 0;
  const auto& values = model::meet_warp((uint64_t)(int64_t)value);
  for (unsigned i = 0; i < 32; i++) bits |= (unsigned)(values[i] == (uint64_t)(int64_t)value) << i;
  return bits;
}

inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_system() { __threadfence(); }
template <class T, class V>
T atomicAdd(T* at, V value) { return model::at(at).fetch_add((T)value); }
template <class T, class V>
T atomicOr(T* at, V value) { return model::at(at).fetch_or((T)value); }
template <class T, class V>
T atomicMin(T* at, V value) {
  T old = model::at(at).load();
  while (old > (T)value && !model::at(at).compare_exchange_weak(old, (T)value)) {}
  return old;
}
inline unsigned atomicInc(unsigned* at, unsigned most) {
  unsigned old = model::at(at).load();
  while (!model::at(at).compare_exchange_weak(old, old >= most ? 0 : old + 1)) {}
  return old;
}
template <class T>
T atomicCAS(T* at, T from, T to) {
  model::at(at).compare_exchange_strong(from, to);
  return from;
}

inline void __nanosleep(unsigned) { model::yield(); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline unsigned __ffs(unsigned v) { return (unsigned)__builtin_ffs((int)v); }
template <class T>
T __ldcg(const T* at) { return *at; }
inline unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
inline float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline int __float2int_rn(float f) { return (int)std::nearbyint(f); }
template <class A, class B>
auto min(A a, B b) { using C = std::common_type_t<A, B>; return (C)a < (C)b ? (C)a : (C)b; }
template <class A, class B>
auto max(A a, B b) { using C = std::common_type_t<A, B>; return (C)a < (C)b ? (C)b : (C)a; }
