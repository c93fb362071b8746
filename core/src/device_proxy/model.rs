//! All schedules of kernels that write commands and the host that takes them.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use super::ring::{Slots, Taker};
use super::tests::BLANK;
use crate::abi;

const CAPACITY: u64 = 2;

/// A ring, and the word by which kernels number commands.
struct Ring {
    sequences: Vec<AtomicU64>,
    commands: Vec<UnsafeCell<abi::TyProxyCommand>>,
    done: AtomicU64,
    head: AtomicU64,
}

impl Ring {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            sequences: (0..CAPACITY).map(|_| AtomicU64::new(0)).collect(),
            commands: (0..CAPACITY).map(|_| UnsafeCell::new(BLANK)).collect(),
            done: AtomicU64::new(0),
            head: AtomicU64::new(0),
        })
    }

    /// As `Face::post` of the kernels.
    fn post(&self, value: u64) {
        let number = self.head.fetch_add(1, Ordering::Relaxed);
        while self.done.load(Ordering::Acquire) + CAPACITY <= number {
            thread::yield_now();
        }
        let slot = (number % CAPACITY) as usize;
        let command = abi::TyProxyCommand { value, ..BLANK };
        // SAFETY: the slot is free, and the number is this thread's alone; loom checks both.
        self.commands[slot].with_mut(|at| unsafe { at.write(command) });
        self.sequences[slot].store(number + 1, Ordering::Release);
    }
}

impl Slots for Arc<Ring> {
    fn sequence(&self, slot: usize) -> u64 {
        self.sequences[slot].load(Ordering::Acquire)
    }

    fn command(&self, slot: usize) -> abi::TyProxyCommand {
        // SAFETY: the sequence was seen and the command is not done; loom checks it.
        self.commands[slot].with(|at| unsafe { at.read() })
    }

    fn set_done(&self, done: u64) {
        self.done.store(done, Ordering::Release);
    }
}

#[test]
fn commands_of_two_kernels_cross_a_full_ring_whole_and_each_once() {
    let mut model = loom::model::Builder::new();
    // Without a limit it takes too long.
    model.preemption_bound = Some(2);
    model.check(|| {
        let ring = Ring::new();
        let kernels = [vec![1], vec![2, 3]].map(|values| {
            let ring = Arc::clone(&ring);
            thread::spawn(move || values.into_iter().for_each(|value| ring.post(value)))
        });
        let mut taker = Taker::new(Arc::clone(&ring), CAPACITY as usize);
        let mut seen = Vec::new();
        while seen.len() < 3 {
            // As many as there are, and the last of them is done first.
            let mut taken = Vec::new();
            while let Some((number, command)) = taker.take() {
                seen.push(command.value);
                taken.push(number);
            }
            taken.iter().rev().for_each(|number| assert!(taker.end(*number)));
            taker.publish();
            thread::yield_now();
        }
        seen.sort_unstable();
        assert_eq!(seen, [1, 2, 3]);
        for kernel in kernels {
            kernel.join().unwrap();
        }
    });
}
