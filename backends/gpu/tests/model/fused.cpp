// Combines from expert-major and packed rows, in which owners merge the rows of a token, push the partial row
// and sum their own tokens in one kernel. Some ranks merge in a kernel of its own instead.
#include <unistd.h>

#include "helpers.h"
#include "exchange.cu"
#include "level.h"

using Ranks = std::vector<Rank*>;

std::vector<Inputs*> inputs_of(const Ranks& ranks) { return std::vector<Inputs*>(ranks.begin(), ranks.end()); }

// The types of rows.
struct Float {
  using Value = float;
  static Value of(float value) { return value; }
  static float widen(Value value) { return value; }
  static constexpr auto fused = &ty_combine_fused_f32;
  static constexpr auto merge = &ty_merge_f32;
  static constexpr auto combine = &ty_combine_f32;
};
struct Brain {
  using Value = u16;
  static Value of(float value) { return (Value)model::bf16(value); }
  static float widen(Value value) { return std::bit_cast<float>((u32)value << 16); }
  static constexpr auto fused = &ty_combine_fused_bf16;
  static constexpr auto merge = &ty_merge_bf16;
  static constexpr auto combine = &ty_combine_bf16;
};

// How a rank takes part.
struct Way {
  bool fuses = true;    // one kernel; else one that merges before
  bool lands = true;    // it has memory for the partial rows of others
  bool silent = false;  // it does not push what it announces
};

// The arguments that all ranks have in common.
struct Call {
  bool weighted, returns_weights;
  u32 biases;
  u32 pieces;
  bool at_once = false;  // no rank leaves the wait for the end to a kernel of its own
};

// One rank's rows of experts, biases and results.
template <class T>
struct Rows_ {
  using Value = typename T::Value;
  u64 hidden, slots;
  Value *y, *bias[2], *out;
  float *weights, *out_weights;

  Rows_(const Rank& r, u64 places) : hidden(r.s.row_bytes / sizeof(Value)), slots(places) {
    y = room<Value>(places * hidden), out = room<Value>(r.tokens * hidden);
    weights = room<float>(places), out_weights = room<float>(r.tokens * r.s.topk);
    for (u64 i = 0; i < places * hidden; i++) y[i] = T::of((float)((i * 31 + r.me * 1001) % 4099) / 3 - 600);
    for (u64 i = 0; i < places; i++) weights[i] = (float)(i + r.me * 100000);
    for (u32 b = 0; b < 2; b++) {
      bias[b] = room<Value>(r.tokens * hidden);
      for (u64 i = 0; i < r.tokens * hidden; i++) bias[b][i] = T::of((float)((i * 17 + b * 5 + r.me) % 997) / 7);
    }
    memset(out, 0xa5, r.tokens * r.s.row_bytes);
  }
  ~Rows_() {
    for (void* at :
         {(void*)y, (void*)bias[0], (void*)bias[1], (void*)out, (void*)weights, (void*)out_weights})
      free(at);
  }
};

struct Dispatched {
  DispatchArgs args;
  Outcome outcome;
  Region region;

  const i32* slots(const Rank& r) const { return (const i32*)(r.arena + args.region + region.slots); }
  const float* weights(const Rank& r) const { return (const float*)(r.arena + args.region + region.weights); }
};

template <class T>
void combine_one(Rank& r, const Dispatched& d, const Call& call, const Way& way, Rows_<T>& rows) {
  static u32* no_rows = room<u32>(64);
  FusedCombineArgs f{};
  CombineArgs& a = f.combine;
  MergeArgs& m = f.merge;
  a.c = r.common(signature(3)), a.r = r.r;
  if (way.silent) a.r.source_rows = no_rows;
  a.x = kStagingAt, a.weights = kYAt, a.out = (u8*)rows.out;
  a.out_weights = call.returns_weights ? rows.out_weights : nullptr;
  a.bias0 = call.biases & 1 ? (u8*)rows.bias[0] : nullptr, a.bias1 = call.biases & 2 ? (u8*)rows.bias[1] : nullptr;
  a.row_bytes = r.s.row_bytes, a.piece_bytes = r.s.row_bytes / call.pieces / 16 * 16;
  a.pieces = (u32)((a.row_bytes + a.piece_bytes - 1) / a.piece_bytes);
  a.stages = 1 + r.operations % 4, a.stage_bytes = (u32)align_region(a.piece_bytes), a.table_bytes = 8 << 10;
  a.returns_weights = call.returns_weights, a.at_once = call.at_once || r.operations % 2;
  a.flags = r.state->outbox + (16 << 10), a.most_units = r.s.most(), a.unit_shift = r.s.topk % 3;
  m = {(u8*)rows.y, call.returns_weights ? rows.weights : nullptr, call.weighted ? d.weights(r) : nullptr, d.slots(r),
       way.fuses ? nullptr : r.arena + a.x, (float*)(r.arena + a.weights), nullptr, d.outcome.tokens, rows.slots,
       a.row_bytes, r.s.topk, a.piece_bytes, a.pieces, a.stages, a.stage_bytes, 0};
  if (!way.fuses || call.returns_weights)
    model::launch(kBlocks, kSummingWarps * kWave, [=, &r] { T::merge(m, r.params()); });
  if (way.fuses) {
    a.own = (u8*)rows.y, a.landing = way.lands ? kLandingAt : 0;
    model::launch(1 + r.operations % kBlocks, kFusedWarps * kWave, [=, &r] { T::fused(f, r.params()); });
  } else {
    model::launch(kBlocks, kSummingWarps * kWave, [=, &r] { T::combine(a, r.params()); });
  }
  if (*r.abort != 0) return;
  same("combine", a.c.cell->code, kGo);
  if (!a.at_once) r.arrive(a.c, false);
  same("an ended wait of rank " + std::to_string(r.me), r.report->ended, 0u);
}

