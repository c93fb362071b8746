//! One lane: its connections, the commands under way on them, and its events.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event};
use tokenyard_sys_verbs::ffi::{SEND_SIGNALED, SendWr, Sge, WC_SUCCESS, Wc};
use tokenyard_sys_verbs::{CallError, Context, Cq};

use super::commands::{Request, Way};
use super::failure::{Failure, Fault, Place};
use super::flight::{Pending, of_request, request_id};
use super::memory::Memory;
use super::peer::{Chain, Peer, Stage};
use super::signals::{Signals, queue_fault};
use crate::device::REQUESTS;

/// Most commands that are made into lists before the doorbells ring.
const BATCH: usize = 64;
/// Completions that one call takes from the device at most, times [`ROUNDS`].
const TAKEN: usize = 32;
const ROUNDS: usize = 8;
/// The clock is looked at in every so many polls.
const POLLS_PER_LOOK: u32 = 64;
/// The watchdog looks at the connections at most this often.
const WATCH_EVERY: Duration = Duration::from_millis(100);

/// What the lanes of a transport share.
#[derive(Debug)]
pub(super) struct Shared {
    /// Field order is drop order: peers' access to memory ends, then the device.
    pub(super) signals: Signals,
    pub(super) memory: Memory,
    pub(super) context: Arc<Context>,
    /// How long a connection may stand still (INV-6).
    pub(super) deadline: Duration,
    /// The first failure; it stays (INV-7).
    pub(super) failure: OnceLock<Failure>,
}

impl Shared {
    #[cold]
    pub(super) fn fail(&self, fault: Fault, place: Option<Place>) -> i32 {
        // Only the first failure is kept.
        let _ = self.failure.set(Failure { fault, place });
        abi::TY_TRANSPORT
    }

    /// Counts the signals that have arrived; whether there was one.
    #[inline]
    pub(super) fn drive_signals(&self) -> bool {
        match self.signals.drive() {
            Ok(moved) => moved,
            Err(fault) => {
                self.fail(fault, None);
                false
            }
        }
    }
}

/// A lane. On cache lines of its own, so that lanes of several threads do not slow each other.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct Lane(Mutex<Queue>);

impl Lane {
    pub(super) fn new(queue: Queue) -> Self {
        Self(Mutex::new(queue))
    }

