//! The traffic of a ring, counted for reports, which read the counts from another thread at any time. Only
//! the ring's thread stores, so a count costs a load and a store and no lock. The thread may be a
//! transport's.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::abi;
use crate::transport::{Command, put_bytes};

/// Counts of one peer, or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Carried {
    /// Commands that the transport accepted.
    pub(crate) posted: u64,
    /// Accepted commands that have ended.
    pub(crate) done: u64,
    /// The sum of `add` over the peer's signals.
    pub(crate) raised: u64,
    /// Bytes of the accepted commands.
    pub(crate) bytes: u64,
}

/// As [`abi::TyPeerCounters`]; a ring does not use those of waits.
#[derive(Debug, Default)]
#[repr(C)]
struct PeerCounts {
    posted: AtomicU64,
    done: AtomicU64,
    raised: AtomicU64,
    _waits: [AtomicU64; 2],
    bytes: AtomicU64,
}

const _: () = assert!(size_of::<PeerCounts>() == size_of::<abi::TyPeerCounters>());

/// The counts of one ring.
#[derive(Debug)]
pub(crate) struct Counts {
    peers: Box<[PeerCounts]>,
    /// `[peers, signals]`: the total by which each signal was raised.
    raised: Box<[AtomicU64]>,
    signals: usize,
    capacity: u32,
}

fn add(count: &AtomicU64, by: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

/// The counters of a ring's thread, in the memory of [`Counts`].
#[derive(Debug)]
pub(super) struct Tally {
    peers: *const PeerCounts,
    raised: *const AtomicU64,
    signals: usize,
}

// SAFETY: addresses of atomic words that outlive the value, by the contract of `new`.
unsafe impl Send for Tally {}

impl Tally {
    /// # Safety
    /// Both have the number of words that [`abi::TyServeRing`] states for `signals`, are accessed as atomic
    /// words only, and outlive the value.
    pub(super) unsafe fn new(
        peers: *mut abi::TyPeerCounters,
        raised: *mut u64,
        signals: u32,
    ) -> Self {
        let (peers, raised) = (peers.cast_const().cast(), raised.cast_const().cast());
        Self { peers, raised, signals: signals as usize }
    }

    fn peer(&self, peer: u32) -> &PeerCounts {
        // SAFETY: the peer of a command that was checked, by the contract of `new`.
        unsafe { &*self.peers.wrapping_add(peer as usize) }
    }

    /// The transport accepted a command, which was checked.
    pub(super) fn posted(&self, command: &Command) {
        let peer = self.peer(command.peer);
        add(&peer.posted, 1);
        add(&peer.bytes, put_bytes(command));
        // For other commands these fields have no meaning, and were not checked.
        if matches!(command.op, abi::TY_OP_SIGNAL | abi::TY_OP_PUT_SIGNAL) {
            add(&peer.raised, command.add.into());
            let signal = command.peer as usize * self.signals + command.signal as usize;
            // SAFETY: the peer and the signal of a command that was checked, by the contract of `new`.
            add(unsafe { &*self.raised.wrapping_add(signal) }, command.add.into());
        }
    }

    /// A command to `peer` has ended.
    pub(super) fn done(&self, peer: u32) {
        add(&self.peer(peer).done, 1);
    }
}

impl Counts {
    pub(crate) fn new(ring: &abi::TyGpuRing, peers: u32) -> Self {
        let (peers, signals) = (peers as usize, ring.signals as usize);
        Self {
            peers: (0..peers).map(|_| PeerCounts::default()).collect(),
            raised: (0..peers * signals).map(|_| AtomicU64::new(0)).collect(),
            signals,
            capacity: ring.capacity,
        }
    }

    /// The addresses of the counters, for the thread that counts.
    pub(crate) fn words(&self) -> (*mut abi::TyPeerCounters, *mut u64) {
        (self.peers.as_ptr().cast_mut().cast(), self.raised.as_ptr().cast_mut().cast())
    }

    /// Most commands that are not done.
    pub(crate) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The traffic to a peer; nothing for a peer beyond the team.
    pub(crate) fn of(&self, peer: u32) -> Option<Carried> {
        let PeerCounts { posted, done, raised, bytes, .. } = self.peers.get(peer as usize)?;
        let [posted, done, raised, bytes] =
            [posted, done, raised, bytes].map(|w| w.load(Ordering::Relaxed));
        Some(Carried { posted, done, raised, bytes })
    }

    /// The traffic to all peers.
    pub(crate) fn of_all(&self) -> Carried {
        let each = (0..self.peers.len() as u32).filter_map(|peer| self.of(peer));
        each.fold(Carried::default(), |sum, one| Carried {
            posted: sum.posted.wrapping_add(one.posted),
            done: sum.done.wrapping_add(one.done),
            raised: sum.raised.wrapping_add(one.raised),
            bytes: sum.bytes.wrapping_add(one.bytes),
        })
    }

    /// The raised signals of a peer, each with its total.
    pub(crate) fn raised(&self, peer: u32) -> Vec<(u32, u64)> {
        let signals =
            self.raised.chunks(self.signals.max(1)).nth(peer as usize).unwrap_or_default();
        let totals = (0..).zip(signals).map(|(id, total)| (id, total.load(Ordering::Relaxed)));
        totals.filter(|(_, total)| *total > 0).collect()
    }
}
