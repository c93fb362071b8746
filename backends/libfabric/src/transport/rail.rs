//! One rail: an endpoint on one NIC, used by one thread at a time.

mod errors;
mod mailboxes;
mod patience;
mod read_back;
mod words;

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use tokenyard_core::{Result, abi};
use tokenyard_sys_fabric::calls;
use tokenyard_sys_fabric::consts::*;
use tokenyard_sys_fabric::types::*;

use super::datum::{Datum, VALUES_PER_PEER};
use super::objects::{Objects, failed};
use super::shared::{Failure, Shared};
use super::wire::{Extent, RailEndpoint};
use patience::Refusals;
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
    pub(super) objects: Objects,
    interface: String,
    pub(super) peers: Box<[Peer]>,
    /// How long the provider may refuse commands for a peer before the rail gives the peer up.
    pub(super) patience: Duration,
    /// Index of the peers' mailboxes among their windows.
    mailboxes: usize,
    /// Whether the provider is a layer over connections, each with its own doorbell.
    layered: bool,
    /// Registered memory that is never read, for writes of no bytes.
    spare: *mut u8,
    read_back: Option<ReadBack>,
    /// Credits that could not be sent yet.
    owed: u32,
    /// A batch ended early, and the provider waits for its end. The peer matters only under a layer
    /// over connections.
    doorbell: Option<u32>,
    /// The context of injected writes to each peer, where operations may share a context; else
    /// empty.
    markers: Box<[UnsafeCell<fi_context2>]>,
    fence: Box<UnsafeCell<fi_context2>>,
    fence_is_out: bool,
}

// SAFETY: the contexts hold libfabric's own pointers, which belong to no thread; `spare` is an
// address.
unsafe impl Send for State {}

/// A peer, as this rail reaches it.
#[derive(Debug, Default)]
pub(super) struct Peer {
    address: fi_addr_t,
    /// The addresses of its windows, then of its mailboxes of this rail; empty until it is
    /// connected.
    windows: Box<[Remote]>,
    /// Its greeting has come: it can reach this rank.
    pub(super) greeted: bool,
    /// A bit for each of its mailboxes that this rank may fill.
    free_values: u32,
    /// A bit for each local mailbox that was emptied and whose writer has not been notified.
    owed: u32,
    /// A write without a completion was sent.
    pub(super) unflushed: bool,
    /// It has sent its farewell.
    pub(super) left: bool,
    /// Refusals of the provider to send to it.
    refused: Refusals,
    /// Refusals because it returns no mailbox.
    starved: Refusals,
    /// It was refused for too long: no further attempt is made (INV-6).
    given_up: bool,
}

#[derive(Clone, Copy, Debug)]
struct Remote {
    base: u64,
    key: u64,
}

/// A write or a read, in the provider's terms.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub(super) peer: u32,
    pub(super) local: *mut u8,
    pub(super) descriptor: *mut c_void,
    pub(super) bytes: usize,
    /// Index of the peer's window; the mailboxes are the last.
    pub(super) window: usize,
    pub(super) offset: u64,
    pub(super) datum: Option<Datum>,
}

/// The outcome of an attempt to post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    Posted,
    /// Try again after driving the rail.
    Full,
    /// A positive error number.
    Failed(i32),
    /// The peer or its window is not known, or the rail is closed.
    Unknown,
    /// The peer was refused for too long.
    GivenUp,
}

impl Attempt {
    #[inline]
    fn of(status: isize) -> Self {
        match status {
            0 => Self::Posted,
            EAGAIN => Self::Full,
            error => Self::Failed(-error as i32),
        }
    }
}

