//! The position of the user's own thread. That thread stores, any thread reads; no call waits
//! or allocates.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::report::{Activity, Call, State};

use crate::wait::monotonic_ns;

/// Bits of a word for the kind of an operation: its index among the kinds of the user, and 1.
const KIND_BITS: u32 = 8;

/// The number and the kind of an operation, in one word, so that a reader never sees those of two operations. Never 0,
/// the word of a slot without one.
fn pack(operation: u64, kind: usize) -> u64 {
    operation << KIND_BITS | (kind as u64 + 1)
}

const STATES: [State; 5] =
    [State::Opening, State::Caller, State::Send, State::Receive, State::Closed];

/// The position of a rank in its calls.
#[derive(Debug)]
pub(crate) struct Track {
    /// The names of the kinds of operations. The operations give them: a session knows none.
    kinds: &'static [&'static str],
    /// Index into [`STATES`].
    state: AtomicU64,
    since_ns: AtomicU64,
    begun: AtomicU64,
    call: AtomicU64,
    /// The last operation in each slot.
    slots: Box<[AtomicU64]>,
}

impl Track {
    pub(super) fn new(in_flight: u32, kinds: &'static [&'static str]) -> Self {
        Self {
            kinds,
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

    /// The user is open, and no call is under way.
    pub(crate) fn opened(&self) {
        self.enter(1);
    }

    /// A call that sends begins a new operation of the kind with this index.
    pub(crate) fn send(&self, operation: u64, kind: usize) {
        let word = pack(operation, kind);
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

    /// A call of one kind that not all ranks make begins. It is no operation that ranks compare.
    pub(crate) fn pass(&self, number: u64, kind: usize, receives: bool) {
        self.call.store(pack(number, kind), Ordering::Relaxed);
        self.enter(if receives { 3 } else { 2 });
    }

    /// A call returns.
    pub(crate) fn leave(&self) {
        if self.state.load(Ordering::Relaxed) != 4 {
            self.enter(1);
        }
    }

    /// The user is closed, for ever.
    pub(crate) fn close(&self) {
        self.enter(4);
    }

    fn unpack(&self, word: u64) -> Option<Call> {
        let index = word & ((1 << KIND_BITS) - 1);
        let kind = self.kinds.get(usize::try_from(index.checked_sub(1)?).ok()?)?;
        let operation = word >> KIND_BITS;
        let slot = (operation % (self.slots.len() as u64).max(1)) as u32;
        Some(Call { operation, kind: (*kind).to_owned(), slot })
    }

    /// The present activity.
    pub(super) fn read(&self) -> Activity {
        let call = |word: &AtomicU64| self.unpack(word.load(Ordering::Relaxed));
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
        let track = Track::new(2, &["there", "back"]);
        assert_eq!(track.read().state, State::Opening);
        track.opened();
        assert_eq!((track.read().state, track.read().call), (State::Caller, None));
        track.send(6, 0);
        track.leave();
        track.send(7, 1);
        let now = track.read();
        assert_eq!((now.state, now.begun), (State::Send, 8));
        let back = Call { operation: 7, kind: "back".into(), slot: 1 };
        assert_eq!(now.call.as_ref(), Some(&back));
        assert_eq!(now.recent.iter().map(|c| c.operation).collect::<Vec<_>>(), [6, 7]);
        track.receive(6);
        assert_eq!(track.read().call.map(|c| c.kind).as_deref(), Some("there"));
        track.pass(3, 0, true);
        let now = track.read();
        assert_eq!((now.state, now.begun), (State::Receive, 8));
        assert_eq!(now.call.map(|c| (c.operation, c.kind)), Some((3, "there".to_owned())));
        assert_eq!(now.recent.len(), 2, "ranks do not compare it");
        track.close();
        track.leave();
        assert_eq!(track.read().state, State::Closed, "a closed communicator does not open again");
    }
}
