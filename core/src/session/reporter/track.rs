//! The position of the communicator's own thread. That thread stores, any thread reads; no call waits
//! or allocates.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::report::{Activity, Call, State};

use crate::wait::monotonic_ns;

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sort {
    Dispatch = 1,
    Replay = 2,
    Combine = 3,
}

/// The number and the kind of an operation, in one word.
fn pack(operation: u64, sort: Sort) -> u64 {
    operation << 2 | sort as u64
}

fn unpack(word: u64, slots: u64) -> Option<Call> {
    let kind = match word & 3 {
        1 => "dispatch",
        2 => "replay",
        3 => "combine",
        _ => return None,
    };
    let operation = word >> 2;
    Some(Call { operation, kind: kind.to_owned(), slot: (operation % slots.max(1)) as u32 })
}

const STATES: [State; 5] =
    [State::Opening, State::Caller, State::Send, State::Receive, State::Closed];

/// The position of a rank in its calls.
#[derive(Debug)]
pub(crate) struct Track {
    /// Index into [`STATES`].
    state: AtomicU64,
    since_ns: AtomicU64,
    begun: AtomicU64,
    call: AtomicU64,
    /// The last operation in each slot.
    slots: Box<[AtomicU64]>,
}

impl Track {
    pub(super) fn new(in_flight: u32) -> Self {
        Self {
            state: AtomicU64::new(0),
            since_ns: AtomicU64::new(monotonic_ns()),
            begun: AtomicU64::new(0),
            call: AtomicU64::new(0),
            slots: (0..in_flight).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    fn enter(&self, state: u64) {
        self.since_ns.store(monotonic_ns(), Ordering::Relaxed);
        self.state.store(state, Ordering::Relaxed);
    }

    /// The communicator is open, and no call is under way.
    pub(crate) fn opened(&self) {
        self.enter(1);
    }

    /// A call that sends begins a new operation.
    pub(crate) fn send(&self, operation: u64, sort: Sort) {
        let word = pack(operation, sort);
        self.begun.store(operation + 1, Ordering::Relaxed);
        self.call.store(word, Ordering::Relaxed);
        self.slots[operation as usize % self.slots.len()].store(word, Ordering::Relaxed);
        self.enter(2);
    }

    /// A call that receives an operation begins.
    pub(crate) fn receive(&self, operation: u64) {
        let sent = self.slots[operation as usize % self.slots.len()].load(Ordering::Relaxed);
        self.call.store(sent, Ordering::Relaxed);
        self.enter(3);
    }

    /// A call returns.
    pub(crate) fn leave(&self) {
        if self.state.load(Ordering::Relaxed) != 4 {
            self.enter(1);
        }
    }

    /// The communicator is closed, for ever.
    pub(crate) fn close(&self) {
        self.enter(4);
    }

    /// The present activity.
    pub(super) fn read(&self) -> Activity {
        let slots = self.slots.len() as u64;
        let call = |word: &AtomicU64| unpack(word.load(Ordering::Relaxed), slots);
        let mut recent: Vec<Call> = self.slots.iter().filter_map(call).collect();
        recent.sort_by_key(|call| call.operation);
        let since = monotonic_ns().saturating_sub(self.since_ns.load(Ordering::Relaxed));
        let state = self.state.load(Ordering::Relaxed) as usize;
        Activity {
            state: STATES.get(state).copied().unwrap_or_default(),
            since_ms: since / 1_000_000,
            begun: self.begun.load(Ordering::Relaxed),
            begun_by_all: 0,
            call: call(&self.call),
            recent,
            collective: None,
            collectives: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_where_its_last_call_left_it() {
        let track = Track::new(2);
        assert_eq!(track.read().state, State::Opening);
        track.opened();
        assert_eq!((track.read().state, track.read().call), (State::Caller, None));
        track.send(6, Sort::Dispatch);
        track.leave();
        track.send(7, Sort::Combine);
        let now = track.read();
        assert_eq!((now.state, now.begun), (State::Send, 8));
        let combine = Call { operation: 7, kind: "combine".into(), slot: 1 };
        assert_eq!(now.call.as_ref(), Some(&combine));
        assert_eq!(now.recent.iter().map(|c| c.operation).collect::<Vec<_>>(), [6, 7]);
        track.receive(6);
        assert_eq!(track.read().call.map(|c| c.kind).as_deref(), Some("dispatch"));
        track.close();
        track.leave();
        assert_eq!(track.read().state, State::Closed, "a closed communicator does not open again");
    }
}
