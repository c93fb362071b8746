//! An open kernel set and its calls. `levels`: operations over two levels · `tools`: its memory, streams and graphs
//! for tools · `needs`, `counters`: checks of its needs, and of its counters for reports · `blank`: results
//! before a call · `loaded`: the C form of calls, for a set whose calls go through its table.

mod blank;
mod counters;
mod levels;
mod loaded;
mod needs;
mod tools;

#[cfg(test)]
pub(crate) use blank::NO_OUTPUT;
pub use blank::NO_TENSOR;

use std::ffi::c_void;

use super::registry::KernelsRef;
use super::transport::{check_window, missing_slot};
use super::{attended, blank_error, check, config_as_ty, optional, services};
use crate::abi;
use crate::config::ComponentTable;
use crate::kernels::{
    Copies, KernelCall, KernelNeeds, KernelShape, Limits, NO_KERNEL_NEEDS, Trace,
};
use crate::transport::{MemoryNeeds, NO_WINDOW, Window};
use crate::{Error, ErrorKind, Result};
use blank::{NO_COUNTERS, NO_RING, no_output};

/// The kind of these components, in words.
const KIND: &str = "kernel set";

impl KernelsRef {
    /// Checks whether the kernel set can run here; returns the kinds of memory that it works on.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn probe(&self, config: &ComponentTable) -> Result<u32> {
        let probe = self.table.probe.ok_or_else(|| missing_slot(self.name(), "probe"))?;
        let mut kinds = 0;
        let mut error = blank_error();
        // SAFETY: a judged table; every structure belongs to this side and is valid for the call.
        let status = attended(KIND, self.name(), "probe", || unsafe {
            probe(services(), &config_as_ty(config), &mut kinds, &mut error)
        });
        check("probe", status, &error)
            .map_err(|e| config.locate(e).with_context("component", self.name()))?;
        Ok(kinds)
    }

    /// Opens an instance.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn open(&self, config: &ComponentTable, shape: &KernelShape) -> Result<OpenKernels> {
        let (Some(open), Some(close)) = (self.table.open, self.table.close) else {
            return Err(missing_slot(self.name(), "open"));
        };
        let mut instance = std::ptr::null_mut();
        let mut error = blank_error();
        // SAFETY: a judged table; every structure belongs to this side and is valid for the call.
        let status = attended(KIND, self.name(), "open", || unsafe {
            open(services(), &config_as_ty(config), shape, &mut instance, &mut error)
        });
        check("open", status, &error)
            .map_err(|e| config.locate(e).with_context("component", self.name()))?;
        Ok(OpenKernels { component: *self, instance, close, levels: None })
    }
}

/// An open kernel set. One thread at a time.
#[derive(Debug)]
pub struct OpenKernels {
    component: KernelsRef,
    instance: *mut c_void,
    close: unsafe extern "C" fn(*mut c_void),
    /// Where operations are two exchanges.
    levels: Option<levels::TwoLevels>,
}

// SAFETY: the ABI allows an instance to be used from any thread, one at a time; `OpenKernels` has no
// `&self` call that reaches the instance.
unsafe impl Send for OpenKernels {}

