// Low-latency operations: several ranks whose rows are sent without a request, one operation after the other,
// in one kernel and in halves, with one rank late, with flat operations between them, refused ones and ended waits.
#define MODEL_SLOTS 4
#define MODEL_DECODE (6 << 20)
#include "helpers.h"
#include "exchange.cu"
#include "level.h"
#include <map>
#include <mutex>
#include "casts.h"
#include "logfmt.h"

using Ranks = std::vector<Rank*>;

std::vector<Inputs*> inputs_of(const Ranks& ranks) { return std::vector<Inputs*>(ranks.begin(), ranks.end()); }

Ranks all_ranks(const Shape& shape) {
  Ranks ranks;
  for (u32 i = 0; i < shape.ranks; i++) ranks.push_back(new Rank(shape, i));
  return ranks;
}

// Runs on all ranks at once; one of them is late now and then.
template <class Run>
void on_all(const Ranks& ranks, std::mt19937& random, Run run) {
  std::vector<std::thread> running;
  u32 late = random() % (2 * ranks.size());
  for (u32 i = 0; i < ranks.size(); i++)
    running.emplace_back([&, i] {
      if (i == late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      run(*ranks[i], i);
    });
  for (auto& t : running) t.join();
}

// How an operation runs.
enum class Way { kAtOnce, kByRole, kHalves };

DecodeArgs decode_of(const Rank& r, Way way) {
  DecodeArgs s{};
  u32 ranks = r.s.ranks, most = r.s.most();
  s.token_words = (most + 31) / 32;
  s.record_pitch = 16 * (1 + r.s.topk);
  s.topk_factor = factor_of(r.s.topk), s.tokens_factor = factor_of(most);
  s.words_factor = factor_of(s.token_words), s.report_factor = factor_of(s.token_words + r.s.local());
  s.ranks_factor = factor_of(ranks);
  // Sums that are rounded once are sent as f32.
  s.row_pitch = align_region(2 * r.s.row_bytes + 4 * r.s.scale_words + 16);
  s.words = kDecodeAt;
  s.records = s.words + align_region(8ull * kSlots * ranks * (s.token_words + r.s.local()));
  s.rows = s.records + align_region((u64)kSlots * ranks * most * s.record_pitch);
  if (s.rows + (u64)kSlots * ranks * most * s.row_pitch > kControlBytes) fail("the inbox is too small");
  s.phases = kSends | kReceives;
  // One of them posts heads, the others send rows.
  s.senders = way == Way::kByRole ? 3 : 0;
  s.masking = r.masking;
  return s;
}

u32 blocks_of(const DecodeArgs& s) { return kBlocks + s.senders; }

// The whole inbox of a rank, as it is when no operation is open.
void check_clean(const Rank& r, const std::string& when) {
  DecodeArgs s = decode_of(r, Way::kAtOnce);
  bool clean = all_are(0, r.control + s.rows, (u64)kSlots * r.s.ranks * r.s.most() * s.row_pitch);
  same("inbox of rank " + std::to_string(r.me) + " is free " + when, clean, true);
}

// Rows whose bytes look like an empty inbox, or like a key.
void bring_anything(Rank& r, std::mt19937& random) {
  u32* words = (u32*)r.x;
  u32 all = r.tokens * r.s.row_bytes / 4, pick = 0;
  for (u32 i = 0; i < all; i++) {
    u32 token = i / (r.s.row_bytes / 4);
    // The first row is all ones, the second has keys that are tried, the others have random bytes.
    if (token == 0)
      words[i] = ~0u;
    else if (token == 1)
      words[i] = ~(i % 40 * 0x9e3779b9u);
    else if ((pick = random() % 8) < 3)
      words[i] = pick == 0 ? 0u : pick == 1 ? ~0u : 0xffff7fffu;
  }
  for (u32 i = 0; i < r.tokens * r.s.scale_words; i++)
    if (random() % 3 == 0) r.scales[i] = ~0u;
}

// M of calls for rank-major rows; 0: rows are packed.
u32 by_rank = 0;

// The part of a rank's handle that rank-major rows have.
u32* sources_of(const Rank& r) {
  static std::mutex mutex;
  static std::map<const Rank*, u32*> all;
  std::lock_guard lock(mutex);
  u32*& sources = all[&r];
  return sources ? sources : sources = room<u32>((u64)r.s.ranks * r.s.most());
}

DecodeDispatchArgs decode_dispatch(Rank& r, bool replay, Way way) {
  if (by_rank) {
    DecodeDispatchArgs a{dispatch_args(r, kRankMajor, replay), decode_of(r, way), sources_of(r)};
    a.dispatch.call_tokens = by_rank, a.decode.senders = 0;
    return a;
  }
  DecodeDispatchArgs a{dispatch_args(r, Layout::kPacked, replay), decode_of(r, way), nullptr};
  a.dispatch.tile_rows = 0, a.dispatch.worst = 1;
  // Each rank has forms of its own.
  take_forms(a.decode, a.dispatch, (r.operations + r.me) % 2, (r.operations / 4 + r.me) % 2 * r.s.max_tokens);
  return a;
}

// The kernel for longer rows, as the host chooses it.
bool is_long_for(u32 pieces, u32 each) { return pieces > each * kWarps * kWave; }

void run_decode(const DecodeDispatchArgs& a, const Up::Params& params, bool is_long) {
#if !TY_MASKS
  if (a.dispatch.rank_major && a.dispatch.casts())
    return is_long ? ty_dispatch_decode_rank_major_cast_long(a, params) : ty_dispatch_decode_rank_major_cast(a, params);
  if (a.dispatch.rank_major)
    return is_long ? ty_dispatch_decode_rank_major_long(a, params) : ty_dispatch_decode_rank_major(a, params);
#endif
  if (a.dispatch.casts())
    is_long ? ty_dispatch_decode_cast_long(a, params) : ty_dispatch_decode_cast(a, params);
  else
    is_long ? ty_dispatch_decode_long(a, params) : ty_dispatch_decode(a, params);
}

// A block that starts later than the others: when `hold` returns.
struct Late {
  u32 block = ~0u;
  std::function<void()> hold = [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
};

void launch_decode(Rank& r, const DecodeDispatchArgs& a, u32 phases, const Late& late = {}) {
  DecodeDispatchArgs part = a;
  part.decode.phases = phases;
  bool is_long = is_long_for(sent_pieces(a.dispatch), a.dispatch.casts() ? 1 : 2);
  model::launch(blocks_of(part.decode), kWarps * kWave, [=, &r] {
    if (blockIdx.x == late.block && threadIdx.x == 0) late.hold();
    run_decode(part, r.params(), is_long);
  });
}

void no_ended_wait(const Rank& r) { same("an ended wait of rank " + std::to_string(r.me), r.report->ended, 0u); }

// Where the host does not wait: the outcome in the region.
Outcome reported_to(Rank& r, const DispatchArgs& a) {
  Outcome outcome = *r.outcome;
  if (!a.c.no_host_sync) same("ticket of the outcome", outcome.epoch, a.c.ticket);
  outcome.code = a.c.cell->code, outcome.rows = a.c.local_experts() * a.most_tokens();
  outcome.tokens = *(u64*)(r.arena + a.region + region_of(a, outcome).totals);
  return outcome;
}

void check_packed(const Ranks& ranks, const std::vector<DecodeDispatchArgs>& args) {
  for (u32 d = 0; d < ranks.size(); d++) {
    const DispatchArgs& a = args[d].dispatch;
    no_ended_wait(*ranks[d]);
    Outcome outcome = reported_to(*ranks[d], a);
    same("dispatch", outcome.code, kGo);
    check_received(inputs_of(ranks), d, a, ranks[d]->arena + a.region, outcome, args[d].decode);
    Region region = region_of(a, outcome);
    const u32 *counts = (u32*)(ranks[d]->arena + a.region + region.rank_counts),
              *ends = (u32*)(ranks[d]->arena + a.region + region.rank_ends);
    for (u32 s = 0, sum = 0; s < ranks.size(); s++) same("rows up to a source", ends[s], sum += counts[s]);
    // A copy of the output reads them.
    if (by_rank) same("rows, as tokens", ((u64*)(ranks[d]->arena + a.region + region.totals))[1], outcome.tokens);
    check_clean(*ranks[d], "behind a dispatch");
  }
}

std::vector<DecodeDispatchArgs> dispatch_all(const Ranks& ranks, std::mt19937& random, bool replay, Way way,
                                             bool no_host_sync = false) {
  std::vector<DecodeDispatchArgs> args;
  for (Rank* r : ranks) {
    memset(r->arena, 0xee, kArenaBytes);
    args.push_back(decode_dispatch(*r, replay, way));
    if (no_host_sync) args.back().dispatch.c.no_host_sync = 1, args.back().dispatch.c.outcome = r->late;
    if (no_host_sync && !replay) *r->tokens_word = r->tokens, args.back().dispatch.tokens = r->tokens_word;
  }
  if (way == Way::kHalves) {
    // One after the other: a sender waits for no rank.
    for (u32 i = 0; i < ranks.size(); i++) launch_decode(*ranks[i], args[i], kSends);
    on_all(ranks, random, [&](Rank& r, u32 i) { launch_decode(r, args[i], kReceives); });
  } else {
    on_all(ranks, random, [&](Rank& r, u32 i) { launch_decode(r, args[i], kSends | kReceives); });
  }
  return args;
}

// The row of each source's selections at its owner: [source][token][k].
using Slots = std::vector<std::vector<std::vector<i64>>>;
Slots slots_of(const Ranks& ranks) {
  Shape s = ranks[0]->s;
  Slots slots(s.ranks);
  std::vector<u32> next(s.experts);
  for (Rank* r : ranks)
    for (u32 t = 0; t < r->tokens; t++) {
      slots[r->me].emplace_back(s.topk, -1);
      for (u32 k = 0; k < s.topk; k++) {
        i64 e = r->topk[t * s.topk + k];
        if (e >= 0) slots[r->me][t][k] = e % s.local() * s.ranks * s.max_tokens + next[e]++;
      }
    }
  return slots;
}

float from_bf16(u16 bits) { return std::bit_cast<float>((u32)bits << 16); }

// Values of a row, f32 or bf16.
struct Elements {
  bool narrow;
  u32 bytes() const { return narrow ? 2 : 4; }
  float get(const u8* at, u64 i) const { return narrow ? from_bf16(((u16*)at)[i]) : ((float*)at)[i]; }
  void set(u8* at, u64 i, float value) const {
    if (narrow)
      ((u16*)at)[i] = (u16)model::bf16(value);
    else
      ((float*)at)[i] = value;
  }
  float round(float value) const { return narrow ? from_bf16((u16)model::bf16(value)) : value; }
};

// How a combine is called.
struct Call {
  Way way = Way::kAtOnce;
  bool narrow = false, weighted = false, returns = false, biased = false, no_host_sync = false;
  // Sums are rounded once; the call has weights of its own, and ids of which some drop a term.
  bool once = false, late = false;
  // Partial rows travel in LogFMT-10.
  bool coded = false;
};

// The inputs of a rank to a combine, and its results.
struct Given {
  std::vector<u8> y, bias, out;
  std::vector<float> back, weights, late;
  std::vector<i64> ids;
};

DecodeCombineArgs decode_combine(Rank& r, const DispatchArgs& d, Given& mine, const Call& call) {
  DecodeCombineArgs a{};
  CombineArgs& c = a.combine;
  Region at = region_of(d, Outcome{});
  u8* base = r.arena + d.region;
  c.c = r.common(signature(3));
  c.c.no_host_sync = call.no_host_sync, c.c.outcome = call.no_host_sync ? r.late : r.outcome;
  c.r = r.r, c.out = mine.out.data(), c.row_bytes = r.s.row_bytes;
  c.bias0 = call.biased ? mine.bias.data() : nullptr;
  c.out_weights = call.returns ? mine.weights.data() : nullptr;
  MergeArgs& m = a.merge;
  m.x = mine.y.data(), m.weights = call.returns ? mine.back.data() : nullptr;
  m.dispatch_weights = call.weighted && !call.late ? (float*)(base + at.weights) : nullptr;
  a.topk_weights = call.late ? mine.late.data() : nullptr;
  a.topk_idx = call.late && r.me % 2 == 0 ? mine.ids.data() : nullptr;
  m.slots = (i32*)(base + at.slots), m.rows = d.c.local_experts() * d.most_tokens();
  m.row_bytes = r.s.row_bytes, m.topk = r.s.topk;
  a.sources = (u32*)(base + at.landed_source);
  a.decode = decode_of(r, call.way);
  return a;
}

void launch_combine(Rank& r, const DecodeCombineArgs& a, const Call& call, u32 phases, const Late& late = {}) {
  DecodeCombineArgs part = a;
  part.decode.phases = phases;
  bool is_long = is_long_for(r.s.row_bytes / 16, 2);
  model::launch(blocks_of(part.decode), kWarps * kWave, [=, &r] {
    if (blockIdx.x == late.block && threadIdx.x == 0) late.hold();
    if (call.coded)
      ty_combine_decode_bf16_logfmt(part, r.params());
    else if (call.narrow && call.once)
      ty_combine_decode_bf16_once(part, r.params());
    else if (call.narrow)
      is_long ? ty_combine_decode_bf16_long(part, r.params()) : ty_combine_decode_bf16(part, r.params());
    else
      is_long ? ty_combine_decode_f32_long(part, r.params()) : ty_combine_decode_f32(part, r.params());
  });
}

// The partial row that `owner` makes of a token.
std::vector<float> partial_row(const Rank& s, u32 t, u32 owner, const Slots& slots, const std::vector<Given>& given,
                               const Call& call) {
  Elements values{call.narrow};
  u32 width = s.s.row_bytes / values.bytes();
  std::vector<float> row(width);
  bool first = true;
  for (u32 k = 0; k < s.s.topk; k++) {
    i64 e = s.topk[t * s.s.topk + k];
    if (e < 0 || e / s.s.local() != owner) continue;
    if (call.late && s.me % 2 == 0 && given[s.me].ids[t * s.s.topk + k] < 0) continue;
    float w = call.late ? given[s.me].late[t * s.s.topk + k] : s.weights[t * s.s.topk + k];
    for (u32 i = 0; i < width; i++) {
      float y = values.get(given[owner].y.data(), slots[s.me][t][k] * width + i);
      row[i] = !(call.weighted || call.late) ? (first ? y : row[i] + y) : first ? w * y : std::fma(w, y, row[i]);
    }
    first = false;
  }
  for (float& value : row) value = call.once ? value : values.round(value);
  return call.coded ? after_its_way(row) : row;
}

// The expected sum of a token.
std::vector<float> expected_sum(const Rank& s, u32 t, const Slots& slots, const std::vector<Given>& given,
                                const Call& call) {
  Elements values{call.narrow};
  u32 width = s.s.row_bytes / values.bytes();
  std::vector<float> sum(width);
  bool empty = !call.biased;
  for (u32 i = 0; i < width && call.biased; i++) sum[i] = values.get(given[s.me].bias.data(), t * width + i);
  for (u32 owner : owners_of(s, t)) {
    std::vector<float> partial = partial_row(s, t, owner, slots, given, call);
    for (u32 i = 0; i < width; i++) sum[i] = empty ? partial[i] : sum[i] + partial[i];
    empty = false;
  }
  for (float& value : sum) value = values.round(value);
  return sum;
}

void combine_all(const Ranks& ranks, std::mt19937& random, const std::vector<DecodeDispatchArgs>& dispatched,
                 const Call& call) {
  Shape s = ranks[0]->s;
  Elements values{call.narrow};
  u32 width = s.row_bytes / values.bytes();
  u64 rows = (u64)s.local() * s.ranks * s.max_tokens;
  std::vector<Given> given(s.ranks);
  std::vector<DecodeCombineArgs> args;
  for (Rank* r : ranks) {
    Given& mine = given[r->me];
    mine.y.resize(rows * s.row_bytes), mine.bias.resize((u64)s.max_tokens * s.row_bytes);
    mine.out.assign((u64)s.max_tokens * s.row_bytes, 0xaa);
    mine.back.resize(rows), mine.weights.assign((u64)s.max_tokens * s.topk, -7);
    if (call.coded) bring_coded(mine.y.data(), rows, width, random);
    for (u64 i = 0; i < rows * width && !call.coded; i++)
      values.set(mine.y.data(), i, (float)(int)(random() % 4099) / 3 - 600);
    for (u64 i = 0; i < (u64)s.max_tokens * width; i++) values.set(mine.bias.data(), i, (float)(random() % 77));
    for (float& w : mine.back) w = (float)(random() % 9999);
    mine.late.resize((u64)s.max_tokens * s.topk), mine.ids.assign(r->topk.begin(), r->topk.end());
    for (float& w : mine.late) w = (float)(int)(random() % 199) / 8 - 12;
    for (i64& id : mine.ids) id = random() % 3 == 0 ? -1 : id;
    args.push_back(decode_combine(*r, dispatched[r->me].dispatch, mine, call));
  }
  if (call.way == Way::kHalves) {
    // Weights of the call come from all ranks before sums are made.
    if (call.late) on_all(ranks, random, [&](Rank& r, u32 i) { launch_combine(r, args[i], call, kSends); });
    for (u32 i = 0; i < ranks.size(); i++) {
      if (!call.late) launch_combine(*ranks[i], args[i], call, kSends);
      // The sent rows may be overwritten.
      std::vector<u8> kept = given[i].y;
      std::fill(given[i].y.begin(), given[i].y.end(), 0x5a);
      given[i].y.swap(kept);
    }
    on_all(ranks, random, [&](Rank& r, u32 i) { launch_combine(r, args[i], call, kReceives); });
  } else {
    on_all(ranks, random, [&](Rank& r, u32 i) { launch_combine(r, args[i], call, kSends | kReceives); });
  }
  Slots slots = slots_of(ranks);
  for (Rank* r : ranks) {
    no_ended_wait(*r);
    same("combine", args[r->me].combine.c.cell->code, kGo);
    const Given& mine = given[r->me];
    for (u32 t = 0; t < r->tokens; t++) {
      std::vector<float> sum = expected_sum(*r, t, slots, given, call);
      for (u32 i = 0; i < width; i++)
        same("sum of token " + std::to_string(t), values.get(mine.out.data(), (u64)t * width + i), sum[i]);
      for (u32 k = 0; k < s.topk && call.returns; k++) {
        i64 e = r->topk[t * s.topk + k];
        float weight = e < 0 ? 0 : given[e / s.local()].back[slots[r->me][t][k]];
        same("returned weight", mine.weights[t * s.topk + k], weight);
      }
    }
    u64 written = (u64)r->tokens * s.row_bytes;
    same("rows behind the last token are left", all_are(0xaa, mine.out.data() + written, mine.out.size() - written), true);
    check_clean(*r, "behind a combine");
  }
}

// Turns of `rounds`: random selections, the same of all tokens, and rows of any bytes.
using Turns = std::vector<u32>;
const Turns kAllTurns = {0, 1, 2};
// Every turn in a run that leaves nothing out.
Turns only(u32 turn) { return model::runs_all() ? kAllTurns : Turns{turn}; }

// Operations in a row, by the given `way`.
void rounds(const Ranks& ranks, std::mt19937& random, std::vector<u32> tokens, Way way, bool no_host_sync,
            const Turns& turns = kAllTurns) {
  for (u32 turn : turns) {
    for (Rank* r : ranks) {
      bring(*r, tokens[(r->me + turn) % tokens.size()], random);
      // Here all tokens select the same experts.
      for (u32 i = 0; i < r->tokens * r->s.topk && turn == 1; i++) r->topk[i] = i % r->s.topk;
      if (turn == 2) bring_anything(*r, random);
    }
    auto args = dispatch_all(ranks, random, false, way, no_host_sync);
    check_packed(ranks, args);
    bool odd = turn % 2;
    combine_all(ranks, random, args, {way, odd, !odd, turn != 1, odd, no_host_sync});
    Call late{way, odd, true, odd, turn == 2, no_host_sync};
    late.once = !is_long_for(ranks[0]->s.row_bytes / 16, 2), late.late = true;
    combine_all(ranks, random, args, late);
    args = dispatch_all(ranks, random, true, way, no_host_sync);
    check_packed(ranks, args);
  }
}

// A block of one rank starts late: all its heads come before the reports of that block.
void late_blocks(const Ranks& ranks, std::mt19937& random) {
  std::vector<DecodeDispatchArgs> args;
  for (Rank* r : ranks) {
    bring(*r, r->s.max_tokens, random);
    memset(r->arena, 0xee, kArenaBytes);
    args.push_back(decode_dispatch(*r, false, Way::kAtOnce));
  }
  on_all(ranks, random, [&](Rank& r, u32 i) {
    launch_decode(r, args[i], kSends | kReceives, Late{i == 0 ? 0 : ~0u});
  });
  check_packed(ranks, args);
}

// Two operations are open at once.
void two_at_once(const Ranks& ranks, std::mt19937& random) {
  std::vector<DecodeDispatchArgs> first, second;
  for (Rank* r : ranks) {
    bring(*r, r->s.max_tokens, random);
    memset(r->arena, 0xee, kArenaBytes);
    first.push_back(decode_dispatch(*r, false, Way::kHalves));
    second.push_back(decode_dispatch(*r, true, Way::kHalves));
    second.back().dispatch.region = 2 << 20;
  }
  for (u32 i = 0; i < ranks.size(); i++)
    for (auto* args : {&first, &second}) launch_decode(*ranks[i], (*args)[i], kSends);
  std::vector<Outcome> outcomes(ranks.size());
  on_all(ranks, random, [&](Rank& r, u32 i) {
    launch_decode(r, first[i], kReceives);
    outcomes[i] = reported_to(r, first[i].dispatch);
    launch_decode(r, second[i], kReceives);
  });
  for (u32 d = 0; d < ranks.size(); d++)
    for (auto* args : {&first, &second})
      check_received(inputs_of(ranks), d, (*args)[d].dispatch, ranks[d]->arena + (*args)[d].dispatch.region,
                     outcomes[d], (*args)[d].decode);
}

// Rows are cast as they leave.
void cast(const Ranks& ranks, std::mt19937& random, Cast how, DType dtype) {
  Shape s = ranks[0]->s;
  std::vector<std::vector<u32>> raw(s.ranks);
  std::vector<DecodeDispatchArgs> args;
  for (Rank* r : ranks) {
    bring(*r, r->s.max_tokens - r->me, random);
    raw[r->me] = bring_raw(*r, how, dtype, random);
    memset(r->arena, 0xee, kArenaBytes);
    args.push_back(decode_dispatch(*r, false, Way::kAtOnce));
    cast_from(args.back().dispatch, raw[r->me], how, dtype);
  }
  on_all(ranks, random, [&](Rank& r, u32 i) { launch_decode(r, args[i], kSends | kReceives); });
  check_packed(ranks, args);
}

// One rank refuses a combine, of which the others may have weights to send.
void refused_combine(const Ranks& ranks, std::mt19937& random, bool late, bool coded = false) {
  auto args = dispatch_all(ranks, random, false, Way::kAtOnce);
  check_packed(ranks, args);
  std::vector<Given> given(ranks.size());
  Call call;
  call.late = late, call.coded = call.narrow = coded;
  std::vector<DecodeCombineArgs> combines;
  for (Rank* r : ranks) {
    u64 rows = (u64)r->s.local() * r->s.ranks * r->s.max_tokens;
    given[r->me].y.resize(rows * r->s.row_bytes, 1);
    if (coded) bring_coded(given[r->me].y.data(), rows, r->s.row_bytes / 2, random);
    given[r->me].out.resize((u64)r->s.max_tokens * r->s.row_bytes);
    given[r->me].late.resize((u64)r->s.max_tokens * r->s.topk);
    given[r->me].ids.resize((u64)r->s.max_tokens * r->s.topk);
    combines.push_back(decode_combine(*r, args[r->me].dispatch, given[r->me], call));
  }
  on_all(ranks, random, [&](Rank& r, u32 i) {
    if (i != 1) return launch_combine(r, combines[i], call, kSends | kReceives);
    DecodeRefusalArgs a{combines[i].combine.c, combines[i].decode};
    a.c.verdict = kRefuseText;
    model::launch(1, kWarps * kWave, [=, &r] { ty_refuse_decode(a, r.params()); });
  });
  for (Rank* r : ranks) {
    same("refused combine", r->outcome->code, kRefused);
    check_clean(*r, "behind a combine that was refused");
  }
}

// One rank refuses, or its routing is bad: all ranks learn the reason, and the next operations find
// free decode.
void refusals(const Ranks& ranks, std::mt19937& random) {
  const char text[] = "no rows today";
  for (Rank* r : ranks) bring(*r, r->s.max_tokens, random);
  for (u32 kind : {0u, kNoExpert, kTwice}) {
    std::vector<DecodeDispatchArgs> args;
    for (Rank* r : ranks) args.push_back(decode_dispatch(*r, false, Way::kAtOnce));
    Common refused = args[1].dispatch.c;
    refused.verdict = kRefuseText, refused.text_bytes = sizeof text;
    memcpy(refused.text, text, sizeof text);
    i64 kept = ranks[0]->topk[1];
    if (kind == kNoExpert) ranks[0]->topk[1] = ranks[0]->s.experts;
    if (kind == kTwice) ranks[0]->topk[0] = ranks[0]->topk[1] = 3;
    // The head of one rank comes before its rows: the block that does not post the head is late. It is held until the
    // rank that refuses waits for rows, or waits no more.
    u32 refuser = kind == 0 ? 1 : 0;
    std::atomic<bool> over{false};
    Late late{0, [&] {
                auto& waiting = model::at(&ranks[refuser]->report->waiting);
                while (!over && waiting.load() >> 32 != kPhaseRows) model::rest(1000);
              }};
    model::refuses = kind == 0;
    on_all(ranks, random, [&](Rank& r, u32 i) {
      DecodeRefusalArgs a{refused, args[i].decode};
      if (kind != 0 || i != 1)
        launch_decode(r, args[i], kSends | kReceives, i == 1 - refuser ? late : Late{});
      else
        model::launch(1, kWarps * kWave, [=, &r] { ty_refuse_decode(a, r.params()); });
      if (i == refuser) over = true;
    });
    model::refuses = false;
    for (Rank* r : ranks) {
      no_ended_wait(*r);
      same("refused", r->outcome->code, kRefused);
      same("by rank", r->outcome->rank, kind == 0 ? 1u : 0u);
      if (kind == 0) same_bytes("text", r->outcome->text, text, sizeof text);
      if (kind != 0) same("the problem", ((u32*)r->outcome->text)[1], 1u << 8 | kind);
      check_clean(*r, "behind what was refused");
    }
    ranks[0]->topk[0] = -1, ranks[0]->topk[1] = kind == kTwice ? -1 : kept;
  }
  for (bool late : {false, true})
    if (!by_rank) refused_combine(ranks, random, late);
}

// The bits that a dispatch which names M adds to its signature.
u64 naming(u32 m) { return 1ull << 18 | (u64)(m & 1) << 19 | (u64)(m >> 1) << 46; }

// Ranks name another M than one of them: each finds it, and no row of it is left. Of the communicator's M, the others
// name nothing.
void another_m(const Ranks& ranks, std::mt19937& random) {
  u32 most = by_rank ? ranks[0]->s.most() : ranks[0]->s.max_tokens;
  for (u32 of_others : {most, most - 1}) {
    for (bool is_less : {false, true}) {
      std::vector<DecodeDispatchArgs> args;
      for (Rank* r : ranks) {
        u32 m = r->me == 1 ? (is_less ? of_others - 1 : of_others) : is_less ? of_others : of_others - 1;
        bring(*r, std::min(m, r->s.max_tokens), random);
        args.push_back(decode_dispatch(*r, false, Way::kAtOnce));
        args.back().dispatch.call_tokens = m;
        if (m != most) args.back().dispatch.c.signature |= naming(m);
      }
      on_all(ranks, random, [&](Rank& r, u32 i) { launch_decode(r, args[i], kSends | kReceives); });
      for (u32 i = 0; i < ranks.size(); i++) {
        no_ended_wait(*ranks[i]);
        same("another M", ranks[i]->outcome->code, kAnotherM);
        same("at rank", ranks[i]->outcome->rank, i == 1 ? 0u : 1u);
        check_clean(*ranks[i], "behind ranks that named another M");
      }
    }
  }
}

// Other operations take their turns between them.
void flat_between(const Ranks& ranks, std::mt19937& random) {
  std::vector<DispatchArgs> args;
  for (Rank* r : ranks) {
    bring(*r, r->s.max_tokens, random);
    memset(r->arena, 0xee, kArenaBytes);
    args.push_back(dispatch_args(*r, Layout::kFlat, false));
  }
  on_all(ranks, random, [&](Rank& r, u32 i) { dispatch_on(r, args[i]); });
  for (u32 d = 0; d < ranks.size(); d++)
    check_received(inputs_of(ranks), d, args[d], ranks[d]->arena + args[d].region, *ranks[d]->outcome);
}

// A rank does not send: the waits of the others are ended, and received data is no row of a later
// operation.
void ended_waits(const Ranks& ranks, std::mt19937& random) {
  for (Rank* r : ranks) bring(*r, r->s.max_tokens, random);
  std::vector<DecodeDispatchArgs> args;
  for (Rank* r : ranks) args.push_back(decode_dispatch(*r, false, Way::kHalves));
  auto on_others = [&](u32 phases) {
    std::vector<std::thread> running;
    for (Rank* r : ranks)
      if (r->me != 1) running.emplace_back([&, r, phases] { launch_decode(*r, args[r->me], phases); });
    for (auto& t : running) t.join();
  };
  // Sent rows arrive before a wait ends: rows that arrive later find a communicator that is closed.
  on_others(kSends);
  std::thread host([&] {
    auto& waiting = model::at(&ranks[0]->report->waiting);
    while (waiting.load() == 0) model::rest(1000);
    for (Rank* r : ranks) model::at(r->abort).store(1);
  });
  on_others(kReceives);
  host.join();
  for (Rank* r : ranks) {
    if (r->me != 1) {
      same("a wait is ended", r->report->ended, 2u);
      same("of entry", r->report->phase, by_rank ? kPhaseRows : kPhaseEntry);
      same("of rank", r->report->peer, 1u);
      same("nothing more is entered", r->state->stopped, 1u);
      check_clean(*r, "behind an ended wait");
    }
    // The rank that did not poll removes the received rows itself.
    DecodeArgs s = decode_of(*r, Way::kAtOnce);
    if (r->me == 1) memset(r->control + s.rows, 0, (u64)kSlots * r->s.ranks * r->s.most() * s.row_pitch);
    ranks[1]->state->turn = ranks[0]->state->turn;
    *r->report = {}, *r->abort = 0, r->state->stopped = 0;
  }
  if (by_rank) return;
  rounds(ranks, random, {ranks[0]->s.max_tokens}, Way::kAtOnce, false, only(2));
}

#include "decode_rank_major.h"

// One turn of each way, and what goes wrong.
void run_briefly(const Shape& shape, std::vector<u32> tokens, bool all) {
  Ranks ranks = all_ranks(shape);
  std::mt19937 random(shape.ranks * 100 + shape.topk);
  Fabric fabric(ranks);
  run_by_rank(ranks, random, tokens, all);
  rounds(ranks, random, tokens, Way::kAtOnce, false, {0});
  rounds(ranks, random, tokens, Way::kHalves, true, {2});
  if (!all) return;
  rounds(ranks, random, tokens, Way::kByRole, false, {1});
  late_blocks(ranks, random);
  two_at_once(ranks, random);
  flat_between(ranks, random);
  refusals(ranks, random);
  another_m(ranks, random);
  ended_waits(ranks, random);
}

void run(const Shape& shape, std::vector<u32> tokens, bool all) {
  Ranks ranks = all_ranks(shape);
  std::mt19937 random(shape.ranks * 100 + shape.topk);
  Fabric fabric(ranks);
  run_by_rank(ranks, random, tokens, all);
  rounds(ranks, random, tokens, Way::kAtOnce, false);
  rounds(ranks, random, tokens, Way::kHalves, true);
  if (!all) return;
  rounds(ranks, random, tokens, Way::kByRole, false);
  late_blocks(ranks, random);
  two_at_once(ranks, random);
  flat_between(ranks, random);
  rounds(ranks, random, tokens, Way::kAtOnce, true, only(1));
  if (ranks.size() == 1) return;
  refusals(ranks, random);
  another_m(ranks, random);
  rounds(ranks, random, tokens, Way::kHalves, true, only(0));
  ended_waits(ranks, random);
}

// Hidden sizes whose last group is short, and whose scales are fewer than a piece.
void casts(u32 ranks) {
  for (Cast how : kCasts)
    for (DType dtype : {DType::kBf16, DType::kFp32}) {
      u32 hidden = how == Cast::kFp8Round ? 1104 : 336;
      Shape shape{ranks, ranks * 4, 3, hidden, cast_words(how, hidden), 9, 1 << 20};
      Ranks all = all_ranks(shape);
      std::mt19937 random((u32)how + (u32)dtype);
      Fabric fabric(all);
      cast(all, random, how, dtype);
    }
}

#ifndef MODEL_NO_MAIN
#include "coded.h"

void main_decode(const std::string& what) {
  if (what == "least") return run({2, 8, 3, 80, 1, 5, 1 << 20}, {5, 0}, false);
  // The shapes that differ in how lanes share the work.
  if (what == "few") {
    run({3, 12, 4, 112, 3, 9, 1 << 20}, {0, 9, 7}, true);
    run({2, 64, 32, 16, 1, 3, 1 << 20}, {3, 2}, false);
    return casts(2);
  }
  const Shape two{2, 8, 3, 64, 0, 40, 1 << 20}, three{3, 12, 4, 272, 3, 20, 1 << 20}, eight{8, 32, 4, 48, 1, 12, 1 << 20};
  // Most changes are noticed here.
  if (model::mutant != 0) run_briefly(two, {33, 40}, true);
  run(two, {33, 40}, true);
  model::mutant != 0 || model::runs_all() ? run(three, {0, 20, 7}, true) : run_briefly(three, {0, 20, 7}, true);
  if (model::mutant != 0) return;
  model::runs_all() ? run(eight, {12, 9, 0}, true) : run_briefly(eight, {12, 9, 0}, false);
  // More pieces than a block has threads, and more than two a thread; the maximum of selections.
  run({2, 4, 2, 8240, 2, 4, 1 << 20}, {4, 2}, false);
  run({2, 4, 2, 20000, 1, 3, 1 << 20}, {3, 1}, false);
  run({2, 64, 32, 16, 1, 9, 1 << 20}, {9, 8}, false);
  run({1, 4, 2, 48, 1, 8, 1 << 20}, {8}, true);
  casts(2);
}

// Arguments: "coded" for combines that encode partial rows, and the shapes; or the number of a change to the kernels.
int main(int count, char** arguments) {
  std::string what = count > 1 ? arguments[1] : "";
  // Waits end soon.
  if (int number = atoi(what.c_str()); number != 0) fault = Fault::kWaits, model::mutant = number;
  const std::string coded = "coded";
  bool codes = what.starts_with(coded) || model::mutant > 100;
  if (what.starts_with(coded)) what = what.substr(std::min(what.size(), coded.size() + 1));
  codes ? main_coded(what) : main_decode(what);
  if (what == "values") return 0;
  puts(model::mutant != 0 ? "nothing was noticed" : "all is well");
}
#endif
