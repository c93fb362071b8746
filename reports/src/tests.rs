use super::*;
use tokenyard_core::report::{Activity, Call, Collective, Peer, Reason, State, Traffic, Wait};

/// A report of an idle rank that was asked for it, in a world of 3.
fn idle(rank: u32) -> Report {
    let peer = |rank| Peer { rank, state: "alive".into(), heard_ms: 50, ..Peer::default() };
    let call = Call { operation: 7, kind: "dispatch".into(), slot: 1 };
    Report {
        tokenyard_report: 1,
        job: "job".into(),
        rank,
        ranks: 3,
        host: format!("host{rank}"),
        unix_ms: 100_000,
        reason: Reason { kind: "asked".into(), ..Reason::default() },
        activity: Activity {
            state: State::Caller,
            since_ms: 20,
            begun: 8,
            call: Some(call.clone()),
            recent: vec![call],
            ..Activity::default()
        },
        peers: (0..3).filter(|other| *other != rank).map(peer).collect(),
        ..Report::default()
    }
}

/// A report of a rank that waits for the entry of another.
fn waiting(rank: u32, peer: u32, age_ms: u64) -> Report {
    let mut report = idle(rank);
    report.activity.state = State::Receive;
    report.activity.since_ms = age_ms;
    report.wait = Some(Wait {
        phase: "entry".into(),
        level: "scale-up".into(),
        peer,
        signal: 4 + peer,
        expected: 5,
        found: 4,
        operation: Some(7),
        age_ms,
        given_up: false,
    });
    report
}

fn verdict(reports: Vec<Report>) -> (Kind, Vec<u32>, String) {
    let explanation = explain(reports).expect("there are reports");
    let Verdict { kind, ranks, sentence, .. } = explanation.verdict;
    (kind, ranks, sentence)
}

#[test]
fn nothing_comes_of_no_report() {
    assert!(explain(Vec::new()).is_none());
}

#[test]
fn short_waits_are_healthy_and_long_ones_lead_to_the_end_of_the_chain() {
    let (kind, ranks, _) = verdict(vec![idle(0), waiting(1, 0, 30), waiting(2, 1, 30)]);
    assert_eq!((kind, ranks), (Kind::Healthy, vec![]));
    let (kind, ranks, sentence) = verdict(vec![idle(0), waiting(1, 0, 9000), waiting(2, 1, 9000)]);
    assert_eq!((kind, ranks), (Kind::Late, vec![0]), "{sentence}");
    assert!(sentence.contains("ranks 1-2 wait for it"), "{sentence}");
}

#[test]
fn a_short_wait_is_no_link_of_the_chain() {
    let reports = vec![idle(0), waiting(1, 0, 30), waiting(2, 1, 9000)];
    let (kind, ranks, sentence) = verdict(reports);
    assert_eq!((kind, ranks), (Kind::Late, vec![1]), "{sentence}");
    assert!(sentence.starts_with("Rank 1 was late"), "{sentence}");
    let mut late = idle(0);
    late.activity.since_ms = 9000;
    let (_, ranks, sentence) = verdict(vec![late, waiting(1, 0, 9000)]);
    assert!(ranks == [0] && sentence.starts_with("Rank 0 is late"), "{sentence}");
}

#[test]
fn a_rank_that_works_inside_a_call_is_busy_and_not_late() {
    let mut busy = idle(0);
    busy.activity.state = State::Send;
    let (kind, ranks, sentence) = verdict(vec![busy, waiting(1, 0, 9000)]);
    assert_eq!((kind, ranks), (Kind::Busy, vec![0]), "{sentence}");
    assert!(sentence.contains("sends dispatch 7"), "{sentence}");
}

#[test]
fn a_live_rank_without_a_report_is_asked_for() {
    let (kind, ranks, sentence) = verdict(vec![waiting(0, 1, 9000), waiting(2, 1, 9000)]);
    assert_eq!((kind, ranks), (Kind::NoReport, vec![1]));
    assert!(sentence.contains("which lives, sent its last heartbeat 0.0 s ago"), "{sentence}");
}

