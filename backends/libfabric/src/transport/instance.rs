//! One instance: its rails and queues, its bring-up and its shutdown.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use tokenyard_core::abi;
use tokenyard_core::transport::{Command, Event, Team, TransportNeeds, Window};
use tokenyard_core::{Error, ErrorKind, Result};
use tokenyard_sys_fabric::Library;
use tokenyard_sys_fabric::consts::*;

use super::Settings;
use super::backlog::Backlog;
use super::datum::Datum;
use super::info::Info;
use super::objects::{Memory, Objects, failed};
use super::queue::{Own, Queue, Slots};
use super::rail::{Attempt, Mirror, Rail, RailOptions, State};
use super::shared::{LocalWindow, Pages, RECORD_STRIDE, Shared};
use super::wire::{Endpoint, Extent, RailEndpoint};
use crate::config::Flush;

/// Commands that one rail gets before the next rail's turn.
const BATCH: usize = 16;
/// Completions that may wait in addition to those of this rank's own commands.
const ARRIVALS: usize = 4096;
/// Errors about what this process has none left of.
const SHORTAGES: [Errno; 4] = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS];
/// How long `drop` waits for posted commands, and `connect` for a greeting to be sent.
const FAREWELL: Duration = Duration::from_millis(500);

/// Indices of a rail's regions.
const MAILBOX_REGION: usize = 0;
pub(super) const STAGING_REGION: usize = 1;

/// The region of a window.
#[inline]
pub(super) fn window_region(window: u16) -> usize {
    STAGING_REGION + 1 + window as usize
}

/// An open transport. Fields drop in order: the rails, through which peers write, before the
/// memory.
#[derive(Debug)]
pub(super) struct Instance {
    pub(super) library: &'static Library,
    rails: Box<[Rail]>,
    all_rails: Box<[usize]>,
    queues: Box<[Queue]>,
    depth: u32,
    /// A record per slot: values to send.
    pub(super) staging: Pages,
    pub(super) shared: Shared,
    provider: String,
    /// The provider is a layer over connections.
    pub(super) layered: bool,
    pub(super) get: bool,
    flush: Flush,
    /// The first window whose payloads need a read-back, which reads its first bytes.
    mirrored: Option<Memory>,
    /// Most bytes that all rails can inject.
    pub(super) inject_bytes: u64,
    /// All windows are host memory.
    pub(super) host_only: bool,
    deadline: Duration,
    pub(super) farewell: Duration,
    /// The description of the link to each peer, for diagnoses.
    links: Vec<String>,
}

impl Instance {
    pub(super) fn open(
        infos: Vec<Info>,
        settings: &Settings,
        team: &Team,
        needs: &TransportNeeds,
    ) -> Result<Self> {
        let library = infos[0].library();
        let inject_bytes = infos.iter().map(Info::inject_bytes).min().unwrap_or(0) as u64;
        let slots = Slots::new(needs.queues, needs.queue_depth);
        let records = needs.queues as usize * needs.queue_depth as usize;
        let shared = Shared::new(team, slots, needs.signals, infos.len());
        // One more record is the destination of read-backs.
        let staging = Pages::new((records + 1) * RECORD_STRIDE);
        let provider = infos[0].provider();
        let peers = shared.ranks();
        let options = RailOptions { peers, patience: needs.deadline, spare: staging.base() };
        let rails: Box<[Rail]> = infos
            .into_iter()
            .enumerate()
            .map(|(index, info)| {
                let mut objects = Objects::open(info, peers as usize, records + ARRIVALS)?;
                for (pages, access) in [(&shared.mailboxes, FI_REMOTE_WRITE), (&staging, FI_WRITE)]
                {
                    let (base, bytes) = (pages.base(), pages.bytes());
                    let memory =
                        Memory { base, bytes, interface: 0, device: 0, dmabuf: None, access };
                    // SAFETY: the pages live as long as the instance, whose rails are dropped first.
                    unsafe { objects.register(&memory)? };
                }
                Ok(Rail::new(index, objects, options))
            })
            .collect::<Result<_>>()?;
        let backlog =
            || (settings.config.proxy_threads > 0).then(|| Backlog::new(needs.queue_depth, peers));
        let queue = |id| Queue::new(id, needs.queue_depth, backlog());
        let queues = (0..needs.queues).map(queue).collect();
        let links = vec![format!("{provider}, not connected"); peers as usize];
        Ok(Self {
            library,
            all_rails: (0..rails.len()).collect(),
            rails,
            queues,
            depth: needs.queue_depth,
            staging,
            shared,
            layered: provider.contains(';'),
            provider,
            get: settings.config.get,
            flush: settings.config.flush,
            mirrored: None,
            inject_bytes,
            host_only: true,
            deadline: needs.deadline,
            farewell: FAREWELL,
            links,
        })
    }

