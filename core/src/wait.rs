//! Bounded waits (INV-6): the board that a waiter and the host's watchdog share, and the wait loop of
//! CPU code.

use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::time::Duration;

use crate::abi;
use crate::{Error, ErrorKind, Result};

/// The wait board of one communicator, with atomic fields. Same layout as [`abi::TyWaitBoard`].
///
/// Any thread may read and write any field. A waiter publishes its wait, `phase` last; the host raises
/// `abort` when it decides that the wait must end.
#[repr(C)]
#[derive(Debug, Default)]
pub struct WaitBoard {
    abort: AtomicU64,
    phase: AtomicU64,
    peer: AtomicU64,
    signal: AtomicU64,
    expected: AtomicU64,
    found: AtomicU64,
    since_ns: AtomicU64,
    operation: AtomicU64,
    level: AtomicU64,
    gave_up: AtomicU64,
    /// Set when the board is made, and never changed.
    waited_ns: AtomicPtr<AtomicU64>,
    ranks: AtomicU64,
}

const _: () = assert!(size_of::<WaitBoard>() == size_of::<abi::TyWaitBoard>());
const _: () = assert!(align_of::<WaitBoard>() == align_of::<abi::TyWaitBoard>());

/// The event of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitFor {
    /// One of `TY_PHASE_*`.
    pub phase: u64,
    /// World rank that must act.
    pub peer: u32,
    /// Signal id.
    pub signal: u32,
    /// Total that ends the wait.
    pub expected: u64,
    /// Operation number.
    pub operation: u64,
    /// One of `TY_LEVEL_*`: the level whose transport raises the signal.
    pub level: u64,
}

/// A wait in progress, from the view of the watchdog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    /// The event of the wait.
    pub what: WaitFor,
    /// The total last seen.
    pub found: u64,
    /// The time since its beginning, also where it has ended without its signal.
    pub lasted: Duration,
}

/// The name of a phase in messages.
pub(crate) fn phase_name(phase: u64) -> &'static str {
    match phase {
        abi::TY_PHASE_ENTRY => "entry",
        abi::TY_PHASE_GRANT => "grant",
        abi::TY_PHASE_ROWS => "dispatch rows",
        abi::TY_PHASE_COMBINE_ROWS => "combine rows",
        abi::TY_PHASE_DONE => "combine done",
        abi::TY_PHASE_QUEUE => "queue room",
        abi::TY_PHASE_MESSAGE => "message",
        _ => "unknown phase",
    }
}

/// `CLOCK_MONOTONIC` in nanoseconds: comparable between the libraries of one process.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

impl WaitBoard {
    /// Views the ABI's board.
    ///
    /// # Safety
    /// `board` points to a board that stays valid for `'a` and is only accessed atomically.
    pub unsafe fn from_abi<'a>(board: *mut abi::TyWaitBoard) -> &'a Self {
        // SAFETY: same layout (asserted above); the caller promises validity and atomic access.
        unsafe { &*board.cast::<Self>() }
    }

    /// A board whose waiters add up the time of their waits, per world rank.
    ///
    /// # Safety
    /// `waited_ns` outlives the board, and every view of it.
    pub(crate) unsafe fn counting(waited_ns: &[AtomicU64]) -> Self {
        let totals = waited_ns.as_ptr().cast_mut();
        let ranks = AtomicU64::new(waited_ns.len() as u64);
        Self { waited_ns: AtomicPtr::new(totals), ranks, ..Self::default() }
    }

