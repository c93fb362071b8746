// The arguments that the host passes. Mirrored in args.rs; TY_ARGS_BYTES checks the sizes.
//
// TY_GROUPED: the tokens of this rank are rows that it received from several domains, one *group* of
// tokens from each, and forwards inside its own domain. Received rows are in order of groups, then
// of ranks.
#pragma once
#include "region.cuh"
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

// Whether rows may be taken in tiles: see tiles.cuh.
constexpr bool kMayTile = !kPuts && !kGrouped;
// Whether rows may be sent without a request: see decode.cuh.
constexpr bool kMayDecode = !kPuts && !kGrouped;
// Whether rows of a combine may be pushed: see push_combine.cuh.
constexpr bool kMayPush = !kPuts && !kGrouped;

constexpr u32 kControl = 0;     // window of entry records
constexpr u32 kArena = 1;       // window of rows
// The types of rows: the codes of DType, on the host.
constexpr u32 kBf16 = 1;
constexpr u32 kFp16 = 2;
constexpr u32 kFp32 = 3;

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
constexpr u32 kMetadataWarps = kWarps / 4;  // of them that move row metadata
constexpr u32 kRings = 2;       // of a block that sums, each with its own share of the tokens
constexpr u32 kRingWarps = 256 / kWave;  // few, so that each has much of a row
constexpr u32 kSummingWarps = kRings * kRingWarps;

constexpr u32 kPhaseEntry = 1, kPhaseRows = 3, kPhaseCombineRows = 4, kPhaseDone = 5;

// How a rank enters.
constexpr u32 kEnter = 0;       // it takes part
constexpr u32 kRefuseText = 1;  // its host refuses: a text follows
constexpr u32 kRefuseRoute = 2; // its routing is bad: the place and the value that was found follow
constexpr u32 kRefuseFull = 3;  // its arena is full: a text follows
constexpr u32 kRefuseBroken = 4; // ranks that it met before are out of step: a text follows

// The error of a routing.
constexpr u32 kNoExpert = 1, kTwice = 2, kTooMany = 3;

// How an operation continues: the same answer on all ranks except for the last two.
// Each returned weight is the sum of the entries of all ranks that have a row of the token.
constexpr u32 kWeightsOfAll = 2;
constexpr u32 kGo = 1, kRefused = 2, kFull = 3, kMismatch = 4, kOrigin = 5, kBadRows = 6;

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
  u64 epoch;     // for kernels that receive apart from those that send: see decode.cuh
  u64 totals[1]; // [R]: of the signals that are waited for; then [R]: the tallies with them
};

// The part of a handle that only the device knows, in device memory.
struct Note {
  u64 made;  // epoch of its dispatch | T << 32
  u64 rows;  // N; 0 if that dispatch has failed
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
  // with a signal.
  __device__ void expect(u64* totals, u32 source, u64 more) const {
    u64 all = more + (kPuts && source != rank);
    cell->totals[source] = totals[source] += more;
    cell->totals[ranks + source] = state->tallies[source] += all;
  }
};

// The routing that a handle holds, in device memory. A warp counts a *span* of tokens, a block the
// spans of its kWarps warps.
struct Routing {
  i32* topk;           // [T, K]: experts, or -1
  u32* rows;           // [T, K]: at the last k of each rank, rank << 20 | the token's place among its
                       // span's rows for that rank; else kNoRow
  u32* places;         // [T, K]: the token's place among its span's rows for that expert; not flat
  u32* span_ranks;     // [spans, R]: first of a span's rows among its block's rows for a rank
  u32* span_experts;   // [spans, E]: the same for experts; not flat
  u32* block_ranks;    // [blocks, R]: first of a block's rows among this rank's rows for a rank
  u32* block_experts;  // [blocks, E]: the same for experts
  u32* counts;         // [R]: this rank's rows for each rank
  u32* expert_counts;  // [E]: the same for experts
  u32* row_base;       // [G, R]: first of this rank's rows at each rank; kGrouped: what to add to the
                       // place of a group's row among all of them
  u32* source_rows;    // [R + 1]: first of each source's rows here, then N; not kGrouped
  u32* group_starts;   // [G + 1]: first token of each group; kGrouped
  u32* group_counts;   // [R + E, G]: this rank's rows for each rank and expert; kGrouped
  Note* note;
  u32 span;            // tokens of a span, a power of two
  u32 blocks;          // number of blocks that counted
};

