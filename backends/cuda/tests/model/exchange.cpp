// Dispatches and combines of several ranks on the model of a GPU: over the face of NVLink, or over the
// proxy's (TY_PUTS). There a thread per rank stands in for core's proxy and a transport: it executes
// commands in any order (INV-2).
#include "cuda.h"
#include "exchange.cu"

#include <random>
#include <utility>
#include <string>

using namespace ty;
using Words = std::vector<u32>;

constexpr u32 kBlocks = 2, kSlots = 2, kCapacity = 32;
constexpr u64 kControlBytes = 1 << 17, kArenaBytes = 8 << 20, kStagingAt = 4 << 20;
constexpr u64 kLandingAt = 6 << 20, kYAt = 5 << 20;

[[noreturn]] void fail(const std::string& what) {
  fprintf(stderr, "%s\n", what.c_str());
  _exit(1);
}
template <class A, class B>
void same(const std::string& what, A found, B expected) {
  if (found != (A)expected)
    fail(what + ": found " + std::to_string(found) + "; expected " + std::to_string(expected));
}

struct Shape {
  u32 ranks, experts, topk, row_bytes, scale_words, max_tokens;
  u64 longest_put;
  u32 local() const { return experts / ranks; }
};

template <class T>
T* room(u64 count, u64 align = 128) {
  void* at = aligned_alloc(align, (count * sizeof(T) + align) / align * align);
  memset(at, 0, count * sizeof(T));
  return (T*)at;
}

struct Rank {
  Shape s;
  u32 me, tokens = 0;
  u8 *control = room<u8>(kControlBytes), *arena = room<u8>(kArenaBytes);
  // Signals are a word apart.
  u64 *totals = room<u64>(1024), *abort = room<u64>(1);
#if TY_PUTS
  Up::Command* commands = room<Up::Command>(kCapacity);
  u64 *head = room<u64>(1), *done = room<u64>(1);
  Up::Params params() const { return {head, commands, done, totals, kCapacity - 1, me}; }
#else
  u64* everybody[2];  // windows, then totals, of all ranks
  Up::Params params() const { return {everybody[0], everybody[1], s.ranks, me, 8, 0}; }
#endif
  Report* report = room<Report>(1);
  State* state = room<State>(1);
  Outcome *outcome = room<Outcome>(1), *late = room<Outcome>(1);
  u32* tokens_word = room<u32>(1);
  Trace* trace = room<Trace>(1);
  // One per operation that may be open, with room for all ranks' totals.
  Cell* cells[kSlots] = {(Cell*)room<u64>(64), (Cell*)room<u64>(64)};
  Routing r{};
  u64 operations = 0;
  // What the rank brings.
  std::vector<i64> topk;
  std::vector<float> weights;
  u8* x = nullptr;
  Words scales;
  u32 layout = kFlat;

  Rank(const Shape& shape, u32 rank) : s(shape), me(rank) {
    u32 words = (kHead + s.ranks + s.experts + kTextWords + 15) / 16 * 16;
    u64 entries = 8ull * kSlots * s.ranks * words;
    if (2 * entries > kControlBytes) fail("the control window is too small");
    *state = State{0, 0, 1, 0, 0, 0, ~0ull, room<u64>(kSlots * s.ranks), room<u64>(kSlots * s.ranks),
                   room<u64>(kSlots), entries, s.longest_put, 2ull * s.ranks * kSlots,
                   {control, arena}};
    u64 pairs = (u64)s.max_tokens * s.topk, spans = kBlocks * kWarps;
    r = Routing{room<i32>(pairs), room<u32>(pairs), room<u32>(pairs), room<u32>(spans * s.ranks),
                room<u32>(spans * s.experts), room<u32>(kBlocks * s.ranks),
                room<u32>(kBlocks * s.experts), room<u32>(s.ranks), room<u32>(s.experts),
                room<u32>(s.ranks), room<Note>(1), 32, kBlocks};
  }
  Common common(u64 signature) {
    Common c{};
    c.entry_words = (kHead + s.ranks + s.experts + kTextWords + 15) / 16 * 16;
    c.cell = cells[operations % kSlots];
    c.abort = abort, c.report = report, c.state = state, c.outcome = outcome, c.trace = trace;
    c.cap_ns = 300'000'000'000ull;
    c.signature = signature;
    c.rank = me, c.ranks = s.ranks, c.experts = s.experts, c.topk = s.topk;
    c.max_tokens = s.max_tokens, c.brought = tokens, c.slots = kSlots;
    // The host's own numbers, which are none of the device's.
    c.ticket = (u32)operations++ + 77;
    return c;
  }
  void arrive(const Common& c, bool rows) {
    ArriveArgs a{abort, report, c.cap_ns, c.cell, s.ranks, !rows, rows ? kPhaseRows : 4, 0, trace};
    model::launch(1, kWarps * 32, [=, this] { ty_arrive(a, params()); });
    same("an ended wait of rank " + std::to_string(me), report->ended, 0u);
  }
};

