//! The host API: one stream per queue, commands in order, a totals table for signals.

use std::collections::VecDeque;
use std::sync::Arc;

use tokenyard_core::Result;
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event, TransportNeeds};

use crate::driver::{Context, Event as Mark, Stream};

/// A queue: commands run in the order of their posts, so a signal comes after its payload (INV-1).
/// All memory is allocated when the queue is made.
#[derive(Debug)]
pub(super) struct Queue {
    stream: Stream,
    /// Commands that are not done or not reported yet; oldest first, at most `depth`.
    posted: VecDeque<Posted>,
    /// One for each command that may still be posted.
    marks: Vec<Mark>,
    depth: usize,
    /// `[peers, signals]`: totals of the signals that this queue raises. Each signal has one writing
    /// (peer, queue).
    totals: Vec<u64>,
}

/// A command in the stream.
#[derive(Debug)]
struct Posted {
    event: Event,
    /// Behind the command.
    mark: Mark,
    /// No caller receives its completion.
    silent: bool,
}

impl Queue {
    pub(super) fn new(
        context: &Arc<Context>,
        needs: &TransportNeeds,
        peers: usize,
    ) -> Result<Self> {
        let depth = needs.queue_depth.max(1) as usize;
        Ok(Self {
            stream: Stream::new(context)?,
            posted: VecDeque::with_capacity(depth),
            marks: (0..depth).map(|_| Mark::new(context)).collect::<Result<_>>()?,
            depth,
            totals: vec![0; peers * needs.signals as usize],
        })
    }

    /// Whether the queue has no space for another command; silent commands that are done are
    /// dropped first.
    pub(super) fn is_full(&mut self) -> bool {
        while let Some(first) = self.posted.front()
            && first.silent
            && matches!(first.mark.is_done(), Ok(true))
        {
            self.marks.extend(self.posted.pop_front().map(|done| done.mark));
        }
        self.posted.len() >= self.depth
    }

    pub(super) fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<()> {
        self.stream.copy(to, from, bytes)
    }

    /// Stores one value, whole (INV-3).
    pub(super) fn write(&self, at: u64, value: u64) -> Result<()> {
        self.stream.write(at, value)
    }

    /// Adds to the signal at `at`, whose total is number `index` of this queue's totals.
    pub(super) fn raise(&mut self, at: u64, index: usize, add: u32) -> Result<()> {
        let total = &mut self.totals[index];
        *total = total.wrapping_add(u64::from(add));
        self.stream.write(at, *total)
    }

    /// Stores a command until it is done. The queue is not full.
    pub(super) fn note(&mut self, command: &Command, failed: bool) {
        debug_assert!(!self.marks.is_empty(), "the queue is full");
        let Some(mark) = self.marks.pop() else { return };
        let failed = mark.record(self.stream.name()).is_err() || failed;
        let (kind, status) =
            if failed { (abi::TY_EVENT_ERROR, abi::TY_TRANSPORT) } else { (abi::TY_EVENT_DONE, 0) };
        let event =
            Event { kind, queue: command.queue, peer: command.peer, status, tag: command.tag };
        let silent = !failed && command.flags & abi::TY_FLAG_NOTIFY == 0;
        self.posted.push_back(Posted { event, mark, silent });
    }

    /// Moves the events of commands that are done to the front of `out`.
    pub(super) fn take(&mut self, out: &mut [Event]) -> usize {
        let mut count = 0;
        while count < out.len() {
            let Some(first) = self.posted.front_mut() else { break };
            match first.mark.is_done() {
                Ok(false) => break,
                Ok(true) => {}
                Err(_) => {
                    first.silent = false;
                    (first.event.kind, first.event.status) =
                        (abi::TY_EVENT_ERROR, abi::TY_TRANSPORT);
                }
            }
            if !first.silent {
                out[count] = first.event;
                count += 1;
            }
            self.marks.extend(self.posted.pop_front().map(|done| done.mark));
        }
        count
    }
}
