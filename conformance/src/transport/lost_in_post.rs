//! A rank that is stopped or killed inside `post` and `poll` (`TY_CAP_MASKING`): it holds nothing that others wait for,
//! such as a lock in memory that they share.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::process::Signal;
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::clock::Clock;
use super::lost_peer::{PUTS, await_loss, bring_up, signal};
use super::masking::{comes_from_other, each_failure_names, leaves_for_other, stuck};
use super::needs::Needs;
use super::progress::drive;
use super::rig::{self, Rig};
use super::{Body, TransportCase};
use crate::suite::{Loss, Outcome, Rank};

pub(super) const CASES: &[TransportCase] = &[TransportCase {
    name: "a_peer_lost_in_post_holds_up_no_other",
    about: "commands of all kinds to others go on, and no call waits, beside a peer that posts all kinds and polls \
            without a pause, each time that it is stopped, and after it was killed",
    invariants: "INV-6",
    ranks: &[3],
    flags: abi::TY_CAP_MASKING,
    needs: PUTS,
    body: Body::OwnProcess(others_go_on),
    ..TransportCase::BARE
}];

/// The others are the survivors.
const VICTIM: u32 = 2;
/// Stops of the victim. One that finds it outside of a lock shows nothing: about every second one where each put takes
/// a lock, and nearly each where the locks are short.
const STOPS: u64 = 40;
/// Exchanges of the survivors after the victim was killed.
const AFTERWARDS: u64 = 10;
/// The survivors' bytes. Behind them is a value, and room for what the victim puts.
const SMALL: u64 = 64;
/// Bytes of the victim's long commands.
const LONG: usize = 1 << 16;
/// The victim's short commands for each long one. They take about as long, so that it is stopped in both.
const SHORTS: usize = 64;

fn others_go_on(rank: &Rank<'_>, needs: &Needs) -> Result<Outcome> {
    let (mut rig, pids) = bring_up(rank, needs)?;
    if rig.me() == VICTIM {
        return posts_until_killed(rank, rig);
    }
    rig.expect_errors();
    rig.queues[0].clock = Some(Clock::new(rig::short(rank) / 10));
    let pid = pids[VICTIM as usize];
    let mut open = 0;
    let stopped = (1..=STOPS).try_for_each(|round| {
        if rig.me() == 0 {
            stop_while_it_posts(&mut rig, rank, pid, round)?;
        }
        open += exchange(&mut rig, round, open)?;
        if rig.me() == 0 { signal(pid, Signal::CONT) } else { Ok(()) }
    });
    if stopped.is_err() {
        // A survivor that waits for the victim's lock gets it, and ends.
        let _ = signal(pid, Signal::CONT);
    }
    stopped?;
    rig.barrier("stops are over")?;
    await_loss(rank, pid, Loss::Killed)?;
    for round in STOPS + 1..=STOPS + AFTERWARDS {
        open += exchange(&mut rig, round, open)?;
    }
    let failures = rig.queues[0].take();
    each_failure_names(&rig, &failures, &[VICTIM])?;
    Ok(Outcome::PassAndOver)
}

/// A thread of the victim posts and polls, until its process is killed.
fn posts_until_killed(rank: &Rank<'_>, rig: Rig<'_>) -> Result<Outcome> {
    let (commands, is_driven) = (mixed(&rig), rig.is_driven());
    let Rig { transport, windows, mut queues, .. } = rig;
    std::mem::forget(windows);
    let mut queue = queues.swap_remove(0);
    queue.expects_errors = true;
    std::thread::spawn(move || {
        let (mut works, mut left) = (Ok(()), &commands[..]);
        while works.is_ok() {
            // A full queue takes a part: the next ones come after that.
            left = if left.is_empty() { &commands } else { left };
            let posted = queue.try_post(&transport, left);
            works = posted.and_then(|accepted| {
                left = &left[accepted..];
                if is_driven {
                    drive(&transport)?;
                }
                queue.drive(&transport)
            });
            queue.take();
        }
        // It stays open, also where it has failed.
        std::mem::forget(transport);
    });
    rank.world.barrier("stops are over")?;
    Ok(Outcome::IsLost(Loss::Killed))
}

/// The victim's commands to both survivors, of all kinds, long and short ones.
fn mixed(rig: &Rig<'_>) -> Vec<Command> {
    let long = rig.put_bytes(LONG) as u64;
    let command = |(op, bytes), peer| Command {
        op,
        peer,
        signal: rig.signal(1, 0, VICTIM),
        add: raises(op),
        dst_window: 1,
        dst_offset: LONG as u64,
        bytes,
        ..NO_COMMAND
    };
    let get = rig.can_get().then_some(abi::TY_OP_GET);
    let longs = [abi::TY_OP_PUT_SIGNAL, abi::TY_OP_PUT].into_iter().chain(get);
    let shorts = [
        (abi::TY_OP_PUT_SIGNAL, SMALL),
        (abi::TY_OP_PUT, SMALL),
        (abi::TY_OP_PUT_VALUE, 0),
        (abi::TY_OP_SIGNAL, 0),
    ];
    let shorts = shorts.into_iter().chain(get.map(|op| (op, SMALL)));
    let all = longs.map(|op| (op, long)).chain(shorts.cycle().take(SHORTS));
    all.flat_map(|kind| [command(kind, 0), command(kind, 1)]).collect()
}

