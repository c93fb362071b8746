//! Commands to peers: records, rows and signals.

use std::cell::Cell;

use tokenyard_core::Result;
use tokenyard_core::abi;
use tokenyard_core::moe::{ControlLayout, RECORD_HEADER, RECORD_TEXT};
use tokenyard_core::transport::{Command, NO_COMMAND};
use tokenyard_core::wait::WaitFor;

use super::channel::Channel;
use super::control::{Header, Signal};
use super::engine::{Engine, QUEUE, broken};
use super::rail::no_rail;
use super::windows::CONTROL;

/// What goes behind a record's header.
#[derive(Clone, Copy)]
pub(super) enum Body<'a> {
    /// Numbers, one list after the other.
    Counts([&'a [u32]; 2]),
    /// Why a rank refuses.
    Text(&'a [u8]),
    Nothing,
}

/// How far a signal is raised, and for which operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Raise {
    pub(super) operation: u64,
    pub(super) add: u64,
}

/// Consecutive rows that go to one peer: (window, offset) on both sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) operation: u64,
    pub(super) peer: u32,
    /// The signal that counts the rows there.
    pub(super) signal: u32,
    pub(super) rows: u64,
    pub(super) width: u64,
    pub(super) src: (u16, u64),
    pub(super) dst: (u16, u64),
}

/// A record on its way: from where to where in the control windows, and the signal that says so.
struct Sending {
    peer: u32,
    signal: u32,
    from: u64,
    to: u64,
}

fn span_of(layout: &ControlLayout, signal: Signal) -> u64 {
    if signal == Signal::Grant { layout.grants.offset } else { layout.entries.offset }
}

impl Engine {
    /// Posts one command of a slot; waits while the queue is full. One to a lost rank goes nowhere.
    fn post(
        &self,
        channel: &Channel,
        slot: usize,
        command: &Command,
        operation: u64,
    ) -> Result<()> {
        let rank = channel.rank_of(command.peer);
        let number = channel.number_of(command.peer).filter(|_| !self.losses.is_lost(rank));
        let Some(peer) = number else { return Ok(()) };
        let tag = self.outstanding.tag(slot, rank);
        let command = Command { flags: abi::TY_FLAG_NOTIFY, tag, peer, ..*command };
        let most = if self.losses.are_masked() { channel.share } else { u32::MAX };
        let try_post = || {
            if self.outstanding.to(rank) >= most {
                return Ok(0);
            }
            // SAFETY: offsets were laid out inside the windows; sources stay until the slot is
            // entered again, which waits for `outstanding`; one thread drives this queue.
            unsafe { channel.link.post(QUEUE, std::slice::from_ref(&command)) }
        };
        match try_post() {
            Ok(1) => {
                self.note_posted(channel, rank, &command);
                return Ok(());
            }
            Ok(_) => {}
            Err(status) => return self.losses.suspect(rank, broken(channel, status)),
        }
        let what = WaitFor {
            phase: abi::TY_PHASE_QUEUE,
            peer: rank,
            signal: command.signal,
            expected: 1,
            operation,
            level: channel.level,
        };
        let end = Cell::new(None);
        let turn = || {
            end.set(match try_post() {
                Ok(0) if self.losses.is_lost(rank) => Some(Ok(false)),
                Ok(0) => None,
                Ok(_) => Some(Ok(true)),
                Err(status) => Some(Err(status)),
            });
            u64::from(end.get().is_some())
        };
        let waited = self.waiter.until(&what, turn, || self.progress());
        waited.map_err(|error| self.losses.explain(error))?;
        match end.get() {
            Some(Ok(true)) => self.note_posted(channel, rank, &command),
            Some(Err(status)) => return self.losses.suspect(rank, broken(channel, status)),
            _ => {}
        }
        Ok(())
    }

    fn note_posted(&self, channel: &Channel, rank: u32, command: &Command) {
        self.outstanding.posted(command.tag);
        self.counters.posted(channel, rank, command);
    }

    /// Raises a signal of `peer` by `raise.add`, in as many steps as its width demands.
    pub(super) fn raise(
        &self,
        channel: &Channel,
        slot: usize,
        (peer, signal): (u32, u32),
        raise: Raise,
    ) -> Result<()> {
        let mut left = raise.add;
        while left > 0 {
            let add = left.min(0xffff);
            left -= add;
            let add = add as u32;
            let command = Command { op: abi::TY_OP_SIGNAL, peer, signal, add, ..NO_COMMAND };
            self.post(channel, slot, &command, raise.operation)?;
        }
        Ok(())
    }

    /// Puts `rows` rows of `width` bytes to a peer; each piece raises the signal by its rows,
    /// because only a piece's own signal says that it is there (INV-1, INV-2).
    pub(super) fn put_rows(&self, channel: &Channel, slot: usize, block: &Block) -> Result<()> {
        let most = (channel.largest_put / block.width).clamp(1, 0xffff);
        let mut done = 0;
        while done < block.rows {
            let rows = most.min(block.rows - done);
            let command = Command {
                op: abi::TY_OP_PUT_SIGNAL,
                peer: block.peer,
                signal: block.signal,
                add: rows as u32,
                src_window: block.src.0,
                src_offset: block.src.1 + done * block.width,
                dst_window: block.dst.0,
                dst_offset: block.dst.1 + done * block.width,
                bytes: rows * block.width,
                ..NO_COMMAND
            };
            self.post(channel, slot, &command, block.operation)?;
            done += rows;
        }
        Ok(())
    }