#if TY_PUTS

// Executes commands of all ranks until it is told to stop, each rank's in an order of its own.
struct Fabric {
  std::vector<Rank*> ranks;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;

  explicit Fabric(std::vector<Rank*> all) : ranks(all) {
    for (Rank* r : ranks) threads.emplace_back([this, r] { serve(*r); });
  }
  ~Fabric() {
    stop = true;
    for (auto& t : threads) t.join();
  }
  void execute(Rank& from, const Up::Command& c) {
    Rank& to = *ranks[c.peer];
    u8* source = (c.src_window == kArena ? from.arena : from.control) + c.src_offset;
    u8* target = (c.dst_window == kArena ? to.arena : to.control) + c.dst_offset;
    same("op", c.op, 2u);
    bool fits = c.bytes > 0 && c.bytes <= from.s.longest_put;
    same("length", fits || c.dst_window == kControl, true);
    same("multiples of 4", (c.src_offset | c.dst_offset | c.bytes) % 4, 0u);
    if (c.dst_offset + c.bytes > (c.dst_window == kArena ? kArenaBytes : kControlBytes))
      fail("a put leaves its window");
    memcpy(target, source, c.bytes);
    model::at(to.totals + c.signal).fetch_add(c.add, std::memory_order_release);
  }
  void serve(Rank& r) {
    std::mt19937 random(r.me + 7);
    std::vector<u64> pending;
    std::vector<bool> ended(kCapacity);
    u64 taken = 0, done = 0;
    while (!stop) {
      u64 slot = taken % kCapacity;
      if (model::at(&r.commands[slot].sequence).load(std::memory_order_acquire) == taken + 1)
        pending.push_back(taken++);
      else if (pending.empty())
        std::this_thread::yield();
      if (pending.empty() || (pending.size() < 8 && random() % 4 == 0)) continue;
      u64 which = random() % pending.size(), number = pending[which];
      pending.erase(pending.begin() + (long)which);
      execute(r, r.commands[number % kCapacity]);
      // What kernels stage may be overwritten once the command is done.
      ended[number % kCapacity] = true;
      while (ended[done % kCapacity]) ended[done++ % kCapacity] = false;
      model::at(r.done).store(done, std::memory_order_release);
    }
  }
};

#else

// Everybody's memory is everybody's.
struct Fabric {
  explicit Fabric(std::vector<Rank*> ranks) {
    for (Rank* r : ranks) {
      r->everybody[0] = room<u64>(2 * ranks.size());
      r->everybody[1] = room<u64>(ranks.size());
      for (u32 i = 0; i < ranks.size(); i++) {
        r->everybody[0][i] = (u64)ranks[i]->control;
        r->everybody[0][ranks.size() + i] = (u64)ranks[i]->arena;
        r->everybody[1][i] = (u64)ranks[i]->totals;
      }
    }
  }
};

#endif

u64 signature(u32 kind, u32 layout) { return kind | layout << 4; }

DispatchArgs dispatch_args(Rank& r, u32 layout, bool replay) {
  DispatchArgs a{};
  if (!replay) {
    r.r.span = ((r.tokens + kBlocks * kWarps - 1) / (kBlocks * kWarps) + 31) / 32 * 32;
  }
  a.c = r.common(signature(replay ? 2 : 1, layout));
  a.r = r.r, a.topk_idx = r.topk.data(), a.x = r.x, a.weights = r.weights.data();
  a.scales = r.s.scale_words ? r.scales.data() : nullptr;
  a.scale_stride[0] = r.s.scale_words, a.scale_stride[1] = 1;
  a.region = 0, a.capacity = kStagingAt, a.row_bytes = r.s.row_bytes;
  a.scale_words = r.s.scale_words, a.replay = replay, a.layout = layout, a.alignment = 4;
  a.staged = TY_PUTS, a.piece_bytes = r.s.row_bytes, a.pieces = 1, a.stages = 1, a.movers = 14;
  a.table_bytes = 16 << 10, a.side_tokens = 32, a.side_bytes = 16 << 10, a.side_scales = 1;
  a.side_at = 64 << 10, a.staging = kStagingAt, a.mover_blocks = kBlocks;
  if (layout == kExpertMajor && !TY_PUTS) {
    // Small tiles, so that there are several.
    a.tiles = r.state->outbox, a.tile_rows = 32, a.mover_blocks = kBlocks / 2, a.zero_padding = 1;
  }
  return a;
}

