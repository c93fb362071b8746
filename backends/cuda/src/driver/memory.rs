//! Memory of devices and of the host: plain, pooled, registered and shareable.

use std::ffi::c_void;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr::null_mut;

use cudarc::driver::sys;
use tokenyard_core::Result;
use tokenyard_gpu::driver::{DriverMemory, RawDevice, RawMemory};

use super::device::attribute;
use super::{CudaDriver, check};

const POSIX_FD: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// CUDA's devices are their ordinals.
fn location(device: RawDevice) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device.0,
    }
}

fn properties(device: RawDevice) -> Result<sys::CUmemAllocationProp> {
    use sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED as RDMA;
    // SAFETY: plain numbers, for which zero means "nothing special".
    let mut flags: sys::CUmemAllocationProp_st__bindgen_ty_1 = unsafe { std::mem::zeroed() };
    // Transports between machines register the same windows.
    flags.gpuDirectRDMACapable = u8::from(attribute(device, RDMA)? != 0);
    Ok(sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: POSIX_FD,
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: flags,
    })
}

/// # Safety
/// The range is the caller's own, and nothing is mapped there.
unsafe fn map_at(at: u64, bytes: usize, memory: RawMemory, device: RawDevice) -> Result<()> {
    // SAFETY: by this function's contract; the driver refuses a length beyond that of the memory.
    check("map memory", unsafe { sys::cuMemMap(at, bytes, 0, memory.0, 0) })?;
    let access = sys::CUmemAccessDesc {
        location: location(device),
        flags: sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: the range was just mapped; the structure is valid for the call.
    let allowed = unsafe { sys::cuMemSetAccess(at, bytes, &access, 1) };
    check("give access", allowed).map_err(|error| {
        // SAFETY: as above.
        let _ = unsafe { sys::cuMemUnmap(at, bytes) };
        error.with_fix("see nvidia-smi topo -p2p rw: the devices must reach each other")
    })
}

/// Lets the device's pool keep its memory: a return of memory to the system waits for kernels.
fn keep_pool(device: RawDevice) -> Result<()> {
    let (mut pool, mut all) = (std::ptr::null_mut(), u64::MAX);
    // SAFETY: a device that exists.
    check("ask pool", unsafe { sys::cuDeviceGetDefaultMemPool(&mut pool, device.0) })?;
    let key = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the pool of a device; the value has the attribute's type.
    check("set up pool", unsafe { sys::cuMemPoolSetAttribute(pool, key, (&raw mut all).cast()) })
}

/// # Safety
/// The memory stays mapped until it is unregistered.
unsafe fn register(
    operations: [&'static str; 2],
    pointer: *mut c_void,
    bytes: usize,
    more: u32,
) -> Result<u64> {
    let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_PORTABLE | more;
    let mut device = 0;
    // SAFETY: by this function's contract.
    check(operations[0], unsafe { sys::cuMemHostRegister_v2(pointer, bytes, flags) })?;
    // SAFETY: memory that was just registered to be seen by the device.
    let status = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, pointer, 0) };
    check(operations[1], status).map(|()| device).inspect_err(|_| {
        // SAFETY: registered above; no other code knows its address on the device.
        let _ = unsafe { sys::cuMemHostUnregister(pointer) };
    })
}

// SAFETY of the blocks below: as of `impl Driver`.
impl DriverMemory for CudaDriver {
    fn alloc(&self, bytes: usize) -> Result<u64> {
        let mut address = 0;
        // SAFETY: see above.
        check("allocate device memory", unsafe { sys::cuMemAlloc_v2(&mut address, bytes) })?;
        Ok(address)
    }

    unsafe fn free(&self, address: u64) {
        // SAFETY: see above.
        let _ = unsafe { sys::cuMemFree_v2(address) };
    }

    fn alloc_pooled(&self, device: RawDevice, bytes: usize) -> Result<u64> {
        keep_pool(device)?;
        let mut address = 0;
        // SAFETY: the driver is loaded; null names the default stream.
        let status = unsafe { sys::cuMemAllocAsync(&mut address, bytes, std::ptr::null_mut()) };
        check("allocate device memory", status).map(|()| address)
    }

