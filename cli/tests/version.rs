//! `tokenyard version`, `--version` and `completions`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

mod common;

use std::process::{Command, Output, Stdio};

use common::{expect_code, json, stderr, stdout, tokenyard};

fn call(arguments: &[&str]) -> Output {
    tokenyard().args(arguments).output().unwrap()
}

#[test]
fn version_says_build_compiler_formats_and_libraries_within_80_columns() {
    let output = call(&["version"]);
    expect_code(&output, 0);
    let text = stdout(&output);
    assert!(text.starts_with(&format!("tokenyard {}\n", env!("CARGO_PKG_VERSION"))), "{text}");
    for what in ["commit", "compiler", "rustc 1.", "transport ABI", "device API", "Linux"] {
        assert!(text.contains(what), "no `{what}` in:\n{text}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    assert_eq!(text, stdout(&call(&["--version", "--verbose"])));
    assert_eq!(text, stdout(&call(&["-Vv"])));
}

#[test]
fn the_version_alone_is_one_line() {
    for flag in ["--version", "-V"] {
        let output = call(&[flag]);
        expect_code(&output, 0);
        assert_eq!(stdout(&output), format!("tokenyard {}\n", env!("CARGO_PKG_VERSION")));
    }
    let output = call(&["--verbose"]);
    expect_code(&output, 2);
    assert!(stderr(&output).contains("--version"), "{output:?}");
}

#[test]
fn version_as_json_has_what_a_report_of_a_fault_needs() {
    let output = call(&["version", "--json"]);
    expect_code(&output, 0);
    let document = json(&output);
    assert_eq!(document["command"], "version");
    assert_eq!(document["version"], env!("CARGO_PKG_VERSION"));
    assert!(document["build"]["compiler"].as_str().unwrap().starts_with("rustc "));
    assert!(document["build"]["target"].as_str().unwrap().contains("linux"));
    assert!(document["formats"]["transport_abi"].as_str().unwrap().starts_with("1."));
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    assert_eq!(document["node"]["kernel"], release.trim());
    for library in document["node"]["libraries"].as_array().unwrap() {
        assert!(std::path::Path::new(library["path"].as_str().unwrap()).exists(), "{library}");
    }
}

#[test]
fn completions_are_scripts_that_their_shell_reads_and_name_every_command() {
    let output = call(&["completions", "bash"]);
    expect_code(&output, 0);
    let mut bash = Command::new("bash");
    let mut bash = bash.arg("-n").stdin(Stdio::piped()).spawn().expect("start bash");
    std::io::Write::write_all(&mut bash.stdin.take().unwrap(), &output.stdout).unwrap();
    assert!(bash.wait().unwrap().success());
    for shell in ["bash", "zsh", "fish"] {
        let output = call(&["completions", shell]);
        expect_code(&output, 0);
        for command in ["run", "bench", "conformance", "doctor", "explain", "version"] {
            assert!(stdout(&output).contains(command), "{shell}: no {command}");
        }
        assert!(stdout(&output).contains("json"), "{shell}");
    }
    expect_code(&call(&["completions", "cmd"]), 2);
}
