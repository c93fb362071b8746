//! Runs one command: shows its output, counts the tests in it, and ends it at its time limit.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, io};

use rustix::process::{Pid, Signal, kill_process};

/// How long output may still come once the command has ended. Only a process that it left behind
/// can make use of this.
const OUTPUT_GRACE: Duration = Duration::from_secs(5);

/// A command line, with variables on top of this process's own.
pub(crate) struct Line<'a> {
    pub(crate) words: Vec<String>,
    pub(crate) env: &'a [(&'a str, &'a str)],
    pub(crate) folder: &'a Path,
}

/// What came of a command.
#[derive(Debug, Default)]
pub(crate) struct Ran {
    pub(crate) failure: Option<String>,
    pub(crate) tests: Tests,
    /// What the output says of the tests that failed.
    pub(crate) failed: String,
}

/// Tests that a command reported in the form of `cargo test`, of `tokenyard conformance` or of pytest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tests {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
}

impl Tests {
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
    }

    fn in_line(line: &str) -> Self {
        Self::of_level(line)
            .or_else(|| Self::of_pytest(line))
            .unwrap_or_else(|| Self::of_cargo(line))
    }

    /// Reads pytest's last line, `1 failed, 20 passed, 1 warning in 3.75s`. A test that did not run for an error of
    /// its own making failed; one that was skipped did not pass.
    fn of_pytest(line: &str) -> Option<Self> {
        let (counts, time) = line.trim().trim_matches('=').trim().rsplit_once(" in ")?;
        let (seconds, _) = time.split_once('s')?;
        seconds.parse::<f64>().ok()?;
        let mut tests = Self::default();
        for part in counts.split(", ") {
            let (count, what) = part.split_once(' ')?;
            let count: u64 = count.parse().ok()?;
            match what {
                "passed" => tests.passed += count,
                "failed" | "error" | "errors" => tests.failed += count,
                _ => {}
            }
        }
        Some(tests)
    }

    /// Reads a row of the suite's table: the level, then how many pass, are not supported, fail as
    /// expected, fail, and pass although a failure was expected.
    fn of_level(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        words.next().filter(|level| matches!(*level, "L0" | "L1" | "L2" | "L3"))?;
        let counts: Vec<u64> = words.map(|word| word.parse().ok()).collect::<Option<_>>()?;
        let [pass, _, expected_fail, fail, unexpected_pass] = counts[..] else { return None };
        Some(Self { passed: pass + expected_fail, failed: fail + unexpected_pass })
    }

    /// Reads `test result: ok. 12 passed; 0 failed; ...`; any other line counts nothing.
    fn of_cargo(line: &str) -> Self {
        let Some(result) = line.trim_start().strip_prefix("test result: ") else {
            return Self::default();
        };
        let count = |what: &str| {
            let part = result.split([';', '.']).find_map(|part| part.trim().strip_suffix(what));
            part.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
        };
        Self { passed: count("passed"), failed: count("failed") }
    }
}

/// Finds what output says of the tests that failed, so that it can be shown again where a reader of a
/// long log looks first: at its end.
#[derive(Default)]
struct Failures {
    inside: bool,
    of_suite: bool,
    kept: usize,
}

impl Failures {
    /// Most bytes kept of one command's output.
    const MOST: usize = 16 << 10;

    /// Whether a line belongs to what failed: the component from `failures:` to `test result:` of
    /// `cargo test`, a case of `tokenyard conformance` with its indented details, or a line of pytest's summary.
    fn keeps(&mut self, line: &str) -> bool {
        let heads = ["FAIL: ", "UNEXPECTED PASS: ", "FAILED ", "ERROR "];
        let of_suite = heads.iter().any(|head| line.starts_with(head));
        self.of_suite = of_suite || self.of_suite && line.starts_with("    ");
        self.inside |= line.trim_end() == "failures:";
        let keeps = self.inside || self.of_suite;
        self.inside &= !line.starts_with("test result: ");
        self.kept += if keeps { line.len() } else { 0 };
        keeps && self.kept <= Self::MOST
    }
}

