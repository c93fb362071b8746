//! Explains the reports of a job: which rank waits for which, and which rank is the cause.
//!
//! `set` chooses one report per rank · `evidence` gathers the knowledge of each rank about the
//! others · `graph` holds the waits of ranks for each other · `causes` tries one cause after the
//! other, the root of all others first; `links` has those that lie in transports and links.
//!
//! Watched by `tests/recorded.rs` (reports of real jobs, and their verdicts) and `any_bytes.rs`; `cli/tests/reports`
//! plays the jobs.

mod causes;
mod evidence;
mod graph;
mod links;
mod set;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::Serialize;

use set::Set;
use tokenyard_core::report::{Report, Slow, utc, words};

/// The kind of failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Nothing.
    Healthy,
    /// A rank's process or host ended.
    Dead,
    /// A rank sends no heartbeats any more: stopped, starved or cut off.
    Stopped,
    /// A rank ended with an error of its own.
    Failed,
    /// A rank left the world while others still need it.
    Left,
    /// A transport reported an error.
    TransportError,
    /// A link between two live ranks carries nothing.
    BrokenLink,
    /// Ranks called different operations, or with different arguments.
    DifferentCalls,
    /// A rank is in its caller's code, and others wait for it.
    Late,
    /// A rank is inside a call and waits for no rank, and others wait for it.
    Busy,
    /// Ranks wait for each other in a circle.
    Cycle,
    /// All wait for a rank that lives and wrote no report.
    NoReport,
    /// Something is wrong, and the reports do not say what.
    Unclear,
}

impl Kind {
    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Dead => "dead",
            Self::Stopped => "stopped",
            Self::Failed => "failed",
            Self::Left => "left",
            Self::TransportError => "transport_error",
            Self::BrokenLink => "broken_link",
            Self::DifferentCalls => "different_calls",
            Self::Late => "late",
            Self::Busy => "busy",
            Self::Cycle => "cycle",
            Self::NoReport => "no_report",
            Self::Unclear => "unclear",
        }
    }
}

/// The cause: the ranks to blame, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// The kind of failure.
    pub kind: Kind,
    /// The culprits: one rank; both ends of a link, the sender first; the ranks of a circle; those
    /// whose call differs. Empty where nothing is wrong, or no rank can be named.
    pub ranks: Vec<u32>,
    /// One sentence.
    pub sentence: String,
    /// The facts that support it.
    pub evidence: Vec<String>,
    /// The remedy.
    pub fix: String,
}

/// One rank waits for another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Edge {
    /// The rank that waits.
    pub from: u32,
    /// The rank that it waits for.
    pub to: u32,
    /// The signal or collective that it waits for.
    pub what: String,
    /// The length of the wait so far, in milliseconds.
    pub age_ms: u64,
    /// Whether the wait is long enough to mean something.
    pub counts: bool,
}

/// The result: verdict, waits and notes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// The job; empty where its ranks have not met.
    pub job: String,
    /// The time of the last of these reports: wall clock of its host, since 1970.
    pub unix_ms: u64,
    /// The cause.
    pub verdict: Verdict,
    /// The waits of ranks for each other.
    pub graph: Vec<Edge>,
    /// Ranks without a report, in order.
    pub missing: Vec<u32>,
    /// Reservations: reports of different moments, jobs or configs.
    pub notes: Vec<String>,
    /// Ranks of the world.
    pub ranks: u32,
    /// The ranks that all others together have waited for longest since the communicator was
    /// opened, the worst first. In a healthy job these are the ranks to look at.
    pub slowest: Vec<Slow>,
    /// The report of each rank on which the verdict is based, in order.
    #[serde(skip)]
    pub reports: Vec<Report>,
}

/// Explains the reports of a job. Of several jobs the latest counts. A process with several
/// communicators reports on all of them at once; then the first communicator that is not healthy
/// counts. Of several reports of one rank, the one that an error caused counts, else the latest.
/// `None` without a report.
pub fn explain(reports: Vec<Report>) -> Option<Explanation> {
    let mut found = set::jobs(&reports).into_iter().map(|job| explain_job(&reports, &job));
    let first = found.next()?;
    let mut explanation = match first.verdict.kind {
        Kind::Healthy => found.find(|f| f.verdict.kind != Kind::Healthy).unwrap_or(first),
        _ => first,
    };
    explanation.notes.extend(other_jobs(&reports, &explanation.job));
    Some(explanation)
}

/// The verdicts of the other jobs, the latest first, for a reader who meant another job.
fn other_jobs(reports: &[Report], this: &str) -> Vec<String> {
    let mut latest: BTreeMap<&str, u64> = BTreeMap::new();
    for report in reports.iter().filter(|r| !r.job.is_empty() && r.job != this) {
        let known = latest.entry(&report.job).or_default();
        *known = report.unix_ms.max(*known);
    }
    let mut latest: Vec<_> = latest.into_iter().map(|(job, at)| (Reverse(at), job)).collect();
    latest.sort_unstable();
    let note = |(Reverse(at), job): (Reverse<u64>, &str)| {
        let (kind, job) = (explain_job(reports, job).verdict.kind.name(), words::job(job));
        format!("{job}, last of {}, is {kind}; name its files to have that explained", utc(at))
    };
    latest.into_iter().take(OTHER_JOBS).map(note).collect()
}

/// The most other jobs that are listed.
const OTHER_JOBS: usize = 4;

fn explain_job(reports: &[Report], job: &str) -> Explanation {
    let set = Set::choose(reports, job);
    let graph = graph::edges(&set);
    let verdict = causes::verdict(&set, &graph);
    Explanation {
        job: job.to_owned(),
        unix_ms: set.all().map(|report| report.unix_ms).max().unwrap_or(0),
        verdict,
        graph,
        missing: set.missing(),
        notes: set.notes(),
        ranks: set.ranks,
        slowest: slowest(&set),
        reports: set.into_reports(),
    }
}

/// The most ranks that are listed as the slowest.
const SLOWEST: usize = 5;

fn slowest(set: &Set) -> Vec<Slow> {
    let mut waited: BTreeMap<u32, u64> = BTreeMap::new();
    for peer in set.all().flat_map(|report| &report.peers).filter(|peer| peer.waited_ms > 0) {
        let total = waited.entry(peer.rank).or_default();
        *total = total.saturating_add(peer.waited_ms);
    }
    let mut slow: Vec<Slow> =
        waited.into_iter().map(|(rank, waited_ms)| Slow { rank, waited_ms }).collect();
    slow.sort_by_key(|slow| std::cmp::Reverse(slow.waited_ms));
    slow.truncate(SLOWEST);
    slow
}
