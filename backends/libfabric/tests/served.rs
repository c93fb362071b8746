//! A ring of kernels that the transport serves itself. The kernels are a model: this thread writes their commands.
//!
//! The test stands between libfabric and the system's `sendmsg` and `send`, to see the addresses that payload
//! leaves from, and replaces the allocator. It is a separate binary for this reason.

#![allow(clippy::unwrap_used)]

mod common;

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};
use std::time::Instant;

use common::{LONG, Memory, Rank, WINDOW_BYTES, with_ranks};
use tokenyard_core::abi;
use tokenyard_core::gpu_ring::RingToServe;
use tokenyard_core::transport::{Transport, Window};
use tokenyard_testkit::{Counting, of_all_threads};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const CAPACITY: u64 = 8;
const SIGNALS: usize = 16;
/// The words of the counters of a peer.
const COUNTERS: usize = size_of::<abi::TyPeerCounters>() / 8;
/// Puts before the first whose allocations count: threads allocate when they start.
const WARM_UP: u64 = 100;
const PUTS: u64 = WARM_UP + 1000;
/// More than all else that a put sends: the provider's header.
const BYTES: usize = 16_384;
/// Places of rows in each half of a window.
const ROWS: usize = WINDOW_BYTES / 2 / BYTES;
const MOST_HEADER: u64 = 256;

/// Addresses of the windows of all ranks, and the bytes that were sent from them and from elsewhere.
static WINDOWS: Mutex<Vec<Range<usize>>> = Mutex::new(Vec::new());
static FROM_WINDOWS: AtomicU64 = AtomicU64::new(0);
static FROM_ELSEWHERE: AtomicU64 = AtomicU64::new(0);

/// Counts the first `sent` bytes of the buffers.
fn count(buffers: &[libc::iovec], sent: libc::ssize_t) {
    let mut left = usize::try_from(sent).unwrap_or(0);
    let windows = WINDOWS.lock().unwrap();
    for buffer in buffers {
        let (first, bytes) = (buffer.iov_base as usize, left.min(buffer.iov_len));
        let is_inside =
            |window: &Range<usize>| window.start <= first && first + bytes <= window.end;
        let from = if windows.iter().any(is_inside) { &FROM_WINDOWS } else { &FROM_ELSEWHERE };
        from.fetch_add(bytes as u64, Ordering::Relaxed);
        left -= bytes;
    }
}

/// The system's call, under the name that libfabric looks up.
#[unsafe(no_mangle)]
unsafe extern "C" fn sendmsg(
    socket: c_int,
    message: *const libc::msghdr,
    flags: c_int,
) -> libc::ssize_t {
    // SAFETY: by the contract of sendmsg(2), as for the next one.
    let sent = unsafe { libc::syscall(libc::SYS_sendmsg, socket, message, flags) } as libc::ssize_t;
    // SAFETY: the caller's list of buffers.
    count(unsafe { std::slice::from_raw_parts((*message).msg_iov, (*message).msg_iovlen) }, sent);
    sent
}

/// As [`sendmsg`].
#[unsafe(no_mangle)]
unsafe extern "C" fn send(
    socket: c_int,
    from: *const c_void,
    bytes: usize,
    flags: c_int,
) -> libc::ssize_t {
    let nowhere = std::ptr::null::<c_void>();
    // SAFETY: by the contract of send(2), which is sendto(2) without an address.
    let sent = unsafe { libc::syscall(libc::SYS_sendto, socket, from, bytes, flags, nowhere, 0) };
    count(&[libc::iovec { iov_base: from.cast_mut(), iov_len: bytes }], sent as libc::ssize_t);
    sent as libc::ssize_t
}

