//! `tokenyard bench`.

mod gpu;
mod operations;
mod plot;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use tokenyard_allocations::Counting;
use tokenyard_bench::gpu::case::Phase;
use tokenyard_bench::link::LinkTask;
use tokenyard_bench::ranks::{RunOn, Start};
use tokenyard_bench::report::NAMED_SIZES;
use tokenyard_bench::{BenchReport, Plan, Progress, Scenario, Sizes};
use tokenyard_core::config::Config;
use tokenyard_launch::interrupt::Interrupted;

use crate::output::{People, print_json};
use crate::writable::Files;
use crate::{memory, preload, progress, warnings, writable};

/// The allocator counts, so that the ranks of `steady`, which are this program, can report the
/// allocations of a step.
#[global_allocator]
static ALLOCATOR: Counting = Counting;

const EXAMPLE: &str = "\
Example:
  tokenyard bench configs/cpu.toml
  tokenyard bench configs/cpu.toml --scenario exchange --ranks 2,4 --out figures.json
  tokenyard bench configs/cpu.toml --scenario exchange --tokens 1,8,128 --csv sweep.csv
  tokenyard bench link configs/libfabric.toml
  tokenyard bench gather configs/cpu.toml
  tokenyard bench dispatch configs/nvlink.toml

Ranks are processes of this machine. `exchange`, the default, shows dispatch and combine as a part of
what a plain copy of the same bytes between the same processes reaches in the same run. The other
scenarios are checks for developers: `steady` shows what steps allocate; `scaling` counts commands and
bytes; `proxy` shows what a proxy thread costs; `all` runs all four.
`dispatch` and `combine` are for GPUs, `gather`, `pipe` and `table` for both. Exit code 0: it measured;
1, with --check: a required figure was missed; 2: nothing could be measured. Repeating the figures:
docs/performance.md.";

/// The fix for sizes that take too much memory.
const FEWER: &str = "choose fewer tokens, experts or ranks, or a smaller hidden size or top-k";

/// Arguments of `tokenyard bench`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLE, args_conflicts_with_subcommands = true)]
#[command(subcommand_negates_reqs = true)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    which: Option<Which>,
    /// The config: its kernel set, transport and plugins are measured
    #[arg(required = true)]
    config: Option<PathBuf>,
    /// The measurement
    #[arg(long, value_enum, default_value = "exchange")]
    scenario: Choice,
    /// Numbers of ranks for `exchange` and `steady`
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4])]
    ranks: Vec<u32>,
    /// T: tokens per rank, one or several
    #[arg(long, value_delimiter = ',', default_values_t = [NAMED_SIZES.tokens])]
    tokens: Vec<u32>,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    csv: Csv,
    /// Runs as a rank.
    #[arg(long, hide = true, value_name = "JOB")]
    rank_job: Option<String>,
}

/// Measurements with arguments of their own.
#[derive(Debug, clap::Subcommand)]
enum Which {
    /// One link between two ranks: bare (libfabric or libibverbs by direct calls), through the
    /// transport, and under a dispatch. On GPUs: the rate of NVLink
    Link(LinkArgs),
    /// Dispatch on GPUs, by SM count, against the rate of the link
    Dispatch(gpu::OperationArgs),
    /// Combine on GPUs, by SM count, against the rate of the link
    Combine(gpu::OperationArgs),
    /// A dispatch and the combine of its handle, on GPUs: one step of a layer
    Pair(gpu::OperationArgs),
    /// All-gathers, and sums over all ranks, by size
    Gather(operations::GatherArgs),
    /// Messages of a pipe between ranks, by size
    Pipe(operations::PipeArgs),
    /// Fetches of table entries that all ranks have
    Table(operations::TableArgs),
    /// Commands of GPU kernels through the host's ring, into a transport that only counts
    Ring(RingArgs),
    /// A transport whose kernels put, alone: rate, latency, puts a second, and lateness of a stand-in
    Nic(NicArgs),
    /// Draws reports of GPUs: time and bandwidth over SM count
    Plot(plot::PlotArgs),
}

const RING_EXAMPLE: &str = "\
Example:
  tokenyard bench ring configs/nvlink.toml

Kernels over a transport without a device API write commands into a ring in host memory, and a thread
of the host posts them. Shown are commands per second that one thread takes from 16 blocks, and the
time from a kernel's command to the signal that it raises. Needs one GPU; of the config only
[kernels.cuda] counts. Exit code as for `bench`.";

/// Arguments of `tokenyard bench ring`.
#[derive(Debug, clap::Args)]
#[command(after_help = RING_EXAMPLE)]
struct RingArgs {
    /// The config: kernels `cuda`
    config: PathBuf,
    #[command(flatten)]
    output: Output,
}

