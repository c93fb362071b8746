// The arguments and reports of every operation: how ranks enter, waits, signals, times. Mirrored in
// engine/args.rs; TY_ARGS_BYTES checks the sizes.
//
// TY_GROUPED: the tokens of this rank are rows that it received from several domains, one *group* of
// tokens from each, and forwards inside its own domain. Received rows are in order of groups, then
// of ranks.
#pragma once
#include "transport.cuh"

namespace ty {

#if TY_GROUPED
constexpr bool kGrouped = true;
using GivenId = i32;  // ids as a dispatch leaves them
#else
constexpr bool kGrouped = false;
using GivenId = i64;  // as callers pass them
#endif

#if TY_PUTS
constexpr bool kPuts = true;
#else
constexpr bool kPuts = false;
#endif

// Between domains: rows cross in runs. See runs.cuh.
#ifndef TY_RUNS
#define TY_RUNS 0
#endif
constexpr bool kRuns = TY_RUNS;

constexpr u32 kControl = 0;     // window of entry records
constexpr u32 kArena = 1;       // window of rows

constexpr u32 kHead = 8;        // words of an entry's head
// The words of a head. Some differ by operation; the signature, which comes first, tells heads of two apart.
constexpr u32 kHeadVerdict = 0;        // how its rank takes part; above it the number of blocks, and flags
constexpr u32 kHeadSignature = 1;      // of the call, the low half
constexpr u32 kHeadOrigin = 2;         // the rank whose refusal it passes on
constexpr u32 kHeadPlace = 3;          // dispatch: of the region, in units of kRegionAlign; combine: of the rows, of 16
constexpr u32 kHeadCapacity = 4;       // dispatch: room of the region, in the same unit
constexpr u32 kHeadWeights = 4;        // combine: the place of the rows' weights, in units of 16 bytes
constexpr u32 kHeadPieces = 4;         // decode: pieces of 16 bytes in a row
constexpr u32 kHeadRows = 5;           // combine: the rows that it has; decode: those that it sends the receiver
constexpr u32 kHeadSignatureHigh = 6;  // of the call, the high half
constexpr u32 kHeadText = 7;           // dispatch: bytes of a refusal's text
constexpr u32 kHeadLanding = 7;        // combine: the place where rows are pushed to, in units of 16 bytes
constexpr u32 kTextBytes = 192; // longest text of a refusal
constexpr u32 kTextWords = 1 + kTextBytes / 4;
constexpr u32 kWarps = 512 / kWave;  // of a block

constexpr u32 kPhaseEntry = 1, kPhaseRows = 3, kPhaseCombineRows = 4, kPhaseDone = 5;

// How a rank enters.
constexpr u32 kEnter = 0;       // it takes part
constexpr u32 kRefuseText = 1;  // its host refuses: a text follows
constexpr u32 kRefuseInput = 2; // its routing is bad: the place and the value that was found follow
constexpr u32 kRefuseFull = 3;  // its arena is full: a text follows
constexpr u32 kRefuseBroken = 4; // ranks that it met before are out of step: a text follows

// The error of a routing.
constexpr u32 kNoExpert = 1, kTwice = 2, kTooMany = 3;

// How an operation continues: the same answer on all ranks except for kOrigin and kBadRows.
constexpr u32 kGo = 1, kRefused = 2, kFull = 3, kMismatch = 4, kOrigin = 5, kBadRows = 6, kAnotherM = 7;

// The report to the host while rows move: in pinned memory, one per slot.
struct Outcome {
  u64 epoch;    // the ticket, written last
  u32 code;     // kGo ...
  u32 rank;     // the rank that it is about
  u64 tokens;   // N on this rank
  u64 rows;     // X on this rank, expert-major
  u64 needed;   // bytes that the full rank needs, and has
  u64 capacity;
  u32 verdict;  // how the refusing rank entered
  u32 text_bytes;
  u64 signature; // of the rank that it is about
  u64 own_signature;
  u32 origin;
  u32 own_origin;
  u32 objector;  // refused: `objector` of the rank that refused
  u32 reserved;
  u8 text[kTextBytes];
};

// The times of an operation, in nanoseconds of the device's clock: in device memory, one per slot,
// for tools.
struct Trace {
  u64 begun;      // the kernel
  u64 counted;    // this rank's routing, all of it; a combine: as begun
  u64 entered;    // every rank's counts
  u64 moved;      // the first block's rows have left, tiles are spread; a combine: its sums are made
  u64 arrived;    // the rows of all ranks; a combine: all have read
};

// The counters that reports read for a rank, in pinned memory: TyPeerCounters of the plugin ABI.
struct PeerCounters {
  u64 posted, done;  // the host's
  u64 raised, expected, received;
  u64 bytes;
};

// State that lives as long as the communicator, in device memory, zero at first.
struct State {
  u32 arrived;      // blocks that have counted, or read their turn
  u32 reserved;
  u64 turn;         // the next operation: epoch | slot << 32
  u64 stopped;      // not 0: an operation failed that no caller waited for, so no more are entered
  u64 dealt;        // pieces of rows that warps have taken
  u64 taken;        // shares of tiles that warps have taken
  u64 gathered;     // units of row metadata that warps have taken
  u64 summed;       // units that rings have taken, beyond those that each starts with; then 0 again
  u64 problem;      // first bad entry of topk_idx: token << 16 | k << 8 | kind; all ones if none
  u64* rows;        // [slots, R]: totals of the row signals that are waited for
  u64* done;        // [slots, R]: the same of the done signals
  // Where the device API only puts:
  u64* entered;     // [slots]: operations that this rank has entered, so entry signals of each rank
  u64 outbox;       // offset of slot 0's staged records in the control window, behind all records
  u64 largest_put;  // bytes
  u64 queues;       // of puts; 1 over loads and stores
  u64 entry_signals;  // the first of [slots, R]
  u8* windows[2];   // this rank's own
  u64* tallies;     // [R]: how far signals of each rank were or are waited for, in all slots together
  PeerCounters* counters;   // of the team's first rank
  u64 counters_step;    // to the next one
  u64* put_bytes;       // [R]: bytes that kernels have put to each rank
};

// The state that an operation finds in device memory when its first kernel starts. No field is an
// argument, because a graph launches the same kernels with the same arguments again and again.
struct Operation {
  u32 epoch;   // of the operation; never 0 unless all have stopped
  u32 slot;    // it has records, signals and totals of its own
  u32 tokens;  // T
  u32 origin;  // epoch of the dispatch that made the handle
  u64 rows;    // N of that dispatch; only a combine asks
  u32 verdict; // how this rank enters
  u32 former_epoch;  // of the former exchange, if there is one
};

// The operation of this block's kernel: one thread writes it, and a barrier follows.
__device__ inline Operation& operation() {
  __shared__ Operation operation;
  return operation;
}

// The state that the first kernel of an operation leaves for the kernels behind it. One per operation
// that may be open.
struct Cell {
  u32 slot;
  u32 code;      // how it continues; 0 if it did not get that far
  u64 epoch;     // for kernels that receive apart from those that send: see decode.cuh; for an exchange beside it
  u64 decided;   // between domains: the ticket of an operation whose code and counts are known, in the high half
  u64 totals[1]; // [R]: of the signals that are waited for; then [R]: the tallies with them
};

// Waits until the operation of a ticket has decided how it goes on; false if the wait was ended. `rank` is this one:
// whoever decides runs on this GPU. One thread.
__device__ inline bool is_decided(const Cell* cell, u32 ticket, u32 rank, Guard& guard) {
  return guard.until({kPhaseEntry, rank, 0, ticket}, [&] { return load_acquire(&cell->decided) >> 32; },
                     [&](u64 found) { return found == ticket; });
}

// The part of a handle that only the device knows, in device memory.
struct Note {
  u64 made;  // epoch of its dispatch | T << 32
  u64 rows;  // N, rank-major R*M: what a combine may name; 0 if that dispatch has failed
};

// n / by; the host has computed `factor`: 2^32 / by, rounded up, or 0 for 1. A division takes a tenth of a microsecond.
__device__ inline u32 quotient(u32 n, u32 by, u32 factor) {
  if (factor == 0) return n;
  u32 found = (u32)((u64)n * factor >> 32);
  // The factor is rounded up, so the product may be one too many.
  return found - ((i32)(n - found * by) < 0);
}

// Arguments of every operation.
struct Common {
  const u64* abort;
  WaitReport* report;
  State* state;
  Outcome* outcome;
  Trace* trace;
  Cell* cell;
  // Among several domains: the exchange before this one in its operation, whose outcome no host has seen yet. This
  // rank enters with its refusal, if there is one. Null where there is no such exchange.
  const Cell* former;
  const Outcome* former_outcome;
  const u64* former_stopped;  // `State::stopped` of that exchange
  u64 cap_ns;
  u64 signature;        // equal on all ranks; the low byte even where one refuses
  u32 rank, ranks, experts, topk;
  u32 max_tokens;
  u32 input_rows;       // rows of the call's tensors: T, or the most that it may be
  u32 ticket;           // the host waits for this number in the outcome
  u32 no_host_sync;          // no caller waits: only a code that is not kGo is reported, and it stops all later ones
  u32 verdict;
  u32 entry_words;      // 64-bit words of a record
  u32 text_bytes;       // why it refuses; else the holder of its arena, where that may be too full
  u32 slots;
  u32 objector;         // the rank that refused first-hand; of several the lowest counts
  u32 group_count;      // of sources, where kGrouped
  u32 local;            // El
  u32 local_factor;     // see `quotient`
  u32 former_ticket;    // of the former exchange, if it runs beside this one; else 0
  u32 reserved;
  u8 text[kTextBytes];

