//! Entering and leaving the slots of operations (INV-5). A slot is entered again when all peers
//! have left its last operation. No other rank writes to this rank in the exchange.

use tokenyard_core::refusal::is_refusal;
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::engine::channel::Channel;
use crate::engine::commands::Raise;
use crate::engine::control::Signal;
use crate::engine::counters::LevelPeer;
use crate::engine::ends::{End, Exposed};
use crate::engine::order::{QUEUE, SlotOrder, Wait};
use crate::engine::places::Places;

/// Whether an operation ended for the rank behind a place as it did here. Its `Done` has risen: one
/// command raised it, and the next raise comes after this rank has entered the slot again.
fn check_end(channel: &Channel, slot: usize, place: u32, rank: u32, end: End) -> Result<()> {
    let (id, expected) = channel.expect(Signal::Done, slot, place, end as u64 - 1);
    if channel.link.read_signal(QUEUE, id) == expected {
        Ok(())
    } else {
        Err(of_two_minds(rank, end))
    }
}

#[cold]
fn of_two_minds(rank: u32, end: End) -> Error {
    let (theirs, ours) = match end {
        End::Refused => ("completed the operation", "learned that it was refused"),
        End::Done => ("learned that the operation was refused", "completed it"),
    };
    let text = format!("rank {rank} {theirs}, and this rank {ours}: who refused was lost");
    Error::new(ErrorKind::Mismatch, "leave operation", text).with_rank(rank)
}

/// Whether an error ends the operation on all ranks and leaves the communicator usable. Only errors that
/// ranks report to each other in records, or that all ranks detect before they enter, may have these kinds.
pub(crate) fn was_refused(error: &Error) -> bool {
    is_refusal(error) || error.kind() == ErrorKind::InvalidInput
}

impl SlotOrder {
    /// Makes a slot usable for a new operation. Its posted commands are done then (INV-5), and all peers have
    /// left its last operation, so its records and landing places may be written again. A peer that has not
    /// left it has not arrived yet, and may be as late as for an entry.
    pub(crate) fn open_slot(&mut self, operation: u64) -> Result<usize> {
        let slot = self.slot(operation);
        self.losses().begin(operation);
        self.wait_posted(slot, operation)?;
        self.wait_done(slot, operation, abi::TY_PHASE_ENTRY)?;
        Ok(slot)
    }

    /// Announces to all peers that this rank has left the operation of a slot. Every operation that does
    /// not close the communicator ends so, once, on every rank.
    pub(crate) fn leave(&mut self, slot: usize, operation: u64, end: End) -> Result<()> {
        let place = self.member.domains.place(self.member.domains.mine, self.member.domains.index);
        let (add, signal) = (end as u64, self.channel.ids.id(Signal::Done, slot, place));
        for peer in self.member.domains.peers() {
            self.raise(slot, Raise { operation, peer, signal, add })?;
        }
        self.ends[slot] = Some(end);
        Ok(())
    }

    /// Waits until all peers have left the operation that this rank left last in a slot, unless that
    /// is known already. Then checks that it ended for them as it did here.
    pub(crate) fn wait_done(&mut self, slot: usize, operation: u64, phase: u64) -> Result<()> {
        let Some(end) = self.ends[slot] else { return Ok(()) };
        for peer in self.member.domains.peers() {
            let (place, rank) = (
                self.member.domains.place(self.member.domains.mine, peer),
                self.member.rank_of(peer),
            );
            let wait = Wait { operation, add: 1, phase, rank };
            if self.wait(Signal::Done, slot, place, wait)? {
                check_end(&self.channel, slot, place, rank, end)?;
                let at = LevelPeer { level: self.channel.level, rank };
                self.counters().add_seen(at, end as u64 - 1);
            }
        }
        self.ends[slot] = None;
        Ok(())
    }
}

/// Leaves the slot of an operation that ended on all ranks alike: refused, or without room.
pub(crate) fn leave_if_refused<T>(
    places: &Places,
    order: &mut SlotOrder,
    slot: usize,
    operation: u64,
    result: Result<T>,
) -> Result<T> {
    let exposed = order.exposed.take();
    if result.as_ref().is_err_and(was_refused) {
        order.leave(slot, operation, End::Refused)?;
        if let Some(exposed) = exposed {
            take_back(places, order, slot, operation, exposed)?;
        }
    }
    result
}

/// Takes back the memory that other ranks know of in an operation that was refused. Where losses are masked,
/// some ranks may not know of the refusal, because the rank that refused is lost. So this waits until all
/// have reported how the operation ended for them. No rank is elsewhere by then: each learned of the refusal
/// in the same call as this rank, or waits for this rank in that call.
fn take_back(
    places: &Places,
    order: &mut SlotOrder,
    slot: usize,
    operation: u64,
    exposed: Exposed,
) -> Result<()> {
    if order.losses().are_masked() {
        order.wait_done(slot, operation, abi::TY_PHASE_DONE)?;
    }
    let Some(region) = exposed.region else { return Ok(()) };
    let may_write = |peer| order.losses().may_write(order.member.rank_of(peer), operation);
    if order.member.domains.peers().any(may_write) {
        places.arena().quarantine(region.id);
    } else {
        places.arena().release(region.id);
    }
    Ok(())
}
