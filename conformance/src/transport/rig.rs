//! The rig: one rank's transport with windows of its own. It opens as a communicator would open it,
//! without a kernel set.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use tokenyard_core::abi;
use tokenyard_core::bootstrap::{Liveness, World};
use tokenyard_core::config::{ComponentChoice, ComponentTable, Config};
use tokenyard_core::host::{OpenTransport, Registry, TransportRef};
use tokenyard_core::transport::{
    Command, NO_COMMAND, NO_WINDOW, Team, TransportNeeds, TransportOpen, Window,
};

use super::memory::{Area, UNTOUCHED};
use super::needs::Needs;
use super::queue::{Queue, scribble};
use super::teams::{Among, of_team};
use crate::device::DeviceMemory;
use crate::suite::Rank;

/// The transport that carries the rows of `config`, chosen as bring-up would on one node.
pub(super) fn choose(config: &Config) -> Result<(TransportRef, &ComponentChoice)> {
    let registry = Registry::for_config(config)?;
    let mut last = anyhow!("the config names no transport");
    for choice in config.scale_up.iter().chain(&config.scale_out) {
        let component = registry.choose_transport(choice)?;
        match component.probe(&choice.table) {
            Ok(_) => return Ok((component, choice)),
            Err(error) => last = error.into(),
        }
        if config.scale_up.is_some() {
            break;
        }
    }
    Err(last)
}

/// A deadline of a case that waits for it, and what a busy machine adds to a call. Slow machines have longer ones.
pub(super) fn short(rank: &Rank<'_>) -> Duration {
    (rank.config.world.deadline / 10).max(Duration::from_secs(1))
}

/// Polls behind a failure, in which a transport would take itself for well again.
const QUIET_POLLS: u32 = 64;

/// The rig cannot work here; no fault of the transport.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Lacking(pub(super) String);

/// A rank of a case. Fields drop in order: the transport ends before its windows.
pub(super) struct Rig<'a> {
    pub(super) transport: OpenTransport,
    pub(super) windows: Vec<Area>,
    /// The windows as they were registered.
    pub(super) described: Vec<Window>,
    pub(super) queues: Vec<Queue>,
    pub(super) world: &'a Arc<World>,
    pub(super) needs: TransportNeeds,
    team: Team,
    /// The declarations of the transport: bits `TY_CAP_*`.
    flags: u64,
    liveness: Arc<Liveness>,
}

/// Opens the transport of the config on this rank.
pub(super) fn open_transport(
    rank: &Rank<'_>,
    needs: &Needs,
    deadline: Duration,
) -> Result<(OpenTransport, TransportNeeds)> {
    let (component, choice) = choose(rank.config)?;
    open_chosen(component, choice, rank, needs, deadline)
}

/// The same, of a transport that is loaded.
pub(super) fn open_chosen(
    component: TransportRef,
    choice: &ComponentChoice,
    rank: &Rank<'_>,
    needs: &Needs,
    deadline: Duration,
) -> Result<(OpenTransport, TransportNeeds)> {
    let mut team = needs.teams.of(rank.world.rank(), rank.world.ranks());
    let ranks = team.world_ranks.len() as u32;
    let opened = needs.of_transport(ranks, rank.capabilities, deadline);
    // Inputs of its own, which do not outlive the call.
    let table = ComponentTable::from_text(choice.table.text(), choice.table.file());
    let exchange = Among { world: rank.world, team: &team };
    let open = TransportOpen::new(&team, &opened).among(&exchange);
    let transport = component.open(&table, &open).context("open; expected it to succeed")?;
    scribble(&mut team.world_ranks, u32::MAX / 2);
    // It stays, so that nothing else lies in its place.
    std::mem::forget(team);
    Ok((transport, opened))
}

/// Whether `what` holds on any rank. Collective.
pub(super) fn of_any(world: &World, what: bool) -> Result<bool> {
    let all = world.all_gather("of any", &[u8::from(what)])?;
    Ok(all.iter().any(|what| what == &[1]))
}

