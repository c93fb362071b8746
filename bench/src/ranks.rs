//! Runs ranks as processes: sends them jobs and collects their figures.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokenyard_core::bootstrap::{Identity, Secret, World, WorldOptions, environment, with_call};
use tokenyard_core::config::{Config, WorldConfig};
use tokenyard_launch::{Event, Exit, Hosts, Launcher, Running, Stderr, interrupt};

use crate::job::{Job, Output, Plan, Scenario};
use crate::report::BenchReport;
use crate::{exchange, gpu, link, ops, proxy, scaling, steady};

/// The longest pause between the ends of the other ranks, after one has failed.
const OTHERS_END: Duration = Duration::from_millis(500);
/// The longest time without output before a rank counts as failed. It is longer than any deadline
/// inside a rank, as errors of the rank have better messages.
const SILENCE: Duration = Duration::from_secs(120);

/// How to start this program as a rank.
#[derive(Clone, Debug)]
pub struct Start {
    /// The program.
    pub program: PathBuf,
    /// Its arguments; the job follows as the last one, in JSON.
    pub args: Vec<OsString>,
    /// The config, which every rank reads for itself.
    pub config: PathBuf,
    /// The place where the ranks run.
    pub place: RunOn,
}

/// The place where ranks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunOn {
    /// All on this machine.
    Machine,
    /// Each on a host of its own. The hosts are stand-ins: network namespaces of this machine.
    Hosts,
}

/// The state of the run, for a progress bar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// A description for people.
    pub what: String,
    /// Steps done.
    pub done: u64,
    /// Steps in all.
    pub all: u64,
}

/// Measures. Blocks until everything is done.
///
/// # Errors
/// Sizes are impossible, a rank failed (with its message), or the exchange itself failed.
pub fn run(plan: &Plan, start: &Start, progress: &mut dyn FnMut(Progress)) -> Result<BenchReport> {
    plan.check()?;
    let config = Config::load(&start.config)?;
    let mut report = BenchReport::new(&config);
    let mut group = |ranks: u32, what: &str, job: Job| {
        let what = format!("{what}, {ranks} ranks");
        let mut tell = |done, all| progress(Progress { what: what.clone(), done, all });
        group(start, ranks, &job, &mut tell).with_context(|| format!("measure {what}"))
    };
    for scenario in &plan.scenarios {
        match scenario {
            Scenario::Exchange => {
                for ranks in plan.ranks.iter().copied() {
                    for sizes in plan.sizes.iter().copied() {
                        let what = format!("exchange, {} tokens", sizes.tokens);
                        let task = exchange::ExchangeTask { sizes, samples: plan.samples };
                        let outputs = group(ranks, &what, Job::Exchange(task))?;
                        report.exchange.extend(exchange::rows(ranks, &sizes, &outputs)?);
                    }
                }
            }
            Scenario::Steady => {
                for ranks in plan.ranks.iter().copied() {
                    let outputs =
                        group(ranks, "steady", Job::Steady(steady::SteadyTask::new(ranks)))?;
                    report.steady.push(steady::row(ranks, &outputs)?);
                }
            }
            Scenario::Scaling => {
                for ranks in scaling::RANKS {
                    let task = scaling::ScalingTask::new(ranks);
                    let outputs = group(ranks, "scaling", Job::Scaling(task))?;
                    report.scaling.extend(scaling::rows(ranks, &outputs)?);
                }
            }
            Scenario::Proxy => {
                let tasks = proxy::THREADS.map(proxy::ProxyTask::new).to_vec();
                report.proxy = proxy::rows(&group(1, "proxy", Job::Proxy(tasks))?)?;
            }
        }
    }
    Ok(report)
}

/// Measures the link between two ranks that it starts. Blocks until everything is done.
///
/// # Errors
/// As [`run`].
pub fn run_link(
    task: &link::LinkTask,
    start: &Start,
    progress: &mut dyn FnMut(Progress),
) -> Result<BenchReport> {
    task.check()?;
    let config = Config::load(&start.config)?;
    let what = "link, 2 ranks".to_owned();
    let mut tell = |done, all| progress(Progress { what: what.clone(), done, all });
    let outputs = group(start, 2, &Job::Link(task.clone()), &mut tell).context("measure link")?;
    Ok(BenchReport { link: link::rows(&outputs)?, ..BenchReport::new(&config) })
}

/// Measures operations beside MoE between ranks that it starts. Blocks until everything is done.
///
/// # Errors
/// As [`run`].
pub fn run_operations(
    task: &ops::OperationsTask,
    ranks: u32,
    start: &Start,
    progress: &mut dyn FnMut(Progress),
) -> Result<BenchReport> {
    task.check(ranks)?;
    let config = Config::load(&start.config)?;
    let what = format!("operations, {ranks} ranks");
    let mut tell = |done, all| progress(Progress { what: what.clone(), done, all });
    let outputs = group(start, ranks, &Job::Operations(task.clone()), &mut tell)
        .with_context(|| format!("measure {what}"))?;
    let operations = Some(ops::report(&config, &outputs)?);
    Ok(BenchReport { operations, ..BenchReport::new(&config) })
}

