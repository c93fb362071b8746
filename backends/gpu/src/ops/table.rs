//! A table: each rank loads entries of any rank, which takes no part.
//!
//! A window has the entries of its rank, by layer. A fetch copies its indices and checks them on the device when it is
//! sent. When it is received, one kernel loads the values from the windows of their ranks, and one the scales. Ranks
//! write between two barriers of the host, so nothing changes while another rank reads, and no word is needed.

mod args;

use std::sync::Arc;

use tokenyard_core::kernels::KernelShape;
use tokenyard_core::ops::entry::{EntryField, LayerCounts, counts_of, entry_fields, no_layer};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::line::Mapped;
use crate::config::GpuConfig;
use crate::driver::{Buffer, Context, Pinned, Stream};
pub(crate) use args::TABLE;
use args::{Move, TableArgs, TableKernels};

/// Places of `Table::words`.
const WRONG: usize = 0;
const INDEX: usize = 1;
const COUNTS: usize = 2;

/// The parts of a window: the entries of each layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TableLayout {
    /// From one entry to the next: kernels move whole units of 16 bytes where they can.
    pitch: u64,
    /// Most entries of a rank in a layer.
    entries: u64,
    layers: u64,
}

impl TableLayout {
    pub(crate) fn new(shape: &KernelShape) -> Self {
        let pitch = shape.message_bytes.next_multiple_of(16);
        Self { pitch, entries: shape.entries, layers: shape.layers.into() }
    }

    /// Bytes of the window; none where they are beyond the address space.
    pub(crate) fn bytes(&self) -> Option<u64> {
        let bytes = self.entries.checked_mul(self.layers)?.checked_mul(self.pitch);
        bytes.filter(|bytes| *bytes < 1 << 47)
    }

    /// Bytes of the indices of a slot's fetch.
    fn index_room(shape: &KernelShape) -> u64 {
        8 * u64::from(shape.max_tokens)
    }

    /// Where the entries of a layer begin.
    fn layer(&self, layer: u32) -> u64 {
        u64::from(layer) * self.entries * self.pitch
    }
}

/// The entries that each rank has written to a layer.
#[derive(Debug)]
struct Layer {
    counts: Vec<u64>,
    /// The same, for kernels.
    on_device: Buffer,
}

/// A fetch that was sent, or the room for one.
#[derive(Debug)]
struct Fetch {
    /// None once it is received.
    sent: Option<SentFetch>,
    indices: Buffer,
}

#[derive(Clone, Copy, Debug)]
struct SentFetch {
    operation: u64,
    layer: u32,
    index_bytes: u32,
    count: u64,
    /// An index that has no entry.
    wrong: Option<i64>,
}

/// See the [module](self). Each call waits for its own work, also where it fails, so nothing is queued between calls.
///
/// All memory is made when it is opened: to make more might wait for work of the device that waits for another rank.
#[derive(Debug)]
pub(crate) struct Table {
    mapped: Mapped,
    layout: TableLayout,
    kernels: TableKernels,
    work: Stream,
    /// Device addresses of all windows, for kernels.
    windows: Buffer,
    layers: Vec<Layer>,
    /// By slot.
    fetches: Vec<Fetch>,
    /// Words for the host: the result of a check, an index, and then the counts of a layer.
    words: Pinned<u64>,
}

impl Table {
    /// `mapped`: the windows of all ranks.
    pub(crate) fn new(
        context: &Arc<Context>,
        config: &GpuConfig,
        shape: &KernelShape,
        mapped: Mapped,
    ) -> Result<Self> {
        let layer = || {
            let counts = vec![0; shape.ranks as usize];
            let on_device = Buffer::of(context, &counts)?;
            Ok(Layer { counts, on_device })
        };
        let fetch = || {
            let indices = Buffer::new(context, TableLayout::index_room(shape))?;
            Ok(Fetch { sent: None, indices })
        };
        Ok(Self {
            layout: TableLayout::new(shape),
            kernels: TableKernels::load(context, config)?,
            work: Stream::new(context)?,
            windows: Buffer::of(context, &mapped.windows)?,
            layers: (0..shape.layers).map(|_| layer()).collect::<Result<_>>()?,
            fetches: (0..shape.in_flight).map(|_| fetch()).collect::<Result<_>>()?,
            words: Pinned::new(context, COUNTS + shape.ranks as usize)?,
            mapped,
        })
    }

