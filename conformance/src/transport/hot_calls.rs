//! Calls of hot slots, which never wait.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::limits::LARGE;
use super::needs::Needs;
use super::progress::{drive, of_rank};
use super::rig::Rig;
use super::{Body, TransportCase};

pub(super) const CASES: &[TransportCase] = &[TransportCase {
    name: "hot_calls_do_not_wait",
    about: "post, poll, progress, health and read_signal are quick where there was nothing to do for a while, and \
            while a peer takes nothing, and the queue is full of long puts",
    invariants: "INV-6",
    ranks: &[2],
    needs: Needs { windows: &[LARGE as u64, LARGE as u64], kinds: 3, ..Needs::SMALL },
    body: Body::Connected(hot_calls_do_not_wait),
    ..TransportCase::BARE
}];

/// Puts that wait for the peer, each a part of what no socket takes at once.
const WAITING: usize = 8;

fn hot_calls_do_not_wait(rig: &mut Rig<'_>) -> Result<()> {
    idle_calls_are_quick(rig)?;
    let posted = if rig.me() == 0 { busy_calls_are_quick(rig)? } else { 0 };
    // Rank 1 drives nothing before.
    let posted = of_rank(rig.world, 0, &posted.to_le_bytes())?;
    if rig.me() == 1 {
        rig.wait_signal(0, rig.signal(0, 0, 0), posted)?;
    }
    rig.barrier("all puts have arrived")
}

/// Calls of a hot slot, of which the fastest counts: a busy machine does not hold up all of them.
const QUICK_CALLS: u32 = 20;
/// As many of `health`.
const LOOKS: u32 = 3;
/// Calls with nothing to do before those that count: a loop that naps once it has found nothing for a while does so by
/// then. They take the time at least, and at most the tenth of a deadline.
const IDLE_CALLS: u32 = 3000;
const IDLE: Duration = Duration::from_millis(20);

/// A call of this many must be quicker than this.
#[derive(Clone, Copy)]
struct Limit {
    calls: u32,
    fastest: Duration,
}

/// The limit of a hot slot. Slow machines have longer deadlines.
fn hot(rig: &Rig<'_>) -> Limit {
    let fastest = (rig.needs.deadline / 10_000).max(Duration::from_millis(1));
    Limit { calls: QUICK_CALLS, fastest }
}

/// The same of `health`.
fn cold(rig: &Rig<'_>) -> Limit {
    Limit { calls: LOOKS, fastest: (rig.needs.deadline / 10).max(Duration::from_secs(1)) }
}

/// Calls while nothing is under way, and then posts of signals.
fn idle_calls_are_quick(rig: &mut Rig<'_>) -> Result<()> {
    let (hot, cold, meanwhile) = (hot(rig), cold(rig), "with nothing to do");
    stays_idle(rig, |rig| rig.drive())?;
    is_quick(rig, "poll", meanwhile, hot, |rig| rig.drive())?;
    if rig.is_driven() {
        stays_idle(rig, |rig| drive(&rig.transport))?;
        is_quick(rig, "progress", meanwhile, hot, |rig| drive(&rig.transport))?;
    }
    is_quick(rig, "health", meanwhile, cold, |rig| Ok(rig.transport.health()?))?;
    let signal = rig.signal(2, 0, rig.me());
    is_quick(rig, "read_signal", meanwhile, hot, |rig| {
        rig.transport.read_signal(0, signal);
        Ok(())
    })?;
    rig.barrier("idle calls were quick")?;
    let raise = Command { op: abi::TY_OP_SIGNAL, peer: rig.next(), signal, add: 1, ..NO_COMMAND };
    let mut posted = 0_u64;
    is_quick(rig, "post", meanwhile, hot, |rig| {
        posted += rig.queues[0].try_post(&rig.transport, &[raise])? as u64;
        Ok(())
    })?;
    let previous = rig.previous();
    let total = of_rank(rig.world, previous as usize, &posted.to_le_bytes())?;
    rig.wait_signal(0, rig.signal(2, 0, previous), total)?;
    rig.barrier("quick calls")
}

