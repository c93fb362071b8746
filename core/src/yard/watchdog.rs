use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::abi;
use crate::bootstrap::{Ended, Headway, Liveness, Membership, PeerState, World};
use crate::config::OnFailure;
use crate::wait::{WaitBoard, Waiting, expired, monotonic_ns};
use crate::{Error, ErrorKind, Result};

/// How often the watchdog looks.
const LOOK: Duration = Duration::from_millis(10);

/// How long a wait on a rank that left may last.
const GRACE: Duration = Duration::from_secs(1);

/// How long a live rank may be silent: several heartbeats of at most 100 ms.
const SILENT: Duration = Duration::from_millis(500);

/// The bounds of a wait (INV-6).
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// From a peer's arrival to the end of a wait on it.
    pub(super) deadline: Duration,
    /// How long a live peer may take to arrive at all.
    pub(super) late: Duration,
}

/// One thread per yard that ends waits: when a rank is lost, or when a wait outlives its bound. Where
/// losses are masked, it tells the kernel set who is lost, and the kernel set ends those waits.
pub(super) struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
}

struct Shared {
    board: WaitBoard,
    liveness: Arc<Liveness>,
    headway: Arc<Headway>,
    bounds: Bounds,
    membership: Membership,
    /// By rank: 1 once it is lost, where losses are masked; else empty.
    lost: Vec<AtomicU8>,
    /// When the last loss was noted, or a rank was silent while a wait was overdue.
    unsettled: Mutex<Option<Instant>>,
    /// When the watchdog looked last, in nanoseconds of `CLOCK_MONOTONIC`.
    looked: AtomicU64,
    /// When it ran again after this process had been stopped, or starved.
    resumed: Mutex<Option<Instant>>,
    verdict: Mutex<Option<Verdict>>,
    stop: AtomicBool,
    /// What connects this rank to others, by level and world rank; set once the links are up.
    links: OnceLock<[Vec<(u32, String)>; 2]>,
}

/// Why waits were ended. Kept as data: every call after it makes a fresh error of it.
#[derive(Clone, Debug)]
struct Verdict {
    kind: ErrorKind,
    rank: u32,
    text: String,
}

