//! Host memory that peers can map.

use std::os::fd::OwnedFd;

use crate::{Error, Result};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// A sealed memfd, mapped once. Zero at first. Not /dev/shm, which is small in containers.
#[derive(Debug)]
pub struct SealedMemory {
    pointer: *mut u8,
    bytes: usize,
    fd: OwnedFd,
}

// SAFETY: the mapping belongs to this value and may be used from any thread.
unsafe impl Send for SealedMemory {}

impl SealedMemory {
    /// `bytes`, at least 1, is rounded up to whole pages.
    ///
    /// # Errors
    /// Errors of the system.
    pub fn new(bytes: u64) -> Result<Self> {
        let bytes = bytes.next_multiple_of(rustix::param::page_size() as u64);
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
        Ok(Self { pointer: pointer.cast(), bytes: bytes as usize, fd })
    }

    /// First byte. Peers may write to the memory at any time.
    pub fn pointer(&self) -> *mut u8 {
        self.pointer
    }

    /// Length, a multiple of the page.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The descriptor that peers map.
    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }
}

impl Drop for SealedMemory {
    fn drop(&mut self) {
        // SAFETY: a mapping of this value; its users and the transport that registered it were dropped
        // before (ABI: kernels are closed after transports).
        let unmapped = unsafe { rustix::mm::munmap(self.pointer.cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}