Region region_of(const DispatchArgs& a, const Outcome& told) {
  u64 tokens = told.tokens, rows = told.rows, places = a.c.local_experts() * a.most_tokens();
  if (a.layout == kPacked || a.worst) tokens = a.most_tokens();
  if (a.layout == kPacked) rows = places;
  if (a.layout == kExpertMajor && a.worst) rows = a.worst_experts;
  return Region(a.region_shape(), tokens, a.layout == kFlat ? 0 : rows);
}

// What a rank was told, or what its region says where nobody waits.
Outcome told_to(Rank& r, const DispatchArgs& a) {
  if (!a.c.unheard) return *r.outcome;
  Outcome told{};
  const u64* totals = (u64*)(r.arena + a.region + region_of(a, told).totals);
  told.code = a.c.cell->code, told.tokens = totals[0];
  told.rows = a.layout == kPacked ? a.c.local_experts() * a.most_tokens() : totals[1];
  return told;
}

// On all ranks at once; returns what each was told.
std::vector<Outcome> dispatch(std::vector<Rank*>& ranks, std::vector<DispatchArgs> args) {
  std::vector<std::thread> running;
  for (u32 i = 0; i < ranks.size(); i++)
    running.emplace_back([&, i] {
      Rank& r = *ranks[i];
      DispatchArgs a = args[i];
      model::launch(kBlocks, kWarps * 32, [=, &r] { ty_dispatch(a, r.params()); });
      same("an ended wait", r.report->ended, 0u);
      if (!a.c.unheard) same("ticket of the outcome", r.outcome->epoch, a.c.ticket);
      if (!a.c.unheard && r.outcome->code != kGo) return;
      r.arrive(a.c, true);
      if (a.layout == kFlat || a.tile_rows > 0) return;
      Region region = region_of(a, *r.outcome);
      u64 rows = r.outcome->rows;
      bool major = a.layout == kExpertMajor;
      if (a.c.unheard) rows = major ? a.worst_experts : a.c.local_experts() * a.most_tokens();
      auto at = [&](u64 offset) { return r.arena + a.region + offset; };
      SpreadArgs s{at(0), (u32*)at(region.scales), major ? (float*)at(region.weights) : nullptr,
                   (i32*)at(region.slots), (u32*)at(region.landed_scales),
                   (float*)at(region.landed_weights), (u32*)at(region.expert_counts),
                   (u32*)at(region.expert_starts), a.c.cell,
                   a.c.unheard ? (u64*)at(region.totals) : nullptr, r.outcome->tokens, rows, a.row_bytes,
                   major ? a.scale_words : 0, a.c.topk, a.c.local_experts(), 0, a.piece_bytes, 14, 1, 0};
      model::launch(kBlocks, kWarps * 32, [=, &r] { ty_spread(s, r.params()); });
    });
  for (auto& t : running) t.join();
  std::vector<Outcome> told;
  for (u32 i = 0; i < ranks.size(); i++) told.push_back(told_to(*ranks[i], args[i]));
  return told;
}

void bring(Rank& r, u32 tokens, std::mt19937& random) {
  r.tokens = tokens;
  r.topk.assign(r.s.max_tokens * r.s.topk + 1, -1);
  r.weights.assign(r.s.max_tokens * r.s.topk + 1, 0);
  r.scales.assign(r.s.max_tokens * r.s.scale_words + 1, 0);
  r.x = r.x ? r.x : room<u8>((u64)r.s.max_tokens * r.s.row_bytes);
  std::vector<i64> experts(r.s.experts);
  for (u32 e = 0; e < r.s.experts; e++) experts[e] = e;
  for (u32 t = 0; t < tokens; t++) {
    std::shuffle(experts.begin(), experts.end(), random);
    for (u32 k = 0; k < r.s.topk; k++) {
      if (random() % 5 != 0) r.topk[t * r.s.topk + k] = experts[k];
      r.weights[t * r.s.topk + k] = (float)(random() % 1000);
    }
    for (u32 i = 0; i < r.s.row_bytes / 4; i++)
      ((float*)r.x)[(u64)t * r.s.row_bytes / 4 + i] = (float)(int)(random() % 4096) / 7;
    for (u32 i = 0; i < r.s.scale_words; i++) r.scales[t * r.s.scale_words + i] = random();
  }
}

