// The ranks of one exchange on the model of a GPU. They work over the device API of NVLink, or over one that
// puts (TY_PUTS): the GPU ring, or `device-put` with TY_QUEUES queues. In the second case a thread per rank
// stands in for the host and a transport: it executes commands in any order (INV-2). Included behind
// `exchange.cu`, once for each of its levels. Where MODEL_FABRIC names a header, that header has the fabric.
using namespace ty;

// Operations that have places of their own: twice as many where rows are sent without a request (decode.cpp).
#ifndef MODEL_SLOTS
#define MODEL_SLOTS 2
#endif
// Behind the records, the counts of tiles and the words of units.
#ifndef MODEL_DECODE
#define MODEL_DECODE 0
#endif
constexpr u32 kBlocks = 2, kSlots = MODEL_SLOTS;
// Commands of a ring. Few where waves run in lockstep: more lanes of one wave post than there are
// slots.
constexpr u32 kCapacity = model::kLockstep ? 8 : 32;
constexpr u64 kDecodeAt = 1 << 18, kControlBytes = kDecodeAt + MODEL_DECODE;
constexpr u64 kArenaBytes = 8 << 20, kStagingAt = 4 << 20;
constexpr u64 kLandingAt = 6 << 20, kYAt = 5 << 20;
constexpr u32 kQueues = std::max(1, TY_QUEUES);

// As the host computes it: see `quotient`.
inline u32 factor_of(u32 by) { return by > 1 ? ~0u / by + 1 : 0; }

// The fault of a transport, where the model shows that it is noticed. kWaits is a fault of the
// kernels: waits end soon.
enum class Fault { kNone, kSignalFirst, kLost, kDoneEarly, kWrongQueue, kWaits };
inline Fault fault = Fault::kNone;

#ifdef MODEL_FABRIC
#include MODEL_FABRIC
#endif

struct Rank : Inputs {
  u8 *control = room<u8>(kControlBytes), *arena = room<u8>(kArenaBytes);
  // Signals are a word apart.
  u64 *totals = room<u64>(1024), *abort = room<u64>(1);
  u64* of_all[2];  // windows, then totals, of all ranks
#if defined(MODEL_FABRIC)
  Links links;
  Up::Params params() const { return links.params; }
  std::vector<HcaWindow> windows() const { return {{control, kControlBytes}, {arena, kArenaBytes}}; }
#elif TY_PUTS
  // One queue.
  struct Ring {
    // The number of commands so far, the number known to be done, and whether a thread asks for
    // more.
    u64* head = room<u64>(3);
    Up::Command* commands = room<Up::Command>(kCapacity);
    u64 *submitted = room<u64>(1), *done = room<u64>(1), *failed = room<u64>(1);
  };
  Ring rings[kQueues];
#endif
#if defined(MODEL_FABRIC)
#elif TY_QUEUES
  static_assert(sizeof(Ring) == sizeof(Up::Ring), "device-put has rings of other fields");
  Up::Params params() const {
    return {{of_all[0], of_all[1], s.ranks, me, 8, 0}, (const Up::Ring*)rings, kCapacity - 1, signals(), me, 0};
  }
#elif TY_PUTS
  Up::Params params() const {
    return {rings[0].head, rings[0].commands, rings[0].done, totals, kCapacity - 1, me};
  }
#else
  Up::Params params() const { return {of_all[0], of_all[1], s.ranks, me, 8, 0}; }
#endif
  // Where rows cross in runs: of 4.
  static constexpr u32 kRunShift = 2;
  u32 most_runs() const { return kRuns ? (s.most() + (1 << kRunShift) - 1) >> kRunShift : 0; }
  Crossing crossing{room<u64>(kSlots * s.ranks * most_runs()), room<u64>(s.ranks * most_runs()),
                    room<u64>(s.ranks * most_runs()), room<u64>(s.ranks), nullptr,
                    3 * kSlots * s.ranks, most_runs(), kRunShift, 0, kWave, 0};
  u64* summed[2] = {room<u64>(s.ranks * most_runs() + 1), room<u64>(s.ranks * most_runs() + 1)};
  // Signals of each queue.
  u32 signals() const { return (3 + most_runs()) * kSlots * s.ranks; }
  // Blocks of an operation on flat rows: ranks differ.
  u32 some_blocks() const { return (u32)(1 + (operations + me) % kBlocks); }
  WaitReport* report = room<WaitReport>(1);
  State* state = room<State>(1);
  Outcome *outcome = room<Outcome>(1), *late = room<Outcome>(1);
  u64* host_counts = room<u64>(s.local());
  u32* tokens_word = room<u32>(1);
  Trace* trace = room<Trace>(1);
  // Bytes that a fabric has put to each rank.
  std::vector<u64> put = std::vector<u64>(s.ranks);
  // One per operation that may be open, with space for all ranks' totals.
  Cell* cells[kSlots];
  Routing r{};
  // The counters that reports read for each rank.
  PeerCounters* counters = room<PeerCounters>(s.ranks);
  u64 operations = 0;
  // Where ranks are masked; else empty.
  Masking masking{};

