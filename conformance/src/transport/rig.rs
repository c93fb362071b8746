//! The rig: one rank's transport with windows of its own. It opens as a communicator would open it,
//! without a kernel set.

use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use tokenyard_core::abi;
use tokenyard_core::bootstrap::{Liveness, World};
use tokenyard_core::config::{ComponentChoice, Config};
use tokenyard_core::host::{OpenTransport, Registry, TransportRef};
use tokenyard_core::transport::{
    Capabilities, Command, Event, NO_EVENT, Team, TransportNeeds, TransportOpen, Window,
};

use super::headway::Headway;
use super::memory::{Area, UNTOUCHED};
use super::teams::{Among, Teams, of_team};
use crate::device::DeviceMemory;
use crate::suite::Rank;

/// The most queues that a case opens if it asks for all: communicators use no more.
const MOST_QUEUES: u32 = 64;

/// The resources of a transport that a case uses; the ranks multiply the signals.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needs {
    /// Bytes of each window. With `fewer` set, there are fewer windows if the transport has fewer.
    pub(super) windows: &'static [u64],
    /// The case works with fewer windows.
    pub(super) fewer: bool,
    /// 0: as many as the transport has.
    pub(super) queues: u32,
    /// Signal ids per (queue, writer); 0: as many as the transport has.
    pub(super) kinds: u32,
    /// Smaller if the transport's limit is smaller.
    pub(super) queue_depth: u32,
    /// The teams that the ranks make; each rank opens the transport for its own.
    pub(super) teams: Teams,
}

impl Needs {
    /// One window of 64 KiB, one queue, two signals per writer.
    pub(super) const SMALL: Self = Self {
        windows: &[1 << 16],
        fewer: false,
        queues: 1,
        kinds: 2,
        queue_depth: 64,
        teams: Teams::World,
    };

    fn signals(&self, ranks: u32, capabilities: &Capabilities) -> u32 {
        match self.kinds {
            0 => capabilities.max_signals,
            kinds => kinds * self.queues(capabilities) * ranks,
        }
    }

    fn queues(&self, capabilities: &Capabilities) -> u32 {
        if self.queues == 0 { capabilities.max_queues.min(MOST_QUEUES) } else { self.queues }
    }

    fn windows(&self, capabilities: &Capabilities) -> u32 {
        let windows = self.windows.len() as u32;
        if self.fewer { windows.min(capabilities.max_windows) } else { windows }
    }

    /// The declared limit that is too small for `ranks` ranks, if there is one.
    pub(super) fn lack(&self, ranks: u32, capabilities: &Capabilities) -> Option<String> {
        [
            ("max_peers", ranks, capabilities.max_peers),
            ("max_queues", self.queues(capabilities).max(1), capabilities.max_queues),
            ("max_signals", self.signals(ranks, capabilities).max(1), capabilities.max_signals),
            ("max_windows", self.windows(capabilities).max(1), capabilities.max_windows),
            ("max_queue_depth", 1, capabilities.max_queue_depth),
        ]
        .into_iter()
        .find(|(_, wanted, most)| wanted > most)
        .map(|(name, wanted, most)| format!("{name} is {most}; the case needs {wanted}"))
    }

    /// The needs that the transport is opened with.
    pub(super) fn of_transport(
        &self,
        ranks: u32,
        capabilities: &Capabilities,
        deadline: Duration,
    ) -> TransportNeeds {
        let largest = self.windows.iter().copied().max().unwrap_or(0);
        TransportNeeds {
            windows: self.windows(capabilities),
            queues: self.queues(capabilities),
            signals: self.signals(ranks, capabilities),
            queue_depth: self.queue_depth.min(capabilities.max_queue_depth),
            largest_put: largest.min(capabilities.largest_put),
            deadline,
        }
    }
}

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

/// The rig cannot work here; no fault of the transport.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Lacking(pub(super) String);

/// The statuses of errors: `TY_MISMATCH` to `TY_UNAVAILABLE`.
pub(super) const STATUSES: RangeInclusive<i32> = abi::TY_MISMATCH..=abi::TY_UNAVAILABLE;

/// One queue, and the events that it gave and that no case has taken yet.
#[derive(Debug)]
pub(super) struct Queue {
    id: u32,
    events: Vec<Event>,
    /// Whether the case expects error events.
    expects_errors: bool,
}

impl Queue {
    fn new(id: u32) -> Self {
        Self { id, events: Vec::new(), expects_errors: false }
    }

