//! Errors: a command that fails is reported once, and the transport stays unhealthy.

use anyhow::{Context as _, Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_COMMAND};
use tokenyard_core::{Error, ErrorKind};

use super::lost_peer::{PUTS, a_put_fails, end_of, is_known};
use super::needs::Needs;
use super::rig::Rig;
use super::{Body, TransportCase};
use crate::suite::Loss;

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "errors_are_reported",
        about: "a command with an unknown op ends as an error event of its peer and queue, and health reports the \
                first such error, about no peer, for ever",
        invariants: "INV-7",
        ranks: &[2],
        needs: Needs::TWO_QUEUES,
        body: Body::Breaking(errors_are_reported),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "the_first_error_stays_first",
        about: "without TY_CAP_MASKING health reports the first error for ever, of puts to two killed peers and of \
                unknown ops, in either order",
        invariants: "INV-7",
        ranks: &[4],
        flags: abi::TY_CAP_BOUNDED_PUT,
        without: abi::TY_CAP_MASKING,
        needs: PUTS,
        body: Body::Losing(Loss::Killed, 2, the_first_error_stays_first),
    },
];

/// An op that no version of the ABI has. New ops are new numbers, and an unknown op is an error by
/// contract, so every transport can be made to fail in this way.
pub(super) const UNKNOWN_OP: u8 = 0xee;

/// Rank 0 fails; the others are its peers.
fn errors_are_reported(rig: &mut Rig<'_>) -> Result<()> {
    if rig.me() != 0 {
        return Ok(());
    }
    rig.transport.health()?;
    rig.expect_errors();
    let queue = rig.last_queue();
    let signal = rig.signal(0, queue, 0);
    let good = Command { op: abi::TY_OP_SIGNAL, queue, peer: 1, signal, add: 1, ..NO_COMMAND };
    let noted = |tag| Command { flags: abi::TY_FLAG_NOTIFY, tag, ..good };
    // Errors are always reported: the bad command has no TY_FLAG_NOTIFY.
    let bad = Command { op: UNKNOWN_OP, tag: 77, ..good };
    rig.post(queue, &[noted(1), bad, noted(2)])?;
    let events = rig.wait_events(queue, 3)?;
    for (tag, count) in [(1, 1), (77, 1), (2, 1)] {
        let found = events.iter().filter(|e| e.tag == tag).count();
        ensure!(found == count, "found {events:?}; expected one event with tag {tag}");
    }
    for event in events.iter().filter(|e| e.tag == 77) {
        ensure!(
            event.kind == abi::TY_EVENT_ERROR && event.status < 0,
            "the bad command ended as {event:?}; expected an error event with a negative status"
        );
        ensure!(
            (event.queue, event.peer) == (queue, 1),
            "the bad command ended as {event:?}; expected queue {queue} and peer 1, as in the command"
        );
    }
    stays_bad(rig)?;
    let first = about_no_peer(rig)?;
    rig.post(queue, &[noted(3), Command { op: UNKNOWN_OP - 1, ..bad }])?;
    rig.wait_events(queue, 2)?;
    stays_bad(rig)?;
    let now = about_no_peer(rig)?;
    ensure!(
        now == first,
        "health is `{now}` behind a second failure; expected the first error for ever, `{first}`"
    );
    Ok(())
}

/// With `TY_CAP_MASKING` other rules hold: see `masking.rs`. Rank 0 loses its peers before its own mistakes, rank 1
/// behind them.
fn the_first_error_stays_first(rig: &mut Rig<'_>, victims: &[u32]) -> Result<()> {
    let mut first = None;
    if rig.me() == 0 {
        losses(rig, victims, &mut first)?;
        unknown_ops(rig, &mut first)
    } else {
        unknown_ops(rig, &mut first)?;
        losses(rig, victims, &mut first)
    }
}

fn losses(rig: &mut Rig<'_>, victims: &[u32], first: &mut Option<String>) -> Result<()> {
    for victim in victims {
        // Memory that outlives the victims takes their puts: then an unknown op is the first error.
        if a_put_fails(rig, *victim, "which is lost")? {
            if first.is_none() {
                is_known(rig, *victim)?;
            }
            is_still(rig, first, &format!("a put to rank {victim}, which is lost"))?;
        }
    }
    Ok(())
}

fn unknown_ops(rig: &mut Rig<'_>, first: &mut Option<String>) -> Result<()> {
    for op in [UNKNOWN_OP, UNKNOWN_OP - 1] {
        an_unknown_op_fails(rig, op)?;
        is_still(rig, first, "an unknown op")?;
    }
    Ok(())
}

/// Posts a command with an unknown op to this rank.
pub(super) fn an_unknown_op_fails(rig: &mut Rig<'_>, op: u8) -> Result<()> {
    let bad = Command { op, peer: rig.me(), tag: u64::from(op) << 32, ..NO_COMMAND };
    let event = end_of(rig, "a command with an unknown op", &bad)?;
    ensure!(
        event.kind == abi::TY_EVENT_ERROR,
        "a command with an unknown op ended as {event:?}; expected an error event"
    );
    Ok(())
}

/// Checks that `health` reports the first error behind one more failure.
fn is_still(rig: &Rig<'_>, first: &mut Option<String>, behind: &str) -> Result<()> {
    stays_bad(rig)?;
    for _ in 0..2 * rig.ranks() {
        let now = rig.transport.health().err().context("health is good")?.to_string();
        let first = first.get_or_insert_with(|| now.clone());
        ensure!(
            now == *first,
            "health is `{now}` behind the failure of {behind}; expected the first error for ever, `{first}` (INV-7)"
        );
    }
    Ok(())
}

/// The text of the error of `health`, which the host's own mistake has made: no peer is to blame.
fn about_no_peer(rig: &Rig<'_>) -> Result<String> {
    let error = rig.transport.health().err().context("health is good")?;
    ensure!(
        error.rank().is_none(),
        "health behind an unknown op is about rank {:?}: `{error}`; expected an error about no peer",
        error.rank()
    );
    Ok(error.to_string())
}

/// Checks that `health` reports the error of a command at each look, and not only once.
pub(super) fn stays_bad(rig: &Rig<'_>) -> Result<()> {
    for look in 1..=3 {
        let error = rig.transport.health().err().with_context(|| {
            format!("a command failed and health is good at look {look}; expected it to stay bad (INV-7)")
        })?;
        has_status(&error)?;
    }
    Ok(())
}

/// Checks that an error names no other rank than the one that it is about.
pub(super) fn is_about(error: &Error, rank: u32) -> Result<()> {
    ensure!(
        error.rank().is_none_or(|named| named == rank),
        "an error is about rank {:?}; expected world rank {rank}, or none: `{error}`",
        error.rank()
    );
    Ok(())
}

/// Checks that the status behind an error is one of the ABI.
pub(super) fn has_status(error: &Error) -> Result<()> {
    ensure!(
        error.kind() != ErrorKind::Plugin,
        "a slot returned a status that no slot has: {error}"
    );
    Ok(())
}
