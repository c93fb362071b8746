//! One queue of the host: its connections, the commands in flight on them, and its events.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event};
use tokenyard_sys_mlx5::cqe::syndrome;
use tokenyard_verbs::connection::{FailedAt, Flight, Pending};

use super::commands::{RemoteMemory, RequestMaker};
use super::fault::Fault;
use super::memory::sink;
use super::shared::Shared;
use crate::fault::QueueFault;
use crate::queue_pair::QueuePair;

/// The clock is read once in this many polls.
const POLLS_PER_LOOK: u32 = 64;
/// The shortest interval between two checks of the watchdog.
const WATCH_EVERY: Duration = Duration::from_millis(100);

/// A command, and the requests of the queue pair up to its last one, counted since the beginning.
#[derive(Clone, Copy, Debug)]
struct Posted {
    command: Pending,
    end: u64,
}

/// A queue's connection to a peer.
#[derive(Debug)]
pub(super) struct Peer {
    /// None once the connection has broken.
    pub(super) pair: Option<QueuePair>,
    /// First packet sequence number that this side sends.
    pub(super) psn: u32,
    /// None until the queue pair is connected.
    pub(super) remote: Option<Arc<RemoteMemory>>,
    flight: Flight<Posted>,
}

impl Peer {
    pub(super) fn new(pair: QueuePair, psn: u32, depth: usize) -> Self {
        Self { pair: Some(pair), psn, remote: None, flight: Flight::new(depth) }
    }

    pub(super) fn number(&self) -> u32 {
        self.pair.as_ref().map_or(0, QueuePair::number)
    }
}

/// The state of a queue. Nothing is allocated after `new`.
#[derive(Debug)]
pub(super) struct Connections {
    id: u32,
    depth: usize,
    /// The first signal of the queue.
    first_signal: u64,
    /// Commands that were accepted and have not ended.
    under_way: usize,
    /// Events of commands that have ended; together with the commands in flight never more than the depth (INV-5).
    events: VecDeque<Event>,
    pub(super) peers: Vec<Peer>,
    polls: u32,
    next_watch: Instant,
}

impl Connections {
    pub(super) fn new(id: u32, depth: usize, first_signal: u64, peers: Vec<Peer>) -> Self {
        Self {
            id,
            depth,
            first_signal,
            under_way: 0,
            events: VecDeque::with_capacity(depth),
            peers,
            polls: 0,
            next_watch: Instant::now() + WATCH_EVERY,
        }
    }

    /// The number of commands in flight.
    pub(super) fn under_way(&self) -> usize {
        self.under_way
    }

    /// Accepts as many commands as the depth allows, and rings once for each peer.
    pub(super) fn post(&mut self, shared: &Shared, commands: &[Command]) -> usize {
        let room = self.depth - self.under_way - self.events.len();
        let accepted = &commands[..commands.len().min(room)];
        accepted.iter().for_each(|command| self.take_on(shared, command));
        for command in accepted {
            // A ring without new requests does nothing.
            if let Some(pair) = &mut self.peers[command.peer as usize].pair {
                pair.ring();
            }
        }
        accepted.len()
    }

    fn take_on(&mut self, shared: &Shared, command: &Command) {
        let peer = &mut self.peers[command.peer as usize];
        let (Some(pair), Some(remote)) = (&mut peer.pair, &peer.remote) else {
            return self.refuse(shared, Fault::BrokenBefore, command);
        };
        let maker = RequestMaker {
            remote,
            regions: &shared.memory.regions,
            sink: sink(&shared.memory),
            first_signal: self.first_signal,
        };
        let Some((first, last)) = maker.requests(command) else {
            return self.refuse(shared, Fault::UnknownOp, command);
        };
        // The queue pair has room for two requests of each command of the queue. Each command's last request asks for a
        // completion, so every command ends without a later one (INV-5).
        let fits = first.is_none_or(|first| pair.post(&first, false)) && pair.post(&last, true);
        debug_assert!(fits, "a queue pair without room for its queue");
        peer.flight.push(Posted { command: Pending::of(command), end: pair.posted() });
        self.under_way += 1;
    }

