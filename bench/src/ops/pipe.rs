//! Messages: around a ring of ranks, and to a partner and back. With several domains, inside each.

use anyhow::{Context, Result, ensure};
use tokenyard_core::config::Config;
use tokenyard_core::host::tensors::TensorMemory;
use tokenyard_core::ops::pipe::{Pipe, PipeOptions};

use super::sampler::{Call, Pass, Sampler};
use super::{Measured, OperationSamples};

/// The ranks that this one exchanges messages with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Peers {
    rank: u32,
    /// The ranks behind and before it in the ring.
    next: u32,
    before: u32,
    /// The last of an odd number of ranks has none.
    partner: Option<u32>,
}

impl Peers {
    /// Of a rank in a world of so many domains. Where each rank is a domain, all are joined.
    fn new(rank: u32, ranks: u32, domains: u32) -> Self {
        let size = if domains > 1 && domains < ranks { ranks / domains } else { ranks };
        let (first, at) = (rank - rank % size, rank % size);
        Self {
            rank,
            next: first + (at + 1) % size,
            before: first + (at + size - 1) % size,
            partner: Some(at ^ 1).filter(|partner| *partner < size).map(|partner| first + partner),
        }
    }
}

/// Measures all sizes.
pub(super) fn measure(
    config: &Config,
    sizes: &[u64],
    sampler: &mut Sampler<'_>,
) -> Result<Vec<OperationSamples>> {
    let most = sizes.iter().copied().max().unwrap_or(1);
    let mut pipe = Pipe::open(sampler.world, config, PipeOptions::new(most))?;
    sampler.check_device(pipe.device())?;
    let memory = TensorMemory::open(config, sampler.world, pipe.device())?;
    let (rank, ranks) = (sampler.world.rank(), sampler.world.ranks());
    let peers = Peers::new(rank, ranks, config.domains.unwrap_or(1));
    let mut results = Vec::new();
    for bytes in sizes.iter().map(|bytes| *bytes as usize) {
        let mut messages = Messages { pipe: &mut pipe, memory: &memory, peers, bytes };
        results.push(messages.around(sampler)?);
        results.push(messages.one_way(sampler)?);
    }
    pipe.close()?;
    Ok(results)
}

/// Messages of one size.
struct Messages<'p> {
    pipe: &'p mut Pipe,
    memory: &'p TensorMemory,
    peers: Peers,
    bytes: usize,
}

impl Messages<'_> {
    /// `to`: the rank that the ceiling copies to, if any.
    fn call(&self, measured: Measured, to: Option<u32>, ranks: u32) -> Call {
        let copied = |peer| if to == Some(peer) { self.bytes } else { 0 };
        let copied = (0..ranks).map(copied).collect();
        Call { measured, size: self.bytes as u64, bytes: self.bytes as u64, copied, times: 1 }
    }

    /// Each rank sends to the next one.
    fn around(&mut self, sampler: &mut Sampler<'_>) -> Result<OperationSamples> {
        let Peers { rank, next, before, .. } = self.peers;
        let call = self.call(Measured::Message, Some(next), sampler.world.ranks());
        let mut samples = None;
        for pass in Pass::ALL {
            let sent = self.memory.tensors(vec![vec![pass.filler(rank); self.bytes]])?;
            let mut received = self.memory.tensors(vec![vec![0; self.bytes]])?;
            samples = samples.or(sampler.run(pass, &call, || {
                self.pipe.send(sent.refs()?.remove(0), next)?;
                Ok(self.pipe.recv(received.muts()?.remove(0), before)?)
            })?);
            check(&received.into_bytes()?.remove(0), pass.filler(before))?;
        }
        samples.context("found no sample of messages")
    }

    /// A message to the partner and its answer, of which half is reported.
    fn one_way(&mut self, sampler: &mut Sampler<'_>) -> Result<OperationSamples> {
        let Peers { rank, partner, .. } = self.peers;
        let is_asking = partner.is_some_and(|partner| rank < partner);
        // One message is under way at a time, so one rank of a pair copies.
        let to = partner.filter(|_| is_asking);
        let call = self.call(Measured::OneWay, to, sampler.world.ranks());
        let mut samples = None;
        for pass in Pass::ALL {
            let sent = self.memory.tensors(vec![vec![pass.filler(rank); self.bytes]])?;
            let mut received = self.memory.tensors(vec![vec![0; self.bytes]])?;
            samples = samples.or(sampler.run(pass, &call, || {
                let Some(partner) = partner else { return Ok(()) };
                if is_asking {
                    self.pipe.send(sent.refs()?.remove(0), partner)?;
                }
                self.pipe.recv(received.muts()?.remove(0), partner)?;
                if !is_asking {
                    self.pipe.send(sent.refs()?.remove(0), partner)?;
                }
                Ok(())
            })?);
            if let Some(partner) = partner {
                check(&received.into_bytes()?.remove(0), pass.filler(partner))?;
            }
        }
        let mut samples: OperationSamples = samples.context("found no sample of messages")?;
        // The answering rank has left before its answer arrives, so the times of the other one count. Pairs of ranks
        // are measured each by itself.
        if !is_asking {
            samples.pairs.clear();
        }
        for (_, (start, end)) in &mut samples.pairs {
            (*start, *end) = (0, (*end - *start) / 2);
        }
        Ok(samples)
    }
}

fn check(received: &[u8], filler: u8) -> Result<()> {
    let is_right = received.iter().all(|byte| *byte == filler);
    ensure!(is_right, "message: found other bytes than {filler}, which were sent");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_those_that_a_link_joins() {
        let of = |rank, ranks, domains| {
            let Peers { next, before, partner, .. } = Peers::new(rank, ranks, domains);
            (next, before, partner)
        };
        assert_eq!(of(0, 3, 1), (1, 2, Some(1)));
        assert_eq!(of(2, 3, 1), (0, 1, None));
        assert_eq!(of(2, 4, 2), (3, 3, Some(3)));
        assert_eq!(of(3, 6, 2), (4, 5, Some(4)));
        assert_eq!(of(1, 2, 2), (0, 0, Some(0)));
    }
}
