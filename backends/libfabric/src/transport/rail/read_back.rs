//! Makes payloads visible before their signals count (INV-1), where a completion does not guarantee
//! it.
//!
//! A completion in host memory may be seen before a payload that went to another device's memory is
//! visible there. A read by the same NIC does not pass its own earlier writes. So a completed read
//! of a window of this rank, posted after the completion was seen, proves that the payload is
//! visible.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::null_mut;

use tokenyard_sys_fabric::types::fi_context2;

use super::outbound::{Attempt, Remote, Transfer};
use super::{State, errors};
use crate::transport::shared::{Failure, Shared};

/// Signals that wait for a read.
#[derive(Debug)]
pub(super) struct ReadBack {
    transfer: Transfer,
    /// The context that the provider returns when the read is done.
    context: Box<UnsafeCell<fi_context2>>,
    /// Signal ids and the amounts to add. The list grows where more signals come during one read
    /// than it has room for: the read's own completion is behind them in the queue, so they cannot
    /// be left there.
    waiting: VecDeque<(u32, u32)>,
    /// The number of first entries of `waiting` that count when the read in flight is done; 0 if
    /// none is in flight.
    covered: usize,
    /// Whether a read could not be posted: the transport is then unhealthy.
    broken: bool,
}

// SAFETY: the transfer holds addresses; the context holds libfabric's own pointers. Neither belongs to
// a thread.
unsafe impl Send for ReadBack {}

impl ReadBack {
    /// There is room for `usual` signals that wait.
    fn new(transfer: Transfer, usual: usize) -> Self {
        let context = Box::new(UnsafeCell::new(fi_context2 { internal: [null_mut(); 8] }));
        let waiting = VecDeque::with_capacity(usual);
        Self { transfer, context, waiting, covered: 0, broken: false }
    }

    pub(super) fn hold(&mut self, id: u32, add: u32) {
        self.waiting.push_back((id, add));
    }

    /// Whether a read is due: signals wait, and no read is in flight.
    fn is_due(&self) -> bool {
        self.covered == 0 && !self.waiting.is_empty() && !self.broken
    }

    /// Notes that a read was posted, which covers the signals so far.
    fn posted(&mut self) {
        self.covered = self.waiting.len();
    }

    /// The read is done: returns the signals that count now.
    fn done(&mut self) -> impl Iterator<Item = (u32, u32)> {
        let covered = std::mem::take(&mut self.covered);
        self.waiting.drain(..covered)
    }
}

/// The source and the destination of a read-back.
#[derive(Clone, Copy, Debug)]
pub(in crate::transport) struct Mirror {
    /// Region of the window's first 8 bytes, which only this rank uses.
    pub(in crate::transport) source: usize,
    /// Address of its first byte, in the form that peers use.
    pub(in crate::transport) base: u64,
    /// 8 bytes that no code reads, and their region.
    pub(in crate::transport) landing: *mut u8,
    pub(in crate::transport) region: usize,
}

impl State {
    /// From now on, signals count after a read-back. This rank is connected to itself as `me`.
    pub(in crate::transport) fn read_back_first(&mut self, me: u32, mirror: Mirror, usual: usize) {
        let remote = Remote { base: mirror.base, key: self.outbound.objects.key(mirror.source) };
        let own = &mut self.outbound.peers[me as usize].windows;
        let window = own.len();
        *own = own.iter().copied().chain([remote]).collect();
        let transfer = Transfer {
            peer: me,
            local: mirror.landing,
            descriptor: self.outbound.objects.descriptor(mirror.region),
            bytes: size_of::<u64>(),
            window,
            offset: 0,
            datum: None,
        };
        self.read_back = Some(ReadBack::new(transfer, usual));
    }

    /// Posts a read if signals wait for one. Returns whether some wait.
    pub(super) fn read_if_due(&mut self, shared: &Shared) -> bool {
        let Some(read_back) = self.read_back.as_ref() else { return false };
        let waits = !read_back.waiting.is_empty();
        if read_back.is_due() {
            let (transfer, context) = (read_back.transfer, read_back.context.get());
            let attempt = self.outbound.read(&transfer, context.cast());
            let Some(read_back) = self.read_back.as_mut() else { return false };
            match attempt {
                Attempt::Posted => read_back.posted(),
                Attempt::Full => {}
                other => {
                    read_back.broken = true;
                    self.read_failed(shared, other);
                }
            }
        }
        waits
    }

    #[cold]
    fn read_failed(&self, shared: &Shared, attempt: Attempt) {
        let why = match attempt {
            Attempt::Failed(error) => self.outbound.objects.info.library().strerror(error),
            other => format!("{other:?}"),
        };
        let message = format!("a read of this rank's own window cannot be posted: {why}");
        shared.fail(Failure { peer: None, message, interface: self.interface.clone() });
    }

    /// Handles a completion that belongs to no command.
    pub(super) fn read_came(&mut self, shared: &Shared, context: *const c_void) {
        let unknown = match &mut self.read_back {
            Some(it) if context == it.context.get().cast() => {
                it.done().fold(false, |unknown, (id, add)| !shared.raise(id, add) || unknown)
            }
            _ => false,
        };
        if unknown {
            errors::distrust(&self.interface, shared, None, "a signal that is not there");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_back(usual: usize) -> ReadBack {
        let transfer = Transfer {
            peer: 0,
            local: null_mut(),
            descriptor: null_mut(),
            bytes: 8,
            window: 0,
            offset: 0,
            datum: None,
        };
        ReadBack::new(transfer, usual)
    }

    #[test]
    fn a_signal_counts_only_after_a_read_that_was_posted_behind_it() {
        let mut it = read_back(4);
        assert!(!it.is_due());
        it.hold(1, 10);
        assert!(it.is_due());
        it.posted();
        it.hold(2, 20);
        assert!(!it.is_due(), "one read at a time");
        assert_eq!(it.done().collect::<Vec<_>>(), [(1, 10)]);
        assert!(it.is_due(), "the second needs a read of its own");
        it.posted();
        assert_eq!(it.done().collect::<Vec<_>>(), [(2, 20)]);
        assert!(!it.is_due());
        assert_eq!(it.done().count(), 0);
    }

    #[test]
    fn more_signals_than_usual_wait_for_one_read_and_all_count() {
        let mut it = read_back(2);
        it.hold(0, 1);
        it.posted();
        (1..100).for_each(|id| it.hold(id, 1));
        assert_eq!(it.done().count(), 1);
        it.posted();
        assert!(it.done().map(|(id, _)| id).eq(1..100));
    }
}
