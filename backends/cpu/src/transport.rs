//! The `shm` transport: ranks are processes of one machine that map each other's windows.
//!
//! Windows and signals are sealed memfds whose descriptors cross abstract Unix sockets while ranks
//! connect; after that no system call is made. A command is done when `post` returns. Ranks may as
//! well be threads of one process: nothing here is process-wide.
//!
//! Watched by `tests/{commands,connect,allocations}.rs`, and L0 of the suite.

mod commands;
mod memory;
mod peer;
mod queue;
mod signals;

use std::sync::OnceLock;
use std::time::Duration;

use tokenyard_core::abi;
use tokenyard_core::transport::{
    Capabilities, Command, Event, MemoryNeeds, NO_CAPABILITIES, Transport, TransportOpen, Window,
};
use tokenyard_core::{Error, ErrorKind, Result};

use crate::config::ShmConfig;
use commands::{Fault, execute};
use peer::Local;
use queue::Queue;
use tokenyard_core::fd_exchange::{DESCRIPTOR_FIX, Endpoint, Links, MAX_WINDOWS, Offer};

const MAX_PEERS: u32 = 1024;
const MAX_QUEUES: u32 = 64;
const MAX_SIGNALS: u32 = 65_536;
const MAX_QUEUE_DEPTH: u32 = 4096;
const LARGEST_PUT: u64 = 1 << 40;

/// Shared memory between the processes of one machine.
#[derive(Debug)]
pub struct Shm {
    load_store: bool,
    deadline: Duration,
    links: Links<Local>,
    queues: Vec<Queue>,
    /// The first failed command; it stays (INV-7).
    failure: OnceLock<Failure>,
}

/// A command that failed, without text: it is recorded on the hot path.
#[derive(Clone, Copy, Debug)]
struct Failure {
    fault: Fault,
    command: Command,
}

impl Transport for Shm {
    const NAME: &'static str = "shm";
    const ABOUT: &'static str = "shared memory between processes of one Linux machine";
    type Config = ShmConfig;

    fn probe(config: &ShmConfig) -> Result<Capabilities> {
        probe_system()?;
        let load_store = if config.load_store { abi::TY_CAP_LOAD_STORE } else { 0 };
        Ok(Capabilities {
            flags: load_store
                | abi::TY_CAP_NATIVE_ATOMICS
                | abi::TY_CAP_GET
                | abi::TY_CAP_ORDERED
                | abi::TY_CAP_BOUNDED_PUT
                | abi::TY_CAP_MASKING,
            memory_kinds: abi::TY_MEMORY_HOST,
            max_peers: MAX_PEERS,
            max_queues: MAX_QUEUES,
            max_signals: MAX_SIGNALS,
            max_queue_depth: MAX_QUEUE_DEPTH,
            max_windows: MAX_WINDOWS,
            largest_put: LARGEST_PUT,
            ..NO_CAPABILITIES
        })
    }

    fn open(config: ShmConfig, open: &TransportOpen<'_>) -> Result<Self> {
        let TransportOpen { team, needs, .. } = *open;
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        check_descriptor_limit(team.world_ranks.len() as u64, needs.windows, limit)?;
        let (local, signals) = Local::new(needs)?;
        Ok(Self {
            load_store: config.load_store,
            deadline: needs.deadline,
            links: Links::new(Offer::new(team, needs.signals, signals)?, local)?,
            queues: (0..needs.queues).map(|_| Queue::new(needs.queue_depth)).collect(),
            failure: OnceLock::new(),
        })
    }

    fn memory_needs(&self) -> MemoryNeeds {
        MemoryNeeds {
            size: size_of::<MemoryNeeds>(),
            kinds: abi::TY_MEMORY_HOST,
            handles: abi::TY_HANDLE_MEMFD,
            alignment: rustix::param::page_size() as u64,
        }
    }

    unsafe fn register(&mut self, window: &Window) -> Result<()> {
        // SAFETY: the window outlives `self`, and the links with it, by this function's contract.
        let (fd, extent) = unsafe { self.links.memory.add_window(window)? };
        self.links.offer.add_window(fd, extent);
        Ok(())
    }

    fn endpoint(&mut self, _: u32) -> Result<Vec<u8>> {
        Ok(self.links.offer.endpoint.to_bytes())
    }

    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()> {
        let endpoint = Endpoint::parse(data)?;
        self.links.connect(peer, &endpoint, self.deadline)
    }

