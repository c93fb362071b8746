// CUDA's words of arch.cuh, for compute capability 8.0 and later.
#pragma once

namespace ty {

// --- Threads

constexpr u32 kWave = 32;
using Lanes = u32;
constexpr Lanes kAllLanes = ~Lanes(0);

// A thread of a block of kWarps warps has 128 registers.
#define TY_MANY_REGISTERS 0

// A kernel with at most this many threads a block.
#define TY_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
// A kernel of which one block, with at most this many threads, has a multiprocessor for itself.
#define TY_KERNEL_ALONE(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
// A kernel of which one block shares a multiprocessor with a block of another such kernel.
#define TY_KERNEL_PAIRED(threads) extern "C" __global__ void __launch_bounds__(threads, 2)
// A constant that the host finds by its name.
#define TY_CONSTANT __constant__
// Arguments of a kernel: read in place, not copied.
#define TY_ARGUMENT const __grid_constant__
// The first argument of a kernel, in place.
template <class T>
__device__ inline const T& in_place(const T& first) { return first; }
// For a function whose call would force its arguments by reference into memory, where the compiler would
// not inline it.
#define TY_INLINED
// Code that is seldom run, and then once, is no part of the code around it: a kernel of hundreds of kilobytes
// waits for its instructions.
#define TY_COLD __noinline__
// The dynamic shared memory of a block.
#define TY_SHARED_BYTES(name) extern __shared__ __align__(1024) ty::u8 name[]

__device__ inline u32 lane_id() { return threadIdx.x % kWave; }
// Index of this thread's warp in its block, and warps of a block.
__device__ inline u32 wave_id() { return threadIdx.x / kWave; }
__device__ inline u32 block_waves() { return blockDim.x / kWave; }

__device__ inline void sync_wave() { __syncwarp(); }
__device__ inline void sync_block() { __syncthreads(); }
// Whether the condition holds in all, or in any, threads of the block.
__device__ inline int sync_block_and(int yes) { return __syncthreads_and(yes); }
__device__ inline int sync_block_or(int yes) { return __syncthreads_or(yes); }

// The value of another lane: of the lane with this number, of the lane `by` before this one, of the
// lane whose number differs in `bits`.
template <class T>
__device__ inline T shfl(T value, u32 lane) { return __shfl_sync(kAllLanes, value, lane); }
template <class T>
__device__ inline T shfl_up(T value, u32 by) { return __shfl_up_sync(kAllLanes, value, by); }
template <class T>
__device__ inline T shfl_xor(T value, u32 bits) { return __shfl_xor_sync(kAllLanes, value, bits); }
// The lanes in which the condition holds.
__device__ inline Lanes ballot(int yes) { return __ballot_sync(kAllLanes, yes); }
__device__ inline int any(int yes) { return __any_sync(kAllLanes, yes); }
__device__ inline int all(int yes) { return __all_sync(kAllLanes, yes); }
// The lanes that have the same value.
__device__ inline Lanes match_any(i32 value) { return __match_any_sync(kAllLanes, value); }
// The number of lanes that are set, and the number of the first; one beyond all if none is set.
__device__ inline u32 popc(Lanes lanes) { return __popc(lanes); }
__device__ inline u32 first_of(Lanes lanes) { return __ffs(lanes) - 1; }
// Runs `body` in each calling thread. The threads of a warp proceed independently, so one may wait for an
// action of another.
template <class Body>
__device__ inline bool in_turn(Body body) { return body(); }
// The lanes that call this together with this one, with the same key. All of them call the three words below, with
// these lanes: the value of the first, the lanes whose condition holds, and a barrier.
__device__ inline Lanes lanes_with(const void* key) { return __match_any_sync(__activemask(), (u64)key); }
template <class T>
__device__ inline T from_first(Lanes lanes, T value) {
  // Where the compiler does not know the lanes, a shuffle first compares those of each lane: some 60 cycles.
  if (lanes == kAllLanes) return __shfl_sync(kAllLanes, value, 0);
  return (lanes & (lanes - 1)) == 0 ? value : __shfl_sync(lanes, value, first_of(lanes));
}
__device__ inline Lanes ballot_of(Lanes lanes, int yes) { return __ballot_sync(lanes, yes); }
__device__ inline void sync_lanes(Lanes lanes) { __syncwarp(lanes); }

// --- Memory that others see: system scope, aligned words

__device__ inline u64 load_acquire(const u64* at) {
  u64 value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
__device__ inline u64 load_relaxed(const u64* at) {
  u64 value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
  return value;
}
__device__ inline void store_relaxed(u64* at, u64 value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ inline void store_release(u64* at, u64 value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ inline u32 load_relaxed(const u32* at) {
  u32 value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
__device__ inline void store_relaxed(u32* at, u32 value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
// A value that is loaded and not used.
__device__ inline void use(u32 value) { asm volatile("" ::"r"(value)); }
// 16 bytes. Observers may see 8 of them at once, or 4.
__device__ inline void store_16_relaxed(uint4* at, const uint4& value) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}
// To a register of another device: one store, whole, never merged with another.
__device__ inline void store_mmio(u64* at, u64 value) {
  asm volatile("st.mmio.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ inline void add_relaxed(u64* at, u64 value) {
  asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
__device__ inline void add_release(u64* at, u64 value) {
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
// For threads of this device alone.
__device__ inline void add_release_device(u64* at, u64 value) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}
// Orders accesses before it ahead of accesses behind it, for observers that see the latter. Cheaper
// than fence_system_all, which also orders stores before loads.
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ inline void fence_system_all() { __threadfence_system(); }
// A fence for this device alone; it also orders stores before loads.
__device__ inline void fence_device() { __threadfence(); }
// A fence for this block alone.
__device__ inline void fence_block() { __threadfence_block(); }
// A load past the nearest cache, of what other blocks have written.
__device__ inline u32 load_device(const u32* at) { return __ldcg(at); }
__device__ inline u64 load_device(const u64* at) { return __ldcg(at); }
__device__ inline i64 load_device(const i64* at) { return __ldcg(at); }

// 16 bytes of global memory at once.
__device__ inline uint4 load_16(const uint4* at) { return *at; }
__device__ inline void store_16(uint4* at, const uint4& value) { *at = value; }

// 16 bytes of memory that another device writes: each 4 bytes are whole.
__device__ inline uint4 load_16_relaxed(const uint4* at) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

// --- Atomics of this device; each returns the previous value

template <class T>
__device__ inline T atomic_add(T* at, T value) { return atomicAdd(at, value); }
template <class T>
__device__ inline T atomic_or(T* at, T value) { return atomicOr(at, value); }
template <class T>
__device__ inline T atomic_min(T* at, T value) { return atomicMin(at, value); }
// Adds 1; at `most`, returns to 0 instead.
__device__ inline u32 atomic_inc(u32* at, u32 most) { return atomicInc(at, most); }
template <class T>
__device__ inline T atomic_cas(T* at, T from, T to) { return atomicCAS(at, from, to); }

// --- Kernels that start before the kernel ahead of them in their stream has ended, where the host launches them so

// Waits until the kernel ahead has ended, and what it has stored is there.
__device__ inline void wait_for_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the kernel behind this one start, once all blocks of this one have come here.
__device__ inline void let_kernel_behind_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// --- Time

__device__ inline u64 now_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
// Lets other warps run for about this long.
__device__ inline void pause_ns(u32 ns) { __nanosleep(ns); }
// Between two looks at a word that another device writes.
__device__ inline void between_looks() {}
// Looks at such a word between two at the host's memory: about 40 ms, if a look takes 0.6 us. Ranks that are apart by
// less, as those of Python programs are, then never wait for those.
constexpr u32 kLooksApart = 65536;

// --- Arithmetic: one rounding each, never contracted

__device__ inline float add_rn(float a, float b) { return __fadd_rn(a, b); }
__device__ inline float mul_rn(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float div_rn(float a, float b) { return __fdiv_rn(a, b); }
// a * b + c with one rounding in all.
__device__ inline float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ inline i32 to_int_rn(float value) { return __float2int_rn(value); }
// The bytes in reverse.
__device__ inline u32 swap_bytes(u32 value) { return __byte_perm(value, 0, 0x0123); }
__device__ inline u32 bits_of(float value) { return __float_as_uint(value); }
__device__ inline float float_of(u32 bits) { return __uint_as_float(bits); }
// Arithmetic and conversions make one NaN, without a sign (PTX ISA, "Floating Point Instructions" and `cvt`). So no
// word of a rounded sum is all ones.
constexpr bool kNanHasNoSign = true;
// Two floats to the nearest bf16 or f16, ties to even; the low half is of the first.
__device__ inline u32 to_bf16x2(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ inline u32 to_f16x2(float low, float high) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ inline float from_f16(u16 half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}
// Two floats to FP8 e4m3, to the nearest, ties to even, saturating; the low byte is of the first. Only
// where TY_HAS_E4M3.
#if __CUDA_ARCH__ >= 890
#define TY_HAS_E4M3 1
__device__ inline u32 to_e4m3x2(float low, float high) {
  u16 both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
}
#else
#define TY_HAS_E4M3 0
#endif

// --- Shared memory

__device__ inline u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// 16 bytes of shared memory at once: smaller accesses would meet in the same banks.
__device__ inline uint4 load_shared(const uint4* at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared_address(at)));
  return v;
}

// Copies 4 or 16 bytes to shared memory; `copies_done` waits for the copies of a thread.
__device__ inline void copy_async(void* to, const void* from, u32 bytes) {
  if (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}
__device__ inline void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// --- Bulk copies between global and shared memory, and the barriers that count them. Only where
// TY_ROWS_TMA: sm_90 and later

#if TY_ROWS_TMA

__device__ inline void bulk_load(u32 to, const u8* from, u32 bytes, u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ inline void bulk_store(u8* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ inline void init_barrier(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ inline void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Whether a phase of a barrier of this block is past. The answer may be late: false for a moment
// after the phase has ended.
__device__ inline bool is_past(u32 barrier, u32 parity) {
  u32 past;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(past)
      : "r"(barrier), "r"(parity)
      : "memory");
  return past != 0;
}
// Barriers that this thread has initialised may be used by bulk copies and by other threads.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Waits for the phase of a barrier of this block. Such a phase always ends: no guard.
__device__ inline void wait_barrier(u32 barrier, u32 parity) {
  while (!is_past(barrier, parity)) {
  }
}

// Makes the writes of this thread to shared memory visible to bulk copies.
__device__ inline void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Extends the order of this thread's loads to its bulk copies.
__device__ inline void publish_places() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ inline void close_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All stores of this thread have read shared memory.
__device__ inline void stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// All groups of stores of this thread except the last have read shared memory.
__device__ inline void stores_read_but_one() {
  asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}
// All groups of stores of this thread except the last are complete, not only read.
__device__ inline void stores_done_but_one() {
  asm volatile("cp.async.bulk.wait_group 1;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}
// All stores of this thread are complete, not only read: a signal that follows covers them.
__device__ inline void stores_done() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}

#else

__device__ inline void publish_shared() {}
__device__ inline void publish_places() {}
__device__ inline void close_stores() {}
__device__ inline void stores_read() {}
__device__ inline void stores_done() {}

#endif

}  // namespace ty
