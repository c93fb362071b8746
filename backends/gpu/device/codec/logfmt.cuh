// LogFMT-10, ten bits a value, and formats of its kind: templates over a Quant.
//
// The format, and why its bits are those of every kernel set, are in core/src/moe/logfmt.rs. A block of this
// file has 512 channels, which are 64 pieces of 16 bytes: the words of its groups, then the pieces, or, where the
// block is encoded, half as many bytes with the low bits of all codes, and a quarter of that with the others.
// Each block of a row has its place, and its first words say which of its bytes come.
//
// The lanes of a group, and of two pieces that share a word of high bits, are neighbours in one warp: rows have
// whole blocks, and blocks of threads are multiples of 64.
#pragma once
#include "quant.cuh"
#include "types.cuh"

namespace ty {

// Pieces of bf16 of a block, and of a group. Then bytes of the words of a block's groups, and of a block.
constexpr u32 kBlockPieces = 512 / Bf16::kLanes;
template <class Q>
struct GroupPieces {
  static constexpr u32 kCount = Q::group / Bf16::kLanes;
  static_assert(Q::group % Bf16::kLanes == 0 && kCount >= 1 && kCount <= kWave && (kCount & (kCount - 1)) == 0 &&
                    (Q::bits == 9 || Q::bits == 10),
                "the lanes of a group reduce by halves, and the high bits of two pieces fit a word");
};
template <class Q>
constexpr u32 kGroupPieces = GroupPieces<Q>::kCount;
template <class Q>
constexpr u32 kGroupWordBytes = 4 * (kBlockPieces / kGroupPieces<Q>);
template <class Q>
constexpr u32 kBlockBytes = kGroupWordBytes<Q> + 16 * kBlockPieces;
// Of a code: its bits that no low byte has, and the place of its sign. Then steps between the ends of a group's range.
template <class Q>
constexpr u32 kHighBits = Q::bits - 8;
template <class Q>
constexpr u32 kSignBit = Q::bits - 1;
template <class Q>
constexpr float kSteps = (1u << kSignBit<Q>) - 2;
// In the word of a group: its chunk is encoded.
constexpr u32 kIsCoded = 1u << 31;
// Exponent fields of the largest magnitude of a group that is encoded.
constexpr u32 kLeastExponent = 37, kOneExponent = 127;
// Powers of two that the codes of a group span at most: 2^5.
constexpr float kCodeDepth = 0x1p5f;

// --- Numbers

// A whole number below 2^23, as f32.
__device__ inline float whole_float(u32 value) { return add_rn(float_of(0x4b000000u | value), -8388608.0f); }

// log2 of a magnitude of bf16, relative to 2^(base - 127).
__device__ TY_INLINED float log2_of(u32 magnitude, float base) {
  float f = add_rn(float_of((magnitude & 0x7f) << 16 | 0x3f800000u), -1.0f);
  float ratio = fma_rn(-0.026812049f, f, 0.1243932f);
  ratio = fma_rn(ratio, f, -0.2804581f);
  ratio = fma_rn(ratio, f, 0.45867306f);
  ratio = fma_rn(ratio, f, -0.71835726f);
  ratio = fma_rn(ratio, f, 1.4425576f);
  return fma_rn(f, ratio, add_rn(whole_float(magnitude >> 7), -base));
}

// The numbers by which the values of a group are decoded.
template <class Q>
struct GroupScale {
  u32 base;  // the exponent field of the largest magnitude
  float bottom, range, step;

  __device__ TY_INLINED explicit GroupScale(u32 word) : base(word >> 23 & 0xff) {
    float unit = whole_float(base);
    float top = log2_of(word >> 16 & 0x7fff, unit);
    bottom = fmaxf(log2_of(word & 0x7fff, unit), add_rn(top, -kCodeDepth));
    range = add_rn(top, -bottom);
    step = mul_rn(range, 1.0f / kSteps<Q>);
  }
  // The value of a code with its sign in the highest bit.
  __device__ TY_INLINED float value(u32 code) const {
    constexpr float kWhole = 12582912.0f;
    u32 sign = code << (31 - kSignBit<Q>) & 1u << 31;
    code &= (1u << kSignBit<Q>) - 1;
    // Less 1.
    float below = add_rn(float_of(0x4b000000u | code), -8388609.0f);
    float at = fma_rn(below, step, bottom);
    float shifted = add_rn(at, kWhole);
    float z = add_rn(at, -add_rn(shifted, -kWhole));
    float power = fma_rn(0.009582853f, z, 0.055906426f);
    power = fma_rn(power, z, 0.240241f);
    power = fma_rn(power, z, 0.6931242f);
    power = fma_rn(power, z, 1.0f);
    // The last bits of `shifted` are the whole part.
    u32 bits = bits_of(power) + ((bits_of(shifted) + base - 127) << 23);
    return float_of((code != 0 ? bits & ~(1u << 31) : 0) | sign);
  }
};

// The numbers by which they are encoded.
template <class Q>
struct GroupCoder : GroupScale<Q> {
  using Scale = GroupScale<Q>;
  float unit, inverse, rounding;

