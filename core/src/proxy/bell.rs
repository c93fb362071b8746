//! Sleep and wake-up of a thread without missed work.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::sync::{AtomicBool, Ordering, Thread, current, fence, park_timeout};

/// Wakes one thread.
#[derive(Debug)]
pub(super) struct Bell {
    asleep: AtomicBool,
    sleeper: OnceLock<Thread>,
}

impl Bell {
    pub(super) fn new() -> Self {
        Self { asleep: AtomicBool::new(false), sleeper: OnceLock::new() }
    }

    /// Wakes the thread if it sleeps. The caller has published work before.
    pub(super) fn ring(&self) {
        // The work was stored before `asleep` is loaded; the thread stores `asleep` before it checks
        // for work. Only sequentially consistent fences between the two prevent both sides from missing
        // each other: the only place where release and acquire do not suffice.
        fence(Ordering::SeqCst);
        self.nudge();
    }

    /// Wakes the thread if it is seen to sleep. For callers that repeat the call and so need no fence.
    pub(super) fn nudge(&self) {
        if self.asleep.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        if let Some(sleeper) = self.sleeper.get() {
            sleeper.unpark();
        }
    }

    /// Sleeps until the bell rings, `nap` is over or there is work, whichever comes first, and returns
    /// true if it ended before the nap was over. Only one thread calls it, and only that thread writes
    /// `asleep`.
    pub(super) fn sleep(&self, nap: Duration, has_work: impl FnOnce() -> bool) -> bool {
        let start = Instant::now();
        self.sleeper.get_or_init(current);
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !has_work() {
            park_timeout(nap);
        }
        self.asleep.store(false, Ordering::Relaxed);
        start.elapsed() < nap
    }
}
