// Formats of quantised rows: Quant of the host, and the codes of the types that arguments name.
#pragma once
#include "arch.cuh"

namespace ty {

// The types of rows before a cast: the codes of DType, on the host.
enum class DType : u32 { kBf16 = 1, kFp16 = 2, kFp32 = 3 };

__device__ constexpr u32 bytes_of(DType type) { return type == DType::kFp32 ? 4 : 2; }

// How rows are cast as they move: the codes of Cast, on the host.
enum class Cast : u32 { kNone = 0, kFp8 = 1, kFp8Round = 2, kFp8Ue8m0 = 3 };

// The scale of a group. Those of rows that are cast have the codes of their casts.
enum class ScaleType : u32 {
  kF32 = (u32)Cast::kFp8,               // a factor, one in a word
  kPowerOfTwo = (u32)Cast::kFp8Round,   // the same, rounded up to a power of two
  kUe8m0 = (u32)Cast::kFp8Ue8m0,        // the exponent byte of such a power, four in a word
  kBf16Range,                           // the largest and the smallest magnitude, each as bits of bf16
};

// Channels that share a scale, in every format.
constexpr u32 kGroup = 128;

struct Quant {
  u32 bits;   // of a number
  u32 group;  // channels that share a scale
  ScaleType scale;

  __device__ constexpr u32 groups(u32 channels) const { return (channels + group - 1) / group; }
  // Channels whose scales fill a word.
  __device__ constexpr u32 word_channels() const { return scale == ScaleType::kUe8m0 ? 4 * group : group; }
};

// The format of the rows that a cast makes.
__device__ constexpr Quant quant_of(Cast cast) { return {8, kGroup, (ScaleType)cast}; }
// Nine bits of a logarithm and a sign.
constexpr Quant kLogFmt10 = {10, kGroup, ScaleType::kBf16Range};

}  // namespace ty
