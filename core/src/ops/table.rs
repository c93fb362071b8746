//! A table that all ranks hold together: each reads entries of any rank, which takes no part. Such as the rows of an
//! embedding that is too large for one device.
//!
//! An entry is some bytes of values and of scales. It is in a layer, on the rank that wrote it. All ranks write
//! together. Then each rank fetches alone, as often as it likes. Index `i` names entry `i % max_entries` of rank `i /
//! max_entries`. Ranks may have fewer entries than that, each as many as it likes.
//!
//! One thread uses a table at a time. Each rank takes window memory for `layers * max_entries` entries, and for
//! `in_flight * max_indices` more where the transport cannot load from peers.

mod votes;

use std::sync::{Arc, Mutex, PoisonError};

use crate::abi;
use crate::bootstrap::World;
use crate::communicator::memory::{Argument, check_memory};
use crate::communicator::{BringUpReport, TensorMut, TensorRef};
use crate::kernels::KernelShape;
use crate::moe::DType;
use crate::session::opening::{OpenedUser, UserSpec};
use crate::session::reporter::InCall;
use crate::session::standing::Standing;
use crate::session::user::User;
use crate::{Error, ErrorKind, Result};
use votes::{Vote, Votes};

/// The names of the operations, and their numbers in reports.
const NAMES: &[&str] = &["fetch", "write"];
const FETCH: usize = 0;
const WRITE: usize = 1;

/// A caller's options for a table; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableOptions {
    /// Bytes of the values of an entry, 1 to 2^30.
    pub entry_bytes: u64,
    /// Bytes of its scales, 0 to 2^30.
    pub scale_bytes: u64,
    /// Most entries of a rank in a layer, 1 to 2^32.
    pub max_entries: u64,
    /// Layers, 1 to 128.
    pub layers: u32,
    /// Most indices of a fetch, 1 to 2^31 - 1.
    pub max_indices: u32,
    /// Fetches that may be sent and not yet received, 1 to 32.
    pub in_flight: u32,
}

impl TableOptions {
    /// Options with one layer, no scales, and 2 fetches in flight.
    pub fn new(entry_bytes: u64, max_entries: u64, max_indices: u32) -> Self {
        Self { entry_bytes, scale_bytes: 0, max_entries, layers: 1, max_indices, in_flight: 2 }
    }

    pub(super) fn spec(self, ranks: u32) -> Result<UserSpec> {
        let Self { entry_bytes, scale_bytes, max_entries, layers, max_indices, in_flight } = self;
        let check = |name, value, most| super::check_range("open table", name, value, most);
        check("entry_bytes", entry_bytes, 1 << 30)?;
        if scale_bytes > 0 {
            check("scale_bytes", scale_bytes, 1 << 30)?;
        }
        check("max_entries", max_entries, 1 << 32)?;
        check("layers", layers.into(), 128)?;
        check("max_indices", max_indices.into(), (1 << 31) - 1)?;
        check("in_flight", in_flight.into(), 32)?;
        let shape = KernelShape {
            max_tokens: max_indices,
            in_flight,
            runs: abi::TY_RUNS_TABLE,
            message_bytes: entry_bytes + scale_bytes,
            entries: max_entries,
            layers,
            ..super::no_shape(ranks)
        };
        Ok(UserSpec {
            name: "table",
            shape,
            capability: abi::TY_KERNELS_CAP_TABLE,
            operations: NAMES,
            agreement: super::agreement([
                ("entry_bytes", entry_bytes),
                ("scale_bytes", scale_bytes),
                ("max_entries", max_entries),
                ("layers", layers.into()),
                ("max_indices", max_indices.into()),
                ("in_flight", in_flight.into()),
            ]),
        })
    }
}

/// Entries of a layer, as a caller has them. Tensors are contiguous, and of any shape: only their bytes count.
#[derive(Clone, Copy, Debug)]
pub struct Entries<'a> {
    /// The values: `entry_bytes` for each.
    pub values: TensorRef<'a>,
    /// The scales: `scale_bytes` for each; none where that is 0.
    pub scales: Option<TensorRef<'a>>,
}

