//! The results of a run of the suite, for readers, for programs and for CI.

mod environment;
mod junit;
mod table;

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use crate::claims::{self, ClaimResult};
use crate::expected::{Entry, Expected};
use crate::runner::{Finished, Verdict};
use crate::suite::{self, Level};

pub use environment::Environment;

/// Version of the JSON form. It changes when a field changes its meaning or is removed.
pub const SCHEMA: u32 = 1;

/// How a test ended, as compared with what was expected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub enum Status {
    /// Everything held.
    Pass,
    /// It does not apply.
    NotSupported {
        /// The missing capability.
        why: String,
    },
    /// Something did not hold.
    Fail {
        /// The failure, per rank.
        message: String,
    },
    /// It failed, as expected.
    ExpectedFail {
        /// The failure.
        message: String,
        /// The reason why it was expected.
        reason: String,
        /// A link to the follow-up.
        link: String,
    },
    /// It passed, or failed as it may: it fails by chance, so a pass proves nothing.
    MayFail {
        /// The failure, if it failed.
        #[serde(skip_serializing_if = "Option::is_none")]
        message: Option<String>,
        /// The reason why it may fail.
        reason: String,
        /// A link to the follow-up.
        link: String,
    },
    /// It passed although a failure was expected: the expectation must go.
    UnexpectedPass {
        /// Why a failure was expected.
        reason: String,
    },
}

impl Status {
    /// Whether this fails the run.
    pub fn is_bad(&self) -> bool {
        matches!(self, Self::Fail { .. } | Self::UnexpectedPass { .. })
    }

    /// The word in the text report.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Pass => "pass",
            Self::NotSupported { .. } => "not supported",
            Self::Fail { .. } => "FAIL",
            Self::ExpectedFail { .. } => "expected fail",
            Self::MayFail { .. } => "may fail",
            Self::UnexpectedPass { .. } => "UNEXPECTED PASS",
        }
    }
}

/// One test of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// Its name.
    pub name: String,
    /// Its level.
    pub level: Level,
    /// The number of ranks that it ran on.
    pub ranks: u32,
    /// The rule that must hold.
    pub about: String,
    /// The invariants that a failure breaks: numbers of `docs/invariants.md`.
    pub invariants: &'static str,
    /// How it ended.
    #[serde(flatten)]
    pub status: Status,
    /// The time that it took.
    pub seconds: f64,
}

/// A whole run.
#[derive(Clone, Debug, Serialize)]
pub struct SuiteReport {
    schema_version: u32,
    /// The place of the run, and the component under test.
    pub environment: Environment,
    /// Whether every result is as expected.
    pub ok: bool,
    /// Tests per word of [`Status`], for each level.
    pub levels: BTreeMap<String, BTreeMap<&'static str, usize>>,
    /// Levels of which tests were chosen and none ran: the run proves nothing about them.
    pub nothing_ran: Vec<String>,
    /// For each claim of the transport, the cases that tested it.
    pub claims: Vec<ClaimResult>,
    /// The wall time of the run.
    pub seconds: f64,
    /// Sizes of the worlds that tests ran on.
    pub world_sizes: Vec<u32>,
    /// Every test that was chosen.
    pub tests: Vec<Line>,
}

/// A test before it ran.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// Its name.
    pub name: String,
    /// Its level.
    pub level: Level,
    /// The number of ranks that it needs.
    pub ranks: u32,
    /// The rule that must hold.
    pub about: String,
}

