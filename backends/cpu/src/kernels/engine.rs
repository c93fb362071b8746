//! The planned kernel set: everything is allocated, operations only move bytes.

use tokenyard_core::kernels::KernelShape;
use tokenyard_core::{Result, abi};

use super::launch::Launcher;
use super::order::Order;
use super::places::Places;
use super::routing::RoutingTable;
use super::windows::WindowSizes;
use super::world::World;
use crate::pool::Pool;

/// The state that the operations of a communicator work with.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) world: World,
    pub(super) routing: RoutingTable,
    pub(super) places: Places,
    pub(super) order: Order,
    pub(super) launcher: Launcher,
}

// SAFETY: the areas are mappings that live as long as the communicator; the engine is used by one thread at a
// time (thread rule of the kernel set ABI).
unsafe impl Send for Engine {}

impl Engine {
    /// # Safety
    /// Everything that the plan points to (but for the list of windows) outlives the engine.
    pub(super) unsafe fn new(
        shape: &KernelShape,
        sizes: WindowSizes,
        plan: &abi::TyPlan,
        pool: Pool,
    ) -> Result<Self> {
        let world = World::new(shape);
        // SAFETY: by this function's contract; the host passes judged tables.
        let (order, windows) = unsafe {
            (
                Order::new(world, shape, plan)?,
                std::slice::from_raw_parts(plan.windows, plan.window_count),
            )
        };
        Ok(Self {
            world,
            routing: RoutingTable::new(world, shape),
            places: Places::new(world, sizes, windows, &order.channel)?,
            order,
            launcher: Launcher::new(world, pool),
        })
    }
}
