//! The transport in C in the guide for plugin authors passes the suite, exactly as printed there.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tokenyard_core::abi::TY_TRANSPORT_MINOR;

use common::{expect_code, stderr, stdout, tokenyard};

const GUIDE: &str = include_str!("../../docs/plugin-c.md");
/// The line of its first listing that limits the ranks.
const PEERS: &str = "#define PEERS 64\n";

/// The guide's first listing in C.
fn listing() -> &'static str {
    GUIDE.split("```c\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap()
}

fn build(folder: &Path, code: &str, compiler: &str, options: &[&str]) -> PathBuf {
    let (source, library) = (folder.join("my.c"), folder.join(format!("libmy_{compiler}.so")));
    fs::write(&source, code).unwrap();
    let include = concat!(env!("CARGO_MANIFEST_DIR"), "/../abi/include");
    let made = Command::new(compiler)
        .args(options)
        .args(["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-I", include])
        .args([&source, Path::new("-o"), &library])
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", stderr(&made));
    library
}

fn config(library: &Path, keys: &str) -> PathBuf {
    let file = library.with_extension("toml");
    let text = format!(
        "[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"neighbours\"\n{keys}\
         [plugins]\npaths = [\"{}\"]\n",
        library.display()
    );
    fs::write(&file, text).unwrap();
    file
}

#[test]
fn the_guides_transport_in_c_passes_the_suite_as_c_and_as_cpp() {
    let folder = tempfile::tempdir().unwrap();
    for (compiler, options, levels) in [
        ("cc", &["-std=c11"][..], "--level L0 --level L1"),
        ("g++", &["-std=c++17", "-x", "c++"], "--level L0"),
    ] {
        let config = config(&build(folder.path(), listing(), compiler, options), "");
        let levels = levels.split_whitespace();
        let output = tokenyard().arg("conformance").arg(config).args(levels).output().unwrap();
        expect_code(&output, 0);
        let text = stdout(&output) + &stderr(&output);
        assert!(text.contains("all as expected"), "{compiler}: {text}");
    }
}

/// The header of minor version 8, as it was.
const OLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/header_1_8");
/// The guide's word for the slot that this header lacks.
const NEWER: &str = ", NULL /* serve_ring */, NULL /* device_api_of */";

#[test]
fn a_transport_that_was_built_against_an_older_header_loads_and_passes() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(listing().matches(NEWER).count(), 1, "the guide's table ends with these slots");
    // The compiler refuses a table with slots that the header lacks, and one that ends too soon.
    let options = ["-std=c11", "-I", OLDER];
    let library = build(folder.path(), &listing().replace(NEWER, ""), "cc", &options);
    let config = config(&library, "");
    let args = ["--level", "L0", "--json"];
    let output = tokenyard().arg("conformance").arg(config).args(args).output().unwrap();
    expect_code(&output, 0);
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    let tests = report["tests"].as_array().unwrap();
    let is = |test: &&Value, outcome: &str| test["outcome"] == outcome;
    let passed = tests.iter().filter(|test| is(test, "pass")).count();
    // Cases of capabilities that this transport does not declare.
    let lacks = |test: &&Value| test["why"].as_str().is_some_and(|why| why.starts_with("TY_CAP_"));
    let not_run = tests.iter().filter(|test| is(test, "not_supported") && lacks(test)).count();
    assert_eq!(passed + not_run, tests.len(), "{report}");
    assert!(passed > 30, "{passed} passed, {not_run} did not run");
}

/// An author who ports a transport goes down this table, from the version of the own header.
#[test]
fn each_minor_version_of_the_transport_abi_has_a_row_in_the_list_of_changes() {
    let page = include_str!("../../docs/plugin-abi.md");
    let changes = page.split("### Changes of the transport ABI\n").nth(1).unwrap();
    let changes = changes.split("\n## ").next().unwrap();
    let row = |line: &str| line.strip_prefix("| ")?.split(' ').next()?.parse::<u32>().ok();
    let rows: Vec<u32> = changes.lines().filter_map(row).collect();
    assert_eq!(rows, (1..=TY_TRANSPORT_MINOR).collect::<Vec<_>>(), "rows of docs/plugin-abi.md");
    // Of stricter rules it says since which version they are new.
    let since = changes.split("These rules are new since minor").nth(1).unwrap();
    let since = since.trim_start().split(|c: char| !c.is_ascii_digit()).next().unwrap();
    let since: u32 = since.parse().unwrap();
    assert!(rows.contains(&since), "found {since}; expected one of the rows {rows:?}");
}

