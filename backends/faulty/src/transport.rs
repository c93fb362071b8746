//! The transport that wraps another transport.

use std::time::{Duration, Instant};

use tokenyard_core::abi;
use tokenyard_core::config::ComponentTable;
use tokenyard_core::export::find_transport;
use tokenyard_core::host::OpenTransport;
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, NO_EVENT, Team, Transport, TransportOpen, Window,
};
use tokenyard_core::wait::monotonic_ns;
use tokenyard_core::{Error, ErrorKind, Result};

use crate::config::FaultyConfig;
use crate::fault::{Breakage, Fate};
use crate::queue::{Held, Queue, State};
use crate::rng::Rng;

/// The result of a hot call.
type Hot<T> = std::result::Result<T, i32>;

/// How long a drop tries to pass on held commands.
const FLUSH: Duration = Duration::from_secs(1);

/// Another transport, with faults.
#[derive(Debug)]
pub struct Faulty {
    inner: OpenTransport,
    memory: MemoryNeeds,
    config: FaultyConfig,
    team: Team,
    queue_depth: usize,
    queues: Vec<Queue>,
    breakage: Option<Breakage>,
}

impl Transport for Faulty {
    const NAME: &'static str = "faulty";
    const ABOUT: &'static str = "for tests only: reorders, delays and breaks another transport";
    type Config = FaultyConfig;

    fn configure(table: &ComponentTable) -> Result<FaultyConfig> {
        FaultyConfig::read(table)
    }

    fn probe(config: &FaultyConfig) -> Result<Capabilities> {
        let found = find_transport(&config.inner)?.probe(&config.table)?;
        // Kernels would bypass the faults of this transport.
        let mut lost = abi::TY_CAP_ORDERED | abi::TY_CAP_DEVICE_API;
        if !config.load_store {
            lost |= abi::TY_CAP_LOAD_STORE;
        }
        if config.fault.is_some() {
            // The first failure of this transport would hide those of other peers.
            lost |= abi::TY_CAP_MASKING;
        }
        if config.fault.is_some_and(|fault| fault.kind.is_silent()) {
            lost |= abi::TY_CAP_BOUNDED_PUT;
        }
        // Held commands are passed on when a thread drives the queue, its owner or another.
        let flags = found.flags & !lost | abi::TY_CAP_MANUAL_PROGRESS;
        Ok(Capabilities { flags, ..found })
    }

    fn open(config: FaultyConfig, open: &TransportOpen<'_>) -> Result<Self> {
        let TransportOpen { team, needs, .. } = *open;
        let mut inner = find_transport(&config.inner)?.open(&config.table, open)?;
        let breakage = match &config.fault {
            Some(fault) => Breakage::new(fault, team)?,
            None => None,
        };
        let rank = team.world_ranks.get(team.me as usize).copied().unwrap_or(team.me);
        let depth = needs.queue_depth.max(1) as usize;
        let queue = |queue| {
            let rng = Rng::new(config.seed, [rank, queue]);
            Queue::new(rng, config.reorder as usize + 1, depth)
        };
        Ok(Self {
            memory: inner.memory_needs()?,
            inner,
            queues: (0..needs.queues).map(queue).collect(),
            config,
            team: team.clone(),
            queue_depth: depth,
            breakage,
        })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        self.memory
    }

    fn alloc(&mut self, id: u32, bytes: u64) -> Result<Window> {
        self.inner.alloc(id, bytes)
    }

    unsafe fn register(&mut self, window: &Window) -> Result<()> {
        // SAFETY: the window outlives `self`, and the inner transport with it, by this function's
        // contract.
        unsafe { self.inner.register(window) }
    }

    fn endpoint(&mut self, peer: u32) -> Result<Vec<u8>> {
        self.inner.endpoint(peer)
    }

    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        self.inner.connect(peer, data)
    }

    fn commit(&mut self) -> Result<()> {
        self.inner.commit()
    }

    fn peer_address(&self, window: u32, peer: u32) -> Result<*mut u8> {
        if !self.config.load_store {
            let message = "load_store = false in the table of faulty";
            return Err(Error::new(ErrorKind::Unsupported, "peer_address", message));
        }
        self.inner.peer_address(window, peer)
    }

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> Hot<usize> {
        self.hang();
        let Some(mut state) = self.queue(queue)?.enter() else { return Ok(0) };
        let admitted = state.admitted(commands.len(), self.config.back_pressure);
        for (accepted, command) in commands[..admitted].iter().enumerate() {
            // SAFETY: by this function's contract, which covers held commands as well: they are not
            // done before the inner transport reports it.
            let result = unsafe { self.accept(queue, &mut state, command) };
            match result {
                Ok(true) => state.fresh = false,
                // Accepted commands are reported; the error is returned again by the next call.
                Err(status) if accepted == 0 => return Err(status),
                Ok(false) | Err(_) => return Ok(accepted),
            }
        }
        Ok(admitted)
    }

    fn poll(&self, queue: u32, events: &mut [Event]) -> Hot<usize> {
        self.hang();
        let Some(mut state) = self.queue(queue)?.enter() else { return Ok(0) };
        self.hand_some_on(queue, &mut state)?;
        state.fresh = true;
        if state.is_quiet(self.config.quiet) {
            return Ok(0);
        }
        let room = match self.config.quiet {
            0 => events.len(),
            // Only a part of the events.
            _ => events.len().min(1 + state.rng.below(events.len() as u64) as usize),
        };
        let own = state.take_own(&mut events[..room]);
        if own == room {
            return Ok(own);
        }
        Ok(own + self.inner.poll(queue, &mut events[own..room])?)
    }

    #[inline]
    fn read_signal(&self, queue: u32, id: u32) -> u64 {
        self.inner.read_signal(queue, id)
    }

    fn health(&self) -> Result<()> {
        self.hang();
        self.breakage.as_ref().map_or(Ok(()), Breakage::health)?;
        self.inner.health()
    }

    fn progress(&self) -> Hot<bool> {
        self.hang();
        let mut moved = false;
        for (id, queue) in (0..).zip(&self.queues) {
            if let Some(mut state) = queue.enter() {
                moved |= self.hand_some_on(id, &mut state)?;
            }
        }
        Ok(self.inner.progress()? || moved)
    }

    fn link_name(&self, peer: u32) -> String {
        format!("over {}", self.inner.link_name(peer))
    }
}

