//! Runs one command: shows its output, counts the tests in it, and kills it if it hangs.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};
use std::{fs, io};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use wait4::{ResUse, Wait4};

/// The time for which output may arrive after the command has ended. Only a process that the command left
/// behind can write then.
const OUTPUT_GRACE: Duration = Duration::from_secs(5);

/// The limits after which a command counts as hanging. Neither is a limit of wall time, because a busy
/// machine would exceed that.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HangLimits {
    /// The longest time without a line of output and without processor time of the command and its
    /// descendants.
    pub(crate) idle: Duration,
    /// The most processor time of the command and its descendants.
    pub(crate) processor: Duration,
}

/// The destination of output.
pub(crate) enum Output<'a> {
    /// To standard output, at once.
    Shown,
    /// Into this text, which is shown later: another step's output is shown meanwhile.
    Kept(&'a mut String),
}

impl Output<'_> {
    pub(crate) fn line(&mut self, line: &str) {
        match self {
            Self::Shown => print!("{line}"),
            Self::Kept(text) => text.push_str(line),
        }
    }
}

/// A command line, with variables on top of this process's own.
pub(crate) struct Line<'a> {
    pub(crate) words: Vec<String>,
    pub(crate) env: &'a [(&'a str, &'a str)],
    pub(crate) folder: &'a Path,
}

/// The result of a command.
#[derive(Debug, Default)]
pub(crate) struct Ran {
    pub(crate) failure: Option<String>,
    /// Processor time of the command and of all descendants that were waited for.
    pub(crate) processor: Duration,
    pub(crate) tests: Tests,
    /// The output about the tests that failed.
    pub(crate) failed: String,
    /// The reasons why tests did not run, one for each test.
    pub(crate) skipped: Vec<String>,
    /// The programs of tests that it ran, with their processor time.
    pub(crate) programs: Vec<(String, Duration)>,
}

/// The line that `cargo xtask unit` prints before the output of a program.
pub(crate) fn program_line(name: &str, time: Duration, processor: Duration) -> String {
    format!(
        "--- {name} in {:.1} s, {:.1} s of the processor",
        time.as_secs_f32(),
        processor.as_secs_f32()
    )
}

