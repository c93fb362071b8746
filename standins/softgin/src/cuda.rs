//! The CUDA driver: streams that copy, and memory of peers that is mapped here. Nothing here waits for the device,
//! because kernels may wait for these copies.

use std::ffi::c_void;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;

use crate::abi;
use crate::failure::{Failure, Result};

const POSIX_FD: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

fn check(what: &str, status: sys::CUresult) -> Result<()> {
    match status {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        other => Err(Failure::new(abi::UNHANDLED_CUDA_ERROR, format!("{what}: {other:?}"))),
    }
}

/// The resources of one copy: an event behind it, and 8 bytes of pinned memory for a value of the host.
#[derive(Debug)]
pub(crate) struct Slot {
    event: sys::CUevent,
    value: usize,
}

// SAFETY: a handle of the driver, and an address.
unsafe impl Send for Slot {}

/// Slots are made before kernels run: making a slot may wait for running kernels.
#[derive(Debug, Default)]
struct Slots {
    blocks: Vec<usize>,
    free: Vec<Slot>,
}

/// The context that was current when the team connected.
#[derive(Debug)]
pub(crate) struct Cuda {
    context: sys::CUcontext,
    device: sys::CUdevice,
    /// One stream for each peer.
    to: Vec<sys::CUstream>,
    signals: sys::CUstream,
    slots: Mutex<Slots>,
}

// SAFETY: handles of the driver, whose calls any thread may make once the context is current.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

/// Makes a context current on this thread, until it is dropped.
struct Entered {
    pushed: bool,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if self.pushed {
            let mut before = std::ptr::null_mut();
            // SAFETY: pushed on this thread by `enter`.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut before) };
        }
    }
}

impl Cuda {
    /// Streams of the current context; none where there is no driver, or no context.
    pub(crate) fn of_current_context(peers: usize) -> Result<Option<Self>> {
        // SAFETY: opening the driver's library runs its constructors only.
        if !unsafe { sys::is_culib_present() } {
            return Ok(None);
        }
        let (mut context, mut device) = (std::ptr::null_mut(), 0);
        // SAFETY: the library is there.
        let status = unsafe { sys::cuCtxGetCurrent(&mut context) };
        if status != sys::CUresult::CUDA_SUCCESS || context.is_null() {
            return Ok(None);
        }
        // SAFETY: a context is current.
        check("cuCtxGetDevice", unsafe { sys::cuCtxGetDevice(&mut device) })?;
        let mut this = Self {
            context,
            device,
            to: Vec::new(),
            signals: std::ptr::null_mut(),
            slots: Mutex::default(),
        };
        for _ in 0..peers {
            this.to.push(this.new_stream()?);
        }
        this.signals = this.new_stream()?;
        Ok(Some(this))
    }

