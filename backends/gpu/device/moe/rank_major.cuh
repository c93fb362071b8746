// Rank-major on the owner's side. Each source has a block of M places here, in which its rows come first. So only the
// base of row numbers differs from that of flat rows, and the region is that of R*M flat rows. No rank stores behind
// the last row of a block.
#pragma once
#include "put_rows.cuh"

namespace ty {

// Repeats a word. Addresses and lengths are multiples of 4.
__device__ inline void fill(u64 to, u64 bytes, u32 word, const Threads& some) {
  if (((to | bytes) & 15) == 0) {
    uint4 words = make_uint4(word, word, word, word);
    for (u64 at = 16 * (u64)some.index; at < bytes; at += 16 * (u64)some.count)
      *reinterpret_cast<uint4*>(to + at) = words;
    return;
  }
  for (u64 at = 4 * (u64)some.index; at < bytes; at += 4 * (u64)some.count) *reinterpret_cast<u32*>(to + at) = word;
}

// Marks the places here that have no token, and clears the rest of them if the call asks for that. The warps that move
// row metadata, of all blocks; one of them has run `note_counts`.
__device__ inline void close_blocks(const DispatchArgs& a, const DispatchTables& t) {
  constexpr u32 kFirst = kWarps - kMetadataWarps, kThreads = kMetadataWarps * kWave;
  if (wave_id() < kFirst) return;
  // A combine may name each place.
  if (blockIdx.x == 0 && threadIdx.x == (kWarps - 1) * kWave) a.r.note->rows = a.most_tokens();
  Threads some{blockIdx.x * kThreads + threadIdx.x - kFirst * kWave, gridDim.x * kThreads};
  u32 me = a.c.rank;
  u64 by_k = 4 * (u64)a.c.topk;
#pragma unroll 1
  for (u32 s = 0; s < a.c.ranks; s++) {
    u32 came = *counts_for(a, t, s, me);
    if (came >= a.call_tokens) continue;
    u64 first = (u64)s * a.call_tokens + came, rows = a.call_tokens - came;
    auto clear = [&](const u64* table, u64 width, u32 word) {
      fill(table[me] + first * width, rows * width, word, some);
    };
    clear(t.ids, by_k, ~0u);
    clear(t.source, 4, ~0u);
    if (!a.zero_padding) continue;
    clear(t.x, a.row_bytes, 0);
    clear(t.scales, 4 * (u64)a.scale_words, 0);
    if (a.weights) clear(t.weights, by_k, 0);
  }
}

}  // namespace ty
