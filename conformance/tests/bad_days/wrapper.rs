//! `between`: a test transport between a communicator and another transport.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use tokenyard_core::Result;
use tokenyard_core::abi;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::export::find_transport;
use tokenyard_core::host::OpenTransport;
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, Transport, TransportOpen,
};

/// Puts of rows that rank 1 has made through a `between` that counts: those to the arena, which is
/// window 1 of the `cpu` kernel set.
pub(crate) static ROWS_PUT: AtomicU64 = AtomicU64::new(0);

pub(crate) struct Between {
    inner: OpenTransport,
    memory: MemoryNeeds,
    splits: bool,
    counts: bool,
    /// Per queue: the accepted commands that are not posted yet.
    waiting: Vec<Mutex<VecDeque<Command>>>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BetweenConfig {
    inner: String,
    /// Whether a put with a signal becomes a put and a signal after it, as a kernel set posts them that
    /// relies on order.
    #[serde(default)]
    splits: bool,
    #[serde(default)]
    counts: bool,
    #[serde(skip, default = "ComponentTable::empty")]
    table: ComponentTable,
}

impl Transport for Between {
    const NAME: &'static str = "between";
    const ABOUT: &'static str = "stands between a communicator and its transport";
    type Config = BetweenConfig;

    fn configure(table: &ComponentTable) -> Result<BetweenConfig> {
        #[derive(serde::Deserialize)]
        struct Inner {
            inner: String,
        }
        let (own, below) = table.split(&table.parse::<Inner>("between")?.inner)?;
        Ok(BetweenConfig { table: below, ..own.parse("between")? })
    }

    fn probe(config: &BetweenConfig) -> Result<Capabilities> {
        find_transport(&config.inner)?.probe(&config.table)
    }

    fn open(config: BetweenConfig, open: &TransportOpen<'_>) -> Result<Self> {
        let TransportOpen { team, needs, .. } = *open;
        let mut inner = find_transport(&config.inner)?.open(&config.table, open)?;
        Ok(Self {
            memory: inner.memory_needs()?,
            inner,
            splits: config.splits,
            counts: config.counts && team.me == 1,
            waiting: (0..needs.queues).map(|_| Mutex::default()).collect(),
        })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        self.memory
    }

    tokenyard_testkit::pass_on!(inner: register, endpoint, connect, read_signal, health, progress);

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32> {
        self.hand_on(queue)?;
        let mut waiting = self.waiting[queue as usize].lock().unwrap();
        if !waiting.is_empty() {
            return Ok(0);
        }
        for command in commands {
            if self.splits && command.op == abi::TY_OP_PUT_SIGNAL && command.bytes > 0 {
                waiting.push_back(Command { op: abi::TY_OP_PUT, flags: 0, ..*command });
                waiting.push_back(Command { op: abi::TY_OP_SIGNAL, bytes: 0, ..*command });
            } else {
                waiting.push_back(*command);
            }
        }
        drop(waiting);
        self.hand_on(queue)?;
        Ok(commands.len())
    }

    fn poll(&self, queue: u32, events: &mut [Event]) -> std::result::Result<usize, i32> {
        self.hand_on(queue)?;
        self.inner.poll(queue, events)
    }
}

impl Between {
    /// Posts the waiting commands, in order.
    fn hand_on(&self, queue: u32) -> std::result::Result<(), i32> {
        let mut waiting = self.waiting[queue as usize].lock().unwrap();
        while let Some(command) = waiting.front() {
            // SAFETY: the caller that posted the command promised all that `post` asks for; windows outlive
            // the instance. A source that is overwritten early is the subject of this test.
            if unsafe { self.inner.post(queue, std::slice::from_ref(command))? } == 0 {
                return Ok(());
            }
            if self.counts && command.dst_window == 1 {
                ROWS_PUT.fetch_add(1, Ordering::Relaxed);
            }
            waiting.pop_front();
        }
        Ok(())
    }
}

tokenyard_testkit::built_in_transport!(Between);
