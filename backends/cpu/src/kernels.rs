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
//! With several domains each rank is also a *forwarder*: inside its domain it acts for the sources of
//! other domains on its rail. The case of one domain has no forwarders.

pub use crate::engine::launch::PIECE_BYTES;
pub use crate::moe::config::CpuConfig;
pub use crate::moe::handle::handle_bytes;
pub use crate::moe::sizes::{Spread, WindowSizes};

use tokenyard_core::abi;
use tokenyard_core::call::{AgreeCall, CombineCall, DispatchCall, ExchangeKind};
use tokenyard_core::kernels::two_levels::{ExchangePair, Part};
use tokenyard_core::kernels::{
    KernelNeeds, KernelSet, KernelShape, Limits, LinkNeeds, NO_KERNEL_NEEDS, NO_LINK_NEEDS,
};
use tokenyard_core::moe::Shape;
use tokenyard_core::transport::{Capabilities, MemoryNeeds, Window};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::engine::areas;
use crate::engine::channel::queue_depth;
use crate::engine::control::Ids;
use crate::engine::window::Memory;
use crate::moe::combine::forwarded;
use crate::moe::dispatch::rail;
use crate::moe::dispatch::upstream::Upstream;
use crate::moe::runner::{Runner, Runners};
use crate::moe::{combine, dispatch, verdicts};
use crate::ops::Beside;
use crate::pool::Pool;

/// The kernel set. See the [module](self).
#[derive(Debug)]
pub struct CpuKernels {
    config: CpuConfig,
    shape: KernelShape,
    /// Set by `needs`.
    sizes: Option<WindowSizes>,
    /// Set by `plan`. Dropped before the memory it points to.
    runners: Option<Runners>,
    /// Set by `plan`, of an instance for an operation beside MoE. As above.
    beside: Option<Beside>,
    memory: Vec<Memory>,
}

pub(crate) fn link_needs(limits: &Capabilities, ids: Ids) -> LinkNeeds {
    LinkNeeds {
        queues: 1,
        signals: ids.count(),
        queue_depth: queue_depth(limits),
        reserved: 0,
        largest_put: limits.largest_put.min(areas::LARGEST_PUT),
    }
}

/// Whether the level inside the domain is scale-up, and what the link there can do.
pub(crate) fn inside(limits: &Limits) -> (bool, &Capabilities) {
    match limits.scale_up.max_queues > 0 {
        true => (true, &limits.scale_up),
        false => (false, &limits.scale_out),
    }
}

impl CpuKernels {
    fn beside(&mut self) -> Result<&mut Beside> {
        self.beside.as_mut().ok_or_else(|| {
            Error::new(ErrorKind::Internal, "run operation", "the instance was planned for MoE")
        })
    }

