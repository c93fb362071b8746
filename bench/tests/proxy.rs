//! A steady proxy does not allocate. The test is a separate binary, because it replaces the
//! allocator and counts all threads.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use libtest_mimic::{Arguments, Trial};
use tokenyard_allocations::Counting;
use tokenyard_bench::proxy::{ProxyTask, THREADS, measure};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() {
    let mut arguments = Arguments::from_args();
    // One test at a time runs on this thread, so no other thread allocates.
    arguments.test_threads = Some(1);
    let trial = Trial::test("a_thousand_batches_allocate_nothing", || {
        a_thousand_batches_allocate_nothing();
        Ok(())
    });
    libtest_mimic::run(&arguments, vec![trial]).exit();
}

fn a_thousand_batches_allocate_nothing() {
    for threads in THREADS {
        let task = ProxyTask { timed_batches: 100, round_trips: 100, ..ProxyTask::new(threads) };
        let found = measure(&task).unwrap();
        assert_eq!((found.counted_batches, found.allocations), (1_000, 0), "{found:?}");
        assert!(found.commands_per_s > 0.0 && found.round_trip_us > 0.0, "{found:?}");
    }
}