    /// # Safety
    /// As `Transport::register`.
    pub(super) unsafe fn register(&mut self, window: &Window) -> Result<()> {
        let interface = match window.kind {
            abi::TY_MEMORY_CUDA => FI_HMEM_CUDA,
            abi::TY_MEMORY_HIP => FI_HMEM_ROCR,
            _ => 0,
        };
        let get = if self.get { FI_READ | FI_REMOTE_READ } else { 0 };
        let memory = Memory {
            base: window.pointer,
            bytes: window.bytes as usize,
            interface,
            device: u64::try_from(window.device).unwrap_or(0),
            dmabuf: (window.handle == abi::TY_HANDLE_DMABUF && window.fd >= 0)
                .then_some((window.fd, window.fd_offset)),
            access: FI_WRITE | FI_REMOTE_WRITE | get,
        };
        for rail in &mut self.rails {
            // SAFETY: the window outlives this instance, by this function's contract.
            unsafe { rail.get_mut().outbound.objects.register(&memory)? };
        }
        let local = LocalWindow::new(window);
        self.host_only &= local.is_host();
        if self.mirrored.is_none() && (self.flush == Flush::Always || !local.is_host()) {
            let bytes = memory.bytes.min(size_of::<u64>());
            self.mirrored = Some(Memory { bytes, access: FI_REMOTE_READ, ..memory });
        }
        self.shared.windows.push(local);
        Ok(())
    }

    pub(super) fn endpoint(&mut self) -> Result<Vec<u8>> {
        let windows = self.extents();
        let regions = (0..self.shared.windows.len() as u16)
            .map(window_region)
            .chain([MAILBOX_REGION])
            .collect::<Vec<_>>();
        let rails = self.rails.iter_mut().map(|rail| {
            let objects = &rail.get_mut().outbound.objects;
            let keys = regions.iter().map(|region| objects.key(*region)).collect();
            Ok(RailEndpoint { address: objects.address()?, keys })
        });
        let endpoint = Endpoint {
            rank: self.shared.team.me,
            ranks: self.shared.ranks(),
            provider: self.provider.clone(),
            rails: rails.collect::<Result<_>>()?,
            windows,
        };
        Ok(endpoint.to_bytes())
    }

    /// This rank's windows, then its mailboxes, as peers address them.
    fn extents(&mut self) -> Vec<Extent> {
        let mode = self.rails[0].get_mut().outbound.objects.info.mr_mode();
        let extent = |base: *mut u8, bytes: u64| Extent {
            base: if mode & FI_MR_VIRT_ADDR != 0 { base as u64 } else { 0 },
            bytes,
        };
        let windows = self.shared.windows.iter();
        let mut extents: Vec<_> = windows.map(|w| extent(w.base(), w.bytes())).collect();
        let mailboxes = &self.shared.mailboxes;
        extents.push(extent(mailboxes.base(), mailboxes.bytes() as u64));
        extents
    }