/// Measures GPUs, one rank on each of `ranks`. Blocks until everything is done.
///
/// # Errors
/// A rank failed; the error has its message.
pub fn run_gpu(
    task: &gpu::GpuTask,
    ranks: u32,
    start: &Start,
    progress: &mut dyn FnMut(Progress),
) -> Result<BenchReport> {
    let config = Config::load(&start.config)?;
    let what = format!("GPUs, {ranks} ranks");
    let mut tell = |done, all| progress(Progress { what: what.clone(), done, all });
    let outputs = group(start, ranks, &Job::Gpu(task.clone()), &mut tell)
        .with_context(|| format!("measure {what}"))?;
    let mut all = Vec::new();
    for output in outputs {
        let Output::Gpu(figures) = output else { bail!("found {output:?}; expected figures") };
        all.push(*figures);
    }
    Ok(BenchReport { gpu: Some(gpu::report(&config, task, &all)?), ..BenchReport::new(&config) })
}

/// The way into the world of a config: the caller may pass the rank's warnings on from then.
pub type Join<'a> = &'a dyn Fn(&WorldConfig) -> tokenyard_core::Result<World>;

/// Measures GPUs as one of the ranks that another launcher started. Rank 0 gets the report.
///
/// # Errors
/// As [`run_gpu`].
pub fn measure_gpu(
    config: &Path,
    task: &gpu::GpuTask,
    join: Join<'_>,
) -> Result<Option<BenchReport>> {
    let config = Config::load(config)?;
    let world = Arc::new(join(&config.world)?);
    world.agree("bench", &[("task".to_owned(), serde_json::to_string(task)?)])?;
    let figures = gpu::measure(&world, &config, task, &Speaker { speaks: false })?;
    let Some(all) = gathered(&world, "gpu figures", &figures)? else { return Ok(None) };
    let gpu = Some(gpu::report(&config, task, &all)?);
    Ok(Some(BenchReport { gpu, ..BenchReport::new(&config) }))
}

/// The figures of all ranks, for rank 0.
fn gathered<T: Serialize + DeserializeOwned>(
    world: &World,
    topic: &str,
    mine: &T,
) -> Result<Option<Vec<T>>> {
    let all = world.all_gather(topic, &serde_json::to_vec(mine)?)?;
    world.barrier("bench done")?;
    let read = || all.iter().map(|bytes| serde_json::from_slice(bytes)).collect::<Result<_, _>>();
    Ok((world.rank() == 0).then(read).transpose()?)
}

