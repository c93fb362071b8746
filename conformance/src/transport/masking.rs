//! Ranks that go on beside lost ones (`TY_CAP_MASKING`): commands to others move, and every failure names the peer
//! that it is about.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event, NO_COMMAND};

use super::errors::{UNKNOWN_OP, an_unknown_op_fails, stays_bad};
use super::lost_peer::{PUTS, a_put_fails, has_loss_status, is_of_a_loss, puts_fail};
use super::memory::{compare, pattern};
use super::needs::Needs;
use super::rig::Rig;
use super::{Body, TransportCase};
use crate::suite::Loss;

/// The cases differ in their losses.
const MASKS: TransportCase = TransportCase {
    invariants: "INV-6, INV-7",
    flags: abi::TY_CAP_MASKING,
    needs: Needs { windows: &[2 * LARGE as u64, 2 * LARGE as u64], ..Needs::SMALL },
    ..TransportCase::BARE
};

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "a_killed_peer_holds_up_no_other",
        about: "commands to others go on beside a killed peer, and each failure names it",
        ranks: &[3],
        body: Body::Losing(Loss::Killed, 1, others_go_on),
        ..MASKS
    },
    TransportCase {
        name: "a_stopped_peer_holds_up_no_other",
        about: "commands to others go on beside a stopped peer that has much to read, and each failure names it",
        ranks: &[3],
        body: Body::Losing(Loss::Stopped, 1, others_go_on),
        ..MASKS
    },
    TransportCase {
        name: "a_killed_peer_hides_no_other",
        about: "health reports the failures of two killed peers in turn",
        ranks: &[4],
        body: Body::Losing(Loss::Killed, 2, others_go_on),
        ..MASKS
    },
    TransportCase {
        name: "an_error_about_no_peer_comes_first",
        about: "health reports the failure of an unknown op before those of peers, and as about none, whichever came \
                first",
        ranks: &[3],
        flags: abi::TY_CAP_MASKING | abi::TY_CAP_BOUNDED_PUT,
        needs: PUTS,
        body: Body::Losing(Loss::Killed, 1, own_error_comes_first),
        ..MASKS
    },
];

/// The host goes on without a peer that an error is about. One that is about no peer must end the communicator, whether
/// it came behind the loss of a peer, as on rank 0, or before it.
fn own_error_comes_first(rig: &mut Rig<'_>, victims: &[u32]) -> Result<()> {
    let (victim, state) = (victims[0], "which is lost");
    if rig.me() == 0 {
        puts_fail(rig, victim, state)?;
        an_unknown_op_fails(rig, UNKNOWN_OP)?;
    } else {
        an_unknown_op_fails(rig, UNKNOWN_OP)?;
        a_put_fails(rig, victim, state)?;
    }
    for look in 1..=2 * rig.ranks() {
        let error = rig.transport.health().err().context("health is good after an unknown op")?;
        ensure!(
            error.rank().is_none(),
            "health at look {look} is about rank {:?}: `{error}`; expected the error about no peer first (INV-7, \
             TY_CAP_MASKING)",
            error.rank()
        );
    }
    Ok(())
}

/// Exchanges of the surviving ranks.
const ROUNDS: u64 = 20;
/// Bytes of each exchange.
const SMALL: usize = 1024;
/// Bytes of a put to a victim. A few of them are more than sockets hold.
const LARGE: usize = 1 << 20;

/// The surviving ranks are 0 and 1.
fn others_go_on(rig: &mut Rig<'_>, victims: &[u32]) -> Result<()> {
    let (me, other) = (rig.me(), 1 - rig.me());
    // A put to a lost peer may hold its place until the fabric gives up.
    let most_held = (rig.needs.queue_depth as usize / 4).max(1);
    let (large, signal) = (rig.put_bytes(LARGE) as u64, rig.signal(0, 0, me));
    let to_victim = |round: u64, peer: u32| Command {
        op: abi::TY_OP_PUT_SIGNAL,
        flags: abi::TY_FLAG_NOTIFY,
        peer,
        signal,
        add: 1,
        dst_window: 1,
        src_offset: LARGE as u64,
        dst_offset: LARGE as u64,
        bytes: large,
        tag: round,
        ..NO_COMMAND
    };
    let (mut held, mut failures) = (0, Vec::new());
    // At first as much as fills a socket, from a source of its own; half of the places are left for later rounds.
    for victim in victims.iter().cycle().take(most_held / 2) {
        held += rig.queues[0].try_post(&rig.transport, &[to_victim(0, *victim)])?;
    }
    for round in 1..=ROUNDS {
        for victim in victims {
            if held < most_held {
                held += rig.queues[0].try_post(&rig.transport, &[to_victim(round, *victim)])?;
            }
        }
        let at = SMALL * round as usize;
        rig.windows[0].write(at, &pattern(u64::from(me) << 32 | round, SMALL));
        let to_other = Command {
            flags: 0,
            peer: other,
            src_offset: at as u64,
            dst_offset: at as u64,
            bytes: SMALL as u64,
            ..to_victim(round, other)
        };
        goes_on(rig, &to_other, 0, round + 1, victims)?;
        failures.extend(rig.queues[0].take());
    }
    // Only now: a total shows how many puts have arrived, and not which (INV-2).
    for round in 1..=ROUNDS {
        let found = rig.windows[1].read(SMALL * round as usize, SMALL);
        let what = format!("put {round} of rank {other}, beside {}", lost(victims));
        compare(&what, &found, &pattern(u64::from(other) << 32 | round, SMALL))?;
    }
    let (op, tag) = (abi::TY_OP_SIGNAL, ROUNDS + 1);
    // A signal of its own: without an order it may overtake puts, whose total it would raise.
    let signal = rig.signal(1, 0, me);
    let last = Command { op, peer: other, signal, bytes: 0, tag, ..to_victim(tag, other) };
    goes_on(rig, &last, 1, 1, victims)?;
    failures.extend(leaves(rig, &last)?);
    each_failure_names(rig, &failures, victims)
}

