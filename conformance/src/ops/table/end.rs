//! The end of a rank of a table.

use std::collections::VecDeque;

use anyhow::{Context, Result, ensure};
use tokenyard_core::ErrorKind;
use tokenyard_core::communicator::TensorRef;
use tokenyard_core::moe::DType;
use tokenyard_core::ops::table::{Entries, PendingFetch, Table, TableOptions};
use tokenyard_core::ops::{SessionOptions, SessionUsers};

use super::rules::{self, Parts, Sizes};
use crate::ops::end::{OperationEnd, WorldPlace};
use crate::ops::expect;

/// A table that numbers its writes and fetches, and checks what each fetch gives.
pub(crate) struct TableEnd {
    table: Table,
    pub(super) place: WorldPlace,
    /// Indices of a fetch, in turn.
    lengths: &'static [usize],
    /// Writes and fetches so far.
    writes: u64,
    sent: u64,
    pending: VecDeque<OpenFetch>,
}

/// A fetch that is not received.
struct OpenFetch {
    layer: u32,
    indices: Vec<i64>,
    pending: PendingFetch,
}

/// Ranks write anew before a fetch where none is open, so that all of them meet; the other fetches are each rank's
/// alone.
impl OperationEnd for TableEnd {
    const WORD: &'static str = "table";
    type Options = TableOptions;
    type Length = usize;

    fn ask(session: &mut SessionOptions, options: TableOptions) {
        session.tables.push(options);
    }

    fn take(
        users: &mut SessionUsers,
        place: WorldPlace,
        lengths: &'static [usize],
    ) -> Option<Self> {
        let table = users.tables.pop()?;
        Some(Self { table, place, lengths, writes: 0, sent: 0, pending: VecDeque::new() })
    }

    fn place(&self) -> &WorldPlace {
        &self.place
    }

    fn in_flight(&self) -> u32 {
        self.table.options().in_flight
    }

    fn send_next(&mut self) -> Result<()> {
        if self.pending.is_empty() {
            self.write_next()?;
        }
        self.fetch_next()
    }

    fn recv_next(&mut self) -> Result<()> {
        self.recv_at(0)
    }

    fn is_closed(&self) -> bool {
        self.table.is_closed()
    }

    fn close(self) -> Result<()> {
        self.table.close().context("close the table")
    }
}

impl TableEnd {
    fn sizes(&self) -> Sizes {
        let TableOptions { entry_bytes, scale_bytes, max_entries: most, .. } = self.table.options();
        Sizes { values: entry_bytes as usize, scales: scale_bytes as usize, most }
    }

    fn most(&self) -> u64 {
        self.table.options().max_entries
    }

    /// Writes the entries of the next number to all layers.
    pub(super) fn write_next(&mut self) -> Result<()> {
        let (rank, most) = (self.place.rank, self.most());
        let written = self.write(|layer| rules::count(rank, layer, most), self.writes + 1);
        written.with_context(|| format!("write {}", self.writes + 1))?;
        self.writes += 1;
        Ok(())
    }

    /// Writes one entry more than there is room for: every rank learns of it.
    pub(in crate::ops) fn write_too_many(&mut self) -> Result<()> {
        let most = self.most();
        Ok(self.write(|_| most + 1, self.writes + 1)?)
    }

    fn write(&mut self, count: impl Fn(u32) -> u64, number: u64) -> tokenyard_core::Result<()> {
        let (rank, sizes) = (self.place.rank, self.sizes());
        let entries = |layer| {
            let parts = rules::entries(rank, layer, count(layer), number, sizes);
            [parts.values, parts.scales]
        };
        let layers = (0..self.table.options().layers).flat_map(entries).collect();
        let tensors = self.place.memory.tensors(layers)?;
        let given: Vec<_> = tensors.refs()?;
        let given = given.chunks(2).map(|parts| Entries {
            values: parts[0],
            scales: (sizes.scales > 0).then_some(parts[1]),
        });
        self.table.write(&given.collect::<Vec<_>>())
    }

