//! The state of dispatch and combine beside the engine of their exchange.

use std::sync::Arc;

use tokenyard_core::Result;
use tokenyard_core::moe::{DType, Layout, Region, RowFormat};

use crate::compile::Rows;
use crate::config::{GpuConfig, Outside, Sms};
use crate::decode::loaded::DecodeKernels;
use crate::decode::sizes::DecodeSizes;
use crate::driver::{Buffer, Context};
use crate::engine::Engine;
use crate::engine::counters::Counters;
use crate::engine::mode::Mode;
use crate::moe::blocks::Blocks;
use crate::moe::combine_tiling::CombineTiling;
use crate::moe::crossing::Runs;
use crate::moe::exchange::{Exchange, Scope};
use crate::moe::handle::HandleState;
use crate::moe::host_counts::HostCounts;
use crate::moe::limits::BlockLimits;
use crate::moe::loaded::Kernels;
use crate::moe::moving::Moving;
use crate::moe::routing::RoutingTable;
use crate::moe::sizes::{CONTROL, DispatchTiling, Sizes};

/// The plan of an exchange.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedExchange<'a> {
    pub(crate) exchange: Exchange,
    pub(crate) sizes: Sizes,
    /// Addresses of its windows: control and arena.
    pub(crate) windows: [u64; 2],
    /// The counters of the communicator.
    pub(crate) counters: &'a Counters,
    /// The number of handles that it stores.
    pub(crate) handles: u32,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct MoeState {
    pub(crate) exchange: Exchange,
    pub(crate) sizes: Sizes,
    pub(crate) kernels: Kernels,
    pub(crate) blocks: Blocks,
    /// The memory and the warps of each block.
    pub(crate) block: BlockLimits,
    pub(crate) routing: RoutingTable,
    pub(crate) counts: HostCounts,
    /// How rows outside the arena are returned.
    pub(crate) outside: Outside,
    /// The address of the control window.
    pub(crate) control: u64,
    /// Between domains, where rows cross in runs.
    pub(crate) runs: Option<Runs>,
    /// `[R]` zeros: the ranks that an output leaves out where a lost rank ends the communicator.
    pub(crate) lost: Buffer,
}

impl MoeState {
    pub(crate) fn new(
        context: &Arc<Context>,
        config: &GpuConfig,
        planned: &PlannedExchange<'_>,
        kernels: Kernels,
    ) -> Result<Self> {
        let PlannedExchange { exchange, sizes, windows, handles, .. } = *planned;
        let facts = context.device.facts()?;
        let (processors, block) = (facts.processors, BlockLimits::of(&facts));
        let blocks = Blocks {
            exchange: config.sms.blocks(processors),
            by_formula: config.sms == Sms::Auto
                && exchange.scope == Scope::Flat
                && !exchange.path.puts()
                && kernels.rows == Rows::Tma,
            local: config.local_sms.local_blocks(processors),
            local_is_set: config.local_sms != Sms::Auto,
            decode: config.decode_sms,
            all: processors,
        };
        let slots = sizes.slots as usize;
        Ok(Self {
            exchange,
            sizes,
            kernels,
            blocks,
            block,
            routing: RoutingTable::new(&exchange, handles, blocks.most_counting(), block.warps()),
            counts: HostCounts::new(context, slots, exchange.shape.local_experts())?,
            outside: config.outside,
            control: windows[CONTROL],
            runs: sizes
                .runs
                .map(|runs| Runs::new(context, runs, sizes.run_signal(), &exchange))
                .transpose()?,
            lost: Buffer::new(context, exchange.regions.ranks.into())?,
        })
    }

    /// How a dispatch of rows moves them, if it does not cast them.
    pub(crate) fn dispatch_tiling(
        &self,
        row: &RowFormat,
        layout: Layout,
        few: bool,
    ) -> DispatchTiling {
        let moving = match layout {
            Layout::Flat | Layout::RankMajor { .. } if self.kernels.rows == Rows::Tma => {
                Moving::Links { beside: self.exchange.has_runs() || self.exchange.awaits_rows }
            }
            Layout::ExpertMajor { .. } | Layout::Packed if self.has_tiles() => {
                Moving::Tiles { few }
            }
            _ => Moving::Any,
        };
        DispatchTiling::new(&self.exchange, row, self.block, moving)
    }

    /// How a dispatch casts rows of a type as it moves them.
    pub(crate) fn cast_tiling(&self, row: &RowFormat, dtype: u32) -> DispatchTiling {
        let channel_bytes = if dtype == DType::F32.code() { 4 } else { 2 };
        let moving = Moving::Cast { channel_bytes };
        DispatchTiling::new(&self.exchange, row, self.block, moving)
    }

    /// How a combine of rows reads them.
    pub(crate) fn combine_tiling(&self, row_bytes: u64) -> CombineTiling {
        CombineTiling::new(&self.exchange, row_bytes, self.block)
    }

    /// Whether rows are spread over experts while others arrive. Tiles number the rows of a source
    /// consecutively. Rows of several groups have no such numbers.
    pub(crate) fn has_tiles(&self) -> bool {
        !self.exchange.path.puts() && self.exchange.groups == 1
    }

    /// Low-latency kernels and places, for rows of a layout.
    pub(crate) fn decode(&self, layout: Layout) -> Option<(&DecodeKernels, DecodeSizes)> {
        self.kernels.decode.as_ref().filter(|kernels| kernels.take(layout)).zip(self.sizes.decode)
    }

    /// Whether rows of a layout go to inboxes.
    pub(crate) fn decodes(&self, layout: Layout) -> bool {
        self.decode(layout).is_some()
    }

    /// The reason why rows of this many bytes, with scales of this many bytes, cannot be sent in a
    /// layout.
    pub(crate) fn too_long(
        &self,
        layout: Layout,
        row_bytes: u64,
        scale_bytes: u64,
    ) -> Option<String> {
        self.decode(layout).and_then(|(_, sizes)| sizes.refuses(row_bytes, scale_bytes))
    }

    /// The staging of an operation is free behind the operation; the staging of one that may run
    /// again stays with the handle.
    pub(crate) fn unstage(
        &mut self,
        engine: &mut Engine,
        staging: Option<Region>,
        handle: u32,
        mode: &Mode,
    ) {
        let Some(region) = staging else { return };
        if mode.is_recorded() {
            engine.order.regions.give(region.id, mode.stream);
            self.routing.handle(handle).kept.push(region);
        } else {
            engine.places.arena.release(region.id);
        }
    }

    /// A handle slot is used for another dispatch, so its caller has dropped the last one. Graphs may still launch
    /// that: its staging is theirs, and so is the memory of its routing.
    pub(crate) fn renew(
        &mut self,
        engine: &mut Engine,
        handle: u32,
        is_recorded: bool,
    ) -> Result<()> {
        for region in std::mem::take(&mut self.routing.handle(handle).kept) {
            engine.release(region.id);
        }
        let (blocks, warps) = (self.blocks.most_counting(), self.block.warps());
        let state = self.routing.renew(handle, is_recorded, || HandleState::new(blocks, warps));
        state.allocate(engine.order.context_arc(), &self.exchange)
    }
}
