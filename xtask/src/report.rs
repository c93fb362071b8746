//! Runs a step and reports its result.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{env, iter};

use crate::exec::{self, HangLimits, Line, Output, Tests};
use crate::needs;
use crate::programs::WORKSPACE;
use crate::shares::Used;
use crate::step::{Cmd, Lane, Step};

/// The limits after which one command of a step counts as hanging. The suite's own limits are far below:
/// its runner ends and names a test that hangs.
pub(crate) const LIMITS: HangLimits =
    HangLimits { idle: Duration::from_secs(15 * 60), processor: Duration::from_secs(3 * 3600) };

/// The argument for a run that leaves nothing out.
pub(crate) const ALL: &str = "--all";
/// Tests find this variable in such a run.
pub(crate) const ALL_VARIABLE: &str = "TOKENYARD_TEST_ALL";

/// The result of one step.
pub(crate) struct StepResult {
    name: &'static str,
    failure: Option<String>,
    tests: Tests,
    /// The output of its commands about the tests that failed.
    failed: String,
    /// The reasons why its tests did not run, one for each test.
    skipped: Vec<String>,
    time: Duration,
    /// Processor time of its commands.
    processor: Duration,
    /// Its programs of tests, with theirs.
    programs: Vec<(String, Duration)>,
}

impl StepResult {
    /// Runs a step after those in `earlier`.
    pub(crate) fn run(
        step: &Step,
        root: &Path,
        earlier: &[StepResult],
        output: &mut Output<'_>,
    ) -> Self {
        let start = Instant::now();
        let mut tests = Tests::default();
        let mut failed = String::new();
        let mut skipped = Vec::new();
        let mut processor = Duration::ZERO;
        let mut programs = Vec::new();
        let failure = obstacle(step, root, earlier).or_else(|| {
            step.commands.iter().find_map(|command| {
                let ran = exec::run(&line(step, command, root), LIMITS, output);
                processor += ran.processor;
                programs.extend(ran.programs);
                tests.add(ran.tests);
                failed.push_str(&ran.failed);
                skipped.extend(ran.skipped);
                ran.failure
            })
        });
        // A step counts as a test itself if it has no tests inside, or if it failed outside of them.
        match &failure {
            None if tests == Tests::default() => tests.passed = 1,
            Some(_) if tests.failed == 0 => tests.failed = 1,
            _ => {}
        }
        Self {
            name: step.name,
            failure,
            tests,
            failed,
            skipped,
            time: start.elapsed(),
            processor,
            programs,
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Name and result alone, by which later steps are judged.
    pub(crate) fn verdict(&self) -> Self {
        let Self { failure, tests, time, processor, .. } = self;
        let (failed, skipped, programs) = (String::new(), Vec::new(), Vec::new());
        let failure = failure.clone();
        Self {
            name: self.name,
            failure,
            tests: *tests,
            failed,
            skipped,
            time: *time,
            processor: *processor,
            programs,
        }
    }

    pub(crate) fn passed(&self) -> bool {
        self.failure.is_none() && self.tests.failed == 0
    }

    pub(crate) fn summary(&self) -> String {
        let result = if self.passed() { "pass" } else { "FAIL" };
        let why = self.failure.as_ref().map(|why| format!(", {why}")).unwrap_or_default();
        format!(
            "{result} in {:.1} s, {:.1} s of the processor{why}",
            self.time.as_secs_f32(),
            self.processor.as_secs_f32()
        )
    }
}

/// The reason why a step cannot run: a failed step that it builds on, or a missing need.
fn obstacle(step: &Step, root: &Path, earlier: &[StepResult]) -> Option<String> {
    let broken =
        earlier.iter().find(|report| !report.passed() && step.after.contains(&report.name));
    if let Some(report) = broken {
        return Some(format!("it builds on step `{}`, which failed", report.name));
    }
    needs::require(step.needs, root).err().map(|missing| missing.to_string())
}

fn line<'a>(step: &Step, command: &Cmd, root: &'a Path) -> Line<'a> {
    let target = target_folder(root).display().to_string();
    let xtask = env::current_exe().unwrap_or_else(|_| "cargo-xtask".into()).display().to_string();
    let words = command.line.split_whitespace().flat_map(|word| match word {
        "{workspace}" => WORKSPACE.map(str::to_owned).to_vec(),
        _ => vec![word.replace("{target}", &target).replace("{xtask}", &xtask)],
    });
    // The tests that run at the same time are time-sensitive.
    let nice = if step.lane == Lane::Beside { "nice -n 19" } else { "" };
    let mut before: Vec<String> = nice.split_whitespace().map(str::to_owned).collect();
    if env::args().any(|word| word == ALL) {
        before.extend(["env".to_owned(), format!("{ALL_VARIABLE}=1")]);
    }
    let words = before.into_iter().chain(words);
    Line { words: words.collect(), env: command.env, folder: root }
}

