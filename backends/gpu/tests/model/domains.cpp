// Several domains on the model of a GPU: two exchanges, each over a device API of its own, as in `exchanges.rs`. They
// run side by side where rows cross in runs, else one behind the other. This program stands in for that file: between
// the two it reads nothing that the first has left.
#include "helpers.h"

// Of the ranks, so many are there in a twin: two of a domain, and one of a rail.
#ifndef TWINS
#define TWINS 0
#endif
#define TY_TWIN (TWINS > 0)
#define TY_PUTS OUT_PUTS
#define TY_QUEUES OUT_QUEUES
#define TY_UP_PARAM_BYTES OUT_PARAM_BYTES
#define TY_GROUPED 0
#define TY_RUNS OUT_PUTS
namespace out_level {
#include "out/exchange.cu"
#include "level.h"
}  // namespace out_level
#undef TY_PUTS
#undef TY_QUEUES
#undef TY_UP_PARAM_BYTES
#undef TY_GROUPED
#undef TY_TWIN
#undef TY_RUNS

#define TY_TWIN TWINS
#define TY_PUTS UP_PUTS
#define TY_QUEUES UP_QUEUES
#define TY_UP_PARAM_BYTES UP_PARAM_BYTES
#define TY_GROUPED 1
namespace up_level {
#include "up/exchange.cu"
#include "level.h"
}  // namespace up_level

using up_level::ty::u32, up_level::ty::u64, up_level::ty::u8, up_level::ty::i64;
using up_level::ty::Layout;
namespace ty = up_level::ty;
constexpr u64 kYAt = up_level::kYAt, kWeightsAt = kYAt + (512 << 10);

// A rank of the world, in both of its teams.
struct Rank : Inputs {
  u32 domain, index;
  out_level::Rank* out;
  up_level::Rank* in;
  up_level::DispatchArgs handed{};
  ty::Outcome outcome{};
  std::vector<float> sums, weights_back;
};

struct World {
  Shape s;
  u32 domains, size;
  std::vector<Rank*> ranks;
  std::vector<std::unique_ptr<out_level::Fabric>> rails;
  std::vector<std::unique_ptr<up_level::Fabric>> inside;

  World(const Shape& shape, u32 count) : s(shape), domains(count), size(shape.ranks / count) {
    Shape rail = s, domain = s;
    rail.ranks = domains;
    domain.ranks = size, domain.experts = s.experts / domains, domain.groups = domains;
    domain.max_tokens = domains * s.max_tokens;
    for (u32 w = 0; w < s.ranks; w++) {
      u32 d = w / size, i = w % size;
      ranks.push_back(new Rank{{s, w}, d, i, new out_level::Rank(rail, d),
                               new up_level::Rank(domain, i)});
    }
    for (u32 i = 0; i < size; i++) {
      std::vector<out_level::Rank*> team;
      for (u32 d = 0; d < domains; d++) team.push_back(ranks[d * size + i]->out);
      rails.push_back(std::make_unique<out_level::Fabric>(team));
    }
    for (u32 d = 0; d < domains; d++) {
      std::vector<up_level::Rank*> team;
      for (u32 i = 0; i < size; i++) team.push_back(ranks[d * size + i]->in);
      inside.push_back(std::make_unique<up_level::Fabric>(team));
    }
  }
  std::vector<Inputs*> inputs() { return {ranks.begin(), ranks.end()}; }
  template <class Each>
  void all(Each each) {
    std::vector<std::thread> running;
    for (Rank* r : ranks) running.emplace_back([=] { each(*r); });
    for (auto& t : running) t.join();
  }
};

// Enters with the objection that the host has received, in its words.
template <class Common, class Outcome>
void carry(Common& c, const Outcome& heard, u32 objector) {
  c.verdict = heard.code == ty::kFull ? ty::kRefuseFull : ty::kRefuseText;
  c.objector = objector, c.text_bytes = heard.text_bytes;
  memcpy(c.text, heard.text, sizeof c.text);
}

// How a rank enters, beyond its rows.
struct Wish {
  u32 verdict = 0;    // it refuses
  u64 capacity = 0;   // else its memory for rows, if that is small
  bool bad = false;   // a token selects an expert that does not exist
};

// The last exchange of a rank in a team, for the one behind it.
template <class Team, class Former>
void last_of(const Team& team, Former& former) {
  former = {team.cells[(team.operations - 1) % std::size(team.cells)], team.outcome, &team.state->stopped, 0};
}

