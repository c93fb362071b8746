//! Queries the health of a transport. A component that does not answer delays neither a report nor the end of
//! a user.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::report::ReportedHealth;

use crate::Result;

/// Most time that a report waits for an answer; much longer than a thread of a busy machine needs.
const WITHIN: Duration = Duration::from_secs(1);

/// Queries one transport, from threads of its own: one query at a time.
#[derive(Debug, Default)]
pub(super) struct Checkup {
    state: Mutex<CheckupState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct CheckupState {
    /// The start of the query that is open.
    open: Option<Instant>,
    /// The last answer; nothing where the transport could not be queried.
    answer: Option<Answer>,
}

#[derive(Clone, Debug, Default)]
struct Answer {
    error: Option<String>,
    rank: Option<u32>,
}

impl Answer {
    fn new(health: Result<()>) -> Self {
        health.map_or_else(
            |error| Self { error: Some(error.to_string()), rank: error.rank() },
            |()| Self::default(),
        )
    }
}

impl Checkup {
    fn state(&self) -> MutexGuard<'_, CheckupState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a query, unless one is still open. Returns at once.
    pub(super) fn ask(self: &Arc<Self>, health: impl FnOnce() -> Result<()> + Send + 'static) {
        let mut state = self.state();
        if state.open.is_some() {
            return;
        }
        *state = CheckupState { open: Some(Instant::now()), answer: None };
        let this = Arc::clone(self);
        let asking = move || {
            let answer = Answer::new(health());
            *this.state() = CheckupState { open: None, answer: Some(answer) };
            this.ended.notify_all();
        };
        let made = std::thread::Builder::new().name("tokenyard-query".into()).spawn(asking);
        if made.is_err() {
            state.open = None;
        }
    }

    /// Adds the answer to the last query.
    pub(super) fn answer(&self, health: &mut ReportedHealth) {
        let state = self.state();
        let open_for = state.open.map_or(Duration::ZERO, |since| since.elapsed());
        let state = self.wait(state, WITHIN.saturating_sub(open_for));
        match (state.open, &state.answer) {
            (Some(since), _) => health.unanswered_ms = Some(since.elapsed().as_millis() as u64),
            (None, None) => health.unanswered_ms = Some(0),
            (None, Some(answer)) => {
                (health.error, health.rank) = (answer.error.clone(), answer.rank);
            }
        }
    }

    /// Waits for the open query to end. Returns true if none is open any more.
    pub(super) fn has_ended(&self) -> bool {
        self.wait(self.state(), WITHIN).open.is_none()
    }

    fn wait<'a>(
        &'a self,
        state: MutexGuard<'a, CheckupState>,
        within: Duration,
    ) -> MutexGuard<'a, CheckupState> {
        let waited = self.ended.wait_timeout_while(state, within, |state| state.open.is_some());
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::{Error, ErrorKind};

    fn answer(checkup: &Checkup) -> ReportedHealth {
        let mut health = ReportedHealth::default();
        checkup.answer(&mut health);
        health
    }

    #[test]
    fn an_answer_is_reported_with_the_rank_that_it_is_about() {
        let checkup = Arc::new(Checkup::default());
        checkup.ask(|| Ok(()));
        while !checkup.has_ended() {}
        assert_eq!(answer(&checkup), ReportedHealth::default());
        checkup.ask(|| Err(Error::new(ErrorKind::Transport, "put", "a cable broke").with_rank(3)));
        while !checkup.has_ended() {}
        let health = answer(&checkup);
        assert_eq!((health.rank, health.unanswered_ms), (Some(3), None));
        assert!(health.error.is_some_and(|error| error.contains("a cable broke")));
    }

    #[test]
    fn a_transport_that_does_not_answer_is_asked_once_until_it_does() {
        let checkup = Arc::new(Checkup::default());
        let (release, block) = mpsc::channel::<()>();
        checkup.ask(move || {
            let _ = block.recv();
            Ok(())
        });
        assert!(answer(&checkup).unanswered_ms.is_some_and(|ms| ms >= 1000));
        checkup.ask(|| Err(Error::new(ErrorKind::Internal, "health", "it was asked again")));
        assert!(!checkup.has_ended());
        assert!(answer(&checkup).unanswered_ms.is_some_and(|ms| ms >= 2000), "since it was asked");
        drop(release);
        while !checkup.has_ended() {}
        assert_eq!(answer(&checkup), ReportedHealth::default());
    }
}
