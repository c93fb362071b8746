//! The ceiling: the rate of the link between GPUs.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tokenyard_core::bootstrap::World;
use tokenyard_gpu::probe::{About, Copies, Probe};

pub use tokenyard_gpu::probe::CopyMethod as Copy;

use super::Components;
use crate::ranks::Speaker;

/// Bytes of a row: those of 7,168 bf16 channels. Rows of 3,584 bytes and more reach the same rate.
pub const ROW_BYTES: u32 = 14_336;
/// Bytes that each rank sends, about. They are many, so that launches and barriers do not matter.
const BYTES: u64 = 256 << 20;
/// Launches of a measurement, and the number of first ones that do not count.
const LAUNCHES: u32 = 13;
const WARM_UP: usize = 3;
/// Rounds of barriers and of counts.
const ROUNDS: u32 = 500;
/// Counts that a rank sends to every other: of 256 experts and 8 ranks.
pub const COUNTS: u32 = 264;

/// Launches of one kind, on one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Launches {
    /// The way of the copies.
    pub copy: Copy,
    /// The number of multiprocessors; 0 for copy engines.
    pub sms: u32,
    /// The time of each launch, in microseconds.
    pub us: Vec<f64>,
}

/// The figures of one rank.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct CeilingFigures {
    /// Bytes that each launch moves from this rank to all others.
    pub bytes: u64,
    /// The launches in the order in which they were measured.
    pub launches: Vec<Launches>,
    /// The time of a barrier of all ranks.
    pub barrier_us: f64,
    /// The time of an exchange of [`COUNTS`] counts.
    pub counts_us: f64,
    /// The time of an empty kernel, launched back to back.
    pub launch_us: f64,
}

/// The wanted SM counts that a device with `processors` multiprocessors can use, and that number
/// itself.
fn counts(wanted: &[u32], processors: u32) -> Vec<u32> {
    let fewer = wanted.iter().copied().filter(|count| (1..processors).contains(count));
    fewer.chain([processors]).collect()
}

/// The work of one rank.
pub(crate) fn measure<C: tokenyard_gpu::Components>(
    world: &World,
    components: &Components,
    sms: &[u32],
    say: &Speaker,
) -> Result<(About, CeilingFigures)> {
    let peers = u64::from(world.ranks().saturating_sub(1).max(1));
    let room = (BYTES / peers).next_multiple_of(u64::from(ROW_BYTES));
    let mut probe = Probe::<C>::open(world, &components.kernels, &components.link, room)?;
    let about = probe.about().clone();
    let sms = counts(sms, fewest(world, about.processors)?);
    let mut plan = vec![(Copy::PushEngines, 0)];
    for copy in [Copy::PushBulk, Copy::PullBulk, Copy::PushVectors, Copy::PullVectors] {
        let bulk = matches!(copy, Copy::PushBulk | Copy::PullBulk);
        if !bulk || probe.has_bulk_copies() {
            plan.extend(sms.iter().map(|count| (copy, *count)));
        }
    }
    let mut launches = Vec::new();
    for (done, (copy, sms)) in plan.iter().copied().enumerate() {
        say.progress(done as u64, plan.len() as u64)?;
        let copies = Copies { method: copy, blocks: sms, row_bytes: ROW_BYTES, launches: LAUNCHES };
        let us = probe.copies(world, &copies).with_context(|| copy.name())?;
        launches.push(Launches { copy, sms, us: us.into_iter().skip(WARM_UP).collect() });
    }
    let figures = CeilingFigures {
        bytes: peers * probe.bytes_per_peer(ROW_BYTES),
        launches,
        barrier_us: probe.barrier_us(ROUNDS)?,
        counts_us: probe.counts_us(COUNTS, ROUNDS)?,
        launch_us: probe.launch_us(ROUNDS)?,
    };
    // No rank unmaps memory that others still use.
    world.barrier("link measured")?;
    Ok((about, figures))
}

/// The number of multiprocessors of the smallest GPU: all ranks copy with at most as many.
fn fewest(world: &World, processors: u32) -> Result<u32> {
    let all = world.all_gather("probe processors", &processors.to_le_bytes())?;
    let counts = all.iter().filter_map(|bytes| bytes.as_slice().try_into().ok());
    Ok(counts.map(u32::from_le_bytes).min().unwrap_or(processors))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_beyond_the_device_are_left_out_and_all_of_it_is_added() {
        assert_eq!(counts(&[4, 8, 132, 200, 0], 132), [4, 8, 132]);
        assert_eq!(counts(&[], 16), [16]);
    }
}
