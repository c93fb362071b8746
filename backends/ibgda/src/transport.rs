//! The `ibgda` transport: one reliable connection of a ConnectX per queue and peer, this rank itself included, on which
//! this crate writes the work requests. The host posts on connections of its own; kernels on others, through the device
//! API.
//!
//! A put is an RDMA write. Its signal is an atomic addition behind it on the same connection.
//!
//! It shares `tokenyard_verbs::connection` with `verbs`: a change there touches both. Watched by the tests
//! in these files and `cli/tests/software_hca.rs`.

mod commands;
mod device_side;
mod fault;
mod gpu;
mod kernels;
mod memory;
mod queue;
mod shared;

use std::sync::{Arc, OnceLock};

use tokenyard_core::config::ComponentTable;
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, Team, Transport, TransportNeeds, TransportOpen,
    Window,
};
use tokenyard_core::{Error, ErrorKind, Result, abi};
use tokenyard_gpu::driver::Context as GpuContext;
use tokenyard_sys_mlx5::{CallError, Uar, UarKind};
use tokenyard_sys_verbs::Pd;
use tokenyard_verbs::connection::{Health, Memory, Owned, connected_before, finish, first_packet};
use tokenyard_verbs::endpoint::{Endpoint, Expected, Key, RemoteQp, SignalArea};
use tokenyard_verbs::port::{self, REQUESTS, no_port};
use tokenyard_verbs::rules;

use crate::config::{COMPONENT, IbgdaConfig};
use crate::connect::{NextHop, Setup, unreachable};
use crate::device::{Adapter, adapters};
use crate::device_api::DEPTHS;
use crate::endpoint::{self, WIRE};
use crate::pair::Parents;
use crate::queue_pair::QueuePair;
use commands::RemoteMemory;
use device_side::{DeviceSide, Parts};
use kernels::{Kernels, PairCount};
use memory::{SignalCount, Signals};
use queue::{Connections, Peer};
use shared::Shared;

/// The keys that lower the need for resources of the device.
const DEPTH_KEYS: &str = "`queue_pairs` or `depth`";

/// ConnectX, driven by kernels or by the host.
#[derive(Debug)]
pub struct Ibgda {
    /// Field order is drop order: connections end first, so that no write reaches windows or signals when their
    /// registrations end.
    queues: Vec<Owned<Connections>>,
    device_side: OnceLock<DeviceSide>,
    kernels: Option<Kernels>,
    signals: Option<Signals>,
    shared: Shared,
    uar: Arc<Uar>,
    pd: Arc<Pd>,
    adapter: Adapter,
    /// The GPU whose kernels post; none where they run on the host.
    gpu: Option<Arc<GpuContext>>,
    config: IbgdaConfig,
    team: Team,
    needs: TransportNeeds,
    /// The memory of each connected peer.
    remotes: Vec<Option<Arc<RemoteMemory>>>,
}

impl Transport for Ibgda {
    const NAME: &'static str = COMPONENT;
    const ABOUT: &'static str =
        "ConnectX whose work requests kernels write themselves (IBGDA); the host posts too";
    type Config = IbgdaConfig;

    fn configure(table: &ComponentTable) -> Result<IbgdaConfig> {
        IbgdaConfig::read(table)
    }

    fn probe(config: &IbgdaConfig) -> Result<Capabilities> {
        let (all, gpu) = (adapters(config, None)?, gpu::is_there());
        port::common(all.iter().map(|adapter| adapter.capabilities(config, gpu)))
    }

    fn open(config: IbgdaConfig, open: &TransportOpen<'_>) -> Result<Self> {
        let gpu = gpu::context(open.device)?;
        Self::open_on(config, open, gpu)
    }

    fn memory_needs(&self) -> MemoryNeeds {
        // Signals lie where windows lie, so all windows are of one kind (INV-1).
        let (kinds, handles) = match &self.gpu {
            Some(_) => (abi::TY_MEMORY_CUDA, abi::TY_HANDLE_DMABUF),
            None => (abi::TY_MEMORY_HOST, 0),
        };
        MemoryNeeds { size: size_of::<MemoryNeeds>(), kinds, handles, alignment: 64 }
    }

    unsafe fn register(&mut self, window: &Window) -> Result<()> {
        // SAFETY: the window outlives `self`, and its registration with it, by this function's contract.
        unsafe { self.shared.memory.add(&self.pd, window) }
    }

