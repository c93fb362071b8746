//! The device.

use std::collections::VecDeque;

use tokenyard_sys_mlx5::wqe::MOST_INLINE;

use crate::commands::{self, Refused};
use crate::completion::Completions;
use crate::fault::FaultPlan;
use crate::memory::Memory;
use crate::parse::Limits;
use crate::requester::Link;
use crate::store::Store;
use crate::violation::Violation;
use crate::wire::Packet;

/// The source of the requests that the device takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Profile {
    /// Requests of this project's kernels: one block, one piece of memory, at most 12 inline bytes, no sends. A
    /// wrong key is a violation, and so is a queue pair that ends with work under way.
    #[default]
    Kernels,
    /// Requests of libmlx5: any size. A wrong key is an error completion, and queue pairs may end at any time.
    Library,
}

impl Profile {
    pub(crate) fn limits(self) -> Limits {
        match self {
            Self::Kernels => Limits { segments: 4, inline: MOST_INLINE, exact: true, sends: false },
            Self::Library => Limits { segments: 63, inline: 1000, exact: false, sends: true },
        }
    }
}

/// The order in which the writes of a connection reach memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// The order in which they were posted.
    #[default]
    InOrder,
    /// Any order, and in pieces: as on a fabric that routes adaptively. A request that is not a plain write waits
    /// until all earlier writes of its connection have landed.
    Adaptive,
}

/// The config of a device.
#[derive(Clone, Debug, Default)]
pub struct Config {
    /// Local id: the address to which its peers send.
    pub lid: u16,
    /// The source of the requests that it takes.
    pub profile: Profile,
    /// The order in which writes land here.
    pub order: Order,
    /// The planted faults.
    pub faults: FaultPlan,
}

/// An event that a device reports beside completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// The port is down.
    PortDown,
    /// A queue pair that takes shared receives has broken, and takes no more of them.
    LastReceive {
        /// Number of the queue pair.
        qpn: u32,
    },
}

/// A ConnectX in software.
pub struct Hca {
    pub(crate) link: Link,
    /// Doorbells that a fault holds back.
    pub(crate) late_rings: VecDeque<(u64, u32)>,
}

impl std::fmt::Debug for Hca {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hca").field("lid", &self.link.lid).finish_non_exhaustive()
    }
}

impl Hca {
    /// Makes a device that reads and writes `memory`.
    pub fn new(config: Config, memory: impl Memory + 'static) -> Self {
        let store = Store::new(config.profile, Box::new(memory));
        let link = Link {
            completions: Completions::new(store, &config.faults),
            lid: config.lid,
            order: config.order,
            outbox: VecDeque::new(),
            port_is_up: true,
        };
        Self { link, late_rings: VecDeque::new() }
    }

    /// Executes a command, and returns its answer.
    ///
    /// # Errors
    /// The command is not known, has bits that it must not have, or is not possible now.
    pub fn command(&mut self, input: &[u8]) -> Result<Vec<u8>, Refused> {
        commands::execute(self, input)
    }

    pub(crate) fn store(&mut self) -> &mut Store {
        &mut self.link.completions.store
    }

    /// The rules that the driver broke. The device stops at the first.
    pub fn violations(&self) -> &[Violation] {
        &self.link.completions.store.violations
    }

    /// Takes the events that were reported beside completions.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.link.completions.events.drain(..).collect()
    }

    /// Whether its port carries packets.
    pub fn port_is_up(&self) -> bool {
        self.link.port_is_up
    }

    /// Takes a packet.
    pub fn receive(&mut self, packet: Packet) {
        self.link.receive(packet);
    }

    /// Takes the packets that are to be carried to other devices, or to this one.
    pub fn take_packets(&mut self) -> Vec<Packet> {
        self.link.outbox.drain(..).collect()
    }

    /// Whether the device has stopped: by a violation, or by a fault.
    pub fn is_stopped(&self) -> bool {
        self.link.completions.is_stopped()
    }

    /// Lets time pass, and does the work that is due. `now` is in nanoseconds and never falls. Returns whether
    /// there was work.
    pub fn step(&mut self, now: u64) -> bool {
        self.link.completions.now = self.link.completions.now.max(now);
        if self.link.completions.is_stopped() {
            return false;
        }
        let mut moved = self.take_late_rings();
        let qpns: Vec<u32> = self.link.completions.store.qps.keys().copied().collect();
        for qpn in qpns {
            moved |= self.link.land(qpn);
            moved |= self.link.serve(qpn);
            moved |= self.link.look_at_timers(qpn);
            moved |= self.link.send(qpn);
        }
        moved | self.link.completions.write_held()
    }

    /// The time of the next work that waits for time alone, in nanoseconds.
    pub fn next_due(&self) -> Option<u64> {
        let timers =
            self.link.completions.store.qps.values().flat_map(|qp| [qp.due, qp.pause]).flatten();
        let inboxes = self
            .link
            .completions
            .store
            .qps
            .values()
            .filter_map(|qp| qp.inbox.front().map(|(due, _)| *due));
        let rings = self.late_rings.front().map(|(due, _)| *due);
        let held = self
            .link
            .completions
            .store
            .cqs
            .values()
            .filter_map(|cq| cq.held.front().map(|held| held.due));
        let later = |due: &u64| *due > self.link.completions.now;
        timers.chain(inboxes).chain(rings).chain(held).filter(later).min()
    }

    /// The most reads and atomics of a queue pair that were under way at once.
    pub fn most_reads_seen(&self, qpn: u32) -> u32 {
        self.link.completions.store.qps.get(&qpn).map_or(0, |qp| qp.most_reads_seen)
    }
}
