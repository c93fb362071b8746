//! How the host waits for kernels, and reports what they wait for (INV-6).

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokenyard_core::wait::{WaitFor, Waiter, expired, monotonic_ns};
use tokenyard_core::{Error, ErrorKind, Result, abi};

use crate::driver::Pinned;
use crate::engine::args::WaitReport;
use crate::engine::masking::Masks;
use crate::engine::member::Member;
use crate::engine::posting::Posting;

/// A kernel that waits sees a raised abort word within microseconds; one that copies ends by itself.
const LAST_MOMENT: Duration = Duration::from_secs(5);

/// The longest delay between the name of a wait and its subject: stores over PCIe take about a
/// microsecond each. A wait that has a name has lasted for hundreds.
const FOLLOWS: Duration = Duration::from_micros(10);

pub(crate) const KEEP_TENSORS: &str =
    "keep the tensors of this operation until the device is idle, or end the process";

/// Waits for the end of a kernel that nothing delays: a caller that receives an error may free its
/// tensors. False if the kernel lasts.
pub(crate) fn see_end(is_over: &dyn Fn() -> Result<bool>) -> bool {
    let start = Instant::now();
    while matches!(is_over(), Ok(false)) {
        if start.elapsed() > LAST_MOMENT {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// The subject of a wait, as far as the host knows it by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    pub(crate) operation: u64,
    /// One of `TY_PHASE_*`.
    pub(crate) phase: u64,
    pub(crate) level: u64,
    /// A rank that must act; the kernel's report takes precedence.
    pub(crate) rank: u32,
}

/// The waits of one communicator.
#[derive(Debug)]
pub(crate) struct Waits {
    pub(crate) waiter: Waiter<'static>,
    pub(crate) report: Pinned<WaitReport>,
    /// Not 0: kernels stop waiting. Set once, when an operation has failed for good. The host's own
    /// abort word ends the host's wait, which then sets this one.
    pub(crate) abort: Pinned<u64>,
    /// World rank of each index in the team.
    pub(crate) ranks: Vec<u32>,
    pub(crate) posting: Posting,
    /// None where a lost rank ends the communicator.
    pub(crate) masks: Option<Masks>,
    pub(crate) turn: Turn,
}

/// The owner of the board: it has space for one wait. A host call that waits goes first; the
/// observer steps back meanwhile, because the wait of the host sees every failure.
#[derive(Debug, Default)]
pub(crate) struct Turn(Mutex<bool>);

impl Turn {
    /// Takes the board until the result is dropped. One thread at a time.
    fn wait(&self) -> HostWaits<'_> {
        self.set(true);
        HostWaits(self)
    }

    fn set(&self, host_waits: bool) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = host_waits;
    }

    /// Runs `look` on the board, unless a host call waits there.
    fn look<T>(&self, look: impl FnOnce() -> T) -> Option<T> {
        let host_waits = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (!*host_waits).then(look)
    }
}

/// The host waits on the board.
struct HostWaits<'a>(&'a Turn);

impl Drop for HostWaits<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// A wait without a host call, as of the last poll.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    /// The subject of the wait, and the time at which it began.
    what: Option<(Look, u64)>,
}

/// Whether both wait for the same action of the same rank. The kernel's report of the signal may be
/// torn.
fn is_same(a: &Look, b: &Look) -> bool {
    let of = |look: &Look| (look.what.operation, look.what.phase, look.what.peer, look.launch());
    of(a) == of(b)
}

/// A wait, and the number that distinguishes the operations of graphs.
#[derive(Clone, Copy, Debug)]
struct Look {
    what: WaitFor,
    /// Number of the last operation that all ranks have entered, as the device counts.
    begun: u64,
}

impl Look {
    /// For an operation without a number: the number by which the device knows it. It is the expected
    /// value of an entry.
    fn launch(&self) -> u64 {
        match (self.what.operation, self.what.phase) {
            (abi::TY_OPERATION_OF_GRAPH, abi::TY_PHASE_ENTRY) => self.what.expected,
            (abi::TY_OPERATION_OF_GRAPH, _) => self.begun,
            _ => 0,
        }
    }
}

impl Waits {
    /// Ends every wait of this rank's kernels, now and later.
    pub(crate) fn end_all(&self) {
        // SAFETY: pinned memory that lives as long as `self`; an aligned word.
        unsafe { self.abort.at(0).write_volatile(1) }
    }

