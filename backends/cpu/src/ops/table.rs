//! A table: each rank reads entries of any rank, which takes no part.
//!
//! A window has the entries of this rank, by layer. They are loaded from a peer's window where it is mapped. Elsewhere
//! they are got into a slot behind the entries, and copied from there. Ranks write between two barriers of the host, so
//! nothing changes while another rank reads, and no signal is needed.

use tokenyard_core::kernels::KernelShape;
use tokenyard_core::ops::entry::{
    EntryField, EntryPlace, LayerCounts, counts_of, entry_fields, no_layer,
};
use tokenyard_core::transport::{Capabilities, Command, NO_COMMAND};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::line::{Line, Lines, WINDOW};
use tokenyard_core::domains::Member;

/// The parts of a window: the entries of each layer, then the slots of fetches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TableLayout {
    /// Bytes of an entry.
    width: u64,
    /// Most entries of a rank in a layer.
    entries: u64,
    layers: u64,
    in_flight: u64,
    /// Entries that a slot has room for; none where peers are mapped.
    landing: u64,
}

impl TableLayout {
    /// `gets`: the link cannot load from peers.
    pub(crate) fn new(shape: &KernelShape, gets: bool) -> Self {
        let KernelShape { message_bytes: width, entries, layers, in_flight, .. } = *shape;
        let landing = if gets { shape.max_tokens.into() } else { 0 };
        Self { width, entries, layers: layers.into(), in_flight: in_flight.into(), landing }
    }

    /// Bytes of the window; none where they are beyond the address space.
    pub(crate) fn bytes(&self) -> Option<u64> {
        let held = self.entries.checked_mul(self.layers)?;
        let bytes = held.checked_add(self.landing * self.in_flight)?.checked_mul(self.width);
        bytes.filter(|bytes| *bytes < 1 << 47)
    }

    /// Where an entry of a layer lies, in the window of the rank that has it.
    fn entry(&self, layer: u32, entry: u64) -> u64 {
        (u64::from(layer) * self.entries + entry) * self.width
    }

    /// Where the entries land that a slot's fetch has got.
    fn slot(&self, slot: usize) -> u64 {
        (self.layers * self.entries + slot as u64 * self.landing) * self.width
    }
}

/// Checks that a table runs over a link.
///
/// # Errors
/// A link that can neither load from peers nor get.
pub(crate) fn check_link(limits: &Capabilities) -> Result<()> {
    if limits.flags & (abi::TY_CAP_LOAD_STORE | abi::TY_CAP_GET) != 0 {
        return Ok(());
    }
    let text = "found a transport that declares neither TY_CAP_LOAD_STORE nor TY_CAP_GET; expected one of them: a \
                table reads entries of ranks that take no part";
    Err(Error::new(ErrorKind::Unsupported, "open table", text)
        .with_fix("use a transport with gets (verbs; libfabric with get = true), or one that maps peers (shm)"))
}

/// A table over several links: an entry of another domain and rail has no way.
#[cold]
pub(crate) fn two_levels(shape: &KernelShape) -> Error {
    let text = format!(
        "found {} domains of {} ranks; expected one link that reaches every rank",
        shape.domains,
        shape.ranks / shape.domains
    );
    Error::new(ErrorKind::Unsupported, "open table", text).with_fix(
        "open it with a config whose scale-out transport reaches all ranks, and no scale-up",
    )
}

