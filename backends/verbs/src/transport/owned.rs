//! The lock of a queue.

use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// The state of a queue. It has its own cache lines, so that queues of several threads do not slow each other.
#[derive(Debug)]
#[repr(align(128))]
pub struct Owned<T>(Mutex<T>);

impl<T> Owned<T> {
    /// A queue that no thread uses.
    pub fn new(state: T) -> Self {
        Self(Mutex::new(state))
    }

    /// The state, for the one thread that owns the queue now. `None` while another thread has it, such as the
    /// watchdog: hot calls never wait (INV-6), and the caller calls again.
    #[inline]
    pub fn enter(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(state) => Some(state),
            // After a panic the host makes no more hot calls.
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The state, for the owner of the transport.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}
