//! The end: a peer that has left in order is no failure, and what was opened is given back.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, NO_COMMAND};

use super::limits::LARGE;
use super::lost_peer::{PART, PUTS, puts_fail};
use super::needs::Needs;
use super::patience::{PATIENCE, open_before, timed};
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
        about: "probe, calls that fail, and open to close leave no descriptor, thread, mapping or name behind",
        invariants: "the order of calls: `probe`, `close`; INV-8",
        ranks: &[2],
        needs: Needs::SMALL,
        body: Body::OwnProcess(what_was_opened_is_given_back),
        ..TransportCase::BARE
    },
];

/// The time in which a transport would notice that a connection has ended.
const AFTERWARDS: Duration = Duration::from_millis(300);

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

/// Counted calls of each kind: enough to see a leak at every third one. The two calls before them may keep what a
/// process has once, such as a library's handle.
const CALLS: i32 = 6;
/// Counted calls of a kind that takes long, behind one that does not count.
const SLOW_CALLS: i32 = 2;
/// A call that takes long waits for a peer, as some fabrics do.
const SLOW: Duration = Duration::from_millis(40);
/// The time that descriptors and names have to go after `close`: more on slow machines.
fn settles(rank: &Rank<'_>) -> Duration {
    3 * rig::short(rank)
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
        let _ = component.probe(&with_unknown_key(&choice.table));
        Ok(())
    })?;
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
        // An error is right, and so is success.
        let _ = rig.transport.connect(peer, &[0xff; 64]);
        Ok(())
    })?;
    keeps_nothing(rank, "a connect to a closed instance, and close", || {
        let ends = Rig::open(rank, needs, PATIENCE)?.exchange_endpoints()?;
        rank.world.barrier("all have closed")?;
        let mut rig = open_before(rank, needs, peer)?;
        let _ = rig.transport.connect(peer, &ends[peer as usize]);
        Ok(())
    })?;
    keeps_nothing(rank, "an open that fails, or close", || {
        SPARE.into_iter().try_for_each(|spare| open_with(spare, rank, needs))
    })?;
    if rank.capabilities.flags & abi::TY_CAP_OWNS_MEMORY != 0 {
        keeps_nothing(rank, "an alloc that fails, and close", || {
            let (mut transport, _) = rig::open_transport(rank, needs, PATIENCE)?;
            // No machine has as much.
            let _ = transport.alloc(0, 1 << 60);
            Ok(())
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
            let _ = rig.transport.peer_address(0, peer);
        }
        Ok(rig.transport.health()?)
    })?;
    rig.end(true)?;
    // Names of the other rank's instance are in use until it has closed as well.
    rank.world.barrier("all have closed")?;
    let mut left = names.left(|| settles(rank));
    left.own.extend(names.left_files(|_| true));
    Ok(left)
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

