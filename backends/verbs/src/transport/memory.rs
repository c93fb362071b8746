//! The registered windows of this rank, and the word into which atomic additions return old values.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use tokenyard_core::abi;
use tokenyard_core::transport::Window;
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_sys_verbs::ffi::{ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE};
use tokenyard_sys_verbs::{CallError, DmabufRange, Mr, Pd};

use crate::endpoint::{Key, RemoteWindow, is_inside};

/// A registered window.
#[derive(Debug)]
pub struct Region {
    /// Its registration.
    pub mr: Mr,
    /// The first byte, as work requests name it.
    pub address: u64,
    /// Length.
    pub bytes: u64,
    /// The processor can read it.
    pub host: bool,
}

impl Region {
    /// Registers a window, for peers to write and read.
    ///
    /// # Errors
    /// The device refuses the memory, with the fix.
    ///
    /// # Safety
    /// Memory and descriptor of the window stay valid until the region is dropped.
    pub unsafe fn new(pd: &Arc<Pd>, window: &Window) -> Result<Self> {
        let bytes = usize::try_from(window.bytes).unwrap_or(usize::MAX);
        let access = ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ;
        let host = window.kind == abi::TY_MEMORY_HOST;
        // SAFETY: by this function's contract; core tolerates writes of peers to windows.
        let by_address = || unsafe { Mr::new(pd, window.pointer, bytes, access) };
        // Memory without a dmabuf, or with one that the device does not take, is registered by its address: host
        // memory, and device memory through a kernel module.
        let registered = if window.handle != abi::TY_HANDLE_DMABUF || window.fd < 0 {
            by_address()
        } else {
            // SAFETY: as above; the descriptor is open.
            let by_dmabuf = unsafe {
                let fd = BorrowedFd::borrow_raw(window.fd);
                let range = DmabufRange { fd, offset: window.fd_offset, bytes };
                Mr::of_dmabuf(pd, &range, window.pointer, access)
            };
            by_dmabuf.or_else(|refused| by_address().map_err(|_| refused))
        };
        let mr = registered.map_err(|e| {
            let error = refused(e, window.bytes).with_context("window", window.id);
            if host { error } else { error.with_fix(DEVICE_MEMORY_FIX) }
        })?;
        Ok(Self { mr, address: window.pointer as u64, bytes: window.bytes, host })
    }

    /// The address of `bytes` at an offset, which core has checked.
    #[inline]
    pub fn at(&self, offset: u64, bytes: u64) -> u64 {
        debug_assert!(is_inside(offset, bytes, self.bytes));
        self.address + offset
    }
}

/// This rank's windows, in order of registration.
#[derive(Debug)]
pub struct Memory {
    /// The windows.
    pub regions: Vec<Region>,
    /// Field order is drop order: the region ends before its word.
    scratch: Mr,
    word: Box<u64>,
}

impl Memory {
    /// No windows yet.
    ///
    /// # Errors
    /// The device refuses the memory, with the fix.
    pub fn new(pd: &Arc<Pd>) -> Result<Self> {
        let mut word = Box::new(0_u64);
        // SAFETY: the word lives as long as the region, beside it; no code reads it.
        let scratch = unsafe { Mr::new(pd, (&raw mut *word).cast(), 8, ACCESS_LOCAL_WRITE) };
        let scratch = scratch.map_err(|e| refused(e, 8))?;
        Ok(Self { regions: Vec::new(), scratch, word })
    }

    /// The destination of the old values of additions: the address and the key.
    pub fn scratch(&self) -> (u64, u32) {
        (&raw const *self.word as u64, self.scratch.lkey())
    }

    /// Registers the next window, for peers to write and read.
    ///
    /// # Errors
    /// As of [`Region::new`].
    ///
    /// # Safety
    /// Memory and descriptor of the window stay valid until `self` is dropped.
    pub unsafe fn add(&mut self, pd: &Arc<Pd>, window: &Window) -> Result<()> {
        debug_assert_eq!(window.id as usize, self.regions.len(), "windows come in order");
        // SAFETY: by this function's contract.
        self.regions.push(unsafe { Region::new(pd, window) }?);
        Ok(())
    }

    /// A window that is memory of a device.
    pub fn of_device(&self) -> Option<&Region> {
        self.regions.iter().find(|region| !region.host)
    }

    /// The windows, as the endpoint names them.
    pub fn to_peers(&self) -> Vec<RemoteWindow> {
        let window = |region: &Region| {
            let (address, bytes) = (region.address, region.bytes);
            RemoteWindow { address, bytes, key: Key(region.mr.rkey()) }
        };
        self.regions.iter().map(window).collect()
    }

    /// The lengths of the windows, which each peer must have, too.
    pub fn lengths(&self) -> Vec<u64> {
        self.regions.iter().map(|region| region.bytes).collect()
    }
}

const DEVICE_MEMORY_FIX: &str = "give the window a dmabuf descriptor (kernel 5.12, rdma-core 34 and \
     a driver with ibv_reg_dmabuf_mr), or load the kernel module nvidia_peermem";

/// The error for a refused registration.
pub fn refused(error: CallError, bytes: u64) -> Error {
    let no_memory = error.source.raw_os_error() == Some(rustix::io::Errno::NOMEM.raw_os_error());
    let message = format!("{} of {bytes} bytes", error.call);
    let error = Error::new(ErrorKind::System, "register", message).with_source(error.source);
    if no_memory {
        return error.with_fix("raise the limit on locked memory: `ulimit -l`, LimitMEMLOCK=");
    }
    error
}
