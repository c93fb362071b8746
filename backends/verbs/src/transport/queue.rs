//! One queue: its connections, and the commands in flight on them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event};
use tokenyard_sys_verbs::ffi::{WC_SUCCESS, Wc};
use tokenyard_sys_verbs::{CallError, Cq};

use super::batch::Batch;
use super::commands::RequestMaker;
use super::failure::FailedAt;
use super::fault::Fault;
use super::flight::{Pending, of_request, request_id};
use super::ledger::{Ledger, Watchdog};
use super::peer::{Peer, Stage};
use super::shared::Shared;
use super::signals::queue_fault;
use crate::port::REQUESTS;

/// Most commands in the lists of one batch, before the doorbells ring.
const BATCH: usize = 64;
/// Completions that one call takes from the device at most, times [`ROUNDS`].
const TAKEN: usize = 32;
const ROUNDS: usize = 8;
/// The longest time that a device may take to return posted commands of a broken connection.
const LONGEST_FLUSH: Duration = Duration::from_secs(1);

/// The state of a queue. Nothing is allocated after `new`.
#[derive(Debug)]
pub(super) struct QueuePairs {
    pub(super) ledger: Ledger,
    pub(super) peers: Vec<Peer>,
    batch: Batch,
    /// Peers for which the batch has lists.
    touched: Vec<u32>,
    cq: Arc<Cq>,
    completions: Box<[Wc; TAKEN]>,
    watchdog: Watchdog,
}

impl QueuePairs {
    pub(super) fn new(id: u32, depth: usize, peers: Vec<Peer>, cq: Arc<Cq>) -> Self {
        Self {
            ledger: Ledger::new(id, depth),
            batch: Batch::new(BATCH * REQUESTS as usize),
            touched: Vec::with_capacity(BATCH),
            peers,
            cq,
            completions: Box::new([Wc::default(); TAKEN]),
            watchdog: Watchdog::armed(),
        }
    }

    /// Accepts as many commands as the depth allows, and rings one doorbell per peer and batch.
    ///
    /// # Safety
    /// As for [`Transport::post`](tokenyard_core::transport::Transport::post).
    pub(super) unsafe fn post(&mut self, shared: &Shared, commands: &[Command]) -> usize {
        let accepted = self.ledger.accepted(commands);
        for batch in accepted.chunks(BATCH) {
            for command in batch {
                self.take_on(shared, command);
            }
            // SAFETY: the requests point into `batch`, which lives, and into windows, which this
            // function's contract covers.
            unsafe { self.ring(shared) };
        }
        accepted.len()
    }

    fn take_on(&mut self, shared: &Shared, command: &Command) {
        let peer = &mut self.peers[command.peer as usize];
        let Stage::Connected(_, remote) = &peer.stage else {
            return self.refuse(shared, Fault::BrokenBefore, command);
        };
        let maker = RequestMaker { remote, memory: &shared.memory, inline: peer.inline };
        let Some((first, last)) = maker.requests(command) else {
            return self.refuse(shared, Fault::UnknownOp, command);
        };
        let pending = Pending::of(command);
        let id = request_id(command.peer, peer.flight.push(pending));
        self.ledger.start();
        if peer.chain.is_none() {
            self.touched.push(command.peer);
        }
        let chain = first.map_or(peer.chain, |it| Some(self.batch.add(peer.chain, id, it)));
        let chain = self.batch.add(chain, id, last);
        if pending.notify {
            self.batch.report(chain);
        }
        peer.chain = Some(chain);
    }

    /// Ends a command that cannot be posted.
    #[cold]
    fn refuse(&mut self, shared: &Shared, fault: Fault, command: &Command) {
        let pending = Pending::of(command);
        let status = shared.health.fail(fault, Some(self.place(command.peer, Some(pending))));
        self.ledger.refuse(command.peer, pending, status);
    }

    fn place(&self, peer: u32, command: Option<Pending>) -> FailedAt {
        FailedAt { queue: self.ledger.queue(), peer, command }
    }

    /// Posts the lists of the batch.
    ///
    /// # Safety
    /// The memory that the requests name is valid for the call, and the memory of windows until the
    /// requests end.
    unsafe fn ring(&mut self, shared: &Shared) {
        for at in 0..self.touched.len() {
            let index = self.touched[at];
            let peer = &mut self.peers[index as usize];
            let Some(chain) = peer.chain.take() else { continue };
            // The last request always has a completion, so every command ends without a later one
            // (INV-5).
            self.batch.report(chain);
            let first = self.batch.list(chain);
            // SAFETY: the batch returns a list that ends with null; the rest is this function's
            // contract.
            if let Err((error, bad)) = unsafe { peer.post(first) } {
                let bad = if bad.is_null() { first } else { bad };
                // SAFETY: the device returns a request of the list, which lies in the batch.
                let (_, sequence) = of_request(unsafe { (*bad).wr_id });
                self.not_posted(shared, index, sequence, &error);
            }
        }
        self.touched.clear();
        self.batch.clear();
    }

