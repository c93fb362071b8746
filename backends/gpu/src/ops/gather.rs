//! All-gather: each rank gets the shards of all ranks.
//!
//! A slot of a window has a place for the record and the shards of each rank. A rank stages its shards in its own
//! place, and copies them to the same place of every other rank. The record goes ahead, so all ranks know how a gather
//! ends while its shards are on their way.
//!
//! Work is queued on three streams, so that nothing waits for what it does not need: shards are staged on one, and
//! leave on the next, whatever their caller does. Outputs are copied on the third. Its last work stores that this rank
//! has left the gather; the slot is used again once all ranks have left (INV-4).

use std::sync::Arc;

use tokenyard_core::kernels::KernelShape;
use tokenyard_core::ops::record::{ExpectedRecord, RECORD, Shards, parts_of, verdict};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use super::line::{Line, RawRecord, WordWait};
use super::places::{RankPlaces, Word};
use crate::driver::{Context, Event, Pinned, RawStream, Stream};

/// See the [module](self). Its drop waits for the streams, and so for all that uses the memory.
#[derive(Debug)]
pub(crate) struct Gather {
    context: Arc<Context>,
    line: Line,
    places: RankPlaces,
    /// Shards are staged on it.
    stage: Stream,
    /// Records and staged shards leave on it.
    push: Stream,
    /// Outputs are copied on it.
    out: Stream,
    /// Behind the present work of a caller's stream.
    caller: Event,
    slots: Vec<Slot>,
    /// Own records by slot, and behind them those of the other ranks in the gather at hand, by rank.
    records: Pinned<RawRecord>,
}

#[derive(Debug)]
struct Slot {
    /// The shards of this rank, while a gather is open.
    own: Option<Shards>,
    /// The last gather that this rank has left.
    left: Option<u64>,
    /// Behind the staging of its shards.
    staged: Event,
    /// Behind the copies of outputs.
    copied: Event,
}

impl Slot {
    fn new(context: &Arc<Context>) -> Result<Self> {
        let (staged, copied) = (Event::new(context)?, Event::new(context)?);
        Ok(Self { own: None, left: None, staged, copied })
    }
}

impl Gather {
    /// `window`: the device address of this rank's window.
    ///
    /// # Safety
    /// Board and links of the plan outlive the gather.
    pub(crate) unsafe fn new(
        context: &Arc<Context>,
        shape: &KernelShape,
        window: u64,
        plan: &abi::TyPlan,
    ) -> Result<Self> {
        let in_flight = shape.in_flight as usize;
        Ok(Self {
            context: Arc::clone(context),
            // SAFETY: by this function's contract.
            line: unsafe { Line::new(context, shape, window, plan)? },
            places: RankPlaces::new(shape),
            stage: Stream::new(context)?,
            push: Stream::new(context)?,
            out: Stream::new(context)?,
            caller: Event::new(context)?,
            slots: (0..in_flight).map(|_| Slot::new(context)).collect::<Result<_>>()?,
            records: Pinned::new(context, in_flight + shape.ranks as usize)?,
        })
    }

    /// Sends the shards of this rank.
    ///
    /// # Safety
    /// As [`KernelSet::gather_send`](tokenyard_core::kernels::KernelSet::gather_send).
    pub(crate) unsafe fn send(&mut self, gather: &abi::TyGather) -> Result<()> {
        let (number, caller) = (gather.operation, caller_of(gather));
        self.open_slot(number)?;
        // SAFETY: by this function's contract.
        let mut shards = unsafe { Shards::of(self.line.mapped.rank, gather) };
        if shards.refusal.is_empty() && self.is_captured(caller)? {
            shards = shards.refused(CAPTURED);
        }
        self.send_record(&shards)?;
        if shards.refusal.is_empty() {
            // SAFETY: by this function's contract.
            let parts = unsafe { parts_of(gather) };
            self.send_shards(&shards, parts, caller)?;
        }
        let slot = self.places.slot(number);
        self.slots[slot].own = Some(shards);
        Ok(())
    }

    /// Waits until all others have left the last gather of a slot.
    fn open_slot(&mut self, operation: u64) -> Result<()> {
        let slot = self.places.slot(operation);
        let Some(number) = self.slots[slot].left.take() else { return Ok(()) };
        self.line.wait(WordWait { word: Word::Left, number, operation, phase: PHASE })
    }

    fn send_record(&self, shards: &Shards) -> Result<()> {
        if self.places.ranks == 1 {
            return Ok(());
        }
        let (rank, number) = (shards.rank, shards.number);
        let slot = self.places.slot(number);
        let record = self.records.at(slot);
        // SAFETY: pinned memory that lives as long as `self`. The last copies from it were ahead of what all others
        // have left.
        unsafe { record.write(RawRecord::new(shards.words(0), &shards.refusal)) };
        let place = self.places.record(rank, slot);
        let own = self.line.at(rank, place);
        self.push.copy(own, record as u64, RECORD)?;
        for peer in self.line.peers() {
            self.push.copy(self.line.at(peer, place), own, RECORD)?;
            self.line.store(&self.push, Word::Entered, number, peer)?;
        }
        Ok(())
    }

    fn send_shards(
        &self,
        shards: &Shards,
        parts: &[abi::TyPart],
        caller: Option<RawStream>,
    ) -> Result<()> {
        let (rank, number) = (shards.rank, shards.number);
        let slot = &self.slots[self.places.slot(number)];
        let place = self.places.data(rank, self.places.slot(number));
        let own = self.line.at(rank, place);
        self.begin_on(&self.stage, caller)?;
        slot.copied.hold(self.stage.name())?;
        let mut to = own;
        for part in parts.iter().filter(|part| part.bytes > 0) {
            self.stage.copy(to, part.data as u64, part.bytes)?;
            to += part.bytes;
        }
        slot.staged.record(self.stage.name())?;
        slot.staged.hold(self.push.name())?;
        for peer in self.line.peers() {
            self.push.copy(self.line.at(peer, place), own, shards.bytes)?;
            self.line.store(&self.push, Word::Arrived, number, peer)?;
        }
        end_on(&self.stage, &slot.staged, caller)
    }