    /// Passes losses on to kernels, where they go on without a rank.
    pub(crate) fn pass_on_losses(&self) {
        if let Some(masks) = &self.masks {
            masks.pass_on();
        }
    }

    /// The present report of kernels. They write it at any time, and each field is read whole.
    fn report(&self) -> WaitReport {
        // SAFETY: pinned memory that lives as long as `self`; aligned words.
        unsafe { self.report.at(0).read_volatile() }
    }

    /// The present report, once a wait that lasts has reported its subject: its name comes first.
    fn whole_report(&self) -> WaitReport {
        let start = Instant::now();
        let mut report = self.report();
        while report.waiting != 0 && start.elapsed() < FOLLOWS {
            std::hint::spin_loop();
            report = self.report();
        }
        report
    }

    fn what(&self, wait: Wait, report: &WaitReport) -> WaitFor {
        let (phase, peer) = (report.waiting >> 32, report.waiting as u32);
        if peer == 0 {
            let Wait { operation, phase, level, rank } = wait;
            return WaitFor { phase, peer: rank, signal: 0, expected: 1, operation, level };
        }
        WaitFor {
            phase,
            peer: self.rank(peer - 1),
            signal: report.wait_signal as u32,
            expected: report.wait_expected,
            operation: wait.operation,
            level: wait.level,
        }
    }

    fn rank(&self, peer: u32) -> u32 {
        self.ranks.get(peer as usize).copied().unwrap_or(peer)
    }

    /// Returns once `done` is true. `is_over` reports whether the kernel has ended, and how.
    pub(crate) fn until(
        &self,
        wait: Wait,
        done: &dyn Fn() -> bool,
        is_over: &dyn Fn() -> Result<bool>,
    ) -> Result<()> {
        let waited = {
            let _turn = self.turn.wait();
            self.look_on(wait, done, is_over)
        };
        waited.map_err(|error| {
            let ended = self.wind_up(error, wait, is_over);
            // The failure of the transport is the cause; the wait shows where the ranks are.
            match self.posting.explain() {
                Err(cause) => cause.with_context("meanwhile", ended.message()),
                Ok(()) => ended,
            }
        })
    }

    /// Ends kernels after a wait that failed, and returns the reason.
    pub(crate) fn wind_up(
        &self,
        error: Error,
        wait: Wait,
        is_over: &dyn Fn() -> Result<bool>,
    ) -> Error {
        self.end_all();
        if !see_end(is_over) {
            return error
                .with_context("a kernel", "still runs, or waits behind another")
                .with_fix(KEEP_TENSORS);
        }
        if self.posting.check().is_err() {
            return error;
        }
        self.ended(wait).err().unwrap_or(error)
    }

    /// Polls a wait without a host call.
    ///
    /// # Errors
    /// The error with which the wait must end.
    pub(crate) fn look_at(&self, wait: Wait, seen: &mut Seen) -> Result<()> {
        let report = self.report();
        let what = self.what(wait, &report);
        let now = Look { what, begun: report.begun };
        let look = || {
            let since = match seen.what {
                Some((same, since)) if is_same(&same, &now) => since,
                before => {
                    if before.is_some() {
                        self.waiter.look_away();
                    }
                    monotonic_ns()
                }
            };
            seen.what = Some((now, since));
            // Not there yet, whatever value an old word has.
            let found = report.wait_found.min(what.expected.saturating_sub(1));
            self.posting.check()?;
            self.waiter.look_at(&what, since, found)
        };
        self.turn.look(look).unwrap_or(Ok(()))
    }

    /// Polls the waits of kernels that graphs launched, or of calls that no caller waits for. The wait
    /// of a host call may be among them, and then goes first.
    ///
    /// # Errors
    /// The error of a wait that was ended, or had to be.
    pub(crate) fn look_around(&self, level: u64, seen: &mut Seen) -> Result<()> {
        let wait = Wait { operation: abi::TY_OPERATION_OF_GRAPH, phase: 0, level, rank: 0 };
        self.ended(wait)?;
        if self.report().waiting == 0 {
            if seen.what.take().is_some() {
                self.look_away();
            }
            return Ok(());
        }
        self.look_at(wait, seen).map_err(|error| {
            self.look_away();
            // Every kernel that waits ends by the word; one of them reports the subject of its
            // wait.
            self.wind_up(error, wait, &|| Ok(self.report().ended == 2))
        })
    }