#[test]
fn a_rank_that_left_while_others_wait_for_it_is_named_and_not_asked() {
    let says = |mut report: Report, state: &str| {
        let peers = report.peers.iter_mut().filter(|peer| peer.rank == 1);
        peers.for_each(|peer| (peer.state, peer.ended_ms) = (state.into(), Some(5000)));
        report
    };
    let reports = vec![says(waiting(0, 1, 9000), "left"), says(waiting(2, 0, 9000), "left")];
    let verdict = explain(reports).expect("reports").verdict;
    assert_eq!((verdict.kind, verdict.ranks), (Kind::Left, vec![1]), "{}", verdict.sentence);
    assert!(!verdict.fix.contains("kill"), "{}", verdict.fix);
    // The newer report ended in a way that does not explain the wait.
    let verdict = explain(vec![says(waiting(0, 1, 9000), "new")]).expect("reports").verdict;
    assert_eq!(verdict.kind, Kind::NoReport);
    assert!(!verdict.fix.contains("kill") && !verdict.sentence.contains("lives"), "{verdict:?}");
}

#[test]
fn a_circle_is_named_in_its_order() {
    let (kind, ranks, sentence) =
        verdict(vec![waiting(0, 1, 9000), waiting(1, 2, 9000), waiting(2, 0, 9000)]);
    assert_eq!((kind, ranks), (Kind::Cycle, vec![0, 1, 2]));
    assert!(sentence.contains("rank 2 for rank 0"), "{sentence}");
}

/// A report of a rank that has raised the signal for which rank `to` waits.
fn has_sent(mut report: Report, to: u32, total: u64) -> Report {
    let rank = report.rank;
    for peer in report.peers.iter_mut().filter(|peer| peer.rank == to) {
        let raised = vec![(9, 70), (4 + rank, total)];
        peer.links = vec![Traffic { level: "scale-up".into(), raised, ..Traffic::default() }];
    }
    report
}

#[test]
fn what_was_sent_and_has_not_come_breaks_a_circle_at_the_link() {
    let sent = has_sent(waiting(0, 1, 9000), 1, 5);
    let (kind, ranks, sentence) = verdict(vec![sent, waiting(1, 0, 9000)]);
    assert_eq!((kind, ranks), (Kind::BrokenLink, vec![0, 1]), "{sentence}");
    // It has not sent the last one.
    let sent = has_sent(waiting(0, 1, 9000), 1, 4);
    assert_eq!(verdict(vec![sent, waiting(1, 0, 9000)]).0, Kind::Cycle);
}

#[test]
fn what_may_have_been_sent_after_the_other_rank_reported_breaks_no_link() {
    let mut late = has_sent(waiting(0, 1, 100), 1, 5);
    late.unix_ms += 3000;
    let (kind, ..) = verdict(vec![late, waiting(1, 0, 9000)]);
    assert_ne!(kind, Kind::BrokenLink);
}

#[test]
fn totals_compare_rolling() {
    let mut sent = has_sent(waiting(0, 1, 9000), 1, 3);
    let mut waits = waiting(1, 0, 9000);
    if let Some(wait) = &mut waits.wait {
        (wait.expected, wait.found) = (u64::MAX, u64::MAX - 1);
    }
    assert_eq!(verdict(vec![sent.clone(), waits.clone()]).0, Kind::BrokenLink);
    sent = has_sent(sent, 1, u64::MAX - 1);
    assert_eq!(verdict(vec![sent, waits]).0, Kind::Cycle);
}

#[test]
fn the_writer_of_a_signal_counts_for_more_than_the_rank_that_is_named() {
    // Rank 2 forwards for rank 0: it raises signal 4, which rank 1 attributes to rank 0.
    let mut forwarder = idle(2);
    for peer in forwarder.peers.iter_mut().filter(|peer| peer.rank == 1) {
        let raised = vec![(4, 4)];
        peer.links = vec![Traffic { level: "scale-up".into(), raised, ..Traffic::default() }];
    }
    let (kind, ranks, sentence) = verdict(vec![idle(0), waiting(1, 0, 9000), forwarder]);
    assert_eq!((kind, ranks), (Kind::Late, vec![2]), "{sentence}");
}

