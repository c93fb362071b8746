//! A steady step does not allocate. The test is a separate binary, because it replaces the
//! allocator.
#![allow(clippy::unwrap_used, reason = "tests fail by panic")]

use libtest_mimic::{Arguments, Trial};
use tokenyard_allocations::{Allocations, Counting};
use tokenyard_bench::steady::{SLACK_BYTES, SteadyFigures, SteadyTask, figures};
use tokenyard_bench::workload::Workload;
use tokenyard_conformance::ranks::in_threads;
use tokenyard_core::communicator::Communicator;
use tokenyard_core::config::Config;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A scenario takes many steps by default; the other variants need fewer to show growth of more
/// than 64 bytes a step.
const FEWER: u32 = 1_000;

/// One for each function.
macro_rules! trials {
    ($($test:ident),* $(,)?) => {
        vec![$(Trial::test(stringify!($test), || {
            $test();
            Ok(())
        })),*]
    };
}

fn main() {
    let mut arguments = Arguments::from_args();
    // One test at a time runs on this thread, so no other thread allocates.
    arguments.test_threads = Some(1);
    let trials = trials![
        a_thousand_steps_allocate_nothing_and_ten_thousand_do_not_grow_memory,
        the_same_holds_where_rows_are_put,
        the_same_holds_among_two_domains,
        the_same_holds_where_losses_are_masked,
        the_same_holds_after_a_rank_was_lost,
        the_counter_sees_every_thread_and_tells_heartbeats_apart,
    ];
    libtest_mimic::run(&arguments, trials).exit();
}

fn steady_on(ranks: u32, task: &SteadyTask, extra: &str) {
    let config = config(extra);
    let found = in_threads(ranks, &config, |world| figures(world, &config, task).unwrap());
    found.unwrap().iter().for_each(check);
}

fn config(extra: &str) -> Config {
    tokenyard_bench::link();
    let text = format!("[kernels]\nuse = \"cpu\"\n[transport.scale_up]\nuse = \"shm\"\n{extra}");
    Config::parse(&text, "test.toml").unwrap()
}

fn check(found: &SteadyFigures) {
    assert_eq!(found.allocations, 0, "{found:?}");
    assert!(found.heap_growth <= SLACK_BYTES, "{found:?}");
    assert!(found.resident_growth <= SLACK_BYTES, "{found:?}");
}

fn a_thousand_steps_allocate_nothing_and_ten_thousand_do_not_grow_memory() {
    let task = SteadyTask::new(2);
    assert_eq!((task.counted_steps, task.grown_steps), (1_000, 10_000));
    steady_on(2, &task, ALONE);
}

const ALONE: &str = "[transport.scale_out]\nuse = \"none\"\n";

fn the_same_holds_where_rows_are_put() {
    let task = SteadyTask { grown_steps: FEWER, ..SteadyTask::new(2) };
    steady_on(2, &task, &format!("{ALONE}[transport.scale_up.shm]\nload_store = false\n"));
}

fn the_same_holds_among_two_domains() {
    let task = SteadyTask { grown_steps: FEWER, ..SteadyTask::new(4) };
    steady_on(
        4,
        &task,
        "[transport.scale_out]\nuse = \"shm\"\n[transport.scale_out.shm]\nload_store = false\n\
         [topology]\ndomains = 2\n",
    );
}

fn the_same_holds_where_losses_are_masked() {
    let task = SteadyTask { grown_steps: FEWER, ..SteadyTask::new(2) };
    steady_on(2, &task, MASKED);
}

fn the_same_holds_after_a_rank_was_lost() {
    let task = SteadyTask { grown_steps: FEWER, ..SteadyTask::new(3) };
    lose_one_on(&task, &format!("{MASKED}[transport.scale_up.shm]\nload_store = false\n"));
    lose_one_on(&task, MASKED);
}

/// Reports are off: the report of a loss allocates, and is not part of a step.
const MASKED: &str =
    "[transport.scale_out]\nuse = \"none\"\n[world]\non_failure = \"mask\"\nreports = \"none\"\n";

/// Rank 1 leaves, and the others go on with the communicator.
fn lose_one_on(task: &SteadyTask, extra: &str) {
    let config = config(extra);
    let found = in_threads(3, &config, |world| {
        if world.rank() == 1 {
            drop(Communicator::open(world, &config, Workload::options(&task.sizes)).unwrap());
            return None;
        }
        Some(figures(world, &config, task).unwrap())
    });
    let found: Vec<_> = found.unwrap().into_iter().flatten().collect();
    assert_eq!(found.len(), 2);
    found.iter().for_each(check);
}

fn the_counter_sees_every_thread_and_tells_heartbeats_apart() {
    let allocate = || drop(std::hint::black_box(vec![0_u8; 100]));
    let before = Allocations::now();
    allocate();
    let (steps, control) = Allocations::now().since(&before);
    assert!(steps >= 1 && control == 0, "{steps} {control}");
    for (name, is_control) in [("tokenyard-12", true), ("tokenyard-watch", false)] {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name(name.to_owned());
            let body = || {
                let before = Allocations::now();
                (0..10).for_each(|_| allocate());
                // Read while the thread lives, as its name decides how it is counted.
                Allocations::now().since(&before)
            };
            let (steps, control) = thread.spawn_scoped(scope, body).unwrap().join().unwrap();
            let (found, other) = if is_control { (control, steps) } else { (steps, control) };
            assert!(found >= 10 && other < 10, "{name}: {steps} {control}");
        });
    }
}
