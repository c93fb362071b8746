//! The memory that this rank shares with its peers, and its mappings of each.

use std::os::fd::{AsFd as _, BorrowedFd};

use tokenyard_core::fd_exchange::{Extent, Handed, Memory, SignalMemory};
use tokenyard_core::transport::{TransportNeeds, Window};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::memory::{self, Mapping, Span};
use super::signals::Signals;

/// A rank whose memory can be reached: another one, or this one itself.
#[derive(Debug)]
pub(super) struct Peer {
    /// Its windows, in order of registration.
    pub(super) windows: Vec<Span>,
    pub(super) signals: Signals,
    /// Keeps the spans above mapped; nothing for this rank itself.
    _mappings: Vec<Mapping>,
}

/// This rank's own memory.
#[derive(Debug)]
pub(super) struct Local {
    pub(super) windows: Vec<Span>,
    pub(super) signals: Signals,
    signal_count: u32,
    /// Keeps `signals` mapped.
    _signal_mapping: Mapping,
}

impl Local {
    /// Makes the signals; their memory is behind the descriptor.
    pub(super) fn new(needs: &TransportNeeds) -> Result<(Self, SignalMemory)> {
        let bytes = Signals::bytes(needs.signals);
        let fd = memory::create("tokenyard-signals", bytes as u64)?;
        let mapping = Mapping::new(fd.as_fd(), 0, bytes)?;
        let local = Self {
            windows: Vec::with_capacity(needs.windows as usize),
            // SAFETY: the mapping has these bytes, is page-aligned and stays beside the signals;
            // nothing but totals is in it.
            signals: unsafe { Signals::new(mapping.span(), needs.signals) },
            signal_count: needs.signals,
            _signal_mapping: mapping,
        };
        let extent = Extent { offset: 0, bytes: bytes as u64 };
        Ok((local, SignalMemory { fd, extent }))
    }

    /// Keeps a window, and returns what peers need of it.
    ///
    /// # Safety
    /// Memory and descriptor of the window stay valid until `self` and the holder of the result are dropped.
    pub(super) unsafe fn add_window(
        &mut self,
        window: &Window,
    ) -> Result<(BorrowedFd<'static>, Extent)> {
        debug_assert_eq!(window.id as usize, self.windows.len(), "windows come in order");
        let refused = |message: String| {
            Error::new(ErrorKind::InvalidInput, "register", message)
                .with_context("window", window.id)
                .with_fix("allocate the window as `memory_needs` says: a page-aligned memfd")
        };
        if window.fd < 0 || window.handle != abi::TY_HANDLE_MEMFD {
            let found = format!("found descriptor {} of handle {}", window.fd, window.handle);
            return Err(refused(format!("{found}; expected a memfd ({})", abi::TY_HANDLE_MEMFD)));
        }
        let page = rustix::param::page_size() as u64;
        if window.bytes == 0 || !window.fd_offset.is_multiple_of(page) {
            return Err(refused(format!(
                "found {} bytes at offset {}; expected at least 1 at a multiple of {page}",
                window.bytes, window.fd_offset
            )));
        }
        // SAFETY: open for as long as it is used, by this function's contract.
        let fd = unsafe { BorrowedFd::borrow_raw(window.fd) };
        let (found, end) = (memory::length(fd)?, window.fd_offset.saturating_add(window.bytes));
        if found < end {
            return Err(refused(format!(
                "found {found} bytes behind the descriptor; expected at least {end}"
            )));
        }
        memory::seal(fd).map_err(|e| e.with_context("window", window.id))?;
        self.windows.push(Span::new(window.pointer, window.bytes as usize));
        Ok((fd, Extent { offset: window.fd_offset, bytes: window.bytes }))
    }
}

impl Memory for Local {
    type Peer = Peer;

    fn own(&self) -> Peer {
        Peer { windows: self.windows.clone(), signals: self.signals, _mappings: Vec::new() }
    }

    fn map(&self, memory: Vec<Handed>) -> Result<Peer> {
        let mut mappings = Vec::with_capacity(memory.len());
        for Handed { fd, extent } in &memory {
            memory::check(fd.as_fd(), extent.offset + extent.bytes)?;
            mappings.push(Mapping::new(fd.as_fd(), extent.offset, extent.bytes as usize)?);
        }
        let mut spans: Vec<_> = mappings.iter().map(Mapping::span).collect();
        let Some(signals) = spans.pop() else {
            return Err(Error::new(ErrorKind::Internal, "meet peer", "no signals came"));
        };
        Ok(Peer {
            windows: spans,
            // SAFETY: the mapping has `Signals::bytes(signal_count)` bytes, is page-aligned and
            // stays beside the signals. A peer's stray writes there can only make totals wrong.
            signals: unsafe { Signals::new(signals, self.signal_count) },
            _mappings: mappings,
        })
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::MemfdFlags;

    use super::*;

    const BYTES: u64 = 4096;

    /// The error about a window behind `fd`.
    fn met_with(fd: std::os::fd::OwnedFd) -> Error {
        let needs = TransportNeeds {
            windows: 1,
            queues: 1,
            signals: 8,
            queue_depth: 1,
            largest_put: BYTES,
            deadline: std::time::Duration::from_secs(20),
        };
        let (local, signals) = Local::new(&needs).unwrap();
        let window = Handed { fd, extent: Extent { offset: 0, bytes: BYTES } };
        local.map(vec![window, Handed { fd: signals.fd, extent: signals.extent }]).unwrap_err()
    }

    #[test]
    fn memory_that_could_kill_this_rank_is_refused() {
        let open = rustix::fs::memfd_create("window", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&open, BYTES).unwrap();
        let error = met_with(open);
        assert_eq!(error.kind(), ErrorKind::Protocol);
        assert!(error.to_string().contains("expected F_SEAL_SHRINK"), "{error}");
        let error = met_with(memory::create("window", BYTES - 1).unwrap());
        assert!(error.to_string().contains("found 4095 bytes of memory"), "{error}");
    }
}
