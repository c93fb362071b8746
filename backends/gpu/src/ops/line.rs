//! The link to the ranks of a domain as operations beside MoE use it: the mapped windows of all ranks, and the words
//! that ranks store into them.
//!
//! Words lie in device memory. The host reads those of its own window by small copies, on a stream that waits for
//! nothing: while it waits for a word, no work of a stream waits for a peer. So a wait that expires leaves nothing
//! behind that would have to be ended.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use tokenyard_core::kernels::KernelShape;
use tokenyard_core::link::Link;
use tokenyard_core::moe::RECORD_TEXT;
use tokenyard_core::ops::record::{RECORD, RecordWords};
use tokenyard_core::wait::{WaitBoard, WaitFor, Waiter, reached};
use tokenyard_core::{Result, abi};

use super::places::{RankPlaces, Word};
use crate::driver::{Context, Pinned, Stream};

/// The only window.
const WINDOW: u32 = 0;

/// The windows of all ranks, which a link maps.
#[derive(Debug)]
pub(crate) struct Mapped {
    pub(crate) rank: u32,
    level: u64,
    /// Device addresses, by rank.
    pub(crate) windows: Vec<u64>,
    pub(crate) link: Link,
}

impl Mapped {
    /// `own`: the device address of this rank's window.
    ///
    /// # Safety
    /// The links of the plan outlive it.
    pub(crate) unsafe fn new(shape: &KernelShape, own: u64, plan: &abi::TyPlan) -> Result<Self> {
        let (level, raw) = match plan.scale_up.table.is_null() {
            true => (abi::TY_LEVEL_SCALE_OUT, &plan.scale_out),
            false => (abi::TY_LEVEL_SCALE_UP, &plan.scale_up),
        };
        // SAFETY: by this function's contract; the host passes judged tables.
        let link = unsafe { Link::from_abi(raw)? };
        let address = |peer| match peer == shape.rank {
            true => Ok(own),
            false => link.peer_address(WINDOW, peer).map(|at| at as u64),
        };
        let windows = (0..shape.ranks).map(address).collect::<Result<_>>()?;
        Ok(Self { rank: shape.rank, level, windows, link })
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) mapped: Mapped,
    places: RankPlaces,
    waiter: Waiter<'static>,
    look: Stream,
    /// Words as they were seen last, by rank.
    seen: Pinned<u64>,
}

/// A record, as it lies in windows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawRecord {
    pub(crate) words: RecordWords,
    pub(crate) text: [u8; RECORD_TEXT as usize],
}

const _: () = assert!(size_of::<RawRecord>() as u64 == RECORD);

impl RawRecord {
    /// `text`: as much of it as there is room for.
    pub(crate) fn new(words: RecordWords, text: &[u8]) -> Self {
        let mut room = [0; RECORD_TEXT as usize];
        let bytes = text.len().min(room.len());
        room[..bytes].copy_from_slice(&text[..bytes]);
        Self { words, text: room }
    }
}

/// A wait for another rank, or for all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WordWait {
    pub(crate) word: Word,
    /// The gather or message that ranks must have come to.
    pub(crate) number: u64,
    /// The one that waits.
    pub(crate) operation: u64,
    /// One of `TY_PHASE_*`.
    pub(crate) phase: u64,
}

impl Line {
    /// `own`: the device address of this rank's window.
    ///
    /// # Safety
    /// Board and links of the plan outlive the line.
    pub(crate) unsafe fn new(
        context: &Arc<Context>,
        shape: &KernelShape,
        own: u64,
        plan: &abi::TyPlan,
    ) -> Result<Self> {
        // SAFETY: by this function's contract; the host passes a board that is valid.
        let (mapped, board) =
            unsafe { (Mapped::new(shape, own, plan)?, WaitBoard::from_abi(plan.board)) };
        Ok(Self {
            mapped,
            places: RankPlaces::new(shape),
            waiter: Waiter::new(board, Duration::from_nanos(plan.cap_ns)),
            look: Stream::new(context)?,
            seen: Pinned::new(context, shape.ranks as usize)?,
        })
    }

    /// The other ranks, from the next one on: so that not all ranks turn to rank 0 at once.
    pub(crate) fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let (rank, ranks) = (self.mapped.rank, self.places.ranks);
        (1..ranks).map(move |ahead| (rank + ahead) % ranks)
    }

    /// The address of a place in the window of a rank.
    pub(crate) fn at(&self, rank: u32, place: u64) -> u64 {
        self.mapped.windows[rank as usize] + place
    }

    /// Stores at a peer, in the order of a stream, that this rank has come to a gather or message. All that the stream
    /// has copied is there then.
    pub(crate) fn store(&self, stream: &Stream, word: Word, number: u64, peer: u32) -> Result<()> {
        let place = self.places.word(word, self.places.slot(number), self.mapped.rank);
        stream.write(self.at(peer, place), number + 1)
    }

    /// Waits until the words of all other ranks are there.
    ///
    /// # Errors
    /// The deadline; errors of the device and of the transport.
    pub(crate) fn wait(&self, wait: WordWait) -> Result<()> {
        self.look(wait.word, self.places.slot(wait.number))?;
        self.peers().try_for_each(|peer| self.go_on_waiting(wait, peer))
    }

    /// Waits until the word of one rank is there.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub(crate) fn wait_for(&self, wait: WordWait, peer: u32) -> Result<()> {
        self.look(wait.word, self.places.slot(wait.number))?;
        self.go_on_waiting(wait, peer)
    }

    /// The last look was at this word.
    fn go_on_waiting(&self, wait: WordWait, peer: u32) -> Result<()> {
        let WordWait { word, number, operation, phase } = wait;
        let (slot, expected) = (self.places.slot(number), number + 1);
        let signal = self.places.index(word, slot, peer);
        let what = WaitFor { phase, peer, signal, expected, operation, level: self.mapped.level };
        let failed = Cell::new(None);
        let read = || {
            if !reached(self.seen(peer), expected)
                && let Err(error) = self.look(word, slot)
            {
                // The first one names the cause (INV-7).
                failed.set(failed.take().or(Some(error)));
            }
            self.seen(peer)
        };
        let failure = || failed.take().map_or(Ok(()), Err);
        self.waiter.until(&what, read, || failure().and_then(|()| self.mapped.link.health()))?;
        failure()
    }

    /// A word, as the last look has found it.
    fn seen(&self, peer: u32) -> u64 {
        // SAFETY: pinned memory that lives as long as `self`; the copy into it has ended.
        unsafe { self.seen.at(peer as usize).read_volatile() }
    }

    /// Reads the words of all ranks in a slot.
    fn look(&self, word: Word, slot: usize) -> Result<()> {
        let (place, bytes) = (self.places.word(word, slot, 0), 8 * u64::from(self.places.ranks));
        self.read(self.seen.at(0) as u64, place, bytes)?;
        self.end_reading()
    }

    /// Queues a copy from this rank's window to pinned memory.
    pub(crate) fn read(&self, to: u64, place: u64, bytes: u64) -> Result<()> {
        self.look.copy(to, self.at(self.mapped.rank, place), bytes)
    }

    /// Waits for the end of such copies.
    pub(crate) fn end_reading(&self) -> Result<()> {
        self.look.synchronize()
    }
}
