//! Commands that are under way when their peer goes: each of them ends, once.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rustix::process::Signal;
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event, NO_COMMAND};

use super::ending::{FILLS, exchange};
use super::limits::LARGE;
use super::lost_peer::{self, PART, await_loss, is_error, is_known};
use super::memory::{compare, pattern};
use super::needs::Needs;
use super::rig::Rig;
use super::{Body, TransportCase};
use crate::suite::{Loss, Outcome, Rank};

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "commands_under_way_to_a_lost_peer_end_once",
        about: "commands of all kinds that are under way when their peer is killed end once each, the failed ones \
                with an error, whether they ask for an event or not; with TY_CAP_ORDERED also all behind them",
        invariants: "commands, events; INV-6, INV-7",
        ranks: &[2],
        flags: abi::TY_CAP_BOUNDED_PUT,
        needs: Needs { windows: &[LARGE as u64, LARGE as u64], ..Needs::TWO_QUEUES },
        body: Body::OwnProcess(at_a_loss),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "commands_under_way_at_a_goodbye_fail",
        about: "with TY_CAP_MANUAL_PROGRESS a put that a peer has not taken when it closes is an error, which names it",
        invariants: "the end; INV-7",
        ranks: &[2],
        flags: abi::TY_CAP_BOUNDED_PUT | abi::TY_CAP_MANUAL_PROGRESS,
        without: abi::TY_CAP_OWNS_MEMORY,
        needs: Needs { windows: &[LARGE as u64, LARGE as u64], ..Needs::SMALL },
        body: Body::Alone(at_a_goodbye),
    },
];

/// Bytes of a short put.
const SHORT: u64 = 64;

/// Commands to peer 1 on the last queue, each with its place as its tag: long puts, of which sockets do not hold one,
/// gets, and short puts. Of each kind one that asks for an event comes before one that does not.
fn mixed(rig: &Rig<'_>) -> Vec<Command> {
    let long = rig.put_bytes(LARGE) as u64;
    let gets = [
        (abi::TY_OP_GET, true, long),
        (abi::TY_OP_GET, false, long),
        (abi::TY_OP_GET, true, long),
        (abi::TY_OP_GET, true, SHORT),
    ];
    let first = [(abi::TY_OP_PUT_SIGNAL, true, long)];
    let others = [
        (abi::TY_OP_PUT, true, long),
        (abi::TY_OP_PUT, false, long),
        (abi::TY_OP_PUT_SIGNAL, false, long),
        (abi::TY_OP_PUT_SIGNAL, true, long),
        (abi::TY_OP_SIGNAL, true, 0),
        (abi::TY_OP_PUT_VALUE, true, 0),
        (abi::TY_OP_PUT_VALUE, false, 0),
        (abi::TY_OP_PUT, true, SHORT),
        (abi::TY_OP_PUT, false, SHORT),
        (abi::TY_OP_PUT_SIGNAL, true, SHORT),
        (abi::TY_OP_PUT_SIGNAL, false, SHORT),
        (abi::TY_OP_SIGNAL, false, 0),
        (abi::TY_OP_PUT_VALUE, true, 0),
    ];
    let gets = gets.into_iter().filter(|_| rig.can_get());
    let kinds = first.into_iter().chain(gets).chain(others);
    let queue = rig.last_queue();
    let signal = rig.signal(1, queue, rig.me());
    let command = |(tag, (op, notify, bytes))| Command {
        op,
        flags: if notify { abi::TY_FLAG_NOTIFY } else { 0 },
        queue,
        peer: 1,
        signal,
        add: u32::from(op == abi::TY_OP_SIGNAL || op == abi::TY_OP_PUT_SIGNAL),
        // A get stores there, and a put reads from window 0.
        src_window: if op == abi::TY_OP_GET { 1 } else { 0 },
        dst_window: 1,
        bytes,
        tag,
        ..NO_COMMAND
    };
    (0..).zip(kinds).map(command).collect()
}

fn asks(command: &Command) -> bool {
    command.flags & abi::TY_FLAG_NOTIFY != 0
}

/// Rank 1 is stopped, so that commands wait, and then killed.
fn at_a_loss(rank: &Rank<'_>, needs: &Needs) -> Result<Outcome> {
    let (mut rig, pids) = lost_peer::bring_up(rank, needs)?;
    if rig.me() == 1 {
        // Its transport stays open: it sends no goodbye.
        std::mem::forget(rig);
        return Ok(Outcome::IsLost(Loss::Stopped));
    }
    rig.expect_errors();
    await_loss(rank, pids[1], Loss::Stopped)?;
    let commands = mixed(&rig);
    let accepted = post_some(&mut rig, &commands)?;
    lost_peer::signal(pids[1], Signal::KILL)?;
    await_loss(rank, pids[1], Loss::Killed)?;
    let commands = &commands[..accepted];
    let ends = ends_of(&mut rig, commands)?;
    let failed = |command: &&Command| ends.get(&command.tag) == Some(&true);
    if commands.iter().any(|command| failed(&command)) {
        is_known(&rig, 1)?;
    }
    // Puts alike, or gets, of which all that ask for an event have failed. They lay between each other.
    for (kind, is_get) in [("puts", false), ("gets", true)] {
        let long = || {
            let of_kind = move |one: &&Command| (one.op == abi::TY_OP_GET) == is_get;
            commands.iter().filter(|one| one.bytes > SHORT).filter(of_kind)
        };
        let (mut asking, mut silent) =
            (long().filter(|one| asks(one)), long().filter(|one| !asks(one)));
        ensure!(
            !asking.all(|one| failed(&one)) || silent.any(|one| failed(&one)) || long().all(asks),
            "all long {kind} with TY_FLAG_NOTIFY failed, and those without it between them gave no event; expected \
             error events of these as well (INV-7)"
        );
    }
    if rig.is_ordered() {
        none_gets_ahead(commands, &ends)?;
    }
    Ok(Outcome::PassAndOver)
}