    pub(super) fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        let endpoint = Endpoint::parse(data)?;
        self.compare(peer, &endpoint)?;
        for (rail, theirs) in self.rails.iter_mut().zip(&endpoint.rails) {
            rail.get_mut().outbound.learn(peer, &endpoint.windows, theirs)?;
        }
        self.links[peer as usize] = self.describe(&endpoint);
        if peer == self.shared.team.me {
            return self.read_back_if_needed();
        }
        self.greet(peer)
    }

    /// Makes payloads visible before signals where completions do not (INV-1). This rank is
    /// connected to itself. The window is registered once more, with a key that peers do not
    /// receive.
    fn read_back_if_needed(&mut self) -> Result<()> {
        let Some(window) = self.mirrored else { return Ok(()) };
        let me = self.shared.team.me;
        let landing = self.staging.record(self.queues.len() * self.depth as usize).cast::<u8>();
        let bytes = size_of::<u64>();
        for rail in &mut self.rails {
            let state = rail.get_mut();
            let virtual_addresses = state.outbound.objects.info.mr_mode() & FI_MR_VIRT_ADDR != 0;
            let base = if virtual_addresses { window.base as u64 } else { 0 };
            let here = Memory {
                base: landing,
                bytes,
                interface: 0,
                device: 0,
                dmabuf: None,
                access: FI_READ,
            };
            // SAFETY: the window outlives this instance, by the contract of `register`; the pages live
            // as long as the instance, whose rails are dropped first.
            let (source, region) = unsafe {
                (state.outbound.objects.register(&window)?, state.outbound.objects.register(&here)?)
            };
            state.read_back_first(me, Mirror { source, base, landing, region }, ARRIVALS);
        }
        Ok(())
    }

    /// Once all peers are connected, no process opens the memory of the provider `shm` by its name
    /// any more. So the name is removed now, and nothing remains if this process is killed.
    pub(super) fn forget_names(&mut self) {
        const PREFIX: &[u8] = b"fi_shm://";
        for rail in &mut self.rails {
            let address = rail.get_mut().outbound.objects.address().unwrap_or_default();
            let name = address.strip_prefix(PREFIX).and_then(|name| name.strip_suffix(&[0]));
            if let Some(name) = name.and_then(|name| std::str::from_utf8(name).ok())
                && !name.contains('/')
                && let Err(error) = std::fs::remove_file(Path::new("/dev/shm").join(name))
            {
                tracing::debug!("the shared memory {name} keeps its name: {error}");
            }
        }
    }

    /// Compares everything that must be equal on all ranks.
    fn compare(&mut self, peer: u32, endpoint: &Endpoint) -> Result<()> {
        let bytes = |extents: &[Extent]| extents.iter().map(|e| e.bytes).collect::<Vec<_>>();
        let (theirs, ours) = (bytes(&endpoint.windows), bytes(&self.extents()));
        let different = [
            ("rank", endpoint.rank.to_string(), peer.to_string()),
            ("ranks in the team", endpoint.ranks.to_string(), self.shared.ranks().to_string()),
            ("provider", endpoint.provider.clone(), self.provider.clone()),
            ("rails", endpoint.rails.len().to_string(), self.rails.len().to_string()),
            ("bytes of windows", format!("{theirs:?}"), format!("{ours:?}")),
        ];
        match different.into_iter().find(|(_, found, expected)| found != expected) {
            None => Ok(()),
            Some((what, found, expected)) => Err(Error::new(
                ErrorKind::Protocol,
                "connect",
                format!("{what}: found {found}; expected {expected}"),
            )
            .with_fix("give all ranks the same provider and as many rails each")),
        }
    }

    fn describe(&mut self, theirs: &Endpoint) -> String {
        let mut text = String::new();
        for (rail, theirs) in self.rails.iter_mut().zip(&theirs.rails) {
            let state = rail.get_mut();
            let own = state.outbound.objects.address().unwrap_or_default();
            let (from, to) =
                (state.outbound.objects.words(&own), state.outbound.objects.words(&theirs.address));
            let gap = if text.is_empty() { "" } else { "; " };
            text += &format!("{gap}{} {from} -> {to}", state.interface());
        }
        text
    }

    /// Waits until this rank has received the greeting of `peer` on every rail, and until its own greetings
    /// are sent. After that the peer receives them even if this rank does not drive its rails. Ranks connect
    /// to their peers in ascending order, so no ring of ranks can wait for one another.
    fn greet(&mut self, peer: u32) -> Result<()> {
        let until = Instant::now() + self.deadline;
        let mut steps = vec![Greeting::Unsent; self.rails.len()];
        let mut heard = None;
        loop {
            let (mut silent, mut leaving) = (0, false);
            for (rail, step) in self.rails.iter_mut().zip(&mut steps) {
                let state = rail.get_mut();
                if let Err(error) = step.go_on(state, peer, self.shared.team.me) {
                    return Err(self.unreachable(peer, error));
                }
                state.drive(&self.shared);
                let unsent = *step == Greeting::Unsent;
                silent += usize::from(unsent || !state.outbound.peers[peer as usize].greeted);
                leaving |= *step != Greeting::Followed || state.outbound.fence_is_out();
            }
            if silent == 0 {
                // A provider that needs an answer of the peer may get none, as the peer may not
                // drive its rails by now.
                let heard = *heard.get_or_insert_with(Instant::now);
                if !leaving || self.delivers() || heard.elapsed() >= self.farewell {
                    return Ok(());
                }
            }
            self.shared.health()?;
            if Instant::now() >= until {
                return Err(self.unanswered(peer, silent));
            }
            std::thread::yield_now();
        }
    }

    #[cold]
    fn unanswered(&self, peer: u32, silent: usize) -> Error {
        let message = format!(
            "found {silent} of {} rails silent after {:?}; expected an answer on each",
            self.rails.len(),
            self.deadline
        );
        Error::new(ErrorKind::Deadline, "connect", message)
            .with_rank(self.shared.team.world_ranks[peer as usize])
            .with_context("link", &self.links[peer as usize])
            .with_fix("look whether the addresses reach each other, and at the firewall")
    }

    /// Whether the provider delivers accepted writes at once, as `shm` does. One more write would
    /// touch a peer's memory, which may be unmapped by now if the peer is a thread of this process.
    fn delivers(&self) -> bool {
        self.provider == "shm"
    }

    fn unreachable(&self, peer: u32, error: i32) -> Error {
        if SHORTAGES.iter().any(|errno| errno.raw_os_error() == error) {
            // This process lacks it: no peer is to blame.
            return failed(self.library, "connect", error)
                .with_context("link", &self.links[peer as usize]);
        }
        Error::new(ErrorKind::Transport, "connect", self.library.strerror(error))
            .with_rank(self.shared.team.world_ranks[peer as usize])
            .with_context("link", &self.links[peer as usize])
    }

    /// The link to a peer, for diagnoses: provider, interface, both addresses.
    pub(super) fn link_name(&self, peer: u32) -> &str {
        self.links.get(peer as usize).map_or("no such peer", String::as_str)
    }

    pub(super) fn queue(&self, queue: u32) -> Result<std::sync::MutexGuard<'_, Own>, i32> {
        self.queues.get(queue as usize).and_then(Queue::enter).ok_or(abi::TY_INTERNAL)
    }

    /// Posts the first n of `commands` on some of the rails, a batch on each in turn, and returns n.
    ///
    /// # Safety
    /// As `Transport::post`.
    pub(super) unsafe fn post(
        &self,
        queue: u32,
        commands: &[Command],
        rails: &[usize],
    ) -> Result<usize, i32> {
        let mut own = self.queue(queue)?;
        let mut accepted = 0;
        for batch in commands.chunks(BATCH) {
            own.turn += 1;
            let rail = &self.rails[rails[own.turn % rails.len()]];
            let Some(mut state) = rail.enter() else { break };
            // SAFETY: by this function's contract.
            let posted = unsafe { self.post_batch(&mut own, &mut state, batch) };
            accepted += posted;
            if posted < batch.len() {
                break;
            }
        }
        Ok(accepted)
    }

    /// Posts commands that wait for their peers, if these accept them now; a batch at most.
    pub(super) fn post_backlog(&self, queue: u32, rails: &[usize]) -> Result<(), i32> {
        let mut own = self.queue(queue)?;
        if own.backlog().is_none() {
            return Ok(());
        }
        own.turn += 1;
        if let Some(mut state) = self.rails[rails[own.turn % rails.len()]].enter() {
            self.retry(&mut own, &mut state, BATCH);
        }
        Ok(())
    }

    /// The events of a queue whose completions have been read.
    pub(super) fn take_events(&self, queue: u32, events: &mut [Event]) -> Result<usize, i32> {
        let mut own = self.queue(queue)?;
        own.collect(&self.shared.slots);
        Ok(own.take_events(events))
    }

    /// Drives the given rails; a rail that another thread is using is left to that thread. Returns
    /// whether something moved.
    #[inline]
    pub(super) fn progress(&self, rails: &[usize]) -> bool {
        rails.iter().fold(false, |moved, rail| {
            let state = self.rails[*rail].try_enter();
            state.is_some_and(|mut state| state.drive(&self.shared)) || moved
        })
    }

    /// A rail that no other thread is using.
    #[cfg(test)]
    pub(super) fn rail(&self, rail: usize) -> std::sync::MutexGuard<'_, State> {
        self.rails[rail].try_enter().unwrap()
    }

    /// Indices of all rails.
    pub(super) fn all_rails(&self) -> &[usize] {
        &self.all_rails
    }

    /// The number of queues, and the most commands in flight on one.
    pub(super) fn queues(&self) -> (u32, u32) {
        (self.queues.len() as u32, self.depth)
    }

    /// The processors near a rail's NIC; empty where they are unknown.
    pub(super) fn cpus(&self, rail: usize) -> Vec<u32> {
        let state = self.rails[rail].try_enter();
        state.map(|state| state.outbound.objects.info.cpus()).unwrap_or_default()
    }

    /// Ends the access of peers through a rail (INV-8).
    pub(super) fn close(&self, rail: usize) {
        self.rails[rail].close();
    }

    /// Waits a bounded time for posted commands: until they are done, and for those without a
    /// completion until a fence after them is done. It does not wait for peers that have left, and
    /// notifies those that stay that this rank leaves. A rank that closes needs no credits. Returns
    /// whether all has ended.
    pub(super) fn flush(&mut self) -> bool {
        let until = Instant::now() + self.farewell;
        // The farewells of peers that have left may be among completions that were not read yet.
        self.progress(&self.all_rails);
        let (me, delivers) = (self.shared.team.me, self.delivers());
        let mut fences: Vec<(usize, u32)> = Vec::new();
        for (index, rail) in self.rails.iter_mut().enumerate().filter(|_| !delivers) {
            let state = rail.get_mut();
            state.forgive();
            state.outbound.say_goodbye(me);
            let peers = (0..).zip(&state.outbound.peers).filter(|(_, peer)| peer.unflushed);
            fences.extend(peers.map(|(peer, _)| (index, peer)));
        }
        loop {
            self.progress(&self.all_rails);
            let shared = &self.shared;
            let busy = self.queues.iter().filter_map(Queue::enter).any(|mut own| {
                own.collect(&shared.slots);
                !own.is_idle()
            });
            fences.retain(|(rail, peer)| {
                let state = self.rails[*rail].get_mut();
                !state.outbound.peers[*peer as usize].left
                    && state.outbound.post_fence(*peer) == Attempt::Full
            });
            let fenced = self.rails.iter_mut().all(|rail| !rail.get_mut().outbound.fence_is_out());
            if !busy && fenced && fences.is_empty() {
                return true;
            }
            if Instant::now() >= until {
                tracing::debug!("closed with commands that were not done: {:?}", self.farewell);
                return false;
            }
            std::thread::yield_now();
        }
    }
}

/// The state of a greeting on one rail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Greeting {
    Unsent,
    Sent,
    /// A fence was posted after it, or cannot be.
    Followed,
}

impl Greeting {
    /// Takes the next step, if it can be taken now. `Err`: a positive error number.
    fn go_on(&mut self, state: &mut State, peer: u32, me: u32) -> Result<(), i32> {
        match *self {
            Self::Unsent => match state.outbound.send(peer, Datum::Hello(me)) {
                Attempt::Posted => *self = Self::Sent,
                Attempt::Full | Attempt::GivenUp => {}
                Attempt::Failed(error) => return Err(error),
                Attempt::Unknown => return Err(FI_ENOKEY),
            },
            Self::Sent if state.outbound.post_fence(peer) != Attempt::Full => {
                *self = Self::Followed
            }
            Self::Sent | Self::Followed => {}
        }
        Ok(())
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        self.flush();
    }
}