impl Rail {
    pub(super) fn new(index: usize, objects: Objects, options: RailOptions) -> Self {
        let RailOptions { peers, patience, spare } = options;
        let context = || UnsafeCell::new(fi_context2 { internal: [null_mut(); 8] });
        let markers = if objects.info.leaves_contexts() { peers } else { 0 };
        let interface = format!("{} {}", objects.info.provider(), objects.info.domain());
        let layered = objects.info.is_layered();
        Self(Mutex::new(State {
            index,
            objects,
            interface,
            peers: (0..peers).map(|_| Peer::default()).collect(),
            patience,
            mailboxes: 0,
            layered,
            spare,
            read_back: None,
            owed: 0,
            doorbell: None,
            markers: (0..markers).map(|_| context()).collect(),
            fence: Box::new(context()),
            fence_is_out: false,
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
        state.objects.close();
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

    /// Whether the peer is connected.
    pub(super) fn knows(&self, peer: u32) -> bool {
        self.peers.get(peer as usize).is_some_and(|peer| !peer.windows.is_empty())
    }

    pub(super) fn interface(&self) -> &str {
        &self.interface
    }

    /// Stores the address and keys of a peer. `extents` are those of its windows.
    pub(super) fn learn(
        &mut self,
        peer: u32,
        extents: &[Extent],
        endpoint: &RailEndpoint,
    ) -> Result<()> {
        let mut address = FI_ADDR_NOTAVAIL;
        self.objects.check_address(&endpoint.address)?;
        // SAFETY: the vector is open; the address has the length that this provider reads.
        let taken = unsafe {
            let bytes = endpoint.address.as_ptr().cast();
            calls::av_insert(self.objects.av.raw(), bytes, &mut address)
        };
        if taken != 1 {
            let library = self.objects.info.library();
            return Err(failed(library, "fi_av_insert", -taken)
                .with_context("address", self.objects.words(&endpoint.address)));
        }
        let remotes = extents.iter().zip(&endpoint.keys);
        self.mailboxes = extents.len() - 1;
        self.peers[peer as usize] = Peer {
            address,
            windows: remotes.map(|(extent, key)| Remote { base: extent.base, key: *key }).collect(),
            free_values: (1 << VALUES_PER_PEER) - 1,
            // The greeting may have come before this call.
            greeted: self.peers[peer as usize].greeted,
            ..Peer::default()
        };
        Ok(())
    }

    /// Writes a few bytes; they are copied, and a completion comes only if the write fails. The
    /// completion then names the peer.
    #[inline]
    pub(super) fn inject(&mut self, transfer: &Transfer) -> Attempt {
        let mut flags = FI_INJECT;
        if transfer.datum.is_some() {
            flags |= FI_REMOTE_CQ_DATA;
        }
        let marker = self.markers.get(transfer.peer as usize).map_or(null_mut(), UnsafeCell::get);
        let attempt = self.message(transfer, marker.cast(), |ep, message| {
            // SAFETY: the endpoint is enabled; the bytes are readable, by `Transfer`, and no more
            // than the inject size.
            unsafe { calls::writemsg(ep, message, flags) }
        });
        if attempt == Attempt::Posted {
            self.peers[transfer.peer as usize].unflushed = true;
        }
        attempt
    }

    /// The peer whose marker this is.
    fn marked(&self, context: *const c_void) -> Option<u32> {
        let offset = (context as usize).checked_sub(self.markers.as_ptr() as usize)?;
        let peer = offset / size_of::<fi_context2>();
        let ours = offset.is_multiple_of(size_of::<fi_context2>()) && peer < self.markers.len();
        ours.then_some(peer as u32)
    }

    /// Writes; the provider returns `context` when the source is reusable. With `more`, another
    /// write follows at once.
    #[inline]
    pub(super) fn write(
        &mut self,
        transfer: &Transfer,
        context: *mut c_void,
        more: bool,
    ) -> Attempt {
        let mut flags = FI_COMPLETION | FI_INJECT_COMPLETE;
        if more {
            flags |= FI_MORE;
        }
        if transfer.datum.is_some() {
            flags |= FI_REMOTE_CQ_DATA;
        }
        let attempt = self.message(transfer, context, |ep, message| {
            // SAFETY: the endpoint is enabled; the source stays until `context` returns, by the
            // contract of `post`.
            unsafe { calls::writemsg(ep, message, flags) }
        });
        match attempt {
            Attempt::Posted if more => self.doorbell = Some(transfer.peer),
            Attempt::Posted if !self.layered || self.doorbell == Some(transfer.peer) => {
                self.doorbell = None;
            }
            _ => {}
        }
        attempt
    }

    /// Whether a write may leave the doorbell to the next one: not while an earlier batch waits for
    /// it.
    pub(super) fn may_hold_back(&self) -> bool {
        self.doorbell.is_none() || !self.layered
    }

    /// Reads from the peer; the provider returns `context` when the bytes are there.
    pub(super) fn read(&mut self, transfer: &Transfer, context: *mut c_void) -> Attempt {
        self.message(transfer, context, |ep, message| {
            // SAFETY: the endpoint is enabled; the destination stays until `context` returns, by
            // the contract of `post`.
            unsafe { calls::readmsg(ep, message, FI_COMPLETION) }
        })
    }

    #[inline]
    fn message(
        &mut self,
        transfer: &Transfer,
        context: *mut c_void,
        post: impl FnOnce(*mut fid_ep, &fi_msg_rma) -> isize,
    ) -> Attempt {
        let peer = transfer.peer as usize;
        let (Some(ep), Some(known)) = (self.objects.ep(), self.peers.get(peer)) else {
            return Attempt::Unknown;
        };
        let Some(remote) = known.windows.get(transfer.window) else { return Attempt::Unknown };
        if known.given_up {
            return Attempt::GivenUp;
        }
        let to = known.address;
        let local = iovec { iov_base: transfer.local.cast(), iov_len: transfer.bytes };
        let remote = fi_rma_iov {
            addr: remote.base.wrapping_add(transfer.offset),
            len: transfer.bytes,
            key: remote.key,
        };
        let mut descriptor = transfer.descriptor;
        let message = fi_msg_rma {
            msg_iov: &local,
            desc: &mut descriptor,
            iov_count: 1,
            addr: to,
            rma_iov: &remote,
            rma_iov_count: 1,
            context,
            data: transfer.datum.map_or(0, Datum::encode),
        };
        let attempt = Attempt::of(post(ep, &message));
        if attempt == Attempt::Full {
            return self.refused(peer, |peer| &mut peer.refused);
        }
        self.peers[peer].refused = Refusals::default();
        attempt
    }

    /// A refused command for a peer is tried again, but not for ever (INV-6), as other commands
    /// wait behind it.
    #[cold]
    fn refused(&mut self, peer: usize, kind: fn(&mut Peer) -> &mut Refusals) -> Attempt {
        let peer = &mut self.peers[peer];
        if kind(peer).one_more(Instant::now(), self.patience) {
            return Attempt::Full;
        }
        peer.given_up = true;
        Attempt::GivenUp
    }

    /// Reads completions, and sends the credits that are owed. Returns whether there were any
    /// completions.
    pub(super) fn drive(&mut self, shared: &Shared) -> bool {
        let mut moved = false;
        let mut entries = [const { MaybeUninit::<fi_cq_data_entry>::uninit() }; LOOK];
        for _ in 0..LOOKS {
            // SAFETY: the queue is open, has this format, and the buffer has the stated length.
            let count =
                unsafe { calls::cq_read(self.objects.cq.raw(), entries.as_mut_ptr().cast(), LOOK) };
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
        if self.doorbell.is_some() {
            self.ring();
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
            let message = errors::unreadable(&self.objects, status);
            return shared.fail(failure(None, message, &self.interface));
        }
        while let Some(entry) = errors::next(&self.objects) {
            let slot = shared.slots.find(entry.op_context);
            if entry.op_context == self.fence.get().cast() {
                self.fence_is_out = false;
            }
            let marked = || self.marked(entry.op_context);
            let peer = slot.map(|slot| shared.slots.peer(slot)).or_else(marked);
            let message = errors::in_words(&self.objects, &entry);
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
        } else if entry.op_context == self.fence.get().cast() {
            self.fence_is_out = false;
        } else {
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
            Datum::Credit(place) => (place.peer, self.credit_came(place)),
            Datum::Hello(peer) => (peer, self.word_came(peer, |peer| peer.greeted = true)),
            Datum::Bye(peer) => (peer, self.word_came(peer, |peer| peer.left = true)),
            Datum::Signal { id, add } => return self.signal_came(shared, id, add),
        };
        if let Err(what) = result {
            errors::distrust(&self.interface, shared, Some(peer), what);
        }
    }
}