  Rank(const Shape& shape, u32 rank) : Inputs{shape, rank} {
    u64 entries = 8ull * kSlots * s.ranks * entry_words();
    u64 units = 8ull * s.ranks * s.most() + (16 << 10);
    for (Cell*& cell : cells) cell = (Cell*)room<u64>(128);
    if (entries + std::max(entries, units) > kDecodeAt) fail("the control window is too small");
    *state = State{0, 0, 1, 0, 0, 0, 0, 0, ~0ull, room<u64>(kSlots * s.ranks), room<u64>(kSlots * s.ranks),
                   room<u64>(kSlots), entries, s.largest_put, kQueues, 2ull * s.ranks * kSlots,
                   {control, arena}, room<u64>(s.ranks), counters, 1, room<u64>(s.ranks)};
    u64 pairs = (u64)s.most() * s.topk, spans = kBlocks * kWarps;
    r = Routing{room<i32>(pairs), room<u32>(pairs), room<u32>(pairs), room<u32>(spans * s.ranks),
                room<u32>(spans * s.experts), room<u32>(kBlocks * s.ranks),
                room<u32>(kBlocks * s.experts), room<u32>(s.ranks), room<u32>(s.experts),
                room<u32>(s.ranks * s.groups), room<u32>(s.ranks + 1), room<u32>(s.groups + 1),
                room<u32>((s.ranks + s.experts) * s.groups), room<Note>(1), 32, kBlocks};
  }
  u32 entry_words() const {
    return (kHead + (s.ranks + s.experts) * s.groups + kTextWords + 15) / 16 * 16;
  }
  Common common(u64 signature) {
    Common c{};
    c.entry_words = entry_words();
    c.cell = cells[operations % kSlots];
    c.abort = abort, c.report = report, c.state = state, c.outcome = outcome, c.trace = trace;
    // Where a wait must end, soon.
    bool ends = fault == Fault::kLost || fault == Fault::kWrongQueue || fault == Fault::kWaits;
    c.cap_ns = ends ? 3'000'000'000ull : 300'000'000'000ull;
    c.signature = signature;
    c.rank = me, c.ranks = s.ranks, c.experts = s.experts, c.topk = s.topk;
    c.local = s.experts / s.ranks, c.local_factor = factor_of(c.local);
    c.max_tokens = s.most(), c.input_rows = tokens, c.slots = kSlots;
    c.objector = me, c.group_count = s.groups;
    // The host's own numbers, which differ from the device's.
    c.ticket = (u32)operations++ + 77;
    return c;
  }
  void arrive(const Common& c, bool rows) {
    u32 phase = rows ? kPhaseRows : kPhaseCombineRows;
    ArriveArgs a{abort, report, c.cap_ns, c.cell, s.ranks, !rows, phase, me, trace, state};
    model::launch(1, kWarps * kWave, [=, this] { ty_arrive(a, params()); });
    same("an ended wait of rank " + std::to_string(me), report->ended, 0u);
  }
};

