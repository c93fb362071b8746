//! Times in which no peer counts as slow: a rank was silent, or this process was stopped.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Most spans that are remembered. Older spans do not suspend bounds any more.
const SPANS: usize = 1024;

/// Spans of time in which bounds were suspended.
#[derive(Debug)]
pub(super) struct Unrest {
    /// The beginning and the end of each span; in order, apart from each other.
    spans: VecDeque<(Instant, Instant)>,
    /// Most time that is subtracted from a wait in total (INV-6).
    most: Duration,
}

impl Unrest {
    pub(super) fn new(most: Duration) -> Self {
        // Reserved now, because spans are recorded during steps, which do not allocate. A span is added
        // before the oldest is removed.
        let room = if most.is_zero() { 0 } else { SPANS + 1 };
        Self { spans: VecDeque::with_capacity(room), most }
    }

    /// Records a span. No span begins before the end of a span that ended earlier and was recorded.
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

    /// The time of the last `window` before `now` in which bounds were suspended.
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
