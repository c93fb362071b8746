//! Commands to peers: the endpoint of a rail, and its peers as it reaches them.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use tokenyard_core::Result;
use tokenyard_sys_fabric::calls;
use tokenyard_sys_fabric::consts::*;
use tokenyard_sys_fabric::types::*;

use super::patience::Refusals;
use super::{EAGAIN, RailOptions};
use crate::transport::datum::{Datum, VALUES_PER_PEER};
use crate::transport::objects::{Objects, failed};
use crate::transport::wire::{Extent, RailEndpoint};

/// The half of a rail that posts. Completions are read by the [`State`](super::State) that owns it.
#[derive(Debug)]
pub(in crate::transport) struct Outbound {
    pub(in crate::transport) objects: Objects,
    pub(in crate::transport) peers: Box<[Peer]>,
    /// How long the provider may refuse commands for a peer before the rail gives the peer up.
    pub(in crate::transport) patience: Duration,
    /// Index of the peers' mailboxes among their windows.
    pub(super) mailboxes: usize,
    /// Whether the provider is a layer over connections, each with its own doorbell.
    layered: bool,
    /// Registered memory that is never read, for writes of no bytes.
    pub(super) spare: *mut u8,
    /// A batch ended early, and the provider waits for its end. The peer matters only under a layer
    /// over connections.
    pub(super) doorbell: Option<u32>,
    /// The context of injected writes to each peer, where operations may share a context; else
    /// empty.
    markers: Box<[UnsafeCell<fi_context2>]>,
    pub(super) fence: Box<UnsafeCell<fi_context2>>,
    pub(super) fence_is_out: bool,
}

// SAFETY: the contexts hold libfabric's own pointers, which belong to no thread; `spare` is an
// address.
unsafe impl Send for Outbound {}

/// A peer, as this rail reaches it.
#[derive(Debug, Default)]
pub(in crate::transport) struct Peer {
    address: fi_addr_t,
    /// The addresses of its windows, then of its mailboxes of this rail; empty until it is
    /// connected.
    pub(super) windows: Box<[Remote]>,
    /// Its greeting has come: it can reach this rank.
    pub(in crate::transport) greeted: bool,
    /// A bit for each of its mailboxes that this rank may fill.
    pub(super) free_values: u32,
    /// A bit for each local mailbox that was emptied and whose writer has not been notified.
    pub(super) owed: u32,
    /// A write without a completion was sent.
    pub(in crate::transport) unflushed: bool,
    /// It has sent its farewell.
    pub(in crate::transport) left: bool,
    /// Refusals of the provider to send to it.
    refused: Refusals,
    /// Refusals because it returns no mailbox.
    pub(super) starved: Refusals,
    /// It was refused for too long: no further attempt is made (INV-6).
    pub(super) given_up: bool,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Remote {
    pub(super) base: u64,
    pub(super) key: u64,
}

/// A write or a read, in the provider's terms.
#[derive(Clone, Copy, Debug)]
pub(in crate::transport) struct Transfer {
    pub(in crate::transport) peer: u32,
    pub(in crate::transport) local: *mut u8,
    pub(in crate::transport) descriptor: *mut c_void,
    pub(in crate::transport) bytes: usize,
    /// Index of the peer's window; the mailboxes are the last.
    pub(in crate::transport) window: usize,
    pub(in crate::transport) offset: u64,
    pub(in crate::transport) datum: Option<Datum>,
}

/// The outcome of an attempt to post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::transport) enum Attempt {
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

impl Outbound {
    pub(super) fn new(objects: Objects, options: RailOptions) -> Self {
        let RailOptions { peers, patience, spare } = options;
        let context = || UnsafeCell::new(fi_context2 { internal: [null_mut(); 8] });
        let markers = if objects.info.leaves_contexts() { peers } else { 0 };
        let layered = objects.info.is_layered();
        Self {
            objects,
            peers: (0..peers).map(|_| Peer::default()).collect(),
            patience,
            mailboxes: 0,
            layered,
            spare,
            doorbell: None,
            markers: (0..markers).map(|_| context()).collect(),
            fence: Box::new(context()),
            fence_is_out: false,
        }
    }

    /// Whether the peer is connected.
    pub(in crate::transport) fn knows(&self, peer: u32) -> bool {
        self.peers.get(peer as usize).is_some_and(|peer| !peer.windows.is_empty())
    }

    /// Stores the address and keys of a peer. `extents` are those of its windows.
    pub(in crate::transport) fn learn(
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
    pub(in crate::transport) fn inject(&mut self, transfer: &Transfer) -> Attempt {
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
    pub(super) fn marked(&self, context: *const c_void) -> Option<u32> {
        let offset = (context as usize).checked_sub(self.markers.as_ptr() as usize)?;
        let peer = offset / size_of::<fi_context2>();
        let ours = offset.is_multiple_of(size_of::<fi_context2>()) && peer < self.markers.len();
        ours.then_some(peer as u32)
    }

    /// Writes; the provider returns `context` when the source is reusable. With `more`, another
    /// write follows at once.
    #[inline]
    pub(in crate::transport) fn write(
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
    pub(in crate::transport) fn may_hold_back(&self) -> bool {
        self.doorbell.is_none() || !self.layered
    }

    /// Reads from the peer; the provider returns `context` when the bytes are there.
    pub(in crate::transport) fn read(
        &mut self,
        transfer: &Transfer,
        context: *mut c_void,
    ) -> Attempt {
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
    pub(super) fn refused(&mut self, peer: usize, kind: fn(&mut Peer) -> &mut Refusals) -> Attempt {
        let peer = &mut self.peers[peer];
        if kind(peer).one_more(Instant::now(), self.patience) {
            return Attempt::Full;
        }
        peer.given_up = true;
        Attempt::GivenUp
    }

    /// Whether a batch waits for its end.
    pub(super) fn holds_back(&self) -> bool {
        self.doorbell.is_some()
    }

    /// Notes the end of the fence if this is its context. Returns whether it is.
    pub(super) fn fence_came(&mut self, context: *const c_void) -> bool {
        let is_fence = context == self.fence.get().cast();
        self.fence_is_out &= !is_fence;
        is_fence
    }
}
