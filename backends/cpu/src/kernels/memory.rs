use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use tokenyard_core::abi;
use tokenyard_core::transport::{MemoryNeeds, Window};
use tokenyard_core::{Error, ErrorKind, Result};

/// Window memory: a sealed memfd, mapped once. Not /dev/shm, which containers keep small.
#[derive(Debug)]
pub(super) struct Memory {
    pointer: *mut u8,
    bytes: usize,
    fd: OwnedFd,
}

// SAFETY: the mapping belongs to this value and may be used from any thread.
unsafe impl Send for Memory {}

impl Memory {
    pub(super) fn new(bytes: u64, needs: &MemoryNeeds) -> Result<Self> {
        if needs.kinds & abi::TY_MEMORY_HOST == 0 {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "allocate window",
                format!(
                    "the transport wants memory kinds {:#x}; expected host memory",
                    needs.kinds
                ),
            ));
        }
        let page = rustix::param::page_size() as u64;
        if needs.alignment > page {
            return Err(Error::new(
                ErrorKind::Unsupported,
                "allocate window",
                format!("found alignment {}; expected at most a page, {page}", needs.alignment),
            ));
        }
        let bytes = bytes.next_multiple_of(page);
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
        // SAFETY: a new mapping at an address of the kernel's choice.
        let pointer = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &fd,
                0,
            )
        }
        .map_err(system("the memory cannot be mapped"))?;
        Ok(Self { pointer: pointer.cast(), bytes: bytes as usize, fd })
    }

    pub(super) fn window(&self, id: u32) -> Window {
        Window {
            size: size_of::<Window>(),
            id,
            kind: abi::TY_MEMORY_HOST,
            pointer: self.pointer,
            bytes: self.bytes as u64,
            fd: self.fd.as_raw_fd(),
            device: -1,
            fd_offset: 0,
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: our own mapping; the engine that used it and the transport that registered it
        // were dropped before (ABI: kernels are closed after transports).
        let unmapped = unsafe { rustix::mm::munmap(self.pointer.cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}