// The counters of ranks about each other once no kernel runs. Where kernels put, the host counts
// the commands.
void check_counters(const std::vector<Rank*>& ranks) {
  for (const Rank* r : ranks)
    for (const Rank* peer : ranks) {
      const PeerCounters &to = r->counters[peer->me], &from = peer->counters[r->me];
      std::string who = " of rank " + std::to_string(r->me) + " by " + std::to_string(peer->me);
      same("what is expected" + who, from.expected, from.received);
      // A rank puts no record at itself.
      if (r != peer) same("something is received" + who, from.received > 0, true);
      // Every signal that was raised, and nothing else.
      u64 seen = 0;
      for (u32 signal = r->me; signal < kQueues * r->signals(); signal += r->s.ranks)
        seen += peer->totals[signal];
      if (!TY_PUTS) same("what is raised" + who, to.raised, seen);
#ifndef MODEL_FABRIC
      if (r != peer) same("bytes that are put" + who, to.bytes, r->put[peer->me]);
#endif
      same("what is received" + who, from.received, seen);
    }
}

// The memory of all ranks is shared by all.
void share_memory(const std::vector<Rank*>& ranks) {
  for (Rank* r : ranks) {
    r->of_all[0] = room<u64>(2 * ranks.size());
    r->of_all[1] = room<u64>(ranks.size());
    for (u32 i = 0; i < ranks.size(); i++) {
      r->of_all[0][i] = (u64)ranks[i]->control;
      r->of_all[0][ranks.size() + i] = (u64)ranks[i]->arena;
      r->of_all[1][i] = (u64)ranks[i]->totals;
    }
  }
}

#if defined(MODEL_FABRIC)

using Fabric = FabricOf<Rank>;

#elif TY_PUTS

// Executes commands of all ranks until it is stopped, each rank's in an order of its own.
struct Fabric {
  std::vector<Rank*> ranks;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;

  explicit Fabric(std::vector<Rank*> all) : ranks(all) {
    share_memory(ranks);
    // In a loop all are one rank.
    for (Rank* r : ranks)
      if (r != ranks[0] || threads.empty()) threads.emplace_back([this, r] { serve(*r); });
  }
  ~Fabric() {
    stop = true;
    for (auto& t : threads) t.join();
  }
  // Where a kernel is changed, runs of rows come last, and late: what does not wait for them must find that.
  static bool is_late(const Rank& from, const Up::Command& c) {
    return model::mutant != 0 && kRuns && c.signal % from.signals() >= 3 * kSlots * from.s.ranks;
  }
  void execute(Rank& from, const Up::Command& c) {
    Rank& to = *ranks[c.peer];
    u8* source = (c.src_window == kArena ? from.arena : from.control) + c.src_offset;
    u8* target = (c.dst_window == kArena ? to.arena : to.control) + c.dst_offset;
    same("op", c.op, 2u);
    bool fits = c.bytes > 0 && c.bytes <= from.s.largest_put;
    same("length", fits || c.dst_window == kControl, true);
    same("multiples of 4", (c.src_offset | c.dst_offset | c.bytes) % 4, 0u);
    if (c.dst_offset + c.bytes > (c.dst_window == kArena ? kArenaBytes : kControlBytes))
      fail("a put leaves its window");
    auto raise = [&] {
      u32 signal = c.signal;
      if (fault == Fault::kWrongQueue) signal = (signal + from.signals()) % (kQueues * from.signals());
      model::at(to.totals + signal).fetch_add(c.add, std::memory_order_release);
    };
    bool first = fault == Fault::kSignalFirst && from.me == 0 && c.dst_window == kArena;
    if (first) raise(), std::this_thread::sleep_for(std::chrono::milliseconds(50));
    if (is_late(from, c)) std::this_thread::sleep_for(std::chrono::milliseconds(40));
    memcpy(target, source, c.bytes);
    from.put[c.peer] += c.bytes;
    if (!first) raise();
  }
  void serve(Rank& r) {
    std::mt19937 random(r.me + 7);
    std::vector<Served> queues;
    for (Rank::Ring& ring : r.rings) queues.push_back({ring, r.me});
    unsigned idle = 0;
    while (!stop) {
      size_t pending = 0;
      for (Served& queue : queues) {
        if (queue.take()) idle = 0;
        pending += queue.pending.size();
      }
      if (pending == 0) model::rest(idle++);
      if (pending == 0 || (pending < 8 && random() % 4 == 0)) continue;
      Served& queue = queues[random() % queues.size()];
      if (queue.pending.empty()) continue;
      u64 which = random();
      for (u64 i = 0; i < queue.pending.size() && model::mutant != 0; i++)
        if (!is_late(r, queue.command(i))) which = i;
      if (fault == Fault::kLost && which % 64 == 0)
        queue.end_one(which, [](const Up::Command&) {});
      else
        queue.end_one(which, [&](const Up::Command& c) { execute(r, c); });
    }
  }

