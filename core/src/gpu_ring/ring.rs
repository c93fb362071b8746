//! The host's end of a ring: takes commands by number, and publishes the number of finished commands.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use crate::abi;

/// The memory of a ring. Model checks replace it.
pub(super) trait Slots {
    /// The sequence word of a slot, with acquire order.
    fn sequence(&self, slot: usize) -> u64;
    /// The command of a slot whose sequence was seen and that is not done.
    fn command(&self, slot: usize) -> abi::TyGpuRingCommand;
    /// Publishes the number of finished commands, with release order.
    fn set_done(&self, done: u64);
}

/// Memory of a ring that device and host see.
#[derive(Debug)]
pub(super) struct RingMemory {
    commands: *mut abi::TyGpuRingCommand,
    status: *mut abi::TyGpuRingStatus,
    totals: *mut u64,
}

// SAFETY: addresses; their memory stays valid while they are used, by the contract of `new`, and is
// accessed by the ring's protocol.
unsafe impl Send for RingMemory {}

impl RingMemory {
    /// # Safety
    /// The memory behind the ring's pointers stays valid, and only kernels write it besides, while this
    /// value lives.
    pub(super) unsafe fn new(ring: &abi::TyGpuRing) -> Self {
        Self { commands: ring.commands, status: ring.status, totals: ring.totals }
    }

    /// Publishes the total of a signal, with release order. `id` is below the ring's `signals`.
    pub(super) fn set_total(&self, id: u32, total: u64) {
        let at = self.totals.wrapping_add(id as usize);
        // SAFETY: one of the ring's totals, by the contract of `new` and of this function.
        unsafe { AtomicU64::from_ptr(at) }.store(total, Ordering::Release);
    }

    /// Publishes that the ring is dead: see `TyGpuRingStatus::failed`.
    pub(super) fn set_failed(&self, failed: u64, status: i32) {
        // SAFETY: the ring's status, by the contract of `new`; aligned words.
        let (of, word) = unsafe {
            (
                AtomicI64::from_ptr(&raw mut (*self.status).status),
                AtomicU64::from_ptr(&raw mut (*self.status).failed),
            )
        };
        of.store(status.into(), Ordering::Relaxed);
        word.store(failed, Ordering::Release);
    }
}

impl Slots for RingMemory {
    fn sequence(&self, slot: usize) -> u64 {
        let at = self.commands.wrapping_add(slot);
        // SAFETY: a slot of the ring, by the contract of `new`; an aligned word.
        unsafe { AtomicU64::from_ptr(&raw mut (*at).sequence) }.load(Ordering::Acquire)
    }

    fn command(&self, slot: usize) -> abi::TyGpuRingCommand {
        // SAFETY: as above; the kernel that wrote the sequence had written the rest before, and no
        // kernel writes the slot again until its command is done.
        unsafe { self.commands.wrapping_add(slot).read() }
    }

    fn set_done(&self, done: u64) {
        // SAFETY: the ring's status, by the contract of `new`; an aligned word.
        unsafe { AtomicU64::from_ptr(&raw mut (*self.status).done) }.store(done, Ordering::Release);
    }
}

/// Takes commands out in order and records those that are done, in any order.
#[derive(Debug)]
pub(super) struct Taker<S> {
    pub(super) slots: S,
    /// By slot: true if its command is done, and an earlier command is not.
    ended: Box<[bool]>,
    taken: u64,
    done: u64,
    /// The value of `done` that was published last.
    published: u64,
}

impl<S: Slots> Taker<S> {
    /// `capacity` is a power of two.
    pub(super) fn new(slots: S, capacity: usize) -> Self {
        Self { slots, ended: vec![false; capacity].into(), taken: 0, done: 0, published: 0 }
    }

    pub(super) fn capacity(&self) -> usize {
        self.ended.len()
    }

    fn slot(&self, number: u64) -> usize {
        number as usize & (self.ended.len() - 1)
    }

    /// The next command and its number, if it has been written.
    pub(super) fn take(&mut self) -> Option<(u64, abi::TyGpuRingCommand)> {
        let (number, slot) = (self.taken, self.slot(self.taken));
        if self.slots.sequence(slot) != number + 1 {
            return None;
        }
        self.taken += 1;
        Some((number, self.slots.command(slot)))
    }

    /// Records that a command is done. Returns whether it was in flight.
    pub(super) fn end(&mut self, number: u64) -> bool {
        let slot = self.slot(number);
        if !(self.done..self.taken).contains(&number) || self.ended[slot] {
            return false;
        }
        self.ended[slot] = true;
        while self.done < self.taken {
            let first = self.slot(self.done);
            if !std::mem::take(&mut self.ended[first]) {
                break;
            }
            self.done += 1;
        }
        true
    }

    /// Publishes the number of finished commands to the device, if it has changed.
    pub(super) fn publish(&mut self) {
        if self.published != self.done {
            self.slots.set_done(self.done);
            self.published = self.done;
        }
    }
}