// The experts of rank `d` that a token selects, by k; -1 elsewhere.
std::vector<i32> local_ids(const Rank& s, u32 token, u32 d) {
  std::vector<i32> ids(s.s.topk, -1);
  for (u32 k = 0; k < s.s.topk; k++) {
    i64 e = s.topk[token * s.s.topk + k];
    if (e >= 0 && e / s.s.local() == d) ids[k] = (i32)(e - d * s.s.local());
  }
  return ids;
}
bool goes(const std::vector<i32>& ids) {
  for (i32 id : ids)
    if (id >= 0) return true;
  return false;
}

void same_bytes(const std::string& what, const void* found, const void* expected, u64 bytes) {
  if (memcmp(found, expected, bytes) != 0) fail(what + " differs");
}

// Compares what a rank got with what all brought.
void check_received(std::vector<Rank*>& ranks, u32 d, const DispatchArgs& a, const Outcome& told) {
  Rank& r = *ranks[d];
  Shape s = r.s;
  u32 local = s.local();
  // Rows of each expert, and where they start.
  std::vector<u64> starts(local + 1), next(local), counts(local);
  for (Rank* source : ranks)
    for (u32 t = 0; t < source->tokens; t++)
      for (i32 id : local_ids(*source, t, d))
        if (id >= 0) counts[id]++;
  for (u32 e = 0; e < local; e++) {
    u64 place = a.layout == kPacked ? a.most_tokens() : (counts[e] + 3) / 4 * 4;
    starts[e + 1] = starts[e] + place;
    next[e] = starts[e];
  }
  Region region = region_of(a, told);
  if (a.layout != kFlat) same("rows", told.rows, starts[local]);
  u8* base = r.arena + a.region;
  u64 n = 0, scale_bytes = 4ull * s.scale_words;
  for (Rank* source : ranks) {
    u64 before = n;
    for (u32 t = 0; t < source->tokens; t++) {
      auto ids = local_ids(*source, t, d);
      if (!goes(ids)) continue;
      std::string what = "rank " + std::to_string(d) + ", layout " + std::to_string(a.layout) +
                         ", row " + std::to_string(n) + ": ";
      const u8* row = source->x + (u64)t * s.row_bytes;
      const u32* scales = source->scales.data() + t * s.scale_words;
      u32 from = source->me * s.max_tokens + t;
      if (a.layout == kFlat) {
        same_bytes(what + "x", base + n * s.row_bytes, row, s.row_bytes);
        same_bytes(what + "scales", base + region.scales + n * scale_bytes, scales, scale_bytes);
        same_bytes(what + "ids", base + region.ids + n * s.topk * 4, ids.data(), s.topk * 4);
      }
      if (a.layout != kPacked)
        same(what + "source", ((u32*)(base + region.source))[n], from);
      for (u32 k = 0; k < s.topk; k++) {
        float weight = ids[k] < 0 ? 0 : source->weights[t * s.topk + k];
        if (a.layout == kFlat) {
          same(what + "weight", ((float*)(base + region.weights))[n * s.topk + k], weight);
          continue;
        }
        i32 slot = ids[k] < 0 ? -1 : (i32)next[ids[k]]++;
        same(what + "slot", ((i32*)(base + region.slots))[n * s.topk + k], slot);
        if (slot < 0) continue;
        same_bytes(what + "copy", base + (u64)slot * s.row_bytes, row, s.row_bytes);
        same(what + "weight of a copy", ((float*)(base + region.weights))[slot], weight);
        same_bytes(what + "scales of a copy", base + region.scales + slot * scale_bytes, scales,
                   scale_bytes);
        if (a.layout == kPacked)
          same(what + "source of a copy", ((u32*)(base + region.source))[slot], from);
      }
      n++;
    }
    same("rows of a source", ((u32*)(base + region.rank_counts))[source->me], n - before);
  }
  same("tokens", told.tokens, n);
  std::vector<u8> zeros(s.row_bytes);
  for (u32 e = 0; e < local && a.zero_padding; e++)
    for (u64 row = starts[e] + counts[e]; row < starts[e + 1]; row++)
      same_bytes("padding", base + row * s.row_bytes, zeros.data(), s.row_bytes);
  for (u32 i = 0; i < s.ranks * (a.tile_rows ? a.tiles_of_source() : 0); i++)
    same("count of a tile", ((u64*)(r.control + a.tiles))[i], 0u);
  for (u32 e = 0; e < local; e++)
    same("rows of an expert", ((u32*)(base + region.expert_counts))[e], counts[e]);
}

