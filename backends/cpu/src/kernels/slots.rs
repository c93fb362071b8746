//! Entering and leaving the slots of operations (INV-5): a slot is entered again when everybody is
//! through with its last operation.

use tokenyard_core::abi;
use tokenyard_core::{Error, ErrorKind, Result};

use super::control::Signal;
use super::engine::{Engine, Raise, Wait};

impl Engine {
    /// Makes a slot usable for a new operation: what it posted is done (INV-5), and all peers are
    /// through with its last one, so that its records and landing places may be written again. A
    /// peer that is not has not arrived yet, and may be as late as for an entry.
    pub(super) fn enter_slot(&mut self, operation: u64) -> Result<usize> {
        let slot = self.slot(operation);
        self.wait_posted(slot, operation)?;
        if self.owed[slot] {
            self.wait_done(slot, operation, abi::TY_PHASE_ENTRY)?;
        }
        Ok(slot)
    }

    /// Tells all peers that this rank is through with the operation of a slot. Every operation that
    /// does not close the yard ends so, once, on every rank.
    pub(super) fn leave(&mut self, slot: usize, operation: u64) -> Result<()> {
        for peer in self.rotation() {
            self.raise(Signal::Done, slot, peer, Raise { operation, add: 1 })?;
        }
        self.owed[slot] = true;
        Ok(())
    }

    /// Waits until all peers are through with the operation that this rank left last in a slot.
    pub(super) fn wait_done(&mut self, slot: usize, operation: u64, phase: u64) -> Result<()> {
        for peer in self.rotation() {
            self.wait(Signal::Done, slot, peer, Wait { operation, add: 1, phase })?;
        }
        self.owed[slot] = false;
        Ok(())
    }

    /// Leaves the slot where an operation ended on all ranks alike: refused, or without room.
    pub(super) fn leave_if_refused<T>(
        &mut self,
        slot: usize,
        operation: u64,
        result: Result<T>,
    ) -> Result<T> {
        if result.as_ref().is_err_and(was_refused) {
            self.leave(slot, operation)?;
        }
        result
    }
}

/// Whether an error ends the operation on all ranks and leaves the yard usable. Only what ranks tell
/// each other in records, or all find alike before they enter, may have these kinds.
pub(super) fn was_refused(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Refused | ErrorKind::Full | ErrorKind::InvalidInput)
}
