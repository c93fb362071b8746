//! The life of the thread that serves a ring.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::check::Limits;
use super::counts::Tally;
use super::ring::{RingMemory, Taker};
use super::{Fabric, RingToServe};
use crate::abi;
use crate::idle::{Idle, Rest};
use crate::transport::{Command, Event, NO_COMMAND, NO_EVENT};

/// Most commands of one post, and most events of one poll.
const MAX_BATCH: usize = 32;
const NAP: Duration = Duration::from_micros(50);

/// The reason why a ring is dead: the failed command, if there is one, and the status.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RingFailure {
    command: Option<u64>,
    status: i32,
}

impl RingFailure {
    fn of_link(status: i32) -> Self {
        Self { command: None, status: if status < 0 { status } else { abi::TY_INTERNAL } }
    }
}

/// Serves one ring.
pub(super) struct RingWorker<F> {
    fabric: F,
    taker: Taker<RingMemory>,
    limits: Limits,
    queue: u32,
    /// Taken and not accepted yet: `batch[first..last]`.
    batch: [Command; MAX_BATCH],
    first: usize,
    last: usize,
    /// The total of each signal that was published last.
    totals: Vec<u64>,
    tally: Tally,
    /// The peer of each slot's command.
    peers: Box<[u32]>,
}

impl<F: Fabric> RingWorker<F> {
    pub(super) fn new(fabric: F, ring: RingToServe) -> Self {
        let RingToServe { taker, limits, queue, tally } = ring;
        let totals = vec![0; limits.signals as usize];
        let batch = [NO_COMMAND; MAX_BATCH];
        let peers = vec![0; taker.capacity()].into();
        Self { fabric, taker, limits, queue, batch, first: 0, last: 0, totals, tally, peers }
    }

    fn slot(&self, number: u64) -> usize {
        number as usize & (self.peers.len() - 1)
    }

    /// Works until it is stopped or something fails.
    pub(super) fn run(&mut self, stop: &AtomicBool) {
        let mut idle = Idle::default();
        while !stop.load(Ordering::Acquire) {
            match self.round() {
                Ok(true) => idle = Idle::default(),
                Ok(false) => {
                    let rest = idle.next(Instant::now);
                    take(rest);
                    // Between sleeps there is time to check for errors that no command reports.
                    if rest == Rest::Nap && !self.fabric.is_healthy() {
                        return self.fail(&RingFailure::of_link(abi::TY_TRANSPORT));
                    }
                }
                Err(failure) => return self.fail(&failure),
            }
        }
    }

    /// One round over commands, events and signals. Returns whether something moved.
    pub(super) fn round(&mut self) -> Result<bool, RingFailure> {
        let mut moved = self.fill()?;
        moved |= self.post()?;
        moved |= self.collect()?;
        Ok(moved | self.report_totals())
    }

    /// Takes commands into the batch, once all of the last one are accepted.
    fn fill(&mut self) -> Result<bool, RingFailure> {
        if self.first < self.last {
            return Ok(false);
        }
        (self.first, self.last) = (0, 0);
        while self.last < MAX_BATCH
            && let Some((number, command)) = self.taker.take()
        {
            let Some(command) = self.limits.translate(&command) else {
                return Err(RingFailure { command: Some(number), status: abi::TY_INTERNAL });
            };
            let slot = self.slot(number);
            self.peers[slot] = command.peer;
            self.batch[self.last] = Command { queue: self.queue, tag: number, ..command };
            self.last += 1;
        }
        Ok(self.last > 0)
    }

    fn post(&mut self) -> Result<bool, RingFailure> {
        let waiting = &self.batch[self.first..self.last];
        if waiting.is_empty() {
            return Ok(false);
        }
        // SAFETY: the values that they name were checked; their sources stay unchanged by the kernels'
        // contract, which `RingToServe::new` states.
        let accepted = unsafe { self.fabric.post(waiting) }.map_err(RingFailure::of_link)?;
        let accepted = accepted.min(waiting.len());
        waiting[..accepted].iter().for_each(|command| self.tally.posted(command));
        self.first += accepted;
        Ok(accepted > 0)
    }

    fn collect(&mut self) -> Result<bool, RingFailure> {
        let mut events: [Event; MAX_BATCH] = [NO_EVENT; MAX_BATCH];
        let count = self.fabric.poll(&mut events).map_err(RingFailure::of_link)?;
        for event in events.iter().take(count) {
            if event.kind != abi::TY_EVENT_DONE {
                let status = if event.status < 0 { event.status } else { abi::TY_TRANSPORT };
                return Err(RingFailure { command: Some(event.tag), status });
            }
            if !self.taker.end(event.tag) {
                return Err(RingFailure { command: Some(event.tag), status: abi::TY_INTERNAL });
            }
            self.tally.done(self.peers[self.slot(event.tag)]);
        }
        self.taker.publish();
        Ok(count > 0)
    }

    fn report_totals(&mut self) -> bool {
        let mut news = false;
        for (id, reported) in (0..).zip(&mut self.totals) {
            let total = self.fabric.read_signal(id);
            if total != *reported {
                self.taker.slots.set_total(id, total);
                *reported = total;
                news = true;
            }
        }
        news
    }

    #[cold]
    fn fail(&self, failure: &RingFailure) {
        let RingFailure { command, status } = *failure;
        tracing::error!(?command, status, "the command ring of a device is dead");
        self.taker.slots.set_failed(command.map_or(u64::MAX, |number| number + 1), status);
    }
}

fn take(rest: Rest) {
    match rest {
        Rest::Spin => std::hint::spin_loop(),
        Rest::Yield => std::thread::yield_now(),
        Rest::Nap => std::thread::sleep(NAP),
    }
}
