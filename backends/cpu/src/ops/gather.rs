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
use tokenyard_core::moe::RECORD_HEADER;
use tokenyard_core::ops::record::{ExpectedRecord, RECORD, Shards, parts_of, verdict};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::line::{Line, Lines, Passage};
use super::reduce::bucket::Bucket;
use super::reduce::layout::ReduceLayout;
use crate::engine::control::{Header, Signal};
use crate::engine::ends::End;
use crate::engine::places::Area;
use crate::engine::record::Record;

/// The parts of a window, which repeat for each slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GatherLayout {
    ranks: u32,
    in_flight: u32,
    /// Room for the shards of a rank.
    pub(super) room: u64,
    /// Behind the slots, where the instance reduces.
    pub(super) reduces: Option<ReduceLayout>,
}

impl GatherLayout {
    /// `puts`: some link of the ranks cannot store to peers.
    pub(crate) fn new(shape: &KernelShape, puts: bool) -> Self {
        let room = shape.message_bytes.next_multiple_of(64);
        let layout = Self { ranks: shape.ranks, in_flight: shape.in_flight, room, reduces: None };
        let reduces = (shape.runs == abi::TY_RUNS_REDUCE)
            .then(|| ReduceLayout::new(shape, puts, layout.place(0, shape.in_flight as usize)));
        Self { reduces, ..layout }
    }

    /// Bytes of the window; none where they are beyond the address space.
    pub(crate) fn bytes(&self) -> Option<u64> {
        let places = (RECORD + self.room).checked_mul(self.ranks.into())?;
        let slots = places.checked_add(RECORD)?.checked_mul(self.in_flight.into())?;
        let behind = self.reduces.map_or(Some(0), |reduces| reduces.bytes(self.room))?;
        slots.checked_add(behind).filter(|bytes| *bytes < 1 << 47)
    }

    pub(super) fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Where the record of a rank lies; its shards follow.
    pub(super) fn place(&self, rank: u32, slot: usize) -> u64 {
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
    pub(super) lines: Lines,
    pub(super) layout: GatherLayout,
    pub(super) domains: Domains,
    pub(super) rank: u32,
    /// By slot, the shards of this rank.
    pub(super) own: Vec<Option<Shards>>,
    /// By slot, what this rank sums.
    pub(super) buckets: Vec<Option<Bucket>>,
}

// SAFETY: as for `Pipe`.
unsafe impl Send for Gather {}

/// A place that shards of a rank have on a line: its number there, and where they lie in each window.
#[derive(Clone, Copy)]
pub(super) struct Landing {
    pub(super) rank: u32,
    pub(super) place: u32,
    /// Where their record lies: at the place of the rank in every call, so that ranks that make different calls find
    /// each other's.
    pub(super) at: u64,
    /// Where their bytes lie.
    pub(super) bytes_at: u64,
    /// How many times the bytes of the record lie there: once for each rank that they go on to.
    pub(super) times: u32,
}

/// A line, and a gather in a slot of it.
#[derive(Clone, Copy)]
pub(super) struct Turn<'a> {
    pub(super) line: &'a Line,
    layout: &'a GatherLayout,
    pub(super) window: &'a Area,
    slot: usize,
    number: u64,
}