/// A barrier of all ranks, beside which this rank drives.
pub(super) fn barrier_beside(
    world: &World,
    topic: &str,
    mut drive: impl FnMut() -> Result<()>,
) -> Result<()> {
    std::thread::scope(|scope| {
        let barrier = scope.spawn(move || world.barrier(topic));
        let mut driven = Ok(());
        while driven.is_ok() && !barrier.is_finished() {
            driven = drive();
            std::thread::sleep(Duration::from_micros(20));
        }
        if let Err(error) = &driven {
            // Without the report, the others would wait for this rank, and it would wait for them in
            // the barrier.
            world.report_failure(&format!("{error:#}"));
        }
        let barrier = barrier.join().map_err(|_| anyhow!("a barrier panicked"))?;
        driven.and(barrier.with_context(|| format!("barrier \"{topic}\"")))
    })
}

impl<'a> Rig<'a> {
    /// Opens the transport of the config on this rank and registers its windows. Collective where the transport's
    /// `open` is.
    pub(super) fn open(rank: &Rank<'a>, needs: &Needs, deadline: Duration) -> Result<Self> {
        let (transport, opened) = open_transport(rank, needs, deadline)?;
        let mut rig = Self {
            transport,
            windows: Vec::new(),
            described: Vec::new(),
            queues: (0..opened.queues).map(Queue::new).collect(),
            world: rank.world,
            needs: opened,
            team: needs.teams.of(rank.world.rank(), rank.world.ranks()),
            flags: rank.capabilities.flags,
            liveness: rank.world.liveness(),
        };
        let memory = rig.transport.memory_needs()?;
        let device = rig.device(rank)?;
        let owns = rank.capabilities.flags & abi::TY_CAP_OWNS_MEMORY != 0;
        for (id, bytes) in (0..opened.windows).zip(needs.windows) {
            let (area, window) = if owns {
                let window = rig.transport.alloc(id, *bytes)?;
                (Area::of_transport(&window, device.as_ref())?, window)
            } else {
                match &device {
                    Some(device) => Area::on_device(id, *bytes, &memory, device)?,
                    None => Area::new(id, *bytes, &memory)?,
                }
            };
            let mut given = window;
            // SAFETY: the memory lives in `windows`, which is dropped after the transport, or belongs to
            // the transport.
            unsafe { rig.transport.register(&given) }
                .context("register a window that memory_needs allows; expected it to succeed")?;
            scribble(std::slice::from_mut(&mut given), NO_WINDOW);
            rig.windows.push(area);
            rig.described.push(window);
        }
        Ok(rig)
    }

    /// The device of the windows, where the transport takes no host memory.
    ///
    /// # Errors
    /// [`Lacking`]: the config's kernel set has no such memory, or only kernels post. All ranks find the same.
    fn device(&self, rank: &Rank<'a>) -> Result<Option<Rc<DeviceMemory>>> {
        let kinds = rank.capabilities.memory_kinds;
        if kinds & abi::TY_MEMORY_HOST != 0 {
            return Ok(None);
        }
        let config = rank.config;
        let kernels = Registry::for_config(config)?.choose_kernels(&config.kernels)?;
        let works_on = kernels.probe(&config.kernels.table)?;
        if works_on & kinds == 0 {
            bail!(Lacking(format!(
                "the transport takes memory kinds {kinds:#x}; kernel set `{}` works on {works_on:#x}",
                kernels.name()
            )));
        }
        // SAFETY: no commands.
        if unsafe { self.transport.post(0, &[]) } == Err(abi::TY_UNSUPPORTED) {
            bail!(Lacking("only kernels post on this transport".to_owned()));
        }
        Ok(Some(Rc::new(DeviceMemory::open(config, rank.world)?)))
    }

    /// Connects the whole team. Collective.
    pub(super) fn bring_up(rank: &Rank<'a>, needs: &Needs) -> Result<Self> {
        Self::bring_up_within(rank, needs, rank.config.world.deadline)
    }

    /// Connects the whole team within `deadline`. Collective.
    pub(super) fn bring_up_within(
        rank: &Rank<'a>,
        needs: &Needs,
        deadline: Duration,
    ) -> Result<Self> {
        Self::open(rank, needs, deadline)?.connected()
    }

