//! Messages between pairs of ranks, in order, with credits.
//!
//! A rank has `in_flight` slots for each other rank: for the messages of that rank, and for its own. A sender writes a
//! message into the receiver's slot, and may use the slot again once the receiver has raised a credit. The bytes of a
//! message and its record arrive in any order (INV-2), so each has a signal of its own. Slots have signals of their
//! own, too: no rise of one message is taken for that of another.

use tokenyard_core::domains::Member;
use tokenyard_core::kernels::KernelShape;
use tokenyard_core::ops::message::{JudgedMessage, SentMessage, read_credit};
use tokenyard_core::ops::record::{ExpectedRecord, RECORD, text_of};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::line::{Lines, Passage};
use crate::engine::control::{Header, Signal};
use crate::engine::record::Record;

/// The parts of a window, which repeat for each slot of each rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PipeLayout {
    ranks: u32,
    in_flight: u32,
    /// Room for the bytes of a message.
    room: u64,
    /// Whether messages are staged: some link puts.
    stages: bool,
}

/// A part of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SlotPart {
    /// The record of a message that comes, and behind it the bytes.
    MessageIn,
    /// The credit that comes.
    CreditIn,
    CreditOut,
    MessageOut,
}

impl PipeLayout {
    pub(crate) fn new(shape: &KernelShape, stages: bool) -> Self {
        let room = shape.message_bytes.next_multiple_of(64);
        Self { ranks: shape.ranks, in_flight: shape.in_flight, room, stages }
    }

    fn pitch(&self) -> u64 {
        let message = RECORD + self.room;
        2 * RECORD + if self.stages { 2 * message } else { message }
    }

    /// Bytes of the window; none where they are beyond the address space.
    pub(crate) fn bytes(&self) -> Option<u64> {
        let slots = u64::from(self.ranks) * u64::from(self.in_flight);
        self.pitch().checked_mul(slots).filter(|bytes| *bytes < 1 << 47)
    }

    /// Where a part of a slot for `rank` starts.
    fn at(&self, part: SlotPart, rank: u32, slot: usize) -> u64 {
        let number = u64::from(rank) * u64::from(self.in_flight) + slot as u64;
        let inside = match part {
            SlotPart::CreditIn => 0,
            SlotPart::CreditOut => RECORD,
            SlotPart::MessageIn => 2 * RECORD,
            SlotPart::MessageOut => 3 * RECORD + self.room,
        };
        self.pitch() * number + inside
    }
}

/// How far messages between this rank and another one have come.
#[derive(Clone, Copy, Debug, Default)]
struct Lane {
    sent: u64,
    /// Of those that were sent.
    taken: u64,
    received: u64,
}

/// The other side of a message.
#[derive(Clone, Copy, Debug)]
struct Other {
    line: usize,
    peer: u32,
    rank: u32,
    slot: usize,
    /// The number of the message among those of the pair.
    number: u64,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Pipe {
    lines: Lines,
    /// By rank.
    lanes: Vec<Lane>,
    layout: PipeLayout,
    rank: u32,
}

// SAFETY: the areas are mappings that live as long as the instance. No other value shares the state of the lines, so it
// moves with them. One thread at a time uses them (thread rule of the kernel set ABI).
unsafe impl Send for Pipe {}

impl Pipe {
    /// # Safety
    /// Everything that the plan points to (but for the list of windows) outlives the pipe.
    pub(crate) unsafe fn new(
        shape: &KernelShape,
        layout: PipeLayout,
        members: Vec<Member>,
        plan: &abi::TyPlan,
    ) -> Result<Self> {
        // SAFETY: by this function's contract.
        let lines = unsafe { Lines::new(shape, members, plan)? };
        let lanes = vec![Lane::default(); shape.ranks as usize];
        Ok(Self { lines, lanes, layout, rank: shape.rank })
    }

    /// The way to the slot of a message to or from a rank.
    fn other(&self, rank: u32, number: u64) -> Result<Other> {
        let ways = self.lines.all.iter().enumerate();
        let way = ways.filter_map(|(line, way)| Some((line, way.peer(rank)?))).next();
        let slot = (number % u64::from(self.layout.in_flight)) as usize;
        let found = way.map(|(line, peer)| Other { line, peer, rank, slot, number });
        found.ok_or_else(|| no_way(self.rank, rank))
    }

    /// Sends a message. See [`KernelSet::send`](tokenyard_core::kernels::KernelSet::send).
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn send(&mut self, message: &abi::TyMessage) -> Result<()> {
        let (rank, number) = (message.peer, self.lanes[message.peer as usize].sent);
        let other = self.other(rank, number)?;
        let in_flight = u64::from(self.layout.in_flight);
        self.settle(rank, (number + 1).saturating_sub(in_flight))?;
        let line = &self.lines.all[other.line];
        // Commands that were posted from the slot's staging places are done (INV-5).
        line.order.wait_posted(other.slot, number)?;
        // SAFETY: the host's text, valid for the call.
        let text = unsafe { text_of(&message.refusal) };
        let bytes = if text.is_empty() { message.bytes } else { 0 };
        if bytes > 0 {
            let way = self.way(&other, Signal::Rows);
            // SAFETY: the slot has room for the most bytes of a message, which core has checked. No other rank writes
            // to it, and the receiver reads it once it has seen the signals. The memory by this function's contract.
            unsafe {
                let to = line.start(&way);
                std::ptr::copy_nonoverlapping(message.data.cast(), to, bytes as usize);
            }
            line.put(&way, bytes)?;
        }
        let refusal = (!text.is_empty()).then(|| text.to_vec());
        let sent =
            SentMessage { rank: self.rank, number, bytes, pieces: line.pieces(bytes), refusal };
        line.write(&self.way(&other, Signal::Entry), Header(sent.words()), text)?;
        self.lanes[rank as usize].sent += 1;
        Ok(())
    }

