//! How the blocks of a dispatch share its work, and how received rows reach the experts of their tokens.

use tokenyard_core::Result;
use tokenyard_core::moe::{Cast, Layout, RowFormat, Shape, Span};

use crate::driver::Launch;
use crate::engine::args::THREADS;
use crate::flat_sms::{FlatOp, FlatWork};
use crate::moe::args::SpreadArgs;
use crate::moe::blocks::{Blocks, Roles};
use crate::moe::dispatch::Dispatch;
use crate::moe::operation::DispatchOp;
use crate::moe::state::MoeState;
use crate::moe::wanted::Wanted;

/// Of so many blocks of an operation on two levels, one is for the rail. It stages the rows of a dispatch as fast as a
/// NIC takes them. In a combine half of a block serves, and the others sum what returns. The load of a rank of 2 × 8
/// was measured on two H200 with 46 GB/s out, while a whole block served. With 2, 3 and 4 of 12 blocks on the rail,
/// dispatches took 1093, 874 and 871 µs (FP8), 1762, 1502 and 1515 (BF16). Combines took 2097 and 1528 µs with 3 and 4.
pub(crate) const RAIL_OF_DISPATCH: u32 = 4;
pub(crate) const RAIL_OF_COMBINE: u32 = 3;

/// T of a dispatch on this rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tokens {
    /// T, or the most that it may be.
    pub(crate) most: u32,
    /// Whether only the device knows T.
    pub(crate) on_device: bool,
}

impl MoeState {
    /// The blocks of a dispatch of this many tokens, and what each of them does.
    pub(crate) fn roles(&self, wanted: &Wanted, cast: Cast, tokens: Tokens) -> Roles {
        let blocks = self.blocks.of_call(wanted.mode.sms);
        let max_tokens = self.exchange.shape.max_tokens;
        let (at_once, casts) = (wanted.mode.at_once, !matches!(cast, Cast::None));
        match wanted.spec.layout {
            // Among several domains a block moves its own share of rows; low latency has other kernels.
            layout if !self.has_tiles() || self.decodes(layout) => {
                let roles = self.beside(blocks, RAIL_OF_DISPATCH).alike();
                if self.exchange.has_runs() { roles.helped_by(blocks.exchange) } else { roles }
            }
            layout if !layout.has_a_row_per_token() => blocks.of_tiles(at_once, casts, max_tokens),
            _ if casts => blocks.of_flat_cast(at_once, max_tokens),
            _ => blocks.of_flat(&self.flat_dispatch(wanted, tokens.most), tokens.on_device),
        }
    }

    /// The blocks of this exchange, where another one runs beside it. Of `share` blocks, one is for the rail.
    pub(crate) fn beside(&self, blocks: Blocks, share: u32) -> Blocks {
        // Of the two rings of a combine's first block one serves, and another block sums weights.
        let rail = (blocks.exchange / share).max(2);
        let exchange = if self.exchange.has_runs() {
            rail
        } else if self.exchange.awaits_rows {
            blocks.exchange.saturating_sub(rail).max(1)
        } else {
            blocks.exchange
        };
        Blocks { exchange, ..blocks }
    }

    /// The work of a dispatch of this many tokens to flat rows.
    fn flat_dispatch(&self, wanted: &Wanted, tokens: u32) -> FlatWork {
        let Shape { ranks, topk, .. } = self.exchange.shape;
        let RowFormat { x_bytes, scale_bytes, weights } = wanted.format.row;
        // An id for each selection, a weight if there are any, and the source.
        let metadata = 4 * u64::from(topk) * (1 + u64::from(weights)) + 4;
        FlatWork {
            op: FlatOp::Dispatch,
            ranks,
            topk,
            tokens,
            row_bytes: x_bytes.into(),
            beside_bytes: u64::from(scale_bytes) + metadata,
        }
    }
}

impl Dispatch<'_> {
    /// Where there are no tiles: copies rows to the other experts of their tokens. With tiles, the
    /// dispatch has already done so.
    pub(crate) fn spread(&self, slot: usize, op: &DispatchOp) -> Result<()> {
        let zero_padding = match op.arrangement {
            Layout::Flat | Layout::RankMajor { .. } => return Ok(()),
            _ if self.moe.has_tiles() => return Ok(()),
            Layout::ExpertMajor { zero_padding, .. } => zero_padding,
            Layout::Packed => false,
        };
        let (layout, row) = (&op.output.layout, &op.format.row);
        let at = |span: Span| op.output.address + span.offset;
        let packed = op.arrangement == Layout::Packed;
        let weights = |span: Span| if row.weights { at(span) } else { 0 };
        let source = |span: Span| if packed { at(span) } else { 0 };
        // As many warps as have memory for a stage.
        let dispatch_tiling = self.moe.dispatch_tiling(row, op.arrangement, false);
        let movers = self.moe.block.warps().min(dispatch_tiling.movers * dispatch_tiling.stages);
        let arguments = SpreadArgs {
            x: at(layout.x),
            scales: at(layout.scales),
            weights: weights(layout.weights),
            source: source(layout.source),
            slots: at(layout.slots),
            landed_scales: at(layout.landed_scales),
            landed_weights: weights(layout.landed_weights),
            landed_source: source(layout.landed_source),
            counts: at(layout.expert_counts),
            starts: at(layout.expert_starts),
            cell: if op.mode.no_host_sync { self.engine.launcher.cell(slot) } else { 0 },
            totals: if op.is_open { at(layout.totals) } else { 0 },
            tokens: op.received,
            rows: op.output.rows_of(op.arrangement, &self.moe.exchange.regions),
            row_bytes: row.x_bytes.into(),
            scale_words: op.format.scale_cols as u32,
            topk: self.moe.exchange.shape.topk,
            local_experts: self.moe.exchange.shape.local_experts(),
            zero_padding: zero_padding.into(),
            stage_bytes: dispatch_tiling.pitch,
            movers,
            stages: 1,
            reserved: 0,
        };
        let blocks = self.moe.blocks.of_call(op.mode.sms).local;
        let size = Launch::of_threads(blocks, THREADS, movers * dispatch_tiling.pitch);
        // SAFETY: the kernel's type; it names a region that is held.
        unsafe { self.engine.launch(&self.moe.kernels.spread, size, &arguments, slot) }
    }
}
