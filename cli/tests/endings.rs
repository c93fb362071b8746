//! The exit of a command when a signal ends it or one of its ranks, or when its output cannot be
//! written.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

mod common;

use std::fs::File;
use std::process::{Command, Output, Stdio};

use common::{Config, Library, expect_code, names, repository, run, stderr, stdout, tokenyard};

const SMALL: &str = "--tokens 12 --hidden 128 --experts 8 --topk 3 --steps 3 --ranks 2";

fn call(words: &[&str]) -> Output {
    tokenyard().args(words).output().unwrap()
}

#[test]
fn a_rank_that_ends_with_0_and_no_result_fails_the_run_and_nothing_is_written() {
    let library =
        Library::new("const char *r = getenv(\"TOKENYARD_RANK\"); if (r && *r == '1') _exit(0);");
    let config = library.config();
    let out = config.file("out.safetensors");
    let output = run(&config, &format!("{SMALL} --output {} --json", out.display()));
    expect_code(&output, 2);
    let text = stderr(&output);
    let first = text.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
    assert!(first.contains("rank 1: it ended with exit code 0 and gave no result"), "{text}");
    assert_eq!(common::json(&output)["check"]["passed"], false);
    assert_eq!(names(out.parent().unwrap()), ["config.toml"]);
}

#[test]
fn a_rank_that_is_killed_after_its_result_fails_the_run_and_nothing_is_written() {
    let library = Library::new(
        "const char *r = getenv(\"TOKENYARD_RANK\"); if (r && *r == '1') atexit(late);",
    );
    let config = library.config();
    let out = config.file("out.safetensors");
    let output = run(&config, &format!("{SMALL} --output {}", out.display()));
    expect_code(&output, 2);
    assert!(stderr(&output).contains("error: rank 1: it died: killed by signal 9"), "{output:?}");
    assert_eq!(names(out.parent().unwrap()), ["config.toml"]);
}

#[test]
fn ranks_that_all_end_with_0_and_no_result_are_no_success_of_any_command() {
    let library = Library::new("if (getenv(\"TOKENYARD_RANK\")) _exit(0);");
    let config = library.config();
    let path = config.path();
    let path = path.to_str().unwrap();
    let output = run(&config, SMALL);
    expect_code(&output, 2);
    // One line for both, or one each. A rank that had not loaded the library when the other one ended may report
    // that loss instead of ending in the same way.
    let says = |who: &str| stderr(&output).contains(&format!("{who}: it ended with exit code 0"));
    let lost = |who: &str, other: &str| {
        let loss = format!("error: {who}: join world: {other} closed its connection");
        stderr(&output).contains(&loss)
    };
    let ended = says("ranks 0-1")
        || says("rank 0") && (says("rank 1") || lost("rank 1", "rank 0"))
        || says("rank 1") && lost("rank 0", "rank 1");
    assert!(ended, "{output:?}");
    let named = format!("announced is `dlopen` of plugin `{}`", library.file().display());
    assert!(stderr(&output).contains(&named), "{output:?}");
    for arguments in [&["--scenario", "steady", "--ranks", "2"][..], &["--scenario", "scaling"]] {
        let output = call(&[&["bench", path][..], arguments].concat());
        expect_code(&output, 2);
        // Here, too, a rank may see the end of the other one first.
        let seen = ["exit code 0 and gave no figures", "closed its connection without a goodbye"];
        assert!(seen.iter().any(|text| stderr(&output).contains(text)), "{output:?}");
        assert!(stderr(&output).contains(&named), "{output:?}");
    }
    let output = call(&["conformance", path, "--filter", "l0/puts_reach_the_right_place/r2"]);
    expect_code(&output, 1);
    assert!(stdout(&output).contains("ended (exit code 0) without a result"), "{output:?}");
}