// The sum of a token by its definition.
template <class T>
struct Expected {
  const Ranks& ranks;
  const std::vector<Dispatched>& of;
  const std::vector<std::unique_ptr<Rows_<T>>>& rows;
  const Call& call;
  Rows row = received_rows(inputs_of(ranks));

  i32 slot(const Rank& s, u32 t, u32 k, u32 d) const {
    i64 e = s.topk[t * s.s.topk + k];
    if (e < 0 || e / s.s.local() != d) return -1;
    return of[d].slots(*ranks[d])[row[s.me][t][d] * s.s.topk + k];
  }
  float partial(const Rank& s, u32 t, u32 d, u64 i) const {
    float sum = 0;
    bool first = true;
    for (u32 k = 0; k < s.s.topk; k++) {
      i32 at = slot(s, t, k, d);
      if (at < 0) continue;
      float x = T::widen(rows[d]->y[at * rows[d]->hidden + i]), w = s.weights[t * s.s.topk + k];
      sum = !call.weighted ? (first ? x : sum + x) : first ? w * x : std::fma(w, x, sum);
      first = false;
    }
    return T::widen(T::of(sum));
  }
  typename T::Value operator()(const Rank& s, u32 t, u64 i) const {
    std::vector<float> terms;
    for (u32 b = 0; b < 2; b++)
      if (call.biases >> b & 1) terms.push_back(T::widen(rows[s.me]->bias[b][t * rows[s.me]->hidden + i]));
    for (u32 d : owners_of(s, t)) terms.push_back(partial(s, t, d, i));
    float sum = 0;
    for (u32 n = 0; n < terms.size(); n++) sum = n == 0 ? terms[0] : sum + terms[n];
    return T::of(sum);
  }
};

