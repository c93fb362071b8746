//! All-gather: each rank gets the shards of all ranks.
//!
//! A slot of a window has a place for the shards of each rank. A rank copies its own into its place, and sends them to
//! the same place of every rank of its domain, and of its rail. Among domains, a rank is the forwarder of its rail: it
//! sends on inside what comes from other domains. So shards cross to a domain once for each of its rails.
//!
//! The record beside shards says how many bytes they have, and whether their rank refuses. Every rank reads the
//! records of all ranks, so all end a gather alike, without another round.

use tokenyard_core::domains::Domains;
use tokenyard_core::kernels::KernelShape;
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::line::{Line, Lines, Passage, RECORD, text_of};
use crate::engine::control::{Header, Signal};
use crate::engine::ends::End;
use crate::engine::member::Member;
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
        let places = u64::from(self.ranks) * u64::from(self.in_flight);
        (RECORD + self.room).checked_mul(places).filter(|bytes| *bytes < 1 << 47)
    }

    /// Where the record of a rank lies; its shards follow.
    fn place(&self, rank: u32, slot: usize) -> u64 {
        let number = slot as u64 * u64::from(self.ranks) + u64::from(rank);
        (RECORD + self.room) * number
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Gather {
    lines: Lines,
    layout: GatherLayout,
    domains: Domains,
    rank: u32,
}

// SAFETY: as for `Pipe`.
unsafe impl Send for Gather {}

/// A line, and a gather in a slot of it.
#[derive(Clone, Copy)]
struct Turn<'a> {
    line: &'a Line,
    layout: &'a GatherLayout,
    slot: usize,
    number: u64,
}

