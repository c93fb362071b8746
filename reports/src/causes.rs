//! Tries one cause after the other. The first that fits is the root cause: a dead rank makes others
//! wait, and a rank that waits makes others wait.

use std::collections::BTreeMap;

use super::evidence::{LONG_MS, Loss, SILENT_MS};
use super::graph::{Graph, is_over};
use super::links::{broken_link, hanging_transport, transport};
use super::set::Set;
use super::{Edge, Kind, Verdict, graph};
use tokenyard_core::error::words::{capital, ranks, seconds, verb};
use tokenyard_core::report::words::{activity, call};
use tokenyard_core::report::{Report, State};

/// An error that came at least this much earlier than a loss is not its consequence.
const BEFORE_MS: u64 = 500;

/// The verdict on a set of reports, with its waits as evidence.
pub(super) fn verdict(set: &Set, edges: &[Edge]) -> Verdict {
    let mut verdict = None
        .or_else(|| ended(set, Masked::No))
        .or_else(|| silent(set))
        .or_else(|| hanging_transport(set, edges))
        .or_else(|| broken_link(set))
        .or_else(|| transport(set))
        .or_else(|| different_calls(set))
        .or_else(|| failed(set))
        .or_else(|| last_words(set, Masked::No))
        .or_else(|| left(set, edges))
        .or_else(|| waits(set, edges))
        .or_else(|| ended(set, Masked::Yes))
        .or_else(|| last_words(set, Masked::Yes))
        .unwrap_or_else(|| nothing(set));
    verdict.evidence.extend(graph::lines(edges));
    verdict
}

/// Whether to look for losses that are masked: all ranks that know of the loss go on without the
/// lost rank, and no rank waits for it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Masked {
    No,
    Yes,
}

/// The losses of one kind, in the order in which they were noticed.
fn losses(set: &Set, masked: Masked) -> impl Iterator<Item = Loss> {
    let is_masked = move |loss: &Loss| {
        loss.witnesses.iter().all(|witness| goes_on_without(set, *witness, loss.rank))
    };
    set.losses().into_iter().filter(move |loss| is_masked(loss) == (masked == Masked::Yes))
}

/// Whether a rank masks the loss of another, or is going to. A report shows the masking after a
/// short delay, and not while the communicator is renewed. A loss that the rank cannot mask, such
/// as that of rank 0, closes the communicator with an error.
fn goes_on_without(set: &Set, witness: u32, rank: u32) -> bool {
    let Some(report) = set.get(witness) else { return false };
    let Some(peer) = report.peer(rank) else { return false };
    let ended_by_it = report.is_error() && report.reason.rank == Some(rank);
    let is_to_mask = report.config.on_failure == "mask" && peer.state == "lost" && rank != 0;
    peer.masked || (is_to_mask && !ended_by_it)
}

/// A rank that ended without a message.
fn ended(set: &Set, masked: Masked) -> Option<Verdict> {
    let loss = losses(set, masked).find(|loss| loss.last_words().is_none())?;
    let earlier = |report: &Report| {
        let about_it = report.reason.rank == Some(loss.rank);
        let is_own = report.is_error() && report.reason.kind != "peer_lost";
        is_own && !about_it && report.unix_ms.saturating_add(BEFORE_MS) < loss.when_ms
    };
    if set.all().any(earlier) {
        return None;
    }
    let Loss { rank, why, witnesses, .. } = &loss;
    let stopped = why.contains("silent");
    let mut evidence =
        vec![format!("{} {} lost it", ranks(witnesses), verb(witnesses, "has", "have"))];
    let is_masked = set.all().any(|r| r.peer(*rank).is_some_and(|peer| peer.masked));
    if is_masked {
        evidence.push(format!("the others go on without rank {rank}: losses are masked"));
    }
    let report = match set.get(*rank) {
        Some(_) => "its own report was written before, or after it ran again",
        None => "it wrote no report",
    };
    let (kind, word, fix) = if stopped {
        (Kind::Stopped, "was stopped, starved or cut off", STOPPED_FIX)
    } else {
        (Kind::Dead, "ended without a message", DEAD_FIX)
    };
    Some(Verdict {
        kind,
        ranks: vec![*rank],
        sentence: format!("Rank {rank}{} {word}: it {why}, and {report}.", process(set, *rank)),
        evidence,
        fix: format!("{fix}, then {}", if is_masked { REPLACE_RANK } else { RESTART_JOB }),
    })
}

