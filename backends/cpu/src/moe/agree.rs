//! How ranks enter an operation together, and leave it together when one of them refuses.
//!
//! A rank enters with a record to each peer for each group of its rows. So every rank receives an entry for each
//! source, and all draw the same conclusion from them. Where losses are masked among domains they do not all
//! receive the same: see `verdicts`.

use tokenyard_core::signature::Signature;
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::engine::control::{Header, Signal, Verdict};
use crate::engine::losses::Losses;
use crate::engine::order::{SlotOrder, Wait};
use crate::engine::record::{Record, bad_record, checked, verdict_of};
use crate::engine::sending::{RecordPlace, send_record};
use crate::moe::entry::{Enter, Entry, NO_ENTRY, PeerRefusal, Terms};
use crate::moe::routing::RoutingTable;
use crate::moe::runner::Runner;

/// The terms that a peer gets about the rows of a group: `(group, peer)`.
pub(crate) type ToPeer<'f> = dyn for<'a> Fn(&'a RoutingTable, u32, u32) -> Terms<'a> + 'f;

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

/// Announces to every peer how this rank enters, for each group of its rows; or that the group's source is lost.
pub(crate) fn announce(
    runner: &Runner,
    slot: usize,
    enter: &Enter<'_>,
    to_peer: &ToPeer<'_>,
) -> Result<()> {
    for group in runner.exchange.member.domains.all() {
        let is_gone = runner.routing.is_source_gone(group) && enter.refusal.is_none();
        for peer in runner.exchange.member.domains.peers() {
            let terms = || to_peer(&runner.routing, group, peer);
            let record = if is_gone {
                terms().record(enter.operation, Verdict::Gone, Signature::default(), 0)
            } else {
                enter.record(terms)
            };
            let place = runner.exchange.member.domains.place(group, peer);
            send_record(
                &runner.order,
                &runner.places,
                RecordPlace { signal: Signal::Entry, slot, place },
                record,
            )?;
        }
    }
    Ok(())
}

/// Announces to every peer that this rank refuses.
pub(crate) fn post_refusal(runner: &Runner, slot: usize, enter: &Enter<'_>) -> Result<()> {
    announce(runner, slot, enter, &|_, _, _| Terms::rows(0))
}

/// Receives every source's entry, or reads it again, and returns the first refusal. All are received,
/// whatever they say, so that the counts stay right. The own domain comes first: its entries depend on
/// no other, so ranks that are out of step find out.
pub(crate) fn poll_entries(
    runner: &mut Runner,
    slot: usize,
    enter: &Enter<'_>,
) -> Result<Option<PeerRefusal>> {
    let mut refused = None;
    for source in runner.exchange.member.domains.places() {
        let (operation, phase) = (enter.operation, abi::TY_PHASE_ENTRY);
        let wait = Wait { operation, add: 1, phase, rank: runner.exchange.member.source(source) };
        let came = match runner.routing.agreed[slot] {
            Some(_) => !runner.order.losses().is_given_up(runner.exchange.member.forwarder(source)),
            None => runner.order.wait(Signal::Entry, slot, source, wait)?,
        };
        if !came {
            runner.routing.forget_entry(source);
            continue;
        }
        let record = runner.places.record_from(Signal::Entry, slot, source);
        let rank = runner.exchange.member.source(source);
        let header = checked(record, rank, operation)?;
        let is_own =
            runner.exchange.member.domains.domain_of(source) == runner.exchange.member.domains.mine;
        let may_be_gone = !is_own && runner.order.losses().are_masked();
        if may_be_gone && header.verdict() == Some(Verdict::Gone) {
            note_gone(&mut runner.routing, &runner.order, source, &header);
            continue;
        }
        let is_new = |losses: &Losses| losses.is_handed_on(source, operation);
        let verdict = verdict_of(&header, rank)?;
        if runner.exchange.member.has_groups()
            && verdict == Verdict::Go
            && !is_new(runner.order.losses())
        {
            return Err(bad_record(
                rank,
                "an entry, after its forwarder had reported it lost".into(),
            ));
        }
        let theirs = header.signature();
        let equal = if verdict == Verdict::Go && enter.refusal.is_none() {
            theirs == enter.signature && header.0[7] == enter.origin
        } else {
            theirs.sort() == enter.signature.sort()
        };
        if !equal {
            return Err(mismatch(rank, &header, runner.exchange.member.rank, enter));
        }
        if verdict == Verdict::Go {
            accept_entry(&mut runner.routing, source, &header, record)?;
        } else {
            runner.routing.forget_entry(source);
            let ranks = runner.order.ranks();
            refused = PeerRefusal::first(refused, PeerRefusal::of(record, rank, ranks)?);
        }
    }
    Ok(refused)
}

/// A source that its forwarder reports as lost. The rest of the record is about the forwarder
/// itself, and counts.
#[cold]
fn note_gone(routing: &mut RoutingTable, order: &SlotOrder, source: u32, header: &Header) {
    order.losses().note_gone(source, header.operation());
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
    if rows > u64::from(routing.exchange.regions.max_tokens) {
        let text = format!("{rows} rows of {}", routing.exchange.regions.max_tokens);
        return Err(bad_record(routing.exchange.member.source(source), text));
    }
    let signature = header.signature();
    let arrays = signature.arrays();
    let entry = Entry { rows, arrays, base_x: header.0[4], base_weights: header.0[5], gone: false };
    routing.gathered.entries[source as usize] = entry;
    routing.gathered.rows[source as usize] = rows as u32;
    if signature.carries_counts() {
        let local = routing.exchange.regions.local_experts() as usize;
        let counts = &mut routing.gathered.counts[source as usize * local..][..local];
        record.copy_counts(0, counts);
    }
    Ok(())
}
