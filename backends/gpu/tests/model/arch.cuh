// The dialect of the model: the words of device/common/arch.cuh for a host compiler, over fibers (cuda.h). A wait
// that polls again lets the other fibers of its block continue.
#pragma once
#include "cuda.h"

namespace ty {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 kWave = model::kWave;
using Lanes = std::conditional_t<kWave == 64, u64, u32>;
constexpr Lanes kAllLanes = ~Lanes(0);

// Inline: only those that a model launches are compiled.
#define TY_KERNEL(threads) inline void
#define TY_KERNEL_ALONE(threads) inline void
#define TY_KERNEL_PAIRED(threads) inline void
#define TY_ARGUMENT const
template <class T>
const T& in_place(const T& first) { return first; }
#define TY_INLINED
#define TY_COLD inline
// Shared memory of a block. More would slow the model down: each of its threads clears it.
constexpr u32 kSharedBytes = 1 << 17;
#define TY_SHARED_BYTES(name) static thread_local ty::u8 name[ty::kSharedBytes]

inline u32 lane_id() { return threadIdx.x % kWave; }
inline u32 wave_id() { return threadIdx.x / kWave; }
inline u32 block_waves() { return blockDim.x / kWave; }

inline void sync_wave() {
  model::share();
  model::meet_warp(0);
}
inline void sync_block() { model::meet_block(0); }
inline int sync_block_and(int yes) {
  const auto& all = model::meet_block(yes != 0);
  return all.set == all.size;
}
inline int sync_block_or(int yes) { return !sync_block_and(!yes); }

template <class T>
T shfl(T value, u32 lane) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = model::meet_warp(bits).values[lane % kWave];
  memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
T shfl_up(T value, u32 by) {
  u32 lane = lane_id();
  return shfl(value, lane < by ? lane : lane - by);
}
template <class T>
T shfl_xor(T value, u32 bits) { return shfl(value, lane_id() ^ bits); }
inline Lanes ballot(int yes) { return (Lanes)model::meet_warp(yes != 0).members; }
inline int any(int yes) { return ballot(yes) != 0; }
inline int all(int yes) { return ballot(yes) == kAllLanes; }
inline Lanes match_any(i32 value) {
  Lanes lanes = 0;
  const auto& values = model::meet_warp((u64)(i64)value).values;
  for (u32 i = 0; i < kWave; i++) lanes |= Lanes(values[i] == (u64)(i64)value) << i;
  return lanes;
}
inline u32 popc(Lanes lanes) { return (u32)std::popcount(lanes); }
inline u32 first_of(Lanes lanes) { return (u32)std::countr_zero(lanes); }
template <class Body>
bool in_turn(Body body) { return model::in_turn(body); }
// A lane in its turn is alone.
inline Lanes lanes_with(const void*) { return Lanes(1) << lane_id(); }
template <class T>
T from_first(Lanes, T value) { return value; }
inline Lanes ballot_of(Lanes lanes, int yes) { return yes ? lanes : 0; }
inline void sync_lanes(Lanes) {}
inline Lanes lanes_before(u32 lane) { return (Lanes(1) << lane) - 1; }

inline u64 load_acquire(const u64* at) {
  model::poll();
  return model::at(const_cast<u64*>(at)).load(std::memory_order_acquire);
}
inline u64 load_relaxed(const u64* at) {
  model::poll();
  return model::at(const_cast<u64*>(at)).load(std::memory_order_relaxed);
}
inline u32 load_relaxed(const u32* at) {
  model::poll();
  return model::at(const_cast<u32*>(at)).load(std::memory_order_relaxed);
}
inline void store_relaxed(u64* at, u64 value) {
  model::word();
  model::store(at, value);
}
inline void store_relaxed(u32* at, u32 value) {
  model::word();
  model::store(at, value);
}
inline void store_16_relaxed(uint4* at, const uint4& value) {
  model::word();
  model::store(at, value);
}
inline void use(u32) {}
inline void store_mmio(u64* at, u64 value) {
  model::word();
  model::hold(at, &value, 8, true);
}
inline void store_release(u64* at, u64 value) {
  model::drain();
  model::seen(at).store(value, std::memory_order_release);
}
inline void add_relaxed(u64* at, u64 value) {
  model::seen(at).fetch_add(value, std::memory_order_relaxed);
}
inline void add_release(u64* at, u64 value) {
  model::drain();
  model::seen(at).fetch_add(value);
}
inline void add_release_device(u64* at, u64 value) { add_release(at, value); }
inline void fence_system() {
  model::drain();
  std::atomic_thread_fence(std::memory_order_seq_cst);
#ifdef MODEL_FENCES_LAST
  // Other threads of the block run meanwhile.
  model::yield();
#endif
}
inline void fence_system_all() { fence_system(); }
// For this device: other devices still see nothing.
inline void fence_device() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void fence_block() { std::atomic_thread_fence(std::memory_order_acq_rel); }
template <class T>
T load_device(const T* at) { return *at; }
inline uint4 load_16(const uint4* at) { return *at; }
inline void store_16(uint4* at, const uint4& value) { model::store(at, value); }
inline uint4 load_16_relaxed(const uint4* at) {
  model::poll();
  u64* halves = (u64*)at;
  u64 low = model::at(halves).load(std::memory_order_relaxed);
  u64 high = model::at(halves + 1).load(std::memory_order_relaxed);
  return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
}

template <class T>
T atomic_add(T* at, T value) { return model::seen(at).fetch_add(value); }
template <class T>
T atomic_or(T* at, T value) { return model::seen(at).fetch_or(value); }
template <class T>
T atomic_min(T* at, T value) {
  T old = model::seen(at).load();
  while (old > value && !model::at(at).compare_exchange_weak(old, value)) {
  }
  return old;
}
inline u32 atomic_inc(u32* at, u32 most) {
  u32 old = model::seen(at).load();
  while (!model::at(at).compare_exchange_weak(old, old >= most ? 0 : old + 1)) {
  }
  return old;
}
template <class T>
T atomic_cas(T* at, T from, T to) {
  model::seen(at).compare_exchange_strong(from, to);
  return from;
}

// Kernels of a rank run one after the other.
inline void wait_for_kernel_ahead() {}
inline void let_kernel_behind_start() {}

inline u64 now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (u64)now.tv_sec * 1000000000 + now.tv_nsec;
}
inline void pause_ns(u32) {
  model::here->fibers[model::here->current].polls = true;
  model::yield();
}
inline void between_looks() {}
constexpr u32 kLooksApart = 128;

inline float add_rn(float a, float b) { return a + b; }
inline float mul_rn(float a, float b) { return a * b; }
inline float div_rn(float a, float b) { return a / b; }
inline float fma_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline i32 to_int_rn(float value) { return (i32)std::nearbyint(value); }
inline u32 swap_bytes(u32 value) { return __builtin_bswap32(value); }
inline u32 bits_of(float value) { return std::bit_cast<u32>(value); }
inline float float_of(u32 bits) { return std::bit_cast<float>(bits); }
// A sum may have the NaN of a term, with its sign.
constexpr bool kNanHasNoSign = false;
inline u32 to_bf16x2(float low, float high) { return model::bf16x2(low, high); }
inline u32 to_f16x2(float low, float high) { return model::f16x2(low, high); }
inline float from_f16(u16 half) { return model::from_f16(half); }
#define TY_HAS_E4M3 0
#define TY_MANY_REGISTERS 1

}  // namespace ty
