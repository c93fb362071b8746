//! Measures how busy the machine is while ranks run: the ranks are not at fault for the load of other
//! processes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// A nap, and the CPU work after it: 5 % of the time.
const NAP: Duration = Duration::from_millis(19);
const WORK: Duration = Duration::from_millis(1);

/// A thread that naps and works a little, and measures how long both take.
#[derive(Debug)]
pub(super) struct LoadWatch {
    seen: Arc<LoadSeen>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct LoadSeen {
    over: AtomicBool,
    /// Microseconds of CPU work, and the wall time that they took.
    worked: AtomicU64,
    took: AtomicU64,
    /// The longest delay of a nap and its work beyond the time that they need.
    latest: RwLock<Duration>,
}

impl LoadWatch {
    pub(super) fn start() -> Self {
        let seen = Arc::new(LoadSeen::default());
        let watched = Arc::clone(&seen);
        Self { seen, thread: Some(std::thread::spawn(move || watched.watch())) }
    }

    /// A limit for the load measured so far: multiplied by the factor by which work took longer here, plus
    /// four times the longest delay of the thread.
    pub(super) fn stretch(&self, limit: Duration) -> Duration {
        let worked = self.seen.worked.load(Ordering::Relaxed);
        let took = self.seen.took.load(Ordering::Relaxed).max(worked);
        let latest = *self.seen.latest.read().unwrap_or_else(PoisonError::into_inner);
        let factor = if worked == 0 { 1.0 } else { took as f64 / worked as f64 };
        limit.mul_f64(factor) + 4 * latest
    }
}

impl Drop for LoadWatch {
    fn drop(&mut self) {
        self.seen.over.store(true, Ordering::Release);
        // A panic of the thread proves nothing about the ranks.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl LoadSeen {
    fn watch(&self) {
        while !self.over.load(Ordering::Acquire) {
            let start = Instant::now();
            std::thread::sleep(NAP);
            let (work_start, before) = (Instant::now(), processor_time());
            while processor_time().saturating_sub(before) < WORK {
                std::hint::spin_loop();
            }
            self.worked.fetch_add(WORK.as_micros() as u64, Ordering::Relaxed);
            self.took.fetch_add(work_start.elapsed().as_micros() as u64, Ordering::Relaxed);
            let late = start.elapsed().saturating_sub(NAP + WORK);
            let mut latest = self.latest.write().unwrap_or_else(PoisonError::into_inner);
            *latest = late.max(*latest);
        }
    }
}

/// The CPU time of this thread.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(worked: u64, took: u64, late: u64) -> LoadWatch {
        let seen = LoadSeen {
            worked: worked.into(),
            took: took.into(),
            latest: RwLock::new(Duration::from_millis(late)),
            ..LoadSeen::default()
        };
        LoadWatch { seen: Arc::new(seen), thread: None }
    }

    #[test]
    fn a_limit_grows_by_what_others_take_and_never_shrinks() {
        let limit = Duration::from_secs(2);
        assert_eq!(with(0, 0, 0).stretch(limit), limit);
        assert_eq!(with(1000, 900, 0).stretch(limit), limit);
        assert_eq!(with(1000, 4000, 0).stretch(limit), 4 * limit);
        assert_eq!(with(1000, 1000, 500).stretch(limit), 2 * limit);
    }

    #[test]
    fn the_thread_ends_with_its_watch() {
        let watch = LoadWatch::start();
        let start = Instant::now();
        while watch.seen.worked.load(Ordering::Relaxed) == 0 {
            assert!(start.elapsed() < Duration::from_secs(60));
            std::thread::yield_now();
        }
        let seen = Arc::downgrade(&watch.seen);
        drop(watch);
        assert!(seen.upgrade().is_none());
    }
}