    fn endpoint(&mut self, peer: u32) -> Result<Vec<u8>> {
        self.complete()?;
        let signals = self.signals.as_ref().map(Signals::area).unwrap_or_default();
        let own = self.queues.iter_mut().map(|queue| {
            let peer = &queue.get_mut().peers[peer as usize];
            RemoteQp { number: peer.number(), psn: peer.psn }
        });
        let of_kernels = self.kernels.iter().flat_map(|kernels| kernels.to_peer(peer));
        let queue_pairs = own.chain(of_kernels).collect();
        let endpoint = Endpoint {
            signal_count: self.needs.signals,
            signals: SignalArea::Atomic { address: signals.0, key: Key(signals.1) },
            queue_pairs,
            windows: self.shared.memory.to_peers(),
            ..self.adapter.port.endpoint(&self.team, peer)
        };
        Ok(endpoint.to_bytes_of(&WIRE))
    }

    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        let rank = self.team.world_ranks[peer as usize];
        let endpoint = endpoint::parse(data).map_err(|e| e.with_rank(rank))?;
        let windows = self.shared.memory.lengths();
        let of_kernels = self.kernels.as_ref().map_or(0, |kernels| kernels.to_peer(peer).count());
        let expected = Expected {
            me: self.team.me,
            peer,
            ranks: self.team.world_ranks.len() as u32,
            queues: self.queues.len() + of_kernels,
            signals: self.needs.signals,
            link_layer: self.adapter.port.attr.link_layer,
            windows: &windows,
        };
        expected.check(&endpoint).map_err(|e| e.with_rank(rank))?;
        if self.remotes[peer as usize].is_some() {
            return Err(connected_before().with_rank(rank));
        }
        let link = self.link_name(peer);
        self.join(peer, &endpoint).map_err(|e| unreachable(e, rank, &link))
    }

    fn commit(&mut self) -> Result<()> {
        self.kernels.as_mut().map_or(Ok(()), Kernels::start)
    }

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32> {
        let Some(mut connections) = self.queue(queue)?.enter() else { return Ok(0) };
        Ok(connections.post(&self.shared, commands))
    }

    fn poll(&self, queue: u32, events: &mut [Event]) -> std::result::Result<usize, i32> {
        let Some(mut connections) = self.queue(queue)?.enter() else { return Ok(0) };
        Ok(connections.poll(&self.shared, events))
    }

    // The call is inlined into the slot of the table, also where a plugin's crate makes the table.
    #[inline]
    fn read_signal(&self, queue: u32, id: u32) -> u64 {
        let total = self.signals.as_ref().and_then(|signals| signals.read(queue, id));
        total.unwrap_or_else(|| {
            self.shared.health.fail(fault::Fault::Unreadable, None);
            0
        })
    }

    fn health(&self) -> Result<()> {
        if let Some(kernels) = &self.kernels {
            kernels.check(&self.shared);
        }
        self.shared
            .health
            .check(&self.team, |peer| peer.map_or_else(|| self.here(), |peer| self.link_name(peer)))
    }

    fn device_api(&self) -> Result<abi::TyDeviceApi> {
        if let Some(device_side) = self.device_side.get() {
            return Ok(device_side.device_api());
        }
        let made = self.make_device_side()?;
        Ok(self.device_side.get_or_init(|| made).device_api())
    }

    fn device_source() -> Result<abi::TyDeviceApi> {
        Ok(device_side::source())
    }

    fn link_name(&self, peer: u32) -> String {
        let here = self.here();
        match self.remotes.get(peer as usize).and_then(Option::as_ref) {
            None => format!("{here}; not connected"),
            Some(remote) => format!("{here}; to {}", std::net::Ipv6Addr::from(remote.gid)),
        }
    }
}

impl Ibgda {
    /// Opens the transport for kernels of this GPU, or for kernels on the host.
    ///
    /// # Errors
    /// As [`open`](Transport::open).
    pub fn open_on(
        config: IbgdaConfig,
        open: &TransportOpen<'_>,
        gpu: Option<Arc<GpuContext>>,
    ) -> Result<Self> {
        let TransportOpen { team, needs, .. } = *open;
        let adapter = adapters(&config, Some(team))?.pop().ok_or_else(no_port)?;
        let port = &adapter.port;
        // Kernels have as many as the host.
        let each = u64::from(needs.queues) * if gpu.is_some() { 2 } else { 1 };
        port.check_queue_pairs(team, each, "lower `queue_pairs`")?;
        rules::warn_of_silence(config.timeout, config.retry_count, needs.deadline);
        let failed = |e| port.refused(e, DEPTH_KEYS);
        port.context.make_events_nonblocking().map_err(failed)?;
        let pd = Pd::new(&port.context).map_err(failed)?;
        let uar = Arc::new(Uar::new(&adapter.devx, UarKind::Uncached).map_err(failed)?);
        let shared = Shared {
            memory: Memory::new(&pd)?,
            health: Health::new(
                port,
                team,
                needs.deadline,
                rules::shortest_silence(config.timeout, config.retry_count),
            ),
        };
        let mut this = Self {
            queues: Vec::with_capacity(needs.queues as usize),
            device_side: OnceLock::new(),
            kernels: None,
            signals: None,
            shared,
            uar,
            pd,
            adapter,
            gpu,
            config,
            team: team.clone(),
            needs: *needs,
            remotes: vec![None; team.world_ranks.len()],
        };
        for queue in 0..needs.queues {
            let connections = this.new_connections(queue)?;
            this.queues.push(Owned::new(connections));
        }
        Ok(this)
    }

    fn queue(&self, queue: u32) -> std::result::Result<&Owned<Connections>, i32> {
        self.queues.get(queue as usize).ok_or(abi::TY_INTERNAL)
    }

