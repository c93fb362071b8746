//! Completion queues and shared receive queues.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::device::Context;
use crate::ffi::{RawCq, RawSrq, RecvWr, SrqAttr, SrqInitAttr, Wc};
use crate::library::CallError;
use crate::memory::Pd;

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    raw: NonNull<RawCq>,
    context: Arc<Context>,
    poll: unsafe extern "C" fn(*mut RawCq, c_int, *mut Wc) -> c_int,
}

// SAFETY: libibverbs locks the data that calls on one queue share.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl Cq {
    /// Makes a completion queue for at least `entries` unpolled completions.
    ///
    /// # Errors
    /// The library's error.
    pub fn new(context: &Arc<Context>, entries: u32) -> Result<Arc<Self>, CallError> {
        const CALL: &str = "ibv_create_cq";
        let null = std::ptr::null_mut();
        let entries = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: an open device; no channel and the first vector, which always exists.
        let raw = unsafe {
            (context.library().create_cq)(context.raw(), entries, null, std::ptr::null_mut(), 0)
        };
        let raw = NonNull::new(raw).ok_or_else(|| CallError::last(CALL))?;
        // SAFETY: the provider filled its table when the device was opened, and does not change it.
        let poll = unsafe { (*context.raw()).ops.poll_cq };
        let Some(poll) = poll else { return Err(missing("poll_cq")) };
        Ok(Arc::new(Self { raw, context: Arc::clone(context), poll }))
    }

    /// Fills `completions` from the front and returns their number.
    ///
    /// # Errors
    /// The queue is broken.
    #[inline]
    pub fn poll(&self, completions: &mut [Wc]) -> Result<usize, CallError> {
        let room = completions.len() as c_int;
        // SAFETY: the queue lives; there is room for the stated number of completions.
        let found = unsafe { (self.poll)(self.raw(), room, completions.as_mut_ptr()) };
        usize::try_from(found).map_err(|_| CallError::last("ibv_poll_cq"))
    }

    /// Its device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn raw(&self) -> *mut RawCq {
        self.raw.as_ptr()
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold it by an `Arc`, so none is left.
        unsafe { (self.context.library().destroy_cq)(self.raw()) };
    }
}

/// Most receives of one [`Srq::post`].
pub const RECEIVE_BATCH: usize = 64;

/// Receives without memory, for writes with immediate data; shared by many queue pairs.
#[derive(Debug)]
pub struct Srq {
    raw: NonNull<RawSrq>,
    pd: Arc<Pd>,
    post: unsafe extern "C" fn(*mut RawSrq, *mut RecvWr, *mut *mut RecvWr) -> c_int,
}

// SAFETY: libibverbs locks the data that calls on one queue share.
unsafe impl Send for Srq {}
// SAFETY: as above.
unsafe impl Sync for Srq {}

impl Srq {
    /// Makes a shared receive queue with room for `receives`; none is posted.
    ///
    /// # Errors
    /// The library's error.
    pub fn new(pd: &Arc<Pd>, receives: u32) -> Result<Arc<Self>, CallError> {
        let mut attr = SrqInitAttr {
            srq_context: std::ptr::null_mut(),
            attr: SrqAttr { max_wr: receives, max_sge: 1, srq_limit: 0 },
        };
        let context = pd.context();
        // SAFETY: a live domain; `attr` is valid for the call.
        let raw = unsafe { (context.library().create_srq)(pd.raw(), &mut attr) };
        let raw = NonNull::new(raw).ok_or_else(|| CallError::last("ibv_create_srq"))?;
        // SAFETY: the provider filled its table when the device was opened, and does not change it.
        let post = unsafe { (*context.raw()).ops.post_srq_recv };
        let Some(post) = post else { return Err(missing("post_srq_recv")) };
        Ok(Arc::new(Self { raw, pd: Arc::clone(pd), post }))
    }

    /// Posts `count` receives, at most [`RECEIVE_BATCH`], with one call.
    ///
    /// # Errors
    /// There is no room for them.
    pub fn post(&self, count: usize) -> Result<(), CallError> {
        let blank = RecvWr {
            wr_id: 0,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
        };
        let mut list = [blank; RECEIVE_BATCH];
        let list = &mut list[..count.min(RECEIVE_BATCH)];
        let first = list.as_mut_ptr();
        for at in 1..list.len() {
            list[at - 1].next = first.wrapping_add(at);
        }
        if list.is_empty() {
            return Ok(());
        }
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue lives; the list is linked, ends with null, and is read only during the
        // call.
        let status = unsafe { (self.post)(self.raw(), first, &mut bad) };
        CallError::check("ibv_post_srq_recv", status)
    }

    pub(crate) fn raw(&self) -> *mut RawSrq {
        self.raw.as_ptr()
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // SAFETY: queue pairs hold it by an `Arc`, so none is left.
        unsafe { (self.pd.context().library().destroy_srq)(self.raw()) };
    }
}

pub(crate) fn missing(call: &'static str) -> CallError {
    CallError { call, source: std::io::Error::from_raw_os_error(libc::EOPNOTSUPP) }
}
