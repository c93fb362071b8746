//! When a region is free again: behind the work that the streams of callers had when it was taken back. It
//! is made of events alone: the host does not wait, and allocates nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokenyard_core::{Error, ErrorKind, Result};

use crate::driver::{Context, Event, RawStream, Stream};
use crate::engine::capture_marks::CaptureMarks;
use crate::engine::mode::Mode;

/// How often the host polls a caller's stream that it waits for.
const LOOK: Duration = Duration::from_micros(100);

/// Capacity in regions that are given out in the order of a stream: as many as an arena can hold.
const MOST_REGIONS: usize = 4096;

/// The stream on which each region was given out; regions in the host's order are not in it.
#[derive(Debug)]
struct Owners<S> {
    held: Vec<(u64, S)>,
}

impl<S: Copy> Owners<S> {
    fn new() -> Self {
        Self { held: Vec::with_capacity(MOST_REGIONS) }
    }

    fn give(&mut self, region: u64, stream: Option<S>) {
        self.held.extend(stream.map(|stream| (region, stream)));
    }

    fn of(&self, region: u64) -> Option<S> {
        self.held.iter().find(|(id, _)| *id == region).map(|(_, stream)| *stream)
    }

    fn take(&mut self, region: u64) -> Option<S> {
        let index = self.held.iter().position(|(id, _)| *id == region)?;
        Some(self.held.swap_remove(index).1)
    }
}

impl<S: PartialEq> Owners<S> {
    fn forget(&mut self, stream: S) {
        self.held.retain(|(_, owner)| *owner != stream);
    }
}

/// The streams on which regions were used that `freed` waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PendingDeps<S> {
    Nothing,
    /// On this stream alone, or this stream has waited for all others. Work that is queued on it later runs
    /// behind their use.
    One(S),
    Several,
}

impl<S: Copy + PartialEq> PendingDeps<S> {
    fn add(&mut self, stream: S) {
        *self = match *self {
            Self::Nothing => Self::One(stream),
            Self::One(other) if other == stream => Self::One(stream),
            _ => Self::Several,
        };
    }

