//! `tokenyard conformance`.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tokenyard_conformance::expected::{self, Expected};
use tokenyard_conformance::faults::{self, Fault};
use tokenyard_conformance::pace::Pace;
use tokenyard_conformance::report::{Chosen, Environment, SuiteReport};
use tokenyard_conformance::runner::{self, Finished, Program, RunEvent, Settings, Verdict};
use tokenyard_conformance::suite::{self, Level, Test};
use tokenyard_core::config::Config;
use tokenyard_core::files;
use tokenyard_core::host::Registry;
use tokenyard_launch::interrupt::Interrupted;

use crate::output::{People, print_json};
use crate::writable::Files;
use crate::{preload, progress, writable};

/// The largest list of expected failures, in bytes.
const MAX_EXPECTED: u64 = 1 << 20;

/// The exit code where nothing failed, and a level ran nothing.
const NOTHING_RAN: u8 = 3;

/// The end of `--help`.
const EXAMPLES: &str = "\
Levels: L0 the transport alone, L1 exchanges against the oracle, messages, shards
and entries, L2 concurrency and chaining, L3 killed, stopped and misled ranks.

Examples:
  tokenyard conformance configs/cpu.toml
  tokenyard conformance my-fabric.toml --level L0,L1 --junit results.xml
  tokenyard conformance my-fabric.toml --filter 'l1/hidden/*' --list
  tokenyard conformance my-fabric.toml --level L3 --slow 5
  TOKENYARD_SOAK_ROUNDS=10000 tokenyard conformance my-fabric.toml --filter l2/soak --slow 5

Exit code: 0 all as expected, 1 a test failed (or passed unexpectedly), 2 it could not run,
3 nothing failed but a level ran nothing (leave it out by --level if that is right),
128 and a signal's number: the signal ended it.";

/// Arguments of `tokenyard conformance`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ConformanceArgs {
    /// The config whose components are tested. Ranks are started as processes of this machine.
    #[arg(required_unless_present = "rank")]
    config: Option<PathBuf>,
    /// Only these levels.
    #[arg(long, value_delimiter = ',', value_parser = level, default_value = "L0,L1,L2,L3")]
    level: Vec<Level>,
    /// Only tests whose name fits one of these patterns: a part of the name, or with `*` the whole
    /// name.
    #[arg(long, value_name = "PATTERN", value_delimiter = ',')]
    filter: Vec<String>,
    /// The largest world; tests that need a larger one are reported as not supported.
    #[arg(long, value_name = "N", default_value_t = 4)]
    ranks: u32,
    /// Multiply every deadline and time limit, for an emulated or a busy machine. The report shows
    /// the factor.
    #[arg(long, value_name = "FACTOR", value_parser = pace, default_value = "1")]
    slow: Pace,
    /// Print the chosen tests and run none.
    #[arg(long)]
    list: bool,
    /// Print the report as one JSON line on standard output.
    #[arg(long)]
    json: bool,
    /// Write the report as JUnit XML.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Write the report as JSON to this file as well, into a folder that is made if necessary.
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Read the expected failures from this TOML file instead of the list that comes with the suite.
    #[arg(long, value_name = "FILE")]
    expected: Option<PathBuf>,
    /// Be one rank of a run: the order of the launcher.
    #[arg(long, value_name = "ORDER", hide = true)]
    rank: Option<PathBuf>,
}

fn level(text: &str) -> Result<Level, String> {
    match text.to_ascii_uppercase().as_str() {
        "L0" => Ok(Level::L0),
        "L1" => Ok(Level::L1),
        "L2" => Ok(Level::L2),
        "L3" => Ok(Level::L3),
        _ => Err(format!("found level {text}; expected L0, L1, L2 or L3")),
    }
}

fn pace(text: &str) -> Result<Pace, String> {
    let slow =
        text.parse().map_err(|_| format!("found {text}; expected 1 to {}", Pace::SLOWEST))?;
    Pace::new(slow)
}

/// The tests to run.
struct SuitePlan {
    tests: Vec<Test>,
    faults: Vec<Fault>,
    pace: Pace,
}

impl SuitePlan {
    fn new(args: &ConformanceArgs, settings: &Settings) -> Self {
        let chosen = |level: Level, name: &str| {
            args.level.contains(&level)
                && (args.filter.is_empty()
                    || args.filter.iter().any(|filter| expected::matches(filter, name)))
        };
        let mut tests = suite::tests(settings.capabilities(), settings.domains());
        tests.retain(|test| chosen(test.level, &test.name));
        let most = args.ranks.min(settings.most_ranks());
        let faults = faults::list(settings.domains())
            .into_iter()
            .filter(|fault| chosen(Level::L3, &fault.name))
            .map(|fault| fault.within(most))
            .collect();
        Self { tests, faults, pace: args.slow }
    }

    fn chosen(&self) -> Vec<Chosen> {
        let tests = self.tests.iter().map(|test| Chosen {
            name: test.name.clone(),
            level: test.level,
            ranks: test.ranks,
            about: test.about.clone(),
        });
        let faults = self.faults.iter().map(|fault| Chosen {
            name: fault.name.clone(),
            level: Level::L3,
            ranks: fault.ranks,
            about: fault.about.clone(),
        });
        tests.chain(faults).collect()
    }

