//! `tokenyard explain`, and SIGUSR1 to a running `tokenyard run`. The reports of jobs that go wrong
//! are tested in `reports/`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

mod common;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use common::{Config, expect_code, json, repository, stderr, stdout, tokenyard};
use rustix::process::{Pid, Signal, kill_process};

fn explain(files: &[&Path]) -> Output {
    tokenyard().arg("explain").args(files).output().unwrap()
}

fn recorded(set: &str) -> PathBuf {
    repository("reports/tests/recorded").join(set)
}

#[test]
fn a_job_that_is_asked_in_the_middle_of_its_steps_goes_on_and_is_healthy() {
    let config = Config::new();
    let reports = config.file("reports");
    let mut command = tokenyard();
    command.arg("run").arg(config.path()).env("TOKENYARD_REPORTS", &reports);
    command.args("--ranks 2 --tokens 12 --hidden 128 --experts 8 --topk 3 --steps 1500".split(' '));
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    // The first answers may come while the communicator is still being opened.
    while !has_reports_of_steps(&reports) {
        assert!(start.elapsed() < Duration::from_secs(120), "no reports");
        std::thread::sleep(Duration::from_millis(300));
        kill_process(Pid::from_child(&child), Signal::USR1).unwrap();
    }
    let output = child.wait_with_output().unwrap();
    expect_code(&output, 0);
    assert!(stdout(&output).contains("check: passed"), "{}", stdout(&output));
    assert!(stderr(&output).contains("[rank 1] report: "), "{}", stderr(&output));
    // The launcher itself has no communicator.
    assert!(stderr(&output).contains("SIGUSR1 is handed on to ranks 0-1"), "{}", stderr(&output));
    let output = explain(&[&reports]);
    expect_code(&output, 0);
    assert!(stdout(&output).starts_with("healthy: The job goes on"), "{}", stdout(&output));
}

fn has_reports_of_steps(folder: &Path) -> bool {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let texts = entries.filter_map(|entry| std::fs::read_to_string(entry.path()).ok());
    let texts: Vec<String> = texts.filter(|text| text.contains("\"tokenyard_report\"")).collect();
    let is_there = |rank: u32| {
        let words = [format!("\"rank\":{rank},\"ranks\":2"), "\"operation\":".to_owned()];
        texts.iter().any(|text| words.iter().all(|word| text.contains(word)))
    };
    is_there(0) && is_there(1)
}

#[test]
fn the_sentence_comes_first_then_evidence_fix_and_a_table_of_ranks() {
    let set = recorded("a_link_that_carries_nothing_is_named_with_both_ends");
    let output = explain(&[&set]);
    expect_code(&output, 1);
    let text = stdout(&output);
    assert!(text.starts_with("broken_link: The link from rank 1 to rank 0"), "{text}");
    let place = |words: &str| text.find(words).unwrap_or_else(|| panic!("no {words} in {text}"));
    assert!(place("rank 1 says that it raised") < place("Fix: look at the NIC"), "{text}");
    assert!(place("Fix:") < place("rank  host"), "{text}");
    let document = json(&tokenyard().args(["explain", "--json"]).arg(&set).output().unwrap());
    assert_eq!(document["schema_version"], 5);
    assert_eq!(document["command"], "explain");
    assert_eq!(document["verdict"]["ranks"], serde_json::json!([1, 0]));
    assert_eq!(document["missing"], serde_json::json!([]));
    assert_eq!(document["graph"].as_array().unwrap().len(), 3);
}

#[test]
fn a_file_that_is_no_report_is_refused_by_name_and_the_others_are_explained() {
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("other.json");
    std::fs::write(&other, "{\"weather\": 1}").unwrap();
    let missing = folder.path().join("missing.json");
    let output = explain(&[&other, &missing]);
    expect_code(&output, 2);
    let text = stderr(&output);
    assert!(text.contains("other.json: found no `tokenyard_report`"), "{text}");
    assert!(text.contains("missing.json: "), "{text}");
    let set = recorded("a_rank_that_was_killed_is_named");
    let output = explain(&[&other, &set]);
    expect_code(&output, 1);
    let text = stdout(&output);
    assert!(text.contains("no report of: 1"), "{text}");
    assert!(text.contains("note: ") && text.contains("other.json"), "{text}");
    expect_code(&explain(&[folder.path()]), 2);
}

#[test]
fn a_rank_without_a_report_leaves_it_open() {
    let set = recorded("a_rank_that_sleeps_in_its_own_code_is_named_before_the_deadline");
    let entries = std::fs::read_dir(&set).unwrap().flatten().map(|entry| entry.path());
    let others: Vec<PathBuf> =
        entries.filter(|path| !path.to_string_lossy().contains("-rank00001-")).collect();
    let output = explain(&others.iter().map(PathBuf::as_path).collect::<Vec<_>>());
    expect_code(&output, 3);
    let text = stdout(&output);
    assert!(text.contains("whose report is not among these"), "{text}");
    assert!(text.contains("kill -USR1"), "{text}");
}

