//! Starts the ranks, reads their messages, and reports the result.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use tokenyard_core::config::{Config, OnFailure, WorldConfig};
use tokenyard_core::error::words;
use tokenyard_launch::interrupt::{self, Interrupted};
use tokenyard_launch::{Event, Job, Running, Stderr};

use super::diagnosis::{self, RankEnd};
use super::message::{Cause, Message, Opened, RankResult};
use super::plan::Plan;
use super::summary::Summary;
use super::{RunArgs, Verdict, judge, results};
use crate::output::{LOG_VARIABLE, People};
use crate::{progress, signals, writable};

/// The most ranks on one machine. A file may contain any number, and a wrong one must not overload
/// the machine.
const MAX_PROCESSES: usize = 1024;
/// The interval at which the progress is checked.
const TICK: Duration = Duration::from_millis(100);
/// How long ranks may take to end after the deadline that they observe themselves.
const GRACE: Duration = Duration::from_secs(1);
/// Runs shorter than this show no progress.
const SHOW_AFTER: Duration = Duration::from_secs(1);

pub(crate) fn main(args: &RunArgs) -> Result<Verdict> {
    args.start.check("run")?;
    let config = Config::load(&args.config)?;
    let plan = Plan::new(args, None)?;
    ensure!(
        plan.case.ranks <= MAX_PROCESSES,
        "start ranks: found {} ranks to start; expected at most {MAX_PROCESSES} on one machine",
        plan.case.ranks
    );
    config.check_ranks(plan.case.ranks as u32)?;
    plan.check_memory(plan.case.ranks)?;
    check_files(args, &config)?;
    judge::refuse_wrong(args, &config, plan.case.ranks as u32)?;
    let parts = args.output.as_deref().map(parts_folder).transpose()?;
    let job = Job {
        program: std::env::current_exe().context("find this program")?,
        args: rank_arguments(parts.as_ref()),
        ranks: plan.case.ranks as u32,
        env: Vec::new(),
        // A requested log is shown; otherwise the messages of the ranks contain all that is needed, warnings too.
        stderr: match std::env::var_os(LOG_VARIABLE) {
            Some(_) => Stderr::Inherit,
            None => Stderr::Capture,
        },
    };
    let mut summary = Summary::new(args, &config, &plan.case);
    summary.print_head();
    let mut heard = Heard::new(plan.case.ranks, args.steps, &config.world);
    interrupt::check()?;
    heard.listen(job.start()?).map_err(|interrupted| interrupted.with_done(heard.done()))?;
    summary.opened = heard.opened;
    summary.ranks = heard.results.into_iter().flatten().collect();
    summary.lost = diagnosis::mask(&mut heard.ends, &summary.ranks);
    summary.findings = diagnosis::findings(&heard.ends);
    let verdict = diagnosis::verdict(summary.findings.iter().map(|finding| finding.cause));
    if let (Verdict::Right, Some(folder), Some(output)) = (verdict, &parts, &args.output) {
        let ranks: Vec<u32> = summary.ranks.iter().map(|result| result.rank).collect();
        results::join(folder.path(), &plan.case, &ranks, output)?;
    }
    summary.print(args.json)?;
    Ok(verdict)
}

/// Refuses files that could not be written at the end, before anything starts.
fn check_files(args: &RunArgs, config: &Config) -> Result<()> {
    writable::check_reports(config)?;
    let Some(output) = &args.output else { return Ok(()) };
    args.read_files().writes("--output", output)
}

/// A temporary folder beside the output, where there is room for it.
fn parts_folder(output: &Path) -> Result<TempDir> {
    let parent = match output.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    tempfile::Builder::new()
        .prefix(".tokenyard-")
        .tempdir_in(parent)
        .with_context(|| format!("--output: cannot write in {}", parent.display()))
}

/// The arguments of this process, and those of a rank.
fn rank_arguments(parts: Option<&TempDir>) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["run".into(), "--as-rank".into()];
    if let Some(folder) = parts {
        arguments.extend(["--parts".into(), folder.path().into()]);
    }
    // After `--` options would count as names, so they come first.
    arguments.extend(std::env::args_os().skip_while(|word| word != "run").skip(1));
    arguments
}

/// The progress of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Starting,
    /// It waits for the others, as long as `late_ms` allows.
    Joining,
    Joined,
}

