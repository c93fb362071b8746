//! A peer whose process is killed, or stopped, under an open transport.
//!
//! The last ranks of the world are the victims. Their processes are really lost, once all ranks have reached each
//! other. The others watch these processes, so that they go on only when all are gone. The ranks' own world knows
//! of the loss as well, so no rank waits in a barrier.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event, NO_COMMAND};
use tokenyard_core::{Error, ErrorKind};

use super::ending::nothing_fails;
use super::errors::stays_bad;
use super::memory::{compare, pattern};
use super::needs::Needs;
use super::rig::Rig;
use super::teams::Teams;
use super::waits::Total;
use super::{Body, TransportCase};
use crate::suite::{Loss, Outcome, Rank};

pub(super) const PUTS: Needs = Needs { windows: &[1 << 20, 1 << 20], ..Needs::SMALL };

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "a_put_to_a_killed_peer_ends",
        about: "a put to a killed peer ends in time: with an error, or in memory that outlives the peer",
        invariants: "INV-6, INV-7",
        ranks: &[2],
        flags: abi::TY_CAP_BOUNDED_PUT,
        needs: Needs { teams: Teams::Backwards(1), ..PUTS },
        body: Body::Losing(Loss::Killed, 1, puts_end),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "a_put_to_a_stopped_peer_ends",
        about: "a put to a stopped peer, and a get from it, ends in time: with an error, or as done, and then the put \
                arrives",
        invariants: "INV-4, INV-6, INV-7",
        ranks: &[2],
        flags: abi::TY_CAP_BOUNDED_PUT,
        needs: PUTS,
        body: Body::OwnProcess(puts_to_a_stopped_peer_end),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "the_death_of_an_idle_peer_is_no_failure",
        about: "health stays good, and no event comes, after a peer was killed to which no command is under way",
        invariants: "the end",
        ranks: &[2],
        needs: PUTS,
        body: Body::Losing(Loss::Killed, 1, stays_well),
        ..TransportCase::BARE
    },
];

/// A rig's deadline is this part of the config's: the test waits for calls that hang.
pub(super) const PART: u32 = 3;

/// Runs a loss: the victims return that they must be lost now, and the others run `survive`.
pub(super) fn play(
    rank: &Rank<'_>,
    needs: &Needs,
    loss: Loss,
    victims: u32,
    survive: fn(&mut Rig<'_>, &[u32]) -> Result<()>,
) -> Result<Outcome> {
    let (mut rig, pids) = bring_up(rank, needs)?;
    let first_victim = rank.world.ranks() - victims;
    let victims: Vec<u32> =
        (0..rig.ranks()).filter(|peer| rig.world_rank(*peer) >= first_victim).collect();
    if victims.contains(&rig.me()) {
        // Its transport stays open: it sends no goodbye to the others.
        std::mem::forget(rig);
        return Ok(Outcome::IsLost(loss));
    }
    for victim in &victims {
        await_loss(rank, pids[rig.world_rank(*victim) as usize], loss)?;
    }
    rig.expect_errors();
    survive(&mut rig, &victims)?;
    Ok(Outcome::Pass)
}

/// Connects all ranks, which then have reached each other. Returns their processes, by world rank.
pub(super) fn bring_up<'a>(rank: &Rank<'a>, needs: &Needs) -> Result<(Rig<'a>, Vec<u32>)> {
    bring_up_within(rank, needs, rank.config.world.deadline / PART)
}

/// The same within `deadline`.
pub(super) fn bring_up_within<'a>(
    rank: &Rank<'a>,
    needs: &Needs,
    deadline: Duration,
) -> Result<(Rig<'a>, Vec<u32>)> {
    let mut rig = Rig::bring_up_within(rank, needs, deadline)?;
    meet(&mut rig)?;
    // A rank that others have reached must drive its transport until it has reached all of them.
    rig.barrier("all ranks have met")?;
    let pids = processes(rank)?;
    rig.barrier("a rank is lost")?;
    Ok((rig, pids))
}

/// The processes of all ranks. Collective.
pub(super) fn processes(rank: &Rank<'_>) -> Result<Vec<u32>> {
    let pids = rank.world.all_gather("processes", &std::process::id().to_le_bytes())?;
    let number = |pid: Vec<u8>| pid.as_slice().try_into().map(u32::from_le_bytes);
    let pids: Result<_, _> = pids.into_iter().map(number).collect();
    pids.context("read the ranks' processes: found no number")
}

/// Signals the process of another rank.
pub(super) fn signal(pid: u32, signal: Signal) -> Result<()> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).context("a process's number")?;
    kill_process(pid, signal).context("signal another rank")
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