    /// The way of what this rank writes about a message: its bytes, its record, or its credit.
    fn way(&self, other: &Other, signal: Signal) -> Passage {
        let Other { line, peer, rank, slot, number } = *other;
        let (out, into, behind) = match signal {
            Signal::Rows => (SlotPart::MessageOut, SlotPart::MessageIn, RECORD),
            Signal::Entry => (SlotPart::MessageOut, SlotPart::MessageIn, 0),
            _ => (SlotPart::CreditOut, SlotPart::CreditIn, 0),
        };
        let from = self.layout.at(out, rank, slot) + behind;
        let to = self.layout.at(into, self.rank, slot) + behind;
        Passage { peer, slot, number, signal, place: self.lines.all[line].own(), from, to }
    }

    /// Waits until the first `until` messages to a rank are taken. Reports one that was not taken as it was sent.
    fn settle(&mut self, rank: u32, until: u64) -> Result<()> {
        while self.lanes[rank as usize].taken < until {
            let number = self.lanes[rank as usize].taken;
            let other = self.other(rank, number)?;
            let record = self.record(&other, SlotPart::CreditIn, Signal::Grant)?;
            self.lanes[rank as usize].taken += 1;
            read_credit(record.header().0, record.text(), rank, number)?;
        }
        Ok(())
    }

    /// Waits for a record of a message.
    fn record(&self, other: &Other, part: SlotPart, signal: Signal) -> Result<Record> {
        self.wait(other, signal, 1)?;
        let at = self.layout.at(part, other.rank, other.slot);
        Ok(Record::at(self.lines.window.at(at)))
    }

    /// The bytes of a message that was sent are on their way; the other rank may be late for its side of a message.
    fn wait(&self, other: &Other, signal: Signal, add: u64) -> Result<()> {
        let way = Passage { place: other.peer, ..self.way(other, signal) };
        let phase = match signal {
            Signal::Rows => abi::TY_PHASE_ROWS,
            _ => abi::TY_PHASE_MESSAGE,
        };
        self.lines.all[other.line].wait(&way, add, phase)
    }

    /// Takes the next message of a rank. See [`KernelSet::recv`](tokenyard_core::kernels::KernelSet::recv).
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn recv(&mut self, message: &abi::TyMessage) -> Result<()> {
        let (rank, number) = (message.peer, self.lanes[message.peer as usize].received);
        let other = self.other(rank, number)?;
        let record = self.record(&other, SlotPart::MessageIn, Signal::Entry)?;
        let expected = ExpectedRecord { rank, number, room: self.layout.room };
        let sent = SentMessage::read(record.header().0, record.text(), expected)?;
        let line = &self.lines.all[other.line];
        self.wait(&other, Signal::Rows, sent.pieces)?;
        // SAFETY: the host's text, valid for the call.
        let refusal = unsafe { text_of(&message.refusal) };
        let judged = JudgedMessage { sent: &sent, expected: message.bytes, refusal };
        if judged.fits() && sent.bytes > 0 {
            let from = self
                .lines
                .window
                .at(self.layout.at(SlotPart::MessageIn, rank, other.slot) + RECORD);
            // SAFETY: all bytes of the message are there (INV-1), its sender writes no more of them before the credit;
            // the memory by this function's contract.
            unsafe {
                std::ptr::copy_nonoverlapping(from, message.data.cast(), message.bytes as usize)
            };
        }
        // The credit that was posted from the slot before has left (INV-5).
        line.order.wait_posted(other.slot, number)?;
        let (words, text) = judged.credit(self.rank);
        line.write(&self.way(&other, Signal::Grant), Header(words), text)?;
        self.lanes[rank as usize].received += 1;
        judged.end()
    }

    /// Waits until all messages of this rank are taken, and all that it posted has left (INV-4).
    pub(crate) fn flush(&mut self) -> Result<()> {
        for rank in 0..self.lanes.len() as u32 {
            self.settle(rank, self.lanes[rank as usize].sent)?;
        }
        self.lines.all.iter().try_for_each(|line| line.order.flush())
    }

    pub(crate) fn counters(&self) -> Option<abi::TyCounters> {
        self.lines.all.first().map(|line| line.order.counters().as_abi())
    }
}

#[cold]
fn no_way(own: u32, rank: u32) -> Error {
    let text = format!(
        "found rank {rank}; expected a rank of the domain of rank {own}, or of its rail: no link leads to others"
    );
    Error::new(ErrorKind::Unsupported, "find way", text)
        .with_rank(rank)
        .with_fix("send to a rank of the same domain or rail, and let that one send on")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_all_slots_are_apart_and_within_the_window() {
        for stages in [false, true] {
            let layout = PipeLayout { ranks: 3, in_flight: 2, room: 128, stages };
            let end = layout.bytes().unwrap();
            let mut spans = Vec::new();
            for (rank, slot) in (0..3).flat_map(|rank| [(rank, 0), (rank, 1)]) {
                let message = RECORD + layout.room;
                let mut add = |part, bytes| {
                    let at = layout.at(part, rank, slot);
                    spans.push((at, at + bytes));
                };
                add(SlotPart::CreditIn, RECORD);
                add(SlotPart::CreditOut, RECORD);
                add(SlotPart::MessageIn, message);
                if stages {
                    add(SlotPart::MessageOut, message);
                }
            }
            spans.sort_unstable();
            assert!(spans.windows(2).all(|two| two[0].1 <= two[1].0), "{spans:?}");
            assert_eq!((spans[0].0, spans.last().unwrap().1), (0, end));
        }
    }
}
