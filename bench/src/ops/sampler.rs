//! Pairs of samples: the ceiling, and an operation.

use std::sync::Arc;

use anyhow::Result;
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::Config;
use tokenyard_core::wait::monotonic_ns;

use super::{Measured, OperationSamples};
use crate::ceiling::Ceiling;
use crate::gpu::{self, Engines};
use crate::pairs::Lasted;
use crate::ranks::Speaker;

/// Pairs before the first that counts. They touch memory, and warm caches.
const WARM_UP: u32 = 3;

/// A call to be measured.
pub(super) struct Call {
    pub(super) measured: Measured,
    /// Bytes of a shard, tensor or message, or of the fetched entries.
    pub(super) size: u64,
    /// Bytes that this rank's ceiling copies to each rank.
    pub(super) copied: Vec<usize>,
    /// How often: an all-reduce moves its bytes twice.
    pub(super) times: u32,
}

impl Call {
    /// As many as come from others.
    fn bytes_to_others(&self, rank: u32) -> u64 {
        let others = self.copied.iter().enumerate().filter(|(peer, _)| *peer != rank as usize);
        others.map(|(_, bytes)| *bytes as u64).sum::<u64>() * u64::from(self.times)
    }
}

/// See the [module](self).
pub(super) struct Sampler<'w> {
    pub(super) world: &'w Arc<World>,
    say: &'w Speaker,
    /// Plain copies; between GPUs its barriers alone.
    copies: Ceiling,
    /// Bytes of a copy.
    from: Vec<u8>,
    /// Between GPUs: the ceiling.
    pub(super) engines: Option<Engines>,
    samples: u32,
}

impl<'w> Sampler<'w> {
    /// `room`: the most bytes that a rank copies to another. Collective.
    pub(super) fn open(
        world: &'w Arc<World>,
        config: &Config,
        room: u64,
        samples: u32,
        say: &'w Speaker,
    ) -> Result<Self> {
        let engines = match gpu::is_gpu(config) {
            true => Some(gpu::engines(world, config, say)?),
            false => None,
        };
        let bytes = if engines.is_some() { 1 } else { room as usize };
        let copies = Ceiling::open(world, bytes)?;
        Ok(Self { world, say, copies, from: vec![1; bytes], engines, samples })
    }

    /// Measures a call. `is_idle`: this rank takes no part but in the barriers.
    pub(super) fn measure(
        &mut self,
        call: &Call,
        is_idle: bool,
        mut run: impl FnMut() -> Result<()>,
    ) -> Result<OperationSamples> {
        let all = WARM_UP + self.samples;
        let mut pairs = Vec::with_capacity(all as usize);
        for done in 0..all {
            self.say.progress(done.into(), all.into())?;
            let ceiling = self.ceiling(call)?;
            self.copies.barrier()?;
            let start = monotonic_ns();
            if !is_idle {
                run()?;
            }
            pairs.push((ceiling, (start, monotonic_ns())));
        }
        pairs.drain(..WARM_UP as usize);
        if is_idle {
            pairs.clear();
        }
        let bytes = call.bytes_to_others(self.world.rank());
        let (measured, size) = (call.measured, call.size);
        Ok(OperationSamples { measured, size, bytes, pairs })
    }

    /// The time of the ceiling, for the bytes of a call.
    fn ceiling(&mut self, call: &Call) -> Result<Lasted> {
        if let Some(engines) = &self.engines {
            let bytes = call.bytes_to_others(self.world.rank()) as f64;
            return Ok((0, (bytes / engines.bytes_per_s * 1e9) as u64));
        }
        self.copies.barrier()?;
        let start = monotonic_ns();
        for _ in 0..call.times {
            self.copies.write(&self.from, &call.copied)?;
        }
        Ok((start, monotonic_ns()))
    }
}
