//! Measures how long a peer is refused.

use std::time::{Duration, Instant};

/// Refusals of one peer without an acceptance between them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Refusals(Option<Span>);

#[derive(Clone, Copy, Debug)]
struct Span {
    first: Instant,
    last: Instant,
}

impl Refusals {
    /// Counts a refusal; `false` if there were only refusals for as long as `patience`. Only time
    /// in which this rank tried without pause counts: while the rank itself was stopped, or had
    /// nothing to send, the peer had no chance to accept.
    pub(super) fn one_more(&mut self, now: Instant, patience: Duration) -> bool {
        let away = |span: &Span| now.saturating_duration_since(span.last) > patience / 4;
        let first = self.0.filter(|span| !away(span)).map_or(now, |span| span.first);
        self.0 = Some(Span { first, last: now });
        now.saturating_duration_since(first) < patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// The results of `one_more` at these numbers of seconds after the first refusal.
    fn at(seconds: &[u64]) -> Vec<bool> {
        let (mut refusals, start) = (Refusals::default(), Instant::now());
        let mut say =
            |second: &u64| refusals.one_more(start + Duration::from_secs(*second), PATIENCE);
        seconds.iter().map(&mut say).collect()
    }

    #[test]
    fn who_is_refused_all_the_time_is_given_up_at_the_end_of_the_patience() {
        assert_eq!(at(&[0, 5, 10, 15, 19, 20]), [true, true, true, true, true, false]);
    }

    #[test]
    fn a_peer_is_not_blamed_for_time_in_which_no_thread_tried() {
        assert_eq!(at(&[0, 100, 105, 110, 115]), [true; 5]);
        assert_eq!(at(&[0, 5, 10, 15, 100]), [true; 5]);
        assert!(!at(&[0, 100, 105, 110, 115, 120])[5]);
    }
}
