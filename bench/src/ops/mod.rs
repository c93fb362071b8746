//! Operations beside MoE against the same bytes, copied: gathers with sums, messages of pipes, fetches of tables.
//!
//! `gather`, `pipe` and `table` each run one operation; `sampler` takes the pairs of samples. Between CPUs the
//! ceiling is a plain copy of the same bytes between the same processes, between GPUs the rate of copy engines, which
//! the same run measures. Times are those of the host: a call's begin to its end.

mod gather;
mod pipe;
mod sampler;
mod table;

use std::fmt;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::Config;

use crate::gpu::Engines;
use crate::gpu::machine::Machine;
use crate::gpu::setup::Setup;
use crate::job::{MAX_SAMPLES, Output};
use crate::pairs::{Lasted, PairFigures};
use crate::ranks::Speaker;
use crate::report::{heading, short};
use crate::table::table as aligned;
use sampler::Sampler;

/// The fraction of the rate of copy engines that large gathers and messages must reach between GPUs.
pub const REQUIRED_ENGINES: f64 = 0.95;
/// Bytes to or from a rank from which that is required.
pub const LARGE: u64 = 32 << 20;
/// The most bytes of a rank in one call.
pub const MAX_BYTES: u64 = 1 << 34;
/// The most entries of a rank in a layer of a table, and bytes of one: those of `TableOptions`.
const MAX_ENTRIES: u64 = 1 << 32;
const MAX_ENTRY_BYTES: u64 = 1 << 30;

/// The task of the ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OperationsTask {
    /// The operation.
    pub operation: Operation,
    /// Samples of each size, at least 1.
    pub samples: u32,
}

/// An operation and its sizes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Operation {
    /// All-gathers of shards of these bytes; where the kernel set sums, reduce-scatters and all-reduces of f32 tensors
    /// of these bytes, too, if those have R parts.
    Gather(Vec<u64>),
    /// Messages of these bytes.
    Pipe(Vec<u64>),
    /// Fetches of entries that are spread over all ranks.
    Table {
        /// Entries of each rank.
        entries: u64,
        /// Bytes of each.
        entry_bytes: u64,
        /// Numbers of entries that a rank fetches in a call.
        indices: Vec<u32>,
    },
}

/// The subject of a line of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Measured {
    /// Each rank gets the shards of all.
    AllGather,
    /// Each rank gets its part of the sum of all tensors.
    ReduceScatter,
    /// Each rank gets that sum.
    AllReduce,
    /// Each rank sends to the next one, and receives from the one before.
    Message,
    /// Half of a message and its answer, between pairs of ranks.
    OneWay,
    /// Each rank fetches entries of all ranks.
    Fetch,
}

impl Measured {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all-gather",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllReduce => "all-reduce",
            Self::Message => "message",
            Self::OneWay => "one way",
            Self::Fetch => "fetch",
        }
    }
}

/// The figures of one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OperationFigures {
    /// The GPU and its copy engines; none between CPUs.
    pub engines: Option<Engines>,
    /// Samples, in the order of sizes.
    pub samples: Vec<OperationSamples>,
}

/// Samples of one operation and size on one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OperationSamples {
    /// The subject.
    pub measured: Measured,
    /// Bytes of a shard, tensor or message, or of all fetched entries.
    pub size: u64,
    /// Bytes that this rank gets from others in a call.
    pub bytes: u64,
    /// The ceiling, and the operation.
    pub pairs: Vec<(Lasted, Lasted)>,
}

/// All figures of a run.
#[derive(Clone, Debug, Serialize)]
pub struct OperationsReport {
    /// R, the number of ranks.
    pub ranks: u32,
    /// The GPU of rank 0; none between CPUs.
    pub machine: Option<Machine>,
    /// Stand-ins, where there are some: each figure is one over them.
    pub stand_ins: Vec<String>,
    /// `plain copy` or `copy engines`.
    pub ceiling: &'static str,
    /// A line for each operation and size.
    pub rows: Vec<OperationRow>,
}