    /// Ends a command that cannot be posted.
    #[cold]
    fn refuse(&mut self, shared: &Shared, fault: Fault, command: &Command) {
        self.end_failed(shared, fault, command.peer, Pending::of(command));
    }

    #[cold]
    fn end_failed(&mut self, shared: &Shared, fault: Fault, peer: u32, pending: Pending) {
        let queue = self.id;
        let place = FailedAt { queue, peer, command: Some(pending) };
        let status = shared.health.fail(fault, Some(place));
        let (kind, tag) = (abi::TY_EVENT_ERROR, pending.tag);
        self.events.push_back(Event { kind, queue, peer, status, tag });
    }

    /// Takes completions, fills in the oldest events and returns their number.
    pub(super) fn poll(&mut self, shared: &Shared, out: &mut [Event]) -> usize {
        self.take_completions(shared);
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(POLLS_PER_LOOK) {
            self.watch(shared, Instant::now());
        }
        let count = out.len().min(self.events.len());
        for (to, event) in out.iter_mut().zip(self.events.drain(..count)) {
            *to = event;
        }
        count
    }

    fn take_completions(&mut self, shared: &Shared) {
        for index in 0..self.peers.len() {
            let peer = &mut self.peers[index];
            if peer.flight.is_empty() {
                continue;
            }
            let Some(pair) = &mut peer.pair else { continue };
            match pair.done() {
                Ok(done) => self.end_done(index, done),
                Err(fault) => self.broken(shared, index, fault),
            }
        }
    }

    /// Ends the commands whose requests are done.
    fn end_done(&mut self, index: usize, done: u64) {
        let (queue, peer) = (self.id, index as u32);
        while let Some(posted) = self.peers[index].flight.pop_if(|it| it.end <= done) {
            self.under_way -= 1;
            if posted.command.notify {
                let (kind, status, tag) = (abi::TY_EVENT_DONE, abi::TY_OK, posted.command.tag);
                debug_assert!(self.events.len() < self.depth);
                self.events.push_back(Event { kind, queue, peer, status, tag });
            }
        }
    }

    /// Ends the commands of a connection with an error completion.
    #[cold]
    fn broken(&mut self, shared: &Shared, index: usize, fault: QueueFault) {
        let fault = QueueFault { peer: index as u32, queue: self.id, ..fault };
        // Requests before the one that failed are done, in order. A flushed request says nothing about earlier
        // ones: its completion has overwritten that of the first failure.
        if fault.syndrome != syndrome::FLUSHED
            && let Some(first) =
                self.peers[index].pair.as_ref().map(|pair| pair.absolute(fault.index))
        {
            self.end_done(index, first);
        }
        self.abandon(shared, index, Fault::Completion(fault));
    }

    /// Destroys the queue pair of a connection. After that the device does not access the memory of its commands any
    /// more (INV-4), so they end here.
    #[cold]
    fn abandon(&mut self, shared: &Shared, index: usize, first: Fault) {
        self.peers[index].pair = None;
        let mut fault = first;
        while let Some(posted) = self.peers[index].flight.pop() {
            self.under_way -= 1;
            self.end_failed(shared, fault, index as u32, posted.command);
            fault = Fault::BrokenBefore;
        }
    }

    /// Checks for asynchronous events of the device, and gives up stalled connections (INV-6). Completions must
    /// have been taken before: a connection with unread completions is not stalled.
    #[cold]
    fn watch(&mut self, shared: &Shared, now: Instant) {
        if now < self.next_watch {
            return;
        }
        self.next_watch = now + WATCH_EVERY;
        shared.take_events(now);
        for index in 0..self.peers.len() {
            if self.peers[index].flight.is_stalled(now, shared.health.deadline) {
                self.abandon(shared, index, Fault::Stalled);
            }
        }
    }
}
