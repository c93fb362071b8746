//! One report per rank.

use std::collections::BTreeMap;

use super::words;
use crate::format::Report;

/// Reports further apart than this are said to be of different moments.
const APART_MS: u64 = 2000;

/// The reports of one job.
pub(super) struct Set {
    pub(super) ranks: u32,
    reports: BTreeMap<u32, Report>,
    notes: Vec<String>,
}

/// The most jobs that are looked at.
const MOST_JOBS: usize = 16;

/// The jobs that reported last, at about the same moment, the latest first; one at least if there is a
/// report.
pub(super) fn jobs(reports: &[Report]) -> Vec<String> {
    let mut latest: BTreeMap<&str, u64> = BTreeMap::new();
    for report in reports {
        let known = latest.entry(&report.job).or_default();
        *known = report.unix_ms.max(*known);
    }
    if latest.len() > 1 {
        latest.remove("");
    }
    let mut jobs: Vec<(u64, &str)> = latest.into_iter().map(|(job, at)| (at, job)).collect();
    jobs.sort_unstable_by(|a, b| b.cmp(a));
    let last = jobs.first().map_or(0, |(at, _)| *at);
    let at_once = |(at, _): &&(u64, &str)| last - at <= APART_MS;
    jobs.iter().filter(at_once).take(MOST_JOBS).map(|(_, job)| (*job).to_owned()).collect()
}

impl Set {
    /// The reports of a job. Before the ranks have met, nobody knows its name: those count for any.
    pub(super) fn choose(reports: &[Report], job: &str) -> Self {
        let mut notes = Vec::new();
        let mut kept: BTreeMap<u32, &Report> = BTreeMap::new();
        let (mut others, mut ranks) = (0, 0);
        for report in reports {
            if !report.job.is_empty() && report.job != job {
                others += 1;
                continue;
            }
            ranks = ranks.max(report.ranks);
            let weight = |r: &Report| (r.is_error(), r.unix_ms);
            match kept.get(&report.rank) {
                Some(known) if weight(known) >= weight(report) => {}
                _ => drop(kept.insert(report.rank, report)),
            }
        }
        if others > 0 {
            notes.push(format!(
                "{others} reports of other jobs, or other yards, were left out; this is about job {job}"
            ));
        }
        let reports = kept.into_iter().map(|(rank, report)| (rank, report.clone())).collect();
        let mut set = Self { ranks, reports, notes };
        set.note_moments();
        set.note_configs();
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
}
