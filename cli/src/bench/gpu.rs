//! `tokenyard bench dispatch`, `combine` and `pair`, and `link` on GPUs.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use tokenyard_bench::gpu::setup::{GivenRates, Setup};
use tokenyard_bench::gpu::{self, GpuTask, case, exchange};
use tokenyard_bench::ranks::RunOn;
use tokenyard_bench::{BenchReport, Sizes};
use tokenyard_core::bootstrap::{environment, is_rank_of_mpirun};
use tokenyard_core::config::Config;

use crate::launched::StartRanks;
use crate::memory;
use crate::output::plural;
use crate::preload;
use crate::warnings;
use crate::writable::Files;

use super::{Csv, FEWER, Output, check_files, judge, measuring, print_head, start};

/// The default SM counts.
const SMS: [u32; 6] = [4, 8, 12, 16, 24, 32];

const EXAMPLES: &str = "\
Examples:
  tokenyard bench dispatch configs/nvlink.toml
  tokenyard bench dispatch configs/nvlink.toml --type fp8 --replay --plot replay.svg
  tokenyard bench combine configs/nvlink.toml --tokens 128,1024,4096 --sms 8,16 --csv combine.csv
  tokenyard bench pair configs/nvlink.toml --tokens 128 --type cast --layout packed --calls graph
  torchrun --nproc-per-node 8 --no-python tokenyard bench dispatch configs/nvlink.toml --as-rank
  tokenyard bench dispatch domains.toml --inside-rate 365 --out-rate 46 --sms 6,8,12,16,24,32

Needs GPUs: one rank per GPU of this machine. The link is measured in the same run; an operation must
take at most 1.05 x (bytes through the busiest port / rate of the link) + 20 us, with 16 SMs or
fewer. Of a config with several domains each level has a floor; 1.08 x the larger + 25 us is allowed
there. Ranks may share GPUs there, or be those of a twin. The link inside is not measured then:
--inside-rate is required. A figure over a stand-in that was too late is void. Exit code 0: it
measured; 1, with --check: one took more, or is void; 2: nothing could be measured.
The method and the columns are explained in docs/performance.md.";

/// Arguments of `tokenyard bench dispatch`, `combine` and `pair`.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct OperationArgs {
    /// The config: kernels `cuda` over `nvlink`, or `rocm` over `xgmi`
    config: PathBuf,
    /// T: tokens per rank, one or several
    #[arg(long, value_delimiter = ',', default_values_t = [4096], conflicts_with = "input",
          value_parser = clap::value_parser!(u32).range(1..))]
    tokens: Vec<u32>,
    /// H: hidden size
    #[arg(long, default_value_t = 7168)]
    hidden: u32,
    /// K: experts per token
    #[arg(long, default_value_t = 8)]
    topk: u32,
    /// E: experts on all ranks together
    #[arg(long, default_value_t = 256)]
    experts: u32,
    /// The type of dispatched rows, one or several; a combine is of bf16
    #[arg(long = "type", value_name = "TYPE", value_enum, value_delimiter = ',',
          default_values_t = [case::Rows::Fp8, case::Rows::Bf16])]
    rows: Vec<case::Rows>,
    /// The layout of received rows, one or several
    #[arg(long = "layout", value_name = "LAYOUT", value_enum, value_delimiter = ',',
          default_values_t = [case::Layout::Flat])]
    layouts: Vec<case::Layout>,
    /// The experts that the tokens select
    #[arg(long, value_enum, default_value_t = GpuRoutingName::Uniform, conflicts_with = "input")]
    routing: GpuRoutingName,
    /// The routing of a recorded batch (docs/input-files.md); rows are generated
    #[arg(long, value_name = "FILE.safetensors")]
    input: Option<PathBuf>,
    /// Dispatch with the routing of a handle: nothing is counted
    #[arg(long)]
    replay: bool,
    /// Dispatch, and copy rows, scales, ids and weights out of the arena
    #[arg(long, conflicts_with = "replay")]
    copy: bool,
    /// Combine rows that are in memory of the caller, outside the arena
    #[arg(long)]
    outside: bool,
    /// How the host queues operations
    #[arg(long, value_enum, default_value_t = case::Calls::Waiting)]
    calls: case::Calls,
    /// SM counts; a communicator is opened for each
    #[arg(long, value_delimiter = ',', default_values_t = SMS,
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    sms: Vec<u32>,
    /// Operations that count, after a warm-up
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    samples: u32,
    #[command(flatten)]
    ranks: RankArgs,
    #[command(flatten)]
    output: Output,
    #[command(flatten)]
    csv: Csv,
    /// Draw time and bandwidth over SM count
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    rates: Rates,
}