fn program_in(line: &str) -> Option<(String, Duration)> {
    let (name, times) = line.trim_end().strip_prefix("--- ")?.split_once(" in ")?;
    let seconds = times.split_once(" s, ")?.1.strip_suffix(" s of the processor")?;
    Some((name.to_owned(), Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?))
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

    /// Reads pytest's last line, `1 failed, 20 passed, 1 warning in 3.75s`. A test that an error of its own
    /// prevented from running has failed; a skipped test has not passed.
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

    /// Reads a row of the suite's table: the level, then the numbers of tests that pass, are not supported,
    /// fail as expected, may fail, fail, and pass although a failure was expected. A test that may fail proves
    /// nothing, so it counts as one that did not run.
    fn of_level(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        words.next().filter(|level| matches!(*level, "L0" | "L1" | "L2" | "L3"))?;
        let counts: Vec<u64> = words.map(|word| word.parse().ok()).collect::<Option<_>>()?;
        let [pass, _, expected_fail, _, fail, unexpected_pass] = counts[..] else { return None };
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

/// Finds the output about the tests that failed, so that it can be shown again at the end of a long log,
/// where a reader looks first.
#[derive(Default)]
struct Failures {
    inside: bool,
    of_suite: bool,
    kept: usize,
}

impl Failures {
    /// The most bytes that are stored of one command's output.
    const MOST: usize = 16 << 10;

    /// Whether a line belongs to a failure: the part from `failures:` to `test result:` of `cargo test`, a
    /// case of `tokenyard conformance` with its indented details, or a line of pytest's summary.
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

/// Finds tests that did not run: `test NAME ... ignored` of `cargo test`, `SKIPPED [1] FILE: WHY` of pytest,
/// and `not supported: NAME` of `tokenyard conformance`, with the reason in the next line.
#[derive(Default)]
struct Skips {
    of_suite: bool,
}

impl Skips {
    fn in_line(&mut self, line: &str) -> Vec<String> {
        let line = line.trim_end();
        if std::mem::take(&mut self.of_suite) {
            return vec![format!("not supported: {}", line.trim())];
        }
        self.of_suite = line.starts_with("not supported: ");
        if let Some((name, why)) = line
            .strip_prefix("test ")
            .and_then(|test| test.split_once(" ... "))
            .and_then(|(name, end)| Some((name, end.strip_prefix("ignored")?)))
        {
            let why = why.trim_start_matches(", ");
            return vec![if why.is_empty() { name.to_owned() } else { format!("{name}: {why}") }];
        }
        let of_pytest = line.strip_prefix("SKIPPED [").and_then(|rest| rest.split_once("] "));
        let Some((count, why)) = of_pytest else { return Vec::new() };
        vec![why.to_owned(); count.parse().unwrap_or(1)]
    }
}

/// The content of a line of output.
struct Printed {
    text: String,
    tests: Tests,
    failed: bool,
    skipped: Vec<String>,
}

/// Runs a command to its end, or until it hangs; then kills it and all its descendants.
pub(crate) fn run(line: &Line<'_>, limits: HangLimits, output: &mut Output<'_>) -> Ran {
    let text = line.words.join(" ");
    output.line(&format!("$ {text}\n"));
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
    let lines = read_lines(&mut child);
    let mut ran = Ran::default();
    let ended = wait(&mut child, limits, || {
        let mut any = false;
        while let Ok(printed) = lines.try_recv() {
            ran.take(printed, output);
            any = true;
        }
        any
    });
    ran.failure = match ended {
        Ok((hangs, used)) => {
            ran.processor = used.rusage.utime + used.rusage.stime;
            match hangs {
                Some(hangs) => Some(format!("`{text}` {hangs}")),
                None if used.status.success() => None,
                None => Some(format!("`{text}` ended with {}", used.status)),
            }
        }
        Err(error) => Some(format!("`{text}` could not be waited for: {error}")),
    };
    let end = Instant::now() + OUTPUT_GRACE;
    while let Ok(line) = lines.recv_timeout(end.saturating_duration_since(Instant::now())) {
        ran.take(line, output);
    }
    ran
}

impl Ran {
    fn take(&mut self, printed: Printed, output: &mut Output<'_>) {
        output.line(&printed.text);
        self.tests.add(printed.tests);
        if printed.failed {
            self.failed.push_str(&printed.text);
        }
        self.skipped.extend(printed.skipped);
        self.programs.extend(program_in(&printed.text));
    }
}

fn failed(failure: String) -> Ran {
    Ran { failure: Some(failure), ..Ran::default() }
}

/// Reads the lines of the output. The receiver disconnects at its end.
fn read_lines(child: &mut Child) -> Receiver<Printed> {
    let (lines_in, lines) = mpsc::channel();
    if let Some(stdout) = child.stdout.take() {
        thread::spawn(move || {
            let mut stdout = BufReader::new(stdout);
            let mut line = Vec::new();
            let (mut failures, mut skips) = (Failures::default(), Skips::default());
            while stdout.read_until(b'\n', &mut line).is_ok_and(|bytes| bytes > 0) {
                let text = String::from_utf8_lossy(&line).into_owned();
                let (tests, failed) = (Tests::in_line(&text), failures.keeps(&text));
                let skipped = skips.in_line(&text);
                if lines_in.send(Printed { text, tests, failed, skipped }).is_err() {
                    return;
                }
                line.clear();
            }
        });
    }
    lines
}

/// The time between two measurements of the processor time of a command and its descendants.
const LOOK: Duration = Duration::from_secs(2);

/// Waits for a command. Returns in which way it hung, if it did, and how it ended with what it used; a command
/// that hung was killed. `has_output` returns whether there was output since its last call.
fn wait(
    child: &mut Child,
    limits: HangLimits,
    mut has_output: impl FnMut() -> bool,
) -> io::Result<(Option<String>, ResUse)> {
    let id = WaitId::Pid(Pid::from_child(child));
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let (mut looked, mut moved) = (Instant::now(), Instant::now());
    // The time of a process that has ended since the last measurement is no longer visible, so this sum
    // only grows.
    let (mut used, mut last) = (Duration::ZERO, HashMap::new());
    loop {
        // It is not reaped here: the call that reaps says what it used.
        if waitid(id.clone(), look)?.is_some() {
            return Ok((None, child.wait4()?));
        }
        if has_output() {
            moved = Instant::now();
        }
        if looked.elapsed() > LOOK.min(limits.idle / 4) {
            looked = Instant::now();
            let now = processor_times(child.id().cast_signed());
            let grown = now
                .iter()
                .map(|(pid, time)| time.saturating_sub(last.get(pid).copied().unwrap_or_default()));
            let grown: Duration = grown.sum();
            (used, last) = (used + grown, now);
            // A process that only polls uses a little.
            if grown > LOOK / 100 {
                moved = looked;
            }
        }
        let hangs = if moved.elapsed() > limits.idle {
            format!("did nothing for {} s", limits.idle.as_secs_f32())
        } else if used > limits.processor {
            format!("used {} s of the processor", limits.processor.as_secs_f32())
        } else {
            thread::sleep(Duration::from_millis(20));
            continue;
        };
        kill_family(child);
        return Ok((Some(hangs), child.wait4()?));
    }
}

/// Processor time of a process and of each of its descendants.
fn processor_times(root: i32) -> HashMap<i32, Duration> {
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    let of = |pid: &i32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // `pid (name) state parent ...`; fields 14 and 15 are ticks as user and as system.
        let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(11);
        let mut ticks = || fields.next()?.parse::<u64>().ok();
        let ticks = ticks()? + ticks()?;
        Some(Duration::from_millis(ticks * 1000 / per_second))
    };
    family(root).into_iter().filter_map(|pid| Some((pid, of(&pid)?))).collect()
}

/// Kills a command and all its descendants.
pub(crate) fn kill(child: &mut Child) -> io::Result<()> {
    kill_family(child);
    child.wait()?;
    Ok(())
}

fn kill_family(child: &Child) {
    for pid in family(child.id().cast_signed()) {
        // The kill fails only for a process that has ended by itself.
        let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
    }
}

/// A process and all its descendants. The command stays in this process's group, so that Ctrl-C reaches it.
/// The command therefore has no group of its own that one call could kill.
fn family(root: i32) -> Vec<i32> {
    let pairs: Vec<(i32, i32)> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let pid = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
            // The file has `pid (name) state parent ...`, where the name may hold any characters.
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

    fn shell(script: &str, idle: Duration) -> Ran {
        let words = ["sh", "-c", script].map(String::from).to_vec();
        let line = Line { words, env: &[("COLOUR", "green")], folder: Path::new("/") };
        run(&line, HangLimits { idle, processor: LONG }, &mut Output::Shown)
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
            "echo 'level     pass  not supported  expected fail  may fail    FAIL  UNEXPECTED PASS'
             echo 'L0          21              4              1         9       2                3'
             echo 'L1         100              0              0         0       0                0'
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
    fn a_command_that_prints_or_computes_does_not_hang() {
        let idle = Duration::from_secs(4);
        let ran = shell("for i in 1 2 3 4 5 6; do sleep 1; echo $i; done", idle);
        assert_eq!(ran.failure, None);
        let ran =
            shell("end=$(($(date +%s) + 2)); while [ $(date +%s) -lt $end ]; do :; done", LONG);
        assert_eq!(ran.failure, None);
    }

    #[test]
    fn a_command_that_computes_for_ever_is_ended_by_what_it_used() {
        let words = ["sh", "-c", "while :; do :; done"].map(String::from).to_vec();
        let line = Line { words, env: &[], folder: Path::new("/") };
        let limits = HangLimits { idle: LONG, processor: Duration::from_millis(200) };
        let failure = run(&line, limits, &mut Output::Shown).failure.unwrap();
        assert!(failure.ends_with("used 0.2 s of the processor"), "{failure}");
    }

    #[test]
    fn the_programs_of_a_command_are_found_in_its_output() {
        let line = program_line("a/b", Duration::from_secs(3), Duration::from_millis(1500));
        let ran = shell(&format!("echo '{line}'; echo '--- another line in words'"), LONG);
        assert_eq!(ran.programs, [("a/b".to_owned(), Duration::from_millis(1500))]);
    }

    #[test]
    fn the_processor_time_of_a_command_has_that_of_its_children() {
        let busy = "end=$(($(date +%s) + 2)); while [ $(date +%s) -lt $end ]; do :; done";
        let ran = shell(&format!("sh -c '{busy}'; true"), LONG);
        assert!(ran.processor > Duration::from_millis(50), "{:?}", ran.processor);
        assert!(shell("sleep 1", LONG).processor < Duration::from_millis(500));
    }

    #[test]
    fn tests_that_did_not_run_are_listed_with_the_reason() {
        let ran = shell(
            "echo 'test a::b ... ignored, needs a GPU'; echo 'test c ... ignored'; echo 'test d ... ok'
             echo 'SKIPPED [2] python/tests/test_x.py:3: no device'
             printf 'not supported: l1/a (2 ranks)\n    no streams\nlevel   pass\n'",
            LONG,
        );
        let gpu = "python/tests/test_x.py:3: no device";
        let expected = ["a::b: needs a GPU", "c", gpu, gpu, "not supported: no streams"];
        assert_eq!(ran.skipped, expected);
        let mut text = String::new();
        let words = ["echo", "kept"].map(String::from).to_vec();
        let line = Line { words, env: &[], folder: Path::new("/") };
        run(&line, HangLimits { idle: LONG, processor: LONG }, &mut Output::Kept(&mut text));
        assert_eq!(text, "$ echo kept\nkept\n");
    }

    #[test]
    fn a_failure_names_the_command_and_its_status() {
        let failure = shell("[ $COLOUR = green ] && [ $PWD = / ] && exit 3", LONG).failure.unwrap();
        assert!(failure.contains("exit 3` ended with exit status: 3"), "{failure}");
        let words = vec!["/no/such/program".to_string()];
        let line = Line { words, env: &[], folder: Path::new("/") };
        let limits = HangLimits { idle: LONG, processor: LONG };
        let failure = run(&line, limits, &mut Output::Shown).failure.unwrap();
        assert!(failure.starts_with("`/no/such/program` could not be started"), "{failure}");
    }

    #[test]
    fn a_command_that_does_nothing_is_killed_with_all_that_it_started() {
        let folder = tempfile::tempdir().unwrap();
        let script = format!(
            "sh -c 'sleep 60 & echo $! > {0}/grandchild; wait' & echo $! > {0}/child; wait",
            folder.path().display()
        );
        let start = Instant::now();
        let failure = shell(&script, Duration::from_millis(500)).failure.unwrap();
        assert!(failure.ends_with("did nothing for 0.5 s"), "{failure}");
        assert!(start.elapsed() < LONG);
        for name in ["child", "grandchild"] {
            let pid = fs::read_to_string(folder.path().join(name)).unwrap();
            let stat = format!("/proc/{}/stat", pid.trim());
            // Another process is its parent now, so it may stay a zombie for a while.
            let dead = || fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z "));
            while !dead() {
                assert!(start.elapsed() < LONG, "{name} {pid} lives");
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
}
