// In the place of the PTX of transport.cuh. A wait that looks again lets the others of its block go on.
__device__ inline u64 now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (u64)now.tv_sec * 1000000000 + now.tv_nsec;
}
__device__ inline u64 load_acquire(const u64* at) {
  model::poll();
  return model::at(const_cast<u64*>(at)).load(std::memory_order_acquire);
}
__device__ inline u64 load_relaxed(const u64* at) {
  model::poll();
  return model::at(const_cast<u64*>(at)).load(std::memory_order_relaxed);
}
__device__ inline void fence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
__device__ inline void store_relaxed(u64* at, u64 value) {
  model::at(at).store(value, std::memory_order_relaxed);
}
__device__ inline void store_release(u64* at, u64 value) {
  model::at(at).store(value, std::memory_order_release);
}
__device__ inline void add_release(u64* at, u64 value) { model::at(at).fetch_add(value); }
__device__ inline void add_relaxed(u64* at, u64 value) {
  model::at(at).fetch_add(value, std::memory_order_relaxed);
}
