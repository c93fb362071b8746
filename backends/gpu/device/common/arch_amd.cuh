// AMD's words of arch.cuh, for CDNA 3 and later (gfx942, gfx950): clang's builtins, and HIP's words where
// hiprtc has already included them. No header of ROCm is needed.
//
// Sums are defined bit for bit. So the compiler gets -ffp-contract=off: by default clang fuses products and
// sums into multiply-adds in HIP.
#pragma once

#if !__has_builtin(__builtin_amdgcn_ballot_w64)
#error "found another compiler; expected clang for amdgcn: hiprtc, or clang 19 and later"
#endif

// hiprtc has these words; clang by itself does not.
#ifndef __HIPCC_RTC__

#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))

struct uint2 { unsigned x, y; };
struct __attribute__((aligned(16))) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
__device__ inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
__device__ inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
__device__ inline float2 make_float2(float x, float y) { return {x, y}; }

namespace ty::words {
struct Thread { struct X { __device__ operator unsigned() const { return __builtin_amdgcn_workitem_id_x(); } } x; };
struct Block { struct X { __device__ operator unsigned() const { return __builtin_amdgcn_workgroup_id_x(); } } x; };
struct Threads { struct X { __device__ operator unsigned() const { return __builtin_amdgcn_workgroup_size_x(); } } x; };
struct Blocks {
  struct X {
    __device__ operator unsigned() const {
      return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x();
    }
  } x;
};
}  // namespace ty::words
#define threadIdx (ty::words::Thread{})
#define blockIdx (ty::words::Block{})
#define blockDim (ty::words::Threads{})
#define gridDim (ty::words::Blocks{})

#endif

namespace ty {

// --- Threads

// A lane of a block of kWarps waves has 256 registers.
#define TY_MANY_REGISTERS 1
constexpr u32 kWave = 64;
using Lanes = u64;
constexpr Lanes kAllLanes = ~Lanes(0);

#define TY_KERNEL(threads) \
  extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(1, threads)))
// A unit has four processors: with two waves on each, 512 threads may have 256 registers each.
#define TY_KERNEL_ALONE(threads) \
  extern "C" __global__ void __attribute__(( \
      amdgpu_flat_work_group_size(1, threads), amdgpu_waves_per_eu(1, (threads) / (4 * ty::kWave))))
#define TY_KERNEL_PAIRED(threads) \
  extern "C" __global__ void __attribute__(( \
      amdgpu_flat_work_group_size(1, threads), amdgpu_waves_per_eu(1, 2 * (threads) / (4 * ty::kWave))))
#define TY_CONSTANT __constant__ __attribute__((used))
#define TY_ARGUMENT const
template <class T>
__device__ inline const T& in_place(const T&) {
  return *(const T*)__builtin_amdgcn_kernarg_segment_ptr();
}
#define TY_INLINED inline __attribute__((always_inline))
// A call takes private memory, so seldom run code is inline, too.
#define TY_COLD inline
#define TY_SHARED_BYTES(name) extern __shared__ __attribute__((aligned(1024))) ty::u8 name[]

__device__ inline u32 lane_id() {
  return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
}
__device__ inline u32 wave_id() { return threadIdx.x / kWave; }
__device__ inline u32 block_waves() { return blockDim.x / kWave; }