#[test]
fn a_library_that_ends_the_process_that_opens_it_is_no_success_of_any_command() {
    let library = Library::new("_exit(0);");
    let config = library.config();
    let path = config.path();
    let path = path.to_str().unwrap();
    for command in ["plugins", "doctor", "conformance", "config check", "run", "bench"] {
        let words: Vec<_> = command.split(' ').chain([path]).collect();
        let output = call(&words);
        expect_code(&output, 2);
        let text = stderr(&output);
        assert!(text.contains("libearly.so ended the process that opened it"), "{command}: {text}");
        assert_eq!(stdout(&output), "", "{command}: no rank has started");
    }
    let output = tokenyard()
        .args(["run", path, "--as-rank"])
        .envs([("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")])
        .output()
        .unwrap();
    expect_code(&output, 2);
}

#[test]
fn a_library_that_prints_in_ranks_ends_no_bench() {
    let library =
        Library::new("if (getenv(\"TOKENYARD_RANK\") && write(1, \"hello\\n\", 6) != 6) _exit(1);");
    let config = library.config();
    let path = config.path();
    let output = call(&["bench", path.to_str().unwrap(), "--scenario", "scaling", "--json"]);
    expect_code(&output, 0);
    assert!(!common::json(&output)["scaling"].as_array().unwrap().is_empty());
    assert!(stderr(&output).contains("printed \"hello\""), "{output:?}");
}

#[test]
fn an_output_that_is_the_input_is_refused_and_the_input_stays() {
    let config = Config::new();
    let input = config.file("in.safetensors");
    std::fs::copy(repository("samples/skewed-router.safetensors"), &input).unwrap();
    let before = std::fs::read(&input).unwrap();
    let link = config.file("link");
    std::os::unix::fs::symlink(&input, &link).unwrap();
    let (input, link) = (input.to_str().unwrap(), link.to_str().unwrap());
    let path = config.path();
    let path = path.to_str().unwrap();
    for (from, to) in [(input, input), (input, link), (link, input), (input, path)] {
        let output = call(&["run", path, "--input", from, "--output", to]);
        expect_code(&output, 2);
        assert!(stderr(&output).contains("which would be overwritten"), "{output:?}");
        assert_eq!(stdout(&output), "", "nothing has run");
    }
    let output = call(&["bench", path, "--out", path]);
    expect_code(&output, 2);
    let output = call(&["bench", "plot", input, "--out", link]);
    expect_code(&output, 2);
    assert!(stderr(&output).contains("found the file of a report"), "{output:?}");
    assert_eq!(std::fs::read(input).unwrap(), before);
    assert!(std::fs::read_to_string(path).unwrap().contains("[kernels]"));
}

#[test]
fn what_cannot_be_written_is_refused_before_anything_runs() {
    let config = Config::with("");
    let folder = config.file("");
    let path = config.path();
    let (path, folder) = (path.to_str().unwrap(), folder.to_str().unwrap());
    for (words, expected) in [
        (vec!["run", path, "--output", "/no/such/out"], "Fix: mkdir -p /no/such"),
        (vec!["run", path, "--output", folder], "name a file in it"),
        (vec!["bench", path, "--out", "/no/such/out"], "Fix: mkdir -p /no/such"),
        (vec!["bench", path, "--csv", "/no/such/out"], "Fix: mkdir -p /no/such"),
        (vec!["bench", "link", path, "--out", "/no/such/out"], "Fix: mkdir -p /no/such"),
        (vec!["bench", "dispatch", path, "--plot", "/no/such/out"], "Fix: mkdir -p /no/such"),
        (vec!["conformance", path, "--junit", "/no/such/out"], "Fix: mkdir -p /no/such"),
        (vec!["conformance", path, "--save", "/proc/no/out"], "cannot write in /proc"),
    ] {
        let output = call(&words);
        expect_code(&output, 2);
        let text = stderr(&output);
        assert!(text.contains(expected), "{words:?}: {text}");
        assert_eq!(stdout(&output), "", "{words:?}: nothing has run");
    }
    let text = std::fs::read_to_string(path).unwrap();
    std::fs::write(path, text.replace("[world]", "[world]\nreports = \"/proc/no/such\"")).unwrap();
    for command in ["run", "bench", "conformance"] {
        let output = call(&[command, path]);
        expect_code(&output, 2);
        assert!(stderr(&output).contains("world.reports /proc/no/such"), "{output:?}");
    }
}