/// A recorded set of three ranks, multiplied to many: rank 1 is late, the others wait for it.
fn many(ranks: u64, folder: &Path) {
    let set = recorded("a_rank_that_sleeps_in_its_own_code_is_named_before_the_deadline");
    let mut files: Vec<_> = std::fs::read_dir(set).unwrap().map(|f| f.unwrap().path()).collect();
    files.sort();
    let read = |at: usize| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(&files[at]).unwrap()).unwrap()
    };
    for rank in 0..ranks {
        let mut report = read(usize::from(rank == 1));
        (report["rank"], report["ranks"]) = (rank.into(), ranks.into());
        report["host"] = format!("node{}", rank / 8).into();
        let path = folder.join(format!("tokenyard-x-rank{rank:05}-asked.json"));
        std::fs::write(path, report.to_string()).unwrap();
    }
}

#[test]
fn ranks_of_a_large_world_that_say_the_same_are_one_line_and_the_culprit_is_the_first() {
    let folder = tempfile::tempdir().unwrap();
    many(64, folder.path());
    let output = explain(&[folder.path()]);
    expect_code(&output, 1);
    let text = stdout(&output);
    assert!(text.starts_with("late: Rank 1 on node0 (process "), "{text}");
    assert!(text.contains("ranks 0, 2-63 wait for rank 1: entry of"), "{text}");
    assert!(text.contains(": reports of 64 of 64 ranks, the last of "), "{text}");
    let table = text.lines().skip_while(|line| !line.contains("at (UTC)"));
    let table: Vec<&str> = table.take_while(|line| !line.is_empty()).collect();
    assert!(table.iter().all(|line| line.chars().count() <= 80), "{text}");
    // Words that do not fit continue on the next line, after blanks.
    let rows: Vec<&&str> = table.iter().filter(|line| line.contains("Z  ")).collect();
    assert!(rows[0].contains(" node0 ") && rows[0].contains("in the caller's"), "{text}");
    assert!(rows[1].starts_with("0, 2-63  8 hosts"), "{text}");
    assert_eq!(rows.len(), 2, "{text}");
}

#[test]
fn the_texts_beside_reports_may_be_named_too() {
    let folder = tempfile::tempdir().unwrap();
    many(3, folder.path());
    let files = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path());
    let files: Vec<PathBuf> = files.flat_map(|file| [file.with_extension("txt"), file]).collect();
    files.iter().step_by(2).for_each(|text| std::fs::write(text, "for people").unwrap());
    let output = explain(&files.iter().map(PathBuf::as_path).collect::<Vec<_>>());
    expect_code(&output, 1);
    assert!(!stdout(&output).contains("note: "), "{}", stdout(&output));
    // Alone it is no report.
    let alone = folder.path().join("alone.txt");
    std::fs::write(&alone, "for people").unwrap();
    expect_code(&explain(&[&alone]), 2);
}

#[test]
fn help_has_an_example_and_the_exit_codes() {
    let output = tokenyard().args(["explain", "--help"]).output().unwrap();
    expect_code(&output, 0);
    let text = stdout(&output);
    for part in ["\n  tokenyard explain ", "SIGUSR1", "Exit codes: 0", "docs/reports.md"] {
        assert!(text.contains(part), "{part} is missing in {text}");
    }
}

#[test]
fn a_process_that_is_asked_before_it_opens_a_communicator_says_so() {
    let config = Config::new();
    let bootstrap = format!("file://{}", config.file("rendezvous").display());
    let mut command = tokenyard();
    command.arg("run").arg(config.path()).arg("--as-rank");
    // The other rank never comes.
    command.envs([("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")]);
    command.env("TOKENYARD_BOOTSTRAP", &bootstrap);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    // The message shows that it waits; it answers signals from earlier on.
    let mut text: Vec<String> = Vec::new();
    while !text.last().is_some_and(|line| line.contains("has waited 2 s to join")) {
        text.push(lines.next().unwrap_or_else(|| panic!("it never waited: {text:?}")));
    }
    kill_process(Pid::from_child(&child), Signal::USR1).unwrap();
    text.extend(lines);
    child.wait().unwrap();
    let text = text.join("\n");
    assert!(text.contains("no communicator yet: rank 0 of 2 has waited"), "{text}");
    assert!(text.contains("to join: rank 1 did not join yet"), "{text}");
    // It also reports by itself, after 2 s and then at growing intervals; a busy machine delays them.
    let warns = |line: &&str| line.contains("WARN") && line.contains("s to join: rank 1 did not");
    assert!(text.lines().filter(warns).count() >= 2, "{text}");
}
