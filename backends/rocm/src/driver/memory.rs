//! Memory of devices and of the host: plain, pooled, registered and shareable.
//!
//! Peers look at windows while kernels run, so all shareable memory is uncached. HIP shares it in one of two
//! ways: see [`Sharing`].

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::sync::{Mutex, PoisonError};

use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_gpu::driver::{DriverMemory, RawDevice, RawMemory};
use tokenyard_sys_hip::{self as sys, consts};

use super::device::attribute;
use super::library::{Loaded, loaded};
use super::status::check;
use super::{HipDriver, call, card, end};

/// The unit of memory that is shared by hipIpc, which has none itself: that of large pages.
const IPC_UNIT: u64 = 2 << 20;

/// How memory crosses to other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sharing {
    /// Virtual memory management: physical memory behind a descriptor.
    Vmm,
    /// `hipIpcMemHandle_t`: a name of a whole allocation.
    Ipc,
}

/// Shareable memory, behind a [`RawMemory`].
#[derive(Debug)]
enum Shared {
    /// Physical memory, this process's or another's.
    Physical(*mut c_void),
    /// An allocation of this process.
    Own(*mut c_void),
    /// An allocation of another process, opened.
    Opened(*mut c_void),
}

impl Shared {
    /// Passes it to the owner of the result, who calls `memory_release` once.
    fn into_raw(self) -> RawMemory {
        RawMemory(Box::into_raw(Box::new(self)) as u64)
    }

    /// # Safety
    /// The memory lives.
    unsafe fn of<'a>(raw: RawMemory) -> &'a Self {
        // SAFETY: of `into_raw`, by this function's contract.
        unsafe { &*(raw.0 as *const Self) }
    }
}

impl Sharing {
    /// How a device shares its memory: by physical memory where HIP has it uncached, else by hipIpc. Tried
    /// once for each device.
    pub(super) fn of(device: RawDevice) -> Result<Self> {
        static CHOSEN: Mutex<BTreeMap<i32, Sharing>> = Mutex::new(BTreeMap::new());
        let mut chosen = CHOSEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sharing) = chosen.get(&device.0) {
            return Ok(*sharing);
        }
        let loaded = loaded()?;
        let has_vmm = attribute(device, consts::ATTRIBUTE_VMM)? != 0;
        let sharing = match (has_vmm, loaded.version >= consts::FIRST_VMM_UNCACHED) {
            (true, true) => match try_physical(loaded, device) {
                Ok(()) => Self::Vmm,
                Err(error) => {
                    tracing::warn!(%error, "memory is shared by hipIpc: a trial of VMM failed");
                    Self::Ipc
                }
            },
            _ => Self::Ipc,
        };
        chosen.insert(device.0, sharing);
        Ok(sharing)
    }

    /// The name of this way, in HIP's words.
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Vmm => "VMM, uncached",
            Self::Ipc => "hipIpc, uncached",
        }
    }
}

/// Makes one unit of physical memory, and exports it.
fn try_physical(loaded: &Loaded, device: RawDevice) -> Result<()> {
    let unit = physical_unit(loaded, device)?;
    let memory = physical(loaded, device, unit as usize)?;
    let exported = export_physical(loaded, memory);
    // SAFETY: made just above; nothing of it is mapped.
    check(loaded, "release memory", unsafe { (loaded.hip.mem_release)(memory) })?;
    exported.map(drop)
}

fn location(device: RawDevice) -> sys::Location {
    sys::Location { kind: consts::MEM_LOCATION_DEVICE, id: device.0 }
}

fn properties(device: RawDevice) -> sys::AllocationProp {
    sys::AllocationProp {
        kind: consts::MEM_ALLOCATION_UNCACHED,
        handle_kind: consts::MEM_HANDLE_POSIX_FD,
        location: location(device),
        win32: std::ptr::null_mut(),
        // Transports between machines register the same windows.
        flags: sys::AllocationFlags { gpu_direct_rdma: 1, ..Default::default() },
    }
}

