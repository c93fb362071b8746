//! An allocator that counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

/// The system's allocator, counted. A test that is a binary of its own declares it:
/// `#[global_allocator] static ALLOCATOR: Counting = Counting;`
#[derive(Clone, Copy, Debug, Default)]
pub struct Counting;

static ALL: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Constant and without a destructor: to read it allocates nothing.
    static MINE: Cell<u64> = const { Cell::new(0) };
}

/// Allocations of the calling thread so far; always 0 in a program that does not use [`Counting`].
pub fn of_this_thread() -> u64 {
    MINE.get()
}

/// Allocations of all threads so far; always 0 in a program that does not use [`Counting`].
pub fn of_all_threads() -> u64 {
    ALL.load(Ordering::Relaxed)
}

// SAFETY: everything is passed on to the system's allocator unchanged. `realloc` and `alloc_zeroed` go
// through `alloc`, as the trait provides them, and so count too.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        MINE.set(MINE.get() + 1);
        ALL.fetch_add(1, Ordering::Relaxed);
        // SAFETY: by the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: by the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}