impl Turn<'_> {
    /// The way of the shards of `rank`, or of their record, to a peer of the line. `place`: theirs on the line.
    fn way(&self, signal: Signal, rank: u32, [peer, place]: [u32; 2]) -> Passage {
        let behind = if signal == Signal::Rows { RECORD } else { 0 };
        let at = self.layout.place(rank, self.slot) + behind;
        Passage { peer, slot: self.slot, number: self.number, signal, place, from: at, to: at }
    }

    /// Sends the shards of a rank, which lie in this rank's window behind their record, to all others of the line.
    fn pass(&self, rank: u32, place: u32, window: &Area) -> Result<()> {
        let at = self.layout.place(rank, self.slot);
        let record = Record::at(window.at(at));
        let [_, _, bytes, ..] = record.header().0;
        let whole = RECORD.min(64 + record.text().len() as u64);
        for peer in self.line.order.member.domains.peers().skip(1) {
            for (signal, bytes) in [(Signal::Rows, bytes), (Signal::Entry, whole)] {
                let way = self.way(signal, rank, [peer, place]);
                if self.line.is_mapped() {
                    // SAFETY: places of equal size in two windows; this rank alone writes to the peer's, which has left
                    // the last gather of the slot.
                    unsafe {
                        let (from, to) = (window.at(way.from), self.line.start(&way));
                        std::ptr::copy_nonoverlapping(from, to, bytes as usize);
                    }
                }
                match signal {
                    Signal::Rows => self.line.put(&way, bytes)?,
                    _ => self.line.announce(&way, bytes)?,
                }
            }
        }
        Ok(())
    }

    /// Waits for the record and the shards of a rank, from the peer of its place on the line.
    fn take(&self, rank: u32, place: u32, window: &Area) -> Result<()> {
        let way = |signal| self.way(signal, rank, [0, place]);
        self.line.wait(&way(Signal::Entry), 1)?;
        let record = Record::at(window.at(self.layout.place(rank, self.slot)));
        let header = checked(record, rank, self.number)?;
        let [_, _, bytes, ..] = header.0;
        if bytes > self.layout.room {
            return Err(bad_record(rank, format!("{bytes} bytes of shards")));
        }
        self.line.wait(&way(Signal::Rows), self.line.pieces(bytes))
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
        Ok(Self { lines, layout, domains: Domains::new(shape), rank: shape.rank })
    }

    fn slot(&self, operation: u64) -> usize {
        (operation % u64::from(self.layout.in_flight)) as usize
    }

    fn turn(&self, line: usize, operation: u64) -> Turn<'_> {
        let (line, slot) = (&self.lines.all[line], self.slot(operation));
        Turn { line, layout: &self.layout, slot, number: operation }
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
        let refuses = !text.is_empty();
        let at = self.layout.place(self.rank, self.slot(operation));
        let mut bytes = 0;
        for part in parts.iter().filter(|part| !refuses && part.bytes > 0) {
            let to = self.lines.window.at(at + RECORD + bytes);
            // SAFETY: the place has room for the shards, which core has checked, and no other rank writes to it.
            unsafe { std::ptr::copy_nonoverlapping(part.data.cast(), to, part.bytes as usize) };
            bytes += part.bytes;
        }
        let verdict = if refuses { REFUSED } else { GOES };
        let lengths = lengths(parts.iter().map(|part| part.bytes));
        let header = Header([operation, verdict, bytes, lengths, 0, self.rank.into(), 0, 0]);
        self.note(at, header, text);
        let mine = self.domains.mine;
        self.turn(0, operation).pass(self.rank, self.rank, &self.lines.window)?;
        match self.lines.all.len() {
            1 => Ok(()),
            _ => self.turn(1, operation).pass(self.rank, mine, &self.lines.window),
        }
    }

    /// Writes this rank's record to its own place.
    fn note(&self, at: u64, header: Header, text: &[u8]) {
        let text = &text[..text.len().min((RECORD - 64) as usize)];
        let to = self.lines.window.at(at);
        // SAFETY: a record's room, which no other rank writes; commands that were posted from it are done (open_slot).
        unsafe {
            to.cast::<Header>().write(header.with_text(text.len() as u64));
            std::ptr::copy_nonoverlapping(text.as_ptr(), to.add(64), text.len());
        }
    }

    /// Waits for the shards of all ranks, and writes them to the parts.
    ///
    /// # Safety
    /// As [`KernelSet::gather_recv`](tokenyard_core::kernels::KernelSet::gather_recv).
    pub(crate) unsafe fn recv(&mut self, gather: &abi::TyGather) -> Result<()> {
        let operation = gather.operation;
        self.take_all(operation)?;
        let verdict = self.verdict(operation);
        if verdict.is_ok() {
            // SAFETY: by this function's contract.
            unsafe { self.copy_out(gather) };
        }
        let end = if verdict.is_ok() { End::Done } else { End::Refused };
        let slot = self.slot(operation);
        for line in &self.lines.all {
            // Others write to the places of their shards once this rank has left, and what goes on inside lies there.
            line.order.wait_posted(slot, operation)?;
        }
        for line in &mut self.lines.all {
            line.order.leave(slot, operation, end)?;
        }
        verdict
    }

    /// Waits for the shards of all ranks; sends those of other domains on.
    fn take_all(&self, operation: u64) -> Result<()> {
        let (domains, window) = (&self.domains, &self.lines.window);
        for domain in domains.others() {
            let rank = domains.place(domain, domains.index);
            self.turn(1, operation).take(rank, domain, window)?;
            self.turn(0, operation).pass(rank, rank, window)?;
        }
        for domain in domains.all() {
            for peer in domains.peers().skip(1) {
                let rank = domains.place(domain, peer);
                self.turn(0, operation).take(rank, rank, window)?;
            }
        }
        Ok(())
    }

    /// The end of a gather, from the records of all ranks: the same on all of them.
    fn verdict(&self, operation: u64) -> Result<()> {
        let slot = self.slot(operation);
        let record = |rank| Record::at(self.lines.window.at(self.layout.place(rank, slot)));
        let mut first: Option<(u32, [u64; 2])> = None;
        for rank in 0..self.layout.ranks {
            let [_, verdict, bytes, lengths, ..] = record(rank).header().0;
            if verdict != GOES {
                return Err(refused(rank, record(rank).text()));
            }
            match first {
                Some((of, found)) if found != [bytes, lengths] => {
                    return Err(other_lengths([of, rank], [found[0], bytes]));
                }
                _ => first = first.or(Some((rank, [bytes, lengths]))),
            }
        }
        Ok(())
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
        let mut all = starts.concat();
        all.sort_unstable();
        let step = RECORD + layout.room;
        assert_eq!(all, (0..6).map(|number| number * step).collect::<Vec<_>>());
        assert_eq!(layout.bytes(), Some(6 * step));
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
