//! A run of the pool allocates nothing, on any thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_cpu::pool::Pool;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is handed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_run_allocates_nothing() {
    let pool = Pool::new(3).unwrap();
    let sum = AtomicU64::new(0);
    let run = || {
        pool.run(8, &|i| {
            sum.fetch_add(i as u64, Ordering::Relaxed);
        })
        .unwrap()
    };
    // Threads allocate their own handles when they start.
    for _ in 0..100 {
        run();
    }
    std::thread::sleep(std::time::Duration::from_millis(10));
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for _ in 0..1000 {
        run();
    }
    assert_eq!(ALLOCATIONS.load(Ordering::Relaxed) - before, 0);
    assert_eq!(sum.into_inner(), 1100 * 28);
}