// One rank of a dispatch: between domains, inside, and the agreement of all. Returns the objecting
// rank, or -1.
i64 dispatch(Rank& r, Layout layout, bool replay, Wish wish) {
  static_cast<Inputs&>(*r.out) = {r.out->s, r.domain, r.tokens, r.topk, r.weights, r.x, r.scales};
  if (wish.bad) r.out->topk[1] = r.s.experts + 5;
  auto first = out_level::dispatch_args(*r.out, out_level::ty::Layout::kFlat, replay);
  first.source_first = r.me * r.s.max_tokens, first.worst = 1;
  first.c.objector = r.me, first.c.verdict = wish.verdict;
  out_level::Former over_rail;
  last_of(*r.out, over_rail);
  std::thread rail([&] {
    out_level::dispatch_on(*r.out, first);
    // Does nothing if the dispatch was refused.
    if (r.out->outcome->code != ty::kGo) r.out->arrive(first.c, true);
  });
  // A rank that has refused knows that itself.
  bool at_once = out_level::ty::kRuns && wish.verdict == 0;
  if (!at_once) rail.join();
  out_level::Region region(first.region_shape(), first.most_tokens(), 0);
  u8* at = r.out->arena;
  // The most that may come.
  r.in->tokens = r.in->s.max_tokens;
  auto& second = r.handed = up_level::dispatch_args(*r.in, layout, replay);
  second.topk_idx = (const ty::GivenId*)(at + region.ids), second.x = at;
  second.scales = (const u32*)(at + region.scales);
  second.weights = (const float*)(at + region.weights);
  second.sources = (const u32*)(at + region.source), second.tokens = (const u32*)(at + region.totals);
  if (wish.capacity != 0) second.capacity = wish.capacity;
  if (wish.verdict != 0)
    carry(second.c, *r.out->outcome, r.out->outcome->objector);
  else
    up_level::follow(second.c, {over_rail.cell, over_rail.outcome, over_rail.stopped});
  const auto& x = first.crossing;
  if (at_once)
    second.crossing = {nullptr, nullptr, x.here, nullptr, nullptr, 0, x.most, x.shift, r.domain, 0, (u32)(r.in->operations % 2)};
  if (at_once || !replay) {
    u32 words = replay ? 0 : (r.in->s.ranks + r.in->s.experts) * r.in->s.groups;
    ty::GroupArgs g{r.in->abort, r.in->report, second.c.cap_ns, second.c.former, at_once ? x.described : nullptr,
                    first.c.ticket, r.in->me, (const u32*)(at + region.rank_counts), r.in->r.group_starts,
                    r.in->r.group_counts, r.in->s.groups, words};
    model::launch(1, ty::kWarps * ty::kWave, [=, &r] { up_level::ty_group(g, r.in->params()); });
  }
  up_level::dispatch_on(*r.in, second);
  r.outcome = *r.in->outcome;
  // Beside the rows on the rail, which may still be under way.
  auto last = r.out->common(first.c.signature);
  auto* agreed = last.outcome = room<out_level::ty::Outcome>(1);
  if (r.outcome.code == ty::kFull) carry(last, r.outcome, 1u << 31 | (r.domain * r.in->s.ranks + r.outcome.rank));
  if (r.outcome.code == ty::kRefused) carry(last, r.outcome, r.outcome.objector);
  model::launch(1, ty::kWarps * ty::kWave, [=, &r] { out_level::ty_agree(last, r.out->params()); });
  if (at_once) rail.join();
  same("an ended wait", r.out->report->ended, 0u);
  if (agreed->code == ty::kGo) return -1;
  same("code", agreed->code, ty::kRefused);
  return agreed->objector & ~(1u << 31);
}

// The sum of a token, from the rows where its owners have them: domains in the order of their last rank, and the ranks
// of each. `size` ranks are a domain.
template <class Row>
void check_sum(const Rank& r, u32 token, u32 columns, u32 size, Row row) {
  std::vector<u32> owners = owners_of(r, token), domains;
  for (u32 o = owners.size(); o-- > 0;)
    if (u32 d = owners[o] / size; std::find(domains.begin(), domains.end(), d) == domains.end())
      domains.insert(domains.begin(), d);
  for (u32 i = 0; i < columns; i++) {
    float sum = 0;
    for (u32 n = 0; n < domains.size(); n++) {
      float part = 0;
      bool has = false;
      for (u32 owner : owners) {
        if (owner / size != domains[n]) continue;
        float term = row(owner)[i];
        part = has ? part + term : term;
        has = true;
      }
      sum = n == 0 ? part : sum + part;
    }
    same("sum of token " + std::to_string(token), r.sums[(u64)token * columns + i], sum);
  }
}