/// Puts to the next rank and waits for their ends, until `posted` in all have arrived from the one before.
fn put_many(rig: &mut Rig<'_>, posted: u64) -> Result<()> {
    let (op, flags) = (abi::TY_OP_PUT_SIGNAL, abi::TY_FLAG_NOTIFY);
    let (peer, signal) = (rig.next(), rig.signal(0, 0, rig.me()));
    let put = Command { op, flags, peer, signal, add: 1, bytes: 64, ..NO_COMMAND };
    let batch = [put; 32];
    for _ in 0..MANY / batch.len() {
        rig.post(0, &batch)?;
        rig.wait_events(0, batch.len())?;
    }
    rig.wait_signal(0, rig.signal(0, 0, rig.previous()), posted)?;
    rig.barrier("all commands have ended")
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

/// The resources of a process: its descriptors, its mappings of files and shared memory, its threads, the bytes that
/// it has of the allocator, and those of other memory. Bytes count modulo 2^32, as the allocator counts them.
#[derive(Clone, Copy, Debug)]
struct Held([u32; KINDS.len()]);

/// The kinds, each with the growth by each call that is a leak, if each must grow. Bytes must: the allocator's caches,
/// and the host's own tables, take some now and then (up to 7 KiB were seen on the heap), and a thread's stack stays
/// for the next. Of the others two in all are a leak, which may come at every third call alone.
const KINDS: [(&str, Option<i32>); 5] = [
    ("descriptors", None),
    ("mappings", None),
    ("threads", None),
    ("bytes on the heap", Some(4 * PAGE)),
    ("bytes of other memory", Some(PAGE)),
];
const IN_ALL: i32 = 2;
const PAGE: i32 = 4096;

impl Held {
    fn now() -> Result<Self> {
        let descriptors = std::fs::read_dir("/proc/self/fd")?.count() as u32;
        // The allocator makes anonymous mappings when it likes, and joins them: their bytes count, less its own.
        let maps = std::fs::read_to_string("/proc/self/maps")?;
        let named = |line: &&str| line.contains(" rw-s ") || line.contains(" /");
        let bytes: usize = maps.lines().filter(|line| !named(line)).map(writable).sum();
        let mappings = maps.lines().filter(named).count() as u32;
        // SAFETY: it takes no argument, and locks what it reads.
        let heap = unsafe { libc::mallinfo() };
        let [arenas, used, mapped] = [heap.arena, heap.uordblks, heap.hblkhd].map(|n| n as u32);
        let other = (bytes as u32).wrapping_sub(arenas).wrapping_sub(mapped);
        let threads = threads()?.len() as u32;
        Ok(Self([descriptors, mappings, threads, used.wrapping_add(mapped), other]))
    }

    fn more_than(self, before: Self) -> [i32; KINDS.len()] {
        std::array::from_fn(|kind| self.0[kind].wrapping_sub(before.0[kind]).cast_signed())
    }
}

/// The bytes of a mapping, a line of the kernel's list, if this process may write them.
fn writable(line: &str) -> usize {
    let bytes = || {
        let (first, rest) = line.split_once('-')?;
        let (end, _) = rest.split_once(" rw-p ")?;
        let at = |text| usize::from_str_radix(text, 16).ok();
        at(end)?.checked_sub(at(first)?)
    };
    bytes().unwrap_or(0)
}

/// The time that a thread which was joined stays in the system's list, on a busy machine.
const LEAVES: Duration = Duration::from_millis(50);

/// The threads of this process.
fn threads() -> Result<BTreeSet<OsString>> {
    let tasks = std::fs::read_dir("/proc/self/task").context("this process's threads")?;
    tasks.map(|task| Ok(task?.file_name())).collect()
}

/// Whether threads go on that are not among these.
fn go_on_beside(before: &BTreeSet<OsString>) -> Result<bool> {
    let until = Instant::now() + LEAVES;
    while !threads()?.is_subset(before) {
        if Instant::now() > until {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(false)
}

/// Calls `what` some times, and checks that what this process holds does not grow with each call, and that no thread
/// goes on after each. Collective.
fn keeps_nothing(rank: &Rank<'_>, what: &str, mut call: impl FnMut() -> Result<()>) -> Result<()> {
    let (called, took) = timed(&mut call);
    called?;
    let is_slow = rig::of_any(rank.world, took >= SLOW)?;
    let calls = if is_slow { SLOW_CALLS } else { call().map(|()| CALLS)? };
    let before = Held::now()?;
    let (mut last, mut by_each, mut each_leaves_threads) = (before, [i32::MAX; KINDS.len()], true);
    for _ in 0..calls {
        let threads = threads()?;
        call()?;
        each_leaves_threads = each_leaves_threads && go_on_beside(&threads)?;
        let now = Held::now()?;
        let more = now.more_than(last);
        by_each = std::array::from_fn(|kind| by_each[kind].min(more[kind]));
        last = now;
    }
    ensure!(
        !each_leaves_threads,
        "{what}: a thread goes on after each of {calls} calls; expected that close waits for its end"
    );
    let until = Instant::now() + settles(rank);
    loop {
        let now = Held::now()?;
        let more = now.more_than(before);
        let is_leak = |(kind, (_, each)): &(usize, (&str, Option<i32>))| match each {
            None => more[*kind] >= IN_ALL,
            Some(each) => by_each[*kind] >= *each && more[*kind] >= calls * each,
        };
        let Some((kind, (words, _))) = KINDS.into_iter().enumerate().find(is_leak) else {
            return Ok(());
        };
        ensure!(
            Instant::now() < until,
            "{what}: found {} {words} after {calls} calls; expected {}, as before",
            now.0[kind],
            before.0[kind]
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}
