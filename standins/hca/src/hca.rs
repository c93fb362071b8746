//! The device.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tokenyard_sys_mlx5::wqe::MOST_INLINE;

use crate::commands::{self, Refused};
use crate::fault::{FaultPlan, Faults};
use crate::memory::Memory;
use crate::object::{CompletionQueue, QueuePair, ReceiveQueue, Region, UserMemory};
use crate::parse::Limits;
use crate::random::Random;
use crate::violation::{Rule, Violation};
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
    pub(crate) config: Config,
    pub(crate) memory: Box<dyn Memory>,
    pub(crate) random: Random,
    pub(crate) faults: Faults,
    /// Nanoseconds.
    pub(crate) now: u64,
    pub(crate) numbers: u32,
    pub(crate) pds: BTreeSet<u32>,
    pub(crate) regions: BTreeMap<u32, Region>,
    pub(crate) umems: BTreeMap<u32, UserMemory>,
    /// Pages of registers, and where they lie.
    pub(crate) pages: BTreeMap<u32, u64>,
    pub(crate) cqs: BTreeMap<u32, CompletionQueue>,
    pub(crate) srqs: BTreeMap<u32, ReceiveQueue>,
    pub(crate) qps: BTreeMap<u32, QueuePair>,
    pub(crate) outbox: VecDeque<Packet>,
    pub(crate) events: VecDeque<Event>,
    /// Doorbells that a fault holds back.
    pub(crate) late_rings: VecDeque<(u64, u32)>,
    pub(crate) violations: Vec<Violation>,
    pub(crate) port_is_up: bool,
}

impl std::fmt::Debug for Hca {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hca").field("config", &self.config).finish_non_exhaustive()
    }
}

impl Hca {
    /// Makes a device that reads and writes `memory`.
    pub fn new(config: Config, memory: impl Memory + 'static) -> Self {
        Self {
            random: Random::new(config.faults.seed),
            faults: Faults::new(&config.faults),
            config,
            memory: Box::new(memory),
            now: 0,
            numbers: 0x40,
            pds: BTreeSet::new(),
            regions: BTreeMap::new(),
            umems: BTreeMap::new(),
            pages: BTreeMap::new(),
            cqs: BTreeMap::new(),
            srqs: BTreeMap::new(),
            qps: BTreeMap::new(),
            outbox: VecDeque::new(),
            events: VecDeque::new(),
            late_rings: VecDeque::new(),
            violations: Vec::new(),
            port_is_up: true,
        }
    }

    /// Executes a command, and returns its answer.
    ///
    /// # Errors
    /// The command is not known, has bits that it must not have, or is not possible now.
    pub fn command(&mut self, input: &[u8]) -> Result<Vec<u8>, Refused> {
        commands::execute(self, input)
    }

    /// The rules that the driver broke. The device stops at the first.
    pub fn violations(&self) -> &[Violation] {
        &self.violations
    }

    /// Takes the events that were reported beside completions.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.events.drain(..).collect()
    }

    /// Whether its port carries packets.
    pub fn port_is_up(&self) -> bool {
        self.port_is_up
    }

    /// Takes the packets that are to be carried to other devices, or to this one.
    pub fn take_packets(&mut self) -> Vec<Packet> {
        self.outbox.drain(..).collect()
    }

    /// Whether the device has stopped: by a violation, or by a fault.
    pub fn is_stopped(&self) -> bool {
        !self.violations.is_empty() || self.faults.stopped
    }

    /// Lets time pass, and does the work that is due. `now` is in nanoseconds and never falls. Returns whether
    /// there was work.
    pub fn step(&mut self, now: u64) -> bool {
        self.now = self.now.max(now);
        if self.is_stopped() {
            return false;
        }
        let mut moved = self.take_late_rings();
        let qpns: Vec<u32> = self.qps.keys().copied().collect();
        for qpn in qpns {
            moved |= self.land(qpn);
            moved |= self.serve(qpn);
            moved |= self.look_at_timers(qpn);
            moved |= self.send(qpn);
        }
        moved | self.write_held()
    }

    /// The time of the next work that waits for time alone, in nanoseconds.
    pub fn next_due(&self) -> Option<u64> {
        let timers = self.qps.values().flat_map(|qp| [qp.due, qp.pause]).flatten();
        let inboxes = self.qps.values().filter_map(|qp| qp.inbox.front().map(|(due, _)| *due));
        let rings = self.late_rings.front().map(|(due, _)| *due);
        let held = self.cqs.values().filter_map(|cq| cq.held.front().map(|held| held.due));
        let later = |due: &u64| *due > self.now;
        timers.chain(inboxes).chain(rings).chain(held).filter(later).min()
    }

    /// The most reads and atomics of a queue pair that were under way at once.
    pub fn most_reads_seen(&self, qpn: u32) -> u32 {
        self.qps.get(&qpn).map_or(0, |qp| qp.most_reads_seen)
    }

    pub(crate) fn violate(&mut self, rule: Rule, qpn: Option<u32>, text: String, bytes: &[u8]) {
        self.violations.push(Violation { rule, qpn, text, bytes: bytes.to_vec() });
    }

    /// A number that no object had before.
    pub(crate) fn number(&mut self) -> u32 {
        self.numbers += 1;
        self.numbers
    }

    /// Reads memory that the device was given. If nothing is mapped there, the driver passed a wrong address.
    pub(crate) fn read_array<const N: usize>(
        &self,
        address: u64,
    ) -> Result<[u8; N], crate::Unmapped> {
        let mut bytes = [0; N];
        self.memory.read(address, &mut bytes)?;
        Ok(bytes)
    }
}