/// A ring with its counts, in memory that both sides share. It is never freed, because threads may
/// outlive a failed test.
struct Ring {
    raw: &'static abi::TyGpuRing,
    counters: &'static [[AtomicU64; COUNTERS]],
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

/// Both ranks put rows to each other through their rings: `from`, and more up to `to`.
fn put_rows(rank: &Rank, ring: &Ring, from: u64, to: u64) {
    let half = (WINDOW_BYTES / 2) as u64;
    let peer = 1 - rank.me;
    for number in from..to {
        let command = abi::TyGpuRingCommand {
            op: abi::TY_OP_PUT_SIGNAL.into(),
            peer,
            signal: 3,
            add: 2,
            src_window: 0,
            dst_window: 0,
            src_offset: number % ROWS as u64 * BYTES as u64,
            dst_offset: half + number % ROWS as u64 * BYTES as u64,
            bytes: BYTES as u64,
            value: 0,
            sequence: 0,
        };
        ring.post(number, command);
    }
    until("all is done", || ring.done() == to);
    until("the peer's signals", || ring.total(3) == 2 * to);
}

/// The traces of the puts of both ranks.
fn check_rows(rank: &Rank, ring: &Ring) {
    let peer = 1 - rank.me;
    for word in &rank.memory.0[WINDOW_BYTES / 16..] {
        assert_eq!(word.load(Ordering::Relaxed), u64::from(peer) + 100);
    }
    let counted = |word: usize| ring.counters[peer as usize][word].load(Ordering::Relaxed);
    assert_eq!([counted(0), counted(1), counted(2)], [PUTS, PUTS, 2 * PUTS]);
    assert_eq!(ring.raised[peer as usize * SIGNALS + 3].load(Ordering::Relaxed), 2 * PUTS);
}

fn fill(memory: &Memory, value: u64) {
    memory.0[..WINDOW_BYTES / 16].iter().for_each(|word| word.store(value, Ordering::Relaxed));
}

/// Notes a window, whose bytes are payload when they are sent.
fn watch(window: &Window) {
    let first = window.pointer as usize;
    WINDOWS.lock().unwrap().push(first..first + window.bytes as usize);
}

#[test]
fn one_thread_of_the_transport_serves_the_ring_and_neither_copies_payload_nor_allocates() {
    // By default this provider copies the end of a message while its socket is full.
    // SAFETY: no other thread of this process uses its environment.
    unsafe { std::env::set_var("FI_TCP_STAGING_SBUF_SIZE", "0") };
    let both = Barrier::new(2);
    with_ranks(2, "provider = \"tcp\"\nproxy_threads = 1", |rank| {
        // A thread has its name only once it runs.
        until("proxy threads that wait for posts of a host", || threads("ty-proxy-") > 0);
        fill(&rank.memory, u64::from(rank.me) + 100);
        let ring = Ring::new();
        let windows = [rank.memory.window()];
        watch(&windows[0]);
        assert!(rank.transport.serve_ring(ring.to_serve(&windows)).unwrap());
        put_rows(rank, &ring, 0, WARM_UP);
        both.wait();
        let before = of_all_threads();
        both.wait();
        put_rows(rank, &ring, WARM_UP, PUTS);
        both.wait();
        let allocations = of_all_threads() - before;
        both.wait();
        assert_eq!(allocations, 0, "for 1,000 puts");
        check_rows(rank, &ring);
        // Both ranks are served here: no proxy thread is left, and each has one thread.
        until("one thread for each ring, and no other", || {
            (threads("ty-proxy-"), threads("tokenyard-ring")) == (0, 2)
        });
        rank.transport.health().unwrap();
    });
    until("close ends them", || threads("tokenyard-ring") == 0);
    // Every byte of payload left from the place where the kernel had it: copies would leave from elsewhere.
    let (from_windows, from_elsewhere) =
        (FROM_WINDOWS.load(Ordering::Relaxed), FROM_ELSEWHERE.load(Ordering::Relaxed));
    assert_eq!(from_windows, 2 * PUTS * BYTES as u64, "{from_elsewhere} bytes from elsewhere");
    assert!(from_elsewhere < 2 * PUTS * MOST_HEADER, "{from_elsewhere} bytes from elsewhere");

    // Without threads the transport leaves the ring to the host, whose thread drives it at once.
    with_ranks(2, "provider = \"tcp\"\nproxy_threads = 0", |rank| {
        let ring = Ring::new();
        assert!(!rank.transport.serve_ring(ring.to_serve(&[rank.memory.window()])).unwrap());
        assert_eq!(threads("ty-proxy-") + threads("tokenyard-ring"), 0);
    });
}
