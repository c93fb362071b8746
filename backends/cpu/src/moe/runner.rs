//! A planned exchange: everything is allocated, operations only move bytes.

use std::rc::Rc;
use std::sync::Arc;

use tokenyard_core::call::WireFormat;
use tokenyard_core::kernels::KernelShape;
use tokenyard_core::kernels::two_levels::ExchangePair;
use tokenyard_core::moe::{Layout, RegionLayout, RegionRows, RegionSpec};
use tokenyard_core::{Result, abi};

use crate::engine::order::{SlotOrder, Traffic};
use crate::engine::places::{Places, Windows};
use crate::moe::exchange::Exchange;
use crate::moe::launcher::Launcher;
use crate::moe::operation::Operation;
use crate::moe::routing::RoutingTable;
use crate::moe::sizes::WindowSizes;
use crate::pool::Pool;

/// Runs the operations of one exchange: the state that they work with.
#[derive(Debug)]
pub(crate) struct Runner {
    pub(crate) exchange: Exchange,
    pub(crate) routing: RoutingTable,
    pub(crate) places: Places,
    pub(crate) order: SlotOrder,
    pub(crate) launcher: Launcher,
    /// By slot.
    pub(crate) operations: Vec<Operation>,
}

impl Runner {
    /// The layout of one source's landing places: flat, room for M rows.
    pub(crate) fn landing_layout(&self, format: &WireFormat) -> Result<RegionLayout> {
        let spec = RegionSpec::new(self.exchange.regions, Layout::Flat, format.row);
        let rows = RegionRows { tokens: self.exchange.regions.max_tokens.into(), experts: 0 };
        let region = RegionLayout::new(&spec, rows)?;
        debug_assert!(region.bytes <= self.places.slots.landing_pitch);
        Ok(region)
    }
}

/// The exchanges of a communicator. They share windows, arena, worker threads, and what is known of their links.
#[derive(Debug)]
pub(crate) struct Runners {
    pub(crate) levels: ExchangePair<Runner>,
}

// SAFETY: the areas are mappings that live as long as the communicator. No other value shares the state that
// runners share, so it moves with them. One thread at a time uses them (thread rule of the kernel set ABI).
unsafe impl Send for Runners {}

impl Runners {
    /// # Safety
    /// Everything that the plan points to (but for the list of windows) outlives the runners.
    pub(crate) unsafe fn new(
        shape: &KernelShape,
        sizes: WindowSizes,
        plan: &abi::TyPlan,
        pool: Pool,
    ) -> Result<Self> {
        let level = match plan.scale_up.table.is_null() {
            true => abi::TY_LEVEL_SCALE_OUT,
            false => abi::TY_LEVEL_SCALE_UP,
        };
        let (owners, rail) = Exchange::of(shape, level);
        let exchanges = [Some(owners), rail];
        // SAFETY: by this function's contract; the host passes judged tables.
        let (traffic, windows) = unsafe {
            (
                Traffic::new(
                    shape,
                    exchanges.iter().flatten().map(|exchange| &exchange.member),
                    plan,
                )?,
                std::slice::from_raw_parts(plan.windows, plan.window_count),
            )
        };
        let (traffic, pool) = (Rc::new(traffic), Arc::new(pool));
        let windows = Windows::new(windows, sizes.arena_bytes)?;
        let runner = |exchange: Exchange, number: usize| -> Result<Runner> {
            let order = SlotOrder::new(exchange.member, &traffic, shape.in_flight, number);
            let slots = if number == 0 { sizes.owners() } else { sizes.rail() };
            Ok(Runner {
                exchange,
                routing: RoutingTable::new(exchange, shape),
                places: Places::new(exchange.member, slots, &windows, &order.channel)?,
                order,
                launcher: Launcher::new(exchange, Arc::clone(&pool)),
                operations: vec![Operation::None; shape.in_flight as usize],
            })
        };
        let rail = rail.map(|rail| runner(rail, 1)).transpose()?;
        Ok(Self { levels: ExchangePair::new(runner(owners, 0)?, rail, shape.in_flight) })
    }
}