    /// Waits for the shards of all ranks, and writes them to the parts.
    ///
    /// # Safety
    /// As [`KernelSet::gather_recv`](tokenyard_core::kernels::KernelSet::gather_recv).
    pub(crate) unsafe fn recv(&mut self, gather: &abi::TyGather) -> Result<()> {
        let (operation, slot) = (gather.operation, self.places.slot(gather.operation));
        let Some(own) = self.slots[slot].own.take().filter(|own| own.number == operation) else {
            let text = format!("found gather {operation}; expected one that was sent");
            return Err(Error::new(ErrorKind::Internal, "receive gather", text));
        };
        let verdict = verdict(&self.records(own)?);
        let caller = caller_of(gather);
        let is_captured = self.is_captured(caller)?;
        // Nothing is queued on a stream that captures: the call ends here without outputs.
        let caller = caller.filter(|_| !is_captured);
        let outs = match &verdict {
            // SAFETY: by this function's contract.
            Ok(()) if !is_captured => unsafe { parts_of(gather) },
            _ => &[],
        };
        if verdict.is_ok() {
            let word = Word::Arrived;
            self.line.wait(WordWait { word, number: operation, operation, phase: PHASE })?;
        }
        self.begin_on(&self.out, caller)?;
        self.slots[slot].staged.hold(self.out.name())?;
        self.copy_out(slot, outs)?;
        for peer in self.line.peers() {
            self.line.store(&self.out, Word::Left, operation, peer)?;
        }
        self.slots[slot].copied.record(self.out.name())?;
        self.slots[slot].left = Some(operation);
        end_on(&self.out, &self.slots[slot].copied, caller)?;
        match is_captured && verdict.is_ok() {
            true => Err(Error::new(ErrorKind::InvalidInput, "receive gather", CAPTURED)),
            false => verdict,
        }
    }

    /// The records of all ranks, in their order. Waits for those of the others.
    fn records(&self, own: Shards) -> Result<Vec<Shards>> {
        let (number, room) = (own.number, self.places.room);
        let (slot, word) = (self.places.slot(number), Word::Entered);
        self.line.wait(WordWait { word, number, operation: number, phase: PHASE })?;
        let theirs = |rank: u32| self.records.at(self.slots.len() + rank as usize);
        for rank in self.line.peers() {
            self.line.read(theirs(rank) as u64, self.places.record(rank, slot), RECORD)?;
        }
        self.line.end_reading()?;
        let mut all = vec![own];
        for rank in self.line.peers() {
            // SAFETY: pinned memory that lives as long as `self`; the copy into it has ended.
            let record = unsafe { theirs(rank).read_volatile() };
            let expected = ExpectedRecord { rank, number, room };
            all.push(Shards::read(record.words, &record.text, expected)?.0);
        }
        all.sort_unstable_by_key(|shards| shards.rank);
        Ok(all)
    }

    /// Copies the shards of all ranks to the outputs.
    fn copy_out(&self, slot: usize, outs: &[abi::TyPart]) -> Result<()> {
        let (ranks, mut behind) = (self.places.ranks, 0);
        for out in outs.iter().filter(|out| out.bytes > 0) {
            let bytes = out.bytes / u64::from(ranks);
            for rank in 0..ranks {
                let from =
                    self.line.at(self.line.mapped.rank, self.places.data(rank, slot) + behind);
                self.out.copy(out.data as u64 + u64::from(rank) * bytes, from, bytes)?;
            }
            behind += bytes;
        }
        Ok(())
    }

    fn is_captured(&self, caller: Option<RawStream>) -> Result<bool> {
        caller.map_or(Ok(false), |stream| stream.is_captured(&self.context))
    }

    /// The next work of a stream runs behind the present work of a caller's.
    fn begin_on(&self, stream: &Stream, caller: Option<RawStream>) -> Result<()> {
        let Some(caller) = caller else { return Ok(()) };
        self.caller.record(caller)?;
        self.caller.hold(stream.name())
    }

    /// Waits until all that it queued has ended (INV-4).
    pub(crate) fn flush(&self) -> Result<()> {
        [&self.stage, &self.push, &self.out].into_iter().try_for_each(Stream::synchronize)
    }
}

impl Drop for Gather {
    fn drop(&mut self) {
        if let Err(error) = self.flush() {
            tracing::warn!("the streams of a gather did not end well: {error}");
        }
    }
}

/// The bound of its waits is that for late ranks: what a rank sends comes behind the work of its callers' streams,
/// which may wait for others in turn. A lost rank ends them earlier.
const PHASE: u64 = abi::TY_PHASE_MESSAGE;

/// The reason why a gather is refused on a stream that captures a graph.
const CAPTURED: &str = "stream: found one that captures a graph; expected one that runs";

/// The stream of a call.
fn caller_of(gather: &abi::TyGather) -> Option<RawStream> {
    let is_there = gather.flags & abi::TY_GATHER_ON_STREAM != 0;
    is_there.then(|| RawStream::of(gather.stream))
}

/// The caller's stream goes on behind the mark; without one, the host waits for the work of `stream`.
fn end_on(stream: &Stream, mark: &Event, caller: Option<RawStream>) -> Result<()> {
    caller.map_or_else(|| stream.synchronize(), |caller| mark.hold(caller))
}

#[cfg(test)]
mod tests;
