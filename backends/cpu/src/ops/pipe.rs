//! Messages between pairs of ranks, in order, with credits.
//!
//! A rank has `in_flight` slots for each other rank: for the messages of that rank, and for its own. A sender writes a
//! message into the receiver's slot, and may use the slot again once the receiver has raised a credit. The bytes of a
//! message and its record arrive in any order (INV-2), so each has a signal of its own. Slots have signals of their
//! own, too: no rise of one message is taken for that of another.

use std::rc::Rc;

use tokenyard_core::domains::Domains;
use tokenyard_core::kernels::KernelShape;
use tokenyard_core::moe::{RECORD_HEADER, RECORD_TEXT};
use tokenyard_core::transport::{Command, NO_COMMAND, Window};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::engine::commands::Raise;
use crate::engine::control::{Header, Signal};
use crate::engine::member::Member;
use crate::engine::order::{SlotOrder, Traffic, Wait};
use crate::engine::places::Area;
use crate::engine::record::Record;

/// The only window.
const WINDOW: u16 = 0;
/// Bytes of a record: its header, and the text of a refusal.
const RECORD: u64 = (RECORD_HEADER + RECORD_TEXT).next_multiple_of(64);

/// Verdicts in word 1 of a record.
const TAKEN: u64 = 0;
const REFUSED: u64 = 1;
const OTHER_LENGTH: u64 = 2;

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

/// The link to some ranks: those of a domain, or those of a rail.
#[derive(Debug)]
struct Line {
    order: SlotOrder,
    /// The windows of its peers, where they are mapped.
    mapped: Vec<Area>,
}

impl Line {
    /// The number of a rank on this link, if it is there.
    fn peer(&self, rank: u32) -> Option<u32> {
        let member = &self.order.member;
        let (first, step) = member.team;
        let ahead = rank.checked_sub(first)?;
        (ahead % step == 0 && ahead / step < member.peers()).then(|| ahead / step)
    }

    /// This rank's own number.
    fn own(&self) -> u32 {
        self.order.member.domains.index
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

/// A record on its way.
struct Outgoing<'a> {
    /// Where it lies here before it leaves, and where it goes, from the receiver's view.
    parts: [SlotPart; 2],
    signal: Signal,
    header: Header,
    text: &'a [u8],
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
    lines: Vec<Line>,
    /// By rank.
    lanes: Vec<Lane>,
    layout: PipeLayout,
    window: Area,
    rank: u32,
}

// SAFETY: the areas are mappings that live as long as the instance. No other value shares the state of the orders, so
// it moves with them. One thread at a time uses them (thread rule of the kernel set ABI).
unsafe impl Send for Pipe {}

/// This rank on the links that lead to others: inside its domain, and on its rail. `inside`: the level of the first.
pub(crate) fn members(shape: &KernelShape, inside: u64) -> Vec<Member> {
    let (rank, domains) = (shape.rank, Domains::new(shape));
    let first = domains.place(domains.mine, 0);
    let of =
        |level, at, size, team| Member { level, rank, domains: Domains::of(at, size, 1), team };
    let mut all = vec![of(inside, domains.index, domains.size, (first, 1))];
    if domains.count > 1 {
        let team = (domains.index, domains.size);
        all.push(of(abi::TY_LEVEL_SCALE_OUT, domains.mine, domains.count, team));
    }
    all
}

impl Pipe {
    /// # Safety
    /// Everything that the plan points to (but for the list of windows) outlives the pipe.
    pub(crate) unsafe fn new(
        shape: &KernelShape,
        layout: PipeLayout,
        plan: &abi::TyPlan,
    ) -> Result<Self> {
        let inside = match plan.scale_up.table.is_null() {
            true => abi::TY_LEVEL_SCALE_OUT,
            false => abi::TY_LEVEL_SCALE_UP,
        };
        let members = members(shape, inside);
        // SAFETY: by this function's contract.
        let (traffic, windows): (_, &[Window]) = unsafe {
            (
                Rc::new(Traffic::new(shape, members.iter(), plan)?),
                std::slice::from_raw_parts(plan.windows, plan.window_count),
            )
        };
        let window = Area::own(windows, WINDOW)?;
        let line = |(number, member): (usize, Member)| {
            let order = SlotOrder::new(member, &traffic, shape.in_flight, number);
            let peers = if order.channel.link.is_load_store() { member.peers() } else { 0 };
            let map = |peer| window.of_peer(&order.channel, WINDOW, peer);
            let mapped = (0..peers).map(map).collect::<Result<_>>()?;
            Ok(Line { order, mapped })
        };
        let lines = members.into_iter().enumerate().map(line).collect::<Result<Vec<_>>>()?;
        let lanes = vec![Lane::default(); shape.ranks as usize];
        Ok(Self { lines, lanes, layout, window, rank: shape.rank })
    }