#[test]
fn who_is_not_in_the_collective_that_the_others_are_in_is_late() {
    let in_barrier = |rank| {
        let mut report = idle(rank);
        let collective = Collective { name: "barrier".into(), topic: "x".into(), since_ms: 5000 };
        report.activity.collective = Some(collective);
        report
    };
    let (kind, ranks, sentence) = verdict(vec![in_barrier(0), idle(1), in_barrier(2)]);
    assert_eq!((kind, ranks), (Kind::Late, vec![1]), "{sentence}");
    let (kind, ranks, _) = verdict(vec![in_barrier(0), in_barrier(2)]);
    assert_eq!((kind, ranks), (Kind::NoReport, vec![1]));
}

fn loses(mut report: Report, rank: u32, why: &str, ended_ms: u64) -> Report {
    for peer in report.peers.iter_mut().filter(|peer| peer.rank == rank) {
        (peer.state, peer.why, peer.ended_ms) = ("lost".into(), why.into(), Some(ended_ms));
    }
    report.reason = Reason { kind: "peer_lost".into(), text: why.into(), rank: Some(rank) };
    report
}

#[test]
fn of_several_lost_ranks_the_first_is_the_cause() {
    let mut report = loses(idle(0), 2, "closed its connection", 10);
    report = loses(report, 1, "was silent for 3 s", 900);
    let (kind, ranks, _) = verdict(vec![report]);
    assert_eq!((kind, ranks), (Kind::Stopped, vec![1]));
}

#[test]
fn a_rank_that_ended_after_an_error_of_another_is_not_its_cause() {
    let mut first = waiting(0, 2, 9000);
    first.reason = Reason { kind: "deadline".into(), text: "too late".into(), rank: Some(2) };
    let mut second = loses(idle(2), 1, "closed its connection", 0);
    second.unix_ms += 5000;
    let (kind, ranks, sentence) = verdict(vec![first, second]);
    assert_eq!((kind, ranks), (Kind::Late, vec![2]), "{sentence}");
}

#[test]
fn silence_of_rank_0_explains_the_silence_of_all() {
    let deaf = |rank| {
        let mut report = idle(rank);
        report.peers.iter_mut().for_each(|peer| peer.heard_ms = 4000 + u64::from(peer.rank));
        report
    };
    let (kind, ranks, _) = verdict(vec![deaf(1), deaf(2)]);
    assert_eq!((kind, ranks), (Kind::Stopped, vec![0]));
    // A rank that has reported since was not stopped for good.
    let mut later = idle(0);
    later.unix_ms += 100;
    assert_eq!(verdict(vec![later, idle(1), idle(2)]).0, Kind::Healthy);
}

#[test]
fn of_several_jobs_the_latest_counts_and_the_others_are_mentioned() {
    let mut old = waiting(0, 1, 9000);
    (old.job, old.unix_ms) = ("old".into(), 5);
    let explanation = explain(vec![old, idle(0), idle(1), idle(2)]).expect("reports");
    assert_eq!(explanation.verdict.kind, Kind::Healthy);
    assert!(explanation.notes[0].contains("1 reports of other jobs"), "{:?}", explanation.notes);
    // The other job may be the one that the reader looks for.
    let other = "job old, last of 1970-01-01T00:00:00.005Z, is no_report";
    assert!(explanation.notes[1].starts_with(other), "{:?}", explanation.notes);
}

/// The report, changed into that of a rank that has not met the others, `before_ms` milliseconds earlier.
fn opening(mut report: Report, before_ms: u64) -> Report {
    (report.job, report.unix_ms) = (String::new(), report.unix_ms - before_ms);
    report.activity.state = State::Opening;
    report
}

