//! A ring of kernels that the transport serves itself. The kernels are a model: this thread writes their commands.

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use common::{LONG, Memory, Rank, WINDOW_BYTES, with_ranks};
use tokenyard_core::abi;
use tokenyard_core::gpu_ring::RingToServe;
use tokenyard_core::transport::{Transport, Window};

const CAPACITY: u64 = 8;
const SIGNALS: usize = 16;
/// More than the ring holds.
const PUTS: u64 = 500;
const BYTES: usize = 1024;

/// A ring with its counts, in memory that both sides share. It is never freed, because threads may
/// outlive a failed test.
struct Ring {
    raw: &'static abi::TyGpuRing,
    counters: &'static [[AtomicU64; 5]],
    raised: &'static [AtomicU64],
}

fn words<const N: usize>(count: usize) -> &'static [[AtomicU64; N]] {
    let zero = || std::array::from_fn(|_| AtomicU64::new(0));
    Box::leak((0..count).map(|_| zero()).collect::<Vec<_>>().into_boxed_slice())
}

impl Ring {
    fn new() -> Self {
        // Commands are eight words, the status is three.
        let commands = words::<8>(CAPACITY as usize);
        let (status, totals) = (words::<3>(1), words::<1>(SIGNALS));
        let raised = words::<1>(2 * SIGNALS).as_flattened();
        let raw = Box::leak(Box::new(abi::TyGpuRing {
            size: size_of::<abi::TyGpuRing>(),
            level: 0,
            queue: 0,
            capacity: CAPACITY as u32,
            commands: commands.as_ptr().cast_mut().cast(),
            status: status.as_ptr().cast_mut().cast(),
            totals: totals.as_ptr().cast_mut().cast(),
            signals: SIGNALS as u32,
            reserved: 0,
        }));
        Self { raw, counters: words(2), raised }
    }

    fn to_serve(&self, windows: &[Window]) -> RingToServe {
        let serve = abi::TyServeRing {
            size: size_of::<abi::TyServeRing>(),
            ring: self.raw,
            counters: self.counters.as_ptr().cast_mut().cast(),
            raised: self.raised.as_ptr().cast_mut().cast(),
            windows: windows.as_ptr(),
            window_count: windows.len(),
            largest_put: WINDOW_BYTES as u64,
            peers: 2,
            reserved: 0,
        };
        // SAFETY: the memory is never freed; commands below follow the rules.
        unsafe { RingToServe::new(&serve) }
    }

    fn word(at: *mut u64) -> u64 {
        // SAFETY: a word of the ring.
        unsafe { AtomicU64::from_ptr(at) }.load(Ordering::Acquire)
    }

    fn done(&self) -> u64 {
        // SAFETY: the ring's status.
        let (done, failed) =
            unsafe { (&raw mut (*self.raw.status).done, &raw mut (*self.raw.status).failed) };
        assert_eq!(Self::word(failed), 0, "the ring is dead");
        Self::word(done)
    }

    fn total(&self, id: usize) -> u64 {
        Self::word(self.raw.totals.wrapping_add(id))
    }

    /// Posts as a kernel does: waits for room, writes the command, then its number.
    fn post(&self, number: u64, command: abi::TyGpuRingCommand) {
        until("room in the ring", || self.done() + CAPACITY > number);
        let slot = self.raw.commands.wrapping_add((number % CAPACITY) as usize);
        // SAFETY: the slot is free.
        unsafe {
            slot.write(abi::TyGpuRingCommand { sequence: (*slot).sequence, ..command });
            AtomicU64::from_ptr(&raw mut (*slot).sequence).store(number + 1, Ordering::Release);
        }
    }
}

fn until(what: &str, mut ready: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !ready() {
        assert!(Instant::now() < end, "{what} never comes");
        std::thread::yield_now();
    }
}

/// The number of threads of this process whose names start with `name`.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.map(|task| std::fs::read_to_string(task.path().join("comm")));
    names.flatten().filter(|found| found.starts_with(name)).count()
}

/// Both ranks put rows to each other through their rings.
fn put_rows(rank: &Rank, ring: &Ring) {
    let half = (WINDOW_BYTES / 2) as u64;
    let peer = 1 - rank.me;
    for number in 0..PUTS {
        let command = abi::TyGpuRingCommand {
            op: abi::TY_OP_PUT_SIGNAL.into(),
            peer,
            signal: 3,
            add: 2,
            src_window: 0,
            dst_window: 0,
            src_offset: number % 8 * BYTES as u64,
            dst_offset: half + number % 8 * BYTES as u64,
            bytes: BYTES as u64,
            value: 0,
            sequence: 0,
        };
        ring.post(number, command);
    }
    until("all is done", || ring.done() == PUTS);
    until("the peer's signals", || ring.total(3) == 2 * PUTS);
    let words = |from: usize| &rank.memory.0[from / 8..][..8 * BYTES / 8];
    for word in words(WINDOW_BYTES / 2) {
        assert_eq!(word.load(Ordering::Relaxed), u64::from(peer) + 100);
    }
    let counted = |word: usize| ring.counters[peer as usize][word].load(Ordering::Relaxed);
    assert_eq!([counted(0), counted(1), counted(2)], [PUTS, PUTS, 2 * PUTS]);
    assert_eq!(ring.raised[peer as usize * SIGNALS + 3].load(Ordering::Relaxed), 2 * PUTS);
}

fn fill(memory: &Memory, value: u64) {
    memory.0[..WINDOW_BYTES / 16].iter().for_each(|word| word.store(value, Ordering::Relaxed));
}

#[test]
fn one_thread_of_the_transport_serves_the_ring_and_hands_commands_over_once() {
    with_ranks(2, "provider = \"tcp\"\nproxy_threads = 1", |rank| {
        assert!(threads("ty-proxy-") > 0, "before, proxy threads wait for posts of a host");
        fill(&rank.memory, u64::from(rank.me) + 100);
        let ring = Ring::new();
        let windows = [rank.memory.window()];
        assert!(rank.transport.serve_ring(ring.to_serve(&windows)).unwrap());
        put_rows(rank, &ring);
        // Both ranks are served here: no proxy thread is left, and each has one thread.
        assert_eq!((threads("ty-proxy-"), threads("tokenyard-ring")), (0, 2));
        rank.transport.health().unwrap();
    });
    assert_eq!(threads("tokenyard-ring"), 0, "close ends them");

    // Without threads the transport leaves the ring to the host, whose thread drives it at once.
    with_ranks(2, "provider = \"tcp\"\nproxy_threads = 0", |rank| {
        let ring = Ring::new();
        assert!(!rank.transport.serve_ring(ring.to_serve(&[rank.memory.window()])).unwrap());
        assert_eq!(threads("ty-proxy-") + threads("tokenyard-ring"), 0);
    });
}
