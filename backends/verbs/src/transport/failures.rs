//! The first failure of each peer.
//!
//! Ranks may go on without a lost peer, so its failure does not hide that of another peer (INV-7).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The first failure about each peer, and the first that is about no peer. They stay.
#[derive(Debug)]
pub struct Failures<F> {
    /// The first failures by peer; the last place is for a failure about no peer.
    first: Box<[OnceLock<F>]>,
    is_well: AtomicBool,
    /// The place at which `next` starts.
    turn: AtomicUsize,
}

impl<F> Failures<F> {
    /// Room for the failures of this many peers.
    pub fn new(peers: usize) -> Self {
        Self {
            first: (0..=peers).map(|_| OnceLock::new()).collect(),
            is_well: AtomicBool::new(true),
            turn: AtomicUsize::new(0),
        }
    }

    /// Stores a failure about a peer, or about none, unless there is already one of the same.
    #[cold]
    pub fn add(&self, about: Option<u32>, failure: F) {
        let peers = self.first.len() - 1;
        let place = about.map_or(peers, |peer| peers.min(peer as usize));
        if self.first[place].set(failure).is_ok() {
            self.is_well.store(false, Ordering::Release);
        }
    }

    /// Whether a further failure of this peer would never be reported.
    pub fn hide(&self, peer: u32) -> bool {
        let is_known = |first: Option<&OnceLock<F>>| first.and_then(OnceLock::get).is_some();
        is_known(self.first.get(peer as usize)) || is_known(self.first.last())
    }

    /// The failure about no peer; otherwise the failures of the peers, one after the other from
    /// call to call.
    #[inline]
    pub fn next(&self) -> Option<&F> {
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