    /// Sends a record to a peer of this domain, into this rank's place for `domain` there.
    pub(super) fn send_record(
        &self,
        signal: Signal,
        slot: usize,
        (domain, peer): (u32, u32),
        record: (Header, Body<'_>),
    ) -> Result<()> {
        let records = &self.sizes.records;
        let out = self.domains.place(domain, peer);
        let here = self.domains.place(domain, self.domains.index);
        let place = |start: u64, place: u32| {
            start + span_of(records, signal) + records.pitch * u64::from(place)
        };
        let sending = Sending {
            peer,
            signal: self.channel.ids.id(signal, slot, here),
            from: place(self.sizes.records_out(slot), out),
            to: place(self.sizes.records_in(slot), here),
        };
        self.put_record(&self.channel, slot, &sending, record)
    }

    /// Sends a record to the rail's rank in `domain`.
    pub(super) fn send_rail_record(
        &self,
        signal: Signal,
        slot: usize,
        domain: u32,
        record: (Header, Body<'_>),
    ) -> Result<()> {
        let Some(rail) = &self.rail else { return Err(no_rail()) };
        let records = &self.sizes.rail_records;
        let place = |start: u64, place: u32| {
            start + span_of(records, signal) + records.pitch * u64::from(place)
        };
        let sending = Sending {
            peer: domain,
            signal: rail.channel.ids.id(signal, slot, self.domains.mine),
            from: place(self.sizes.rail_records_out(slot), domain),
            to: place(self.sizes.rail_records_in(slot), self.domains.mine),
        };
        self.put_record(&rail.channel, slot, &sending, record)
    }

    fn put_record(
        &self,
        channel: &Channel,
        slot: usize,
        sending: &Sending,
        (mut header, body): (Header, Body<'_>),
    ) -> Result<()> {
        let target = self.control.at(sending.from);
        let mut bytes = RECORD_HEADER;
        let mut add = |data: &[u8]| {
            // SAFETY: the record lies in this rank's own control window, in a component that only this
            // rank writes and no peer reads or writes; it has room for its counts and for the text,
            // which is cut; what was posted from it before is done (enter_slot).
            unsafe {
                let to = target.add(bytes as usize);
                std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len());
            }
            bytes += data.len() as u64;
        };
        match body {
            Body::Counts(lists) => lists.iter().for_each(|list| add(as_bytes(list))),
            Body::Text(text) => {
                let text = &text[..text.len().min(RECORD_TEXT as usize)];
                add(text);
                header.0[6] = text.len() as u64;
            }
            Body::Nothing => {}
        }
        // SAFETY: as above; records are aligned to 64 bytes.
        unsafe { target.cast::<Header>().write(header) };
        let command = Command {
            op: abi::TY_OP_PUT_SIGNAL,
            peer: sending.peer,
            signal: sending.signal,
            add: 1,
            src_window: CONTROL,
            src_offset: sending.from,
            dst_window: CONTROL,
            dst_offset: sending.to,
            bytes,
            ..NO_COMMAND
        };
        self.post(channel, slot, &command, header.operation())
    }

    /// The record that arrived in a place. Read it only after its signal was seen.
    pub(super) fn record_from(&self, signal: Signal, slot: usize, place: u32) -> Record {
        let records = &self.sizes.records;
        let start = self.sizes.records_in(slot) + span_of(records, signal);
        Record(self.control.at(start + records.pitch * u64::from(place)))
    }

    /// The record that arrived from the rail's rank in `domain`. As above.
    pub(super) fn rail_record_from(&self, signal: Signal, slot: usize, domain: u32) -> Record {
        let records = &self.sizes.rail_records;
        let start = self.sizes.rail_records_in(slot) + span_of(records, signal);
        Record(self.control.at(start + records.pitch * u64::from(domain)))
    }
}

fn as_bytes(list: &[u32]) -> &[u8] {
    // SAFETY: any u32 is four bytes.
    unsafe { std::slice::from_raw_parts(list.as_ptr().cast(), size_of_val(list)) }
}

/// A record in this rank's control window. Its writer is done with it once its signal was seen
/// (INV-1), and writes it again only after the operation; so read it between the two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record(*const u8);

impl Record {
    /// The header, as its writer left it.
    pub(super) fn header(self) -> Header {
        // SAFETY: records lie inside the window, aligned to 64 bytes, by `record_from`.
        unsafe { self.0.cast::<Header>().read_volatile() }
    }

    /// Copies the counts behind the header, from number `first` on. There is room for as many as
    /// the shape allows, and no caller asks for more.
    pub(super) fn copy_counts(self, first: usize, into: &mut [u32]) {
        // SAFETY: as in `header`; counts follow the header.
        unsafe {
            let counts = self.0.add(RECORD_HEADER as usize).cast::<u32>().add(first);
            std::ptr::copy_nonoverlapping(counts, into.as_mut_ptr(), into.len());
        }
    }

    /// The text of a refusal, cut to its room.
    pub(super) fn text(&self) -> &[u8] {
        let bytes = self.header().text_bytes();
        // SAFETY: as in `header`; a record has room for a text.
        unsafe { std::slice::from_raw_parts(self.0.add(RECORD_HEADER as usize), bytes) }
    }
}
