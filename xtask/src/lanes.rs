//! Runs steps in two lanes at the same time.
//!
//! Tests of time, such as deadlines, must not be disturbed. So [`Lane::Tests`] runs one step at a time.
//! [`Lane::Beside`] has the steps that only compute (builds, lints, compilers), one at a time too and with
//! the lowest priority: it uses the processor time that the tests, which mostly wait, leave. A step may
//! build on steps of the other lane.

use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::exec::Output;
use crate::report::StepResult;
use crate::step::{Lane, Step};

/// The results so far, and a signal for the lanes that wait for them.
#[derive(Default)]
struct Board {
    reports: Mutex<Vec<StepResult>>,
    more: Condvar,
}

/// Runs all steps; the results are in the order of `selected`.
pub(crate) fn run(selected: &[&'static Step], root: &Path) -> Vec<StepResult> {
    let board = Board::default();
    std::thread::scope(|scope| {
        for lane in [Lane::Tests, Lane::Beside] {
            let board = &board;
            scope.spawn(move || {
                for step in selected.iter().filter(|step| step.lane == lane) {
                    board.run(step, selected, root);
                }
            });
        }
    });
    let mut reports = board.reports.into_inner().unwrap_or_else(PoisonError::into_inner);
    let place = |report: &StepResult| selected.iter().position(|step| step.name == report.name());
    reports.sort_by_key(place);
    reports
}

impl Board {
    fn reports(&self) -> MutexGuard<'_, Vec<StepResult>> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the steps that a step builds on, runs it, and posts its result. A step builds only on
    /// earlier steps of the table, and each lane runs in the order of the table, so no two steps wait for
    /// each other.
    fn run(&self, step: &Step, selected: &[&'static Step], root: &Path) {
        let needed = |name: &&&str| selected.iter().any(|step| step.name == **name);
        let ready = |reports: &Vec<StepResult>| {
            let done = |name: &&str| reports.iter().any(|report| report.name() == *name);
            step.after.iter().filter(needed).all(done)
        };
        let mut reports = self.reports();
        while !ready(&reports) {
            reports = self.more.wait(reports).unwrap_or_else(PoisonError::into_inner);
        }
        // The results that it is judged by exist; the lock is not held while it runs.
        let broken = reports.iter().filter(|report| step.after.contains(&report.name()));
        let earlier: Vec<StepResult> = broken.map(StepResult::verdict).collect();
        drop(reports);
        let head = format!("\n=== {}: {}\n", step.name, step.about);
        let report = match step.lane {
            Lane::Tests => {
                print!("{head}");
                StepResult::run(step, root, &earlier, &mut Output::Shown)
            }
            Lane::Beside => {
                let mut text = head;
                let report = StepResult::run(step, root, &earlier, &mut Output::Kept(&mut text));
                print!("{text}");
                report
            }
        };
        println!("=== {}: {}", step.name, report.summary());
        self.reports().push(report);
        self.more.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::{Cmd, Quick};

    const fn step(
        name: &'static str,
        lane: Lane,
        after: &'static [&'static str],
        commands: &'static [Cmd],
    ) -> Step {
        Step { name, about: "about", after, needs: &[], lane, quick: Quick::No, commands }
    }

    const GOOD: &[Cmd] = &[Cmd { env: &[], line: "true" }];
    const BAD: &[Cmd] = &[Cmd { env: &[], line: "false" }];

    static ACROSS: [Step; 4] = [
        step("build", Lane::Beside, &[], GOOD),
        step("test", Lane::Tests, &["build"], GOOD),
        step("more", Lane::Beside, &["test"], BAD),
        step("last", Lane::Tests, &["more"], GOOD),
    ];

    #[test]
    fn lanes_wait_for_each_other_and_results_keep_the_order_of_the_table() {
        let all: Vec<&'static Step> = ACROSS.iter().collect();
        let reports = run(&all, Path::new("/"));
        let found: Vec<_> = reports.iter().map(|report| (report.name(), report.passed())).collect();
        let expected = [("build", true), ("test", true), ("more", false), ("last", false)];
        assert_eq!(found, expected);
        assert!(reports[3].summary().contains("step `more`, which failed"));
    }

    #[test]
    fn a_step_that_was_not_chosen_is_not_waited_for() {
        let reports = run(&[&ACROSS[1]], Path::new("/"));
        assert!(reports[0].passed());
    }
}
