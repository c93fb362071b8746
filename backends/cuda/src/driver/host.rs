//! Shareable host memory that the device reads and writes: windows of transports that cannot register
//! a device's.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use tokenyard_core::{Error, Result};

use super::{Context, check, sys};

/// A sealed memfd, mapped for this process and for its device. Zero at first.
#[derive(Debug)]
pub(crate) struct HostWindow {
    context: Arc<Context>,
    pointer: *mut std::ffi::c_void,
    bytes: usize,
    /// Where the device sees it; 0 until it is registered with the driver.
    device: sys::CUdeviceptr,
    fd: OwnedFd,
}

// SAFETY: an address; every access is its caller's affair.
unsafe impl Send for HostWindow {}

impl HostWindow {
    /// `bytes` is rounded up to whole pages.
    pub(crate) fn new(context: &Arc<Context>, bytes: u64) -> Result<Self> {
        let bytes = bytes.max(1).next_multiple_of(rustix::param::page_size() as u64);
        let system = |what: &'static str| {
            move |e: rustix::io::Errno| {
                Error::system("allocate window", what, e).with_context("bytes", bytes)
            }
        };
        let fd =
            rustix::fs::memfd_create("tokenyard", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
                .map_err(system("memfd_create failed"))?;
        rustix::fs::ftruncate(&fd, bytes).map_err(system("the memory cannot be sized"))?;
        // Peers map this memory: they must be sure that it cannot shrink under them.
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)
            .map_err(system("the memory cannot be sealed"))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let pointer = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes as usize, access, flags, &fd, 0)
        }
        .map_err(system("the memory cannot be mapped"))?;
        let context = Arc::clone(context);
        let mut window = Self { context, pointer, bytes: bytes as usize, device: 0, fd };
        window.register()?;
        Ok(window)
    }

    fn register(&mut self) -> Result<()> {
        let _entered = self.context.enter()?;
        let flags = sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_PORTABLE;
        let mut device = 0;
        // SAFETY: a mapping of this length that lives until `drop`, which unregisters it.
        check("pin window", unsafe { sys::cuMemHostRegister_v2(self.pointer, self.bytes, flags) })
            .map_err(|e| {
                e.with_context("bytes", self.bytes).with_fix(
                    "give the container more memory it may lock (ulimit -l), or lower arena_mib",
                )
            })?;
        // SAFETY: memory that was just registered to be seen by the device.
        let status = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut device, self.pointer, 0) };
        if let Err(error) = check("map window", status) {
            // SAFETY: registered above, and nobody knows its address on the device.
            let _ = unsafe { sys::cuMemHostUnregister(self.pointer) };
            return Err(error);
        }
        self.device = device;
        Ok(())
    }

    /// First byte, for this process.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.pointer.cast()
    }

    /// First byte, for kernels.
    pub(crate) fn address(&self) -> u64 {
        self.device
    }

    /// Length, a multiple of the page.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// The descriptor that others map.
    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }
}

impl Drop for HostWindow {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: our own mapping; kernels that use it have ended, and transports that registered it
        // were closed before.
        unsafe {
            if self.device != 0 {
                let _ = sys::cuMemHostUnregister(self.pointer);
            }
            let _ = rustix::mm::munmap(self.pointer, self.bytes);
        }
    }
}
