//! The memory that this rank shares with its peers, and the memory of each that it has mapped.

use std::sync::Arc;

use tokenyard_core::fd_exchange::{Extent, Handed, Memory, SignalMemory};
use tokenyard_core::{Error, ErrorKind, Result};

use super::SPACING;
use crate::driver::{Context, Reserved, Vmm, granularity};

/// A rank whose memory can be reached: another one, or this one itself.
#[derive(Debug)]
pub(super) struct Peer {
    /// Device addresses, in order of registration.
    pub(super) windows: Vec<u64>,
    pub(super) signals: u64,
    /// Keeps the addresses above mapped; nothing for this rank itself.
    _mappings: Vec<Reserved>,
}

/// This rank's own memory.
#[derive(Debug)]
pub(super) struct Local {
    context: Arc<Context>,
    /// Device addresses, in order of registration.
    pub(super) windows: Vec<u64>,
    signals: Vmm,
}

impl Local {
    /// Makes the signals; their memory is behind the descriptor.
    pub(super) fn new(context: &Arc<Context>, signals: u32) -> Result<(Self, SignalMemory)> {
        let signals = Vmm::new(context, SPACING * u64::from(signals))?;
        let fd = signals
            .fd()
            .try_clone()
            .map_err(|e| Error::system("share signals", "the descriptor cannot be copied", e))?;
        let extent = Extent { offset: 0, bytes: signals.bytes() };
        let local = Self { context: Arc::clone(context), windows: Vec::new(), signals };
        Ok((local, SignalMemory { fd, extent }))
    }

    pub(super) fn signals(&self) -> u64 {
        self.signals.address()
    }
}

impl Memory for Local {
    type Peer = Peer;

    fn own(&self) -> Peer {
        Peer {
            windows: self.windows.clone(),
            signals: self.signals.address(),
            _mappings: Vec::new(),
        }
    }

    fn map(&self, memory: Vec<Handed>) -> Result<Peer> {
        let unit = granularity(self.context.device)?;
        let mut mappings = Vec::with_capacity(memory.len());
        for Handed { fd, extent } in &memory {
            let bytes = whole(extent, unit)?;
            mappings.push(Reserved::import(&self.context, fd, bytes)?);
        }
        let mut windows: Vec<_> = mappings.iter().map(Reserved::address).collect();
        let Some(signals) = windows.pop() else {
            return Err(Error::new(ErrorKind::Internal, "meet peer", "no signals came"));
        };
        Ok(Peer { windows, signals, _mappings: mappings })
    }
}

/// The length of a peer's memory, which is mapped whole.
fn whole(extent: &Extent, unit: u64) -> Result<u64> {
    if extent.offset == 0 && extent.bytes > 0 && extent.bytes.is_multiple_of(unit) {
        return Ok(extent.bytes);
    }
    let message = format!(
        "found {} bytes at {} of an allocation; expected a multiple of {unit} at 0",
        extent.bytes, extent.offset
    );
    Err(Error::new(ErrorKind::Protocol, "map memory", message)
        .with_fix("use GPUs of one kind, and the same version of tokenyard on all ranks"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_allocations_of_a_peer_are_mapped() {
        let check = |offset, bytes| whole(&Extent { offset, bytes }, 4096);
        assert_eq!(check(0, 8192).unwrap(), 8192);
        for (offset, bytes) in [(4096, 4096), (0, 0), (0, 100), (u64::MAX, u64::MAX)] {
            let error = check(offset, bytes).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol, "{bytes} at {offset}");
        }
    }
}
