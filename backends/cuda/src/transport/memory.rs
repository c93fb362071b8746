//! What this rank shares with its peers, and what it has mapped of each.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_handover::{Extent, Handed, Memory};

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
    pub(super) fn new(context: &Arc<Context>, signals: u32) -> Result<(Self, (OwnedFd, Extent))> {
        let signals = Vmm::new(context, SPACING * u64::from(signals))?;
        let fd = signals
            .fd()
            .try_clone()
            .map_err(|e| Error::system("share signals", "the descriptor cannot be copied", e))?;
        let extent = Extent { offset: 0, bytes: signals.bytes() };
        let local = Self { context: Arc::clone(context), windows: Vec::new(), signals };
        Ok((local, (fd, extent)))
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
            let bytes = extent.bytes.next_multiple_of(unit);
            mappings.push(Reserved::import(&self.context, fd, bytes)?);
        }
        let mut windows: Vec<_> = mappings.iter().map(Reserved::address).collect();
        let Some(signals) = windows.pop() else {
            return Err(Error::new(ErrorKind::Internal, "meet peer", "no signals came"));
        };
        Ok(Peer { windows, signals, _mappings: mappings })
    }
}
