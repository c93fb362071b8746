//! One queue: its connections, the commands in flight on them, and its events.

use std::collections::VecDeque;
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
use super::peer::{Peer, Stage};
use super::shared::Shared;
use super::signals::queue_fault;
use crate::device::REQUESTS;

/// Most commands in the lists of one batch, before the doorbells ring.
const BATCH: usize = 64;
/// Completions that one call takes from the device at most, times [`ROUNDS`].
const TAKEN: usize = 32;
const ROUNDS: usize = 8;
/// The clock is read once in this many polls.
const POLLS_PER_LOOK: u32 = 64;
/// The shortest interval between two checks of the watchdog.
pub(super) const WATCH_EVERY: Duration = Duration::from_millis(100);
/// The longest time that a device may take to return posted commands of a broken connection.
pub(super) const LONGEST_FLUSH: Duration = Duration::from_secs(1);

/// The state of a queue. Nothing is allocated after `new`.
#[derive(Debug)]
pub(super) struct QueuePairs {
    id: u32,
    depth: usize,
    /// Commands that were accepted and have not ended.
    under_way: usize,
    /// Events of commands that have ended; together with the commands in flight never more than the
    /// depth (INV-5).
    events: VecDeque<Event>,
    pub(super) peers: Vec<Peer>,
    batch: Batch,
    /// Peers for which the batch has lists.
    touched: Vec<u32>,
    cq: Arc<Cq>,
    completions: Box<[Wc; TAKEN]>,
    polls: u32,
    next_watch: Instant,
}

impl QueuePairs {
    pub(super) fn new(id: u32, depth: usize, peers: Vec<Peer>, cq: Arc<Cq>) -> Self {
        Self {
            id,
            depth,
            under_way: 0,
            events: VecDeque::with_capacity(depth),
            batch: Batch::new(BATCH * REQUESTS as usize),
            touched: Vec::with_capacity(BATCH),
            peers,
            cq,
            completions: Box::new([Wc::default(); TAKEN]),
            polls: 0,
            next_watch: Instant::now() + WATCH_EVERY,
        }
    }

    /// The number of commands in flight.
    pub(super) fn under_way(&self) -> usize {
        self.under_way
    }

    /// Accepts as many commands as the depth allows, and rings one doorbell per peer and batch.
    ///
    /// # Safety
    /// As for [`Transport::post`](tokenyard_core::transport::Transport::post).
    pub(super) unsafe fn post(&mut self, shared: &Shared, commands: &[Command]) -> usize {
        let room = self.depth - self.under_way - self.events.len();
        let accepted = &commands[..commands.len().min(room)];
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
        self.under_way += 1;
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
        let (queue, peer) = (self.id, command.peer);
        let place = FailedAt { queue, peer, command: Some(Pending::of(command)) };
        let status = shared.health.fail(fault, Some(place));
        let (kind, tag) = (abi::TY_EVENT_ERROR, command.tag);
        self.events.push_back(Event { kind, queue, peer, status, tag });
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
        shared.health.fail(fault, Some(FailedAt { queue: self.id, peer: index, command }));
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
        let (queue, peer) = (self.id, &mut self.peers[index as usize]);
        peer.stage = Stage::Gone;
        while let Some(pending) = peer.flight.pop() {
            let place = FailedAt { queue, peer: index, command: Some(pending) };
            let status = shared.health.fail(Fault::BrokenBefore, Some(place));
            let (kind, tag) = (abi::TY_EVENT_ERROR, pending.tag);
            self.events.push_back(Event { kind, queue, peer: index, status, tag });
            self.under_way -= 1;
        }
    }

    /// Takes completions, fills in the oldest events and returns their number.
    pub(super) fn poll(&mut self, shared: &Shared, out: &mut [Event]) -> Result<usize, i32> {
        self.drive(shared)?;
        shared.drive_signals();
        let count = out.len().min(self.events.len());
        for (to, event) in out.iter_mut().zip(self.events.drain(..count)) {
            *to = event;
        }
        Ok(count)
    }

    /// Takes completions from the device, and checks the connections at intervals.
    pub(super) fn drive(&mut self, shared: &Shared) -> Result<(), i32> {
        let all = self.take_completions(shared)?;
        self.polls = self.polls.wrapping_add(1);
        if all && self.polls.is_multiple_of(POLLS_PER_LOOK) {
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
        let queue = self.id;
        let failed = completion.status != WC_SUCCESS;
        let ended = peer.flight.ended_by(sequence);
        self.under_way -= ended;
        for left in (0..ended).rev() {
            let Some(pending) = peer.flight.pop() else { break };
            let (kind, status) = match left {
                0 if failed => {
                    let fault = Fault::Completion {
                        status: completion.status,
                        vendor: completion.vendor_err,
                    };
                    let place = FailedAt { queue, peer: index as u32, command: Some(pending) };
                    (abi::TY_EVENT_ERROR, shared.health.fail(fault, Some(place)))
                }
                _ if pending.notify => (abi::TY_EVENT_DONE, abi::TY_OK),
                _ => continue,
            };
            let event = Event { kind, queue, peer: index as u32, status, tag: pending.tag };
            debug_assert!(self.events.len() < self.depth);
            self.events.push_back(event);
        }
        if failed && matches!(peer.stage, Stage::Connected(..)) {
            self.give_up(shared, index as u32);
        }
    }

    /// Checks for asynchronous events of the device, and gives up stalled connections: otherwise
    /// the device would wait without end for a peer without receives (INV-6). Completions must have
    /// been taken before: a connection with unread completions is not stalled.
    #[cold]
    fn watch(&mut self, shared: &Shared, now: Instant) {
        if now < self.next_watch {
            return;
        }
        self.next_watch = now + WATCH_EVERY;
        shared.take_events(now);
        shared.health.look_at_port(now);
        for index in 0..self.peers.len() {
            let peer = &mut self.peers[index];
            match peer.stage {
                Stage::Connected(..) if peer.flight.is_stalled(now, shared.health.deadline) => {
                    let command = peer.flight.oldest();
                    let place = FailedAt { queue: self.id, peer: index as u32, command };
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
