//! Ranks over the `shm` transport, as a host sees them: through the judged tables.

// Each test binary uses its own part of this module; a helper of tests may panic as a test may.
#![allow(dead_code, clippy::unwrap_used)]

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::Duration;

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use tokenyard_core::abi;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::host::{OpenTransport, Registry, TransportRef};
use tokenyard_core::transport::{
    Command, Event, NO_COMMAND, NO_EVENT, NO_WINDOW, Team, TransportNeeds, TransportOpen, Window,
};

pub(crate) const WINDOW_BYTES: usize = 1 << 16;

pub(crate) fn needs() -> TransportNeeds {
    TransportNeeds {
        windows: 2,
        queues: 2,
        signals: 16,
        queue_depth: 8,
        largest_put: WINDOW_BYTES as u64,
        deadline: Duration::from_secs(20),
    }
}

/// The transport, as a program that links the backend finds it.
pub(crate) fn shm() -> TransportRef {
    tokenyard_cpu::link();
    tokenyard_topology::link();
    Registry::built_in().unwrap().transport("shm").unwrap()
}

pub(crate) fn table(text: &str) -> ComponentTable {
    ComponentTable::from_text(text, "test.toml")
}

/// Window memory as a kernel set would allocate it.
pub(crate) struct Memory {
    fd: OwnedFd,
    base: *mut u8,
}

// SAFETY: an owned mapping; the tests order their accesses by signals and barriers.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new() -> Self {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("tokenyard-window", flags).unwrap();
        rustix::fs::ftruncate(&fd, WINDOW_BYTES as u64).unwrap();
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let null = std::ptr::null_mut();
        // SAFETY: a fresh mapping.
        let base = unsafe { rustix::mm::mmap(null, WINDOW_BYTES, prot, MapFlags::SHARED, &fd, 0) };
        Self { fd, base: base.unwrap().cast() }
    }

    /// The address of the 8-byte word `index`.
    pub(crate) fn word(&self, index: usize) -> *mut u64 {
        assert!(index < WINDOW_BYTES / 8);
        self.base.cast::<u64>().wrapping_add(index)
    }

    pub(crate) fn read(&self, index: usize) -> u64 {
        // SAFETY: the word is mapped and aligned.
        unsafe { self.word(index).read_volatile() }
    }

    pub(crate) fn write(&self, index: usize, value: u64) {
        // SAFETY: the word is mapped and aligned.
        unsafe { self.word(index).write_volatile(value) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, unmapped once.
        unsafe { rustix::mm::munmap(self.base.cast(), WINDOW_BYTES).unwrap() }
    }
}

/// One rank. Fields drop in order: the transport ends before its windows.
pub(crate) struct Rank {
    pub(crate) me: u32,
    pub(crate) ranks: u32,
    pub(crate) transport: OpenTransport,
    pub(crate) windows: [Memory; 2],
}

impl Rank {
    pub(crate) fn open(me: u32, ranks: u32, config: &str, needs: &TransportNeeds) -> Self {
        let transport = shm()
            .open(&table(config), &TransportOpen::new(&Team::world(me, ranks), needs))
            .unwrap();
        let mut rank = Self { me, ranks, transport, windows: [Memory::new(), Memory::new()] };
        let demand = rank.transport.memory_needs().unwrap();
        assert_eq!((demand.kinds, demand.handles), (abi::TY_MEMORY_HOST, abi::TY_HANDLE_MEMFD));
        for (id, memory) in (0..).zip(&rank.windows) {
            assert!(memory.base.addr().is_multiple_of(demand.alignment as usize));
            let window = Window {
                id,
                kind: abi::TY_MEMORY_HOST,
                pointer: memory.base,
                bytes: WINDOW_BYTES as u64,
                fd: memory.fd.as_raw_fd(),
                handle: abi::TY_HANDLE_MEMFD,
                ..NO_WINDOW
            };
            // SAFETY: the windows are dropped after the transport.
            unsafe { rank.transport.register(&window).unwrap() };
        }
        rank
    }

    /// Posts all commands; the tests' commands are in range and their sources do not change.
    pub(crate) fn post(&self, queue: u32, commands: &[Command]) -> usize {
        // SAFETY: by this function's description; each queue has one thread.
        unsafe { self.transport.post(queue, commands).unwrap() }
    }

    /// Up to four events.
    pub(crate) fn poll(&self, queue: u32) -> Vec<Event> {
        let mut events = [NO_EVENT; 4];
        let count = self.transport.poll(queue, &mut events).unwrap();
        events[..count].to_vec()
    }

    pub(crate) fn signal(&self, id: u32) -> u64 {
        self.transport.read_signal(0, id)
    }

    /// Waits until a signal has a total of at least `total`.
    pub(crate) fn wait(&self, id: u32, total: u64) {
        let start = std::time::Instant::now();
        while self.signal(id) < total {
            assert!(start.elapsed() < needs().deadline, "signal {id} never reached {total}");
            std::thread::yield_now();
        }
    }
}

/// A command for `peer` with everything else zero.
pub(crate) fn command(op: u8, peer: u32) -> Command {
    Command { op, peer, add: 1, ..NO_COMMAND }
}

/// Runs `body` on connected ranks, one thread each. All ranks live until the last one is done.
pub(crate) fn with_ranks(ranks: u32, config: &str, body: impl Fn(&Rank) + Sync) {
    with_ranks_that_need(&needs(), ranks, config, body);
}

/// As [`with_ranks`], with other needs.
pub(crate) fn with_ranks_that_need(
    needs: &TransportNeeds,
    ranks: u32,
    config: &str,
    body: impl Fn(&Rank) + Sync,
) {
    let mut all: Vec<Rank> = (0..ranks).map(|me| Rank::open(me, ranks, config, needs)).collect();
    // endpoints[me][peer]
    let endpoints: Vec<Vec<Vec<u8>>> = all
        .iter_mut()
        .map(|rank| (0..ranks).map(|peer| rank.transport.endpoint(peer).unwrap()).collect())
        .collect();
    let run = |mut rank: Rank| {
        for (peer, theirs) in (0..).zip(&endpoints) {
            rank.transport.connect(peer, &theirs[rank.me as usize]).unwrap();
        }
        body(&rank);
        rank.transport.health().unwrap();
        rank
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = all.drain(..).map(|rank| scope.spawn(move || run(rank))).collect();
        let done: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        for result in done {
            if let Err(panic) = result {
                std::panic::resume_unwind(panic);
            }
        }
    });
}
