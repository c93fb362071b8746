// In the place of the PTX of bulk.cuh.
__device__ inline void copy_async(void* to, const void* from, u32 bytes) { memcpy(to, from, bytes); }
__device__ inline void copies_done() {}
