//! Core's proxy for kernels over the `shm` transport. The test acts as the kernels: it writes commands into
//! a ring as `backends/gpu/device/common/gpu_ring.cuh` does. It is a binary of its own, because it replaces the
//! allocator.

// Helpers of a test may panic as a test may.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{Rank, WINDOW_BYTES, needs};
use tokenyard_core::abi;
use tokenyard_core::gpu_ring::{GpuRing, RingToServe};
use tokenyard_core::transport::{NO_WINDOW, Window};
use tokenyard_testkit::{Counting, of_all_threads};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const CAPACITY: u32 = 8;
const SIGNALS: u32 = 16;
/// The words of the counters of a peer.
const COUNTERS: u32 = (size_of::<abi::TyPeerCounters>() / 8) as u32;
const PATIENCE: Duration = Duration::from_secs(60);

/// The memory of a ring, in words, as the device sees it. It outlives the proxy.
struct Kernels {
    /// `CAPACITY` commands of 8 words.
    commands: Vec<AtomicU64>,
    status: Vec<AtomicU64>,
    totals: Vec<AtomicU64>,
    /// The host's counters, of 2 peers.
    counters: Vec<AtomicU64>,
    raised: Vec<AtomicU64>,
    head: u64,
}

impl Kernels {
    fn new() -> Self {
        let words = |count: u32| (0..count).map(|_| AtomicU64::new(0)).collect();
        Self {
            commands: words(8 * CAPACITY),
            status: words(3),
            totals: words(SIGNALS),
            counters: words(2 * COUNTERS),
            raised: words(2 * SIGNALS),
            head: 0,
        }
    }

    fn ring(&self) -> abi::TyGpuRing {
        abi::TyGpuRing {
            size: size_of::<abi::TyGpuRing>(),
            level: abi::TY_LEVEL_SCALE_OUT,
            queue: 1,
            capacity: CAPACITY,
            commands: self.commands.as_ptr().cast_mut().cast(),
            status: self.status.as_ptr().cast_mut().cast(),
            totals: self.totals.as_ptr().cast_mut().cast(),
            signals: SIGNALS,
            reserved: 0,
        }
    }

    fn total(&self, id: u32) -> u64 {
        self.totals[id as usize].load(Ordering::Acquire)
    }

    fn until(&self, what: &str, ready: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !ready(self) {
            let failed = self.status[1].load(Ordering::Acquire);
            assert!(failed == 0 && start.elapsed() < PATIENCE, "{what} never comes ({failed})");
            std::thread::yield_now();
        }
    }

    fn until_done(&self, count: u64) {
        self.until("done", |k| k.status[0].load(Ordering::Acquire) >= count);
    }

    /// Puts `bytes` of window 0 to the same place of the peer's window 1, and raises a signal there.
    fn put_signal(&mut self, peer: u32, offset: u64, bytes: u64, signal: u32) {
        let number = self.head;
        self.head += 1;
        self.until_done((number + 1).saturating_sub(CAPACITY.into()));
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let words = [
            pair(abi::TY_OP_PUT_SIGNAL.into(), peer),
            pair(signal, 1),
            pair(0, 1),
            offset,
            offset,
            bytes,
            0,
        ];
        let slot = &self.commands[8 * (number % u64::from(CAPACITY)) as usize..][..8];
        slot.iter().zip(words).for_each(|(to, word)| to.store(word, Ordering::Relaxed));
        slot[7].store(number + 1, Ordering::Release);
    }
}

/// Two ranks of this process whose kernels post through proxies. Each proxy ends before the ring and the
/// transport that it serves: fields drop in order.
fn ranks() -> [(GpuRing, Kernels, Rank); 2] {
    let mut ranks = [0, 1].map(|me| Rank::open(me, 2, "", &needs()));
    let endpoints =
        [0, 1].map(|me: usize| [0, 1].map(|peer| ranks[me].transport.endpoint(peer).unwrap()));
    std::thread::scope(|scope| {
        for (me, rank) in ranks.iter_mut().enumerate() {
            let endpoints = &endpoints;
            scope.spawn(move || {
                for peer in 0..2 {
                    rank.transport.connect(peer, &endpoints[peer as usize][me]).unwrap();
                }
            });
        }
    });
    ranks.map(|rank| {
        let kernels = Kernels::new();
        let window =
            |id| Window { id, kind: abi::TY_MEMORY_HOST, bytes: WINDOW_BYTES as u64, ..NO_WINDOW };
        // SAFETY: the tuple drops the proxy before the ring, whose heap memory does not move, and before
        // the transport.
        let proxy = unsafe {
            let (ring, windows) = (kernels.ring(), [window(0), window(1)]);
            let serve = abi::TyServeRing {
                size: size_of::<abi::TyServeRing>(),
                ring: &raw const ring,
                counters: kernels.counters.as_ptr().cast_mut().cast(),
                raised: kernels.raised.as_ptr().cast_mut().cast(),
                windows: windows.as_ptr(),
                window_count: windows.len(),
                largest_put: u64::MAX,
                peers: 2,
                reserved: 0,
            };
            GpuRing::start(RingToServe::new(&serve), rank.transport.link()).unwrap()
        };
        (proxy, kernels, rank)
    })
}

#[test]
fn rows_that_kernels_put_are_there_with_their_signals_and_a_steady_step_allocates_nothing() {
    const STEPS: u64 = 1000;
    const BURST: u64 = 12;
    let mut ranks = ranks();
    let mut before = 0;
    for step in 1..=STEPS + 10 {
        if step == 10 {
            before = of_all_threads();
        }
        for (_, kernels, rank) in &mut ranks {
            let peer = 1 - rank.me;
            // More commands than the ring and the transport's queue hold.
            for i in 0..BURST {
                rank.windows[0].write(i as usize, step << 8 | i);
                kernels.put_signal(peer, 8 * i, 8, i as u32);
            }
            kernels.until_done(kernels.head);
        }
        for (_, kernels, rank) in &ranks {
            for i in 0..BURST {
                kernels.until("a signal", |k| k.total(i as u32) >= step);
                assert_eq!(rank.windows[1].read(i as usize), step << 8 | i);
            }
        }
    }
    assert_eq!(of_all_threads() - before, 0);
}
