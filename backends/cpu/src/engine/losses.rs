//! Ranks that this one goes on without, where losses are masked.
//!
//! The host says which ranks are *lost*. This rank *gives up* on a lost rank when a wait for it
//! cannot end otherwise. From then on nothing of that rank counts, whatever it still writes (INV-8).
//! Work that it had completed before counts as that of any rank. Nothing is sent to a lost rank.
//!
//! A command to a rank may fail before its loss is known. That is no error yet, but a suspicion,
//! which must be resolved before the slot is used again: the rank is lost, or the failure is an error
//! after all (INV-7).

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU8, Ordering};

use tokenyard_core::abi::{self, TY_RANK_ABSENT};
use tokenyard_core::kernels::KernelShape;
use tokenyard_core::{Error, ErrorKind};

/// Ranks that are lost, given up, or suspected.
#[derive(Debug)]
pub(crate) struct Losses {
    /// By rank, written by the host; none where a lost rank ends the communicator.
    lost: Option<&'static [AtomicU8]>,
    given_up: Vec<Cell<Option<MayKnow>>>,
    /// By source of another domain: the first operation in which it takes no part, as reported by
    /// its forwarder here, which is alive.
    gone: Vec<Cell<Option<u64>>>,
    /// The last operation that this rank has begun.
    begun: Cell<u64>,
    /// The first failure of a command to each rank that is not lost so far.
    suspects: RefCell<Vec<(u32, String)>>,
    /// Checks of the links' health that are skipped before the next one.
    rest: Cell<u32>,
}

/// A link stays unhealthy once a rank was lost, and its error text costs memory. So its health is
/// queried seldom then. Its reports about other ranks are sticky too, so none is missed.
const REST: u32 = 64;

/// Facts that a rank which was given up may still know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MayKnow {
    /// It was never there.
    Nothing,
    /// The places of operations up to this one.
    Until(u64),
}

impl Losses {
    /// # Safety
    /// The plan's table outlives the runner.
    pub(crate) unsafe fn new(shape: &KernelShape, plan: &abi::TyPlan) -> Self {
        let lost = (!plan.lost.is_null()).then(|| {
            // SAFETY: R bytes that are only accessed atomically, by this function's contract.
            unsafe {
                std::slice::from_raw_parts(plan.lost.cast::<AtomicU8>(), shape.ranks as usize)
            }
        });
        Self::of(lost, shape.ranks as usize)
    }

    pub(crate) fn of(lost: Option<&'static [AtomicU8]>, ranks: usize) -> Self {
        // A rank that was lost after the teams were made still has its number in them.
        let is_absent =
            |rank: usize| lost.is_some_and(|l| l[rank].load(Ordering::Acquire) == TY_RANK_ABSENT);
        let known = |rank| Cell::new(is_absent(rank).then_some(MayKnow::Nothing));
        let given_up = (0..ranks).map(known).collect();
        Self {
            lost,
            given_up,
            gone: vec![Cell::new(None); ranks],
            begun: Cell::new(0),
            suspects: RefCell::new(Vec::new()),
            rest: Cell::new(0),
        }
    }

    /// Whether this rank goes on without lost ones.
    pub(crate) fn are_masked(&self) -> bool {
        self.lost.is_some()
    }

    /// Whether the host says that a rank is lost.
    pub(crate) fn is_lost(&self, rank: u32) -> bool {
        self.lost.is_some_and(|lost| lost[rank as usize].load(Ordering::Acquire) != 0)
    }

    /// Whether nothing of a rank counts any more.
    pub(crate) fn is_given_up(&self, rank: u32) -> bool {
        self.given_up[rank as usize].get().is_some()
    }

    /// Notes that this rank begins an operation: peers that live learn of its places.
    pub(crate) fn begin(&self, operation: u64) {
        self.begun.set(operation);
    }

    pub(crate) fn give_up(&self, rank: u32) {
        let given_up = &self.given_up[rank as usize];
        if given_up.get().is_none() {
            given_up.set(Some(MayKnow::Until(self.begun.get())));
        }
    }

    /// Notes that a source of another domain takes no part from an operation on.
    pub(crate) fn note_gone(&self, source: u32, operation: u64) {
        let gone = &self.gone[source as usize];
        gone.set(Some(gone.get().map_or(operation, |first| first.min(operation))));
    }

    /// Whether the forwarder of a source has reported it as lost.
    pub(crate) fn is_gone(&self, source: u32) -> bool {
        self.gone[source as usize].get().is_some()
    }

    /// Whether the forwarder of a source forwards its rows of an operation, or reports that they do not
    /// count.
    pub(crate) fn is_handed_on(&self, source: u32, operation: u64) -> bool {
        self.gone[source as usize].get().is_none_or(|first| operation < first)
    }

    /// Whether a rank that was given up may still write to the places of an operation.
    pub(crate) fn may_write(&self, rank: u32, operation: u64) -> bool {
        matches!(self.given_up[rank as usize].get(), Some(MayKnow::Until(last)) if operation <= last)
    }