/// See the [module](self).
pub struct Table {
    standing: Standing,
    user: User,
    options: TableOptions,
    report: BringUpReport,
    /// The name of its collectives in the world, where other tables may meet as well.
    topic: String,
    /// The number of the next fetch, of this rank alone.
    next_fetch: u64,
    /// Writes so far.
    writes: u64,
    /// Slots (fetch number modulo `in_flight`) whose fetch was sent and not received: one bit each.
    open_slots: u32,
    /// Its address names this table.
    dropped: Arc<Dropped>,
    /// Dropped last: the goodbye to the other ranks comes behind the end of the transports.
    _world: Arc<World>,
}

/// Fetches of a table whose pendings were dropped. They end at its next call.
#[derive(Debug, Default)]
struct Dropped(Mutex<Vec<SentFetch>>);

#[derive(Clone, Copy, Debug)]
struct SentFetch {
    operation: u64,
    layer: u32,
    count: u64,
}

/// A fetch that was sent. Finish it with [`Table::fetch_recv`]. One that is dropped ends at the next call of its table,
/// and its entries are lost.
#[derive(Debug)]
#[must_use = "the entries of a fetch that is never received are lost"]
pub struct PendingFetch {
    table: Arc<Dropped>,
    count: u64,
    /// None once it is received.
    sent: Option<SentFetch>,
}

impl PendingFetch {
    /// The number of its indices.
    pub fn count(&self) -> u64 {
        self.count
    }
}

impl Drop for PendingFetch {
    fn drop(&mut self) {
        let mut dropped = self.table.0.lock().unwrap_or_else(PoisonError::into_inner);
        dropped.extend(self.sent.take());
    }
}

super::user_of_a_session!(Table, TableOptions);

impl Table {
    /// The table of a user that was opened.
    pub(super) fn made(opened: OpenedUser, options: TableOptions) -> Self {
        let OpenedUser { number, user, standing, report } = opened;
        let _world = Arc::clone(&standing.world);
        Self {
            standing,
            user,
            options,
            report,
            topic: format!("write table {number}"),
            next_fetch: 0,
            writes: 0,
            open_slots: 0,
            dropped: Arc::default(),
            _world,
        }
    }

