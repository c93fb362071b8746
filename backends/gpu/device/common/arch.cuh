// The words of a dialect: all differences between the GPUs of one maker and another. The rest of the
// device code uses these words alone; arch_cuda.cuh and arch_amd.cuh define the same set.
//
// A warp is a group of threads that run in lockstep or nearly so: 32 threads of CUDA, the 64 of a wavefront
// of CDNA. kWave is its size, Lanes a mask of its lanes. All threads of a warp call the words for warps. No
// thread of a warp waits for an action of another thread of the same warp, except inside of `in_turn`: a
// wavefront continues only when all of its lanes do.
//
// Transports must not use these words unless transport.cuh says so: they are not versioned like the
// device API.
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

// The size of a warp that this program was compiled for. The host compares it with the device's when it loads
// the program: waves of another size would hang, or leave rows behind.
extern "C" {
TY_CONSTANT ty::u32 ty_wave = ty::kWave;
}

namespace ty {

// The lanes before a given lane.
__device__ inline Lanes lanes_before(u32 lane) { return (Lanes(1) << lane) - 1; }

}  // namespace ty
