//! The arguments of dispatch and combine. Mirrors `moe_args.cuh`; the compiler of the kernels checks the sizes.

use crate::engine::args::{ArriveArgs, Common, Masking, Outcome, State, Trace, WaitReport};

/// Bits of a place among the rows that one warp counts.
pub(crate) const PLACE_BITS: u32 = 20;
/// Rings of a block that sums.
pub(crate) const RINGS: u32 = 2;

/// Warps of a block that push rows by bulk copies: more crowd the link, fewer do not fill it.
pub(crate) const PUSH_WARPS: u32 = 4;
/// Pieces that each of these warps has in shared memory: `kPushStages` of the kernels.
pub(crate) const PUSH_STAGES: u32 = 3;

/// The phases that a low-latency kernel runs: `kSends`, `kReceives` of the kernels.
pub(crate) const SENDS: u32 = 1;
pub(crate) const RECEIVES: u32 = 2;
/// Pieces of 16 bytes of a low-latency row that a thread may have: `kMostPieces` of the kernels.
pub(crate) const MOST_PIECES: u32 = 4;

/// An error of a routing: more tokens than the call has rows.
pub(crate) const TOO_MANY: u32 = 3;

/// How a dispatch or a combine ends, beside the engine's codes.
pub(crate) const ORIGIN: u32 = 5;
pub(crate) const BAD_ROWS: u32 = 6;
pub(crate) const ANOTHER_M: u32 = 7;

/// Each returned weight is the sum of the entries of all ranks that have a row of the token.
pub(crate) const WEIGHTS_OF_ALL: u32 = 2;