    /// Writes this rank's entries of all layers, in place of those that it had. Collective: no rank may have a fetch
    /// that is sent and not received. The tensors may be changed afterwards.
    ///
    /// It is a collective of the world, too: all ranks write to several tables, and open and close, in the same order.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for entries that cannot be written, [`ErrorKind::Refused`] on the other ranks.
    /// Nothing is written then on any rank. Any other error closes the table.
    pub fn write(&mut self, layers: &[Entries<'_>]) -> Result<()> {
        self.standing.check_open()?;
        self.end_dropped()?;
        let counts = self.check_layers(layers);
        self.write_checked(layers, counts)
    }

    /// Takes part in the write that the other ranks make now, with a refusal, where this rank has no entries for
    /// [`write`](Self::write). For callers that read tensors before core can. Returns `why`, or the error that ended
    /// the call before.
    pub fn refuse_write(&mut self, why: Error) -> Error {
        match self.standing.check_open() {
            Ok(()) => self.write_checked(&[], Err(why)).err().unwrap_or_else(|| {
                Error::new(ErrorKind::Internal, "refuse write", "the entries were written")
            }),
            Err(closed) => closed,
        }
    }

    /// Reads an entry for each index, in their order. This rank alone. `indices`: contiguous, i32 or i64; `outs` has
    /// room for as many entries, and is written.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for tensors that cannot be used, for an index without an entry, and where
    /// `in_flight` fetches are not received: the outputs are unchanged, and the table goes on. Any other error closes
    /// it.
    pub fn fetch(
        &mut self,
        layer: u32,
        indices: TensorRef<'_>,
        values: &mut TensorMut<'_>,
        scales: Option<&mut TensorMut<'_>>,
    ) -> Result<()> {
        let pending = self.fetch_send(layer, indices)?;
        self.fetch_recv(pending, values, scales)
    }

    /// The first half of [`fetch`](Self::fetch). The indices may be changed afterwards.
    ///
    /// # Errors
    /// As there, but for indices without an entry, which the second half reports.
    pub fn fetch_send(&mut self, layer: u32, indices: TensorRef<'_>) -> Result<PendingFetch> {
        self.standing.check_open()?;
        self.end_dropped()?;
        let (count, index_bytes) = self.check_indices(layer, indices)?;
        let operation = self.begin()?;
        let _in_call = InCall::new(&self.standing.recorder);
        let data = if count == 0 { std::ptr::null() } else { indices.raw().data.cast_const() };
        let fetch = abi::TyFetch {
            size: size_of::<abi::TyFetch>(),
            operation,
            layer,
            index_bytes,
            indices: data.cast(),
            count,
            parts: [NO_PART; 2],
        };
        // SAFETY: the indices are borrowed for the call, are so many of so many bytes, and lie in memory that the
        // kernel set works on, as was checked.
        let sent = unsafe { self.user.kernels().fetch_send(&fetch) };
        sent.map_err(|error| self.standing.fail(error))?;
        let sent = Some(SentFetch { operation, layer, count });
        Ok(PendingFetch { table: Arc::clone(&self.dropped), count, sent })
    }

    /// The second half: waits for the entries, and writes them. Fetches are received in any order.
    ///
    /// # Errors
    /// As [`fetch`](Self::fetch). Also where the outputs cannot be written: the fetch has ended then, and its entries
    /// are lost.
    pub fn fetch_recv(
        &mut self,
        mut pending: PendingFetch,
        values: &mut TensorMut<'_>,
        scales: Option<&mut TensorMut<'_>>,
    ) -> Result<()> {
        self.standing.check_open()?;
        let is_mine = Arc::ptr_eq(&pending.table, &self.dropped);
        let Some(sent) = pending.sent.take_if(|_| is_mine) else {
            let text = "found a fetch that was sent by another table";
            return Err(Error::new(ErrorKind::InvalidInput, "receive fetch", text)
                .with_fix("receive it on the table that sent it"));
        };
        let outs =
            Entries { values: values.as_ref(), scales: scales.map(|scales| scales.as_ref()) };
        let checked = self.check_parts(sent.count, &outs);
        let parts = if checked.is_ok() { parts(&outs) } else { [NO_PART; 2] };
        let received = self.recv(sent, parts);
        if self.is_closed() { received } else { checked.and(received) }
    }

    /// Closes the table on all ranks together. Collective.
    ///
    /// # Errors
    /// A fetch that was sent and not received; a lost rank.
    pub fn close(mut self) -> Result<()> {
        self.standing.check_open()?;
        self.end_dropped()?;
        if let Err(error) = self.check_received("close table") {
            return Err(self.standing.end(error));
        }
        let flushed = self.user.kernels().flush();
        flushed.map_err(|error| self.standing.fail(error))?;
        self.standing.world.barrier("close table")
    }

    /// `counts`: the entries of each layer, or why this rank refuses.
    fn write_checked(&mut self, layers: &[Entries<'_>], counts: Result<Vec<u64>>) -> Result<()> {
        self.standing.recorder.0.track.pass(self.writes, WRITE, false);
        self.writes += 1;
        let in_call = InCall::new(&self.standing.recorder);
        let voted = match &counts {
            Ok(counts) => self.vote(&Vote::Goes(counts)),
            Err(why) => self.vote(&Vote::Refuses(&super::reason(why))),
        };
        let written = voted.and_then(|votes| match votes {
            Votes::Refused(refusal) => Ok(Some(refusal)),
            Votes::Go(by_layer) => {
                for (layer, (entries, counts)) in (0..).zip(layers.iter().zip(by_layer)) {
                    self.write_layer(layer, entries, &counts)?;
                }
                // No rank fetches before all have written.
                self.standing.world.barrier(&self.topic).map(|()| None)
            }
        });
        drop(in_call);
        match (written, counts) {
            (Ok(None), _) => Ok(()),
            // Nothing is written: no rank has begun.
            (Ok(Some(refusal)), counts) => Err(counts.err().unwrap_or(refusal)),
            (Err(error), _) => Err(self.standing.fail(error)),
        }
    }

    /// Learns what all ranks have, before any of them writes.
    fn vote(&self, mine: &Vote<'_>) -> Result<Votes> {
        let votes = self.standing.world.all_gather(&self.topic, &mine.bytes())?;
        Votes::read(&votes, &self.options)
    }

    /// `counts`: the entries of each rank.
    fn write_layer(&self, layer: u32, entries: &Entries<'_>, counts: &[u64]) -> Result<()> {
        let written = abi::TyEntries {
            size: size_of::<abi::TyEntries>(),
            layer,
            reserved: 0,
            counts: counts.as_ptr(),
            parts: parts(entries),
        };
        // SAFETY: the tensors are borrowed for the call, have so many entries, and lie in memory that the kernel set
        // works on, as was checked. All ranks write now, and none has a fetch that is open.
        unsafe { self.user.kernels().write_entries(&written) }
    }

    /// The number of a fetch whose slot is free.
    fn begin(&mut self) -> Result<u64> {
        let in_flight = u64::from(self.options.in_flight);
        let is_free = |number: &u64| self.open_slots >> (number % in_flight) & 1 == 0;
        let mut numbers = self.next_fetch..self.next_fetch + in_flight;
        let Some(operation) = numbers.find(is_free) else {
            let text = format!(
                "{in_flight} fetches were sent and not received; expected fewer, because in_flight = {in_flight}"
            );
            return Err(Error::new(ErrorKind::InvalidInput, "start fetch", text)
                .with_fix("receive each fetch; or open the table with a larger in_flight"));
        };
        self.standing.recorder.0.track.pass(operation, FETCH, false);
        self.next_fetch = operation + 1;
        self.open_slots |= 1 << (operation % in_flight);
        Ok(operation)
    }

    /// Ends the fetches whose pendings were dropped.
    fn end_dropped(&mut self) -> Result<()> {
        let mut dropped = self.dropped.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all = std::mem::take(&mut *dropped);
        drop(dropped);
        for sent in all {
            match self.recv(sent, [NO_PART; 2]) {
                Err(error) if error.kind() != ErrorKind::InvalidInput => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn recv(&mut self, sent: SentFetch, parts: [abi::TyPart; 2]) -> Result<()> {
        let SentFetch { operation, layer, count } = sent;
        self.standing.recorder.0.track.pass(operation, FETCH, true);
        let in_call = InCall::new(&self.standing.recorder);
        let mut fetch = abi::TyFetch {
            size: size_of::<abi::TyFetch>(),
            operation,
            layer,
            index_bytes: 0,
            indices: std::ptr::null(),
            count,
            parts,
        };
        // SAFETY: the outputs are borrowed exclusively for the call, have room for so many entries, and lie in memory
        // that the kernel set works on, as was checked; or there are none.
        let received = unsafe { self.user.kernels().fetch_recv(&mut fetch) };
        drop(in_call);
        self.open_slots &= !(1 << (operation % u64::from(self.options.in_flight)));
        received.map_err(|error| match error.kind() {
            // The kernel set finds what is wrong with the caller's indices.
            ErrorKind::Refused => {
                Error::new(ErrorKind::InvalidInput, "fetch entries", error.message())
                    .with_fix("index i names entry i % max_entries of rank i / max_entries")
            }
            _ => self.standing.fail(error),
        })
    }

    fn check_received(&self, operation: &'static str) -> Result<()> {
        if self.open_slots == 0 {
            return Ok(());
        }
        let open = self.open_slots.count_ones();
        let text = format!("found {open} fetches that were sent and not received");
        Err(Error::new(ErrorKind::InvalidInput, operation, text)
            .with_fix("receive every fetch before"))
    }

    /// The entries of each layer.
    fn check_layers(&self, layers: &[Entries<'_>]) -> Result<Vec<u64>> {
        self.check_received("write table")?;
        if layers.len() != self.options.layers as usize {
            let (found, expected) = (layers.len(), self.options.layers);
            return Err(wrong(format!("layers: found {found}; expected {expected}")));
        }
        layers.iter().map(|entries| self.check_entries(entries)).collect()
    }

    /// The number of entries that the tensors hold.
    fn check_entries(&self, entries: &Entries<'_>) -> Result<u64> {
        let TableOptions { entry_bytes, max_entries, .. } = self.options;
        let bytes = super::contiguous_bytes("values", entries.values)?;
        let count = bytes / entry_bytes;
        if bytes % entry_bytes != 0 || count > max_entries {
            return Err(wrong(format!(
                "values: found {bytes} bytes; expected those of at most {max_entries} entries of {entry_bytes} bytes"
            )));
        }
        self.check_parts(count, entries).map(|()| count)
    }

    /// Checks that the tensors hold so many entries.
    fn check_parts(&self, count: u64, entries: &Entries<'_>) -> Result<()> {
        let TableOptions { entry_bytes, scale_bytes, .. } = self.options;
        let Entries { values, scales } = *entries;
        let arguments =
            [Argument::other("values", Some(values)), Argument::other("scales", scales)];
        check_memory(&arguments, self.user.device)?;
        let found = super::contiguous_bytes("values", values)?;
        if found != count * entry_bytes {
            let expected = count * entry_bytes;
            return Err(wrong(format!(
                "values: found {found} bytes; expected {expected}, {count} entries of {entry_bytes} bytes"
            )));
        }
        let found = match scales {
            Some(scales) => super::contiguous_bytes("scales", scales)?,
            None => 0,
        };
        if found != count * scale_bytes {
            let expected = count * scale_bytes;
            return Err(wrong(format!(
                "scales: found {found} bytes; expected {expected}, {count} entries of {scale_bytes} bytes"
            )));
        }
        Ok(())
    }

    /// The number of indices, and the bytes of one.
    fn check_indices(&self, layer: u32, indices: TensorRef<'_>) -> Result<(u64, u32)> {
        check_memory(&[Argument::other("indices", Some(indices))], self.user.device)?;
        let index_bytes = match indices.dtype() {
            Some(DType::I32) => 4,
            Some(DType::I64) => 8,
            other => {
                let found = other.map_or("no type".to_owned(), |dtype| dtype.to_string());
                return Err(wrong(format!("indices: found {found}; expected i32 or i64")));
            }
        };
        let count = super::contiguous_bytes("indices", indices)? / u64::from(index_bytes);
        if count > self.options.max_indices.into() {
            let most = self.options.max_indices;
            return Err(wrong(format!("indices: found {count}; expected at most {most}")));
        }
        if layer >= self.options.layers {
            let layers = self.options.layers;
            return Err(wrong(format!("layer: found {layer}; expected less than {layers}")));
        }
        Ok((count, index_bytes))
    }
}

const NO_PART: abi::TyPart = abi::TyPart { data: std::ptr::null_mut(), bytes: 0 };

/// Of tensors without gaps.
fn parts(entries: &Entries<'_>) -> [abi::TyPart; 2] {
    [super::part(entries.values), entries.scales.map_or(NO_PART, super::part)]
}

fn wrong(text: String) -> Error {
    Error::new(ErrorKind::InvalidInput, "check arguments", text)
        .with_fix("pass contiguous tensors of the sizes that the table was opened with")
}