  // The commands that were taken from one queue.
  struct Served {
    Rank::Ring ring;
    u32 me;
    std::vector<u64> pending{};
    std::vector<bool> ended = std::vector<bool>(kCapacity);
    u64 taken = 0, done = 0;

    bool take() {
      auto& sequence = model::at(&ring.commands[taken % kCapacity].sequence);
      bool submitted = !TY_QUEUES || taken < model::at(ring.submitted).load(std::memory_order_acquire);
      bool there = submitted && sequence.load(std::memory_order_acquire) == taken + 1;
      if (there) pending.push_back(taken++);
      return there;
    }
    const Up::Command& command(u64 which) const { return ring.commands[pending[which] % kCapacity]; }
    template <class Execute>
    void end_one(u64 random, Execute execute) {
      u64 which = random % pending.size(), number = pending[which];
      pending.erase(pending.begin() + (long)which);
      Up::Command command = ring.commands[number % kCapacity];
      // Only for one rank's rows, so that the rank continues while they have not left yet.
      bool early = fault == Fault::kDoneEarly && me == 0 && command.src_window == kArena;
      if (!early) execute(command);
      // The staging of kernels may be overwritten once the command is done.
      ended[number % kCapacity] = true;
      while (ended[done % kCapacity]) ended[done++ % kCapacity] = false;
      model::at(ring.done).store(done, std::memory_order_release);
      if (!early) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      execute(command);
    }
  };
};

#else

struct Fabric {
  explicit Fabric(std::vector<Rank*> ranks) { share_memory(ranks); }
};

#endif

#include "rank_major.h"

// Whether kernels may wait themselves for the rows of other ranks.
constexpr bool kAtOnce = !TY_PUTS && !kGrouped;

u64 signature(u32 kind) { return kind; }
u64 signature(u32 kind, Layout layout) { return signature(kind) | (u32)layout << 4; }

// Places stages, metadata and notes in shared memory, in the product's order. There are at most as many
// stages, and warps that move rows, as fit.
void share_out(DispatchArgs& a) {
  u32 note = 4 * (2 + a.c.topk);
  // Of rows in runs, metadata come first, in the memory of the stages.
  u32 metadata = kRuns ? 0 : kMetadataWarps * a.metadata_bytes;
  auto bytes = [&] { return a.table_bytes + metadata + a.movers * a.stages * (a.stage_bytes + note); };
  while (a.stages > 1 && bytes() > kSharedBytes) a.stages--;
  while (a.movers > 1 && bytes() > kSharedBytes) a.movers--;
  if (bytes() > kSharedBytes) fail("a row of " + std::to_string(a.row_bytes) + " bytes is too long for this model");
  u32 stages = a.movers * a.stages * a.stage_bytes;
  a.metadata_at = a.table_bytes + (kRuns ? 0 : stages), a.notes_at = a.table_bytes + stages + metadata;
}

