//! The launcher's side of L0 to L2.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokenyard_launch::{Event, Exit, Hosts, Job, Launcher, Running, Stderr, interrupt};

use super::Program;
use super::order::{Answer, JobSpec, TestEnd, Work};
use crate::pace::Pace;
use crate::suite::Test;

/// The time that ranks have to end by themselves after a test has failed on one of them.
const END_LIMIT: Duration = Duration::from_secs(25);
/// The lines of a rank's standard error that a report includes, from its end.
const TAIL_LINES: usize = 12;

/// How a test ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Everything held on every rank.
    Pass,
    /// A capability is missing; the text names it.
    NotSupported(String),
    /// The failure, per rank.
    Fail(String),
}

/// A test that ended.
#[derive(Clone, Debug)]
pub struct Finished {
    /// Its name.
    pub name: String,
    /// Its verdict.
    pub verdict: Verdict,
    /// The time that it took.
    pub took: Duration,
}

/// The progress of a run.
#[derive(Clone, Debug)]
pub enum RunEvent<'a> {
    /// The test of this name runs now.
    Starts(&'a str),
    /// A test has ended.
    Ended(Finished),
    /// The log of a rank has a warning; each text comes once.
    Warned {
        /// The rank.
        rank: u32,
        /// The warning.
        text: String,
    },
}

