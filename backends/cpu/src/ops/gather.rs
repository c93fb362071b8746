//! All-gather: each rank gets the shards of all ranks.
//!
//! A slot of a window has a place for the shards of each rank. A rank copies its own into its place, and sends them to
//! the same place of every rank of its domain, and of its rail. Among domains, a rank is the forwarder of its rail: it
//! sends on inside what comes from other domains. So shards cross to a domain once for each of its rails.
//!
//! The record beside shards says how many bytes they have, and whether their rank refuses. Every rank reads the
//! records of all ranks, so all end a gather alike, without another round.

use tokenyard_core::domains::{Domains, Member};
use tokenyard_core::kernels::KernelShape;
use tokenyard_core::moe::{RECORD_HEADER, RECORD_TEXT};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::line::{Line, Lines, Passage, RECORD, bytes_of, text_of};
use crate::engine::control::{Header, Signal};
use crate::engine::ends::End;
use crate::engine::places::Area;
use crate::engine::record::{Record, bad_record, checked};

/// Verdicts in word 1 of a record.
const GOES: u64 = 0;
const REFUSED: u64 = 1;

/// The parts of a window, which repeat for each slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GatherLayout {
    ranks: u32,
    in_flight: u32,
    /// Room for the shards of a rank.
    room: u64,
}

impl GatherLayout {
    pub(crate) fn new(shape: &KernelShape) -> Self {
        let room = shape.message_bytes.next_multiple_of(64);
        Self { ranks: shape.ranks, in_flight: shape.in_flight, room }
    }

    /// Bytes of the window; none where they are beyond the address space.
    pub(crate) fn bytes(&self) -> Option<u64> {
        let places = (RECORD + self.room).checked_mul(self.ranks.into())?;
        let bytes = places.checked_add(RECORD)?.checked_mul(self.in_flight.into());
        bytes.filter(|bytes| *bytes < 1 << 47)
    }

    /// Where the record of a rank lies; its shards follow.
    fn place(&self, rank: u32, slot: usize) -> u64 {
        let of_slot = (RECORD + self.room) * u64::from(self.ranks) + RECORD;
        of_slot * slot as u64 + (RECORD + self.room) * u64::from(rank)
    }

    /// Where this rank's record lies before it leaves on the rail: its pieces there have another length than inside.
    fn on_rail(&self, slot: usize) -> u64 {
        self.place(self.ranks, slot)
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Gather {
    lines: Lines,
    layout: GatherLayout,
    domains: Domains,
    rank: u32,
    /// By slot, the shards of this rank.
    own: Vec<Option<Shards>>,
}

// SAFETY: as for `Pipe`.
unsafe impl Send for Gather {}

/// The shards of a rank, as their record says, and this rank has checked. They lie in the window.
#[derive(Clone, Debug)]
struct Shards {
    rank: u32,
    number: u64,
    bytes: u64,
    /// See [`lengths`].
    lengths: u64,
    /// Why their rank refuses; no bytes where it does not.
    refusal: Vec<u8>,
}

impl Shards {
    /// The header of their record, for a peer that they reach in so many pieces.
    fn header(&self, pieces: u64) -> Header {
        let verdict = if self.refusal.is_empty() { GOES } else { REFUSED };
        Header([self.number, verdict, self.bytes, self.lengths, pieces, self.rank.into(), 0, 0])
    }
}

/// A line, and a gather in a slot of it.
#[derive(Clone, Copy)]
struct Turn<'a> {
    line: &'a Line,
    layout: &'a GatherLayout,
    window: &'a Area,
    slot: usize,
    number: u64,
}

impl Turn<'_> {
    /// The way of the shards of `rank`, or of their record, to a peer of the line. `place`: theirs on the line.
    fn way(&self, signal: Signal, rank: u32, [peer, place]: [u32; 2]) -> Passage {
        let behind = if signal == Signal::Rows { RECORD } else { 0 };
        let to = self.layout.place(rank, self.slot) + behind;
        let is_rail = signal == Signal::Entry && self.line.order.member.is_rail();
        let from = if is_rail { self.layout.on_rail(self.slot) } else { to };
        Passage { peer, slot: self.slot, number: self.number, signal, place, from, to }
    }

    /// Sends shards, which lie in this rank's window, to all others of the line.
    fn pass(&self, shards: &Shards, place: u32) -> Result<()> {
        let Self { line, window, .. } = *self;
        let header = shards.header(line.pieces(shards.bytes));
        for (at, peer) in line.order.member.domains.peers().skip(1).enumerate() {
            let way = self.way(Signal::Rows, shards.rank, [peer, place]);
            if line.is_mapped() {
                // SAFETY: places of equal size in two windows, and the bytes are within them; this rank alone writes
                // to the peer's, which has left the last gather of the slot.
                unsafe {
                    let (from, to) = (window.at(way.from), line.start(&way));
                    std::ptr::copy_nonoverlapping(from, to, shards.bytes as usize);
                }
            }
            line.put(&way, shards.bytes)?;
            let way = self.way(Signal::Entry, shards.rank, [peer, place]);
            if line.is_mapped() || at == 0 {
                // All puts of the line leave from one record.
                line.fill(&way, header, &shards.refusal);
            }
            line.announce(&way, RECORD_HEADER + shards.refusal.len() as u64)?;
        }
        Ok(())
    }

