// Partial rows in LogFMT-10: ten bits a value, on their way to the sources of a low-latency combine.
//
// The format, and why its bits are those of every kernel set, are in core/src/moe/logfmt.rs. A block of this
// file has 512 channels, which are 64 pieces of 16 bytes: the words of its groups, then the pieces, or, where the
// block is encoded, half as many bytes with the low bits of all codes, and a quarter of that with the others.
// Each block of a row has its place, and its first words say which of its bytes come. Words show their own
// arrival as those of other rows do, so a lane may take 4 or 8 bytes at once.
//
// The lanes of a group, and of two pieces that share a word of high bits, are neighbours in one warp: rows have
// whole blocks, and blocks of threads are multiples of 64.
#pragma once
#include "decode.cuh"

namespace ty {

// Partial rows of bf16 that are encoded.
struct LogFmt10 : Bf16 {};
template <class Partial>
constexpr bool kCodes = false;
template <>
constexpr bool kCodes<LogFmt10> = true;

constexpr u32 kBlockPieces = 64, kBlockBytes = 1040, kGroupPieces = 16, kGroupWordBytes = 16;
// Groups of the longest row of which each thread has two pieces.
constexpr u32 kMostGroups = 2 * kWarps * kWave / kGroupPieces;
// In the word of a group: its chunk is encoded.
constexpr u32 kIsCoded = 1u << 31;
// Exponent fields of the largest magnitude of a group that is encoded.
constexpr u32 kLeastExponent = 37, kOneExponent = 127;
// Powers of two that the codes of a group span at most: 2^5.
constexpr float kCodeDepth = 0x1p5f;

// The words of the groups of a thread's pieces: of rows that are encoded.
template <class Partial, u32 N>
struct GroupWords {};
template <u32 N>
struct GroupWords<LogFmt10, N> {
  u32 of[N];
};

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
struct GroupScale {
  u32 base;  // the exponent field of the largest magnitude
  float bottom, range, step;

