//! Addresses that the kernel has resolved.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::ffi::AhAttr;
use crate::library::CallError;
use crate::memory::Pd;

/// A route for which the kernel has found the next hop.
#[derive(Debug)]
pub struct AddressHandle {
    raw: NonNull<c_void>,
    pd: Arc<Pd>,
}

// SAFETY: only `drop` changes it.
unsafe impl Send for AddressHandle {}
// SAFETY: as above.
unsafe impl Sync for AddressHandle {}

impl AddressHandle {
    /// Resolves a route. On RoCE this may wait for the answer of a neighbour.
    ///
    /// # Errors
    /// The library's error; `EHOSTUNREACH` or `ETIMEDOUT` where no neighbour answers.
    pub fn new(pd: &Arc<Pd>, route: &AhAttr) -> Result<Self, CallError> {
        const CALL: &str = "ibv_create_ah";
        let Some(create) = pd.context().library().create_ah else {
            let source = std::io::Error::from_raw_os_error(libc::EOPNOTSUPP);
            return Err(CallError { call: CALL, source });
        };
        let mut route = *route;
        // SAFETY: a live domain; `route` is valid for the call.
        let raw = unsafe { create(pd.raw(), &mut route) };
        let raw = NonNull::new(raw).ok_or_else(|| CallError::last(CALL))?;
        Ok(Self { raw, pd: Arc::clone(pd) })
    }

    /// The handle of libibverbs, which lives as long as this.
    pub fn raw(&self) -> *mut c_void {
        self.raw.as_ptr()
    }
}

impl Drop for AddressHandle {
    fn drop(&mut self) {
        if let Some(destroy) = self.pd.context().library().destroy_ah {
            // SAFETY: made by the library, destroyed once.
            unsafe { destroy(self.raw()) };
        }
    }
}