// The inbox of low-latency rows, in the control windows of all ranks: see decode.cuh. Places
// are of [slots, R] ranks that write, and each rank has places for M tokens.
struct DecodeArgs {
  u64 words;         // offset of reports on rows: [token_words + El] words {epoch, value} per rank
  u64 records;       // offset of records: [M] each
  u64 rows;          // offset of rows: [M] each
  u64 row_pitch;     // bytes from one row to the next
  u32 record_pitch;  // the same for records
  u32 token_words;   // 32-bit words of a set of a rank's tokens
  u32 phases;        // the phases that the kernel runs: kSends, kReceives
  u32 senders;       // blocks that only send, while the others only receive; 0: each does both
  Masking masking;
  i64* waited_ns;      // [R]: the time of waits for each rank's head is added; or null
  u32* expert_totals;  // [El]: the rows of each local expert are added; or null
  u32 scale_stride[2];  // of received scales: words from a row of an expert to the next, and from a word to the next
  u32 source_step;      // what `source` adds for each source rank: M, or 0 where it is the token alone
  u32 topk_factor;      // see `quotient`: of K, M, token_words, token_words + El, and R
  u32 tokens_factor;
  u32 words_factor;
  u32 report_factor;
  u32 ranks_factor;
};

// The group of a token.
__device__ inline u32 group_of(const Common& c, const Routing& r, u32 token) {
  u32 group = 0;
  if constexpr (kGrouped)
    while (group + 1 < c.groups() && token >= r.group_starts[group + 1]) group++;
  return group;
}
constexpr u32 kNoRow = ~0u;
constexpr u32 kPlaceBits = 20;

struct DispatchArgs {
  Common c;
  Routing r;
  const GivenId* topk_idx;  // [T, K]
  const u32* tokens;    // T, where only the device knows it; or null
  const u8* x;          // [T, row_bytes]
  const u32* scales;    // [T, scale_words], or null
  const float* weights; // [T, K], or null
  i64 scale_stride[2];  // in elements
  u64 region;           // arena offset of this rank's region
  u64 capacity;         // bytes that it may have
  u64 row_bytes;
  u32 scale_words;
  u32 replay;           // the routing is the handle's
  u32 worst;            // regions are laid out for the most rows
  u32 layout;           // kFlat, kExpertMajor or kPacked
  u64 worst_experts;    // expert-major: the most expert rows
  u32 alignment;        // expert-major: of expert starts, in rows
  u32 staged;           // the device API only puts: rows are staged by token first, in every layout
  u32 piece_bytes;      // a row moves in pieces of this many bytes
  u32 pieces;
  u32 stages;           // pieces in flight of one warp
  u32 movers;           // warps of a block that move rows
  u32 table_bytes;      // shared memory before the stages
  u32 metadata_tokens;      // tokens whose ids, weights and scales are gathered at once
  u32 metadata_bytes;       // shared memory for them: a room
  u32 metadata_scales;      // whether scales are gathered too
  u32 metadata_at;          // where that memory starts
  u32 notes_at;         // shared memory for what stages hold: 2 + K words each
  // Rows that are cast as they move: `x` and `scales` are then null.
  const u8* raw;        // [T, hidden] of the type `dtype`
  u32 cast;             // TY_CAST_*
  u32 dtype;            // kBf16, kFp16 or kFp32
  u32 hidden;
  u32 source_first;     // of this rank's first token
  const u32* sources;   // [T]: of each, where kGrouped
  u64 staging;          // arena offset of the staged rows, where the device API only puts
  // Expert-major and packed over loads and stores: see tiles.cuh.
  u64 tiles;            // offset of the counts of tiles in the control window
  u32 tile_rows;        // rows of a tile; 0: rows are not tiled
  u32 zero_padding;
  u32 at_once;          // it also waits until the rows of other ranks for this rank have arrived
  u32 tally_tokens;     // tokens that a warp counts at once: at most 32
  u32 stage_bytes;      // shared memory of one stage
  u32 stage_scales;     // where in a stage the scales of a piece lie that is cast
  u32 pushers;          // of rows in tiles: the first blocks, which move rows to other ranks, while the others
                        // move this rank's own; 0: each block moves both
  u32 part_rows;        // rows of a share of a tile, which one warp spreads
  u64* host_counts;     // host memory: [El] of ticket << 32 | rows of each local expert; or null

