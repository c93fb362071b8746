// Low latency: where rows and records lie in the inbox, and how they show their own arrival. See decode.cuh.
#pragma once
#include "masking.cuh"

namespace ty {

// The place of the rows and records of one writer and token.
__device__ inline u64 place_of(const Common& c, u32 writer, u32 token) {
  return ((u64)c.slot() * c.ranks + writer) * c.max_tokens + token;
}
template <class Up>
__device__ uint4* decode_row(const Common& c, const DecodeArgs& s, const Up& up, u32 peer, u64 place) {
  return reinterpret_cast<uint4*>(up.peer_ptr(kControl, peer, s.rows + place * s.row_pitch));
}
template <class Up>
__device__ uint4* decode_record(const Common& c, const DecodeArgs& s, const Up& up, u32 peer, u64 place) {
  return reinterpret_cast<uint4*>(up.peer_ptr(kControl, peer, s.records + place * s.record_pitch));
}
// Words of `source`'s report about its rows at `peer`.
__device__ inline u32 report_words(const Common& c, const DecodeArgs& s) { return s.token_words + c.local_experts(); }
template <class Up>
__device__ u64* decode_word(const Common& c, const DecodeArgs& s, const Up& up, u32 peer, u32 source, u32 word) {
  u64 at = ((u64)c.slot() * c.ranks + source) * report_words(c, s) + word;
  return reinterpret_cast<u64*>(up.peer_ptr(kControl, peer, s.words + 8 * at));
}

// --- Rows. A block has one at a time, each thread up to N pieces of it, as far apart as a block is long.

__device__ inline u32 piece_at(u32 j) { return threadIdx.x + j * blockDim.x; }

// The place of the `rank`-th bit that is set, counted from 0.
__device__ inline u32 nth_bit(u32 bits, u32 rank) {
  u32 at = 0;
#pragma unroll
  for (u32 half = 16; half > 0; half /= 2) {
    u32 below = popc(bits >> at & ((1u << half) - 1));
    if (rank < below) continue;
    rank -= below;
    at += half;
  }
  return at;
}

__device__ inline bool has_word(const uint4& v, u32 word) {
  return v.x == word || v.y == word || v.z == word || v.w == word;
}
__device__ inline bool has_come(const uint4& v) { return !has_word(v, 0); }
__device__ inline uint4 with_key(const uint4& v, u32 key) {
  return make_uint4(v.x ^ key, v.y ^ key, v.z ^ key, v.w ^ key);
}

// The place of a thread's piece `j`, of M, in a row of P parts of `pieces` each.
template <u32 P, u32 M>
__device__ inline u32 place_in(u32 j, u32 pieces) { return piece_at(j % (M / P)) + j / (M / P) * pieces; }
template <u32 P, u32 M>
__device__ inline bool is_inside(u32 j, u32 pieces) { return piece_at(j % (M / P)) < pieces; }

// A word that the row does not have. The whole block. The keys that are tried all differ, so it takes at
// most one more try than the row has words, and usually one.
template <u32 P = 1, u32 M>
__device__ TY_INLINED u32 key_of(const uint4 (&row)[M], u32 pieces) {
  for (u32 attempt = 0;; attempt++) {
    u32 key = ~(attempt * 0x9e3779b9u);
    bool taken = false;
#pragma unroll
    for (u32 j = 0; j < M; j++)
      if (is_inside<P, M>(j, pieces)) taken |= has_word(row[j], key);
    if (!sync_block_or(taken)) return key;
  }
}

template <u32 P = 1, u32 M>
__device__ TY_INLINED void store_decode_row(uint4* to, const uint4 (&row)[M], u32 pieces, u32 key) {
#pragma unroll
  for (u32 j = 0; j < M; j++)
    if (is_inside<P, M>(j, pieces)) store_16_relaxed(to + place_in<P, M>(j, pieces), with_key(row[j], key));
}


// Whether a lane's selection, of an expert of `rank`, is the last one of its token for that rank: it
// represents the rank. The whole warp.
__device__ TY_INLINED bool stands_for(bool selects, u32 rank) {
  Lanes like = match_any(selects ? (i32)rank : -1 - (i32)lane_id());
  return selects && like >> lane_id() == 1;
}

// --- Records: of each entry two values and their epochs, 16 bytes. Entry 0 has the key in its first half, entry
// 1 + k the metadata of selection k. In a combine owners write the first halves, and sources the second ones: the
// selections that count, as bits, and the weights, where the call has its own.

__device__ inline void store_entry(uint4* at, u32 epoch, u32 first, u32 second) {
  store_16_relaxed(at, make_uint4(first, epoch, second, epoch));
}
__device__ inline u64* first_half(uint4* at) { return reinterpret_cast<u64*>(at); }
__device__ inline u64* second_half(uint4* at) { return reinterpret_cast<u64*>(at) + 1; }

// A row in the inbox of this rank, and its record.
struct DecodePlace {
  uint4 *row, *record;
  u32 pieces;  // of each part of the row

