//! Traffic between this rank and each other one: counted for reports, which read it from another
//! thread at any time. One thread stores, so a count costs a load and a store and no lock.

use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_core::abi;
use tokenyard_core::transport::{Command, put_bytes};

use crate::engine::channel::Channel;
use crate::engine::control::KINDS;

/// As [`abi::TyPeerCounters`].
#[repr(C)]
#[derive(Debug, Default)]
struct PeerTraffic {
    posted: AtomicU64,
    done: AtomicU64,
    raised: AtomicU64,
    expected: AtomicU64,
    received: AtomicU64,
    bytes: AtomicU64,
}

/// As [`abi::TyRaised`].
#[repr(C)]
#[derive(Debug, Default)]
struct Raised {
    signal: AtomicU64,
    total: AtomicU64,
}

const _: () = assert!(size_of::<PeerTraffic>() == size_of::<abi::TyPeerCounters>());
const _: () = assert!(size_of::<Raised>() == size_of::<abi::TyRaised>());

/// Where a count belongs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LevelPeer {
    /// One of `TY_LEVEL_*`.
    pub(crate) level: u64,
    /// World rank.
    pub(crate) rank: u32,
}

/// The counters of both levels.
#[derive(Debug)]
pub(crate) struct Counters {
    ranks: usize,
    /// Signals of one peer that this rank may raise over a level.
    signals: usize,
    queue_depth: [u32; 2],
    peers: Box<[PeerTraffic]>,
    raised: Box<[Raised]>,
}

fn add(count: &AtomicU64, by: u64) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

fn zeros<T: Default>(count: usize) -> Box<[T]> {
    (0..count).map(|_| T::default()).collect()
}

impl Counters {
    pub(crate) fn new(ranks: u32, in_flight: u32, domains: u32, queue_depth: [u32; 2]) -> Self {
        let (ranks, signals) = (ranks as usize, (KINDS * in_flight * domains) as usize);
        Self {
            ranks,
            signals,
            queue_depth,
            peers: zeros(2 * ranks),
            raised: zeros(2 * ranks * signals),
        }
    }

    fn peer(&self, at: LevelPeer) -> &PeerTraffic {
        &self.peers[at.level as usize * self.ranks + at.rank as usize]
    }

    /// A command was accepted.
    pub(crate) fn posted(&self, channel: &Channel, rank: u32, command: &Command) {
        let at = LevelPeer { level: channel.level, rank };
        let (peer, by) = (self.peer(at), u64::from(command.add));
        add(&peer.posted, 1);
        add(&peer.raised, by);
        add(&peer.bytes, put_bytes(command));
        let first = (at.level as usize * self.ranks + rank as usize) * self.signals;
        if let Some(raised) = self.raised.get(first + channel.index_of(command.signal)) {
            raised.signal.store(u64::from(command.signal) + 1, Ordering::Relaxed);
            add(&raised.total, by);
        }
    }

    /// A command has ended.
    pub(crate) fn done(&self, at: LevelPeer) {
        add(&self.peer(at).done, 1);
    }

    /// A wait for a rise by this much has begun.
    pub(crate) fn expects(&self, at: LevelPeer, by: u64) {
        add(&self.peer(at).expected, by);
    }

    /// A rise by this much was seen.
    pub(crate) fn received(&self, at: LevelPeer, by: u64) {
        add(&self.peer(at).received, by);
    }

    /// A signal rose by more than was waited for, as its writer chose.
    pub(crate) fn add_seen(&self, at: LevelPeer, by: u64) {
        self.expects(at, by);
        self.received(at, by);
    }

    /// The counters as they cross the ABI.
    pub(crate) fn as_abi(&self) -> abi::TyCounters {
        abi::TyCounters {
            size: size_of::<abi::TyCounters>(),
            ranks: self.ranks as u32,
            signals: self.signals as u32,
            queue_depth: self.queue_depth,
            peers: self.peers.as_ptr().cast(),
            raised: self.raised.as_ptr().cast(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_levels_and_ranks_are_apart() {
        let counters = Counters::new(3, 2, 1, [8, 0]);
        let at = |level, rank| LevelPeer { level, rank };
        counters.expects(at(0, 2), 5);
        counters.received(at(1, 2), 3);
        counters.done(at(1, 0));
        let read = |level: usize, rank: usize| {
            let peer = &counters.peers[level * 3 + rank];
            [&peer.done, &peer.expected, &peer.received].map(|c| c.load(Ordering::Relaxed))
        };
        assert_eq!((read(0, 2), read(1, 2)), ([0, 5, 0], [0, 0, 3]));
        assert_eq!((read(1, 0), read(0, 0)), ([1, 0, 0], [0, 0, 0]));
    }
}