void check_sums(World& world, bool weights) {
  Shape s = world.s;
  u32 columns = s.row_bytes / 4;
  Rows row = received_rows(world.inputs());
  auto y = [&](u32 d) { return (const float*)(world.ranks[d]->in->arena + kYAt); };
  for (Rank* r : world.ranks)
    for (u32 t = 0; t < r->tokens; t++) {
      for (u32 k = 0; k < s.topk && weights; k++) {
        i64 e = r->topk[t * s.topk + k], owner = e < 0 ? 0 : e / s.local();
        const float* back = (const float*)(world.ranks[owner]->in->arena + kWeightsAt);
        float expected = e < 0 ? 0 : back[row[r->me][t][owner] * s.topk + k];
        same("returned weight", r->weights_back[t * s.topk + k], expected);
      }
      check_sum(*r, t, columns, world.size, [&](u32 owner) { return y(owner) + row[r->me][t][owner] * columns; });
    }
}

// One rank of a combine: inside, the agreement of all where both exchanges are not under way at once, and between
// domains. `refuses`: this rank does; `expected` by all, inside this domain and then everywhere.
void combine_one(Rank& r, bool weights, bool refuses, std::pair<u32, u32> expected) {
  float *partials = (float*)(r.out->arena + kYAt), *back = (float*)(r.out->arena + kWeightsAt);
  up_level::Combine inner;
  inner.refuses = refuses, inner.expected = expected.first, inner.objector = r.me;
  bool at_once = out_level::ty::kRuns && !refuses;
  const auto& x = r.out->crossing;
  u64* summed = r.out->summed[r.in->operations % 2];
  if (at_once) inner.crossing = {nullptr, nullptr, nullptr, nullptr, summed, 0, x.most, x.shift, r.domain, 0, 0};
  u64 behind = r.in->operations;
  std::thread inside([&] { up_level::combine_on(*r.in, partials, weights ? back : nullptr, inner); });
  if (!at_once) inside.join();
  out_level::Former former{r.in->cells[behind % std::size(r.in->cells)], r.in->outcome, &r.in->state->stopped};
  if (at_once) former.ticket = (u32)behind + 77;
  // Over puts inside, sums are made by a second kernel.
  bool agrees = !out_level::ty::kRuns || up_level::ty::kPuts;
  if (agrees) {
    auto c = r.out->common(out_level::signature(3));
    if (refuses)
      carry(c, *r.in->outcome, r.me);
    else
      out_level::follow(c, former);
    model::launch(1, ty::kWarps * ty::kWave, [=, &r] { out_level::ty_agree(c, r.out->params()); });
    same("what all agree on", r.out->outcome->code, expected.second);
    last_of(*r.out, former);
  }
  out_level::Combine outer;
  outer.expected = expected.second, outer.refuses = refuses, outer.objector = r.me;
  if (!refuses) outer.former = former;
  outer.crossing = x, outer.crossing.summed = summed;
  out_level::combine_on(*r.out, r.sums.data(), weights ? r.weights_back.data() : nullptr, outer);
  if (at_once) inside.join();
}

void combine(World& world, bool weights) {
  u32 columns = world.s.row_bytes / 4, topk = world.s.topk;
  for (Rank* r : world.ranks) {
    float *y = (float*)(r->in->arena + kYAt), *back = (float*)(r->in->arena + kWeightsAt);
    for (u64 i = 0; i < r->outcome.tokens * columns; i++) y[i] = (float)((i * 31 + r->me * 1001) % 4099) / 3;
    for (u64 i = 0; i < r->outcome.tokens * topk; i++) back[i] = (float)(i + r->me * 100000);
    r->sums.assign(r->tokens * columns + 4, -1);
    r->weights_back.assign(r->tokens * topk + 1, -1);
  }
  world.all([=](Rank& r) { combine_one(r, weights, false, {ty::kGo, ty::kGo}); });
  check_sums(world, weights);
}

void refusals(World& world) {
  u32 last = world.s.ranks - 1;
  auto objector = [&](std::vector<std::pair<u32, Wish>> wishes, u32 expected) {
    world.all([=](Rank& r) {
      Wish wish;
      for (auto& [rank, wanted] : wishes)
        if (rank == r.me) wish = wanted;
      same("who objects", dispatch(r, Layout::kFlat, false, wish), (i64)expected);
    });
  };
  objector({{last, {ty::kRefuseText}}}, last);
  objector({{last, {ty::kRefuseText}}, {last - 1, {ty::kRefuseText}}}, last - 1);
  objector({{last, {0, 128}}}, last);
  // A refusal comes before a full arena.
  objector({{last, {ty::kRefuseText}}, {0, {0, 128}}}, last);
  // No host passes on what a kernel has found.
  u32 source = 0;
  while (world.ranks[source]->tokens == 0) source++;
  objector({{source, {0, 0, true}}}, source);
  for (Rank* r : world.ranks) {
    if (r->domain != source / world.size && world.domains > 1 && r->index != source % world.size) continue;
    same("how the refusal is passed on", r->outcome.verdict, ty::kRefuseInput);
    const u32* words = (const u32*)r->outcome.text;
    same("the token", words[0], 0u), same("its selection", words[1], 1u << 8 | ty::kNoExpert);
    same("the expert", words[2], world.s.experts + 5);
  }
}

