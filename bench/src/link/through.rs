//! Puts through the transport: its hot calls, without a communicator.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokenyard_core::abi;
use tokenyard_core::bootstrap::World;
use tokenyard_core::config::{ComponentChoice, Config};
use tokenyard_core::host::{OpenTransport, Registry};
use tokenyard_core::transport::{
    Command, NO_COMMAND, NO_EVENT, NO_WINDOW, Team, TransportNeeds, TransportOpen, Window,
};

use super::raw::{self, Raw, Seen};
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
    posted: u64,
    /// Ended commands, and the total of the only signal.
    seen: Seen,
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
        Ok(Self { transport, _memory: pages, peer, posted: 0, seen: Seen::default() })
    }

    /// Whether only the caller drives the transport.
    pub(super) fn is_inline(&self) -> bool {
        self.transport.capabilities().flags & abi::TY_CAP_MANUAL_PROGRESS != 0
    }

    /// As of a bare link; ends once all puts of this rank have ended.
    pub(super) fn ping(&mut self, pings: u32) -> Result<Duration> {
        let took = raw::ping(self, pings)?;
        // The remaining commands of this measurement must not be part of the next.
        let posted = self.posted;
        raw::wait(self, |seen| seen.done == posted)?;
        Ok(took)
    }

    /// Posts a put that raises the signal of this rank; false if the queue is full.
    fn put(&mut self, from: usize, to: usize, bytes: usize) -> Result<bool> {
        let command = Command {
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
        };
        // SAFETY: inside the window; sources are never written while puts are in flight; one
        // thread uses the queue.
        let posted = unsafe { self.transport.post(0, &[command]) };
        let posted = posted.map_err(|status| self.broken(status))?;
        self.posted += posted as u64;
        Ok(posted == 1)
    }

    #[cold]
    fn broken(&self, status: i32) -> anyhow::Error {
        let why = self.transport.health().err().map(anyhow::Error::from);
        why.unwrap_or_else(|| anyhow::anyhow!("the transport failed with status {status}"))
    }
}

impl Raw for Through {
    fn name(&self) -> String {
        self.transport.link_name(self.peer)
    }

    fn is_first(&self) -> bool {
        self.peer == 1
    }

    fn seen(&self) -> Seen {
        self.seen
    }

    fn put_small(&mut self) -> Result<bool> {
        self.put(0, 0, SMALL)
    }

    fn put_large(&mut self, slot: usize) -> Result<bool> {
        self.put(slot * LARGE, (DEPTH + slot) * LARGE, LARGE)
    }

    fn drive(&mut self) -> Result<()> {
        let mut events = [NO_EVENT; 16];
        let count = self.transport.poll(0, &mut events).map_err(|status| self.broken(status))?;
        for event in &events[..count] {
            if event.kind != abi::TY_EVENT_DONE {
                return Err(self.broken(event.status));
            }
            self.seen.done += 1;
        }
        self.seen.arrived = self.transport.read_signal(0, self.peer);
        Ok(())
    }
}
