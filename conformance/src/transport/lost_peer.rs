//! A peer whose process is killed, or stopped, under an open transport.
//!
//! The last rank of the team is the victim. Its process is really lost, once all ranks have reached each
//! other. The others watch its process, so that they go on only when it is gone. The ranks' own world knows
//! of the loss as well, so no rank waits in a barrier.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event, NO_COMMAND};

use super::memory::{compare, pattern};
use super::rig::{Needs, Rig, Total};
use super::{Body, TransportCase};
use crate::suite::{Loss, Outcome, Rank};

const PUTS: Needs = Needs { windows: &[1 << 20, 1 << 20], ..Needs::SMALL };

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "a_put_to_a_killed_peer_ends",
        about: "a put to a killed peer ends in time: with an error, or in memory that outlives the peer",
        invariants: "INV-6, INV-7",
        ranks: &[2],
        flags: abi::TY_CAP_BOUNDED_PUT,
        needs: PUTS,
        body: Body::Losing(Loss::Killed, puts_end),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "a_put_to_a_stopped_peer_ends",
        about: "a put to a stopped peer ends in time: with an error, or in memory that it still has",
        invariants: "INV-6, INV-7",
        ranks: &[2],
        flags: abi::TY_CAP_BOUNDED_PUT,
        needs: PUTS,
        body: Body::Losing(Loss::Stopped, puts_end),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "a_killed_peer_holds_up_no_other",
        about: "commands to others go on beside a killed peer, and each failure names it",
        invariants: "INV-6, INV-7",
        ranks: &[3],
        flags: abi::TY_CAP_MASKING,
        needs: PUTS,
        body: Body::Losing(Loss::Killed, others_go_on),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "a_stopped_peer_holds_up_no_other",
        about: "commands to others go on beside a stopped peer, and each failure names it",
        invariants: "INV-6, INV-7",
        ranks: &[3],
        flags: abi::TY_CAP_MASKING,
        needs: PUTS,
        body: Body::Losing(Loss::Stopped, others_go_on),
        ..TransportCase::BARE
    },
];

/// A rig's deadline is this part of the config's: the test waits for calls that hang.
const PART: u32 = 3;