/// This program lies in `<target>/<profile>/`, wherever cargo builds.
pub(crate) fn target_folder(root: &Path) -> PathBuf {
    let program = env::current_exe().ok();
    let folder = program.as_deref().and_then(Path::parent).and_then(Path::parent);
    folder.map_or_else(|| root.join("target"), Path::to_path_buf)
}

/// The output of the steps about the tests that failed, once more.
pub(crate) fn failed(reports: &[StepResult]) -> String {
    let shown = reports.iter().filter(|report| !report.failed.is_empty());
    shown.map(|report| format!("\n=== failed in {}:\n{}", report.name, report.failed)).collect()
}

/// The reasons why tests did not run, each once per step, with the number of its tests.
fn skipped(reports: &[StepResult]) -> (String, usize) {
    let (mut text, mut total) = (String::new(), 0);
    for report in reports {
        let mut reasons: Vec<(&str, usize)> = Vec::new();
        for why in &report.skipped {
            match reasons.iter_mut().find(|(reason, _)| reason == why) {
                Some((_, count)) => *count += 1,
                None => reasons.push((why, 1)),
            }
        }
        for (why, count) in reasons {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "skipped in {}: {count} x {why}", report.name);
            total += count;
        }
    }
    (text, total)
}

/// The processor time of all steps and of their programs of tests, by name; and of all steps together.
pub(crate) fn used(reports: &[StepResult]) -> (Used, Duration) {
    let of = |report: &StepResult| {
        let programs = report.programs.iter();
        let programs =
            programs.map(|(program, time)| (format!("{} {program}", report.name), *time));
        iter::once((report.name.to_owned(), report.processor)).chain(programs).collect::<Vec<_>>()
    };
    (reports.iter().flat_map(of).collect(), reports.iter().map(|report| report.processor).sum())
}