#[test]
fn an_old_opening_says_nothing_of_a_job() {
    let mut failed = opening(idle(2), 50_000);
    failed.reason = Reason { kind: "config".into(), text: "no such file".into(), rank: None };
    let explanation = explain(vec![failed.clone(), idle(0), idle(1)]).expect("reports");
    assert_eq!(explanation.verdict.kind, Kind::Healthy, "{:?}", explanation.verdict);
    assert_eq!(explanation.missing, [2]);
    // A report of the same moment belongs to the job, unless its rank has met the others.
    failed.unix_ms += 49_000;
    assert_eq!(verdict(vec![failed.clone(), idle(0), idle(1)]).1, [2]);
    let explanation = explain_job(&[failed, idle(0), idle(1), idle(2)], "job");
    assert_eq!(explanation.verdict.kind, Kind::Healthy, "{:?}", explanation.verdict);
}

#[test]
fn an_opening_that_hangs_is_explained_though_an_older_job_has_reports() {
    let mut hangs = [0, 1].map(|rank| opening(idle(rank), 0));
    for report in &mut hangs {
        let name = "barrier".into();
        report.activity.collective = Some(Collective { name, topic: "x".into(), since_ms: 5000 });
    }
    let old = [0, 1, 2].map(|rank| {
        let mut report = idle(rank);
        report.unix_ms -= 60_000;
        report
    });
    let (kind, ranks, _) = verdict(hangs.into_iter().chain(old).collect());
    assert_eq!((kind, ranks), (Kind::NoReport, vec![2]));
}

#[test]
fn of_several_communicators_that_report_at_once_the_one_counts_that_is_not_well() {
    let other = |mut report: Report| {
        (report.job, report.unix_ms) = ("other".into(), report.unix_ms - 3);
        report
    };
    let well = [idle(0), idle(1), idle(2)];
    let hangs = [idle(0), waiting(1, 0, 9000), waiting(2, 0, 9000)].map(other);
    let (kind, ranks, _) = verdict(well.into_iter().chain(hangs).collect());
    assert_eq!((kind, ranks), (Kind::Late, vec![0]));
}

#[test]
fn the_report_of_an_error_counts_for_more_than_a_later_answer() {
    let mut error = waiting(0, 1, 9000);
    error.reason = Reason { kind: "deadline".into(), text: "late".into(), rank: Some(1) };
    let mut answer = idle(0);
    answer.unix_ms += 9000;
    let explanation = explain(vec![error, answer, idle(1)]).expect("reports");
    assert_eq!(explanation.reports.len(), 2);
    assert_eq!(explanation.verdict.kind, Kind::Late);
}

#[test]
fn the_ranks_that_all_have_waited_for_longest_are_named() {
    let mut reports = vec![idle(0), idle(1), idle(2)];
    for (at, peer, ms) in [(0, 1, 40), (0, 2, 70), (1, 2, 5), (2, 1, 90)] {
        let peers = reports[at].peers.iter_mut();
        peers.filter(|p| p.rank == peer).for_each(|p| p.waited_ms = ms);
    }
    let slowest = explain(reports).expect("reports").slowest;
    let slowest: Vec<(u32, u64)> = slowest.iter().map(|s| (s.rank, s.waited_ms)).collect();
    assert_eq!(slowest, [(1, 130), (2, 75)]);
}

#[test]
fn other_moments_and_other_configs_are_mentioned() {
    let (first, mut second) = (idle(0), idle(1));
    second.unix_ms += 12_300;
    second.config.digest = "beef".into();
    let explanation = explain(vec![first, second]).expect("reports");
    let notes = explanation.notes.join("\n");
    assert!(notes.contains("that of rank 1 was written 12.3 s after that of rank 0"), "{notes}");
    assert!(notes.contains("or their hosts' clocks differ"), "{notes}");
    assert!(notes.contains("rank 1 read beef"), "{notes}");
    assert_eq!(explanation.missing, [2]);
}

/// A report of a rank that goes on without `lost`.
fn masks(mut report: Report, lost: u32) -> Report {
    report = loses(report, lost, "closed its connection", 5);
    let peers = report.peers.iter_mut().filter(|peer| peer.rank == lost);
    peers.for_each(|peer| peer.masked = true);
    report.reason =
        Reason { kind: Report::MASKED.into(), text: "goes on".into(), rank: Some(lost) };
    report
}

#[test]
fn what_was_waited_for_when_a_loss_was_masked_blames_no_other_rank() {
    let reports = vec![masks(waiting(0, 2, 9000), 1), masks(waiting(2, 1, 9000), 1)];
    let (kind, ranks, sentence) = verdict(reports);
    assert_eq!((kind, ranks), (Kind::Dead, vec![1]), "{sentence}");
}