/// The time in which late failures are still reported, and the last signal crosses.
const LATER: Duration = Duration::from_millis(200);

/// Drives until the last command has left, and for some time after it. Returns the events.
fn leaves(rig: &mut Rig<'_>, last: &Command) -> Result<Vec<Event>> {
    let is_last = |event: &Event| event.tag == last.tag;
    let (limit, mut until) = (rig.until(), None);
    while until.is_none_or(|until| Instant::now() < until) {
        rig.drive()?;
        if until.is_none() && (rig.queues[0].events().iter().any(is_last) || Instant::now() > limit)
        {
            until = Some(Instant::now() + LATER);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(rig.queues[0].take())
}

/// Posts `put` to the other surviving rank, and waits until that rank's signal of a kind has a total.
fn goes_on(rig: &mut Rig<'_>, put: &Command, kind: u32, total: u64, victims: &[u32]) -> Result<()> {
    leaves_for_other(rig, put, victims)?;
    comes_from_other(rig, kind, total, victims, rig.needs.deadline)
}

pub(super) fn stuck(what: &str, victims: &[u32]) -> anyhow::Error {
    anyhow!("{what} beside {} (INV-6, TY_CAP_MASKING)", lost(victims))
}

/// Posts a command to the other surviving rank.
pub(super) fn leaves_for_other(rig: &mut Rig<'_>, put: &Command, victims: &[u32]) -> Result<()> {
    let until = rig.until();
    while rig.queues[0].try_post(&rig.transport, &[*put])? == 0 {
        rig.drive()?;
        if Instant::now() >= until {
            let what = format!("the queue takes no command to rank {}", put.peer);
            return Err(stuck(&what, victims));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Waits until a signal of a kind of the other surviving rank has a total, at most for `limit`.
pub(super) fn comes_from_other(
    rig: &mut Rig<'_>,
    kind: u32,
    total: u64,
    victims: &[u32],
    limit: Duration,
) -> Result<()> {
    let (other, start) = (1 - rig.me(), Instant::now());
    let id = rig.signal(kind, 0, other);
    // Failures come at once behind a kill, whatever the other rank does.
    rig.drive()?;
    let (mut failed, mut failed_late) = (failures(rig), false);
    loop {
        let before = Instant::now();
        rig.drive()?;
        // A command that waits for the deadline fails late.
        let late = before - start > rig.needs.deadline / 2;
        failed_late |= late && failures(rig) > failed;
        failed = failures(rig);
        let found = rig.transport.read_signal(0, id);
        if found >= total {
            // A busy machine takes long as well; but then nothing fails meanwhile.
            if failed_late {
                let what = format!("commands of rank {other} arrive only when others have failed,");
                return Err(stuck(&what, victims));
            }
            return Ok(());
        }
        if start.elapsed() >= limit {
            let what = format!(
                "commands of rank {other} do not arrive: signal {id}: found total {found}; expected {total}"
            );
            return Err(stuck(&what, victims));
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Error events that were not taken yet.
fn failures(rig: &Rig<'_>) -> usize {
    rig.queues[0].events().iter().filter(|event| event.kind != abi::TY_EVENT_DONE).count()
}

fn lost(victims: &[u32]) -> String {
    let names: Vec<_> = victims.iter().map(|rank| format!("rank {rank}")).collect();
    format!("{}, which is lost", names.join(" and "))
}

/// Each error event names one of the victims, and `health` names every victim that one of them is about, in turn.
pub(super) fn each_failure_names(rig: &Rig<'_>, events: &[Event], victims: &[u32]) -> Result<()> {
    let mut failed = BTreeSet::new();
    for event in events.iter().filter(|event| event.kind != abi::TY_EVENT_DONE) {
        ensure!(
            victims.contains(&event.peer),
            "found {event:?}, a failure that does not name {} (INV-7, TY_CAP_MASKING)",
            lost(victims)
        );
        has_loss_status(event)?;
        failed.insert(event.peer);
    }
    if failed.is_empty() && rig.transport.health().is_ok() {
        return Ok(());
    }
    stays_bad(rig)?;
    let mut named = BTreeSet::new();
    for _ in 0..2 * rig.ranks() {
        let Err(error) = rig.transport.health() else { continue };
        let about = error.rank().filter(|rank| victims.contains(rank));
        named.extend(about);
        ensure!(
            about.is_some(),
            "health is about {:?}: `{error}`; it does not name {} (INV-7, TY_CAP_MASKING)",
            error.rank(),
            lost(victims)
        );
        is_of_a_loss(&error)?;
    }
    ensure!(
        failed.is_subset(&named),
        "commands to the ranks {failed:?} failed, and health names {named:?} alone; expected each in turn (INV-7, \
         TY_CAP_MASKING)"
    );
    Ok(())
}