/// Rates of links that are not measured.
#[derive(Clone, Copy, Debug, clap::Args)]
struct Rates {
    /// The rate between domains, out of a rank, in GB/s; not over a `paced` that has a rate
    #[arg(long, value_name = "GB/S", value_parser = rate)]
    out_rate: Option<f64>,
    /// The rate inside a domain, out of a rank, in GB/s; it is not measured then
    #[arg(long, value_name = "GB/S", value_parser = rate)]
    inside_rate: Option<f64>,
}

/// The most GB/s of a link.
const MOST_RATE: f64 = 100_000.0;

fn rate(text: &str) -> Result<f64, String> {
    let found: Option<f64> = text.parse().ok();
    let expected = || format!("expected GB/s above 0, at most {MOST_RATE}");
    found.filter(|rate| *rate > 0.0 && *rate <= MOST_RATE).ok_or_else(expected)
}

impl Rates {
    fn given(self) -> GivenRates {
        GivenRates { inside: self.inside_rate, out: self.out_rate }
    }
}

impl OperationArgs {
    /// Whether this process is to start ranks.
    pub(super) fn starts_ranks(&self) -> bool {
        !self.ranks.are_started()
    }

    /// Refuses files that could not be written at the end, before anything starts.
    fn check_files(&self, config: &Config) -> Result<()> {
        let files = Files::default().reads("the config", &self.config);
        let files = match &self.input {
            Some(input) => files.reads("--input", input),
            None => files,
        };
        let (out, csv, plot) = (&self.output.out, &self.csv.file, &self.plot);
        check_files(files, config, &[("--out", out), ("--csv", csv), ("--plot", plot)])
    }
}

/// The choice of ranks.
#[derive(Debug, clap::Args)]
pub(super) struct RankArgs {
    /// Ranks, one per GPU [default: as many as there are GPUs]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    ranks: Option<u32>,
    /// Be one of the ranks that another launcher starts, with its variables; rank 0 prints the
    /// report. Under mpirun with more than one rank this is so without the option
    #[arg(long, conflicts_with = "ranks")]
    as_rank: bool,
    #[command(flatten)]
    start: StartRanks,
}

impl RankArgs {
    /// The requested number of ranks.
    pub(super) fn count(&self) -> Option<u32> {
        self.ranks
    }

    /// Whether another launcher starts them.
    pub(super) fn are_started(&self) -> bool {
        self.as_rank || is_rank_of_mpirun(&environment)
    }

