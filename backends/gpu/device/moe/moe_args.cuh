// The arguments of dispatch and combine. Mirrored in moe/args.rs; TY_ARGS_BYTES checks the sizes.
#pragma once
#include "args.cuh"
#include "quant.cuh"
#include "region.cuh"

namespace ty {

// Whether rows may be taken in tiles: see tiles.cuh.
constexpr bool kMayTile = !kPuts && !kGrouped;
// Whether rows may be sent without a request: see decode.cuh.
constexpr bool kMayDecode = !kPuts && !kGrouped;
// Whether the source of a row may fix its place: see rank_major.cuh.
constexpr bool kMayFix = !kPuts && !kGrouped;
// Whether rows of a combine may be pushed: see push_combine.cuh.
constexpr bool kMayPush = !kPuts && !kGrouped;

// The format of rows that are cast as they move. A call chooses how their scales are made and packed.
using CastRows = Fp8;

// Of a block, the last warps: they move row metadata. An exchange with runs begins with metadata, so there all warps
// do.
constexpr u32 kMetadataWarps = kRuns ? kWarps : kWarps / 4;
constexpr u32 kRings = 2;       // of a block that sums, each with its own share of the tokens
constexpr u32 kRingWarps = 256 / kWave;  // few, so that each has much of a row
constexpr u32 kSummingWarps = kRings * kRingWarps;

// Each returned weight is the sum of the entries of all ranks that have a row of the token.
constexpr u32 kWeightsOfAll = 2;

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

// The group of a token.
__device__ inline u32 group_of(const Common& c, const Routing& r, u32 token) {
  u32 group = 0;
  if constexpr (kGrouped)
    while (group + 1 < c.groups() && token >= r.group_starts[group + 1]) group++;
  return group;
}
constexpr u32 kNoRow = ~0u;
constexpr u32 kPlaceBits = 20;

// Rows that cross between domains in runs: see runs.cuh. The exchange on the rail has all of it; the one inside reads
// what it stores.
struct Crossing {
  u64* totals;     // [slots, R, most]: expected of the signals of runs
  u64* staged;     // [R, most]: staged pieces of the rows of each run; 0 again behind its put
  u64* here;       // [R, most]: epoch of the last exchange whose run is here. Inside: null where rows are there
  u64* described;  // [R]: the same of the metadata of a source's rows
  u64* summed;     // [R, most]: of a combine, what is counted of the stored sums of each run; then what is for one row
  u32 signal;      // the first of [slots, most, R]
  u32 most;        // runs of a source
  u32 shift;       // a run has 2^shift rows
  u32 mine;        // this domain
  u32 lanes;       // of a warp that look at words at once: few where these lie in the host's memory
  u32 scales;      // inside: scales come with rows, not before
};

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
  Layout layout;
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
  Cast cast;
  DType dtype;
  u32 hidden;
  u32 source_first;     // of this rank's first token: rank * M of the call
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
                        // move this rank's own; 0: each block moves both. See also `blocks_of_runs`
  u32 part_rows;        // rows of a share of a tile, which one warp spreads
  u32 call_tokens;      // M of the call, for each rank whose rows a sender forwards: at most that of the exchange
  u32 rank_major;       // each source has M places for its rows, which are as flat ones in all else
  u64* host_counts;     // host memory: [El] of ticket << 32 | rows of each local expert; or null
  Crossing crossing;

  __device__ bool is_flat() const { return layout == Layout::kFlat; }
  // Each of these three is known when kernels are compiled, except for a kernel that moves groups.
  __device__ bool stages_rows() const {
    if constexpr (!kPuts) return false;
    return staged;
  }
  // Rows that stay on this rank go straight to their place, with their metadata, and no put carries them. In the
  // layouts by experts a row is staged in the order of tokens, and put to the place of its first expert.
  __device__ bool keeps_own() const { return !kGrouped && stages_rows() && is_flat(); }
  // Its rows come over a rail meanwhile: see arrivals.cuh.
  __device__ bool awaits_rows() const { return kGrouped && crossing.here != nullptr; }
  __device__ bool in_tiles() const {
    if constexpr (!kMayTile) return false;
    return tile_rows > 0;
  }
  // Rows are stored in the order of tokens, at their rank or where they are staged for that rank.
  __device__ bool by_token() const { return is_flat() || stages_rows(); }
  __device__ bool casts() const { return cast != Cast::kNone; }
  // Of the rows that are sent, where they are cast.
  __device__ CastRows quant() const { return quant_of(cast); }
  // Words of scales that move by themselves: those of rows that are cast travel with the rows.
  __device__ u32 beside_words() const { return casts() ? 0 : scale_words; }
  __device__ RegionShape region_shape() const {
    return {layout, c.ranks * c.groups(), c.topk, c.local_experts(), row_bytes, scale_words, weights != nullptr};
  }
  __device__ u64 most_tokens() const { return (u64)c.ranks * call_tokens; }
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
  u32 source_places;   // rank-major: this rank has so many places for the rows of each source; else 0
  u32 reserved;
  Crossing crossing;
};

// One kernel merges expert rows, pushes them and sums: see fused_combine.cuh. `own` of `combine` are the
// expert rows.
struct FusedCombineArgs {
  CombineArgs combine;
  MergeArgs merge;     // the sum that is made here; `out` and `out_weights` are not written
};

// Finds the group of each token, once the exchange over the rail has got as far.
struct GroupArgs {
  const u64* abort;
  WaitReport* report;
  u64 cap_ns;
  const Cell* former;    // of the exchange on the rail, or null
  const u64* described;  // as in Crossing; null where that exchange has ended
  u32 ticket;            // of that exchange
  u32 rank;
  const u32* counts;  // [G]: tokens
  u32* starts;        // [G + 1]
  u32* zeros;         // memory for counts, which start as zeros
  u32 groups;
  u32 words;          // of that memory
};

#ifdef TY_ARGS_BYTES
static_assert(sizeof(DispatchArgs) == kHostBytes[3] && sizeof(CombineArgs) == kHostBytes[4] &&
              sizeof(SpreadArgs) == kHostBytes[6] && sizeof(MergeArgs) == kHostBytes[7] &&
              sizeof(GroupArgs) == kHostBytes[9] && sizeof(FusedCombineArgs) == kHostBytes[14],
              "moe/args.rs and moe_args.cuh differ");
#endif

}  // namespace ty