  __device__ TY_INLINED explicit GroupScale(u32 word) : base(word >> 23 & 0xff) {
    float unit = whole_float(base);
    float top = log2_of(word >> 16 & 0x7fff, unit);
    bottom = fmaxf(log2_of(word & 0x7fff, unit), add_rn(top, -kCodeDepth));
    range = add_rn(top, -bottom);
    step = mul_rn(range, 1.0f / 510.0f);
  }
  // The value of a code with its sign in bit 9.
  __device__ TY_INLINED float value(u32 code) const {
    constexpr float kWhole = 12582912.0f;
    u32 sign = code << 22 & 1u << 31;
    code &= 0x1ff;
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
struct GroupCoder : GroupScale {
  float unit, inverse, rounding;

  __device__ TY_INLINED explicit GroupCoder(u32 word) : GroupScale(word), unit(whole_float(base)) {
    inverse = div_rn(510.0f, range);
    rounding = fma_rn(-bottom, inverse, fma_rn(-0.0866434f, step, 1.5f));
  }
  // The code of a number of bf16.
  __device__ TY_INLINED u32 code(u32 bits) const {
    float at = fma_rn(log2_of(bits & 0x7fff, unit), inverse, rounding);
    return (u32)fmaxf(at, 0.0f) | (bits & 0x8000) >> 6;
  }
};

// --- Pieces

// The word of the group of this lane's piece. The whole warp.
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
  for (u32 other = kGroupPieces / 2; other > 0; other /= 2) {
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
__device__ TY_INLINED uint4 encode_piece(const uint4& piece, u32 word) {
  GroupCoder coder(word);
  const u32* words = &piece.x;
  u32 low[2] = {0, 0}, high = 0;
#pragma unroll
  for (u32 i = 0; i < 8; i++) {
    u32 code = coder.code(words[i / 2] >> 16 * (i % 2) & 0xffff);
    low[i / 4] |= (code & 0xff) << 8 * (i % 4);
    high |= code >> 8 << 2 * i;
  }
  u32 other = shfl_xor(high, 1u);
  high = lane_id() % 2 == 0 ? high | other << 16 : other | high << 16;
  return make_uint4(low[0], low[1], high, high);
}
__device__ TY_INLINED void decode_piece(const uint4& piece, u32 word, float* values) {
  GroupScale scale(word);
  const u32* low = &piece.x;
  u32 high = piece.z >> 16 * (lane_id() % 2);
#pragma unroll
  for (u32 i = 0; i < 8; i++)
    values[i] = scale.value((low[i / 4] >> 8 * (i % 4) & 0xff) | (high >> 2 * i & 3) << 8);
}

// The places of a piece in a row of the inbox.
struct CodedPlace {
  u8* block;
  u32 piece;  // of the block

  __device__ CodedPlace(uint4* row, u32 at)
      : block(reinterpret_cast<u8*>(row) + (u64)(at / kBlockPieces) * kBlockBytes), piece(at % kBlockPieces) {}
  __device__ u32* word() const { return reinterpret_cast<u32*>(block) + piece / kGroupPieces; }
  __device__ uint4* plain() const { return reinterpret_cast<uint4*>(block + kGroupWordBytes) + piece; }
  __device__ u64* low() const { return reinterpret_cast<u64*>(block + kGroupWordBytes) + piece; }
  __device__ u32* high() const {
    return reinterpret_cast<u32*>(block + kGroupWordBytes + 8 * kBlockPieces) + piece / 2;
  }
};

// One lane stores, or frees, what lanes share.
__device__ inline bool has_word_of_group() { return lane_id() % kGroupPieces == 0; }
__device__ inline bool has_word_of_pair() { return lane_id() % 2 == 0; }

// --- Rows

// Encodes the chunks of a row that may be encoded. The whole block.
template <u32 N>
__device__ TY_INLINED void encode_row(uint4 (&row)[N], GroupWords<LogFmt10, N>& words, u32 pieces) {
  __shared__ u32 groups[kMostGroups];
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    if (piece_at(j) >= pieces) continue;
    words.of[j] = group_word(row[j]);
    if (has_word_of_group()) groups[piece_at(j) / kGroupPieces] = words.of[j];
  }
  sync_block();
  // A chunk has two blocks where the row has an even number of them.
  u32 chunk = (pieces % (2 * kBlockPieces) == 0 ? 2 : 1) * kBlockPieces / kGroupPieces;
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    if (piece_at(j) >= pieces) continue;
    const u32* of_chunk = groups + piece_at(j) / kGroupPieces / chunk * chunk;
    bool fits = true;
#pragma unroll 1
    for (u32 i = 0; i < chunk; i++) fits &= may_be_coded(of_chunk[i]);
    if (!fits) continue;
    row[j] = encode_piece(row[j], words.of[j]);
    words.of[j] |= kIsCoded;
  }
  // The next row has words of its own.
  sync_block();
}

// A word that no word of the encoded row is, as `key_of`. The whole block.
template <u32 N>
__device__ TY_INLINED u32 key_of_coded(const uint4 (&row)[N], const GroupWords<LogFmt10, N>& words, u32 pieces) {
  for (u32 attempt = 0;; attempt++) {
    u32 key = ~(attempt * 0x9e3779b9u);
    bool taken = false;
#pragma unroll
    for (u32 j = 0; j < N; j++)
      if (piece_at(j) < pieces) taken |= has_word(row[j], key) || words.of[j] == key;
    if (!sync_block_or(taken)) return key;
  }
}

template <u32 N>
__device__ TY_INLINED void store_coded(uint4* to, const uint4 (&row)[N], const GroupWords<LogFmt10, N>& words,
                                       u32 pieces, u32 key) {
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    if (piece_at(j) >= pieces) continue;
    CodedPlace place(to, piece_at(j));
    uint4 v = with_key(row[j], key);
    if (has_word_of_group()) store_relaxed(place.word(), words.of[j] ^ key);
    if (!(words.of[j] & kIsCoded)) {
      store_16_relaxed(place.plain(), v);
      continue;
    }
    store_relaxed(place.low(), (u64)v.y << 32 | v.x);
    if (has_word_of_pair()) store_relaxed(place.high(), v.z);
  }
}

// A read of the codes of a piece, which may not have arrived, or be no codes.
__device__ TY_INLINED uint4 look_at_codes(const CodedPlace& place) {
  u64 low = load_relaxed(place.low());
  u32 high = load_relaxed(place.high());
  return make_uint4((u32)low, (u32)(low >> 32), high, high);
}
template <u32 N>
__device__ TY_INLINED void look_at_coded(uint4* from, uint4 (&seen)[N], GroupWords<LogFmt10, N>& words, u32 pieces) {
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    if (piece_at(j) >= pieces) continue;
    CodedPlace place(from, piece_at(j));
    words.of[j] = load_relaxed(place.word());
    seen[j] = look_at_codes(place);
  }
}

