//! Instances: a process holds several at once, which share nothing that one of them could change for another.

use anyhow::{Context as _, Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::ending::exchange;
use super::errors::UNKNOWN_OP;
use super::headway::Headway;
use super::memory::{UNTOUCHED, compare, pattern};
use super::needs::Needs;
use super::rig::{self, Rig};
use super::{Body, TransportCase};
use crate::suite::Rank;

const SEVERAL: TransportCase = TransportCase {
    invariants: "the threads: several instances",
    ranks: &[2],
    ..TransportCase::BARE
};

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "instances_of_a_process_share_nothing",
        about: "signals, payloads, failures and the close of an instance change nothing in another one of the process",
        needs: Needs::SMALL,
        body: Body::Alone(instances_of_a_process_share_nothing),
        ..SEVERAL
    },
    TransportCase {
        name: "instances_of_a_process_move_puts_at_once",
        about: "long puts of two instances of a process, which are driven in turn, arrive each in its own place",
        needs: Needs { windows: &[1 << 22, 1 << 22], ..Needs::SMALL },
        body: Body::Alone(instances_of_a_process_move_puts_at_once),
        ..SEVERAL
    },
];

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

/// Puts of each instance, and their bytes: a fabric that moves parts has not moved one of them at a call.
const PUTS: usize = 3;
const BYTES: usize = 1 << 20;

fn instances_of_a_process_move_puts_at_once(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let mut both = [Rig::bring_up(rank, needs)?, Rig::bring_up(rank, needs)?];
    let moved = post_to_next(&mut both).and_then(|()| move_in_turn(&mut both));
    moved.context("puts of two instances of the process at once")?;
    rig::barrier_beside(rank.world, "puts of two instances", || drive_each(&mut both))?;
    for (number, rig) in both.iter().enumerate() {
        for put in 0..PUTS {
            let what = format!("put {put} of instance {number}, beside those of another one");
            let found = rig.windows[1].read(place(rig, number, put), rig.put_bytes(BYTES));
            compare(&what, &found, &content(rig, rig.previous(), number, put))
                .context("puts of two instances of the process at once")?;
        }
    }
    both.into_iter().try_for_each(|rig| rig.end(true))
}

/// The place of a put in both windows, which differs between the instances.
fn place(rig: &Rig<'_>, instance: usize, put: usize) -> usize {
    (instance + put) * rig.put_bytes(BYTES)
}

fn content(rig: &Rig<'_>, writer: u32, instance: usize, put: usize) -> Vec<u8> {
    let number = (instance * PUTS + put) as u64;
    pattern(u64::from(writer) << 32 | number, rig.put_bytes(BYTES))
}

/// The signal of an instance's puts.
fn signal(rig: &Rig<'_>, instance: usize, writer: u32) -> u32 {
    rig.signal(instance as u32, 0, writer)
}

/// Posts the puts of the instances, one of each in turn.
fn post_to_next(both: &mut [Rig<'_>; 2]) -> Result<()> {
    for put in 0..PUTS {
        for (number, rig) in both.iter_mut().enumerate() {
            let at = place(rig, number, put);
            rig.windows[0].write(at, &content(rig, rig.me(), number, put));
            let command = Command {
                op: abi::TY_OP_PUT_SIGNAL,
                flags: abi::TY_FLAG_NOTIFY,
                peer: rig.next(),
                signal: signal(rig, number, rig.me()),
                add: 1,
                dst_window: 1,
                src_offset: at as u64,
                dst_offset: at as u64,
                bytes: rig.put_bytes(BYTES) as u64,
                tag: put as u64,
                ..NO_COMMAND
            };
            rig.post(0, &[command])?;
        }
    }
    Ok(())
}

/// Drives the instances in turn, until the puts of both have ended and have arrived.
fn move_in_turn(both: &mut [Rig<'_>; 2]) -> Result<()> {
    let limit = both[0].needs.deadline;
    let (mut headway, mut ended, mut found) = (Headway::new(limit), [0; 2], [0; 2]);
    while ended != [PUTS; 2] || found != [PUTS as u64; 2] {
        ensure!(
            !headway.is_over((ended.iter().sum::<usize>() as u64) + found.iter().sum::<u64>()),
            "found {ended:?} ended puts and the totals {found:?}, and no more within {limit:?}; expected {PUTS} each"
        );
        drive_each(both)?;
        for (number, rig) in both.iter_mut().enumerate() {
            rig.check_peers()?;
            ended[number] += rig.queues[0].take().len();
            found[number] = rig.transport.read_signal(0, signal(rig, number, rig.previous()));
        }
    }
    Ok(())
}

fn drive_each(both: &mut [Rig<'_>; 2]) -> Result<()> {
    both.iter_mut().try_for_each(Rig::drive)
}
