//! How ranks enter an operation together, and leave it together when one of them refuses.
//!
//! A source enters with a record to each peer of its domain and one over the rail to each other
//! domain; the forwarder there hands it on. So every rank receives all R entries, and all draw the same
//! conclusion from them. Where losses are masked they do not all receive the same: see `verdicts`.

use tokenyard_core::signature::Signature;
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::channel::no_rail;
use super::control::{Header, Signal, Verdict};
use super::engine::Engine;
use super::entry::{Enter, Entry, NO_ENTRY, Refusal, Terms};
use super::order::{Order, Wait};
use super::record::{Record, bad_record, checked, verdict_of};
use super::routing::RoutingTable;
use super::sending::{send_rail_record, send_record};

/// The terms that a peer of this domain gets about the rows of the source in a domain: `(domain, peer)`.
pub(super) type ToPeer<'f> = dyn for<'a> Fn(&'a RoutingTable, u32, u32) -> Terms<'a> + 'f;

/// The terms that the forwarder in a domain gets about this rank's rows.
pub(super) type ToDomain<'f> = dyn for<'a> Fn(&'a RoutingTable, u32) -> Terms<'a> + 'f;

#[cold]
fn mismatch(peer: u32, header: &Header, rank: u32, enter: &Enter<'_>) -> Error {
    let theirs = header.signature();
    let (theirs, ours) = if theirs == enter.signature {
        let handle = |origin| format!("used the handle of dispatch {origin}");
        (handle(header.0[7]), handle(enter.origin))
    } else {
        let call = |signature: Signature| format!("called a {}", signature.describe());
        (call(theirs), call(enter.signature))
    };
    Error::new(
        ErrorKind::Mismatch,
        "enter operation",
        format!("operation {}: rank {peer} {theirs}; rank {rank} {ours}", enter.operation),
    )
    .with_rank(peer)
    .with_fix("all ranks must call the same operations in the same order with the same types")
}

/// Announces to every rank how this one enters: the forwarders of the other domains, and the peers.
pub(super) fn announce_to_all(
    engine: &Engine,
    slot: usize,
    enter: &Enter<'_>,
    to_domain: &ToDomain<'_>,
    to_peer: &ToPeer<'_>,
) -> Result<()> {
    for domain in engine.world.domains.others() {
        let record = enter.record(|| to_domain(&engine.routing, domain));
        send_rail_record(engine, Signal::Entry, slot, domain, record)?;
    }
    announce(engine, slot, engine.world.domains.mine, enter, to_peer)
}

/// Announces to the peers how the source of a domain enters.
fn announce(
    engine: &Engine,
    slot: usize,
    domain: u32,
    enter: &Enter<'_>,
    to_peer: &ToPeer<'_>,
) -> Result<()> {
    for peer in engine.world.domains.peers() {
        let record = enter.record(|| to_peer(&engine.routing, domain, peer));
        let source = engine.world.domains.place(domain, peer);
        send_record(engine, Signal::Entry, slot, source, record)?;
    }
    Ok(())
}

/// Receives the entries of the sources at the other ends of the rail, and hands on to the peers how they enter.
pub(super) fn relay(
    engine: &mut Engine,
    slot: usize,
    operation: u64,
    to_peer: &ToPeer<'_>,
) -> Result<()> {
    for domain in engine.world.domains.others() {
        poll_entry(engine, slot, domain, operation)?;
        hand_on(engine, slot, domain, operation, to_peer)?;
    }
    Ok(())
}

/// Hands on how the source of a domain enters, which has arrived; or that it is lost.
pub(super) fn hand_on(
    engine: &Engine,
    slot: usize,
    domain: u32,
    operation: u64,
    to_peer: &ToPeer<'_>,
) -> Result<()> {
    if engine.routing.heard(domain)?.gone {
        for peer in engine.world.domains.peers() {
            let terms = to_peer(&engine.routing, domain, peer);
            let record = terms.record(operation, Verdict::Gone, Signature::default(), 0);
            let source = engine.world.domains.place(domain, peer);
            send_record(engine, Signal::Entry, slot, source, record)?;
        }
        return Ok(());
    }
    let record = engine.places.rail_record_from(Signal::Entry, slot, domain);
    let header = record.header();
    let refusal = header.verdict().filter(|verdict| *verdict != Verdict::Go);
    let enter = Enter {
        operation,
        signature: header.signature(),
        origin: header.0[7],
        refusal: refusal.map(|verdict| (verdict, record.text())),
    };
    announce(engine, slot, domain, &enter, to_peer)
}

/// Announces to every rank that this one refuses, and hands on what others say.
pub(super) fn post_refusal(engine: &mut Engine, slot: usize, enter: &Enter<'_>) -> Result<()> {
    announce_to_all(engine, slot, enter, &|_, _| Terms::rows(0), &|_, _, _| Terms::rows(0))?;
    relay(engine, slot, enter.operation, &|_, _, _| Terms::rows(0))
}

/// Receives every source's entry, or reads it again, and returns the first refusal. All are received,
/// whatever they say, so that the counts stay right. The own domain comes first: its entries depend on
/// no other, so ranks that are out of step find out.
pub(super) fn poll_entries(
    engine: &mut Engine,
    slot: usize,
    enter: &Enter<'_>,
) -> Result<Option<Refusal>> {
    let mut refused = None;
    for source in engine.world.domains.places() {
        let (operation, phase) = (enter.operation, abi::TY_PHASE_ENTRY);
        let wait = Wait { operation, add: 1, phase, rank: source };
        let came = match engine.routing.agreed[slot] {
            Some(_) => !engine.order.losses.is_given_up(engine.world.domains.forwarder(source)),
            None => engine.order.wait(Signal::Entry, slot, source, wait)?,
        };
        if !came {
            engine.routing.forget_entry(source);
            continue;
        }
        let record = engine.places.record_from(Signal::Entry, slot, source);
        let header = checked(record, source, operation)?;
        let is_own = engine.world.domains.domain_of(source) == engine.world.domains.mine;
        let may_be_gone = !is_own && engine.order.losses.are_masked();
        if may_be_gone && header.verdict() == Some(Verdict::Gone) {
            note_gone(&mut engine.routing, &engine.order, source, &header);
            continue;
        }
        if !engine.order.losses.is_handed_on(source, operation) {
            return Err(bad_record(
                source,
                "an entry, after its forwarder had reported it lost".into(),
            ));
        }
        let theirs = header.signature();
        let verdict = verdict_of(&header, source)?;
        let equal = if verdict == Verdict::Go && enter.refusal.is_none() {
            theirs == enter.signature && header.0[7] == enter.origin
        } else {
            theirs.sort() == enter.signature.sort()
        };
        if !equal {
            return Err(mismatch(source, &header, engine.world.rank, enter));
        }
        if verdict == Verdict::Go {
            accept_entry(&mut engine.routing, source, &header, record)?;
        } else {
            engine.routing.forget_entry(source);
            let record = Some(record);
            refused = Refusal::first(refused, Refusal { rank: source, verdict, record });
        }
    }
    Ok(refused)
}

/// A source that its forwarder says is lost; what the record says of the forwarder itself stays.
#[cold]
fn note_gone(routing: &mut RoutingTable, order: &Order, source: u32, header: &Header) {
    order.losses.note_gone(source, header.operation());
    routing.forget_entry(source);
    let [.., rows, base_x, base_weights, _, _] = header.0;
    let entry = Entry { rows, base_x, base_weights, gone: true, ..NO_ENTRY };
    routing.gathered.entries[source as usize] = entry;
}

fn accept_entry(
    routing: &mut RoutingTable,
    source: u32,
    header: &Header,
    record: Record,
) -> Result<()> {
    let rows = header.0[3];
    if rows > u64::from(routing.world.shape.max_tokens) {
        return Err(bad_record(
            source,
            format!("{rows} rows of {}", routing.world.shape.max_tokens),
        ));
    }
    let signature = header.signature();
    let arrays = signature.arrays();
    let entry = Entry { rows, arrays, base_x: header.0[4], base_weights: header.0[5], gone: false };
    routing.gathered.entries[source as usize] = entry;
    routing.gathered.rows[source as usize] = rows as u32;
    if signature.carries_counts() {
        let local = routing.world.shape.local_experts() as usize;
        let counts = &mut routing.gathered.counts[source as usize * local..][..local];
        record.copy_counts(0, counts);
    }
    Ok(())
}

/// Receives how the source of a domain enters, or that it is lost.
pub(super) fn poll_entry(
    engine: &mut Engine,
    slot: usize,
    domain: u32,
    operation: u64,
) -> Result<()> {
    let source = engine.world.domains.place(domain, engine.world.domains.index);
    let wait = Wait { operation, add: 1, phase: abi::TY_PHASE_ENTRY, rank: source };
    if !engine.order.wait_rail(Signal::Entry, slot, domain, wait)? {
        if let Some(rail) = &mut engine.routing.rail {
            rail.forget(domain);
        }
        return Ok(());
    }
    let record = engine.places.rail_record_from(Signal::Entry, slot, domain);
    let header = checked(record, source, operation)?;
    let goes = verdict_of(&header, source)? == Verdict::Go;
    let rows = header.0[3];
    if rows > u64::from(engine.world.shape.max_tokens) {
        return Err(bad_record(
            source,
            format!("{rows} rows of {}", engine.world.shape.max_tokens),
        ));
    }
    let Some(rail) = &mut engine.routing.rail else { return Err(no_rail()) };
    rail.accept(domain, &header, record, goes);
    Ok(())
}
