// Formats of quantised rows: Quant of the host, and the codes of the types that arguments name. Codecs are templates
// over a format, so that another one is another value of Quant.
#pragma once
#include "arch.cuh"

namespace ty {

// The types of rows before a cast: the codes of DType, on the host.
enum class DType : u32 { kBf16 = 1, kFp16 = 2, kFp32 = 3 };

__device__ constexpr u32 bytes_of(DType type) { return type == DType::kFp32 ? 4 : 2; }

// How rows are cast as they move: the codes of Cast, on the host.
enum class Cast : u32 { kNone = 0, kFp8 = 1, kFp8Round = 2, kFp8Ue8m0 = 3 };

// The scale of a group.
enum class ScaleType : u32 {
  kF32,         // a factor
  kPowerOfTwo,  // the same, rounded up to a power of two
  kBf16Range,   // the largest and the smallest magnitude, each as bits of bf16
};

// How the scales of a row lie in words of four bytes.
enum class Packing : u32 {
  kWords,      // one in a word
  kExponents,  // the exponent byte of each, four in a word: the first group has the lowest byte
};

// Channels that share a scale, in every format.
constexpr u32 kGroup = 128;

// Bits of a number, and channels that share a scale, are known when kernels are compiled: units and loops of lanes
// follow from them. A call may choose the rest.
template <u32 kBits, u32 kChannels>
struct Quant {
  static constexpr u32 bits = kBits, group = kChannels;
  ScaleType scale;
  Packing packing;

  __device__ static constexpr u32 groups(u32 channels) { return (channels + group - 1) / group; }
  // Channels whose scales fill a word.
  __device__ constexpr u32 word_channels() const { return packing == Packing::kExponents ? 4 * group : group; }
};

// e4m3.
using Fp8 = Quant<8, kGroup>;
// Nine bits of a logarithm and a sign.
using LogFmt10 = Quant<10, kGroup>;
constexpr LogFmt10 kLogFmt10 = {ScaleType::kBf16Range, Packing::kWords};

// The format of the rows that a cast makes.
__device__ constexpr Fp8 quant_of(Cast cast) {
  return {cast == Cast::kFp8 ? ScaleType::kF32 : ScaleType::kPowerOfTwo,
          cast == Cast::kFp8Ue8m0 ? Packing::kExponents : Packing::kWords};
}

}  // namespace ty