  __device__ bool is_flat() const { return layout == kFlat; }
  // Each of these three is known when kernels are compiled, except for a kernel that moves groups.
  __device__ bool stages_rows() const {
    if constexpr (!kPuts) return false;
    return staged;
  }
  __device__ bool in_tiles() const {
    if constexpr (!kMayTile) return false;
    return tile_rows > 0;
  }
  // Rows are stored in the order of tokens, at their rank or where they are staged for that rank.
  __device__ bool by_token() const { return is_flat() || stages_rows(); }
  // Words of scales that move by themselves: those of rows that are cast travel with the rows.
  __device__ u32 beside_words() const { return cast == 0 ? scale_words : 0; }
  __device__ RegionShape region_shape() const {
    return {layout, c.ranks * c.groups(), c.topk, c.local_experts(), row_bytes, scale_words, weights != nullptr};
  }
  __device__ u64 most_tokens() const { return (u64)c.ranks * c.max_tokens; }
  // The source of a received row.
  __device__ u32 source(u32 token) const {
    if constexpr (kGrouped) return sources[token];
    return source_first + token;
  }
  __device__ u32 tiles_of_source() const { return (c.max_tokens + tile_rows - 1) / tile_rows; }
};

// Where there are no tiles: spreads received rows over the experts of a token; zeroes padding.
struct SpreadArgs {
  u8* x;                        // [X, row_bytes]
  u32* scales;                  // [X, scale_words]
  float* weights;               // [X], or null
  u32* source;                  // [X], packed; else null
  const i32* slots;             // [N, K]
  const u32* landed_scales;     // [N, scale_words]
  const float* landed_weights;  // [N, K], or null
  const u32* landed_source;     // [N], packed
  const u32* counts;            // [El]
  const u32* starts;            // [El + 1]
  const Cell* cell;             // null where the host knows that all ranks continued
  const u64* totals;            // N and X, where only the device knows them; or null
  u64 tokens;                   // N
  u64 rows;                     // X
  u64 row_bytes;
  u32 scale_words, topk, local_experts;
  u32 zero_padding;
  u32 stage_bytes;              // a row moves in pieces of this many bytes
  u32 movers;                   // warps of a block that move rows
  u32 stages;                   // of a warp
  u32 reserved;
};

// Expert-major and packed: one partial row per received token, from the rows of its copies.
struct MergeArgs {
  const u8* x;                    // [rows, row_bytes]
  const float* weights;           // [rows], or null: weights to return
  const float* dispatch_weights;  // [rows], or null: rows are multiplied by them
  const i32* slots;               // [N, K]
  u8* out;                        // [N, row_bytes], or null: only weights are returned
  float* out_weights;             // [N, K]
  const u64* received;            // N, where only the device knows it; or null
  u64 tokens;                     // N
  u64 rows;
  u64 row_bytes;
  u32 topk;
  u32 piece_bytes;     // a row is read in pieces of this many bytes
  u32 pieces;
  u32 stages;          // pieces in flight of a ring
  u32 stage_bytes;
  u32 reserved;
};

