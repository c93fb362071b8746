//! A transport that only records its commands, and `faulty` around it.

// Each test binary uses its own part of this module; a helper of tests may panic as a test may.
#![allow(dead_code, clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::time::Duration;

use tokenyard_core::Result;
use tokenyard_core::abi;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::host::{OpenTransport, Registry, TransportRef};
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, NO_CAPABILITIES, NO_COMMAND, NO_EVENT, Team,
    Transport, TransportNeeds, TransportOpen, Window,
};

/// The recorded commands, by the `id` of the notebook. They outlive the notebooks, because a drop
/// may still write.
static NOTES: Mutex<BTreeMap<u64, Vec<Command>>> = Mutex::new(BTreeMap::new());

/// The commands that notebook `id` received, in order.
pub(crate) fn notes(id: u64) -> Vec<Command> {
    NOTES.lock().unwrap().get(&id).cloned().unwrap_or_default()
}

/// Their tags.
pub(crate) fn tags(id: u64) -> Vec<u64> {
    notes(id).iter().map(|command| command.tag).collect()
}

pub(crate) struct Notebook {
    id: u64,
    depth: usize,
    queues: Vec<Mutex<VecDeque<Event>>>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NotebookConfig {
    id: u64,
}

impl Transport for Notebook {
    const NAME: &'static str = "notebook";
    const ABOUT: &'static str = "records its commands";
    type Config = NotebookConfig;

    fn probe(_: &NotebookConfig) -> Result<Capabilities> {
        Ok(Capabilities {
            flags: abi::TY_CAP_GET
                | abi::TY_CAP_ORDERED
                | abi::TY_CAP_LOAD_STORE
                | abi::TY_CAP_BOUNDED_PUT
                | abi::TY_CAP_MASKING,
            memory_kinds: abi::TY_MEMORY_HOST,
            max_peers: 8,
            max_queues: 2,
            max_signals: 16,
            max_queue_depth: 1024,
            max_windows: 1,
            largest_put: 1 << 20,
            ..NO_CAPABILITIES
        })
    }

    fn open(config: NotebookConfig, open: &TransportOpen<'_>) -> Result<Self> {
        let needs = open.needs;
        let depth = needs.queue_depth as usize;
        let mut all = NOTES.lock().unwrap();
        all.insert(config.id, Vec::with_capacity(100_000));
        let queues = (0..needs.queues).map(|_| Mutex::new(VecDeque::with_capacity(depth)));
        Ok(Self { id: config.id, depth, queues: queues.collect() })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        let size = size_of::<MemoryNeeds>();
        MemoryNeeds { size, kinds: abi::TY_MEMORY_HOST, handles: 0, alignment: 64 }
    }

    unsafe fn register(&mut self, _: &Window) -> Result<()> {
        Ok(())
    }

    fn endpoint(&mut self, _: u32) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn connect(&mut self, _: u32, _: &[u8]) -> Result<()> {
        Ok(())
    }

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32> {
        let mut events = self.queues[queue as usize].lock().unwrap();
        let mut all = NOTES.lock().unwrap();
        let notes = all.get_mut(&self.id).unwrap();
        for (accepted, command) in commands.iter().enumerate() {
            if events.len() == self.depth {
                return Ok(accepted);
            }
            notes.push(*command);
            if command.flags & abi::TY_FLAG_NOTIFY != 0 {
                let (kind, status) = (abi::TY_EVENT_DONE, abi::TY_OK);
                events.push_back(Event {
                    kind,
                    queue,
                    peer: command.peer,
                    status,
                    tag: command.tag,
                });
            }
        }
        Ok(commands.len())
    }

    fn poll(&self, queue: u32, events: &mut [Event]) -> std::result::Result<usize, i32> {
        let mut ring = self.queues[queue as usize].lock().unwrap();
        let count = events.len().min(ring.len());
        events.iter_mut().zip(ring.drain(..count)).for_each(|(to, event)| *to = event);
        Ok(count)
    }

    fn read_signal(&self, _: u32, id: u32) -> u64 {
        u64::from(id)
    }

    fn health(&self) -> Result<()> {
        Ok(())
    }
}

tokenyard_testkit::built_in_transport!(Notebook);

pub(crate) const DEPTH: u32 = 512;

pub(crate) fn component() -> TransportRef {
    tokenyard_faulty::link();
    Registry::built_in().unwrap().transport("faulty").unwrap()
}

pub(crate) fn table(id: u64, keys: &str) -> ComponentTable {
    let text = format!("inner = \"notebook\"\nnotebook.id = {id}\n{keys}");
    ComponentTable::from_text(&text, "test.toml")
}

/// `faulty` around the notebook `id`, on rank 0 of 3, with these keys.
pub(crate) fn open(id: u64, keys: &str) -> OpenTransport {
    let needs = TransportNeeds {
        windows: 1,
        queues: 2,
        signals: 16,
        queue_depth: DEPTH,
        largest_put: 4096,
        deadline: Duration::from_secs(20),
    };
    component().open(&table(id, keys), &TransportOpen::new(&Team::world(0, 3), &needs)).unwrap()
}

/// Command number `tag`, to one of the three ranks in turn.
pub(crate) fn command(tag: u64) -> Command {
    Command {
        op: abi::TY_OP_PUT_SIGNAL,
        flags: abi::TY_FLAG_NOTIFY,
        peer: (tag % 3) as u32,
        add: 1,
        bytes: 8,
        tag,
        ..NO_COMMAND
    }
}

/// Posts on queue 0 and returns how many were accepted.
pub(crate) fn post(transport: &OpenTransport, commands: &[Command]) -> usize {
    // SAFETY: the notebook reads no memory; one thread drives the queue.
    unsafe { transport.post(0, commands).unwrap() }
}

/// Polls queue 0 once, with room for many events.
pub(crate) fn poll(transport: &OpenTransport) -> Vec<Event> {
    let mut events = [NO_EVENT; 64];
    let count = transport.poll(0, &mut events).unwrap();
    events[..count].to_vec()
}

/// Posts `count` commands, in batches of five, and polls until all have ended; their events.
pub(crate) fn run(transport: &OpenTransport, count: u64) -> Vec<Event> {
    let commands: Vec<_> = (0..count).map(command).collect();
    let mut left = &commands[..];
    let mut events = Vec::new();
    for _ in 0..1_000_000 {
        let batch = post(transport, &left[..left.len().min(5)]);
        left = &left[batch..];
        events.extend(poll(transport));
        if events.len() as u64 == count {
            return events;
        }
    }
    panic!("{} of {count} commands ended, {} were not accepted", events.len(), left.len());
}
