//! An open kernel set: the calls of each operation. `needs`: checks its needs · `tools`: its memory,
//! streams and graphs for tools · `counters`: its counters for reports · `levels`: operations over two levels ·
//! `outputs`: copies and counts of outputs.

mod counters;
mod levels;
mod needs;
mod outputs;
mod tools;

use std::ffi::c_void;

use super::registry::KernelsRef;
use super::transport::{check_window, missing_slot};
use super::{attended, blank_error, check, config_as_ty, services};
use crate::abi;
use crate::config::ComponentTable;
use crate::kernels::KernelShape;
use crate::transport::{MemoryNeeds, NO_WINDOW, Window};
use crate::{Error, ErrorKind, Result};

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

/// An output without tensors.
const NO_OUTPUT: abi::TyReceived = abi::TyReceived {
    size: size_of::<abi::TyReceived>(),
    region: 0,
    tokens: 0,
    rows: 0,
    x: NO_TENSOR,
    scales: NO_TENSOR,
    ids: NO_TENSOR,
    weights: NO_TENSOR,
    source: NO_TENSOR,
    slots: NO_TENSOR,
    expert_counts: NO_TENSOR,
    expert_starts: NO_TENSOR,
    expert_ends: NO_TENSOR,
    source_counts: NO_TENSOR,
    source_ends: NO_TENSOR,
    ranges: NO_TENSOR,
    totals: NO_TENSOR,
    lost: NO_TENSOR,
};

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
    pub fn name(&self) -> &'static str {
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
        let mut received = NO_OUTPUT;
        // SAFETY: as in `allocate`.
        self.call("dispatch_recv", |t, i, e| unsafe {
            t.dispatch_recv.map(|f| f(i, operation, &mut received, e))
        })?;
        Ok(received)
    }

    /// The place of the output of a dispatch that was sent and not received; `None` where it is not fixed.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn dispatch_output(&mut self, operation: u64) -> Result<Option<abi::TyReceived>> {
        if self.component.table.dispatch_output.is_none() {
            return Ok(None);
        }
        let mut received = NO_OUTPUT;
        // SAFETY: as in `allocate`.
        self.call("dispatch_output", |t, i, e| unsafe {
            t.dispatch_output.map(|f| f(i, operation, &mut received, e))
        })?;
        Ok((!received.x.data.is_null()).then_some(received))
    }

    /// Gives an arena region for expert outputs.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn combine_input(&mut self, handle: u32, dtype: u32) -> Result<(u64, abi::TyTensor)> {
        let (mut region, mut tensor) = (0, NO_TENSOR);
        // SAFETY: as in `allocate`.
        self.call("combine_input", |t, i, e| unsafe {
            t.combine_input.map(|f| f(i, handle, dtype, &mut region, &mut tensor, e))
        })?;
        Ok((region, tensor))
    }

    /// Ends a combine.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn combine_recv(&mut self, operation: u64) -> Result<()> {
        // SAFETY: as in `allocate`.
        self.call("combine_recv", |t, i, e| unsafe { t.combine_recv.map(|f| f(i, operation, e)) })
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
    pub unsafe fn release_after(&mut self, stream: *mut c_void) -> Result<()> {
        // SAFETY: as in `allocate`, and by this function's contract.
        self.call("release_after", |t, i, e| unsafe { t.release_after.map(|f| f(i, stream, e)) })
    }

    /// The ranks that operations leave out, by rank.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn masks(&mut self, ranks: u32) -> Result<Vec<u8>> {
        let mut masks = vec![0; ranks as usize];
        self.call_masks(abi::TY_MASKS_READ, 0, masks.as_mut_ptr())?;
        Ok(masks)
    }

    /// Masks or unmasks a rank.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn set_mask(&mut self, rank: u32, is_masked: bool) -> Result<()> {
        let action = if is_masked { abi::TY_MASKS_SET } else { abi::TY_MASKS_CLEAR };
        self.call_masks(action, rank, std::ptr::null_mut())
    }

    fn call_masks(&mut self, action: u32, rank: u32, masks: *mut u8) -> Result<()> {
        let call = abi::TyMasks { size: size_of::<abi::TyMasks>(), action, rank, masks };
        // SAFETY: as in `allocate`; R bytes where masks are read.
        self.call("masks", |t, i, e| unsafe { t.masks.map(|f| f(i, &call, e)) })
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
    pub fn gpu_ring(&mut self, level: u64) -> Result<Option<abi::TyGpuRing>> {
        if self.component.table.gpu_ring.is_none() {
            return Ok(None);
        }
        let mut ring = abi::TyGpuRing {
            size: size_of::<abi::TyGpuRing>(),
            level,
            queue: 0,
            capacity: 0,
            commands: std::ptr::null_mut(),
            status: std::ptr::null_mut(),
            totals: std::ptr::null_mut(),
            signals: 0,
            reserved: 0,
        };
        // SAFETY: as in `allocate`.
        self.cold("gpu_ring", |t, i, e| unsafe { t.gpu_ring.map(|f| f(i, &mut ring, e)) })?;
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
}

impl Drop for OpenKernels {
    fn drop(&mut self) {
        // SAFETY: the instance is open and no code can use it after this.
        attended(KIND, self.name(), "close", || unsafe { (self.close)(self.instance) });
    }
}

/// An absent tensor.
pub const NO_TENSOR: abi::TyTensor = abi::TyTensor {
    data: std::ptr::null_mut(),
    dtype: 0,
    reserved: 0,
    shape: [0; 2],
    stride: [0; 2],
};
