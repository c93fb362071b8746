//! The cost of a step in commands and bytes: counted, and compared to the protocol's formulas.
//!
//! The formulas are those of the direct algorithm: fixed records per peer, then rows. Nothing grows
//! with E beyond the counts that are exchanged, and nothing with tokens but their (token, rank)
//! pairs.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use serde::{Deserialize, Serialize};
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{Cast, Communicator};
use tokenyard_core::config::{ComponentChoice, ComponentTable, Config};
use tokenyard_core::moe::{Layout, RECORD_HEADER};
use tokenyard_cpu::kernels::PIECE_BYTES;

use crate::counting::{self, Counts};
use crate::job::{Output, Sizes};
use crate::workload::Workload;

/// Numbers of ranks that are compared.
pub const RANKS: [u32; 3] = [2, 4, 8];

/// The path of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Path {
    /// Staged, then put.
    #[default]
    Put,
    /// Stored directly into the peer's arena, and loaded from there.
    LoadStore,
}

/// The task of the ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ScalingTask {
    /// T is multiplied by 1, 2 and 4.
    pub sizes: Sizes,
    /// Steps that are counted and averaged.
    pub steps: u32,
}

impl ScalingTask {
    /// The task for this number of ranks.
    pub fn new(ranks: u32) -> Self {
        Self { sizes: Sizes { tokens: 64, hidden: 1024, topk: 4, experts: 4 * ranks }, steps: 20 }
    }
}

/// The figures of one rank for one T and path.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct ScalingFigures {
    /// The path of rows.
    pub path: Path,
    /// T.
    pub tokens: u32,
    /// Rows this rank sent, in a step: its (token, rank) pairs.
    pub pairs_sent: u64,
    /// Rows this rank received.
    pub pairs_received: u64,
    /// Posted in one dispatch and one combine.
    pub counted: Counts,
    /// The counts by the formulas.
    pub predicted: Counts,
    /// Microseconds of a dispatch and combine.
    pub step_us: f64,
}

/// One line of the report: sums over ranks, the time of the slowest.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct ScalingRow {
    /// R, the number of ranks.
    pub ranks: u32,
    /// The path of rows.
    pub path: Path,
    /// T.
    pub tokens: u32,
    /// (token, rank) pairs of all ranks.
    pub pairs: u64,
    /// Commands of all ranks in a step.
    pub commands: u64,
    /// Bytes that these commands moved.
    pub bytes: u64,
    /// Whether every rank's counts equal the formulas; required.
    pub as_predicted: bool,
    /// Microseconds of a step.
    pub step_us: f64,
}

/// The counts of one rank for one dispatch and one combine of flat bf16 rows with weights, by the
/// formulas.
pub fn predict(path: Path, sizes: &Sizes, workload: &Workload) -> Counts {
    let ranks = workload.sends().len() as u64;
    let local = u64::from(sizes.experts) / ranks;
    let row = 2 * u64::from(sizes.hidden);
    // With each row: K ids, K weights, and its source.
    let side = 8 * u64::from(sizes.topk) + 4;
    let steps = |count: u64| count.div_ceil(0xffff);
    // Rows are put as they are staged, in pieces; one thread stages.
    let pieces = |rows: u64| rows.div_ceil((PIECE_BYTES / row).max(1));
    // An entry and a grant with a count per local expert; the entry of the combine without.
    // Both operations end with "done" to every peer.
    let records = Counts {
        puts: 3 * ranks,
        signals: 2 * ranks,
        bytes: ranks * (2 * (RECORD_HEADER + 4 * local) + RECORD_HEADER),
    };
    // "Rows are there": four arrays of each.
    let stored = |rows: u64| steps(4 * rows);
    let sum = |rows: &[u64], of: &dyn Fn(u64) -> u64| rows.iter().map(|n| of(*n)).sum::<u64>();
    let own = workload.sends()[workload.rank() as usize];
    // Rows to other ranks and from them; own rows do not move.
    let sum_of_others = |rows: &[u64], of: &dyn Fn(u64) -> u64| sum(rows, of) - of(own);
    let (sends, receives) = (workload.sends(), workload.receives());
    match path {
        Path::Put => Counts {
            // Pieces of rows, then ids, weights and sources to each other rank; rows back to each.
            puts: records.puts
                + sum_of_others(sends, &|n| pieces(n) + 3 * steps(n))
                + sum_of_others(receives, &steps),
            signals: records.signals + stored(own),
            bytes: records.bytes
                + sum_of_others(sends, &|n| n * (row + side))
                + sum_of_others(receives, &|n| n * row),
        },
        Path::LoadStore => Counts { signals: records.signals + sum(sends, &stored), ..records },
    }
}