#[test]
fn a_masked_loss_is_no_error_and_no_verdict_over_the_error_that_ended_the_job() {
    // Rank 2 masked the loss as well, and wrote no later report.
    let old = masks(idle(2), 1);
    let mut error = masks(waiting(0, 2, 9000), 1);
    error.unix_ms += 60_000;
    error.peers.iter_mut().filter(|peer| peer.rank == 1).for_each(|p| p.ended_ms = Some(60_000));
    error.reason = Reason { kind: "deadline".into(), text: "too late".into(), rank: Some(2) };
    let explanation =
        explain(vec![old.clone(), masks(idle(0), 1), error.clone()]).expect("reports");
    let found = &explanation.verdict;
    assert_eq!((found.kind, &found.ranks[..]), (Kind::NoReport, &[2][..]), "{}", found.sentence);
    let notes = explanation.notes.join("\n");
    assert!(notes.contains("the report of rank 2 on a masked loss is older"), "{notes}");
    // Its last message takes precedence over that old report.
    let mut late = masks(idle(2), 1);
    (late.unix_ms, late.reason.kind) = (error.unix_ms, "peer_lost".into());
    late.activity.since_ms = 9000;
    let (kind, ranks, sentence) = verdict(vec![old, late, error]);
    assert_eq!((kind, ranks), (Kind::Late, vec![2]), "{sentence}");
}

#[test]
fn who_was_asked_after_a_masked_loss_is_explained_by_that_answer() {
    let later = |rank| {
        let mut report = masks(idle(rank), 1);
        (report.unix_ms, report.reason.kind) = (report.unix_ms + 500, "asked".into());
        report
    };
    let reports = vec![masks(waiting(0, 2, 9000), 1), later(0), masks(idle(2), 1), later(2)];
    let explanation = explain(reports).expect("reports");
    assert!(explanation.reports.iter().all(|report| report.reason.kind == "asked"));
    assert_eq!(explanation.verdict.kind, Kind::Dead);
}

/// Found on GPUs: a thread that was stopped in a barrier which the other rank had left.
#[test]
fn a_rank_that_stays_in_a_collective_that_has_ended_on_others_waits_for_no_rank() {
    let mut stays = idle(1);
    let name = "barrier".into();
    stays.activity.collective = Some(Collective { name, topic: "x".into(), since_ms: 9000 });
    (stays.activity.since_ms, stays.activity.collectives) = (9000, 7);
    let mut goes_on = waiting(0, 1, 9000);
    goes_on.activity.collectives = 8;
    let found = explain(vec![goes_on.clone(), stays.clone()]).expect("reports").verdict;
    assert_eq!((found.kind, &found.ranks[..]), (Kind::Late, &[1][..]), "{}", found.sentence);
    assert!(found.evidence.iter().any(|line| line.contains("has ended on others")), "{found:?}");
    // The other rank has not been in the barrier, or no report shows it.
    for (mine, other) in [(7, 7), (0, 0), (0, 8)] {
        (stays.activity.collectives, goes_on.activity.collectives) = (mine, other);
        assert_eq!(verdict(vec![goes_on.clone(), stays.clone()]).0, Kind::Cycle);
    }
    // The other rank entered it after the first one had reported.
    (stays.activity.collectives, goes_on.activity.collectives) = (7, 8);
    goes_on.unix_ms += 2 * LATER;
    assert_eq!(verdict(vec![goes_on, stays]).0, Kind::Cycle);
}

const LATER: u64 = 1000;

/// As `waiting`, with a transport that does not answer.
fn mute(mut report: Report) -> Report {
    let unanswered_ms = Some(1000);
    report.transports = vec![tokenyard_core::report::ReportedHealth {
        unanswered_ms,
        ..tokenyard_core::report::ReportedHealth::default()
    }];
    report
}

