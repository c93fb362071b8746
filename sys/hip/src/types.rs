//! Structures that HIP takes by pointer or by value.

use std::ffi::{c_int, c_uint, c_void};

/// `hipUUID`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uuid {
    /// The id, the same in every process.
    pub bytes: [u8; 16],
}

/// `hipMemLocation`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Location {
    /// [`MEM_LOCATION_DEVICE`](crate::consts::MEM_LOCATION_DEVICE).
    pub kind: c_uint,
    /// The device's ordinal.
    pub id: c_int,
}

/// The flags of `hipMemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AllocationFlags {
    /// 0.
    pub compression: u8,
    /// Whether NICs may register it.
    pub gpu_direct_rdma: u8,
    /// 0.
    pub usage: u16,
}

/// `hipMemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllocationProp {
    /// One of `MEM_ALLOCATION_*`.
    pub kind: c_uint,
    /// [`MEM_HANDLE_POSIX_FD`](crate::consts::MEM_HANDLE_POSIX_FD).
    pub handle_kind: c_uint,
    /// The location of the memory.
    pub location: Location,
    /// Null.
    pub win32: *mut c_void,
    /// Further properties.
    pub flags: AllocationFlags,
}

/// `hipMemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AccessDesc {
    /// The device that gets access.
    pub location: Location,
    /// [`MEM_ACCESS_READ_WRITE`](crate::consts::MEM_ACCESS_READ_WRITE).
    pub flags: c_uint,
}

/// `hipIpcMemHandle_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IpcHandle {
    /// The opaque bytes of the handle, which is for a whole allocation.
    pub reserved: [u8; 64],
}