__device__ inline void sync_wave() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}
__device__ inline void sync_block() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// Behind a barrier, so that the word of the previous vote has been read.
__device__ inline int sync_block_or(int yes) {
  __shared__ int vote;
  sync_block();
  if (threadIdx.x == 0) vote = 0;
  sync_block();
  if (yes) __hip_atomic_store(&vote, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  sync_block();
  return vote;
}
__device__ inline int sync_block_and(int yes) { return !sync_block_or(!yes); }

template <class T>
__device__ inline T shfl(T value, u32 lane) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  i32 at = (i32)(lane % kWave << 2);
  if constexpr (sizeof(T) == 4) {
    return __builtin_bit_cast(T, __builtin_amdgcn_ds_bpermute(at, __builtin_bit_cast(i32, value)));
  } else {
    u64 bits = __builtin_bit_cast(u64, value);
    u64 low = (u32)__builtin_amdgcn_ds_bpermute(at, (i32)(u32)bits);
    u64 high = (u32)__builtin_amdgcn_ds_bpermute(at, (i32)(u32)(bits >> 32));
    return __builtin_bit_cast(T, low | high << 32);
  }
}
// Bytes and booleans travel as words.
__device__ inline bool shfl(bool value, u32 lane) { return shfl((u32)value, lane) != 0; }
template <class T>
__device__ inline T shfl_up(T value, u32 by) {
  u32 lane = lane_id();
  return shfl(value, lane < by ? lane : lane - by);
}
template <class T>
__device__ inline T shfl_xor(T value, u32 bits) { return shfl(value, lane_id() ^ bits); }
__device__ inline Lanes ballot(int yes) { return __builtin_amdgcn_ballot_w64(yes != 0); }
__device__ inline int any(int yes) { return ballot(yes) != 0; }
__device__ inline int all(int yes) { return ballot(yes) == kAllLanes; }
__device__ inline u32 popc(Lanes lanes) { return (u32)__builtin_popcountll(lanes); }
__device__ inline u32 first_of(Lanes lanes) { return (u32)__builtin_ffsll((i64)lanes) - 1; }
// One turn for each distinct value.
__device__ inline Lanes match_any(i32 value) {
  Lanes same = 0;
  for (Lanes left = kAllLanes; left != 0;) {
    bool mine = value == __builtin_amdgcn_readlane(value, (i32)first_of(left));
    Lanes these = ballot(mine);
    if (mine) same = these;
    left &= ~these;
  }
  return same;
}
// Runs `body` in the calling threads of a warp one after the other, each to its end: a body may wait for
// what the threads before it have done. All lanes go through the loop together, so no compiler takes a
// body out of it.
template <class Body>
__device__ inline bool in_turn(Body body) {
  bool well = false;
  for (Lanes left = __builtin_amdgcn_ballot_w64(true); left != 0; left &= left - 1)
    if (lane_id() == first_of(left)) well = body();
  return well;
}
// A lane in its turn is alone.
__device__ inline Lanes lanes_with(const void*) { return Lanes(1) << lane_id(); }
template <class T>
__device__ inline T from_first(Lanes, T value) { return value; }
__device__ inline Lanes ballot_of(Lanes lanes, int yes) { return yes ? lanes : 0; }
__device__ inline void sync_lanes(Lanes) {}

// --- Memory that others see: system scope, aligned words

