//! Commands to peers: rows and signals.

use std::cell::Cell;

use tokenyard_core::transport::{Command, NO_COMMAND};
use tokenyard_core::wait::WaitFor;
use tokenyard_core::{Result, abi};

use crate::engine::channel::Channel;
use crate::engine::control::Signal;
use crate::engine::order::{QUEUE, SlotOrder, broken};

/// A signal of a peer, how far it is raised, and for which operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Raise {
    pub(crate) operation: u64,
    pub(crate) peer: u32,
    pub(crate) signal: u32,
    pub(crate) add: u64,
}

/// Consecutive rows that go to one peer: (window, offset) on both sides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) operation: u64,
    pub(crate) peer: u32,
    /// The signal that counts the rows there.
    pub(crate) signal: u32,
    pub(crate) rows: u64,
    pub(crate) width: u64,
    pub(crate) src: (u16, u64),
    pub(crate) dst: (u16, u64),
}

impl SlotOrder {
    /// Posts one command of a slot; waits while the queue is full. A command to a lost rank is dropped.
    pub(crate) fn post(&self, slot: usize, command: &Command, operation: u64) -> Result<()> {
        let channel = &*self.channel;
        let rank = channel.rank_of(command.peer);
        let number = channel.number_of(command.peer).filter(|_| !self.losses().is_lost(rank));
        let Some(peer) = number else { return Ok(()) };
        let tag = self.tag(slot, rank);
        let command = Command { flags: abi::TY_FLAG_NOTIFY, tag, peer, ..*command };
        let most = if self.losses().are_masked() { channel.share } else { u32::MAX };
        let try_post = || {
            if self.outstanding().to(rank) >= most {
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
            Err(status) => return self.losses().suspect(rank, broken(channel, status)),
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
                Ok(0) if self.losses().is_lost(rank) => Some(Ok(false)),
                Ok(0) => None,
                Ok(_) => Some(Ok(true)),
                Err(status) => Some(Err(status)),
            });
            u64::from(end.get().is_some())
        };
        let waited = self.waiter().until(&what, turn, || self.progress());
        waited.map_err(|error| self.losses().explain(error))?;
        match end.get() {
            Some(Ok(true)) => self.note_posted(channel, rank, &command),
            Some(Err(status)) => return self.losses().suspect(rank, broken(channel, status)),
            _ => {}
        }
        Ok(())
    }

    fn note_posted(&self, channel: &Channel, rank: u32, command: &Command) {
        self.outstanding().posted(command.tag);
        self.counters().posted(channel, rank, command);
    }

    /// Raises a signal of a peer, in as many steps as its width demands.
    pub(crate) fn raise(&self, slot: usize, raise: Raise) -> Result<()> {
        let Raise { operation, peer, signal, add: mut left } = raise;
        while left > 0 {
            let add = left.min(0xffff);
            left -= add;
            let add = add as u32;
            let command = Command { op: abi::TY_OP_SIGNAL, peer, signal, add, ..NO_COMMAND };
            self.post(slot, &command, operation)?;
        }
        Ok(())
    }

    /// Puts `rows` rows of `width` bytes to a peer; each piece raises the signal by its rows,
    /// because only a piece's own signal says that it is there (INV-1, INV-2).
    pub(crate) fn put_rows(&self, slot: usize, block: &Block) -> Result<()> {
        let most = (self.channel.largest_put / block.width).clamp(1, 0xffff);
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
            self.post(slot, &command, block.operation)?;
            done += rows;
        }
        Ok(())
    }

    /// The signal that counts the rows of a group at its peers.
    pub(crate) fn rows_signal(&self, slot: usize, group: u32) -> u32 {
        let place = self.member.domains.place(group, self.member.domains.index);
        self.channel.ids.id(Signal::Rows, slot, place)
    }

    /// Whether nothing goes to a peer any more.
    pub(crate) fn is_left_out(&self, peer: u32) -> bool {
        self.losses().is_given_up(self.member.rank_of(peer))
    }
}