#[test]
fn a_transport_that_does_not_answer_is_named_where_its_rank_is_stuck_in_a_call() {
    let (kind, ranks, sentence) = verdict(vec![waiting(0, 1, 9000), mute(waiting(1, 0, 9000))]);
    assert_eq!((kind, ranks), (Kind::TransportError, vec![1]), "{sentence}");
    assert!(sentence.contains("hangs"), "{sentence}");
    // Without a wait there is no harm; in the caller's code the cause is another.
    let explanation = explain(vec![idle(0), mute(waiting(1, 0, 30))]).expect("reports");
    assert_eq!(explanation.verdict.kind, Kind::Healthy);
    assert!(explanation.notes[0].contains("a transport of rank 1"), "{:?}", explanation.notes);
    assert_eq!(verdict(vec![waiting(0, 1, 9000), mute(idle(1))]).0, Kind::Late);
}

/// A rank that was stopped, and runs again just before it answers.
#[test]
fn a_rank_without_heartbeats_before_its_report_is_late_and_the_evidence_says_so() {
    let mut again = idle(1);
    again.unix_ms += 1500;
    let name = "barrier".into();
    again.activity.collective = Some(Collective { name, topic: "x".into(), since_ms: 4000 });
    again.activity.collectives = 7;
    let mut waits = waiting(0, 1, 3000);
    waits.activity.collectives = 8;
    waits.peers.iter_mut().filter(|p| p.rank == 1).for_each(|p| p.heard_ms = 2600);
    let found = explain(vec![waits, again]).expect("reports").verdict;
    assert_eq!((found.kind, &found.ranks[..]), (Kind::Late, &[1][..]), "{}", found.sentence);
    assert!(found.evidence.iter().any(|line| line.contains("no heartbeat for 2.6 s")), "{found:?}");
}

#[test]
fn ranks_that_wait_for_the_same_are_one_line() {
    let found = explain(vec![idle(0), waiting(1, 0, 9000), waiting(2, 0, 8000)]);
    let found = found.expect("reports").verdict;
    let line = "ranks 1-2 wait for rank 0: entry of operation 7, for up to 9.0 s";
    assert!(found.evidence.iter().any(|evidence| evidence == line), "{found:?}");
}

#[test]
fn a_report_of_before_the_others_were_asked_again_is_left_out() {
    let asked = |report: Report, ms| Report { unix_ms: report.unix_ms + ms, ..report };
    let again = [asked(waiting(0, 1, 9000), 60_000), asked(waiting(2, 1, 9000), 60_000)];
    let first = vec![idle(0), idle(1), idle(2)];
    let explanation = explain(first.iter().cloned().chain(again.clone()).collect());
    let explanation = explanation.expect("reports");
    assert_eq!(explanation.verdict.kind, Kind::NoReport, "{:?}", explanation.verdict);
    assert_eq!(explanation.missing, [1]);
    assert!(explanation.notes[0].contains("rank 1 did not answer"), "{:?}", explanation.notes);
    // Its clock is behind those of the others: it answered both times.
    let behind = asked(idle(1), 3000);
    let all = first.into_iter().chain(again).chain([behind]).collect();
    assert_eq!(explain(all).expect("reports").missing, [0_u32; 0]);
}

#[test]
fn who_missed_the_last_of_many_rounds_is_left_out_where_its_clock_is_known_to_be_that_of_the_others()
 {
    // The last eight answers of each rank are stored.
    let answers = |host: &dyn Fn(u32) -> String| {
        let round = |rank: u32, round: u64| Report {
            unix_ms: 100_000 + 60_000 * round,
            host: host(rank),
            ..idle(rank)
        };
        let of = |rank: u32| (0..8).map(move |of| (rank, if rank == 1 { of } else { of + 1 }));
        (0..3).flat_map(of).map(|(rank, of)| round(rank, of)).collect::<Vec<_>>()
    };
    let one_host = explain(answers(&|_| "host0".to_owned())).expect("reports");
    assert_eq!(one_host.missing, [1]);
    assert!(one_host.notes[0].contains("rank 1 did not answer"), "{:?}", one_host.notes);
    let three = explain(answers(&|rank| format!("host{rank}"))).expect("reports");
    assert_eq!(three.missing, [0_u32; 0]);
}
