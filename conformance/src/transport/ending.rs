//! The end: a peer that has left in order is no failure, and what was opened is given back.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::errors::{UNKNOWN_OP, has_status};
use super::leaks::{keeps_nothing, settles};
use super::limits::LARGE;
use super::lost_peer::{PART, PUTS, puts_fail};
use super::memory::Area;
use super::needs::Needs;
use super::patience::{PATIENCE, open_before};
use super::progress::drive;
use super::rig::{self, Rig};
use super::shortage::DescriptorLimit;
use super::slots::with_unknown_key;
use super::{Body, TransportCase};
use crate::names::{LeftNames, Watch};
use crate::suite::{Outcome, Rank};

pub(super) const CASES: &[TransportCase] = &[
    TransportCase {
        name: "a_goodbye_is_no_failure",
        about: "health stays good, and no event comes, after a peer has closed in an orderly way",
        invariants: "the end; INV-7",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::Alone(a_goodbye_is_no_failure),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "a_put_after_a_goodbye_fails",
        about: "a put to a peer that has closed in order is an error, or reaches memory that outlives the peer",
        invariants: "the end; INV-7",
        ranks: &[2],
        flags: abi::TY_CAP_BOUNDED_PUT,
        needs: PUTS,
        body: Body::Alone(a_put_after_a_goodbye_fails),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "nothing_arrives_after_close",
        about: "memory that was a window is a rank's own once the rank has closed, also where puts are under way",
        invariants: "INV-8",
        ranks: &[2],
        without: abi::TY_CAP_OWNS_MEMORY,
        needs: Needs { windows: &[LARGE as u64, LARGE as u64], ..Needs::SMALL },
        body: Body::Alone(nothing_arrives_after_close),
        ..TransportCase::BARE
    },
    TransportCase {
        name: "what_was_opened_is_given_back",
        about: "probe, commands, calls that fail, and open to close leave no descriptor, thread, mapping or name",
        invariants: "the order of calls: `probe`, `close`; INV-8",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::OwnProcess(what_was_opened_is_given_back),
        ..TransportCase::BARE
    },
];

/// The time in which a transport would notice that a connection has ended.
const AFTERWARDS: Duration = Duration::from_millis(200);

fn a_goodbye_is_no_failure(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    after_a_goodbye(rank, needs, |rig| nothing_fails(rig, "an orderly goodbye"))
}

/// Drives for some time, in which the transport must stay well.
pub(super) fn nothing_fails(rig: &mut Rig<'_>, after: &str) -> Result<()> {
    let until = Instant::now() + AFTERWARDS;
    while Instant::now() < until {
        rig.drive()?;
        let health = rig.transport.health();
        health.with_context(|| format!("health after {after}; expected it to be good"))?;
        std::thread::sleep(Duration::from_millis(1));
    }
    let left = rig.queues[0].events();
    ensure!(left.is_empty(), "found {left:?} after {after}; expected no event");
    Ok(())
}

fn a_put_after_a_goodbye_fails(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    after_a_goodbye(rank, needs, |rig| {
        rig.expect_errors();
        puts_fail(rig, 1, "which has closed")
    })
}