    /// The pointer that crosses the ABI.
    pub(crate) fn as_abi(&self) -> *mut abi::TyWaitBoard {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    /// Ends every present and later wait on this board.
    pub(crate) fn raise_abort(&self) {
        self.abort.store(1, Ordering::Release);
    }

    /// True once waits must end.
    pub(crate) fn is_aborted(&self) -> bool {
        self.abort.load(Ordering::Acquire) != 0
    }

    /// The wait in progress, if there is one.
    pub(crate) fn waiting(&self) -> Option<Waiting> {
        self.read(self.phase.load(Ordering::Acquire))
    }

    /// The last wait that ended without its signal, while no wait runs.
    pub(crate) fn given_up(&self) -> Option<Waiting> {
        self.read(self.gave_up.load(Ordering::Acquire))
    }

    fn read(&self, phase: u64) -> Option<Waiting> {
        if phase == 0 {
            return None;
        }
        let since = self.since_ns.load(Ordering::Relaxed);
        Some(Waiting {
            what: WaitFor {
                phase,
                peer: self.peer.load(Ordering::Relaxed) as u32,
                signal: self.signal.load(Ordering::Relaxed) as u32,
                expected: self.expected.load(Ordering::Relaxed),
                operation: self.operation.load(Ordering::Relaxed),
                level: self.level.load(Ordering::Relaxed),
            },
            found: self.found.load(Ordering::Relaxed),
            lasted: Duration::from_nanos(monotonic_ns().saturating_sub(since)),
        })
    }

    fn begin(&self, what: &WaitFor, since_ns: u64) {
        self.gave_up.store(0, Ordering::Relaxed);
        self.peer.store(u64::from(what.peer), Ordering::Relaxed);
        self.signal.store(u64::from(what.signal), Ordering::Relaxed);
        self.expected.store(what.expected, Ordering::Relaxed);
        self.operation.store(what.operation, Ordering::Relaxed);
        self.level.store(what.level, Ordering::Relaxed);
        self.since_ns.store(since_ns, Ordering::Relaxed);
        self.phase.store(what.phase, Ordering::Release);
    }

    fn end(&self) {
        self.phase.store(0, Ordering::Release);
    }

    /// Records a wait that ended without its signal.
    #[cold]
    fn give_up(&self, what: &WaitFor) {
        self.gave_up.store(what.phase, Ordering::Release);
        self.end();
    }

    /// Adds the time of a wait on a rank.
    fn add(&self, rank: u32, took_ns: u64) {
        let totals = self.waited_ns.load(Ordering::Relaxed);
        if totals.is_null() || u64::from(rank) >= self.ranks.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: an index into totals that outlive the board (contract of `waited_ns` in the ABI).
        let total = unsafe { &*totals.add(rank as usize) };
        total.fetch_add(took_ns, Ordering::Relaxed);
    }
}

/// Rounds of pure spinning before the first yield. Short: ranks may share a core.
const SPINS: u32 = 64;
/// Rounds of yielding before the first sleep.
const YIELDS: u32 = 4000;
/// The shortest sleep between checks once a wait has become long.
const NAP: Duration = Duration::from_micros(50);
/// The longest. Ranks that wait for a lost one for seconds leave their cores to others.
const LONGEST_NAP: Duration = Duration::from_micros(500);
/// A sleep adds at most this part to a wait that has lasted long.
const NAP_PART: u32 = 256;

/// Waits of one CPU kernel set: spin, then yield, then sleep, up to a bound.
#[derive(Clone, Copy, Debug)]
pub struct Waiter<'a> {
    board: &'a WaitBoard,
    cap: Duration,
}

impl<'a> Waiter<'a> {
    /// Waits on `board`; a wait that outlives `cap` ends by itself, without the host.
    pub fn new(board: &'a WaitBoard, cap: Duration) -> Self {
        Self { board, cap }
    }