/// Runs tests, those of the smallest worlds first, and passes each start and result to `each` at once.
///
/// # Errors
/// The ranks cannot be started at all, or a signal is to end this process
/// ([`Interrupted`](tokenyard_launch::interrupt::Interrupted)).
pub fn run_in_processes(
    program: &Program,
    config: &Path,
    tests: &[Test],
    each: &mut dyn FnMut(RunEvent<'_>),
) -> Result<()> {
    let mut by_ranks: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for test in tests {
        by_ranks.entry(test.ranks).or_default().push(test.name.clone());
    }
    let mut warned = BTreeSet::new();
    for (ranks, names) in by_ranks {
        let mut rest = names.as_slice();
        while !rest.is_empty() {
            let mut world =
                Watched::start(program, config, Work::Tests(rest.to_vec()), ranks, None)?;
            // At least one test ends: a world that ends at once fails its first test.
            let done = world.watch_tests(rest, each)?;
            for (rank, text) in world.running.warnings() {
                if warned.insert(text.clone()) {
                    each(RunEvent::Warned { rank, text });
                }
            }
            rest = &rest[done..];
        }
    }
    Ok(())
}

/// One job, and its answers so far.
pub(super) struct Watched {
    pub(super) running: Running,
    pub(super) ranks: u32,
    /// The limit of one test.
    limit: Duration,
    pub(super) pace: Pace,
    /// The folder of the order, and of the ranks' temporary files.
    pub(super) folder: tempfile::TempDir,
    /// Per rank, its answer about the watched test.
    answers: BTreeMap<u32, TestEnd>,
    pub(super) exits: BTreeMap<u32, Exit>,
    /// Per rank, the slot of its transport that did not return at the rank's last report.
    stuck: BTreeMap<u32, String>,
    /// Answers of ranks that are ahead of the others.
    early: BTreeMap<(u32, String), TestEnd>,
}

impl Watched {
    pub(super) fn start(
        program: &Program,
        config: &Path,
        work: Work,
        ranks: u32,
        hosts: Option<&Hosts>,
    ) -> Result<Self> {
        interrupt::check()?;
        let folder = tempfile::tempdir().context("run tests: no temporary folder")?;
        let path = folder.path().join("order.json");
        let config = std::path::absolute(config).context("run tests")?;
        JobSpec { config, pace: program.pace, work }.write(&path)?;
        let mut args = program.arguments.clone();
        args.push(path.into_os_string());
        let job = Job {
            program: program.path.clone(),
            args,
            ranks,
            env: vec![("TMPDIR".into(), folder.path().into())],
            stderr: Stderr::Capture,
        };
        Ok(Self {
            running: match hosts {
                Some(hosts) => job.start_on(hosts, Launcher::Torchrun)?,
                None => job.start()?,
            },
            ranks,
            limit: program.pace.stretch(program.limit),
            pace: program.pace,
            folder,
            answers: BTreeMap::new(),
            exits: BTreeMap::new(),
            stuck: BTreeMap::new(),
            early: BTreeMap::new(),
        })
    }

    /// Watches the tests of the order up to the first that fails, or ends its world; returns how many
    /// ended.
    fn watch_tests(
        &mut self,
        names: &[String],
        each: &mut dyn FnMut(RunEvent<'_>),
    ) -> Result<usize> {
        for (done, name) in names.iter().enumerate() {
            let start = Instant::now();
            each(RunEvent::Starts(name));
            let verdict = self.watch_test(name, start)?;
            let over =
                matches!(verdict, Verdict::Fail(_)) || self.answers.values().any(TestEnd::is_over);
            let took = start.elapsed();
            each(RunEvent::Ended(Finished { name: name.clone(), verdict, took }));
            if over {
                return Ok(done + 1);
            }
        }
        Ok(names.len())
    }

    fn watch_test(&mut self, name: &str, start: Instant) -> Result<Verdict> {
        self.answers.clear();
        self.stuck.clear();
        for rank in 0..self.ranks {
            if let Some(answer) = self.early.remove(&(rank, name.to_owned())) {
                self.answers.insert(rank, answer);
            }
        }
        let mut limit = self.limit;
        let mut failing = false;
        while !self.is_over() && start.elapsed() < limit {
            let left = limit.saturating_sub(start.elapsed());
            if let Some(event) = self.running.wait_event(left)? {
                self.note(name, event);
            }
            if !failing && self.has_failed() {
                failing = true;
                limit = (start.elapsed() + self.pace.stretch(END_LIMIT)).min(self.limit);
            }
        }
        // Ranks share the terminal's signals; a rank that a signal ended has not failed.
        interrupt::check()?;
        Ok(self.verdict())
    }

    fn note(&mut self, name: &str, event: Event) {
        match event {
            Event::Exited { rank, status } => {
                self.exits.insert(rank, status);
            }
            Event::Line { rank, line } => match Answer::read(&line) {
                Some(Answer::Test { name: of, outcome }) if of == name => {
                    self.answers.insert(rank, outcome);
                }
                Some(Answer::Test { name: of, outcome }) => {
                    self.early.insert((rank, of), outcome);
                }
                Some(Answer::Stuck { slot }) => {
                    self.note_stuck(rank, slot);
                }
                _ => {}
            },
        }
    }

    fn is_over(&self) -> bool {
        (0..self.ranks)
            .all(|rank| self.answers.contains_key(&rank) || self.exits.contains_key(&rank))
    }

    fn has_failed(&self) -> bool {
        self.answers.values().any(|answer| matches!(answer, TestEnd::Fail(_)))
            || self.exits.keys().any(|rank| !self.answers.contains_key(rank))
    }

    fn verdict(&self) -> Verdict {
        let mut failures = Vec::new();
        let mut not_supported = None;
        for rank in 0..self.ranks {
            match self.answers.get(&rank) {
                Some(TestEnd::Pass | TestEnd::PassAndOver) => {}
                Some(TestEnd::NotSupported(why)) => not_supported = Some(why.clone()),
                Some(TestEnd::Fail(why)) => failures.push(format!("rank {rank}: {why}")),
                None => failures.push(format!("rank {rank}: {}", self.silence(rank))),
            }
        }
        match (failures.is_empty(), not_supported) {
            (false, _) => Verdict::Fail(failures.join("\n")),
            (true, Some(why)) => Verdict::NotSupported(why),
            (true, None) => Verdict::Pass,
        }
    }

    pub(super) fn note_stuck(&mut self, rank: u32, slot: Option<String>) {
        match slot {
            Some(slot) => self.stuck.insert(rank, slot),
            None => self.stuck.remove(&rank),
        };
    }

    /// The call of the transport that a rank hangs in, if it does.
    pub(super) fn hangs_in(&self, rank: u32) -> Option<String> {
        let slot = self.stuck.get(&rank)?;
        Some(format!("hangs in slot `{slot}` of the transport (INV-6)"))
    }

    /// The reason why a rank did not answer.
    fn silence(&self, rank: u32) -> String {
        let ended = match (self.exits.get(&rank), self.hangs_in(rank)) {
            (Some(exit), _) => format!("ended ({exit}) without a result"),
            (None, Some(hangs)) => format!("{hangs}: no result in time"),
            (None, None) => "hangs: no result in time".to_owned(),
        };
        with_tail(ended, &self.running.stderr_tail(rank))
    }
}

pub(super) fn with_tail(what: String, stderr: &str) -> String {
    let lines: Vec<&str> = stderr.lines().collect();
    let tail = &lines[lines.len().saturating_sub(TAIL_LINES)..];
    if tail.is_empty() { what } else { format!("{what}; stderr ends:\n  {}", tail.join("\n  ")) }
}
