//! The C form of calls, for a kernel set whose calls all go through its table.

use std::ptr::null_mut;

use super::{NO_OUTPUT, OpenKernels};
use crate::kernels::{Call, Copies};
use crate::{Error, ErrorKind, Result, abi};

/// Calls a slot of the table with an open instance.
macro_rules! cross {
    ($kernels:ident, $slot:ident($($argument:expr),*)) => {
        // SAFETY: an open instance of a judged table; the structures are valid for the call; the rest by the
        // contract of the function around.
        $kernels.call(stringify!($slot), |t, i, e| unsafe { t.$slot.map(|f| f(i, $($argument,)* e)) })
    };
}

const NO_RING: abi::TyGpuRing = abi::TyGpuRing {
    size: size_of::<abi::TyGpuRing>(),
    level: 0,
    queue: 0,
    capacity: 0,
    commands: null_mut(),
    status: null_mut(),
    totals: null_mut(),
    signals: 0,
    reserved: 0,
};

const NO_COUNTERS: abi::TyCounters = abi::TyCounters {
    size: size_of::<abi::TyCounters>(),
    ranks: 0,
    signals: 0,
    queue_depth: [0; 2],
    peers: std::ptr::null(),
    raised: std::ptr::null(),
};

impl OpenKernels {
    /// Makes a call through the table. A query whose slot is left out gives nothing.
    ///
    /// # Errors
    /// Errors of the component; a component without the slot.
    ///
    /// # Safety
    /// As the method of [`KernelSet`](crate::kernels::KernelSet).
    pub(super) unsafe fn make_loaded(&mut self, call: Call<'_>) -> Result<()> {
        let table = self.component.table;
        match call {
            Call::DispatchSend(call) => cross!(self, dispatch_send(&call.as_abi())),
            Call::CombineSend(call) => cross!(self, combine_send(&call.as_abi())),
            Call::Agree(call) => cross!(self, agree(&call.as_abi())),
            Call::CopyOut(copies) => cross!(self, copy_out(&copies_as_abi(copies))),
            Call::CountRouting(counts) => cross!(self, count_routing(counts)),
            Call::SetMask { rank, is_masked } => {
                let action = if is_masked { abi::TY_MASKS_SET } else { abi::TY_MASKS_CLEAR };
                cross!(self, masks(&masks_as_abi(action, rank, null_mut())))
            }
            Call::Masks(masks) => {
                cross!(self, masks(&masks_as_abi(abi::TY_MASKS_READ, 0, masks.as_mut_ptr())))
            }
            Call::ReleaseAfter(stream) => cross!(self, release_after(stream)),
            Call::DispatchRecv(operation, output) => {
                cross!(self, dispatch_recv(operation, output))
            }
            Call::CombineRecv(operation) => cross!(self, combine_recv(operation)),
            Call::DispatchOutput(operation, output) if table.dispatch_output.is_some() => {
                let received = output.insert(NO_OUTPUT);
                cross!(self, dispatch_output(operation, received))
            }
            Call::CombineInput { handle, dtype, region, tensor } => {
                cross!(self, combine_input(handle, dtype, region, tensor))
            }
            Call::ExpertCounts(..) if table.expert_counts.is_none() => {
                let text = "found a table without the slot; expected counts of experts";
                Err(Error::new(ErrorKind::Unsupported, "expert_counts", text)
                    .with_context("component", self.name()))
            }
            Call::ExpertCounts(operation, counts) => {
                let (at, count) = (counts.as_mut_ptr(), counts.len() as u32);
                cross!(self, expert_counts(operation, at, count))
            }
            Call::GpuRing(level, ring) if table.gpu_ring.is_some() => {
                let ring = ring.insert(abi::TyGpuRing { level, ..NO_RING });
                cross!(self, gpu_ring(ring))
            }
            Call::Counters(counters) if table.counters.is_some() => {
                let counters = counters.insert(NO_COUNTERS);
                cross!(self, counters(counters))
            }
            Call::Trace(operation, trace) => cross!(self, trace(operation, trace)),
            Call::DispatchOutput(..) | Call::GpuRing(..) | Call::Counters(_) => Ok(()),
        }
    }
}

fn copies_as_abi(copies: &Copies<'_>) -> abi::TyCopies {
    abi::TyCopies {
        size: size_of::<abi::TyCopies>(),
        copies: copies.copies.as_ptr(),
        count: copies.copies.len() as u32,
        flags: if copies.stream.is_some() { abi::TY_COPIES_ON_STREAM } else { 0 },
        totals: copies.totals,
        stream: copies.stream.unwrap_or(null_mut()),
    }
}

fn masks_as_abi(action: u32, rank: u32, masks: *mut u8) -> abi::TyMasks {
    abi::TyMasks { size: size_of::<abi::TyMasks>(), action, rank, masks }
}
