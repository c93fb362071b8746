//! The clock of calls that must not wait.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

/// Slow calls that show a transport which waits: a busy machine holds up one of many, and not as many.
const SLOW_CALLS: u32 = 3;

/// Times calls that must not wait.
#[derive(Debug)]
pub(super) struct Clock {
    limit: Duration,
    slow: AtomicU32,
}

impl Clock {
    pub(super) fn new(limit: Duration) -> Self {
        Self { limit, slow: AtomicU32::new(0) }
    }

    pub(super) fn time<T>(&self, slot: &str, call: impl FnOnce() -> T) -> Result<T> {
        let start = Instant::now();
        let result = call();
        let took = start.elapsed();
        ensure!(
            took < self.limit || self.slow.fetch_add(1, Ordering::Relaxed) + 1 < SLOW_CALLS,
            "{slot} took {took:?}, the call number {SLOW_CALLS} that took longer than {:?}; expected that it never \
             waits (INV-6)",
            self.limit
        );
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_slow_call_is_none_and_three_are_a_wait() {
        let clock = Clock::new(Duration::from_millis(1));
        let slow = || clock.time("post", || std::thread::sleep(Duration::from_millis(2)));
        let found = [slow(), slow(), slow()].map(|result| result.is_ok());
        assert_eq!(found, [true, true, false]);
    }
}
