//! What a ring has carried: counted for reports, which read it from another thread at any time. Only the
//! ring's thread stores, so a count costs a load and a store and no lock.

use std::sync::atomic::{AtomicU64, Ordering};

use super::check::Limits;
use crate::abi;
use crate::transport::Command;

/// Counts of one peer, or of all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Carried {
    /// Commands that the transport accepted.
    pub(crate) posted: u64,
    /// Those of them that have ended.
    pub(crate) done: u64,
    /// How far they have raised the peer's signals, all in all.
    pub(crate) raised: u64,
}

#[derive(Debug, Default)]
struct PeerCounts {
    posted: AtomicU64,
    done: AtomicU64,
    raised: AtomicU64,
}

/// The counts of one ring.
#[derive(Debug)]
pub(crate) struct Counts {
    peers: Box<[PeerCounts]>,
    /// `[peers, signals]`: how far each was raised.
    raised: Box<[AtomicU64]>,
    signals: usize,
    capacity: u32,
}

fn add(count: &AtomicU64, by: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

impl Counts {
    pub(super) fn new(limits: &Limits, capacity: usize) -> Self {
        let (peers, signals) = (limits.peers as usize, limits.signals as usize);
        Self {
            peers: (0..peers).map(|_| PeerCounts::default()).collect(),
            raised: (0..peers * signals).map(|_| AtomicU64::new(0)).collect(),
            signals,
            capacity: capacity as u32,
        }
    }

    /// The transport accepted a command, which was checked.
    pub(super) fn posted(&self, command: &Command) {
        let peer = &self.peers[command.peer as usize];
        add(&peer.posted, 1);
        // What else a command has in these fields means nothing, and was not checked.
        if matches!(command.op, abi::TY_OP_SIGNAL | abi::TY_OP_PUT_SIGNAL) {
            add(&peer.raised, command.add.into());
            let signal = command.peer as usize * self.signals + command.signal as usize;
            add(&self.raised[signal], command.add.into());
        }
    }

    /// A command to `peer` has ended.
    pub(super) fn done(&self, peer: u32) {
        add(&self.peers[peer as usize].done, 1);
    }

    /// Most commands that are not done.
    pub(crate) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// What went to a peer; nothing for one that is not there.
    pub(crate) fn of(&self, peer: u32) -> Option<Carried> {
        let PeerCounts { posted, done, raised } = self.peers.get(peer as usize)?;
        let [posted, done, raised] = [posted, done, raised].map(|w| w.load(Ordering::Relaxed));
        Some(Carried { posted, done, raised })
    }

    /// What went to all peers.
    pub(crate) fn of_all(&self) -> Carried {
        let each = (0..self.peers.len() as u32).filter_map(|peer| self.of(peer));
        each.fold(Carried::default(), |sum, one| Carried {
            posted: sum.posted.wrapping_add(one.posted),
            done: sum.done.wrapping_add(one.done),
            raised: sum.raised.wrapping_add(one.raised),
        })
    }

    /// The signals of a peer that were raised, and how far.
    pub(crate) fn raised(&self, peer: u32) -> Vec<(u32, u64)> {
        let signals =
            self.raised.chunks(self.signals.max(1)).nth(peer as usize).unwrap_or_default();
        let totals = (0..).zip(signals).map(|(id, total)| (id, total.load(Ordering::Relaxed)));
        totals.filter(|(_, total)| *total > 0).collect()
    }
}