/// In order, nothing arrives behind a command that has failed: one of the same kind behind it has failed as well. One
/// of another kind may have ended before, in a buffer.
fn none_gets_ahead(commands: &[Command], ends: &BTreeMap<u64, bool>) -> Result<()> {
    let failed = |command: &Command| ends.get(&command.tag) == Some(&true);
    for (at, command) in commands.iter().enumerate() {
        let mut alike =
            commands[..at].iter().filter(|one| one.op == command.op && one.bytes == command.bytes);
        if let Some(first) = alike.find(|one| failed(one)) {
            ensure!(
                failed(command),
                "{command:?} gave no error event behind {first:?}, which failed; expected one of each command of \
                 its kind behind it (INV-7, TY_CAP_ORDERED)"
            );
        }
    }
    Ok(())
}

/// Posts as many commands as the last queue takes while the peer takes nothing.
fn post_some(rig: &mut Rig<'_>, commands: &[Command]) -> Result<usize> {
    let mut accepted = 0;
    for _ in 0..FILLS {
        if accepted < commands.len() {
            let queue = &rig.queues[rig.last_queue() as usize];
            accepted += queue.try_post(&rig.transport, &commands[accepted..])?;
        }
        rig.drive()?;
    }
    Ok(accepted)
}

/// The time in which a second event of a command would come.
const AGAIN: Duration = Duration::from_millis(100);

/// Waits until the commands have ended that ask for an event, and checks that each command has at most one. Returns for
/// each tag with an event whether it is an error.
fn ends_of(rig: &mut Rig<'_>, commands: &[Command]) -> Result<BTreeMap<u64, bool>> {
    let (limit, mut ends) = (2 * rig.needs.deadline, BTreeMap::new());
    let (until, mut after) = (Instant::now() + limit, None);
    while after.is_none_or(|after| Instant::now() < after) {
        rig.drive()?;
        let queue = rig.last_queue() as usize;
        for event in rig.queues[queue].take() {
            note(&mut ends, commands, event)?;
        }
        let missing = commands.iter().find(|one| asks(one) && !ends.contains_key(&one.tag));
        if missing.is_none() {
            after = after.or(Some(Instant::now() + AGAIN));
        }
        ensure!(
            after.is_some() || Instant::now() < until,
            "a command that was under way when its peer went has not ended after {limit:?}: {missing:?} (INV-6, \
             TY_CAP_BOUNDED_PUT)"
        );
        std::thread::sleep(Duration::from_micros(100));
    }
    Ok(ends)
}

fn note(ends: &mut BTreeMap<u64, bool>, commands: &[Command], event: Event) -> Result<()> {
    let command = commands.iter().find(|command| command.tag == event.tag);
    let is_error = is_error(event, 1)?;
    ensure!(
        command.is_some_and(|command| is_error || asks(command)),
        "found {event:?}; expected events of commands that failed or have TY_FLAG_NOTIFY: {command:?}"
    );
    ensure!(
        ends.insert(event.tag, is_error).is_none(),
        "found a second event of a command that was under way when its peer went: {event:?}"
    );
    Ok(())
}

/// Parts of the puts at a goodbye: the last one cannot lie in the sockets with the others before it.
const PARTS: usize = 4;
const SEED: u64 = 0x600d;

/// Rank 1 closes and has driven nothing since rank 0 posted.
fn at_a_goodbye(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let mut rig = Rig::bring_up_within(rank, needs, rank.config.world.deadline / PART)?;
    exchange(&mut rig)?;
    let part = rig.put_bytes(LARGE / PARTS);
    let last = LARGE / part - 1;
    let content = pattern(SEED, part);
    if rig.me() == 1 {
        rank.world.barrier("puts are under way")?;
        let Rig { transport, windows, .. } = rig;
        drop(transport);
        rank.world.barrier("the peer of puts has closed")?;
        rank.world.barrier("puts have ended")?;
        let arrived = compare("", &windows[1].read(last * part, part), &content).is_ok();
        rank.world.all_gather("the last put has arrived", &[u8::from(arrived)])?;
        return Ok(());
    }
    rig.expect_errors();
    rig.windows[0].write(0, &content);
    let put = |place: usize| Command {
        op: abi::TY_OP_PUT,
        flags: abi::TY_FLAG_NOTIFY,
        peer: 1,
        dst_window: 1,
        dst_offset: (place * part) as u64,
        bytes: part as u64,
        tag: place as u64,
        ..NO_COMMAND
    };
    let puts: Vec<_> = (0..=last).map(put).collect();
    let accepted = post_some(&mut rig, &puts)?;
    let early = rig.queues[0].events().iter().any(|event| event.tag == last as u64);
    rank.world.barrier("puts are under way")?;
    rank.world.barrier("the peer of puts has closed")?;
    let ends = ends_of(&mut rig, &puts[..accepted])?;
    rank.world.barrier("puts have ended")?;
    let arrived = rank.world.all_gather("the last put has arrived", &[0])?[1] == [1];
    if ends.values().any(|is_error| *is_error) {
        is_known(&rig, 1)?;
    }
    // A queue of few short commands may all lie in a buffer, and memory may outlive its owner's transport.
    let failed = ends.get(&(last as u64));
    ensure!(
        failed != Some(&false) || early || arrived,
        "a put ended as done behind the goodbye of its peer, which had not taken it; expected an error (INV-7)"
    );
    Ok(())
}
