// Casting rows to FP8 e4m3, with one scale for each group of channels: templates over a Quant of 8 bits.
//
// Bit for bit the result of the CPU: all in f32, to the nearest, ties to even, saturating; a NaN
// keeps the sign of its channel.
#pragma once
#include "quant.cuh"
#include "types.cuh"

namespace ty {

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
__device__ inline float2 group_scale(float amax, ScaleType type) {
  float scale = mul_rn(amax, 1.0f / 448.0f);
  if (type == ScaleType::kF32) return make_float2(div_rn(448.0f, amax), scale);
  u32 bits = bits_of(scale);
  i32 exponent = (i32)(bits >> 23) - 127 + ((bits & 0x7fffff) != 0);
  return make_float2(power_of_two(-exponent), power_of_two(exponent));
}

// Eight consecutive channels, as f32 with the signs that they have, those of NaNs included.
struct Channels {
  float x[8];

  // `second` is only of f32, where eight channels take 32 bytes.
  __device__ void widen(DType type, const uint4& first, const uint4& second) {
    if (type == DType::kFp32) {
      F32::widen(first, x);
      F32::widen(second, x + 4);
    } else if (type == DType::kBf16) {
      Bf16::widen(first, x);
    } else {
      F16::widen(first, x);
      // A conversion does not preserve the sign of a NaN.
      const u32* words = &first.x;
      for (u32 j = 0; j < 8; j++) {
        u32 sign = words[j / 2] << (16 - 16 * (j % 2)) & 1u << 31;
        x[j] = float_of((bits_of(x[j]) & ~(1u << 31)) | sign);
      }
    }
  }
  __device__ void load(DType type, const u8* at) {
    const uint4* from = reinterpret_cast<const uint4*>(at);
    widen(type, load_16(from), type == DType::kFp32 ? load_16(from + 1) : make_uint4(0, 0, 0, 0));
  }
  // The codes of two channels, multiplied by a factor; the low byte is of the first. Arithmetic does not
  // preserve the sign of a NaN, so signs are those of the channels.
  __device__ u32 codes(u32 pair, float factor) const {
    float first = x[2 * pair], second = x[2 * pair + 1];
    float low = mul_rn(first, factor), high = mul_rn(second, factor);
#if TY_HAS_E4M3
    u32 both = to_e4m3x2(low, high);
#else
    u32 both = e4m3_magnitude(low) | e4m3_magnitude(high) << 8;
#endif
    return both | (bits_of(first) >> 24 & 0x80) | (bits_of(second) >> 16 & 0x8000);
  }
};

// Channels of a lane, in two halves; channels of a warp; lanes of a group.
constexpr u32 kCastChannels = 16, kWaveChannels = kWave * kCastChannels;
template <class Q>
constexpr u32 kGroupLanes = Q::group / kCastChannels;

// The channels of one lane: with those of its neighbours they make a group.
struct CastLane {
  Channels half[2];

  // The codes of both halves; returns the scale that undoes the cast. All lanes of a warp.
  template <class Q>
  __device__ float cast(const Q& quant, uint2 (&codes)[2]) const {
    static_assert(Q::bits == 8, "codes are of e4m3");
    static_assert(Q::group % kCastChannels == 0 && (kGroupLanes<Q> & (kGroupLanes<Q> - 1)) == 0,
                  "neighbours of a number that is a power of two make a group");
    float amax = 1e-4f;
    // Ignores NaN.
#pragma unroll
    for (u32 i = 0; i < kCastChannels; i++) amax = fmaxf(amax, fabsf(half[i / 8].x[i % 8]));
#pragma unroll
    for (u32 other = kGroupLanes<Q> / 2; other > 0; other /= 2)
      amax = fmaxf(amax, shfl_xor(amax, other));
    float2 factor = group_scale(amax, quant.scale);
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      codes[h].x = half[h].codes(0, factor.x) | half[h].codes(1, factor.x) << 16;
      codes[h].y = half[h].codes(2, factor.x) | half[h].codes(3, factor.x) << 16;
    }
    return factor.y;
  }
};

// Stores the scale of one group.
template <class Q>
__device__ inline void store_scale(const Q& quant, u8* scales, u32 group, float scale) {
  if (quant.packing == Packing::kWords)
    reinterpret_cast<u32*>(scales)[group] = bits_of(scale);
  else
    scales[group] = (u8)(bits_of(scale) >> 23);
}

}  // namespace ty
