//! Puts through the transport: its hot calls, without a communicator.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::{ComponentChoice, Config};
use tokenyard_core::host::{OpenTransport, Registry};
use tokenyard_core::transport::{
    Command, NO_COMMAND, NO_EVENT, NO_WINDOW, Team, TransportNeeds, TransportOpen, Window,
};

use super::{DEPTH, LARGE, PATIENCE, SMALL};

/// Memory that every fabric accepts.
#[derive(Clone)]
#[repr(align(4096))]
struct Page {
    _bytes: [u8; 4096],
}

/// An open transport between two ranks, with one window.
pub(super) struct Through {
    /// Dropped first: it uses the memory.
    transport: OpenTransport,
    _memory: Vec<Page>,
    peer: u32,
    /// Posted commands, and ended commands.
    posted: u64,
    done: u64,
    /// The total of the only signal that was waited for.
    seen: u64,
}

impl Through {
    pub(super) fn open(world: &World, config: &Config, choice: &ComponentChoice) -> Result<Self> {
        let component = Registry::for_config(config)?.choose_transport(choice)?;
        let team = Team::world(world.rank(), world.ranks());
        let needs = TransportNeeds {
            windows: 1,
            queues: 1,
            signals: world.ranks(),
            queue_depth: DEPTH as u32,
            largest_put: LARGE as u64,
            deadline: PATIENCE,
        };
        let mut transport =
            component.open(&choice.table, &TransportOpen::new(&team, &needs).among(world))?;
        let memory = transport.memory_needs()?;
        ensure!(
            memory.handles == 0
                && memory.alignment <= 4096
                && memory.kinds & abi::TY_MEMORY_HOST != 0,
            "found {memory:?}; expected needs that plain host memory fits"
        );
        let mut pages = vec![Page { _bytes: [0; 4096] }; 2 * DEPTH * LARGE / 4096];
        let window = Window {
            kind: abi::TY_MEMORY_HOST,
            pointer: pages.as_mut_ptr().cast(),
            bytes: (2 * DEPTH * LARGE) as u64,
            ..NO_WINDOW
        };
        // SAFETY: the pages are dropped after the transport (order of fields, and of locals here).
        unsafe { transport.register(&window)? };
        let outgoing = (0..world.ranks()).map(|peer| transport.endpoint(peer));
        let incoming = world.exchange("link endpoints", outgoing.collect::<Result<_, _>>()?)?;
        for (peer, endpoint) in (0..).zip(&incoming) {
            transport.connect(peer, endpoint)?;
        }
        transport.commit()?;
        world.barrier("link connected")?;
        let peer = 1 - world.rank();
        Ok(Self { transport, _memory: pages, peer, posted: 0, done: 0, seen: 0 })
    }

    pub(super) fn name(&self) -> String {
        self.transport.link_name(self.peer)
    }

    /// Whether only the caller drives the transport.
    pub(super) fn is_inline(&self) -> bool {
        self.transport.capabilities().flags & abi::TY_CAP_MANUAL_PROGRESS != 0
    }

    fn is_first(&self) -> bool {
        self.peer == 1
    }

    fn put(&self, from: usize, to: usize, bytes: usize) -> Command {
        Command {
            op: abi::TY_OP_PUT_SIGNAL,
            flags: abi::TY_FLAG_NOTIFY,
            peer: self.peer,
            // A signal has one writer: each rank raises the one of its own number.
            signal: 1 - self.peer,
            add: 1,
            src_offset: from as u64,
            dst_offset: to as u64,
            bytes: bytes as u64,
            ..NO_COMMAND
        }
    }

    /// Small puts in round trips; returns the total time.
    pub(super) fn ping(&mut self, pings: u32) -> Result<Duration> {
        let small = self.put(0, 0, SMALL);
        let start = Instant::now();
        for _ in 0..pings {
            if self.is_first() {
                self.post(&small)?;
            }
            self.await_signal(self.seen + 1)?;
            if !self.is_first() {
                self.post(&small)?;
            }
        }
        let took = start.elapsed();
        // The remaining commands of this measurement must not be part of the next.
        self.drive_until(|link| link.done == link.posted)?;
        Ok(took)
    }

    /// Large puts in both directions at once; returns the time until all have arrived on both
    /// ranks.
    pub(super) fn stream(&mut self, puts: u32) -> Result<Duration> {
        let start = Instant::now();
        let wanted = self.seen + u64::from(puts);
        for index in 0..puts as usize {
            self.drive_until(|link| link.posted - link.done < DEPTH as u64)?;
            let slot = index % DEPTH;
            self.post(&self.put(slot * LARGE, (DEPTH + slot) * LARGE, LARGE))?;
        }
        self.drive_until(|link| link.done == link.posted)?;
        self.await_signal(wanted)?;
        Ok(start.elapsed())
    }

    fn post(&mut self, command: &Command) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        loop {
            // SAFETY: inside the window; sources are never written while puts are in flight; one
            // thread uses the queue.
            let posted = unsafe { self.transport.post(0, std::slice::from_ref(command)) };
            if posted.map_err(|status| self.broken(status))? == 1 {
                self.posted += 1;
                return Ok(());
            }
            ensure!(Instant::now() < until, "the queue was full for {PATIENCE:?}");
            self.drive()?;
        }
    }

    fn await_signal(&mut self, wanted: u64) -> Result<()> {
        let id = self.peer;
        self.drive_until(|link| link.transport.read_signal(0, id) >= wanted)?;
        self.seen = wanted;
        Ok(())
    }

    fn drive_until(&mut self, holds: impl Fn(&Self) -> bool) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        let mut looks = 0_u32;
        while !holds(self) {
            self.drive()?;
            looks = looks.wrapping_add(1);
            if looks.is_multiple_of(1024) {
                ensure!(Instant::now() < until, "nothing came from the other rank in {PATIENCE:?}");
                // Both ranks may share a core.
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn drive(&mut self) -> Result<()> {
        let mut events = [NO_EVENT; 16];
        let count = self.transport.poll(0, &mut events).map_err(|status| self.broken(status))?;
        for event in &events[..count] {
            if event.kind != abi::TY_EVENT_DONE {
                return Err(self.broken(event.status));
            }
            self.done += 1;
        }
        Ok(())
    }

    #[cold]
    fn broken(&self, status: i32) -> anyhow::Error {
        let why = self.transport.health().err().map(anyhow::Error::from);
        why.unwrap_or_else(|| anyhow::anyhow!("the transport failed with status {status}"))
    }
}
