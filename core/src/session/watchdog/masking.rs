//! Masked losses: the ranks that the user continues without, and whether this rank itself is still a
//! member.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{EndedWaits, LOOK, SILENT, WatchdogState};
use crate::abi;
use crate::bootstrap::{Ended, PeerState};
use crate::{Error, ErrorKind, Result};

impl WatchdogState {
    /// Records lost ranks; the user ends only with the loss of rank 0, where all ranks meet, or when
    /// the others declared this rank lost. A rank 0 that sent its goodbye ends waits on it, as any rank that
    /// left.
    pub(super) fn mask_losses(&self) -> Option<EndedWaits> {
        let me = self.liveness.this();
        let (mut hub_lost, mut news) = (false, Vec::new());
        for (rank, ended) in self.membership.ended(&self.liveness).filter(|(rank, _)| *rank != me) {
            if rank == 0 {
                hub_lost = ended.state != PeerState::Left;
            } else if self.mask(rank, ended) {
                news.push(rank);
            }
        }
        if let Some(recorder) = self.recorder.get().filter(|_| !news.is_empty()) {
            recorder.report_masked(&news);
        }
        match self.given_up() {
            // Until the others have received the report of this rank's loss, they may still read the memory
            // that it entered with. Only after that do its waits end, and its memory may change.
            Some(when) if when.elapsed() < self.bounds.deadline => None,
            Some(_) => Some(self.end_of_all(me)),
            None => hub_lost.then(|| self.end_of_all(0)),
        }
    }

    /// The time at which this rank learned that the others declared it lost.
    fn given_up(&self) -> Option<Instant> {
        let me = self.liveness.this();
        self.membership.ended(&self.liveness).find(|(rank, _)| *rank == me).map(|(_, end)| end.when)
    }

    #[cold]
    fn end_of_all(&self, rank: u32) -> EndedWaits {
        let text = self.liveness.end_of_all("watch ranks", rank).detail();
        let text = format!("{text}; {}", self.describe_wait());
        EndedWaits { kind: ErrorKind::PeerLost, rank, text }
    }

    /// Marks a rank as lost. Returns true if the mark is new.
    fn mask(&self, rank: u32, ended: &Ended) -> bool {
        // Signals that a rank raised before its goodbye may still be on their way for a moment.
        let left = ended.state == PeerState::Left;
        if left && ended.when.elapsed() < self.bounds.grace() {
            return false;
        }
        let Some(lost) = self.lost.get(rank as usize) else { return false };
        let is_new = lost.swap(abi::TY_RANK_LOST, Ordering::AcqRel) == 0;
        if is_new {
            tracing::warn!("going on without rank {rank}{}", self.link_of(rank));
            self.note_unrest(Duration::ZERO);
        }
        is_new
    }

    /// Records a check of the watchdog, and the pause before it. In this order: a thread that sees the
    /// check also sees the pause.
    pub(super) fn note_look(&self) {
        let now = boottime_ns();
        let pause = now.saturating_sub(self.looked.load(Ordering::Acquire));
        let pause = Duration::from_nanos(pause);
        if !self.lost.is_empty() {
            if pause > self.longest_pause() {
                let resumed = Some(Instant::now());
                *self.resumed.lock().unwrap_or_else(PoisonError::into_inner) = resumed;
                self.note_unrest(pause);
            }
            self.note_silence();
        }
        self.looked.store(now, Ordering::Release);
    }

    /// The longest pause of the watchdog, or of the news from rank 0, that is no stop of this process.
    fn longest_pause(&self) -> Duration {
        SILENT.min(self.bounds.deadline / 4)
    }

    /// True if this process has just been stopped, or starved, and `resumed` does not show it yet.
    fn was_stopped(&self) -> bool {
        let looked = self.looked.load(Ordering::Acquire);
        Duration::from_nanos(boottime_ns().saturating_sub(looked)) > self.longest_pause()
    }

    /// True if this process ran without a stop, or has received news since, and is not declared lost.
    pub(super) fn is_settled(&self) -> bool {
        let stopped = self.was_stopped();
        let resumed = *self.resumed.lock().unwrap_or_else(PoisonError::into_inner);
        let runs = !stopped && resumed.is_none_or(|since| since.elapsed() > SILENT);
        // Rank 0 has reported the state of this rank before its goodbye.
        let hears = match self.liveness.state(0) {
            PeerState::Alive => self.liveness.silence(0) <= self.longest_pause(),
            PeerState::Left => true,
            PeerState::Lost { .. } => false,
        };
        runs && hears && self.given_up().is_none()
    }

    /// The wait of [`Watchdog::confirm`](super::Watchdog::confirm). It counts its checks, not the time:
    /// a process that is stopped again checks nothing meanwhile.
    pub(super) fn settle(&self) -> Result<()> {
        let most = (2 * self.bounds.deadline + 4 * SILENT).div_duration_f64(LOOK) as u64;
        for _ in 0..most {
            if self.is_settled() {
                return Ok(());
            }
            if let Some(error) = self.ended() {
                return Err(error);
            }
            std::thread::sleep(LOOK);
        }
        let text = format!(
            "this process is stopped or starved again and again: its last news of rank 0 is {:.1} s \
             old; expected news every {:.1} s",
            self.liveness.silence(0).as_secs_f64(),
            self.longest_pause().as_secs_f64()
        );
        Err(Error::new(ErrorKind::Deadline, "watch ranks", text)
            .with_fix("give it a core of its own"))
    }

    /// True if a rank has ended whose loss is not recorded yet.
    fn has_news(&self) -> bool {
        let is_lost = |rank: u32| {
            self.lost.get(rank as usize).is_some_and(|lost| lost.load(Ordering::Acquire) != 0)
        };
        self.membership.ended(&self.liveness).any(|(rank, _)| !is_lost(rank))
    }

    /// Records a silence or an end. In this order: a silent rank that ends meanwhile is seen as silent
    /// or as ended.
    fn note_silence(&self) {
        if let Some((_, silence)) = self.liveness.most_silent()
            && silence > SILENT
        {
            self.note_unrest(silence);
        } else if self.has_news() {
            self.note_unrest(Duration::ZERO);
        }
    }

    /// Suspends the bounds from `since` ago until a moment from now, so that the others can catch up.
    fn note_unrest(&self, since: Duration) {
        let now = Instant::now();
        let mut unrest = self.unrest.lock().unwrap_or_else(PoisonError::into_inner);
        unrest.note(now.checked_sub(since).unwrap_or(now), now + SILENT);
    }

    /// The part of a wait's time that counts against its peer alone. If rank 0 waits for rank 1, and rank 1
    /// waits for a silent rank, the wait of rank 0 must not reach its bound before the silence is resolved. A
    /// rank is silent for `deadline` at most; after that it is lost. So bounds are suspended meanwhile,
    /// though not for ever (INV-6).
    pub(super) fn blameless(&self, used: Duration) -> Duration {
        if self.lost.is_empty() {
            return used;
        }
        if self.given_up().is_some() || self.was_stopped() {
            // No rank answers this rank any more, and the reason will arrive; or the news is still
            // unread.
            return Duration::ZERO;
        }
        let unrest = self.unrest.lock().unwrap_or_else(PoisonError::into_inner);
        used.saturating_sub(unrest.within(used, Instant::now()))
    }
}

/// The time of a clock that runs while the machine sleeps, as the clocks of other machines do.
pub(super) fn boottime_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
