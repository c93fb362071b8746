//! Steady steps: repeated dispatch and combine must not allocate.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use tokenyard_core::bootstrap::World;
use tokenyard_core::communicator::{Cast, Communicator};
use tokenyard_core::config::Config;
use tokenyard_core::moe::Layout;

use crate::job::{Output, Sizes};
use crate::ranks::Speaker;
use crate::workload::Workload;
use tokenyard_allocations::{Allocations, are_counted};

/// Growth that has other causes than the exchange: a heartbeat in flight, a page of the C library.
pub const SLACK_BYTES: i64 = 64 << 10;

/// Steps before the first that counts.
const WARM_UP: u32 = 200;

/// The task of the ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SteadyTask {
    /// Sizes of a step.
    pub sizes: Sizes,
    /// Steps whose allocations are counted.
    pub counted_steps: u32,
    /// Steps over which memory must not grow.
    pub grown_steps: u32,
}

impl SteadyTask {
    /// The task for this number of ranks.
    pub fn new(ranks: u32) -> Self {
        let sizes = Sizes { tokens: 16, hidden: 256, topk: 4, experts: 8 * ranks };
        Self { sizes, counted_steps: 1_000, grown_steps: 10_000 }
    }
}

/// The figures of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SteadyFigures {
    /// Allocations of all threads but the rendezvous' over the counted steps.
    pub allocations: u64,
    /// Allocations of the rendezvous' control thread meanwhile: heartbeats.
    pub control_allocations: u64,
    /// Growth of the heap over `grown_steps` steps.
    pub heap_growth: i64,
    /// Growth of resident memory (`Rss` of `smaps_rollup`) over `grown_steps` steps.
    pub resident_growth: i64,
    /// Microseconds of a step.
    pub step_us: f64,
}

/// One line of the report: sums and maxima over ranks.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SteadyRow {
    /// R, the number of ranks.
    pub ranks: u32,
    /// Steps whose allocations were counted.
    pub counted_steps: u32,
    /// Allocations of all ranks over them; 0 is required.
    pub allocations: u64,
    /// Allocations of heartbeats meanwhile.
    pub control_allocations: u64,
    /// Steps over which memory was watched.
    pub grown_steps: u32,
    /// The largest growth of a rank's heap, in bytes; at most [`SLACK_BYTES`] is required.
    pub heap_growth: i64,
    /// The largest growth of a rank's resident memory, in bytes; the same limit applies.
    pub resident_growth: i64,
    /// Microseconds of a step, of the slowest rank.
    pub step_us: f64,
}

/// The work of one rank; see [`figures`].
pub(crate) fn measure(
    world: &Arc<World>,
    config: &Config,
    task: &SteadyTask,
    say: &Speaker,
) -> Result<SteadyFigures> {
    let all = u64::from(task.counted_steps + task.grown_steps);
    say.progress(0, all)?;
    let figures = figures(world, config, task)?;
    say.progress(all, all)?;
    Ok(figures)
}

/// Steps on one rank of `world`, in a program that counts allocations. Collective.
///
/// # Errors
/// The communicator reported an error, or the program does not count allocations.
pub fn figures(world: &Arc<World>, config: &Config, task: &SteadyTask) -> Result<SteadyFigures> {
    ensure!(are_counted(), "steady: this program does not use the counting allocator");
    let mut comm = Communicator::open(world, config, Workload::options(&task.sizes))?;
    let mut workload = Workload::new(&task.sizes, world.rank(), world.ranks());
    steps(&mut comm, &mut workload, WARM_UP)?;

    // Ranks of one process share the counters: no rank may start to count while another still runs
    // an earlier phase.
    world.barrier("count")?;
    steps(&mut comm, &mut workload, WARM_UP)?;
    let before = Allocations::now();
    steps(&mut comm, &mut workload, task.counted_steps)?;
    let counted = Allocations::now();
    steps(&mut comm, &mut workload, WARM_UP)?;
    let (allocations, control_allocations) = counted.since(&before);
    world.barrier("counted")?;

    let (heap, resident) = (Allocations::now().live_bytes, resident()?);
    let start = Instant::now();
    steps(&mut comm, &mut workload, task.grown_steps)?;
    let elapsed = start.elapsed();
    let (heap_after, resident_after) = (Allocations::now().live_bytes, self::resident()?);
    // No rank closes its communicator while others of the same process still measure memory.
    world.barrier("grown")?;
    Ok(SteadyFigures {
        allocations,
        control_allocations,
        heap_growth: growth(heap, heap_after),
        resident_growth: growth(resident, resident_after),
        step_us: elapsed.as_secs_f64() * 1e6 / f64::from(task.grown_steps.max(1)),
    })
}

fn growth(before: u64, after: u64) -> i64 {
    after as i64 - before as i64
}

fn steps(comm: &mut Communicator, workload: &mut Workload, steps: u32) -> Result<()> {
    for _ in 0..steps {
        let (received, handle) = comm.dispatch(&workload.dispatch(Layout::Flat, Cast::None)?)?;
        comm.combine(&handle, workload.combine(&received)?)?;
    }
    Ok(())
}

/// Resident memory in bytes, private and shared, without that of files: code becomes resident where it first runs, much
/// of it at a time. `smaps_rollup` is exact; `statm` is not.
fn resident() -> Result<u64> {
    let path = "/proc/self/smaps_rollup";
    let text = std::fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    let kib = |key: &str| -> Result<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(key));
        let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse().ok());
        kib.with_context(|| format!("find {key} in {path}"))
    };
    Ok((kib("Pss_Anon:")? + kib("Pss_Shmem:")?) << 10)
}

/// The line of the report for one number of ranks.
pub(crate) fn row(ranks: u32, outputs: &[Output]) -> Result<SteadyRow> {
    let task = SteadyTask::new(ranks);
    let SteadyTask { counted_steps, grown_steps, .. } = task;
    let mut row = SteadyRow { ranks, counted_steps, grown_steps, ..SteadyRow::default() };
    for output in outputs {
        let Output::Steady(figures) = output else { bail!("found {output:?}; expected figures") };
        row.allocations += figures.allocations;
        row.control_allocations += figures.control_allocations;
        row.heap_growth = row.heap_growth.max(figures.heap_growth);
        row.resident_growth = row.resident_growth.max(figures.resident_growth);
        row.step_us = row.step_us.max(figures.step_us);
    }
    Ok(row)
}