    fn new_stream(&self) -> Result<sys::CUstream> {
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let (mut least, mut greatest) = (0, 0);
        // A stream may share a queue of the device with others of its priority, and then its copies wait behind their
        // kernels, which may wait for these copies. Kernels have the usual priority.
        // SAFETY: the context is current (`of_current_context`).
        unsafe {
            check(
                "cuCtxGetStreamPriorityRange",
                sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest),
            )?;
            check(
                "cuStreamCreateWithPriority",
                sys::cuStreamCreateWithPriority(&mut stream, flags, greatest),
            )?;
        }
        Ok(stream)
    }

    /// Makes the context current: NCCL's progress thread has none.
    fn enter(&self) -> Result<Entered> {
        let mut current = std::ptr::null_mut();
        // SAFETY: the library is there.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&mut current) })?;
        if current == self.context {
            return Ok(Entered { pushed: false });
        }
        // SAFETY: the communicator's context, which outlives the team.
        check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(self.context) })?;
        Ok(Entered { pushed: true })
    }

    /// Makes room for `count` more copies at once.
    pub(crate) fn add_slots(&self, count: usize) -> Result<()> {
        let _entered = self.enter()?;
        let mut at = std::ptr::null_mut();
        // SAFETY: the context is current.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&mut at, 8 * count, 0) })?;
        let mut slots = self.slots();
        slots.blocks.push(at as usize);
        for number in 0..count {
            let mut event = std::ptr::null_mut();
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
            // SAFETY: the context is current.
            check("cuEventCreate", unsafe { sys::cuEventCreate(&mut event, flags) })?;
            slots.free.push(Slot { event, value: at as usize + 8 * number });
        }
        Ok(())
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot; none while all are in use.
    pub(crate) fn take_slot(&self) -> Option<Slot> {
        self.slots().free.pop()
    }

    pub(crate) fn free_slot(&self, slot: Slot) {
        self.slots().free.push(slot);
    }

    /// Stores a value of the host in pinned memory; returns its address for the device.
    pub(crate) fn place(&self, slot: &Slot, value: [u8; 8]) -> u64 {
        // SAFETY: 8 bytes of pinned memory that belong to this slot.
        unsafe { (slot.value as *mut [u8; 8]).write(value) };
        slot.value as u64
    }

    /// Copies on the stream of a peer; the event of the slot shows when the copy is done.
    pub(crate) fn copy(
        &self,
        slot: &Slot,
        peer: usize,
        ends: [u64; 2],
        bytes: usize,
    ) -> Result<()> {
        let _entered = self.enter()?;
        let ([to, from], stream) = (ends, self.to[peer]);
        // SAFETY: both ranges were checked against their regions.
        check("cuMemcpyAsync", unsafe { sys::cuMemcpyAsync(to, from, bytes, stream) })?;
        // SAFETY: the event and the stream live.
        check("cuEventRecord", unsafe { sys::cuEventRecord(slot.event, stream) })
    }

    /// Whether a copy is done.
    pub(crate) fn is_over(&self, slot: &Slot) -> Result<bool> {
        let _entered = self.enter()?;
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(slot.event) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => check("a copy", status).map(|()| true),
        }
    }

    /// Writes a signal's total into this device's memory.
    pub(crate) fn write(&self, at: u64, total: u64) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: a word of a region of this rank.
        let status = unsafe { sys::cuStreamWriteValue64_v2(self.signals, at, total, 0) };
        check("cuStreamWriteValue64", status)
    }

    /// Exports memory of this rank, so that others can map it; none for memory that was not made to be exported.
    pub(crate) fn export(&self, at: u64) -> Result<Option<Exported>> {
        let _entered = self.enter()?;
        let (mut base, mut bytes, mut handle) = (0_u64, 0_usize, 0);
        use sys::CUpointer_attribute_enum::{
            CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR as BASE,
            CU_POINTER_ATTRIBUTE_MAPPING_SIZE as SIZE,
        };
        for (attribute, value) in
            [(BASE, (&raw mut base).cast::<c_void>()), (SIZE, (&raw mut bytes).cast())]
        {
            // SAFETY: both attributes are 8 bytes.
            let status = unsafe { sys::cuPointerGetAttribute(value, attribute, at) };
            check("cuPointerGetAttribute", status)?;
        }
        // SAFETY: the driver finds out whether something is there.
        let status = unsafe { sys::cuMemRetainAllocationHandle(&mut handle, at as *mut c_void) };
        check("cuMemRetainAllocationHandle", status)?;
        let mut fd: i32 = -1;
        // SAFETY: for this type of handle the driver writes one `int`; the handle was retained above.
        let status = unsafe {
            let out = (&raw mut fd).cast();
            let status = sys::cuMemExportToShareableHandle(out, handle, POSIX_FD, 0);
            sys::cuMemRelease(handle);
            status
        };
        if status != sys::CUresult::CUDA_SUCCESS {
            // NCCL's own signals: only the owner writes them.
            return Ok(None);
        }
        // SAFETY: the driver gave a fresh descriptor to this process.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Some(Exported { fd, bytes: bytes as u64, offset: at - base }))
    }

    /// Maps memory that a peer has exported.
    pub(crate) fn import(self: &Arc<Self>, fd: &OwnedFd, bytes: u64) -> Result<Mapping> {
        let _entered = self.enter()?;
        let (mut handle, mut at) = (0, 0);
        let os = fd.as_raw_fd() as usize as *mut c_void;
        let mut access: sys::CUmemAccessDesc = sys::CUmemAccessDesc {
            location: sys::CUmemLocation {
                type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE,
                id: self.device,
            },
            flags: sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let bytes = bytes as usize;
        // SAFETY: the driver checks what is behind the descriptor, and the length against it.
        unsafe {
            check(
                "cuMemImportFromShareableHandle",
                sys::cuMemImportFromShareableHandle(&mut handle, os, POSIX_FD),
            )?;
            let reserved = sys::cuMemAddressReserve(&mut at, bytes, 0, 0, 0);
            let mapped = check("cuMemAddressReserve", reserved)
                .and_then(|()| check("cuMemMap", sys::cuMemMap(at, bytes, 0, handle, 0)));
            sys::cuMemRelease(handle);
            mapped?;
        }
        let mapping = Mapping { cuda: Arc::clone(self), at, bytes };
        // SAFETY: the range was just mapped.
        check("cuMemSetAccess", unsafe { sys::cuMemSetAccess(at, bytes, &raw mut access, 1) })?;
        Ok(mapping)
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        let Ok(_entered) = self.enter() else { return };
        // SAFETY: made by this type, and not used any more. Destroying a stream does not wait for its work.
        unsafe {
            for stream in self.to.drain(..).chain([self.signals]) {
                if !stream.is_null() {
                    let _ = sys::cuStreamDestroy_v2(stream);
                }
            }
            let slots = self.slots.get_mut().unwrap_or_else(PoisonError::into_inner);
            for slot in slots.free.drain(..) {
                let _ = sys::cuEventDestroy_v2(slot.event);
            }
            for block in slots.blocks.drain(..) {
                let _ = sys::cuMemFreeHost(block as *mut c_void);
            }
        }
    }
}

/// Memory that others can map.
#[derive(Debug)]
pub(crate) struct Exported {
    pub(crate) fd: OwnedFd,
    /// Bytes of the whole mapping, in which the region begins at `offset`.
    pub(crate) bytes: u64,
    pub(crate) offset: u64,
}

/// A peer's memory, mapped here.
#[derive(Debug)]
pub(crate) struct Mapping {
    cuda: Arc<Cuda>,
    pub(crate) at: u64,
    bytes: usize,
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let Ok(_entered) = self.cuda.enter() else { return };
        // SAFETY: mapped by `import`; NCCL ends its operations before it takes regions back.
        unsafe {
            let _ = sys::cuMemUnmap(self.at, self.bytes);
            let _ = sys::cuMemAddressFree(self.at, self.bytes);
        }
    }
}
