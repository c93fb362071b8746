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

/// `hipDeviceProp_tR0600`, whose layout is the same in ROCm 6 and 7. Only the name of the architecture is
/// read: HIP gives everything else as attributes.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct DeviceProp {
    bytes: [u8; Self::BYTES],
}

impl DeviceProp {
    /// Bytes of the structure.
    pub const BYTES: usize = 1472;
    /// The place of `gcnArchName` in it.
    pub const ARCHITECTURE_AT: usize = 1160;
    /// Bytes of `gcnArchName`.
    pub const ARCHITECTURE_BYTES: usize = 256;

    /// Room for HIP to fill.
    pub fn zeroed() -> Self {
        Self { bytes: [0; Self::BYTES] }
    }

    /// `gcnArchName`, such as `gfx942:sramecc+:xnack-`.
    pub fn architecture(&self) -> String {
        let name = &self.bytes[Self::ARCHITECTURE_AT..][..Self::ARCHITECTURE_BYTES];
        let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
        String::from_utf8_lossy(&name[..end]).into_owned()
    }
}

impl std::fmt::Debug for DeviceProp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeviceProp").field("architecture", &self.architecture()).finish()
    }
}