/// What a line of output said.
struct Printed {
    tests: Tests,
    failed: Option<String>,
}

/// Runs a command to its end or for at most `limit`, then kills it and all that it started.
pub(crate) fn run(line: &Line<'_>, limit: Duration) -> Ran {
    let text = line.words.join(" ");
    println!("$ {text}");
    let Some((program, args)) = line.words.split_first() else {
        return failed("found an empty command line".into());
    };
    let spawned = Command::new(program)
        .args(args)
        .envs(line.env.iter().copied())
        .current_dir(line.folder)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn();
    let mut child = match spawned {
        Ok(child) => child,
        Err(error) => return failed(format!("`{text}` could not be started: {error}")),
    };
    let said = show_and_read(&mut child);
    let failure = match wait(&mut child, limit) {
        Ok(Some(status)) if status.success() => None,
        Ok(Some(status)) => Some(format!("`{text}` ended with {status}")),
        Ok(None) => Some(format!("`{text}` did not end within {} s", limit.as_secs_f32())),
        Err(error) => Some(format!("`{text}` could not be waited for: {error}")),
    };
    let mut ran = Ran { failure, ..Ran::default() };
    let end = Instant::now() + OUTPUT_GRACE;
    while let Ok(line) = said.recv_timeout(end.saturating_duration_since(Instant::now())) {
        ran.tests.add(line.tests);
        ran.failed.extend(line.failed);
    }
    ran
}

fn failed(failure: String) -> Ran {
    Ran { failure: Some(failure), ..Ran::default() }
}

/// The receiver disconnects at the end of the output.
fn show_and_read(child: &mut Child) -> Receiver<Printed> {
    let (said_in, said) = mpsc::channel();
    if let Some(stdout) = child.stdout.take() {
        thread::spawn(move || {
            let mut stdout = BufReader::new(stdout);
            let mut line = Vec::new();
            let mut failures = Failures::default();
            while stdout.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
                let text = String::from_utf8_lossy(&line);
                print!("{text}");
                // Fails if the command was given up; its output is shown all the same.
                let failed = failures.keeps(&text).then(|| text.to_string());
                let _ = said_in.send(Printed { tests: Tests::in_line(&text), failed });
                line.clear();
            }
        });
    }
    said
}

/// `None` if the command had to be killed.
fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    while start.elapsed() < limit {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        thread::sleep(Duration::from_millis(20));
    }
    kill(child)?;
    Ok(None)
}

/// Kills a command and all that it started.
pub(crate) fn kill(child: &mut Child) -> io::Result<()> {
    for pid in family(child.id().cast_signed()) {
        // Fails only for a process that has ended by itself.
        let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
    }
    child.wait()?;
    Ok(())
}