impl SuiteReport {
    /// Joins the chosen tests with their results. A chosen test without a result has failed: a missing
    /// result is not a pass.
    pub fn new(
        environment: Environment,
        chosen: Vec<Chosen>,
        finished: &[Finished],
        expected: &Expected,
        took: Duration,
    ) -> Self {
        let by_name: BTreeMap<&str, &Finished> =
            finished.iter().map(|finished| (finished.name.as_str(), finished)).collect();
        let tests: Vec<Line> = chosen
            .into_iter()
            .map(|test| {
                let finished = by_name.get(test.name.as_str());
                let status = status(&test.name, finished.map(|f| &f.verdict), expected);
                let seconds = finished.map_or(0.0, |f| f.took.as_secs_f64());
                let Chosen { name, level, ranks, about } = test;
                let invariants = suite::invariants(&name, level);
                Line { name, level, ranks, about, invariants, status, seconds }
            })
            .collect();
        let mut levels: BTreeMap<String, BTreeMap<&'static str, usize>> = BTreeMap::new();
        for line in &tests {
            let counts = levels.entry(format!("{:?}", line.level)).or_default();
            *counts.entry(line.status.word()).or_default() += 1;
        }
        let ran = |line: &&Line| !matches!(line.status, Status::NotSupported { .. });
        let mut world_sizes: Vec<u32> = tests.iter().filter(ran).map(|line| line.ranks).collect();
        world_sizes.sort_unstable();
        world_sizes.dedup();
        let ok = !tests.iter().any(|line| line.status.is_bad());
        let not_run = Status::NotSupported { why: String::new() }.word();
        let nothing_ran = levels
            .iter()
            .filter(|(_, counts)| counts.keys().all(|word| *word == not_run))
            .map(|(level, _)| level.clone())
            .collect();
        let claims = claims::results(environment.capabilities(), &tests);
        let (schema_version, seconds) = (SCHEMA, took.as_secs_f64());
        Self {
            schema_version,
            environment,
            ok,
            levels,
            nothing_ran,
            claims,
            seconds,
            world_sizes,
            tests,
        }
    }

    /// The number of chosen tests that did not run.
    pub fn not_run(&self) -> usize {
        let not_run = |line: &&Line| matches!(line.status, Status::NotSupported { .. });
        self.tests.iter().filter(not_run).count()
    }

    /// JUnit's XML, one test suite per level.
    pub fn junit(&self) -> String {
        junit::write(self)
    }

    /// The text table: every test that is not a plain pass, then counts per level.
    pub fn table(&self) -> String {
        table::write(self)
    }
}

fn status(name: &str, verdict: Option<&Verdict>, expected: &Expected) -> Status {
    let Some(verdict) = verdict else {
        return Status::Fail { message: "found no result; expected one".to_owned() };
    };
    let message = match verdict {
        Verdict::NotSupported(why) => return Status::NotSupported { why: why.clone() },
        Verdict::Fail(message) => Some(message.clone()),
        Verdict::Pass => None,
    };
    let fits =
        |entry: &&Entry| message.as_ref().is_none_or(|message| message.contains(&entry.found));
    let Some(entry) = expected.entry(name).filter(fits) else {
        return message.map_or(Status::Pass, |message| Status::Fail { message });
    };
    let (reason, link) = (entry.reason.clone(), entry.link.clone());
    match message {
        message if entry.sometimes => Status::MayFail { message, reason, link },
        Some(message) => Status::ExpectedFail { message, reason, link },
        None => Status::UnexpectedPass { reason },
    }
}

#[cfg(test)]
mod tests {
    use tokenyard_core::config::Config;

    use tokenyard_core::transport::NO_CAPABILITIES;

    use super::*;
    use crate::pace::Pace;

    fn config() -> Config {
        let text = "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n";
        Config::parse(text, "a \"config\" <1>").expect("a valid config")
    }

    fn chosen(name: &str) -> Chosen {
        Chosen { name: name.into(), level: Level::L1, ranks: 2, about: "about".into() }
    }

    fn finished(name: &str, verdict: Verdict) -> Finished {
        Finished { name: name.into(), verdict, took: Duration::from_millis(1500) }
    }

    fn report(names: &[&str], ended: &[Finished]) -> SuiteReport {
        let entry = |name: &str, more: &str| {
            format!(
                "[[expected]]\ncomponent = \"shm\"\ntest = \"{name}\"\nreason = \"r\"\nlink = \"l\"\n{more}"
            )
        };
        let chance = entry("l1/chance", "found = \"hangs\"\nsometimes = true\n");
        let expected = entry("l1/known*", "") + &chance;
        let expected = Expected::parse(&expected, &config()).expect("valid");
        let environment = Environment::new(&config(), &[], &NO_CAPABILITIES, Pace::new(3).unwrap());
        let chosen = names.iter().map(|n| chosen(n)).collect();
        SuiteReport::new(environment, chosen, ended, &expected, Duration::from_millis(700))
    }

