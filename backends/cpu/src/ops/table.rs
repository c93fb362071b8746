//! A table: each rank reads entries of any rank, which takes no part.
//!
//! A window has the entries of this rank, by layer. They are loaded from a peer's window where it is mapped. Elsewhere
//! they are got into a slot behind the entries, and copied from there. Ranks write between two barriers of the host, so
//! nothing changes while another rank reads, and no signal is needed.

use tokenyard_core::kernels::KernelShape;
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

/// An entry of a fetch: its rank, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct EntryPlace {
    rank: u32,
    number: u64,
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
        let given = unsafe { std::slice::from_raw_parts(entries.counts, counts.len()) };
        if let Some(most) = given.iter().max().filter(|most| **most > self.layout.entries) {
            let text = format!("found {most} entries; expected at most {}", self.layout.entries);
            return Err(Error::new(ErrorKind::Internal, "write entries", text));
        }
        counts.copy_from_slice(given);
        let count = counts[self.rank as usize];
        let first = self.layout.entry(entries.layer, 0);
        for Field { part, width, behind } in fields(&entries.parts, count) {
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
        // SAFETY: by this function's contract.
        let entries = unsafe { entries_of(fetch, self.layout.entries, counts) };
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
        let entries = sent.entries.map_err(|index| self.no_entry(sent.layer, index))?;
        self.line().order.wait_posted(slot, operation)?;
        let landed = self.layout.slot(slot);
        for Field { part, width, behind } in fields(&fetch.parts, entries.len() as u64) {
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

    #[cold]
    fn no_entry(&self, layer: u32, index: i64) -> Error {
        let (ranks, entries) = (self.counts[layer as usize].len() as u64, self.layout.entries);
        let text = match u64::try_from(index) {
            Ok(index) if index / entries < ranks => {
                let (rank, number) = (index / entries, index % entries);
                let count = self.counts[layer as usize][rank as usize];
                format!(
                    "index {index} is entry {number} of rank {rank}, which has written {count} to layer {layer}"
                )
            }
            _ => format!(
                "index {index} is of no rank; expected 0 to {}, that is {entries} for each of {ranks} ranks",
                entries * ranks - 1
            ),
        };
        Error::new(ErrorKind::Refused, "fetch entries", text)
    }

    /// Waits until all that it posted has ended.
    pub(crate) fn flush(&self) -> Result<()> {
        self.line().order.flush()
    }

    pub(crate) fn counters(&self) -> Option<abi::TyCounters> {
        Some(self.line().order.counters().as_abi())
    }
}

/// One of the two things that an entry is made of: memory with so many bytes of each entry, which lie so far behind the
/// start of an entry of the window.
struct Field {
    part: *mut std::ffi::c_void,
    width: u64,
    behind: u64,
}

/// The parts of `count` entries.
fn fields(parts: &[abi::TyPart; 2], count: u64) -> impl Iterator<Item = Field> {
    let widths = parts.map(|part| part.bytes.checked_div(count).unwrap_or_default());
    let fields = [(parts[0], 0), (parts[1], widths[0])].into_iter().zip(widths);
    fields
        .map(|((part, behind), width)| Field { part: part.data, width, behind })
        .filter(|field| field.width > 0)
}

/// The entries that a fetch names; or its first index that has none. `counts`: the entries of each rank.
///
/// # Safety
/// The indices are valid for the call.
unsafe fn entries_of(
    fetch: &abi::TyFetch,
    entries: u64,
    counts: &[u64],
) -> Result<Vec<EntryPlace>, i64> {
    let count = fetch.count as usize;
    if count == 0 {
        return Ok(Vec::new());
    }
    let entry_of = |index: i64| {
        let at = u64::try_from(index).map_err(|_| index)?;
        let (rank, number) = (at / entries, at % entries);
        match counts.get(usize::try_from(rank).map_err(|_| index)?) {
            Some(count) if number < *count => Ok(EntryPlace { rank: rank as u32, number }),
            _ => Err(index),
        }
    };
    // SAFETY: by this function's contract; tensors are aligned to their elements.
    unsafe {
        match fetch.index_bytes {
            4 => std::slice::from_raw_parts(fetch.indices.cast::<i32>(), count)
                .iter()
                .map(|index| entry_of((*index).into()))
                .collect(),
            _ => std::slice::from_raw_parts(fetch.indices.cast::<i64>(), count)
                .iter()
                .map(|index| entry_of(*index))
                .collect(),
        }
    }
}

#[cold]
fn no_layer(layer: u32) -> Error {
    let text = format!("found layer {layer}; expected one of the shape");
    Error::new(ErrorKind::Internal, "use table", text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fetch(indices: &[i32]) -> abi::TyFetch {
        let none = abi::TyPart { data: std::ptr::null_mut(), bytes: 0 };
        abi::TyFetch {
            size: size_of::<abi::TyFetch>(),
            operation: 0,
            layer: 0,
            index_bytes: 4,
            indices: indices.as_ptr().cast(),
            count: indices.len() as u64,
            parts: [none; 2],
        }
    }

    fn named(indices: &[i32]) -> Result<Vec<(u32, u64)>, i64> {
        // SAFETY: the indices live.
        let entries = unsafe { entries_of(&fetch(indices), 10, &[3, 10, 0])? };
        Ok(entries.into_iter().map(|entry| (entry.rank, entry.number)).collect())
    }

    #[test]
    fn an_index_names_the_entry_of_a_rank() {
        assert_eq!(named(&[0, 2, 10, 19]), Ok(vec![(0, 0), (0, 2), (1, 0), (1, 9)]));
        assert_eq!(named(&[]), Ok(vec![]));
    }

    #[test]
    fn the_first_index_without_an_entry_is_found() {
        assert_eq!(named(&[1, 3, -1]), Err(3), "rank 0 has 3 entries");
        assert_eq!(named(&[20]), Err(20), "rank 2 has none");
        assert_eq!(named(&[30]), Err(30), "there are 3 ranks");
        assert_eq!(named(&[-1]), Err(-1));
    }

    #[test]
    fn entries_of_layers_and_slots_are_apart_and_within_the_window() {
        let layout = TableLayout { width: 12, entries: 5, layers: 2, in_flight: 2, landing: 7 };
        assert_eq!([layout.entry(0, 4), layout.entry(1, 0)], [48, 60]);
        assert_eq!([0, 1].map(|slot| layout.slot(slot)), [120, 120 + 84]);
        assert_eq!(layout.bytes(), Some(120 + 2 * 84));
    }

    #[test]
    fn the_parts_of_an_entry_lie_behind_each_other() {
        let part = |bytes| abi::TyPart { data: std::ptr::null_mut(), bytes };
        let of = |parts, count| {
            fields(&parts, count).map(|field| (field.behind, field.width)).collect::<Vec<_>>()
        };
        assert_eq!(of([part(24), part(12)], 3), [(0, 8), (8, 4)]);
        assert_eq!(of([part(24), part(0)], 3), [(0, 8)]);
        assert_eq!(of([part(0), part(0)], 0), []);
    }
}
