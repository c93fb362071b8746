//! Messages: around a ring of ranks, and to a partner and back.

use anyhow::{Result, ensure};
use tokenyard_core::config::Config;
use tokenyard_core::host::tensors::TensorMemory;
use tokenyard_core::ops::pipe::{Pipe, PipeOptions};

use super::sampler::{Call, Sampler};
use super::{Measured, OperationSamples};

/// Measures all sizes.
pub(super) fn measure(
    config: &Config,
    sizes: &[u64],
    sampler: &mut Sampler<'_>,
) -> Result<Vec<OperationSamples>> {
    let most = sizes.iter().copied().max().unwrap_or(1);
    let mut pipe = Pipe::open(sampler.world, config, PipeOptions::new(most))?;
    let memory = TensorMemory::open(config, sampler.world, pipe.device())?;
    let mut results = Vec::new();
    for bytes in sizes.iter().map(|bytes| *bytes as usize) {
        results.push(around(&mut pipe, &memory, bytes, sampler)?);
        results.push(one_way(&mut pipe, &memory, bytes, sampler)?);
    }
    pipe.close()?;
    Ok(results)
}

/// The bytes that a call copies: all of them to one rank.
fn call(measured: Measured, bytes: usize, to: Option<u32>, sampler: &Sampler<'_>) -> Call {
    let copied = |peer| if to == Some(peer) { bytes } else { 0 };
    let copied = (0..sampler.world.ranks()).map(copied).collect();
    Call { measured, size: bytes as u64, copied, times: 1 }
}

/// Each rank sends to the next one.
fn around(
    pipe: &mut Pipe,
    memory: &TensorMemory,
    bytes: usize,
    sampler: &mut Sampler<'_>,
) -> Result<OperationSamples> {
    let (rank, ranks) = (sampler.world.rank(), sampler.world.ranks());
    let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
    let sent = memory.tensors(vec![vec![rank as u8 + 1; bytes]])?;
    let mut received = memory.tensors(vec![vec![0; bytes]])?;
    let samples =
        sampler.measure(&call(Measured::Message, bytes, Some(next), sampler), false, || {
            pipe.send(sent.refs()?.remove(0), next)?;
            Ok(pipe.recv(received.muts()?.remove(0), before)?)
        })?;
    check(&received.into_bytes()?.remove(0), before)?;
    Ok(samples)
}

/// A message to the partner and its answer, of which half is reported.
fn one_way(
    pipe: &mut Pipe,
    memory: &TensorMemory,
    bytes: usize,
    sampler: &mut Sampler<'_>,
) -> Result<OperationSamples> {
    let (rank, ranks) = (sampler.world.rank(), sampler.world.ranks());
    let partner = Some(rank ^ 1).filter(|partner| *partner < ranks);
    let sent = memory.tensors(vec![vec![rank as u8 + 1; bytes]])?;
    let mut received = memory.tensors(vec![vec![0; bytes]])?;
    let call = call(Measured::OneWay, bytes, partner, sampler);
    let mut samples = sampler.measure(&call, partner.is_none(), || {
        let Some(partner) = partner else { return Ok(()) };
        if rank < partner {
            pipe.send(sent.refs()?.remove(0), partner)?;
        }
        pipe.recv(received.muts()?.remove(0), partner)?;
        if rank > partner {
            pipe.send(sent.refs()?.remove(0), partner)?;
        }
        Ok(())
    })?;
    // The answering rank has left before its answer arrives, so the times of the other one count.
    if partner.is_some_and(|partner| rank > partner) {
        samples.pairs.clear();
    }
    for (_, (start, end)) in &mut samples.pairs {
        *end = *start + (*end - *start) / 2;
    }
    if let Some(partner) = partner {
        check(&received.into_bytes()?.remove(0), partner)?;
    }
    Ok(samples)
}

fn check(received: &[u8], from: u32) -> Result<()> {
    let is_right = received.iter().all(|byte| *byte == from as u8 + 1);
    ensure!(is_right, "message from rank {from}: found other bytes than it sent");
    Ok(())
}
