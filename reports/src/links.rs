//! Causes that lie in a transport, or in the link between two ranks.

use std::collections::BTreeMap;

use super::causes::process;
use super::evidence::is_long;
use super::set::Set;
use super::{Edge, Kind, Verdict};
use tokenyard_core::error::words::{ranks, seconds};
use tokenyard_core::report::words::{self, activity};
use tokenyard_core::report::{Report, State};

/// A transport that does not answer, of a rank that is stuck inside a call. A transport that does
/// not answer while no rank waits may only have had no processor time on a busy machine.
pub(super) fn hanging_transport(set: &Set, edges: &[Edge]) -> Option<Verdict> {
    let is_inside = |report: &&Report| {
        matches!(report.activity.state, State::Send | State::Receive)
            && is_long(report, report.activity.since_ms)
            && edges.iter().any(|e| e.counts && (e.to == report.rank || e.from == report.rank))
    };
    let mut inside = set.all().filter(is_inside);
    let (report, health) = inside.find_map(|report| {
        let mut transports = report.transports.iter();
        Some((report, transports.find(|health| health.unanswered_ms.is_some())?))
    })?;
    let rank = report.rank;
    Some(Verdict {
        kind: Kind::TransportError,
        ranks: vec![rank],
        sentence: format!(
            "Transport {} ({}) of rank {rank}{} hangs: it does not answer, and rank {rank} is inside a call: it {}.",
            health.transport,
            health.level,
            process(set, rank),
            activity(report)
        ),
        evidence: report.transports.iter().map(words::transport).collect(),
        fix: "look at where the threads of that process are (`gdb -p`, `thread apply all bt`) and at the \
              device; the call ends with the process only"
            .to_owned(),
    })
}

/// Rows or signals that one rank has sent, and that another live rank has not received.
pub(super) fn broken_link(set: &Set) -> Option<Verdict> {
    let mut broken: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let mut evidence = Vec::new();
    for report in set.all() {
        let Some(wait) = &report.wait else { continue };
        let Some((writer, total)) = set.sent_in_vain(report, wait) else { continue };
        broken.entry(writer).or_default().push(report.rank);
        evidence.push(format!(
            "rank {writer} says that it raised {} signal {} of rank {} to {total}; rank {} waits for {} \
             and sees {}, for {}",
            wait.level,
            wait.signal,
            report.rank,
            report.rank,
            wait.expected,
            wait.found,
            seconds(wait.age_ms)
        ));
        evidence.extend(on_the_way(set, writer, report.rank));
    }
    let (from, to) = broken.iter().max_by_key(|(_, to)| to.len())?;
    let name = link_name(set, *from, to[0]);
    Some(Verdict {
        kind: Kind::BrokenLink,
        ranks: [&[*from], &to[..]].concat(),
        sentence: format!(
            "The link from rank {from} to {}{name} carries nothing: data that rank {from} sent does not \
             arrive, and both ends live.",
            ranks(to)
        ),
        evidence,
        fix: format!(
            "look at the NIC, port and cable of rank {from} and of {}, and at the switch between them \
             (`tokenyard doctor` on both hosts)",
            ranks(to)
        ),
    })
}

/// Commands on a link that have not ended.
fn on_the_way(set: &Set, from: u32, to: u32) -> Option<String> {
    let links = &set.get(from)?.peer(to)?.links;
    let counts = links.iter().filter_map(|link| link.counts.as_ref());
    let open = counts.map(|c| c.posted.saturating_sub(c.done)).fold(0, u64::saturating_add);
    (open > 0).then(|| format!("{open} commands of rank {from} to rank {to} have not ended"))
}

fn link_name(set: &Set, from: u32, to: u32) -> String {
    let link = set.get(from).and_then(|report| report.peer(to)?.links.first());
    link.map_or_else(String::new, |link| format!(" ({}, {})", link.level, link.name))
}

/// The error that a transport reports itself.
pub(super) fn transport(set: &Set) -> Option<Verdict> {
    let failed = set.all().filter(|report| report.reason.kind == "transport");
    let unwell = set.all().filter(|r| r.transports.iter().any(|t| t.error.is_some()));
    let report = failed.min_by_key(|r| r.unix_ms).or_else(|| unwell.min_by_key(|r| r.unix_ms))?;
    let health = report.transports.iter().find(|health| health.error.is_some());
    let about = report.reason.rank.or_else(|| health.and_then(|health| health.rank));
    let about = about.filter(|rank| *rank != report.rank);
    let text = if report.is_error() {
        report.reason.text.clone()
    } else {
        health.and_then(|health| health.error.clone()).unwrap_or_default()
    };
    let to = about.map_or_else(String::new, |rank| format!(" to rank {rank}"));
    let mut evidence: Vec<String> = report.transports.iter().map(words::transport).collect();
    if let Some(rank) = about.filter(|rank| set.get(*rank).is_none()) {
        evidence.push(format!("rank {rank} wrote no report: its process or host may have ended"));
    }
    let rank = report.rank;
    Some(Verdict {
        kind: Kind::TransportError,
        ranks: std::iter::once(rank).chain(about).collect(),
        sentence: format!("The transport of rank {rank} reports an error{to}: {text}."),
        evidence,
        fix:
            "look at the device that it names, and at its counterpart (`tokenyard doctor` on both \
              hosts); the page of the transport lists its errors"
                .to_owned(),
    })
}
