//! The `cpu` kernel set with one alteration built in.

use tokenyard_core::Result;
use tokenyard_core::abi;
use tokenyard_core::call::{AgreeCall, CombineCall, DispatchCall};
use tokenyard_core::config::ComponentTable;
use tokenyard_core::export::{Exported, KERNELS_HEADER, KernelsComponent};
use tokenyard_core::host::BuiltIn;
use tokenyard_core::kernels::{KernelNeeds, KernelSet, KernelShape, Limits};
use tokenyard_core::transport::{MemoryNeeds, Window};
use tokenyard_cpu::CpuKernels;

use crate::cap_mutants::*;
use crate::faulty_shm::NoSettings;
use crate::kernel_mutants::*;
use crate::operation_mutants::*;
use crate::rank_major_mutants::*;

/// The alteration: of arguments on their way in, or of results on their way out.
pub(crate) trait Alteration: Default + Send + 'static {
    /// The kernel set's name in a config.
    const NAME: &'static str;

    fn needs(&mut self, _: &mut KernelNeeds) {}

    fn dispatch(&mut self, _: &mut DispatchCall<'_>) {}

    fn received(&mut self, _: &mut abi::TyReceived) {}

    fn combine(&mut self, _: &mut CombineCall<'_>) {}

    fn combined(&mut self) {}

    /// Of an instance of this shape.
    fn planned(&mut self, _: &KernelShape, _: &abi::TyPlan) {}

    fn message(&mut self, _: &mut abi::TyMessage) {}

    fn message_received(&mut self, _: &KernelShape, _: &abi::TyMessage) {}

    fn shards(&mut self, _: &mut abi::TyGather) {}

    fn gathered(&mut self, _: &KernelShape, _: &abi::TyGather) {}

    fn reduce(&mut self, _: &mut abi::TyReduce) {}

    fn reduced(&mut self, _: &abi::TyReduce) {}

    fn entries(&mut self, _: &mut abi::TyEntries) {}

    /// How a fetch ended.
    fn fetched(&mut self, _: &KernelShape, _: &abi::TyFetch, end: Result<()>) -> Result<()> {
        end
    }
}

/// A kernel set with the alteration `A`.
pub(crate) struct Altered<A> {
    cpu: CpuKernels,
    shape: KernelShape,
    alteration: A,
}

fn cpu_config() -> <CpuKernels as KernelSet>::Config {
    ComponentTable::from_text("", "mutants").parse("cpu").unwrap()
}

impl<A: Alteration> KernelSet for Altered<A> {
    const NAME: &'static str = A::NAME;
    const ABOUT: &'static str = "the cpu kernels, broken on purpose";
    type Config = NoSettings;

    fn probe(_: &NoSettings) -> Result<u32> {
        CpuKernels::probe(&cpu_config())
    }

    fn open(_: NoSettings, shape: &KernelShape) -> Result<Self> {
        let cpu = CpuKernels::open(cpu_config(), shape)?;
        Ok(Self { cpu, shape: *shape, alteration: A::default() })
    }

    fn needs(&mut self, limits: &Limits) -> Result<KernelNeeds> {
        let mut needs = self.cpu.needs(limits)?;
        self.alteration.needs(&mut needs);
        Ok(needs)
    }

    fn allocate(&mut self, id: u32, bytes: u64, needs: &MemoryNeeds) -> Result<Window> {
        self.cpu.allocate(id, bytes, needs)
    }

    unsafe fn plan(&mut self, plan: &abi::TyPlan) -> Result<()> {
        self.alteration.planned(&self.shape, plan);
        // SAFETY: by this function's contract.
        unsafe { self.cpu.plan(plan) }
    }

    unsafe fn send(&mut self, message: &abi::TyMessage) -> Result<()> {
        let mut message = *message;
        self.alteration.message(&mut message);
        // SAFETY: by this function's contract; alterations only leave texts out.
        unsafe { self.cpu.send(&message) }
    }

    unsafe fn recv(&mut self, message: &abi::TyMessage) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.cpu.recv(message)? };
        self.alteration.message_received(&self.shape, message);
        Ok(())
    }

    unsafe fn gather_send(&mut self, gather: &abi::TyGather) -> Result<()> {
        let mut gather = *gather;
        self.alteration.shards(&mut gather);
        // SAFETY: by this function's contract; alterations only leave texts out.
        unsafe { self.cpu.gather_send(&gather) }
    }

    unsafe fn gather_recv(&mut self, gather: &abi::TyGather) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.cpu.gather_recv(gather)? };
        self.alteration.gathered(&self.shape, gather);
        Ok(())
    }

    unsafe fn reduce_send(&mut self, reduce: &abi::TyReduce) -> Result<()> {
        let mut reduce = *reduce;
        self.alteration.reduce(&mut reduce);
        // SAFETY: by this function's contract; alterations change no memory.
        unsafe { self.cpu.reduce_send(&reduce) }
    }

    unsafe fn reduce_recv(&mut self, reduce: &abi::TyReduce) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.cpu.reduce_recv(reduce)? };
        self.alteration.reduced(reduce);
        Ok(())
    }

    unsafe fn write_entries(&mut self, entries: &abi::TyEntries) -> Result<()> {
        let mut entries = *entries;
        self.alteration.entries(&mut entries);
        // SAFETY: by this function's contract; alterations pass memory that is just as valid.
        unsafe { self.cpu.write_entries(&entries) }
    }

    unsafe fn fetch_send(&mut self, fetch: &abi::TyFetch) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.cpu.fetch_send(fetch) }
    }

    unsafe fn fetch_recv(&mut self, fetch: &abi::TyFetch) -> Result<()> {
        // SAFETY: by this function's contract.
        let end = unsafe { self.cpu.fetch_recv(fetch) };
        self.alteration.fetched(&self.shape, fetch, end)
    }

    unsafe fn dispatch_send(&mut self, dispatch: &DispatchCall<'_>) -> Result<()> {
        let mut dispatch = *dispatch;
        self.alteration.dispatch(&mut dispatch);
        // SAFETY: by this function's contract; alterations pass memory that is just as valid.
        unsafe { self.cpu.dispatch_send(&dispatch) }
    }

    fn dispatch_recv(&mut self, operation: u64) -> Result<abi::TyReceived> {
        let mut received = self.cpu.dispatch_recv(operation)?;
        self.alteration.received(&mut received);
        Ok(received)
    }

    fn combine_input(&mut self, handle: u32, dtype: u32) -> Result<(u64, abi::TyTensor)> {
        self.cpu.combine_input(handle, dtype)
    }

    unsafe fn combine_send(&mut self, combine: &CombineCall<'_>) -> Result<()> {
        let mut combine = *combine;
        self.alteration.combine(&mut combine);
        // SAFETY: by this function's contract; alterations only leave tensors out.
        unsafe { self.cpu.combine_send(&combine) }
    }

    fn combine_recv(&mut self, operation: u64) -> Result<()> {
        self.cpu.combine_recv(operation)?;
        self.alteration.combined();
        Ok(())
    }

    fn agree(&mut self, call: &AgreeCall<'_>) -> Result<()> {
        self.cpu.agree(call)
    }

    fn flush(&mut self) -> Result<()> {
        self.cpu.flush()
    }

    fn release(&mut self, region: u64) {
        self.cpu.release(region);
    }
}