    /// Stores the failure of a command to `rank`; returns it if it is an error at once.
    #[cold]
    pub(crate) fn suspect(&self, rank: u32, error: Error) -> Result<(), Error> {
        if self.lost.is_none() {
            return Err(error);
        }
        let mut suspects = self.suspects.borrow_mut();
        if !self.is_lost(rank) && suspects.iter().all(|(known, _)| *known != rank) {
            suspects.push((rank, error.detail()));
        }
        Ok(())
    }

    /// Whether the links' health need not be looked at now.
    pub(crate) fn rests_from_health(&self) -> bool {
        let rest = self.rest.get();
        self.rest.set(rest.saturating_sub(1));
        rest > 0
    }

    /// Notes that a link was found unhealthy.
    #[cold]
    pub(crate) fn rest_from_health(&self) {
        self.rest.set(REST);
    }

    /// A rank that is suspected and is not lost.
    pub(crate) fn suspected(&self) -> Option<u32> {
        self.forget_lost();
        self.suspects.borrow().first().map(|(rank, _)| *rank)
    }

    fn forget_lost(&self) {
        self.suspects.borrow_mut().retain(|(rank, _)| !self.is_lost(*rank));
    }

    /// The failure behind the end of a wait, if there is one: a rank that was suspected lives.
    #[cold]
    pub(crate) fn explain(&self, wait: Error) -> Error {
        self.forget_lost();
        match self.suspects.borrow().first() {
            Some((rank, text)) if wait.kind() == ErrorKind::Deadline => {
                Error::new(ErrorKind::Transport, "complete command", text.clone()).with_rank(*rank)
            }
            _ => wait,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn losses(lost: &'static [AtomicU8]) -> Losses {
        Losses::of(Some(lost), lost.len())
    }

    fn failure() -> Error {
        Error::new(ErrorKind::Transport, "complete command", "the link is down")
    }

    #[test]
    fn a_failed_command_to_a_rank_that_turns_out_lost_is_forgotten() {
        static LOST: [AtomicU8; 2] = [const { AtomicU8::new(0) }; 2];
        let losses = losses(&LOST);
        losses.suspect(1, failure()).expect("no error yet");
        assert_eq!(losses.suspected(), Some(1));
        LOST[1].store(1, Ordering::Release);
        assert_eq!(losses.suspected(), None);
        let wait = Error::new(ErrorKind::Deadline, "wait", "too long");
        assert_eq!(losses.explain(wait).kind(), ErrorKind::Deadline);
    }

    #[test]
    fn the_loss_of_one_suspect_does_not_clear_another() {
        static LOST: [AtomicU8; 3] = [const { AtomicU8::new(0) }; 3];
        let losses = losses(&LOST);
        losses.suspect(1, failure()).expect("no error yet");
        losses.suspect(2, failure()).expect("no error yet");
        LOST[1].store(1, Ordering::Release);
        assert_eq!(losses.suspected(), Some(2));
    }

    #[test]
    fn a_failed_command_to_a_rank_that_lives_ends_the_wait_as_its_error() {
        static LOST: [AtomicU8; 2] = [const { AtomicU8::new(0) }; 2];
        let losses = losses(&LOST);
        losses.suspect(1, failure()).expect("no error yet");
        let error = losses.explain(Error::new(ErrorKind::Deadline, "wait", "too long"));
        assert_eq!((error.kind(), error.rank()), (ErrorKind::Transport, Some(1)));
        assert!(error.message().contains("the link is down"), "{error}");
    }

    #[test]
    fn where_losses_are_not_masked_a_failed_command_is_an_error_at_once() {
        let losses = Losses::of(None, 1);
        assert!(losses.suspect(0, failure()).is_err());
        assert!(!losses.is_lost(0));
    }

    #[test]
    fn a_link_that_was_found_unhealthy_is_asked_again_after_a_while() {
        static LOST: [AtomicU8; 1] = [const { AtomicU8::new(0) }];
        let losses = losses(&LOST);
        assert!(!losses.rests_from_health());
        losses.rest_from_health();
        assert_eq!((0..1000).take_while(|_| losses.rests_from_health()).count(), REST as usize);
        assert!(!losses.rests_from_health());
    }

    #[test]
    fn what_a_forwarder_hands_on_before_it_says_that_its_source_is_gone_is_waited_for() {
        let losses = Losses::of(None, 2);
        assert!(losses.is_handed_on(1, 7) && !losses.is_gone(1));
        losses.note_gone(1, 6);
        // A void of an earlier operation, which is received later.
        losses.note_gone(1, 7);
        assert!(losses.is_gone(1) && !losses.is_gone(0));
        assert!(losses.is_handed_on(1, 5) && !losses.is_handed_on(1, 6));
    }

    #[test]
    fn what_a_given_up_rank_knows_of_stays_out_of_use_and_no_more() {
        static LOST: [AtomicU8; 1] = [const { AtomicU8::new(0) }];
        let losses = losses(&LOST);
        losses.begin(7);
        assert!(!losses.may_write(0, 7), "no rank gave it up");
        losses.give_up(0);
        losses.begin(8);
        losses.give_up(0);
        assert!(losses.is_given_up(0));
        assert!(losses.may_write(0, 6) && losses.may_write(0, 7) && !losses.may_write(0, 8));
    }
}
