//! Structures, constants and function types of `infiniband/verbs.h` (rdma-core 44), reduced to the
//! used parts. Names are those of the header without the prefix `ibv_`; `tests/layout.rs` compares
//! sizes, offsets and values with the header.
//!
//! Enumerations that the library writes are plain integers here: a newer library may have values
//! that are not in this file.
//!
//! This file has the objects; `device` has devices and ports, `queue_pair` the creation of queues,
//! `work` requests and completions.

mod device;
mod queue_pair;
mod work;

use std::ffi::{c_int, c_void};
use std::marker::{PhantomData, PhantomPinned};

pub use device::*;
pub use queue_pair::*;
pub use work::*;

/// An opaque type: only the library makes and reads it.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug)]
        pub struct $name {
            _data: [u8; 0],
            _pin: PhantomData<(*mut u8, PhantomPinned)>,
        }
    )*};
}

opaque! {
    /// A device of the list.
    Device,
    /// A completion channel; never made here.
    CompChannel,
}

/// The local device may write.
pub const ACCESS_LOCAL_WRITE: c_int = 1;
/// Peers may write.
pub const ACCESS_REMOTE_WRITE: c_int = 1 << 1;
/// Peers may read.
pub const ACCESS_REMOTE_READ: c_int = 1 << 2;
/// Peers may add.
pub const ACCESS_REMOTE_ATOMIC: c_int = 1 << 3;

/// The public part of a protection domain.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RawPd {
    pub context: *mut RawContext,
    pub handle: u32,
}

/// A memory region.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RawMr {
    pub context: *mut RawContext,
    pub pd: *mut RawPd,
    pub addr: *mut c_void,
    pub length: usize,
    pub handle: u32,
    pub lkey: u32,
    pub rkey: u32,
}

/// The first field of a completion queue; the rest is the library's.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RawCq {
    pub context: *mut RawContext,
}

/// The first field of a shared receive queue; the rest is the library's.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RawSrq {
    pub context: *mut RawContext,
}

/// The first fields of a queue pair; the rest is the library's.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RawQp {
    pub context: *mut RawContext,
    pub qp_context: *mut c_void,
    pub pd: *mut RawPd,
    pub send_cq: *mut RawCq,
    pub recv_cq: *mut RawCq,
    pub srq: *mut RawSrq,
    pub handle: u32,
    pub qp_num: u32,
}

/// An unused slot of [`ContextOps`].
type Unused = *const c_void;

/// The provider's own functions; the names that start with `_` are never called here.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct ContextOps {
    _before_poll: [Unused; 11],
    pub poll_cq: Option<unsafe extern "C" fn(*mut RawCq, c_int, *mut Wc) -> c_int>,
    _before_srq: [Unused; 8],
    pub post_srq_recv:
        Option<unsafe extern "C" fn(*mut RawSrq, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _before_send: [Unused; 4],
    pub post_send: Option<unsafe extern "C" fn(*mut RawQp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    _after_send: [Unused; 6],
}

/// The first fields of an open device; the rest is the library's.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RawContext {
    pub device: *mut Device,
    pub ops: ContextOps,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
}
