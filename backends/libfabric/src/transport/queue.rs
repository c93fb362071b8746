//! Queues: the slots of commands in flight, and their ownership.
//!
//! A queue's owner takes slots and frees them. The thread that drives the rail, which may be another one,
//! finds a slot's completion. It pushes the slot on the queue's list of done slots: a lock-free stack, which
//! the owner takes as a whole.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event};
use tokenyard_sys_fabric::types::fi_context2;

use super::backlog::Backlog;

const NONE: u32 = u32::MAX;

/// A place for one command in flight.
#[repr(C)]
#[derive(Debug)]
struct Slot {
    /// The first field, because the provider returns its address. It belongs to the provider while
    /// the command is in flight.
    context: UnsafeCell<fi_context2>,
    /// The next in the list of done slots.
    next: AtomicU32,
    status: AtomicI32,
    peer: AtomicU32,
    /// Whether the provider has accepted the command and its completion has not come.
    under_way: AtomicBool,
}

/// The slots of all queues.
#[derive(Debug)]
pub(super) struct Slots {
    all: Box<[Slot]>,
    depth: u32,
    /// The first done slot of each queue.
    done: Box<[AtomicU32]>,
}

// SAFETY: all but the contexts are atomics, and a context is only used by libfabric.
unsafe impl Send for Slots {}
// SAFETY: as above.
unsafe impl Sync for Slots {}

impl Slots {
    pub(super) fn new(queues: u32, depth: u32) -> Self {
        let slot = || Slot {
            context: UnsafeCell::new(fi_context2 { internal: [std::ptr::null_mut(); 8] }),
            next: AtomicU32::new(NONE),
            status: AtomicI32::new(abi::TY_OK),
            peer: AtomicU32::new(0),
            under_way: AtomicBool::new(false),
        };
        Self {
            all: (0..queues as usize * depth as usize).map(|_| slot()).collect(),
            depth,
            done: (0..queues).map(|_| AtomicU32::new(NONE)).collect(),
        }
    }

    /// The operation's context for the provider.
    pub(super) fn context(&self, slot: u32) -> *mut c_void {
        self.all[slot as usize].context.get().cast()
    }

    /// The slot whose context this is. Contexts of errors may be anything.
    pub(super) fn find(&self, context: *const c_void) -> Option<u32> {
        let offset = (context as usize).checked_sub(self.all.as_ptr() as usize)?;
        let slot = offset / size_of::<Slot>();
        let ours = offset.is_multiple_of(size_of::<Slot>()) && slot < self.all.len();
        ours.then_some(slot as u32)
    }

    /// The peer of the command in a slot.
    pub(super) fn peer(&self, slot: u32) -> u32 {
        self.all[slot as usize].peer.load(Ordering::Relaxed)
    }

    /// Notes that the provider has accepted the command of a slot. It is called while the rail is
    /// locked, so that no completion comes before.
    #[inline]
    pub(super) fn start(&self, slot: u32) {
        self.all[slot as usize].under_way.store(true, Ordering::Relaxed);
    }

    /// Ends the command of a slot. It is called by the thread that has locked the command's rail. A
    /// second report of the provider changes nothing: it would turn the list of done slots into a
    /// ring.
    pub(super) fn complete(&self, slot: u32, status: i32) {
        let it = &self.all[slot as usize];
        // A swap is not needed: no other thread has locked this rail.
        if !it.under_way.load(Ordering::Relaxed) {
            return;
        }
        it.under_way.store(false, Ordering::Relaxed);
        it.status.store(status, Ordering::Relaxed);
        let list = &self.done[(slot / self.depth) as usize];
        let mut head = list.load(Ordering::Relaxed);
        loop {
            it.next.store(head, Ordering::Relaxed);
            // Release: the owner sees the status and the link.
            match list.compare_exchange_weak(head, slot, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(found) => head = found,
            }
        }
    }
}

/// A command that is in flight or has an event to report.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    peer: u32,
    notify: bool,
    tag: u64,
    status: i32,
}

/// A queue. It has its own cache line, so that queues of several threads do not slow each other.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Queue(Mutex<Own>);

/// The state that belongs to the owner of a queue. Sizes are fixed: nothing here allocates after
/// `new`.
#[derive(Debug)]
pub(super) struct Own {
    id: u32,
    first: u32,
    free: Vec<u32>,
    held: Box<[Held]>,
    /// Slots whose event waits for `poll`.
    ready: VecDeque<u32>,
    /// Slots whose command waits for its peer, where a proxy thread posts.
    backlog: Option<Backlog>,
    /// Counts batches, so that the rails are used in turn.
    pub(super) turn: usize,
}

