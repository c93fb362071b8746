//! Instances: a process holds several at once, which share nothing that one of them could change for another.

use anyhow::{Context as _, Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::ending::exchange;
use super::errors::UNKNOWN_OP;
use super::memory::{UNTOUCHED, compare};
use super::needs::Needs;
use super::rig::Rig;
use super::{Body, TransportCase};
use crate::suite::Rank;

pub(super) const CASES: &[TransportCase] = &[TransportCase {
    name: "instances_of_a_process_share_nothing",
    about: "signals, payloads, failures and the close of an instance change nothing in another one of the process",
    invariants: "the threads: several instances",
    ranks: &[2],
    needs: Needs::SMALL,
    body: Body::Alone(instances_of_a_process_share_nothing),
    ..TransportCase::BARE
}];

fn instances_of_a_process_share_nothing(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let mut busy = Rig::bring_up(rank, needs)?;
    let mut idle = Rig::bring_up(rank, needs)?;
    exchange(&mut busy)?;
    fail(&mut busy)?;
    is_untouched(&mut idle).context("another instance of the process, which did nothing")?;
    idle.barrier("the idle instance was looked at")?;
    busy.end(false)?;
    // The totals of the idle instance begin at 0, whatever those of the other one were.
    exchange(&mut idle).context("an instance behind the close of another one")?;
    idle.end(true)
}

/// A command with an unknown op, which ends as an error.
fn fail(rig: &mut Rig<'_>) -> Result<()> {
    rig.expect_errors();
    let peer = rig.next();
    rig.post(0, &[Command { op: UNKNOWN_OP, peer, ..NO_COMMAND }])?;
    let events = rig.wait_events(0, 1)?;
    ensure!(
        events.iter().all(|event| event.kind == abi::TY_EVENT_ERROR),
        "a command with an unknown op ended as {events:?}; expected an error event"
    );
    ensure!(rig.transport.health().is_err(), "a command failed and health is good (INV-7)");
    Ok(())
}

fn is_untouched(rig: &mut Rig<'_>) -> Result<()> {
    rig.drive()?;
    let events = rig.queues[0].take();
    ensure!(events.is_empty(), "found {events:?}; expected no event");
    for id in 0..rig.needs.signals {
        let total = rig.transport.read_signal(0, id);
        ensure!(total == 0, "signal {id}: found total {total}; expected 0");
    }
    let found = rig.windows[0].read(0, rig.windows[0].len());
    compare("window 0", &found, &vec![UNTOUCHED; found.len()])?;
    rig.transport.health().context("health; expected it to be good")
}
