//! How the host waits for kernels, and says what they wait for (INV-6).

use std::time::{Duration, Instant};

use tokenyard_core::wait::{WaitFor, Waiter, expired};
use tokenyard_core::{Error, ErrorKind, Result};

use super::args::Report;
use super::proxy::Ring;
use crate::driver::Pinned;

/// A kernel that waits sees a raised abort word within microseconds; one that copies ends by itself.
const LAST_MOMENT: Duration = Duration::from_secs(5);

/// What is waited for, as far as the host knows by itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wait {
    pub(super) operation: u64,
    /// One of `TY_PHASE_*`.
    pub(super) phase: u64,
    pub(super) level: u64,
    /// A rank that must act; what the kernel says counts for more.
    pub(super) rank: u32,
}

/// The waits of one yard.
#[derive(Debug)]
pub(super) struct Waits {
    pub(super) waiter: Waiter<'static>,
    pub(super) report: Pinned<Report>,
    /// Not 0: kernels stop waiting. Set once, when an operation has failed for good; the host's own
    /// word ends the host's wait, and so comes here.
    pub(super) abort: Pinned<u64>,
    /// World rank of each index in the team.
    pub(super) ranks: Vec<u32>,
    /// Where kernels post through the host.
    pub(super) ring: Option<Ring>,
}

impl Waits {
    /// Ends every wait of this rank's kernels, now and later.
    pub(super) fn end_all(&self) {
        // SAFETY: pinned memory that lives as long as `self`; an aligned word.
        unsafe { self.abort.at(0).write_volatile(1) }
    }

    /// What kernels say now. They write it at any time, and each field is read whole.
    fn report(&self) -> Report {
        // SAFETY: pinned memory that lives as long as `self`; aligned words.
        unsafe { self.report.at(0).read_volatile() }
    }

    fn what(&self, wait: Wait, report: &Report) -> WaitFor {
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

    /// Returns once `done` says so. `is_over` says whether the kernel has ended, and how.
    pub(super) fn until(
        &self,
        wait: Wait,
        done: &dyn Fn() -> bool,
        is_over: &dyn Fn() -> Result<bool>,
    ) -> Result<()> {
        let Err(error) = self.look_on(wait, done, is_over) else { return Ok(()) };
        self.end_all();
        // Who is told that the operation failed may free its tensors.
        let start = Instant::now();
        while matches!(is_over(), Ok(false)) {
            if start.elapsed() > LAST_MOMENT {
                return Err(error.with_context("a kernel", "still runs, or waits behind another").with_fix(
                    "keep the tensors of this operation until the device is idle, or end the process",
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let told = self.ended(wait).err().unwrap_or(error);
        // What broke is the cause; what it broke says where the ranks are.
        Err(match self.posts() {
            Err(cause) => cause.with_context("meanwhile", told.message()),
            Ok(()) => told,
        })
    }

    /// Whether what kernels post still goes out (INV-7).
    fn posts(&self) -> Result<()> {
        self.ring.as_ref().map_or(Ok(()), Ring::check)
    }

    fn look_on(
        &self,
        wait: Wait,
        done: &dyn Fn() -> bool,
        is_over: &dyn Fn() -> Result<bool>,
    ) -> Result<()> {
        loop {
            let seen = self.report();
            let what = self.what(wait, &seen);
            let read = || {
                let now = self.report();
                if done() || now.ended == 2 || now.waiting != seen.waiting {
                    what.expected
                } else {
                    // Not there yet, whatever an old word looks like.
                    let short = what.expected.wrapping_sub(1);
                    let is_short = (now.wait_found.wrapping_sub(what.expected) as i64) < 0;
                    if is_short { now.wait_found } else { short }
                }
            };
            // Errors of the kernel end the wait; so does its end without an answer.
            self.waiter.until(&what, read, || self.posts().and_then(|()| is_over().map(|_| ())))?;
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

    /// Whether a kernel has given up a wait, and which.
    pub(super) fn ended(&self, wait: Wait) -> Result<()> {
        let report = self.report();
        // 1: a kernel is about to say which wait it gave up.
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
}
