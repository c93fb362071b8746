// The arguments of low-latency operations. Mirrored in moe/args.rs; TY_ARGS_BYTES checks the sizes.
#pragma once
#include "moe_args.cuh"

namespace ty {

// The inbox of low-latency rows, in the control windows of all ranks: see decode.cuh. Places
// are of [slots, R] ranks that write, and each rank has places for M tokens.
struct DecodeArgs {
  u64 words;         // offset of reports on rows: [token_words + El] words {epoch, value} per rank
  u64 records;       // offset of records: [M] each
  u64 rows;          // offset of rows: [M] each
  u64 row_pitch;     // bytes from one row to the next
  u32 record_pitch;  // the same for records
  u32 token_words;   // 32-bit words of a set of a rank's tokens
  u32 phases;        // the phases that the kernel runs: kSends, kReceives
  u32 senders;       // blocks that only send, while the others only receive; 0: each does both
  Masking masking;
  i64* waited_ns;      // [R]: the time of waits for each rank's head is added; or null
  u32* expert_totals;  // [El]: the rows of each local expert are added; or null
  u32 scale_stride[2];  // of received scales: words from a row of an expert to the next, and from a word to the next
  u32 source_step;      // what `source` adds for each source rank: M, or 0 where it is the token alone
  u32 topk_factor;      // see `quotient`: of K, M, token_words, token_words + El, and R
  u32 tokens_factor;
  u32 words_factor;
  u32 report_factor;
  u32 ranks_factor;
};

// Low latency: see decode_dispatch.cuh, and decode_rank_major.cuh.
struct DecodeDispatchArgs {
  DispatchArgs dispatch;
  DecodeArgs decode;
  u32* sources;  // rank-major: [R * M of the call], for the handle: as in DecodeCombineArgs
};

// Low latency, the return path: see decode_combine.cuh. No field of `combine` names rows in an
// arena.
struct DecodeCombineArgs {
  CombineArgs combine;
  MergeArgs merge;         // the sum that is made here; `out` and `out_weights` are not written
  DecodeArgs decode;
  // [N]: source rank * M + source token. Rank-major: of each place, ~0 if it has no row; a row is at its place, and
  // `merge.slots` is null.
  const u32* sources;
  // [T, K]: weights of this call instead of the dispatch's, and ids, of which negative ones drop a term; or null.
  const float* topk_weights;
  const i64* topk_idx;
  // [T]: selections of each token that are left out of its sum, with their ranks; or null.
  u8* missing;

  __device__ bool weighted() const { return topk_weights || merge.dispatch_weights; }
  // Masks leave no rank out of rank-major rows, so their kernels lack the code for these.
  __device__ bool is_rank_major() const { return !kMasks && combine.source_places != 0; }
};

// This rank does not take part: see `refuse_decode`.
struct DecodeRefusalArgs {
  Common c;
  DecodeArgs decode;
};

#ifdef TY_ARGS_BYTES
static_assert(sizeof(DecodeDispatchArgs) == kHostBytes[11] && sizeof(DecodeCombineArgs) == kHostBytes[12] &&
              sizeof(DecodeRefusalArgs) == kHostBytes[13],
              "moe/args.rs and decode_args.cuh differ");
#endif

}  // namespace ty