/// Waits until the process is gone, or stopped. A busy machine takes time to end it.
pub(super) fn await_loss(rank: &Rank<'_>, pid: u32, loss: Loss) -> Result<()> {
    let until = Instant::now() + 2 * rank.config.world.deadline;
    loop {
        // The file has `pid (name) state ...`, where the name may hold any characters.
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok();
        let state = stat.as_ref().and_then(|stat| stat.rsplit_once(") ")?.1.chars().next());
        let lost = match loss {
            Loss::Killed => state.is_none_or(|state| "ZX".contains(state)) && threads(pid) <= 1,
            Loss::Stopped => state == Some('T'),
        };
        if lost {
            return Ok(());
        }
        ensure!(Instant::now() < until, "process {pid} of the victim is not lost: {state:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// The threads of a process. On a busy machine its first one has ended, and shows as a zombie, while others still hold
/// its descriptors: connections to it succeed.
fn threads(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

/// Bytes of a put to the victim. They soon exceed the bytes that a socket takes without an answer.
const BYTES: usize = 1 << 18;
/// The number of puts that must end as done, with their bytes in the victim's memory, before the test
/// accepts that this memory outlives the victim.
const BELIEVED: u64 = 3;
/// Puts that end as done behind the deadline, together more than sockets hold, before the test says that none fails.
const LATE_PUTS: u32 = PAUSED_PUTS;

/// The host finds a dead rank by itself, and decides what that means.
fn stays_well(rig: &mut Rig<'_>, _: &[u32]) -> Result<()> {
    nothing_fails(rig, "an idle peer's death")
}

fn puts_end(rig: &mut Rig<'_>, victims: &[u32]) -> Result<()> {
    puts_fail(rig, victims[0], "which is lost")
}

/// Puts to a rank that is no more, and checks that `health` names it, if one fails.
pub(super) fn puts_fail(rig: &mut Rig<'_>, victim: u32, state: &str) -> Result<()> {
    if a_put_fails(rig, victim, state)? { is_known(rig, victim) } else { Ok(()) }
}

/// Puts to a rank that is no more, until one fails, or until its memory is seen to outlive it. The first ones may end
/// as done: that is local (INV-4). Returns whether one has failed.
pub(super) fn a_put_fails(rig: &mut Rig<'_>, victim: u32, state: &str) -> Result<bool> {
    let (start, mut late) = (Instant::now(), 0);
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
            // A place for each rank that survives.
            dst_offset: u64::from(me) * bytes as u64,
            bytes: bytes as u64,
            tag: number,
            ..NO_COMMAND
        };
        if is_error(end_of(rig, "a put", &put)?, victim)? {
            return Ok(true);
        }
        if can_get {
            match get_back(rig, &put, &data)? {
                GetEnd::Error => return Ok(true),
                GetEnd::Bytes if number >= BELIEVED => return Ok(false),
                GetEnd::Bytes => {}
            }
        }
        // A busy machine may take the deadline for a few puts. Those that were posted after it decide.
        late += u32::from(start.elapsed() > rig.needs.deadline);
        ensure!(
            late < LATE_PUTS,
            "{number} puts to rank {victim}, {state}, ended as done in {:?}, the last {late} of them after the \
             deadline, and health is {}; expected an error, as TY_CAP_BOUNDED_PUT says (INV-7)",
            start.elapsed(),
            if rig.transport.health().is_ok() { "good" } else { "bad" }
        );
    }
    Ok(false)
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
pub(super) fn end_of(rig: &mut Rig<'_>, what: &str, command: &Command) -> Result<Event> {
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

pub(super) fn is_error(event: Event, victim: u32) -> Result<bool> {
    if event.kind == abi::TY_EVENT_DONE {
        return Ok(false);
    }
    ensure!(
        event.peer == victim,
        "found {event:?}; expected a failure of a command to peer {victim} (INV-7)"
    );
    has_loss_status(&event)?;
    Ok(true)
}

/// The statuses of commands that a loss has ended: the peer is gone, it took nothing in time, or its fabric says so by
/// an error completion.
const LOSSES: [i32; 3] = [abi::TY_PEER_LOST, abi::TY_DEADLINE, abi::TY_TRANSPORT];

/// Checks that an error event of a command to a lost peer has the status of a loss.
pub(super) fn has_loss_status(event: &Event) -> Result<()> {
    ensure!(
        LOSSES.contains(&event.status),
        "found {event:?} of a command to a lost peer; expected TY_PEER_LOST, TY_DEADLINE or TY_TRANSPORT"
    );
    Ok(())
}

/// Checks that `health` stays bad after an error event, names the peer, and has the status of a loss.
pub(super) fn is_known(rig: &Rig<'_>, victim: u32) -> Result<()> {
    stays_bad(rig)?;
    let error = rig.transport.health().err().context("health is good")?;
    let victim = rig.world_rank(victim);
    ensure!(
        error.rank() == Some(victim),
        "health is about {:?}: `{error}`; expected it to name rank {victim} (INV-7)",
        error.rank()
    );
    is_of_a_loss(&error)
}

/// Checks that an error of `health` which names a lost peer has the status of a loss.
pub(super) fn is_of_a_loss(error: &Error) -> Result<()> {
    ensure!(
        matches!(error.kind(), ErrorKind::PeerLost | ErrorKind::Deadline | ErrorKind::Transport),
        "health after a command to a lost peer has failed: found {:?}, `{error}`; expected TY_PEER_LOST, TY_DEADLINE \
         or TY_TRANSPORT",
        error.kind()
    );
    Ok(())
}

/// Puts to a stopped peer: together more than sockets hold.
const PAUSED_PUTS: u32 = 64;

/// Rank 1 is stopped, and goes on once the puts of rank 0 have ended. A put that ended as done may lie in a buffer
/// until then (INV-4), and arrives after that.
fn puts_to_a_stopped_peer_end(rank: &Rank<'_>, needs: &Needs) -> Result<Outcome> {
    let (mut rig, pids) = bring_up(rank, needs)?;
    rig.expect_errors();
    if rig.me() == 1 {
        Loss::Stopped.befall()?;
        let all_done = rank.world.all_gather("all puts are done", &[0])?[0] == [1];
        if all_done {
            // Rank 0 tells what is wrong.
            let _ = confirm(&mut rig);
        }
        return Ok(Outcome::PassAndOver);
    }
    await_loss(rank, pids[1], Loss::Stopped)?;
    let all_done = put_to_paused(&mut rig);
    signal(pids[1], Signal::CONT)?;
    let is_done = matches!(all_done, Ok(true));
    rank.world.all_gather("all puts are done", &[u8::from(is_done)])?;
    if all_done? {
        let confirmed = rig.signal(1, 0, 1);
        rig.wait_signal(0, confirmed, 1).with_context(|| {
            format!(
                "{PAUSED_PUTS} puts to rank 1, which was stopped, ended as done; expected all of them to arrive \
                 when it goes on (INV-7, TY_CAP_BOUNDED_PUT)"
            )
        })?;
    }
    Ok(Outcome::PassAndOver)
}

/// The content of a place, which all puts to it have in common: they may land in any order (INV-2).
fn in_place(place: u32, bytes: usize) -> Vec<u8> {
    pattern(0x5700 + u64::from(place), bytes)
}

/// Puts one after the other, and gets. Returns whether all ended as done; an error is right as well.
fn put_to_paused(rig: &mut Rig<'_>) -> Result<bool> {
    let (bytes, signal) = (rig.put_bytes(BYTES), rig.signal(0, 0, 0));
    let places = (rig.windows[0].len() / bytes) as u32;
    for number in 0..PAUSED_PUTS {
        let place = number % places;
        let at = place as usize * bytes;
        if number < places {
            rig.windows[0].write(at, &in_place(place, bytes));
        }
        let put = Command {
            op: abi::TY_OP_PUT_SIGNAL,
            flags: abi::TY_FLAG_NOTIFY,
            peer: 1,
            signal,
            add: 1,
            dst_window: 1,
            src_offset: at as u64,
            dst_offset: at as u64,
            bytes: bytes as u64,
            tag: u64::from(number),
            ..NO_COMMAND
        };
        if is_error(end_of(rig, "a put", &put)?, 1)? {
            return is_known(rig, 1).map(|()| false);
        }
    }
    // A fabric of messages has no answer to it; one that is one-sided reads the peer's memory.
    if rig.can_get() {
        let (op, flags, tag) = (abi::TY_OP_GET, abi::TY_FLAG_NOTIFY, u64::from(PAUSED_PUTS));
        let get =
            Command { op, flags, peer: 1, dst_window: 1, bytes: bytes as u64, tag, ..NO_COMMAND };
        if is_error(end_of(rig, "a get", &get)?, 1)? {
            return is_known(rig, 1).map(|()| false);
        }
    }
    Ok(true)
}

/// Waits for all puts of rank 0, checks them, and tells rank 0.
fn confirm(rig: &mut Rig<'_>) -> Result<()> {
    // Beside the put by which they met.
    rig.wait_signal(0, rig.signal(0, 0, 0), 1 + u64::from(PAUSED_PUTS))?;
    let bytes = rig.put_bytes(BYTES);
    for place in 0..(rig.windows[1].len() / bytes) as u32 {
        let found = rig.windows[1].read(place as usize * bytes, bytes);
        compare("a put that ended as done", &found, &in_place(place, bytes))?;
    }
    let (flags, signal) = (abi::TY_FLAG_NOTIFY, rig.signal(1, 0, 1));
    let yes = Command { op: abi::TY_OP_SIGNAL, flags, peer: 0, signal, add: 1, ..NO_COMMAND };
    rig.post(0, &[yes])?;
    rig.wait_events(0, 1)?;
    // Done is local: it leaves while this rank drives.
    rig.barrier("rank 0 knows")
}
