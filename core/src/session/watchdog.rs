mod masking;
mod unrest;

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use self::unrest::Unrest;
use super::reporter::FlightRecorder;
use crate::abi;
use crate::bootstrap::{Headway, Liveness, Membership, PeerState, World, beat};
use crate::config::OnFailure;
use crate::wait::{WaitBoard, Waiting, expired};
use crate::{Error, ErrorKind, Result};

/// The interval between two checks of the watchdog.
const LOOK: Duration = Duration::from_millis(10);

/// Most time that data of a rank may still be on its way after its goodbye was received. A new wait
/// does not restart it.
const GRACE: Duration = Duration::from_secs(1);

/// The shortest wait for data of a rank that left longer ago. The data is here, or in the kernels'
/// socket buffers, until this rank reads and so opens the TCP window; longer than the 200 ms after
/// which Linux repeats a lost segment. A wait that begins after the last arrival needs this time,
/// because no thread read in between.
const LAST_FETCH: Duration = Duration::from_millis(250);

/// The shortest wait on a live rank after rank 0 left, when no more news arrives.
const LAST_NEWS: Duration = Duration::from_millis(500);

/// Most silence of a live rank where losses are masked: several heartbeats of at most 100 ms.
const SILENT: Duration = Duration::from_millis(500);

/// Most extra time of a wait on a peer that forwards data.
const PATIENCE: Duration = Duration::from_millis(500);

/// The bounds of a wait (INV-6).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Most time from a peer's arrival to the end of a wait on it.
    pub(crate) deadline: Duration,
    /// Most time for a live peer to arrive at all.
    pub(crate) late: Duration,
}

impl Bounds {
    /// Most time in total for which the bounds are suspended, while other ranks are silent, where
    /// losses are masked.
    fn excuse(&self, on_failure: OnFailure) -> Duration {
        match on_failure {
            OnFailure::Stop => Duration::ZERO,
            OnFailure::Mask => 4 * self.deadline,
        }
    }

    /// The time after a goodbye from which no data is on its way any more.
    fn grace(&self) -> Duration {
        GRACE.min(self.deadline)
    }

    /// True if a wait for a rank that sent its goodbye is over: `since_goodbye` and `lasted` are the times
    /// since the goodbye and since the wait began. The wait ends with the grace, which counts from the
    /// goodbye, but not before it has lasted `least`. An arrival ends a wait too, so a rank waits again only
    /// after an arrival. It receives all data that was sent before the goodbye, and waits only once for data
    /// that was not sent.
    fn is_over(&self, since_goodbye: Duration, lasted: Duration, least: Duration) -> bool {
        since_goodbye >= self.grace() && lasted >= least.min(self.deadline)
    }

    /// The longest that any wait lasts.
    pub(crate) fn cap(&self, on_failure: OnFailure) -> Duration {
        self.late + 2 * self.deadline + self.excuse(on_failure)
    }
}

/// One thread per user that ends waits: when a rank is lost, or when a wait outlives its bound. Where
/// losses are masked, it marks the lost ranks for the kernel set, and the kernel set ends those waits.
pub(crate) struct Watchdog {
    shared: Arc<WatchdogState>,
    thread: Option<std::thread::JoinHandle<()>>,
}

struct WatchdogState {
    board: WaitBoard,
    /// The time of waits on each rank; the board points there.
    waited_ns: Arc<[AtomicU64]>,
    liveness: Arc<Liveness>,
    headway: Arc<Headway>,
    bounds: Bounds,
    membership: Membership,
    /// By rank: 0, or one of `TY_RANK_*`, where losses are masked; else empty.
    lost: Vec<AtomicU8>,
    /// The times in which bounds were suspended, where losses are masked.
    unrest: Mutex<Unrest>,
    /// The time of the watchdog's last check, in nanoseconds of `CLOCK_BOOTTIME`.
    looked: AtomicU64,
    /// The time at which it ran again after this process had been stopped, or starved.
    resumed: Mutex<Option<Instant>>,
    verdict: Mutex<Option<EndedWaits>>,
    stop: AtomicBool,
    /// Set once the links are up.
    links: OnceLock<WatchedLinks>,
    /// Reports that waits were ended.
    recorder: OnceLock<Arc<FlightRecorder>>,
}

