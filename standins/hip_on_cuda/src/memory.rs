//! Structures of shareable memory, as CUDA has them.

use std::ffi::{c_int, c_uint};

use cudarc::driver::sys;
use tokenyard_sys_hip::{AccessDesc, AllocationProp, Location, consts};

use crate::status::{Failed, INVALID_VALUE};

fn location(of: &Location) -> Result<sys::CUmemLocation, Failed> {
    if of.kind != consts::MEM_LOCATION_DEVICE {
        return Err(INVALID_VALUE);
    }
    Ok(sys::CUmemLocation {
        type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE,
        id: of.id as c_int,
    })
}

/// Memory that HIP calls uncached is CUDA's, where peers see stores anyway.
pub(crate) fn properties(of: &AllocationProp) -> Result<sys::CUmemAllocationProp, Failed> {
    let is_known =
        matches!(of.kind, consts::MEM_ALLOCATION_PINNED | consts::MEM_ALLOCATION_UNCACHED);
    if !is_known || of.handle_kind != consts::MEM_HANDLE_POSIX_FD || !of.win32.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: plain numbers, for which zero means "nothing special".
    let flags: sys::CUmemAllocationProp_st__bindgen_ty_1 = unsafe { std::mem::zeroed() };
    Ok(sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: POSIX_FD,
        location: location(&of.location)?,
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: flags,
    })
}

pub(crate) const POSIX_FD: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

pub(crate) fn access(of: &AccessDesc) -> Result<sys::CUmemAccessDesc, Failed> {
    if of.flags != consts::MEM_ACCESS_READ_WRITE {
        return Err(INVALID_VALUE);
    }
    Ok(sys::CUmemAccessDesc {
        location: location(&of.location)?,
        flags: sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    })
}

/// How a range of addresses is given to other devices.
pub(crate) fn range_handle(kind: c_uint) -> Result<sys::CUmemRangeHandleType, Failed> {
    match kind {
        consts::RANGE_HANDLE_DMABUF => {
            Ok(sys::CUmemRangeHandleType_enum::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD)
        }
        _ => Err(INVALID_VALUE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROPERTIES: AllocationProp = AllocationProp {
        kind: consts::MEM_ALLOCATION_UNCACHED,
        handle_kind: consts::MEM_HANDLE_POSIX_FD,
        location: Location { kind: consts::MEM_LOCATION_DEVICE, id: 3 },
        win32: std::ptr::null_mut(),
        flags: tokenyard_sys_hip::AllocationFlags { compression: 0, gpu_direct_rdma: 1, usage: 0 },
    };

    #[test]
    fn uncached_and_pinned_memory_of_a_device_is_pinned_memory_of_the_same_device() {
        for kind in [consts::MEM_ALLOCATION_UNCACHED, consts::MEM_ALLOCATION_PINNED] {
            let found = properties(&AllocationProp { kind, ..PROPERTIES }).ok().unwrap();
            assert_eq!(found.type_ as u32, 1);
            assert!(found.requestedHandleTypes == POSIX_FD);
            assert_eq!((found.location.type_ as u32, found.location.id), (1, 3));
        }
    }

    #[test]
    fn memory_of_any_other_kind_is_refused() {
        let host = Location { kind: 2, id: 0 };
        for wrong in [
            AllocationProp { kind: 2, ..PROPERTIES },
            AllocationProp { handle_kind: 8, ..PROPERTIES },
            AllocationProp { location: host, ..PROPERTIES },
        ] {
            assert_eq!(properties(&wrong).err(), Some(INVALID_VALUE), "{wrong:?}");
        }
        let location = PROPERTIES.location;
        assert_eq!(access(&AccessDesc { location, flags: 1 }).err(), Some(INVALID_VALUE));
        let both = access(&AccessDesc { location, flags: 3 }).ok().unwrap();
        assert_eq!((both.flags as u32, both.location.id), (3, 3));
    }

    #[test]
    fn a_range_is_given_as_a_dmabuf_and_as_nothing_else() {
        let dmabuf = range_handle(consts::RANGE_HANDLE_DMABUF).ok().unwrap();
        assert_eq!(dmabuf as u32, 1, "CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD");
        for other in [0, 2] {
            assert_eq!(range_handle(other).err(), Some(INVALID_VALUE), "{other}");
        }
    }
}
