//! The result of a dispatch that later calls use: the routing in device memory, and the facts that
//! the host knows of it.

use std::sync::Arc;

use tokenyard_core::Result;
use tokenyard_core::moe::{Layout, Region, RegionLayout, RegionRows, RegionSpec, Shape, Span};

use crate::driver::{Context, Pooled, RawStream, RelaxedCapture};
use crate::moe::args::Routing;
use crate::moe::exchange::Exchange;

/// One handle slot. Its memory is allocated when it is used first: callers ask for many, and use few at once.
#[derive(Debug, Default)]
pub(crate) struct HandleState {
    pub(crate) routing: Routing,
    /// The most blocks that count its tokens, and the warps of each.
    most_blocks: u32,
    warps: u32,
    /// T on this rank, or the most that it may be.
    pub(crate) tokens: u32,
    /// Whether only the device knows T.
    pub(crate) has_device_tokens: bool,
    /// True N on this rank, or the most that it may be.
    pub(crate) received: u64,
    /// Whether only the device knows N.
    pub(crate) is_open: bool,
    /// The rows that an exact output is laid out for.
    pub(crate) exact: RegionRows,
    /// Rows that the output has: N, or the most.
    pub(crate) rows: u64,
    pub(crate) worst: bool,
    pub(crate) layout: Layout,
    /// M of the dispatch, for its replays.
    pub(crate) max_tokens: u32,
    /// Expert-major and packed: where the slots and the weights of the first output lie; 0 where it has none.
    pub(crate) slots: u64,
    pub(crate) weights: u64,
    /// In low latency: the place at which the first output names the source of each row in
    /// flat order.
    pub(crate) landed_sources: u64,
    /// In low latency: `[R * M]`, the source of each rank-major place.
    pub(crate) place_sources: u64,
    /// The stream of the dispatch that made it.
    pub(crate) stream: Option<RawStream>,
    /// The staging of captured operations: theirs until the slot is used again.
    pub(crate) kept: Vec<Region>,
    /// Whether a graph writes or reads its memory.
    pub(crate) is_captured: bool,
    memory: Option<Pooled>,
}

/// Bytes of the device's note: T and origin, then N.
const NOTE: u64 = 16;
/// Tokens of the shortest span. Spans are powers of two.
const SPAN: u32 = 8;

/// Tokens that one warp counts, where this many warps count.
fn span(tokens: u32, warps: u32) -> u32 {
    tokens.div_ceil(warps).next_power_of_two().max(SPAN)
}

impl HandleState {
    /// Where the device notes N.
    pub(crate) fn received_at(&self) -> u64 {
        self.routing.note + 8
    }

    /// Takes a new routing of this many tokens, which this many blocks count.
    pub(crate) fn count(&mut self, tokens: u32, blocks: u32) {
        // The memory is for so many.
        let blocks = blocks.min(self.most_blocks);
        self.tokens = tokens;
        self.routing.blocks = blocks;
        self.routing.span = span(tokens, blocks * self.warps);
    }

    /// A handle without memory, for counts by at most `most_blocks` blocks of `warps` warps each.
    pub(crate) fn new(most_blocks: u32, warps: u32) -> Self {
        Self {
            routing: Routing { span: SPAN, blocks: most_blocks, ..Routing::default() },
            most_blocks,
            warps,
            ..Self::default()
        }
    }

    /// Allocates its memory, unless it has some.
    pub(crate) fn allocate(&mut self, context: &Arc<Context>, exchange: &Exchange) -> Result<()> {
        if self.memory.is_some() {
            return Ok(());
        }
        // Other threads, or this call, may capture graphs meanwhile.
        let _relaxed = RelaxedCapture::enter(context)?;
        let blocks = self.most_blocks;
        let (shape, groups) = (&exchange.shape, u64::from(exchange.groups));
        let (ranks, most) = (u64::from(shape.ranks), u64::from(shape.max_tokens));
        let pairs = 4 * most * u64::from(shape.topk);
        let (of_ranks, of_experts) = (4 * ranks, 4 * u64::from(shape.experts));
        let spans = u64::from(blocks) * u64::from(self.warps);
        let lengths = [
            pairs,
            pairs,
            pairs,
            spans * of_ranks,
            spans * of_experts,
            u64::from(blocks) * of_ranks,
            u64::from(blocks) * of_experts,
            of_ranks,
            of_experts,
            groups * of_ranks,
            4 * (ranks + 1),
            4 * (groups + 1),
            groups * (of_ranks + of_experts),
            NOTE,
            if exchange.decodes { 4 * ranks * most } else { 0 },
        ];
        let mut end = 0;
        let starts = lengths.map(|bytes| {
            let start = end;
            end += bytes.next_multiple_of(256);
            start
        });
        let memory = Pooled::new(context, end)?;
        // Each part is named once: the order is that of `lengths`.
        macro_rules! routing {
            ($($name:ident),*) => {{
                let [$($name,)* place_sources] = starts.map(|start| memory.address() + start);
                (Routing { $($name,)* span: SPAN, blocks }, place_sources)
            }};
        }
        (self.routing, self.place_sources) = routing! {
            topk, rows, places, span_ranks, span_experts, block_ranks, block_experts, counts, expert_counts,
            row_base, source_rows, group_starts, group_counts, note
        };
        self.memory = Some(memory);
        Ok(())
    }

    /// Stores the facts that a combine needs of the output that the routing made first.
    pub(crate) fn note_output(&mut self, output: &Output, received: u64, spec: &RegionSpec) {
        let at = |span: Span| output.address + span.offset;
        self.received = received;
        self.exact = output.rows;
        self.rows = output.rows_of(spec.layout, &spec.shape);
        self.slots = at(output.layout.slots);
        self.landed_sources = at(output.layout.landed_source);
        self.weights = if spec.row.weights { at(output.layout.weights) } else { 0 };
    }
}

/// Where the output of a dispatch lies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Output {
    pub(crate) region: u64,
    pub(crate) address: u64,
    pub(crate) layout: RegionLayout,
    /// The rows that it was laid out for.
    pub(crate) rows: RegionRows,
}

impl Output {
    /// Rows of the output tensor: N (flat), X (expert-major), El * R*M (packed) or R*M (rank-major).
    pub(crate) fn rows_of(&self, layout: Layout, shape: &Shape) -> u64 {
        match layout {
            Layout::Flat | Layout::RankMajor { .. } => self.rows.tokens,
            Layout::ExpertMajor { .. } => self.rows.experts,
            Layout::Packed => u64::from(shape.local_experts()) * self.rows.tokens,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::args::PLACE_BITS;
    use crate::moe::limits::BlockLimits;

    #[test]
    fn places_of_the_most_tokens_that_a_warp_counts_fit_their_bits() {
        for wave in [32, 64] {
            let block = BlockLimits { shared: 65_536, wave };
            let most = block.most_tokens();
            for blocks in [1, 2, 3, 78, 132, 148, 304] {
                for tokens in [0, 1, 4096, 1_000_003, most - 1, most] {
                    let warps = blocks * block.warps();
                    let span = span(tokens, warps);
                    assert!(span <= 1 << PLACE_BITS, "{tokens} tokens, {warps} warps: {span}");
                    assert!(u64::from(span) * u64::from(warps) >= u64::from(tokens));
                }
            }
        }
        let line = format!("constexpr u32 kPlaceBits = {PLACE_BITS};");
        assert!(
            include_str!("../../device/moe/moe_args.cuh").contains(&line),
            "the kernels have other places"
        );
    }
}
