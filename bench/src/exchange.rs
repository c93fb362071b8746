//! Dispatch and combine against a plain copy of the same bytes, sample by sample.
//!
//! Each sample is a pair (see [`pairs`](crate::pairs)): the ceiling, then the exchange. The figure is the median of the
//! pairs' ratios.

use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{Cast, Communicator};
use tokenyard_core::config::{ComponentTable, Config};
use tokenyard_core::moe::Layout;
use tokenyard_core::wait::monotonic_ns;

use crate::ceiling::Ceiling;
use crate::job::{Output, Sizes};
use crate::pairs::{Lasted, PairFigures};
use crate::ranks::Speaker;
use crate::workload::Workload;

/// The fraction of the ceiling that dispatch of bf16 rows must reach on CPUs.
pub const REQUIRED_DISPATCH: f64 = 0.6;
/// The fraction of the ceiling that combine of bf16 rows must reach on CPUs.
pub const REQUIRED_COMBINE: f64 = 0.4;

/// Pairs before the first that counts. They touch memory and warm caches and branch predictors.
const WARM_UP: u32 = 5;

/// The task of the ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExchangeTask {
    /// Sizes of a step.
    pub sizes: Sizes,
    /// Pairs per variant.
    pub samples: u32,
}

/// One way to exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Variant {
    /// bf16 rows, flat layout: the one with a requirement.
    Flat,
    /// As `Flat`, with `load_store = false`: rows are staged and put.
    Put,
    /// Cast to FP8 e4m3 on the way; dispatch only.
    Fp8,
    /// bf16 rows grouped by expert.
    ExpertMajor,
    /// bf16 rows in a block per expert, for decoding.
    Packed,
}

impl Variant {
    const ALL: [Self; 5] = [Self::Flat, Self::Put, Self::Fp8, Self::ExpertMajor, Self::Packed];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flat => "flat bf16",
            Self::Put => "flat bf16, put",
            Self::Fp8 => "flat, cast to fp8",
            Self::ExpertMajor => "expert-major bf16",
            Self::Packed => "packed bf16",
        }
    }

    fn layout(self) -> Layout {
        match self {
            Self::Flat | Self::Put | Self::Fp8 => Layout::Flat,
            Self::ExpertMajor => Layout::ExpertMajor { alignment: 1, zero_padding: false },
            Self::Packed => Layout::Packed,
        }
    }

    fn cast(self) -> Cast {
        if self == Self::Fp8 { Cast::Fp8 } else { Cast::None }
    }

    /// Bytes of one row on its way to an expert.
    fn row_bytes(self, sizes: &Sizes) -> u64 {
        u64::from(sizes.hidden) * if self == Self::Fp8 { 1 } else { 2 }
    }
}

/// The times of one variant on one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Samples {
    /// The variant.
    pub variant: Variant,
    /// Bytes of rows that this rank sent.
    pub bytes: u64,
    /// Plain copies to the peers, and dispatches.
    pub dispatch: Vec<(Lasted, Lasted)>,
    /// Plain copies from the peers, and combines; empty where nothing is combined.
    pub combine: Vec<(Lasted, Lasted)>,
}

/// One line of the report.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ExchangeRow {
    /// R, the number of ranks.
    pub ranks: u32,
    /// Sizes of a step.
    #[serde(flatten)]
    pub sizes: Sizes,
    /// The variant's name, for people.
    pub variant: &'static str,
    /// `dispatch` or `combine`.
    pub phase: &'static str,
    /// Bytes of rows per rank: the mean over ranks.
    pub bytes: u64,
    /// Times and rates; the ceiling is the plain copy.
    #[serde(flatten)]
    pub figures: PairFigures,
    /// The ratio that must be reached, if there is one.
    pub required: Option<f64>,
}

/// The config with puts instead of stores, if its transport can do either. Of ours only `shm` has a key for that.
fn put_config(config: &Config) -> Option<Config> {
    let mut config = config.clone();
    let choice = config.scale_up.as_mut().filter(|choice| choice.name == "shm")?;
    choice.table = ComponentTable::from_text("load_store = false\n", &config.name);
    Some(config)
}

/// The work of one rank.
pub(crate) fn measure(
    world: &Arc<World>,
    config: &Config,
    task: &ExchangeTask,
    say: &Speaker,
) -> Result<Vec<Samples>> {
    let sizes = &task.sizes;
    let mut bench = Bench {
        ceiling: Ceiling::open(world, sizes.tokens as usize * sizes.hidden as usize * 2)?,
        workload: Workload::new(sizes, world.rank(), world.ranks()),
    };
    let mut results = Vec::new();
    for (done, variant) in (0..).zip(Variant::ALL) {
        let config = match (variant, put_config(config)) {
            (Variant::Put, None) => continue,
            (Variant::Put, Some(put)) => put,
            _ => config.clone(),
        };
        say.progress(done, Variant::ALL.len() as u64)?;
        let mut comm = Communicator::open(world, &config, Workload::options(sizes))?;
        results.push(bench.variant(&mut comm, variant, task)?);
        comm.close()?;
    }
    Ok(results)
}