const NIC_EXAMPLE: &str = "\
Example:
  tokenyard bench nic paced.toml --check

Kernels on one GPU put to that GPU itself: 64 KiB to 1 MiB, 64 bytes and none, and rows of 7 KiB.
Measured is the config's scale-out transport, or that of scale_up without one; its kernels must post
(`paced`). A stand-in is held to the rate and latency of its own table: the rate within 1 %, the
latency within 1 us, and without a limit 20 million puts a second. Exit code as for `bench`.";

/// Arguments of `tokenyard bench nic`.
#[derive(Debug, clap::Args)]
#[command(after_help = NIC_EXAMPLE)]
struct NicArgs {
    /// The config: kernels `cuda`, over a transport whose kernels put
    config: PathBuf,
    #[command(flatten)]
    output: Output,
}

const LINK_EXAMPLE: &str = "\
Examples:
  tokenyard bench link configs/libfabric.toml
  tokenyard bench link configs/libfabric.toml --namespaces
  tokenyard bench link configs/nvlink.toml --plot link.svg
  RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 \\
    tokenyard bench link fabric.toml --as-rank      (and RANK=1 on the other host)

Latency is half of a put and its answer, 8 bytes each; bandwidth is of 1 MiB puts with both ranks
sending at the same time. All of it is measured in one run, one thing after the other. On GPUs
(kernels `cuda` over `nvlink`, or `rocm` over `xgmi`): copies between all GPUs by SM count, barriers,
exchanges of counts. There sizes are fixed, and only the options --ranks, --as-rank, --json, --out and
--plot count. Exit code as for `bench`.";

/// Arguments of `tokenyard bench link`.
#[derive(Debug, clap::Args)]
#[command(after_help = LINK_EXAMPLE)]
struct LinkArgs {
    /// The config: its scale-out transport (`libfabric`, `efa` or `verbs`) is measured, or `nvlink` or `xgmi`
    config: PathBuf,
    /// T: tokens per rank of the dispatch
    #[arg(long, default_value_t = NAMED_SIZES.tokens)]
    tokens: u32,
    #[command(flatten)]
    common: Common,
    #[command(flatten)]
    ranks: gpu::RankArgs,
    /// Draw the rate of NVLink over SM count
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    /// Give each rank its own host. The hosts are stand-ins, network namespaces of this machine:
    /// cores and memory stay shared (root; docs/testing-hosts.md)
    #[arg(long, conflicts_with = "as_rank")]
    namespaces: bool,
}

/// Figures of operations for spreadsheets.
#[derive(Debug, clap::Args)]
struct Csv {
    /// Write a line per operation to this file, as CSV: minimum, median and 99th percentile in us
    #[arg(long = "csv", value_name = "FILE")]
    file: Option<PathBuf>,
}

impl Csv {
    fn write(&self, report: &BenchReport) -> Result<()> {
        let Some(path) = &self.file else { return Ok(()) };
        let mut text = Vec::new();
        report.write_csv(&mut text)?;
        writable::write(path, &text)
    }
}

/// Arguments of all measurements.
#[derive(Debug, clap::Args)]
struct Common {
    /// H: hidden size
    #[arg(long, default_value_t = NAMED_SIZES.hidden)]
    hidden: u32,
    /// K: experts per token
    #[arg(long, default_value_t = NAMED_SIZES.topk)]
    topk: u32,
    /// E: experts on all ranks together
    #[arg(long, default_value_t = NAMED_SIZES.experts)]
    experts: u32,
    /// Samples per line
    #[arg(long, default_value_t = 30)]
    samples: u32,
    #[command(flatten)]
    output: Output,
}

