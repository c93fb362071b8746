//! One rail: an endpoint on one NIC, used by one thread at a time.

mod errors;

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, TryLockError};

use tokenyard_core::{Error, ErrorKind, Result, abi};
use tokenyard_sys_fabric::calls;
use tokenyard_sys_fabric::consts::*;
use tokenyard_sys_fabric::types::*;

use super::datum::{Datum, Place, VALUES_PER_PEER};
use super::objects::{Objects, failed};
use super::shared::Shared;
use super::wire::{Extent, RailEndpoint};

/// Completions that one look at the queue takes.
const LOOK: usize = 16;
/// Looks of one drive: no thread drives for ever while peers keep sending (INV-6).
const LOOKS: usize = 16;
/// How often a thread looks again at a rail that another thread is using.
const SPINS: u32 = 200;

const EAGAIN: isize = -(FI_EAGAIN as isize);
const EAVAIL: isize = -(FI_EAVAIL as isize);

/// One rail, shared by all lanes.
#[derive(Debug)]
pub(super) struct Rail(Mutex<State>);

/// What belongs to whoever is using the rail.
#[derive(Debug)]
pub(super) struct State {
    index: usize,
    pub(super) objects: Objects,
    interface: String,
    pub(super) peers: Box<[Peer]>,
    /// Credits that could not be sent yet.
    owed: u32,
    /// A batch ended early, and the provider waits for its end: whoever it was for.
    doorbell: Option<u32>,
    /// The context of what is injected to each peer, where operations may share one; else none.
    markers: Box<[UnsafeCell<fi_context2>]>,
    fence: Box<UnsafeCell<fi_context2>>,
    fence_is_out: bool,
}

// SAFETY: the context holds pointers of libfabric's own, which belong to no thread.
unsafe impl Send for State {}

/// A peer, as this rail reaches it.
#[derive(Debug, Default)]
pub(super) struct Peer {
    address: fi_addr_t,
    /// Where its windows are, then its mailboxes of this rail; empty until it is connected.
    windows: Box<[Remote]>,
    /// Its datum has come: it reaches this rank.
    pub(super) greeted: bool,
    /// A bit for each mailbox there that this rank may fill.
    free_values: u32,
    /// A bit for each mailbox here that was emptied and whose writer does not know.
    owed: u32,
    /// Something was sent that has no completion.
    pub(super) unflushed: bool,
}

#[derive(Clone, Copy, Debug)]
struct Remote {
    base: u64,
    key: u64,
}

/// A write or a read, as the provider wants it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub(super) peer: u32,
    pub(super) local: *mut u8,
    pub(super) descriptor: *mut c_void,
    pub(super) bytes: usize,
    /// Number of the peer's window, that of the mailboxes being the last.
    pub(super) window: usize,
    pub(super) offset: u64,
    pub(super) datum: Option<Datum>,
}

