//! Messages between pairs of ranks, in order, with credits.
//!
//! A rank has `in_flight` slots for the messages of each other rank. A sender copies the bytes of a message and then
//! its record into a slot of the receiver, and stores a word behind both. It uses the slot again once the receiver has
//! answered with a credit: a record, and a word behind it.
//!
//! Calls are in the order of the host, which waits for the copies of each. So one stream is all.

use std::sync::Arc;

use tokenyard_core::kernels::KernelShape;
use tokenyard_core::ops::message::{JudgedMessage, SentMessage, read_credit};
use tokenyard_core::ops::record::{ExpectedRecord, RECORD, RecordWords, text_of};
use tokenyard_core::{Result, abi};

use super::line::{Line, RawRecord, WordWait};
use super::places::{RankPlaces, Word};
use crate::driver::{Context, Pinned, Stream};

/// How far messages between this rank and another one have come.
#[derive(Clone, Copy, Debug, Default)]
struct MessageCounts {
    sent: u64,
    /// Of those that were sent.
    taken: u64,
    received: u64,
}

/// A record that this rank sends to another one.
#[derive(Clone, Copy)]
struct Answer<'a> {
    to: u32,
    number: u64,
    /// `Entered` for a message, `Left` for a credit.
    word: Word,
    words: RecordWords,
    text: &'a [u8],
}

/// See the [module](self). Its drop waits for the stream, and so for all that uses the memory.
#[derive(Debug)]
pub(crate) struct Pipe {
    line: Line,
    places: RankPlaces,
    /// By rank.
    counts: Vec<MessageCounts>,
    work: Stream,
    /// The record that leaves, and the one that was read last.
    records: Pinned<RawRecord>,
}

impl Pipe {
    /// `window`: the device address of this rank's window.
    ///
    /// # Safety
    /// Board and links of the plan outlive the pipe.
    pub(crate) unsafe fn new(
        context: &Arc<Context>,
        shape: &KernelShape,
        window: u64,
        plan: &abi::TyPlan,
    ) -> Result<Self> {
        Ok(Self {
            // SAFETY: by this function's contract.
            line: unsafe { Line::new(context, shape, window, plan)? },
            places: RankPlaces::new(shape),
            counts: vec![MessageCounts::default(); shape.ranks as usize],
            work: Stream::new(context)?,
            records: Pinned::new(context, 2)?,
        })
    }

    /// Sends a message.
    ///
    /// # Safety
    /// As [`KernelSet::send`](tokenyard_core::kernels::KernelSet::send).
    pub(crate) unsafe fn send(&mut self, message: &abi::TyMessage) -> Result<()> {
        let (to, number) = (message.peer, self.counts[message.peer as usize].sent);
        self.settle(to, (number + 1).saturating_sub(self.places.in_flight.into()))?;
        // SAFETY: the host's text, valid for the call.
        let text = unsafe { text_of(&message.refusal) };
        let bytes = if text.is_empty() { message.bytes } else { 0 };
        let rank = self.line.mapped.rank;
        let place = self.line.at(to, self.places.data(rank, self.places.slot(number)));
        self.work.copy(place, message.data as u64, bytes)?;
        let refusal = (!text.is_empty()).then(|| text.to_vec());
        let words = SentMessage { rank, number, bytes, pieces: 0, refusal }.words();
        self.answer(Answer { to, number, word: Word::Entered, words, text })?;
        self.counts[to as usize].sent += 1;
        Ok(())
    }

    /// Sends a record behind the work of the stream, and waits for the end of both.
    fn answer(&self, answer: Answer<'_>) -> Result<()> {
        let Answer { to, number, word, words, text } = answer;
        let (rank, slot, record) =
            (self.line.mapped.rank, self.places.slot(number), self.records.at(0));
        // SAFETY: pinned memory that lives as long as `self`. The last call has waited for the copy from it.
        unsafe { record.write(RawRecord::new(words, text)) };
        let place = match word {
            Word::Left => self.places.credit(rank, slot),
            _ => self.places.record(rank, slot),
        };
        let own = self.line.at(rank, self.places.credit(rank, slot));
        self.work.copy(own, record as u64, RECORD)?;
        self.work.copy(self.line.at(to, place), own, RECORD)?;
        self.line.store(&self.work, word, number, to)?;
        self.work.synchronize()
    }

    /// Waits for a record of a rank, and reads it.
    fn record(&self, word: Word, rank: u32, number: u64) -> Result<RawRecord> {
        let wait = WordWait { word, number, operation: number, phase: abi::TY_PHASE_MESSAGE };
        self.line.wait_for(wait, rank)?;
        let slot = self.places.slot(number);
        let place = match word {
            Word::Left => self.places.credit(rank, slot),
            _ => self.places.record(rank, slot),
        };
        let found = self.records.at(1);
        self.line.read(found as u64, place, RECORD)?;
        self.line.end_reading()?;
        // SAFETY: pinned memory that lives as long as `self`; the copy into it has ended.
        Ok(unsafe { found.read_volatile() })
    }

    /// Waits until the first `until` messages to a rank are taken. Reports one that was not taken as it was sent.
    fn settle(&mut self, rank: u32, until: u64) -> Result<()> {
        while self.counts[rank as usize].taken < until {
            let number = self.counts[rank as usize].taken;
            let credit = self.record(Word::Left, rank, number)?;
            self.counts[rank as usize].taken += 1;
            read_credit(credit.words, &credit.text, rank, number)?;
        }
        Ok(())
    }

    /// Takes the next message of a rank.
    ///
    /// # Safety
    /// As [`KernelSet::recv`](tokenyard_core::kernels::KernelSet::recv).
    pub(crate) unsafe fn recv(&mut self, message: &abi::TyMessage) -> Result<()> {
        let (rank, number) = (message.peer, self.counts[message.peer as usize].received);
        let record = self.record(Word::Entered, rank, number)?;
        let expected = ExpectedRecord { rank, number, room: self.places.room };
        let sent = SentMessage::read(record.words, &record.text, expected)?;
        // SAFETY: the host's text, valid for the call.
        let refusal = unsafe { text_of(&message.refusal) };
        let judged = JudgedMessage { sent: &sent, expected: message.bytes, refusal };
        if judged.fits() {
            let place = self.places.data(rank, self.places.slot(number));
            let from = self.line.at(self.line.mapped.rank, place);
            self.work.copy(message.data as u64, from, message.bytes)?;
        }
        let (words, text) = judged.credit(self.line.mapped.rank);
        self.answer(Answer { to: rank, number, word: Word::Left, words, text })?;
        self.counts[rank as usize].received += 1;
        judged.end()
    }

    /// Waits until all messages of this rank are taken.
    pub(crate) fn flush(&mut self) -> Result<()> {
        (0..self.places.ranks)
            .try_for_each(|rank| self.settle(rank, self.counts[rank as usize].sent))
    }

    /// Waits until all that it queued has ended.
    pub(crate) fn synchronize(&self) -> Result<()> {
        self.work.synchronize()
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        if let Err(error) = self.synchronize() {
            tracing::warn!("the stream of a pipe did not end well: {error}");
        }
    }
}

#[cfg(test)]
mod tests;
