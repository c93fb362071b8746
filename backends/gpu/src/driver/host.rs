//! Mappings for the device: shareable host memory, for windows of transports that cannot register device memory, and
//! registers of NICs.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokenyard_core::Result;
use tokenyard_core::fd_exchange::SealedMemory;

use super::Context;

/// Sealed memory that is also mapped for this process's device. Zero at first.
#[derive(Debug)]
pub(crate) struct HostWindow {
    context: Arc<Context>,
    /// The address for the device; 0 until the memory is registered with the driver.
    device: u64,
    memory: SealedMemory,
}

impl HostWindow {
    /// `bytes` is rounded up to whole pages.
    pub(crate) fn new(context: &Arc<Context>, bytes: u64) -> Result<Self> {
        let memory = SealedMemory::new(bytes.max(1))?;
        let mut window = Self { context: Arc::clone(context), device: 0, memory };
        window.register()?;
        Ok(window)
    }

    fn register(&mut self) -> Result<()> {
        let _entered = self.context.enter()?;
        let (pointer, bytes) = (self.memory.pointer().cast(), self.memory.bytes());
        // SAFETY: a mapping of this length that lives until `drop`, which unregisters it.
        let registered = unsafe { self.context.driver().register_host(pointer, bytes) };
        self.device = registered.map_err(|e| {
            e.with_context("bytes", bytes).with_fix(
                "give the container more memory it may lock (ulimit -l), or lower arena_mib",
            )
        })?;
        Ok(())
    }

    /// First byte, for this process.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.memory.pointer()
    }

    /// First byte, for kernels.
    pub(crate) fn address(&self) -> u64 {
        self.device
    }

    /// Length, a multiple of the page.
    pub(crate) fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }

    /// The descriptor that other processes map.
    pub(crate) fn fd(&self) -> &OwnedFd {
        self.memory.fd()
    }
}

impl Drop for HostWindow {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        if self.device != 0 {
            // SAFETY: our own mapping; kernels that use it have ended, and transports that
            // registered it were closed before.
            unsafe { self.context.driver().unregister_host(self.memory.pointer().cast()) };
        }
    }
}

/// Registers of another device, mapped for this device.
#[derive(Debug)]
pub struct IoPage {
    context: Arc<Context>,
    pointer: *mut u8,
    device: u64,
}

// SAFETY: an address; only the driver uses it.
unsafe impl Send for IoPage {}
// SAFETY: as above.
unsafe impl Sync for IoPage {}

impl IoPage {
    /// Maps `bytes` bytes at `pointer`, a whole page or more.
    ///
    /// # Errors
    /// The error of the driver where it maps no registers.
    ///
    /// # Safety
    /// The registers stay mapped in this process until the result is dropped.
    pub unsafe fn new(context: &Arc<Context>, pointer: *mut u8, bytes: usize) -> Result<Self> {
        let _entered = context.enter()?;
        // SAFETY: by this function's contract.
        let device = unsafe { context.driver().register_io(pointer.cast(), bytes)? };
        Ok(Self { context: Arc::clone(context), pointer, device })
    }

    /// First byte, for kernels.
    pub fn address(&self) -> u64 {
        self.device
    }
}

impl Drop for IoPage {
    fn drop(&mut self) {
        let _entered = self.context.enter();
        // SAFETY: registered by `new`; kernels that ring have ended.
        unsafe { self.context.driver().unregister_host(self.pointer.cast()) };
    }
}
