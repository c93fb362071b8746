//! Protection domains and memory regions.

use std::ffi::c_int;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::device::Context;
use crate::ffi::{RawMr, RawPd};
use crate::library::CallError;

/// What queue pairs and memory regions must share to work together.
#[derive(Debug)]
pub struct Pd {
    raw: NonNull<RawPd>,
    context: Arc<Context>,
}

// SAFETY: libibverbs locks what calls on one domain share.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    /// Makes one.
    ///
    /// # Errors
    /// What the library says.
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

    pub(crate) fn raw(&self) -> *mut RawPd {
        self.raw.as_ptr()
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: everything made in this domain holds it by an `Arc`, so nothing is left.
        unsafe { (self.context.library().dealloc_pd)(self.raw()) };
    }
}

/// A piece of the memory of another device.
#[derive(Clone, Copy, Debug)]
pub struct DmabufRange<'a> {
    /// The dmabuf.
    pub fd: BorrowedFd<'a>,
    /// Where in it the piece begins, in bytes.
    pub offset: u64,
    /// How long it is, in bytes.
    pub bytes: usize,
}

/// Memory that the device may touch. Its keys are never printed.
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
    /// What the library says; `ENOMEM` where the limit on locked memory is too low.
    ///
    /// # Safety
    /// The memory stays mapped while the region lives, and whoever uses it bears with the device
    /// writing it where `access` lets it.
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
    /// What the library says; `EOPNOTSUPP` where library, driver or device cannot.
    ///
    /// # Safety
    /// The memory behind the descriptor stays where it is while the region lives, and whoever uses it
    /// bears with the device writing it where `access` lets it.
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

    /// The key that this side's work requests name it by.
    pub fn lkey(&self) -> u32 {
        // SAFETY: the region lives.
        unsafe { self.raw.as_ref().lkey }
    }

    /// The key that peers name it by.
    pub fn rkey(&self) -> u32 {
        // SAFETY: the region lives.
        unsafe { self.raw.as_ref().rkey }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: made by the library, ended once. Peers' access ends here (INV-8).
        unsafe { (self.pd.context.library().dereg_mr)(self.raw.as_ptr()) };
    }
}