/// The links from this rank to others.
pub(crate) struct WatchedLinks {
    /// The names of the links, by level and world rank.
    pub(crate) names: [Vec<(u32, String)>; 2],
    /// Domains among which data is forwarded; 1 where one link reaches every rank.
    pub(crate) domains: u32,
}

/// The reason why waits were ended. Stored as data: every later call makes a new error of it.
#[derive(Clone, Debug)]
struct EndedWaits {
    kind: ErrorKind,
    rank: u32,
    text: String,
}

impl EndedWaits {
    fn error(&self) -> Error {
        Error::new(self.kind, "watch ranks", self.text.clone()).with_rank(self.rank)
    }
}

/// The watchdog's view, for reports. Any thread may use it; no call waits.
pub(crate) struct Watched(Arc<WatchdogState>);

impl Watched {
    /// The wait in progress (false), or the last wait that ended without its signal (true).
    pub(crate) fn wait(&self) -> Option<(Waiting, bool)> {
        let board = &self.0.board;
        let now = board.waiting().map(|wait| (wait, false));
        now.or_else(|| board.given_up().map(|wait| (wait, true)))
    }

    /// Operations that all ranks have begun.
    pub(crate) fn begun_by_all(&self) -> u64 {
        self.0.headway.begun_by_all()
    }

    /// True if the user continues without a rank.
    pub(crate) fn is_masked(&self, rank: u32) -> bool {
        self.0.lost.get(rank as usize).is_some_and(|lost| lost.load(Ordering::Acquire) != 0)
    }

    /// The total time of waits on a rank, the wait in progress included.
    pub(crate) fn waited(&self, rank: u32) -> Duration {
        let past = self.0.waited_ns.get(rank as usize).map_or(0, |ns| ns.load(Ordering::Relaxed));
        let now = self.0.board.waiting().filter(|wait| wait.what.peer == rank);
        Duration::from_nanos(past) + now.map_or(Duration::ZERO, |wait| wait.lasted)
    }

    /// The links to a rank: their level and name.
    pub(crate) fn link_names(&self, rank: u32) -> Vec<(usize, String)> {
        let Some(links) = self.0.links.get() else { return Vec::new() };
        let named = links.names.iter().enumerate().filter_map(|(level, names)| {
            let at = names.binary_search_by_key(&rank, |(linked, _)| *linked).ok()?;
            Some((level, names[at].1.clone()))
        });
        named.collect()
    }
}

impl Watchdog {
    pub(crate) fn start(
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
                .map(|life| AtomicU8::new(if life.is_none() { abi::TY_RANK_ABSENT } else { 0 }))
                .collect(),
        };
        let waited_ns: Arc<[AtomicU64]> = (0..world.ranks()).map(|_| AtomicU64::new(0)).collect();
        let shared = Arc::new(WatchdogState {
            // SAFETY: the totals live as long as the board, and are never replaced; a move of their
            // owner does not move them.
            board: unsafe { WaitBoard::counting(&waited_ns) },
            waited_ns,
            headway,
            liveness: world.liveness(),
            bounds,
            lost,
            unrest: Mutex::new(Unrest::new(bounds.excuse(membership.on_failure))),
            looked: AtomicU64::new(masking::boottime_ns()),
            resumed: Mutex::new(None),
            verdict: Mutex::new(None),
            stop: AtomicBool::new(false),
            links: OnceLock::new(),
            recorder: OnceLock::new(),
            membership,
        });
        let watched = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("tokenyard-watch".into())
            .spawn(move || watched.watch())
            .map_err(|e| Error::system("start watchdog", "a thread cannot be made", e))?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Passes the links of this rank to the watchdog, for diagnoses. Called once.
    pub(crate) fn name_links(&mut self, links: WatchedLinks) {
        // A second call would change nothing, and there is none.
        let _ = self.shared.links.set(links);
    }