    fn levels(&mut self) -> Result<&mut ExchangePair<Runner>> {
        self.runners.as_mut().map(|runners| &mut runners.levels).ok_or_else(|| {
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
        Ok(Self {
            config,
            shape: *shape,
            sizes: None,
            runners: None,
            beside: None,
            memory: Vec::new(),
        })
    }

    fn needs(&mut self, limits: &Limits) -> Result<KernelNeeds> {
        if self.shape.runs != abi::TY_RUNS_MOE {
            return Beside::needs(&self.shape, limits);
        }
        let (scale_up, inside) = inside(limits);
        let KernelShape { ranks, domains, in_flight, .. } = self.shape;
        let spread = Spread { in_flight, domains };
        let both = [inside, &limits.scale_out];
        let sizes = WindowSizes::new(&Shape::from(&self.shape), spread, both, &self.config)?;
        self.sizes = Some(sizes);
        let mut window_bytes = [0; abi::TY_MAX_WINDOWS];
        window_bytes[areas::CONTROL as usize] = sizes.control_bytes;
        window_bytes[areas::ARENA as usize] = sizes.arena_bytes;
        let link = link_needs(inside, Ids { places: ranks, in_flight });
        let rail = link_needs(&limits.scale_out, Ids { places: domains, in_flight });
        let (scale_up, scale_out) = match (domains > 1, scale_up) {
            (true, _) => (link, rail),
            (false, true) => (link, NO_LINK_NEEDS),
            (false, false) => (NO_LINK_NEEDS, link),
        };
        Ok(KernelNeeds {
            windows: 2,
            capabilities: abi::TY_KERNELS_CAP_MASKING
                | abi::TY_KERNELS_CAP_CALL_TOKENS
                | abi::TY_KERNELS_CAP_ROUND_ONCE
                | abi::TY_KERNELS_CAP_SUM_WEIGHTS
                | abi::TY_KERNELS_CAP_PACKED_FORMS
                | abi::TY_KERNELS_CAP_NO_REGION
                | abi::TY_KERNELS_CAP_RANK_MAJOR
                // Sums of a domain would be encoded once more on the rail, and sources there learn no places.
                | if domains > 1 {
                    0
                } else {
                    abi::TY_KERNELS_CAP_LOGFMT10 | abi::TY_KERNELS_CAP_ROW_CAP
                },
            scale_up,
            scale_out,
            window_bytes,
            ..NO_KERNEL_NEEDS
        })
    }

    fn allocate(&mut self, id: u32, bytes: u64, needs: &MemoryNeeds) -> Result<Window> {
        let memory = Memory::new(bytes, needs)?;
        let window = memory.window(id);
        self.memory.push(memory);
        Ok(window)
    }

    unsafe fn plan(&mut self, plan: &abi::TyPlan) -> Result<()> {
        if self.shape.runs != abi::TY_RUNS_MOE {
            // SAFETY: by this function's contract, as below.
            self.beside = Some(unsafe { Beside::new(&self.shape, plan)? });
            return Ok(());
        }
        let sizes = self.sizes.ok_or_else(|| {
            Error::new(ErrorKind::Internal, "plan kernels", "`plan` came before `needs`")
        })?;
        let pool = Pool::new(self.config.threads as usize)?;
        // SAFETY: links stay valid while there are operations, and the board until the runner is
        // dropped, by this function's contract; the runner uses links in operations only.
        self.runners = Some(unsafe { Runners::new(&self.shape, sizes, plan, pool)? });
        Ok(())
    }

    unsafe fn dispatch_send(&mut self, dispatch: &DispatchCall<'_>) -> Result<()> {
        let part = self.levels()?.part(dispatch.exchange)?;
        // SAFETY: by this function's contract.
        unsafe {
            match part {
                Part::Whole(owners) => dispatch::dispatch_send(owners, dispatch, None),
                Part::OnRail(_, rail) => rail::cross(&mut rail.between, dispatch),
                Part::Inside(owners, rail) => {
                    let slot = rail.between.order.slot(dispatch.operation);
                    let upstream =
                        Upstream { runner: &rail.between, slot, format: dispatch.format };
                    let upstream = dispatch.refusal.is_none().then_some(&upstream);
                    dispatch::dispatch_send(owners, dispatch, upstream)
                }
            }
        }
    }

    fn dispatch_recv(&mut self, operation: u64) -> Result<abi::TyReceived> {
        dispatch::dispatch_recv(&mut self.levels()?.owners, operation)
    }

    fn dispatch_output(&mut self, operation: u64) -> Result<Option<abi::TyReceived>> {
        dispatch::dispatch_output(&mut self.levels()?.owners, operation)
    }

    fn combine_input(&mut self, handle: u32, dtype: u32) -> Result<(u64, abi::TyTensor)> {
        let owners = &self.levels()?.owners;
        combine::combine_input(&owners.routing, &owners.places, handle, dtype)
    }

    unsafe fn combine_send(&mut self, combine: &CombineCall<'_>) -> Result<()> {
        let part = self.levels()?.part(combine.exchange)?;
        // SAFETY: by this function's contract.
        unsafe {
            match part {
                Part::Whole(owners) => combine::combine_send(owners, combine),
                Part::Inside(owners, rail) => forwarded::combine_inside(owners, rail, combine),
                Part::OnRail(_, rail) => forwarded::combine_on_rail(rail, combine),
            }
        }
    }

    fn combine_recv(&mut self, operation: u64) -> Result<()> {
        let ExchangePair { owners, rail } = self.levels()?;
        match rail {
            Some(rail) => forwarded::recv_on_rail(rail, operation),
            None => combine::combine_recv(owners, operation),
        }
    }

    fn agree(&mut self, call: &AgreeCall<'_>) -> Result<()> {
        let (owners, rail) = self.levels()?.both()?;
        match call.exchange {
            ExchangeKind::Rail => rail::agree(&mut rail.between, call),
            ExchangeKind::Owners => verdicts::agree_inside(owners, call),
        }
    }

    unsafe fn send(&mut self, message: &abi::TyMessage) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.beside()?.pipe()?.send(message) }
    }

    unsafe fn recv(&mut self, message: &abi::TyMessage) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.beside()?.pipe()?.recv(message) }
    }

    unsafe fn gather_send(&mut self, gather: &abi::TyGather) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.beside()?.gather()?.send(gather) }
    }

    unsafe fn gather_recv(&mut self, gather: &abi::TyGather) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.beside()?.gather()?.recv(gather) }
    }

    unsafe fn reduce_send(&mut self, reduce: &abi::TyReduce) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.beside()?.gather()?.reduce_send(reduce) }
    }

    unsafe fn reduce_recv(&mut self, reduce: &abi::TyReduce) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.beside()?.gather()?.reduce_recv(reduce) }
    }

    unsafe fn write_entries(&mut self, entries: &abi::TyEntries) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.beside()?.table()?.write(entries) }
    }

    unsafe fn fetch_send(&mut self, fetch: &abi::TyFetch) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.beside()?.table()?.send(fetch) }
    }

    unsafe fn fetch_recv(&mut self, fetch: &abi::TyFetch) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.beside()?.table()?.recv(fetch) }
    }

    fn flush(&mut self) -> Result<()> {
        if let Some(beside) = &mut self.beside {
            return beside.flush();
        }
        self.levels()?.each().try_for_each(|runner| runner.order.flush())
    }

    fn counters(&mut self) -> Option<abi::TyCounters> {
        match &self.beside {
            Some(beside) => beside.counters(),
            None => self.runners.as_ref().map(|r| r.levels.owners.order.counters().as_abi()),
        }
    }

    fn release(&mut self, region: u64) {
        if let Some(runners) = &mut self.runners {
            runners.levels.owners.places.arena().release(region);
        }
    }
}
