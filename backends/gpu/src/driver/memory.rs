//! Memory: shareable allocations and their mappings, plain device memory, pinned host memory.

use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::Arc;

use tokenyard_core::Result;

use super::{Context, Device, check, sys};

const POSIX_FD: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

fn location(device: Device) -> sys::CUmemLocation {
    sys::CUmemLocation {
        type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device.ordinal,
    }
}

fn properties(device: Device) -> Result<sys::CUmemAllocationProp> {
    use sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED as RDMA;
    // SAFETY: plain numbers, for which zero means "nothing special".
    let mut flags: sys::CUmemAllocationProp_st__bindgen_ty_1 = unsafe { std::mem::zeroed() };
    // Transports between machines register the same windows.
    flags.gpuDirectRDMACapable = u8::from(device.attribute(RDMA)? != 0);
    Ok(sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: POSIX_FD,
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: flags,
    })
}

/// The unit of shareable memory: addresses and lengths are multiples of it.
pub(crate) fn granularity(device: Device) -> Result<u64> {
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

/// Physical memory that other processes can map.
#[derive(Debug)]
struct Handle(sys::CUmemGenericAllocationHandle);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made or imported once; mappings keep the memory themselves.
        let _ = unsafe { sys::cuMemRelease(self.0) };
    }
}

/// A mapping of shareable memory at an address of this process.
#[derive(Debug)]
pub(crate) struct Reserved {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
    bytes: usize,
    mapped: bool,
}

impl Reserved {
    /// Maps memory that another process made, for this rank's device. Its descriptor may be closed
    /// afterwards. `bytes` is a multiple of the granularity.
    pub(crate) fn import(context: &Arc<Context>, fd: &OwnedFd, bytes: u64) -> Result<Self> {
        let _entered = context.enter()?;
        let mut raw = 0;
        let os = fd.as_raw_fd() as usize as *mut std::ffi::c_void;
        // SAFETY: the driver checks what is behind the descriptor.
        let status = unsafe { sys::cuMemImportFromShareableHandle(&mut raw, os, POSIX_FD) };
        check("import memory", status).map_err(|e| {
            e.with_fix("let the ranks of a machine see the same devices (containers, cgroups)")
        })?;
        let handle = Handle(raw);
        Self::map(context, &handle, bytes)
    }

    fn map(context: &Arc<Context>, handle: &Handle, bytes: u64) -> Result<Self> {
        let bytes = bytes as usize;
        let mut address = 0;
        // SAFETY: the driver chooses a fresh range of addresses; given back on drop.
        check("reserve addresses", unsafe {
            sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0)
        })?;
        let mut this = Self { context: Arc::clone(context), address, bytes, mapped: false };
        // SAFETY: a range of our own that nothing is mapped at; the driver refuses a length beyond
        // that of the memory.
        check("map memory", unsafe { sys::cuMemMap(address, bytes, 0, handle.0, 0) })?;
        this.mapped = true;
        let access = sys::CUmemAccessDesc {
            location: location(context.device),
            flags: sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range was just mapped.
        check("give access", unsafe { sys::cuMemSetAccess(address, bytes, &access, 1) }).map_err(
            |e| e.with_fix("see nvidia-smi topo -p2p rw: the devices must reach each other"),
        )?;
        Ok(this)
    }

    /// First byte.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: our own range; kernels that use it have ended (transports and kernel sets
        // synchronise before they drop memory).
        unsafe {
            if self.mapped {
                let _ = sys::cuMemUnmap(self.address, self.bytes);
            }
            let _ = sys::cuMemAddressFree(self.address, self.bytes);
        }
    }
}

/// Shareable device memory of this rank, mapped and zeroed.
#[derive(Debug)]
pub(crate) struct Vmm {
    mapping: Reserved,
    fd: OwnedFd,
    bytes: u64,
}

impl Vmm {
    /// `bytes` is rounded up to the granularity.
    pub(crate) fn new(context: &Arc<Context>, bytes: u64) -> Result<Self> {
        let _entered = context.enter()?;
        let bytes = bytes.max(1).next_multiple_of(granularity(context.device)?);
        let mut raw = 0;
        let properties = properties(context.device)?;
        // SAFETY: the structure is valid for the call; released on drop.
        let status = unsafe { sys::cuMemCreate(&mut raw, bytes as usize, &properties, 0) };
        check("allocate device memory", status).map_err(|e| e.with_context("bytes", bytes))?;
        let handle = Handle(raw);
        let mut fd: i32 = -1;
        // SAFETY: for this type of handle the driver writes one `int`.
        check("export memory", unsafe {
            sys::cuMemExportToShareableHandle((&raw mut fd).cast(), handle.0, POSIX_FD, 0)
        })?;
        // SAFETY: the driver gave a fresh descriptor to this process.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let mapping = Reserved::map(context, &handle, bytes)?;
        zero(mapping.address, bytes as usize)?;
        Ok(Self { mapping, fd, bytes })
    }

    /// First byte.
    pub(crate) fn address(&self) -> u64 {
        self.mapping.address
    }

    /// Length, a multiple of the granularity.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The descriptor that others map.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }
}

/// Plain device memory, zeroed.
#[derive(Debug)]
pub(crate) struct Buffer {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
}