const DEAD_FIX: &str =
    "read the end of its log and its host's kernel log (out of memory, a signal)";
const STOPPED_FIX: &str = "look at its process (state T: stopped by a debugger or a signal; D: in the \
                           kernel) and at its host and network";
const RESTART_JOB: &str = "restart the job";
const REPLACE_RANK: &str =
    "start that rank again: it comes back when the others renew their communicator";

/// ` on host (process 7)`, where these are known.
pub(super) fn process(set: &Set, rank: u32) -> String {
    let own = set.get(rank).map(|own| (own.host.clone(), own.pid));
    let from_peers = || {
        let peer = set.all().find_map(|report| report.peer(rank))?;
        Some((peer.host.clone(), peer.pid))
    };
    match own.or_else(from_peers) {
        Some((host, pid)) if pid != 0 => format!(" on {host} (process {pid})"),
        _ => String::new(),
    }
}

/// A rank that sends no heartbeats, and that no rank has declared lost so far.
fn silent(set: &Set) -> Option<Verdict> {
    let silence = set.silent()?;
    let rank = silence.rank;
    Some(Verdict {
        kind: Kind::Stopped,
        ranks: vec![rank],
        sentence: format!(
            "Rank {rank}{} sent no heartbeat for {}, and has not reported since: it is stopped, starved or \
             cut off.",
            process(set, rank),
            seconds(silence.ms)
        ),
        evidence: vec![format!(
            "{} {} not receive its heartbeats; a live rank sends one every 0.1 s, and {} is long",
            ranks(&silence.witnesses),
            verb(&silence.witnesses, "does", "do"),
            seconds(SILENT_MS)
        )],
        fix: format!("{STOPPED_FIX}; a process that runs again may go on, else {RESTART_JOB}"),
    })
}

/// One operation for which ranks called different functions, or reported a mismatch.
fn different_calls(set: &Set) -> Option<Verdict> {
    let mut kinds: BTreeMap<u64, BTreeMap<&str, Vec<u32>>> = BTreeMap::new();
    for report in set.all() {
        for call in &report.activity.recent {
            let same = kinds.entry(call.operation).or_default();
            same.entry(call.kind.as_str()).or_default().push(report.rank);
        }
    }
    let differs = kinds.into_iter().find(|(_, kinds)| kinds.len() > 1);
    let complaint = set.all().find(|report| report.reason.kind == "mismatch");
    if differs.is_none() && complaint.is_none() {
        return None;
    }
    let complaints: Vec<String> = complaint
        .map(|report| format!("rank {} says: {}", report.rank, report.reason.text))
        .into_iter()
        .collect();
    let fix = "let all ranks call the same operations in the same order, with the same layout, types and \
               handles"
        .to_owned();
    let Some((operation, kinds)) = differs else {
        let report = complaint?;
        let who = report.reason.rank.map_or_else(|| vec![report.rank], |rank| vec![rank]);
        let text = &report.reason.text;
        let sentence = format!("{} made a different call: {text}.", capital(&ranks(&who)));
        let kind = Kind::DifferentCalls;
        return Some(Verdict { kind, ranks: who, sentence, evidence: complaints, fix });
    };
    let groups = kinds.iter().map(|(kind, list)| format!("{} called {kind}", ranks(list)));
    let groups = groups.collect::<Vec<_>>().join(", and ");
    // Where equally many ranks made each call, the reports do not show which call is right.
    let least = kinds.values().map(Vec::len).min().unwrap_or(0);
    let few = kinds.values().filter(|list| list.len() == least).flatten().copied();
    let few = sorted(&few.collect::<Vec<_>>());
    Some(Verdict {
        kind: Kind::DifferentCalls,
        ranks: few,
        sentence: format!("Ranks made different calls as operation {operation}: {groups}."),
        evidence: complaints,
        fix,
    })
}

