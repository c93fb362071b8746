//! The `verbs` transport: one reliable connection per queue and peer, this rank itself included.
//!
//! A put is an RDMA write. Its signal is immediate data of the same write, or an atomic addition
//! after it on the same connection. The calling thread posts and polls; the device does the rest.
//!
//! `failure`, `flight`, `health`, `ledger`, `memory` and `owned` serve `ibgda` too. Watched by the tests in these
//! files, and `tests/{behaviour,masking,allocations}.rs`.

mod batch;
mod commands;
mod connect;
mod failure;
mod failures;
mod fault;
mod flight;
mod health;
mod ledger;
mod memory;
mod owned;
mod peer;
mod queue;
mod read_back;
mod shared;
mod signals;

use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokenyard_core::abi;
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, Team, Transport, TransportOpen, Window,
};
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_sys_verbs::ffi::{
    ACCESS_LOCAL_WRITE, ACCESS_REMOTE_ATOMIC, ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, WrRdma,
};
use tokenyard_sys_verbs::{CallError, Cq, Init, Mr, Pd, Qp, QpRequest};

use crate::config::{Flush, VerbsConfig};
use crate::device::{Adapter, COMPLETIONS, adapters};
use crate::endpoint::{Endpoint, Expected, RemoteQp};
use crate::port::{self, REQUESTS, no_port};
use crate::rules::{self, SignalMode};
use connect::{FAR, Setup, unreachable};
use health::Health;
use ledger::{Watchdog, finish};
use memory::Memory;
use owned::Owned;
use peer::{Peer, Remote, Route, Stage};
use queue::QueuePairs;
use read_back::{ReadBack, ReadBackMemory};
use shared::Shared;
use signals::{Receiver, Signals};

/// The host's half of reliable connections, which the transport `ibgda` shares.
pub mod connection {
    pub use super::connect::unreachable;
    pub use super::failure::{FailedAt, Failure, TransportFault, cut_words, event_words};
    pub use super::failures::{Attributable, Blame};
    pub use super::flight::{Flight, Pending};
    pub use super::health::Health;
    pub use super::ledger::{Ledger, Watchdog, finish};
    pub use super::memory::{Memory, Region, refused as registration_refused};
    pub use super::owned::Owned;
    pub use super::{connected_before, first_packet};
}

/// Payloads of up to this many bytes are copied while they are posted.
const INLINE: u32 = 64;
/// The keys that lower the need for resources of the device.
const DEPTHS: &str = "`queue_depth` or `receive_depth`";
/// The inline bytes that a value needs (INV-3).
const LEAST_INLINE: u32 = 8;

/// RDMA over InfiniBand and RoCE.
#[derive(Debug)]
pub struct Verbs {
    /// Field order is drop order: connections end first, so that no write reaches windows or
    /// signals when their registrations end.
    queues: Vec<Owned<QueuePairs>>,
    shared: Shared,
    pd: Arc<Pd>,
    adapter: Adapter,
    config: VerbsConfig,
    team: Team,
    signal_count: u32,
    /// The route of queue 0 to each connected peer.
    routes: Vec<Option<Route>>,
    /// It checks the queues by `progress`.
    watchdog: Mutex<Watchdog>,
}

impl Transport for Verbs {
    const NAME: &'static str = "verbs";
    const ABOUT: &'static str = "RDMA over InfiniBand and RoCE, driven by the CPU";
    type Config = VerbsConfig;

    fn probe(config: &VerbsConfig) -> Result<Capabilities> {
        port::common(adapters(config, None)?.iter().map(|adapter| adapter.capabilities(config)))
    }