  __device__ TY_INLINED explicit GroupCoder(u32 word) : Scale(word), unit(whole_float(Scale::base)) {
    inverse = div_rn(kSteps<Q>, Scale::range);
    rounding = fma_rn(-Scale::bottom, inverse, fma_rn(-0.0866434f, Scale::step, 1.5f));
  }
  // The code of a number of bf16.
  __device__ TY_INLINED u32 code(u32 bits) const {
    float at = fma_rn(log2_of(bits & 0x7fff, unit), inverse, rounding);
    return (u32)fmaxf(at, 0.0f) | (bits & 0x8000) >> (15 - kSignBit<Q>);
  }
};

// --- Pieces

// The word of the group of this lane's piece. The whole warp.
template <class Q>
__device__ TY_INLINED u32 group_word(const uint4& piece) {
  const u32* words = &piece.x;
  u32 most = 0, least = 0x7fff;
#pragma unroll
  for (u32 i = 0; i < 4; i++) {
    u32 low = words[i] & 0x7fff, high = words[i] >> 16 & 0x7fff;
    most = max(most, max(low, high));
    least = min(least, min(low, high));
  }
#pragma unroll
  for (u32 other = kGroupPieces<Q> / 2; other > 0; other /= 2) {
    most = max(most, shfl_xor(most, other));
    least = min(least, shfl_xor(least, other));
  }
  return most << 16 | least;
}
__device__ TY_INLINED bool may_be_coded(u32 word) {
  u32 exponent = word >> 23;
  return exponent >= kLeastExponent && exponent < kOneExponent && (word & 0x7fff) < word >> 16;
}

// An encoded piece in registers: the low bytes of its codes, and twice the word that has its high bits and those of
// its neighbour. The whole warp.
template <class Q>
__device__ TY_INLINED uint4 encode_piece(const uint4& piece, u32 word) {
  GroupCoder<Q> coder(word);
  const u32* words = &piece.x;
  u32 low[2] = {0, 0}, high = 0;
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    u32 code = coder.code(words[i / 2] >> 16 * (i % 2) & 0xffff);
    low[i / 4] |= (code & 0xff) << 8 * (i % 4);
    high |= code >> 8 << kHighBits<Q> * i;
  }
  u32 other = shfl_xor(high, 1u);
  high = lane_id() % 2 == 0 ? high | other << 16 : other | high << 16;
  return make_uint4(low[0], low[1], high, high);
}
template <class Q>
__device__ TY_INLINED void decode_piece(const uint4& piece, u32 word, float* values) {
  GroupScale<Q> scale(word);
  const u32* low = &piece.x;
  u32 high = piece.z >> 16 * (lane_id() % 2);
  constexpr u32 kMask = (1u << kHighBits<Q>) - 1;
#pragma unroll
  for (u32 i = 0; i < 8; i++)
    values[i] = scale.value((low[i / 4] >> 8 * (i % 4) & 0xff) | (high >> kHighBits<Q> * i & kMask) << 8);
}

// The places of a piece in a row.
template <class Q>
struct CodedPlace {
  u8* block;
  u32 piece;  // of the block

  __device__ CodedPlace(uint4* row, u32 at)
      : block(reinterpret_cast<u8*>(row) + (u64)(at / kBlockPieces) * kBlockBytes<Q>), piece(at % kBlockPieces) {}
  __device__ u32* word() const { return reinterpret_cast<u32*>(block) + piece / kGroupPieces<Q>; }
  __device__ uint4* plain() const { return reinterpret_cast<uint4*>(block + kGroupWordBytes<Q>) + piece; }
  __device__ u64* low() const { return reinterpret_cast<u64*>(block + kGroupWordBytes<Q>) + piece; }
  __device__ u32* high() const {
    return reinterpret_cast<u32*>(block + kGroupWordBytes<Q> + 8 * kBlockPieces) + piece / 2;
  }
};

}  // namespace ty
