//! Reports of jobs that went wrong, as real processes wrote them (`cli/tests/reports` plays them),
//! and the verdicts expected of them.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests fail by panic")]

use std::path::{Path, PathBuf};

use tokenyard_core::report::{Collective, Report, State, read, text};
use tokenyard_reports::{Explanation, explain};

/// The folder of a set, the kind of the verdict, and the ranks that it names.
const SETS: [(&str, &str, &[u32]); 24] = [
    ("a_job_that_goes_on_is_healthy", "healthy", &[]),
    ("a_link_between_domains_that_carries_nothing_is_named", "broken_link", &[1, 3]),
    ("a_link_that_carries_nothing_is_named_before_the_deadline", "broken_link", &[1, 0]),
    ("a_link_that_carries_nothing_is_named_with_both_ends", "broken_link", &[1, 0]),
    ("a_loss_that_is_masked_makes_each_of_the_others_report_once", "dead", &[1]),
    ("a_rank_on_a_gpu_that_was_killed_is_named", "dead", &[1]),
    ("a_rank_that_failed_by_itself_is_named_with_its_words", "failed", &[1]),
    ("a_rank_that_is_late_after_a_masked_loss_is_named", "late", &[2]),
    ("a_rank_that_is_stopped_is_named_before_the_deadline", "stopped", &[1]),
    ("a_rank_that_others_go_on_without_is_named", "dead", &[1]),
    ("a_rank_that_sleeps_between_send_and_receive_is_named", "late", &[1]),
    ("a_rank_that_sleeps_in_its_own_code_is_named", "late", &[1]),
    ("a_rank_that_sleeps_in_its_own_code_is_named_before_the_deadline", "late", &[1]),
    ("a_rank_that_sleeps_is_named_among_domains", "late", &[1]),
    ("a_rank_that_was_killed_is_named", "dead", &[1]),
    ("a_rank_that_was_stopped_is_named", "stopped", &[1]),
    ("a_rank_whose_commands_stop_is_named_with_those_that_miss_them", "broken_link", &[1, 0, 2]),
    ("a_transport_that_hangs_is_named", "transport_error", &[1]),
    ("a_transport_that_hangs_is_named_before_the_deadline", "transport_error", &[1]),
    ("an_error_of_a_transport_is_named_with_both_ends", "transport_error", &[1, 0]),
    ("ranks_on_gpus_that_go_on_are_healthy", "healthy", &[]),
    ("ranks_on_gpus_whose_hosts_post_are_healthy", "healthy", &[]),
    ("ranks_that_call_different_operations_are_named", "different_calls", &[1]),
    ("ranks_that_wait_for_each_other_are_named", "cycle", &[0, 1]),
];

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().flatten();
    let mut files: Vec<_> = entries.map(|entry| entry.path()).collect();
    files.sort();
    files
}

fn recorded() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded")
}

fn reports_of(set: &str) -> Vec<Report> {
    let files = files(&recorded().join(set));
    assert!(!files.is_empty(), "{set} is empty");
    files.iter().map(|file| read(&std::fs::read(file).unwrap()).unwrap()).collect()
}

fn explained(reports: Vec<Report>) -> Explanation {
    explain(reports).unwrap()
}

#[test]
fn every_recorded_job_is_explained_as_what_it_was() {
    for (set, kind, ranks) in SETS {
        let explanation = explained(reports_of(set));
        let verdict = &explanation.verdict;
        assert_eq!((verdict.kind.name(), &verdict.ranks[..]), (kind, ranks), "{set}: {verdict:#?}");
    }
}

#[test]
fn every_recorded_set_has_its_verdict_here() {
    let names = files(&recorded());
    let names: Vec<_> =
        names.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    let mut known = SETS.map(|(set, ..)| set);
    known.sort_unstable();
    assert_eq!(names, known);
}

#[test]
fn the_order_of_files_does_not_matter() {
    for (set, ..) in SETS {
        let mut reversed = reports_of(set);
        reversed.reverse();
        assert_eq!(explained(reversed), explained(reports_of(set)), "{set}");
    }
}

