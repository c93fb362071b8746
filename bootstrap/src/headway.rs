//! The progress of the ranks: it distinguishes a rank that comes late from a link that carries nothing.
//!
//! A rank that waits for the first signal of a peer in an operation cannot see why the signal does not
//! come. So the heartbeats of the ranks carry the number of operations that they have begun, and those
//! of rank 0 carry the number that all ranks have begun. Once all ranks have arrived, no rank is late
//! any more.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Operations that were begun, by the number of their communicator.
pub(super) type Begun = Vec<(u64, u64)>;

/// The operations of one communicator that this rank has begun, and that all ranks have begun. Any thread
/// may use it; no call waits.
#[derive(Debug)]
pub struct Headway {
    comm: u64,
    epoch: Instant,
    mine: AtomicU64,
    all: AtomicU64,
    /// Nanoseconds from the epoch to the last change of `all`.
    changed: AtomicU64,
}

impl Headway {
    /// Records that this rank has begun `operations` operations.
    pub fn begin(&self, operations: u64) {
        self.mine.store(operations, Ordering::Relaxed);
    }

    /// The time since all ranks had begun every operation that this rank has begun, as far as it knows;
    /// nothing while one of them has not. The knowledge is up to two heartbeats old.
    pub fn together(&self) -> Option<Duration> {
        let all = self.all.load(Ordering::Acquire);
        let since = Duration::from_nanos(self.changed.load(Ordering::Relaxed));
        (all >= self.mine.load(Ordering::Relaxed))
            .then(|| self.epoch.elapsed().saturating_sub(since))
    }

    /// The number of operations that all ranks have begun, as far as this rank knows.
    pub fn begun_by_all(&self) -> u64 {
        self.all.load(Ordering::Relaxed)
    }

    fn note_all(&self, all: u64) {
        if all > self.all.load(Ordering::Relaxed) {
            self.changed.store(self.epoch.elapsed().as_nanos() as u64, Ordering::Relaxed);
            self.all.store(all, Ordering::Release);
        }
    }
}

/// The communicators of a world that are open on this rank.
#[derive(Debug, Default)]
pub(super) struct Headways(Mutex<Vec<Weak<Headway>>>);

impl Headways {
    /// Adds a new communicator. Its number is the same on all ranks, ranks that joined later included, and no
    /// other communicator has it.
    pub(super) fn open(&self, comm: u64) -> Arc<Headway> {
        let headway = Arc::new(Headway {
            comm,
            epoch: Instant::now(),
            mine: AtomicU64::new(0),
            all: AtomicU64::new(0),
            changed: AtomicU64::new(0),
        });
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&headway));
        headway
    }

    /// The operations that this rank has begun, communicators in the order of opening.
    pub(super) fn begun(&self) -> Begun {
        let mine = |headway: Arc<Headway>| (headway.comm, headway.mine.load(Ordering::Relaxed));
        self.living().into_iter().map(mine).collect()
    }

    /// Records the operations that all ranks have begun.
    pub(super) fn all_begun(&self, begun: &[(u64, u64)]) {
        for headway in self.living() {
            if let Some((_, all)) = begun.iter().find(|(comm, _)| *comm == headway.comm) {
                headway.note_all(*all);
            }
        }
    }

    fn living(&self) -> Vec<Arc<Headway>> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|headway| headway.strong_count() > 0);
        open.iter().filter_map(Weak::upgrade).collect()
    }
}

/// The operations that all of these ranks have begun: the minimum for each communicator that the first rank
/// names. A rank that does not name a communicator has begun nothing there.
pub(super) fn least<'a>(mine: Begun, others: impl Iterator<Item = &'a Begun> + Clone) -> Begun {
    let in_communicator = |begun: &Begun, wanted: u64| {
        begun.iter().find(|(comm, _)| *comm == wanted).map_or(0, |(_, operations)| *operations)
    };
    mine.into_iter()
        .map(|(comm, operations)| {
            let least = others.clone().map(|begun| in_communicator(begun, comm)).min();
            (comm, least.map_or(operations, |least| least.min(operations)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_together_once_all_have_begun_what_this_one_has() {
        let headways = Headways::default();
        let (first, second) = (headways.open(0), headways.open(1));
        first.begin(3);
        second.begin(1);
        assert_eq!(headways.begun(), [(0, 3), (1, 1)]);
        assert_eq!(first.together(), None);
        headways.all_begun(&[(0, 2), (1, 1), (7, 9)]);
        assert_eq!(first.together(), None);
        assert!(second.together().is_some());
        headways.all_begun(&[(0, 3)]);
        assert!(first.together().is_some());
        first.begin(4);
        assert_eq!(first.together(), None);
    }

    #[test]
    fn the_time_together_counts_from_the_last_arrival() {
        let headways = Headways::default();
        let headway = headways.open(0);
        headway.begin(1);
        std::thread::sleep(Duration::from_millis(30));
        headways.all_begun(&[(0, 1)]);
        let arrived = Instant::now();
        std::thread::sleep(Duration::from_millis(5));
        headways.all_begun(&[(0, 1)]);
        let together = headway.together().unwrap();
        assert!(together >= Duration::from_millis(5), "{together:?}");
        assert!(together <= arrived.elapsed() + Duration::from_millis(1), "{together:?}");
    }

    #[test]
    fn a_communicator_that_is_closed_is_forgotten() {
        let headways = Headways::default();
        drop(headways.open(3));
        let second = headways.open(8);
        second.begin(5);
        assert_eq!(headways.begun(), [(8, 5)]);
    }

    #[test]
    fn the_least_counts_and_who_names_no_communicator_has_begun_nothing_there() {
        let others = [vec![(0, 4), (1, 9)], vec![(0, 6)]];
        assert_eq!(least(vec![(0, 5), (1, 2)], others.iter()), [(0, 4), (1, 0)]);
        assert_eq!(least(vec![(0, 5)], others[1..].iter()), [(0, 5)]);
        assert_eq!(least(vec![(0, 5)], [].iter()), [(0, 5)]);
    }
}
