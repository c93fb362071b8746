//! One queue of the host: its connections, and the commands in flight on them.

use std::sync::Arc;
use std::time::Instant;

use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event};
use tokenyard_sys_mlx5::cqe::syndrome;
use tokenyard_verbs::connection::{FailedAt, Flight, Ledger, Pending, Watchdog};

use super::commands::{RemoteMemory, RequestMaker};
use super::fault::Fault;
use super::memory::sink;
use super::shared::Shared;
use crate::fault::QueueFault;
use crate::queue_pair::QueuePair;

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
    pub(super) ledger: Ledger,
    /// The first signal of the queue.
    first_signal: u64,
    pub(super) peers: Vec<Peer>,
    watchdog: Watchdog,
}

impl Connections {
    pub(super) fn new(id: u32, depth: usize, first_signal: u64, peers: Vec<Peer>) -> Self {
        let (ledger, watchdog) = (Ledger::new(id, depth), Watchdog::armed());
        Self { ledger, first_signal, peers, watchdog }
    }

    /// Accepts as many commands as the depth allows, and rings once for each peer.
    pub(super) fn post(&mut self, shared: &Shared, commands: &[Command]) -> usize {
        let accepted = self.ledger.accepted(commands);
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
        self.ledger.start();
    }

    /// Ends a command that cannot be posted.
    #[cold]
    fn refuse(&mut self, shared: &Shared, fault: Fault, command: &Command) {
        let pending = Pending::of(command);
        let status = self.failed(shared, fault, command.peer, pending);
        self.ledger.refuse(command.peer, pending, status);
    }

    fn failed(&self, shared: &Shared, fault: Fault, peer: u32, pending: Pending) -> i32 {
        let place = FailedAt { queue: self.ledger.queue(), peer, command: Some(pending) };
        shared.health.fail(fault, Some(place))
    }

    /// Takes completions, fills in the oldest events and returns their number.
    pub(super) fn poll(&mut self, shared: &Shared, out: &mut [Event]) -> usize {
        self.take_completions(shared);
        if self.watchdog.looks() {
            self.watch(shared, Instant::now());
        }
        self.ledger.take(out)
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
        while let Some(posted) = self.peers[index].flight.pop_if(|it| it.end <= done) {
            self.ledger.end(index as u32, posted.command, abi::TY_OK);
        }
    }

    /// Ends the commands of a connection with an error completion.
    #[cold]
    fn broken(&mut self, shared: &Shared, index: usize, fault: QueueFault) {
        let fault = QueueFault { peer: index as u32, queue: self.ledger.queue(), ..fault };
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
            let status = self.failed(shared, fault, index as u32, posted.command);
            self.ledger.end(index as u32, posted.command, status);
            fault = Fault::BrokenBefore;
        }
    }

    /// Checks for asynchronous events of the device, and gives up stalled connections (INV-6). Completions must
    /// have been taken before: a connection with unread completions is not stalled.
    #[cold]
    fn watch(&mut self, shared: &Shared, now: Instant) {
        if !self.watchdog.is_due(now) {
            return;
        }
        shared.take_events(now);
        for index in 0..self.peers.len() {
            if self.peers[index].flight.is_stalled(now, shared.health.deadline) {
                self.abandon(shared, index, Fault::Stalled);
            }
        }
    }
}