/// One line of the report.
#[derive(Clone, Debug, Serialize)]
pub struct OperationRow {
    /// `all-gather`, `reduce-scatter`, `all-reduce`, `message`, `one way` or `fetch`.
    pub operation: &'static str,
    /// Bytes of a rank's shard, tensor or message, or of the entries that it fetches.
    pub size: u64,
    /// Bytes that a rank gets from others in a call: the mean over ranks.
    pub bytes: u64,
    /// Times and rates.
    #[serde(flatten)]
    pub figures: PairFigures,
    /// The ratio that must be reached, if there is one.
    pub required: Option<f64>,
}

impl OperationsTask {
    /// Bytes of host memory that one of `ranks` ranks takes, about: tensors, windows, and a plain copy. On GPUs
    /// windows lie there.
    pub fn rank_bytes(&self, ranks: u32, on_gpus: bool) -> u64 {
        let most = |sizes: &[u64]| sizes.iter().copied().max().unwrap_or(0);
        let ranks = u64::from(ranks);
        // The most that puts and sums take: docs/pipes.md.
        let of_windows = if on_gpus { 0 } else { 10 * ranks };
        match &self.operation {
            Operation::Gather(sizes) => most(sizes).saturating_mul(of_windows + ranks + 4),
            Operation::Pipe(sizes) => most(sizes).saturating_mul(of_windows + 4),
            Operation::Table { entries, entry_bytes, indices } => {
                let fetched = u64::from(indices.iter().copied().max().unwrap_or(0));
                let rows = entries.saturating_mul(2).saturating_add(fetched * 6);
                rows.saturating_mul(*entry_bytes).saturating_add(fetched * 32)
            }
        }
    }

    /// Refuses a task that no rank would accept.
    ///
    /// # Errors
    /// A value is out of range; the error names it and the range.
    pub fn check(&self, ranks: u32) -> Result<()> {
        ensure!(
            (2..=64).contains(&ranks),
            "check bench: found {ranks} ranks; expected 2 to 64 (they share this machine)"
        );
        ensure!(
            (1..=MAX_SAMPLES).contains(&self.samples),
            "check bench: found {} samples; expected 1 to {MAX_SAMPLES}",
            self.samples
        );
        match &self.operation {
            Operation::Gather(sizes) | Operation::Pipe(sizes) => {
                for bytes in sizes {
                    ensure!(
                        (1..=MAX_BYTES).contains(bytes),
                        "check bench: found --bytes {bytes}; expected 1 to {MAX_BYTES}"
                    );
                }
            }
            Operation::Table { entries, entry_bytes, indices } => {
                let bytes = entries.saturating_mul(*entry_bytes);
                let fits = *entries <= MAX_ENTRIES && *entry_bytes <= MAX_ENTRY_BYTES;
                ensure!(
                    fits && (1..=MAX_BYTES).contains(&bytes),
                    "check bench: found {entries} entries of {entry_bytes} bytes; expected up to {MAX_ENTRIES} of up \
                     to {MAX_ENTRY_BYTES} bytes, and 1 to {MAX_BYTES} bytes in all"
                );
                for count in indices {
                    let bytes = u64::from(*count).saturating_mul(*entry_bytes);
                    ensure!(
                        (1..=MAX_BYTES).contains(&bytes) && *count <= i32::MAX as u32,
                        "check bench: found --indices {count} of {entry_bytes} bytes; expected up to {} indices, and \
                         1 to {MAX_BYTES} bytes",
                        i32::MAX
                    );
                }
            }
        }
        Ok(())
    }
}

/// The work of one rank.
pub(crate) fn measure(
    world: &Arc<World>,
    config: &Config,
    task: &OperationsTask,
    say: &Speaker,
) -> Result<OperationFigures> {
    let room = match &task.operation {
        Operation::Gather(sizes) | Operation::Pipe(sizes) => sizes.iter().copied().max(),
        Operation::Table { entry_bytes, indices, .. } => {
            indices.iter().max().map(|most| u64::from(*most) * entry_bytes)
        }
    };
    let room = room.context("check bench: found no size; expected one or several")?;
    let mut sampler = Sampler::open(world, config, room, task.samples, say)?;
    let samples = match &task.operation {
        Operation::Gather(sizes) => gather::measure(config, sizes, &mut sampler),
        Operation::Pipe(sizes) => pipe::measure(config, sizes, &mut sampler),
        Operation::Table { entries, entry_bytes, indices } => {
            let form = table::Form { entries: *entries, entry_bytes: *entry_bytes };
            table::measure(config, form, indices, &mut sampler)
        }
    }?;
    Ok(OperationFigures { engines: sampler.close(), samples })
}