    /// Sets the recorder that reports why waits were ended. Called once.
    pub(crate) fn report_to(&self, recorder: &Arc<FlightRecorder>) {
        // As in `name_links`.
        let _ = self.shared.recorder.set(Arc::clone(recorder));
    }

    /// The view for reports.
    pub(crate) fn watched(&self) -> Watched {
        Watched(Arc::clone(&self.shared))
    }

    /// Records that this rank has begun `operations` operations.
    pub(crate) fn begin(&self, operations: u64) {
        self.shared.headway.begin(operations);
    }

    /// The board on which waits are published. It lives as long as the watchdog.
    pub(crate) fn board(&self) -> &WaitBoard {
        &self.shared.board
    }

    /// R bytes that mark the lost ranks, for the kernel set; null where a loss stops the user. They
    /// live as long as the watchdog.
    pub(crate) fn lost_table(&self) -> *const u8 {
        let lost = &self.shared.lost;
        if lost.is_empty() { std::ptr::null() } else { lost.as_ptr().cast() }
    }

    /// Ranks that the user continues without, in order.
    pub(crate) fn lost_ranks(&self) -> Vec<u32> {
        self.shared.look();
        let lost = (0..).zip(&self.shared.lost);
        lost.filter(|(_, lost)| lost.load(Ordering::Acquire) != 0).map(|(rank, _)| rank).collect()
    }

    /// Checks that the result of an operation is valid, where losses are masked. The others may have
    /// declared a stopped process lost, and it may then have read memory that they had already changed.
    /// This call therefore waits, after a stop, until the report of such a loss would have arrived.
    pub(crate) fn confirm(&self) -> Result<()> {
        if self.shared.lost.is_empty() {
            return Ok(());
        }
        self.shared.settle()
    }

    /// Adds the link to the rank to a failure about a rank.
    pub(crate) fn report_to_link(&self, error: Error) -> Error {
        match error.rank() {
            Some(rank) => {
                let link = self.shared.link_of(rank);
                error.with_context("link", link.trim_start_matches("; "))
            }
            None => error,
        }
    }

    /// The error that ended the user's waits, if there is one.
    pub(crate) fn verdict(&self) -> Option<Error> {
        self.shared.ended()
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The thread only checks and parks, so this ends at once.
            if thread.join().is_err() {
                tracing::error!("the watchdog thread panicked");
            }
        }
    }
}

impl WatchdogState {
    fn watch(&self) {
        while !self.stop.load(Ordering::Acquire) {
            self.note_look();
            self.look();
            std::thread::park_timeout(LOOK);
        }
    }

