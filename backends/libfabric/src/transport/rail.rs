//! One rail: an endpoint on one NIC, used by one thread at a time.

mod errors;
mod mailboxes;
mod outbound;
mod patience;
mod read_back;
mod words;

use std::mem::MaybeUninit;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use tokenyard_core::abi;
use tokenyard_sys_fabric::calls;
use tokenyard_sys_fabric::consts::*;
use tokenyard_sys_fabric::types::*;

use super::datum::Datum;
use super::objects::Objects;
use super::shared::{Failure, Shared};
pub(super) use outbound::{Attempt, Outbound, Transfer};
pub(super) use read_back::Mirror;
use read_back::ReadBack;

/// Completions that one read of the queue takes.
const LOOK: usize = 16;
/// Reads of one drive: no thread drives for ever while peers continue to send (INV-6).
const LOOKS: usize = 16;
/// How often a thread tries again to lock a rail that another thread is using.
const SPINS: u32 = 200;

const EAGAIN: isize = -(FI_EAGAIN as isize);
const EAVAIL: isize = -(FI_EAVAIL as isize);

/// One rail, shared by all queues.
#[derive(Debug)]
pub(super) struct Rail(Mutex<State>);

/// The settings of a rail, besides its objects.
#[derive(Clone, Copy, Debug)]
pub(super) struct RailOptions {
    pub(super) peers: u32,
    /// How long the provider may refuse commands for a peer before the rail gives the peer up.
    pub(super) patience: Duration,
    /// A place in the staging region of the objects; it outlives the rail.
    pub(super) spare: *mut u8,
}

/// The state that belongs to the thread that has locked the rail.
#[derive(Debug)]
pub(super) struct State {
    index: usize,
    interface: String,
    pub(super) outbound: Outbound,
    read_back: Option<ReadBack>,
    /// Credits that could not be sent yet.
    owed: u32,
}

impl Rail {
    pub(super) fn new(index: usize, objects: Objects, options: RailOptions) -> Self {
        let interface = format!("{} {}", objects.info.provider(), objects.info.domain());
        Self(Mutex::new(State {
            index,
            interface,
            outbound: Outbound::new(objects, options),
            read_back: None,
            owed: 0,
        }))
    }

    /// The rail, unless another thread is using it.
    pub(super) fn try_enter(&self) -> Option<MutexGuard<'_, State>> {
        match self.0.try_lock() {
            Ok(state) => Some(state),
            // The call that panicked reports it; the objects are libfabric's.
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The rail, if another thread that is using it unlocks it soon.
    #[inline]
    pub(super) fn enter(&self) -> Option<MutexGuard<'_, State>> {
        for _ in 0..SPINS {
            if let Some(state) = self.try_enter() {
                return Some(state);
            }
            std::hint::spin_loop();
        }
        None
    }

    /// Ends the access of peers to this rank and of the NIC to its sources (INV-8). Commands that
    /// are posted afterwards fail.
    pub(super) fn close(&self) {
        let mut state = self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        state.outbound.objects.close();
    }

    /// The state, for calls that own the whole transport.
    pub(super) fn get_mut(&mut self) -> &mut State {
        self.0.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl State {
    pub(super) fn index(&self) -> usize {
        self.index
    }

    pub(super) fn interface(&self) -> &str {
        &self.interface
    }

    /// Reads completions, and sends the credits that are owed. Returns whether there were any
    /// completions.
    pub(super) fn drive(&mut self, shared: &Shared) -> bool {
        let mut moved = false;
        let mut entries = [const { MaybeUninit::<fi_cq_data_entry>::uninit() }; LOOK];
        for _ in 0..LOOKS {
            // SAFETY: the queue is open, has this format, and the buffer has the stated length.
            let count = unsafe {
                calls::cq_read(self.outbound.objects.cq.raw(), entries.as_mut_ptr().cast(), LOOK)
            };
            if count <= 0 {
                if count != EAGAIN && count != 0 {
                    self.complain(shared, count);
                }
                break;
            }
            moved = true;
            for entry in &entries[..count as usize] {
                // SAFETY: libfabric filled the first `count` entries.
                self.completed(shared, unsafe { entry.assume_init_ref() });
            }
            if (count as usize) < LOOK {
                break;
            }
        }
        if self.owed > 0 {
            self.pay(shared);
        }
        if self.outbound.holds_back() {
            self.outbound.ring();
        }
        if self.read_back.is_some() {
            moved |= self.read_if_due(shared);
        }
        moved
    }

    /// Reads the error entries after a failed read of the queue (INV-7).
    #[cold]
    fn complain(&mut self, shared: &Shared, status: isize) {
        let failure = |peer, message, interface: &String| Failure {
            peer,
            message,
            interface: interface.clone(),
        };
        if status != EAVAIL {
            let message = errors::unreadable(&self.outbound.objects, status);
            return shared.fail(failure(None, message, &self.interface));
        }
        while let Some(entry) = errors::next(&self.outbound.objects) {
            let slot = shared.slots.find(entry.op_context);
            self.outbound.fence_came(entry.op_context);
            let marked = || self.outbound.marked(entry.op_context);
            let peer = slot.map(|slot| shared.slots.peer(slot)).or_else(marked);
            let message = errors::in_words(&self.outbound.objects, &entry);
            shared.fail(failure(peer, message, &self.interface));
            if let Some(slot) = slot {
                shared.slots.complete(slot, abi::TY_TRANSPORT);
            }
        }
    }

    #[inline]
    fn completed(&mut self, shared: &Shared, entry: &fi_cq_data_entry) {
        if entry.flags & FI_REMOTE_CQ_DATA != 0 {
            // INV-1: fi_cq(3), "Target completion semantics": a completion at the target means that
            // the data is in its buffer, whatever the writer asked for.
            match Datum::decode(entry.data) {
                Some(Datum::Signal { id, add }) => self.signal_came(shared, id, add),
                Some(datum) => self.own_datum(shared, datum),
                None => errors::distrust(&self.interface, shared, None, "data that no rank writes"),
            }
        } else if let Some(slot) = shared.slots.find(entry.op_context) {
            shared.slots.complete(slot, abi::TY_OK);
        } else if !self.outbound.fence_came(entry.op_context) {
            self.read_came(shared, entry.op_context);
        }
    }

    #[inline]
    fn signal_came(&mut self, shared: &Shared, id: u32, add: u32) {
        match &mut self.read_back {
            Some(read_back) => read_back.hold(id, add),
            None if shared.raise(id, add) => {}
            None => errors::distrust(&self.interface, shared, None, "a signal that is not there"),
        }
    }

    fn own_datum(&mut self, shared: &Shared, datum: Datum) {
        let (peer, result) = match datum {
            Datum::Value(place) => (place.peer, self.value_came(shared, place)),
            Datum::Credit(place) => (place.peer, self.outbound.credit_came(place)),
            Datum::Hello(peer) => (peer, self.outbound.word_came(peer, |peer| peer.greeted = true)),
            Datum::Bye(peer) => (peer, self.outbound.word_came(peer, |peer| peer.left = true)),
            Datum::Signal { id, add } => return self.signal_came(shared, id, add),
        };
        if let Err(what) = result {
            errors::distrust(&self.interface, shared, Some(peer), what);
        }
    }
}
