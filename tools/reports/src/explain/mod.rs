//! What the reports of a job come to: who waits for whom, and who is the culprit.
//!
//! `set` chooses one report per rank · `evidence` says what each rank knows of the others · `graph` says who
//! waits for whom · `causes` tries one cause after the other, the root of all others first; `links` has those
//! that lie in transports and links · `words` says it.

mod causes;
mod evidence;
mod graph;
mod links;
mod set;
#[cfg(test)]
mod tests;
pub mod words;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde::Serialize;

use crate::format::{Report, Slow};
use crate::time::utc;
use set::Set;

/// What is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Nothing.
    Healthy,
    /// A rank's process or host ended.
    Dead,
    /// A rank is not heard any more: stopped, starved or cut off.
    Stopped,
    /// A rank ended with an error of its own.
    Failed,
    /// A rank said goodbye while others still need it.
    Left,
    /// A transport reported an error.
    TransportError,
    /// A link between two live ranks carries nothing.
    BrokenLink,
    /// Ranks called different operations, or with different arguments.
    DifferentCalls,
    /// A rank is in its caller's code, and others wait for it.
    Late,
    /// A rank is inside a call, waits for nobody, and others wait for it.
    Busy,
    /// Ranks wait for each other in a circle.
    Cycle,
    /// All wait for a rank that lives and wrote no report.
    NoReport,
    /// Something is wrong, and the reports do not say what.
    Unclear,
}

impl Kind {
    /// As JSON has it.
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

/// Who is to blame, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Verdict {
    /// What is wrong.
    pub kind: Kind,
    /// The culprits: one rank; both ends of a link, the sender first; the ranks of a circle; those whose
    /// call differs. Empty where nothing is wrong, or nobody can be named.
    pub ranks: Vec<u32>,
    /// One sentence.
    pub sentence: String,
    /// What it rests on.
    pub evidence: Vec<String>,
    /// What to do.
    pub fix: String,
}

/// One rank waits for another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Edge {
    /// Who waits.
    pub from: u32,
    /// For whom.
    pub to: u32,
    /// For what.
    pub what: String,
    /// For how long, in milliseconds.
    pub age_ms: u64,
    /// Whether it is long enough to mean something.
    pub counts: bool,
}

/// What the reports come to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Explanation {
    /// The job; empty where its ranks have not met.
    pub job: String,
    /// When the last of these reports was written: wall clock of its host, since 1970.
    pub unix_ms: u64,
    /// Who is to blame.
    pub verdict: Verdict,
    /// Who waits for whom.
    pub graph: Vec<Edge>,
    /// Ranks without a report, in order.
    pub missing: Vec<u32>,
    /// What to keep in mind: reports of different moments, jobs or configs.
    pub notes: Vec<String>,
    /// Ranks of the world.
    pub ranks: u32,
    /// The ranks that all others together have waited for longest since the communicator was opened, the worst
    /// first: in a job that is well, the ones to look at.
    pub slowest: Vec<Slow>,
    /// The report of each rank that the verdict rests on, in order.
    #[serde(skip)]
    pub reports: Vec<Report>,
}

/// Explains the reports of a job. Of several jobs the latest counts; a process with several communicators reports
/// of all of them at once, and then the first counts that is not well. Of several reports of one rank
/// the one counts that an error made it write, else the latest. Nothing without a report.
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

/// What the other jobs come to, the latest first: who looks for one may have got the reports of another.
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

/// Other jobs that are told of, at most.
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

/// Ranks that are named as the slowest, at most.
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
