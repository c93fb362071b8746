//! How a combine reads rows, and its use of shared memory.

use tokenyard_core::moe::REGION_ALIGN;

use crate::engine::args::HEAD;
use crate::moe::args::{PUSH_STAGES, PUSH_WARPS, RINGS};
use crate::moe::exchange::Exchange;
use crate::moe::limits::BlockLimits;
use crate::moe::moving::{LONGEST_PIECE, pieces};
use crate::moe::sizes::KEPT;

/// Rows that a ring reads at once; `Ring::kMost` of the kernels.
const RING_STAGES: u32 = 16;

/// Rows that a ring reads at once where they are merged as they are pushed; `FusedRing::kMost` of the kernels.
const FUSED_STAGES: u32 = 8;
/// Rows of such a ring that are being stored; `kFusedOut` of the kernels.
const FUSED_OUT: u32 = 2;
/// The longest piece of such a row: five vectors of 16 bytes for each thread of six warps. Six do not fit registers.
pub(crate) const LONGEST_FUSED: u32 = 5 * 16 * 6 * 32;

/// How a combine reads rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CombineTiling {
    pub(crate) piece_bytes: u32,
    pub(crate) pieces: u32,
    pub(crate) stages: u32,
    pub(crate) stage_bytes: u32,
    /// Shared memory before the stages: `CombineTables` of the kernels.
    pub(crate) table_bytes: u32,
    /// Pushed units move in pieces of this many bytes.
    pub(crate) push_bytes: u32,
    pub(crate) shared: u32,
    /// Pieces in flight of a ring where rows are merged as they are pushed, and shared memory of a block.
    pub(crate) fused_stages: u32,
    pub(crate) fused_shared: u32,
}

impl CombineTiling {
    /// The tiling for rows of `row_bytes` on a device.
    pub(crate) fn new(exchange: &Exchange, row_bytes: u64, block: BlockLimits) -> Self {
        let (ranks, groups) = (exchange.shape.ranks, exchange.groups);
        // Where kernels put, records count each group; they are read before the other tables are
        // filled.
        let each = HEAD * 4 + (4 * 8 + 4 * block.warps() + 4 + 4).max(4 * (1 + groups));
        let table_bytes = (ranks * each).next_multiple_of(128);
        let (piece_bytes, pieces) = pieces(row_bytes);
        let stage_bytes = piece_bytes.next_multiple_of(REGION_ALIGN as u32).max(128);
        let room = block.shared.saturating_sub(KEPT + table_bytes) / stage_bytes;
        let stages = (room / RINGS).clamp(1, RING_STAGES);
        let stages_bytes = RINGS * stages * stage_bytes;
        let fused_stages = (room / RINGS).saturating_sub(FUSED_OUT).clamp(1, FUSED_STAGES);
        // Each piece is waited for, so short rows travel together.
        let push_bytes = stages_bytes / (PUSH_WARPS * PUSH_STAGES) / 128 * 128;
        Self {
            piece_bytes,
            pieces,
            stages,
            stage_bytes,
            table_bytes,
            push_bytes: push_bytes.clamp(128, LONGEST_PIECE as u32),
            shared: table_bytes + stages_bytes.max(PUSH_WARPS * PUSH_STAGES * 128),
            fused_stages,
            fused_shared: table_bytes + RINGS * (fused_stages + FUSED_OUT) * stage_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokenyard_core::moe::Shape;

    use super::*;
    use crate::engine::args::THREADS;
    use crate::engine::path::Path;
    use crate::engine::path::tests::ring;
    use crate::moe::exchange::tests::SHAPE;
    use crate::moe::sizes::tests::{HOPPER, whole};

    #[test]
    fn pieces_of_rows_that_are_read_or_pushed_fit_shared_memory() {
        for (ranks, experts) in [(1, 4), (2, 512), (8, 256), (72, 288)] {
            let shape = Shape { ranks, experts, topk: 2, hidden: 64, max_tokens: 8 };
            for row_bytes in [16, 48, 2880 * 2, 7168, 14_336, 16_400, 28_672, 1 << 20] {
                let combine_tiling =
                    CombineTiling::new(&whole(shape, 2, Path::STORE), row_bytes, HOPPER);
                assert!(
                    combine_tiling.shared + KEPT <= HOPPER.shared
                        && combine_tiling.stages <= RING_STAGES,
                    "{combine_tiling:?}"
                );
                assert!(combine_tiling.fused_shared + KEPT <= HOPPER.shared, "{combine_tiling:?}");
                // All threads but those of one warp take five vectors of 16 bytes each.
                assert!(combine_tiling.piece_bytes <= (THREADS / RINGS - HOPPER.wave) * 5 * 16);
                let pushed = PUSH_WARPS * PUSH_STAGES * combine_tiling.push_bytes;
                assert!(
                    combine_tiling.table_bytes + pushed <= combine_tiling.shared,
                    "{combine_tiling:?}"
                );
            }
        }
    }

    #[test]
    fn kernels_push_by_as_many_pieces_as_they_have_room_for() {
        let line = format!("constexpr u32 kPushStages = {PUSH_STAGES};");
        assert!(
            include_str!("../../device/moe/push_combine.cuh").contains(&line),
            "the kernels have other stages"
        );
        for line in [
            format!("static constexpr u32 kMost = {FUSED_STAGES};"),
            format!("constexpr u32 kFusedOut = {FUSED_OUT};"),
        ] {
            assert!(
                include_str!("../../device/moe/fused_combine.cuh").contains(&line),
                "the kernels differ: {line}"
            );
        }
    }

    #[test]
    fn there_is_room_for_what_a_block_knows_of_all_ranks() {
        // The heads of two ranks; four addresses and 17 numbers of each, and one number more.
        let [inside, _] = Exchange::levels(&SHAPE, [Path::STORE, ring(1024)]);
        assert_eq!(
            CombineTiling::new(&inside, 128, HOPPER).table_bytes,
            (2 * 136_u32).next_multiple_of(128)
        );
    }
}
