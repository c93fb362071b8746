//! Outputs that were received: counts for the host, and copies for its caller.

use super::OpenKernels;
use crate::kernels::Copies;
use crate::{Result, abi};

impl OpenKernels {
    /// Whether it gives the host counts of experts.
    pub fn has_expert_counts(&self) -> bool {
        self.component.table.expert_counts.is_some()
    }

    /// Writes the rows of each local expert of an operation.
    ///
    /// # Errors
    /// Errors of the component.
    pub fn expert_counts(&mut self, operation: u64, counts: &mut [u32]) -> Result<()> {
        let (at, count) = (counts.as_mut_ptr(), counts.len() as u32);
        // SAFETY: an open instance of a judged table; the structures are valid for the call.
        self.call("expert_counts", |t, i, e| unsafe {
            t.expert_counts.map(|f| f(i, operation, at, count, e))
        })
    }

    /// Copies arrays of an output that was received.
    ///
    /// # Errors
    /// A component without the slot; errors of the component.
    ///
    /// # Safety
    /// As [`KernelSet::copy_out`](crate::kernels::KernelSet::copy_out).
    pub unsafe fn copy_out(&mut self, copies: &Copies<'_>) -> Result<()> {
        let flags = if copies.stream.is_some() { abi::TY_COPIES_ON_STREAM } else { 0 };
        let call = abi::TyCopies {
            size: size_of::<abi::TyCopies>(),
            copies: copies.copies.as_ptr(),
            count: copies.copies.len() as u32,
            flags,
            totals: copies.totals,
            stream: copies.stream.unwrap_or(std::ptr::null_mut()),
        };
        // SAFETY: as in `expert_counts`, and by this function's contract.
        self.call("copy_out", |t, i, e| unsafe { t.copy_out.map(|f| f(i, &call, e)) })
    }
    /// Counts a routing.
    ///
    /// # Errors
    /// A component without the slot; errors of the component.
    ///
    /// # Safety
    /// As [`KernelSet::count_routing`](crate::kernels::KernelSet::count_routing).
    pub unsafe fn count_routing(&mut self, counts: &abi::TyRoutingCounts) -> Result<()> {
        // SAFETY: as in `expert_counts`, and by this function's contract.
        self.call("count_routing", |t, i, e| unsafe { t.count_routing.map(|f| f(i, counts, e)) })
    }
}
