//! The runner with tests that fail, end, hang and print other lines: a shell script stands in for the ranks
//! here.

#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests may end them")]

use std::path::Path;
use std::time::{Duration, Instant};

use tokenyard_conformance::faults::Fault;
use tokenyard_conformance::runner::{
    Finished, Program, RunEvent, Verdict, run_fault, run_in_processes,
};
use tokenyard_conformance::suite::{Level, Outcome, Test};

/// A rank: it acts as the name of each test says. `$0` is the order.
const RANK: &str = r#"
for name in $(sed 's/.*"tests":\[//; s/\].*//; s/[",]/ /g' "$0"); do
    outcome='"pass"'
    case $name in
        babbles) echo "hello"; echo '{"half": ' ;;
        ends) [ "$TOKENYARD_RANK" = 1 ] && { echo "no memory" >&2; exit 7; } ;;
        hangs) [ "$TOKENYARD_RANK" = 0 ] && sleep 60 ;;
        sticks) [ "$TOKENYARD_RANK" = 0 ] && { echo '{"tokenyard":"stuck","slot":"connect"}'; sleep 60; } ;;
        fails) [ "$TOKENYARD_RANK" = 1 ] && outcome='{"fail":"3 is not 4"}' ;;
        misses) outcome='{"not_supported":"no get"}' ;;
    esac
    printf '{"tokenyard":"test","name":"%s","outcome":%s}\n' "$name" "$outcome"
    case $outcome in *fail*) exit 0 ;; esac
done
"#;

fn run(names: &[&str]) -> Vec<Finished> {
    let mut program = Program::new("/bin/sh".into(), vec!["-c".into(), RANK.into()]);
    program.limit = Duration::from_secs(2);
    let tests: Vec<Test> = names
        .iter()
        .map(|name| Test {
            name: (*name).to_owned(),
            level: Level::L1,
            ranks: 2,
            about: String::new(),
            in_processes: false,
            lacks: None,
            body: Box::new(|_| Ok(Outcome::Pass)),
        })
        .collect();
    let mut finished = Vec::new();
    let mut started = Vec::new();
    let mut each = |event: RunEvent<'_>| match event {
        RunEvent::Starts(name) => started.push(name.to_owned()),
        RunEvent::Ended(one) => {
            assert_eq!(started.last(), Some(&one.name), "it is named before it runs");
            finished.push(one);
        }
        RunEvent::Warned { rank, text } => panic!("rank {rank} warns: {text}"),
    };
    run_in_processes(&program, Path::new("none.toml"), &tests, &mut each).expect("the ranks start");
    finished
}

fn failure(finished: &Finished) -> &str {
    match &finished.verdict {
        Verdict::Fail(message) => message,
        other => panic!("{}: found {other:?}, expected a failure", finished.name),
    }
}

#[test]
fn a_failure_of_any_kind_takes_no_other_test_down() {
    let names = ["babbles", "ends", "good", "fails", "misses", "last"];
    let finished = run(&names);
    assert_eq!(finished.iter().map(|f| f.name.as_str()).collect::<Vec<_>>(), names);
    for good in [0, 2, 5] {
        assert_eq!(finished[good].verdict, Verdict::Pass, "{}", finished[good].name);
    }
    let ended = failure(&finished[1]);
    assert!(ended.contains("rank 1: ended (exit code 7) without a result"), "{ended}");
    assert!(ended.contains("no memory") && !ended.contains("rank 0"), "{ended}");
    assert_eq!(failure(&finished[3]), "rank 1: 3 is not 4");
    assert_eq!(finished[4].verdict, Verdict::NotSupported("no get".into()));
}

#[test]
fn a_test_that_hangs_is_ended_and_named() {
    let start = Instant::now();
    let finished = run(&["good", "hangs", "sticks", "last"]);
    assert_eq!(finished[0].verdict, Verdict::Pass);
    assert_eq!(failure(&finished[1]), "rank 0: hangs: no result in time");
    let sticks = "rank 0: hangs in slot `connect` of the transport (INV-6): no result in time";
    assert_eq!(failure(&finished[2]), sticks);
    assert_eq!(finished[3].verdict, Verdict::Pass);
    assert!(start.elapsed() < Duration::from_secs(60), "no test waits for the sleepers");
}

#[test]
fn a_fault_whose_operation_no_rank_has_is_not_supported() {
    let fault = Fault::find("l3/pipe/killed/message").expect("it is listed").within(2);
    let verdict = |lacking: u32| {
        // One rank that says it twice is not two ranks.
        let says = "echo '{\"tokenyard\":\"lacks\",\"why\":\"no pipe\"}'";
        let script = format!("[ $TOKENYARD_RANK -ge {lacking} ] || {{ {says}; {says}; }}");
        let program = Program::new("/bin/sh".into(), vec!["-c".into(), script.into()]);
        run_fault(&program, Path::new("none.toml"), &fault).expect("the ranks start").verdict
    };
    assert_eq!(verdict(2), Verdict::NotSupported("no pipe".into()));
    let Verdict::Fail(why) = verdict(1) else { panic!("one rank alone lacks it") };
    assert!(why.contains("rank 0: no error; expected one"), "{why}");
}