    /// The way to the slot of a message to or from a rank.
    fn other(&self, rank: u32, number: u64) -> Result<Other> {
        let ways = self.lines.iter().enumerate();
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
        let order = &self.lines[other.line].order;
        // Commands that were posted from the slot's staging places are done (INV-5).
        order.wait_posted(other.slot, number)?;
        // SAFETY: the host's text, valid for the call.
        let text = unsafe { text_of(message) };
        let verdict = if text.is_empty() { TAKEN } else { REFUSED };
        let bytes = if text.is_empty() { message.bytes } else { 0 };
        if bytes > 0 {
            // SAFETY: by this function's contract.
            unsafe { self.move_bytes(&other, message.data.cast(), bytes)? };
        }
        let header = Header([number, verdict, bytes, 0, 0, self.rank.into(), 0, 0]);
        let parts = [SlotPart::MessageOut, SlotPart::MessageIn];
        self.write(&other, &Outgoing { parts, signal: Signal::Entry, header, text })?;
        self.lanes[rank as usize].sent += 1;
        Ok(())
    }

    /// Moves the bytes of a message to the receiver's slot.
    ///
    /// # Safety
    /// `from` has so many bytes.
    unsafe fn move_bytes(&self, other: &Other, from: *const u8, bytes: u64) -> Result<()> {
        let Other { line, peer, slot, number, rank } = *other;
        let Line { order, mapped } = &self.lines[line];
        let there = self.layout.at(SlotPart::MessageIn, self.rank, slot) + RECORD;
        let stage = self.layout.at(SlotPart::MessageOut, rank, slot) + RECORD;
        let to = match mapped.get(peer as usize) {
            Some(window) => window.at(there),
            None => self.window.at(stage),
        };
        // SAFETY: the slot has room for the most bytes of a message, which core has checked. No other rank writes to
        // it, and the receiver reads it once it has seen the signals.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes as usize) };
        if !mapped.is_empty() {
            return Ok(());
        }
        let signal = order.channel.ids.id(Signal::Rows, slot, self.lines[line].own());
        let mut done = 0;
        while done < bytes {
            let piece = (bytes - done).min(order.channel.largest_put);
            let command = Command {
                op: abi::TY_OP_PUT_SIGNAL,
                peer,
                signal,
                add: 1,
                src_window: WINDOW,
                src_offset: stage + done,
                dst_window: WINDOW,
                dst_offset: there + done,
                bytes: piece,
                ..NO_COMMAND
            };
            order.post(slot, &command, number)?;
            done += piece;
        }
        Ok(())
    }

