//! Leaks: what a process has before and after calls that give back all that they took.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::patience::timed;
use super::rig;
use crate::suite::Rank;

/// Counted calls of each kind: enough to see a leak at every third one. The two calls before them may keep what a
/// process has once, such as a library's handle.
const CALLS: i32 = 6;
/// Counted calls of a kind that takes long, behind one that does not count.
const SLOW_CALLS: i32 = 2;
/// A call that takes long waits for a peer, as some fabrics do.
const SLOW: Duration = Duration::from_millis(40);
/// The time that descriptors and names have to go after `close`: more on slow machines.
pub(super) fn settles(rank: &Rank<'_>) -> Duration {
    3 * rig::short(rank)
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
pub(super) fn keeps_nothing(
    rank: &Rank<'_>,
    what: &str,
    mut call: impl FnMut() -> Result<()>,
) -> Result<()> {
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
