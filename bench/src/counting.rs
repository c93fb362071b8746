//! A transport that counts the commands posted to it, and passes them to `shm`.
//!
//! Counters belong to world ranks, not to instances, so that a program that runs ranks (as threads
//! or as processes) finds them without access to a communicator. Two communicators of one rank add
//! up.

use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_core::Result;
use tokenyard_core::abi;
use tokenyard_core::export::{Exported, TRANSPORT_HEADER, TransportComponent};
use tokenyard_core::host::{BuiltIn, add_built_in};
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, Transport, TransportOpen, Window,
};
use tokenyard_cpu::{Shm, ShmConfig};

/// Its name in a config.
pub const NAME: &str = "shm-counted";

/// Ranks that have counters of their own.
const MOST_RANKS: usize = 64;

static COUNTS: [Counters; MOST_RANKS] = [const { Counters::new() }; MOST_RANKS];

/// Counters of one rank. They have their own cache lines, since ranks may be threads.
#[derive(Debug)]
#[repr(align(128))]
struct Counters {
    puts: AtomicU64,
    signals: AtomicU64,
    bytes: AtomicU64,
}

/// The counts of posted commands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Counts {
    /// Commands that move bytes (puts, gets, values).
    pub puts: u64,
    /// Commands that raise a signal and move nothing.
    pub signals: u64,
    /// Bytes moved by commands.
    pub bytes: u64,
}

impl Counts {
    /// Commands of all kinds.
    pub fn commands(&self) -> u64 {
        self.puts + self.signals
    }

    /// The counts of commands posted after `earlier`.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            puts: self.puts - earlier.puts,
            signals: self.signals - earlier.signals,
            bytes: self.bytes - earlier.bytes,
        }
    }
}

impl Counters {
    const fn new() -> Self {
        Self { puts: AtomicU64::new(0), signals: AtomicU64::new(0), bytes: AtomicU64::new(0) }
    }

    fn count(&self, command: &Command) {
        let kind = if command.op == abi::TY_OP_SIGNAL { &self.signals } else { &self.puts };
        kind.fetch_add(1, Ordering::Relaxed);
        let bytes = if command.op == abi::TY_OP_PUT_VALUE { 8 } else { command.bytes };
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// The counts of commands that `rank` has posted through this component so far, in this process.
/// Ranks from 64 on share counters.
pub fn counts(rank: u32) -> Counts {
    let counters = &COUNTS[rank as usize % MOST_RANKS];
    let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    Counts {
        puts: read(&counters.puts),
        signals: read(&counters.signals),
        bytes: read(&counters.bytes),
    }
}

/// `shm`, counted.
#[derive(Debug)]
pub struct CountedShm {
    inner: Shm,
    counters: &'static Counters,
}

impl Transport for CountedShm {
    const NAME: &'static str = NAME;
    const ABOUT: &'static str = "shm with counted commands, for `tokenyard bench`";
    type Config = ShmConfig;

    fn probe(config: &ShmConfig) -> Result<Capabilities> {
        Shm::probe(config)
    }

    fn open(config: ShmConfig, open: &TransportOpen<'_>) -> Result<Self> {
        let team = open.team;
        let rank = team.world_ranks.get(team.me as usize).copied().unwrap_or(team.me);
        let counters = &COUNTS[rank as usize % MOST_RANKS];
        Ok(Self { inner: Shm::open(config, open)?, counters })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        self.inner.memory_needs()
    }

    unsafe fn register(&mut self, window: &Window) -> Result<()> {
        // SAFETY: the same contract.
        unsafe { self.inner.register(window) }
    }

    fn endpoint(&mut self, peer: u32) -> Result<Vec<u8>> {
        self.inner.endpoint(peer)
    }

    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        self.inner.connect(peer, data)
    }

    fn peer_address(&self, window: u32, peer: u32) -> Result<*mut u8> {
        self.inner.peer_address(window, peer)
    }

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32> {
        // SAFETY: the same contract.
        let accepted = unsafe { self.inner.post(queue, commands)? };
        commands.iter().take(accepted).for_each(|command| self.counters.count(command));
        Ok(accepted)
    }

    fn poll(&self, queue: u32, events: &mut [Event]) -> std::result::Result<usize, i32> {
        self.inner.poll(queue, events)
    }

    fn read_signal(&self, queue: u32, id: u32) -> u64 {
        self.inner.read_signal(queue, id)
    }

    fn health(&self) -> Result<()> {
        self.inner.health()
    }
}

const TABLES: &[*const abi::TyTransportTable] =
    &[&raw const *TransportComponent::<CountedShm>::TABLE];
static TRANSPORTS: Exported<abi::TyTransportExport> = Exported(abi::TyTransportExport {
    header: TRANSPORT_HEADER,
    components: TABLES.as_ptr(),
    count: TABLES.len(),
});

static COMPONENT: BuiltIn = BuiltIn::Transport(&TRANSPORTS);

/// Registers the component, so that configs of this process may name it. Only programs that count
/// call this, so that no list of components shows it otherwise, and no other config can choose it.
pub fn provide() {
    add_built_in(&COMPONENT);
}
