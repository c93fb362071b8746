//! All-gathers, and sums over all ranks.

use anyhow::{Result, ensure};
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::{TensorMut, TensorRef};
use tokenyard_core::config::Config;
use tokenyard_core::host::tensors::TensorMemory;
use tokenyard_core::ops::gather::reduce::Sum;
use tokenyard_core::ops::gather::{Gather, GatherOptions};

use super::sampler::{Call, Sampler};
use super::{Measured, OperationSamples};

/// Measures all sizes.
pub(super) fn measure(
    config: &Config,
    sizes: &[u64],
    sampler: &mut Sampler<'_>,
) -> Result<Vec<OperationSamples>> {
    let most = sizes.iter().copied().max().unwrap_or(1);
    let mut gather = open(config, most, sampler)?;
    let memory = TensorMemory::open(config, sampler.world, gather.device())?;
    let mut results = Vec::new();
    for bytes in sizes.iter().map(|bytes| *bytes as usize) {
        results.push(all_gather(&mut gather, &memory, bytes, sampler)?);
        if gather.options().reduces {
            results.push(reduce_scatter(&mut gather, bytes, sampler)?);
            results.push(all_reduce(&mut gather, bytes, sampler)?);
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

fn call(measured: Measured, size: usize, copied: usize, sampler: &Sampler<'_>) -> Call {
    let copied = vec![copied; sampler.world.ranks() as usize];
    Call { measured, size: size as u64, copied, times: 1 }
}

fn all_gather(
    gather: &mut Gather,
    memory: &TensorMemory,
    bytes: usize,
    sampler: &mut Sampler<'_>,
) -> Result<OperationSamples> {
    let (rank, ranks) = (sampler.world.rank() as u8, sampler.world.ranks() as usize);
    let shard = memory.tensors(vec![vec![rank + 1; bytes]])?;
    let mut whole = memory.tensors(vec![vec![0; bytes * ranks]])?;
    let samples =
        sampler.measure(&call(Measured::AllGather, bytes, bytes, sampler), false, || {
            Ok(gather.all_gather(&shard.refs()?, &mut whole.muts()?)?)
        })?;
    let whole = whole.into_bytes()?.remove(0);
    let is_right = whole.chunks(bytes).zip(1..).all(|(shard, of)| shard.iter().all(|b| *b == of));
    ensure!(is_right, "all-gather of {bytes} bytes: found other bytes than those of the ranks");
    Ok(samples)
}

/// Sums numbers for which no order of addition rounds.
fn reduce_scatter(
    gather: &mut Gather,
    bytes: usize,
    sampler: &mut Sampler<'_>,
) -> Result<OperationSamples> {
    let ranks = sampler.world.ranks() as usize;
    let mine = vec![1.0 + sampler.world.rank() as f32; bytes / 4];
    let mut part = vec![0.0_f32; bytes / 4 / ranks];
    let call = call(Measured::ReduceScatter, bytes, bytes / ranks, sampler);
    let samples = sampler.measure(&call, false, || {
        let tensor = TensorRef::from_slice(&mine, 1, mine.len())?;
        let length = part.len();
        let out = TensorMut::from_slice(&mut part, 1, length)?;
        Ok(gather.reduce_scatter(&[tensor], &mut [out], Sum::default())?)
    })?;
    check_sums("reduce-scatter", &part, ranks)?;
    Ok(samples)
}

fn all_reduce(
    gather: &mut Gather,
    bytes: usize,
    sampler: &mut Sampler<'_>,
) -> Result<OperationSamples> {
    let ranks = sampler.world.ranks() as usize;
    let mine = vec![1.0 + sampler.world.rank() as f32; bytes / 4];
    let mut sums = vec![0.0_f32; bytes / 4];
    let call = Call { times: 2, ..call(Measured::AllReduce, bytes, bytes / ranks, sampler) };
    let samples = sampler.measure(&call, false, || {
        let tensor = TensorRef::from_slice(&mine, 1, mine.len())?;
        let length = sums.len();
        let out = TensorMut::from_slice(&mut sums, 1, length)?;
        Ok(gather.all_reduce(&[tensor], &mut [out], Sum::default())?)
    })?;
    check_sums("all-reduce", &sums, ranks)?;
    Ok(samples)
}

fn check_sums(what: &str, sums: &[f32], ranks: usize) -> Result<()> {
    let expected = (ranks * (ranks + 1) / 2) as f32;
    let wrong = sums.iter().find(|sum| **sum != expected);
    ensure!(wrong.is_none(), "{what}: found the sum {wrong:?}; expected {expected}");
    Ok(())
}