DispatchArgs dispatch_args(Rank& r, Layout layout, bool replay) {
  DispatchArgs a{};
  if (!replay) {
    r.r.blocks = has_row_per_token(layout) && !TY_PUTS && !kGrouped ? r.some_blocks() : kBlocks;
    u32 warps = r.r.blocks * kWarps;
    r.r.span = std::bit_ceil(std::max(8u, (r.tokens + warps - 1) / warps));
  }
  a.c = r.common(signature(replay ? 2 : 1, layout));
  a.r = r.r, a.topk_idx = (const GivenId*)r.topk.data(), a.x = r.x, a.weights = r.weights.data();
  a.scales = r.s.scale_words ? r.scales.data() : nullptr;
  a.scale_stride[0] = r.s.scale_words, a.scale_stride[1] = 1;
  a.region = 0, a.capacity = kStagingAt, a.row_bytes = r.s.row_bytes;
  a.scale_words = r.s.scale_words, a.replay = replay, a.alignment = 4;
  take_layout(a, layout);
  a.staged = TY_PUTS, a.piece_bytes = r.s.row_bytes, a.pieces = 1, a.stages = 1 + r.operations % 4;
  u32 tiled = r.operations % 2 ? kWarps / 2 - 1 : kWarps * 3 / 4;
  a.movers = has_row_per_token(layout) ? kWarps - kWarps / 8 : tiled;
  if constexpr (kRuns) a.crossing = r.crossing, a.movers = std::min(a.movers, kWarps - 2);
  a.stage_bytes = (u32)align_region(r.s.row_bytes), a.table_bytes = 16 << 10;
  a.metadata_bytes = (16 << 10) * (kWarps / 4) / kMetadataWarps;
  share_out(a);
  a.staging = kStagingAt, a.source_first = r.me * r.s.max_tokens;
  a.call_tokens = r.s.max_tokens;
  a.at_once = kAtOnce && r.operations % 2;
  a.host_counts = r.host_counts;
  // As with small shared memory, or wide metadata: fewer tokens at once, scales by themselves.
  a.tally_tokens = 32 >> r.operations % 6, a.metadata_tokens = 32 >> r.operations % 4;
  a.metadata_scales = r.operations % 3 != 0;
  if (a.rank_major) a.zero_padding = (r.operations + r.me) % 2;
  if (kRuns) a.pushers = (r.operations / 2 + r.me) % 3 == 0 ? 0 : 1;
  if (!has_row_per_token(layout) && !TY_PUTS && !kGrouped) {
    // Small tiles, so that there are several.
    a.tiles = r.state->outbox, a.tile_rows = r.operations % 2 ? 32 : 8;
    // Some ranks have blocks that push.
    a.pushers = (r.operations / 2 + r.me) % 3 == 0 ? 0 : 1, a.part_rows = a.pushers > 0 ? 1 : 8;
    a.zero_padding = layout == Layout::kExpertMajor;
  }
  return a;
}

// The dispatch casts rows of a type, in pieces that may be shorter than a row and in one stage or two.
void cast_from(DispatchArgs& a, const std::vector<u32>& raw, Cast how, DType dtype) {
  a.raw = (const u8*)raw.data(), a.x = nullptr, a.scales = nullptr;
  a.cast = how, a.dtype = dtype, a.hidden = (u32)a.row_bytes;
  a.piece_bytes = std::min(512u, a.hidden), a.pieces = (a.hidden + a.piece_bytes - 1) / a.piece_bytes;
  a.stage_scales = (u32)align_region(a.piece_bytes * bytes_of(dtype)), a.stage_bytes = a.stage_scales + 128;
  a.stages = 1 + a.stages % 2, a.movers = 6;
  share_out(a);
}

