//! Warnings that a stranger can cause any number of times: most are left out, and counted.

use std::time::{Duration, Instant};

/// At most one line a second; the others are counted.
#[derive(Debug)]
pub struct SparseLog {
    /// The text about the lines that were left out.
    of_others: &'static str,
    last: Option<Instant>,
    left_out: u64,
}

impl SparseLog {
    const EVERY: Duration = Duration::from_secs(1);

    /// A log that reports the lines that it leaves out as `of_others`, with their number.
    pub const fn new(of_others: &'static str) -> Self {
        Self { of_others, last: None, left_out: 0 }
    }

    /// Warns of `why`, or counts it.
    pub fn warn(&mut self, why: &str) {
        if self.last.is_some_and(|last| last.elapsed() < Self::EVERY) {
            self.left_out += 1;
            return;
        }
        self.catch_up();
        tracing::warn!("{why}");
    }

    /// Reports the number of lines that were left out.
    pub fn catch_up(&mut self) {
        self.last = Some(Instant::now());
        match std::mem::take(&mut self.left_out) {
            0 => {}
            left_out => tracing::warn!(left_out, "{}", self.of_others),
        }
    }

    /// The time from which [`Self::catch_up`] has lines to report.
    pub fn due(&self) -> Option<Instant> {
        self.last.filter(|_| self.left_out > 0).map(|last| last + Self::EVERY)
    }
}
