//! All-gathers, and sums over all ranks.

use anyhow::{Context, Result, ensure};
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::{TensorMut, TensorRef};
use tokenyard_core::config::Config;
use tokenyard_core::host::tensors::TensorMemory;
use tokenyard_core::ops::gather::reduce::Sum;
use tokenyard_core::ops::gather::{Gather, GatherOptions};

use super::sampler::{Call, Pass, Sampler};
use super::{Measured, OperationSamples};

/// Measures all sizes.
pub(super) fn measure(
    config: &Config,
    sizes: &[u64],
    sampler: &mut Sampler<'_>,
) -> Result<Vec<OperationSamples>> {
    let most = sizes.iter().copied().max().unwrap_or(1);
    let mut gather = open(config, most, sampler)?;
    sampler.check_device(gather.device())?;
    let memory = TensorMemory::open(config, sampler.world, gather.device())?;
    let mut results = Vec::new();
    for bytes in sizes.iter().map(|bytes| *bytes as usize) {
        results.push(all_gather(&mut gather, &memory, bytes, sampler)?);
        // A tensor of f32 is cut into a part for each rank.
        let has_parts = bytes.is_multiple_of(4 * sampler.world.ranks() as usize);
        if gather.options().reduces && has_parts {
            results.push(sum(Measured::ReduceScatter, &mut gather, bytes, sampler)?);
            results.push(sum(Measured::AllReduce, &mut gather, bytes, sampler)?);
        }
    }
    gather.close()?;
    Ok(results)
}

/// A gather that sums where the kernel set does.
fn open(config: &Config, most: u64, sampler: &Sampler<'_>) -> Result<Gather> {
    let options = GatherOptions { reduces: true, ..GatherOptions::new(most) };
    match Gather::open(sampler.world, config, options) {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            let options = GatherOptions { reduces: false, ..options };
            Ok(Gather::open(sampler.world, config, options)?)
        }
        opened => Ok(opened?),
    }
}

/// `parts`: bytes for each rank, which an all-reduce moves twice.
fn call(measured: Measured, size: usize, parts: usize, sampler: &Sampler<'_>) -> Call {
    let ranks = sampler.world.ranks() as usize;
    let times = if measured == Measured::AllReduce { 2 } else { 1 };
    let bytes = (parts * (ranks - 1)) as u64 * u64::from(times);
    Call { measured, size: size as u64, bytes, copied: vec![parts; ranks], times }
}

fn all_gather(
    gather: &mut Gather,
    memory: &TensorMemory,
    bytes: usize,
    sampler: &mut Sampler<'_>,
) -> Result<OperationSamples> {
    let (rank, ranks) = (sampler.world.rank(), sampler.world.ranks());
    let call = call(Measured::AllGather, bytes, bytes, sampler);
    let mut samples = None;
    for pass in Pass::ALL {
        let shard = memory.tensors(vec![vec![pass.filler(rank); bytes]])?;
        let mut whole = memory.tensors(vec![vec![0; bytes * ranks as usize]])?;
        samples = samples.or(sampler
            .run(pass, &call, || Ok(gather.all_gather(&shard.refs()?, &mut whole.muts()?)?))?);
        let whole = whole.into_bytes()?.remove(0);
        let mut shards = whole.chunks(bytes).zip(0..);
        let is_right = shards.all(|(shard, of)| shard.iter().all(|b| *b == pass.filler(of)));
        ensure!(is_right, "all-gather of {bytes} bytes: found other bytes than those of the ranks");
    }
    samples.context("found no sample of gathers")
}

/// Sums numbers for which no order of addition rounds.
fn sum(
    measured: Measured,
    gather: &mut Gather,
    bytes: usize,
    sampler: &mut Sampler<'_>,
) -> Result<OperationSamples> {
    let (rank, ranks) = (sampler.world.rank(), sampler.world.ranks());
    let (length, part) = (bytes / 4, bytes / ranks as usize);
    let call = call(measured, bytes, part, sampler);
    let mut samples = None;
    for pass in Pass::ALL {
        let mine = vec![f32::from(pass.filler(rank)); length];
        let whole = measured == Measured::AllReduce;
        let mut sums = vec![0.0_f32; if whole { length } else { part / 4 }];
        samples = samples.or(sampler.run(pass, &call, || {
            let tensors = [TensorRef::from_slice(&mine, 1, length)?];
            let room = sums.len();
            let mut outs = [TensorMut::from_slice(&mut sums, 1, room)?];
            let summed = match whole {
                true => gather.all_reduce(&tensors, &mut outs, Sum::default()),
                false => gather.reduce_scatter(&tensors, &mut outs, Sum::default()),
            };
            Ok(summed?)
        })?);
        let expected: f32 = (0..ranks).map(|rank| f32::from(pass.filler(rank))).sum();
        let wrong = sums.iter().find(|sum| **sum != expected);
        ensure!(
            wrong.is_none(),
            "{}: found the sum {wrong:?}; expected {expected}",
            measured.name()
        );
    }
    samples.context("found no sample of sums")
}
