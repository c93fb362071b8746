//! The pauses of threads that poll for work.

use std::time::{Duration, Instant};

/// Rounds without work before the first yield. Short: other threads may want the core.
const SPINS: u32 = 256;
/// The time of yielding before the first sleep. Not a number of rounds: on a busy machine each round
/// may take as long as other threads hold the core.
const YIELDING: Duration = Duration::from_millis(2);

/// Rounds without work, since the last round with work.
#[derive(Default)]
pub(crate) struct Idle {
    rounds: u32,
    /// The time of the first yield.
    since: Option<Instant>,
}

/// The next pause of a thread that has found no work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rest {
    Spin,
    Yield,
    Nap,
}

impl Idle {
    /// The pause after another round without work. The more such rounds, the more of the core is left to
    /// other threads.
    pub(crate) fn next(&mut self, now: impl FnOnce() -> Instant) -> Rest {
        if self.rounds < SPINS {
            self.rounds += 1;
            return Rest::Spin;
        }
        let now = now();
        match now.duration_since(*self.since.get_or_insert(now)) < YIELDING {
            true => Rest::Yield,
            false => Rest::Nap,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_whose_yields_take_long_naps_as_soon_as_any_other() {
        let start = Instant::now();
        for (yield_takes, yields) in [(YIELDING / 1000, 1000), (YIELDING / 2, 2), (YIELDING, 1)] {
            let (mut idle, mut now) = (Idle::default(), start);
            for _ in 0..SPINS {
                assert_eq!(idle.next(|| now), Rest::Spin);
            }
            let mut yielded = 0;
            while idle.next(|| now) == Rest::Yield {
                (now, yielded) = (now + yield_takes, yielded + 1);
            }
            assert_eq!(yielded, yields, "{yield_takes:?}");
            assert_eq!(idle.next(|| now), Rest::Nap);
        }
    }
}
