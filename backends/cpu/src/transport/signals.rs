//! Signal totals in shared memory: one cache line each, so that two writers never share one.

use std::sync::atomic::{AtomicU64, Ordering};

use super::memory::Span;

/// Bytes between two totals.
const SPACING: usize = 64;

/// The totals of one rank, as mapped in this process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Signals {
    span: Span,
    count: u32,
}

impl Signals {
    /// Bytes of memory that `count` totals take; never 0, for memory of no bytes cannot be mapped.
    pub(super) fn bytes(count: u32) -> usize {
        SPACING * count.max(1) as usize
    }

    /// # Safety
    /// `span` has `Signals::bytes(count)` bytes, is aligned to 8 bytes, outlives every copy of the
    /// result, and is only accessed through it and its like in other processes.
    pub(super) unsafe fn new(span: Span, count: u32) -> Self {
        debug_assert!(span.bytes() >= Self::bytes(count));
        Self { span, count }
    }

    #[inline]
    fn total(&self, id: u32) -> Option<&AtomicU64> {
        if id >= self.count {
            return None;
        }
        let cell = self.span.at(u64::from(id) * SPACING as u64, 8).cast::<u64>();
        // SAFETY: the cell is inside the span and aligned; all access is atomic, by the contract
        // of `new`. Atomics work between processes as they do between threads.
        Some(unsafe { AtomicU64::from_ptr(cell) })
    }

    /// Adds to a total after everything this thread wrote before (INV-1). `None`: no such signal.
    pub(super) fn raise(&self, id: u32, add: u32) -> Option<()> {
        self.total(id)?.fetch_add(u64::from(add), Ordering::Release);
        Some(())
    }

    /// A total; what was written before it was raised is visible after this (INV-1).
    #[inline]
    pub(super) fn read(&self, id: u32) -> Option<u64> {
        Some(self.total(id)?.load(Ordering::Acquire))
    }
}
