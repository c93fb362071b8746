// Casting rows to FP8 e4m3, with one scale per 128 channels, before they move.
//
// Bit for bit the result of the CPU: all in f32, to the nearest, ties to even, saturating; a NaN
// keeps the sign of its channel.
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
  if (magnitude < 0.015625f) return (u32)to_int_rn(magnitude * 512.0f);
  u32 bits = bits_of(magnitude);
  u32 rounded = bits + 0x7ffff + (bits >> 20 & 1);
  u32 code = (rounded >> 20) - ((127 - 7) << 3);
  return code < 0x7e ? code : 0x7e;
}

// 2^exponent, for -149 to 128; 128 gives infinity.
__device__ inline float power_of_two(i32 exponent) {
  u32 bits = exponent >= -126 ? (u32)(exponent + 127) << 23 : 1u << (exponent + 149);
  return float_of(bits);
}

// The factor for the channels, and the scale that undoes it.
__device__ inline float2 group_scale(float amax, u32 cast) {
  float scale = mul_rn(amax, 1.0f / 448.0f);
  if (cast < kCastRound) return make_float2(div_rn(448.0f, amax), scale);
  u32 bits = bits_of(scale);
  i32 exponent = (i32)(bits >> 23) - 127 + ((bits & 0x7fffff) != 0);
  return make_float2(power_of_two(-exponent), power_of_two(exponent));
}

// Eight consecutive channels, as f32: one load, or two. Arithmetic does not preserve the sign of a
// NaN, so signs are taken from the loaded value.
struct Channels {
  float x[8];
  u32 signs;

  __device__ void load(const DispatchArgs& a, u64 at) {
    signs = 0;
    if (a.dtype == 3) {
      const uint4* from = reinterpret_cast<const uint4*>(a.raw + at * 4);
      uint4 low = load_16(from), high = load_16(from + 1);
      F32::widen(low, x);
      F32::widen(high, x + 4);
      for (u32 j = 0; j < 8; j++) signs |= bits_of(x[j]) >> 31 << j;
    } else {
      uint4 both = load_16(reinterpret_cast<const uint4*>(a.raw + at * 2));
      a.dtype == 1 ? Bf16::widen(both, x) : F16::widen(both, x);
      const u32 words[] = {both.x, both.y, both.z, both.w};
      for (u32 j = 0; j < 8; j++) signs |= (words[j / 2] >> (15 + 16 * (j % 2)) & 1) << j;
    }
  }
  // The codes of two channels, multiplied by a factor; the low byte is of the first.
  __device__ u32 codes(u32 pair, float factor) const {
    float low = mul_rn(x[2 * pair], factor), high = mul_rn(x[2 * pair + 1], factor);
#if TY_HAS_E4M3
    u32 magnitudes = to_e4m3x2(low, high) & 0x7f7f;
#else
    u32 magnitudes = e4m3_magnitude(low) | e4m3_magnitude(high) << 8;
#endif
    u32 mine = signs >> 2 * pair;
    return magnitudes | (mine & 1) << 7 | (mine >> 1 & 1) << 15;
  }
};

// The scale of one group.
__device__ inline void store_scale(const DispatchArgs& a, u32 token, u32 group, float scale) {
  u32* scales = const_cast<u32*>(a.scales) + (u64)token * a.scale_words;
  if (a.cast != kCastUe8m0)
    scales[group] = bits_of(scale);
  else
    reinterpret_cast<u8*>(scales)[group] = (u8)(bits_of(scale) >> 23);
}

// Channels of a lane, lanes of a group, and groups that a warp takes side by side; then the number of such
// sets.
constexpr u32 kChannels = 8, kGroupLanes = kGroup / kChannels, kWaveGroups = kWave / kGroupLanes;
constexpr u32 kCastsAtOnce = 4;

// Groups of one token. One warp. The channels of a row are a multiple of 16, so all channels of a lane are
// inside the row or none is.
__device__ inline void cast_groups(const DispatchArgs& a, u32 token, u32 first) {
  u32 lane = lane_id();
  u64 row = (u64)token * a.hidden;
  Channels c[kCastsAtOnce];
#pragma unroll
  for (u32 i = 0; i < kCastsAtOnce; i++) {
    u32 at = (first + kWaveGroups * i) * kGroup + lane * kChannels;
    if (at < a.hidden)
      c[i].load(a, row + at);
    else
      c[i] = Channels{};
  }
#pragma unroll
  for (u32 i = 0; i < kCastsAtOnce; i++) {
    u32 at = (first + kWaveGroups * i) * kGroup + lane * kChannels;
    float amax = 1e-4f;
    // Ignores NaN.
    for (u32 j = 0; j < 8; j++) amax = fmaxf(amax, fabsf(c[i].x[j]));
    for (u32 other = kGroupLanes / 2; other > 0; other /= 2)
      amax = fmaxf(amax, shfl_xor(amax, other));
    float2 factor = group_scale(amax, a.cast);
    if (at >= a.hidden) continue;
    u32 codes[4];
    for (u32 j = 0; j < 4; j++) codes[j] = c[i].codes(j, factor.x);
    *reinterpret_cast<uint2*>(const_cast<u8*>(a.x) + row + at) =
        make_uint2(codes[0] | codes[1] << 16, codes[2] | codes[3] << 16);
    if (lane % kGroupLanes == 0) store_scale(a, token, at / kGroup, factor.y);
  }
}

// All blocks. The rows are loaded in bulk after a barrier of all blocks.
__device__ inline void cast_rows(const DispatchArgs& a, u32 tokens) {
  u32 warps = block_waves(), groups = (a.hidden + kGroup - 1) / kGroup;
  for (u32 token = blockIdx.x * warps + wave_id(); token < tokens;
       token += gridDim.x * warps) {
    for (u32 group = 0; group < groups; group += kCastsAtOnce * kWaveGroups) cast_groups(a, token, group);
    u32 lane = lane_id(), bytes = a.scale_words * 4;
    if (a.cast == kCastUe8m0 && groups + lane < bytes)
      reinterpret_cast<u8*>(const_cast<u32*>(a.scales) + (u64)token * a.scale_words)[groups + lane] = 0;
  }
#if TY_ROWS_TMA
  publish_places();
#endif
}

}  // namespace ty
