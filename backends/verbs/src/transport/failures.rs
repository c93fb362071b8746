//! The first failure of each peer, and the attribution of faults.
//!
//! Ranks may go on without a lost peer, so its failure does not hide that of another peer (INV-7).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// A fault of a command, as far as its attribution depends on it.
pub trait Attributable: Copy {
    /// Whether the host should not have posted the command.
    fn is_of_the_host(self) -> bool;
    /// Whether a port that is down would explain it.
    fn is_silence(self) -> bool;
}

/// The owner of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The connection to this peer, or the peer.
    Peer(u32),
    /// The device, or this rank.
    Here,
    /// This rank's port is down: it reaches no peer.
    Port,
}

impl Blame {
    /// The peer that the failure is about.
    pub fn peer(self) -> Option<u32> {
        match self {
            Self::Peer(peer) => Some(peer),
            Self::Here | Self::Port => None,
        }
    }
}

/// The first failure about each peer, and the first that is about no peer. They stay.
#[derive(Debug)]
pub(super) struct Failures<F> {
    /// The first failures by peer; the last place is for a failure about no peer.
    first: Box<[OnceLock<F>]>,
    is_well: AtomicBool,
    /// The place at which `next` starts.
    turn: AtomicUsize,
    /// This rank's index in the team.
    me: u32,
}

impl<F> Failures<F> {
    /// Room for the failures of this many peers; this rank is number `me` of them.
    pub(super) fn new(peers: usize, me: u32) -> Self {
        Self {
            first: (0..=peers).map(|_| OnceLock::new()).collect(),
            is_well: AtomicBool::new(true),
            turn: AtomicUsize::new(0),
            me,
        }
    }

    /// The owner of a fault at a command to `peer`, or of one at no command; none where the fault only follows from a
    /// failure that is reported already.
    ///
    /// No rank can go on without its own device, so failures of the device are not those of a peer. Nor is a command
    /// that the host should not have posted, which follows from no failure.
    #[cold]
    pub(super) fn attribute(
        &self,
        fault: impl Attributable,
        peer: Option<u32>,
        port_is_down: impl FnOnce() -> bool,
    ) -> Option<Blame> {
        let Some(peer) = peer.filter(|_| !fault.is_of_the_host()) else { return Some(Blame::Here) };
        if self.hide(peer) {
            return None;
        }
        if fault.is_silence() && port_is_down() {
            return Some(Blame::Port);
        }
        Some(if peer == self.me { Blame::Here } else { Blame::Peer(peer) })
    }

    /// Stores a failure about a peer, or about none, unless there is already one of the same.
    #[cold]
    pub(super) fn add(&self, about: Option<u32>, failure: F) {
        let peers = self.first.len() - 1;
        let place = about.map_or(peers, |peer| peers.min(peer as usize));
        if self.first[place].set(failure).is_ok() {
            self.is_well.store(false, Ordering::Release);
        }
    }

    /// Whether a further failure of this peer would never be reported.
    fn hide(&self, peer: u32) -> bool {
        let is_known = |first: Option<&OnceLock<F>>| first.and_then(OnceLock::get).is_some();
        is_known(self.first.get(peer as usize)) || is_known(self.first.last())
    }

    /// The failure about no peer; otherwise the failures of the peers, one after the other from
    /// call to call.
    #[inline]
    pub(super) fn next(&self) -> Option<&F> {
        if self.is_well.load(Ordering::Acquire) {
            return None;
        }
        self.first.last().and_then(OnceLock::get).or_else(|| self.next_of_peers())
    }

    #[cold]
    fn next_of_peers(&self) -> Option<&F> {
        let peers = self.first.len() - 1;
        let turn = self.turn.load(Ordering::Relaxed);
        let mut places = (turn..turn + peers).map(|place| place % peers);
        let (place, failure) = places.find_map(|place| Some((place, self.first[place].get()?)))?;
        self.turn.store(place + 1, Ordering::Relaxed);
        Some(failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Toy {
        Unknown,
        Silent,
        Loud,
    }

    impl Attributable for Toy {
        fn is_of_the_host(self) -> bool {
            self == Self::Unknown
        }
        fn is_silence(self) -> bool {
            self == Self::Silent
        }
    }

    const UP: fn() -> bool = || false;
    const DOWN: fn() -> bool = || true;

    #[test]
    fn a_fault_belongs_to_its_peer_unless_this_rank_or_its_port_explains_it() {
        let failures: Failures<Toy> = Failures::new(3, 0);
        let blame = |fault, peer, port| failures.attribute(fault, peer, port);
        assert_eq!(blame(Toy::Loud, Some(1), DOWN), Some(Blame::Peer(1)));
        assert_eq!(blame(Toy::Silent, Some(1), UP), Some(Blame::Peer(1)));
        assert_eq!(blame(Toy::Silent, Some(1), DOWN), Some(Blame::Port));
        assert_eq!(blame(Toy::Loud, Some(0), UP), Some(Blame::Here));
        assert_eq!(blame(Toy::Silent, None, DOWN), Some(Blame::Here));
    }

    #[test]
    fn the_hosts_mistake_is_about_no_peer_and_no_failure_hides_it() {
        let failures = Failures::new(3, 0);
        failures.add(Some(1), Toy::Loud);
        assert_eq!(failures.attribute(Toy::Silent, Some(1), UP), None);
        assert_eq!(failures.attribute(Toy::Loud, Some(2), UP), Some(Blame::Peer(2)));
        assert_eq!(failures.attribute(Toy::Unknown, Some(1), DOWN), Some(Blame::Here));
        failures.add(None, Toy::Unknown);
        assert_eq!(failures.attribute(Toy::Loud, Some(2), UP), None);
        assert_eq!(failures.next(), Some(&Toy::Unknown));
    }
}