    /// Connects the whole team, of which every rank is open. Collective.
    pub(super) fn connected(mut self) -> Result<Self> {
        self.windows.iter().for_each(|window| window.fill(UNTOUCHED));
        let endpoints = self.exchange_endpoints()?;
        self.connect_to(&endpoints)?;
        self.barrier("connected")?;
        Ok(self)
    }

    /// Connects to all peers, by the endpoints that they wrote for this rank.
    pub(super) fn connect_to(&mut self, endpoints: &[Vec<u8>]) -> Result<()> {
        // They live until the commit, scribbled over.
        let mut given = endpoints.to_vec();
        for (peer, endpoint) in (0..).zip(&mut given) {
            self.transport
                .connect(peer, endpoint)
                .with_context(|| format!("connect to peer {peer}; expected it to succeed"))?;
            scribble(endpoint, 0xff);
        }
        self.transport.commit().context("commit; expected it to succeed")
    }

    /// Calls what comes before a first connect to `peer`, by any bytes. `peer` is number 0 of the team, or 1 for number
    /// 0: this rank is the only one that the order of calls may put before it.
    pub(super) fn prepare(&mut self, peer: u32) -> Result<()> {
        let me = self.me();
        ensure!(peer == u32::from(me == 0), "connect first: found rank {peer} on rank {me}");
        let mine: tokenyard_core::Result<Vec<_>> =
            (0..self.ranks()).map(|peer| self.transport.endpoint(peer)).collect();
        let mine = mine?;
        if me < peer { Ok(self.transport.connect(me, &mine[me as usize])?) } else { Ok(()) }
    }

    /// The endpoints that every rank wrote for this one. Collective.
    pub(super) fn exchange_endpoints(&mut self) -> Result<Vec<Vec<u8>>> {
        let mine: Result<Vec<_>, _> =
            (0..self.ranks()).map(|peer| self.transport.endpoint(peer)).collect();
        let mut outgoing = vec![Vec::new(); self.world.ranks() as usize];
        for (rank, endpoint) in self.team.world_ranks.iter().zip(mine?) {
            outgoing[*rank as usize] = endpoint;
        }
        Ok(of_team(&self.team, self.world.exchange("conformance endpoints", outgoing)?))
    }

    /// This rank, as an index into its team.
    pub(super) fn me(&self) -> u32 {
        self.team.me
    }

    /// Ranks of the team.
    pub(super) fn ranks(&self) -> u32 {
        self.team.world_ranks.len() as u32
    }

    /// The world rank of a peer, by which errors name it.
    pub(super) fn world_rank(&self, peer: u32) -> u32 {
        self.team.world_ranks[peer as usize]
    }

    /// Whether `TY_OP_GET` works.
    pub(super) fn can_get(&self) -> bool {
        self.flags & abi::TY_CAP_GET != 0
    }

    /// Whether the caller must drive the transport.
    pub(super) fn is_driven(&self) -> bool {
        self.flags & abi::TY_CAP_MANUAL_PROGRESS != 0
    }

    /// Whether puts of a queue to one peer arrive in order.
    pub(super) fn is_ordered(&self) -> bool {
        self.flags & abi::TY_CAP_ORDERED != 0
    }

    /// Whether commands to a lost peer end within the deadline.
    pub(super) fn is_bounded(&self) -> bool {
        self.flags & abi::TY_CAP_BOUNDED_PUT != 0
    }

    /// The rank behind this one, in a ring.
    pub(super) fn next(&self) -> u32 {
        (self.me() + 1) % self.ranks()
    }

    /// The rank before this one, in a ring.
    pub(super) fn previous(&self) -> u32 {
        (self.me() + self.ranks() - 1) % self.ranks()
    }

    /// The signal that `writer` raises on `queue`; `kind` is below [`Needs::kinds`]. One writer per
    /// id, as transports may rely on.
    pub(super) fn signal(&self, kind: u32, queue: u32, writer: u32) -> u32 {
        (kind * self.needs.queues + queue) * self.ranks() + writer
    }

