//! An allocator that counts calls by thread, for benchmarks and for tests of code that must not
//! allocate.
//!
//! A program that wants the figures declares it:
//! `#[global_allocator] static ALLOCATOR: Counting = Counting;`
//!
//! It counts by thread because one thread of a rank takes no part in steps: the control thread of
//! the rendezvous sends heartbeats, which allocate for a moment. Every other thread must not
//! allocate.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

/// The most threads that are counted separately; later threads share the last place.
const MOST_THREADS: usize = 64;

static THREADS: [Thread; MOST_THREADS] = [const { Thread::new() }; MOST_THREADS];
static KNOWN_THREADS: AtomicUsize = AtomicUsize::new(0);
static TAKEN: AtomicU64 = AtomicU64::new(0);
static GIVEN_BACK: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// This thread's place in the list. It is constant and has no destructor, so a read of it
    /// allocates nothing.
    static PLACE: Cell<usize> = const { Cell::new(usize::MAX) };
    /// Calls of this thread that allocated.
    static MINE: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counting;

struct Thread {
    id: AtomicI32,
    calls: AtomicU64,
}

impl Thread {
    const fn new() -> Self {
        Self { id: AtomicI32::new(0), calls: AtomicU64::new(0) }
    }
}

/// Calls of the calling thread that have allocated so far; always 0 in a program that does not use
/// [`Counting`].
pub fn of_this_thread() -> u64 {
    MINE.get()
}

/// Calls of all threads that have allocated so far; always 0 in a program that does not use
/// [`Counting`].
pub fn of_all_threads() -> u64 {
    THREADS.iter().map(|thread| thread.calls.load(Ordering::Relaxed)).sum()
}

/// The allocations since the process started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocations {
    /// Calls that allocated (new, larger or moved blocks), by thread.
    calls: [u64; MOST_THREADS],
    /// Bytes that all threads hold now.
    pub live_bytes: u64,
}

impl Allocations {
    /// The counts so far; all zero in a program that does not use [`Counting`]. Allocates nothing.
    pub fn now() -> Self {
        let mut calls = [0; MOST_THREADS];
        for (calls, thread) in calls.iter_mut().zip(&THREADS) {
            *calls = thread.calls.load(Ordering::Relaxed);
        }
        let given_back = GIVEN_BACK.load(Ordering::Relaxed);
        Self { calls, live_bytes: TAKEN.load(Ordering::Relaxed).saturating_sub(given_back) }
    }

    /// Calls since `earlier`: first of all threads except the control threads of the rendezvous,
    /// then of the control threads.
    pub fn since(&self, earlier: &Self) -> (u64, u64) {
        let (mut steps, mut control) = (0, 0);
        for (place, thread) in THREADS.iter().enumerate() {
            let calls = self.calls[place] - earlier.calls[place];
            if calls > 0 && is_control(thread.id.load(Ordering::Relaxed)) {
                control += calls;
            } else {
                steps += calls;
            }
        }
        (steps, control)
    }
}

/// Whether a live thread of this process is the control thread of a world. Its name is `tokenyard-`
/// and the rank.
fn is_control(thread: i32) -> bool {
    let name = std::fs::read_to_string(format!("/proc/self/task/{thread}/comm"));
    name.is_ok_and(|name| {
        let rank = name.trim_end().strip_prefix("tokenyard-").unwrap_or_default();
        !rank.is_empty() && rank.bytes().all(|c| c.is_ascii_digit())
    })
}

/// Whether this program uses [`Counting`].
pub fn are_counted() -> bool {
    let before = Allocations::now();
    drop(std::hint::black_box(Box::new(0_u64)));
    Allocations::now().calls != before.calls
}

fn place() -> usize {
    PLACE.with(|place| {
        if place.get() == usize::MAX {
            let new = KNOWN_THREADS.fetch_add(1, Ordering::Relaxed).min(MOST_THREADS - 1);
            let id = rustix::thread::gettid().as_raw_nonzero().get();
            THREADS[new].id.store(id, Ordering::Relaxed);
            place.set(new);
        }
        place.get()
    })
}

fn took(bytes: usize) {
    MINE.set(MINE.get() + 1);
    THREADS[place()].calls.fetch_add(1, Ordering::Relaxed);
    TAKEN.fetch_add(bytes as u64, Ordering::Relaxed);
}

fn gave_back(bytes: usize) {
    GIVEN_BACK.fetch_add(bytes as u64, Ordering::Relaxed);
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: by the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: by the caller's contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        took(new_size);
        gave_back(layout.size());
        // SAFETY: by the caller's contract.
        unsafe { System.realloc(pointer, layout, new_size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        gave_back(layout.size());
        // SAFETY: by the caller's contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}