// Every owner returns rows of its own making; sources sum them. f32.
void combine(std::vector<Rank*>& ranks, const std::vector<Outcome>& told, bool weights,
             bool unheard = false) {
  std::vector<std::thread> running;
  std::vector<std::vector<float>> outs(ranks.size()), out_weights(ranks.size());
  for (u32 d = 0; d < ranks.size(); d++) {
    Rank& r = *ranks[d];
    u64 values = told[d].tokens * r.s.row_bytes / 4;
    for (u64 i = 0; i < values; i++)
      ((float*)(r.arena + kYAt))[i] = (float)((i * 31 + d * 1001) % 4099) / 3;
    float* back = (float*)(r.arena + kYAt + (512 << 10));
    for (u64 i = 0; i < told[d].tokens * r.s.topk; i++) back[i] = (float)(i + d * 100000);
    outs[d].assign(r.tokens * r.s.row_bytes / 4 + 4, -1);
    out_weights[d].assign(r.tokens * r.s.topk + 1, -1);
  }
  for (u32 i = 0; i < ranks.size(); i++)
    running.emplace_back([&, i] {
      Rank& r = *ranks[i];
      CombineArgs a{};
      a.c = r.common(signature(3, 0));
      a.r = r.r, a.x = kYAt, a.weights = kYAt + (512 << 10);
      a.c.unheard = unheard, a.c.outcome = unheard ? r.late : r.outcome;
      a.out = (u8*)outs[i].data(), a.out_weights = weights ? out_weights[i].data() : nullptr;
      a.row_bytes = r.s.row_bytes, a.piece_bytes = r.s.row_bytes, a.pieces = 1, a.stages = 1;
      a.stage_bytes = r.s.row_bytes, a.table_bytes = 8 << 10, a.returns_weights = weights;
      a.landing = kLandingAt, a.landing_weights = kLandingAt + (1 << 20);
      auto sum = [=, &r] { ty_combine_f32(a, r.params()); };
#if TY_PUTS
      model::launch(1, kWarps * 32, [=, &r] { ty_give_back(a, r.params()); });
      same("combine", a.c.cell->code, kGo);
      r.arrive(a.c, false);
      model::launch(kBlocks, kSummingWarps * 32, sum);
#else
      model::launch(kBlocks, kSummingWarps * 32, sum);
      same("combine", a.c.cell->code, kGo);
      r.arrive(a.c, false);
#endif
    });
  for (auto& t : running) t.join();
  // The row of each token at each rank.
  std::vector<std::vector<std::vector<i64>>> row(ranks.size());
  for (u32 d = 0; d < ranks.size(); d++) {
    i64 n = 0;
    for (Rank* source : ranks)
      for (u32 t = 0; t < source->tokens; t++) {
        auto& rows = row[source->me];
        rows.resize(source->tokens, std::vector<i64>(ranks.size(), -1));
        if (goes(local_ids(*source, t, d))) rows[t][d] = n++;
      }
  }
  for (Rank* s : ranks)
    for (u32 t = 0; t < s->tokens; t++) {
      // Ranks in the order of their highest selecting k.
      std::vector<u32> order;
      for (u32 k = s->s.topk; k-- > 0;) {
        i64 e = s->topk[t * s->s.topk + k];
        u32 owner = e < 0 ? 0 : (u32)(e / s->s.local());
        i64 at = e < 0 ? -1 : row[s->me][t][owner];
        if (e >= 0 && std::find(order.begin(), order.end(), owner) == order.end())
          order.insert(order.begin(), owner);
        float back = at < 0 ? 0 : ((float*)(ranks[owner]->arena + kYAt + (512 << 10)))[at * s->s.topk + k];
        if (weights) same("returned weight", out_weights[s->me][t * s->s.topk + k], back);
      }
      for (u32 i = 0; i < s->s.row_bytes / 4; i++) {
        float sum = 0;
        for (u32 o = 0; o < order.size(); o++) {
          u32 d = order[o];
          float term = ((float*)(ranks[d]->arena + kYAt))[row[s->me][t][d] * s->s.row_bytes / 4 + i];
          sum = o == 0 ? term : sum + term;
        }
        same("sum of token " + std::to_string(t), outs[s->me][(u64)t * s->s.row_bytes / 4 + i], sum);
      }
    }
}