    fn peer_address(&self, window: u32, peer: u32) -> Result<*mut u8> {
        let fail = |kind, message: &str| Err(Error::new(kind, "peer_address", message));
        if !self.load_store {
            return fail(ErrorKind::Unsupported, "load_store = false in the table of shm");
        }
        let Some(known) = self.links.peer(peer) else {
            return fail(ErrorKind::InvalidInput, "the peer is not connected");
        };
        match known.windows.get(window as usize) {
            Some(span) => Ok(span.base()),
            None => fail(ErrorKind::InvalidInput, "there is no such window"),
        }
    }

    unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32> {
        let mut events = self.queue(queue)?.enter().ok_or(abi::TY_INTERNAL)?;
        for (done, command) in commands.iter().enumerate() {
            if events.is_full() {
                return Ok(done);
            }
            // SAFETY: by this function's contract.
            let result = unsafe { execute(&self.links, command) };
            let (kind, status) = match result {
                Ok(()) if command.flags & abi::TY_FLAG_NOTIFY == 0 => continue,
                Ok(()) => (abi::TY_EVENT_DONE, abi::TY_OK),
                Err(fault) => (abi::TY_EVENT_ERROR, self.fail(fault, command)),
            };
            events.push(Event { kind, queue, peer: command.peer, status, tag: command.tag });
        }
        Ok(commands.len())
    }

    fn poll(&self, queue: u32, events: &mut [Event]) -> std::result::Result<usize, i32> {
        Ok(self.queue(queue)?.enter().ok_or(abi::TY_INTERNAL)?.take(events))
    }

    // Inlined into the table's slot, also where that is made in another crate: a plugin.
    #[inline]
    fn read_signal(&self, _: u32, id: u32) -> u64 {
        let total = self.links.memory.signals.read(id);
        debug_assert!(total.is_some(), "signal {id} is out of range");
        total.unwrap_or(0)
    }

    fn health(&self) -> Result<()> {
        match self.failure.get() {
            None => Ok(()),
            Some(failure) => Err(failure.to_error()),
        }
    }
}

impl Shm {
    fn queue(&self, queue: u32) -> std::result::Result<&Queue, i32> {
        self.queues.get(queue as usize).ok_or(abi::TY_INTERNAL)
    }

    /// Makes the transport unhealthy; returns the status of the error event.
    #[cold]
    fn fail(&self, fault: Fault, command: &Command) -> i32 {
        // Only the first failure is stored.
        let _ = self.failure.set(Failure { fault, command: *command });
        abi::TY_TRANSPORT
    }
}

impl Failure {
    /// About no peer: whoever posted the command is to blame.
    fn to_error(self) -> Error {
        let Self { fault, command } = self;
        Error::new(ErrorKind::Transport, "execute command", format!("{fault}"))
            .with_context("op", command.op)
            .with_context("queue", command.queue)
            .with_context("peer", command.peer)
            .with_context("window", command.dst_window)
            .with_context("signal", command.signal)
            .with_context("tag", command.tag)
            .with_fix("report this: whoever posted the command broke the transport contract")
    }
}

/// Whether this system lets a process make memfds and abstract sockets.
fn probe_system() -> Result<()> {
    // The text of the cause names the fix.
    let unavailable = |cause: Error| {
        let message = format!("shared memory does not work here: {cause}");
        Error::new(ErrorKind::Unavailable, "probe", message)
    };
    memory::create("tokenyard-probe", 1).map_err(unavailable)?;
    tokenyard_core::fd_exchange::probe().map_err(unavailable)
}

/// Descriptors that travel count against the limit on open files of whoever sends them, summed over
/// all processes of the user: in the worst case all ranks call one another at once.
fn check_descriptor_limit(ranks: u64, windows: u32, limit: Option<u64>) -> Result<()> {
    let needed = ranks * (u64::from(windows) + 1);
    match limit {
        Some(limit) if limit < needed => Err(Error::new(
            ErrorKind::Unavailable,
            "open",
            format!(
                "the limit on open files (RLIMIT_NOFILE) is {limit}; expected at least {needed}: \
                 {ranks} ranks with {windows} windows and the signals each"
            ),
        )
        .with_fix(DESCRIPTOR_FIX)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_limit_that_is_too_small_is_named_with_the_fix() {
        check_descriptor_limit(8, 3, Some(32)).unwrap();
        check_descriptor_limit(u64::from(MAX_PEERS), MAX_WINDOWS, None).unwrap();
        let error = check_descriptor_limit(8, 3, Some(31)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let text = error.to_string();
        assert!(text.contains("RLIMIT_NOFILE) is 31; expected at least 32"), "{text}");
        assert!(text.contains("ulimit -n"), "{text}");
    }
}