    /// Removes such a wait from the board.
    pub(crate) fn look_away(&self) {
        self.turn.look(|| self.waiter.look_away());
    }

    fn look_on(
        &self,
        wait: Wait,
        done: &dyn Fn() -> bool,
        is_over: &dyn Fn() -> Result<bool>,
    ) -> Result<()> {
        loop {
            let seen = self.whole_report();
            let what = self.what(wait, &seen);
            let read = || {
                let now = self.report();
                if done() || now.ended == 2 || now.waiting != seen.waiting {
                    what.expected
                } else {
                    // Not there yet, whatever value an old word has.
                    let short = what.expected.wrapping_sub(1);
                    let is_short = (now.wait_found.wrapping_sub(what.expected) as i64) < 0;
                    if is_short { now.wait_found } else { short }
                }
            };
            // Errors of the kernel end the wait; so does its end without an answer.
            self.waiter
                .until(&what, read, || self.posting.check().and_then(|()| is_over().map(|_| ())))?;
            if done() {
                return Ok(());
            }
            self.ended(wait)?;
            if is_over()? && !done() {
                let message = "a kernel ended without an answer";
                return Err(Error::new(ErrorKind::Internal, "run kernel", message));
            }
        }
    }

    /// Whether a kernel has given up a wait, and which one.
    pub(crate) fn ended(&self, wait: Wait) -> Result<()> {
        let report = self.report();
        // 1: a kernel is about to report which wait it gave up.
        if report.ended != 2 {
            return Ok(());
        }
        let what = WaitFor {
            phase: report.phase,
            peer: self.rank(report.peer as u32),
            signal: report.signal as u32,
            expected: report.expected,
            operation: wait.operation,
            level: wait.level,
        };
        Err(expired(&what, report.found, Duration::ZERO))
    }

    /// Waits until all puts of kernels are done (INV-4). No kernel runs.
    pub(crate) fn flush_puts(&self, member: &Member) -> Result<()> {
        let Some(ring) = self.posting.ring() else { return Ok(()) };
        let what = WaitFor {
            phase: abi::TY_PHASE_QUEUE,
            peer: member.world_rank(),
            signal: 0,
            expected: ring.numbered()?,
            operation: 0,
            level: member.level,
        };
        self.waiter.until(&what, || ring.done(), || self.posting.explain())
    }

    /// Ends every wait of this rank's kernels after an error that closes the communicator: no other code
    /// does so, and memory must not be freed while a kernel runs.
    pub(crate) fn abort_on_fatal<T>(&self, result: Result<T>) -> Result<T> {
        result.inspect_err(|error: &Error| {
            if !matches!(error.kind(), ErrorKind::Refused | ErrorKind::Full) {
                self.end_all();
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_of_one_launch_of_a_graph_are_distinguished_from_those_of_the_next() {
        let rows = WaitFor {
            phase: abi::TY_PHASE_ROWS,
            peer: 1,
            signal: 4,
            expected: 32,
            operation: abi::TY_OPERATION_OF_GRAPH,
            level: 0,
        };
        let look = |what, begun| Look { what, begun };
        assert!(is_same(&look(rows, 5), &look(WaitFor { signal: 8, ..rows }, 5)));
        assert!(!is_same(&look(rows, 5), &look(rows, 6)));
        // While an entry is waited for, others may end.
        let entry = WaitFor { phase: abi::TY_PHASE_ENTRY, ..rows };
        assert!(is_same(&look(entry, 5), &look(WaitFor { signal: 8, ..entry }, 6)));
        assert!(!is_same(&look(entry, 5), &look(WaitFor { expected: 33, ..entry }, 5)));
        let numbered = WaitFor { operation: 7, ..rows };
        assert!(is_same(&look(numbered, 5), &look(WaitFor { expected: 1, ..numbered }, 6)));
    }

    #[test]
    fn who_looks_on_leaves_the_board_to_who_waits() {
        let turn = Turn::default();
        assert_eq!(turn.look(|| 1), Some(1));
        let waits = turn.wait();
        assert_eq!(turn.look(|| 2), None);
        drop(waits);
        assert_eq!(turn.look(|| 3), Some(3));
    }
}