/// The config with the counting transport, on the path. The call registers that transport in this
/// process.
pub fn counted_config(config: &Config, path: Path) -> Config {
    counting::provide();
    let text = match path {
        Path::Put => "load_store = false\n",
        Path::LoadStore => "load_store = true\n",
    };
    let table = ComponentTable::from_text(text, &config.name);
    let choice = ComponentChoice { name: counting::NAME.to_owned(), line: 0, table };
    Config { scale_up: Some(choice), scale_out: Vec::new(), ..config.clone() }
}

/// Counts on one rank of `world`, both paths, three T. Collective.
///
/// # Errors
/// The communicator reported an error.
pub fn measure(
    world: &Arc<World>,
    config: &Config,
    task: &ScalingTask,
) -> Result<Vec<ScalingFigures>> {
    let mut all = Vec::new();
    for path in [Path::Put, Path::LoadStore] {
        let config = counted_config(config, path);
        for factor in [1, 2, 4] {
            let sizes = Sizes { tokens: factor * task.sizes.tokens, ..task.sizes };
            let mut comm = Communicator::open(world, &config, Workload::options(&sizes))?;
            all.push(figures(&mut comm, path, &sizes, task.steps)?);
            comm.close()?;
        }
    }
    Ok(all)
}

fn figures(
    comm: &mut Communicator,
    path: Path,
    sizes: &Sizes,
    steps: u32,
) -> Result<ScalingFigures> {
    let rank = comm.rank();
    let mut workload = Workload::new(sizes, rank, comm.shape().ranks);
    step(comm, &mut workload)?;
    let (before, start) = (counting::counts(rank), Instant::now());
    for _ in 0..steps {
        step(comm, &mut workload)?;
    }
    let elapsed = start.elapsed();
    let sum = counting::counts(rank).since(&before);
    let steps = u64::from(steps.max(1));
    ensure!(
        [sum.puts, sum.signals, sum.bytes].iter().all(|n| n % steps == 0),
        "found {sum:?} in {steps} equal steps; expected a multiple"
    );
    Ok(ScalingFigures {
        path,
        tokens: sizes.tokens,
        pairs_sent: workload.sends().iter().sum(),
        pairs_received: workload.receives().iter().sum(),
        counted: Counts {
            puts: sum.puts / steps,
            signals: sum.signals / steps,
            bytes: sum.bytes / steps,
        },
        predicted: predict(path, sizes, &workload),
        step_us: elapsed.as_secs_f64() * 1e6 / steps as f64,
    })
}

fn step(comm: &mut Communicator, workload: &mut Workload) -> Result<()> {
    let (received, handle) = comm.dispatch(&workload.dispatch(Layout::Flat, Cast::None)?)?;
    workload.check(&received)?;
    comm.combine(&handle, workload.combine(&received)?)?;
    Ok(())
}

/// The lines of the report for one number of ranks.
pub(crate) fn rows(ranks: u32, outputs: &[Output]) -> Result<Vec<ScalingRow>> {
    let mut rows: Vec<ScalingRow> = Vec::new();
    for output in outputs {
        let Output::Scaling(all) = output else { bail!("found {output:?}; expected figures") };
        for (index, found) in all.iter().enumerate() {
            if rows.len() == index {
                let (path, tokens) = (found.path, found.tokens);
                let new =
                    ScalingRow { ranks, path, tokens, as_predicted: true, ..Default::default() };
                rows.push(new);
            }
            let row = &mut rows[index];
            row.pairs += found.pairs_sent;
            row.commands += found.counted.commands();
            row.bytes += found.counted.bytes;
            row.as_predicted &= found.counted == found.predicted;
            row.step_us = row.step_us.max(found.step_us);
        }
    }
    Ok(rows)
}
