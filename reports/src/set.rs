//! One report per rank.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use tokenyard_core::error::words;
use tokenyard_core::report::Report;
use tokenyard_core::report::words::job as job_in_words;

/// Reports further apart than this count as of different moments.
const APART_MS: u64 = 2000;

/// The reports of one job.
pub(super) struct Set {
    pub(super) ranks: u32,
    reports: BTreeMap<u32, Report>,
    notes: Vec<String>,
}

/// The most jobs that are examined.
const MOST_JOBS: usize = 16;

/// The jobs that reported last, at about the same moment, the latest first; at least one if there
/// is a report.
pub(super) fn jobs(reports: &[Report]) -> Vec<String> {
    let mut latest: BTreeMap<&str, u64> = BTreeMap::new();
    for report in reports {
        let known = latest.entry(&report.job).or_default();
        *known = report.unix_ms.max(*known);
    }
    let last = latest.values().copied().max().unwrap_or(0);
    let mut jobs: Vec<(u64, &str)> = latest.into_iter().map(|(job, at)| (at, job)).collect();
    jobs.retain(|(at, _)| last - at <= APART_MS);
    // A report without a job's name may belong to one of the other jobs.
    jobs.sort_unstable_by_key(|(at, job)| Reverse((!job.is_empty(), *at, *job)));
    jobs.iter().take(MOST_JOBS).map(|(_, job)| (*job).to_owned()).collect()
}

/// Ranks that answered a request together with others, and did not answer when those were asked
/// again: their reports are old. A rank with as many answers as one of another host is not listed:
/// the clocks may differ, or, where only the last reports of each rank were stored, some may be
/// missing.
fn missed_rounds<'a>(
    reports: impl Iterator<Item = &'a Report>,
    kept: &BTreeMap<u32, &Report>,
) -> Vec<u32> {
    let mut times: BTreeMap<(&str, u32), BTreeSet<u64>> = BTreeMap::new();
    for report in reports.filter(|report| report.is_asked()) {
        times.entry((&report.host, report.rank)).or_default().insert(report.unix_ms);
    }
    let has_missed = |report: &Report| {
        let at = report.unix_ms;
        let mine = times.get(&(report.host.as_str(), report.rank)).map_or(0, BTreeSet::len);
        let with = at.saturating_sub(APART_MS)..=at.saturating_add(APART_MS);
        report.is_asked()
            && times.iter().any(|((host, _), theirs)| {
                (theirs.len() > mine || theirs.len() == mine && *host == report.host)
                    && theirs.range(with.clone()).next().is_some()
                    && theirs.last().is_some_and(|last| last > with.end())
            })
    };
    kept.values().filter(|report| has_missed(report)).map(|report| report.rank).collect()
}

impl Set {
    /// The reports of a job. Before the ranks have met, the job has no name. A report without a
    /// name counts where it is of the same moment, and its rank has no report with the name.
    pub(super) fn choose(reports: &[Report], job: &str) -> Self {
        let latest = reports.iter().filter(|r| r.job == job).map(|r| r.unix_ms).max().unwrap_or(0);
        let is_of_then = |report: &Report| report.unix_ms.abs_diff(latest) <= APART_MS;
        let is_its_own = |report: &Report| report.job == job && !job.is_empty();
        let mut notes = Vec::new();
        let mut kept: BTreeMap<u32, &Report> = BTreeMap::new();
        // A rank that masked a loss went on, so its report of that loss is out of date.
        let mut past = BTreeSet::new();
        let (mut others, mut ranks) = (0, 0);
        for report in reports {
            let may_be_its_own = report.job.is_empty() && is_of_then(report);
            if !is_its_own(report) && !may_be_its_own {
                others += 1;
                continue;
            }
            ranks = ranks.max(report.ranks);
            if report.is_masked() && !is_of_then(report) {
                past.insert(report.rank);
                continue;
            }
            let weight = |r: &Report| (is_its_own(r), r.is_error(), r.unix_ms);
            match kept.get(&report.rank) {
                Some(known) if weight(known) >= weight(report) => {}
                _ => drop(kept.insert(report.rank, report)),
            }
        }
        if others > 0 {
            notes.push(format!(
                "{others} reports of other jobs, or other communicators, were left out; this is about {}",
                job_in_words(job)
            ));
        }
        let missed = missed_rounds(reports.iter().filter(|r| is_its_own(r)), &kept);
        kept.retain(|rank, _| !missed.contains(rank));
        if !missed.is_empty() {
            notes.push(format!(
                "{} did not answer when the others were asked last; earlier reports are left out",
                words::ranks(&missed)
            ));
        }
        past.retain(|rank| !kept.contains_key(rank));
        if !past.is_empty() {
            let past: Vec<u32> = past.into_iter().collect();
            notes.push(format!(
                "the report of {} on a masked loss is older than the rest, and was left out",
                words::ranks(&past)
            ));
        }
        let reports = kept.into_iter().map(|(rank, report)| (rank, report.clone())).collect();
        let mut set = Self { ranks, reports, notes };
        set.note_moments();
        set.note_configs();
        set.note_unanswered();
        set
    }

    pub(super) fn get(&self, rank: u32) -> Option<&Report> {
        self.reports.get(&rank)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Report> + Clone {
        self.reports.values()
    }

    /// Ranks without a report.
    pub(super) fn missing(&self) -> Vec<u32> {
        (0..self.ranks).filter(|rank| !self.reports.contains_key(rank)).collect()
    }

    pub(super) fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    pub(super) fn into_reports(self) -> Vec<Report> {
        self.reports.into_values().collect()
    }

    fn note_moments(&mut self) {
        let first = self.all().min_by_key(|r| r.unix_ms);
        let last = self.all().max_by_key(|r| r.unix_ms);
        let (Some(first), Some(last)) = (first, last) else { return };
        let apart = last.unix_ms - first.unix_ms;
        if apart <= APART_MS {
            return;
        }
        let clocks = if self.all().any(|r| r.host != first.host) {
            ", or their hosts' clocks differ"
        } else {
            ""
        };
        let note = format!(
            "the reports are of different moments: that of rank {} was written {} after that of rank \
             {}{clocks}",
            last.rank,
            words::seconds(apart),
            first.rank
        );
        self.notes.push(note);
    }

    fn note_configs(&mut self) {
        let mut by_digest: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
        for report in self.reports.values() {
            by_digest.entry(&report.config.digest).or_default().push(report.rank);
        }
        if by_digest.len() > 1 {
            let groups = by_digest
                .iter()
                .map(|(digest, list)| format!("{} read {digest}", words::ranks(list)));
            let groups = groups.collect::<Vec<_>>().join("; ");
            self.notes.push(format!("the config files of the ranks differ: {groups}"));
        }
    }

    fn note_unanswered(&mut self) {
        let is_mute = |r: &&Report| r.transports.iter().any(|t| t.unanswered_ms.is_some());
        let mute: Vec<u32> = self.all().filter(is_mute).map(|report| report.rank).collect();
        if !mute.is_empty() {
            let of = words::ranks(&mute);
            self.notes
                .push(format!("a transport of {of} did not answer when asked for its health"));
        }
    }
}
