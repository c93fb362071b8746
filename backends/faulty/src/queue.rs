//! The commands of one queue that are held back.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, TryLockError};

use tokenyard_core::transport::{Command, Event};

use crate::rng::Rng;

/// A queue. Its owner enters it, and so does the thread that drives the transport. It has its own
/// cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Queue(Mutex<State>);

/// A command that was accepted and not passed on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) command: Command,
    /// The earliest time to pass it on; 0 where nothing is delayed.
    pub(crate) due_ns: u64,
}

/// The state of a queue. All room is allocated at the start, and none later.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) rng: Rng,
    pub(crate) held: Vec<Held>,
    /// Commands that are passed on when the instance is dropped.
    pub(crate) kept: Vec<Command>,
    /// Events of commands that were not passed on.
    pub(crate) own: VecDeque<Event>,
    /// Commands that neither are passed on nor end. They hold their queue slots (INV-5).
    pub(crate) vanished: usize,
    /// Polls from now on that report nothing.
    quiet: u64,
    /// Nothing was accepted since the last poll. The next post then accepts at least one command,
    /// so that an idle queue never refuses.
    pub(crate) fresh: bool,
}

impl Queue {
    pub(crate) fn new(rng: Rng, hold: usize, depth: usize) -> Self {
        Self(Mutex::new(State {
            rng,
            held: Vec::with_capacity(hold),
            kept: Vec::with_capacity(depth),
            own: VecDeque::with_capacity(depth),
            vanished: 0,
            quiet: 0,
            fresh: true,
        }))
    }

    /// The queue's state, unless another thread has it: no thread waits here (INV-6).
    pub(crate) fn enter(&self) -> Option<MutexGuard<'_, State>> {
        match self.0.try_lock() {
            Ok(state) => Some(state),
            // A panic leaves the lists valid.
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// The state, for the only owner.
    pub(crate) fn state_mut(&mut self) -> &mut State {
        self.0.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl State {
    /// The number of `wanted` commands that a post may accept, where some posts accept less.
    pub(crate) fn admitted(&mut self, wanted: usize, back_pressure: u32) -> usize {
        if wanted == 0 || !self.rng.percent(back_pressure) {
            return wanted;
        }
        let least = usize::from(self.fresh);
        self.rng.below(wanted as u64).max(least as u64) as usize
    }

    /// Slots of commands that the inner transport does not have.
    pub(crate) fn stuck(&self) -> usize {
        self.kept.len() + self.own.len() + self.vanished
    }

    /// A random held command that may be passed on now.
    pub(crate) fn pick(&mut self, now_ns: u64) -> Option<usize> {
        let count = self.held.len();
        let first = self.rng.below(count as u64) as usize;
        (0..count).map(|i| (first + i) % count).find(|i| self.held[*i].due_ns <= now_ns)
    }

    /// Whether this poll reports nothing, where up to `most` in a row do.
    pub(crate) fn is_quiet(&mut self, most: u32) -> bool {
        if self.quiet > 0 {
            self.quiet -= 1;
            return true;
        }
        self.quiet = self.rng.below(u64::from(most) + 1);
        false
    }

    /// Takes events from `own`, the oldest first.
    pub(crate) fn take_own(&mut self, events: &mut [Event]) -> usize {
        let count = events.len().min(self.own.len());
        for (to, event) in events.iter_mut().zip(self.own.drain(..count)) {
            *to = event;
        }
        count
    }
}
