//! The limit of a wait for many steps.

use std::time::{Duration, Instant};

/// The time in which something more must come. It begins anew with each step, so that a case of many steps has as much
/// time as a busy machine takes for them.
#[derive(Debug)]
pub(super) struct Headway {
    deadline: Duration,
    until: Instant,
    done: u64,
}

impl Headway {
    pub(super) fn new(deadline: Duration) -> Self {
        Self { deadline, until: Instant::now() + deadline, done: 0 }
    }

    /// Whether nothing more came within the deadline; `done` grows with each step.
    pub(super) fn is_over(&mut self, done: u64) -> bool {
        let now = Instant::now();
        if done != self.done {
            (self.done, self.until) = (done, now + self.deadline);
        }
        now >= self.until
    }
}
