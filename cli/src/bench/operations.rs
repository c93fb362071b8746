//! `tokenyard bench gather`, `pipe` and `table`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use tokenyard_bench::gpu;
use tokenyard_bench::ops::{Operation, OperationsTask};
use tokenyard_bench::ranks::RunOn;
use tokenyard_core::config::Config;

use super::{Output, check_files, judge, measuring, print_head, start};
use crate::writable::Files;
use crate::{memory, preload};

const GATHER_EXAMPLE: &str = "\
Example:
  tokenyard bench gather configs/cpu.toml
  tokenyard bench gather configs/nvlink.toml --bytes 33554432 --check

All-gathers of a shard of each rank; where the kernel set sums, reduce-scatters and all-reduces of f32
tensors, too, if those have a part for each rank. Ranks are processes of this machine. Times are of the
host, from the first rank's call to the last one's end, beside a plain copy of the same bytes between
the same processes, or on GPUs what copy engines carry in the same run: 0.95 of that is required where
a rank gets 32 MiB or more from the others. Exit code as for `bench`.";

const PIPE_EXAMPLE: &str = "\
Example:
  tokenyard bench pipe configs/cpu.toml
  tokenyard bench pipe configs/nvlink.toml --bytes 8,56000000

Messages around a ring of ranks, all at once; and half of a message and its answer between two ranks
(`one way`). With several domains, inside each. Ranks, times, ceiling and exit code as for
`bench gather`; 0.95 is required between 2 ranks.";

const TABLE_EXAMPLE: &str = "\
Example:
  tokenyard bench table configs/cpu.toml
  tokenyard bench table configs/nvlink.toml --entries 1000000 --indices 1024,12288

Each rank fetches entries of all ranks, drawn at random, in one domain. Ranks, times, ceiling and exit code as for
`bench gather`: the copies of the ceiling are contiguous.";

/// The fix for sizes that take too much memory.
const FEWER: &str = "choose fewer bytes, entries or ranks";

/// Arguments of all of them.
#[derive(Debug, clap::Args)]
struct Shared {
    /// The config: its kernel set, transport and plugins are measured
    config: PathBuf,
    /// Ranks [default: 2; on GPUs as many as there are GPUs]
    #[arg(long)]
    ranks: Option<u32>,
    /// Samples per line
    #[arg(long, default_value_t = 30)]
    samples: u32,
    #[command(flatten)]
    output: Output,
}

/// Arguments of `tokenyard bench gather`.
#[derive(Debug, clap::Args)]
#[command(after_help = GATHER_EXAMPLE)]
pub(super) struct GatherArgs {
    #[command(flatten)]
    shared: Shared,
    /// Bytes of a rank's shard or tensor, one or several
    #[arg(long, value_delimiter = ',', default_values_t = [65_536, 1 << 20, 32 << 20])]
    bytes: Vec<u64>,
}

/// Arguments of `tokenyard bench pipe`.
#[derive(Debug, clap::Args)]
#[command(after_help = PIPE_EXAMPLE)]
pub(super) struct PipeArgs {
    #[command(flatten)]
    shared: Shared,
    /// Bytes of a message, one or several
    #[arg(long, value_delimiter = ',', default_values_t = [8, 65_536, 56_000_000])]
    bytes: Vec<u64>,
}

/// Arguments of `tokenyard bench table`.
#[derive(Debug, clap::Args)]
#[command(after_help = TABLE_EXAMPLE)]
pub(super) struct TableArgs {
    #[command(flatten)]
    shared: Shared,
    /// Entries of each rank
    #[arg(long, default_value_t = 65_536)]
    entries: u64,
    /// Bytes of an entry
    #[arg(long, default_value_t = 256)]
    entry_bytes: u64,
    /// Entries that a rank fetches in a call, one or several numbers
    #[arg(long, value_delimiter = ',', default_values_t = [128, 12_288])]
    indices: Vec<u32>,
}

impl GatherArgs {
    pub(super) fn run(&self) -> Result<ExitCode> {
        self.shared.run(Operation::Gather(self.bytes.clone()), "gathers")
    }
}

impl PipeArgs {
    pub(super) fn run(&self) -> Result<ExitCode> {
        self.shared.run(Operation::Pipe(self.bytes.clone()), "messages")
    }
}

impl TableArgs {
    pub(super) fn run(&self) -> Result<ExitCode> {
        let Self { entries, entry_bytes, .. } = *self;
        let indices = self.indices.clone();
        self.shared.run(Operation::Table { entries, entry_bytes, indices }, "fetches")
    }
}

impl Shared {
    fn run(&self, operation: Operation, what: &str) -> Result<ExitCode> {
        let Self { config: path, samples, output, .. } = self;
        let task = OperationsTask { operation, samples: *samples };
        let config = Config::load(path)?;
        let on_gpus = gpu::is_gpu(&config);
        let ranks = match self.ranks {
            Some(ranks) => ranks,
            None if on_gpus => gpu::ranks_here(&config)?,
            None => 2,
        };
        task.check(ranks)?;
        let files = Files::default().reads("the config", path);
        check_files(files, &config, &[("--out", &output.out)])?;
        let bytes = task.rank_bytes(ranks, on_gpus).saturating_mul(ranks.into());
        memory::ensure_room(bytes, "operations of these sizes", FEWER)?;
        preload::try_plugins(Some(&config))?;
        let what = format!("{what} between {ranks} ranks, {samples} samples");
        print_head(&config, &what, output.json);
        let start = start(path, RunOn::Machine)?;
        let report =
            measuring(|progress| tokenyard_bench::run_operations(&task, ranks, &start, progress))?;
        judge(output, &report)
    }
}