    /// A put out of window 0 to the same place of the next rank's window 1, with an event here and a signal there.
    pub(super) fn put_to_next(&self, at: usize, bytes: usize) -> Command {
        Command {
            op: abi::TY_OP_PUT_SIGNAL,
            flags: abi::TY_FLAG_NOTIFY,
            peer: self.next(),
            signal: self.signal(0, 0, self.me()),
            add: 1,
            dst_window: 1,
            src_offset: at as u64,
            dst_offset: at as u64,
            bytes: bytes as u64,
            ..NO_COMMAND
        }
    }

    /// Bytes of a put that are at most `wanted` and that the transport can carry.
    pub(super) fn put_bytes(&self, wanted: usize) -> usize {
        wanted.min(usize::try_from(self.needs.largest_put).unwrap_or(usize::MAX))
    }

    /// The end of the time for a step that starts now.
    pub(super) fn until(&self) -> Instant {
        Instant::now() + self.needs.deadline
    }

    /// Posts all commands on a queue.
    pub(super) fn post(&mut self, queue: u32, commands: &[Command]) -> Result<()> {
        self.queues[queue as usize].post(&self.transport, commands, self.needs.deadline)
    }

    /// The last queue: another one than the first, where the case has two.
    pub(super) fn last_queue(&self) -> u32 {
        self.needs.queues - 1
    }

    /// Accepts error events: the case expects them.
    pub(super) fn expect_errors(&mut self) {
        self.queues.iter_mut().for_each(|queue| queue.expects_errors = true);
    }

    /// Polls every queue once.
    pub(super) fn drive(&mut self) -> Result<()> {
        let transport = &self.transport;
        self.queues.iter_mut().try_for_each(|queue| queue.drive(transport))
    }

    /// Returns an error if another rank has failed.
    pub(super) fn check_peers(&self) -> Result<()> {
        match self.liveness.first_loss() {
            None => Ok(()),
            Some(loss) => bail!("rank {} {}", loss.rank, loss.why),
        }
    }

    /// A barrier of all ranks that drives the queues meanwhile: without that, transports with manual
    /// progress move nothing for the others.
    pub(super) fn barrier(&mut self, topic: &str) -> Result<()> {
        barrier_beside(self.world, topic, || self.drive())
    }

    /// Closes all other peers, which may not have connected, before peer 0, which has connected to them: then no rank
    /// is left that could still look at what peer 0 sent. libfabric's provider `shm` crashes in the other order.
    /// Collective.
    pub(super) fn close_behind_others(self) -> Result<()> {
        let world = self.world;
        let last = (self.me() == 0).then_some(self);
        world.barrier("the others have closed")?;
        drop(last);
        Ok(world.barrier("all have closed")?)
    }

    /// Ends a case: all ranks have finished it, no event is left, the transport is healthy. Where it need not be, it is
    /// as bad as it was (INV-7).
    pub(super) fn end(mut self, healthy: bool) -> Result<()> {
        // A look at a transport that must be healthy could hide an error from the look behind the barrier.
        let was_bad = !healthy && self.transport.health().is_err();
        self.barrier("end of case")?;
        self.drive()?;
        for queue in &self.queues {
            let left = queue.events();
            ensure!(left.is_empty(), "queue {}: found {left:?}; expected no more events", queue.id);
        }
        if healthy {
            self.transport.health().context("health at the end; expected it to be good")?;
        }
        if was_bad {
            (0..QUIET_POLLS).try_for_each(|_| self.drive())?;
            ensure!(
                self.transport.health().is_err(),
                "a command failed and health is good at the end; expected it to stay bad (INV-7)"
            );
        }
        // No rank closes while another one still reads its queues.
        self.barrier("closing")?;
        let Self { transport, windows, .. } = self;
        drop(transport);
        // All of them, because one that is dropped without it would end the process.
        let looks: Vec<_> = windows.into_iter().map(Area::outlives_its_transport).collect();
        looks.into_iter().collect()
    }
}