impl Buffer {
    pub(crate) fn new(context: &Arc<Context>, bytes: u64) -> Result<Self> {
        let _entered = context.enter()?;
        let (mut address, bytes) = (0, bytes.max(1) as usize);
        // SAFETY: freed on drop.
        let status = unsafe { sys::cuMemAlloc_v2(&mut address, bytes) };
        check("allocate device memory", status).map_err(|e| e.with_context("bytes", bytes))?;
        let this = Self { context: Arc::clone(context), address };
        zero(address, bytes)?;
        Ok(this)
    }

    /// First byte.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// A copy of plain values.
    pub(crate) fn of<T: Copy>(context: &Arc<Context>, values: &[T]) -> Result<Self> {
        let this = Self::new(context, size_of_val(values) as u64)?;
        copy(context, this.address, values.as_ptr() as u64, size_of_val(values) as u64)?;
        Ok(this)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: allocated by `new`; whoever launched kernels on it has synchronised.
        let _ = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// Plain device memory from the driver's pool, zeroed: other than that of [`Buffer`], it comes and
/// goes without waiting for kernels, which may wait for peers that wait for this process.
#[derive(Debug)]
pub(crate) struct Pooled {
    context: Arc<Context>,
    address: sys::CUdeviceptr,
}

impl Pooled {
    pub(crate) fn new(context: &Arc<Context>, bytes: u64) -> Result<Self> {
        let _entered = context.enter()?;
        keep_pool(context.device)?;
        let (mut address, bytes) = (0, bytes.max(1) as usize);
        // SAFETY: freed on drop; null names the default stream, which `zero` waits for.
        let status = unsafe { sys::cuMemAllocAsync(&mut address, bytes, std::ptr::null_mut()) };
        check("allocate device memory", status).map_err(|e| e.with_context("bytes", bytes))?;
        let this = Self { context: Arc::clone(context), address };
        zero(address, bytes)?;
        Ok(this)
    }

    /// First byte.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: allocated by `new`; whoever launched kernels on it has synchronised.
        let _ = unsafe { sys::cuMemFreeAsync(self.address, std::ptr::null_mut()) };
    }
}

/// Lets the device's pool keep what it has: giving memory back to the system waits for kernels.
fn keep_pool(device: Device) -> Result<()> {
    let (mut pool, mut all) = (std::ptr::null_mut(), u64::MAX);
    // SAFETY: a device that exists.
    check("ask pool", unsafe { sys::cuDeviceGetDefaultMemPool(&mut pool, device.ordinal) })?;
    let key = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the pool of a device; the value has the attribute's type.
    check("set up pool", unsafe { sys::cuMemPoolSetAttribute(pool, key, (&raw mut all).cast()) })
}

/// Copies between any two places that this process can name, and waits for it.
pub(crate) fn copy(context: &Context, to: u64, from: u64, bytes: u64) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let _entered = context.enter()?;
    // SAFETY: the caller names memory of its own; the driver finds out of which kind each is, and
    // refuses addresses that it does not know.
    check("copy memory", unsafe { sys::cuMemcpy(to, from, bytes as usize) })?;
    settle()
}

/// Zeroes memory of this context's device that was just allocated, and waits for it.
fn zero(at: sys::CUdeviceptr, bytes: usize) -> Result<()> {
    // SAFETY: the callers' own memory, of this length.
    check("zero memory", unsafe { sys::cuMemsetD8_v2(at, 0, bytes) })?;
    settle()
}

/// Calls without a stream run in the default stream and may return before they have ended; the
/// streams of this crate do not wait for it.
fn settle() -> Result<()> {
    // SAFETY: null names the default stream of the current context.
    check("synchronize stream", unsafe { sys::cuStreamSynchronize(std::ptr::null_mut()) })
}

/// One value in pinned host memory that the device reads and writes too. Zero at first; accessed
/// by raw pointer only, because both sides write it.
#[derive(Debug)]
pub(crate) struct Pinned<T> {
    context: Arc<Context>,
    raw: *mut T,
}

// SAFETY: an address; every access is unsafe and its caller's affair.
unsafe impl<T> Send for Pinned<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Pinned<T> {}

impl<T: Copy> Pinned<T> {
    /// Room for `count` values.
    pub(crate) fn new(context: &Arc<Context>, count: usize) -> Result<Self> {
        let _entered = context.enter()?;
        let (mut raw, bytes) = (std::ptr::null_mut(), count.max(1) * size_of::<T>());
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: freed on drop.
        check("allocate pinned memory", unsafe { sys::cuMemHostAlloc(&mut raw, bytes, flags) })?;
        // SAFETY: memory of this length that was just allocated.
        unsafe { std::ptr::write_bytes(raw.cast::<u8>(), 0, bytes) };
        Ok(Self { context: Arc::clone(context), raw: raw.cast() })
    }

    /// Value number `index`, at an address that both sides use (unified addressing).
    pub(crate) fn at(&self, index: usize) -> *mut T {
        self.raw.wrapping_add(index)
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: allocated by `new`; whoever launched kernels on it has synchronised.
        let _ = unsafe { sys::cuMemFreeHost(self.raw.cast()) };
    }
}
