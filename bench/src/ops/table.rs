//! Fetches of entries that are spread over all ranks.

use anyhow::{Context, Result, ensure};
use tokenyard_core::communicator::TensorRef;
use tokenyard_core::config::Config;
use tokenyard_core::host::tensors::TensorMemory;
use tokenyard_core::moe::DType;
use tokenyard_core::ops::table::{Entries, Table, TableOptions};

use super::sampler::{Call, Pass, Sampler};
use super::{Measured, OperationSamples};
use crate::workload::Random;

/// The form of a table.
#[derive(Clone, Copy)]
pub(super) struct Form {
    /// Entries of each rank.
    pub(super) entries: u64,
    /// Bytes of each.
    pub(super) entry_bytes: u64,
}

impl Form {
    /// The byte that fills an entry, by its index.
    fn filler(index: u64) -> u8 {
        (index % 251) as u8 + 1
    }

    /// The entries of a rank.
    fn of_rank(self, rank: u32) -> Vec<u8> {
        let first = u64::from(rank) * self.entries;
        let mut bytes = vec![0; (self.entries * self.entry_bytes) as usize];
        for (at, entry) in (first..).zip(bytes.chunks_mut(self.entry_bytes as usize)) {
            entry.fill(Self::filler(at));
        }
        bytes
    }
}

/// Fetches of so many entries.
#[derive(Clone, Copy)]
struct Fetches {
    form: Form,
    count: u32,
}

/// Measures all numbers of indices.
pub(super) fn measure(
    config: &Config,
    form: Form,
    counts: &[u32],
    sampler: &mut Sampler<'_>,
) -> Result<Vec<OperationSamples>> {
    let most = counts.iter().copied().max().unwrap_or(1);
    let options = TableOptions::new(form.entry_bytes, form.entries, most);
    let mut table = Table::open(sampler.world, config, options)?;
    sampler.check_device(table.device())?;
    let memory = TensorMemory::open(config, sampler.world, table.device())?;
    let mine = memory.tensors(vec![form.of_rank(sampler.world.rank())])?;
    table.write(&[Entries { values: mine.refs()?.remove(0), scales: None }])?;
    let mut results = Vec::new();
    for count in counts {
        results.push(fetch(&mut table, &memory, Fetches { form, count: *count }, sampler)?);
    }
    drop(mine);
    table.close()?;
    Ok(results)
}

fn fetch(
    table: &mut Table,
    memory: &TensorMemory,
    fetches: Fetches,
    sampler: &mut Sampler<'_>,
) -> Result<OperationSamples> {
    let Fetches { form, count } = fetches;
    let (rank, ranks) = (sampler.world.rank(), sampler.world.ranks());
    let mut random = Random::new(0x7461_626c_6500 + u64::from(rank));
    let all = form.entries * u64::from(ranks);
    let size = u64::from(count) * form.entry_bytes;
    let mut samples = None;
    for pass in Pass::ALL {
        let indices: Vec<i64> = (0..count).map(|_| random.below(all) as i64).collect();
        let mut copied = vec![0; ranks as usize];
        for index in &indices {
            copied[(*index as u64 / form.entries) as usize] += form.entry_bytes as usize;
        }
        let bytes = size - copied[rank as usize] as u64;
        let call = Call { measured: Measured::Fetch, size, bytes, copied, times: 1 };
        let there = match table.device() {
            Some(_) => memory.on_device(indices.iter().flat_map(|i| i.to_ne_bytes()).collect())?,
            None => None,
        };
        let mut values = memory.tensors(vec![vec![0; size as usize]])?;
        samples = samples.or(sampler.run(pass, &call, || {
            let given = match &there {
                Some(tensor) => tensor.typed(DType::I64)?.context("indices of a device")?,
                None => TensorRef::from_slice(&indices, 1, indices.len())?,
            };
            Ok(table.fetch(0, given, &mut values.muts()?.remove(0), None)?)
        })?);
        check(&indices, &values.into_bytes()?.remove(0), form)?;
    }
    samples.context("found no sample of fetches")
}

fn check(indices: &[i64], values: &[u8], form: Form) -> Result<()> {
    let entries = values.chunks(form.entry_bytes as usize);
    let is_right = indices.iter().zip(entries).all(|(index, entry)| {
        let filler = Form::filler(*index as u64);
        entry.iter().all(|byte| *byte == filler)
    });
    ensure!(is_right, "fetch: found other bytes than those that were written");
    Ok(())
}