    /// Writes a record to the other rank's slot for this one, and raises its signal there.
    fn write(&self, other: &Other, outgoing: &Outgoing<'_>) -> Result<()> {
        let Other { line, peer, slot, number, rank } = *other;
        let Outgoing { parts: [from, to], signal, header, text } = *outgoing;
        let Line { order, mapped } = &self.lines[line];
        let (stage, there) =
            (self.layout.at(from, rank, slot), self.layout.at(to, self.rank, slot));
        let text = &text[..text.len().min(RECORD_TEXT as usize)];
        let at = match mapped.get(peer as usize) {
            Some(window) => window.at(there),
            None => self.window.at(stage),
        };
        // SAFETY: a record's room, in a part that only this rank writes now: the other rank has given the slot back,
        // and commands that were posted from it are done. Records are aligned to 64 bytes.
        unsafe {
            at.cast::<Header>().write(header.with_text(text.len() as u64));
            let behind = at.add(RECORD_HEADER as usize);
            std::ptr::copy_nonoverlapping(text.as_ptr(), behind, text.len());
        }
        let signal = order.channel.ids.id(signal, slot, self.lines[line].own());
        if !mapped.is_empty() {
            return order.raise(slot, Raise { operation: number, peer, signal, add: 1 });
        }
        let command = Command {
            op: abi::TY_OP_PUT_SIGNAL,
            peer,
            signal,
            add: 1,
            src_window: WINDOW,
            src_offset: stage,
            dst_window: WINDOW,
            dst_offset: there,
            bytes: RECORD_HEADER + text.len() as u64,
            ..NO_COMMAND
        };
        order.post(slot, &command, number)
    }

    /// Waits until the first `until` messages to a rank are taken. Reports one that was not taken as it was sent.
    fn settle(&mut self, rank: u32, until: u64) -> Result<()> {
        while self.lanes[rank as usize].taken < until {
            let number = self.lanes[rank as usize].taken;
            let other = self.other(rank, number)?;
            let record = self.record(&other, SlotPart::CreditIn, Signal::Grant)?;
            self.lanes[rank as usize].taken += 1;
            let [_, verdict, expected, sent, ..] = record.header().0;
            match verdict {
                TAKEN => {}
                REFUSED => return Err(refused(rank, number, record.text())),
                _ => return Err(other_length(rank, number, sent, expected)),
            }
        }
        Ok(())
    }

    /// Waits for a record of a message.
    fn record(&self, other: &Other, part: SlotPart, signal: Signal) -> Result<Record> {
        self.wait(other, signal, 1)?;
        let record = Record::at(self.window.at(self.layout.at(part, other.rank, other.slot)));
        match record.header().0[0] {
            found if found == other.number => Ok(record),
            found => Err(out_of_order(other.rank, found, other.number)),
        }
    }

    fn wait(&self, other: &Other, signal: Signal, add: u64) -> Result<()> {
        let Other { line, peer, rank, slot, number } = *other;
        // The bytes of a message that was sent are on their way; the message itself may be late.
        let phase = match signal {
            Signal::Rows => abi::TY_PHASE_ROWS,
            _ => abi::TY_PHASE_MESSAGE,
        };
        let wait = Wait { operation: number, add, phase, rank };
        match self.lines[line].order.wait(signal, slot, peer, wait)? {
            true => Ok(()),
            false => Err(lost(rank)),
        }
    }

    /// Takes the next message of a rank. See [`KernelSet::recv`](tokenyard_core::kernels::KernelSet::recv).
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn recv(&mut self, message: &abi::TyMessage) -> Result<()> {
        let (rank, number) = (message.peer, self.lanes[message.peer as usize].received);
        let other = self.other(rank, number)?;
        let record = self.record(&other, SlotPart::MessageIn, Signal::Entry)?;
        let [_, verdict, bytes, ..] = record.header().0;
        if bytes > self.layout.room {
            return Err(too_long(rank, bytes, self.layout.room));
        }
        let Line { order, mapped } = &self.lines[other.line];
        if mapped.is_empty() {
            self.wait(&other, Signal::Rows, bytes.div_ceil(order.channel.largest_put))?;
        }
        let refusal = match verdict {
            TAKEN => Vec::new(),
            _ => record.text().to_vec(),
        };
        // SAFETY: the host's text, valid for the call.
        let own = unsafe { text_of(message) };
        let fits = verdict == TAKEN && bytes == message.bytes && own.is_empty();
        if fits && bytes > 0 {
            let from =
                self.window.at(self.layout.at(SlotPart::MessageIn, rank, other.slot) + RECORD);
            // SAFETY: all bytes of the message are there (INV-1), its sender writes no more of them before the credit;
            // the memory by this function's contract.
            unsafe { std::ptr::copy_nonoverlapping(from, message.data.cast(), bytes as usize) };
        }
        // The credit that was posted from the slot before has left (INV-5).
        order.wait_posted(other.slot, number)?;
        let answer = match (verdict, own.is_empty()) {
            (TAKEN, true) if !fits => OTHER_LENGTH,
            (TAKEN, false) => REFUSED,
            _ => TAKEN,
        };
        let header = Header([number, answer, message.bytes, bytes, 0, self.rank.into(), 0, 0]);
        let parts = [SlotPart::CreditOut, SlotPart::CreditIn];
        let text = if answer == REFUSED { own } else { &[] };
        self.write(&other, &Outgoing { parts, signal: Signal::Grant, header, text })?;
        self.lanes[rank as usize].received += 1;
        match verdict {
            TAKEN if own.is_empty() && !fits => {
                Err(other_length(rank, number, bytes, message.bytes))
            }
            TAKEN => Ok(()),
            _ => Err(refused(rank, number, &refusal)),
        }
    }