/// The messages of the ranks so far.
struct Heard {
    opened: Option<Opened>,
    results: Vec<Option<RankResult>>,
    ends: Vec<RankEnd>,
    stages: Vec<Stage>,
    steps: u32,
    /// Steps that rank 0 has done.
    done: u32,
    /// Warnings that were shown.
    warned: BTreeSet<String>,
    deadline: Duration,
    /// Whether ranks go on without a lost one.
    masks: bool,
    /// The time at which ranks that still run are killed. It is set once a rank has ended whose end
    /// makes the others end.
    give_up: Option<Instant>,
}

impl Heard {
    fn new(ranks: usize, steps: u32, world: &WorldConfig) -> Self {
        Self {
            opened: None,
            results: vec![None; ranks],
            ends: vec![RankEnd::default(); ranks],
            stages: vec![Stage::Starting; ranks],
            steps,
            done: 0,
            warned: BTreeSet::new(),
            deadline: world.deadline,
            masks: world.on_failure == OnFailure::Mask,
            give_up: None,
        }
    }

    /// Reads messages until all ranks have ended, by themselves or not.
    ///
    /// While all of them run there is no limit: each rank observes the deadlines of its own waits
    /// (INV-6). Once one rank has ended, the others must end too, unless they go on without it.
    ///
    /// # Errors
    /// A signal is to end this process. All ranks have ended then.
    fn listen(&mut self, mut running: Running) -> Result<(), Interrupted> {
        let start = Instant::now();
        let mut bar = None;
        let mut asked = signals::hand_on();
        while !running.all_exited() && self.give_up.is_none_or(|limit| Instant::now() < limit) {
            if asked != signals::asked() {
                asked = signals::asked();
                self.hand_on(&running);
            }
            let Some(event) = running.wait_event(TICK)? else { continue };
            if let Some(done) = self.take(event) {
                self.done = done;
                if start.elapsed() > SHOW_AFTER {
                    let bar = bar.get_or_insert_with(|| progress::bar(u64::from(self.steps)));
                    bar.set_message("steps");
                    bar.set_position(u64::from(done));
                }
            }
        }
        // Ranks get the terminal's signals too; an end by such a signal is no fault of a rank.
        interrupt::check()?;
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
        let absent = self.never_joins();
        for outcome in running.wait_all(Duration::ZERO) {
            let rank = outcome.rank;
            for line in outcome.lines {
                self.take(Event::Line { rank, line });
            }
            let end = &mut self.ends[rank as usize];
            end.exit = outcome.exit;
            end.timed_out = outcome.timed_out;
            end.tail = outcome.stderr_tail;
            end.waited_for = absent.filter(|_| outcome.timed_out);
        }
        for (end, result) in self.ends.iter_mut().zip(&self.results) {
            end.has_result = result.is_some();
        }
        Ok(())
    }

    /// The progress of the ranks, in words.
    fn done(&self) -> String {
        let Self { done, steps, .. } = self;
        format!("{done} of {steps} steps were done, and all ranks have ended")
    }

    /// Passes the request for reports on to the ranks. A rank that has not joined may not be able
    /// to answer yet.
    fn hand_on(&self, running: &Running) {
        let say = |line: &str| People::errors().say(format_args!("tokenyard: {line}"));
        let ready = (0..).zip(&self.stages).filter(|(_, stage)| **stage != Stage::Starting);
        let ready: Vec<u32> = ready.map(|(rank, _)| rank).collect();
        match ready.as_slice() {
            [] => say("SIGUSR1: no rank has come far enough to answer; ask again"),
            some => say(&format!("SIGUSR1 is handed on to {}", words::ranks(some))),
        }
        for rank in ready {
            if let Err(error) = running.ask(rank) {
                say(&format!("rank {rank} gives no report: {error}"));
            }
        }
    }

    /// Notes an event; returns the steps that rank 0 has done, if the event reports them.
    fn take(&mut self, event: Event) -> Option<u32> {
        match event {
            Event::Exited { rank, status } => {
                self.ends[rank as usize].exit = Some(status);
                if status.success() || self.ends_all(rank) {
                    self.limit(self.deadline + GRACE);
                }
            }
            Event::Line { rank, line } => match serde_json::from_str(&line) {
                Ok(Message::Joining) => self.stages[rank as usize] = Stage::Joining,
                Ok(Message::Joined) => self.stages[rank as usize] = Stage::Joined,
                Ok(Message::Opened(opened)) if rank == 0 => self.opened = Some(opened),
                Ok(Message::Step { done }) if rank == 0 => return Some(done),
                Ok(Message::Done(result)) => self.results[rank as usize] = Some(result),
                Ok(Message::Failed(failure)) => {
                    self.ends[rank as usize].failure = Some(failure);
                    if self.ends_all(rank) {
                        self.limit(self.deadline + GRACE);
                    }
                }
                Ok(Message::Opened(_) | Message::Step { .. }) => {}
                // All ranks may warn of the same.
                Ok(Message::Warned { text }) => {
                    if self.warned.insert(text.clone()) {
                        People::errors().prose(format_args!("[rank {rank}] warning: {text}"));
                    }
                }
                Ok(Message::Calls { call }) => self.ends[rank as usize].call = call,
                // A plugin may print. Its lines are no messages, and must not go to standard
                // output.
                Err(_) => People::errors().say(format_args!("[rank {rank}] {line}")),
            },
        }
        if self.only_the_lost_remain() || self.never_joins().is_some() {
            self.limit(GRACE);
        }
        None
    }