impl Turn<'_> {
    /// Where the shards of `rank` lie, with their place on the line.
    pub(super) fn landing(&self, rank: u32, place: u32) -> Landing {
        let at = self.layout.place(rank, self.slot);
        Landing { rank, place, at, bytes_at: at + RECORD, times: 1 }
    }

    /// The way of shards, or of their record, to a peer of the line.
    fn way(&self, signal: Signal, peer: u32, landing: &Landing) -> Passage {
        let to = if signal == Signal::Rows { landing.bytes_at } else { landing.at };
        let is_rail = signal == Signal::Entry && self.line.order.member.is_rail();
        let from = if is_rail { self.layout.on_rail(self.slot) } else { to };
        let Self { slot, number, .. } = *self;
        Passage { peer, slot, number, signal, place: landing.place, from, to }
    }

    /// Sends shards, which lie in this rank's window, to all others of the line.
    fn pass(&self, shards: &Shards, place: u32) -> Result<()> {
        self.pass_from(shards, self.landing(shards.rank, place), |way| {
            self.store(way, shards.bytes)
        })
    }

    /// Stores bytes of this rank's window to the peer, where it is mapped.
    pub(super) fn store(&self, way: &Passage, bytes: u64) {
        if self.line.is_mapped() {
            // SAFETY: places of equal size in two windows, and the bytes are within them; this rank alone writes to the
            // peer's, which has left the last gather of the slot.
            unsafe {
                let (from, to) = (self.window.at(way.from), self.line.start(way));
                std::ptr::copy_nonoverlapping(from, to, bytes as usize);
            }
        }
    }

    /// Sends shards to all others of the line. `lay` writes those for a peer where their way starts.
    pub(super) fn pass_from(
        &self,
        shards: &Shards,
        landing: Landing,
        lay: impl Fn(&mut Passage),
    ) -> Result<()> {
        let line = self.line;
        let bytes = shards.bytes * u64::from(landing.times);
        let header = Header(shards.words(line.pieces(bytes)));
        for (at, peer) in line.order.member.domains.peers().skip(1).enumerate() {
            let mut way = self.way(Signal::Rows, peer, &landing);
            lay(&mut way);
            line.put(&way, bytes)?;
            let way = self.way(Signal::Entry, peer, &landing);
            if line.is_mapped() || at == 0 {
                // All puts of the line leave from one record.
                line.fill(&way, header, &shards.refusal);
            }
            line.announce(&way, RECORD_HEADER + shards.refusal.len() as u64)?;
        }
        Ok(())
    }

    /// Waits for the record and the shards of a rank, from the peer of its place on the line.
    pub(super) fn take(&self, landing: Landing) -> Result<Shards> {
        let way = |signal| self.way(signal, 0, &landing);
        self.line.wait(&way(Signal::Entry), 1, abi::TY_PHASE_ENTRY)?;
        let record = Record::at(self.window.at(landing.at));
        let expected =
            ExpectedRecord { rank: landing.rank, number: self.number, room: self.layout.room };
        let (shards, pieces) = Shards::read(record.header().0, record.text(), expected)?;
        self.line.wait(&way(Signal::Rows), pieces, abi::TY_PHASE_ROWS)?;
        Ok(shards)
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
        let buckets = vec![None; shape.in_flight as usize];
        Ok(Self { lines, layout, domains: Domains::new(shape), rank: shape.rank, own, buckets })
    }

    pub(super) fn slot(&self, operation: u64) -> usize {
        (operation % u64::from(self.layout.in_flight)) as usize
    }

    pub(super) fn turn(&self, line: usize, operation: u64) -> Turn<'_> {
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
        let (shards, parts) = unsafe { (Shards::of(self.rank, gather), parts_of(gather)) };
        let goes = shards.refusal.is_empty();
        let mut at = self.layout.place(self.rank, self.slot(operation)) + RECORD;
        for part in parts.iter().filter(|part| goes && part.bytes > 0) {
            let to = self.lines.window.at(at);
            // SAFETY: the place has room for the shards, which core has checked, and no other rank writes to it.
            unsafe { std::ptr::copy_nonoverlapping(part.data.cast(), to, part.bytes as usize) };
            at += part.bytes;
        }
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
        let mut all = self.take_rail(operation)?;
        self.take_inside(operation, &mut all)?;
        all.push(own);
        all.sort_unstable_by_key(|shards| shards.rank);
        let verdict = verdict(&all);
        if verdict.is_ok() {
            // SAFETY: by this function's contract.
            unsafe { self.copy_out(gather) };
        }
        self.leave(operation, verdict)
    }

    /// Leaves a call, which ended so on all ranks.
    pub(super) fn leave(&mut self, operation: u64, verdict: Result<()>) -> Result<()> {
        let slot = self.slot(operation);
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

    /// Waits for the shards of other domains on the rail, and sends them on inside.
    fn take_rail(&self, operation: u64) -> Result<Vec<Shards>> {
        let take = |domain| {
            let rank = self.domains.place(domain, self.domains.index);
            let rail = self.turn(1, operation);
            let shards = rail.take(rail.landing(rank, domain))?;
            self.turn(0, operation).pass(&shards, rank)?;
            Ok(shards)
        };
        self.domains.others().map(take).collect()
    }

    /// Waits for the shards that come from the other ranks of this domain: theirs, and those that they send on.
    pub(super) fn take_inside(&self, operation: u64, all: &mut Vec<Shards>) -> Result<()> {
        let turn = self.turn(0, operation);
        for domain in self.domains.all() {
            for peer in self.domains.peers().skip(1) {
                let rank = self.domains.place(domain, peer);
                all.push(turn.take(turn.landing(rank, rank))?);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_all_ranks_and_slots_are_apart_and_within_the_window() {
        let layout = GatherLayout { ranks: 3, in_flight: 2, room: 128, reduces: None };
        let starts = [0, 1].map(|slot| [0, 1, 2].map(|rank| layout.place(rank, slot)));
        let step = RECORD + layout.room;
        let slot = 3 * step + RECORD;
        assert_eq!(starts, [[0, step, 2 * step], [slot, slot + step, slot + 2 * step]]);
        assert_eq!([0, 1].map(|slot| layout.on_rail(slot)), [3 * step, slot + 3 * step]);
        assert_eq!(layout.bytes(), Some(2 * slot));
    }
}
