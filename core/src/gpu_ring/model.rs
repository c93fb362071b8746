//! Model checks of all schedules of kernels that write commands and the host that takes them.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

use super::ring::{Slots, Taker};
use super::tests::BLANK;
use crate::abi;

/// A ring, and the word by which kernels number commands.
struct ModelRing {
    sequences: Vec<AtomicU64>,
    commands: Vec<UnsafeCell<abi::TyGpuRingCommand>>,
    done: AtomicU64,
    head: AtomicU64,
}

impl ModelRing {
    fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self {
            sequences: (0..capacity).map(|_| AtomicU64::new(0)).collect(),
            commands: (0..capacity).map(|_| UnsafeCell::new(BLANK)).collect(),
            done: AtomicU64::new(0),
            head: AtomicU64::new(0),
        })
    }

    /// As `DeviceApi::post` of the kernels.
    fn post(&self, value: u64) {
        let (number, capacity) =
            (self.head.fetch_add(1, Ordering::Relaxed), self.sequences.len() as u64);
        while self.done.load(Ordering::Acquire) + capacity <= number {
            thread::yield_now();
        }
        let slot = (number % capacity) as usize;
        let command = abi::TyGpuRingCommand { value, ..BLANK };
        // SAFETY: the slot is free, and only this thread has the number; loom checks both.
        self.commands[slot].with_mut(|at| unsafe { at.write(command) });
        self.sequences[slot].store(number + 1, Ordering::Release);
    }
}

impl Slots for Arc<ModelRing> {
    fn sequence(&self, slot: usize) -> u64 {
        self.sequences[slot].load(Ordering::Acquire)
    }

    fn command(&self, slot: usize) -> abi::TyGpuRingCommand {
        // SAFETY: the sequence was seen and the command is not done; loom checks it.
        self.commands[slot].with(|at| unsafe { at.read() })
    }

    fn set_done(&self, done: u64) {
        self.done.store(done, Ordering::Release);
    }
}

/// Each kernel posts its values into a ring of `capacity`; returns the values that the host takes.
fn cross(capacity: usize, kernels: &[&'static [u64]]) -> Vec<u64> {
    let ring = ModelRing::new(capacity);
    let mut threads = Vec::new();
    for values in kernels.iter().copied() {
        let ring = Arc::clone(&ring);
        threads.push(thread::spawn(move || values.iter().for_each(|value| ring.post(*value))));
    }
    let mut taker = Taker::new(Arc::clone(&ring), capacity);
    let (mut seen, all) = (Vec::new(), kernels.iter().map(|values| values.len()).sum());
    while seen.len() < all {
        if let Some((number, command)) = taker.take() {
            seen.push(command.value);
            assert!(taker.end(number));
            taker.publish();
        } else {
            thread::yield_now();
        }
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    seen
}

/// Checks every interleaving with few preemptions; without a limit it takes too long.
fn check(f: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(f);
}

#[test]
fn commands_that_two_kernels_write_at_once_come_out_whole_and_each_once() {
    check(|| {
        let mut seen = cross(2, &[&[1], &[2]]);
        seen.sort_unstable();
        assert_eq!(seen, [1, 2]);
    });
}

#[test]
fn a_kernel_writes_into_a_slot_only_when_its_last_command_is_done() {
    check(|| assert_eq!(cross(1, &[&[1, 2, 3]]), [1, 2, 3]));
}