/// The report from the figures of all ranks.
pub(crate) fn report(config: &Config, outputs: &[Output]) -> Result<OperationsReport> {
    let mut by_rank = Vec::new();
    for output in outputs {
        let Output::Operations(figures) = output else {
            bail!("found {output:?}; expected figures of operations");
        };
        by_rank.push(figures);
    }
    let ranks = by_rank.len() as u32;
    let first = by_rank.first().context("found no rank's figures")?;
    let has_levels = config.scale_up.is_none() || config.domains.is_some_and(|domains| domains > 1);
    let mut stand_ins = Setup::of(config)?.stand_ins(has_levels);
    if let Some(gpus) = first.engines.as_ref().map(|engines| engines.gpus)
        && gpus < ranks
    {
        stand_ins.push(format!("ranks share a GPU: {ranks} ranks on {gpus} GPUs"));
    }
    let is_held = first.engines.is_some() && stand_ins.is_empty();
    let samples: Vec<_> = by_rank.iter().map(|figures| &figures.samples[..]).collect();
    Ok(OperationsReport {
        ranks,
        machine: first.engines.as_ref().map(|engines| engines.machine.clone()),
        stand_ins,
        ceiling: if first.engines.is_some() { "copy engines" } else { "plain copy" },
        rows: rows(&samples, is_held)?,
    })
}

/// `is_held`: the ratio to copy engines is required.
fn rows(by_rank: &[&[OperationSamples]], is_held: bool) -> Result<Vec<OperationRow>> {
    let first = *by_rank.first().context("found no rank's figures")?;
    ensure!(by_rank.iter().all(|s| s.len() == first.len()), "ranks measured different operations");
    let row = |(index, one): (usize, &OperationSamples)| {
        let all: Vec<_> = by_rank.iter().map(|samples| &samples[index]).collect();
        // A rank that measures nothing has no partner, or answers.
        let measuring: Vec<_> = all.iter().filter(|one| !one.pairs.is_empty()).collect();
        let bytes = measuring.iter().map(|one| one.bytes).sum::<u64>();
        let bytes = bytes.checked_div(measuring.len() as u64)?;
        let pairs: Vec<_> = measuring.iter().map(|one| &one.pairs[..]).collect();
        let figures = PairFigures::of(&pairs, bytes)?;
        // One of several links may join a rank with the next one, and the rate of engines is that of all.
        let is_held = is_held && (one.measured != Measured::Message || all.len() == 2);
        let required = required(one.measured, bytes).filter(|_| is_held);
        let (operation, size) = (one.measured.name(), one.size);
        Some(OperationRow { operation, size, bytes, figures, required })
    };
    Ok(first.iter().enumerate().filter_map(row).collect())
}

fn required(measured: Measured, bytes: u64) -> Option<f64> {
    let is_large = matches!(measured, Measured::AllGather | Measured::Message) && bytes >= LARGE;
    is_large.then_some(REQUIRED_ENGINES)
}

impl OperationsReport {
    /// The lines that missed their requirement, in words.
    pub(crate) fn missed(&self) -> impl Iterator<Item = String> {
        self.rows.iter().filter_map(|row| {
            let OperationRow { operation, size, figures, required, .. } = row;
            let (ratio, required) = (figures.ratio, (*required)?);
            let Self { ranks, ceiling, .. } = self;
            (ratio < required).then(|| {
                format!(
                    "{operation} of {size} bytes, {ranks} ranks: found {ratio:.2} of the {ceiling}; required {required}"
                )
            })
        })
    }
}

