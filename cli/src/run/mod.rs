//! `tokenyard run`: dispatch, experts, combine on real processes, every element checked.
//!
//! `plan` turns arguments into exchanges · `judge` lets the components check the config · `rank` is
//! the work of one process · `launch` starts the processes and reads their messages · `message`
//! defines the messages · `diagnosis` finds the cause of a failure · `summary` prints the result,
//! with the `times` of operations · `results` writes it to a file.
//!
//! Watched by the tests in these files, and `cli/tests/{run,endings,signals,warnings,mpirun,hosts}.rs`.

mod diagnosis;
mod judge;
mod launch;
mod message;
mod plan;
mod rank;
mod results;
mod summary;
mod times;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::ValueEnum;
use tokenyard_conformance::moe::oracle::Routing;
use tokenyard_core::bootstrap::{environment, is_rank_of_mpirun};

pub(crate) use judge::WrongConfig;

use crate::launched::StartRanks;
use crate::layout::LayoutName;
use crate::writable::Files;

const EXAMPLES: &str = "\
Examples:
  tokenyard run configs/cpu.toml
  tokenyard run configs/cpu.toml --ranks 2 --layout packed --input-type fp8 --steps 100
  tokenyard run configs/cpu.toml --input samples/skewed-router.safetensors
  torchrun --nproc-per-node 4 --no-python tokenyard run configs/cpu.toml --as-rank
  mpirun -n 4 tokenyard run configs/cpu.toml

Exit codes: 0 everything is right (where losses are masked, on the ranks that were not lost), 1 a check failed,
2 it could not run, 128 and a signal's number: the signal ended it.
Input files: docs/input-files.md";

/// Arguments of `tokenyard run`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct RunArgs {
    /// The config file.
    config: PathBuf,
    /// Processes to start [default: 4, or from the input file].
    #[arg(long)]
    ranks: Option<u32>,
    /// The number of exchanges, each with fresh data, each checked.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    steps: u32,
    /// The seed of all generated data.
    #[arg(long, default_value_t = 0, value_parser = seed)]
    seed: u64,
    /// Tokens of each rank.
    #[arg(long, default_value_t = 256, conflicts_with = "input")]
    tokens: u32,
    /// Elements of a token's row.
    #[arg(long, default_value_t = 1024, conflicts_with = "input")]
    hidden: u32,
    /// Experts that each token selects.
    #[arg(long, default_value_t = 4, conflicts_with = "input")]
    topk: u32,
    /// Experts on all ranks together [default: 32, or from the input file].
    #[arg(long)]
    experts: Option<u32>,
    /// The layout of received rows.
    #[arg(long, value_enum, default_value_t = LayoutName::Flat)]
    layout: LayoutName,
    /// The alignment of each expert's group in rows (expert-major only).
    #[arg(long, default_value_t = 1)]
    alignment: u32,
    /// The type of rows; fp8 is cast on the way [default: bf16, or from the input file].
    #[arg(long, value_enum)]
    input_type: Option<InputType>,
    /// The experts that the tokens select.
    #[arg(long, value_enum, default_value_t = RoutingName::Uniform, conflicts_with = "input")]
    routing: RoutingName,
    /// Rows and routing from a file instead of generated ones.
    #[arg(long, value_name = "FILE.safetensors")]
    input: Option<PathBuf>,
    /// Writes the rows that combine returned in the last step.
    #[arg(long, value_name = "FILE.safetensors")]
    output: Option<PathBuf>,
    /// The folder where a started rank writes its part of the output.
    #[arg(long, hide = true)]
    parts: Option<PathBuf>,
    /// Be one rank of a world that torchrun or Slurm started, instead of starting ranks. Under mpirun with
    /// more than one rank this is so without the option.
    #[arg(long)]
    as_rank: bool,
    #[command(flatten)]
    start: StartRanks,
    /// Print one JSON document as the last line of standard output; the rest goes to standard error.
    #[arg(long)]
    json: bool,
}

fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("{text} is not in 0..={}", u64::MAX))
}

/// The types of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum InputType {
    Bf16,
    Fp16,
    Fp32,
    /// Cast to FP8 with one f32 scale per 128 elements.
    Fp8,
    /// The same, scales rounded up to powers of two.
    Fp8Round,
    /// The same, scales packed as exponents.
    Fp8Ue8m0,
}

/// The generated routings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum RoutingName {
    /// Experts at random.
    Uniform,
    /// One expert is among those of every token.
    Skewed,
    /// All tokens select one and the same expert.
    OneExpert,
    /// Tokens stay on their rank.
    OwnRank,
    /// About a quarter of the selections are negative: no expert.
    SomeNegative,
    /// About a third of the tokens select nothing.
    SomeNothing,
    /// No token selects anything.
    Nothing,
}

impl From<RoutingName> for Routing {
    fn from(name: RoutingName) -> Self {
        match name {
            RoutingName::Uniform => Self::Uniform,
            RoutingName::Skewed => Self::Skewed,
            RoutingName::OneExpert => Self::OneExpert,
            RoutingName::OwnRank => Self::OwnRank,
            RoutingName::SomeNegative => Self::SomeNegative,
            RoutingName::SomeNothing => Self::SomeNothing,
            RoutingName::Nothing => Self::Nothing,
        }
    }
}

/// The end of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Right,
    CheckFailed,
    DidNotRun,
}

impl Verdict {
    fn code(self) -> u8 {
        match self {
            Self::Right => 0,
            Self::CheckFailed => 1,
            Self::DidNotRun => 2,
        }
    }
}

impl RunArgs {
    /// Whether this process is to start ranks.
    pub(crate) fn starts_ranks(&self) -> bool {
        !self.is_rank()
    }

    /// Whether this process is one rank of a world that a launcher started.
    fn is_rank(&self) -> bool {
        self.as_rank || is_rank_of_mpirun(&environment)
    }

    /// The files that a run reads, none of which it may write.
    fn read_files(&self) -> Files {
        let files = Files::default().reads("the config", &self.config);
        match &self.input {
            Some(input) => files.reads("--input", input),
            None => files,
        }
    }
}

pub(crate) fn main(args: &RunArgs) -> Result<ExitCode> {
    let verdict = if args.is_rank() { rank::main(args)? } else { launch::main(args)? };
    Ok(ExitCode::from(verdict.code()))
}