// A second dispatch is sent before the first is received: it has a slot, a region and staging of its own.
void two_at_once(std::vector<Rank*>& ranks) {
  std::vector<DispatchArgs> first, second;
  for (Rank* r : ranks) {
    memset(r->arena, 0xee, kArenaBytes);
    first.push_back(dispatch_args(*r, kFlat, false));
    second.push_back(dispatch_args(*r, kFlat, true));
    second.back().region = 2 << 20, second.back().staging = kStagingAt + (1 << 20);
    first.back().capacity = second.back().capacity = 2 << 20;
  }
  std::vector<Outcome> told(ranks.size());
  std::vector<std::thread> running;
  for (u32 i = 0; i < ranks.size(); i++)
    running.emplace_back([&, i] {
      Rank& r = *ranks[i];
      for (DispatchArgs a : {first[i], second[i]})
        model::launch(kBlocks, kWarps * 32, [=, &r] { ty_dispatch(a, r.params()); });
      told[i] = *r.outcome;
      r.arrive(first[i].c, true);
      r.arrive(second[i].c, true);
    });
  for (auto& t : running) t.join();
  for (u32 d = 0; d < ranks.size(); d++)
    for (const auto* args : {&first, &second}) check_received(ranks, d, (*args)[d], told[d]);
}

void refusals(std::vector<Rank*>& ranks) {
  std::vector<DispatchArgs> args;
  for (Rank* r : ranks) args.push_back(dispatch_args(*r, kFlat, false));
  const char text[] = "no rows today";
  args[1].c.verdict = kRefuseText, args[1].c.text_bytes = sizeof text, args[1].staged = 0;
  memcpy(args[1].c.text, text, sizeof text);
  for (const Outcome& o : dispatch(ranks, args)) {
    same("refused", o.code, kRefused);
    same("by rank", o.rank, 1u);
    same_bytes("text", o.text, text, sizeof text);
  }
  args.clear();
  for (Rank* r : ranks) args.push_back(dispatch_args(*r, kFlat, false));
  args[0].capacity = 128, args[0].c.text_bytes = 3;
  for (const Outcome& o : dispatch(ranks, args)) {
    same("full", o.code, kFull);
    same("at rank", o.rank, 0u);
  }
  args.clear();
  for (Rank* r : ranks) args.push_back(dispatch_args(*r, kFlat, false));
  i64 good = std::exchange(ranks[0]->topk[1], ranks[0]->s.experts);
  for (const Outcome& o : dispatch(ranks, args)) {
    same("a bad routing", o.code, kRefused);
    same("for its routing", o.verdict, kRefuseRoute);
  }
  ranks[0]->topk[1] = good;
}

#include "launches.h"

void run(const Shape& shape, std::vector<u32> tokens) {
  std::vector<Rank*> ranks;
  for (u32 i = 0; i < shape.ranks; i++) ranks.push_back(new Rank(shape, i));
  std::mt19937 random(shape.ranks * 100 + shape.topk);
  Fabric fabric(ranks);
  for (u32 layout : {kFlat, kExpertMajor, kPacked}) {
    for (Rank* r : ranks) bring(*r, tokens[(r->me + layout) % tokens.size()], random);
    for (bool replay : {false, true}) {
      std::vector<DispatchArgs> args;
      for (Rank* r : ranks) {
        memset(r->arena, 0xee, kArenaBytes);
        args.push_back(dispatch_args(*r, layout, replay));
      }
      auto told = dispatch(ranks, args);
      for (u32 d = 0; d < shape.ranks; d++) {
        same("dispatch", told[d].code, kGo);
        check_received(ranks, d, args[d], told[d]);
      }
      combine(ranks, told, replay);
    }
    if (layout == kFlat && ranks.size() > 1) refusals(ranks);
    if (layout == kFlat) two_at_once(ranks);
    // Where a model of it is not too slow.
    if (shape.max_tokens < 100 || layout == kFlat) launches(ranks, layout, random);
  }
}

int main() {
  run({2, 8, 3, 64, 0, 72, 1 << 20}, {70, 33});
  // Puts that are shorter than a row, scales, a rank without tokens.
  run({3, 12, 4, 272, 3, 40, 112}, {0, 40, 7});
  run({1, 4, 2, 48, 1, 8, 1 << 20}, {8});
  // Tokens that several blocks count.
  run({2, 4, 2, 16, 1, 600, 64}, {600, 555});
  puts("all is well");
}
