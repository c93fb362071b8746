//! SIGTERM, SIGINT and SIGHUP end a command that runs ranks, and nothing remains.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panic")]

mod common;

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::{Config, Library, children, expect_code, lives, names, program, stderr};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

const SOON: Duration = Duration::from_secs(30);

/// A command whose temporary files lie in their own folder.
struct Job {
    child: Child,
    temporary: tempfile::TempDir,
    ranks: Vec<i32>,
}

impl Job {
    fn start(config: &Config, words: &str) -> Self {
        let temporary = tempfile::tempdir().unwrap();
        // The process that starts these tests may ignore signals, which children inherit.
        let mut command = program(Path::new("env"));
        command.args(["--default-signal=HUP,INT,TERM", env!("CARGO_BIN_EXE_tokenyard")]);
        let (first, rest) = words.split_once(' ').unwrap_or((words, ""));
        command.arg(first).arg(config.path()).args(rest.split_whitespace());
        command.env("TMPDIR", temporary.path()).process_group(0);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        Self { child, temporary, ranks: Vec::new() }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn await_ranks(mut self, count: usize) -> Self {
        let start = Instant::now();
        while self.ranks.len() < count {
            assert!(start.elapsed() < SOON, "the ranks do not start");
            std::thread::sleep(Duration::from_millis(5));
            self.ranks = children(self.child.id());
        }
        self
    }

    /// Waits for the end, and checks that nothing remains. Returns the output.
    fn end(self, code: i32) -> String {
        let output = self.child.wait_with_output().unwrap();
        expect_code(&output, code);
        assert!(!self.ranks.iter().any(|pid| lives(*pid)), "a rank is left behind");
        assert_eq!(names(self.temporary.path()), [""; 0], "{}", stderr(&output));
        stderr(&output)
    }
}

fn endless(config: &Config) -> String {
    let out = config.file("out");
    format!(
        "run --ranks 2 --experts 8 --steps 40000000 --tokens 8 --hidden 64 --output {}",
        out.display()
    )
}

#[test]
fn a_signal_ends_the_ranks_first_and_leaves_nothing_whenever_it_comes() {
    let config = Config::new();
    let folder = config.file("");
    for (signal, code, name) in
        [(Signal::TERM, 143, "SIGTERM"), (Signal::INT, 130, "SIGINT"), (Signal::HUP, 129, "SIGHUP")]
    {
        for milliseconds in [0, 20, 200] {
            let job = Job::start(&config, &endless(&config)).await_ranks(2);
            std::thread::sleep(Duration::from_millis(milliseconds));
            kill_process(job.pid(), signal).unwrap();
            let text = job.end(code);
            assert!(text.contains(&format!("error: interrupted by {name}; ")), "{text}");
            assert!(
                text.contains(" of 40000000 steps were done, and all ranks have ended"),
                "{text}"
            );
            assert_eq!(names(Path::new(&folder)), ["config.toml"]);
        }
    }
}

#[test]
fn a_terminal_s_signal_reaches_the_ranks_too_and_is_no_fault_of_theirs() {
    let config = Config::new();
    let job = Job::start(&config, &endless(&config)).await_ranks(2);
    std::thread::sleep(Duration::from_millis(200));
    kill_process_group(job.pid(), Signal::INT).unwrap();
    let text = job.end(130);
    assert!(text.contains("interrupted by SIGINT") && !text.contains("died"), "{text}");
}

#[test]
fn a_rank_that_the_launcher_s_signal_ends_is_no_fault_whichever_of_them_gets_it_first() {
    let config = Config::new();
    let run = endless(&config);
    let bench = "bench --scenario exchange --ranks 2 --samples 10000";
    for words in [&run, bench, "conformance --level L1 --filter l1/routing"] {
        for ranks_first in [true, false] {
            let job = Job::start(&config, words).await_ranks(2);
            std::thread::sleep(Duration::from_millis(200));
            let ranks = job.ranks.iter().filter_map(|rank| Pid::from_raw(*rank));
            if ranks_first {
                // A short test of the suite may have ended, with its ranks.
                for rank in ranks {
                    let _ = kill_process(rank, Signal::INT);
                }
                await_end(&job.ranks);
                // The launcher has seen their ends for long.
                std::thread::sleep(Duration::from_millis(500));
                kill_process(job.pid(), Signal::INT).unwrap();
            } else {
                kill_process(job.pid(), Signal::INT).unwrap();
                // The launcher may have ended them already.
                for rank in ranks {
                    let _ = kill_process(rank, Signal::INT);
                }
            }
            let text = job.end(130);
            assert!(text.contains("interrupted by SIGINT"), "{words}: {text}");
            assert!(!text.contains("died") && !text.contains("killed by"), "{words}: {text}");
        }
    }
}

#[test]
fn a_signal_to_a_rank_alone_is_its_own_end() {
    let config = Config::new();
    let job = Job::start(&config, &endless(&config)).await_ranks(2);
    std::thread::sleep(Duration::from_millis(200));
    kill_process(Pid::from_raw(job.ranks[1]).unwrap(), Signal::INT).unwrap();
    // Its report stays, so the temporary folder is not empty.
    let output = job.child.wait_with_output().unwrap();
    expect_code(&output, 2);
    assert!(stderr(&output).contains("it died: killed by signal 2"), "{}", stderr(&output));
}

#[test]
fn a_rank_that_ignores_the_signal_is_killed_after_a_grace() {
    let library = Library::new("signal(SIGTERM, SIG_IGN);");
    let config = library.config();
    let job = Job::start(&config, &endless(&config)).await_ranks(2);
    // Long enough for the ranks to load the library.
    std::thread::sleep(Duration::from_millis(1500));
    let start = Instant::now();
    kill_process(job.pid(), Signal::TERM).unwrap();
    // `timeout` sends a second signal at once; it is the same request.
    kill_process(job.pid(), Signal::TERM).unwrap();
    job.end(143);
    assert!(start.elapsed() >= Duration::from_secs(2), "they had no time: {:?}", start.elapsed());
}

#[test]
fn a_second_signal_ends_everything_at_once() {
    let library = Library::new("signal(SIGTERM, SIG_IGN);");
    let config = library.config();
    let mut job = Job::start(&config, &endless(&config)).await_ranks(2);
    std::thread::sleep(Duration::from_millis(1500));
    kill_process(job.pid(), Signal::TERM).unwrap();
    std::thread::sleep(Duration::from_millis(500));
    kill_process(job.pid(), Signal::TERM).unwrap();
    let status = job.child.wait().unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(15));
    await_end(&job.ranks);
}