struct Bench {
    ceiling: Ceiling,
    workload: Workload,
}

impl Bench {
    fn variant(
        &mut self,
        comm: &mut Communicator,
        variant: Variant,
        task: &ExchangeTask,
    ) -> Result<Samples> {
        let row = variant.row_bytes(&task.sizes);
        let all = (WARM_UP + task.samples) as usize;
        let mut samples = Samples {
            variant,
            bytes: row * self.workload.sends().iter().sum::<u64>(),
            dispatch: Vec::with_capacity(all),
            combine: Vec::with_capacity(all),
        };
        for _ in 0..all {
            self.pair(comm, row, &mut samples).with_context(|| variant.name())?;
        }
        samples.dispatch.drain(..WARM_UP as usize);
        if !samples.combine.is_empty() {
            samples.combine.drain(..WARM_UP as usize);
        }
        Ok(samples)
    }

    /// One pair of dispatch and one of combine.
    fn pair(&mut self, comm: &mut Communicator, row: u64, samples: &mut Samples) -> Result<()> {
        let Self { ceiling, workload } = self;
        let bytes: Vec<usize> = workload.sends().iter().map(|rows| (rows * row) as usize).collect();
        let variant = samples.variant;

        ceiling.barrier()?;
        let start = monotonic_ns();
        ceiling.write(workload.x_bytes(), &bytes)?;
        let plain = (start, monotonic_ns());

        ceiling.barrier()?;
        let start = monotonic_ns();
        let (received, handle) =
            comm.dispatch(&workload.dispatch(variant.layout(), variant.cast())?)?;
        samples.dispatch.push((plain, (start, monotonic_ns())));
        workload.check(&received)?;
        if variant == Variant::Fp8 {
            return Ok(());
        }

        ceiling.barrier()?;
        let start = monotonic_ns();
        ceiling.read(workload.out_bytes_mut(), &bytes)?;
        let plain = (start, monotonic_ns());

        ceiling.barrier()?;
        let start = monotonic_ns();
        comm.combine(&handle, workload.combine(&received)?)?;
        samples.combine.push((plain, (start, monotonic_ns())));
        Ok(())
    }
}

/// The lines of the report for one number of ranks.
pub(crate) fn rows(ranks: u32, sizes: &Sizes, outputs: &[Output]) -> Result<Vec<ExchangeRow>> {
    let mut by_rank = Vec::new();
    for output in outputs {
        let Output::Exchange(samples) = output else { bail!("found {output:?}; expected samples") };
        by_rank.push(samples);
    }
    let variants = by_rank.first().map_or(0, |samples| samples.len());
    ensure!(by_rank.iter().all(|s| s.len() == variants), "ranks measured different variants");
    let mut rows = Vec::new();
    for index in 0..variants {
        let all: Vec<&Samples> = by_rank.iter().map(|samples| &samples[index]).collect();
        let dispatch: Vec<_> = all.iter().map(|s| s.dispatch.as_slice()).collect();
        let combine: Vec<_> = all.iter().map(|s| s.combine.as_slice()).collect();
        let bytes = all.iter().map(|s| s.bytes).sum::<u64>() / u64::from(ranks);
        for (phase, samples) in [("dispatch", dispatch), ("combine", combine)] {
            if let Some(figures) = PairFigures::of(&samples, bytes) {
                let variant = all[0].variant;
                let required = required(variant, phase, sizes);
                let (sizes, variant) = (*sizes, variant.name());
                rows.push(ExchangeRow { ranks, sizes, variant, phase, bytes, figures, required });
            }
        }
    }
    Ok(rows)
}

/// The requirement, which applies only to the named sizes.
fn required(variant: Variant, phase: &str, sizes: &Sizes) -> Option<f64> {
    let named = Sizes { experts: sizes.experts, ..crate::report::NAMED_SIZES };
    match (variant, phase) {
        _ if *sizes != named => None,
        (Variant::Flat, "dispatch") => Some(REQUIRED_DISPATCH),
        (Variant::Flat, "combine") => Some(REQUIRED_COMBINE),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_sizes_have_no_requirement() {
        let sizes = crate::report::NAMED_SIZES;
        assert_eq!(required(Variant::Flat, "combine", &sizes), Some(REQUIRED_COMBINE));
        assert_eq!(required(Variant::Flat, "combine", &Sizes { tokens: 8, ..sizes }), None);
        assert_eq!(required(Variant::Put, "dispatch", &sizes), None);
    }
}