/// A rank that ended with an error of its own, by its own report.
fn failed(set: &Set) -> Option<Verdict> {
    let own = set.all().filter(|report| match report.reason.kind.as_str() {
        "asked" | Report::MASKED | "deadline" => false,
        // The program has ended its own membership of the world.
        "peer_lost" => report.reason.rank == Some(report.rank),
        _ => true,
    });
    let report = own.min_by_key(|report| report.unix_ms)?;
    let witness = format!("rank {} reports `{}`", report.rank, report.reason.kind);
    Some(ended_with(set, report.rank, &report.reason.text, witness))
}

/// A rank that ended with an error of its own, by the message that it sent to the others. For a
/// rank with a report, that report counts instead.
fn last_words(set: &Set, masked: Masked) -> Option<Verdict> {
    let mut no_host_sync = losses(set, masked).filter(|loss| set.get(loss.rank).is_none());
    let loss = no_host_sync.find(|loss| loss.last_words().is_some())?;
    let witness =
        format!("{} received its last message; it wrote no report", ranks(&loss.witnesses));
    Some(ended_with(set, loss.rank, loss.last_words()?, witness))
}

fn ended_with(set: &Set, rank: u32, text: &str, witness: String) -> Verdict {
    Verdict {
        kind: Kind::Failed,
        ranks: vec![rank],
        sentence: format!("Rank {rank}{} ended with an error: {text}.", process(set, rank)),
        evidence: vec![witness],
        fix: format!("fix the error of rank {rank}, then restart the job"),
    }
}

/// A rank that left the world, and that others still wait for. A rank that ended because of an
/// error does not count.
fn left(set: &Set, edges: &[Edge]) -> Option<Verdict> {
    let mut missed: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for Edge { from, to, .. } in edges.iter().filter(|edge| edge.counts) {
        let peer = set.get(*from).and_then(|report| report.peer(*to));
        let has_left = peer.is_some_and(|peer| peer.state == "left" && !peer.masked);
        if has_left && !set.get(*to).is_some_and(Report::is_error) {
            missed.entry(*to).or_default().push(*from);
        }
    }
    let (rank, waiting) = missed.into_iter().rev().max_by_key(|(_, waiting)| waiting.len())?;
    let waiting = sorted(&waiting);
    Some(Verdict {
        kind: Kind::Left,
        ranks: vec![rank],
        sentence: format!(
            "Rank {rank}{} left the world without an error, and {} still {} for it.",
            process(set, rank),
            ranks(&waiting),
            verb(&waiting, "waits", "wait")
        ),
        evidence: vec![format!("{} received its goodbye", ranks(&waiting))],
        fix: "let all ranks make the same number of steps, and close their communicators after the last"
            .to_owned(),
    })
}

/// The rank, or the circle of ranks, at the end of the waits.
fn waits(set: &Set, edges: &[Edge]) -> Option<Verdict> {
    // A collective names the ranks that have not entered it; no rank waits for those whose loss is
    // masked. A short wait means nothing.
    let is_waited_for = |edge: &&Edge| edge.counts && !goes_on_without(set, edge.from, edge.to);
    let edges: Vec<&Edge> = edges.iter().filter(is_waited_for).collect();
    let graph = Graph::new(&edges);
    if let Some((end, waiting)) = graph.end() {
        return Some(match set.get(end) {
            Some(report) => {
                let mut verdict = holds_up(set, report, &waiting);
                verdict.evidence.extend(set.heard_again(end).map(|ms| {
                    let silence = seconds(ms);
                    format!(
                        "before its report it sent no heartbeat for {silence}: its process, or its host, \
                         stood still"
                    )
                }));
                if is_over(set, report) {
                    let text = "has ended on others: its thread was not scheduled, or is stuck";
                    verdict.evidence.push(format!("the collective that rank {end} is in {text}"));
                }
                verdict
            }
            None => unknown(set, end, &waiting),
        });
    }
    let circle = graph.circle()?;
    let steps = circle.iter().zip(circle.iter().cycle().skip(1));
    let steps = steps.map(|(from, to)| format!("rank {from} for rank {to}"));
    let calls = circle.iter().filter_map(|rank| set.get(*rank));
    Some(Verdict {
        kind: Kind::Cycle,
        sentence: format!(
            "{} wait for each other: {}.",
            capital(&ranks(&sorted(&circle))),
            steps.collect::<Vec<_>>().join(", ")
        ),
        evidence: calls.map(|report| format!("rank {} {}", report.rank, activity(report))).collect(),
        ranks: circle,
        fix: "let all ranks send and receive in the same order: where one sends 0, sends 1 and receives 0, \
              all do; a collective of the world stands between the same operations on all ranks"
            .to_owned(),
    })
}