Region region_of(const DispatchArgs& a, const Outcome& outcome) {
  u64 tokens = outcome.tokens, rows = outcome.rows, places = a.c.local_experts() * a.most_tokens();
  if (a.layout == Layout::kPacked || a.worst) tokens = a.most_tokens();
  if (a.layout == Layout::kPacked) rows = places;
  if (a.layout == Layout::kExpertMajor && a.worst) rows = a.worst_experts;
  return Region(a.region_shape(), tokens, a.layout == Layout::kFlat ? 0 : rows);
}

// One rank of a dispatch, until its rows have arrived. Where blocks push, or cast, more of them run than count.
void dispatch_on(Rank& r, const DispatchArgs& a) {
  u32 blocks = (a.replay ? kBlocks : a.r.blocks) + (a.pushers > 0 || (a.casts() && !TY_PUTS));
  model::launch(blocks, kWarps * kWave, [=, &r] { ty_dispatch(a, r.params()); });
  same("an ended wait", r.report->ended, 0u);
  if (!a.c.no_host_sync) same("ticket of the outcome", r.outcome->epoch, a.c.ticket);
  if (!a.c.no_host_sync && r.outcome->code != kGo) return;
  if (!a.at_once) r.arrive(a.c, true);
  if (a.layout == Layout::kFlat || a.tile_rows > 0) return;
  Region region = region_of(a, *r.outcome);
  u64 rows = r.outcome->rows;
  bool major = a.layout == Layout::kExpertMajor;
  if (a.c.no_host_sync) rows = major ? a.worst_experts : a.c.local_experts() * a.most_tokens();
  auto at = [&](u64 offset) { return r.arena + a.region + offset; };
  SpreadArgs s{at(0), (u32*)at(region.scales), (float*)at(region.weights),
               major ? nullptr : (u32*)at(region.source), (i32*)at(region.slots),
               (u32*)at(region.landed_scales), (float*)at(region.landed_weights),
               (u32*)at(region.landed_source), (u32*)at(region.expert_counts),
               (u32*)at(region.expert_starts), a.c.cell,
               a.c.no_host_sync ? (u64*)at(region.totals) : nullptr, r.outcome->tokens, rows, a.row_bytes,
               a.scale_words, a.c.topk, a.c.local_experts(), 0, a.piece_bytes, std::min(14u, kWarps), 1, 0};
  model::launch(kBlocks, kWarps * kWave, [=, &r] { ty_spread(s, r.params()); });
}

#include "forms.h"

// Whether a packed output gives the places of the rows of each source.
void check_ranges(const std::vector<Inputs*>& ranks, u32 d, const u64* ranges) {
  for (u32 e = 0; e < ranks[d]->s.local(); e++) {
    u64 begin = 0;
    for (const Inputs* source : ranks) {
      u64 count = 0;
      for (u32 t = 0; t < source->tokens; t++)
        for (int id : local_ids(*source, t, d)) count += id == (int)e;
      same("a range", ranges[e * ranks.size() + source->me], count | begin << 32);
      begin += count;
    }
  }
}