/// Rank 1 closes in an orderly way, and then rank 0 does `rest`.
fn after_a_goodbye(
    rank: &Rank<'_>,
    needs: &Needs,
    rest: impl FnOnce(&mut Rig<'_>) -> Result<()>,
) -> Result<()> {
    let mut rig = Rig::bring_up_within(rank, needs, rank.config.world.deadline / PART)?;
    exchange(&mut rig)?;
    if rig.me() == 1 {
        drop(rig);
        rank.world.barrier("rank 1 has closed")?;
        return Ok(rank.world.barrier("rank 0 has looked")?);
    }
    rig.barrier("rank 1 has closed")?;
    rest(&mut rig)?;
    rank.world.barrier("rank 0 has looked")?;
    Ok(())
}

/// Rank 1 closes while a put is under way, and uses the memory for something else. Rank 0 drives nothing meanwhile: it
/// could still store into memory that both share.
fn nothing_arrives_after_close(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let mut rig = Rig::bring_up(rank, needs)?;
    rig.expect_errors();
    if rig.me() == 0 {
        let (op, signal, bytes) =
            (abi::TY_OP_PUT_SIGNAL, rig.signal(0, 0, 0), rig.put_bytes(LARGE));
        let bytes = bytes as u64;
        rig.post(
            0,
            &[Command { op, peer: 1, signal, add: 1, dst_window: 1, bytes, ..NO_COMMAND }],
        )?;
        // As much as a fabric holds.
        (0..FILLS).try_for_each(|_| rig.drive())?;
        rank.world.barrier("a put is under way")?;
        return Ok(rank.world.barrier("rank 1 has looked")?);
    }
    rank.world.barrier("a put is under way")?;
    let Rig { transport, windows, .. } = rig;
    drop(transport);
    windows[1].fill(OWN);
    std::thread::sleep(AFTERWARDS);
    let found = windows[1].read(0, windows[1].len());
    let changed = found.iter().filter(|byte| **byte != OWN).count();
    rank.world.barrier("rank 1 has looked")?;
    ensure!(changed == 0, "{changed} bytes of a window changed after close; expected none (INV-8)");
    Ok(())
}

/// The content of the memory once it is no window any more.
const OWN: u8 = 0x77;
/// Calls that fill a fabric.
pub(super) const FILLS: u32 = 64;

/// One put to every rank, and its end.
pub(super) fn exchange(rig: &mut Rig<'_>) -> Result<()> {
    let (me, ranks) = (rig.me(), rig.ranks());
    let signal = rig.signal(0, 0, me);
    let put = |peer| Command {
        op: abi::TY_OP_PUT_SIGNAL,
        flags: abi::TY_FLAG_NOTIFY,
        peer,
        signal,
        add: 1,
        dst_offset: 4096 * u64::from(1 + me),
        bytes: 4096,
        ..NO_COMMAND
    };
    rig.post(0, &(0..ranks).map(put).collect::<Vec<_>>())?;
    rig.wait_events(0, ranks as usize)?;
    for peer in 0..ranks {
        rig.wait_signal(0, rig.signal(0, 0, peer), 1)?;
    }
    rig.barrier("all have exchanged")
}

/// Looks at names: names of other programs are new at some of them, and those of the transport at each.
const LOOKS: u32 = 3;

fn what_was_opened_is_given_back(rank: &Rank<'_>, needs: &Needs) -> Result<Outcome> {
    let mut names = Vec::new();
    for _ in 0..LOOKS {
        let LeftNames { own, others } = open_and_close(rank, needs)?;
        ensure!(own.is_empty(), "after close: {}; expected no new name", own.join(", "));
        // Another program may have made these, such as another run of this suite. Those of the transport come again.
        if !rig::of_any(rank.world, !others.is_empty())? {
            return Ok(Outcome::Pass);
        }
        names.extend(others);
    }
    ensure!(
        names.is_empty(),
        "after close, {LOOKS} times: {}; expected no new name",
        names.join(", ")
    );
    Ok(Outcome::Pass)
}

/// Calls all slots that may hold something. Returns the names that are left.
fn open_and_close(rank: &Rank<'_>, needs: &Needs) -> Result<LeftNames> {
    let mut names = Watch::start();
    let (component, choice) = rig::choose(rank.config)?;
    keeps_nothing(rank, "probe", || {
        let _ = component.probe(&choice.table)?;
        Ok(())
    })?;
    keeps_nothing(rank, "a refused probe", || {
        // Each must refuse the key: `unknown_keys_are_refused`.
        may_fail(component.probe(&with_unknown_key(&choice.table)))
    })?;
    // Most transports have none.
    keeps_nothing(rank, "device_source", || may_fail(component.device_source()))?;
    keeps_nothing(rank, "open to close", || {
        let mut rig = Rig::bring_up(rank, needs)?;
        exchange(&mut rig)?;
        rig.transport.health()?;
        names.note([std::process::id()]);
        rig.end(true)
    })?;
    let peer = 1 - rank.world.rank();
    keeps_nothing(rank, "a refused connect, and close", || {
        let mut rig = open_before(rank, needs, peer)?;
        may_fail(rig.transport.connect(peer, &[0xff; 64]))
    })?;
    keeps_nothing(rank, "a connect to a closed instance, and close", || {
        let ends = Rig::open(rank, needs, PATIENCE)?.exchange_endpoints()?;
        rank.world.barrier("all have closed")?;
        let mut rig = open_before(rank, needs, peer)?;
        may_fail(rig.transport.connect(peer, &ends[peer as usize]))
    })?;
    keeps_nothing(rank, "an open that fails, or close", || {
        SPARE.into_iter().try_for_each(|spare| open_with(spare, rank, needs))
    })?;
    if rank.capabilities.memory_kinds & abi::TY_MEMORY_HOST != 0 {
        keeps_nothing(rank, "a register that fails, or close", || register_with_few(rank, needs))?;
    }
    if rank.capabilities.flags & abi::TY_CAP_OWNS_MEMORY != 0 {
        keeps_nothing(rank, "an alloc that fails, and close", || {
            let (mut transport, _) = rig::open_transport(rank, needs, PATIENCE)?;
            // No machine has as much.
            may_fail(transport.alloc(0, 1 << 60))
        })?;
    }
    if rank.capabilities.flags & abi::TY_CAP_BOUNDED_PUT != 0 {
        keeps_nothing(rank, "a put to a peer that has closed, and close", || {
            after_a_goodbye(rank, needs, put_once)
        })?;
    }
    // Once, and again only where it is a commit that fails: a close behind it may wait for the peer.
    if commit_fails_without_the_peer(rank, needs)? {
        keeps_nothing(rank, "a commit without the peer, and close", || {
            commit_fails_without_the_peer(rank, needs).map(drop)
        })?;
    }
    commands_are_given_back(rank, needs)?;
    // Names of the other rank's instance are in use until it has closed as well.
    rank.world.barrier("all have closed")?;
    let mut left = names.left(|| settles(rank));
    left.own.extend(names.left_files(|_| true));
    Ok(left)
}

/// An error is right, with a status that the slot has, and so is success.
fn may_fail<T>(result: tokenyard_core::Result<T>) -> Result<()> {
    result.map_or_else(|error| has_status(&error), |_| Ok(()))
}

/// The slots of connected instances: one that stays well, and one whose commands fail.
fn commands_are_given_back(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let mut rig = Rig::bring_up(rank, needs)?;
    let mut posted = 0;
    keeps_nothing(rank, "commands that have ended", || {
        posted += MANY as u64;
        put_many(&mut rig, posted)
    })?;
    keeps_nothing(rank, "health, link_name and peer_address", || {
        for peer in 0..rig.ranks() {
            rig.transport.link_name(peer);
            // Without load and store it is an error.
            may_fail(rig.transport.peer_address(0, peer))?;
        }
        Ok(rig.transport.health()?)
    })?;
    rig.end(true)?;
    let mut bad = Rig::bring_up(rank, needs)?;
    bad.expect_errors();
    keeps_nothing(rank, "commands that have failed", || fail_many(&mut bad))?;
    keeps_nothing(rank, "health behind a failure", || {
        (0..MANY).try_for_each(|_| may_fail(bad.transport.health()))
    })?;
    bad.end(false)
}

/// One put, which may fail or succeed, and its end if that comes soon.
fn put_once(rig: &mut Rig<'_>) -> Result<()> {
    rig.expect_errors();
    let (op, flags) = (abi::TY_OP_PUT, abi::TY_FLAG_NOTIFY);
    let put = Command { op, flags, peer: 1, bytes: 64, ..NO_COMMAND };
    let until = Instant::now() + PATIENCE;
    while rig.queues[0].try_post(&rig.transport, &[put])? == 0 && Instant::now() < until {
        rig.drive()?;
    }
    while rig.queues[0].take().is_empty() && Instant::now() < until {
        rig.drive()?;
    }
    Ok(())
}

/// Commands of a call: a few bytes for each of them show among those that the allocator takes.
const MANY: usize = 512;

/// Commands of a batch: as many fit into a queue.
const BATCH: usize = 32;

/// Puts to the next rank, moves them, and waits for their ends, until `posted` in all have arrived from the one before.
fn put_many(rig: &mut Rig<'_>, posted: u64) -> Result<()> {
    let (op, flags) = (abi::TY_OP_PUT_SIGNAL, abi::TY_FLAG_NOTIFY);
    let (peer, signal) = (rig.next(), rig.signal(0, 0, rig.me()));
    let put = Command { op, flags, peer, signal, add: 1, bytes: 64, ..NO_COMMAND };
    for _ in 0..MANY / BATCH {
        rig.post(0, &[put; BATCH])?;
        if rig.is_driven() {
            (0..BATCH).try_for_each(|_| drive(&rig.transport))?;
        }
        rig.wait_events(0, BATCH)?;
    }
    rig.wait_signal(0, rig.signal(0, 0, rig.previous()), posted)?;
    rig.barrier("all commands have ended")
}

/// Posts commands with an unknown op, which fail.
fn fail_many(rig: &mut Rig<'_>) -> Result<()> {
    let bad = Command { op: UNKNOWN_OP, peer: rig.next(), ..NO_COMMAND };
    for _ in 0..MANY / BATCH {
        rig.post(0, &[bad; BATCH])?;
        rig.wait_events(0, BATCH)?;
    }
    Ok(())
}

/// Numbers of descriptors that are free while a transport opens: one that needs more fails, early or late.
const SPARE: [usize; 2] = [1, 3];

/// Opens with as many free descriptors as `spare`, and closes. All ranks have as few, because `open` may be collective.
fn open_with(spare: usize, rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let (component, choice) = rig::choose(rank.config)?;
    let few_left = leave_descriptors(spare)?;
    // An error is right, and so is success.
    let _ = rig::open_chosen(component, choice, rank, needs, PATIENCE / 4);
    drop(few_left);
    Ok(())
}

/// Registers a window where one descriptor is free, and closes.
fn register_with_few(rank: &Rank<'_>, needs: &Needs) -> Result<()> {
    let (mut transport, _) = rig::open_transport(rank, needs, PATIENCE)?;
    let memory = transport.memory_needs()?;
    let owns = rank.capabilities.flags & abi::TY_CAP_OWNS_MEMORY != 0;
    let bytes = needs.windows[0];
    let (area, window) = if owns {
        (None, transport.alloc(0, bytes)?)
    } else {
        let (area, window) = Area::new(0, bytes, &memory)?;
        (Some(area), window)
    };
    let few_left = leave_descriptors(SPARE[0])?;
    // SAFETY: the memory is the transport's, or lives until the transport has closed.
    let registered = unsafe { transport.register(&window) };
    drop(few_left);
    drop(transport);
    drop(area);
    may_fail(registered)
}

/// Leaves this process so many descriptors.
fn leave_descriptors(spare: usize) -> Result<DescriptorLimit> {
    let is_free =
        |number: &u64| std::fs::symlink_metadata(format!("/proc/self/fd/{number}")).is_err();
    let first_beyond = (0..).filter(is_free).nth(spare).context("a number that is free")?;
    DescriptorLimit::below(first_beyond)
}

/// Rank 0 connects and commits, and rank 1 does neither. Returns whether the commit failed.
fn commit_fails_without_the_peer(rank: &Rank<'_>, needs: &Needs) -> Result<bool> {
    let mut rig = Rig::open(rank, needs, PATIENCE / 4)?;
    let endpoints = rig.exchange_endpoints()?;
    let is_first = rig.me() == 0;
    let mut connects = (0..).zip(&endpoints);
    let failed = is_first
        && connects.all(|(peer, end)| rig.transport.connect(peer, end).is_ok())
        && rig.transport.commit().is_err();
    let failed = rig::of_any(rank.world, failed)?;
    rig.close_behind_others()?;
    Ok(failed)
}
