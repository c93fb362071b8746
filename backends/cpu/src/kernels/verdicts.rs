//! Whether an operation is refused, as all ranks agree.
//!
//! A refusal is in the refuser's entry, or, where places are counted, in its grants. Where losses are
//! masked among domains, a forwarder may be lost, and its domain receives nothing of its rail. So there the ranks
//! of a domain inform each other, then those of a rail, then those of a domain again: a rank that has lost
//! its partners on the rail, or in its domain, learns it too.

use tokenyard_core::signature::Signature;
use tokenyard_core::{Result, abi};

use super::agree::poll_entries;
use super::commands::Raise;
use super::control::{Signal, Verdict};
use super::counters::LevelPeer;
use super::engine::Engine;
use super::entry::{Enter, Refusal};
use super::order::{Order, QUEUE, Wait};
use super::record::{Record, bad_record, checked, refusal_record, verdict_of};
use super::sending::{send_rail_record, send_record};

impl Refusal {
    /// A number for it, above 0; room for 2 R.
    fn code(&self) -> u64 {
        1 + 2 * u64::from(self.rank) + u64::from(self.verdict == Verdict::Full)
    }

    /// The refusal behind a number; 0 is none.
    fn decode(code: u64) -> Option<Self> {
        let code = code.checked_sub(1)?;
        let verdict = if code % 2 == 1 { Verdict::Full } else { Verdict::Refused };
        Some(Self { rank: (code / 2) as u32, verdict, record: None })
    }
}

/// Receives every source's entry, and agrees with the others on whether some rank refuses.
pub(super) fn gather_entries(engine: &mut Engine, slot: usize, enter: &Enter<'_>) -> Result<()> {
    let refused = poll_entries(engine, slot, enter)?;
    conclude(engine, slot, enter, refused)
}

/// The first refusal, in order of ranks, is the answer of all ranks. Not all may have received it
/// where losses are masked among domains: then those grant places, and learn it from a rank that does not.
pub(super) fn conclude(
    engine: &mut Engine,
    slot: usize,
    enter: &Enter<'_>,
    refused: Option<Refusal>,
) -> Result<()> {
    let refused = if engine.order.masks_domains() {
        let heard = match refused {
            Some(refusal) if enter.signature.carries_counts() => {
                refuse_grants(engine, slot, enter.operation, &refusal)?;
                poll_grants(engine, slot, enter.operation, None)?
            }
            _ => None,
        };
        let refused = heard.map_or(refused, |heard| Refusal::first(refused, heard));
        settle_verdict(engine, slot, enter.operation, enter.signature, refused)?
    } else {
        refused
    };
    refused.map_or(Ok(()), |refusal| Err(refusal.error()))
}

/// Receives every peer's grants, for the rows of every domain; then whether the other domains
/// granted theirs.
pub(super) fn gather_grants(
    engine: &mut Engine,
    slot: usize,
    operation: u64,
    signature: Signature,
    handle: usize,
) -> Result<()> {
    let refused = poll_grants(engine, slot, operation, Some(handle))?;
    let refused = settle_verdict(engine, slot, operation, signature, refused)?;
    refused.map_or(Ok(()), |refusal| Err(refusal.error()))
}

/// Receives the grants of this domain, and stores the places in a handle; returns the first refusal.
fn poll_grants(
    engine: &mut Engine,
    slot: usize,
    operation: u64,
    handle: Option<usize>,
) -> Result<Option<Refusal>> {
    let mut refused = None;
    for place in engine.world.domains.places() {
        let rank = engine.world.domains.forwarder(place);
        let wait = Wait { operation, add: 1, phase: abi::TY_PHASE_GRANT, rank };
        if !engine.order.wait(Signal::Grant, slot, place, wait)? {
            continue;
        }
        let record = engine.places.record_from(Signal::Grant, slot, place);
        match (refusal_in(&engine.order, record, rank, operation)?, handle) {
            (Some(refusal), _) => refused = Refusal::first(refused, refusal),
            (None, Some(handle)) => engine.routing.accept_grant(place, record, handle),
            (None, None) => {}
        }
    }
    Ok(refused)
}

/// Grants nothing, because of a refusal that has arrived.
fn refuse_grants(engine: &Engine, slot: usize, operation: u64, refusal: &Refusal) -> Result<()> {
    for place in engine.world.domains.places() {
        let record = refusal_record(operation, refusal.verdict, refusal.rank, refusal.text());
        send_record(engine, Signal::Grant, slot, place, record)?;
    }
    Ok(())
}