#[test]
fn the_guides_transport_in_c_refuses_a_table() {
    let folder = tempfile::tempdir().unwrap();
    let library = build(folder.path(), listing(), "cc", &["-std=c11"]);
    let config = config(&library, "[transport.scale_up.neighbours]\na = 1\n");
    let output = tokenyard().arg("run").arg(config).args(["--ranks", "2"]).output().unwrap();
    assert!(!output.status.success());
    let text = stderr(&output) + &stdout(&output);
    assert!(text.contains("found `a = 1`, expected no table"), "{text}");
}

/// Runs the suite on the guide's transport, which takes `peers` ranks here. Returns the report, and the
/// text beside it.
fn conformance_of(peers: u32, code: i32, args: &[&str]) -> (Value, String) {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(listing().matches(PEERS).count(), 1, "the guide sets the number of its peers once");
    let source = listing().replace(PEERS, &format!("#define PEERS {peers}\n"));
    let config = config(&build(folder.path(), &source, "cc", &["-std=c11"]), "");
    let output =
        tokenyard().arg("conformance").arg(config).args(args).arg("--json").output().unwrap();
    expect_code(&output, code);
    (serde_json::from_str(&stdout(&output)).unwrap(), stderr(&output))
}

/// Checks that tests of at most `peers` ranks passed, and that the others say why they did not run. Returns
/// how many passed, and how many did not run.
fn passed_and_not_run(report: &Value, peers: u64) -> (usize, usize) {
    let (mut passed, mut not_run) = (0, 0);
    for test in report["tests"].as_array().unwrap() {
        let ranks = test["ranks"].as_u64().unwrap();
        if ranks <= peers {
            assert_eq!(test["outcome"], "pass", "{test}");
            passed += 1;
        } else {
            assert_eq!(test["outcome"], "not_supported", "{test}");
            let why = format!("it needs {ranks} ranks; max_peers of the transport allows {peers}");
            assert_eq!(test["why"], why, "{test}");
            not_run += 1;
        }
    }
    (passed, not_run)
}

#[test]
fn a_transport_for_two_ranks_runs_the_tests_of_two_ranks_and_faults_on_two() {
    let args = ["--level", "L1,L3", "--filter", "l1/*,l3/killed/combine_send"];
    let (report, text) = conformance_of(2, 0, &args);
    let (passed, not_run) = passed_and_not_run(&report, 2);
    assert!(passed > 0 && not_run > 0, "{passed} passed, {not_run} did not run");
    assert!(text.contains(&format!("{not_run} not run: all as expected")), "{text}");
    let faults = |test: &&Value| test["level"] == "L3";
    let faults: Vec<&Value> = report["tests"].as_array().unwrap().iter().filter(faults).collect();
    assert!(!faults.is_empty());
    assert!(faults.iter().all(|fault| fault["ranks"] == 2), "{faults:?}");
}

#[test]
fn a_transport_for_one_rank_runs_no_fault_and_the_run_says_so() {
    let (report, text) = conformance_of(1, 3, &["--level", "L3"]);
    let (passed, not_run) = passed_and_not_run(&report, 1);
    assert!(passed == 0 && not_run > 0, "{passed} passed, {not_run} did not run");
    assert_eq!(report["nothing_ran"], serde_json::json!(["L3"]));
    let end = "nothing failed, but nothing ran of L3, so nothing is known of it";
    assert!(text.trim_end().ends_with(end), "{text}");
}

#[test]
fn a_run_of_fewer_ranks_names_its_own_limit() {
    let args = ["--level", "L3", "--ranks", "1", "--filter", "l3/killed/combine_send"];
    let (report, _) = conformance_of(2, 3, &args);
    let why = report["tests"][0]["why"].as_str().unwrap();
    assert!(why.ends_with("; --ranks is 1"), "{why}");
}
