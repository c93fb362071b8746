//! Whether an operation is refused, as all ranks agree.
//!
//! A refusal is in the refuser's entry, or, where places are counted, in its grants. Where losses are
//! masked among domains, a forwarder may be lost while it passes on a refusal of its rail. So there the ranks of
//! a domain inform each other once more before one of them concludes. Rounds without rows carry a refusal
//! between domains, and from those ranks of a domain that have learned it on their rail to the others.

use tokenyard_core::call::AgreeCall;
use tokenyard_core::refusal::CallRefusal;
use tokenyard_core::{Result, abi};

use crate::engine::commands::Raise;
use crate::engine::control::{Header, Signal, Verdict};
use crate::engine::counters::LevelPeer;
use crate::engine::order::{QUEUE, SlotOrder, Wait};
use crate::engine::record::{
    Body, NewRecord, Record, bad_record, checked, refusal_record, verdict_of,
};
use crate::engine::sending::{RecordPlace, send_record};
use crate::moe::agree::poll_entries;
use crate::moe::entry::{Enter, PeerRefusal};
use crate::moe::runner::Runner;

/// The rise of a signal for each step of a verdict's number. A peer that has left the round may enter the next
/// operation before this rank reads the verdict, and its entry raises the same signal by 1.
const STEP: u64 = 4;

/// The number of a verdict, and how much of a signal's rise is its part.
fn verdict_in(rise: u64) -> (u64, u64) {
    let steps = rise / STEP;
    (steps.saturating_sub(1), steps * STEP)
}

/// A number for a refusal, above 0; room for 2 R. 0 is none.
fn code_of(refusal: Option<&CallRefusal<'_>>) -> u64 {
    refusal.map_or(0, |refusal| 1 + 2 * u64::from(refusal.rank) + u64::from(refusal.is_full))
}

/// The refusal behind a number.
fn decode(code: u64) -> Option<PeerRefusal> {
    let code = code.checked_sub(1)?;
    Some(PeerRefusal { rank: (code / 2) as u32, is_full: code % 2 == 1, record: None })
}

/// Receives every source's entry, and agrees with the others on whether some rank refuses.
pub(crate) fn gather_entries(runner: &mut Runner, slot: usize, enter: &Enter<'_>) -> Result<()> {
    let refused = poll_entries(runner, slot, enter)?;
    conclude(runner, slot, enter, refused)
}

/// The first refusal, in order of ranks, is the answer of all ranks. Where losses are masked among
/// domains, some ranks may not have received it. Those grant places, and learn of the refusal from a rank
/// that grants none.
pub(crate) fn conclude(
    runner: &mut Runner,
    slot: usize,
    enter: &Enter<'_>,
    refused: Option<PeerRefusal>,
) -> Result<()> {
    let refused = share(runner, slot, enter, refused)?;
    refused.map_or(Ok(()), |refusal| Err(refusal.error()))
}

/// The first refusal that some rank of the team has received.
pub(crate) fn share(
    runner: &mut Runner,
    slot: usize,
    enter: &Enter<'_>,
    refused: Option<PeerRefusal>,
) -> Result<Option<PeerRefusal>> {
    if !runner.order.masks_domains() {
        return Ok(refused);
    }
    let operation = enter.operation;
    if !enter.signature.carries_counts() {
        let known = refused.as_ref().map(PeerRefusal::refusal);
        let received =
            share_verdict(&runner.order, slot, operation, Signal::Grant, known.as_ref())?;
        return Ok(received.map_or(refused, |received| PeerRefusal::first(refused, received)));
    }
    // The grants that follow carry the refusal too.
    let Some(refusal) = refused else { return Ok(None) };
    refuse_grants(runner, slot, operation, &refusal.refusal())?;
    let received = poll_grants(runner, slot, operation, None)?;
    Ok(received.map_or(refused, |received| PeerRefusal::first(refused, received)))
}

/// Receives every peer's grants, for the rows of every group.
pub(crate) fn gather_grants(
    runner: &mut Runner,
    slot: usize,
    operation: u64,
    handle: usize,
) -> Result<()> {
    let refused = poll_grants(runner, slot, operation, Some(handle))?;
    refused.map_or(Ok(()), |refusal| Err(refusal.error()))
}

/// Receives the grants of the team, and stores the places in a handle; returns the first refusal.
fn poll_grants(
    runner: &mut Runner,
    slot: usize,
    operation: u64,
    handle: Option<usize>,
) -> Result<Option<PeerRefusal>> {
    let mut refused = None;
    for place in runner.exchange.member.domains.places() {
        let rank = runner.exchange.member.forwarder(place);
        let wait = Wait { operation, add: 1, phase: abi::TY_PHASE_GRANT, rank };
        if !runner.order.wait(Signal::Grant, slot, place, wait)? {
            continue;
        }
        let record = runner.places.record_from(Signal::Grant, slot, place);
        match (refusal_in(&runner.order, record, rank, operation)?, handle) {
            (Some(refusal), _) => refused = PeerRefusal::first(refused, refusal),
            (None, Some(handle)) => runner.routing.accept_grant(place, record, handle),
            (None, None) => {}
        }
    }
    Ok(refused)
}

/// Grants nothing, because of a refusal that has arrived.
fn refuse_grants(
    runner: &Runner,
    slot: usize,
    operation: u64,
    refusal: &CallRefusal<'_>,
) -> Result<()> {
    for place in runner.exchange.member.domains.places() {
        let to = RecordPlace { signal: Signal::Grant, slot, place };
        send_record(&runner.order, &runner.places, to, refusal_record(operation, refusal))?;
    }
    Ok(())
}

