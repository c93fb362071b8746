//! The library file and its functions.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use tokenyard_sys_load::{LoadError, functions};

use crate::ffi::{
    AhAttr, AsyncEvent, CompChannel, Device, DeviceAttr, GidEntry, PortAttr, QpAttr, QpInitAttr,
    RawContext, RawCq, RawMr, RawPd, RawQp, RawSrq, SrqInitAttr,
};

/// The name that every version of rdma-core since 2006 installs.
const FILE: &str = "libibverbs.so.1";

/// A call that the library or the kernel refused.
#[derive(Debug, thiserror::Error)]
#[error("{call}: {source}")]
pub struct CallError {
    /// Name of the call.
    pub call: &'static str,
    /// The errno that it returned.
    pub source: std::io::Error,
}

impl CallError {
    pub(crate) fn last(call: &'static str) -> Self {
        Self { call, source: std::io::Error::last_os_error() }
    }

    /// Checks the status of calls that return an errno. Some old calls return -1 and set errno
    /// instead.
    pub(crate) fn check(call: &'static str, status: c_int) -> Result<(), Self> {
        match status {
            0 => Ok(()),
            -1 => Err(Self::last(call)),
            errno => Err(Self { call, source: std::io::Error::from_raw_os_error(errno.abs()) }),
        }
    }
}

functions! {
    /// The functions of libibverbs, found once and never unloaded.
    pub struct Library {}
    expected "rdma-core 32 or newer";
    pub needed {
        get_device_list: "ibv_get_device_list" fn(*mut c_int) -> *mut *mut Device;
        free_device_list: "ibv_free_device_list" fn(*mut *mut Device);
        get_device_name: "ibv_get_device_name" fn(*mut Device) -> *const c_char;
        open_device: "ibv_open_device" fn(*mut Device) -> *mut RawContext;
        close_device: "ibv_close_device" fn(*mut RawContext) -> c_int;
        query_device: "ibv_query_device" fn(*mut RawContext, *mut DeviceAttr) -> c_int;
        query_port: "ibv_query_port" fn(*mut RawContext, u8, *mut PortAttr) -> c_int;
        query_gid_table: "_ibv_query_gid_table"
            fn(*mut RawContext, *mut GidEntry, usize, u32, usize) -> isize;
        get_async_event: "ibv_get_async_event" fn(*mut RawContext, *mut AsyncEvent) -> c_int;
        ack_async_event: "ibv_ack_async_event" fn(*mut AsyncEvent);
        event_type_str: "ibv_event_type_str" fn(c_int) -> *const c_char;
        wc_status_str: "ibv_wc_status_str" fn(c_int) -> *const c_char;
        alloc_pd: "ibv_alloc_pd" fn(*mut RawContext) -> *mut RawPd;
        dealloc_pd: "ibv_dealloc_pd" fn(*mut RawPd) -> c_int;
        reg_mr: "ibv_reg_mr" fn(*mut RawPd, *mut c_void, usize, c_int) -> *mut RawMr;
        dereg_mr: "ibv_dereg_mr" fn(*mut RawMr) -> c_int;
        create_cq: "ibv_create_cq"
            fn(*mut RawContext, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut RawCq;
        destroy_cq: "ibv_destroy_cq" fn(*mut RawCq) -> c_int;
        create_srq: "ibv_create_srq" fn(*mut RawPd, *mut SrqInitAttr) -> *mut RawSrq;
        destroy_srq: "ibv_destroy_srq" fn(*mut RawSrq) -> c_int;
        create_qp: "ibv_create_qp" fn(*mut RawPd, *mut QpInitAttr) -> *mut RawQp;
        modify_qp: "ibv_modify_qp" fn(*mut RawQp, *mut QpAttr, c_int) -> c_int;
        destroy_qp: "ibv_destroy_qp" fn(*mut RawQp) -> c_int;
    }
    optional {
        reg_dmabuf_mr: "ibv_reg_dmabuf_mr"
            fn(*mut RawPd, u64, usize, u64, c_int, c_int) -> *mut RawMr;
        create_ah: "ibv_create_ah" fn(*mut RawPd, *mut AhAttr) -> *mut c_void;
        destroy_ah: "ibv_destroy_ah" fn(*mut c_void) -> c_int;
    }
}

/// The library of this process.
static LIBRARY: OnceLock<Result<&Library, LoadError>> = OnceLock::new();

impl Library {
    /// The library, opened by the first call in this process.
    ///
    /// # Errors
    /// It is absent or too old; the result stays the same for the life of the process.
    pub fn get() -> Result<&'static Self, LoadError> {
        // SAFETY: libibverbs' initialisers set up only its own data. The types are those of verbs.h.
        let load = || unsafe { Self::load(FILE) }.map(|it| &*Box::leak(Box::new(it)));
        LIBRARY.get_or_init(load).clone()
    }

    /// Makes `library` the library of this process, for tests; returns whether every [`get`](Self::get) returns it.
    pub fn install(library: &'static Self) -> bool {
        LIBRARY
            .get_or_init(|| Ok(library))
            .as_ref()
            .is_ok_and(|found| std::ptr::eq(*found, library))
    }

    /// The library's text for the status of a completion.
    pub fn status_words(&self, status: c_int) -> &'static str {
        // SAFETY: it takes any number and returns a static text, or null.
        unsafe { words((self.wc_status_str)(status)) }
    }

    /// The library's text for the type of an asynchronous event.
    pub fn event_words(&self, event: c_int) -> &'static str {
        // SAFETY: as in `status_words`.
        unsafe { words((self.event_type_str)(event)) }
    }
}

/// # Safety
/// `text` is null or a static, terminated text.
unsafe fn words(text: *const c_char) -> &'static str {
    if text.is_null() {
        return "unknown";
    }
    // SAFETY: by this function's contract.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or("unknown")
}

// Signed and unsigned ints have the same representation in every C ABI of Linux; flags use both.
const _: () = assert!(size_of::<c_int>() == size_of::<c_uint>());