    /// Fetches what is next, of the layer that is next.
    pub(super) fn fetch_next(&mut self) -> Result<()> {
        let (layers, most) = (self.table.options().layers, self.most());
        let (number, layer) = (self.sent, (self.sent % u64::from(layers)) as u32);
        let count = self.lengths[number as usize % self.lengths.len()];
        let drawn = number << 8 | u64::from(self.place.rank);
        let indices = rules::indices(self.place.ranks, layer, most, drawn, count);
        // Layers take turns as well.
        let is_narrow = (number / u64::from(layers)).is_multiple_of(2);
        let pending = self.send(layer, &indices, is_narrow);
        let pending = pending.with_context(|| format!("send fetch {number}"))?;
        self.sent += 1;
        self.pending.push_back(OpenFetch { layer, indices, pending });
        Ok(())
    }

    /// Sends a fetch, with indices of 4 bytes or of 8.
    fn send(
        &mut self,
        layer: u32,
        indices: &[i64],
        is_narrow: bool,
    ) -> tokenyard_core::Result<PendingFetch> {
        let narrow: Vec<i32> = indices.iter().map(|index| *index as i32).collect();
        let (bytes, dtype): (Vec<u8>, _) = match is_narrow {
            true => (narrow.iter().flat_map(|index| index.to_ne_bytes()).collect(), DType::I32),
            false => (indices.iter().flat_map(|index| index.to_ne_bytes()).collect(), DType::I64),
        };
        let there = self.place.memory.on_device(bytes)?;
        let given = match there.as_ref().map(|tensor| tensor.typed(dtype)).transpose()?.flatten() {
            Some(given) => given,
            None if is_narrow => TensorRef::from_slice(&narrow, 1, narrow.len())?,
            None => TensorRef::from_slice(indices, 1, indices.len())?,
        };
        self.table.fetch_send(layer, given)
    }

    /// Drops the first fetch that is not received.
    pub(super) fn drop_next(&mut self) {
        drop(self.pending.pop_front());
    }

    /// Fetches that are not received.
    pub(super) fn open_fetches(&self) -> usize {
        self.pending.len()
    }

    /// Receives the fetch at a place among those that are not received, and checks it.
    pub(super) fn recv_at(&mut self, at: usize) -> Result<()> {
        let fetch = self.pending.remove(at).context("find a fetch that was sent")?;
        let OpenFetch { layer, indices, pending } = fetch;
        let mut parts = Parts::room(indices.len(), self.sizes());
        self.recv(pending, &mut parts).with_context(|| format!("receive from layer {layer}"))?;
        rules::check(layer, self.writes, &indices, self.sizes(), &parts)
    }

    /// The parts hold what was there before where nothing was written.
    fn recv(&mut self, pending: PendingFetch, parts: &mut Parts) -> tokenyard_core::Result<()> {
        let has_scales = self.sizes().scales > 0;
        let room = [&mut parts.values, &mut parts.scales].map(std::mem::take);
        let mut tensors = self.place.memory.tensors(room.into())?;
        let mut outs = tensors.muts()?;
        let (values, scales) = outs.split_at_mut(1);
        let scales = has_scales.then_some(&mut scales[0]);
        let received = self.table.fetch_recv(pending, &mut values[0], scales);
        drop(outs);
        let mut found = tensors.into_bytes()?.into_iter();
        for part in [&mut parts.values, &mut parts.scales] {
            *part = found.next().unwrap_or_default();
        }
        received
    }

    /// A write by this rank, which must end with an error of this kind, about this rank.
    pub(super) fn fail_to_write(
        &mut self,
        kind: ErrorKind,
        about: Option<u32>,
        too_many: bool,
    ) -> Result<()> {
        let (rank, most) = (self.place.rank, self.most());
        let count = |layer| if too_many { most + 1 } else { rules::count(rank, layer, most) };
        let result = self.write(count, self.writes + 1);
        expect(kind, about, result).context("write")
    }

    /// A fetch of an index that names no entry, which must end with an error, and write nothing.
    pub(super) fn fail_to_fetch(&mut self, index: i64) -> Result<()> {
        let pending = self.send(0, &[index], false)?;
        let mut parts = Parts::room(1, self.sizes());
        let received = self.recv(pending, &mut parts);
        expect(ErrorKind::InvalidInput, None, received)
            .with_context(|| format!("index {index}"))?;
        ensure!(parts.is_untouched(), "index {index}: it failed; expected no bytes written");
        Ok(())
    }
}