/// Another rank may be named then, whose last message the others received. But no rank is called
/// dead or stopped for want of a report.
#[test]
fn a_report_that_is_missing_makes_no_rank_dead() {
    for (set, kind, _) in SETS {
        let all = reports_of(set);
        // Without any report there is no explanation.
        for without in (0..all.len()).filter(|_| all.len() > 1) {
            let mut some = all.clone();
            let left_out = some.remove(without).rank;
            let verdict = explained(some).verdict;
            let found = verdict.kind.name();
            assert!(!["dead", "stopped"].contains(&found) || found == kind, "{set}: {verdict:#?}");
            let is_new = found == "failed" && found != kind;
            assert!(!is_new || verdict.ranks == [left_out], "{set}: {verdict:#?}");
        }
    }
}

#[test]
fn a_recorded_report_reads_as_text() {
    let reports = reports_of("a_link_that_carries_nothing_is_named_with_both_ends");
    let text = text(&reports[1]);
    for part in [
        "report of rank 1 of 3",
        "waits for rank 0: dispatch rows of operation 4",
        "waited longest for",
    ] {
        assert!(text.contains(part), "{part} is missing in:\n{text}");
    }
}

/// Once the others go on, the loss is a past event, and not the cause of later ones.
#[test]
fn a_loss_that_is_masked_does_not_hide_who_is_late_later() {
    let mut reports = reports_of("a_rank_that_others_go_on_without_is_named");
    let since_ms = 9000;
    let collective = Collective { name: "barrier".into(), topic: "x".into(), since_ms };
    for report in &mut reports {
        (report.wait, report.activity.state) = (None, State::Caller);
        report.activity.collective = (report.rank == 0).then(|| collective.clone());
    }
    let verdict = explained(reports.clone()).verdict;
    assert_eq!((verdict.kind.name(), &verdict.ranks[..]), ("late", &[2][..]), "{verdict:#?}");
    // All live ranks have a report: the verdict is that one rank is lost.
    for report in &mut reports {
        report.activity.collective = Some(collective.clone());
    }
    let verdict = explained(reports).verdict;
    assert_eq!((verdict.kind.name(), &verdict.ranks[..]), ("dead", &[1][..]), "{verdict:#?}");
}

/// The state while a communicator is renewed, and before the watchdog has run: the rank is going to
/// mask the loss.
#[test]
fn a_loss_that_one_rank_does_not_yet_say_to_mask_does_not_hide_who_is_late() {
    let recorded = reports_of("a_rank_that_is_late_after_a_masked_loss_is_named");
    for deaf in [&[2][..], &[0, 2]] {
        let mut reports = recorded.clone();
        let of_deaf = reports.iter_mut().filter(|report| deaf.contains(&report.rank));
        of_deaf.flat_map(|report| &mut report.peers).for_each(|peer| peer.masked = false);
        let verdict = explained(reports.clone()).verdict;
        assert_eq!((verdict.kind.name(), &verdict.ranks[..]), ("late", &[2][..]), "{verdict:#?}");
        // A rank that could not mask it has ended because of it.
        let of_deaf = reports.iter_mut().filter(|report| deaf.contains(&report.rank));
        of_deaf.for_each(|report| {
            (report.reason.kind, report.reason.rank) = ("peer_lost".into(), Some(1));
        });
        let verdict = explained(reports).verdict;
        assert_eq!((verdict.kind.name(), &verdict.ranks[..]), ("dead", &[1][..]), "{verdict:#?}");
    }
}

/// Kernels count in pinned memory; the host counts the commands that they post through it.
#[test]
fn a_report_of_a_rank_on_a_gpu_has_the_table_of_peers() {
    for (set, queues) in [
        ("ranks_on_gpus_that_go_on_are_healthy", 0),
        ("ranks_on_gpus_whose_hosts_post_are_healthy", 1),
    ] {
        let reports = reports_of(set);
        assert_eq!(reports[0].components.kernels, "cuda");
        let counts = |from: usize, to: u32| {
            let links = &reports[from].peer(to).unwrap().links;
            links[0].counts.clone().unwrap()
        };
        for (from, to) in [(0, 1), (1, 0)] {
            let (theirs, ours) = (counts(to, from as u32), counts(from, to as u32));
            assert!(ours.sent > 0 && theirs.received == ours.sent, "{set}: {ours:?} {theirs:?}");
            assert_eq!(theirs.expected, theirs.received, "{set}");
            assert_eq!(reports[from].queues.len(), queues, "{set}");
        }
    }
}