    /// Removes the tests that need a larger world than `--ranks` and the transport allow, and returns them as results.
    fn take_larger(&mut self, asked: u32, takes: u32) -> Vec<Finished> {
        let ranks = asked.min(takes);
        let limit = if takes < asked {
            format!("max_peers of the transport allows {takes}")
        } else {
            format!("--ranks is {asked}")
        };
        let larger: Vec<Finished> = self
            .chosen()
            .into_iter()
            .filter(|chosen| chosen.ranks > ranks)
            .map(|chosen| Finished {
                name: chosen.name,
                verdict: Verdict::NotSupported(format!("it needs {} ranks; {limit}", chosen.ranks)),
                took: Duration::ZERO,
            })
            .collect();
        self.tests.retain(|test| test.ranks <= ranks);
        self.faults.retain(|fault| fault.ranks <= ranks);
        larger
    }

    fn run(&self, config: &Path, finished: &mut Vec<Finished>) -> Result<()> {
        let path = std::env::current_exe().context("find this program")?;
        let program = Program::new(path, vec!["conformance".into(), "--rank".into()]);
        let program = Program { pace: self.pace, ..program };
        let bar = progress::bar((self.tests.len() + self.faults.len()) as u64);
        // Where there is no bar, a line says what runs: a run that hangs or dies is then seen to be in it.
        let lines = !std::io::stderr().is_terminal();
        let mut each = |event: RunEvent<'_>| match event {
            RunEvent::Starts(name) => {
                if lines {
                    eprintln!("running: {name}");
                }
                bar.set_message(name.to_owned());
            }
            RunEvent::Ended(done) => {
                if let Verdict::Fail(_) = done.verdict {
                    bar.println(format!("failed: {}", done.name));
                }
                bar.inc(1);
                finished.push(done);
            }
            RunEvent::Warned { rank, text } => {
                bar.suspend(|| tracing::warn!("rank {rank}: {text}"));
            }
        };
        runner::run_in_processes(&program, config, &self.tests, &mut each)?;
        runner::run_faults(&program, config, &self.faults, &mut each)?;
        bar.finish_and_clear();
        Ok(())
    }
}

impl ConformanceArgs {
    /// Whether this process is to start ranks.
    pub(crate) fn starts_ranks(&self) -> bool {
        self.rank.is_none() && !self.list
    }

    /// Refuses files that could not be written at the end, before anything starts.
    fn check_files(&self, config: &Config, path: &Path) -> Result<()> {
        writable::check_reports(config)?;
        let mut files = Files::default().reads("the config", path);
        if let Some(expected) = &self.expected {
            files = files.reads("--expected", expected);
        }
        if let Some(junit) = &self.junit {
            files.writes("--junit", junit)?;
        }
        self.save.as_deref().map_or(Ok(()), |save| files.writes_deep("--save", save))
    }
}

pub(crate) fn main(args: &ConformanceArgs) -> Result<ExitCode> {
    if let Some(order) = &args.rank {
        return runner::rank_main(order).map(|()| ExitCode::SUCCESS);
    }
    let path = args
        .config
        .as_deref()
        .context("read options: found no config; expected one. Fix: name a config file")?;
    let config = Config::load(path)?;
    args.check_files(&config, path)?;
    preload::try_plugins(Some(&config))?;
    let settings = Settings::at(args.slow, config.clone())?;
    let expected = match &args.expected {
        None => Expected::shipped(&config)?,
        Some(file) => {
            let text = files::read_text(file, MAX_EXPECTED)?;
            Expected::parse(&text, &config).with_context(|| file.display().to_string())?
        }
    };
    let mut plan = SuitePlan::new(args, &settings);
    let chosen = plan.chosen();
    ensure!(!chosen.is_empty(), "no test fits --level and --filter; --list shows all tests");
    if args.list {
        return list(&chosen, args.json);
    }
    let components = Registry::for_config(&config)?.components();
    let environment = Environment::new(&config, &components, settings.capabilities(), args.slow);
    People::new(args.json).say(environment.summary());
    let start = Instant::now();
    let mut finished = plan.take_larger(args.ranks, settings.most_ranks());
    plan.run(path, &mut finished).map_err(|error| match error.downcast_ref::<Interrupted>() {
        Some(interrupted) => {
            let done = format!("{} of {} tests were done", finished.len(), chosen.len());
            interrupted.clone().with_done(done).into()
        }
        None => error,
    })?;
    let report = SuiteReport::new(environment, chosen, &finished, &expected, start.elapsed());
    show(args, &report)?;
    Ok(match (report.ok, report.nothing_ran.is_empty()) {
        (true, true) => ExitCode::SUCCESS,
        (true, false) => ExitCode::from(NOTHING_RAN),
        (false, _) => ExitCode::FAILURE,
    })
}

fn list(chosen: &[Chosen], json: bool) -> Result<ExitCode> {
    if json {
        let names: Vec<&str> = chosen.iter().map(|test| test.name.as_str()).collect();
        print_json(&names)?;
    } else {
        for Chosen { name, ranks, about, .. } in chosen {
            People::new(false).say(format_args!("{name}\n    {ranks} ranks: {about}"));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn show(args: &ConformanceArgs, report: &SuiteReport) -> Result<()> {
    if let Some(file) = &args.junit {
        writable::write(file, report.junit().as_bytes())?;
    }
    if let Some(file) = &args.save {
        writable::write_deep(file, &serde_json::to_vec(report)?)?;
    }
    People::new(args.json).say(report.table().trim_end());
    if args.json { print_json(report) } else { Ok(()) }
}
