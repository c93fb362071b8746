//! The host face: one stream per lane, commands in order, a totals table for signals.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use tokenyard_core::Result;
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event};

use crate::driver::{Context, Event as Mark, Stream};

/// A lane: commands run in the order of their posts, so a signal comes after its payload (INV-1).
#[derive(Debug)]
pub(super) struct Lane {
    context: Arc<Context>,
    stream: Stream,
    /// Commands that are not reported yet, with the mark behind each; oldest first.
    posted: VecDeque<(Event, Option<Mark>)>,
    /// Marks to use again.
    marks: Vec<Mark>,
    depth: usize,
    /// Totals of the signals that this lane raises: each has one writing (peer, lane).
    totals: HashMap<u64, u64>,
}

impl Lane {
    pub(super) fn new(context: &Arc<Context>, depth: u32) -> Result<Self> {
        Ok(Self {
            context: Arc::clone(context),
            stream: Stream::new(context)?,
            posted: VecDeque::new(),
            marks: Vec::new(),
            depth: depth.max(1) as usize,
            totals: HashMap::new(),
        })
    }

    pub(super) fn is_full(&self) -> bool {
        self.posted.len() >= self.depth
    }

    pub(super) fn copy(&self, to: u64, from: u64, bytes: u64) -> Result<()> {
        self.stream.copy(to, from, bytes)
    }

    /// Stores one value, whole (INV-3).
    pub(super) fn write(&self, at: u64, value: u64) -> Result<()> {
        self.stream.write(at, value)
    }

    /// Adds to a signal that only this lane writes.
    pub(super) fn raise(&mut self, at: u64, add: u32) -> Result<()> {
        let total = self.totals.entry(at).or_insert(0);
        *total = total.wrapping_add(u64::from(add));
        self.stream.write(at, *total)
    }

    /// Remembers a command until it is done.
    pub(super) fn note(&mut self, command: &Command, failed: bool) {
        let mark = self.marks.pop().map_or_else(|| Mark::new(&self.context), Ok);
        let mark = mark.and_then(|mark| mark.record(&self.stream).map(|()| mark));
        let failed = failed || mark.is_err();
        if !failed && command.flags & abi::TY_FLAG_NOTIFY == 0 {
            self.marks.extend(mark);
            return;
        }
        let (kind, status) =
            if failed { (abi::TY_EVENT_ERROR, abi::TY_TRANSPORT) } else { (abi::TY_EVENT_DONE, 0) };
        let event =
            Event { kind, lane: command.lane, peer: command.peer, status, tag: command.tag };
        self.posted.push_back((event, mark.ok().filter(|_| !failed)));
    }

    /// Moves the events of commands that are done to the front of `out`.
    pub(super) fn take(&mut self, out: &mut [Event]) -> usize {
        let mut count = 0;
        while count < out.len() {
            let Some((event, mark)) = self.posted.front_mut() else { break };
            match mark.as_ref().map(Mark::is_done) {
                Some(Ok(false)) => break,
                Some(Err(_)) => {
                    (event.kind, event.status) = (abi::TY_EVENT_ERROR, abi::TY_TRANSPORT);
                }
                Some(Ok(true)) | None => {}
            }
            out[count] = *event;
            count += 1;
            if let Some((_, mark)) = self.posted.pop_front() {
                self.marks.extend(mark);
            }
        }
        count
    }
}
