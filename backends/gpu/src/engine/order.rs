//! The stream on which the kernels of operations are queued, and their order with the streams of
//! callers.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use tokenyard_core::Result;

use crate::driver::{Context, Event, RawStream, Stream};
use crate::engine::mode::{CAPTURED, ELSEWHERE, Mode};
use crate::engine::region_order::RegionOrder;
use crate::engine::waits::{KEEP_TENSORS, see_end};

/// Streams and events of an exchange.
#[derive(Debug)]
pub(crate) struct StreamOrder {
    pub(crate) stream: Arc<Stream>,
    /// Joins the captures of callers' streams. No work runs on it.
    recorded: Arc<Stream>,
    /// Whether the operation at hand is recorded.
    is_recording: bool,
    /// Whether an operation was ever recorded.
    pub(crate) has_recorded: bool,
    /// The caller's stream, where the operation at hand is queued there.
    direct: Option<RawStream>,
    /// The stream on which a kernel that runs was queued last, and the slot whose event is behind
    /// it.
    last: Cell<Option<(RawStream, usize)>>,
    /// Per slot: behind the last kernel of the operation.
    pub(crate) events: Vec<Event>,
    pub(crate) regions: RegionOrder,
}

impl StreamOrder {
    /// Streams and events for operations in this many slots. `cap`: the longest that the host waits
    /// for a caller's stream.
    pub(crate) fn new(context: &Arc<Context>, slots: usize, cap: Duration) -> Result<Self> {
        Ok(Self {
            stream: Arc::new(Stream::new(context)?),
            recorded: Arc::new(Stream::new(context)?),
            is_recording: false,
            has_recorded: false,
            direct: None,
            last: Cell::new(None),
            events: (0..slots).map(|_| Event::new(context)).collect::<Result<_>>()?,
            regions: RegionOrder::new(context, cap)?,
        })
    }

    pub(crate) fn context(&self) -> &Context {
        self.stream.context()
    }

    pub(crate) fn context_arc(&self) -> &Arc<Context> {
        self.stream.context()
    }

    /// The stream on which the kernels of the current operation are queued.
    pub(crate) fn work(&self) -> RawStream {
        let own = if self.is_recording { &self.recorded } else { &self.stream };
        self.direct.unwrap_or(own.name())
    }

    /// Selects the stream of the mode of the current operation; without a mode the operation is
    /// only reported to other ranks.
    pub(crate) fn select_stream(&mut self, mode: Option<&Mode>) {
        self.is_recording = mode.is_some_and(Mode::is_recorded);
        self.direct = mode.and_then(Mode::direct);
    }

    /// Queues the kernels of the current operation on a stream of their own.
    pub(crate) fn turn_aside(&mut self, stream: RawStream) {
        self.direct = Some(stream);
    }

    /// The reason why a call cannot be made on a stream that captures a graph.
    pub(crate) fn cannot_capture(&self, mode: &Mode) -> Result<Option<&'static str>> {
        match mode.stream.filter(|_| mode.captured) {
            Some(_) if !mode.no_host_sync => Ok(Some(CAPTURED)),
            Some(stream) if !mode.at_once => {
                let elsewhere = self.regions.is_elsewhere(&self.recorded, stream)?;
                Ok(elsewhere.then_some(ELSEWHERE))
            }
            _ => Ok(None),
        }
    }

    /// The next kernels run behind the present work of the mode's stream, and behind the last use of every
    /// region that was taken back.
    pub(crate) fn enter(&mut self, mode: &Mode) -> Result<()> {
        self.select_stream(Some(mode));
        self.has_recorded |= self.is_recording;
        let work = self.work();
        if self.is_recording {
            // Work of separate sends in this capture comes first.
            if self.direct.is_some() {
                self.join(work)?;
            }
        } else if let Some((last, slot)) = self.last.get()
            && last != work
        {
            self.events[slot].hold(work)?;
        }
        self.regions.enter(work, mode)?;
        match mode.stream.filter(|_| self.is_recording) {
            Some(stream) => self.regions.marks.hold(stream, work),
            None => Ok(()),
        }
    }

    /// Notes that a kernel of an operation was queued.
    pub(crate) fn queued(&self, slot: usize) -> Result<()> {
        let (event, work) = (&self.events[slot], self.work());
        // A mark in a capture belongs to the graph: calls outside the capture cannot wait for it.
        if self.is_recording {
            return self.regions.marks.mark(work);
        }
        event.record(work)?;
        self.last.set(Some((work, slot)));
        // A waiter for this stream waits for the work of callers' streams, too.
        if self.direct.is_some() { event.hold(self.stream.name()) } else { Ok(()) }
    }

    /// Ends in the capture of `stream` the work that was recorded there.
    pub(crate) fn join(&self, stream: RawStream) -> Result<()> {
        self.regions.join(&self.recorded, stream)
    }

    /// Lets `stream` continue behind the kernels of an operation, unless they are queued there.
    pub(crate) fn leave(&self, slot: usize, stream: RawStream) -> Result<()> {
        if self.direct.is_none() { self.events[slot].hold(stream) } else { Ok(()) }
    }

    /// Regions that are taken back from now on are free behind the kernels of an operation.
    pub(crate) fn free_behind(&mut self, slot: usize) -> Result<()> {
        let work = self.work();
        self.regions.free_behind(&self.events[slot], work)
    }

    /// Lets the stream of a refused call continue behind the call's kernel. That kernel takes a turn, and
    /// work that the caller queues next, including a graph, must find the turn after it. Without a stream the
    /// host waits: the kernel has reported its outcome, but blocks of it may still read the call's tensors.
    pub(crate) fn order_refused(&self, slot: usize, mode: &Mode) {
        if mode.is_recorded() {
            return;
        }
        let event = &self.events[slot];
        // A stream that captures a graph cannot wait for a kernel that runs.
        let Some(stream) = mode.stream.filter(|_| !mode.captured) else {
            if !see_end(&|| event.is_done()) {
                tracing::warn!("the kernel of a refused call still runs: {KEEP_TENSORS}");
            }
            return;
        };
        if let Err(error) = event.hold(stream) {
            tracing::warn!("a stream does not wait for a call that was refused: {error}");
        }
    }

    /// Continues an operation that was sent; false if it was sent in a capture that has ended.
    pub(crate) fn resume(&mut self, mode: &Mode) -> Result<bool> {
        self.select_stream(Some(mode));
        match mode.stream.filter(|_| self.is_recording) {
            Some(stream) => stream.is_captured(self.context()),
            None => Ok(true),
        }
    }

    /// Waits until all launched work has ended, and every region that callers use is free.
    pub(crate) fn end(&mut self) -> Result<()> {
        self.stream.synchronize().and_then(|()| self.regions.take_back_all())
    }
}