/// What became of an attempt to post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    Posted,
    /// Try again after driving the rail.
    Full,
    /// A positive error number.
    Failed(i32),
    /// The peer or its window is not known.
    Unknown,
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
    pub(super) fn new(index: usize, objects: Objects, peers: u32) -> Self {
        let context = || UnsafeCell::new(fi_context2 { internal: [null_mut(); 8] });
        let markers = if objects.info.leaves_contexts() { peers } else { 0 };
        let interface = format!("{} {}", objects.info.provider(), objects.info.domain());
        Self(Mutex::new(State {
            index,
            objects,
            interface,
            peers: (0..peers).map(|_| Peer::default()).collect(),
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
            // A panic is reported by the call that it ended; the objects are libfabric's.
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The rail, if another thread that is using it ends soon.
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

    /// For calls that have the whole transport.
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

    /// Takes the address and keys of a peer. `extents` are those of its windows.
    pub(super) fn learn(
        &mut self,
        peer: u32,
        extents: &[Extent],
        endpoint: &RailEndpoint,
    ) -> Result<()> {
        let mut address = FI_ADDR_NOTAVAIL;
        self.check_address(&endpoint.address)?;
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
        self.peers[peer as usize] = Peer {
            address,
            windows: remotes.map(|(extent, key)| Remote { base: extent.base, key: *key }).collect(),
            free_values: (1 << VALUES_PER_PEER) - 1,
            // It may have come before this call.
            greeted: self.peers[peer as usize].greeted,
            ..Peer::default()
        };
        Ok(())
    }

    /// Providers read as many bytes as an address of theirs has: as many as this rank's own, or up to
    /// a zero byte.
    fn check_address(&self, address: &[u8]) -> Result<()> {
        let message = if self.objects.info.has_text_addresses() {
            if address.iter().position(|byte| *byte == 0) == Some(address.len() - 1) {
                return Ok(());
            }
            "found an address without a zero byte at its end; expected text".to_owned()
        } else {
            let (found, own) = (address.len(), self.objects.address()?.len());
            if found == own {
                return Ok(());
            }
            format!("found an address of {found} bytes; expected {own}")
        };
        Err(Error::new(ErrorKind::Protocol, "read endpoint", message))
    }

    /// Where a transfer goes.
    #[inline]
    fn target(&self, transfer: &Transfer) -> Option<(fi_addr_t, u64, u64)> {
        let peer = self.peers.get(transfer.peer as usize)?;
        let remote = peer.windows.get(transfer.window)?;
        Some((peer.address, remote.base.wrapping_add(transfer.offset), remote.key))
    }

    /// Writes a few bytes; they are copied, and a completion comes only if it fails. Then it names
    /// the peer.
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

    /// Writes; `context` comes back when the source is reusable. With `more`, another write
    /// follows at once.
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
            // SAFETY: the endpoint is enabled; the source stays until `context` comes back, by the
            // contract of `post`.
            unsafe { calls::writemsg(ep, message, flags) }
        });
        match attempt {
            Attempt::Posted if more => self.doorbell = Some(transfer.peer),
            Attempt::Posted => self.doorbell = None,
            _ => {}
        }
        attempt
    }

    /// Reads from the peer; `context` comes back when the bytes are there.
    pub(super) fn read(&mut self, transfer: &Transfer, context: *mut c_void) -> Attempt {
        self.message(transfer, context, |ep, message| {
            // SAFETY: the endpoint is enabled; the destination stays until `context` comes back,
            // by the contract of `post`.
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
        let Some((to, address, key)) = self.target(transfer) else { return Attempt::Unknown };
        let local = iovec { iov_base: transfer.local.cast(), iov_len: transfer.bytes };
        let remote = fi_rma_iov { addr: address, len: transfer.bytes, key };
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
        Attempt::of(post(self.objects.ep.raw(), &message))
    }

    /// A mailbox of `peer` that this rank may fill; it is taken.
    pub(super) fn take_mailbox(&mut self, peer: u32) -> Option<u32> {
        let free = &mut self.peers.get_mut(peer as usize)?.free_values;
        let slot = free.trailing_zeros();
        if slot == u32::BITS {
            return None;
        }
        *free &= !(1 << slot);
        Some(slot)
    }

    /// Gives back a mailbox that was taken and not filled.
    pub(super) fn leave_mailbox(&mut self, peer: u32, slot: u32) {
        self.peers[peer as usize].free_values |= 1 << slot;
    }

    /// Sends a datum alone.
    #[inline]
    pub(super) fn send(&mut self, peer: u32, datum: Datum) -> Attempt {
        let transfer = self.nothing(peer, Some(datum));
        self.inject(&transfer)
    }

    /// A write of no bytes.
    #[inline]
    fn nothing(&self, peer: u32, datum: Option<Datum>) -> Transfer {
        let window = self.peers.get(peer as usize).map_or(0, |p| p.windows.len().max(1) - 1);
        // Nothing is read there, but a null pointer is not every provider's taste.
        let local = self.fence.get().cast();
        Transfer { peer, local, descriptor: null_mut(), bytes: 0, window, offset: 0, datum }
    }

    /// Reads completions, and sends what is owed. Returns whether there were any.
    pub(super) fn drive(&mut self, shared: &Shared) -> bool {
        let mut moved = false;
        let mut entries = [const { MaybeUninit::<fi_cq_data_entry>::uninit() }; LOOK];
        for _ in 0..LOOKS {
            // SAFETY: the queue is open, has this format, and the room is as long as said.
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
        moved
    }

    #[inline]
    fn completed(&mut self, shared: &Shared, entry: &fi_cq_data_entry) {
        if entry.flags & FI_REMOTE_CQ_DATA != 0 {
            // INV-1: fi_cq(3), "Target completion semantics": a completion at the target says
            // that the data is in its buffer, whatever the writer asked for.
            match Datum::decode(entry.data) {
                Some(Datum::Signal { id, add }) if shared.raise(id, add) => {}
                Some(datum) => self.own_datum(shared, datum),
                None => self.distrust(shared, None, "data that nobody writes"),
            }
        } else if let Some(slot) = shared.slots.find(entry.op_context) {
            shared.slots.complete(slot, abi::TY_OK);
        } else if entry.op_context == self.fence.get().cast() {
            self.fence_is_out = false;
        }
    }

    fn own_datum(&mut self, shared: &Shared, datum: Datum) {
        let (peer, result) = match datum {
            Datum::Value(place) => (place.peer, self.value_came(shared, place)),
            Datum::Credit(place) => (place.peer, self.credit_came(place)),
            Datum::Hello(peer) => (
                peer,
                match self.peers.get_mut(peer as usize) {
                    Some(peer) => {
                        peer.greeted = true;
                        Ok(())
                    }
                    None => Err("a greeting of a rank that is not in the team"),
                },
            ),
            Datum::Signal { .. } => {
                return self.distrust(shared, None, "a signal that is not there");
            }
        };
        if let Err(what) = result {
            self.distrust(shared, Some(peer), what);
        }
    }

    fn value_came(&mut self, shared: &Shared, place: Place) -> Result<(), &'static str> {
        let Some(peer) = self.peers.get_mut(place.peer as usize) else {
            return Err("a value of a rank that is not in the team");
        };
        shared.deliver(self.index, place)?;
        peer.owed |= 1 << place.slot;
        self.owed += 1;
        Ok(())
    }

    fn credit_came(&mut self, place: Place) -> Result<(), &'static str> {
        match self.peers.get_mut(place.peer as usize) {
            Some(peer) if peer.free_values & 1 << place.slot == 0 => {
                peer.free_values |= 1 << place.slot;
                Ok(())
            }
            _ => Err("a credit for a mailbox that was not taken"),
        }
    }

    /// Tells writers of values that their mailboxes are empty again.
    fn pay(&mut self, shared: &Shared) {
        let me = shared.team.me;
        for peer in 0..self.peers.len() {
            while self.peers[peer].owed != 0 {
                let slot = self.peers[peer].owed.trailing_zeros();
                match self.send(peer as u32, Datum::Credit(Place { peer: me, slot })) {
                    // The others must not wait for a peer that takes nothing, or is gone.
                    Attempt::Full => break,
                    // A peer that left needs no credits; if it was lost, its own writes say so.
                    Attempt::Posted | Attempt::Failed(_) | Attempt::Unknown => {}
                }
                self.peers[peer].owed &= !(1 << slot);
                self.owed -= 1;
            }
        }
    }

    /// Forgets the credits that this rank owes.
    pub(super) fn forgive(&mut self) {
        self.peers.iter_mut().for_each(|peer| peer.owed = 0);
        self.owed = 0;
    }

    /// Ends a batch whose last write was not accepted.
    #[cold]
    fn ring(&mut self) {
        if let Some(peer) = self.doorbell
            && self.post_fence(peer) != Attempt::Full
        {
            self.doorbell = None;
        }
    }

    /// Writes nothing to `peer`; its completion comes when everything before it has left, where the
    /// provider keeps that order.
    pub(super) fn post_fence(&mut self, peer: u32) -> Attempt {
        if self.fence_is_out {
            return Attempt::Full;
        }
        let context = self.fence.get().cast();
        let transfer = self.nothing(peer, None);
        let attempt = self.write(&transfer, context, false);
        self.fence_is_out = attempt == Attempt::Posted;
        attempt
    }

    pub(super) fn fence_is_out(&self) -> bool {
        self.fence_is_out
    }
}