impl Faulty {
    fn hang(&self) {
        if let Some(breakage) = &self.breakage {
            breakage.hang();
        }
    }

    fn queue(&self, queue: u32) -> Hot<&Queue> {
        self.queues.get(queue as usize).ok_or(abi::TY_INTERNAL)
    }

    fn now_ns(&self) -> u64 {
        // Without delays, nothing depends on a clock.
        if self.config.delay_us == 0 { 0 } else { monotonic_ns() }
    }

    /// Accepts one command; false where there is no room for it.
    ///
    /// # Safety
    /// As [`Transport::post`].
    unsafe fn accept(&self, queue: u32, state: &mut State, command: &Command) -> Hot<bool> {
        if state.stuck() >= self.queue_depth {
            return Ok(false);
        }
        let most = self.config.reorder as usize;
        if state.held.len() > most && !self.hand_one_on(queue, state)? {
            return Ok(false);
        }
        let fate = self.breakage.as_ref().map_or(Fate::Pass, |b| b.fate(command, &self.team));
        match fate {
            Fate::Pass => {
                let delay = state.rng.below(u64::from(self.config.delay_us) * 1000 + 1);
                state.held.push(Held { command: *command, due_ns: self.now_ns() + delay });
                // The next call meets an error of this call again.
                while state.held.len() > most && self.hand_one_on(queue, state) == Ok(true) {}
            }
            Fate::Fail => {
                // SAFETY: by this function's contract.
                unsafe { self.half_do(queue, state, command)? };
                state.own.push_back(failed(queue, command));
            }
            Fate::Refuse => state.own.push_back(failed(queue, command)),
            Fate::Vanish => state.vanished += 1,
            Fate::Keep => state.kept.push(*command),
        }
        Ok(true)
    }

    /// Moves all of a failing command, its payload alone, or nothing. It moves at once, because the
    /// caller may reuse its source when it sees the error.
    ///
    /// # Safety
    /// As [`Transport::post`].
    unsafe fn half_do(&self, queue: u32, state: &mut State, command: &Command) -> Hot<()> {
        let silent = Command { flags: command.flags & !abi::TY_FLAG_NOTIFY, ..*command };
        let component = match (state.rng.below(3), command.op) {
            (0, _) => return Ok(()),
            (1, abi::TY_OP_PUT_SIGNAL) if command.bytes > 0 => {
                Command { op: abi::TY_OP_PUT, ..silent }
            }
            _ => silent,
        };
        // SAFETY: by this function's contract. Where the queue is full, nothing moves.
        unsafe { self.inner.post(queue, std::slice::from_ref(&component)) }.map(|_| ())
    }

    /// Passes on a random number of held commands; true if there were some.
    fn hand_some_on(&self, queue: u32, state: &mut State) -> Hot<bool> {
        if state.held.is_empty() {
            return Ok(false);
        }
        let count = state.rng.below(state.held.len() as u64 + 1);
        let mut moved = false;
        for _ in 0..count {
            if !self.hand_one_on(queue, state)? {
                break;
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Passes on one random held command; false if none may go or the inner queue is full.
    fn hand_one_on(&self, queue: u32, state: &mut State) -> Hot<bool> {
        let Some(index) = state.pick(self.now_ns()) else { return Ok(false) };
        let command = &state.held[index].command;
        // SAFETY: the caller that posted it guarantees the contract of `post` until it is done; the
        // lock of the queue excludes other threads from this queue of the inner transport.
        let accepted = unsafe { self.inner.post(queue, std::slice::from_ref(command))? };
        if accepted == 1 {
            state.held.swap_remove(index);
        }
        Ok(accepted == 1)
    }

    /// Passes on all commands in `held` and `kept` of a queue, while the inner transport accepts
    /// them.
    fn flush(&self, queue: u32, state: &mut State, until: Instant) -> Hot<()> {
        let kept = std::mem::take(&mut state.kept);
        state.held.extend(kept.into_iter().map(|command| Held { command, due_ns: 0 }));
        state.held.iter_mut().for_each(|held| held.due_ns = 0);
        let mut events = [NO_EVENT; 64];
        while !state.held.is_empty() && Instant::now() < until {
            if !self.hand_one_on(queue, state)? {
                self.inner.poll(queue, &mut events)?;
                std::thread::yield_now();
            }
        }
        Ok(())
    }
}

impl Drop for Faulty {
    /// Accepted commands are sent, as a NIC sends them whatever happens to its owner; unless this
    /// rank has stopped.
    fn drop(&mut self) {
        if self.breakage.as_ref().is_some_and(Breakage::has_stopped) {
            return;
        }
        let until = Instant::now() + FLUSH;
        let mut queues = std::mem::take(&mut self.queues);
        for (id, queue) in (0..).zip(&mut queues) {
            // If the inner transport accepts nothing any more, there is no caller left to report it
            // to.
            let _ = self.flush(id, queue.state_mut(), until);
        }
    }
}

fn failed(queue: u32, command: &Command) -> Event {
    Event {
        kind: abi::TY_EVENT_ERROR,
        queue,
        peer: command.peer,
        status: abi::TY_TRANSPORT,
        tag: command.tag,
    }
}