fn sorted(list: &[u32]) -> Vec<u32> {
    let mut list = list.to_vec();
    list.sort_unstable();
    list.dedup();
    list
}

/// A rank that others wait for, and that waits for no rank.
fn holds_up(set: &Set, report: &Report, waiting: &[u32]) -> Verdict {
    let now = &report.activity;
    let rank = report.rank;
    // The rank may have just entered this state.
    let is_over = now.since_ms < LONG_MS;
    let (kind, word, fix) = match now.state {
        State::Send | State::Receive if report.wait.is_none() => (
            Kind::Busy,
            if is_over { "was busy" } else { "is busy" },
            "look at where it is (a debugger, a profiler): it works, or is stuck, inside the library",
        ),
        _ => (
            Kind::Late,
            if is_over { "was late" } else { "is late" },
            "look at what the program does on that rank between its calls (a debugger, `py-spy dump`); if \
             it may take so long, raise `world.late_ms` or `world.deadline_ms`",
        ),
    };
    let behind = now.begun_by_all.max(now.begun);
    Verdict {
        kind,
        ranks: vec![rank],
        sentence: format!(
            "Rank {rank}{} {word}: it is {}, and {} {} for it.",
            process(set, rank),
            activity(report),
            ranks(waiting),
            verb(waiting, "waits", "wait")
        ),
        evidence: vec![format!(
            "rank {rank} has begun {} operations{}; the next is number {behind}",
            now.begun,
            now.call.as_ref().map_or_else(String::new, |last| format!(", {} last", call(last))),
        )],
        fix: fix.to_owned(),
    }
}

/// A rank that others wait for, and that has no report.
fn unknown(set: &Set, rank: u32, waiting: &[u32]) -> Verdict {
    let from_peers = || set.all().filter_map(|report| report.peer(rank));
    let is_alive = from_peers().all(|peer| peer.state == "alive");
    let heard = from_peers().map(|peer| peer.heard_ms).min();
    let heard = heard
        .map_or_else(String::new, |ms| format!(", sent its last heartbeat {} ago", seconds(ms)));
    let (state, fix) = if is_alive {
        (format!("lives{heard}"), ", or ask it: kill -USR1 on its process")
    } else {
        ("has ended".to_owned(), ", and read the end of its log")
    };
    Verdict {
        kind: Kind::NoReport,
        ranks: vec![rank],
        sentence: format!(
            "{} {} for rank {rank}{}, which {state}, and whose report is not among these.",
            capital(&ranks(waiting)),
            verb(waiting, "waits", "wait"),
            process(set, rank)
        ),
        evidence: Vec::new(),
        fix: format!("fetch the report of rank {rank} from its host{fix}"),
    }
}

/// No cause was found.
fn nothing(set: &Set) -> Verdict {
    let errors: Vec<&Report> = set.all().filter(|report| report.is_error()).collect();
    let Some(first) = errors.iter().min_by_key(|report| report.unix_ms) else {
        let begun = set.all().map(|report| report.activity.begun);
        let (least, most) = (begun.clone().min().unwrap_or(0), begun.max().unwrap_or(0));
        let masked: Vec<u32> = sorted(
            &set.all()
                .flat_map(|report| report.peers.iter().filter(|p| p.masked).map(|p| p.rank))
                .collect::<Vec<_>>(),
        );
        let without = match masked.as_slice() {
            [] => String::new(),
            lost => format!(", without {}", ranks(lost)),
        };
        return Verdict {
            kind: Kind::Healthy,
            ranks: Vec::new(),
            sentence: format!(
                "The job goes on{without}: no rank waits for long, and the ranks have begun {least} to \
                 {most} operations."
            ),
            evidence: Vec::new(),
            fix: String::new(),
        };
    };
    Verdict {
        kind: Kind::Unclear,
        ranks: first.reason.rank.into_iter().collect(),
        sentence: format!(
            "The reports do not show the cause; the first report is that of rank {}: {}.",
            first.rank, first.reason.text
        ),
        evidence: Vec::new(),
        fix: "add the reports of the missing ranks".to_owned(),
    }
}
