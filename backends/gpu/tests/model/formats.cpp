// Codecs over formats that no kernel has: another group and other bits are other values of Quant.
#include "helpers.h"
#include "cast.cuh"
#include "logfmt.cuh"
using namespace ty;
#include "casts.h"

// A row of bf16, of as many channels as one warp takes.
std::vector<u16> row_of(u32 channels, float largest, std::mt19937& random) {
  std::vector<u16> row;
  for (u32 i = 0; i < channels; i++)
    row.push_back((u16)model::bf16((float)(int)(random() % 60001 - 30000) / 30001 * largest));
  return row;
}

// One warp casts a row, which is compared with the cast by its definition.
template <u32 kChannels>
void casts(std::mt19937& random) {
  using Q = Quant<8, kChannels>;
  for (Cast how : kCasts) {
    Q quant{quant_of(how).scale, quant_of(how).packing};
    std::vector<u16> row = row_of(kWaveChannels, 1000, random);
    RawRow given;
    for (u32 i = 0; i < kWaveChannels; i++) read_channel(given, row.data(), DType::kBf16, i);
    std::vector<u8> found(kWaveChannels), expected(kWaveChannels);
    std::vector<u32> scales(Q::groups(kWaveChannels)), expected_scales = scales;
    model::launch(1, kWave, [&] {
      u32 at = lane_id() * kCastChannels;
      CastLane lane{};
      for (u32 h = 0; h < 2; h++) lane.half[h].load(DType::kBf16, reinterpret_cast<u8*>(&row[at + 8 * h]));
      uint2 codes[2];
      float scale = lane.cast(quant, codes);
      memcpy(&found[at], codes, sizeof codes);
      if (at % Q::group == 0) store_scale(quant, reinterpret_cast<u8*>(scales.data()), at / Q::group, scale);
    });
    cast_row(given, how, kChannels, expected.data(), expected_scales.data());
    std::string what = "of a cast with groups of " + std::to_string(kChannels);
    same_bytes("a code " + what, found.data(), expected.data(), found.size());
    same_bytes("a scale " + what, scales.data(), expected_scales.data(), 4 * scales.size());
  }
}

// One warp encodes a row and decodes it. The ends of a group's range have the first code and the last, and each value
// is at most half a step away, up to what halves differ by in logarithms.
template <u32 kBits, u32 kChannels>
void codes(std::mt19937& random) {
  using Q = Quant<kBits, kChannels>;
  constexpr u32 kSign = 1u << (kBits - 1), kRow = 8 * kWave;
  std::vector<u16> row = row_of(kRow, 0.5f, random);
  for (u16& bits : row) bits |= 0x3000;
  std::vector<float> decoded(kRow);
  std::vector<u32> words(kRow);
  model::launch(1, kWave, [&] {
    u32 at = 8 * lane_id();
    uint4 piece;
    memcpy(&piece, &row[at], sizeof piece);
    words[at] = group_word<Q>(piece);
    decode_piece<Q>(encode_piece<Q>(piece, words[at]), words[at], &decoded[at]);
  });
  for (u32 first = 0; first < kRow; first += kChannels) {
    u32 most = 0, least = 0x7fff;
    for (u32 i = first; i < first + kChannels; i++)
      most = std::max<u32>(most, row[i] & 0x7fff), least = std::min<u32>(least, row[i] & 0x7fff);
    for (u32 i = first; i < first + kChannels; i += 8) same("the word of a group", words[i], most << 16 | least);
    GroupCoder<Q> coder(most << 16 | least);
    same("the last code", coder.code(most | 0x8000), kSign | (kSign - 1));
    same("the first code", coder.code(least), 1u);
    auto value_of = [](u32 bits) { return std::bit_cast<float>(bits << 16); };
    double step = std::log2(value_of(most) / value_of(least)) / (kSign - 2);
    for (u32 i = first; i < first + kChannels; i++) {
      double apart = std::fabs(std::log2(decoded[i] / value_of(row[i])));
      if (!(apart <= 0.52 * step + 1e-5)) fail("a value is " + std::to_string(apart / step) + " steps away");
    }
  }
}

int main() {
  std::mt19937 random(49);
  casts<16>(random), casts<32>(random), casts<64>(random), casts<kScaled>(random);
  codes<10, kScaled>(random), codes<10, 64>(random), codes<10, 8>(random);
  codes<9, kScaled>(random), codes<9, 32>(random);
  puts("all is well");
}