    /// The lane's queue, for the one thread that owns the lane now. Nothing if a second thread
    /// breaks the lane rule: hot calls never wait (INV-6).
    #[inline]
    pub(super) fn enter(&self) -> Option<MutexGuard<'_, Queue>> {
        match self.0.try_lock() {
            Ok(queue) => Some(queue),
            // After a panic the host makes no more hot calls.
            Err(TryLockError::Poisoned(queue)) => Some(queue.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(super) fn queue(&mut self) -> &mut Queue {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A lane from the inside. Nothing is allocated after `new`.
#[derive(Debug)]
pub(super) struct Queue {
    id: u32,
    depth: usize,
    /// Commands that were accepted and have not ended.
    under_way: usize,
    /// Of commands that have ended; with those under way never more than the depth (INV-5).
    events: VecDeque<Event>,
    pub(super) peers: Vec<Peer>,
    batch: Batch,
    cq: Arc<Cq>,
    completions: Box<[Wc; TAKEN]>,
    polls: u32,
    next_watch: Instant,
}

/// Work requests on their way to the device, in lists per peer.
#[derive(Debug)]
struct Batch {
    wrs: Box<[SendWr]>,
    sges: Box<[Sge]>,
    used: usize,
    touched: Vec<u32>,
}

// SAFETY: the pointers in `wrs` point into the same batch, or into commands during one call of
// `post`; they are made anew for every batch.
unsafe impl Send for Batch {}

impl Queue {
    pub(super) fn new(id: u32, depth: usize, peers: Vec<Peer>, cq: Arc<Cq>) -> Self {
        let room = BATCH * REQUESTS as usize;
        Self {
            id,
            depth,
            under_way: 0,
            events: VecDeque::with_capacity(depth),
            batch: Batch {
                wrs: vec![SendWr::BLANK; room].into(),
                sges: vec![Sge::default(); room].into(),
                used: 0,
                touched: Vec::with_capacity(BATCH),
            },
            peers,
            cq,
            completions: Box::new([Wc::default(); TAKEN]),
            polls: 0,
            next_watch: Instant::now() + WATCH_EVERY,
        }
    }

    /// Commands under way.
    pub(super) fn under_way(&self) -> usize {
        self.under_way
    }

    /// Accepts as many commands as the depth allows, and rings one doorbell per peer and batch.
    ///
    /// # Safety
    /// That of [`Transport::post`](tokenyard_core::transport::Transport::post).
    pub(super) unsafe fn post(&mut self, shared: &Shared, commands: &[Command]) -> usize {
        let room = self.depth - self.under_way - self.events.len();
        let accepted = &commands[..commands.len().min(room)];
        for batch in accepted.chunks(BATCH) {
            for command in batch {
                self.take_on(shared, command);
            }
            // SAFETY: the requests point into `batch`, which lives, and into windows, for which this
            // function's contract stands.
            unsafe { self.ring(shared) };
        }
        accepted.len()
    }

    fn take_on(&mut self, shared: &Shared, command: &Command) {
        let peer = &mut self.peers[command.peer as usize];
        let Stage::Connected(_, remote) = &peer.stage else {
            return self.refuse(shared, Fault::BrokenBefore, command);
        };
        let way = Way { remote, memory: &shared.memory, inline: peer.inline };
        let Some((first, last)) = way.requests(command) else {
            return self.refuse(shared, Fault::UnknownOp, command);
        };
        let pending = Pending::of(command);
        let id = request_id(command.peer, peer.flight.push(pending));
        self.under_way += 1;
        if let Some(first) = first {
            self.batch.add(command.peer, peer, id, first);
        }
        let last = self.batch.add(command.peer, peer, id, last);
        if pending.notify {
            last.send_flags |= SEND_SIGNALED;
        }
    }

    /// Ends a command that cannot be posted.
    #[cold]
    fn refuse(&mut self, shared: &Shared, fault: Fault, command: &Command) {
        let (lane, peer) = (self.id, command.peer);
        let place = Place { lane, peer, command: Some(Pending::of(command)) };
        let status = shared.fail(fault, Some(place));
        let (kind, tag) = (abi::TY_EVENT_ERROR, command.tag);
        self.events.push_back(Event { kind, lane, peer, status, tag });
    }

    /// Posts the lists of the batch.
    ///
    /// # Safety
    /// What the requests name is valid for the call, and windows' memory until their end.
    unsafe fn ring(&mut self, shared: &Shared) {
        for at in 0..self.batch.touched.len() {
            let index = self.batch.touched[at];
            let peer = &mut self.peers[index as usize];
            let Some(chain) = peer.chain.take() else { continue };
            // The last is always reported: so every command ends without another one (INV-5).
            self.batch.wrs[chain.last].send_flags |= SEND_SIGNALED;
            let first = &raw mut self.batch.wrs[chain.first];
            // SAFETY: the list was linked by `add` and ends with null; the rest is this function's
            // contract.
            if let Err((error, bad)) = unsafe { peer.post(first) } {
                let bad = if bad.is_null() { first } else { bad };
                // SAFETY: the device gives a request of the list, which lies in the batch.
                let (_, sequence) = of_request(unsafe { (*bad).wr_id });
                self.not_posted(shared, index, sequence, &error);
            }
        }
        self.batch.touched.clear();
        self.batch.used = 0;
    }

    /// Ends the commands of a peer from `sequence` on, which the device did not take, and breaks the
    /// connection, so that those before it end too: the one that would have reported them is gone.
    #[cold]
    fn not_posted(&mut self, shared: &Shared, index: u32, sequence: u64, error: &CallError) {
        let fault = Fault::Post { errno: error.source.raw_os_error().unwrap_or(0) };
        let (lane, peer) = (self.id, &mut self.peers[index as usize]);
        while let Some(pending) = peer.flight.take_back(sequence) {
            let place = Place { lane, peer: index, command: Some(pending) };
            let status = shared.fail(fault, Some(place));
            let (kind, tag) = (abi::TY_EVENT_ERROR, pending.tag);
            self.events.push_back(Event { kind, lane, peer: index, status, tag });
            self.under_way -= 1;
        }
        peer.give_up();
    }

    /// Takes completions, gives the oldest events and returns how many.
    pub(super) fn poll(&mut self, shared: &Shared, out: &mut [Event]) -> Result<usize, i32> {
        self.drive(shared)?;
        shared.drive_signals();
        let count = out.len().min(self.events.len());
        for (to, event) in out.iter_mut().zip(self.events.drain(..count)) {
            *to = event;
        }
        Ok(count)
    }

    /// Takes completions from the device, and looks after the connections now and then.
    pub(super) fn drive(&mut self, shared: &Shared) -> Result<(), i32> {
        for _ in 0..ROUNDS {
            let found = self.cq.poll(&mut self.completions[..]);
            let found = found.map_err(|e| shared.fail(queue_fault(&e), None))?;
            for at in 0..found {
                let completion = self.completions[at];
                self.complete(shared, &completion);
            }
            if found < TAKEN {
                break;
            }
        }
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(POLLS_PER_LOOK) {
            self.watch(shared, Instant::now());
        }
        Ok(())
    }

    /// Ends the commands that a completion stands for.
    fn complete(&mut self, shared: &Shared, completion: &Wc) {
        let (index, sequence) = of_request(completion.wr_id);
        let Some(peer) = self.peers.get_mut(index) else {
            debug_assert!(false, "a completion of peer {index}");
            return;
        };
        let lane = self.id;
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
                    let place = Place { lane, peer: index as u32, command: Some(pending) };
                    (abi::TY_EVENT_ERROR, shared.fail(fault, Some(place)))
                }
                _ if pending.notify => (abi::TY_EVENT_DONE, abi::TY_OK),
                _ => continue,
            };
            let event = Event { kind, lane, peer: index as u32, status, tag: pending.tag };
            debug_assert!(self.events.len() < self.depth);
            self.events.push_back(event);
        }
        if failed && matches!(peer.stage, Stage::Connected(..)) {
            peer.give_up();
        }
    }

    /// Looks for asynchronous events of the device, and gives connections up that stand still: a
    /// peer that has run out of receives is else waited for without end (INV-6).
    #[cold]
    fn watch(&mut self, shared: &Shared, now: Instant) {
        if now < self.next_watch {
            return;
        }
        self.next_watch = now + WATCH_EVERY;
        while let Some(event) = shared.context.next_event() {
            if event.is_fatal() {
                shared.fail(Fault::Event(event.event), None);
            } else {
                let words = shared.context.library().event_words(event.event);
                tracing::warn!("{} reports \"{words}\"", shared.context.name());
            }
        }
        for (peer, index) in self.peers.iter_mut().zip(0..) {
            let connected = matches!(peer.stage, Stage::Connected(..));
            if connected && peer.flight.is_stalled(now, shared.deadline) {
                let place = Place { lane: self.id, peer: index, command: None };
                shared.fail(Fault::Stalled, Some(place));
                peer.give_up();
            }
        }
    }
}

impl Batch {
    /// Adds a request to the list of a peer, and gives it back for its flags.
    fn add(&mut self, index: u32, peer: &mut Peer, id: u64, request: Request) -> &mut SendWr {
        let at = self.used;
        self.used += 1;
        let mut wr = SendWr { wr_id: id, ..request.wr };
        if let Some(sge) = request.sge {
            self.sges[at] = sge;
            wr.sg_list = &raw mut self.sges[at];
            wr.num_sge = 1;
        }
        self.wrs[at] = wr;
        let chain = match peer.chain {
            None => {
                self.touched.push(index);
                Chain { first: at, last: at }
            }
            Some(chain) => {
                self.wrs[chain.last].next = &raw mut self.wrs[at];
                Chain { last: at, ..chain }
            }
        };
        peer.chain = Some(chain);
        &mut self.wrs[at]
    }
}
