//! The calls of transports that are in progress, so that one that never returns is named.
//!
//! The conformance suite turns the record on. Without it a call costs one load of a constant flag more.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A slot of a transport's table. `read_signal` is not among them: it is a load, in the tightest loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Slot {
    Probe = 1,
    Open,
    MemoryNeeds,
    Alloc,
    Register,
    Endpoint,
    Connect,
    Commit,
    ServeRing,
    PeerAddress,
    DeviceApi,
    Post,
    Poll,
    Health,
    Progress,
    LinkName,
    Close,
}

/// The names of the slots in the header, in the order of [`Slot`].
const NAMES: [&str; 17] = [
    "probe",
    "open",
    "memory_needs",
    "alloc",
    "register",
    "endpoint",
    "connect",
    "commit",
    "serve_ring",
    "peer_address",
    "device_api",
    "post",
    "poll",
    "health",
    "progress",
    "link_name",
    "close",
];

impl Slot {
    pub(crate) fn name(self) -> &'static str {
        NAMES[self as usize - 1]
    }
}

/// The bits of a [`Current`] call that are its slot.
const SLOT_BITS: u32 = 8;

/// Whether calls are recorded.
static RECORDS: AtomicBool = AtomicBool::new(false);

/// The innermost call that one thread is in. Only its thread writes it.
#[derive(Debug, Default)]
struct Current {
    /// The number of the call, and below it its [`Slot`]; 0 outside of calls.
    call: AtomicU64,
    /// Calls so far.
    count: AtomicU64,
}

/// All threads that have made a call and still run.
static THREADS: Mutex<Vec<Weak<Current>>> = Mutex::new(Vec::new());

thread_local! {
    static CURRENT: Arc<Current> = {
        let current = Arc::new(Current::default());
        let mut threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| thread.strong_count() > 0);
        threads.push(Arc::downgrade(&current));
        current
    };
}

/// Runs `call`, which calls `slot`; records that, if the record is on.
#[inline]
pub(crate) fn inside<T>(slot: Slot, call: impl FnOnce() -> T) -> T {
    let outer = RECORDS.load(Ordering::Relaxed).then(|| begin(slot));
    let result = call();
    if let Some(outer) = outer {
        end(outer);
    }
    result
}

/// Begins a call and returns the one around it: a transport may call another one.
#[cold]
fn begin(slot: Slot) -> u64 {
    // A thread that is ending has no record any more.
    CURRENT
        .try_with(|current| {
            let count = current.count.load(Ordering::Relaxed) + 1;
            current.count.store(count, Ordering::Relaxed);
            current.call.swap(count << SLOT_BITS | slot as u64, Ordering::Relaxed)
        })
        .unwrap_or_default()
}

#[cold]
fn end(outer: u64) {
    let _ = CURRENT.try_with(|current| current.call.store(outer, Ordering::Relaxed));
}

/// Finds calls of transports that do not return, by periodic checks. Calls that begin after it was made
/// are recorded.
#[derive(Debug)]
pub struct Lookout {
    /// The calls that were in progress at the last check: the thread, and its [`Current::call`].
    last: Vec<(usize, u64)>,
}

impl Lookout {
    /// Turns the record on, for the rest of this process.
    #[expect(clippy::new_without_default, reason = "it changes the process")]
    pub fn new() -> Self {
        RECORDS.store(true, Ordering::Relaxed);
        Self { last: Vec::new() }
    }

    /// The slot of a call that was in progress at the last check and still is.
    pub fn stuck(&mut self) -> Option<&'static str> {
        let threads = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
        let now: Vec<_> = threads
            .iter()
            .filter_map(Weak::upgrade)
            .map(|thread| (Arc::as_ptr(&thread) as usize, thread.call.load(Ordering::Relaxed)))
            .filter(|(_, call)| *call != 0)
            .collect();
        let found = now.iter().find(|call| self.last.contains(call));
        let slot = found.map(|(_, call)| (call & ((1 << SLOT_BITS) - 1)) as usize);
        self.last = now;
        slot.and_then(|slot| NAMES.get(slot - 1)).copied()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn every_slot_has_its_name() {
        assert_eq!(Slot::Probe.name(), "probe");
        assert_eq!(Slot::Poll.name(), "poll");
        assert_eq!(Slot::Close.name(), "close");
        assert_eq!(Slot::Close as usize, NAMES.len());
    }

    /// The calls of this test's threads: other tests of this process call transports as well.
    fn stuck(lookout: &mut Lookout, thread: usize) -> Option<u64> {
        let last = lookout.last.clone();
        lookout.stuck();
        lookout.last.iter().find(|call| call.0 == thread && last.contains(call)).map(|call| call.1)
    }

    fn this_thread() -> usize {
        CURRENT.with(|current| Arc::as_ptr(current) as usize)
    }

    #[test]
    fn a_call_that_does_not_return_is_named_and_one_that_follows_another_is_not() {
        let mut lookout = Lookout::new();
        let (go, gone) = channel::<()>();
        let (inside_now, is_inside) = channel();
        let thread = std::thread::spawn(move || {
            inside(Slot::Health, || ());
            inside(Slot::Connect, || {
                // The inner transport of a wrapper returns; the wrapper itself does not.
                inside(Slot::Poll, || ());
                inside_now.send(this_thread()).unwrap();
                gone.recv().unwrap();
            });
            inside(Slot::Connect, || {
                inside_now.send(this_thread()).unwrap();
                gone.recv().unwrap();
            });
            assert_eq!(CURRENT.with(|current| current.call.load(Ordering::Relaxed)), 0);
        });
        let id = is_inside.recv().unwrap();
        assert_eq!(stuck(&mut lookout, id), None, "one look says nothing");
        let call = stuck(&mut lookout, id).unwrap();
        assert_eq!(call & 0xff, Slot::Connect as u64);
        go.send(()).unwrap();
        is_inside.recv().unwrap();
        assert_eq!(stuck(&mut lookout, id), None, "it is another call");
        go.send(()).unwrap();
        thread.join().unwrap();
        assert_eq!(stuck(&mut lookout, id), None);
    }
}