template <class T>
void combine_all(const Ranks& ranks, const std::vector<Dispatched>& of, const Call& call, const std::vector<Way>& ways,
                 std::mt19937& random) {
  std::vector<std::unique_ptr<Rows_<T>>> rows;
  model::weak.clear();
  for (Rank* r : ranks) {
    u64 places = r->me < of.size() ? of[r->me].outcome.rows : 0;
    rows.push_back(std::make_unique<Rows_<T>>(*r, places));
    // Leftovers of an earlier operation must not be taken for rows.
    memset(r->arena + kStagingAt, 0xee, 1 << 20);
    memset(r->arena + kLandingAt, 0xee, 2 << 20);
    model::weak.push_back({r->arena + kStagingAt, 1 << 20});
    model::weak.push_back({r->arena + kLandingAt, 2 << 20});
  }
  std::vector<std::thread> running;
  u32 late = random() % (2 * ranks.size());
  for (u32 i = 0; i < ranks.size(); i++)
    running.emplace_back([&, i] {
      if (i == late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      combine_one<T>(*ranks[i], of[i], call, ways[i], *rows[i]);
    });
  for (auto& t : running) t.join();
  model::weak.clear();
  if (*ranks[0]->abort != 0) return;
  Expected<T> expected{ranks, of, rows, call};
  for (const Rank* s : ranks)
    for (u32 t = 0; t < s->tokens; t++) {
      for (u64 i = 0; i < rows[s->me]->hidden; i++)
        same("rank " + std::to_string(s->me) + ", sum of token " + std::to_string(t) + ", channel " + std::to_string(i),
             T::widen(rows[s->me]->out[t * rows[s->me]->hidden + i]), T::widen(expected(*s, t, i)));
      for (u32 k = 0; k < s->s.topk && call.returns_weights; k++) {
        i64 e = s->topk[t * s->s.topk + k];
        u32 d = e < 0 ? 0 : (u32)(e / s->s.local());
        float back = e < 0 ? 0 : rows[d]->weights[expected.slot(*s, t, k, d)];
        same("returned weight", rows[s->me]->out_weights[t * s->s.topk + k], back);
      }
    }
}

Ranks all_ranks(const Shape& shape) {
  Ranks ranks;
  for (u32 i = 0; i < shape.ranks; i++) ranks.push_back(new Rank(shape, i));
  return ranks;
}

std::vector<Dispatched> dispatch_all(const Ranks& ranks, Layout layout) {
  std::vector<Dispatched> of(ranks.size());
  std::vector<std::thread> running;
  for (u32 i = 0; i < ranks.size(); i++) {
    memset(ranks[i]->arena, 0xee, kArenaBytes);
    of[i].args = dispatch_args(*ranks[i], layout, false);
  }
  for (u32 i = 0; i < ranks.size(); i++) running.emplace_back([&, i] { dispatch_on(*ranks[i], of[i].args); });
  for (auto& t : running) t.join();
  for (u32 i = 0; i < ranks.size(); i++)
    of[i].outcome = *ranks[i]->outcome, of[i].region = region_of(of[i].args, of[i].outcome);
  return of;
}

void run(const Shape& shape, std::vector<u32> tokens, u32 turns) {
  Ranks ranks = all_ranks(shape);
  std::mt19937 random(shape.ranks * 100 + shape.topk);
  Fabric fabric(ranks);
  for (Layout layout : {Layout::kExpertMajor, Layout::kPacked}) {
    for (Rank* r : ranks) bring(*r, tokens[(r->me + (u32)layout) % tokens.size()], random);
    auto of = dispatch_all(ranks, layout);
    for (u32 turn = 0; turn < turns; turn++) {
      Call call{random() % 2 == 0, random() % 3 == 0, turn == 0 ? 0 : (u32)(random() % 4),
                1 + turn % 2 * (shape.row_bytes >= 256)};
      std::vector<Way> ways(ranks.size());
      for (Way& way : ways) way.fuses = turn < 2 || random() % 3 != 0, way.lands = turn == 0 || random() % 3 != 0;
      if (turn % 2 == 0)
        combine_all<Float>(ranks, of, call, ways, random);
      else
        combine_all<Brain>(ranks, of, call, ways, random);
    }
  }
}

// A rank does not push what it announces: the ranks that wait for it report it, once their hosts give up.
void silence(const Shape& shape) {
  Ranks ranks = all_ranks(shape);
  std::mt19937 random(shape.ranks);
  Fabric fabric(ranks);
  for (Rank* r : ranks) bring(*r, shape.max_tokens, random);
  auto of = dispatch_all(ranks, Layout::kExpertMajor);
  std::vector<Way> ways(ranks.size());
  ways[1].silent = true;
  std::thread host([&] {
    // Only once rank 0 waits for rows: until then a rank may be late to enter.
    auto& waiting = model::at(&ranks[0]->report->waiting);
    while (waiting.load() >> 32 != kPhaseCombineRows) model::rest(1000);
    for (Rank* r : ranks) model::at(r->abort).store(1);
  });
  combine_all<Float>(ranks, of, {false, false, 0, 1, true}, ways, random);
  host.join();
  same("a wait of rank 0 is ended", ranks[0]->report->ended, 2u);
  same("for rows", ranks[0]->report->phase, kPhaseCombineRows);
  same("of rank", ranks[0]->report->peer, 1u);
  same("nothing more is entered", ranks[0]->state->stopped, 1u);
}

int main(int count, char** arguments) {
  std::string what = count > 1 ? arguments[1] : "";
  if (what == "few" || what == "least") {
    run({3, 12, 4, what == "few" ? 272u : 80u, 1, what == "few" ? 40u : 10u, 1 << 20}, {0, what == "few" ? 40u : 10u, 7},
        what == "few" ? 4 : 1);
    puts("all is well");
    return 0;
  }
  if (count > 1) {
    // Without a wait, a barrier may count wrongly, and then a thread waits for ever.
    model::fail_when_all_wait([] { fail("a wait that does not end"); });
    model::mutant = atoi(arguments[1]);
    for (u32 turn = 0; turn < 2; turn++) run({2, 8, 5, 1040, 1, 40, 1 << 20}, {40, 33}, 4);
    puts("all is well");
    return 0;
  }
  run({2, 8, 5, 1040, 1, 40, 1 << 20}, {40, 33}, 6);
  run({3, 12, 4, 272, 3, 40, 1 << 20}, {0, 40, 7}, 6);
  run({1, 4, 2, 48, 1, 8, 1 << 20}, {8}, 3);
  run({8, 16, 4, 48, 1, 24, 1 << 20}, {24, 9, 0}, 4);
  // The maximum of selections, and more terms than a ring has places.
  run({2, 64, 32, 16, 1, 33, 1 << 20}, {33, 32}, 4);
  silence({2, 8, 3, 64, 0, 40, 1 << 20});
  puts("all is well");
}
