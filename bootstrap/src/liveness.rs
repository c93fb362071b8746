//! The state of each rank, as far as this rank knows.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::headway::{Begun, Headway, Headways};
use super::message::End;
use super::roster::Roster;
use crate::config::OnFailure;
use tokenyard_errors::{Error, ErrorKind};

/// The state of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// It has not ended, as far as this rank knows.
    Alive,
    /// Its goodbye has arrived.
    Left,
    /// It was killed, silent for too long, or reported a failure.
    Lost {
        /// The cause, as text that follows the rank's name: `"was silent for 31 s"`. Fit to print.
        why: String,
    },
}

/// The loss of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// The lost rank.
    pub rank: u32,
    /// The cause, as text that follows the rank's name: `"failed: out of memory"`. Fit to print.
    pub why: String,
    /// When this rank learned of it.
    pub when: Instant,
}

/// The state of every rank of a world. The control thread writes it, any thread reads it; reads
/// take no lock and do not wait, so a watchdog or a spinning wait may call them.
///
/// A goodbye is not a loss, but a required rank may not leave either. Where the loss of a rank stops
/// the world, all ranks are required; where losses are masked, rank 0 and this rank are required.
///
/// A lost rank may come back, as another *life*. Lives are counted from 0; the record of an ended life
/// never changes.
pub struct Liveness {
    epoch: Instant,
    this: u32,
    on_failure: OnFailure,
    peers: Vec<Pulse>,
    first_loss: OnceLock<Loss>,
    first_leave: OnceLock<u32>,
    headways: Headways,
    roster: Roster,
}

struct Pulse {
    /// Nanoseconds from the epoch to the last sign of life.
    heard: AtomicU64,
    first: Life,
    /// True while a process waits to come back as this rank.
    waits: AtomicBool,
}

/// Lives are only ever added, so that reads take no lock.
#[derive(Default)]
struct Life {
    end: OnceLock<Ended>,
    next: OnceLock<Box<Life>>,
}

/// The end of one life.
pub struct Ended {
    /// [`PeerState::Left`] or [`PeerState::Lost`].
    pub state: PeerState,
    /// When this rank learned of it.
    pub when: Instant,
}

impl Pulse {
    fn lives(&self) -> impl Iterator<Item = &Life> {
        std::iter::successors(Some(&self.first), |life| life.next.get().map(|next| &**next))
    }

    fn current(&self) -> &Life {
        self.lives().last().unwrap_or(&self.first)
    }
}

impl Liveness {
    pub(super) fn new(this: u32, ranks: u32, on_failure: OnFailure) -> Self {
        let peer = || Pulse {
            heard: AtomicU64::new(0),
            first: Life::default(),
            waits: AtomicBool::new(false),
        };
        Self {
            epoch: Instant::now(),
            this,
            on_failure,
            peers: (0..ranks).map(|_| peer()).collect(),
            first_loss: OnceLock::new(),
            first_leave: OnceLock::new(),
            headways: Headways::default(),
            roster: Roster::default(),
        }
    }

    /// The same, of ranks that introduced themselves.
    pub(super) fn with_roster(self, roster: Roster) -> Self {
        Self { roster, ..self }
    }

    /// The error with the process of the rank that it is about, where the ranks introduced themselves.
    pub fn locate(&self, error: Error) -> Error {
        self.roster.locate(error)
    }

    /// The processes of the first of `ranks`, as text that follows their list.
    pub(super) fn list(&self, ranks: &[u32]) -> String {
        self.roster.list(ranks)
    }

    /// The state of `rank`; a rank beyond the world counts as one that left.
    pub fn state(&self, rank: u32) -> &PeerState {
        match self.peers.get(rank as usize) {
            Some(peer) => peer.current().end.get().map_or(&PeerState::Alive, |end| &end.state),
            None => &PeerState::Left,
        }
    }

    /// The time since this rank received the goodbye of `rank`, if it did.
    pub fn since_goodbye(&self, rank: u32) -> Option<Duration> {
        let end = self.peers.get(rank as usize)?.current().end.get()?;
        (end.state == PeerState::Left).then(|| end.when.elapsed())
    }

    /// The time since this rank received its last goodbye, if any.
    pub fn since_last_goodbye(&self) -> Option<Duration> {
        (0..self.peers.len() as u32).filter_map(|rank| self.since_goodbye(rank)).min()
    }

    /// The time since this rank learned of the end of `rank`, if it has ended.
    pub fn since_end(&self, rank: u32) -> Option<Duration> {
        Some(self.peers.get(rank as usize)?.current().end.get()?.when.elapsed())
    }