// Compares the received rows of a rank with the inputs of all.
void check_received(const std::vector<Inputs*>& ranks, u32 d, const DispatchArgs& a, u8* base,
                    const Outcome& outcome, const DecodeArgs& forms) {
  Shape s = ranks[d]->s;
  u32 local = s.local();
  // Rows of each expert, and where they start.
  std::vector<u64> starts(local + 1), next(local), counts(local);
  for (Inputs* source : ranks)
    for (u32 t = 0; t < source->tokens; t++)
      for (i32 id : local_ids(*source, t, d))
        if (id >= 0) counts[id]++;
  for (u32 e = 0; e < local; e++) {
    u64 place = a.layout == Layout::kPacked ? a.most_tokens() : (counts[e] + 3) / 4 * 4;
    starts[e + 1] = starts[e] + place;
    next[e] = starts[e];
  }
  Region region = region_of(a, outcome);
  bool flat = a.layout == Layout::kFlat;
  if (!flat) same("rows", outcome.rows, starts[local]);
  u64 n = 0, scale_bytes = 4ull * s.scale_words;
  for (Inputs* source : ranks) {
    u64 before = n;
    for (u32 t = 0; t < source->tokens; t++) {
      auto ids = local_ids(*source, t, d);
      if (!goes(ids)) continue;
      std::string what = "rank " + std::to_string(d) + ", layout " + std::to_string((u32)a.layout) +
                         ", row " + std::to_string(n) + ": ";
      const u8* row = source->x + (u64)t * s.row_bytes;
      const u32* scales = source->scales.data() + t * s.scale_words;
      u32 from = source->source() * (a.rank_major ? a.call_tokens : s.max_tokens) + t;
      u64 at = a.rank_major ? block_of(a, *source) + n - before : n;
      if (flat) {
        same_bytes(what + "x", base + at * s.row_bytes, row, s.row_bytes);
        same_bytes(what + "scales", base + region.scales + at * scale_bytes, scales, scale_bytes);
        same_bytes(what + "ids", base + region.ids + at * s.topk * 4, ids.data(), s.topk * 4);
      }
      if (a.layout != Layout::kPacked)
        same(what + "source", ((u32*)(base + region.source))[at], from);
      for (u32 k = 0; k < s.topk; k++) {
        float weight = ids[k] < 0 ? 0 : source->weights[t * s.topk + k];
        if (flat) {
          same(what + "weight", ((float*)(base + region.weights))[at * s.topk + k], weight);
          continue;
        }
        i32 slot = ids[k] < 0 ? -1 : (i32)next[ids[k]]++;
        same(what + "slot", ((i32*)(base + region.slots))[n * s.topk + k], slot);
        if (slot < 0) continue;
        same_bytes(what + "copy", base + (u64)slot * s.row_bytes, row, s.row_bytes);
        same(what + "weight of a copy", ((float*)(base + region.weights))[slot], weight);
        same_bytes(what + "scales of a copy", scales_at(a, base + region.scales, slot, forms).data(), scales,
                   scale_bytes);
        if (a.layout == Layout::kPacked)
          same(what + "source of a copy", ((u32*)(base + region.source))[slot],
               source->me * forms.source_step + t);
      }
      n++;
    }
    if (a.rank_major) check_behind(*source, a, base, region, n - before);
    same("rows of a source", ((u32*)(base + region.rank_counts))[source->me], n - before);
    same("the end of a source's rows", ((u32*)(base + region.rank_ends))[source->me], n);
  }
  same("tokens", outcome.tokens, n);
  std::vector<u8> zeros(s.row_bytes);
  for (u32 e = 0; e < local && a.zero_padding && !flat; e++)
    for (u64 row = starts[e] + counts[e]; row < starts[e + 1]; row++)
      same_bytes("padding", base + row * s.row_bytes, zeros.data(), s.row_bytes);
  for (u32 e = 0; e < local; e++)
    same("rows of an expert", ((u32*)(base + region.expert_counts))[e], counts[e]);
  if (a.layout == Layout::kPacked) check_ranges(ranks, d, (u64*)(base + region.ranges));
}

void check_received(const std::vector<Inputs*>& ranks, u32 d, const DispatchArgs& a, u8* base,
                    const Outcome& outcome) {
  check_received(ranks, d, a, base, outcome, plain_forms(a, ranks[d]->s.max_tokens));
}

// The exchange that another one is queued behind, of either level.
struct Former {
  const void *cell = nullptr, *outcome = nullptr;
  const u64* stopped = nullptr;
  u32 ticket = 0;  // if it runs beside the other one
};

inline void follow(Common& c, const Former& former) {
  c.former = (const Cell*)former.cell, c.former_outcome = (const Outcome*)former.outcome;
  c.former_stopped = former.stopped, c.former_ticket = former.ticket;
}