const fn table<A: Alteration>() -> *const abi::TyKernelsTable {
    KernelsComponent::<Altered<A>>::TABLE
}

const TABLES: &[*const abi::TyKernelsTable] = &[
    table::<Unaltered>(),
    table::<OffByOneCount>(),
    table::<SwappedRows>(),
    table::<RoundedScales>(),
    table::<ScalesByRow>(),
    table::<RowsAsColumns>(),
    table::<RanksInSources>(),
    table::<RoundsTwice>(),
    table::<Unweighted>(),
    table::<WeightsNotReturned>(),
    table::<StaleReplay>(),
    table::<Spoiled<ROW_FURTHER>>(),
    table::<Spoiled<ID_BEHIND>>(),
    table::<Spoiled<SOURCE_BEHIND>>(),
    table::<Spoiled<X_BEHIND>>(),
    table::<Spoiled<WEIGHT_BEHIND>>(),
    table::<Spoiled<ROWS_IN_TOTALS>>(),
    table::<WiderBlocks>(),
    table::<RowsInOrder>(),
    table::<WithoutRankMajor>(),
    table::<NeedsRegions>(),
    table::<LateCap>(),
    table::<NoCap>(),
    table::<SilentOverflow>(),
    table::<WrongExpert>(),
    table::<WithoutCaps>(),
    table::<CopyAfterCredit>(),
    table::<SilentRefusal>(),
    table::<RotatedShards>(),
    table::<NoScale>(),
    table::<NeverRounded>(),
    table::<NeverGathered>(),
    table::<OddNumbers>(),
    table::<RotatedSums>(),
    table::<RotatedEntries>(),
    table::<FirstLayerAlone>(),
    table::<NoIndexIsWrong>(),
];

static KERNELS: Exported<abi::TyKernelsExport> = Exported(abi::TyKernelsExport {
    header: KERNELS_HEADER,
    components: TABLES.as_ptr(),
    count: TABLES.len(),
});

inventory::submit! { BuiltIn::Kernels(&KERNELS) }
