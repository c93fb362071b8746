use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use crate::abi;
use crate::bootstrap::{Headway, Liveness, PeerState};
use crate::wait::{WaitBoard, Waiting, expired};
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

/// One thread per yard that ends waits: when a rank is lost, or when a wait outlives its bound.
pub(super) struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
}

struct Shared {
    board: WaitBoard,
    liveness: Arc<Liveness>,
    headway: Arc<Headway>,
    bounds: Bounds,
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
    pub(super) fn start(liveness: Arc<Liveness>, bounds: Bounds) -> Result<Self> {
        let shared = Arc::new(Shared {
            board: WaitBoard::default(),
            headway: liveness.headway(),
            liveness,
            bounds,
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
        let found = self.lost_rank().or_else(|| self.overdue());
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
        if let Some(left) = self.left(&waiting) {
            return Some(left);
        }
        let Limit { bound, key, used, note } = self.limit(&waiting);
        if used < bound || self.may_be_innocent(&waiting, used.saturating_sub(bound)) {
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
    use crate::bootstrap::{Identity, Place, Rendezvous, World, WorldOptions};
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
                    let watchdog = Watchdog::start(world.liveness(), bounds).expect("starts");
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