    /// Refuses a number of ranks to start where mpirun has started them.
    pub(super) fn check(&self) -> Result<()> {
        if let (Some(ranks), true) = (self.ranks, self.are_started()) {
            bail!(
                "read options: found --ranks {ranks} under mpirun, which starts the ranks; expected no --ranks"
            );
        }
        if self.are_started() { Ok(()) } else { self.start.check("bench") }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum GpuRoutingName {
    /// K experts at random
    Uniform,
    /// Every token also selects one and the same expert
    Skewed,
}

pub(super) fn operation(phase: case::Phase, args: &OperationArgs) -> Result<ExitCode> {
    let exchange = exchange_task(phase, args)?;
    let rates = args.rates.given();
    let config = Config::load(&args.config)?;
    if gpu::is_gpu(&config) {
        Setup::of(&config)?.check(rates, &exchange)?;
    }
    let task = GpuTask { link_sms: SMS.to_vec(), exchange: Some(exchange), rates };
    args.check_files(&config)?;
    let report = measure(&args.config, &task, &args.ranks, args.output.json)?;
    if let Some(report) = &report {
        args.csv.write(report)?;
    }
    show(report, &args.output, args.plot.as_deref())
}

/// The link alone.
pub(super) fn link(
    config: &Path,
    ranks: &RankArgs,
    output: &Output,
    plot: Option<&Path>,
) -> Result<ExitCode> {
    Setup::of(&Config::load(config)?)?.check_link()?;
    let rates = GivenRates::default();
    let task = GpuTask { link_sms: SMS.to_vec(), exchange: None, rates };
    let report = measure(config, &task, ranks, output.json)?;
    show(report, output, plot)
}

/// The report; none on a rank that does not print it.
fn measure(
    config: &Path,
    task: &GpuTask,
    ranks: &RankArgs,
    json: bool,
) -> Result<Option<BenchReport>> {
    ranks.check()?;
    let loaded = Config::load(config)?;
    preload::try_plugins(Some(&loaded))?;
    if ranks.are_started() {
        return tokenyard_bench::measure_gpu(config, task, &warnings::join);
    }
    let setup = Setup::of(&loaded)?;
    let check_world = |ranks: u32| {
        loaded.check_ranks(ranks)?;
        setup.check_ranks(ranks)?;
        let working = setup.working(ranks);
        setup.check_sharing(working, setup.gpus(working), task.rates)
    };
    ranks.ranks.map_or(Ok(()), check_world)?;
    let gpus = gpu::ranks_here(&loaded)?;
    let ranks = ranks.ranks.unwrap_or(gpus);
    // A config may have several ranks share a GPU, to try domains.
    let most = if gpu::names_gpus(&loaded)? { u32::MAX } else { gpus };
    ensure!(
        (2..=most).contains(&ranks),
        "read options: found {gpus} GPUs for {ranks} ranks; expected at least 2 ranks, and a GPU for each"
    );
    check_world(ranks)?;
    let working = setup.working(ranks);
    if let Some(exchange) = &task.exchange {
        check(exchange, ranks, working)?;
    }
    let on = on(ranks, working, setup.gpus(working));
    let what = match &task.exchange {
        Some(exchange) => format!("{} on {on}, {} samples", exchange.phase, exchange.samples),
        None => format!("the link between {on}"),
    };
    print_head(&loaded, &what, json);
    let start = start(config, RunOn::Machine)?;
    measuring(|progress| tokenyard_bench::run_gpu(task, ranks, &start, progress)).map(Some)
}

/// The ranks and GPUs, in words.
fn on(ranks: u32, working: u32, gpus: u32) -> String {
    if working < ranks {
        format!("{ranks} ranks, of which {working} run, on {gpus} GPUs")
    } else if gpus < ranks {
        format!("{ranks} ranks that share {gpus} GPU{}", plural(gpus as usize))
    } else {
        format!("{ranks} GPUs")
    }
}

/// Refuses, before a rank starts, sizes that every communicator would refuse. `working`: the ranks that have tensors.
fn check(task: &exchange::GpuExchangeTask, ranks: u32, working: u32) -> Result<()> {
    let case::Fixed { hidden, topk, experts } = task.fixed;
    for max_tokens in task.tokens.iter().copied() {
        tokenyard_core::moe::Shape { ranks, experts, topk, hidden, max_tokens }.new()?;
    }
    ensure!(
        hidden.is_multiple_of(16),
        "read options: found --hidden {hidden}; expected a multiple of 16"
    );
    let tokens = task.tokens.iter().copied().max().unwrap_or(0);
    let needed = Sizes { tokens, hidden, topk, experts }.rank_bytes(ranks);
    memory::ensure_room(needed.saturating_mul(working.into()), "a step of these sizes", FEWER)
}

fn exchange_task(phase: case::Phase, args: &OperationArgs) -> Result<exchange::GpuExchangeTask> {
    let [is_dispatch, is_combine] =
        [case::Phase::Dispatch, case::Phase::Combine].map(|one| phase == one);
    for (name, given) in [("--replay", args.replay), ("--copy", args.copy)] {
        ensure!(is_dispatch || !given, "found {name}; it is about the rows of a dispatch alone");
    }
    ensure!(
        is_combine || !args.outside,
        "read options: found --outside; it is about the rows of a combine alone"
    );
    let manner = match (args.replay, args.copy, args.outside) {
        (true, ..) => case::Manner::Replay,
        (_, true, _) => case::Manner::Copied,
        (.., true) => case::Manner::Outside,
        _ => case::Manner::Plain,
    };
    let calls = args.calls;
    let plain = manner == case::Manner::Plain && phase != case::Phase::Pair;
    ensure!(
        plain || calls != case::Calls::Sends,
        "read options: found --calls sends; expected it for a plain dispatch or combine alone"
    );
    ensure!(
        calls.wait() || !args.copy,
        "read options: found --copy with --calls that do not wait; sizes are exact in calls that wait only"
    );
    let routing = match (&args.input, args.routing) {
        (Some(file), _) => case::Routing::Recorded(
            std::path::absolute(file).with_context(|| format!("find {}", file.display()))?,
        ),
        (None, GpuRoutingName::Uniform) => case::Routing::Uniform,
        (None, GpuRoutingName::Skewed) => case::Routing::Skewed,
    };
    Ok(exchange::GpuExchangeTask {
        phase,
        fixed: case::Fixed { hidden: args.hidden, topk: args.topk, experts: args.experts },
        tokens: args.tokens.clone(),
        rows: match is_combine {
            true => vec![case::Rows::Bf16],
            false => args.rows.clone(),
        },
        layouts: args.layouts.clone(),
        routing,
        manner,
        calls,
        sms: args.sms.clone(),
        samples: args.samples,
    })
}

fn show(report: Option<BenchReport>, output: &Output, plot: Option<&Path>) -> Result<ExitCode> {
    let Some(report) = report else { return Ok(ExitCode::SUCCESS) };
    let code = judge(output, &report)?;
    if let (Some(file), Some(gpu)) = (plot, &report.gpu) {
        gpu::plot::draw(std::slice::from_ref(gpu), &[], file)?;
    }
    Ok(code)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: OperationArgs,
    }

    fn task(phase: case::Phase, more: &str) -> Result<exchange::GpuExchangeTask> {
        let words = ["bench", "a.toml"].into_iter().chain(more.split_whitespace());
        exchange_task(phase, &Cli::try_parse_from(words)?.args)
    }

    #[test]
    fn what_is_not_asked_for_is_the_named_case() {
        let task = task(case::Phase::Dispatch, "").unwrap();
        assert_eq!(task.fixed, case::Fixed { hidden: 7168, topk: 8, experts: 256 });
        assert_eq!((task.tokens, task.sms, task.samples), (vec![4096], SMS.to_vec(), 50));
        assert_eq!(task.rows, [case::Rows::Fp8, case::Rows::Bf16]);
        assert_eq!((task.routing, task.manner), (case::Routing::Uniform, case::Manner::Plain));
    }

    #[test]
    fn lists_and_manners_are_read_and_a_combine_is_of_bf16() {
        let combine = task(case::Phase::Combine, "--outside --tokens 128,8192 --sms 8").unwrap();
        assert_eq!((combine.tokens, combine.sms), (vec![128, 8192], vec![8]));
        assert_eq!((combine.rows, combine.manner), (vec![case::Rows::Bf16], case::Manner::Outside));
        let cast = task(case::Phase::Dispatch, "--type cast --layout packed,rank-major --replay");
        let cast = cast.unwrap();
        assert_eq!((cast.rows, cast.manner), (vec![case::Rows::Cast], case::Manner::Replay));
        assert_eq!(cast.layouts, [case::Layout::Packed, case::Layout::RankMajor]);
        let pair = task(case::Phase::Pair, "--calls graph --type bf16").unwrap();
        assert_eq!((pair.calls, pair.rows), (case::Calls::Graph, vec![case::Rows::Bf16]));
    }

    #[test]
    fn gpus_are_those_that_run_and_not_those_that_are_stood_for() {
        assert_eq!(on(8, 8, 8), "8 GPUs");
        assert_eq!(on(16, 2, 2), "16 ranks, of which 2 run, on 2 GPUs");
        assert_eq!(on(4, 4, 1), "4 ranks that share 1 GPU");
    }

    #[test]
    fn rates_of_links_are_above_0() {
        let rates = |more: &str| {
            let words = ["bench", "a.toml"].into_iter().chain(more.split_whitespace());
            Cli::try_parse_from(words).map(|cli| cli.args.rates.given())
        };
        assert_eq!(rates("").unwrap(), GivenRates::default());
        let given = GivenRates { inside: Some(365.0), out: Some(46.5) };
        assert_eq!(rates("--inside-rate 365 --out-rate 46.5").unwrap(), given);
        for wrong in ["0", "-1", "NaN", "inf", "x"] {
            let text = rates(&format!("--out-rate={wrong}")).unwrap_err().to_string();
            assert!(text.contains("expected GB/s above 0"), "{wrong}: {text}");
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let refused = |phase, more: &str| format!("{:#}", task(phase, more).unwrap_err());
        let (dispatch, combine) = (case::Phase::Dispatch, case::Phase::Combine);
        assert!(
            refused(combine, "--replay").contains("--replay; it is about the rows of a dispatch")
        );
        assert!(refused(combine, "--copy").contains("--copy; it is about"));
        assert!(refused(dispatch, "--copy --replay").contains("cannot be used with"));
        assert!(refused(dispatch, "--outside").contains("rows of a combine"));
        assert!(refused(dispatch, "--input a --tokens 3").contains("cannot be used with"));
        assert!(refused(dispatch, "--sms 0").contains("not in 1..=1024"));
        assert!(refused(dispatch, "--calls graph --copy").contains("--calls that do not wait"));
        assert!(refused(dispatch, "--calls sends --replay").contains("--calls sends"));
        assert!(refused(case::Phase::Pair, "--calls sends").contains("--calls sends"));
        let odd = task(dispatch, "--hidden 100").unwrap();
        assert!(check(&odd, 2, 2).unwrap_err().to_string().contains("multiple of 16"));
        let uneven = task(dispatch, "--experts 255").unwrap();
        assert!(check(&uneven, 2, 2).is_err());
    }
}