    /// The connections of a queue of the host.
    fn new_connections(&self, queue: u32) -> Result<Connections> {
        let failed = |e| self.adapter.port.refused(e, DEPTH_KEYS);
        let depth = self.needs.queue_depth;
        let requests = (depth * REQUESTS).next_power_of_two().max(*DEPTHS.start());
        let pd = self.adapter.devx.pd_number(&self.pd).map_err(failed)?;
        let peers = self.team.world_ranks.iter().map(|_| {
            let pair = QueuePair::new(&self.adapter.devx, &self.uar, pd, requests);
            let mut pair = pair.map_err(failed)?;
            if self.config.fence {
                pair.fence_additions();
            }
            Ok(Peer::new(pair, first_packet()?, depth as usize))
        });
        let peers = peers.collect::<Result<_>>()?;
        let first_signal = u64::from(queue) * u64::from(self.needs.signals);
        Ok(Connections::new(queue, depth as usize, first_signal, peers))
    }

    /// Makes what depends on the kind of the windows: signals, and the queue pairs of kernels.
    fn complete(&mut self) -> Result<()> {
        if self.signals.is_some() {
            return Ok(());
        }
        let count = SignalCount { queues: self.needs.queues, per_queue: self.needs.signals };
        let Some(gpu) = self.gpu.as_ref().filter(|_| self.shared.memory.of_device().is_some())
        else {
            self.signals = Some(Signals::on_host(&self.pd, count)?);
            return Ok(());
        };
        let failed = |e| self.adapter.port.refused(e, DEPTH_KEYS);
        let pd = self.adapter.devx.pd_number(&self.pd).map_err(failed)?;
        let parents = Parents { devx: &self.adapter.devx, uar: &self.uar, pd };
        let peers = self.team.world_ranks.len() as u32;
        let pairs = PairCount { peers, queues: self.needs.queues };
        self.kernels = Some(Kernels::new(gpu, &parents, &self.config, pairs)?);
        self.signals = Some(Signals::on_device(&self.pd, gpu, count)?);
        Ok(())
    }

    /// Connects the queue pairs of all queues to `peer`.
    fn join(&mut self, peer: u32, endpoint: &Endpoint) -> Result<(), CallError> {
        let setup = Setup { adapter: &self.adapter, config: &self.config };
        let remote = Arc::new(RemoteMemory {
            windows: endpoint.windows.clone(),
            signals: endpoint::signals(endpoint),
            gid: endpoint.gid,
        });
        let index = peer as usize;
        self.remotes[index] = Some(Arc::clone(&remote));
        let hop: NextHop<'_> = setup.next_hop(&self.pd, endpoint)?;
        let (own, of_kernels) = endpoint.queue_pairs.split_at(self.queues.len());
        for (queue, theirs) in self.queues.iter_mut().zip(own) {
            let peer = &mut queue.get_mut().peers[index];
            let ours = RemoteQp { number: peer.number(), psn: peer.psn };
            if let Some(pair) = &peer.pair {
                pair.connect(&setup.steps(ours, *theirs, &hop))?;
            }
            peer.remote = Some(Arc::clone(&remote));
        }
        let Some(kernels) = &self.kernels else { return Ok(()) };
        kernels.connect(peer, |queue, ours| setup.steps(ours, of_kernels[queue], &hop))
    }

    fn make_device_side(&self) -> Result<DeviceSide> {
        let missing = |message: &str, fix: &str| {
            Error::new(ErrorKind::Unsupported, "device_api", message).with_fix(fix)
        };
        let (Some(gpu), Some(kernels), Some(signals)) = (&self.gpu, &self.kernels, &self.signals)
        else {
            return Err(missing(
                "found no queue pairs of kernels; expected a GPU, and windows in its memory",
                "set use = \"cuda\" in [kernels]",
            ));
        };
        let remotes: Option<Vec<_>> = self.remotes.iter().cloned().collect();
        let remotes = remotes.ok_or_else(|| {
            missing("found a peer that is not connected; expected all", "connect all peers before")
        })?;
        DeviceSide::new(
            gpu,
            &Parts {
                kernels,
                memory: &self.shared.memory,
                signals,
                remotes: &remotes,
                queues: self.needs.queues,
                signal_count: self.needs.signals,
                fence: self.config.fence,
            },
        )
    }

    /// This rank's port and what was chosen, in one line for people.
    fn here(&self) -> String {
        let posts = match &self.kernels {
            None => "the host posts".to_owned(),
            Some(kernels) => kernels.to_string(),
        };
        format!("{}, atomic signals, {posts}", self.adapter.port)
    }
}

impl Drop for Ibgda {
    /// Waits a short time for posted commands, so that peers that still run receive them.
    fn drop(&mut self) {
        let Self { queues, shared, .. } = self;
        finish(queues, shared.health.deadline, |connections| {
            let busy = connections.ledger.under_way() > 0;
            if busy {
                connections.poll(shared, &mut []);
            }
            busy
        });
    }
}