    #[test]
    fn every_chosen_test_appears_and_silence_is_a_failure() {
        let report = report(&["l1/a", "l1/b"], &[finished("l1/a", Verdict::Pass)]);
        assert_eq!(report.tests.len(), 2);
        assert_eq!(report.tests[0].status, Status::Pass);
        assert!(report.tests[1].status.is_bad());
        assert!(!report.ok);
        assert!(report.table().contains("l1/b"), "{}", report.table());
        assert!(
            report.table().contains("    breaks: a rule of the operation; INV-1"),
            "{}",
            report.table()
        );
        assert!(report.table().contains("2 tests in 0.7 s, 0 not run"), "{}", report.table());
    }

    #[test]
    fn an_expected_failure_is_fine_and_an_unexpected_pass_is_not() {
        let fails = finished("l1/known_1", Verdict::Fail("x".into()));
        assert!(report(&["l1/known_1"], &[fails]).ok);
        let passes = finished("l1/known_1", Verdict::Pass);
        let report = report(&["l1/known_1"], &[passes]);
        assert!(!report.ok);
        assert_eq!(report.tests[0].status, Status::UnexpectedPass { reason: "r".into() });
    }

    #[test]
    fn a_failure_by_chance_is_fine_as_a_pass_is_and_another_failure_is_not() {
        for (verdict, word, ok) in [
            (Verdict::Pass, "may fail", true),
            (Verdict::Fail("rank 1: it hangs".into()), "may fail", true),
            (Verdict::Fail("rank 1: wrong bytes".into()), "FAIL", false),
        ] {
            let report = report(&["l1/chance"], &[finished("l1/chance", verdict)]);
            assert_eq!((report.tests[0].status.word(), report.ok), (word, ok));
            assert!(report.table().contains(&format!("{word}: l1/chance")), "{}", report.table());
        }
    }

    #[test]
    fn not_supported_is_a_result_with_its_reason() {
        let ended = finished("l1/a", Verdict::NotSupported("no get".into()));
        let report = report(&["l1/a"], &[ended]);
        assert!(report.ok);
        assert_eq!(report.nothing_ran, ["L1"]);
        let table = report.table();
        assert!(table.contains("1 tests in 0.7 s, 1 not run"), "by the clock: {table}");
        assert!(
            table.trim_end().ends_with("nothing ran of L1, so nothing is known of it"),
            "{table}"
        );
        assert_eq!(report.world_sizes, [0u32; 0]);
        assert!(report.table().contains("no get"), "{}", report.table());
        let json = serde_json::to_value(&report).expect("plain data");
        assert_eq!(json["tests"][0]["outcome"], "not_supported");
        assert_eq!(json["tests"][0]["why"], "no get");
        assert_eq!(json["schema_version"], SCHEMA);
    }

    #[test]
    fn a_run_that_was_given_more_time_says_so() {
        let report = report(&["l1/a"], &[finished("l1/a", Verdict::Pass)]);
        assert!(report.table().contains("3 times the usual deadlines"), "{}", report.table());
        let json = serde_json::to_value(&report).expect("plain data");
        assert_eq!(json["environment"]["slow"], 3);
    }

    #[test]
    fn junit_escapes_what_tests_say() {
        let ended = finished("l1/a", Verdict::Fail("<&\"'>\u{1}]]>".into()));
        let xml = report(&["l1/a"], &[ended]).junit();
        assert!(xml.contains("&lt;&amp;&quot;&apos;&gt;\u{fffd}]]&gt;"), "{xml}");
        assert!(xml.contains("tests=\"1\" failures=\"1\""), "{xml}");
        assert!(xml.contains("time=\"1.500\""), "{xml}");
    }

    #[test]
    fn junit_names_the_invariants_of_failures_only() {
        let failed = report(&["l1/a"], &[finished("l1/a", Verdict::Fail("late".into()))]).junit();
        let breaks = "late\nbreaks: a rule of the operation; INV-1, INV-2 or INV-3 if only";
        assert!(failed.contains(breaks), "{failed}");
        let passed = finished("l1/known_1", Verdict::Pass);
        let passed = report(&["l1/known_1"], &[passed]).junit();
        assert!(passed.contains("expected: r\nbreaks: a rule"), "{passed}");
        let fine =
            [finished("l1/a", Verdict::Pass), finished("l1/known_1", Verdict::Fail("x".into()))];
        let fine = report(&["l1/a", "l1/known_1"], &fine).junit();
        assert!(!fine.contains("breaks"), "{fine}");
    }
}