impl Watchdog {
    pub(super) fn start(
        world: &World,
        headway: Arc<Headway>,
        bounds: Bounds,
        membership: Membership,
    ) -> Result<Self> {
        let lost = match membership.on_failure {
            OnFailure::Stop => Vec::new(),
            OnFailure::Mask => membership
                .lives
                .iter()
                .map(|life| AtomicU8::new(u8::from(life.is_none())))
                .collect(),
        };
        let shared = Arc::new(Shared {
            board: WaitBoard::default(),
            headway,
            liveness: world.liveness(),
            bounds,
            membership,
            lost,
            unsettled: Mutex::new(None),
            looked: AtomicU64::new(monotonic_ns()),
            resumed: Mutex::new(None),
            verdict: Mutex::new(None),
            stop: AtomicBool::new(false),
            links: OnceLock::new(),
        });
        let watched = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("tokenyard-watch".into())
            .spawn(move || watched.watch())
            .map_err(|e| Error::system("start watchdog", "a thread cannot be made", e))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Tells the watchdog what connects this rank to others, for diagnoses. Once.
    pub(super) fn name_links(&mut self, links: [Vec<(u32, String)>; 2]) {
        // A second call would change nothing, and there is none.
        let _ = self.shared.links.set(links);
    }

    /// Notes that this rank has begun so many operations.
    pub(super) fn begin(&self, operations: u64) {
        self.shared.headway.begin(operations);
    }

    /// The board that waits are published on. It lives as long as the watchdog.
    pub(super) fn board(&self) -> &WaitBoard {
        &self.shared.board
    }

    /// R bytes that say who is lost, for the kernel set; null where a loss stops the yard. They live as
    /// long as the watchdog.
    pub(super) fn lost_table(&self) -> *const u8 {
        let lost = &self.shared.lost;
        if lost.is_empty() { std::ptr::null() } else { lost.as_ptr().cast() }
    }

    /// Ranks that the yard goes on without, in order.
    pub(super) fn lost_ranks(&self) -> Vec<u32> {
        self.shared.look();
        let lost = (0..).zip(&self.shared.lost);
        lost.filter(|(_, lost)| lost.load(Ordering::Acquire) != 0).map(|(rank, _)| rank).collect()
    }

    /// Whether what an operation brought may be believed, where losses are masked. A process that was
    /// stopped may have been given up, and may then have read what others had already changed. So
    /// after a stop this waits until word of that would have come.
    pub(super) fn confirm(&self) -> Result<()> {
        if self.shared.lost.is_empty() {
            return Ok(());
        }
        while !self.shared.is_settled() {
            if let Some(error) = self.verdict() {
                return Err(error);
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Why the yard cannot go on, if it cannot.
    pub(super) fn verdict(&self) -> Option<Error> {
        self.shared.look();
        self.shared
            .verdict()
            .as_ref()
            .map(|v| Error::new(v.kind, "watch ranks", v.text.clone()).with_rank(v.rank))
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The thread only looks and parks, so this ends at once.
            if thread.join().is_err() {
                tracing::error!("the watchdog thread panicked");
            }
        }
    }
}

impl Shared {
    fn watch(&self) {
        while !self.stop.load(Ordering::Acquire) {
            if self.was_stopped() {
                *self.resumed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
            }
            self.looked.store(monotonic_ns(), Ordering::Release);
            self.look();
            std::thread::park_timeout(LOOK);
        }
    }

    fn verdict(&self) -> std::sync::MutexGuard<'_, Option<Verdict>> {
        self.verdict.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self) {
        if self.board.is_aborted() {
            return;
        }
        let lost = match self.membership.on_failure {
            OnFailure::Stop => self.lost_rank(),
            OnFailure::Mask => self.mask_losses(),
        };
        let found = lost.or_else(|| self.overdue());
        if let Some(found) = found {
            let mut verdict = self.verdict();
            if verdict.is_none() {
                *verdict = Some(found);
            }
            drop(verdict);
            self.board.raise_abort();
        }
    }

    #[cold]
    fn describe_wait(&self) -> String {
        self.board.waiting().map_or_else(
            || "no wait was in progress".into(),
            |w| format!("at that time: {}", self.describe(&w)),
        )
    }

    /// A wait in words.
    fn describe(&self, waiting: &Waiting) -> String {
        expired(&waiting.what, waiting.found, waiting.lasted).message().to_owned()
    }

    /// The links to a rank. Among domains most ranks have none to each other.
    fn link_of(&self, rank: u32) -> String {
        let Some(links) = self.links.get() else { return String::new() };
        let mut text = String::new();
        let levels = ["scale-up", "scale-out"].iter().zip(links);
        for (level, links) in levels {
            if let Some((_, name)) = links.iter().find(|(linked, _)| *linked == rank) {
                text.push_str(&format!("; the {level} link to rank {rank} is {name}"));
            }
        }
        if text.is_empty() {
            text.push_str(&format!("; there is no link to rank {rank}: others hand its rows on"));
        }
        text
    }

    fn lost_rank(&self) -> Option<Verdict> {
        let loss = self.liveness.first_loss()?;
        Some(Verdict {
            kind: ErrorKind::PeerLost,
            rank: loss.rank,
            text: format!(
                "rank {} {}{}; {}",
                loss.rank,
                loss.why,
                self.link_of(loss.rank),
                self.describe_wait()
            ),
        })
    }

    /// Notes who is lost; the yard ends only with rank 0, where all meet, or when this rank itself was
    /// given up.
    fn mask_losses(&self) -> Option<Verdict> {
        let me = self.liveness.this();
        let mut hub_lost = false;
        for (rank, ended) in self.membership.ended(&self.liveness).filter(|(rank, _)| *rank != me) {
            if rank == 0 {
                hub_lost = true;
            } else {
                self.mask(rank, ended);
            }
        }
        match self.given_up() {
            // The others may still read what this rank entered with, until they have heard that it
            // is given up: its waits end, and its memory changes, only after that.
            Some(when) if when.elapsed() < self.bounds.deadline => None,
            Some(_) => Some(self.end_of_all(me)),
            None => hub_lost.then(|| self.end_of_all(0)),
        }
    }

    /// When this rank learned that the others gave it up.
    fn given_up(&self) -> Option<Instant> {
        let me = self.liveness.this();
        self.membership.ended(&self.liveness).find(|(rank, _)| *rank == me).map(|(_, end)| end.when)
    }

    #[cold]
    fn end_of_all(&self, rank: u32) -> Verdict {
        let text = self.liveness.end_of_all("watch ranks", rank).detail();
        let text = format!("{text}; {}", self.describe_wait());
        Verdict { kind: ErrorKind::PeerLost, rank, text }
    }

    fn mask(&self, rank: u32, ended: &Ended) {
        // What a rank raised before its goodbye may still be on its way for a moment.
        let left = ended.state == PeerState::Left;
        if left && ended.when.elapsed() < GRACE.min(self.bounds.deadline) {
            return;
        }
        let Some(lost) = self.lost.get(rank as usize) else { return };
        if lost.swap(1, Ordering::AcqRel) == 0 {
            tracing::warn!("going on without rank {rank}{}", self.link_of(rank));
            self.unsettle();
        }
    }

    /// Whether this process has just been stopped, or starved: `resumed` does not know of it yet.
    fn was_stopped(&self) -> bool {
        let looked = self.looked.load(Ordering::Acquire);
        Duration::from_nanos(monotonic_ns().saturating_sub(looked)) > self.bounds.deadline / 2
    }

    /// For how long this process has run since it was stopped, if it ever was.
    fn runs_again(&self) -> Option<Duration> {
        let resumed = *self.resumed.lock().unwrap_or_else(PoisonError::into_inner);
        resumed.map(|since| since.elapsed())
    }

    /// Whether this process ran all the time, or has heard since whether it was given up; and was not.
    fn is_settled(&self) -> bool {
        let stopped = self.was_stopped();
        let heard = self.runs_again().is_none_or(|since| since > SILENT);
        let needed = |rank: u32| rank == 0 || rank == self.liveness.this();
        let ended = self.membership.ended(&self.liveness).any(|(rank, _)| needed(rank));
        !stopped && heard && !ended
    }

    /// Whether a rank has ended whose loss is not noted yet.
    fn has_news(&self) -> bool {
        let is_lost = |rank: u32| {
            self.lost.get(rank as usize).is_some_and(|lost| lost.load(Ordering::Acquire) != 0)
        };
        self.membership.ended(&self.liveness).any(|(rank, _)| !is_lost(rank))
    }

    fn unsettle(&self) {
        *self.unsettled.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// For how long a wait has lasted that nobody but its peer is to blame for. Whoever waits for a
    /// rank that waits for a silent one must not lose patience before the silence is resolved: the
    /// bound begins anew then. A rank is silent for `deadline` at most, or it is lost.
    fn blameless(&self, waiting: &Waiting) -> Duration {
        if self.lost.is_empty() {
            return waiting.lasted;
        }
        if self.given_up().is_some() || self.was_stopped() {
            // Nobody answers this rank any more, and it will hear why; or it has yet to hear so.
            return Duration::ZERO;
        }
        let lasted = self.runs_again().map_or(waiting.lasted, |since| waiting.lasted.min(since));
        // In this order: a silent rank that ends meanwhile is seen as the one or the other.
        let is_silent = self.liveness.most_silent().is_some_and(|(_, silence)| silence > SILENT);
        if is_silent || self.has_news() {
            self.unsettle();
        }
        let unsettled = *self.unsettled.lock().unwrap_or_else(PoisonError::into_inner);
        unsettled.map_or(lasted, |since| lasted.min(since.elapsed()))
    }

    /// A rank that said goodbye raises no signal any more. What it raised before may still be on
    /// its way for a moment.
    fn left(&self, waiting: &Waiting) -> Option<Verdict> {
        let rank = waiting.what.peer;
        if waiting.lasted < GRACE.min(self.bounds.deadline) {
            return None;
        }
        let has_left = |rank| matches!(self.liveness.state(rank), PeerState::Left);
        let lost = |rank: u32, what: &str| {
            let text = format!("rank {rank} left the world{what}; {}", self.describe_wait());
            Some(Verdict { kind: ErrorKind::PeerLost, rank, text })
        };
        if has_left(rank) {
            return lost(rank, "");
        }
        // All news came from rank 0. Who waits for a rank that ended after it would never hear so.
        if has_left(0) && self.liveness.silence(0) > GRACE.min(self.bounds.deadline) / 2 {
            return lost(0, ", and with it all news of the other ranks");
        }
        None
    }

    /// Whether the rank that is waited for may itself wait for another that has fallen silent, or
    /// left. A silence is resolved first, one way or the other: that takes `deadline` at most. Who
    /// waits for a rank that left says so after [`GRACE`].
    fn may_be_innocent(&self, waiting: &Waiting, over: Duration) -> bool {
        let silent = self.liveness.most_silent();
        let silent =
            silent.is_some_and(|(rank, silence)| rank != waiting.what.peer && silence > SILENT);
        (silent && over < self.bounds.deadline)
            || (self.liveness.somebody_left() && over < GRACE.min(self.bounds.deadline) / 2)
    }

    /// What bounds a wait, and how much of it is used up. A peer that has not arrived may be late;
    /// once all ranks have, its word must come, or the link between carries nothing.
    fn limit(&self, waiting: &Waiting) -> Limit {
        let Bounds { deadline, late } = self.bounds;
        if waiting.what.phase != abi::TY_PHASE_ENTRY {
            let used = waiting.lasted;
            return Limit { bound: deadline, key: "deadline_ms", used, note: "" };
        }
        match self.headway.together() {
            None => Limit { bound: late, key: "late_ms", used: waiting.lasted, note: "" },
            Some(since) => Limit {
                bound: deadline,
                key: "deadline_ms",
                used: since.min(waiting.lasted),
                note: "; all ranks have begun the operation, so no rank is late",
            },
        }
    }

    fn overdue(&self) -> Option<Verdict> {
        let waiting = self.board.waiting()?;
        if self.membership.on_failure == OnFailure::Stop
            && let Some(left) = self.left(&waiting)
        {
            return Some(left);
        }
        let Limit { bound, key, used, note } = self.limit(&waiting);
        if used < bound
            || self.may_be_innocent(&waiting, used.saturating_sub(bound))
            || self.blameless(&waiting) < bound
        {
            return None;
        }
        let rank = waiting.what.peer;
        Some(Verdict {
            kind: ErrorKind::Deadline,
            rank,
            text: format!(
                "{}; its last heartbeat came {:.1} s ago, and {key} = {} is over{note}{}",
                self.describe(&waiting),
                self.liveness.silence(rank).as_secs_f64(),
                bound.as_millis(),
                self.link_of(rank)
            ),
        })
    }
}

/// The end of a wait that nobody ends.
struct Limit {
    bound: Duration,
    /// Where the config says it.
    key: &'static str,
    used: Duration,
    note: &'static str,
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::bootstrap::{Ask, Identity, Place, Rendezvous, WorldOptions};
    use crate::wait::{WaitFor, Waiter};

    const DEADLINE: Duration = Duration::from_secs(2);
    const LATE: Duration = Duration::from_secs(120);

    /// Runs `body` on every rank, on threads, each with its watchdog.
    fn in_world(ranks: u32, body: impl Fn(World, Watchdog) + Sync) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("job");
        let body = &body;
        std::thread::scope(|scope| {
            for rank in 0..ranks {
                let rendezvous = Rendezvous::File { path: path.clone() };
                scope.spawn(move || {
                    let place = Place { rank, ranks, local_rank: rank };
                    let identity = Identity::new(place, rendezvous).expect("a place");
                    let options = WorldOptions::new(identity);
                    let world =
                        World::join(WorldOptions { deadline: DEADLINE, late: LATE, ..options })
                            .expect("all come");
                    let bounds = Bounds { deadline: DEADLINE, late: LATE };
                    let membership =
                        world.admit(Ask::First).expect("all are there").membership().clone();
                    let headway = world.liveness().headway(0);
                    let watchdog = Watchdog::start(&world, headway, bounds, membership);
                    let watchdog = watchdog.expect("starts");
                    body(world, watchdog);
                });
            }
        });
    }

    /// Waits for the entry of `peer`, which does not come; returns the watchdog's words.
    fn wait_for_entry(watchdog: &Watchdog, peer: u32) -> Error {
        let what = WaitFor {
            phase: abi::TY_PHASE_ENTRY,
            peer,
            signal: 0,
            expected: 1,
            operation: 0,
            level: abi::TY_LEVEL_SCALE_UP,
        };
        let waiter = Waiter::new(watchdog.board(), LATE);
        assert!(waiter.until(&what, || 0, || Ok(())).is_err());
        watchdog.verdict().expect("the watchdog ended the wait")
    }

    #[test]
    fn a_wait_for_an_entry_ends_a_deadline_after_the_last_rank_has_begun() {
        const LATER: Duration = Duration::from_secs(1);
        in_world(2, |world, watchdog| {
            let start = Instant::now();
            world.barrier("start").expect("both are there");
            if world.rank() == 1 {
                std::thread::sleep(LATER);
                watchdog.begin(1);
                // The other one leaves once its wait has ended.
                assert!(world.barrier("end").is_ok());
                return;
            }
            watchdog.begin(1);
            let error = wait_for_entry(&watchdog, 1);
            assert!(start.elapsed() >= LATER + DEADLINE, "{:?}: {error}", start.elapsed());
            assert_eq!((error.kind(), error.rank()), (ErrorKind::Deadline, Some(1)), "{error}");
            let text = error.to_string();
            assert!(text.contains("deadline_ms = 2000 is over; all ranks have begun"), "{text}");
            world.barrier("end").expect("both are there");
        });
    }

    #[test]
    fn a_wait_ends_when_rank_0_has_left_and_no_news_can_come_any_more() {
        in_world(3, |world, watchdog| {
            world.barrier("start").expect("all are there");
            match world.rank() {
                0 => drop(world),
                1 => {
                    let error = wait_for_entry(&watchdog, 2);
                    let about = (error.kind(), error.rank());
                    assert_eq!(about, (ErrorKind::PeerLost, Some(0)), "{error}");
                }
                // It lives, and does not arrive.
                _ => assert!(world.barrier("never").is_err()),
            }
        });
    }
}