    /// Posts the commands that the queue accepts now, and returns their number.
    pub(super) fn try_post(
        &self,
        transport: &OpenTransport,
        commands: &[Command],
    ) -> Result<usize> {
        // SAFETY: cases post commands inside their windows and needs, with one writing (peer, queue) per
        // signal, and do not change sources until they are done; the owner of the queue calls.
        unsafe { transport.post(self.id, commands) }.map_err(|status| {
            anyhow!("post on queue {}: found status {status}; expected 0", self.id)
        })
    }

    /// Posts all commands; drives the queue while it is full. It may be full for `deadline` at a time.
    pub(super) fn post(
        &mut self,
        transport: &OpenTransport,
        commands: &[Command],
        deadline: Duration,
    ) -> Result<()> {
        let mut left = commands;
        let mut headway = Headway::new(deadline);
        while !left.is_empty() {
            let accepted = self.try_post(transport, left)?;
            left = &left[accepted..];
            if accepted == 0 {
                self.drive(transport)?;
                let done = commands.len() - left.len();
                ensure!(
                    !headway.is_over(done as u64),
                    "queue {} accepts nothing although it is polled: found {done} of {} commands \
                     accepted, and no more within {deadline:?}",
                    self.id,
                    commands.len()
                );
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Polls once and stores the events.
    pub(super) fn drive(&mut self, transport: &OpenTransport) -> Result<()> {
        let mut events = [NO_EVENT; 32];
        let count = transport.poll(self.id, &mut events).map_err(|status| {
            anyhow!("poll of queue {}: found status {status}; expected 0", self.id)
        })?;
        for event in &events[..count] {
            let failed = event.kind != abi::TY_EVENT_DONE;
            ensure!(
                if failed { STATUSES.contains(&event.status) } else { event.status == abi::TY_OK },
                "found {event:?}; expected status 0 of a done event, or one of the statuses {STATUSES:?} of an \
                 error event"
            );
            if failed && !self.expects_errors {
                let why =
                    transport.health().err().map_or("health is good".into(), |e| e.to_string());
                bail!("a command failed: found {event:?}; expected a done event ({why})");
            }
            self.events.push(*event);
        }
        Ok(())
    }

    /// Takes the events.
    pub(super) fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Events that were not taken yet.
    pub(super) fn events(&self) -> &[Event] {
        &self.events
    }
}

/// The expected total of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Total {
    pub(super) queue: u32,
    pub(super) id: u32,
    pub(super) total: u64,
}

/// The most totals that an error lists.
const MOST_LISTED: usize = 64;

/// All totals that differ from the expected ones.
fn list_differences(expected: &[Total], found: &[u64]) -> String {
    let differ: Vec<String> = expected
        .iter()
        .zip(found)
        .filter(|(expected, found)| expected.total != **found)
        .map(|(Total { id, total, .. }, found)| {
            format!("signal {id}: found total {found}; expected {total}")
        })
        .collect();
    let listed = differ[..differ.len().min(MOST_LISTED)].join(", ");
    match differ.len().saturating_sub(MOST_LISTED) {
        0 => listed,
        more => format!("{listed}, and {more} more signals differ"),
    }
}

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
    let team = needs.teams.of(rank.world.rank(), rank.world.ranks());
    let ranks = team.world_ranks.len() as u32;
    let opened = needs.of_transport(ranks, rank.capabilities, deadline);
    let exchange = Among { world: rank.world, team: &team };
    let open = TransportOpen::new(&team, &opened).among(&exchange);
    let transport = component.open(&choice.table, &open).context("open; expected it to succeed")?;
    Ok((transport, opened))
}

/// Whether `what` holds on any rank. Collective.
pub(super) fn of_any(world: &World, what: bool) -> Result<bool> {
    let all = world.all_gather("of any", &[u8::from(what)])?;
    Ok(all.iter().any(|what| what == &[1]))
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
            // SAFETY: the memory lives in `windows`, which is dropped after the transport, or belongs to
            // the transport.
            unsafe { rig.transport.register(&window)? };
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
        for (peer, endpoint) in (0..).zip(endpoints) {
            self.transport
                .connect(peer, endpoint)
                .with_context(|| format!("connect to peer {peer}; expected it to succeed"))?;
        }
        self.transport.commit().context("commit; expected it to succeed")
    }

    /// Connects to `peer` alone, by any bytes. `peer` is number 0 of the team, or 1 for number 0: this rank is the only
    /// one that the order of calls may put before it.
    pub(super) fn connect_first(
        &mut self,
        peer: u32,
        data: &[u8],
    ) -> Result<tokenyard_core::Result<()>> {
        self.prepare(peer)?;
        Ok(self.transport.connect(peer, data))
    }

    /// Calls what comes before the connect of [`connect_first`](Self::connect_first).
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

