//! The graph of waits: which rank waits for which.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::Edge;
use super::evidence::{is_long, stuck_commands};
use super::set::Set;
use tokenyard_core::error::words::{ranks, seconds, verb};
use tokenyard_core::report::words::awaited;
use tokenyard_core::report::{Collective, Report, State, Wait};

/// The most ranks that are listed as awaited by one collective.
const MOST: usize = 256;

/// Every wait in the reports.
pub(super) fn edges(set: &Set) -> Vec<Edge> {
    let mut edges = Vec::new();
    for report in set.all() {
        if let Some(wait) = &report.wait {
            edges.push(of_wait(set, report, wait));
        } else if let Some(collective) = &report.activity.collective {
            edges.extend(of_collective(set, report, collective));
        }
    }
    edges
}

fn of_wait(set: &Set, report: &Report, wait: &Wait) -> Edge {
    let mut what = awaited(wait);
    let mut to = set.writer(report, wait).map_or(wait.peer, |(writer, _)| writer);
    if wait.phase == "queue room"
        && let Some((rank, count)) = stuck_commands(report)
    {
        (to, what) = (rank, format!("{what}: {count} commands to rank {rank} do not end"));
    }
    Edge { from: report.rank, to, what, age_ms: wait.age_ms, counts: is_long(report, wait.age_ms) }
}

/// A report that is at most this much later than another one counts as of the same moment.
const MOMENT_MS: u64 = 1000;

/// Whether the collective that a rank is in has ended, on another rank: then all ranks had entered
/// it. A much later report does not count, as the collective may have ended in between.
pub(super) fn is_over(set: &Set, report: &Report) -> bool {
    let ended = report.activity.collectives;
    ended > 0
        && report.activity.collective.is_some()
        && set.all().any(|other| {
            other.activity.collectives > ended
                && other.unix_ms <= report.unix_ms.saturating_add(MOMENT_MS)
        })
}

/// A rank in a collective waits for all ranks that have not entered it, until the collective has
/// ended.
fn of_collective<'a>(
    set: &'a Set,
    report: &'a Report,
    collective: &'a Collective,
) -> impl Iterator<Item = Edge> + 'a {
    let is_there = move |other: &Report| {
        let theirs = other.activity.collective.as_ref();
        theirs.is_some_and(|c| (&c.name, &c.topic) == (&collective.name, &collective.topic))
            || other.activity.state == State::Closed
    };
    let is_absent = set.all().any(|other| !is_there(other));
    let is_over = is_over(set, report);
    let absent =
        (0..set.ranks).filter(move |_| !is_over).filter(move |rank| match set.get(*rank) {
            Some(other) => !is_there(other),
            // A rank without a report may well be in the collective; it counts as absent only if no
            // other rank is.
            None => !is_absent,
        });
    absent.take(MOST).map(move |to| Edge {
        from: report.rank,
        to,
        what: format!("{} \"{}\" of the world", collective.name, collective.topic),
        age_ms: collective.since_ms,
        counts: is_long(report, collective.since_ms),
    })
}

/// The waits as lines of text. Ranks that wait for the same thing share one line; the waits of most
/// ranks come first.
pub(super) fn lines(edges: &[Edge]) -> Vec<String> {
    let mut groups: BTreeMap<(u32, &str), (Vec<u32>, u64)> = BTreeMap::new();
    for Edge { from, to, what, age_ms, .. } in edges.iter().filter(|edge| edge.counts) {
        let (list, longest) = groups.entry((*to, what)).or_default();
        list.push(*from);
        *longest = (*age_ms).max(*longest);
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by_key(|(_, (list, _))| (Reverse(list.len()), list.first().copied()));
    let more = groups.len().saturating_sub(MOST_WAITS);
    let line = |((to, what), (list, longest)): ((u32, &str), (Vec<u32>, u64))| {
        let wait = verb(&list, "waits", "wait");
        let most = verb(&list, "", "up to ");
        format!("{} {wait} for rank {to}: {what}, for {most}{}", ranks(&list), seconds(longest))
    };
    let mut lines: Vec<String> = groups.into_iter().take(MOST_WAITS).map(line).collect();
    if more > 0 {
        lines.push(format!("{more} other waits"));
    }
    lines
}

/// The most waits that are listed as evidence.
const MOST_WAITS: usize = 8;

/// The edges by the rank that waits.
pub(super) struct Graph<'a>(BTreeMap<u32, Vec<&'a Edge>>);

impl<'a> Graph<'a> {
    pub(super) fn new(edges: &[&'a Edge]) -> Self {
        let mut from: BTreeMap<u32, Vec<&Edge>> = BTreeMap::new();
        edges.iter().copied().for_each(|edge| from.entry(edge.from).or_default().push(edge));
        Self(from)
    }

    fn next(&self, rank: u32) -> impl Iterator<Item = u32> + '_ {
        self.0.get(&rank).into_iter().flatten().map(|edge| edge.to)
    }

    /// The rank that waits for no rank and that most others wait for, directly or through other
    /// ranks; with those others.
    pub(super) fn end(&self) -> Option<(u32, Vec<u32>)> {
        let mut waiting: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for from in self.0.keys() {
            for end in self.reach(*from).into_iter().filter(|rank| !self.0.contains_key(rank)) {
                waiting.entry(end).or_default().push(*from);
            }
        }
        // If several have equally many, the one with the lowest number.
        waiting.into_iter().rev().max_by_key(|(_, ranks)| ranks.len())
    }

    fn reach(&self, from: u32) -> BTreeSet<u32> {
        let mut seen = BTreeSet::new();
        let mut todo: Vec<u32> = self.next(from).collect();
        while let Some(rank) = todo.pop() {
            if seen.insert(rank) {
                todo.extend(self.next(rank));
            }
        }
        seen
    }

    /// A circle of ranks in which each waits for the next.
    pub(super) fn circle(&self) -> Option<Vec<u32>> {
        self.0.keys().find_map(|start| {
            let mut path = vec![*start];
            loop {
                let next = self.next(*path.last()?).next()?;
                if let Some(first) = path.iter().position(|rank| *rank == next) {
                    return Some(path.split_off(first));
                }
                path.push(next);
            }
        })
    }
}
