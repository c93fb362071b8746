// Low latency: partial rows of a combine that travel in LogFMT-10. See logfmt.cuh.
//
// Words show their own arrival as those of other rows do, so a lane may take 4 or 8 bytes at once.
#pragma once
#include "decode.cuh"
#include "logfmt.cuh"

namespace ty {

// Partial rows of bf16 that are encoded, and the format of all of them.
struct Coded : Bf16 {};
using CodedRows = LogFmt10;
template <class Partial>
constexpr bool kCodes = false;
template <>
constexpr bool kCodes<Coded> = true;

// Groups of the longest row of which each thread has two pieces.
constexpr u32 kMostGroups = 2 * kWarps * kWave / kGroupPieces<CodedRows>;

// The words of the groups of a thread's pieces: of rows that are encoded.
template <class Partial, u32 N>
struct GroupWords {};
template <u32 N>
struct GroupWords<Coded, N> {
  u32 of[N];
};

// One lane stores, or frees, what lanes share.
__device__ inline bool has_word_of_group() { return lane_id() % kGroupPieces<CodedRows> == 0; }
__device__ inline bool has_word_of_pair() { return lane_id() % 2 == 0; }

// Encodes the chunks of a row that may be encoded. The whole block.
template <u32 N>
__device__ TY_INLINED void encode_row(uint4 (&row)[N], GroupWords<Coded, N>& words, u32 pieces) {
  __shared__ u32 groups[kMostGroups];
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    if (piece_at(j) >= pieces) continue;
    words.of[j] = group_word<CodedRows>(row[j]);
    if (has_word_of_group()) groups[piece_at(j) / kGroupPieces<CodedRows>] = words.of[j];
  }
  sync_block();
  // A chunk has two blocks where the row has an even number of them.
  u32 chunk = (pieces % (2 * kBlockPieces) == 0 ? 2 : 1) * kBlockPieces / kGroupPieces<CodedRows>;
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    if (piece_at(j) >= pieces) continue;
    const u32* of_chunk = groups + piece_at(j) / kGroupPieces<CodedRows> / chunk * chunk;
    bool fits = true;
#pragma unroll 1
    for (u32 i = 0; i < chunk; i++) fits &= may_be_coded(of_chunk[i]);
    if (!fits) continue;
    row[j] = encode_piece<CodedRows>(row[j], words.of[j]);
    words.of[j] |= kIsCoded;
  }
  // The next row has words of its own.
  sync_block();
}

// A word that no word of the encoded row is, as `key_of`. The whole block.
template <u32 N>
__device__ TY_INLINED u32 key_of_coded(const uint4 (&row)[N], const GroupWords<Coded, N>& words, u32 pieces) {
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
__device__ TY_INLINED void store_coded(uint4* to, const uint4 (&row)[N], const GroupWords<Coded, N>& words,
                                       u32 pieces, u32 key) {
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    if (piece_at(j) >= pieces) continue;
    CodedPlace<CodedRows> place(to, piece_at(j));
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
__device__ TY_INLINED uint4 look_at_codes(const CodedPlace<CodedRows>& place) {
  u64 low = load_relaxed(place.low());
  u32 high = load_relaxed(place.high());
  return make_uint4((u32)low, (u32)(low >> 32), high, high);
}
template <u32 N>
__device__ TY_INLINED void look_at_coded(uint4* from, uint4 (&seen)[N], GroupWords<Coded, N>& words, u32 pieces) {
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    if (piece_at(j) >= pieces) continue;
    CodedPlace<CodedRows> place(from, piece_at(j));
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
__device__ TY_INLINED CodedPiece take_coded_piece(const CodedPlace<CodedRows>& place, uint4 piece, u32 word, u32 key,
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
__device__ TY_INLINED void take_coded(uint4* from, uint4 (&row)[N], GroupWords<Coded, N>& words, u32 pieces,
                                      u32 key, const What& what, Guard& guard) {
  // Side by side: one after the other, each would take as long as a load.
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    if (piece_at(j) >= pieces || (words.of[j] != 0 && has_come(row[j]))) continue;
    CodedPlace<CodedRows> place(from, piece_at(j));
    words.of[j] = load_relaxed(place.word());
    row[j] = look_at_codes(place);
  }
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    if (piece_at(j) >= pieces) continue;
    CodedPlace<CodedRows> place(from, piece_at(j));
    CodedPiece taken = take_coded_piece(place, row[j], words.of[j], key, what, guard);
    row[j] = taken.piece, words.of[j] = taken.word;
  }
}

// Adds a row that may be encoded to a sum.
template <class Total, u32 N>
__device__ TY_INLINED void add_coded(Total& total, const uint4 (&row)[N], const GroupWords<Coded, N>& words) {
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    float f[Bf16::kLanes];
    if (words.of[j] & kIsCoded)
      decode_piece<CodedRows>(row[j], words.of[j], f);
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
  blocks = min(blocks, (u32)(s.row_pitch / kBlockBytes<CodedRows>));
#pragma unroll 1
  for (u32 piece = threadIdx.x; piece < blocks * kBlockPieces; piece += blockDim.x) {
    CodedPlace<CodedRows> place(decode_row(c, s, up, c.rank, at), piece);
    take_coded_piece(place, make_uint4(0, 0, 0, 0), 0, key, what, guard);
  }
}

}  // namespace ty