    fn open(config: VerbsConfig, open: &TransportOpen<'_>) -> Result<Self> {
        let TransportOpen { team, needs, .. } = *open;
        let adapter = adapters(&config, Some(team))?.pop().ok_or_else(no_port)?;
        let port = &adapter.port;
        port.check_queue_pairs(team, u64::from(needs.queues), "use fewer queues")?;
        check_flush(&adapter, &config)?;
        rules::warn_of_silence(config.timeout, config.retry_count, needs.deadline);
        let failed = |e| port.refused(e, DEPTHS);
        port.context.make_events_nonblocking().map_err(failed)?;
        let pd = Pd::new(&port.context).map_err(failed)?;
        let signals = match adapter.signals {
            SignalMode::Atomic => Signals::atomic(&pd, needs.signals)?,
            SignalMode::Immediate => {
                let depth = adapter.receive_depth(&config);
                let receiver = Receiver::new(&port.context, &pd, depth).map_err(failed)?;
                Signals::immediate(receiver, needs.signals)
            }
        };
        let shared = Shared {
            signals,
            memory: Memory::new(&pd)?,
            health: Health::new(
                port,
                team,
                needs.deadline,
                rules::shortest_silence(config.timeout, config.retry_count),
            ),
            numbers: Vec::new(),
        };
        let mut verbs = Self {
            queues: Vec::with_capacity(needs.queues as usize),
            shared,
            pd,
            adapter,
            config,
            team: team.clone(),
            signal_count: needs.signals,
            routes: vec![None; team.world_ranks.len()],
            watchdog: Mutex::new(Watchdog::armed()),
        };
        for queue in 0..needs.queues {
            let pairs = verbs.new_queue_pairs(queue, needs.queue_depth)?;
            let numbers = pairs.peers.iter().zip(0..).map(|(peer, at)| (peer.number, queue, at));
            verbs.shared.numbers.extend(numbers);
            verbs.queues.push(Owned::new(pairs));
        }
        verbs.shared.numbers.sort_unstable();
        Ok(verbs)
    }

    fn memory_needs(&self) -> MemoryNeeds {
        MemoryNeeds {
            size: size_of::<MemoryNeeds>(),
            kinds: self.adapter.memory_kinds(),
            handles: 0,
            alignment: 64,
        }
    }

    unsafe fn register(&mut self, window: &Window) -> Result<()> {
        // SAFETY: the window outlives `self`, and its registration with it, by this function's
        // contract.
        unsafe { self.shared.memory.add(&self.pd, window) }
    }

    fn endpoint(&mut self, peer: u32) -> Result<Vec<u8>> {
        let queue_pairs = self.queues.iter_mut().map(|queue| {
            let peer = &queue.get_mut().peers[peer as usize];
            RemoteQp { number: peer.number, psn: peer.psn }
        });
        let queue_pairs = queue_pairs.collect();
        let endpoint = Endpoint {
            signal_count: self.signal_count,
            signals: self.shared.signals.area(),
            queue_pairs,
            windows: self.shared.memory.to_peers(),
            ..self.adapter.port.endpoint(&self.team, peer)
        };
        Ok(endpoint.to_bytes())
    }

    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        let rank = self.team.world_ranks[peer as usize];
        let endpoint = Endpoint::parse(data).map_err(|e| e.with_rank(rank))?;
        let windows = self.shared.memory.lengths();
        let expected = Expected {
            me: self.team.me,
            peer,
            ranks: self.team.world_ranks.len() as u32,
            queues: self.queues.len(),
            signals: self.signal_count,
            link_layer: self.adapter.port.attr.link_layer,
            windows: &windows,
        };
        expected.check(&endpoint).map_err(|e| e.with_rank(rank))?;
        let link = self.link_name(peer);
        self.check_unconnected(peer).map_err(|e| e.with_rank(rank))?;
        self.join(peer, endpoint).map_err(|e| unreachable(e, &FAR, rank, &link))?;
        if peer == self.team.me {
            self.read_back_if_needed().map_err(|e| self.adapter.port.refused(e, DEPTHS))?;
        }
        Ok(())
    }

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32> {
        let Some(mut pairs) = self.queue(queue)?.enter() else { return Ok(0) };
        // SAFETY: by this function's contract.
        Ok(unsafe { pairs.post(&self.shared, commands) })
    }

    fn poll(&self, queue: u32, events: &mut [Event]) -> std::result::Result<usize, i32> {
        let Some(mut pairs) = self.queue(queue)?.enter() else { return Ok(0) };
        pairs.poll(&self.shared, events)
    }

    // The call is inlined into the slot of the table, also where a plugin's crate makes the table.
    #[inline]
    fn read_signal(&self, _: u32, id: u32) -> u64 {
        let total = self.shared.signals.read(id);
        debug_assert!(total.is_some(), "signal {id} is out of range");
        total.unwrap_or(0)
    }

    fn health(&self) -> Result<()> {
        self.shared.health.check(&self.team, |peer| {
            peer.map_or_else(|| self.setup().here(), |peer| self.link_name(peer))
        })
    }

    /// The device moves payloads by itself. This call counts signals, so that receives are posted
    /// again while no thread polls, and finds stalled connections.
    fn progress(&self) -> std::result::Result<bool, i32> {
        self.look_after_queues(Instant::now());
        Ok(self.shared.drive_signals())
    }

    fn link_name(&self, peer: u32) -> String {
        let here = self.setup().here();
        match self.routes.get(peer as usize).copied().flatten() {
            None => format!("{here}; not connected"),
            Some(route) => format!("{here}; {route}"),
        }
    }
}