impl Queue {
    pub(super) fn new(id: u32, depth: u32, backlog: Option<Backlog>) -> Self {
        let first = id * depth;
        Self(Mutex::new(Own {
            id,
            first,
            free: (first..first + depth).rev().collect(),
            held: vec![Held::default(); depth as usize].into_boxed_slice(),
            ready: VecDeque::with_capacity(depth as usize),
            backlog,
            turn: id as usize,
        }))
    }

    /// The queue, for the one thread that owns it now. `None` if a second thread breaks the queue
    /// rule: hot calls never wait (INV-6).
    pub(super) fn enter(&self) -> Option<MutexGuard<'_, Own>> {
        match self.0.try_lock() {
            Ok(own) => Some(own),
            // A call that a panic interrupts loses one slot at most.
            Err(TryLockError::Poisoned(own)) => Some(own.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl Own {
    /// Takes a slot for a command; `None` if the queue is full.
    pub(super) fn take(&mut self, slots: &Slots, command: &Command) -> Option<u32> {
        let slot = self.free.pop()?;
        slots.all[slot as usize].peer.store(command.peer, Ordering::Relaxed);
        let notify = command.flags & abi::TY_FLAG_NOTIFY != 0;
        self.held[(slot - self.first) as usize] =
            Held { peer: command.peer, notify, tag: command.tag, status: abi::TY_OK };
        Some(slot)
    }

    /// Frees a slot whose command was not accepted.
    pub(super) fn give_back(&mut self, slot: u32) {
        self.free.push(slot);
    }

    /// Ends a command: its slot is free at once, unless it has an event to report (INV-5).
    pub(super) fn end(&mut self, slot: u32, status: i32) {
        let held = &mut self.held[(slot - self.first) as usize];
        held.status = status;
        if held.notify || status != abi::TY_OK {
            self.ready.push_back(slot);
        } else {
            self.free.push(slot);
        }
    }

    /// Whether commands of this queue wait for a peer.
    #[inline]
    pub(super) fn waits_for(&self, peer: u32) -> bool {
        self.backlog.as_ref().is_some_and(|backlog| backlog.waits_for(peer))
    }

    /// Lets a command wait for its peer; `false` if commands of this queue never wait.
    pub(super) fn defer(&mut self, slot: u32, command: &Command) -> bool {
        match &mut self.backlog {
            Some(backlog) => {
                backlog.push(slot - self.first, command);
                true
            }
            None => false,
        }
    }

    /// The commands that wait, unless there are none.
    pub(super) fn backlog(&mut self) -> Option<&mut Backlog> {
        self.backlog.as_mut().filter(|backlog| backlog.len() > 0)
    }

    /// The slot of a place of the backlog.
    pub(super) fn slot(&self, place: u32) -> u32 {
        self.first + place
    }

    /// Whether a slot is free.
    pub(super) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// Collects slots that other threads have completed.
    pub(super) fn collect(&mut self, slots: &Slots) {
        let list = &slots.done[self.id as usize];
        if list.load(Ordering::Relaxed) == NONE {
            return;
        }
        // Acquire: see `Slots::complete`.
        let mut slot = list.swap(NONE, Ordering::Acquire);
        while slot != NONE {
            let it = &slots.all[slot as usize];
            let (next, status) =
                (it.next.load(Ordering::Relaxed), it.status.load(Ordering::Relaxed));
            self.end(slot, status);
            slot = next;
        }
    }

    /// Fills `events` from the front and returns how many.
    pub(super) fn take_events(&mut self, events: &mut [Event]) -> usize {
        let mut count = 0;
        while count < events.len()
            && let Some(slot) = self.ready.pop_front()
        {
            let Held { peer, tag, status, .. } = self.held[(slot - self.first) as usize];
            let kind = if status == abi::TY_OK { abi::TY_EVENT_DONE } else { abi::TY_EVENT_ERROR };
            events[count] = Event { kind, queue: self.id, peer, status, tag };
            self.free.push(slot);
            count += 1;
        }
        count
    }

    /// Whether no command is in flight. A command that waits for its peer is not in flight: no
    /// provider has it.
    pub(super) fn is_idle(&self) -> bool {
        let waiting = self.backlog.as_ref().map_or(0, Backlog::len);
        self.free.len() + self.ready.len() + waiting == self.held.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenyard_core::transport::{NO_COMMAND, NO_EVENT};

    fn command(tag: u64, flags: u16) -> Command {
        Command { tag, flags, peer: 1, ..NO_COMMAND }
    }

    #[test]
    fn a_slot_is_free_when_its_event_was_taken() {
        let (slots, queue) = (Slots::new(2, 2), Queue::new(1, 2, None));
        let mut own = queue.enter().unwrap();
        let one = own.take(&slots, &command(7, abi::TY_FLAG_NOTIFY)).unwrap();
        let two = own.take(&slots, &command(8, 0)).unwrap();
        assert!(own.take(&slots, &command(9, 0)).is_none() && !own.is_idle());
        [one, two].iter().for_each(|slot| slots.start(*slot));
        slots.complete(two, abi::TY_OK);
        slots.complete(one, abi::TY_OK);
        own.collect(&slots);
        assert!(own.is_idle() && own.has_room(), "a command without an event frees its slot");
        assert!(own.take(&slots, &command(9, 0)).is_some());
        assert!(own.take(&slots, &command(10, 0)).is_none(), "an event that waits holds its slot");
        let mut events = [NO_EVENT; 4];
        assert_eq!(own.take_events(&mut events), 1);
        assert_eq!((events[0].tag, events[0].queue, events[0].peer), (7, 1, 1));
        assert!(own.has_room());
    }

    #[test]
    fn a_failed_command_has_an_event_although_none_was_asked_for() {
        let (slots, queue) = (Slots::new(1, 4), Queue::new(0, 4, None));
        let mut own = queue.enter().unwrap();
        let slot = own.take(&slots, &command(3, 0)).unwrap();
        slots.start(slot);
        slots.complete(slot, abi::TY_TRANSPORT);
        own.collect(&slots);
        let mut events = [NO_EVENT; 1];
        assert_eq!(own.take_events(&mut events), 1);
        assert_eq!((events[0].kind, events[0].status), (abi::TY_EVENT_ERROR, abi::TY_TRANSPORT));
    }

    #[test]
    fn a_completion_that_is_reported_twice_ends_its_command_once() {
        let (slots, queue) = (Slots::new(1, 4), Queue::new(0, 4, None));
        let mut own = queue.enter().unwrap();
        let [one, two] = [1, 2].map(|tag| own.take(&slots, &command(tag, 0)).unwrap());
        [one, two].iter().for_each(|slot| slots.start(*slot));
        slots.complete(one, abi::TY_TRANSPORT);
        slots.complete(two, abi::TY_TRANSPORT);
        slots.complete(one, abi::TY_TRANSPORT);
        own.collect(&slots);
        let mut events = [NO_EVENT; 4];
        assert_eq!(own.take_events(&mut events), 2);
        slots.complete(one, abi::TY_OK);
        own.collect(&slots);
        assert!(own.is_idle(), "a slot that is free stays free once");
    }

    #[test]
    fn only_contexts_of_slots_are_found() {
        let slots = Slots::new(2, 3);
        for slot in 0..6 {
            assert_eq!(slots.find(slots.context(slot)), Some(slot));
            assert_eq!(slots.find(slots.context(slot).wrapping_byte_add(8)), None);
        }
        assert_eq!(slots.find(slots.context(5).wrapping_byte_add(size_of::<Slot>())), None);
        assert_eq!(slots.find(std::ptr::null()), None);
    }

    #[test]
    fn a_queue_lets_one_in_at_a_time() {
        let queue = Queue::new(0, 1, None);
        let inside = queue.enter().unwrap();
        assert!(queue.enter().is_none());
        drop(inside);
        assert!(queue.enter().is_some());
    }

    #[test]
    fn completions_of_several_threads_are_all_collected() {
        let (slots, queue) = (Slots::new(1, 512), Queue::new(0, 512, None));
        let mut own = queue.enter().unwrap();
        let taken: Vec<_> = (0..512)
            .map(|tag| own.take(&slots, &command(tag, abi::TY_FLAG_NOTIFY)).unwrap())
            .inspect(|slot| slots.start(*slot))
            .collect();
        let mut tags = Vec::new();
        std::thread::scope(|scope| {
            for part in taken.chunks(128) {
                let slots = &slots;
                scope.spawn(move || part.iter().for_each(|slot| slots.complete(*slot, 0)));
            }
            let mut events = [NO_EVENT; 16];
            while tags.len() < 512 {
                own.collect(&slots);
                let count = own.take_events(&mut events);
                tags.extend(events[..count].iter().map(|event| event.tag));
                std::thread::yield_now();
            }
        });
        tags.sort_unstable();
        assert!(tags.into_iter().eq(0..512));
    }
}
