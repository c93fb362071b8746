//! Ranks over real providers, as threads of one process.

// The helpers below may panic as a test may; no test uses all of them.
#![allow(clippy::unwrap_used, dead_code)]

use std::sync::atomic::AtomicU64;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::transport::{
    Command, NO_EVENT, NO_WINDOW, Team, Transport, TransportNeeds, TransportOpen, Window,
};
use tokenyard_libfabric::{Libfabric, LibfabricConfig};

pub(crate) const WINDOW_BYTES: usize = 1 << 16;
pub(crate) const LONG: Duration = Duration::from_secs(60);

pub(crate) fn config(text: &str) -> LibfabricConfig {
    ComponentTable::from_text(text, "test.toml").parse("libfabric").unwrap()
}

pub(crate) fn needs() -> TransportNeeds {
    TransportNeeds {
        windows: 1,
        queues: 2,
        signals: 16,
        queue_depth: 64,
        largest_put: WINDOW_BYTES as u64,
        deadline: LONG,
    }
}

/// Window memory: words that peers write.
pub(crate) struct Memory(pub(crate) Box<[AtomicU64]>);

impl Memory {
    pub(crate) fn new() -> Self {
        Self((0..WINDOW_BYTES / 8).map(|_| AtomicU64::new(0)).collect())
    }

    pub(crate) fn window(&self) -> Window {
        Window {
            kind: abi::TY_MEMORY_HOST,
            pointer: self.0.as_ptr().cast_mut().cast(),
            bytes: WINDOW_BYTES as u64,
            ..NO_WINDOW
        }
    }
}

/// One rank. Fields drop in order: the transport ends before its window.
pub(crate) struct Rank {
    pub(crate) me: u32,
    pub(crate) transport: Libfabric,
    pub(crate) memory: Memory,
}

impl Rank {
    pub(crate) fn open(me: u32, ranks: u32, text: &str) -> Self {
        let mut transport =
            Libfabric::open(config(text), &TransportOpen::new(&Team::world(me, ranks), &needs()))
                .unwrap();
        let memory = Memory::new();
        // SAFETY: the memory is dropped after the transport.
        unsafe { transport.register(&memory.window()).unwrap() };
        Self { me, transport, memory }
    }

    pub(crate) fn until(&self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let until = Instant::now() + LONG;
        while !done(self) {
            self.transport.progress().unwrap();
            self.transport.health().unwrap();
            assert!(Instant::now() < until, "rank {}: {what}", self.me);
            std::thread::yield_now();
        }
    }

    /// Posts all commands; the tests' commands are in range and their sources stay.
    pub(crate) fn post(&self, queue: u32, commands: &[Command]) {
        let mut left = commands;
        self.until("commands are accepted", |rank| {
            // SAFETY: see above.
            let accepted = unsafe { rank.transport.post(queue, left).unwrap() };
            left = &left[accepted..];
            if accepted == 0 {
                rank.transport.poll(queue, &mut [NO_EVENT; 8]).unwrap();
            }
            left.is_empty()
        });
    }

    pub(crate) fn wait_signal(&self, id: u32, total: u64) {
        self.until("a signal", |rank| rank.transport.read_signal(0, id) >= total);
        assert_eq!(self.transport.read_signal(0, id), total);
    }
}

/// Runs `body` on connected ranks; none ends before all have finished.
pub(crate) fn with_ranks(ranks: u32, text: &str, body: impl Fn(&mut Rank) + Sync) {
    let endpoints: Vec<Mutex<Vec<Vec<u8>>>> = (0..ranks).map(|_| Mutex::default()).collect();
    let (ready, through) = (Barrier::new(ranks as usize), Barrier::new(ranks as usize));
    std::thread::scope(|scope| {
        for me in 0..ranks {
            let (endpoints, ready, through, body) = (&endpoints, &ready, &through, &body);
            scope.spawn(move || {
                let mut rank = Rank::open(me, ranks, text);
                let mine = (0..ranks).map(|peer| rank.transport.endpoint(peer).unwrap()).collect();
                *endpoints[me as usize].lock().unwrap() = mine;
                ready.wait();
                for peer in 0..ranks {
                    let data = endpoints[peer as usize].lock().unwrap()[me as usize].clone();
                    rank.transport.connect(peer, &data).unwrap();
                }
                ready.wait();
                body(&mut rank);
                through.wait();
            });
        }
    });
}