// How a rank passes the rows of a combine.
struct Combine {
  bool no_host_sync = false;
  // Its rows lie outside the arena, and it pushes them; `lands`: it has memory for the rows of
  // others.
  bool pushes = false, lands = false;
  // It refuses; or it does not push the rows that it announces, so that others give up.
  bool refuses = false, silent = false;
  u32 objector = ~0u;  // the number of a rank that refuses, if that is not the one in its team
  u32 expected = kGo;
  // Returned weights are sums over all ranks that have a row of the token.
  bool sums = false;
  // Rank-major: places of a source's rows.
  u32 block = 0;
  // Among domains: the exchange that it is queued behind; and the runs by which its rows cross.
  Former former{};
  Crossing crossing{};
};

// One rank of a combine of f32, until its sums are made. Its rows lie at kYAt, their weights 512 KiB
// behind.
void combine_on(Rank& r, float* out, float* out_weights, Combine how = {}) {
  CombineArgs a{};
  a.c = r.common(signature(3));
  follow(a.c, how.former);
  a.c.no_host_sync = how.no_host_sync, a.c.outcome = how.no_host_sync ? r.late : r.outcome;
  a.r = r.r, a.x = kYAt, a.weights = kYAt + (512 << 10);
  a.out = (u8*)out, a.out_weights = out_weights;
  a.row_bytes = r.s.row_bytes, a.pieces = TY_ROWS_TMA && a.row_bytes % 32 == 0 ? 1 + r.operations % 2 : 1;
  a.piece_bytes = r.s.row_bytes / a.pieces, a.stages = 1 + r.operations % 3;
  a.stage_bytes = r.s.row_bytes, a.table_bytes = 8 << 10, a.returns_weights = out_weights != nullptr;
  if (how.sums && out_weights) a.returns_weights = kWeightsOfAll;
  a.at_once = kAtOnce && r.operations % 2;
  a.landing = kLandingAt, a.landing_weights = kLandingAt + (1 << 20);
  // Units of 1, 2 or 4 rows, behind the counts of tiles.
  a.flags = r.state->outbox + (16 << 10), a.most_units = r.s.most(), a.unit_shift = r.s.topk % 3;
  a.source_places = how.block, a.crossing = how.crossing;
  a.push_bytes = 128, a.push_warps = 2 + r.operations % 3, a.pushers = 1 + r.operations % kBlocks;
  std::vector<u8> outside;
  if (how.refuses) a.c.verdict = kRefuseText, a.r = Routing{};
  if (how.objector != ~0u) a.c.objector = how.objector;
  if (how.pushes) {
    if (how.silent) a.pushers = 0;
    if (!how.lands) a.landing = 0;
    outside.assign(r.arena + kYAt, r.arena + kYAt + (512 << 10));
    // The place for rows that a source has no memory for.
    a.own = outside.data(), a.x = kStagingAt;
  }
  auto sum = [=, &r] { ty_combine_f32(a, r.params()); };
#if TY_RUNS
  model::launch(kBlocks, kSummingWarps * 32, sum);
  same("an ended wait of rank " + std::to_string(r.me), r.report->ended, 0u);
  same("combine", a.c.cell->code, how.expected);
  r.arrive(a.c, false);
#elif TY_PUTS
  model::launch(1, kWarps * kWave, [=, &r] { ty_return_put(a, r.params()); });
  same("an ended wait of rank " + std::to_string(r.me), r.report->ended, 0u);
  same("combine", a.c.cell->code, how.expected);
  // Both do nothing if it was refused.
  r.arrive(a.c, false);
  model::launch(kBlocks, kSummingWarps * 32, sum);
#else
  model::launch(how.pushes ? kBlocks : r.some_blocks(), kSummingWarps * 32, sum);
  same("combine", a.c.cell->code, how.expected);
  if (how.expected == kGo && !a.at_once && *r.abort == 0) r.arrive(a.c, false);
#endif
}
