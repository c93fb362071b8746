// The forms of arrays in packed outputs. Included by level.h, once for each of its levels.

// Gives arrays of packed rows their forms: scales by columns or not, and what a source rank adds to `source`.
void take_forms(DecodeArgs& s, const DispatchArgs& a, bool columns, u32 source_step) {
  s.scale_stride[0] = columns ? 1 : a.scale_words, s.scale_stride[1] = columns ? (u32)a.most_tokens() : 1;
  s.source_step = source_step;
}

DecodeArgs plain_forms(const DispatchArgs& a, u32 source_step) {
  DecodeArgs s{};
  take_forms(s, a, false, source_step);
  return s;
}

// The scales of a row in their place.
std::vector<u32> scales_at(const DispatchArgs& a, const u8* all, u64 slot, const DecodeArgs& forms) {
  u64 most = a.most_tokens(), first = slot / most * most * a.scale_words + slot % most * forms.scale_stride[0];
  std::vector<u32> scales;
  for (u32 w = 0; w < a.scale_words; w++) scales.push_back(((const u32*)all)[first + (u64)w * forms.scale_stride[1]]);
  return scales;
}
