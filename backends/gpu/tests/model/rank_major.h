// The places of rank-major rows in an output. Included by level.h, once for each of its levels.

// The layout of kernels is that of flat rows.
constexpr Layout kRankMajor = Layout(4);

// Whether a token has one row at each of its ranks.
bool has_row_per_token(Layout layout) { return layout == Layout::kFlat || layout == kRankMajor; }

void take_layout(DispatchArgs& a, Layout layout) {
  a.rank_major = layout == kRankMajor;
  a.layout = a.rank_major ? Layout::kFlat : layout, a.worst = a.rank_major;
}

// The first of the M places of a source.
u64 block_of(const DispatchArgs& a, const Inputs& source) { return (u64)source.me * a.call_tokens; }

// Behind the rows of a source, nothing is named, and the rest is zero if the call asks for that.
void check_behind(const Inputs& source, const DispatchArgs& a, const u8* base, const Region& region, u64 came) {
  u64 first = block_of(a, source) + came, rows = a.call_tokens - came, by_k = 4ull * a.c.topk;
  auto check = [&](const std::string& what, u64 at, u64 width, u8 byte) {
    bool clear = all_are(byte, base + at + first * width, rows * width);
    same(what + " behind the rows of rank " + std::to_string(source.me), clear, true);
  };
  check("ids", region.ids, by_k, 0xff);
  check("sources", region.source, 4, 0xff);
  if (!a.zero_padding) return;
  check("rows", 0, a.row_bytes, 0);
  check("scales", region.scales, 4ull * a.scale_words, 0);
  check("weights", region.weights, by_k, 0);
}