    /// Writes this rank's entries of a layer.
    ///
    /// # Safety
    /// As [`KernelSet::write_entries`](tokenyard_core::kernels::KernelSet::write_entries).
    pub(crate) unsafe fn write(&mut self, entries: &abi::TyEntries) -> Result<()> {
        let Some(layer) = self.layers.get_mut(entries.layer as usize) else {
            return Err(no_layer(entries.layer));
        };
        // SAFETY: by this function's contract: R numbers.
        let given = unsafe { counts_of(entries, layer.counts.len(), self.layout.entries)? };
        layer.counts.copy_from_slice(given);
        let (words, bytes) = (self.words.at(COUNTS), size_of_val(given) as u64);
        // SAFETY: pinned memory for R numbers that lives as long as `self`; nothing is queued that reads it.
        unsafe { std::ptr::copy_nonoverlapping(given.as_ptr(), words, given.len()) };
        self.work.copy(layer.on_device.address(), words as u64, bytes)?;
        let count = layer.counts[self.mapped.rank as usize];
        let arguments = TableArgs { count, ..self.arguments(entries.layer) };
        // SAFETY: the parts have so many entries, by this function's contract. They have room in the window, and no
        // rank reads it now. The call waits for the kernels.
        unsafe { self.move_all(Move::Write, &entries.parts, arguments) }
    }

    /// Starts a fetch: its indices may be changed afterwards.
    ///
    /// # Safety
    /// As [`KernelSet::fetch_send`](tokenyard_core::kernels::KernelSet::fetch_send).
    pub(crate) unsafe fn send(&mut self, fetch: &abi::TyFetch) -> Result<()> {
        let abi::TyFetch { operation, layer, index_bytes, count, .. } = *fetch;
        if layer as usize >= self.layers.len() {
            return Err(no_layer(layer));
        }
        let slot = self.slot(operation);
        let indices = self.fetches[slot].indices.address();
        let arguments = TableArgs { indices, index_bytes, count, ..self.arguments(layer) };
        // SAFETY: the caller's indices, by this function's contract. The call waits for the copy.
        let wrong = unsafe { self.check_indices(fetch.indices as u64, &arguments)? };
        self.fetches[slot].sent = Some(SentFetch { operation, layer, index_bytes, count, wrong });
        Ok(())
    }

    /// Copies the indices of a fetch, and finds one that has no entry.
    ///
    /// # Safety
    /// There are so many indices at `from`, which are valid for the call.
    unsafe fn check_indices(&self, from: u64, arguments: &TableArgs) -> Result<Option<i64>> {
        let TableArgs { indices, index_bytes, count, .. } = *arguments;
        if count == 0 {
            return Ok(None);
        }
        let index_bytes = u64::from(index_bytes);
        let [wrong, index] = [WRONG, INDEX].map(|word| self.words.at(word));
        // SAFETY: pinned memory that lives as long as `self`; nothing is queued that writes it.
        unsafe { wrong.write_volatile(0) };
        self.wait_behind(|| {
            self.work.copy(indices, from, count * index_bytes)?;
            // SAFETY: memory of this table, which has room for the indices.
            unsafe { self.kernels.check(self.work.name(), arguments) }
        })?;
        // SAFETY: as above; the kernel has ended.
        let Some(at) = unsafe { wrong.read_volatile() }.checked_sub(1) else { return Ok(None) };
        self.wait_behind(|| self.work.copy(index as u64, indices + at * index_bytes, index_bytes))?;
        // SAFETY: as above, an index of so many bytes.
        Ok(Some(unsafe {
            match index_bytes {
                4 => index.cast::<i32>().read_volatile().into(),
                _ => index.cast::<i64>().read_volatile(),
            }
        }))
    }

