//! A run of the pool allocates nothing, on any thread.

use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_cpu::pool::Pool;
use tokenyard_testkit::{Counting, of_all_threads};

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
    let before = of_all_threads();
    for _ in 0..1000 {
        run();
    }
    assert_eq!(of_all_threads() - before, 0);
    assert_eq!(sum.into_inner(), 1100 * 28);
}