/// The output of a report.
#[derive(Debug, clap::Args)]
struct Output {
    /// Print the report as one line of JSON on standard output, and the tables on standard error
    #[arg(long)]
    json: bool,
    /// Write the report to this file, as JSON
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Exit with 1 if a required figure was missed
    #[arg(long)]
    check: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Choice {
    /// All of them, those for developers too
    All,
    /// Dispatch and combine against a plain copy
    Exchange,
    /// Allocations and memory of steady steps
    Steady,
    /// Commands and bytes, 2 to 8 ranks
    Scaling,
    /// Commands through proxy threads into an engine that moves nothing
    Proxy,
}

impl Choice {
    fn scenarios(self) -> Vec<Scenario> {
        match self {
            Self::All => {
                vec![Scenario::Exchange, Scenario::Steady, Scenario::Scaling, Scenario::Proxy]
            }
            Self::Exchange => vec![Scenario::Exchange],
            Self::Steady => vec![Scenario::Steady],
            Self::Scaling => vec![Scenario::Scaling],
            Self::Proxy => vec![Scenario::Proxy],
        }
    }
}

pub(crate) fn main(args: &BenchArgs) -> Result<ExitCode> {
    tokenyard_bench::link();
    match &args.which {
        Some(Which::Link(args)) => return link(args),
        Some(Which::Dispatch(args)) => return gpu::operation(Phase::Dispatch, args),
        Some(Which::Combine(args)) => return gpu::operation(Phase::Combine, args),
        Some(Which::Pair(args)) => return gpu::operation(Phase::Pair, args),
        Some(Which::Gather(args)) => return args.run(),
        Some(Which::Pipe(args)) => return args.run(),
        Some(Which::Table(args)) => return args.run(),
        Some(Which::Ring(args)) => return ring(args),
        Some(Which::Nic(args)) => return nic(args),
        Some(Which::Plot(args)) => return plot::plot(args),
        None => {}
    }
    let config = args
        .config
        .as_deref()
        .context("read options: found no config; expected one. Fix: name a config file")?;
    if let Some(job) = &args.rank_job {
        tokenyard_bench::run_rank(config, job)?;
        return Ok(ExitCode::SUCCESS);
    }
    let has_csv = matches!(args.scenario, Choice::All | Choice::Exchange);
    ensure!(
        has_csv || args.csv.file.is_none(),
        "read options: found --csv with this --scenario; expected `exchange` or `all`: only operations have lines"
    );
    let loaded = Config::load(config)?;
    ensure!(
        !tokenyard_bench::gpu::is_gpu(&loaded),
        "choose benchmark: found a config with the kernel set `{}`; expected `cpu`: rows of GPUs have benchmarks of \
         their own. Fix: tokenyard bench dispatch {1}, bench combine {1} or bench link {1}",
        loaded.kernels.name,
        config.display()
    );
    check_files(
        Files::default().reads("the config", config),
        &loaded,
        &[("--out", &args.common.output.out), ("--csv", &args.csv.file)],
    )?;
    let plan = Plan {
        scenarios: args.scenario.scenarios(),
        ranks: args.ranks.clone(),
        sizes: args.tokens.iter().map(|tokens| args.common.sizes(*tokens)).collect(),
        samples: args.common.samples,
    };
    check_sizes(&plan, plan.bytes())?;
    preload::try_plugins(Some(&loaded))?;
    print_head(&loaded, &args.words(), args.common.output.json);
    let start = start(config, RunOn::Machine)?;
    let report = measuring(|progress| tokenyard_bench::run(&plan, &start, progress))?;
    args.csv.write(&report)?;
    judge(&args.common.output, &report)
}

/// Measures one GPU by itself. `what` is measured.
fn alone(
    path: &Path,
    output: &Output,
    what: &str,
    measure: fn(&Config) -> anyhow::Result<BenchReport>,
) -> Result<ExitCode> {
    let config = Config::load(path)?;
    let files = Files::default().reads("the config", path);
    check_files(files, &config, &[("--out", &output.out)])?;
    preload::try_plugins(Some(&config))?;
    print_head(&config, what, output.json);
    judge(output, &measure(&config)?)
}

fn ring(args: &RingArgs) -> Result<ExitCode> {
    let what = "commands of kernels through the ring of the host";
    alone(&args.config, &args.output, what, tokenyard_bench::gpu::ring::measure)
}

fn nic(args: &NicArgs) -> Result<ExitCode> {
    let what = "puts of kernels in a loop on one GPU";
    alone(&args.config, &args.output, what, tokenyard_bench::gpu::nic::measure)
}

fn link(args: &LinkArgs) -> Result<ExitCode> {
    let output = &args.common.output;
    let config = Config::load(&args.config)?;
    check_files(
        Files::default().reads("the config", &args.config),
        &config,
        &[("--out", &output.out), ("--plot", &args.plot)],
    )?;
    if tokenyard_bench::gpu::is_gpu(&config) {
        ensure!(!args.namespaces, "read options: found --namespaces; NVLink is inside one host");
        return gpu::link(&args.config, &args.ranks, output, args.plot.as_deref());
    }
    ensure!(
        args.plot.is_none(),
        "read options: found --plot; expected a config of GPUs, whose link is drawn"
    );
    let ranks = args.ranks.count().unwrap_or(2);
    ensure!(ranks == 2, "read options: found --ranks {ranks}; expected 2: this link has two ends");
    let (sizes, samples) = (args.common.sizes(args.tokens), args.common.samples);
    let ends = Plan { scenarios: Vec::new(), ranks: vec![2], sizes: vec![sizes], samples };
    let is_one_end = args.ranks.are_started();
    args.ranks.check()?;
    ensure!(
        !(is_one_end && args.namespaces),
        "read options: found --namespaces under mpirun, which starts the ranks; expected one process"
    );
    check_sizes(&ends, if is_one_end { ends.bytes() / 2 } else { ends.bytes() })?;
    let task = LinkTask::new(sizes, samples);
    preload::try_plugins(Some(&config))?;
    if !is_one_end {
        let what = format!("one link between 2 ranks, {samples} samples");
        print_head(&config, &what, output.json);
        let place = if args.namespaces { RunOn::Hosts } else { RunOn::Machine };
        let start = start(&args.config, place)?;
        let report = measuring(|progress| tokenyard_bench::run_link(&task, &start, progress))?;
        return judge(output, &report);
    }
    match tokenyard_bench::measure_link(&args.config, &task, &warnings::join)? {
        Some(report) => judge(output, &report),
        None => Ok(ExitCode::SUCCESS),
    }
}

impl BenchArgs {
    /// The measurements, in words.
    fn words(&self) -> String {
        let Common { hidden, topk, experts, samples, .. } = self.common;
        let list =
            |numbers: &[u32]| numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        let scenario = self.scenario.to_possible_value();
        let scenario = scenario.map_or_else(String::new, |value| value.get_name().to_owned());
        format!(
            "scenario {scenario}; ranks {}; tokens {}, rows of {hidden}, top-{topk} of {experts} experts, \
             {samples} samples",
            list(&self.ranks),
            list(&self.tokens)
        )
    }
}

impl Common {
    fn sizes(&self, tokens: u32) -> Sizes {
        let Self { hidden, topk, experts, .. } = *self;
        Sizes { tokens, hidden, topk, experts }
    }
}

/// Refuses sizes that no rank would accept, and those that need more memory than there is.
fn check_sizes(plan: &Plan, needed: u64) -> Result<()> {
    plan.check()?;
    memory::ensure_room(needed, "a step of these sizes", FEWER)
}

/// Shows the progress of a measurement.
fn measuring(
    run: impl FnOnce(&mut dyn FnMut(Progress)) -> Result<BenchReport>,
) -> Result<BenchReport> {
    let bar = progress::bar(1);
    let mut at = "nothing was measured".to_owned();
    let report = run(&mut |progress| {
        let Progress { what, done, all } = progress;
        at = format!("{what}: {done} of {all} steps were done");
        bar.set_length(all);
        bar.set_position(done);
        bar.set_message(what);
    });
    bar.finish_and_clear();
    report.map_err(|error| match error.downcast_ref::<Interrupted>() {
        Some(interrupted) => interrupted.clone().with_done(at).into(),
        None => error,
    })
}

/// Shows the report; the exit code shows whether all required figures were reached.
fn judge(args: &Output, report: &BenchReport) -> Result<ExitCode> {
    show(args, report)?;
    let missed = report.missed();
    for missed in &missed {
        People::errors().prose(format_args!("missed: {missed}"));
    }
    if !missed.is_empty() && report.conditions.is_busy() {
        People::errors().prose("other programs used the cores; repeat on an idle machine");
    }
    Ok(ExitCode::from(u8::from(args.check && !missed.is_empty())))
}

fn start(config: &Path, place: RunOn) -> Result<Start> {
    let program = std::env::current_exe().context("find this program, to start it as ranks")?;
    let args = vec!["bench".into(), config.into(), "--rank-job".into()];
    Ok(Start { program, args, config: config.to_owned(), place })
}

fn show(args: &Output, report: &BenchReport) -> Result<()> {
    if let Some(file) = &args.out {
        writable::write(file, (serde_json::to_string_pretty(report)? + "\n").as_bytes())?;
    }
    People::new(args.json).say(report.to_string().trim_end());
    if args.json { print_json(report) } else { Ok(()) }
}

/// Refuses files that could not be written at the end, before anything starts.
fn check_files(
    mut files: Files,
    config: &Config,
    outputs: &[(&'static str, &Option<PathBuf>)],
) -> Result<()> {
    writable::check_reports(config)?;
    let mut given = outputs.iter().filter_map(|(name, path)| Some((*name, path.as_deref()?)));
    given.try_for_each(|(name, path)| files.writes(name, path))
}

/// Prints the measurements before they start.
fn print_head(config: &Config, what: &str, json: bool) {
    People::new(json).prose(format_args!("{}\n{what}", progress::head(config)));
}

impl BenchArgs {
    /// Whether this process is to start ranks.
    pub(crate) fn starts_ranks(&self) -> bool {
        match &self.which {
            Some(Which::Link(args)) => !args.ranks.are_started(),
            Some(Which::Dispatch(args) | Which::Combine(args) | Which::Pair(args)) => {
                args.starts_ranks()
            }
            Some(Which::Gather(_) | Which::Pipe(_) | Which::Table(_)) => true,
            Some(Which::Plot(_) | Which::Ring(_) | Which::Nic(_)) => false,
            None => self.rank_job.is_none(),
        }
    }
}