    /// The live rank that has been silent for longest, and the time; never this rank.
    pub fn most_silent(&self) -> Option<(u32, Duration)> {
        let ranks = 0..self.peers.len() as u32;
        ranks
            .filter(|rank| matches!(self.state(*rank), PeerState::Alive))
            .map(|rank| (rank, self.silence(rank)))
            .max_by_key(|(_, silence)| *silence)
    }

    /// The rank that has this view.
    pub fn this(&self) -> u32 {
        self.this
    }

    /// The life of `rank`: the number of times it came back.
    pub fn life(&self, rank: u32) -> u32 {
        self.peers.get(rank as usize).map_or(0, |peer| peer.lives().count() as u32 - 1)
    }

    /// The end of life number `life` of `rank`, if it has ended.
    pub fn end_of(&self, rank: u32, life: u32) -> Option<&Ended> {
        self.peers.get(rank as usize)?.lives().nth(life as usize)?.end.get()
    }

    /// True while a process waits to come back as `rank`, which ended. It comes back when a communicator
    /// is renewed, or opened.
    pub fn waits_to_return(&self, rank: u32) -> bool {
        self.peers.get(rank as usize).is_some_and(|peer| peer.waits.load(Ordering::Relaxed))
    }

    pub(super) fn set_waiting(&self, rank: u32, waits: bool) {
        if let Some(peer) = self.peers.get(rank as usize) {
            peer.waits.store(waits, Ordering::Relaxed);
        }
    }

    /// Begins another life of `rank`, whose last one ended.
    pub(super) fn returns(&self, rank: u32) {
        let Some(peer) = self.peers.get(rank as usize) else { return };
        let life = peer.current();
        if life.end.get().is_some() {
            // Only the control thread adds lives.
            let _ = life.next.set(Box::default());
        }
        peer.waits.store(false, Ordering::Relaxed);
        self.heard(rank, Duration::ZERO);
    }

    /// Ranks whose present life has ended, in order.
    #[cfg(test)]
    pub(super) fn absent(&self) -> Vec<u32> {
        let ranks = 0..self.peers.len() as u32;
        ranks.filter(|rank| *self.state(*rank) != PeerState::Alive).collect()
    }

    /// The first loss that this rank learned of.
    pub fn first_loss(&self) -> Option<&Loss> {
        self.first_loss.get()
    }

    /// The time since the last sign of life of `rank`: zero for this rank itself and for a rank beyond
    /// the world. Signs of life of other ranks reach this rank with the heartbeats of rank 0, so the
    /// time grows for all of them once rank 0 has ended.
    pub fn silence(&self, rank: u32) -> Duration {
        match self.peers.get(rank as usize) {
            Some(peer) if rank != self.this => {
                let heard = Duration::from_nanos(peer.heard.load(Ordering::Relaxed));
                self.epoch.elapsed().saturating_sub(heard)
            }
            _ => Duration::ZERO,
        }
    }

    /// Starts to count the operations of a new communicator. All ranks agree on its number.
    pub fn headway(&self, comm: u64) -> Arc<Headway> {
        self.headways.open(comm)
    }

    /// The operations that this rank has begun.
    pub(super) fn begun(&self) -> Begun {
        self.headways.begun()
    }

    /// Records the operations that all ranks have begun.
    pub(super) fn all_begun(&self, begun: &[(u64, u64)]) {
        self.headways.all_begun(begun);
    }

    /// Records a sign of life, `ago` in the past. Never moves the last sign of a peer back.
    pub(super) fn heard(&self, rank: u32, ago: Duration) {
        if let Some(peer) = self.peers.get(rank as usize) {
            let at = self.epoch.elapsed().saturating_sub(ago).as_nanos() as u64;
            peer.heard.fetch_max(at, Ordering::Relaxed);
        }
    }