/// Runs a loss: the victim returns that it must be lost now, and the others run `survive`.
pub(super) fn play(
    rank: &Rank<'_>,
    needs: &Needs,
    loss: Loss,
    survive: fn(&mut Rig<'_>, u32) -> Result<()>,
) -> Result<Outcome> {
    let mut rig = Rig::bring_up_within(rank, needs, rank.config.world.deadline / PART)?;
    let victim = rig.ranks() - 1;
    meet(&mut rig)?;
    // A rank that others have reached must drive its transport until it has reached all of them.
    rig.barrier("all ranks have met")?;
    let pids = rank.world.all_gather("processes", &std::process::id().to_le_bytes())?;
    rig.barrier("a rank is lost")?;
    if rig.me() == victim {
        // Its transport stays open: it sends no goodbye to the others.
        std::mem::forget(rig);
        return Ok(Outcome::IsLost(loss));
    }
    let pid = pids[victim as usize].as_slice().try_into().map(u32::from_le_bytes);
    // A busy machine takes time to end the process.
    let until = Instant::now() + rank.config.world.deadline + rig.needs.deadline;
    await_loss(pid.context("read the victim's process: found no number")?, loss, until)?;
    rig.expect_errors();
    survive(&mut rig, victim)?;
    Ok(Outcome::Pass)
}

/// Every rank puts to every other one, so that all connections have been used.
fn meet(rig: &mut Rig<'_>) -> Result<()> {
    let (me, ranks) = (rig.me(), rig.ranks());
    let signal = rig.signal(0, 0, me);
    let others = (0..ranks).filter(|peer| *peer != me);
    let put = |peer| Command {
        op: abi::TY_OP_PUT_SIGNAL,
        peer,
        signal,
        add: 1,
        dst_window: 1,
        bytes: 64,
        ..NO_COMMAND
    };
    let puts: Vec<_> = others.clone().map(put).collect();
    rig.post(0, &puts)?;
    let totals: Vec<_> =
        others.map(|peer| Total { queue: 0, id: rig.signal(0, 0, peer), total: 1 }).collect();
    rig.wait_signals(&totals)
}

/// Waits until the process is gone, or stopped.
fn await_loss(pid: u32, loss: Loss, until: Instant) -> Result<()> {
    loop {
        // The file has `pid (name) state ...`, where the name may hold any characters.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok();
        let state = stat.as_ref().and_then(|stat| stat.rsplit_once(") ")?.1.chars().next());
        let lost = match loss {
            Loss::Killed => state.is_none_or(|state| "ZX".contains(state)),
            Loss::Stopped => state == Some('T'),
        };
        if lost {
            return Ok(());
        }
        ensure!(Instant::now() < until, "process {pid} of the victim is not lost: {state:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Bytes of a put to the victim. They soon exceed the bytes that a socket takes without an answer.
const BYTES: usize = 1 << 18;
/// The number of puts that must end as done, with their bytes in the victim's memory, before the test
/// accepts that this memory outlives the victim.
const BELIEVED: u64 = 3;

fn puts_end(rig: &mut Rig<'_>, victim: u32) -> Result<()> {
    let start = Instant::now();
    let bytes = rig.put_bytes(BYTES);
    let (me, can_get) = (rig.me(), rig.can_get());
    for number in 1.. {
        let data = pattern(u64::from(me) << 32 | number, bytes);
        rig.windows[0].write(0, &data);
        let put = Command {
            op: abi::TY_OP_PUT_SIGNAL,
            flags: abi::TY_FLAG_NOTIFY,
            peer: victim,
            signal: rig.signal(0, 0, me),
            add: 1,
            dst_window: 1,
            bytes: bytes as u64,
            tag: number,
            ..NO_COMMAND
        };
        if is_error(end_of(rig, "a put", &put)?, victim)? {
            return is_known(rig, victim);
        }
        if can_get {
            match get_back(rig, &put, &data)? {
                GetEnd::Error => return is_known(rig, victim),
                GetEnd::Bytes if number >= BELIEVED => return Ok(()),
                GetEnd::Bytes => {}
            }
        }
        ensure!(
            start.elapsed() < rig.needs.deadline,
            "{number} puts to rank {victim}, which is lost, ended as done in {:?} and health is {}; expected an error, \
             as TY_CAP_BOUNDED_PUT says (INV-7)",
            start.elapsed(),
            if rig.transport.health().is_ok() { "good" } else { "bad" }
        );
    }
    Ok(())
}

/// The result of a get from the lost peer.
enum GetEnd {
    Error,
    /// The bytes that were put there.
    Bytes,
}

/// Reads back a put that ended as done: its bytes must reach memory that outlives the peer. Done is local
/// (INV-4), so they have until the deadline to arrive.
fn get_back(rig: &mut Rig<'_>, put: &Command, data: &[u8]) -> Result<GetEnd> {
    let (bytes, until) = (data.len(), rig.until());
    loop {
        let back = bytes as u64;
        let get = Command { op: abi::TY_OP_GET, signal: 0, add: 0, src_offset: back, ..*put };
        if is_error(end_of(rig, "a get", &get)?, put.peer)? {
            return Ok(GetEnd::Error);
        }
        let found = rig.windows[0].read(bytes, bytes);
        let same = compare("a put to a lost peer ended as done; a get from there", &found, data);
        if same.is_ok() || Instant::now() >= until {
            return same.map(|()| GetEnd::Bytes);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Posts a command to the lost peer and waits for its end, at most twice the deadline.
fn end_of(rig: &mut Rig<'_>, what: &str, command: &Command) -> Result<Event> {
    let limit = 2 * rig.needs.deadline;
    let until = Instant::now() + limit;
    let peer = command.peer;
    while rig.queues[0].try_post(&rig.transport, &[*command])? == 0 {
        rig.drive()?;
        ensure!(
            Instant::now() < until,
            "the queue takes no command to rank {peer}, which is lost, for {limit:?} (INV-6, TY_CAP_BOUNDED_PUT)"
        );
        std::thread::yield_now();
    }
    loop {
        rig.drive()?;
        let events = rig.queues[0].take();
        if let Some(event) = events.into_iter().find(|event| event.tag == command.tag) {
            return Ok(event);
        }
        ensure!(
            Instant::now() < until,
            "{what} to rank {peer}, which is lost, has not ended after {limit:?}; expected at most {:?} (INV-6, \
             TY_CAP_BOUNDED_PUT)",
            rig.needs.deadline
        );
        std::thread::sleep(Duration::from_micros(100));
    }
}

fn is_error(event: Event, victim: u32) -> Result<bool> {
    if event.kind == abi::TY_EVENT_DONE {
        return Ok(false);
    }
    ensure!(
        event.status < 0 && event.peer == victim,
        "found {event:?}; expected a negative status, and peer {victim} (INV-7)"
    );
    Ok(true)
}

/// Checks that `health` stays bad after an error event.
fn is_known(rig: &Rig<'_>, victim: u32) -> Result<()> {
    match rig.transport.health() {
        Err(_) => Ok(()),
        Ok(()) => {
            bail!(
                "a command to rank {victim} failed and health is good; expected it to be bad (INV-7)"
            )
        }
    }
}

/// Exchanges of the surviving ranks.
const ROUNDS: u64 = 20;
/// Bytes of each exchange.
const SMALL: usize = 1024;

fn others_go_on(rig: &mut Rig<'_>, victim: u32) -> Result<()> {
    let (me, other) = (rig.me(), 1 - rig.me());
    // A put to the lost peer may hold its place until the fabric gives up.
    let most_held = (rig.needs.queue_depth / 4).max(1);
    let (mut held, mut failures) = (0, Vec::new());
    for round in 1..=ROUNDS {
        let to_victim = Command {
            op: abi::TY_OP_PUT_SIGNAL,
            flags: abi::TY_FLAG_NOTIFY,
            peer: victim,
            signal: rig.signal(0, 0, me),
            add: 1,
            dst_window: 1,
            bytes: SMALL as u64,
            tag: round,
            ..NO_COMMAND
        };
        if held < most_held {
            held += rig.queues[0].try_post(&rig.transport, &[to_victim])? as u32;
        }
        let at = SMALL * round as usize;
        rig.windows[0].write(at, &pattern(u64::from(me) << 32 | round, SMALL));
        let to_other = Command {
            flags: 0,
            peer: other,
            src_offset: at as u64,
            dst_offset: at as u64,
            ..to_victim
        };
        goes_on(rig, &to_other, round + 1, victim)?;
        failures.extend(rig.queues[0].take());
    }
    // Only now: a total shows how many puts have arrived, and not which (INV-2).
    for round in 1..=ROUNDS {
        let found = rig.windows[1].read(SMALL * round as usize, SMALL);
        let what = format!("put {round} of rank {other}, beside rank {victim}, which is lost");
        compare(&what, &found, &pattern(u64::from(other) << 32 | round, SMALL))?;
    }
    // Both have all puts; late failures are still reported, and the last signals leave.
    let until = Instant::now() + rig.needs.deadline / 4;
    while Instant::now() < until {
        rig.drive()?;
        std::thread::sleep(Duration::from_millis(1));
    }
    failures.extend(rig.queues[0].take());
    each_failure_names(rig, &failures, victim)
}

/// Posts `put` to the other surviving rank, and waits for the put of that rank.
fn goes_on(rig: &mut Rig<'_>, put: &Command, total: u64, victim: u32) -> Result<()> {
    let (other, until) = (put.peer, rig.until());
    let stuck = |what: String| {
        anyhow!("{what} beside rank {victim}, which is lost (INV-6, TY_CAP_MASKING)")
    };
    while rig.queues[0].try_post(&rig.transport, &[*put])? == 0 {
        rig.drive()?;
        if Instant::now() >= until {
            return Err(stuck(format!("the queue takes no command to rank {other}")));
        }
        std::thread::yield_now();
    }
    let id = rig.signal(0, 0, other);
    loop {
        rig.drive()?;
        let found = rig.transport.read_signal(0, id);
        if found >= total {
            return Ok(());
        }
        if Instant::now() >= until {
            let what = format!(
                "commands of rank {other} do not arrive: signal {id}: found total {found}; expected {total}"
            );
            return Err(stuck(what));
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

fn each_failure_names(rig: &Rig<'_>, events: &[Event], victim: u32) -> Result<()> {
    let failures = || events.iter().filter(|event| event.kind != abi::TY_EVENT_DONE);
    for event in failures() {
        ensure!(
            event.peer == victim,
            "found {event:?}, a failure that does not name rank {victim}, which is lost (INV-7, TY_CAP_MASKING)"
        );
    }
    match rig.transport.health() {
        Ok(()) => ensure!(
            failures().next().is_none(),
            "a command to rank {victim} failed and health is good; expected it to be bad (INV-7)"
        ),
        Err(error) => ensure!(
            error.rank() == Some(victim) || error.rank().is_none() && failures().next().is_some(),
            "health is about {:?}: `{error}`; expected it, or an error event, to name rank {victim} (INV-7, \
             TY_CAP_MASKING)",
            error.rank()
        ),
    }
    Ok(())
}
