//! People see each warning of a job once, whichever of its ranks has it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

mod common;

use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use common::{Config, Library, expect_code, stderr, stdout, tokenyard};

#[test]
fn a_run_shows_each_warning_of_its_ranks_once_without_a_wish_for_their_log() {
    let (library, mode) = (Library::new(""), std::fs::Permissions::from_mode(0o666));
    std::fs::set_permissions(library.file(), mode).unwrap();
    let paths = [library.file()];
    let config =
        Config::with(&format!("[plugins]\npaths = {paths:?}\n[kernels.cpuu]\nthreads = 1"));
    let output = tokenyard()
        .env_remove("TOKENYARD_LOG")
        .args(["run", config.path().to_str().unwrap(), "--ranks", "4", "--steps", "1"])
        .output()
        .unwrap();
    expect_code(&output, 0);
    let (text, shown) = (stderr(&output), stdout(&output));
    for words in ["no component is called `cpuu` here", "libearly.so, mode 0666"] {
        let found: Vec<_> = text.lines().filter(|line| line.contains(words)).collect();
        assert!(matches!(found[..], [line] if line.contains("] warning: ")), "{words}: {text}");
        assert!(!shown.contains(words), "{shown}");
    }
}

/// The standard errors of ranks that another launcher starts.
fn warned_under_another_launcher(
    config: &Config,
    words: &[&str],
    log: Option<&str>,
) -> Vec<String> {
    let bootstrap = format!("file://{}", config.file("rendezvous").display());
    let rank = |rank: &str| {
        let mut command = tokenyard();
        command.args(words).arg("--as-rank");
        command.envs([("RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_RANK", rank)]);
        command.env("TOKENYARD_BOOTSTRAP", &bootstrap);
        if let Some(log) = log {
            command.env("TOKENYARD_LOG", log);
        }
        command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let ranks = ["0", "1"].map(rank);
    let ended = ranks.map(|rank| rank.wait_with_output().unwrap());
    ended.iter().for_each(|output| expect_code(output, 0));
    ended.iter().map(stderr).collect()
}

#[test]
fn ranks_of_another_launcher_show_each_warning_once_through_rank_0() {
    let (library, mode) = (Library::new(""), std::fs::Permissions::from_mode(0o666));
    std::fs::set_permissions(library.file(), mode).unwrap();
    let paths = [library.file()];
    let config =
        Config::with(&format!("[plugins]\npaths = {paths:?}\n[kernels.cpuu]\nthreads = 1"));
    let path = config.path().to_str().unwrap().to_owned();
    let warned = ["no component is called `cpuu` here", "libearly.so, mode 0666"];
    let run = ["run", &path, "--steps", "1"];
    let texts = warned_under_another_launcher(&config, &run, None);
    for warning in warned {
        let found = |rank: usize| -> Vec<&str> {
            texts[rank].lines().filter(|line| line.contains(warning)).collect()
        };
        let is_once = matches!(found(0)[..], [line] if line.starts_with("warning: rank "));
        assert!(is_once && found(1).is_empty(), "{warning}: {texts:#?}");
    }
    // Where a log is asked for, they are in the log of each rank.
    for text in warned_under_another_launcher(&config, &run, Some("warn")) {
        assert!(warned.iter().all(|warning| text.contains(warning)), "{text}");
        assert!(!text.contains("warning: rank"), "{text}");
    }
}

#[test]
fn a_benchmark_and_the_suite_show_each_warning_of_their_ranks_once() {
    let config = Config::with("[kernels.cpuu]\nthreads = 1");
    let path = config.path().to_str().unwrap().to_owned();
    let bench = ["bench", &path, "--scenario", "steady", "--ranks", "2", "--samples", "1"];
    // Two tests, in worlds of two sizes.
    let suite =
        ["conformance", &path, "--filter", "l1/worlds/flat.bf16.r1-*,l1/worlds/flat.bf16.r2-*"];
    for words in [&bench[..], &suite] {
        let output = tokenyard().env_remove("TOKENYARD_LOG").args(words).output().unwrap();
        expect_code(&output, 0);
        let text = stderr(&output);
        let is_of_a_rank = |line: &&str| line.contains("no component is called `cpuu` here");
        let is_of_a_rank = |line: &&str| is_of_a_rank(line) && line.contains(": rank ");
        assert_eq!(text.lines().filter(is_of_a_rank).count(), 1, "{text}");
    }
}