    /// Ends all commands of a peer after the device refused command `sequence`: the refused list
    /// contained the request whose completion would have ended the commands before it.
    #[cold]
    fn not_posted(&mut self, shared: &Shared, index: u32, sequence: u64, error: &CallError) {
        let fault = Fault::Post { errno: error.source.raw_os_error().unwrap_or(0) };
        let command = self.peers[index as usize].flight.get(sequence);
        shared.health.fail(fault, Some(self.place(index, command)));
        // Commands with completions so far end with their own status.
        let _ = self.take_completions(shared);
        self.abandon(shared, index);
    }

    /// Breaks a connection: its commands end as the device returns them.
    #[cold]
    fn give_up(&mut self, shared: &Shared, index: u32) {
        if !self.peers[index as usize].give_up() {
            self.abandon(shared, index);
        }
    }

    /// Destroys the queue pair of a connection that does not end its commands. After that the
    /// device does not access their memory any more (INV-4), so they end here.
    #[cold]
    fn abandon(&mut self, shared: &Shared, index: u32) {
        self.peers[index as usize].stage = Stage::Gone;
        while let Some(pending) = self.peers[index as usize].flight.pop() {
            let place = self.place(index, Some(pending));
            let status = shared.health.fail(Fault::BrokenBefore, Some(place));
            self.ledger.end(index, pending, status);
        }
    }

    /// Takes completions, fills in the oldest events and returns their number.
    pub(super) fn poll(&mut self, shared: &Shared, out: &mut [Event]) -> Result<usize, i32> {
        self.drive(shared)?;
        shared.drive_signals();
        Ok(self.ledger.take(out))
    }

    /// Takes completions from the device, and checks the connections at intervals.
    pub(super) fn drive(&mut self, shared: &Shared) -> Result<(), i32> {
        let all = self.take_completions(shared)?;
        if self.watchdog.looks() && all {
            self.watch(shared, Instant::now());
        }
        Ok(())
    }

    /// Does the work of [`QueuePairs::drive`] while no thread polls.
    #[cold]
    pub(super) fn look_after(&mut self, shared: &Shared, now: Instant) {
        // A failure stays in `health`. If completions remain, a command has ended.
        if self.take_completions(shared) == Ok(true) {
            self.watch(shared, now);
        }
    }

    /// Takes completions from the device; returns whether it took all.
    fn take_completions(&mut self, shared: &Shared) -> Result<bool, i32> {
        for _ in 0..ROUNDS {
            let found = self.cq.poll(&mut self.completions[..]);
            let found = found.map_err(|e| shared.health.fail(queue_fault(&e), None))?;
            for at in 0..found {
                let completion = self.completions[at];
                self.complete(shared, &completion);
            }
            if found < TAKEN {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Ends the commands that a completion covers.
    fn complete(&mut self, shared: &Shared, completion: &Wc) {
        let (index, sequence) = of_request(completion.wr_id);
        let Some(peer) = self.peers.get_mut(index) else {
            debug_assert!(false, "a completion of peer {index}");
            return;
        };
        let failed = completion.status != WC_SUCCESS;
        let at = index as u32;
        for left in (0..peer.flight.ended_by(sequence)).rev() {
            let Some(pending) = peer.flight.pop() else { break };
            let status = match left {
                0 if failed => {
                    let Wc { status, vendor_err: vendor, .. } = *completion;
                    let queue = self.ledger.queue();
                    let place = FailedAt { queue, peer: at, command: Some(pending) };
                    shared.health.fail(Fault::Completion { status, vendor }, Some(place))
                }
                _ => abi::TY_OK,
            };
            self.ledger.end(at, pending, status);
        }
        if failed && matches!(peer.stage, Stage::Connected(..)) {
            self.give_up(shared, at);
        }
    }

    /// Checks for asynchronous events of the device, and gives up stalled connections: otherwise
    /// the device would wait without end for a peer without receives (INV-6). Completions must have
    /// been taken before: a connection with unread completions is not stalled.
    #[cold]
    fn watch(&mut self, shared: &Shared, now: Instant) {
        if !self.watchdog.is_due(now) {
            return;
        }
        shared.take_events(now);
        shared.health.look_at_port(now);
        for index in 0..self.peers.len() {
            let peer = &mut self.peers[index];
            match peer.stage {
                Stage::Connected(..) if peer.flight.is_stalled(now, shared.health.deadline) => {
                    let command = peer.flight.oldest();
                    let place = self.place(index as u32, command);
                    shared.health.fail(Fault::Stalled, Some(place));
                    self.give_up(shared, index as u32);
                }
                Stage::Broken { .. } if peer.flight.is_stalled(now, LONGEST_FLUSH) => {
                    self.abandon(shared, index as u32);
                }
                _ => {}
            }
        }
    }
}
