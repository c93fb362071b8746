//! A ring with one producer and one consumer.
//!
//! Memory layout, plain so that a device can be the producer one day:
//!
//! ```text
//! header   byte   0  u64 pushed   items ever pushed; written by the producer
//!          byte 128  u64 freed    items whose slots are free again; written by the consumer
//!          256 bytes in all, aligned to 128
//! slots    capacity × size of an item, in one piece; item number n is in slot n mod capacity
//! ```
//!
//! The capacity is a power of two; the counts only grow. The producer fills slots, then stores `pushed`
//! with release order; it may fill item n once `freed` + capacity > n. The consumer loads `pushed` with
//! acquire order, copies items out, and stores `freed` with release order. It decides *when* a slot is
//! free: for events when they were read, for commands when they are done (INV-5). Each side holds a
//! copy of the other's count and reads the count again only when the copy does not suffice.

use super::sync::{Arc, AtomicU64, Ordering, UnsafeCell};

/// On a pair of cache lines of its own: processors fetch lines in pairs.
#[repr(C, align(128))]
#[derive(Debug)]
struct Count(AtomicU64);

#[repr(C)]
#[derive(Debug)]
struct Header {
    pushed: Count,
    freed: Count,
}

#[cfg(not(feature = "loom"))]
const _: () = {
    assert!(std::mem::offset_of!(Header, pushed) == 0);
    assert!(std::mem::offset_of!(Header, freed) == 128);
    assert!(size_of::<Header>() == 256 && align_of::<Header>() == 128);
    assert!(size_of::<crate::transport::Command>() == 64);
};

#[derive(Debug)]
struct CommandRing<T> {
    header: Header,
    /// Slots of items from `freed` to `pushed` belong to the consumer, the others to the producer.
    slots: Box<[UnsafeCell<T>]>,
}

// SAFETY: `header` is Send and Sync. Only the side that owns a slot accesses it, and the counts pass
// the slot on with release and acquire order, so a shared ring moves items of type T between threads.
unsafe impl<T: Send> Send for CommandRing<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for CommandRing<T> {}

impl<T> CommandRing<T> {
    fn slot(&self, number: u64) -> &UnsafeCell<T> {
        &self.slots[number as usize & (self.slots.len() - 1)]
    }
}

/// The two ends of a ring with room for at least `capacity` items, which is rounded up to a power of
/// two. `blank` is the initial value of slots.
pub(super) fn ring<T: Copy>(capacity: usize, blank: T) -> (Producer<T>, Consumer<T>) {
    let capacity = capacity.max(1).next_power_of_two();
    let count = || Count(AtomicU64::new(0));
    let ring = Arc::new(CommandRing {
        header: Header { pushed: count(), freed: count() },
        slots: (0..capacity).map(|_| UnsafeCell::new(blank)).collect(),
    });
    let producer = Producer { ring: Arc::clone(&ring), staged: 0, freed: 0 };
    (producer, Consumer { ring, pushed: 0, taken: 0, freed: 0 })
}

/// The end that fills slots.
#[derive(Debug)]
pub(super) struct Producer<T> {
    ring: Arc<CommandRing<T>>,
    /// Items written; the consumer sees them from `publish` on.
    staged: u64,
    /// The consumer's count, as last seen.
    freed: u64,
}

impl<T: Copy> Producer<T> {
    /// Items that can be staged, by the consumer's count as last seen.
    pub(super) fn room(&self) -> usize {
        self.ring.slots.len() - (self.staged - self.freed) as usize
    }

    /// Reads the consumer's count of freed slots.
    pub(super) fn refresh(&mut self) {
        self.freed = self.ring.header.freed.0.load(Ordering::Acquire);
    }

    /// Writes the next item, if there is room.
    #[must_use = "an item that finds no room is not in the ring"]
    pub(super) fn stage(&mut self, item: T) -> bool {
        if self.room() == 0 {
            self.refresh();
            if self.room() == 0 {
                return false;
            }
        }
        // SAFETY: the item's slot was freed (there is room) and is not published, so it belongs to
        // this end, which is the only producer and is borrowed exclusively.
        self.ring.slot(self.staged).with_mut(|slot| unsafe { slot.write(item) });
        self.staged += 1;
        true
    }

    /// Lets the consumer see all staged items.
    pub(super) fn publish(&mut self) {
        self.ring.header.pushed.0.store(self.staged, Ordering::Release);
    }
}

/// The end that takes items out and frees their slots.
#[derive(Debug)]
pub(super) struct Consumer<T> {
    ring: Arc<CommandRing<T>>,
    /// The producer's count, as last seen.
    pushed: u64,
    /// Items that were taken; those from `freed` on still hold their slots.
    taken: u64,
    freed: u64,
}

impl<T: Copy> Consumer<T> {
    /// Items that can be taken, by the producer's count as last seen.
    pub(super) fn waiting(&self) -> usize {
        (self.pushed - self.taken) as usize
    }

    /// Reads the producer's count of published items.
    pub(super) fn refresh(&mut self) {
        self.pushed = self.ring.header.pushed.0.load(Ordering::Acquire);
    }

    /// Copies the oldest items to the front of `out`, without taking them, and returns their number.
    pub(super) fn peek(&mut self, out: &mut [T]) -> usize {
        if self.waiting() < out.len() {
            self.refresh();
        }
        let count = self.waiting().min(out.len());
        for (number, item) in (self.taken..).zip(&mut out[..count]) {
            // SAFETY: the item was published and is not freed, so its slot belongs to this end.
            *item = self.ring.slot(number).with(|slot| unsafe { slot.read() });
        }
        count
    }

    /// Takes the oldest `count` items, of those that `waiting` counts.
    pub(super) fn take(&mut self, count: usize) {
        debug_assert!(count <= self.waiting());
        self.taken = self.pushed.min(self.taken + count as u64);
    }

    /// Frees the slots of `count` taken items, at most all of them.
    pub(super) fn free(&mut self, count: usize) {
        debug_assert!(count as u64 <= self.taken - self.freed);
        self.freed = self.taken.min(self.freed + count as u64);
        self.ring.header.freed.0.store(self.freed, Ordering::Release);
    }
}