/// The sizes that the kernels compare with their own.
pub(crate) fn bytes() -> String {
    [
        size_of::<WaitReport>(),
        size_of::<Outcome>(),
        size_of::<State>(),
        size_of::<DispatchArgs>(),
        size_of::<CombineArgs>(),
        size_of::<ArriveArgs>(),
        size_of::<SpreadArgs>(),
        size_of::<MergeArgs>(),
        size_of::<Trace>(),
        size_of::<GroupArgs>(),
        size_of::<Common>(),
        size_of::<DecodeDispatchArgs>(),
        size_of::<DecodeCombineArgs>(),
        size_of::<DecodeRefusalArgs>(),
        size_of::<FusedCombineArgs>(),
        size_of::<CopyArgs>(),
        size_of::<CountArgs>(),
    ]
    .map(|bytes| bytes.to_string())
    .join(",")
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Routing {
    pub(crate) topk: u64,
    pub(crate) rows: u64,
    pub(crate) places: u64,
    pub(crate) span_ranks: u64,
    pub(crate) span_experts: u64,
    pub(crate) block_ranks: u64,
    pub(crate) block_experts: u64,
    pub(crate) counts: u64,
    pub(crate) expert_counts: u64,
    pub(crate) row_base: u64,
    pub(crate) source_rows: u64,
    pub(crate) group_starts: u64,
    pub(crate) group_counts: u64,
    pub(crate) note: u64,
    pub(crate) span: u32,
    pub(crate) blocks: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Crossing {
    pub(crate) totals: u64,
    pub(crate) staged: u64,
    pub(crate) here: u64,
    pub(crate) described: u64,
    pub(crate) summed: u64,
    pub(crate) signal: u32,
    pub(crate) most: u32,
    pub(crate) shift: u32,
    pub(crate) mine: u32,
    pub(crate) lanes: u32,
    pub(crate) scales: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct DispatchArgs {
    pub(crate) common: Common,
    pub(crate) routing: Routing,
    pub(crate) topk_idx: u64,
    pub(crate) tokens: u64,
    pub(crate) x: u64,
    pub(crate) scales: u64,
    pub(crate) weights: u64,
    pub(crate) scale_stride: [i64; 2],
    pub(crate) region: u64,
    pub(crate) capacity: u64,
    pub(crate) row_bytes: u64,
    pub(crate) scale_words: u32,
    pub(crate) replay: u32,
    pub(crate) worst: u32,
    pub(crate) layout: u32,
    pub(crate) worst_experts: u64,
    pub(crate) alignment: u32,
    pub(crate) staged: u32,
    pub(crate) piece_bytes: u32,
    pub(crate) pieces: u32,
    pub(crate) stages: u32,
    pub(crate) movers: u32,
    pub(crate) table_bytes: u32,
    pub(crate) metadata_tokens: u32,
    pub(crate) metadata_bytes: u32,
    pub(crate) metadata_scales: u32,
    pub(crate) metadata_at: u32,
    pub(crate) notes_at: u32,
    pub(crate) raw: u64,
    pub(crate) cast: u32,
    pub(crate) dtype: u32,
    pub(crate) hidden: u32,
    pub(crate) source_first: u32,
    pub(crate) sources: u64,
    pub(crate) staging: u64,
    pub(crate) tiles: u64,
    pub(crate) tile_rows: u32,
    pub(crate) zero_padding: u32,
    pub(crate) at_once: u32,
    pub(crate) tally_tokens: u32,
    pub(crate) stage_bytes: u32,
    pub(crate) stage_scales: u32,
    pub(crate) pushers: u32,
    pub(crate) part_rows: u32,
    pub(crate) call_tokens: u32,
    pub(crate) rank_major: u32,
    pub(crate) host_counts: u64,
    pub(crate) crossing: Crossing,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CombineArgs {
    pub(crate) common: Common,
    pub(crate) routing: Routing,
    pub(crate) bias0: u64,
    pub(crate) bias1: u64,
    pub(crate) out: u64,
    pub(crate) out_weights: u64,
    pub(crate) x: u64,
    pub(crate) weights: u64,
    pub(crate) row_bytes: u64,
    pub(crate) piece_bytes: u32,
    pub(crate) pieces: u32,
    pub(crate) stages: u32,
    pub(crate) stage_bytes: u32,
    pub(crate) table_bytes: u32,
    /// 1, or [`WEIGHTS_OF_ALL`].
    pub(crate) returns_weights: u32,
    pub(crate) landing: u64,
    pub(crate) landing_weights: u64,
    pub(crate) own: u64,
    pub(crate) flags: u64,
    pub(crate) most_units: u32,
    pub(crate) unit_shift: u32,
    pub(crate) pushers: u32,
    pub(crate) push_warps: u32,
    pub(crate) push_bytes: u32,
    pub(crate) at_once: u32,
    pub(crate) source_places: u32,
    pub(crate) reserved: u32,
    pub(crate) crossing: Crossing,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct FusedCombineArgs {
    pub(crate) combine: CombineArgs,
    pub(crate) merge: MergeArgs,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DecodeArgs {
    pub(crate) words: u64,
    pub(crate) records: u64,
    pub(crate) rows: u64,
    pub(crate) row_pitch: u64,
    pub(crate) record_pitch: u32,
    pub(crate) token_words: u32,
    pub(crate) phases: u32,
    pub(crate) senders: u32,
    pub(crate) masking: Masking,
    pub(crate) waited_ns: u64,
    pub(crate) expert_totals: u64,
    pub(crate) scale_stride: [u32; 2],
    pub(crate) source_step: u32,
    pub(crate) topk_factor: u32,
    pub(crate) tokens_factor: u32,
    pub(crate) words_factor: u32,
    pub(crate) report_factor: u32,
    pub(crate) ranks_factor: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecodeDispatchArgs {
    pub(crate) dispatch: DispatchArgs,
    pub(crate) decode: DecodeArgs,
    pub(crate) sources: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecodeCombineArgs {
    pub(crate) combine: CombineArgs,
    pub(crate) merge: MergeArgs,
    pub(crate) decode: DecodeArgs,
    pub(crate) sources: u64,
    pub(crate) topk_weights: u64,
    pub(crate) topk_idx: u64,
    pub(crate) missing: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct DecodeRefusalArgs {
    pub(crate) common: Common,
    pub(crate) decode: DecodeArgs,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupArgs {
    pub(crate) abort: u64,
    pub(crate) report: u64,
    pub(crate) cap_ns: u64,
    pub(crate) former: u64,
    pub(crate) described: u64,
    pub(crate) ticket: u32,
    pub(crate) rank: u32,
    pub(crate) counts: u64,
    pub(crate) starts: u64,
    pub(crate) zeros: u64,
    pub(crate) groups: u32,
    pub(crate) words: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpreadArgs {
    pub(crate) x: u64,
    pub(crate) scales: u64,
    pub(crate) weights: u64,
    pub(crate) source: u64,
    pub(crate) slots: u64,
    pub(crate) landed_scales: u64,
    pub(crate) landed_weights: u64,
    pub(crate) landed_source: u64,
    pub(crate) counts: u64,
    pub(crate) starts: u64,
    pub(crate) cell: u64,
    pub(crate) totals: u64,
    pub(crate) tokens: u64,
    pub(crate) rows: u64,
    pub(crate) row_bytes: u64,
    pub(crate) scale_words: u32,
    pub(crate) topk: u32,
    pub(crate) local_experts: u32,
    pub(crate) zero_padding: u32,
    pub(crate) stage_bytes: u32,
    pub(crate) movers: u32,
    pub(crate) stages: u32,
    pub(crate) reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MergeArgs {
    pub(crate) x: u64,
    pub(crate) weights: u64,
    pub(crate) dispatch_weights: u64,
    pub(crate) slots: u64,
    pub(crate) out: u64,
    pub(crate) out_weights: u64,
    pub(crate) received: u64,
    pub(crate) tokens: u64,
    pub(crate) rows: u64,
    pub(crate) row_bytes: u64,
    pub(crate) topk: u32,
    pub(crate) piece_bytes: u32,
    pub(crate) pieces: u32,
    pub(crate) stages: u32,
    pub(crate) stage_bytes: u32,
    pub(crate) reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ArrayCopy {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) elements: u64,
    pub(crate) room: u64,
    pub(crate) columns: u32,
    pub(crate) modulus: u32,
    pub(crate) fill: i32,
    pub(crate) flags: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CopyArgs {
    pub(crate) totals: u64,
    pub(crate) count: u32,
    pub(crate) reserved: u32,
    pub(crate) copies: [ArrayCopy; 13],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CountArgs {
    pub(crate) topk_idx: u64,
    pub(crate) rank_tokens: u64,
    pub(crate) expert_tokens: u64,
    pub(crate) is_token_in_rank: u64,
    pub(crate) tokens: u64,
    pub(crate) topk: u32,
    pub(crate) experts: u32,
    pub(crate) ranks: u32,
    pub(crate) reserved: u32,
}
