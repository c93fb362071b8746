//! The slots of the transport under test. It records calls, so that one that never returns is named.

use std::cell::OnceCell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokenyard_core::Result;
use tokenyard_core::host::OpenTransport;
use tokenyard_core::transport::{Command, Event, MemoryNeeds, Window};

/// Names of the slots, in the order of [`Slot`].
const NAMES: [&str; 13] = [
    "none",
    "open",
    "memory_needs",
    "alloc",
    "register",
    "endpoint",
    "connect",
    "commit",
    "peer_address",
    "post",
    "poll",
    "health",
    "progress",
];

/// A slot of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    Open = 1,
    MemoryNeeds,
    Alloc,
    Register,
    Endpoint,
    Connect,
    Commit,
    PeerAddress,
    Post,
    Poll,
    Health,
    Progress,
}

/// The call that one thread is in.
#[derive(Debug, Default)]
struct Current {
    /// A [`Slot`], or 0.
    slot: AtomicUsize,
    /// Calls of slots so far.
    calls: AtomicU64,
}

/// All threads that have called a slot and still run.
static THREADS: Mutex<Vec<Weak<Current>>> = Mutex::new(Vec::new());

thread_local! {
    static CURRENT: OnceCell<Arc<Current>> = const { OnceCell::new() };
}

/// Runs `call`, and records that it is inside `slot` of the transport.
pub(super) fn inside<T>(slot: Slot, call: impl FnOnce() -> T) -> T {
    CURRENT.with(|current| {
        let current = current.get_or_init(|| {
            let current = Arc::new(Current::default());
            let mut threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
            threads.retain(|thread| thread.strong_count() > 0);
            threads.push(Arc::downgrade(&current));
            current
        });
        current.calls.fetch_add(1, Ordering::Relaxed);
        current.slot.store(slot as usize, Ordering::Release);
        let result = call();
        current.slot.store(0, Ordering::Release);
        result
    })
}

/// Finds calls that do not return, by periodic checks.
#[derive(Debug, Default)]
pub(crate) struct Lookout {
    /// The calls that were in progress at the last check.
    last: Vec<(usize, u64, usize)>,
}

impl Lookout {
    /// The slot of a call that was in progress at the last check and still is.
    pub(crate) fn stuck(&mut self) -> Option<&'static str> {
        let threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
        let now: Vec<_> = threads
            .iter()
            .filter_map(Weak::upgrade)
            .map(|current| {
                let slot = current.slot.load(Ordering::Acquire);
                (Arc::as_ptr(&current) as usize, current.calls.load(Ordering::Relaxed), slot)
            })
            .filter(|(.., slot)| *slot != 0)
            .collect();
        let found = now.iter().find(|call| self.last.contains(call)).map(|(.., slot)| NAMES[*slot]);
        self.last = now;
        found
    }
}

/// The transport under test. Each call records its slot.
pub(super) struct Slots(OpenTransport);

impl Slots {
    pub(super) fn new(transport: OpenTransport) -> Self {
        Self(transport)
    }

    pub(super) fn memory_needs(&mut self) -> Result<MemoryNeeds> {
        inside(Slot::MemoryNeeds, || self.0.memory_needs())
    }

    pub(super) fn alloc(&mut self, id: u32, bytes: u64) -> Result<Window> {
        inside(Slot::Alloc, || self.0.alloc(id, bytes))
    }

    /// # Safety
    /// As [`OpenTransport::register`].
    pub(super) unsafe fn register(&mut self, window: &Window) -> Result<()> {
        // SAFETY: by this function's contract.
        inside(Slot::Register, || unsafe { self.0.register(window) })
    }

    pub(super) fn endpoint(&mut self, peer: u32) -> Result<Vec<u8>> {
        inside(Slot::Endpoint, || self.0.endpoint(peer))
    }

    pub(super) fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        inside(Slot::Connect, || self.0.connect(peer, data))
    }

    pub(super) fn commit(&mut self) -> Result<()> {
        inside(Slot::Commit, || self.0.commit())
    }

    pub(super) fn peer_address(&self, window: u32, peer: u32) -> Result<*mut u8> {
        inside(Slot::PeerAddress, || self.0.peer_address(window, peer))
    }

    /// # Safety
    /// As [`OpenTransport::post`].
    pub(super) unsafe fn post(
        &self,
        queue: u32,
        commands: &[Command],
    ) -> std::result::Result<usize, i32> {
        // SAFETY: by this function's contract.
        inside(Slot::Post, || unsafe { self.0.post(queue, commands) })
    }

    pub(super) fn poll(&self, queue: u32, events: &mut [Event]) -> std::result::Result<usize, i32> {
        inside(Slot::Poll, || self.0.poll(queue, events))
    }

    /// A load: it cannot hang, and cases call it in a tight loop.
    pub(super) fn read_signal(&self, queue: u32, id: u32) -> u64 {
        self.0.read_signal(queue, id)
    }

    pub(super) fn health(&self) -> Result<()> {
        inside(Slot::Health, || self.0.health())
    }

    pub(super) fn progress(&self) -> std::result::Result<bool, i32> {
        inside(Slot::Progress, || self.0.progress())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_call_that_does_not_return_is_named_and_one_that_follows_another_is_not() {
        let (go, gone) = channel::<()>();
        let (inside_now, is_inside) = channel();
        let thread = std::thread::spawn(move || {
            inside(Slot::Health, || ());
            inside(Slot::Connect, || {
                inside_now.send(()).unwrap();
                gone.recv().unwrap();
            });
        });
        is_inside.recv().unwrap();
        let mut lookout = Lookout::default();
        assert_eq!(lookout.stuck(), None, "one look says nothing");
        assert_eq!(lookout.stuck(), Some("connect"));
        go.send(()).unwrap();
        thread.join().unwrap();
        assert_eq!(lookout.stuck(), None);
    }
}