/// Additions of the NIC cannot wait for a read-back: a config that demands one is refused, not
/// ignored.
fn check_flush(adapter: &Adapter, config: &VerbsConfig) -> Result<()> {
    let atomic = matches!(adapter.signals, SignalMode::Atomic);
    if !(atomic && matches!(config.flush, Flush::Always)) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Config,
        "open",
        "found flush = \"always\" with atomic signals; expected immediate ones",
    )
    .with_key("flush")
    .with_fix("set signals = \"immediate\", or flush = \"auto\""))
}

impl Verbs {
    fn queue(&self, queue: u32) -> std::result::Result<&Owned<QueuePairs>, i32> {
        self.queues.get(queue as usize).ok_or(abi::TY_INTERNAL)
    }

    fn setup(&self) -> Setup<'_> {
        Setup { adapter: &self.adapter, config: &self.config }
    }

    /// One queue with its queue pairs, ready to be connected.
    fn new_queue_pairs(&self, queue: u32, depth: u32) -> Result<QueuePairs> {
        let failed = |e| self.adapter.port.refused(e, DEPTHS);
        let cq = Cq::new(&self.adapter.port.context, depth * COMPLETIONS).map_err(failed)?;
        let receiver = self.shared.signals.receiver();
        let request = QpRequest {
            recv_cq: Arc::clone(receiver.map_or(&cq, |it| &it.cq)),
            send_cq: Arc::clone(&cq),
            srq: receiver.map(|it| Arc::clone(&it.srq)),
            depth: depth * REQUESTS,
            inline: INLINE,
        };
        let atomics = match self.adapter.signals {
            SignalMode::Immediate => 0,
            SignalMode::Atomic => ACCESS_REMOTE_ATOMIC,
        };
        let peers = self.team.world_ranks.iter().map(|_| {
            let qp = self.new_qp(&request, ACCESS_REMOTE_WRITE | ACCESS_REMOTE_READ | atomics);
            let qp = qp.map_err(failed)?;
            if qp.inline() < LEAST_INLINE {
                return Err(self.no_inline());
            }
            Ok(Peer::new(qp, first_packet()?, depth as usize))
        });
        Ok(QueuePairs::new(queue, depth as usize, peers.collect::<Result<_>>()?, cq))
    }

    fn new_qp(&self, request: &QpRequest, access: i32) -> Result<Qp<Init>, CallError> {
        Qp::new(&self.pd, request)?.init(self.adapter.port.number, self.config.pkey_index, access)
    }

    fn no_inline(&self) -> Error {
        let message = "the device takes no inline payload of 8 bytes; expected it for values";
        Error::new(ErrorKind::Unavailable, "open", message)
            .with_context("device", self.adapter.port.context.name())
            .with_fix("name another `device`")
    }

    /// The watchdog of queues that no thread polls.
    fn look_after_queues(&self, now: Instant) {
        let due = self.watchdog.try_lock().is_ok_and(|mut watchdog| watchdog.is_due(now));
        if !due {
            return;
        }
        // A locked queue is being polled, which checks it too.
        for mut pairs in self.queues.iter().filter_map(Owned::enter) {
            pairs.look_after(&self.shared, now);
        }
    }

    /// A queue pair connects once.
    fn check_unconnected(&mut self, peer: u32) -> Result<()> {
        let mut peers = self.queues.iter_mut().map(|queue| &queue.get_mut().peers[peer as usize]);
        if peers.all(|peer| matches!(peer.stage, Stage::Waiting(_))) {
            return Ok(());
        }
        Err(connected_before())
    }

    /// Connects the queue pairs of all queues to `peer`.
    fn join(&mut self, peer: u32, endpoint: Endpoint) -> Result<(), CallError> {
        let setup = Setup { adapter: &self.adapter, config: &self.config };
        let remote =
            Arc::new(Remote { windows: endpoint.windows.clone(), signals: endpoint.signals });
        let index = peer as usize;
        for (queue, pairs) in self.queues.iter_mut().zip(&endpoint.queue_pairs) {
            let peer = &mut queue.get_mut().peers[index];
            let Stage::Waiting(qp) = std::mem::replace(&mut peer.stage, Stage::Gone) else {
                continue;
            };
            let qp = setup.connect(qp, peer.psn, &endpoint, *pairs)?;
            let route =
                Route { number: peer.number, remote_number: pairs.number, gid: endpoint.gid };
            self.routes[index].get_or_insert(route);
            peer.stage = Stage::Connected(qp, Arc::clone(&remote));
        }
        Ok(())
    }

    /// Makes payloads visible before signals where completions do not (INV-1).
    fn read_back_if_needed(&mut self) -> Result<(), CallError> {
        let region = match self.config.flush {
            Flush::Auto => self.shared.memory.of_device(),
            Flush::Always => self.shared.memory.regions.first(),
        };
        let (Some(region), Some(receiver)) = (region, self.shared.signals.receiver()) else {
            return Ok(());
        };
        let source = WrRdma { remote_addr: region.address, rkey: region.mr.rkey() };
        let cq = Cq::new(&self.adapter.port.context, 1)?;
        let request = QpRequest {
            send_cq: Arc::clone(&cq),
            recv_cq: Arc::clone(&cq),
            srq: Some(Arc::clone(&receiver.srq)),
            depth: 1,
            inline: 0,
        };
        let qp = self.setup().connect_to_itself(self.new_qp(&request, ACCESS_REMOTE_READ)?)?;
        let mut word = Box::new(0_u64);
        // SAFETY: the word lives beside its region in the `ReadBack`, and no code reads it.
        let landing = unsafe { Mr::new(&self.pd, (&raw mut *word).cast(), 8, ACCESS_LOCAL_WRITE)? };
        let memory = ReadBackMemory { source, region: landing, word };
        let most = self.adapter.receive_depth(&self.config) as usize;
        self.shared.signals.read_back_first(ReadBack::new(qp, cq, memory, most));
        Ok(())
    }
}

impl Drop for Verbs {
    /// Waits a short time for posted commands, so that peers that still run receive them.
    fn drop(&mut self) {
        let Self { queues, shared, .. } = self;
        finish(queues, shared.health.deadline, |pairs| {
            pairs.ledger.under_way() > 0 && pairs.poll(shared, &mut []).is_ok()
        });
    }
}

/// The error for a second connect to a peer.
pub fn connected_before() -> Error {
    let message = "found a connect to this peer before, which may have failed; expected none";
    Error::new(ErrorKind::Internal, "connect", message).with_fix("open a new instance")
}

/// A random first packet sequence number: packets of an old connection must not fit a new one
/// (INV-8).
///
/// # Errors
/// The system has no random bits.
pub fn first_packet() -> Result<u32> {
    let bits = getrandom::u32().map_err(|e| {
        Error::new(ErrorKind::System, "draw a packet number", "no random bits").with_source(e)
    })?;
    Ok(bits & 0x00ff_ffff)
}
