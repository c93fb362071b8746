//! The clock of calls that must not wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};

/// A nap of a thread that measures.
pub(super) const NAP: Duration = Duration::from_millis(5);
/// Slow calls that show a transport which waits: a busy machine holds up one of many, and not as many.
const SLOW_CALLS: u32 = 3;

/// Times calls that must not wait, by the naps of a thread beside them: where the machine does not let this process
/// run, that thread takes no nap.
#[derive(Debug)]
pub(super) struct Clock {
    limit: Duration,
    naps: Arc<AtomicU32>,
    slow: AtomicU32,
}

impl Clock {
    pub(super) fn new(limit: Duration) -> Self {
        let naps = Arc::new(AtomicU32::new(0));
        let counted = Arc::downgrade(&naps);
        std::thread::spawn(move || {
            while let Some(naps) = counted.upgrade() {
                naps.fetch_add(1, Ordering::Relaxed);
                drop(naps);
                std::thread::sleep(NAP);
            }
        });
        Self { limit, naps, slow: AtomicU32::new(0) }
    }

    pub(super) fn time<T>(&self, slot: &str, call: impl FnOnce() -> T) -> Result<T> {
        let start = self.naps.load(Ordering::Relaxed);
        let result = call();
        let took = NAP * self.naps.load(Ordering::Relaxed).wrapping_sub(start);
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
        let clock = Clock::new(2 * NAP);
        let slow = || clock.time("post", || std::thread::sleep(60 * NAP));
        let quick = || clock.time("post", || ());
        // A quick one between them takes none back, and counts as none.
        let found = [slow(), quick(), slow(), quick(), slow()].map(|result| result.is_ok());
        assert_eq!(found, [true, true, true, true, false]);
    }
}