    /// Whether all uses are behind the present work of `stream`.
    fn is_within(self, stream: S) -> bool {
        self == Self::Nothing || self == Self::One(stream)
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct RegionOrder {
    owners: Owners<RawStream>,
    /// Holds only waits: behind all of them, every region that was taken back is free.
    freed: Stream,
    /// The streams that `freed` waits for, as streams of operations know it.
    ahead: PendingDeps<RawStream>,
    /// Whether `freed` ever received a wait.
    is_used: bool,
    /// Regions that were returned while their stream captured a graph, where no mark can be made.
    late: Vec<u64>,
    /// An event by which one stream waits for another; it is free again at once.
    mark: Event,
    /// Marks behind which recorded operations run within their graph.
    pub(crate) marks: CaptureMarks,
    /// The longest that the host waits for a caller's stream.
    cap: Duration,
}

impl RegionOrder {
    pub(crate) fn new(context: &Arc<Context>, cap: Duration) -> Result<Self> {
        Ok(Self {
            owners: Owners::new(),
            freed: Stream::new(context)?,
            ahead: PendingDeps::Nothing,
            is_used: false,
            late: Vec::new(),
            mark: Event::new(context)?,
            marks: CaptureMarks::new(context),
            cap,
        })
    }

    /// Work that is queued on `then` from now on runs behind the present work of `first`.
    fn chain(&self, first: RawStream, then: RawStream) -> Result<()> {
        self.mark.record(first)?;
        self.mark.hold(then)
    }

    /// The next operation runs on `work` behind the present work of its caller's stream, and in
    /// regions that no stream uses any more.
    pub(crate) fn enter(&mut self, work: RawStream, mode: &Mode) -> Result<()> {
        if mode.is_recorded() {
            // A graph waits for nothing outside it.
            self.settle()?;
        } else if !self.ahead.is_within(work) {
            self.chain(self.freed.name(), work)?;
            self.ahead = PendingDeps::One(work);
        }
        match mode.stream {
            Some(stream) if stream != work => self.chain(stream, work),
            _ => Ok(()),
        }
    }

    /// Work that is queued on `work` from now on may write regions that no stream uses any more.
    pub(crate) fn hold(&self, work: RawStream) -> Result<()> {
        if self.ahead.is_within(work) { Ok(()) } else { self.chain(self.freed.name(), work) }
    }

    /// Ends the recorded work of `work` in the capture of a stream, if there is any.
    pub(crate) fn join(&self, work: &Stream, stream: RawStream) -> Result<()> {
        if !work.name().is_captured(self.freed.context())? || self.is_elsewhere(work, stream)? {
            return Ok(());
        }
        self.chain(work.name(), stream)
    }

    /// Whether `work` still has some of a capture, and a stream is in another one: to order them would end both.
    pub(crate) fn is_elsewhere(&self, work: &Stream, stream: RawStream) -> Result<bool> {
        let context = self.freed.context();
        let Some(capture) = work.name().capture(context)? else { return Ok(false) };
        Ok(stream.capture(context)?.is_some_and(|other| other != capture))
    }

    /// Regions that were taken back, and those taken back from now on, are free behind `event`,
    /// which was recorded on `stream`.
    pub(crate) fn free_behind(&mut self, event: &Event, stream: RawStream) -> Result<()> {
        event.hold(self.freed.name())?;
        self.ahead.add(stream);
        self.is_used = true;
        Ok(())
    }

    /// A region is used on `stream` until it is taken back, and was filled in its order.
    pub(crate) fn give(&mut self, region: u64, stream: Option<RawStream>) {
        self.owners.give(region, stream);
    }

    /// A region is written on `stream`, or by another writer that the host allows, until it is
    /// taken back.
    pub(crate) fn lend(&mut self, region: u64, stream: Option<RawStream>) -> Result<()> {
        match stream {
            Some(stream) if !stream.is_captured(self.freed.context())? => {
                self.hold(stream)?;
            }
            _ => {
                self.settle()?;
                // It may have been another operation's of the same graph.
                stream.map_or(Ok(()), |stream| self.marks.follow(stream))?;
            }
        }
        self.give(region, stream);
        Ok(())
    }

    /// No stream uses a region any more, except for the present work of its stream. While that stream
    /// captures a graph, a mark there would be in the graph: then the region waits among the late, and
    /// this returns false.
    pub(crate) fn take_back(&mut self, region: u64) -> Result<bool> {
        let Some(stream) = self.owners.of(region) else { return Ok(true) };
        if stream.is_captured(self.freed.context())? {
            self.late.push(region);
            return Ok(false);
        }
        self.owners.take(region);
        self.chain(stream, self.freed.name())?;
        self.ahead.add(stream);
        self.is_used = true;
        Ok(true)
    }

    /// Regions that were taken back, and those taken back from now on, are free behind the present
    /// work of a stream.
    pub(crate) fn free_after(&mut self, stream: RawStream) -> Result<()> {
        if stream.is_captured(self.freed.context())? {
            // Regions of its graph, which others of the graph get again.
            return self.marks.mark(stream);
        }
        self.chain(stream, self.freed.name())?;
        self.ahead.add(stream);
        self.is_used = true;
        Ok(())
    }

    /// Regions to be taken back again.
    pub(crate) fn late(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.late)
    }

    /// A region of a graph belongs to no stream any more. In the same graph it is free behind the present work of its
    /// stream.
    pub(crate) fn take_back_captured(&mut self, region: u64) -> Result<()> {
        self.owners.take(region).map_or(Ok(()), |stream| self.marks.mark(stream))
    }

    /// A stream has ended: its regions belong to the host from now on.
    pub(crate) fn forget(&mut self, stream: RawStream) {
        self.owners.forget(stream);
    }

    /// Takes every region back, and waits until it is free.
    pub(crate) fn take_back_all(&mut self) -> Result<()> {
        while let Some((region, _)) = self.owners.held.last() {
            let region = *region;
            if !self.take_back(region)? {
                self.owners.take(region);
            }
        }
        self.settle()
    }

    /// Waits until callers' streams have passed every region that was taken back.
    pub(crate) fn settle(&self) -> Result<()> {
        if !self.is_used {
            return Ok(());
        }
        let start = Instant::now();
        while !self.freed.is_idle()? {
            if start.elapsed() > self.cap {
                let text = format!(
                    "a stream of the caller has not passed the outputs that were dropped, after {:.1} s",
                    start.elapsed().as_secs_f64()
                );
                return Err(Error::new(ErrorKind::Deadline, "wait for stream", text)
                    .with_fix("see what is queued on the streams that calls were given"));
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_knows_its_stream_until_it_is_taken_back_once() {
        let mut owners = Owners::new();
        owners.give(7, Some('a'));
        owners.give(8, None);
        owners.give(9, Some('b'));
        assert_eq!((owners.of(7), owners.of(8)), (Some('a'), None));
        assert_eq!((owners.take(7), owners.take(7)), (Some('a'), None));
        assert_eq!((owners.take(8), owners.take(9)), (None, Some('b')));
        assert!(owners.held.is_empty() && owners.held.capacity() >= MOST_REGIONS);
        owners.give(10, Some('a'));
        owners.give(11, Some('b'));
        owners.forget('a');
        assert_eq!((owners.take(10), owners.take(11)), (None, Some('b')));
    }

    #[test]
    fn a_stream_need_not_wait_for_regions_that_were_used_on_it_alone() {
        let mut ahead = PendingDeps::Nothing;
        assert!(ahead.is_within('a'));
        ahead.add('a');
        ahead.add('a');
        assert!(ahead.is_within('a') && !ahead.is_within('b'));
        ahead.add('b');
        assert!(!ahead.is_within('a') && !ahead.is_within('b'));
        ahead.add('b');
        assert!(!ahead.is_within('b'));
        // Once 'a' has waited for all, other streams are still not behind them.
        ahead = PendingDeps::One('a');
        assert!(ahead.is_within('a') && !ahead.is_within('b'));
    }
}
