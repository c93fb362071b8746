//! With the feature `loom`, the hand-off is checked under all schedules:
//! `cargo test -p tokenyard-cpu --features loom --lib pool`.

use super::*;

#[cfg(feature = "loom")]
mod model {
    use super::*;

    /// Runs `tasks` tasks and checks that each was done once, by what the caller sees without
    /// further synchronisation.
    fn run_and_check(pool: &Pool, tasks: usize) {
        let done: Vec<_> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
        pool.run(tasks, &|i| {
            let before = done[i].load(Ordering::Relaxed);
            done[i].store(before + 1, Ordering::Relaxed);
        })
        .unwrap();
        assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }

    /// Checks every interleaving with at most `preemptions`; without a limit it takes minutes.
    fn check(preemptions: usize, f: impl Fn() + Send + Sync + 'static) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(preemptions);
        model.check(f);
    }

    #[test]
    fn every_task_is_done_once_and_seen_in_run_after_run() {
        check(3, || {
            let pool = Pool::new(2).unwrap();
            run_and_check(&pool, 2);
            run_and_check(&pool, 2);
        });
    }

    #[test]
    fn two_workers_share_a_run() {
        check(2, || run_and_check(&Pool::new(3).unwrap(), 3));
    }

    /// Being woken makes a worker see everything before it; this one has only the state.
    #[test]
    fn a_worker_that_no_call_woke_may_join() {
        check(2, || run_and_check(&Pool::new(3).unwrap(), 2));
    }

    #[test]
    fn an_unused_pool_ends() {
        loom::model(|| drop(Pool::new(2).unwrap()));
    }
}

#[cfg(not(feature = "loom"))]
mod real {
    use super::*;
    use crate::convert::FloatType;
    use crate::samples::Random;
    use crate::sum::sum_rows;

    #[test]
    fn every_task_is_done_once_in_thousands_of_runs() {
        for threads in 1..=4 {
            let pool = Pool::new(threads).unwrap();
            assert_eq!(pool.threads(), threads);
            let done: Vec<_> = (0..9).map(|_| AtomicUsize::new(0)).collect();
            for run in 0..5000 {
                let tasks = run % 10;
                pool.run(tasks, &|i| {
                    // Not an atomic addition: two threads on one task would lose counts.
                    let before = done[i].load(Ordering::Relaxed);
                    done[i].store(before + 1, Ordering::Relaxed);
                })
                .unwrap();
            }
            for (i, done) in done.iter().enumerate() {
                assert_eq!(done.load(Ordering::Relaxed), 500 * (9 - i));
            }
        }
    }

    #[test]
    fn workers_that_went_to_sleep_are_woken() {
        let pool = Pool::new(2).unwrap();
        for _ in 0..20 {
            std::thread::sleep(std::time::Duration::from_millis(2));
            // Both tasks wait for each other, so the run ends only if the worker wakes up.
            let barrier = std::sync::Barrier::new(2);
            pool.run(2, &|_| {
                barrier.wait();
            })
            .unwrap();
        }
    }

    #[test]
    fn a_panic_becomes_an_error_and_the_pool_lives_on() {
        for threads in [1, 3] {
            let pool = Pool::new(threads).unwrap();
            let error = pool.run(100, &|i| assert!(i != 7, "bad luck")).expect_err("panicked");
            assert_eq!(error.kind(), ErrorKind::Internal);
            assert_eq!(error.message(), "task 7 panicked: bad luck");
            pool.run(100, &|_| ()).unwrap();
        }
    }

    #[test]
    fn a_run_from_within_a_task_or_beside_another_is_done_by_its_caller() {
        let pool = Pool::new(2).unwrap();
        let count = AtomicUsize::new(0);
        let outer = || {
            pool.run(4, &|_| {
                pool.run(4, &|_| {
                    count.fetch_add(1, Ordering::Relaxed);
                })
                .unwrap();
            })
            .unwrap();
        };
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(outer);
            }
        });
        assert_eq!(count.into_inner(), 3 * 16);
    }

    #[test]
    fn a_pool_without_threads_is_refused() {
        let error = Pool::new(0).expect_err("no thread");
        assert_eq!(error.message(), "found 0 threads; expected 1 to 65536");
    }

    #[test]
    fn results_are_the_same_for_every_number_of_threads() {
        const ROW: usize = 2 * 96;
        let mut random = Random(3);
        let rows: Vec<u8> = (0..64 * ROW).map(|_| random.next() as u8 & 0xbf).collect();
        let sum_all = |threads| {
            let out: Vec<Mutex<Vec<u8>>> = (0..32).map(|_| Mutex::new(vec![0; ROW])).collect();
            let row = |i: usize| &rows[i * ROW..][..ROW];
            Pool::new(threads)
                .unwrap()
                .run(out.len(), &|i| {
                    let terms = [row(i), row(i + 7), row(i + 31)];
                    sum_rows(FloatType::Bf16, &mut out[i].lock().unwrap(), &terms);
                })
                .unwrap();
            out.into_iter().map(|row| row.into_inner().unwrap()).collect::<Vec<_>>()
        };
        let expected = sum_all(1);
        assert!((2..6).all(|threads| sum_all(threads) == expected));
    }
}