impl fmt::Display for OperationsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { ranks, ceiling, .. } = self;
        match &self.machine {
            Some(machine) => writeln!(f, "{}; times in us", machine.line(*ranks))?,
            None => writeln!(f, "{ranks} ranks; times in us")?,
        }
        for stand_in in &self.stand_ins {
            writeln!(f, "a stand-in: {stand_in}")?;
        }
        let mut lines = vec![heading("operation bytes ceiling min median p99 GB/s ratio need")];
        for row in &self.rows {
            let figures = &row.figures;
            let mut line = vec![row.operation.to_owned(), row.size.to_string()];
            let times = [figures.ceiling_ms, figures.min_ms, figures.ms, figures.p99_ms];
            line.extend(times.map(|ms| short(ms * 1e3)));
            line.extend([short(figures.gb_per_s), format!("{:.2}", figures.ratio)]);
            line.push(row.required.map_or_else(|| "-".to_owned(), |ratio| ratio.to_string()));
            lines.push(line);
        }
        writeln!(
            f,
            "{}\nceiling: {ceiling}, the same bytes. GB/s: bytes from others, by the median.\n\
             ratio: ceiling / operation. need: the ratio that is required",
            aligned(1, &lines)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(measured: Measured, bytes: u64, us: u64) -> OperationSamples {
        let pairs = vec![((0, 1_000), (5_000, 5_000 + us * 1_000))];
        OperationSamples { measured, size: bytes, bytes, pairs }
    }

    fn report(rows: Vec<OperationRow>) -> OperationsReport {
        let stand_ins = vec!["paced: 46 GB/s".to_owned()];
        OperationsReport { ranks: 2, machine: None, stand_ins, ceiling: "copy engines", rows }
    }

    #[test]
    fn large_gathers_and_messages_over_copy_engines_have_a_requirement() {
        let held = |measured, bytes| required(measured, bytes).is_some();
        assert!(held(Measured::AllGather, LARGE) && held(Measured::Message, LARGE));
        assert!(!held(Measured::Message, LARGE - 1) && !held(Measured::Fetch, LARGE));
        let all = [samples(Measured::Message, LARGE, 1)];
        assert_eq!(rows(&[&all, &all], false).unwrap()[0].required, None);
        assert_eq!(rows(&[&all, &all], true).unwrap()[0].required, Some(REQUIRED_ENGINES));
    }

    #[test]
    fn a_rank_that_measures_nothing_changes_no_time() {
        let of = |us| [samples(Measured::OneWay, 8, us)];
        let [idle] = of(1);
        let idle = [OperationSamples { bytes: 0, pairs: Vec::new(), ..idle }];
        let found = rows(&[&of(2), &of(2), &idle], false).unwrap();
        assert_eq!((found.len(), found[0].figures.ms, found[0].bytes), (1, 0.002, 8));
    }

    #[test]
    fn the_table_fits_80_columns_and_a_miss_is_in_words() {
        let all =
            [Measured::AllGather, Measured::ReduceScatter].map(|of| samples(of, 1 << 34, 400_000));
        let report = report(rows(&[&all], true).unwrap());
        let text = report.to_string();
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains("a stand-in: paced"), "{text}");
        let missed: Vec<_> = report.missed().collect();
        assert!(missed.len() == 1 && missed[0].contains("required 0.95"), "{missed:?}");
    }

    #[test]
    fn sizes_that_no_table_takes_are_refused_before_ranks_start() {
        let task = |entries, entry_bytes, indices| OperationsTask {
            operation: Operation::Table { entries, entry_bytes, indices: vec![indices] },
            samples: 1,
        };
        assert!(task(MAX_ENTRIES, 1, 5).check(2).is_ok());
        assert!(task(MAX_ENTRIES + 1, 1, 5).check(2).is_err());
        assert!(task(1, MAX_ENTRY_BYTES + 1, 1).check(2).is_err());
        assert!(task(5, 1, 1 << 31).check(2).is_err());
        assert!(task(5, 1, 5).check(1).is_err());
    }

    #[test]
    fn a_message_to_one_of_several_ranks_is_not_held_to_the_rate_of_all_links() {
        let all = [samples(Measured::Message, LARGE, 1)];
        let of = |ranks| rows(&vec![&all[..]; ranks], true).unwrap()[0].required;
        assert_eq!([of(2), of(3)], [Some(REQUIRED_ENGINES), None]);
    }
}