// A combine that one rank refuses inside its domain: no rank makes sums.
void refused_combine(World& world) {
  u32 last = world.s.ranks - 1;
  for (Rank* r : world.ranks) r->sums.assign(r->sums.size(), -1);
  world.all([=](Rank& r) {
    u32 inside = r.domain == last / r.in->s.ranks ? ty::kRefused : ty::kGo;
    combine_one(r, false, r.me == last, {inside, ty::kRefused});
  });
  for (Rank* r : world.ranks) {
    same("who objects to a combine", r->out->outcome->objector, last);
    for (float sum : r->sums) same("a sum that is not made", sum, -1.0f);
  }
}

// An exchange behind one that failed is not entered, and ends.
void broken(World& world) {
  for (u32 code : {0u, ty::kMismatch, ty::kGo})
    world.all([=](Rank& r) {
      ty::Cell* cell = (ty::Cell*)room<u64>(128);
      u64* stopped = room<u64>(1);
      cell->code = code, *stopped = code == ty::kGo;
      ty::DispatchArgs a = r.handed;
      a.c.ticket = 5;
      up_level::follow(a.c, {cell, r.out->outcome, stopped});
      model::launch(up_level::kBlocks, ty::kWarps * ty::kWave, [=, &r] { up_level::ty_dispatch(a, r.in->params()); });
      same("a skipped dispatch", a.c.cell->code, 0u);
      same("its outcome", r.in->outcome->epoch == 5, false);
    });
}

void run(const Shape& shape, u32 domains, std::vector<u32> tokens) {
  World world(shape, domains);
  std::mt19937 random(shape.ranks * 100 + domains);
  for (Layout layout : {Layout::kFlat, Layout::kExpertMajor, Layout::kPacked}) {
    for (Rank* r : world.ranks) bring(*r, tokens[(r->me + (u32)layout) % tokens.size()], random);
    for (bool replay : {false, true}) {
      for (Rank* r : world.ranks) {
        memset(r->out->arena, 0xee, out_level::kArenaBytes);
        memset(r->in->arena, 0xee, up_level::kArenaBytes);
      }
      world.all([=](Rank& r) { same("dispatch", dispatch(r, layout, replay, {}), (i64)-1); });
      for (Rank* r : world.ranks)
        up_level::check_received(world.inputs(), r->me, r->handed, r->in->arena, r->outcome);
      for (Rank* r : world.ranks) {
        const u32* counts = (const u32*)(r->in->arena + up_level::region_of(r->handed, r->outcome).expert_counts);
        for (u32 e = 0; e < shape.local(); e++)
          same("rows of an expert, for the host", r->in->host_counts[e], (u64)r->handed.c.ticket << 32 | counts[e]);
      }
      combine(world, replay);
    }
    if (layout == Layout::kFlat) refused_combine(world), refusals(world);
  }
  broken(world);
}

#if TWINS
#include "twin.h"
#endif

int main(int count, char** arguments) {
#if TWINS
  // A loop of all its rails; several GPUs; more domains, and a rank without tokens.
  twin({8, 16, 3, 48, 1, 40, 1 << 20}, 2, {33, 40});
  twin({24, 48, 6, 80, 3, 36, 112}, 3, {36, 29, 31, 0});
  puts("all is well");
  return 0;
#endif
  // A change to the kernels: waits end soon.
  if (count > 1 && atoi(arguments[1]) != 0) {
    model::mutant = atoi(arguments[1]);
    up_level::fault = up_level::Fault::kWaits, out_level::fault = out_level::Fault::kWaits;
    run({4, 8, 3, 48, 1, 40, 1 << 20}, 2, {33, 40, 0});
    puts("nothing was noticed");
    return 0;
  }
  // Domains of 2, each path once.
  if (count > 1 && std::string(arguments[1]) == "few") {
    run({4, 8, 3, 48, 1, 9, 1 << 20}, 2, {7, 9, 0});
    puts("all is well");
    return 0;
  }
  // Domains of 2; a rank without tokens, scales, puts that are shorter than a row.
  run({4, 8, 3, 48, 1, 40, 1 << 20}, 2, {33, 40, 0});
  run({6, 12, 4, 80, 3, 36, 112}, 3, {36, 5, 0, 31});
  // Lanes look at the counts of several experts, or of one, or of none.
  run({4, 280, 3, 16, 0, 12, 1 << 20}, 2, {12, 5, 0});
  // Domains of 1: each rank is its own forwarder everywhere.
  run({2, 4, 2, 32, 1, 70, 64}, 2, {70, 65});
  puts("all is well");
}
