//! Which ranks are alive, as far as this rank knows.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::headway::{Begun, Headway, Headways};
use super::message::End;
use crate::{Error, ErrorKind};

/// How a peer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// It has not ended, as far as this rank knows.
    Alive,
    /// It said goodbye.
    Left,
    /// It was killed, silent for too long, or reported a failure.
    Lost {
        /// What it did, to be read behind its name: `"was silent for 31 s"`. Fit to print.
        why: String,
    },
}

/// The loss of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// The rank that was lost.
    pub rank: u32,
    /// What it did, to be read behind its name: `"failed: out of memory"`. Fit to print.
    pub why: String,
    /// When this rank learned of it.
    pub when: Instant,
}

/// The state of every rank of a world. The control thread writes it, any thread reads it; reads
/// take no lock and do not wait, so a watchdog or a spinning wait may call them.
///
/// A goodbye is not a loss, but no collective can succeed after either.
pub struct Liveness {
    epoch: Instant,
    this: u32,
    peers: Vec<Peer>,
    first_loss: OnceLock<Loss>,
    first_leave: OnceLock<u32>,
    headways: Headways,
}

struct Peer {
    /// Nanoseconds from the epoch to the last sign of life.
    heard: AtomicU64,
    end: OnceLock<PeerState>,
}

impl Liveness {
    pub(super) fn new(this: u32, ranks: u32) -> Self {
        let peer = || Peer { heard: AtomicU64::new(0), end: OnceLock::new() };
        Self {
            epoch: Instant::now(),
            this,
            peers: (0..ranks).map(|_| peer()).collect(),
            first_loss: OnceLock::new(),
            first_leave: OnceLock::new(),
            headways: Headways::default(),
        }
    }

    /// The state of `rank`; a rank beyond the world counts as one that left.
    pub fn state(&self, rank: u32) -> &PeerState {
        match self.peers.get(rank as usize) {
            Some(peer) => peer.end.get().unwrap_or(&PeerState::Alive),
            None => &PeerState::Left,
        }
    }

    /// Whether some rank said goodbye.
    pub fn somebody_left(&self) -> bool {
        (0..self.peers.len() as u32).any(|rank| matches!(self.state(rank), PeerState::Left))
    }

    /// The living rank that has been silent for longest, and for how long; never this one.
    pub fn most_silent(&self) -> Option<(u32, Duration)> {
        let ranks = 0..self.peers.len() as u32;
        ranks
            .filter(|rank| matches!(self.state(*rank), PeerState::Alive))
            .map(|rank| (rank, self.silence(rank)))
            .max_by_key(|(_, silence)| *silence)
    }

    /// The first loss that this rank learned of.
    pub fn first_loss(&self) -> Option<&Loss> {
        self.first_loss.get()
    }

    /// How long nothing has been heard of `rank`: zero for this rank itself and for one beyond the
    /// world. What rank 0 hears of others reaches this rank with the heartbeats of rank 0, so it
    /// grows for all of them once rank 0 has ended.
    pub fn silence(&self, rank: u32) -> Duration {
        match self.peers.get(rank as usize) {
            Some(peer) if rank != self.this => {
                let heard = Duration::from_nanos(peer.heard.load(Ordering::Relaxed));
                self.epoch.elapsed().saturating_sub(heard)
            }
            _ => Duration::ZERO,
        }
    }

    /// Counts the operations of a new yard. Collective in that all ranks open their yards in the same
    /// order; nothing waits.
    pub fn headway(&self) -> Arc<Headway> {
        self.headways.open()
    }

    /// What this rank has begun.
    pub(super) fn begun(&self) -> Begun {
        self.headways.begun()
    }

    /// Notes what all ranks have begun.
    pub(super) fn all_begun(&self, begun: &[(u32, u64)]) {
        self.headways.all_begun(begun);
    }

    /// Notes a sign of life, `ago` in the past. Never turns the clock of a peer back.
    pub(super) fn heard(&self, rank: u32, ago: Duration) {
        if let Some(peer) = self.peers.get(rank as usize) {
            let at = self.epoch.elapsed().saturating_sub(ago).as_nanos() as u64;
            peer.heard.fetch_max(at, Ordering::Relaxed);
        }
    }

    /// Notes the end of `rank`. Only its first end counts; says whether this is it.
    pub(super) fn end(&self, rank: u32, end: End) -> bool {
        let Some(peer) = self.peers.get(rank as usize) else { return false };
        let state = match &end {
            End::Left => PeerState::Left,
            End::Lost(why) => PeerState::Lost { why: why.clone() },
        };
        if peer.end.set(state).is_err() {
            return false;
        }
        match end {
            End::Left => {
                let _ = self.first_leave.set(rank);
            }
            End::Lost(why) => {
                let _ = self.first_loss.set(Loss { rank, why, when: Instant::now() });
            }
        }
        true
    }

    /// The error of a collective that can no longer succeed, if some rank has ended.
    pub(super) fn gone(&self, operation: &'static str) -> Option<Error> {
        let lost = |rank, message, fix| {
            let error = Error::new(ErrorKind::PeerLost, operation, message);
            Some(error.with_rank(rank).with_fix(fix))
        };
        if let Some(Loss { rank, why, .. }) = self.first_loss() {
            let fix = format!("read the log of rank {rank}, then restart the job");
            return lost(*rank, format!("rank {rank} {why}"), fix);
        }
        let rank = self.first_leave.get()?;
        let fix = "let every rank make the same collectives before it leaves".to_owned();
        lost(*rank, format!("rank {rank} left the world, expected it to take part"), fix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_end_of_a_rank_counts_and_a_goodbye_is_no_loss() {
        let liveness = Liveness::new(0, 3);
        assert!(liveness.gone("test").is_none());
        assert!(liveness.end(2, End::Left));
        assert!(!liveness.end(2, End::Lost("closed".into())));
        assert_eq!((liveness.state(2), liveness.first_loss()), (&PeerState::Left, None));
        let error = liveness.gone("test").unwrap();
        assert_eq!(error.rank(), Some(2));
        assert!(error.message().contains("rank 2 left"), "{error}");

        assert!(liveness.end(1, End::Lost("was killed".into())));
        assert_eq!(liveness.state(1), &PeerState::Lost { why: "was killed".into() });
        assert_eq!(liveness.first_loss().unwrap().rank, 1);
        let error = liveness.gone("test").unwrap();
        assert_eq!(error.kind(), ErrorKind::PeerLost);
        assert_eq!(error.rank(), Some(1));
        assert!(error.message().contains("rank 1 was killed"), "{error}");
        assert_eq!(liveness.state(0), &PeerState::Alive);
    }

    #[test]
    fn silence_grows_until_the_peer_is_heard_and_old_news_change_nothing() {
        let liveness = Liveness::new(0, 2);
        std::thread::sleep(Duration::from_millis(20));
        assert!(liveness.silence(1) >= Duration::from_millis(20));
        liveness.heard(1, Duration::ZERO);
        liveness.heard(1, Duration::from_secs(60));
        assert!(liveness.silence(1) < Duration::from_millis(20));
        assert_eq!(liveness.silence(0), Duration::ZERO);
    }

    #[test]
    fn a_rank_beyond_the_world_changes_nothing() {
        let liveness = Liveness::new(0, 1);
        assert!(!liveness.end(7, End::Left));
        liveness.heard(7, Duration::ZERO);
        assert_eq!(liveness.silence(7), Duration::ZERO);
        assert!(liveness.gone("test").is_none());
    }
}