    /// Returns once `read()` has reached `what.expected` (totals compare rolling). `progress` runs
    /// between checks: it drives the transport and reports its errors (INV-7).
    ///
    /// # Errors
    /// [`ErrorKind::Deadline`] when the host raised the abort word or the cap was reached; an error of
    /// `progress`.
    pub fn until(
        &self,
        what: &WaitFor,
        mut read: impl FnMut() -> u64,
        mut progress: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        for _ in 0..SPINS {
            if reached(read(), what.expected) {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        self.slow(what, &mut read, &mut progress)
    }

    /// For a wait that does not block its thread: publishes it, and returns an error if it must end. It
    /// began at `since_ns`. [`look_away`](Self::look_away) removes it from the board. One thread at a
    /// time uses the board.
    ///
    /// # Errors
    /// [`ErrorKind::Deadline`], as [`until`](Self::until).
    pub fn look_at(&self, what: &WaitFor, since_ns: u64, found: u64) -> Result<()> {
        self.board.found.store(found, Ordering::Relaxed);
        self.board.begin(what, since_ns);
        let lasted = Duration::from_nanos(monotonic_ns().saturating_sub(since_ns));
        if self.board.is_aborted() || lasted > self.cap {
            self.board.give_up(what);
            return Err(expired(what, found, lasted));
        }
        Ok(())
    }

    /// Ends the wait that [`look_at`](Self::look_at) has published.
    pub fn look_away(&self) {
        self.board.end();
    }

    #[cold]
    fn slow(
        &self,
        what: &WaitFor,
        read: &mut dyn FnMut() -> u64,
        progress: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let since = monotonic_ns();
        self.board.begin(what, since);
        let mut round = 0_u32;
        let result = loop {
            let found = read();
            if reached(found, what.expected) {
                break Ok(());
            }
            self.board.found.store(found, Ordering::Relaxed);
            let lasted = Duration::from_nanos(monotonic_ns().saturating_sub(since));
            if let Err(error) = progress() {
                // The failure is the cause; the wait shows the state of the ranks.
                break Err(error.with_context("meanwhile", expired(what, found, lasted).message()));
            }
            if self.board.is_aborted() || lasted > self.cap {
                break Err(expired(what, found, lasted));
            }
            round = round.saturating_add(1);
            if round < YIELDS {
                std::thread::yield_now();
            } else {
                std::thread::sleep((lasted / NAP_PART).clamp(NAP, LONGEST_NAP));
            }
        };
        self.board.add(what.peer, monotonic_ns().saturating_sub(since));
        match result {
            Ok(()) => self.board.end(),
            Err(_) => self.board.give_up(what),
        }
        result
    }
}

/// True if a total has reached the expected total. Totals compare rolling.
pub fn reached(found: u64, expected: u64) -> bool {
    found.wrapping_sub(expected) as i64 >= 0
}

/// The error of a wait that ended without its signal.
pub fn expired(what: &WaitFor, found: u64, lasted: Duration) -> Error {
    let operation = match what.operation {
        abi::TY_OPERATION_OF_GRAPH => "an operation that no host waits for".to_owned(),
        number => format!("operation {number}"),
    };
    Error::new(
        ErrorKind::Deadline,
        "wait",
        format!(
            "rank {} did not finish phase `{}` of {operation} in {:.3} s: signal {} is at {found}, \
             expected {}",
            what.peer,
            phase_name(what.phase),
            lasted.as_secs_f64(),
            what.signal,
            what.expected
        ),
    )
    .with_rank(what.peer)
}

#[cfg(test)]
mod tests {
    use super::*;

    const WHAT: WaitFor = WaitFor {
        phase: abi::TY_PHASE_ROWS,
        peer: 3,
        signal: 9,
        expected: 2,
        operation: 5,
        level: 0,
    };

    #[test]
    fn a_wait_ends_when_the_total_is_reached_even_across_the_wrap_of_64_bits() {
        let board = WaitBoard::default();
        let waiter = Waiter::new(&board, Duration::from_secs(1));
        let what = WaitFor { expected: 1, ..WHAT };
        assert!(waiter.until(&what, || u64::MAX.wrapping_add(2), || Ok(())).is_ok());
        let what = WaitFor { expected: u64::MAX, ..WHAT };
        assert!(waiter.until(&what, || 3, || Ok(())).is_ok());
    }

    #[test]
    fn a_raised_abort_word_ends_the_wait_with_who_and_what() {
        let board = WaitBoard::default();
        board.raise_abort();
        let error = Waiter::new(&board, Duration::from_secs(60))
            .until(&WHAT, || 1, || Ok(()))
            .expect_err("aborted");
        assert_eq!(error.kind(), ErrorKind::Deadline);
        let text = error.to_string();
        for part in ["rank 3", "dispatch rows", "operation 5", "signal 9 is at 1", "expected 2"] {
            assert!(text.contains(part), "{part} is missing in: {text}");
        }
    }

    #[test]
    fn a_wait_without_a_host_ends_at_its_cap() {
        let board = WaitBoard::default();
        let waiter = Waiter::new(&board, Duration::from_millis(20));
        assert!(waiter.until(&WHAT, || 0, || Ok(())).is_err());
    }

    #[test]
    fn the_watchdog_sees_what_is_waited_for() {
        let board = WaitBoard::default();
        let mut seen = None;
        let total = AtomicU64::new(1);
        std::thread::scope(|scope| {
            let (total, board) = (&total, &board);
            let wait = scope.spawn(move || {
                Waiter::new(board, Duration::from_secs(5)).until(
                    &WHAT,
                    || total.load(Ordering::Acquire),
                    || Ok(()),
                )
            });
            while seen.is_none() {
                seen = board.waiting();
            }
            total.store(2, Ordering::Release);
            assert!(wait.join().expect("no panic").is_ok());
        });
        assert_eq!(seen.expect("seen").what, WHAT);
        assert!(board.waiting().is_none());
    }

    #[test]
    fn a_wait_that_is_only_looked_at_is_seen_and_ends_like_any_other() {
        let board = WaitBoard::default();
        let waiter = Waiter::new(&board, Duration::from_secs(60));
        assert!(waiter.look_at(&WHAT, monotonic_ns() - 1_000_000, 1).is_ok());
        let seen = board.waiting().expect("published");
        assert_eq!((seen.what, seen.found), (WHAT, 1));
        assert!(seen.lasted >= Duration::from_millis(1));
        waiter.look_away();
        assert!(board.waiting().is_none());
        let long_ago = monotonic_ns().saturating_sub(61_000_000_000);
        assert_eq!(waiter.look_at(&WHAT, long_ago, 1).unwrap_err().kind(), ErrorKind::Deadline);
        board.raise_abort();
        assert!(waiter.look_at(&WHAT, monotonic_ns(), 1).is_err());
    }

    #[test]
    fn an_error_of_the_transport_ends_the_wait() {
        let board = WaitBoard::default();
        let waiter = Waiter::new(&board, Duration::from_secs(5));
        let error = waiter
            .until(&WHAT, || 0, || Err(Error::new(ErrorKind::Transport, "poll", "link is down")))
            .expect_err("must fail");
        assert_eq!(error.kind(), ErrorKind::Transport);
        let text = error.to_string();
        assert!(text.contains("link is down") && text.contains("phase `dispatch rows`"), "{text}");
    }
}