    unsafe fn free_pooled(&self, address: u64) {
        // SAFETY: see above; null names the default stream.
        let _ = unsafe { sys::cuMemFreeAsync(address, null_mut()) };
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<*mut c_void> {
        let mut raw = null_mut();
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: see above.
        check("allocate pinned memory", unsafe { sys::cuMemHostAlloc(&mut raw, bytes, flags) })?;
        Ok(raw)
    }

    unsafe fn free_pinned(&self, pointer: *mut c_void) {
        // SAFETY: see above.
        let _ = unsafe { sys::cuMemFreeHost(pointer) };
    }

    unsafe fn register_host(&self, pointer: *mut c_void, bytes: usize) -> Result<u64> {
        // SAFETY: by this function's contract.
        unsafe { register(["pin window", "map window"], pointer, bytes, 0) }
    }

    unsafe fn unregister_host(&self, pointer: *mut c_void) {
        // SAFETY: see above.
        let _ = unsafe { sys::cuMemHostUnregister(pointer) };
    }

    unsafe fn register_io(&self, pointer: *mut c_void, bytes: usize) -> Result<u64> {
        let flags = sys::CU_MEMHOSTREGISTER_IOMEMORY;
        // SAFETY: by this function's contract.
        unsafe { register(["register registers", "map registers"], pointer, bytes, flags) }
    }

    fn granularity(&self, device: RawDevice) -> Result<u64> {
        let (mut bytes, properties) = (0, properties(device)?);
        // SAFETY: the structure is valid for the call.
        check("ask granularity", unsafe {
            sys::cuMemGetAllocationGranularity(
                &mut bytes,
                &properties,
                sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
            )
        })?;
        Ok(bytes as u64)
    }

    fn memory_create(&self, device: RawDevice, bytes: usize) -> Result<RawMemory> {
        let (mut raw, properties) = (0, properties(device)?);
        // SAFETY: the structure is valid for the call.
        let status = unsafe { sys::cuMemCreate(&mut raw, bytes, &properties, 0) };
        check("allocate device memory", status).map(|()| RawMemory(raw))
    }

    unsafe fn memory_export(&self, memory: RawMemory) -> Result<OwnedFd> {
        let mut fd: i32 = -1;
        // SAFETY: for this type of handle the driver writes one `int`.
        check("export memory", unsafe {
            sys::cuMemExportToShareableHandle((&raw mut fd).cast(), memory.0, POSIX_FD, 0)
        })?;
        // SAFETY: the driver gave a fresh descriptor to this process.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    unsafe fn range_dmabuf(&self, address: u64, bytes: usize) -> Result<OwnedFd> {
        use sys::CUmemRangeHandleType_enum::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD as DMABUF;
        let mut fd: i32 = -1;
        // SAFETY: for this type of handle the driver writes one `int`.
        let status = unsafe {
            sys::cuMemGetHandleForAddressRange((&raw mut fd).cast(), address, bytes, DMABUF, 0)
        };
        check("export dmabuf", status)?;
        // SAFETY: the driver gave a fresh descriptor to this process.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn memory_import(&self, fd: BorrowedFd<'_>) -> Result<RawMemory> {
        let mut raw = 0;
        let os = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the driver checks what is behind the descriptor.
        let status = unsafe { sys::cuMemImportFromShareableHandle(&mut raw, os, POSIX_FD) };
        check("import memory", status).map(|()| RawMemory(raw))
    }

    unsafe fn memory_release(&self, memory: RawMemory) {
        // SAFETY: see above.
        let _ = unsafe { sys::cuMemRelease(memory.0) };
    }

    unsafe fn memory_map(&self, memory: RawMemory, bytes: usize, device: RawDevice) -> Result<u64> {
        let mut address = 0;
        // SAFETY: the driver chooses a fresh range.
        let reserved = unsafe { sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0) };
        check("reserve addresses", reserved)?;
        // SAFETY: our own range, at which nothing is mapped.
        unsafe { map_at(address, bytes, memory, device) }.map(|()| address).inspect_err(|_| {
            // SAFETY: our own range; whatever was mapped there is not any more.
            let _ = unsafe { sys::cuMemAddressFree(address, bytes) };
        })
    }

    unsafe fn memory_unmap(&self, _: RawMemory, address: u64, bytes: usize) {
        // SAFETY: see above.
        let _ = unsafe { sys::cuMemUnmap(address, bytes) };
        // SAFETY: the range of a mapping, at which nothing is mapped any more.
        let _ = unsafe { sys::cuMemAddressFree(address, bytes) };
    }
}