/// Calls again and again, while nothing happens.
fn stays_idle(rig: &mut Rig<'_>, body: impl Fn(&mut Rig<'_>) -> Result<()>) -> Result<()> {
    let start = Instant::now();
    let mut calls = 0;
    while (calls < IDLE_CALLS || start.elapsed() < IDLE)
        && start.elapsed() < rig.needs.deadline / 10
    {
        body(rig)?;
        calls += 1;
    }
    Ok(())
}

/// Calls while long puts wait for a peer that takes nothing. Returns the total of the signal that they raise.
fn busy_calls_are_quick(rig: &mut Rig<'_>) -> Result<u64> {
    let (hot, cold, meanwhile) = (hot(rig), cold(rig), "while the peer takes nothing");
    let bytes = rig.put_bytes(LARGE / WAITING) as u64;
    let (op, signal) = (abi::TY_OP_PUT_SIGNAL, rig.signal(0, 0, 0));
    let put = Command { op, peer: 1, signal, add: 1, dst_window: 1, bytes, ..NO_COMMAND };
    let mut posted = 0_u64;
    for _ in 0..WAITING {
        // A queue that is full takes none, which is right.
        let post = |rig: &mut Rig<'_>| rig.queues[0].try_post(&rig.transport, &[put]);
        posted += returns_soon(rig, "post", post)? as u64;
        returns_soon(rig, "poll", |rig| rig.drive())?;
        if rig.is_driven() {
            returns_soon(rig, "progress", |rig| drive(&rig.transport))?;
        }
    }
    is_quick(rig, "poll", meanwhile, hot, |rig| rig.drive())?;
    if rig.is_driven() {
        is_quick(rig, "progress", meanwhile, hot, |rig| drive(&rig.transport))?;
    }
    is_quick(rig, "health", meanwhile, cold, |rig| Ok(rig.transport.health()?))?;
    // No rank raises it.
    let idle = rig.signal(1, 0, 1);
    is_quick(rig, "read_signal", meanwhile, hot, |rig| {
        rig.transport.read_signal(0, idle);
        Ok(())
    })?;
    // Short ones: a long put may cross inside of its post.
    let raise = Command { op: abi::TY_OP_SIGNAL, bytes: 0, dst_window: 0, ..put };
    is_quick(rig, "post", meanwhile, hot, |rig| {
        posted += rig.queues[0].try_post(&rig.transport, &[raise])? as u64;
        Ok(())
    })?;
    Ok(posted)
}

/// Calls so many times at most, until a call is quicker than the limit.
fn is_quick(
    rig: &mut Rig<'_>,
    call: &str,
    meanwhile: &str,
    Limit { calls, fastest: limit }: Limit,
    mut body: impl FnMut(&mut Rig<'_>) -> Result<()>,
) -> Result<()> {
    let mut fastest = Duration::MAX;
    for number in 1..=calls {
        let start = Instant::now();
        body(rig)?;
        let took = start.elapsed();
        fastest = fastest.min(took);
        if fastest < limit {
            break;
        }
        // One call is enough for one that waits until the deadline.
        ensure!(
            number < calls && took < rig.needs.deadline / 2,
            "{call} took {fastest:?} {meanwhile}, the fastest of {number} calls; expected less than {limit:?} (INV-6)"
        );
    }
    Ok(())
}

/// A call that waits for the peer takes until the deadline; half of that is more than a busy machine takes.
fn returns_soon<T>(
    rig: &mut Rig<'_>,
    call: &str,
    body: impl FnOnce(&mut Rig<'_>) -> Result<T>,
) -> Result<T> {
    let start = Instant::now();
    // A call that waits until the deadline also ends with the failure of a command.
    let result = body(rig);
    let (took, longest) = (start.elapsed(), rig.needs.deadline / 2);
    ensure!(
        took < longest,
        "{call} took {took:?} while the peer takes nothing; expected that it never waits (INV-6)"
    );
    result
}