/// A process and all its descendants. The command stays in this process's group, so that Ctrl-C
/// reaches it; so it has no group of its own that could be killed at once.
fn family(root: i32) -> Vec<i32> {
    let pairs: Vec<(i32, i32)> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let pid = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            // `pid (name) state parent ...`, where the name may hold anything.
            let parent = stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()?;
            Some((pid, parent))
        })
        .collect();
    let mut family = vec![root];
    let mut next = 0;
    while let Some(&parent) = family.get(next) {
        family.extend(pairs.iter().filter(|pair| pair.1 == parent).map(|pair| pair.0));
        next += 1;
    }
    family
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Ran {
        let words = ["sh", "-c", script].map(String::from).to_vec();
        run(&Line { words, env: &[("COLOUR", "green")], folder: Path::new("/") }, limit)
    }

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn test_results_are_summed_over_the_output() {
        let ran = shell(
            "echo 'test result: ok. 12 passed; 0 failed; 3 ignored; 0 measured'
             echo 'test result: FAILED. 1 passed; 2 failed; 0 ignored; finished in 0.01s'
             echo 'we saw 9 passed; 9 failed'",
            LONG,
        );
        assert_eq!(ran.tests, Tests { passed: 13, failed: 2 });
        assert_eq!(ran.failure, None);
    }

    #[test]
    fn rows_of_the_suites_table_are_counted() {
        let ran = shell(
            "echo 'level              pass    not supported    expected fail   FAIL  UNEXPECTED PASS'
             echo 'L0                   21                4                1      2                3'
             echo 'L1                  100                0                0      0                0'
             echo 'L0 the transport alone'
             echo 'L1 1 2 3 4'",
            LONG,
        );
        assert_eq!(ran.tests, Tests { passed: 122, failed: 5 });
    }

    #[test]
    fn the_last_line_of_pytest_is_counted_and_skipped_tests_did_not_pass() {
        let counts = |line| {
            let Tests { passed, failed } = Tests::in_line(line);
            (passed, failed)
        };
        assert_eq!(counts("103 passed in 16.03s"), (103, 0));
        assert_eq!(counts("=== 2 failed, 9 passed, 1 warning in 75.10s (0:01:15) ==="), (9, 2));
        assert_eq!(counts("4 passed, 3 skipped, 2 errors in 1.00s"), (4, 2));
        assert_eq!(counts("test result: ok. 2 passed; 0 failed; finished in 0.20s"), (2, 0));
        assert_eq!(counts("Compiled 12 crates, all in 3s"), (0, 0));
    }

    #[test]
    fn what_failed_is_kept_from_either_form_of_report() {
        let ran = shell(
            "printf 'test a ... FAILED\\n\\nfailures:\\n\\n---- a ----\\nleft: 1\\n\\n'
             echo 'test result: FAILED. 1 passed; 1 failed; 0 ignored'
             echo 'Running the next'
             printf 'FAIL: l1/a (2 ranks)\\n    found 1\\nnot supported: l1/b\\n    CAP\\n'",
            LONG,
        );
        let expected = "failures:\n\n---- a ----\nleft: 1\n\n\
            test result: FAILED. 1 passed; 1 failed; 0 ignored\n\
            FAIL: l1/a (2 ranks)\n    found 1\n";
        assert_eq!(ran.failed, expected);
        assert_eq!(shell("yes 'FAIL: x' | head -n 9999", LONG).failed.len(), Failures::MOST);
    }

    #[test]
    fn a_failure_names_the_command_and_its_status() {
        let failure = shell("[ $COLOUR = green ] && [ $PWD = / ] && exit 3", LONG).failure.unwrap();
        assert!(failure.contains("exit 3` ended with exit status: 3"), "{failure}");
        let words = vec!["/no/such/program".to_string()];
        let line = Line { words, env: &[], folder: Path::new("/") };
        let failure = run(&line, LONG).failure.unwrap();
        assert!(failure.starts_with("`/no/such/program` could not be started"), "{failure}");
    }

    #[test]
    fn a_command_over_its_limit_is_killed_with_all_that_it_started() {
        let folder = tempfile::tempdir().unwrap();
        let script = format!(
            "sh -c 'sleep 60 & echo $! > {0}/grandchild; wait' & echo $! > {0}/child; wait",
            folder.path().display()
        );
        let start = Instant::now();
        let failure = shell(&script, Duration::from_millis(500)).failure.unwrap();
        assert!(failure.ends_with("did not end within 0.5 s"), "{failure}");
        assert!(start.elapsed() < LONG);
        for name in ["child", "grandchild"] {
            let pid = fs::read_to_string(folder.path().join(name)).unwrap();
            let stat = format!("/proc/{}/stat", pid.trim());
            // Somebody else's child now, so it may stay a zombie for a while.
            let dead = || fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "));
            while !dead() {
                assert!(start.elapsed() < LONG, "{name} {pid} lives");
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
}
