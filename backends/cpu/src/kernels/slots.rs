//! Entering and leaving the slots of operations (INV-5): a slot is entered again when everybody is
//! through with its last operation. Everybody: the peers of the domain and of the rail. Nobody else
//! writes to this rank.

use tokenyard_core::abi;
use tokenyard_core::{Error, ErrorKind, Result};

use super::commands::Raise;
use super::control::Signal;
use super::engine::{Engine, Wait};

impl Engine {
    /// Makes a slot usable for a new operation: what it posted is done (INV-5), and all peers are
    /// through with its last one, so that its records and landing places may be written again. A
    /// peer that is not has not arrived yet, and may be as late as for an entry.
    pub(super) fn enter_slot(&mut self, operation: u64) -> Result<usize> {
        let slot = self.slot(operation);
        self.losses.begin(operation);
        self.wait_posted(slot, operation)?;
        if self.owed[slot] {
            self.wait_done(slot, operation, abi::TY_PHASE_ENTRY)?;
        }
        Ok(slot)
    }

    /// Tells all peers that this rank is through with the operation of a slot. Every operation that
    /// does not close the yard ends so, once, on every rank.
    pub(super) fn leave(&mut self, slot: usize, operation: u64) -> Result<()> {
        let raise = Raise { operation, add: 1 };
        let place = self.domains.place(self.domains.mine, self.domains.index);
        let done = self.channel.ids.id(Signal::Done, slot, place);
        for peer in self.domains.peers() {
            self.raise(&self.channel, slot, (peer, done), raise)?;
        }
        if let Some(rail) = &self.rail {
            let done = rail.channel.ids.id(Signal::Done, slot, self.domains.mine);
            for domain in self.domains.others() {
                self.raise(&rail.channel, slot, (domain, done), raise)?;
            }
        }
        self.owed[slot] = true;
        Ok(())
    }

    /// Waits until all peers are through with the operation that this rank left last in a slot.
    pub(super) fn wait_done(&mut self, slot: usize, operation: u64, phase: u64) -> Result<()> {
        for peer in self.domains.peers() {
            let rank = self.domains.place(self.domains.mine, peer);
            self.wait(Signal::Done, slot, rank, Wait { operation, add: 1, phase, rank })?;
        }
        for domain in self.domains.others() {
            let rank = self.domains.place(domain, self.domains.index);
            self.wait_rail(Signal::Done, slot, domain, Wait { operation, add: 1, phase, rank })?;
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
