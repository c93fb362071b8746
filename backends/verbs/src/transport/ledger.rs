//! The counts of every queue of reliable connections: its commands, their events, and the times of its watchdog.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event};

use super::flight::Pending;
use super::owned::Owned;

/// The clock is read once in this many polls.
const POLLS_PER_LOOK: u32 = 64;
/// The shortest interval between two checks of a watchdog.
const WATCH_EVERY: Duration = Duration::from_millis(100);
/// The longest time that a transport which ends waits for posted commands.
const LONGEST_END: Duration = Duration::from_secs(1);

/// The commands that a queue has accepted, and the events of those that have ended. Nothing is allocated after `new`.
#[derive(Debug)]
pub struct Ledger {
    queue: u32,
    depth: usize,
    /// Commands that were accepted and have not ended.
    under_way: usize,
    /// Events of commands that have ended; together with the commands in flight never more than the depth (INV-5).
    events: VecDeque<Event>,
}

impl Ledger {
    /// A queue that accepts `depth` commands at once.
    pub fn new(queue: u32, depth: usize) -> Self {
        Self { queue, depth, under_way: 0, events: VecDeque::with_capacity(depth) }
    }

    /// The number of the queue.
    pub fn queue(&self) -> u32 {
        self.queue
    }

    /// The number of commands in flight.
    pub fn under_way(&self) -> usize {
        self.under_way
    }

    /// As many of these commands as the depth allows.
    #[inline]
    pub fn accepted<'a>(&self, commands: &'a [Command]) -> &'a [Command] {
        let room = self.depth - self.under_way - self.events.len();
        &commands[..commands.len().min(room)]
    }

    /// A command is in flight.
    #[inline]
    pub fn start(&mut self) {
        self.under_way += 1;
    }

    /// A command in flight has ended, with `TY_OK` or the status of its failure.
    #[inline]
    pub fn end(&mut self, peer: u32, command: Pending, status: i32) {
        self.under_way -= 1;
        match status {
            abi::TY_OK if command.notify => self.add(abi::TY_EVENT_DONE, peer, command.tag, status),
            abi::TY_OK => {}
            _ => self.refuse(peer, command, status),
        }
    }

    /// An accepted command has failed before it was in flight.
    #[cold]
    pub fn refuse(&mut self, peer: u32, command: Pending, status: i32) {
        self.add(abi::TY_EVENT_ERROR, peer, command.tag, status);
    }

    fn add(&mut self, kind: u32, peer: u32, tag: u64, status: i32) {
        debug_assert!(self.events.len() < self.depth);
        self.events.push_back(Event { kind, queue: self.queue, peer, status, tag });
    }

    /// Fills in the oldest events and returns their number.
    #[inline]
    pub fn take(&mut self, out: &mut [Event]) -> usize {
        let count = out.len().min(self.events.len());
        for (to, event) in out.iter_mut().zip(self.events.drain(..count)) {
            *to = event;
        }
        count
    }
}

/// The times at which a watchdog checks connections.
#[derive(Debug)]
pub struct Watchdog {
    polls: u32,
    next: Instant,
}

impl Watchdog {
    /// The first check is due after the shortest interval.
    pub fn armed() -> Self {
        Self { polls: 0, next: Instant::now() + WATCH_EVERY }
    }

    /// Counts a poll; whether the clock is read after it.
    #[inline]
    pub fn looks(&mut self) -> bool {
        self.polls = self.polls.wrapping_add(1);
        self.polls.is_multiple_of(POLLS_PER_LOOK)
    }

    /// Whether a check is due; if so, the next is due after the shortest interval.
    pub fn is_due(&mut self, now: Instant) -> bool {
        let due = now >= self.next;
        if due {
            self.next = now + WATCH_EVERY;
        }
        due
    }
}

/// Waits a short time for posted commands, so that peers that still run receive them; `drive` returns whether a queue
/// has commands in flight and can go on.
pub fn finish<T>(
    queues: &mut [Owned<T>],
    deadline: Duration,
    mut drive: impl FnMut(&mut T) -> bool,
) {
    let until = Instant::now() + LONGEST_END.min(deadline);
    for queue in queues {
        while drive(queue.get_mut()) && Instant::now() < until {
            std::thread::yield_now();
        }
    }
}
