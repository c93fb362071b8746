// Bulk copies between global and shared memory, and the barriers that count them: sm_90 and later.
#pragma once
#include "args.cuh"

namespace ty {

__device__ inline u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// 16 bytes of shared memory at once: parts of them would meet in the same banks.
__device__ inline uint4 load_shared(const uint4* at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared_address(at)));
  return v;
}

// Copies 4 or 16 bytes to shared memory; `copies_done` waits for those of a thread.
__device__ inline void copy_async(void* to, const void* from, u32 bytes) {
  if (bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from)
                 : "memory");
}
__device__ inline void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

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
// Whether a phase of a barrier of this block is past. It may take a moment to say no.
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
// Waits for the phase of a barrier of this block. What it waits for always ends: no guard.
__device__ inline void wait_barrier(u32 barrier, u32 parity) {
  while (!is_past(barrier, parity)) {
  }
}

// What this thread wrote to shared memory may then be read by bulk copies.
__device__ inline void publish_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// What this thread learned by loads holds for its bulk copies, too.
__device__ inline void publish_places() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ inline void close_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All stores of this thread have read shared memory.
__device__ inline void stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// All groups of stores of this thread but the last have read shared memory.
__device__ inline void stores_read_but_one() {
  asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
}
// All groups of stores of this thread but the last are complete, not only read.
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