// A piece of a row that may be encoded, with the word of its group.
struct CodedPiece {
  uint4 piece;
  u32 word;
};

// Takes a piece out of the inbox, of which the last reads are given: of its codes, and of the word of its group. Its
// places are free then, also where the wait was ended, and nothing is taken. The whole warp.
__device__ TY_INLINED CodedPiece take_coded_piece(const CodedPlace& place, uint4 piece, u32 word, u32 key,
                                                  const What& what, Guard& guard) {
  // The words that were read are no part of a plain piece.
  if (word != 0 && !((word ^ key) & kIsCoded)) piece = make_uint4(0, 0, 0, 0);
  guard.until(
      what,
      [&]() -> u64 {
        if (word == 0) {
          word = load_relaxed(place.word());
          piece = make_uint4(0, 0, 0, 0);
        }
        if (word == 0) return 0;
        if (!has_come(piece))
          piece = (word ^ key) & kIsCoded ? look_at_codes(place) : load_16_relaxed(place.plain());
        return has_come(piece);
      },
      [](u64 there) { return there != 0; });
  // All lanes have read the words that they share.
  sync_wave();
  if (has_word_of_group()) store_relaxed(place.word(), 0u);
  bool is_plain = word != 0 && !((word ^ key) & kIsCoded);
  if (is_plain || word == 0) store_16_relaxed(place.plain(), make_uint4(0, 0, 0, 0));
  if (!is_plain) {
    store_relaxed(place.low(), 0ull);
    if (has_word_of_pair()) store_relaxed(place.high(), 0u);
  }
  return {with_key(piece, key), word ^ key};
}

// Takes a row that `look_at_coded` has looked at.
template <u32 N>
__device__ TY_INLINED void take_coded(uint4* from, uint4 (&row)[N], GroupWords<LogFmt10, N>& words, u32 pieces,
                                      u32 key, const What& what, Guard& guard) {
  // Side by side: one after the other, each would take as long as a load.
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    if (piece_at(j) >= pieces || (words.of[j] != 0 && has_come(row[j]))) continue;
    CodedPlace place(from, piece_at(j));
    words.of[j] = load_relaxed(place.word());
    row[j] = look_at_codes(place);
  }
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    if (piece_at(j) >= pieces) continue;
    CodedPiece taken = take_coded_piece(CodedPlace(from, piece_at(j)), row[j], words.of[j], key, what, guard);
    row[j] = taken.piece, words.of[j] = taken.word;
  }
}

// Adds a row that may be encoded to a sum.
template <class Total, u32 N>
__device__ TY_INLINED void add_coded(Total& total, const uint4 (&row)[N], const GroupWords<LogFmt10, N>& words) {
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    float f[Bf16::kLanes];
    if (words.of[j] & kIsCoded)
      decode_piece(row[j], words.of[j], f);
    else
      Bf16::widen(row[j], f);
    auto& sum = total.sum[j];
#pragma unroll
    for (u32 i = 0; i < Bf16::kLanes; i++) sum.value[i] = add_rn(sum.value[i], f[i]);
    sum.empty = false;
  }
}

// Removes a row that no rank wants. The whole block.
template <class Up>
__device__ void drain_coded(const Common& c, const DecodeArgs& s, const Up& up, u32 source, u32 token, u32 blocks,
                            Guard& guard) {
  u64 at = place_of(c, source, token);
  What what{kPhaseRows, source, token, c.epoch()};
  u32 key = poll_seen(first_half(decode_record(c, s, up, c.rank, at)), 0, what, guard);
  blocks = min(blocks, (u32)(s.row_pitch / kBlockBytes));
#pragma unroll 1
  for (u32 piece = threadIdx.x; piece < blocks * kBlockPieces; piece += blockDim.x) {
    CodedPlace place(decode_row(c, s, up, c.rank, at), piece);
    take_coded_piece(place, make_uint4(0, 0, 0, 0), 0, key, what, guard);
  }
}

}  // namespace ty
