// The words of a dialect: all that differs between one maker's GPUs and another's. Everything else of
// the device code uses these words alone; arch_cuda.cuh and arch_amd.cuh have the same ones.
//
// A warp is what runs in lockstep or nearly so: 32 threads of CUDA, the 64 of a wavefront of CDNA. kWave is
// its size, Lanes a mask of its lanes. Words for warps are called by all of its threads. No thread of a
// warp waits for what another thread of it is still to do, but inside of `in_turn`: a wavefront goes on
// only when all of its lanes do.
//
// Not for transports to use unless transport.cuh says so: it is not versioned like the device API.
#pragma once

namespace ty {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

}  // namespace ty

#ifdef __AMDGCN__
#include "arch_amd.cuh"
#else
#include "arch_cuda.cuh"
#endif

namespace ty {

// The lanes before one.
__device__ inline Lanes lanes_before(u32 lane) { return (Lanes(1) << lane) - 1; }

}  // namespace ty
