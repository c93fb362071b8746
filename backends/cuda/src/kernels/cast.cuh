// Casting rows to FP8 e4m3, with one scale per 128 channels, before they move.
//
// Bit for bit what the CPU does: all in f32, to the nearest, ties to even, saturating; a NaN keeps
// the sign of its channel.
#pragma once
#include "types.cuh"

namespace ty {

constexpr u32 kGroup = 128;
constexpr u32 kCastRound = 2, kCastUe8m0 = 3;

// The e4m3 code of a value, without its sign.
__device__ inline u32 e4m3_magnitude(float value) {
  if (value != value) return 0x7f;
  float magnitude = fabsf(value);
  // Below 2^-6 codes are multiples of 2^-9; the largest of them rounds up to the first normal.
  if (magnitude < 0.015625f) return (u32)__float2int_rn(magnitude * 512.0f);
  u32 bits = __float_as_uint(magnitude);
  u32 rounded = bits + 0x7ffff + (bits >> 20 & 1);
  u32 code = (rounded >> 20) - ((127 - 7) << 3);
  return code < 0x7e ? code : 0x7e;
}

// 2^exponent, for -149 to 128; 128 gives infinity.
__device__ inline float power_of_two(i32 exponent) {
  u32 bits = exponent >= -126 ? (u32)(exponent + 127) << 23 : 1u << (exponent + 149);
  return __uint_as_float(bits);
}

// What channels are multiplied by, and the scale that undoes it.
__device__ inline float2 group_scale(float amax, u32 cast) {
  float scale = __fmul_rn(amax, 1.0f / 448.0f);
  if (cast < kCastRound) return make_float2(__fdiv_rn(448.0f, amax), scale);
  u32 bits = __float_as_uint(scale);
  i32 exponent = (i32)(bits >> 23) - 127 + ((bits & 0x7fffff) != 0);
  return make_float2(power_of_two(-exponent), power_of_two(exponent));
}

// One channel of a row.
__device__ inline float channel(const DispatchArgs& a, u64 at) {
  if (a.dtype == 3) return reinterpret_cast<const float*>(a.raw)[at];
  u16 half = reinterpret_cast<const u16*>(a.raw)[at];
  if (a.dtype == 1) return __uint_as_float((u32)half << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

// One group of one token: lane i takes four channels that follow each other. One warp.
__device__ inline void cast_group(const DispatchArgs& a, u32 token, u32 group) {
  u32 first = group * kGroup + threadIdx.x % 32 * 4;
  bool inside = first < a.hidden;
  u64 row = (u64)token * a.hidden;
  float x[4] = {};
  float amax = 1e-4f;
  for (u32 i = 0; i < 4 && inside; i++) {
    x[i] = channel(a, row + first + i);
    // Ignores NaN.
    amax = fmaxf(amax, fabsf(x[i]));
  }
  for (u32 other = 16; other > 0; other /= 2)
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, other));
  float2 factor = group_scale(amax, a.cast);
  u32 codes = 0;
  for (u32 i = 0; i < 4; i++) {
    u32 sign = __float_as_uint(x[i]) >> 31 << 7;
    codes |= (e4m3_magnitude(__fmul_rn(x[i], factor.x)) | sign) << 8 * i;
  }
  if (inside) *reinterpret_cast<u32*>(const_cast<u8*>(a.x) + row + first) = codes;
  if (threadIdx.x % 32 != 0) return;
  u32* scales = const_cast<u32*>(a.scales) + (u64)token * a.scale_words;
  if (a.cast != kCastUe8m0)
    scales[group] = __float_as_uint(factor.y);
  else
    reinterpret_cast<u8*>(scales)[group] = (u8)(__float_as_uint(factor.y) >> 23);
}

// All blocks. The rows are loaded in bulk after the blocks have met.
__device__ inline void cast_rows(const DispatchArgs& a) {
  u32 warps = blockDim.x / 32, groups = (a.hidden + kGroup - 1) / kGroup;
  for (u32 token = blockIdx.x * warps + threadIdx.x / 32; token < a.c.tokens;
       token += gridDim.x * warps) {
    for (u32 group = 0; group < groups; group++) cast_group(a, token, group);
    u32 lane = threadIdx.x % 32, bytes = a.scale_words * 4;
    if (a.cast == kCastUe8m0 && groups + lane < bytes)
      reinterpret_cast<u8*>(const_cast<u32*>(a.scales) + (u64)token * a.scale_words)[groups + lane] = 0;
  }
#if TY_ROWS_TMA
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

}  // namespace ty
