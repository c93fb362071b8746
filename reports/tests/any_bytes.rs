//! Reports come from other machines, and may be cut short, of another version, or malicious. For
//! all bytes, nothing panics and nothing hangs.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests fail by panic")]

use proptest::prelude::*;
use serde_json::{Value, json};
use tokenyard_core::report::{Report, read, text};
use tokenyard_reports::{Kind, explain};

fn check(reports: Vec<Report>) {
    for report in &reports {
        let text = text(report);
        assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    }
    if let Some(explanation) = explain(reports) {
        let verdict = explanation.verdict;
        assert!(!verdict.sentence.is_empty());
        assert_eq!(verdict.fix.is_empty(), verdict.kind == Kind::Healthy, "{verdict:?}");
    }
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0_u64..6, Just(u64::MAX), Just(u64::MAX - 1), any::<u64>()]
}

fn word(words: &'static [&'static str]) -> impl Strategy<Value = String> {
    prop_oneof![4 => proptest::sample::select(words).prop_map(str::to_owned), 1 => any::<String>()]
}

fn peer() -> impl Strategy<Value = Value> {
    let link = (0_u32..6, number(), number(), number()).prop_map(|(signal, a, b, c)| {
        json!({ "level": "scale-up", "raised": [[signal, a]],
                "counts": { "sent": b, "posted": c, "done": a, "expected": b } })
    });
    let state = word(&["alive", "lost", "left"]);
    let why = word(&["", "was silent for 3 s", "failed: out of memory", "closed its connection"]);
    (0_u32..5, state, why, number(), number(), proptest::option::of(link)).prop_map(
        |(rank, state, why, heard, ended, link)| {
            let links: Vec<Value> = link.into_iter().collect();
            json!({ "rank": rank, "state": state, "why": why, "heard_ms": heard, "ended_ms": ended,
                    "pid": 7, "links": links, "masked": heard % 2 == 0 })
        },
    )
}

/// Reports whose fields are each possible, and which fit together only by chance.
fn report() -> impl Strategy<Value = Value> {
    let kinds = &["asked", "masked", "deadline", "peer_lost", "transport", "mismatch", "internal"];
    let phase = word(&["entry", "dispatch rows", "queue room"]);
    let wait = (phase, 0_u32..6, 0_u32..4, number(), number()).prop_map(
        |(phase, peer, signal, expected, age)| {
            json!({ "phase": phase, "level": "scale-up", "peer": peer, "signal": signal,
                    "expected": expected, "age_ms": age })
        },
    );
    let states = word(&["opening", "caller", "send", "receive", "closed"]);
    let activity = (states, number(), number(), word(&["dispatch", "combine"]), any::<bool>())
        .prop_map(|(state, since, operation, kind, meets)| {
            let call = json!({ "operation": operation, "kind": kind });
            let collective =
                meets.then(|| json!({ "name": "barrier", "topic": "x", "since_ms": since }));
            json!({ "state": state, "since_ms": since, "begun": operation, "call": call,
                    "recent": [call], "collective": collective })
        });
    let head = (0_u32..5, number(), word(kinds), proptest::option::of(0_u32..6));
    (head, activity, proptest::option::of(wait), proptest::collection::vec(peer(), 0..5)).prop_map(
        |((rank, unix_ms, kind, about), activity, wait, peers)| {
            json!({ "tokenyard_report": 1, "rank": rank, "ranks": 5, "unix_ms": unix_ms, "job": "a",
                    "reason": { "kind": kind, "text": "why", "rank": about },
                    "activity": activity, "wait": wait, "peers": peers })
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_refused_or_explained(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        check(read(&bytes).into_iter().collect());
    }

    #[test]
    fn any_reports_are_explained(values in proptest::collection::vec(report(), 1..8)) {
        let read = |value: &Value| read(value.to_string().as_bytes()).expect("it has the form");
        check(values.iter().map(read).collect());
    }

    #[test]
    fn a_report_that_was_cut_or_changed_is_refused_or_explained(
        value in report(),
        cut in any::<prop::sample::Index>(),
        other in any::<u8>(),
    ) {
        let mut bytes = value.to_string().into_bytes();
        let at = cut.index(bytes.len());
        prop_assert!(read(&bytes[..at]).is_err(), "a report that was cut is no report");
        bytes[at] = other;
        check(read(&bytes).into_iter().collect());
    }
}

#[test]
fn a_world_of_many_ranks_is_explained_in_time() {
    let ranks = 1_u32 << 20;
    let one = json!({ "tokenyard_report": 1, "rank": 3, "ranks": ranks, "unix_ms": 5,
        "reason": { "kind": "deadline" },
        "activity": { "collective": { "name": "barrier", "topic": "x", "since_ms": 9000 } } });
    let explanation = explain(vec![read(one.to_string().as_bytes()).unwrap()]).unwrap();
    assert_eq!(explanation.missing.len() as u32, ranks - 1);
    assert_eq!(explanation.verdict.kind, Kind::NoReport);
}
