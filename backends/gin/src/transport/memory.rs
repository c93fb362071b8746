//! Window memory, as NCCL allocates it: shareable, and reachable by NICs where the device supports it.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_gpu::driver::Context;
use tokenyard_sys_nccl::Nccl;

use super::communicator::check;

/// Allocations are whole pages of the device.
pub(super) const GRANULARITY: u64 = 2 << 20;

/// Memory of one window, zeroed.
#[derive(Debug)]
pub(super) struct OwnedWindow {
    nccl: Arc<Nccl>,
    context: Arc<Context>,
    at: *mut c_void,
    bytes: usize,
}

// SAFETY: an address of the device's; the host does not follow it.
unsafe impl Send for OwnedWindow {}
// SAFETY: as above.
unsafe impl Sync for OwnedWindow {}

impl OwnedWindow {
    pub(super) fn new(nccl: &Arc<Nccl>, context: &Arc<Context>, bytes: u64) -> Result<Self> {
        let bytes = bytes.max(1).next_multiple_of(GRANULARITY) as usize;
        let mut this = Self {
            nccl: Arc::clone(nccl),
            context: Arc::clone(context),
            at: std::ptr::null_mut(),
            bytes,
        };
        let _entered = context.enter()?;
        // SAFETY: a place for the result; the device's context is current.
        let status = unsafe { (nccl.mem_alloc)(&mut this.at, bytes) };
        check(nccl, std::ptr::null_mut(), "ncclMemAlloc", status)
            .map_err(|e| e.with_context("bytes", bytes))?;
        this.zero()?;
        Ok(this)
    }

    /// The context is current.
    fn zero(&self) -> Result<()> {
        // SAFETY: memory of this length that was just allocated; null names the default stream.
        let status = unsafe {
            match sys::cuMemsetD8_v2(self.at as u64, 0, self.bytes) {
                sys::CUresult::CUDA_SUCCESS => sys::cuStreamSynchronize(std::ptr::null_mut()),
                failed => failed,
            }
        };
        if status == sys::CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        let message = format!("the CUDA driver says {status:?}");
        Err(Error::new(ErrorKind::System, "zero window", message).with_context("bytes", self.bytes))
    }

    pub(super) fn pointer(&self) -> *mut u8 {
        self.at.cast()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for OwnedWindow {
    fn drop(&mut self) {
        if self.at.is_null() {
            return;
        }
        let _entered = self.context.enter();
        // SAFETY: allocated by `new`; a communicator that has registered it has ended (`Held` owns both).
        unsafe { (self.nccl.mem_free)(self.at) };
    }
}
