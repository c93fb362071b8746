//! One link as the engine uses it: its signals, and who is behind its peer numbers.

use tokenyard_core::Result;
use tokenyard_core::abi;
use tokenyard_core::link::Link;

use super::control::{Ids, Signal};
use super::windows::LARGEST_PUT;

/// A link to a team: a domain (or the whole world, where one link reaches it), or a rail.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) link: Link,
    /// One of `TY_LEVEL_*`.
    pub(super) level: u64,
    /// World rank of peer 0, and from one peer to the next.
    ranks: (u32, u32),
    pub(super) ids: Ids,
    /// Totals expected so far, by signal id (INV-2: counted, never reset).
    expected: Vec<u64>,
    pub(super) largest_put: u64,
}

impl Channel {
    /// # Safety
    /// As [`Link::from_abi`].
    pub(super) unsafe fn new(
        raw: &abi::TyLink,
        level: u64,
        ranks: (u32, u32),
        ids: Ids,
    ) -> Result<Self> {
        // SAFETY: by this function's contract.
        let link = unsafe { Link::from_abi(raw)? };
        Ok(Self {
            link,
            level,
            ranks,
            ids,
            expected: vec![0; ids.count() as usize],
            largest_put: link.capabilities().largest_put.min(LARGEST_PUT),
        })
    }

    /// The world rank of a peer.
    pub(super) fn rank_of(&self, peer: u32) -> u32 {
        self.ranks.0 + peer * self.ranks.1
    }

    /// Expects a signal `add` more times than before; returns its id and the total that says so.
    pub(super) fn expect(
        &mut self,
        signal: Signal,
        slot: usize,
        writer: u32,
        add: u64,
    ) -> (u32, u64) {
        let id = self.ids.id(signal, slot, writer);
        let expected = &mut self.expected[id as usize];
        *expected = expected.wrapping_add(add);
        (id, *expected)
    }
}