    /// Waits for the record and the shards of a rank, from the peer of its place on the line.
    fn take(&self, rank: u32, place: u32) -> Result<Shards> {
        let way = |signal| self.way(signal, rank, [0, place]);
        self.line.wait(&way(Signal::Entry), 1, abi::TY_PHASE_ENTRY)?;
        let record = Record::at(self.window.at(self.layout.place(rank, self.slot)));
        let header = checked(record, rank, self.number)?;
        let (bytes, pieces) = bytes_of(&header, rank, self.layout.room)?;
        let [_, verdict, _, lengths, ..] = header.0;
        let refusal = match verdict {
            GOES => Vec::new(),
            REFUSED if bytes == 0 => record.text().to_vec(),
            _ => return Err(bad_record(rank, format!("verdict {verdict} and {bytes} bytes"))),
        };
        self.line.wait(&way(Signal::Rows), pieces, abi::TY_PHASE_ROWS)?;
        Ok(Shards { rank, number: self.number, bytes, lengths, refusal })
    }
}

impl Gather {
    /// # Safety
    /// Everything that the plan points to (but for the list of windows) outlives the gather.
    pub(crate) unsafe fn new(
        shape: &KernelShape,
        layout: GatherLayout,
        members: Vec<Member>,
        plan: &abi::TyPlan,
    ) -> Result<Self> {
        // SAFETY: by this function's contract.
        let lines = unsafe { Lines::new(shape, members, plan)? };
        let own = vec![None; shape.in_flight as usize];
        Ok(Self { lines, layout, domains: Domains::new(shape), rank: shape.rank, own })
    }

    fn slot(&self, operation: u64) -> usize {
        (operation % u64::from(self.layout.in_flight)) as usize
    }

    fn turn(&self, line: usize, operation: u64) -> Turn<'_> {
        let (line, slot) = (&self.lines.all[line], self.slot(operation));
        let window = &self.lines.window;
        Turn { line, layout: &self.layout, window, slot, number: operation }
    }

    /// Sends the shards of this rank.
    ///
    /// # Safety
    /// As [`KernelSet::gather_send`](tokenyard_core::kernels::KernelSet::gather_send).
    pub(crate) unsafe fn send(&mut self, gather: &abi::TyGather) -> Result<()> {
        let operation = gather.operation;
        for line in &mut self.lines.all {
            line.order.open_slot(operation)?;
        }
        // SAFETY: by this function's contract.
        let (text, parts) = unsafe { (text_of(&gather.refusal), parts_of(gather)) };
        let refusal = text[..text.len().min(RECORD_TEXT as usize)].to_vec();
        let at = self.layout.place(self.rank, self.slot(operation)) + RECORD;
        let mut bytes = 0;
        for part in parts.iter().filter(|part| refusal.is_empty() && part.bytes > 0) {
            let to = self.lines.window.at(at + bytes);
            // SAFETY: the place has room for the shards, which core has checked, and no other rank writes to it.
            unsafe { std::ptr::copy_nonoverlapping(part.data.cast(), to, part.bytes as usize) };
            bytes += part.bytes;
        }
        let lengths = lengths(parts.iter().map(|part| part.bytes));
        let shards = Shards { rank: self.rank, number: operation, bytes, lengths, refusal };
        self.turn(0, operation).pass(&shards, self.rank)?;
        if self.lines.all.len() > 1 {
            self.turn(1, operation).pass(&shards, self.domains.mine)?;
        }
        let slot = self.slot(operation);
        self.own[slot] = Some(shards);
        Ok(())
    }

    /// Waits for the shards of all ranks, and writes them to the parts.
    ///
    /// # Safety
    /// As [`KernelSet::gather_recv`](tokenyard_core::kernels::KernelSet::gather_recv).
    pub(crate) unsafe fn recv(&mut self, gather: &abi::TyGather) -> Result<()> {
        let (operation, slot) = (gather.operation, self.slot(gather.operation));
        let Some(own) = self.own[slot].take().filter(|own| own.number == operation) else {
            let text = format!("found gather {operation}; expected one that was sent");
            return Err(Error::new(ErrorKind::Internal, "receive gather", text));
        };
        let mut all = self.take_all(operation)?;
        all.push(own);
        all.sort_unstable_by_key(|shards| shards.rank);
        let verdict = verdict(&all);
        if verdict.is_ok() {
            // SAFETY: by this function's contract.
            unsafe { self.copy_out(gather) };
        }
        let end = if verdict.is_ok() { End::Done } else { End::Refused };
        for line in &self.lines.all {
            // Others write to the places of their shards once this rank has left, and what goes on inside lies there.
            line.order.wait_posted(slot, operation)?;
        }
        for line in &mut self.lines.all {
            line.order.leave(slot, operation, end)?;
        }
        verdict
    }

    /// Waits for the shards of all other ranks; sends those of other domains on.
    fn take_all(&self, operation: u64) -> Result<Vec<Shards>> {
        let (domains, mut all) = (&self.domains, Vec::new());
        for domain in domains.others() {
            let rank = domains.place(domain, domains.index);
            let shards = self.turn(1, operation).take(rank, domain)?;
            self.turn(0, operation).pass(&shards, rank)?;
            all.push(shards);
        }
        for domain in domains.all() {
            for peer in domains.peers().skip(1) {
                let rank = domains.place(domain, peer);
                all.push(self.turn(0, operation).take(rank, rank)?);
            }
        }
        Ok(all)
    }

    /// # Safety
    /// Each part has room for the shards of all ranks; all ranks have shards of the same lengths.
    unsafe fn copy_out(&self, gather: &abi::TyGather) {
        let slot = self.slot(gather.operation);
        // SAFETY: by this function's contract.
        let parts = unsafe { parts_of(gather) };
        let mut behind = 0;
        for part in parts.iter().filter(|part| part.bytes > 0) {
            let bytes = part.bytes / u64::from(self.layout.ranks);
            for rank in 0..self.layout.ranks {
                let from = self.lines.window.at(self.layout.place(rank, slot) + RECORD + behind);
                // SAFETY: by this function's contract.
                unsafe {
                    let to = part.data.cast::<u8>().add((u64::from(rank) * bytes) as usize);
                    std::ptr::copy_nonoverlapping(from, to, bytes as usize);
                }
            }
            behind += bytes;
        }
    }

    /// Waits until all that it posted has left (INV-4).
    pub(crate) fn flush(&self) -> Result<()> {
        self.lines.all.iter().try_for_each(|line| line.order.flush())
    }

    pub(crate) fn counters(&self) -> Option<abi::TyCounters> {
        self.lines.all.first().map(|line| line.order.counters().as_abi())
    }
}