struct CombineArgs {
  Common c;
  Routing r;
  const u8* bias0;     // [T, row_bytes], or null
  const u8* bias1;
  u8* out;             // [T, row_bytes]
  float* out_weights;  // [T, K], or null
  u64 x;               // arena offset of this rank's expert outputs; of memory for them, if it pushes them
  u64 weights;         // arena offset of their weights
  u64 row_bytes;
  u32 piece_bytes;     // a row is read in pieces of this many bytes
  u32 pieces;
  u32 stages;          // pieces in flight of a ring
  u32 stage_bytes;
  u32 table_bytes;     // shared memory before the stages
  u32 returns_weights; // weights are returned too: 1, or kWeightsOfAll
  // Where the device API only puts: arena offsets of the returned rows, those of rank 0 first, and of their
  // weights. Where rows are pushed: of [R, M] rows, or 0 where there is no memory for them.
  u64 landing;
  u64 landing_weights;
  const u8* own;       // this rank's rows outside the arena, if it pushes them; else null
  u64 flags;           // offset in the control window of [R, most_units]: see push_combine.cuh
  u32 most_units;      // units of one owner's rows
  u32 unit_shift;      // a unit has 2^unit_shift rows
  u32 pushers;         // blocks that push
  u32 push_warps;      // push warps of each such block
  u32 push_bytes;      // a unit moves in pieces of this many bytes
  u32 at_once;         // it also waits until all have read
};

// One kernel merges expert rows, pushes them and sums: see fused_combine.cuh. `own` of `combine` are the
// expert rows.
struct FusedCombineArgs {
  CombineArgs combine;
  MergeArgs merge;     // the sum that is made here; `out` and `out_weights` are not written
};

// Low latency, packed: see decode_dispatch.cuh.
struct DecodeDispatchArgs {
  DispatchArgs dispatch;
  DecodeArgs decode;
};

// Low latency, the return path: see decode_combine.cuh. No field of `combine` names rows in an
// arena.
struct DecodeCombineArgs {
  CombineArgs combine;
  MergeArgs merge;         // the sum that is made here; `out` and `out_weights` are not written
  DecodeArgs decode;
  const u32* sources;      // [N]: source rank * M + source token
  // [T, K]: weights of this call instead of the dispatch's, and ids, of which negative ones drop a term; or null.
  const float* topk_weights;
  const i64* topk_idx;
  // [T]: selections of each token that are left out of its sum, with their ranks; or null.
  u8* missing;

  __device__ bool weighted() const { return topk_weights || merge.dispatch_weights; }
};

// This rank does not take part: see `refuse_decode`.
struct DecodeRefusalArgs {
  Common c;
  DecodeArgs decode;
};

// Finds the group of each token.
struct GroupArgs {
  const u32* counts;  // [G]: tokens
  u32* starts;        // [G + 1]
  u32* zeros;         // memory for counts, which start as zeros
  u32 groups;
  u32 words;          // of that memory
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
              sizeof(State) == kHostBytes[2] && sizeof(DispatchArgs) == kHostBytes[3] &&
              sizeof(CombineArgs) == kHostBytes[4] && sizeof(ArriveArgs) == kHostBytes[5] &&
              sizeof(SpreadArgs) == kHostBytes[6] && sizeof(MergeArgs) == kHostBytes[7] &&
              sizeof(Trace) == kHostBytes[8] && sizeof(GroupArgs) == kHostBytes[9] &&
              sizeof(Common) == kHostBytes[10] && sizeof(DecodeDispatchArgs) == kHostBytes[11] &&
              sizeof(DecodeCombineArgs) == kHostBytes[12] && sizeof(DecodeRefusalArgs) == kHostBytes[13] &&
              sizeof(FusedCombineArgs) == kHostBytes[14],
              "args.rs and args.cuh differ");
#endif

}  // namespace ty
