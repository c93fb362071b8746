//! The waits of ranks during the join: reported on standard error at growing intervals, and to callers
//! of [`joins_under_way`].

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::identity::RankId;

/// The time of the first report of a wait; each later report comes at twice the time of the one before.
const FIRST_WORD: Duration = Duration::from_secs(2);
const LONGEST_SILENCE: Duration = Duration::from_secs(60);

/// All joins of this process, for [`joins_under_way`].
static WAITS: Mutex<Vec<Weak<Join>>> = Mutex::new(Vec::new());

/// The join of one rank.
#[derive(Debug)]
pub(super) struct Join {
    place: RankId,
    since: Instant,
    state: Mutex<JoinState>,
}

#[derive(Debug)]
struct JoinState {
    /// Nothing once it has joined.
    what: Option<String>,
    next_word: Duration,
}

impl Join {
    pub(super) fn begin(place: RankId) -> Arc<Self> {
        let what = match place.rank {
            0 => "it opens its door".to_owned(),
            _ => "it looks for rank 0".to_owned(),
        };
        let state = Mutex::new(JoinState { what: Some(what), next_word: FIRST_WORD });
        let waiting = Arc::new(Self { place, since: Instant::now(), state });
        let mut waits = WAITS.lock().unwrap_or_else(PoisonError::into_inner);
        waits.retain(|known| known.strong_count() > 0);
        waits.push(Arc::downgrade(&waiting));
        waiting
    }

    /// Records the event that this rank waits for, and reports it when a report is due.
    pub(super) fn waits_for(&self, what: String) {
        let waited = self.since.elapsed();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if waited >= state.next_word {
            state.next_word = waited + waited.min(LONGEST_SILENCE);
            tracing::warn!("{}", self.describe(&what));
        }
        state.what = Some(what);
    }

    /// The rank has joined.
    pub(super) fn done(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).what = None;
    }

    fn describe(&self, what: &str) -> String {
        let RankId { rank, ranks, .. } = self.place;
        let seconds = self.since.elapsed().as_secs();
        format!("rank {rank} of {ranks} has waited {seconds} s to join: {what}")
    }
}

/// One line for each rank of this process that is joining: since when, and what it waits for. May be
/// called from any thread at any time.
pub fn joins_under_way() -> Vec<String> {
    let waits = WAITS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let line = |waiting: Arc<Join>| {
        let state = waiting.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.what.as_ref().map(|what| waiting.describe(what))
    };
    waits.iter().filter_map(Weak::upgrade).filter_map(line).collect()
}
