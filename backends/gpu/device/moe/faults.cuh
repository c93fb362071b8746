// The faults of a routing, in the words that a refusing rank sends with its record: see moe/faults.rs.
#pragma once
#include "entry.cuh"
#include "moe_args.cuh"

namespace ty {

// Word `word` of the text of a refusal.
__device__ TY_COLD u32 text_word(const MoeCommon& c, u32 verdict, u32 word, const GivenId* topk_idx) {
  if (verdict != kRefuseInput || c.passes_on()) return host_word(c, word);
  u64 problem = c.shares->problem, token = problem >> 16, k = problem >> 8 & 0xff;
  bool too_many = (problem & 0xff) == kTooMany;
  i64 found = too_many ? c.input_rows : topk_idx[token * c.topk + k];
  u32 words[] = {(u32)token, (u32)(problem & 0xffff), (u32)found, (u32)((u64)found >> 32)};
  return word < 4 ? words[word] : 0;
}

// The text of a call that has a routing of its own, or null where it has none.
struct RoutingText {
  const MoeCommon& c;
  u32 verdict;
  const GivenId* topk_idx;
  __device__ u32 operator()(u32 word) const { return text_word(c, verdict, word, topk_idx); }
};

}  // namespace ty