/// # Safety
/// The parts are valid for the call.
unsafe fn parts_of(gather: &abi::TyGather) -> &[abi::TyPart] {
    match gather.count {
        0 => &[],
        // SAFETY: by this function's contract.
        count => unsafe { std::slice::from_raw_parts(gather.parts, count) },
    }
}

/// A number for the lengths of shards, which differs where they differ (FNV-1a).
fn lengths(all: impl Iterator<Item = u64>) -> u64 {
    let bytes = all.flat_map(u64::to_le_bytes);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The end of a gather, from the records of all ranks, in order: the same on all of them.
fn verdict(all: &[Shards]) -> Result<()> {
    if let Some(one) = all.iter().find(|shards| !shards.refusal.is_empty()) {
        return Err(refused(one.rank, &one.refusal));
    }
    let Some(first) = all.first() else { return Ok(()) };
    let differs = |other: &&Shards| [other.bytes, other.lengths] != [first.bytes, first.lengths];
    match all.iter().find(differs) {
        None => Ok(()),
        Some(other) => Err(other_lengths([first.rank, other.rank], [first.bytes, other.bytes])),
    }
}

#[cold]
fn refused(rank: u32, why: &[u8]) -> Error {
    let text = format!("rank {rank} refused the gather: {}", String::from_utf8_lossy(why));
    Error::new(ErrorKind::Refused, "gather", text).with_rank(rank)
}

#[cold]
fn other_lengths(ranks: [u32; 2], bytes: [u64; 2]) -> Error {
    let text = format!(
        "the shards of rank {} have {} bytes, and those of rank {} have {}, or are divided otherwise; expected shards \
         of the same lengths on all ranks",
        ranks[0], bytes[0], ranks[1], bytes[1]
    );
    Error::new(ErrorKind::Mismatch, "gather", text).with_rank(ranks[1])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_all_ranks_and_slots_are_apart_and_within_the_window() {
        let layout = GatherLayout { ranks: 3, in_flight: 2, room: 128 };
        let starts = [0, 1].map(|slot| [0, 1, 2].map(|rank| layout.place(rank, slot)));
        let step = RECORD + layout.room;
        let slot = 3 * step + RECORD;
        assert_eq!(starts, [[0, step, 2 * step], [slot, slot + step, slot + 2 * step]]);
        assert_eq!([0, 1].map(|slot| layout.on_rail(slot)), [3 * step, slot + 3 * step]);
        assert_eq!(layout.bytes(), Some(2 * slot));
    }

    #[test]
    fn shards_that_are_divided_otherwise_have_another_number() {
        let of = |all: &[u64]| lengths(all.iter().copied());
        assert_eq!(of(&[8, 16]), of(&[8, 16]));
        assert_ne!(of(&[8, 16]), of(&[16, 8]));
        assert_ne!(of(&[24]), of(&[8, 16]));
        assert_ne!(of(&[]), of(&[0]));
    }
}
