//! The events of one queue.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, TryLockError};

use tokenyard_core::transport::Event;

/// A queue. On a cache line of its own, so that queues of several threads do not slow each other.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Queue(Mutex<Events>);

/// Events that were not polled yet; never more than the queue depth, never reallocated.
#[derive(Debug)]
pub(super) struct Events {
    ring: VecDeque<Event>,
    depth: usize,
}

impl Queue {
    pub(super) fn new(depth: u32) -> Self {
        let depth = depth.max(1) as usize;
        Self(Mutex::new(Events { ring: VecDeque::with_capacity(depth), depth }))
    }

    /// The queue's events, for the one thread that owns the queue now. Nothing if a second thread
    /// breaks the queue rule: hot calls never wait (INV-6).
    pub(super) fn enter(&self) -> Option<MutexGuard<'_, Events>> {
        match self.0.try_lock() {
            Ok(events) => Some(events),
            // A panic cannot leave the ring in a state that matters.
            Err(TryLockError::Poisoned(events)) => Some(events.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl Events {
    pub(super) fn is_full(&self) -> bool {
        self.ring.len() >= self.depth
    }

    pub(super) fn push(&mut self, event: Event) {
        debug_assert!(!self.is_full());
        self.ring.push_back(event);
    }

    /// Moves the oldest events to the front of `out` and returns how many.
    pub(super) fn take(&mut self, out: &mut [Event]) -> usize {
        let count = out.len().min(self.ring.len());
        for (to, event) in out.iter_mut().zip(self.ring.drain(..count)) {
            *to = event;
        }
        count
    }
}