    /// Loads the entries of a fetch into its parts; nothing where they have no bytes.
    ///
    /// # Safety
    /// As [`KernelSet::fetch_recv`](tokenyard_core::kernels::KernelSet::fetch_recv).
    pub(crate) unsafe fn recv(&mut self, fetch: &abi::TyFetch) -> Result<()> {
        let abi::TyFetch { operation, count, .. } = *fetch;
        let slot = self.slot(operation);
        let sent = self.fetches[slot]
            .sent
            .take()
            .filter(|sent| (sent.operation, sent.count) == (operation, count));
        let Some(sent) = sent else {
            let text = format!("found fetch {operation}; expected one that was sent");
            return Err(Error::new(ErrorKind::Internal, "receive fetch", text));
        };
        let SentFetch { layer, index_bytes, .. } = sent;
        if let Some(index) = sent.wrong {
            let counts = &self.layers[layer as usize].counts;
            return Err(LayerCounts { most: self.layout.entries, counts }.no_entry(layer, index));
        }
        let indices = self.fetches[slot].indices.address();
        let arguments = TableArgs { indices, index_bytes, count, ..self.arguments(layer) };
        // SAFETY: the parts have room for so many entries, by this function's contract. Each index has one, as was
        // checked, and no rank writes while fetches are open. The call waits for the kernels.
        unsafe { self.move_all(Move::Fetch, &fetch.parts, arguments) }
    }

    /// # Safety
    /// As the contracts of its callers say.
    unsafe fn move_all(
        &self,
        what: Move,
        parts: &[abi::TyPart; 2],
        arguments: TableArgs,
    ) -> Result<()> {
        self.wait_behind(|| {
            entry_fields(parts, arguments.count).try_for_each(
                |EntryField { part, width, behind }| {
                    let first = arguments.first + behind;
                    let arguments = TableArgs { part: part as u64, first, ..arguments };
                    // SAFETY: by this function's contract.
                    unsafe { self.kernels.run(what, self.work.name(), width, &arguments) }
                },
            )
        })
    }

    /// Waits for all that was queued, also where some of it could not be: callers may free their memory then.
    fn wait_behind(&self, queue: impl FnOnce() -> Result<()>) -> Result<()> {
        let queued = queue();
        let ended = self.work.synchronize();
        queued.and(ended)
    }

    /// The arguments that all kernels of a layer have.
    fn arguments(&self, layer: u32) -> TableArgs {
        TableArgs {
            windows: self.windows.address(),
            counts: self.layers[layer as usize].on_device.address(),
            wrong: self.words.at(WRONG) as u64,
            first: self.layout.layer(layer),
            pitch: self.layout.pitch,
            entries: self.layout.entries,
            rank: self.mapped.rank,
            ranks: self.mapped.windows.len() as u32,
            ..TableArgs::default()
        }
    }

    fn slot(&self, operation: u64) -> usize {
        (operation % self.fetches.len() as u64) as usize
    }

    /// The transport's word on itself: nothing is under way between calls.
    pub(crate) fn flush(&self) -> Result<()> {
        self.mapped.link.health()
    }

    /// Waits until all that it queued has ended.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.work.synchronize()
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        if let Err(error) = self.synchronize() {
            tracing::warn!("the stream of a table did not end well: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_of_layers_are_apart_and_within_the_window() {
        let layout = TableLayout { pitch: 16, entries: 5, layers: 2 };
        assert_eq!([layout.layer(0), layout.layer(1)], [0, 80]);
        assert_eq!(layout.bytes(), Some(160));
        assert_eq!(TableLayout { entries: 1 << 43, ..layout }.bytes(), None);
    }
}
