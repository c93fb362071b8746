//! The `cpu` kernel set, which meets a loss between the making of the links and the planning of the kernels.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_core::export::{Exported, KERNELS_HEADER, KernelsPart};
use tokenyard_core::host::BuiltIn;
use tokenyard_core::kernels::{KernelNeeds, KernelSet, KernelShape, Limits};
use tokenyard_core::transport::{MemoryNeeds, Window};
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_cpu::CpuKernels;

use crate::LIMIT;
use crate::order::Order;

/// What this process is told; set before it opens a yard.
pub(crate) static ORDER: OnceLock<Order> = OnceLock::new();

/// The kernel set's name in a config.
pub(crate) const NAME: &str = "cpu_losing";

struct Losing(CpuKernels);

/// Once, with all links made: the victims do their worst, and the others wait until they know it.
fn meet_loss(order: &Order, plan: &abi::TyPlan) -> anyhow::Result<()> {
    if order.victims().iter().all(|rank| order.marker("worst", *rank).exists()) {
        return Ok(());
    }
    order.mark("planning")?;
    let is_lost = |rank: &usize| {
        // SAFETY: the table has a byte per rank that is only accessed atomically (`TyPlan`).
        unsafe { &*plan.lost.add(*rank).cast::<AtomicU8>() }.load(Ordering::Acquire) != 0
    };
    let is_victim = order.victims().contains(&order.rank);
    let start = Instant::now();
    loop {
        if is_victim && (0..order.ranks()).all(|rank| order.marker("planning", rank).exists()) {
            return order.do_worst();
        }
        if !is_victim && order.victims().iter().all(is_lost) {
            return Ok(());
        }
        anyhow::ensure!(start.elapsed() < LIMIT, "nobody was lost");
        std::thread::sleep(Duration::from_millis(2));
    }
}

impl KernelSet for Losing {
    const NAME: &'static str = NAME;
    const ABOUT: &'static str = "the cpu kernels, planned after a loss";
    type Config = <CpuKernels as KernelSet>::Config;

    fn probe(config: &Self::Config) -> Result<u32> {
        CpuKernels::probe(config)
    }

    fn open(config: Self::Config, shape: &KernelShape) -> Result<Self> {
        CpuKernels::open(config, shape).map(Self)
    }

    fn needs(&mut self, limits: &Limits) -> Result<KernelNeeds> {
        self.0.needs(limits)
    }

    fn allocate(&mut self, id: u32, bytes: u64, needs: &MemoryNeeds) -> Result<Window> {
        self.0.allocate(id, bytes, needs)
    }

    unsafe fn plan(&mut self, plan: &abi::TyPlan) -> Result<()> {
        let met = ORDER.get().map_or(Ok(()), |order| meet_loss(order, plan));
        met.map_err(|e| Error::new(ErrorKind::Internal, "meet loss", format!("{e:#}")))?;
        // SAFETY: by this function's contract.
        unsafe { self.0.plan(plan) }
    }

    unsafe fn dispatch_send(&mut self, dispatch: &abi::TyDispatch) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.0.dispatch_send(dispatch) }
    }

    fn dispatch_recv(&mut self, operation: u64) -> Result<abi::TyReceived> {
        self.0.dispatch_recv(operation)
    }

    fn combine_input(&mut self, handle: u32, dtype: u32) -> Result<(u64, abi::TyTensor)> {
        self.0.combine_input(handle, dtype)
    }

    unsafe fn combine_send(&mut self, combine: &abi::TyCombine) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.0.combine_send(combine) }
    }

    fn combine_recv(&mut self, operation: u64) -> Result<()> {
        self.0.combine_recv(operation)
    }

    fn flush(&mut self) -> Result<()> {
        self.0.flush()
    }

    fn release(&mut self, region: u64) {
        self.0.release(region);
    }
}

const TABLES: &[*const abi::TyKernelsTable] = &[KernelsPart::<Losing>::TABLE];
static KERNELS: Exported<abi::TyKernelsExport> = Exported(abi::TyKernelsExport {
    header: KERNELS_HEADER,
    parts: TABLES.as_ptr(),
    count: TABLES.len(),
});

inventory::submit! { BuiltIn::Kernels(&KERNELS) }