/// One row per step, then the skipped tests, then the line `N passed, M failed, K skipped`, which counts
/// tests, and each line of `grown` as one that failed. Steps run at the same time, so the sum of their times exceeds
/// `took`.
pub(crate) fn table(reports: &[StepResult], took: Duration, grown: &[String]) -> String {
    let width = reports.iter().map(|report| report.name.len()).max().unwrap_or(0).max(4);
    let mut text = format!("{:width$}  result  passed  failed      time  processor\n", "step");
    let mut total = Tests::default();
    for report in reports {
        let StepResult { name, tests, time, processor, failure, .. } = report;
        let result = if report.passed() { "pass" } else { "FAIL" };
        let why = failure.as_deref().map(|why| format!("  {why}")).unwrap_or_default();
        total.add(*tests);
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{name:width$}  {result:6}  {:6}  {:6}  {:6.1} s   {:6.1} s{why}",
            tests.passed,
            tests.failed,
            time.as_secs_f32(),
            processor.as_secs_f32(),
        );
    }
    let (list, skipped) = skipped(reports);
    let (took, all) = (took.as_secs_f32(), used(reports).1.as_secs_f32());
    let _ =
        writeln!(text, "{:width$}                          {took:6.1} s   {all:6.1} s\n", "all");
    text.push_str(&list);
    grown.iter().for_each(|line| {
        let _ = writeln!(text, "FAIL: {line}");
    });
    let (passed, failed) = (total.passed, total.failed + grown.len() as u64);
    let _ = writeln!(text, "{passed} passed, {failed} failed, {skipped} skipped");
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::needs::Need;
    use crate::step::Quick;

    const GOOD: Cmd = Cmd { env: &[], line: "true" };
    const BAD: Cmd = Cmd { env: &[], line: "false" };
    const TWO_TESTS: Cmd = Cmd { env: &[], line: "echo test result: ok. 2 passed; 0 failed" };
    const ONE_SKIPPED: Cmd = Cmd { env: &[], line: "echo test a ... ignored, no GPU" };
    const ONE_BROKEN: Cmd = Cmd { env: &[], line: "echo test result: FAILED. 2 passed; 1 failed" };

    fn run(step: &Step, earlier: &[StepResult]) -> StepResult {
        StepResult::run(step, Path::new("/"), earlier, &mut Output::Shown)
    }

    fn step(name: &'static str, commands: &'static [Cmd]) -> Step {
        Step {
            name,
            about: "about",
            after: &[],
            needs: &[],
            lane: Lane::Beside,
            quick: Quick::No,
            commands,
        }
    }

    const TOOK: Duration = Duration::from_millis(2500);

    #[test]
    fn the_table_counts_tests_and_a_step_without_tests_as_one() {
        let mut reports = vec![
            run(&step("plain", &[GOOD]), &[]),
            run(&step("tests", &[TWO_TESTS, GOOD, TWO_TESTS]), &[]),
            run(&step("broken-tests", &[ONE_BROKEN, BAD, GOOD]), &[]),
            run(&step("outside", &[TWO_TESTS, BAD, TWO_TESTS]), &[]),
            run(&step("skips", &[ONE_SKIPPED, TWO_TESTS, ONE_SKIPPED]), &[]),
        ];
        for report in &mut reports {
            report.time = Duration::from_millis(1500);
            report.processor = Duration::from_millis(500);
        }
        let expected = "\
step          result  passed  failed      time  processor
plain         pass         1       0     1.5 s      0.5 s
tests         pass         4       0     1.5 s      0.5 s
broken-tests  FAIL         2       1     1.5 s      0.5 s  `nice -n 19 false` ended with exit status: 1
outside       FAIL         2       1     1.5 s      0.5 s  `nice -n 19 false` ended with exit status: 1
skips         pass         2       0     1.5 s      0.5 s
all                                      2.5 s      2.5 s

skipped in skips: 2 x a: no GPU
FAIL: tests: it grew
11 passed, 3 failed, 2 skipped
";
        assert_eq!(table(&reports, TOOK, &["tests: it grew".to_owned()]), expected);
    }

    #[test]
    fn what_failed_is_printed_again_under_the_name_of_its_step() {
        const FAIL: Cmd = Cmd { env: &[], line: "echo FAIL: l1/a" };
        let reports = [run(&step("good", &[GOOD]), &[]), run(&step("suite", &[FAIL]), &[])];
        assert_eq!(failed(&reports), "\n=== failed in suite:\nFAIL: l1/a\n");
    }

    #[test]
    fn failed_tests_fail_the_step_whatever_the_command_says() {
        assert!(!run(&step("liar", &[ONE_BROKEN]), &[]).passed());
    }

    #[test]
    fn a_missing_need_fails_the_step_with_the_fix() {
        const NEEDS: &[Need] = &[Need::File { path: "no/such/file", fix: "write it" }];
        let report = run(&Step { needs: NEEDS, ..step("needy", &[GOOD]) }, &[]);
        assert_eq!(report.failure.as_deref(), Some("no/such/file not found: write it"));
        assert!(table(&[report], TOOK, &[]).ends_with("\n0 passed, 1 failed, 0 skipped\n"));
    }

    #[test]
    fn a_step_fails_if_one_it_builds_on_failed() {
        let broken = run(&step("first", &[BAD]), &[]);
        let report = run(&Step { after: &["first"], ..step("second", &[GOOD]) }, &[broken]);
        let expected = "it builds on step `first`, which failed";
        assert_eq!(report.failure.as_deref(), Some(expected));
    }
}
