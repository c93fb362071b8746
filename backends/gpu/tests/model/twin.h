// A twin of domains (standins/twin): TWINS ranks of the first domain, whose memory stands for that of all ranks.
// Inside, the window of a rank that is not there is that of another GPU; a rail is a loop. Included in domains.cpp.
#pragma once

// A world of which only the first ranks are there.
struct Twin {
  Shape s;
  u32 domains, size;
  std::vector<Rank*> ranks;
  std::vector<std::unique_ptr<out_level::Fabric>> rails;
  std::unique_ptr<up_level::Fabric> inside;

  Twin(const Shape& shape, u32 count) : s(shape), domains(count), size(shape.ranks / count) {
    Shape rail = s, domain = s;
    rail.ranks = domains;
    domain.ranks = size, domain.experts = s.experts / domains, domain.groups = domains;
    domain.max_tokens = domains * s.max_tokens;
    std::vector<up_level::Rank*> present;
    for (u32 i = 0; i < TWINS; i++) {
      ranks.push_back(new Rank{{s, i}, 0, i, new out_level::Rank(rail, 0), new up_level::Rank(domain, i)});
      rails.push_back(std::make_unique<out_level::Fabric>(std::vector<out_level::Rank*>(domains, ranks[i]->out)));
      present.push_back(ranks[i]->in);
    }
    inside = std::make_unique<up_level::Fabric>(present);
    for (up_level::Rank* r : present) {
      std::vector<up_level::Rank*> seen;
      for (u32 q = 0; q < size; q++) seen.push_back(present[q < TWINS ? q : partner(r->me, q)]);
      r->of_all[0] = room<u64>(2 * size), r->of_all[1] = room<u64>(size);
      for (u32 q = 0; q < size; q++) {
        r->of_all[0][q] = (u64)seen[q]->control, r->of_all[0][size + q] = (u64)seen[q]->arena;
        r->of_all[1][q] = (u64)seen[q]->totals;
      }
    }
  }

  // The GPU that stands for rank `q` of the domain in the eyes of `me`, in words of its own: two GPUs stand for each
  // other; of four, each is the other of a pair in turn.
  static u32 partner(u32 me, u32 q) {
    if (TWINS == 2) return 1 - me;
    static constexpr u32 kPairs[3][4] = {{1, 0, 3, 2}, {2, 3, 0, 1}, {3, 2, 1, 0}};
    return kPairs[(q - TWINS) % 3][me];
  }
  // The rank, as `me` knows it, on the GPU that stands for `q` in the eyes of `me`.
  static u32 as(u32 me, u32 q) { return q < TWINS ? me : q; }

  // The real world that a rank believes to be in: of the rows of each source, those that reach it. A GPU sends to
  // rank (d, q) what the rank that it stands for sends to this one.
  std::vector<Inputs> believed(u32 me) const {
    std::vector<Inputs> all;
    u32 local = s.local();
    for (u32 w = 0; w < s.ranks; w++) {
      u32 d = w / size, q = w % size;
      const Inputs& sender = *ranks[q < TWINS ? q : partner(me, q)];
      Inputs source = sender;
      source.me = w, source.named = (int)sender.me;
      u32 target = d * size + as(me, q);
      for (i64& e : source.topk) e = e >= 0 && e / local == target ? e % local + me * local : -1;
      all.push_back(source);
    }
    return all;
  }
};

// Rows that reach a rank are those of the world that it believes to be in.
void check_twin_received(const Twin& world) {
  for (Rank* r : world.ranks) {
    std::vector<Inputs> sources = world.believed(r->me);
    std::vector<Inputs*> all;
    for (Inputs& source : sources) all.push_back(&source);
    up_level::check_received(all, r->me, r->handed, r->in->arena, r->outcome);
  }
}

// The sums of all ranks, from the rows where the GPUs have them.
void check_twin_sums(const Twin& world) {
  u32 columns = world.s.row_bytes / 4;
  std::vector<Rows> rows;
  for (Rank* r : world.ranks) {
    std::vector<Inputs> sources = world.believed(r->me);
    std::vector<Inputs*> all;
    for (Inputs& source : sources) all.push_back(&source);
    rows.push_back(received_rows(all));
  }
  for (Rank* r : world.ranks)
    for (u32 t = 0; t < r->tokens; t++) {
      check_sum(*r, t, columns, world.size, [&](u32 owner) {
        u32 q = owner % world.size, at = q < TWINS ? q : Twin::partner(r->me, q);
        u32 writer = owner - q + Twin::as(r->me, q);
        return (const float*)(world.ranks[at]->in->arena + kYAt) + rows[at][writer][t][at] * columns;
      });
    }
}

void twin_all(const Twin& world, const std::function<void(Rank&)>& each) {
  std::vector<std::thread> running;
  for (Rank* r : world.ranks) running.emplace_back([&each, r] { each(*r); });
  for (auto& t : running) t.join();
}

void twin(const Shape& shape, u32 domains, std::vector<u32> tokens) {
  Twin world(shape, domains);
  std::mt19937 random(shape.ranks);
  for (u32 turn = 0; turn < 3; turn++) {
    for (Rank* r : world.ranks) bring(*r, tokens[(r->me + turn) % tokens.size()], random);
    for (bool replay : {false, true}) {
      for (Rank* r : world.ranks) {
        memset(r->out->arena, 0xee, out_level::kArenaBytes);
        memset(r->in->arena, 0xee, up_level::kArenaBytes);
      }
      twin_all(world, [=](Rank& r) { same("dispatch", dispatch(r, Layout::kFlat, replay, {}), (i64)-1); });
      check_twin_received(world);
      u32 columns = shape.row_bytes / 4;
      for (Rank* r : world.ranks) {
        float* y = (float*)(r->in->arena + kYAt);
        for (u64 i = 0; i < r->outcome.tokens * columns; i++) y[i] = (float)((i * 31 + r->me * 1001) % 4099) / 3;
        r->sums.assign(r->tokens * columns + 4, -1);
      }
      twin_all(world, [](Rank& r) { combine_one(r, false, false, {ty::kGo, ty::kGo}); });
      check_twin_sums(world);
    }
  }
}
