//! Pairs of samples: the ceiling, and an operation.

use std::sync::Arc;

use anyhow::{Result, ensure};
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::Config;
use tokenyard_core::wait::monotonic_ns;

use super::{Measured, OperationSamples};
use crate::ceiling::Ceiling;
use crate::gpu::{self, EngineRate, Engines};
use crate::pairs::Lasted;
use crate::ranks::Speaker;

/// Pairs before the first that counts. They touch memory, and warm caches.
const WARM_UP: u32 = 3;

/// A call to be measured.
pub(super) struct Call {
    pub(super) measured: Measured,
    /// Bytes of a shard, tensor or message, or of the fetched entries.
    pub(super) size: u64,
    /// Bytes that this rank gets from others.
    pub(super) bytes: u64,
    /// Bytes that this rank's ceiling copies to each rank.
    pub(super) copied: Vec<usize>,
    /// How often: an all-reduce moves its bytes twice.
    pub(super) times: u32,
}

/// A call is measured, and made once more, into other outputs and with other bytes: what calls before left
/// somewhere does not pass for what it brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pass {
    Measured,
    Checked,
}

impl Pass {
    pub(super) const ALL: [Self; 2] = [Self::Measured, Self::Checked];

    /// The byte that a rank's tensors are filled with.
    pub(super) fn filler(self, rank: u32) -> u8 {
        rank as u8 + if self == Self::Measured { 1 } else { 101 }
    }
}

impl Call {
    /// Bytes of the ceiling that leave this rank.
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
    engines: Option<EngineRate>,
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

    /// Refuses an operation on a device whose links were not measured.
    pub(super) fn check_device(&self, device: Option<i32>) -> Result<()> {
        ensure!(
            device.is_none() || self.engines.is_some(),
            "check bench: found a kernel set of a device; expected `cuda`, `rocm`, or one that works on host memory"
        );
        Ok(())
    }

    /// The GPU, right after the measurements.
    pub(super) fn close(self) -> Option<Engines> {
        self.engines.map(|engines| engines.into_facts(self.world.rank()))
    }

    /// Measures a call, or makes it once more, for its bytes to be checked.
    pub(super) fn run(
        &mut self,
        pass: Pass,
        call: &Call,
        mut run: impl FnMut() -> Result<()>,
    ) -> Result<Option<OperationSamples>> {
        match pass {
            Pass::Measured => self.measure(call, run).map(Some),
            Pass::Checked => run().map(|()| None),
        }
    }

    fn measure(
        &mut self,
        call: &Call,
        mut run: impl FnMut() -> Result<()>,
    ) -> Result<OperationSamples> {
        let all = WARM_UP + self.samples;
        let mut pairs = Vec::with_capacity(all as usize);
        for done in 0..all {
            self.say.progress(done.into(), all.into())?;
            let ceiling = self.ceiling(call)?;
            self.copies.barrier()?;
            let start = monotonic_ns();
            run()?;
            pairs.push((ceiling, (start, monotonic_ns())));
        }
        pairs.drain(..WARM_UP as usize);
        let Call { measured, size, bytes, .. } = *call;
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
