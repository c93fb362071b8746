//! Ranks over the `verbs` transport on stand-in NICs, in one process.

// Each test binary uses its own part of this module; a helper of tests may panic as a test may.
#![allow(dead_code, clippy::unwrap_used)]

use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::transport::{
    Command, Event, NO_COMMAND, NO_EVENT, NO_WINDOW, Team, Transport as _, TransportNeeds,
    TransportOpen, Window,
};
use tokenyard_nic::Nic;
use tokenyard_verbs::Verbs;

/// Words of a rank's window: the first half is a source, the second half a destination.
pub(crate) const WORDS: usize = 32;
pub(crate) const DEPTH: usize = 8;
/// The longest wait of a test that expects success.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) fn needs() -> TransportNeeds {
    TransportNeeds {
        windows: 1,
        queues: 1,
        signals: 4,
        queue_depth: DEPTH as u32,
        largest_put: 1 << 16,
        deadline: PATIENCE,
    }
}

/// The deadline of [`impatient`].
pub(crate) const DEADLINE: Duration = Duration::from_millis(300);

/// Needs with which stalled connections are given up soon.
pub(crate) fn impatient() -> TransportNeeds {
    TransportNeeds { deadline: DEADLINE, ..needs() }
}

/// A rank. Its memory outlives its transport, which is dropped first.
pub(crate) struct Rank {
    pub(crate) transport: Verbs,
    pub(crate) nic: Nic,
    memory: Box<[u64; WORDS]>,
}

/// Connected ranks of the team `name`, which no other test may use, each with its own NIC.
pub(crate) fn ranks(name: &str, count: u32, keys: &str, needs: &TransportNeeds) -> Vec<Rank> {
    let mut ranks: Vec<_> = (0..count)
        .map(|me| {
            let device = format!("{name}{me}");
            let nic = Nic::new(&device);
            let table =
                ComponentTable::from_text(&format!("device = \"{device}\"\n{keys}"), "a.toml");
            let config = Verbs::configure(&table).unwrap();
            let mut transport =
                Verbs::open(config, &TransportOpen::new(&Team::world(me, count), needs)).unwrap();
            let mut memory = Box::new([0; WORDS]);
            let window = window(&mut memory);
            // SAFETY: the memory lives as long as the transport, beside it.
            unsafe { transport.register(&window).unwrap() };
            Rank { transport, nic, memory }
        })
        .collect();
    for me in 0..ranks.len() {
        for peer in 0..ranks.len() {
            let endpoint = ranks[peer].transport.endpoint(me as u32).unwrap();
            ranks[me].transport.connect(peer as u32, &endpoint).unwrap();
        }
    }
    ranks
}

fn window(memory: &mut Box<[u64; WORDS]>) -> Window {
    Window {
        kind: abi::TY_MEMORY_HOST,
        pointer: memory.as_mut_ptr().cast(),
        bytes: (8 * WORDS) as u64,
        ..NO_WINDOW
    }
}

impl Rank {
    /// Posts to queue 0; how many were accepted.
    pub(crate) fn post(&self, commands: &[Command]) -> usize {
        // SAFETY: sources are the first half of the window, which changes only between commands.
        unsafe { self.transport.post(0, commands).unwrap() }
    }

    /// Polls queue 0 until `count` events have come.
    pub(crate) fn events(&self, count: usize) -> Vec<Event> {
        let start = Instant::now();
        let mut found = Vec::new();
        while found.len() < count {
            assert!(start.elapsed() < PATIENCE, "{} of {count} events: {found:?}", found.len());
            let mut some = [NO_EVENT; DEPTH];
            let came = self.transport.poll(0, &mut some).unwrap();
            found.extend_from_slice(&some[..came]);
        }
        found
    }

    /// Writes a word of the window.
    pub(crate) fn write(&mut self, at: usize, value: u64) {
        // SAFETY: a word of the window; no device accesses it while the test is here.
        unsafe { self.memory.as_mut_ptr().add(at).write_volatile(value) };
    }

    /// Reads a word of the window.
    pub(crate) fn read(&self, at: usize) -> u64 {
        // SAFETY: as in `write`.
        unsafe { self.memory.as_ptr().add(at).read_volatile() }
    }

    /// The text of the first failure.
    pub(crate) fn failure(&self) -> String {
        self.transport.health().unwrap_err().to_string()
    }
}

/// A command of one word with an event, from word 0 to the first word of the second half.
pub(crate) fn command(op: u8, peer: u32, tag: u64) -> Command {
    let half = (WORDS / 2 * 8) as u64;
    let flags = abi::TY_FLAG_NOTIFY;
    Command { op, flags, peer, tag, add: 1, bytes: 8, dst_offset: half, ..NO_COMMAND }
}

/// The tags of events, and whether each is an error.
pub(crate) fn ends(events: &[Event]) -> Vec<(u64, bool)> {
    events.iter().map(|event| (event.tag, event.kind == abi::TY_EVENT_ERROR)).collect()
}