/// The number that a command of this op adds to its signal.
fn raises(op: u8) -> u32 {
    u32::from(op == abi::TY_OP_SIGNAL || op == abi::TY_OP_PUT_SIGNAL)
}

/// Stops the victim at some moment after it was seen to post.
fn stop_while_it_posts(rig: &mut Rig<'_>, rank: &Rank<'_>, pid: u32, round: u64) -> Result<()> {
    let total = |rig: &Rig<'_>| rig.transport.read_signal(0, rig.signal(1, 0, VICTIM));
    let (before, until) = (total(rig), rig.until());
    while total(rig) == before {
        rig.drive()?;
        ensure!(
            Instant::now() < until,
            "puts of rank {VICTIM}, which was stopped {} times and goes on, do not arrive: signal {}: found total \
             {before}, and no more within {:?} (INV-6, TY_CAP_MASKING)",
            round - 1,
            rig.signal(1, 0, VICTIM),
            rig.needs.deadline
        );
        std::thread::yield_now();
    }
    // Not always the same moment behind the arrival.
    std::thread::sleep(Duration::from_micros(round * 37 % 500));
    signal(pid, Signal::STOP)?;
    await_loss(rank, pid, Loss::Stopped)
}

/// Rank 0 posts to rank 1 and then rank 1 to rank 0, each also to the victim, where it has few puts `open` to it.
/// Returns how many more are open.
fn exchange(rig: &mut Rig<'_>, round: u64, open: usize) -> Result<usize> {
    let me = rig.me();
    let put = Command {
        op: abi::TY_OP_PUT_SIGNAL,
        peer: 1 - me,
        signal: rig.signal(0, 0, me),
        add: 1,
        dst_window: 1,
        bytes: SMALL,
        tag: round,
        ..NO_COMMAND
    };
    // Events stay with the queue until the end.
    let events = rig.queues[0].events();
    let ended = events.iter().filter(|event| event.peer == VICTIM).count();
    let most_open = (rig.needs.queue_depth as usize / 4).max(1);
    let mut more = 0;
    if open < ended + most_open {
        let to_victim = Command { peer: VICTIM, flags: abi::TY_FLAG_NOTIFY, ..put };
        more = rig.queues[0].try_post(&rig.transport, &[to_victim])?;
    }
    if rig.is_driven() {
        rig.queues[0].call("progress", || drive(&rig.transport))??;
    }
    if me == 0 {
        all_leave(rig, &put)?;
        all_come(rig, round)
    } else {
        all_come(rig, round)?;
        all_leave(rig, &put)
    }?;
    Ok(more)
}

/// Posts a command of each kind to the other survivor, the last one like `put`. A get has ended then.
fn all_leave(rig: &mut Rig<'_>, put: &Command) -> Result<()> {
    let signal = rig.signal(1, 0, rig.me());
    let (value, raise) = (abi::TY_OP_PUT_VALUE, abi::TY_OP_SIGNAL);
    let before = [
        Command { op: abi::TY_OP_PUT, signal: 0, add: 0, ..*put },
        Command { op: value, signal: 0, add: 0, bytes: 0, dst_offset: SMALL, ..*put },
        Command { op: raise, signal, bytes: 0, dst_window: 0, ..*put },
    ];
    before.iter().try_for_each(|command| leaves_for_other(rig, command, &[VICTIM]))?;
    if rig.can_get() {
        let (op, flags) = (abi::TY_OP_GET, abi::TY_FLAG_NOTIFY);
        let get = Command { op, flags, signal: 0, add: 0, src_offset: SMALL, ..*put };
        leaves_for_other(rig, &get, &[VICTIM])?;
        ends(rig, &get)?;
    }
    leaves_for_other(rig, put, &[VICTIM])
}

/// Waits for the event of a command to the other survivor.
fn ends(rig: &mut Rig<'_>, command: &Command) -> Result<()> {
    let Command { peer, tag, .. } = *command;
    let until = rig.until();
    while !rig.queues[0].events().iter().any(|event| (event.peer, event.tag) == (peer, tag)) {
        rig.drive()?;
        if Instant::now() >= until {
            return Err(stuck(&format!("a get from rank {peer} does not end"), &[VICTIM]));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Waits for what the other survivor posted in this round.
fn all_come(rig: &mut Rig<'_>, round: u64) -> Result<()> {
    // The other one may itself have waited for the victim until the deadline.
    let limit = 2 * rig.needs.deadline;
    // Beside the put by which they met.
    comes_from_other(rig, 0, 1 + round, &[VICTIM], limit)?;
    comes_from_other(rig, 1, round, &[VICTIM], limit)
}
