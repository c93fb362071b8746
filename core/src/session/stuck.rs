//! A thread that does not return from a transport: it is left behind, with all memory that it may still
//! use.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::{Error, ErrorKind, Result};

/// Most time that the end of a session waits for a thread that is inside a transport: much longer than
/// any call that returns, on a busy machine too.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// Records whether a thread was left behind, and where. One per session.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stuck(Arc<OnceLock<String>>);

impl Stuck {
    /// Records and logs that a thread is left behind inside `what`.
    #[cold]
    pub(crate) fn set(&self, what: &str) {
        tracing::error!(
            "{what}: a thread is left behind there, and what it may use stays until the process ends"
        );
        let _ = self.0.set(what.to_owned());
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.get().is_some()
    }

    /// # Errors
    /// A thread was left behind.
    pub(crate) fn check(&self, operation: &'static str) -> Result<()> {
        let Some(what) = self.0.get() else { return Ok(()) };
        Err(Error::new(ErrorKind::Transport, operation, what.clone())
            .with_fix("start this process again, without that transport if the fault repeats"))
    }

    /// `value`, which is dropped only if no thread was left behind by then.
    pub(crate) fn keep<T>(&self, value: T) -> Kept<T> {
        Kept { value: ManuallyDrop::new(value), stuck: self.clone() }
    }
}

/// A value that a thread which was left behind may still use.
#[derive(Debug)]
pub(crate) struct Kept<T> {
    value: ManuallyDrop<T>,
    stuck: Stuck,
}

impl<T> Drop for Kept<T> {
    fn drop(&mut self) {
        if !self.stuck.is_set() {
            // SAFETY: it is dropped here only, and no code uses it afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}

impl<T> Deref for Kept<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Kept<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

/// Waits for a thread that was requested to end. False if it has not ended within `within`; the thread
/// is then left running.
pub(crate) fn join_within(thread: JoinHandle<()>, within: Duration) -> bool {
    let end = Instant::now() + within;
    while !thread.is_finished() {
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    if thread.join().is_err() {
        tracing::error!("a thread that drove a transport panicked");
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_thread_left_behind_may_use_stays_and_else_it_goes() {
        for is_stuck in [false, true] {
            let (stuck, value) = (Stuck::default(), Arc::new(()));
            let kept = stuck.keep(Arc::clone(&value));
            assert!(stuck.check("close").is_ok());
            if is_stuck {
                stuck.set("transport `x`, inside of `progress`");
                assert!(stuck.check("close").unwrap_err().to_string().contains("`progress`"));
            }
            drop(kept);
            assert_eq!(Arc::strong_count(&value), 1 + usize::from(is_stuck));
        }
    }
}