#[test]
fn ranks_end_with_a_launcher_that_is_killed() {
    let config = Config::new();
    let mut job = Job::start(&config, &endless(&config)).await_ranks(2);
    std::thread::sleep(Duration::from_millis(300));
    job.child.kill().unwrap();
    job.child.wait().unwrap();
    await_end(&job.ranks);
}

fn await_end(ranks: &[i32]) {
    let start = Instant::now();
    while ranks.iter().any(|pid| lives(*pid)) {
        assert!(start.elapsed() < SOON, "ranks {ranks:?} outlived their launcher");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_signal_that_the_command_was_started_to_ignore_does_not_end_it() {
    let config = Config::new();
    let mut command = std::process::Command::new("sh");
    let line = format!("trap '' HUP; exec {} \"$@\"", env!("CARGO_BIN_EXE_tokenyard"));
    command.args(["-c", &line, "sh", "run"]).arg(config.path());
    command.args("--ranks 2 --experts 8 --steps 200 --tokens 8 --hidden 64".split(' '));
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let start = Instant::now();
    while children(child.id()).len() < 2 {
        assert!(start.elapsed() < SOON, "the ranks do not start");
        std::thread::sleep(Duration::from_millis(5));
    }
    kill_process(Pid::from_child(&child), Signal::HUP).unwrap();
    expect_code(&child.wait_with_output().unwrap(), 0);
}

#[test]
fn conformance_and_bench_leave_nothing_either_and_say_how_far_they_came() {
    let config = Config::new();
    for (words, summary) in [
        ("conformance --level L1,L3", "tests were done"),
        ("conformance --level L3 --filter l3/stopped", "tests were done"),
        ("bench --scenario exchange --ranks 2 --samples 10000", "steps were done"),
    ] {
        let mut pause = Duration::from_millis(700);
        loop {
            let job = Job::start(&config, words).await_ranks(2);
            std::thread::sleep(pause);
            kill_process(job.pid(), Signal::TERM).unwrap();
            let text = job.end(143);
            assert!(text.contains("interrupted by SIGTERM"), "{words}: {text}");
            if text.contains(summary) {
                break;
            }
            // A busy machine may take longer to the first step.
            assert!(text.contains("nothing was measured") && pause < SOON, "{words}: {text}");
            pause *= 2;
        }
    }
}