    /// Whether the loss of this rank is the end of the others: all meet at rank 0.
    fn ends_all(&self, rank: u32) -> bool {
        !self.masks || rank == 0
    }

    /// A rank that ended before it joined, while all ranks that still run can only wait for it.
    fn never_joins(&self) -> Option<u32> {
        let ranks = || (0..).zip(self.ends.iter().zip(&self.stages));
        let has_ended = |end: &RankEnd| end.exit.is_some() || end.failure.is_some();
        let culprit =
            ranks().find(|(_, (end, stage))| has_ended(end) && **stage != Stage::Joined)?;
        let wait = |(_, (end, stage)): (u32, (&RankEnd, &Stage))| {
            has_ended(end) || *stage == Stage::Joining
        };
        ranks().all(wait).then_some(culprit.0)
    }

    fn limit(&mut self, from_now: Duration) {
        let limit = Instant::now() + from_now;
        self.give_up = Some(self.give_up.map_or(limit, |old| old.min(limit)));
    }

    /// Whether every rank that still runs was declared lost by another: a stopped process, which
    /// will not end by itself.
    fn only_the_lost_remain(&self) -> bool {
        let failures = || self.ends.iter().filter_map(|end| end.failure.as_ref());
        let lost = |rank: u32| {
            failures().any(|failure| failure.cause == Cause::Peer && failure.about == Some(rank))
        };
        let mut left = (0..).zip(&self.ends).filter(|(_, end)| end.exit.is_none()).peekable();
        left.peek().is_some() && left.all(|(rank, end)| end.failure.is_none() && lost(rank))
    }
}

#[cfg(test)]
mod tests {
    use tokenyard_launch::Exit;

    use super::*;

    fn heard(stages: &[Message]) -> Heard {
        read_back("stop", stages)
    }

    fn read_back(on_failure: &str, stages: &[Message]) -> Heard {
        let text = format!(
            "[world]\non_failure = \"{on_failure}\"\n[kernels]\nuse = \"cpu\"\n\
             [transport.scale_up]\nuse = \"shm\"\n"
        );
        let config = Config::parse(&text, "test").unwrap();
        let mut heard = Heard::new(stages.len(), 1, &config.world);
        for (rank, message) in (0..).zip(stages) {
            let line = serde_json::to_string(message).unwrap();
            heard.take(Event::Line { rank, line });
        }
        heard
    }

    fn dies(heard: &mut Heard, rank: u32) -> Duration {
        heard.take(Event::Exited { rank, status: Exit::Signal(9) });
        heard.give_up.unwrap().saturating_duration_since(Instant::now())
    }

    #[test]
    fn ranks_that_wait_for_one_that_never_joins_are_ended_at_once() {
        let mut heard = heard(&[Message::Joining, Message::Joining, Message::Joining]);
        assert!(dies(&mut heard, 1) <= GRACE);
        assert_eq!(heard.never_joins(), Some(1));
    }

    #[test]
    fn a_rank_that_still_starts_may_find_the_same_by_itself() {
        let mut heard = heard(&[Message::Joining, Message::Joining]);
        heard.stages[0] = Stage::Starting;
        assert!(dies(&mut heard, 1) > GRACE);
        assert_eq!(heard.never_joins(), None);
    }

    #[test]
    fn ranks_that_mask_a_loss_have_all_the_time_they_need_but_not_after_rank_0() {
        let mut heard = read_back("mask", &[Message::Joined, Message::Joined, Message::Joined]);
        heard.take(Event::Exited { rank: 1, status: Exit::Signal(9) });
        assert_eq!(heard.give_up, None);
        dies(&mut heard, 0);
        assert!(heard.give_up.is_some());
    }

    #[test]
    fn ranks_that_have_joined_find_out_by_themselves() {
        let mut heard = heard(&[Message::Joined, Message::Joined]);
        assert!(dies(&mut heard, 1) > GRACE);
        assert_eq!(heard.never_joins(), None);
    }
}
