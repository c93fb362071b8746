//! The memory of a window.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use tokenyard_core::transport::{NO_WINDOW, Window};
use tokenyard_core::{Result, abi};

use crate::driver::{Context, Device, HostWindow, Vmm};

/// The memory of a window.
#[derive(Debug)]
pub(crate) enum Memory {
    /// Device memory, which other devices map.
    Device(Vmm),
    /// Device memory that NICs reach: by the dmabuf, or by a kernel module where the driver makes none.
    Nic(Vmm, Option<OwnedFd>),
    /// Host memory, which the device reads and writes.
    Host(HostWindow),
}

impl Memory {
    pub(crate) fn new(context: &Arc<Context>, bytes: u64, handle: u32) -> Result<Self> {
        Ok(match handle {
            abi::TY_HANDLE_MEMFD => Self::Host(HostWindow::new(context, bytes)?),
            abi::TY_HANDLE_DMABUF => {
                let memory = Vmm::new(context, bytes)?;
                let dmabuf = memory.dmabuf();
                let dmabuf =
                    dmabuf.inspect_err(|error| tracing::warn!(%error, "a window has no dmabuf"));
                Self::Nic(memory, dmabuf.ok())
            }
            _ => Self::Device(Vmm::new(context, bytes)?),
        })
    }

    /// First byte, for kernels.
    pub(crate) fn address(&self) -> u64 {
        match self {
            Self::Device(memory) | Self::Nic(memory, _) => memory.address(),
            Self::Host(memory) => memory.address(),
        }
    }

    pub(crate) fn window(&self, id: u32, device: Device) -> Window {
        let blank = Window {
            id,
            // Also for host memory: the device works on it.
            device: device.ordinal,
            ..NO_WINDOW
        };
        match self {
            Self::Device(m) => Window {
                kind: device.platform.memory,
                pointer: m.address() as *mut u8,
                bytes: m.bytes(),
                fd: m.fd().as_raw_fd(),
                handle: abi::TY_HANDLE_POSIX,
                ..blank
            },
            Self::Nic(m, dmabuf) => Window {
                kind: device.platform.memory,
                pointer: m.address() as *mut u8,
                bytes: m.bytes(),
                fd: dmabuf.as_ref().map_or(-1, AsRawFd::as_raw_fd),
                handle: if dmabuf.is_some() { abi::TY_HANDLE_DMABUF } else { 0 },
                ..blank
            },
            Self::Host(m) => Window {
                kind: abi::TY_MEMORY_HOST,
                pointer: m.pointer(),
                bytes: m.bytes(),
                fd: m.fd().as_raw_fd(),
                handle: abi::TY_HANDLE_MEMFD,
                ..blank
            },
        }
    }
}