/// A round without rows on the rail: refusals cross from domain to domain.
pub(crate) fn agree_on_rail(runner: &Runner, slot: usize, call: &AgreeCall<'_>) -> Result<()> {
    let (operation, known) = (call.operation, call.refusal);
    for peer in runner.exchange.member.domains.peers() {
        let record = match &known {
            Some(refusal) => refusal_record(operation, refusal),
            None => {
                let header = Header([operation, Verdict::Go as u64, 0, 0, 0, 0, 0, 0]);
                NewRecord { header, body: Body::Nothing }
            }
        };
        let to = RecordPlace { signal: Signal::Grant, slot, place: peer };
        send_record(&runner.order, &runner.places, to, record)?;
    }
    let mut refused = None;
    for peer in runner.exchange.member.domains.peers() {
        let rank = runner.exchange.member.rank_of(peer);
        // A rank may have to wait here for a rank that itself waits for a late rank of its domain.
        let wait = Wait { operation, add: 1, phase: abi::TY_PHASE_ENTRY, rank };
        if !runner.order.wait(Signal::Grant, slot, peer, wait)? {
            continue;
        }
        let record = runner.places.record_from(Signal::Grant, slot, peer);
        if let Some(refusal) = refusal_in(&runner.order, record, rank, operation)? {
            refused = PeerRefusal::first(refused, refusal);
        }
    }
    refused.map_or(Ok(()), |refusal| Err(refusal.error()))
}

/// A round without rows inside a domain: what ranks have learned on their rails.
pub(crate) fn agree_inside(runner: &Runner, call: &AgreeCall<'_>) -> Result<()> {
    let (slot, operation) = (runner.order.slot(call.operation), call.operation);
    // The first use of the signal is over: a rank that gets here has received all entries.
    let received =
        share_verdict(&runner.order, slot, operation, Signal::Entry, call.refusal.as_ref())?;
    let other = match (&call.refusal, received) {
        // The text of this rank itself is more exact.
        (Some(known), Some(received)) if received.rank >= known.rank => return Err(known.error()),
        (_, received) => received,
    };
    other.map_or(Ok(()), |refusal| Err(refusal.error()))
}

/// Exchanges refusals in a team by the amount of a signal's rise, because the records of the operation are
/// in use. So a rank that first learns of the refusal here gets no text. Returns the first refusal, `known`
/// included.
fn share_verdict(
    order: &SlotOrder,
    slot: usize,
    operation: u64,
    signal: Signal,
    known: Option<&CallRefusal<'_>>,
) -> Result<Option<PeerRefusal>> {
    let domains = &order.member.domains;
    let id = order.channel.ids.id(signal, slot, domains.place(domains.mine, domains.index));
    let add = STEP * (1 + code_of(known));
    for peer in domains.peers() {
        order.raise(slot, Raise { operation, peer, signal: id, add })?;
    }
    let mut refused = None;
    for peer in domains.peers() {
        let (place, rank) = (domains.place(domains.mine, peer), order.member.rank_of(peer));
        let wait = Wait { operation, add: STEP, phase: abi::TY_PHASE_ENTRY, rank };
        if !order.wait(signal, slot, place, wait)? {
            continue;
        }
        let (id, expected) = order.channel.expect(signal, slot, place, 0);
        // One command raised it.
        let rise = order.channel.link.read_signal(QUEUE, id).wrapping_sub(expected);
        let (code, part) = verdict_in(rise.saturating_add(STEP));
        order.channel.expect(signal, slot, place, part - STEP);
        order.counters().add_seen(LevelPeer { level: order.channel.level, rank }, part - STEP);
        if code > 2 * u64::from(order.ranks()) {
            return Err(bad_record(rank, format!("verdict {code}")));
        }
        refused = decode(code).map_or(refused, |refusal| PeerRefusal::first(refused, refusal));
    }
    Ok(refused)
}

/// The refusal that the record of a grant or verdict is, if it is one.
fn refusal_in(
    order: &SlotOrder,
    record: Record,
    writer: u32,
    operation: u64,
) -> Result<Option<PeerRefusal>> {
    let header = checked(record, writer, operation)?;
    match verdict_of(&header, writer)? {
        Verdict::Go => Ok(None),
        _ => PeerRefusal::of(record, writer, order.ranks()).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_is_the_same_where_its_rank_has_entered_the_next_operation() {
        for code in 0..=8 {
            let rise = STEP * (1 + code);
            for entries in [0, 1] {
                assert_eq!(verdict_in(rise + entries), (code, rise));
            }
        }
        // The rise by an entry may come first. It is no verdict, so the wait goes on.
        assert_eq!(verdict_in(1), (0, 0));
    }

    #[test]
    fn a_refusal_is_distinguished_by_how_far_a_signal_rises() {
        assert!(decode(code_of(None)).is_none());
        for rank in 0..4 {
            for is_full in [false, true] {
                let code = code_of(Some(&CallRefusal { rank, is_full, why: "" }));
                let decoded = decode(code).map(|decoded| (decoded.rank, decoded.is_full));
                assert_eq!(decoded, Some((rank, is_full)));
                assert!((1..=8).contains(&code), "{code}");
            }
        }
    }
}