/// A fetch that was sent.
#[derive(Debug)]
struct Fetch {
    operation: u64,
    layer: u32,
    /// In the order of indices; or the first index that has none.
    entries: Result<Vec<EntryPlace>, i64>,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Table {
    lines: Lines,
    layout: TableLayout,
    rank: u32,
    /// By layer, the entries of each rank.
    counts: Vec<Vec<u64>>,
    /// By slot.
    fetches: Vec<Option<Fetch>>,
}

// SAFETY: as for `Pipe`.
unsafe impl Send for Table {}

impl Table {
    /// # Safety
    /// Everything that the plan points to (but for the list of windows) outlives the table.
    pub(crate) unsafe fn new(
        shape: &KernelShape,
        layout: TableLayout,
        members: Vec<Member>,
        plan: &abi::TyPlan,
    ) -> Result<Self> {
        // SAFETY: by this function's contract.
        let lines = unsafe { Lines::new(shape, members, plan)? };
        let counts = vec![vec![0; shape.ranks as usize]; shape.layers as usize];
        let fetches = (0..shape.in_flight).map(|_| None).collect();
        Ok(Self { lines, layout, rank: shape.rank, counts, fetches })
    }

    fn line(&self) -> &Line {
        &self.lines.all[0]
    }

    fn slot(&self, operation: u64) -> usize {
        (operation % self.fetches.len() as u64) as usize
    }

    /// # Safety
    /// As [`KernelSet::write_entries`](tokenyard_core::kernels::KernelSet::write_entries).
    pub(crate) unsafe fn write(&mut self, entries: &abi::TyEntries) -> Result<()> {
        let Some(counts) = self.counts.get_mut(entries.layer as usize) else {
            return Err(no_layer(entries.layer));
        };
        // SAFETY: by this function's contract: R numbers.
        let given = unsafe { counts_of(entries, counts.len(), self.layout.entries)? };
        counts.copy_from_slice(given);
        let count = counts[self.rank as usize];
        let first = self.layout.entry(entries.layer, 0);
        for EntryField { part, width, behind } in entry_fields(&entries.parts, count) {
            for number in 0..count {
                let to = self.lines.window.at(first + number * self.layout.width + behind);
                // SAFETY: the part has so many entries, by this function's contract. They have room in the window, and
                // no rank reads it now.
                unsafe {
                    let from = part.cast::<u8>().add((number * width) as usize);
                    std::ptr::copy_nonoverlapping(from, to, width as usize);
                }
            }
        }
        Ok(())
    }

    /// # Safety
    /// As [`KernelSet::fetch_send`](tokenyard_core::kernels::KernelSet::fetch_send).
    pub(crate) unsafe fn send(&mut self, fetch: &abi::TyFetch) -> Result<()> {
        let abi::TyFetch { operation, layer, .. } = *fetch;
        let Some(counts) = self.counts.get(layer as usize) else { return Err(no_layer(layer)) };
        let counts = LayerCounts { most: self.layout.entries, counts };
        // SAFETY: by this function's contract.
        let indices = unsafe { indices_of(fetch) };
        let find = |index: &i64| counts.find(*index).ok_or(*index);
        let entries: Result<Vec<_>, _> = indices.iter().map(find).collect();
        if let Ok(entries) = &entries {
            self.get(operation, layer, entries)?;
        }
        let slot = self.slot(operation);
        self.fetches[slot] = Some(Fetch { operation, layer, entries });
        Ok(())
    }

    /// Gets entries of peers that are not mapped: those that lie together at both ends by one command.
    fn get(&self, operation: u64, layer: u32, entries: &[EntryPlace]) -> Result<()> {
        let (line, slot) = (self.line(), self.slot(operation));
        if line.is_mapped() {
            return Ok(());
        }
        let width = self.layout.width;
        let most = (line.order.channel.largest_put / width).max(1) as usize;
        let mut at = self.layout.slot(slot);
        let follows = |one: &EntryPlace, next: &EntryPlace| {
            one.rank == next.rank && one.number + 1 == next.number
        };
        for run in entries.chunk_by(follows).flat_map(|run| run.chunks(most)) {
            let bytes = run.len() as u64 * width;
            if run[0].rank != self.rank {
                let from = self.layout.entry(layer, run[0].number);
                self.get_run(operation, run[0].rank, [from, at, bytes])?;
            }
            at += bytes;
        }
        Ok(())
    }