    /// Records the end of `rank`. Only the first end of a life counts; returns true for it.
    pub(super) fn end(&self, rank: u32, end: End) -> bool {
        let Some(peer) = self.peers.get(rank as usize) else { return false };
        let state = match &end {
            End::Left => PeerState::Left,
            End::Lost(why) => PeerState::Lost { why: why.clone() },
        };
        if peer.current().end.set(Ended { state, when: Instant::now() }).is_err() {
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

    /// The error of a collective that can no longer succeed, if a required rank has ended.
    pub(super) fn gone(&self, operation: &'static str) -> Option<Error> {
        if self.on_failure == OnFailure::Mask {
            let rank = [self.this, 0].into_iter().find(|r| *self.state(*r) != PeerState::Alive)?;
            return Some(self.end_of_all(operation, rank));
        }
        self.any_gone(operation)
    }

    /// The error of a call that requires every rank, if a rank has ended.
    pub(super) fn any_gone(&self, operation: &'static str) -> Option<Error> {
        let lost = |rank, message, fix| {
            let error = Error::new(ErrorKind::PeerLost, operation, message);
            Some(self.locate(error.with_rank(rank).with_fix(fix)))
        };
        if let Some(Loss { rank, why, .. }) = self.first_loss() {
            let fix = format!("read the log of rank {rank}, then restart the job");
            return lost(*rank, format!("rank {rank} {why}"), fix);
        }
        let rank = self.first_leave.get()?;
        let fix = "let every rank make the same collectives before it leaves".to_owned();
        lost(*rank, format!("rank {rank} left the world, expected it to take part"), fix)
    }

    /// The error where losses are masked and a rank has ended that this rank requires.
    #[cold]
    pub fn end_of_all(&self, operation: &'static str, rank: u32) -> Error {
        let what = match self.state(rank) {
            PeerState::Lost { why } => why,
            PeerState::Left => "left the world",
            PeerState::Alive => "ended",
        };
        let (message, fix) = if rank == 0 {
            let this = if rank == self.this { ", this one," } else { "" };
            let message = format!("rank 0{this} {what}; all ranks meet there");
            (message, "restart the job: on_failure = \"mask\" covers every rank but rank 0")
        } else {
            let message = format!("rank {rank}, this one, {what}; the others go on without it");
            (message, "join again: this rank comes back when the others renew their communicator")
        };
        let error = Error::new(ErrorKind::PeerLost, operation, message).with_rank(rank);
        self.locate(error.with_fix(fix))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_end_of_a_rank_counts_and_a_goodbye_is_no_loss() {
        let liveness = Liveness::new(0, 3, OnFailure::Stop);
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
        let liveness = Liveness::new(0, 2, OnFailure::Stop);
        std::thread::sleep(Duration::from_millis(20));
        assert!(liveness.silence(1) >= Duration::from_millis(20));
        liveness.heard(1, Duration::ZERO);
        liveness.heard(1, Duration::from_secs(60));
        assert!(liveness.silence(1) < Duration::from_millis(20));
        assert_eq!(liveness.silence(0), Duration::ZERO);
    }

    #[test]
    fn a_rank_beyond_the_world_changes_nothing() {
        let liveness = Liveness::new(0, 1, OnFailure::Stop);
        assert!(!liveness.end(7, End::Left));
        liveness.heard(7, Duration::ZERO);
        assert_eq!(liveness.silence(7), Duration::ZERO);
        assert!(liveness.gone("test").is_none());
    }

    #[test]
    fn a_rank_that_comes_back_is_alive_and_its_former_life_stays_ended() {
        let liveness = Liveness::new(0, 3, OnFailure::Mask);
        liveness.end(2, End::Lost("was killed".into()));
        liveness.set_waiting(2, true);
        assert!(liveness.waits_to_return(2));
        assert_eq!((liveness.absent(), liveness.life(2)), (vec![2], 0));
        liveness.returns(2);
        assert_eq!((liveness.state(2), liveness.life(2)), (&PeerState::Alive, 1));
        assert!(!liveness.waits_to_return(2));
        let first = liveness.end_of(2, 0).unwrap();
        assert_eq!(first.state, PeerState::Lost { why: "was killed".into() });
        assert!(liveness.end_of(2, 1).is_none() && liveness.absent().is_empty());
        // A rank that has not ended cannot come back.
        liveness.returns(2);
        assert_eq!(liveness.life(2), 1);
    }

    #[test]
    fn where_losses_are_masked_only_rank_0_and_this_rank_are_needed() {
        let liveness = Liveness::new(1, 4, OnFailure::Mask);
        liveness.end(2, End::Left);
        liveness.end(3, End::Lost("was killed".into()));
        assert!(liveness.gone("test").is_none());
        liveness.end(0, End::Lost("was killed".into()));
        let error = liveness.gone("test").unwrap();
        assert_eq!((error.kind(), error.rank()), (ErrorKind::PeerLost, Some(0)));
        assert!(error.to_string().contains("rank 0 was killed; all ranks meet there"), "{error}");
        liveness.end(1, End::Lost("was silent (reported by rank 0)".into()));
        let error = liveness.gone("test").unwrap().to_string();
        assert!(error.contains("rank 1, this one, was silent"), "{error}");
        assert!(error.contains("the others go on without it"), "{error}");
    }
}
