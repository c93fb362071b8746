// The cast to FP8 that rows are compared with: by its definition, value by value, with nothing of the kernels except
// the names of types and casts. Included behind level.h.
#pragma once
#include <cmath>

// Channels with one scale, by the definition of the formats.
constexpr unsigned kScaled = 128;
constexpr Cast kCasts[] = {Cast::kFp8, Cast::kFp8Round, Cast::kFp8Ue8m0};

// Words of the scales of a row.
unsigned cast_words(Cast how, unsigned hidden) {
  unsigned scales = (hidden + kScaled - 1) / kScaled;
  return how == Cast::kFp8Ue8m0 ? (scales + 3) / 4 : scales;
}

// The value of an e4m3 code below 0x7f.
double of_e4m3(unsigned code) {
  unsigned exponent = code >> 3, mantissa = code & 7;
  return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, (int)exponent - 10);
}

// The nearest code; of two that are as near, the even one; the largest for what is larger.
unsigned char to_e4m3(float value, bool negative) {
  static const std::vector<double> values = [] {
    std::vector<double> all;
    for (unsigned code = 0; code < 0x7f; code++) all.push_back(of_e4m3(code));
    return all;
  }();
  unsigned best = 0x7f;
  if (!std::isnan(value)) {
    double magnitude = std::min(std::fabs((double)value), 448.0);
    best = (unsigned)(std::lower_bound(values.begin(), values.end(), magnitude) - values.begin());
    double above = values[best] - magnitude, below = best == 0 ? INFINITY : magnitude - values[best - 1];
    if (below < above || (below == above && best % 2 != 0)) best--;
  }
  return (unsigned char)(best | (negative ? 0x80 : 0));
}

// A row of channels, and the sign of each, which a NaN has too.
struct RawRow {
  std::vector<float> value;
  std::vector<bool> negative;
};

// Channel `i` of memory of a type.
void read_channel(RawRow& row, const void* from, DType dtype, unsigned long long i) {
  bool wide = dtype == DType::kFp32;
  unsigned bits = wide ? ((const unsigned*)from)[i] : ((const unsigned short*)from)[i];
  row.negative.push_back(bits >> (wide ? 31 : 15));
  row.value.push_back(dtype == DType::kFp16 ? model::from_f16((unsigned short)bits)
                                             : std::bit_cast<float>(wide ? bits : bits << 16));
}

void cast_row(const RawRow& row, Cast how, unsigned group, unsigned char* codes, unsigned* scales) {
  for (unsigned first = 0; first < row.value.size(); first += group) {
    unsigned end = std::min<unsigned>(first + group, row.value.size());
    float amax = 1e-4f;
    for (unsigned i = first; i < end; i++)
      if (std::fabs(row.value[i]) > amax) amax = std::fabs(row.value[i]);
    float scale = amax * (1.0f / 448.0f), factor = 448.0f / amax;
    if (how != Cast::kFp8) {
      int exponent = 128;
      if (std::isfinite(scale) && std::frexp(scale, &exponent) == 0.5f) exponent--;
      scale = std::ldexp(1.0f, exponent), factor = std::ldexp(1.0f, -exponent);
    }
    for (unsigned i = first; i < end; i++) codes[i] = to_e4m3(row.value[i] * factor, row.negative[i]);
    if (how != Cast::kFp8Ue8m0)
      scales[first / group] = std::bit_cast<unsigned>(scale);
    else
      ((unsigned char*)scales)[first / group] = (unsigned char)(std::bit_cast<unsigned>(scale) >> 23);
  }
}

// Gives a rank rows of a type, among them NaNs of either sign and infinities; its `x` and `scales` become what
// is expected of their cast. Returns the rows.
std::vector<unsigned> bring_raw(Inputs& r, Cast how, DType dtype, std::mt19937& random) {
  std::vector<unsigned> raw;
  unsigned long long hidden = r.s.row_bytes, all = r.s.max_tokens * hidden;
  // Narrow types read a prefix of it.
  for (unsigned long long i = 0; i < all; i++) {
    float value = (float)(int)(random() % 60001 - 30000) * (i % 999 < 128 ? 0.0f : 0.01f);
    bool wide = dtype == DType::kFp32, brain = dtype == DType::kBf16;
    unsigned bits = wide ? std::bit_cast<unsigned>(value)
                    : brain ? model::bf16x2(value, -value) : model::f16x2(value, -value);
    unsigned infinite = wide ? 0xff800000 : brain ? 0xff80 : 0xfc00;
    raw.push_back(i % 97 < 4 ? ~0u : i % 89 == 0 ? 0x7fff7fffu : i % 1201 == 0 ? infinite : bits);
  }
  r.scales.assign(r.s.max_tokens * r.s.scale_words + 1, 0);
  for (unsigned t = 0; t < r.s.max_tokens; t++) {
    RawRow row;
    for (unsigned i = 0; i < hidden; i++) read_channel(row, raw.data(), dtype, t * hidden + i);
    cast_row(row, how, kScaled, r.x + t * hidden, r.scales.data() + t * r.s.scale_words);
  }
  return raw;
}
