use std::os::fd::AsRawFd;

use tokenyard_core::abi;
use tokenyard_core::fd_exchange::SealedMemory;
use tokenyard_core::transport::{MemoryNeeds, NO_WINDOW, Window};
use tokenyard_core::{Error, ErrorKind, Result};

/// Memory of a window.
#[derive(Debug)]
pub(crate) struct Memory(SealedMemory);

impl Memory {
    pub(crate) fn new(bytes: u64, needs: &MemoryNeeds) -> Result<Self> {
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
        SealedMemory::new(bytes).map(Self)
    }

    pub(crate) fn window(&self, id: u32) -> Window {
        Window {
            id,
            kind: abi::TY_MEMORY_HOST,
            pointer: self.0.pointer(),
            bytes: self.0.bytes() as u64,
            fd: self.0.fd().as_raw_fd(),
            handle: abi::TY_HANDLE_MEMFD,
            ..NO_WINDOW
        }
    }
}
