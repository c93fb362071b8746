//! The `cpu` kernel set on host memory: the direct algorithm, and over it the hierarchical one.
//!
//! Every rank keeps two windows: *control* (records, staging, landing places, at equal offsets on all
//! ranks) and *arena* (outputs; a receiver chooses the place and grants it).
//!
//! One protocol serves both kinds of transport. Records always travel as `put_signal`. Rows are
//! stored straight into the peer's arena where peers can be loaded from and stored to, and staged
//! and `put` where they cannot. Receivers count (INV-2): per operation slot and place there are four
//! signals, see `control`.
//!
//! With several domains each rank is also a *forwarder*: for the sources of other domains on its rail it
//! does inside its domain what they would do if they were here. One domain is the case without them.

mod agree;
mod channel;
mod combine;
mod commands;
mod config;
mod control;
mod counters;
mod dispatch;
mod domain_rows;
mod engine;
mod entry;
mod expert_major;
mod forward;
mod handle;
mod launch;
mod left_out;
mod losses;
mod memory;
mod mend;
mod merger;
mod moves;
mod operation;
mod order;
mod output;
mod outstanding;
mod packed;
mod partials;
mod pieces;
mod places;
mod rail;
mod record;
mod routing;
mod rows;
mod sending;
mod slots;
mod source;
mod sums;
mod transfer;
mod verdicts;
mod void;
mod windows;
mod world;
mod writer;

pub use config::CpuConfig;
pub use handle::handle_bytes;
pub use launch::PIECE_BYTES;
pub use windows::{Spread, WindowSizes};

use tokenyard_core::abi;
use tokenyard_core::call::{CombineCall, DispatchCall};
use tokenyard_core::kernels::{
    KernelNeeds, KernelSet, KernelShape, Limits, LinkNeeds, NO_LINK_NEEDS,
};
use tokenyard_core::moe::Shape;
use tokenyard_core::transport::{Capabilities, MemoryNeeds, Window};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::pool::Pool;
use channel::queue_depth;
use control::Ids;
use engine::Engine;
use memory::Memory;

/// The kernel set. See the [module](self).
#[derive(Debug)]
pub struct CpuKernels {
    config: CpuConfig,
    shape: KernelShape,
    /// Set by `needs`.
    sizes: Option<WindowSizes>,
    /// Set by `plan`. Dropped before the memory it points to.
    engine: Option<Engine>,
    memory: Vec<Memory>,
}

fn link_needs(limits: &Capabilities, ids: Ids) -> LinkNeeds {
    LinkNeeds {
        queues: 1,
        signals: ids.count(),
        queue_depth: queue_depth(limits),
        reserved: 0,
        largest_put: limits.largest_put.min(windows::LARGEST_PUT),
    }
}

impl CpuKernels {
    fn engine(&mut self) -> Result<&mut Engine> {
        self.engine.as_mut().ok_or_else(|| {
            Error::new(ErrorKind::Internal, "run kernels", "an operation came before `plan`")
        })
    }
}

impl KernelSet for CpuKernels {
    const NAME: &'static str = "cpu";
    const ABOUT: &'static str = "any CPU: host memory, all layouts and types, one or many domains";
    type Config = CpuConfig;

    fn probe(config: &CpuConfig) -> Result<u32> {
        config.check()?;
        Ok(abi::TY_MEMORY_HOST)
    }

    fn open(config: CpuConfig, shape: &KernelShape) -> Result<Self> {
        config.check()?;
        Ok(Self { config, shape: *shape, sizes: None, engine: None, memory: Vec::new() })
    }

    fn needs(&mut self, limits: &Limits) -> Result<KernelNeeds> {
        let scale_up = limits.scale_up.max_queues > 0;
        let inside = if scale_up { &limits.scale_up } else { &limits.scale_out };
        let KernelShape { ranks, domains, in_flight, .. } = self.shape;
        let spread = Spread { in_flight, domains };
        let both = [inside, &limits.scale_out];
        let sizes = WindowSizes::new(&Shape::from(&self.shape), spread, both, &self.config)?;
        self.sizes = Some(sizes);
        let mut window_bytes = [0; abi::TY_MAX_WINDOWS];
        window_bytes[windows::CONTROL as usize] = sizes.control_bytes;
        window_bytes[windows::ARENA as usize] = sizes.arena_bytes;
        let link = link_needs(inside, Ids { places: ranks, in_flight });
        let rail = link_needs(&limits.scale_out, Ids { places: domains, in_flight });
        let (scale_up, scale_out) = match (domains > 1, scale_up) {
            (true, _) => (link, rail),
            (false, true) => (link, NO_LINK_NEEDS),
            (false, false) => (NO_LINK_NEEDS, link),
        };
        Ok(KernelNeeds {
            size: size_of::<KernelNeeds>(),
            windows: 2,
            flags: abi::TY_NEEDS_MASKING
                | abi::TY_NEEDS_CALL_TOKENS
                | abi::TY_NEEDS_ROUND_ONCE
                | abi::TY_NEEDS_SUM_WEIGHTS
                | abi::TY_NEEDS_NO_REGION,
            scale_up,
            scale_out,
            window_bytes,
            window_levels: [0; abi::TY_MAX_WINDOWS],
            device: -1,
            reserved: 0,
        })
    }

    fn allocate(&mut self, id: u32, bytes: u64, needs: &MemoryNeeds) -> Result<Window> {
        let memory = Memory::new(bytes, needs)?;
        let window = memory.window(id);
        self.memory.push(memory);
        Ok(window)
    }

    unsafe fn plan(&mut self, plan: &abi::TyPlan) -> Result<()> {
        let sizes = self.sizes.ok_or_else(|| {
            Error::new(ErrorKind::Internal, "plan kernels", "`plan` came before `needs`")
        })?;
        let pool = Pool::new(self.config.threads as usize)?;
        // SAFETY: links stay valid while there are operations, and the board until the engine is
        // dropped, by this function's contract; the engine uses links in operations only.
        self.engine = Some(unsafe { Engine::new(&self.shape, sizes, plan, pool)? });
        Ok(())
    }

    unsafe fn dispatch_send(&mut self, dispatch: &DispatchCall<'_>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { dispatch::dispatch_send(self.engine()?, dispatch) }
    }

    fn dispatch_recv(&mut self, operation: u64) -> Result<abi::TyReceived> {
        dispatch::dispatch_recv(self.engine()?, operation)
    }

    fn dispatch_output(&mut self, operation: u64) -> Result<Option<abi::TyReceived>> {
        dispatch::dispatch_output(self.engine()?, operation)
    }

    fn combine_input(&mut self, handle: u32, dtype: u32) -> Result<(u64, abi::TyTensor)> {
        let engine = self.engine()?;
        combine::combine_input(&engine.routing, &mut engine.places, handle, dtype)
    }

    unsafe fn combine_send(&mut self, combine: &CombineCall<'_>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { combine::combine_send(self.engine()?, combine) }
    }

    fn combine_recv(&mut self, operation: u64) -> Result<()> {
        combine::combine_recv(self.engine()?, operation)
    }

    fn flush(&mut self) -> Result<()> {
        self.engine()?.order.flush()
    }

    fn counters(&mut self) -> Option<abi::TyCounters> {
        self.engine.as_ref().map(|engine| engine.order.counters.as_abi())
    }

    fn release(&mut self, region: u64) {
        if let Some(engine) = &mut self.engine {
            engine.places.arena.release(region);
        }
    }
}
