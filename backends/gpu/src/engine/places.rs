//! Where data lies: regions of the arena.

use tokenyard_core::Result;
use tokenyard_core::moe::{Arena, Holder, Region};

use crate::engine::mode::Mode;

/// The arena, which is a window that peers read or write.
#[derive(Debug)]
pub(crate) struct Places {
    pub(crate) arena: Arena,
    /// Its address.
    pub(crate) arena_at: u64,
    bytes: u64,
}

impl Places {
    /// An arena of `bytes` at an address; errors name the key that sets its size.
    pub(crate) fn new(arena_at: u64, bytes: u64, key: String) -> Self {
        Self { arena: Arena::new(bytes, key), arena_at, bytes }
    }

    /// Where a region begins.
    pub(crate) fn address(&self, region: &Region) -> u64 {
        self.arena_at + region.offset
    }

    /// The arena offset of memory that lies entirely in the arena, at an address that can be read by
    /// 16 bytes.
    pub(crate) fn offset_of(&self, address: u64, bytes: u64) -> Option<u64> {
        let offset = address.checked_sub(self.arena_at)?;
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes && offset.is_multiple_of(16)).then_some(offset)
    }

    /// A region for an operation: of the memory of graphs, if it is recorded.
    pub(crate) fn allocate(&mut self, bytes: u64, holder: Holder, mode: &Mode) -> Result<Region> {
        match mode.is_recorded() {
            true => self.arena.allocate_captured(bytes, holder),
            false => self.arena.allocate(bytes, holder),
        }
    }

    /// Returns regions that no operation received.
    pub(crate) fn release<'a>(&mut self, regions: impl IntoIterator<Item = &'a Region>) {
        regions.into_iter().for_each(|region| self.arena.release(region.id));
    }
}