  __device__ u32 groups() const {
    if constexpr (kGrouped) return group_count;
    return 1;
  }
  __device__ u32 local_experts() const { return local; }
  __device__ u32 rank_of(u32 expert) const { return quotient(expert, local, local_factor); }

  __device__ u32 epoch() const { return operation().epoch; }
  __device__ u32 slot() const { return operation().slot; }
  __device__ u32 tokens() const { return operation().tokens; }
  __device__ u32 origin() const { return operation().origin; }
  // How this rank enters, once its operation is known: as its host says, or with the refusal of the former exchange.
  __device__ bool enters() const { return operation().verdict == kEnter; }
  __device__ bool passes_on() const { return verdict == kEnter && !enters(); }
  __device__ u32 objector_now() const { return passes_on() ? former_outcome->objector : objector; }
  // Offset of the slot's entry records in the control window.
  __device__ u64 entries() const { return 8 * (u64)slot() * ranks * entry_words; }

  // The signals that this rank raises at others: its rows have arrived, and it has read theirs.
  __device__ u32 rows_signal() const { return 2 * ranks * slot() + rank; }
  __device__ u32 done_signal() const { return rows_signal() + ranks; }
  // The signal that reports, where the device API only puts, that the record of `source` has
  // arrived.
  __device__ u32 entry_signal(u32 source) const {
    return (u32)state->entry_signals + ranks * slot() + source;
  }
  // The totals that this rank waits for in the slot.
  __device__ u64* rows_totals() const { return state->rows + (u64)slot() * ranks; }
  __device__ u64* done_totals() const { return state->done + (u64)slot() * ranks; }
  // Adds to the total that is waited for from `source`. Where the device API only puts, its record came
  // with a signal; `apart`: signals that are waited for one by one.
  __device__ void expect(u64* totals, u32 source, u64 more, u64 apart = 0) const {
    u64 all = more + apart + (kPuts && source != rank);
    cell->totals[source] = totals[source] += more;
    cell->totals[ranks + source] = state->tallies[source] += all;
  }
};

// TY_TWIN: the ranks that have a GPU, in a world where GPUs stand for the others (standins/twin); else 0.
#ifndef TY_TWIN
#define TY_TWIN 0
#endif

// The number under which this rank writes into the window of `peer`: its own. Where a GPU stands for `peer`, the
// number of that rank: the GPU takes it as if that rank had sent it.
__device__ inline u32 writer_at(const Common& c, u32 peer) {
#if TY_TWIN
  return peer >= TY_TWIN ? peer : c.rank;
#else
  return c.rank;
#endif
}
// The number at `peer` of a signal that is this rank's own.
__device__ inline u32 signal_at(const Common& c, u32 signal, u32 peer) {
  return signal + writer_at(c, peer) - c.rank;
}

#if TY_TWIN
// The rank whose GPU stands for `rank` in the eyes of `me`; `stand_in` of standins/twin says the same.
__device__ inline u32 stand_in(u32 me, u32 rank) {
  constexpr u32 kOthers = TY_TWIN > 1 ? TY_TWIN - 1 : 1;
  if (rank < TY_TWIN) return rank;
  return TY_TWIN == 1 ? me : me ^ (1 + (rank - TY_TWIN) % kOthers);
}
#endif

// The record that counts the rows of `source` for `owner`, and the column there. GPUs that stand for ranks send their
// own counts under those ranks' numbers.
struct CountedBy {
  u32 source, owner;

  __device__ CountedBy(const Common& c, u32 from, u32 to) : source(from), owner(to) {
#if TY_TWIN
    u32 at = stand_in(c.rank, to);
    source = stand_in(at, from), owner = from < TY_TWIN ? at : from;
#endif
  }
};

// Waits for one signal of every rank, and until the sources of this rank's puts may be overwritten.
struct ArriveArgs {
  const u64* abort;
  WaitReport* report;
  u64 cap_ns;
  const Cell* cell;
  u32 ranks;
  u32 done;             // the kind of signal: 0 of rows, 1 of the end of reading
  u32 phase;
  u32 rank;
  Trace* trace;
  State* state;
};

#ifdef TY_ARGS_BYTES
constexpr u64 kHostBytes[] = {TY_ARGS_BYTES};
static_assert(sizeof(WaitReport) == kHostBytes[0] && sizeof(Outcome) == kHostBytes[1] &&
              sizeof(State) == kHostBytes[2] && sizeof(ArriveArgs) == kHostBytes[5] &&
              sizeof(Trace) == kHostBytes[8] && sizeof(Common) == kHostBytes[10],
              "engine/args.rs and args.cuh differ");
#endif

}  // namespace ty
