//! A peer that pauses, and takes a part now and then: it is slow, and not lost.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::ending::FILLS;
use super::limits::LARGE;
use super::lost_peer::{await_loss, bring_up, signal};
use super::needs::Needs;
use super::rig::Rig;
use super::{Body, TransportCase};
use crate::suite::{Loss, Outcome, Rank};

pub(super) const CASES: &[TransportCase] = &[TransportCase {
    name: "a_pausing_peer_is_not_lost",
    about: "without TY_CAP_MANUAL_PROGRESS puts end as done where the peer's process is stopped twice, together for \
            longer than the deadline, and takes a part between",
    invariants: "INV-6",
    ranks: &[2],
    without: abi::TY_CAP_MANUAL_PROGRESS,
    needs: Needs { windows: &[LARGE as u64, LARGE as u64], ..Needs::SMALL },
    body: Body::OwnProcess(a_pausing_peer_is_not_lost),
    ..TransportCase::BARE
}];

/// Puts that are under way: far more than the peer takes before it is stopped again.
const PUTS: u64 = 16;

fn a_pausing_peer_is_not_lost(rank: &Rank<'_>, needs: &Needs) -> Result<Outcome> {
    let (mut rig, pids) = bring_up(rank, needs)?;
    if rig.me() == 1 {
        Loss::Stopped.befall()?;
    } else {
        await_loss(rank, pids[1], Loss::Stopped)?;
    }
    let puts = if rig.me() == 0 { pause_twice(&mut rig, rank, pids[1]) } else { Ok(0) };
    if let Err(error) = &puts {
        rank.world.report_failure(&format!("{error:#}"));
        signal(pids[1], Signal::CONT)?;
    }
    let counts = rank.world.all_gather("puts to a peer that pauses", &puts?.to_le_bytes())?;
    let puts = u64::from_le_bytes(counts[0].as_slice().try_into().context("a number of puts")?);
    if rig.me() == 1 {
        // Beside the put by which they met.
        rig.wait_signal(0, rig.signal(0, 0, 0), 1 + puts)?;
    }
    rig.end(true).map(|()| Outcome::Pass)
}

/// Posts puts, and stops the peer once more when it has taken one. Returns how many puts there were.
fn pause_twice(rig: &mut Rig<'_>, rank: &Rank<'_>, pid: u32) -> Result<u64> {
    let bytes = rig.put_bytes(LARGE) as u64;
    let put = Command {
        op: abi::TY_OP_PUT_SIGNAL,
        flags: abi::TY_FLAG_NOTIFY,
        peer: 1,
        signal: rig.signal(0, 0, 0),
        add: 1,
        dst_window: 1,
        bytes,
        ..NO_COMMAND
    };
    let (mut posted, mut ended) = (0, 0);
    for _ in 0..FILLS {
        if posted < PUTS {
            posted += rig.queues[0].try_post(&rig.transport, &[put])? as u64;
        }
        ended += drive(rig)?;
    }
    let pause = rig.needs.deadline * 3 / 5;
    if ended < posted {
        ended += wait(rig, pause, u64::MAX)?;
        signal(pid, Signal::CONT)?;
        ended += wait(rig, rig.needs.deadline, 1)?;
        signal(pid, Signal::STOP)?;
        await_loss(rank, pid, Loss::Stopped)?;
        ended += wait(rig, pause, u64::MAX)?;
    }
    signal(pid, Signal::CONT)?;
    if ended < posted {
        ended += wait(rig, 2 * rig.needs.deadline, posted - ended)?;
    }
    ensure!(ended == posted, "found {ended} ended puts to a peer that pauses; expected {posted}");
    Ok(posted)
}

/// Drives for a time, or until so many puts have ended. Returns how many have.
fn wait(rig: &mut Rig<'_>, time: Duration, enough: u64) -> Result<u64> {
    let (until, mut ended) = (Instant::now() + time, 0);
    while ended < enough && Instant::now() < until {
        ended += drive(rig)?;
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(ended)
}

/// Polls once. Returns how many puts have ended; each must be done.
fn drive(rig: &mut Rig<'_>) -> Result<u64> {
    rig.drive().context("a put to a peer that pauses")?;
    Ok(rig.queues[0].take().len() as u64)
}