  template <class Up>
  __device__ DecodePlace(const Common& c, const DecodeArgs& s, const Up& up, u64 place, u32 pieces)
      : row(decode_row(c, s, up, c.rank, place)), record(decode_record(c, s, up, c.rank, place)), pieces(pieces) {}
};

// An entry of a record, where this lane has one: nothing else waits for it.
struct NoEntry {
  __device__ void look(const uint4*, u32) {}
  __device__ bool is_there(const uint4*, u32) { return true; }
};
struct SeenEntry {
  uint4 seen;
  bool is_mine;

  __device__ TY_INLINED void look(const uint4* record, u32) {
    if (is_mine) seen = load_16_relaxed(record + 1 + lane_id());
  }
  __device__ TY_INLINED bool is_there(const uint4* record, u32 epoch) {
    if (is_mine && (seen.y != epoch || seen.w != epoch)) look(record, epoch);
    return !is_mine || (seen.y == epoch && seen.w == epoch);
  }
};

// A row that arrives: the last reads of its pieces, of its key and of this lane's entry. A thread has M pieces of the P
// parts of a row.
template <u32 M, u32 P, class Entry>
struct Arriving {
  uint4 piece[M];
  u64 key;  // epoch << 32 | key
  Entry entry;

  // First reads, of what may not have arrived.
  __device__ TY_INLINED void look(const DecodePlace& at) {
    key = load_relaxed(first_half(at.record));
    entry.look(at.record, 0);
#pragma unroll
    for (u32 j = 0; j < M; j++)
      if (is_inside<P, M>(j, at.pieces)) piece[j] = load_16_relaxed(at.row + place_in<P, M>(j, at.pieces));
  }
  // Waits for all of them. Reads of those that have not arrived are made again side by side: one behind the other,
  // each would take as long as a load.
  __device__ TY_INLINED void poll(const DecodePlace& at, const What& what, Guard& guard) {
    u32 epoch = (u32)what.expected;
    guard.until(
        what,
        [&]() -> u64 {
          if (key >> 32 != epoch) key = load_relaxed(first_half(at.record));
          bool there = entry.is_there(at.record, epoch);
#pragma unroll
          for (u32 j = 0; j < M; j++)
            if (is_inside<P, M>(j, at.pieces) && !has_come(piece[j]))
              piece[j] = load_16_relaxed(at.row + place_in<P, M>(j, at.pieces));
#pragma unroll
          for (u32 j = 0; j < M; j++) there &= !is_inside<P, M>(j, at.pieces) || has_come(piece[j]);
          return there ? key >> 32 : 0;
        },
        [&](u64 found) { return found == epoch; });
  }
  // Takes the row out of decode. Its places are free then, also where the wait was ended, and nothing is taken.
  __device__ TY_INLINED void take(const DecodePlace& at) {
#pragma unroll
    for (u32 j = 0; j < M; j++) {
      if (!is_inside<P, M>(j, at.pieces)) continue;
      store_16_relaxed(at.row + place_in<P, M>(j, at.pieces), make_uint4(0, 0, 0, 0));
      piece[j] = with_key(piece[j], (u32)key);
    }
  }
};

}  // namespace ty