    /// Accepts error events: the case expects them.
    pub(super) fn expect_errors(&mut self) {
        self.queues.iter_mut().for_each(|queue| queue.expects_errors = true);
    }

    /// Polls every queue once.
    pub(super) fn drive(&mut self) -> Result<()> {
        let transport = &self.transport;
        self.queues.iter_mut().try_for_each(|queue| queue.drive(transport))
    }

    /// Drives all queues until `ready`, at most for the deadline after the last event.
    pub(super) fn wait(
        &mut self,
        ready: impl Fn(&Self) -> bool,
        missing: impl Fn(&Self) -> String,
    ) -> Result<()> {
        self.wait_for_more(ready, || 0, missing)
    }

    /// As [`wait`](Self::wait); the deadline begins anew where `so_far` grows, too.
    fn wait_for_more(
        &mut self,
        ready: impl Fn(&Self) -> bool,
        so_far: impl Fn() -> u64,
        missing: impl Fn(&Self) -> String,
    ) -> Result<()> {
        let mut headway = Headway::new(self.needs.deadline);
        let mut round = 0_u32;
        while !ready(self) {
            self.drive()?;
            self.check_peers()?;
            let events: usize = self.queues.iter().map(|queue| queue.events.len()).sum();
            if headway.is_over(so_far().wrapping_add(events as u64)) {
                let deadline = self.needs.deadline;
                bail!("nothing more came within {deadline:?}: {}", missing(self));
            }
            round += 1;
            if round > 64 {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    /// Waits until the total of a signal is `total`; more is an error at once.
    pub(super) fn wait_signal(&mut self, queue: u32, id: u32, total: u64) -> Result<()> {
        self.wait_signals(&[Total { queue, id, total }])
    }

    /// Waits until all these totals are as expected; a larger total is an error at once. Where none grows for the
    /// deadline, the error lists all that differ.
    pub(super) fn wait_signals(&mut self, expected: &[Total]) -> Result<()> {
        // One reading decides: the payloads that a case checks next must have arrived by this very reading.
        let found = RefCell::new(vec![0; expected.len()]);
        self.wait_for_more(
            |rig| {
                let mut found = found.borrow_mut();
                for (found, Total { queue, id, total }) in found.iter_mut().zip(expected) {
                    if *found < *total {
                        *found = rig.transport.read_signal(*queue, *id);
                    }
                }
                let mut both = found.iter().zip(expected);
                both.clone().any(|(found, expected)| *found > expected.total)
                    || both.all(|(found, expected)| *found == expected.total)
            },
            || found.borrow().iter().fold(0_u64, |sum, total| sum.wrapping_add(*total)),
            |_| list_differences(expected, &found.borrow()),
        )?;
        let found = found.into_inner();
        ensure!(
            found.iter().zip(expected).all(|(found, expected)| *found == expected.total),
            "{}, no more",
            list_differences(expected, &found)
        );
        Ok(())
    }

    /// Returns an error if another rank has failed.
    pub(super) fn check_peers(&self) -> Result<()> {
        match self.liveness.first_loss() {
            None => Ok(()),
            Some(loss) => bail!("rank {} {}", loss.rank, loss.why),
        }
    }

    /// Waits until queue `queue` holds `count` events, and takes them.
    pub(super) fn wait_events(&mut self, queue: u32, count: usize) -> Result<Vec<Event>> {
        let queue = queue as usize;
        self.wait(
            |rig| rig.queues[queue].events.len() >= count,
            |rig| {
                let found = rig.queues[queue].events.len();
                format!("queue {queue}: found {found} events; expected {count}")
            },
        )?;
        Ok(self.queues[queue].take())
    }

    /// A barrier of all ranks that drives the queues meanwhile: without that, transports with manual
    /// progress move nothing for the others.
    pub(super) fn barrier(&mut self, topic: &str) -> Result<()> {
        let world = self.world;
        std::thread::scope(|scope| {
            let barrier = scope.spawn(move || world.barrier(topic));
            let mut driven = Ok(());
            while driven.is_ok() && !barrier.is_finished() {
                driven = self.drive();
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

    /// Ends a case: all ranks have finished it, no event is left, the transport is healthy.
    pub(super) fn end(mut self, healthy: bool) -> Result<()> {
        self.barrier("end of case")?;
        self.drive()?;
        for queue in &self.queues {
            let left = queue.events();
            ensure!(left.is_empty(), "queue {}: found {left:?}; expected no more events", queue.id);
        }
        if healthy {
            self.transport.health().context("health at the end; expected it to be good")?;
        }
        // No rank closes while another one still reads its queues.
        self.barrier("closing")
    }
}