    fn verdict(&self) -> std::sync::MutexGuard<'_, Option<EndedWaits>> {
        self.verdict.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self) -> Option<Error> {
        self.look();
        self.verdict().as_ref().map(EndedWaits::error)
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
            // Reported before the wait ends, so that the report shows the wait.
            if let Some(recorder) = self.recorder.get() {
                recorder.report_error(&found.error());
            }
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

    /// A wait as text.
    fn describe(&self, waiting: &Waiting) -> String {
        expired(&waiting.what, waiting.found, waiting.lasted).message().to_owned()
    }

    /// The links to a rank. Between domains most ranks have no link.
    fn link_of(&self, rank: u32) -> String {
        let Some(links) = self.links.get() else { return String::new() };
        let mut text = String::new();
        let levels = ["scale-up", "scale-out"].iter().zip(&links.names);
        for (level, links) in levels {
            if let Some((_, name)) = links.iter().find(|(linked, _)| *linked == rank) {
                text.push_str(&format!("; the {level} link to rank {rank} is {name}"));
            }
        }
        if text.is_empty() {
            text.push_str(&format!("; there is no link to rank {rank}: others forward its data"));
        }
        text
    }

    fn lost_rank(&self) -> Option<EndedWaits> {
        let loss = self.liveness.first_loss()?;
        Some(EndedWaits {
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

    /// A rank that sent its goodbye raises no signal any more. Signals that it raised before may still be
    /// on their way for a moment.
    fn left(&self, waiting: &Waiting) -> Option<EndedWaits> {
        let rank = waiting.what.peer;
        let is_over = |rank, least: Duration| {
            let since = self.liveness.since_goodbye(rank);
            since.is_some_and(|since| self.bounds.is_over(since, waiting.lasted, least))
        };
        let lost = |rank: u32, what: &str| {
            let text = format!("rank {rank} left the world{what}; {}", self.describe_wait());
            Some(EndedWaits { kind: ErrorKind::PeerLost, rank, text })
        };
        if is_over(rank, LAST_FETCH) {
            return lost(rank, "");
        }
        // All news comes from rank 0. A rank that waits for one that ended after rank 0 would never
        // learn of that end; a live rank gets some time for each wait.
        if is_over(0, LAST_NEWS) {
            return lost(0, ", and with it all news of the other ranks");
        }
        None
    }

    /// True if the peer of this wait may itself wait for another rank that has become silent, or left.
    /// A silence is resolved first, by a sign of life or a loss: that takes `deadline` at most. A rank
    /// that waits for one that left reports it [`GRACE`] after the goodbye, and this rank then receives
    /// the report.
    fn may_be_innocent(&self, waiting: &Waiting, over: Duration) -> bool {
        let quiet = SILENT.max(3 * beat(self.bounds.deadline, self.membership.on_failure));
        let silent = self.liveness.most_silent();
        let silent =
            silent.is_some_and(|(rank, silence)| rank != waiting.what.peer && silence > quiet);
        (silent && over < self.bounds.deadline)
            || self
                .liveness
                .since_last_goodbye()
                .is_some_and(|since| since < self.bounds.grace() * 3 / 2)
    }

    /// The bound of a wait, and the part of it that is used up. A peer that has not arrived may be
    /// late; once all ranks have arrived, its signal must come, or the link carries nothing.
    fn limit(&self, waiting: &Waiting) -> Limit {
        let Bounds { deadline, late } = self.bounds;
        if waiting.what.phase == abi::TY_PHASE_MESSAGE {
            return Limit { bound: late, key: "late_ms", used: waiting.lasted, note: "" };
        }
        if waiting.what.phase != abi::TY_PHASE_ENTRY {
            let used = waiting.lasted;
            return Limit { bound: deadline, key: "deadline_ms", used, note: "" };
        }
        // Hosts do not know the operations that graphs have begun.
        let counted = waiting.what.operation != abi::TY_OPERATION_OF_GRAPH;
        match self.headway.together().filter(|_| counted) {
            None => Limit { bound: late, key: "late_ms", used: waiting.lasted, note: "" },
            Some(since) => Limit {
                bound: deadline,
                key: "deadline_ms",
                used: since.min(waiting.lasted),
                note: "; all ranks have begun the operation, so no rank is late",
            },
        }
    }

    /// Extra time for a peer of this domain that may wait for data of another domain before it can
    /// forward it. The peer then reports first the rank that it waits for.
    fn patience(&self, waiting: &Waiting) -> Duration {
        // A rank without a link on the rail waits too: its peers forward data to it.
        let among_domains = self.links.get().is_some_and(|links| links.domains > 1);
        if among_domains && waiting.what.level == abi::TY_LEVEL_SCALE_UP {
            PATIENCE.min(self.bounds.deadline / 8)
        } else {
            Duration::ZERO
        }
    }

    fn overdue(&self) -> Option<EndedWaits> {
        let waiting = self.board.waiting()?;
        // Where losses are masked, a rank that left is recorded as lost, except for rank 0.
        let left_counts = self.membership.on_failure == OnFailure::Stop
            || *self.liveness.state(0) == PeerState::Left;
        if left_counts && let Some(left) = self.left(&waiting) {
            return Some(left);
        }
        let Limit { bound, key, used, note } = self.limit(&waiting);
        if used < bound + self.patience(&waiting)
            || self.may_be_innocent(&waiting, used.saturating_sub(bound))
            || self.blameless(used) < bound
        {
            return None;
        }
        let rank = waiting.what.peer;
        Some(EndedWaits {
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

/// The bound of a wait that no signal ends.
struct Limit {
    bound: Duration,
    /// The config key of the bound.
    key: &'static str,
    used: Duration,
    note: &'static str,
}

#[cfg(test)]
mod tests;
