//! When nobody could be blamed for being slow: somebody was silent, or this process was stopped.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Spans that are remembered. Of what is older nobody is excused.
const SPANS: usize = 1024;

/// Spans of time in which bounds stood still.
#[derive(Debug)]
pub(super) struct Unrest {
    /// From, to; in order, apart from each other.
    spans: VecDeque<(Instant, Instant)>,
    /// The most that a wait is excused in all (INV-6).
    most: Duration,
}

impl Unrest {
    pub(super) fn new(most: Duration) -> Self {
        // Also when it is noted in the middle of steps, which allocate nothing. One is added before the
        // oldest goes.
        let room = if most.is_zero() { 0 } else { SPANS + 1 };
        Self { spans: VecDeque::with_capacity(room), most }
    }

    /// Notes a span. No span begins before one that ended earlier was noted.
    pub(super) fn note(&mut self, mut from: Instant, mut to: Instant) {
        while let Some((start, end)) = self.spans.back().copied().filter(|(_, end)| *end >= from) {
            self.spans.pop_back();
            (from, to) = (from.min(start), to.max(end));
        }
        self.spans.push_back((from, to));
        if self.spans.len() > SPANS {
            self.spans.pop_front();
        }
    }

    /// How much of the last `window` before `now` is excused.
    pub(super) fn within(&self, window: Duration, now: Instant) -> Duration {
        let Some(start) = now.checked_sub(window) else { return Duration::ZERO };
        let overlap = |(from, to): &(Instant, Instant)| {
            (*to).min(now).saturating_duration_since((*from).max(start))
        };
        self.spans.iter().map(overlap).sum::<Duration>().min(self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// A time that has all these spans before it, in seconds of it.
    fn unrest(most: u32, spans: &[(u32, u32)]) -> (Unrest, Instant) {
        let zero = Instant::now();
        let mut unrest = Unrest::new(most * SECOND);
        spans.iter().for_each(|(from, to)| unrest.note(zero + *from * SECOND, zero + *to * SECOND));
        (unrest, zero)
    }

    #[test]
    fn a_wait_is_excused_for_the_part_of_it_that_was_unrest() {
        let (unrest, zero) = unrest(100, &[(10, 12), (20, 30)]);
        let within = |window: u32, now: u32| unrest.within(window * SECOND, zero + now * SECOND);
        assert_eq!(within(25, 25), 7 * SECOND);
        assert_eq!(within(5, 25), 5 * SECOND);
        assert_eq!(within(30, 41), 11 * SECOND);
        assert_eq!(within(8, 19), SECOND);
        assert_eq!(within(7, 19), Duration::ZERO);
        assert_eq!(within(5, 5), Duration::ZERO);
    }

    #[test]
    fn spans_that_overlap_count_once() {
        let (unrest, zero) = unrest(100, &[(10, 12), (14, 16), (11, 15), (16, 18)]);
        assert_eq!(unrest.spans.len(), 1);
        assert_eq!(unrest.within(20 * SECOND, zero + 20 * SECOND), 8 * SECOND);
    }

    #[test]
    fn hiccups_for_ever_excuse_no_wait_for_ever() {
        let hiccups: Vec<(u32, u32)> = (0..2000).map(|i| (10 * i, 10 * i + 1)).collect();
        let (unrest, zero) = unrest(40, &hiccups);
        assert_eq!(unrest.spans.len(), SPANS);
        assert_eq!(unrest.spans.capacity(), Unrest::new(SECOND).spans.capacity(), "allocated once");
        assert_eq!(unrest.within(20_000 * SECOND, zero + 20_000 * SECOND), 40 * SECOND);
    }
}