    /// `[from, to, bytes]`: offsets of the rank's window and of this one's.
    fn get_run(&self, operation: u64, rank: u32, [from, to, bytes]: [u64; 3]) -> Result<()> {
        let order = &self.line().order;
        let most = order.channel.largest_put;
        let mut done = 0;
        while done < bytes {
            let piece = (bytes - done).min(most);
            let command = Command {
                op: abi::TY_OP_GET,
                peer: rank,
                src_window: WINDOW,
                src_offset: to + done,
                dst_window: WINDOW,
                dst_offset: from + done,
                bytes: piece,
                ..NO_COMMAND
            };
            order.post(self.slot(operation), &command, operation)?;
            done += piece;
        }
        Ok(())
    }

    /// # Safety
    /// As [`KernelSet::fetch_recv`](tokenyard_core::kernels::KernelSet::fetch_recv).
    pub(crate) unsafe fn recv(&mut self, fetch: &abi::TyFetch) -> Result<()> {
        let (operation, slot) = (fetch.operation, self.slot(fetch.operation));
        let Some(sent) = self.fetches[slot].take().filter(|sent| sent.operation == operation)
        else {
            let text = format!("found fetch {operation}; expected one that was sent");
            return Err(Error::new(ErrorKind::Internal, "receive fetch", text));
        };
        let entries = sent.entries.map_err(|index| {
            let counts = &self.counts[sent.layer as usize];
            LayerCounts { most: self.layout.entries, counts }.no_entry(sent.layer, index)
        })?;
        self.line().order.wait_posted(slot, operation)?;
        let landed = self.layout.slot(slot);
        for EntryField { part, width, behind } in entry_fields(&fetch.parts, entries.len() as u64) {
            for (i, entry) in (0..).zip(&entries) {
                let from = self.place(sent.layer, *entry, landed + i * self.layout.width);
                // SAFETY: the part has room for so many entries, by this function's contract. The entry is there: it
                // was got, or lies in a window that no rank writes while fetches are open.
                unsafe {
                    let to = part.cast::<u8>().add((i * width) as usize);
                    std::ptr::copy_nonoverlapping(from.add(behind as usize), to, width as usize);
                }
            }
        }
        Ok(())
    }

    /// Where to load an entry: in the window of its rank, or where it has landed.
    fn place(&self, layer: u32, entry: EntryPlace, landed: u64) -> *const u8 {
        let offset = self.layout.entry(layer, entry.number);
        if entry.rank == self.rank {
            return self.lines.window.at(offset);
        }
        match self.line().mapped(entry.rank) {
            Some(window) => window.at(offset),
            None => self.lines.window.at(landed),
        }
    }

    /// Waits until all that it posted has ended.
    pub(crate) fn flush(&self) -> Result<()> {
        self.line().order.flush()
    }

    pub(crate) fn counters(&self) -> Option<abi::TyCounters> {
        Some(self.line().order.counters().as_abi())
    }
}

/// The indices of a fetch, in their order.
///
/// # Safety
/// The indices lie in host memory, and are valid as long as the result is used.
unsafe fn indices_of(fetch: &abi::TyFetch) -> Vec<i64> {
    let count = fetch.count as usize;
    if count == 0 {
        return Vec::new();
    }
    // SAFETY: by this function's contract; tensors are aligned to their elements.
    unsafe {
        match fetch.index_bytes {
            4 => std::slice::from_raw_parts(fetch.indices.cast::<i32>(), count)
                .iter()
                .map(|index| i64::from(*index))
                .collect(),
            _ => std::slice::from_raw_parts(fetch.indices.cast::<i64>(), count).to_vec(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_layers_and_slots_are_apart_and_within_the_window() {
        let layout = TableLayout { width: 12, entries: 5, layers: 2, in_flight: 2, landing: 7 };
        assert_eq!([layout.entry(0, 4), layout.entry(1, 0)], [48, 60]);
        assert_eq!([0, 1].map(|slot| layout.slot(slot)), [120, 120 + 84]);
        assert_eq!(layout.bytes(), Some(120 + 2 * 84));
    }
}