/// Runs one job on `ranks` processes; returns the output of each, by rank.
fn group(
    start: &Start,
    ranks: u32,
    job: &Job,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<Output>> {
    let mut args = start.args.clone();
    args.push(serde_json::to_string(job)?.into());
    let job = tokenyard_launch::Job {
        program: start.program.clone(),
        args,
        ranks,
        env: Vec::new(),
        stderr: Stderr::Capture,
    };
    let hosts = match start.place {
        RunOn::Machine => None,
        RunOn::Hosts => Some(Hosts::new(ranks as usize)?),
    };
    interrupt::check()?;
    let mut running = match &hosts {
        None => job.start()?,
        Some(hosts) => job.start_on(hosts, Launcher::Hand)?,
    };
    let mut heard = Heard::new(ranks);
    while !running.all_exited() {
        match running.wait_event(Duration::from_secs(1))? {
            Some(Event::Line { rank, line }) => heard.take(rank, &line, progress),
            Some(Event::Exited { rank, status }) if status != Exit::Code(0) => {
                // The other ranks fail because of this one: its message is the cause. Or a signal of the terminal ends
                // one of them, which is no fault of a rank.
                while running.wait_event(OTHERS_END)?.is_some() {}
                bail!("rank {rank}: {}", heard.end(rank, status.to_string(), &running));
            }
            // A rank has succeeded once its figures are here, whatever its exit code.
            Some(Event::Exited { rank, status }) if heard.outputs[rank as usize].is_none() => {
                let how = format!(
                    "ended with {status} and gave no figures: something ended its process, a library for example"
                );
                bail!("rank {rank} {}", heard.end(rank, how, &running));
            }
            Some(Event::Exited { .. }) => {}
            None => heard.refuse_silence()?,
        }
    }
    // No rank's standard error is shown.
    for (rank, text) in running.warnings() {
        tracing::warn!("rank {rank}: {text}");
    }
    (0..)
        .zip(heard.outputs)
        .map(|(rank, output)| output.context(format!("rank {rank} printed nothing")))
        .collect()
}

/// The messages of the ranks so far.
struct Heard {
    outputs: Vec<Option<Output>>,
    /// The call of a component that each rank is inside of; empty outside of such calls.
    calls: Vec<String>,
    last_word: Instant,
}

impl Heard {
    fn new(ranks: u32) -> Self {
        let ranks = ranks as usize;
        Self {
            outputs: vec![None; ranks],
            calls: vec![String::new(); ranks],
            last_word: Instant::now(),
        }
    }

    fn take(&mut self, rank: u32, line: &str, progress: &mut dyn FnMut(u64, u64)) {
        self.last_word = Instant::now();
        match serde_json::from_str(line) {
            Ok(Output::Progress(done, all)) => progress(done, all),
            Ok(Output::Calls(call)) => self.calls[rank as usize] = call,
            Ok(output) => self.outputs[rank as usize] = Some(output),
            // A plugin may print.
            Err(_) => tracing::warn!("rank {rank} printed {line:?}"),
        }
    }

    /// How a rank ended, with the call that it was inside of, and its last lines.
    fn end(&self, rank: u32, how: String, running: &Running) -> String {
        let how = with_call(how, &self.calls[rank as usize]);
        format!("{how}: {}", running.stderr_tail(rank).trim_end())
    }

    /// # Errors
    /// Ranks that run have been silent for too long.
    fn refuse_silence(&self) -> Result<()> {
        if self.last_word.elapsed() <= SILENCE {
            return Ok(());
        }
        let silence = format!("no rank printed anything for {} s", SILENCE.as_secs());
        match self.calls.iter().position(|call| !call.is_empty()) {
            Some(rank) => bail!("{silence}; rank {rank} is inside of {}", self.calls[rank]),
            None => bail!(silence),
        }
    }
}

/// The work of a process that was started as a rank: it joins the world, measures, and prints its
/// figures.
///
/// # Errors
/// The exchange failed.
pub fn run_rank(config: &Path, job: &str) -> Result<()> {
    tokenyard_launch::adopt()?;
    let job: Job = serde_json::from_str(job).context("read the job of a rank")?;
    let config = Config::load(config)?;
    let world = Arc::new(join(&config)?);
    let say = Speaker { speaks: world.rank() == 0 };
    let output = match job {
        Job::Exchange(task) => Output::Exchange(exchange::measure(&world, &config, &task, &say)?),
        Job::Steady(task) => Output::Steady(steady::measure(&world, &config, &task, &say)?),
        Job::Scaling(task) => Output::Scaling(scaling::measure(&world, &config, &task)?),
        Job::Link(task) => Output::Link(link::measure(&world, &config, &task, &say)?),
        Job::Operations(task) => {
            Output::Operations(Box::new(ops::measure(&world, &config, &task, &say)?))
        }
        Job::Gpu(task) => Output::Gpu(Box::new(gpu::measure(&world, &config, &task, &say)?)),
        Job::Proxy(tasks) => {
            Output::Proxy(tasks.iter().map(proxy::measure).collect::<Result<_>>()?)
        }
    };
    print(&output)?;
    // No rank leaves before all ranks have printed their figures.
    world.barrier("bench done")?;
    Ok(())
}

/// Measures the link between two ranks that another launcher started, on two hosts for example.
/// Rank 0 gets the report.
///
/// # Errors
/// As [`run`].
pub fn measure_link(
    config: &Path,
    task: &link::LinkTask,
    join: Join<'_>,
) -> Result<Option<BenchReport>> {
    task.check()?;
    let config = Config::load(config)?;
    let world = Arc::new(join(&config.world)?);
    let figures = link::measure(&world, &config, task, &Speaker { speaks: false })?;
    let outputs = gathered(&world, "link figures", &Output::Link(figures))?;
    let Some(outputs) = outputs else { return Ok(None) };
    Ok(Some(BenchReport { link: link::rows(&outputs)?, ..BenchReport::new(&config) }))
}

/// The ranks of a bench use the rendezvous of their launcher, whatever the config has for real
/// jobs.
fn join(config: &Config) -> Result<World> {
    let mut options = WorldOptions::new(Identity::resolve("env", &environment)?);
    options.secret = Secret::from_env(&environment)?;
    options.deadline = config.world.deadline;
    options.late = config.world.late;
    options.on_call = Some(tell_call);
    Ok(World::join(options)?)
}

/// Tells the launcher of a call that may end this process.
fn tell_call(call: &str) {
    // A launcher that is gone reads none.
    let _ = print(&Output::Calls(call.to_owned()));
}

fn print(output: &Output) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(output)?)?;
    out.flush().context("write to the launcher")
}

/// Lets rank 0 report its progress.
#[derive(Debug)]
pub(crate) struct Speaker {
    speaks: bool,
}

impl Speaker {
    /// It writes to a pipe, so it must not be called inside a measurement.
    pub(crate) fn progress(&self, done: u64, all: u64) -> Result<()> {
        if self.speaks { print(&Output::Progress(done, all)) } else { Ok(()) }
    }
}