impl OpenKernels {
    /// The component's name.
    pub(crate) fn name(&self) -> &'static str {
        self.component.name()
    }

    fn call(
        &mut self,
        slot: &'static str,
        call: impl FnOnce(&abi::TyKernelsTable, *mut c_void, *mut abi::TyError) -> Option<i32>,
    ) -> Result<()> {
        let mut error = blank_error();
        let status = call(self.component.table, self.instance, &mut error)
            .ok_or_else(|| missing_slot(self.component.name(), slot))?;
        check(slot, status, &error).map_err(|e| e.with_context("component", self.name()))
    }

    /// As [`call`](Self::call), of a slot of a bring-up.
    fn cold(
        &mut self,
        slot: &'static str,
        call: impl FnOnce(&abi::TyKernelsTable, *mut c_void, *mut abi::TyError) -> Option<i32>,
    ) -> Result<()> {
        attended(KIND, self.name(), slot, || self.call(slot, call))
    }

    /// Makes a call: as it is where the kernel set is in this image, else in the C form.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// As the method of [`KernelSet`](crate::kernels::KernelSet).
    unsafe fn make(&mut self, call: KernelCall<'_>) -> Result<()> {
        match self.component.typed {
            // SAFETY: an open instance of the same component; the rest by this function's contract.
            Some(typed) => unsafe { typed(self.instance, call) }
                .map_err(|error| error.with_context("component", self.name())),
            // SAFETY: by this function's contract.
            None => unsafe { loaded::make_loaded(self, call) },
        }
    }

    /// As [`make`](Self::make), of a call of a bring-up, without memory of the caller.
    fn attend(&mut self, call: KernelCall<'_>) -> Result<()> {
        // SAFETY: such a call has no contract beyond this host's order of calls.
        attended(KIND, self.name(), call.name(), || unsafe { self.make(call) })
    }

    /// The resources that the kernel set will use, within `limits`.
    ///
    /// # Errors
    /// Errors of the component, or needs beyond the limits.
    pub fn needs(&mut self, limits: &Limits) -> Result<KernelNeeds> {
        let mut needs = NO_KERNEL_NEEDS;
        // SAFETY: as in `allocate`.
        self.cold("needs", |t, i, e| unsafe { t.needs.map(|f| f(i, limits, &mut needs, e)) })?;
        needs::check(self, limits, &needs)?;
        Ok(needs)
    }

    /// Allocates the memory of a window.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn allocate(&mut self, id: u32, bytes: u64, needs: &MemoryNeeds) -> Result<Window> {
        let mut window = Window { id, bytes, ..NO_WINDOW };
        // SAFETY: an open instance of a judged table; the structures are valid for the call.
        self.cold("allocate", |t, i, e| unsafe {
            t.allocate.map(|f| f(i, needs, &mut window, e))
        })?;
        check_window(self.name(), &window, id, bytes)?;
        Ok(window)
    }

    /// Fixes sizes, offsets and buffers.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// All memory that the plan points to stays valid until `self` is dropped.
    pub unsafe fn plan(&mut self, plan: &abi::TyPlan) -> Result<()> {
        // SAFETY: as in `allocate`, and by this function's contract.
        self.cold("plan", |t, i, e| unsafe { t.plan.map(|f| f(i, plan, e)) })
    }

    /// Ends a dispatch.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn dispatch_recv(&mut self, operation: u64) -> Result<abi::TyReceived> {
        let mut output = no_output(operation);
        // SAFETY: a call without memory of the caller.
        unsafe { self.make(KernelCall::DispatchRecv(&mut output))? };
        Ok(output.received)
    }

    /// The place of the output of a dispatch that was sent and not received; `None` where it is not fixed.
    ///
    /// # Errors
    /// Errors of the component.
    pub(crate) fn dispatch_output(&mut self, operation: u64) -> Result<Option<abi::TyReceived>> {
        let mut output = no_output(operation);
        // SAFETY: as in `dispatch_recv`.
        optional(unsafe { self.make(KernelCall::DispatchOutput(&mut output)) })?;
        Ok((!output.received.x.data.is_null()).then_some(output.received))
    }

    /// Gives an arena region for expert outputs.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn combine_input(&mut self, handle: u32, dtype: u32) -> Result<(u64, abi::TyTensor)> {
        let size = size_of::<abi::TyCombineInput>();
        let mut input = abi::TyCombineInput { size, handle, dtype, region: 0, tensor: NO_TENSOR };
        // SAFETY: as in `dispatch_recv`.
        unsafe { self.make(KernelCall::CombineInput(&mut input))? };
        Ok((input.region, input.tensor))
    }

    /// Ends a combine.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn combine_recv(&mut self, operation: u64) -> Result<()> {
        let mut end = abi::TyCombineEnd { size: size_of::<abi::TyCombineEnd>(), operation };
        // SAFETY: as in `dispatch_recv`.
        unsafe { self.make(KernelCall::CombineRecv(&mut end)) }
    }

    /// Waits until all commands that it posted are done.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn flush(&mut self) -> Result<()> {
        // SAFETY: as in `allocate`.
        self.call("flush", |t, i, e| unsafe { t.flush.map(|f| f(i, e)) })
    }

    /// Every region, released before this call or after it, becomes free only once a stream has passed
    /// the work that is queued on it now.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// A stream of the set's device.
    pub(crate) unsafe fn release_after(&mut self, stream: *mut c_void) -> Result<()> {
        let after = abi::TyReleaseAfter { size: size_of::<abi::TyReleaseAfter>(), stream };
        // SAFETY: by this function's contract.
        unsafe { self.make(KernelCall::ReleaseAfter(&after)) }
    }

    /// The ranks that operations leave out, by rank.
    ///
    /// # Errors
    /// Errors of the component.
    pub(crate) fn masks(&mut self, ranks: u32) -> Result<Vec<u8>> {
        let mut masks = vec![0; ranks as usize];
        let mut call = abi::TyMasks {
            size: size_of::<abi::TyMasks>(),
            masks: masks.as_mut_ptr(),
            count: ranks,
            reserved: 0,
        };
        // SAFETY: R bytes.
        unsafe { self.make(KernelCall::Masks(&mut call))? };
        Ok(masks)
    }

    /// Masks or unmasks a rank.
    ///
    /// # Errors
    /// Errors of the component.
    pub(crate) fn set_mask(&mut self, rank: u32, is_masked: bool) -> Result<()> {
        let is_masked = is_masked.into();
        let mask = abi::TyMask { size: size_of::<abi::TyMask>(), rank, is_masked };
        // SAFETY: as in `dispatch_recv`.
        unsafe { self.make(KernelCall::SetMask(&mask)) }
    }

    /// Frees an arena region.
    pub fn release(&mut self, region: u64) {
        if let Some(release) = self.component.table.release {
            // SAFETY: as in `allocate`.
            unsafe { release(self.instance, region) }
        }
    }

    /// The ring of kernels that post through the host on a level; nothing where they do not.
    ///
    /// # Errors
    /// Errors of the component; an invalid ring.
    pub(crate) fn gpu_ring(&mut self, level: u64) -> Result<Option<abi::TyGpuRing>> {
        let mut ring = abi::TyGpuRing { level, ..NO_RING };
        optional(self.attend(KernelCall::GpuRing(&mut ring)))?;
        if ring.commands.is_null() {
            return Ok(None);
        }
        let there = !ring.status.is_null() && (ring.signals == 0 || !ring.totals.is_null());
        if there && ring.capacity.is_power_of_two() && ring.level == level {
            return Ok(Some(ring));
        }
        let message = format!(
            "found a ring of {} slots on level {}, status at {:p}, {} totals at {:p}; expected a power \
             of two, level {level}, and nothing at null",
            ring.capacity, ring.level, ring.status, ring.signals, ring.totals
        );
        Err(Error::new(ErrorKind::Plugin, "gpu_ring", message)
            .with_context("component", self.name())
            .with_fix("use a kernel set that was made for this version"))
    }

    /// Writes the rows of each local expert of an operation.
    ///
    /// # Errors
    /// Errors of the component.
    pub(crate) fn expert_counts(&mut self, operation: u64, counts: &mut [u32]) -> Result<()> {
        let mut call = abi::TyExpertCounts {
            size: size_of::<abi::TyExpertCounts>(),
            operation,
            counts: counts.as_mut_ptr(),
            count: counts.len() as u32,
            reserved: 0,
        };
        // SAFETY: memory of this length.
        unsafe { self.make(KernelCall::ExpertCounts(&mut call)) }
    }

    /// Copies arrays of an output that was received.
    ///
    /// # Errors
    /// A component without the slot; errors of the component.
    ///
    /// # Safety
    /// As [`KernelSet::copy_out`](crate::kernels::KernelSet::copy_out).
    pub(crate) unsafe fn copy_out(&mut self, copies: &Copies<'_>) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.make(KernelCall::CopyOut(copies)) }
    }

    /// Counts a routing.
    ///
    /// # Errors
    /// A component without the slot; errors of the component.
    ///
    /// # Safety
    /// As [`KernelSet::count_routing`](crate::kernels::KernelSet::count_routing).
    pub(crate) unsafe fn count_routing(&mut self, counts: &abi::TyRoutingCounts) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.make(KernelCall::CountRouting(counts)) }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// As [`KernelSet::send`](crate::kernels::KernelSet::send).
    pub(crate) unsafe fn send(&mut self, message: &abi::TyMessage) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.make(KernelCall::Send(message)) }
    }

    /// Takes the next message of a rank.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// As [`KernelSet::recv`](crate::kernels::KernelSet::recv).
    pub(crate) unsafe fn recv(&mut self, message: &abi::TyMessage) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.make(KernelCall::Recv(message)) }
    }

    /// Sends the shards of a gather.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// As [`KernelSet::gather_send`](crate::kernels::KernelSet::gather_send).
    pub(crate) unsafe fn gather_send(&mut self, gather: &abi::TyGather) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.make(KernelCall::GatherSend(gather)) }
    }

    /// Ends a gather.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// As [`KernelSet::gather_recv`](crate::kernels::KernelSet::gather_recv).
    pub(crate) unsafe fn gather_recv(&mut self, gather: &mut abi::TyGather) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.make(KernelCall::GatherRecv(gather)) }
    }

    /// Sends the parts of a reduce-scatter.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// As [`KernelSet::reduce_send`](crate::kernels::KernelSet::reduce_send).
    pub(crate) unsafe fn reduce_send(&mut self, reduce: &abi::TyReduce) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.make(KernelCall::ReduceSend(reduce)) }
    }

    /// Ends a reduce-scatter.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// As [`KernelSet::reduce_recv`](crate::kernels::KernelSet::reduce_recv).
    pub(crate) unsafe fn reduce_recv(&mut self, reduce: &mut abi::TyReduce) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.make(KernelCall::ReduceRecv(reduce)) }
    }

    /// Writes this rank's entries of a layer.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// As [`KernelSet::write_entries`](crate::kernels::KernelSet::write_entries).
    pub(crate) unsafe fn write_entries(&mut self, entries: &abi::TyEntries) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.make(KernelCall::WriteEntries(entries)) }
    }

    /// Starts a fetch.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// As [`KernelSet::fetch_send`](crate::kernels::KernelSet::fetch_send).
    pub(crate) unsafe fn fetch_send(&mut self, fetch: &abi::TyFetch) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.make(KernelCall::FetchSend(fetch)) }
    }

    /// Ends a fetch.
    ///
    /// # Errors
    /// Errors of the component.
    ///
    /// # Safety
    /// As [`KernelSet::fetch_recv`](crate::kernels::KernelSet::fetch_recv).
    pub(crate) unsafe fn fetch_recv(&mut self, fetch: &mut abi::TyFetch) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { self.make(KernelCall::FetchRecv(fetch)) }
    }

    /// Its counters for reports; nothing where it has none.
    ///
    /// # Errors
    /// Errors of the component; counters that do not fit a world of `ranks`.
    pub(crate) fn counters(&mut self, ranks: u32) -> Result<Option<abi::TyCounters>> {
        let mut counters = NO_COUNTERS;
        optional(self.attend(KernelCall::Counters(&mut counters)))?;
        if counters.peers.is_null() {
            return Ok(None);
        }
        counters::check(&counters, ranks)
            .map_err(|error| error.with_context("component", self.name()))?;
        Ok(Some(counters))
    }

    /// The times of the steps of an operation that has ended.
    ///
    /// # Errors
    /// A component without the slot; errors of the component.
    pub(crate) fn trace(&mut self, operation: u64) -> Result<Trace> {
        let (size, trace) = (
            size_of::<abi::TyOperationTrace>(),
            Trace { size: size_of::<Trace>(), ..Trace::default() },
        );
        let mut of = abi::TyOperationTrace { size, operation, trace };
        // SAFETY: as in `dispatch_recv`.
        unsafe { self.make(KernelCall::Trace(&mut of))? };
        Ok(of.trace)
    }
}

impl Drop for OpenKernels {
    fn drop(&mut self) {
        // SAFETY: the instance is open and no code can use it after this.
        attended(KIND, self.name(), "close", || unsafe { (self.close)(self.instance) });
    }
}