    /// Waits until all messages of this rank are taken, and all that it posted has left (INV-4).
    pub(crate) fn flush(&mut self) -> Result<()> {
        for rank in 0..self.lanes.len() as u32 {
            self.settle(rank, self.lanes[rank as usize].sent)?;
        }
        self.lines.iter().try_for_each(|line| line.order.flush())
    }

    pub(crate) fn counters(&self) -> Option<abi::TyCounters> {
        self.lines.first().map(|line| line.order.counters().as_abi())
    }
}

/// # Safety
/// The text is valid for the life of the message.
unsafe fn text_of(message: &abi::TyMessage) -> &[u8] {
    match message.refusal.data.is_null() {
        true => &[],
        // SAFETY: by this function's contract.
        false => unsafe {
            std::slice::from_raw_parts(message.refusal.data.cast(), message.refusal.bytes)
        },
    }
}

#[cold]
fn no_way(own: u32, rank: u32) -> Error {
    let text = format!(
        "found rank {rank}; expected a rank of the domain of rank {own}, or of its rail: no link leads to others"
    );
    Error::new(ErrorKind::Unsupported, "find way", text).with_rank(rank)
}

#[cold]
fn refused(rank: u32, number: u64, why: &[u8]) -> Error {
    let why = String::from_utf8_lossy(why);
    let text = format!("rank {rank} refused message {number}: {why}");
    Error::new(ErrorKind::Refused, "pass message", text).with_rank(rank)
}

#[cold]
fn other_length(rank: u32, number: u64, sent: u64, expected: u64) -> Error {
    let text = format!(
        "message {number} between this rank and rank {rank}: {sent} bytes were sent; {expected} were expected"
    );
    Error::new(ErrorKind::Mismatch, "pass message", text)
        .with_rank(rank)
        .with_fix("pass tensors of one length to both sides of a message")
}

#[cold]
fn out_of_order(rank: u32, found: u64, expected: u64) -> Error {
    let text = format!("rank {rank} wrote a record of message {found}; expected {expected}");
    Error::new(ErrorKind::Protocol, "read record", text).with_rank(rank)
}

#[cold]
fn too_long(rank: u32, found: u64, room: u64) -> Error {
    let text = format!("rank {rank} sent {found} bytes; expected at most {room}");
    Error::new(ErrorKind::Protocol, "read record", text).with_rank(rank)
}

#[cold]
fn lost(rank: u32) -> Error {
    let text = format!("rank {rank} is lost");
    Error::new(ErrorKind::PeerLost, "pass message", text).with_rank(rank)
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

    #[test]
    fn a_rank_reaches_its_domain_and_its_rail() {
        let shape = tokenyard_core::kernels::kernel_shape(
            &tokenyard_core::moe::Shape { ranks: 6, experts: 6, topk: 1, hidden: 1, max_tokens: 1 },
            3,
            2,
            1,
        );
        let shape = KernelShape { rank: 3, ..shape };
        let all = members(&shape, abi::TY_LEVEL_SCALE_UP);
        assert_eq!(all.len(), 2);
        assert_eq!([0, 1].map(|peer| all[0].rank_of(peer)), [2, 3]);
        assert_eq!([0, 1, 2].map(|peer| all[1].rank_of(peer)), [1, 3, 5]);
    }
}