fn physical_unit(loaded: &Loaded, device: RawDevice) -> Result<u64> {
    let (mut bytes, properties) = (0, properties(device));
    // SAFETY: the structure is valid for the call; the number is ours.
    let status = unsafe {
        (loaded.hip.mem_get_allocation_granularity)(
            &mut bytes,
            &properties,
            consts::GRANULARITY_RECOMMENDED,
        )
    };
    check(loaded, "ask granularity", status).map(|()| bytes as u64)
}

fn physical(loaded: &Loaded, device: RawDevice, bytes: usize) -> Result<*mut c_void> {
    let (mut memory, properties) = (std::ptr::null_mut(), properties(device));
    // SAFETY: as above.
    let status = unsafe { (loaded.hip.mem_create)(&mut memory, bytes, &properties, 0) };
    check(loaded, "allocate device memory", status).map(|()| memory)
}

fn export_physical(loaded: &Loaded, memory: *mut c_void) -> Result<OwnedFd> {
    let mut fd: i32 = -1;
    // SAFETY: memory that lives; for this kind of handle HIP writes one `int`.
    let status = unsafe {
        (loaded.hip.mem_export_to_shareable_handle)(
            (&raw mut fd).cast(),
            memory,
            consts::MEM_HANDLE_POSIX_FD,
            0,
        )
    };
    check(loaded, "export memory", status)?;
    // SAFETY: HIP gave a fresh descriptor to this process.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// HIP maps an allocation as a whole: a peer that says that it has more is refused.
fn check_length(loaded: &Loaded, pointer: *mut c_void, bytes: usize) -> Result<()> {
    let (mut base, mut found) = (std::ptr::null_mut(), 0);
    // SAFETY: memory that is mapped here; the numbers are ours.
    let status = unsafe { (loaded.hip.mem_get_address_range)(&mut base, &mut found, pointer) };
    check(loaded, "map memory", status)?;
    if base == pointer && found >= bytes {
        return Ok(());
    }
    let message = format!("found {found} bytes at {base:p}; expected {bytes} at {pointer:p}");
    Err(Error::new(ErrorKind::Protocol, "map memory", message))
}

fn map_physical(
    loaded: &Loaded,
    memory: *mut c_void,
    bytes: usize,
    device: RawDevice,
) -> Result<u64> {
    let (mut range, anywhere) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: HIP chooses a fresh range; the pointer is ours.
    let status = unsafe { (loaded.hip.mem_address_reserve)(&mut range, bytes, 0, anywhere, 0) };
    check(loaded, "reserve addresses", status)?;
    // SAFETY: our own range, at which nothing is mapped; HIP refuses a length beyond that of the memory.
    let status = unsafe { (loaded.hip.mem_map)(range, bytes, 0, memory, 0) };
    let mapped = check(loaded, "map memory", status);
    let access =
        sys::AccessDesc { location: location(device), flags: consts::MEM_ACCESS_READ_WRITE };
    let allowed = mapped.and_then(|()| {
        // SAFETY: the range was just mapped; the structure is valid for the call.
        let status = unsafe { (loaded.hip.mem_set_access)(range, bytes, &access, 1) };
        check(loaded, "give access", status).map_err(|error| {
            // SAFETY: mapped above.
            let _ = unsafe { (loaded.hip.mem_unmap)(range, bytes) };
            error.with_fix("see rocm-smi --showtopo: the devices must reach each other")
        })
    });
    allowed.map(|()| range as u64).inspect_err(|_| {
        // SAFETY: our own range, at which nothing is mapped any more.
        let _ = unsafe { (loaded.hip.mem_address_free)(range, bytes) };
    })
}

/// Lets the device's pool keep its memory: a return of memory to the system waits for kernels.
fn keep_pool(loaded: &Loaded, device: RawDevice) -> Result<()> {
    let (mut pool, mut all) = (std::ptr::null_mut(), u64::MAX);
    // SAFETY: a device that exists; the pointer is ours.
    let status = unsafe { (loaded.hip.device_get_default_mem_pool)(&mut pool, device.0) };
    check(loaded, "ask pool", status)?;
    let (key, value) = (consts::POOL_RELEASE_THRESHOLD, (&raw mut all).cast());
    // SAFETY: the pool of a device; the value has the attribute's type.
    check(loaded, "set up pool", unsafe { (loaded.hip.mem_pool_set_attribute)(pool, key, value) })
}

impl DriverMemory for HipDriver {
    fn alloc(&self, bytes: usize) -> Result<u64> {
        let mut pointer = std::ptr::null_mut();
        call!("allocate device memory", malloc(&mut pointer, bytes))?;
        Ok(pointer as u64)
    }

    unsafe fn free(&self, address: u64) {
        end!(free(address as *mut c_void));
    }

    fn alloc_pooled(&self, device: RawDevice, bytes: usize) -> Result<u64> {
        let loaded = loaded()?;
        keep_pool(loaded, device)?;
        let (mut pointer, stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: null names the default stream; the pointer is ours.
        let status = unsafe { (loaded.hip.malloc_async)(&mut pointer, bytes, stream) };
        check(loaded, "allocate device memory", status).map(|()| pointer as u64)
    }

    unsafe fn free_pooled(&self, address: u64) {
        end!(free_async(address as *mut c_void, std::ptr::null_mut()));
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<*mut c_void> {
        let mut pointer = std::ptr::null_mut();
        let flags = consts::HOST_MALLOC_COHERENT;
        call!("allocate pinned memory", host_malloc(&mut pointer, bytes, flags))?;
        Ok(pointer)
    }

    unsafe fn free_pinned(&self, pointer: *mut c_void) {
        end!(host_free(pointer));
    }

    unsafe fn register_host(&self, pointer: *mut c_void, bytes: usize) -> Result<u64> {
        let (loaded, mut device) = (loaded()?, std::ptr::null_mut());
        let flags = consts::HOST_REGISTER_MAPPED;
        // SAFETY: by this function's contract.
        let status = unsafe { (loaded.hip.host_register)(pointer, bytes, flags) };
        check(loaded, "pin window", status)?;
        // SAFETY: memory that was just registered to be seen by the device.
        let status = unsafe { (loaded.hip.host_get_device_pointer)(&mut device, pointer, 0) };
        check(loaded, "map window", status).map(|()| device as u64).inspect_err(|_| {
            // SAFETY: registered above; no other code knows its address on the device.
            let _ = unsafe { (loaded.hip.host_unregister)(pointer) };
        })
    }

    unsafe fn unregister_host(&self, pointer: *mut c_void) {
        end!(host_unregister(pointer));
    }

    unsafe fn register_io(&self, _: *mut c_void, _: usize) -> Result<u64> {
        let error =
            Error::new(ErrorKind::Unsupported, "map registers", "HIP maps none of other devices");
        Err(error.with_fix("let a thread of the host ring (`doorbell = \"cpu\"`)"))
    }

    fn granularity(&self, device: RawDevice) -> Result<u64> {
        match Sharing::of(device)? {
            Sharing::Vmm => physical_unit(loaded()?, device),
            Sharing::Ipc => Ok(IPC_UNIT),
        }
    }

    fn memory_create(&self, device: RawDevice, bytes: usize) -> Result<RawMemory> {
        let loaded = loaded()?;
        let shared = match Sharing::of(device)? {
            Sharing::Vmm => Shared::Physical(physical(loaded, device, bytes)?),
            Sharing::Ipc => {
                let (mut pointer, flags) = (std::ptr::null_mut(), consts::MALLOC_UNCACHED);
                // SAFETY: the pointer is ours.
                let status =
                    unsafe { (loaded.hip.ext_malloc_with_flags)(&mut pointer, bytes, flags) };
                check(loaded, "allocate device memory", status)?;
                Shared::Own(pointer)
            }
        };
        Ok(shared.into_raw())
    }

    unsafe fn memory_export(&self, memory: RawMemory) -> Result<OwnedFd> {
        let loaded = loaded()?;
        // SAFETY: by this function's contract.
        let pointer = match unsafe { Shared::of(memory) } {
            Shared::Physical(memory) => return export_physical(loaded, *memory),
            Shared::Own(pointer) | Shared::Opened(pointer) => *pointer,
        };
        let mut handle = sys::IpcHandle { reserved: [0; 64] };
        // SAFETY: an allocation that lives; the structure is ours.
        let status = unsafe { (loaded.hip.ipc_get_mem_handle)(&mut handle, pointer) };
        check(loaded, "export memory", status).map_err(|error| {
            error.with_fix(
                "upgrade to ROCm 7.1 or newer, which shares uncached memory by descriptors, too",
            )
        })?;
        card::write(&handle)
    }

    unsafe fn range_dmabuf(&self, address: u64, bytes: usize) -> Result<OwnedFd> {
        let loaded = loaded()?;
        let Some(get) = loaded.hip.mem_get_handle_for_address_range else {
            let message = format!(
                "{} has no function hipMemGetHandleForAddressRange; expected ROCm 7 or newer",
                loaded.hip.file
            );
            return Err(Error::new(ErrorKind::Unsupported, "export dmabuf", message).with_fix(
                "upgrade ROCm, or let windows lie in host memory (leave `windows` out)",
            ));
        };
        let mut fd: i32 = -1;
        let kind = consts::RANGE_HANDLE_DMABUF;
        // SAFETY: by this function's contract; for this kind of handle HIP writes one `int`.
        let status = unsafe { get((&raw mut fd).cast(), address as *mut c_void, bytes, kind, 0) };
        check(loaded, "export dmabuf", status)?;
        // SAFETY: HIP gave a fresh descriptor to this process.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn memory_import(&self, fd: BorrowedFd<'_>) -> Result<RawMemory> {
        let loaded = loaded()?;
        let mut raw = std::ptr::null_mut();
        if let Some(handle) = card::read(fd) {
            let flags = consts::IPC_LAZY_PEER_ACCESS;
            // SAFETY: HIP checks what the handle names; the pointer is ours.
            let status = unsafe { (loaded.hip.ipc_open_mem_handle)(&mut raw, handle, flags) };
            check(loaded, "import memory", status)?;
            return Ok(Shared::Opened(raw).into_raw());
        }
        let os = fd.as_raw_fd() as usize as *mut c_void;
        let kind = consts::MEM_HANDLE_POSIX_FD;
        // SAFETY: HIP checks what is behind the descriptor; the handle is ours.
        let status = unsafe { (loaded.hip.mem_import_from_shareable_handle)(&mut raw, os, kind) };
        check(loaded, "import memory", status)?;
        Ok(Shared::Physical(raw).into_raw())
    }

    unsafe fn memory_release(&self, memory: RawMemory) {
        // SAFETY: of `into_raw`, and its owner ends with this call.
        let shared = unsafe { Box::from_raw(memory.0 as *mut Shared) };
        let Ok(loaded) = loaded() else { return };
        // SAFETY: made or opened by this module, once.
        let status = unsafe {
            match *shared {
                Shared::Physical(memory) => (loaded.hip.mem_release)(memory),
                Shared::Own(pointer) => (loaded.hip.free)(pointer),
                Shared::Opened(pointer) => (loaded.hip.ipc_close_mem_handle)(pointer),
            }
        };
        if let Err(error) = check(loaded, "release memory", status) {
            tracing::debug!(%error);
        }
    }

    unsafe fn memory_map(&self, memory: RawMemory, bytes: usize, device: RawDevice) -> Result<u64> {
        let loaded = loaded()?;
        // SAFETY: by this function's contract.
        match unsafe { Shared::of(memory) } {
            Shared::Physical(memory) => map_physical(loaded, *memory, bytes, device),
            Shared::Own(pointer) | Shared::Opened(pointer) => {
                check_length(loaded, *pointer, bytes)?;
                Ok(*pointer as u64)
            }
        }
    }

    unsafe fn memory_unmap(&self, memory: RawMemory, address: u64, bytes: usize) {
        // SAFETY: the memory lives, by this function's contract.
        let is_physical = matches!(unsafe { Shared::of(memory) }, Shared::Physical(_));
        // Other memory has one address for as long as it lives.
        let (true, Ok(loaded)) = (is_physical, loaded()) else { return };
        let range = address as *mut c_void;
        // SAFETY: by this function's contract.
        let _ = unsafe { (loaded.hip.mem_unmap)(range, bytes) };
        // SAFETY: the range of a mapping, at which nothing is mapped any more.
        let _ = unsafe { (loaded.hip.mem_address_free)(range, bytes) };
    }
}