/// Passes on the refusals that this rank knows, and receives those of others. Returns the first refusal.
pub(super) fn settle_verdict(
    engine: &mut Engine,
    slot: usize,
    operation: u64,
    signature: Signature,
    refused: Option<Refusal>,
) -> Result<Option<Refusal>> {
    let refused = exchange_verdicts(engine, slot, operation, refused)?;
    if !engine.order.masks_domains() {
        return Ok(refused);
    }
    // One that has no other use in the operation, or whose first one is over: a rank that granted had received all
    // entries.
    let signal = if signature.carries_counts() { Signal::Entry } else { Signal::Grant };
    share_verdict(&mut engine.order, slot, operation, signal, refused)
}

/// Exchanges refusals over the rail.
fn exchange_verdicts(
    engine: &mut Engine,
    slot: usize,
    operation: u64,
    mut refused: Option<Refusal>,
) -> Result<Option<Refusal>> {
    for domain in engine.world.domains.others() {
        let record = match &refused {
            Some(refusal) => {
                refusal_record(operation, refusal.verdict, refusal.rank, refusal.text())
            }
            None => refusal_record(operation, Verdict::Go, 0, &[]),
        };
        send_rail_record(engine, Signal::Grant, slot, domain, record)?;
    }
    // Where not every rank receives from every other, a rank may have to wait for one that waits for a late one.
    let phase =
        if engine.order.masks_domains() { abi::TY_PHASE_ENTRY } else { abi::TY_PHASE_GRANT };
    for domain in engine.world.domains.others() {
        let forwarder = engine.world.domains.place(domain, engine.world.domains.index);
        let wait = Wait { operation, add: 1, phase, rank: forwarder };
        if !engine.order.wait_rail(Signal::Grant, slot, domain, wait)? {
            continue;
        }
        let record = engine.places.rail_record_from(Signal::Grant, slot, domain);
        if let Some(refusal) = refusal_in(&engine.order, record, forwarder, operation)? {
            refused = Refusal::first(refused, refusal);
        }
    }
    Ok(refused)
}

/// Exchanges refusals in the domain, by how far a signal rises: the records of the operation are in use. So a
/// rank that first learns of the refusal here gets no text.
fn share_verdict(
    order: &mut Order,
    slot: usize,
    operation: u64,
    signal: Signal,
    mut refused: Option<Refusal>,
) -> Result<Option<Refusal>> {
    let place = order.world.domains.place(order.world.domains.mine, order.world.domains.index);
    let id = order.channel.ids.id(signal, slot, place);
    let add = 1 + refused.as_ref().map_or(0, Refusal::code);
    for peer in order.world.domains.peers() {
        order.raise(&order.channel, slot, Raise { operation, peer, signal: id, add })?;
    }
    for peer in order.world.domains.peers() {
        let rank = order.world.domains.place(order.world.domains.mine, peer);
        let wait = Wait { operation, add: 1, phase: abi::TY_PHASE_ENTRY, rank };
        if !order.wait(signal, slot, rank, wait)? {
            continue;
        }
        let (id, expected) = order.channel.expect(signal, slot, rank, 0);
        // One command raised it, and nothing raises it again before this rank has left the operation.
        let code = order.channel.link.read_signal(QUEUE, id).wrapping_sub(expected);
        order.channel.expect(signal, slot, rank, code);
        order.counters.add_seen(LevelPeer { level: order.channel.level, rank }, code);
        if code > 2 * u64::from(order.world.shape.ranks) {
            return Err(bad_record(rank, format!("verdict {code}")));
        }
        refused = Refusal::decode(code).map_or(refused, |refusal| Refusal::first(refused, refusal));
    }
    Ok(refused)
}

/// The rank whose refusal the record of a grant or verdict is, if it is one.
fn refusal_in(
    order: &Order,
    record: Record,
    writer: u32,
    operation: u64,
) -> Result<Option<Refusal>> {
    let header = checked(record, writer, operation)?;
    let verdict = verdict_of(&header, writer)?;
    if verdict == Verdict::Go {
        return Ok(None);
    }
    let rank = u32::try_from(header.0[5]).unwrap_or(u32::MAX);
    // The refusing rank is in the writer's own domain. With masked losses among several domains it may be in
    // any: the writer may know of more refusals than this rank.
    let is_known = match order.masks_domains() {
        true => rank < order.world.shape.ranks,
        false => rank / order.world.domains.size == writer / order.world.domains.size,
    };
    if !is_known {
        return Err(bad_record(writer, format!("a refusal of rank {rank}")));
    }
    Ok(Some(Refusal { rank, verdict, record: Some(record) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_distinguished_by_how_far_a_signal_rises() {
        assert!(Refusal::decode(0).is_none());
        for rank in 0..4 {
            for verdict in [Verdict::Refused, Verdict::Full] {
                let code = Refusal { rank, verdict, record: None }.code();
                let decoded = Refusal::decode(code).map(|decoded| (decoded.rank, decoded.verdict));
                assert_eq!(decoded, Some((rank, verdict)));
                assert!((1..=8).contains(&code), "{code}");
            }
        }
    }
}
