//! Protection domains and memory regions.

use std::ffi::c_int;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::device::Context;
use crate::ffi::{RawMr, RawPd};
use crate::library::CallError;

/// A protection domain: queue pairs and memory regions of the same domain work together.
#[derive(Debug)]
pub struct Pd {
    raw: NonNull<RawPd>,
    context: Arc<Context>,
}

// SAFETY: libibverbs locks the data that calls on one domain share.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    /// Makes a protection domain.
    ///
    /// # Errors
    /// The library's error.
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, CallError> {
        // SAFETY: an open device.
        let raw = unsafe { (context.library().alloc_pd)(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| CallError::last("ibv_alloc_pd"))?;
        Ok(Arc::new(Self { raw, context: Arc::clone(context) }))
    }

    /// Its device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The domain of libibverbs, which lives as long as this.
    pub fn raw(&self) -> *mut RawPd {
        self.raw.as_ptr()
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: every object of this domain holds it by an `Arc`, so none is left.
        unsafe { (self.context.library().dealloc_pd)(self.raw()) };
    }
}

/// A piece of the memory of another device.
#[derive(Clone, Copy, Debug)]
pub struct DmabufRange<'a> {
    /// The dmabuf.
    pub fd: BorrowedFd<'a>,
    /// The start of the piece in the dmabuf, in bytes.
    pub offset: u64,
    /// The length of the piece, in bytes.
    pub bytes: usize,
}

/// A memory region, which the device may access. Its keys are never printed.
pub struct Mr {
    raw: NonNull<RawMr>,
    pd: Arc<Pd>,
}

// SAFETY: only `drop` changes it.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl std::fmt::Debug for Mr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mr").finish_non_exhaustive()
    }
}

impl Mr {
    /// Registers `bytes` bytes at `address` with the rights of the bits `ACCESS_*`.
    ///
    /// # Errors
    /// The library's error; `ENOMEM` where the limit on locked memory is too low.
    ///
    /// # Safety
    /// The memory stays mapped while the region lives, and its users tolerate writes of the device
    /// where `access` allows them.
    pub unsafe fn new(
        pd: &Arc<Pd>,
        address: *mut u8,
        bytes: usize,
        access: c_int,
    ) -> Result<Self, CallError> {
        // SAFETY: by this function's contract.
        let raw = unsafe { (pd.context.library().reg_mr)(pd.raw(), address.cast(), bytes, access) };
        Self::wrap(pd, raw, "ibv_reg_mr")
    }

    /// Registers a range of a dmabuf. Peers address it from `address` on.
    ///
    /// # Errors
    /// The library's error; `EOPNOTSUPP` where library, driver or device does not support it.
    ///
    /// # Safety
    /// The memory of the descriptor does not move while the region lives, and its users tolerate
    /// writes of the device where `access` allows them.
    pub unsafe fn of_dmabuf(
        pd: &Arc<Pd>,
        range: &DmabufRange<'_>,
        address: *mut u8,
        access: c_int,
    ) -> Result<Self, CallError> {
        const CALL: &str = "ibv_reg_dmabuf_mr";
        let Some(register) = pd.context.library().reg_dmabuf_mr else {
            let source = std::io::Error::from_raw_os_error(libc::EOPNOTSUPP);
            return Err(CallError { call: CALL, source });
        };
        let (fd, iova) = (range.fd.as_raw_fd(), address as u64);
        // SAFETY: by this function's contract; the descriptor is open.
        let raw = unsafe { register(pd.raw(), range.offset, range.bytes, iova, fd, access) };
        Self::wrap(pd, raw, CALL)
    }

    fn wrap(pd: &Arc<Pd>, raw: *mut RawMr, call: &'static str) -> Result<Self, CallError> {
        let raw = NonNull::new(raw).ok_or_else(|| CallError::last(call))?;
        Ok(Self { raw, pd: Arc::clone(pd) })
    }

    /// The key by which local work requests name the region.
    pub fn lkey(&self) -> u32 {
        // SAFETY: the region lives.
        unsafe { self.raw.as_ref().lkey }
    }

    /// The key by which peers name the region.
    pub fn rkey(&self) -> u32 {
        // SAFETY: the region lives.
        unsafe { self.raw.as_ref().rkey }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: made by the library, deregistered once. The access of peers ends here (INV-8).
        unsafe { (self.pd.context.library().dereg_mr)(self.raw.as_ptr()) };
    }
}
