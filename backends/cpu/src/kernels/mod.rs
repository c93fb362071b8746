//! The `cpu` kernel set: the direct algorithm on host memory.
//!
//! Every rank keeps two windows: *control* (records, staging, landing places of the packed layout,
//! at equal offsets on all ranks) and *arena* (outputs; a receiver chooses the place and grants it).
//!
//! One protocol serves both kinds of transport. Records always travel as `put_signal`. Rows are
//! stored straight into the peer's arena where peers can be loaded from and stored to, and staged
//! and `put` where they cannot. Receivers count (INV-2): per operation slot and peer there are four
//! signals, see `control`.

mod agree;
mod arena;
mod combine;
mod config;
mod control;
mod dispatch;
mod engine;
mod handle;
mod memory;
mod merger;
mod output;
mod packed;
mod rows;
mod slots;
mod windows;
mod writer;

pub use config::CpuConfig;
pub use windows::WindowSizes;

use tokenyard_core::abi;
use tokenyard_core::kernels::{
    KernelNeeds, KernelSet, KernelShape, Limits, LinkNeeds, NO_LINK_NEEDS,
};
use tokenyard_core::moe::Shape;
use tokenyard_core::transport::{MemoryNeeds, Window};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::pool::Pool;
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

fn moe_shape(shape: &KernelShape) -> Shape {
    Shape {
        ranks: shape.ranks,
        experts: shape.experts,
        topk: shape.topk,
        hidden: shape.hidden,
        max_tokens: shape.max_tokens,
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
    const ABOUT: &'static str = "any CPU: host memory, direct algorithm, all layouts and types";
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
        if self.shape.domains > 1 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "size windows",
                format!("found {} domains; expected 1", self.shape.domains),
            ));
        }
        let scale_up = limits.scale_up.max_lanes > 0;
        let limits = if scale_up { &limits.scale_up } else { &limits.scale_out };
        let shape = moe_shape(&self.shape);
        let sizes = WindowSizes::new(&shape, self.shape.in_flight, limits, &self.config)?;
        self.sizes = Some(sizes);
        let mut window_bytes = [0; abi::TY_MAX_WINDOWS];
        window_bytes[windows::CONTROL as usize] = sizes.control_bytes;
        window_bytes[windows::ARENA as usize] = sizes.arena_bytes;
        let link = LinkNeeds {
            lanes: 1,
            signals: control::signals(self.shape.ranks, self.shape.in_flight),
            queue_depth: limits.max_queue_depth.min(1024),
            reserved: 0,
            largest_put: limits.largest_put.min(windows::LARGEST_PUT),
        };
        Ok(KernelNeeds {
            size: size_of::<KernelNeeds>(),
            windows: 2,
            reserved: 0,
            scale_up: if scale_up { link } else { NO_LINK_NEEDS },
            scale_out: if scale_up { NO_LINK_NEEDS } else { link },
            window_bytes,
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

    unsafe fn dispatch_send(&mut self, dispatch: &abi::TyDispatch) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.engine()?.dispatch_send(dispatch) }
    }

    fn dispatch_recv(&mut self, operation: u64) -> Result<abi::TyReceived> {
        self.engine()?.dispatch_recv(operation)
    }

    fn combine_input(&mut self, handle: u32, dtype: u32) -> Result<(u64, abi::TyTensor)> {
        self.engine()?.combine_input(handle, dtype)
    }

    unsafe fn combine_send(&mut self, combine: &abi::TyCombine) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.engine()?.combine_send(combine) }
    }

    fn combine_recv(&mut self, operation: u64) -> Result<()> {
        self.engine()?.combine_recv(operation)
    }

    fn flush(&mut self) -> Result<()> {
        self.engine()?.flush()
    }

    fn release(&mut self, region: u64) {
        if let Some(engine) = &mut self.engine {
            engine.arena.release(region);
        }
    }
}