__device__ inline u64 load_relaxed(const u64* at) {
  return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ inline u64 load_acquire(const u64* at) {
  return __hip_atomic_load(at, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ inline void store_relaxed(u64* at, u64 value) {
  __hip_atomic_store(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ inline void store_release(u64* at, u64 value) {
  __hip_atomic_store(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ inline u32 load_relaxed(const u32* at) {
  return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ inline void store_relaxed(u32* at, u32 value) {
  __hip_atomic_store(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ inline void store_16_relaxed(uint4* at, const uint4& value) {
  u64* halves = reinterpret_cast<u64*>(at);
  store_relaxed(halves, (u64)value.y << 32 | value.x);
  store_relaxed(halves + 1, (u64)value.w << 32 | value.z);
}
// A value that is loaded and not used.
__device__ inline void use(u32 value) { asm volatile("" ::"v"(value)); }
// An atomic store at system scope is one store past the caches, and no two of them are merged.
__device__ inline void store_mmio(u64* at, u64 value) { store_relaxed(at, value); }
__device__ inline void add_relaxed(u64* at, u64 value) {
  __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ inline void add_release(u64* at, u64 value) {
  __hip_atomic_fetch_add(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
// For threads of this device alone.
__device__ inline void add_release_device(u64* at, u64 value) {
  __hip_atomic_fetch_add(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ inline void fence_system() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, ""); }
__device__ inline void fence_system_all() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }
__device__ inline void fence_device() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
__device__ inline void fence_block() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "workgroup"); }
// The parts of a GPU have second-level caches of their own.
template <class T>
__device__ inline T load_device(const T* at) {
  return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// Uses a vector type of the compiler: the type leaves structures in memory that are copied whole. The
// pointer is declared to be in global memory, because a pointer out of a structure may be in any address
// space.
using Vector = u32 __attribute__((ext_vector_type(4)));
__device__ inline uint4 load_16(const uint4* at) {
  Vector v = *(const __attribute__((address_space(1))) Vector*)at;
  return make_uint4(v.x, v.y, v.z, v.w);
}
__device__ inline void store_16(uint4* at, const uint4& value) {
  *(__attribute__((address_space(1))) Vector*)at = Vector{value.x, value.y, value.z, value.w};
}

// 16 bytes of memory that another device writes: each 4 bytes are whole.
__device__ inline uint4 load_16_relaxed(const uint4* at) {
  const u64* halves = reinterpret_cast<const u64*>(at);
  u64 low = load_relaxed(halves), high = load_relaxed(halves + 1);
  return make_uint4((u32)low, (u32)(low >> 32), (u32)high, (u32)(high >> 32));
}

// --- Atomics of this device; each returns the previous value

template <class T>
__device__ inline T atomic_add(T* at, T value) {
  return __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T>
__device__ inline T atomic_or(T* at, T value) {
  return __hip_atomic_fetch_or(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T>
__device__ inline T atomic_min(T* at, T value) {
  return __hip_atomic_fetch_min(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
__device__ inline u32 atomic_inc(u32* at, u32 most) {
  return __builtin_amdgcn_atomic_inc32(at, most, __ATOMIC_RELAXED, "agent");
}
template <class T>
__device__ inline T atomic_cas(T* at, T from, T to) {
  __hip_atomic_compare_exchange_strong(at, &from, to, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                       __HIP_MEMORY_SCOPE_AGENT);
  return from;
}

// --- A kernel starts when the kernel ahead of it has ended

__device__ inline void wait_for_kernel_ahead() {}
__device__ inline void let_kernel_behind_start() {}

// --- Time

// A counter of 100 MHz, the same for the whole GPU.
__device__ inline u64 now_ns() { return __builtin_amdgcn_s_memrealtime() * 10; }
// 64 cycles a unit; the number is a constant of the instruction.
__device__ inline void pause_ns(u32) { __builtin_amdgcn_s_sleep(4); }
// Polls without a pause keep the fabric from the stores that they wait for.
__device__ inline void between_looks() { __builtin_amdgcn_s_sleep(1); }
// Looks at such a word between two at the host's memory: about 40 ms, if a look takes 0.6 us. Ranks that are apart by
// less, as those of Python programs are, then never wait for those.
constexpr u32 kLooksApart = 65536;

// --- Arithmetic: one rounding each, never contracted

__device__ inline float add_rn(float a, float b) { return a + b; }
__device__ inline float mul_rn(float a, float b) { return a * b; }
__device__ inline float div_rn(float a, float b) { return a / b; }
__device__ inline float fma_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
__device__ inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
__device__ inline float fabsf(float a) { return __builtin_fabsf(a); }
__device__ inline i32 to_int_rn(float value) { return (i32)__builtin_rintf(value); }
// The bytes in reverse.
__device__ inline u32 swap_bytes(u32 value) { return __builtin_bswap32(value); }
__device__ inline u32 bits_of(float value) { return __builtin_bit_cast(u32, value); }
__device__ inline float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }
template <class A, class B>
__device__ inline auto min(A a, B b) {
  using C = decltype(true ? a : b);
  return (C)a < (C)b ? (C)a : (C)b;
}
template <class A, class B>
__device__ inline auto max(A a, B b) {
  using C = decltype(true ? a : b);
  return (C)a < (C)b ? (C)b : (C)a;
}
// A sum may have the NaN of a term, with its sign.
constexpr bool kNanHasNoSign = false;
__device__ inline u32 to_bf16x2(float low, float high) {
  u32 first = __builtin_bit_cast(u16, (__bf16)low), second = __builtin_bit_cast(u16, (__bf16)high);
  return first | second << 16;
}
__device__ inline u32 to_f16x2(float low, float high) {
  u32 first = __builtin_bit_cast(u16, (_Float16)low), second = __builtin_bit_cast(u16, (_Float16)high);
  return first | second << 16;
}
__device__ inline float from_f16(u16 half) { return (float)__builtin_bit_cast(_Float16, half); }
// The conversions of gfx942 produce another format (e4m3fnuz, at most 240). Codes are the same
// everywhere, so this file does not use these conversions, not even on gfx950.
#define TY_HAS_E4M3 0

// --- Shared memory

__device__ inline uint4 load_shared(const uint4* at) { return *at; }
__device__ inline void copy_async(void* to, const void* from, u32 bytes) {
  if (bytes == 16)
    *static_cast<uint4*>(to) = *static_cast<const uint4*>(from);
  else
    *static_cast<u32*>(to) = *static_cast<const u32*>(from);
}
__device__ inline void copies_done() {}

// --- There are no bulk copies

#if TY_ROWS_TMA
#error "found TY_ROWS_TMA=1; expected 0: AMD's GPUs have no bulk copies"
#endif

__device__ inline void publish_shared() {}
__device__ inline void publish_places() {}
__device__ inline void close_stores() {}
__device__ inline void stores_read() {}
__device__ inline void stores_done() {}

}  // namespace ty