#[test]
fn a_library_that_hangs_while_it_is_loaded_ends_the_run_before_ranks_start() {
    let library = Library::new("sleep(1000);");
    let config = library.config();
    let text = std::fs::read_to_string(config.path()).unwrap();
    let short = text.replace("= 6000", "= 2000").replace("= 10000", "= 2000");
    std::fs::write(config.path(), short).unwrap();
    let output = run(&config, SMALL);
    expect_code(&output, 2);
    assert!(stderr(&output).contains("libearly.so is not open after 2s"), "{output:?}");
    assert_eq!(stdout(&output), "", "no rank has started");
}

/// A command line under a limit on the size of files, in units of 512 bytes.
fn limited(units: u32, line: &str) -> Output {
    let line = format!("ulimit -f {units}; exec {} {line}", env!("CARGO_BIN_EXE_tokenyard"));
    let mut command = Command::new("sh");
    command.args(["-c", &line]).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn a_limit_of_no_file_bytes_is_named() {
    let config = Config::new();
    let run = format!("run {} {SMALL}", config.path().display());
    let out = config.file("out");
    for line in [run.clone(), format!("{run} --output {}", out.display())] {
        let output = limited(0, &line);
        expect_code(&output, 2);
        let text = stderr(&output);
        assert!(text.contains("file size limit") && text.contains("ulimit -f"), "{text}");
    }
    assert_eq!(names(out.parent().unwrap()), ["config.toml"]);
    // Shared memory is limited, too: more than that is enough for the ranks to meet.
    let output = limited(64, &run);
    expect_code(&output, 2);
    let text = stderr(&output);
    assert!(text.contains("file size limit (ulimit -f) in bytes: 32768"), "{text}");
    // Standard output is a file, too.
    let output = limited(0, &format!("plugins > {}", out.display()));
    expect_code(&output, 1);
    assert!(stderr(&output).contains("file size limit (ulimit -f) in bytes: 0"), "{output:?}");
}

#[test]
fn a_full_standard_output_is_no_success_of_any_command() {
    let config = Config::new();
    let path = config.path();
    let path = path.to_str().unwrap();
    let run = ["run", path].into_iter().chain(SMALL.split(' ')).collect::<Vec<_>>();
    let shape = "shape --ranks 2 --experts 4 --topk 2 --hidden 64 --max-tokens 4";
    let commands = [
        run.clone(),
        run.into_iter().chain(["--json"]).collect(),
        vec!["plugins", "--json"],
        vec!["warm", path],
        shape.split(' ').collect(),
        vec!["conformance", path, "--list"],
        vec!["conformance", path, "--filter", "l0/puts_reach_the_right_place/r2", "--json"],
        vec!["bench", path, "--scenario", "proxy"],
        vec!["--help"],
        vec!["--version"],
    ];
    for words in commands {
        let mut command = tokenyard();
        command.args(&words).stdout(File::create("/dev/full").unwrap());
        let output = command.stderr(Stdio::piped()).output().unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {text}");
        assert!(text.contains("error: write to standard output"), "{words:?}: {text}");
    }
}

#[test]
fn a_reader_that_went_away_ends_a_command_quietly() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = tokenyard();
    let output = command.arg("plugins").stdout(writer).stderr(Stdio::piped()).output().unwrap();
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(141), ""));
}

#[test]
fn a_negative_number_is_out_of_range_and_no_unknown_argument() {
    let config = Config::new();
    let path = config.path();
    let path = path.to_str().unwrap();
    for words in [
        ["run", path, "--steps", "-5"],
        ["run", path, "--seed", "-5"],
        ["bench", path, "--samples", "-5"],
        ["bench", path, "--ranks", "-5,2"],
        ["conformance", path, "--ranks", "-5"],
        ["conformance", path, "--slow", "-5"],
        ["doctor", path, "--hidden", "-5"],
        ["warm", path, "--capability", "-5"],
    ] {
        let output = call(&words);
        expect_code(&output, 2);
        let text = stderr(&output);
        assert!(text.starts_with("error: invalid value '-5"), "{words:?}: {text}");
        assert!(text.contains("is not in ") || text.contains("expected 1 to"), "{words:?}: {text}");
    }
}
