//! The transport contract: moves bytes between windows and raises signals.
//!
//! An author of a transport implements [`Transport`]; [`export_transports!`](crate::export_transports)
//! derives the C table. Core validates, transports trust: a transport never checks again the promises
//! of core, it `debug_assert!`s them. It returns only errors that a caller could not have foreseen.
//!
//! Core promises:
//! - queues, peers, windows, offsets, lengths and signal ids of commands are in the negotiated range;
//!   `add` is 1 to 65,535; at most one thread uses a queue at a time;
//! - windows are registered in the same order with equal sizes on all ranks, before `connect`;
//! - a signal id has one writing (peer, queue), so a fabric without atomics may write new totals.
//!
//! A transport promises:
//! - **INV-1 payload before signal.** When a receiver sees the signal of a `put_signal`, that put's
//!   payload is visible to the receiver's device. Nothing is promised about other puts (INV-2).
//! - **INV-3 no tearing.** Aligned 8-byte values arrive whole.
//! - **INV-4, INV-5.** A command's source is reusable, and its queue slot free, when the command is
//!   done: not when it was picked up.
//! - **INV-6.** `connect` and `commit` end within the deadline; `post`, `poll`, `progress` and `health` never block.
//! - **INV-7 no lost errors.** A failed command is an error event, and `health` stays bad.
//!
//! A transport that must be driven by a thread declares `TY_CAP_MANUAL_PROGRESS`; core then calls
//! `progress` from a thread of its own while the ranks compute.

use crate::abi;
use crate::config::ComponentTable;
use crate::exchange::{Exchange, NoExchange};
use crate::gpu_ring::RingToServe;
use crate::nics::Nics;
use crate::{Error, ErrorKind, Result};

/// The capabilities of a transport on this machine. See [`abi::TyCapabilities`] for the fields.
pub type Capabilities = abi::TyCapabilities;
/// One command. See [`abi::TyCommand`].
pub type Command = abi::TyCommand;
/// One event of a poll. See [`abi::TyEvent`].
pub type Event = abi::TyEvent;
/// Registered memory. See [`abi::TyWindow`].
pub type Window = abi::TyWindow;
/// The requirements on window memory. See [`abi::TyMemoryNeeds`].
pub type MemoryNeeds = abi::TyMemoryNeeds;

/// An ordered list of world ranks; `peer` indexes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Team {
    /// This process' index in `world_ranks`.
    pub me: u32,
    /// The members.
    pub world_ranks: Vec<u32>,
    /// NICs that the topology chose for this rank. A transport whose table names NICs uses those; another one
    /// finds its own by [`Nics::choose`].
    pub nics: Nics,
}

impl Team {
    /// The team of these ranks, from the view of number `me` of them. The topology chose no NIC.
    pub fn new(me: u32, world_ranks: Vec<u32>) -> Self {
        Self { me, world_ranks, nics: Nics::default() }
    }

    /// The team of all `ranks`, from the view of world rank `me`.
    pub fn world(me: u32, ranks: u32) -> Self {
        Self::new(me, (0..ranks).collect())
    }
}

/// The resources of a transport that will be used. Core has checked them against the capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransportNeeds {
    /// Windows that will be registered.
    pub windows: u32,
    /// Queues 0 .. queues.
    pub queues: u32,
    /// Signal ids 0 .. signals on every rank.
    pub signals: u32,
    /// Most commands of a queue that are not done yet.
    pub queue_depth: u32,
    /// Most bytes of one put.
    pub largest_put: u64,
    /// Most time of a connect, of a commit, and of a command whose peer takes nothing.
    pub deadline: std::time::Duration,
}

/// Arguments of opening a transport. See [`abi::TyTransportOpen`].
#[derive(Clone, Copy, Debug)]
pub struct TransportOpen<'a> {
    /// The ranks that will communicate with each other.
    pub team: &'a Team,
    /// The resources that will be used.
    pub needs: &'a TransportNeeds,
    /// Ordinal of the GPU whose kernels use the transport; none where they run on the host.
    pub device: Option<u32>,
    /// The exchange by which the team's ranks agree on values that the fabric needs before endpoints
    /// exist.
    pub exchange: &'a dyn Exchange,
}

impl<'a> TransportOpen<'a> {
    /// Arguments for kernels on the host, and for a transport that needs no exchange: its use is refused.
    pub fn new(team: &'a Team, needs: &'a TransportNeeds) -> Self {
        Self { team, needs, device: None, exchange: &NoExchange }
    }

    /// These arguments, with an exchange among the team's ranks.
    pub fn among(self, exchange: &'a dyn Exchange) -> Self {
        Self { exchange, ..self }
    }
}

/// A transport. One instance serves one team.
///
/// Threads: all calls except the hot ones come from one thread, which may block. `post`, `poll` and
/// `read_signal` of one queue are called by one thread at a time, of different queues by several
/// threads at once; `health` by any thread.
pub trait Transport: Sized + Send + Sync + 'static {
    /// The name that a config writes: `[a-z0-9_-]+`.
    const NAME: &'static str;
    /// One line of text for display: fabric and hardware.
    const ABOUT: &'static str;
    /// The component's own table. Its schema belongs to the component; unknown keys must be refused.
    type Config: serde::de::DeserializeOwned;

    /// Reads the component's own table. A component that passes a part of it to another component, or checks
    /// ranges, does so here: only here the lines of the file are known.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] with file, line, key, and the values found and expected.
    fn configure(table: &ComponentTable) -> Result<Self::Config> {
        table.parse(Self::NAME)
    }

    /// Gives the capabilities on this machine, without side effects.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] with the fix, if the component cannot run here.
    fn probe(config: &Self::Config) -> Result<Capabilities>;

    /// Makes an instance for a team.
    ///
    /// # Errors
    /// Errors of the fabric, the operating system or the exchange.
    fn open(config: Self::Config, open: &TransportOpen<'_>) -> Result<Self>;

    /// The requirements on window memory.
    fn memory_needs(&self) -> MemoryNeeds;

    /// Allocates the memory of one window, where the fabric must own it (capability
    /// `TY_CAP_OWNS_MEMORY`). It lives as long as the instance.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] unless the capability was declared.
    fn alloc(&mut self, id: u32, bytes: u64) -> Result<Window> {
        let _ = (id, bytes);
        Err(Error::new(
            ErrorKind::Unsupported,
            "alloc",
            format!("{} does not own window memory", Self::NAME),
        ))
    }

    /// Registers one window.
    ///
    /// # Errors
    /// Errors of the fabric.
    ///
    /// # Safety
    /// The window's memory and descriptor stay valid until the instance is dropped.
    unsafe fn register(&mut self, window: &Window) -> Result<()>;

    /// The bytes that `peer` needs to reach this rank: at most [`abi::TY_ENDPOINT_BYTES`].
    ///
    /// # Errors
    /// Errors of the fabric.
    fn endpoint(&mut self, peer: u32) -> Result<Vec<u8>>;

    /// Connects to `peer`, this rank itself included. `data` comes from another process: check it.
    ///
    /// # Errors
    /// [`ErrorKind::Protocol`] for bytes that fail a check, [`ErrorKind::Deadline`] if the peer
    /// does not answer in time.
    fn connect(&mut self, peer: u32, data: &[u8]) -> Result<()>;

    /// Ends the connection phase: every rank of the team calls it once, after its last
    /// [`connect`](Self::connect) and before any use of the connections. For fabrics that register windows
    /// only once the team is connected. It may wait for peers that still connect.
    ///
    /// # Errors
    /// Errors of the fabric; [`ErrorKind::Deadline`] if a peer does not connect in time.
    fn commit(&mut self) -> Result<()> {
        Ok(())
    }

    /// The address at which `window` of `peer` is mapped in this process (capability
    /// `TY_CAP_LOAD_STORE`).
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] unless the capability was declared.
    fn peer_address(&self, window: u32, peer: u32) -> Result<*mut u8> {
        let _ = (window, peer);
        Err(Error::new(
            ErrorKind::Unsupported,
            "peer_address",
            format!("{} has no load and store access to peers", Self::NAME),
        ))
    }

    /// Accepts the first n of `commands` and returns n. Fewer than all is back-pressure.
    ///
    /// # Errors
    /// A status `TY_*` below zero, if the queue is unusable.
    ///
    /// # Safety
    /// Source memory of an accepted command stays unchanged until the command is done, and all promises
    /// of core in the module's documentation hold.
    unsafe fn post(&self, queue: u32, commands: &[Command]) -> std::result::Result<usize, i32>;

    /// Drives the queue, fills `events` from the front and returns how many were written.
    ///
    /// # Errors
    /// A status `TY_*` below zero, if the queue is unusable.
    fn poll(&self, queue: u32, events: &mut [Event]) -> std::result::Result<usize, i32>;

    /// The total of signal `id` on this rank, with acquire order (INV-1).
    fn read_signal(&self, queue: u32, id: u32) -> u64;

    /// The first asynchronous error, if there was one. It stays.
    ///
    /// # Errors
    /// The asynchronous error.
    fn health(&self) -> Result<()>;

    /// Drives the fabric and stores completions for the next `poll` (capability
    /// `TY_CAP_MANUAL_PROGRESS`). Any thread calls it, also beside hot calls of every queue; it returns
    /// at once if another thread is driving. Returns whether something moved.
    ///
    /// # Errors
    /// A status `TY_*` below zero.
    fn progress(&self) -> std::result::Result<bool, i32> {
        Ok(false)
    }

    /// The source that kernels compile in to use this transport, after `connect` (capability
    /// `TY_CAP_DEVICE_API`). The memory behind its pointers lives as long as the instance.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] unless the capability was declared.
    fn device_api(&self) -> Result<abi::TyDeviceApi> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "device_api",
            format!("{} has no device API", Self::NAME),
        ))
    }

    /// As [`device_api`](Self::device_api), for kernels that count windows, queues and signals from 0 and have a part
    /// of them: number 0 is the first of that part.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where such kernels need an instance of their own.
    fn device_api_of(&self, first: &abi::TyFirst) -> Result<abi::TyDeviceApi> {
        let _ = first;
        let text = format!("the device API of {} serves one user of a session", Self::NAME);
        Err(Error::new(ErrorKind::Unsupported, "device_api_of", text)
            .with_fix("open each user alone, such as by Communicator::open"))
    }

    /// The result of [`device_api`](Self::device_api) without the value of the parameters (`params` is
    /// null, their size and alignment are set): kernels are compiled ahead of a job with it. Its pointers
    /// are static.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where there is no device API, or only an instance knows it.
    fn device_source() -> Result<abi::TyDeviceApi> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "device_source",
            format!("{} has no device API", Self::NAME),
        ))
    }

    /// Takes over a ring of kernels, after [`commit`](Self::commit), where the transport has threads of its
    /// own: see [`GpuRing::serve`](crate::gpu_ring::GpuRing::serve). Only this ring uses its queue. Returns
    /// true if the transport serves the ring; else core serves it.
    ///
    /// # Errors
    /// Errors of the operating system.
    fn serve_ring(&mut self, ring: RingToServe) -> Result<bool> {
        let _ = ring;
        Ok(false)
    }

    /// One line for diagnoses, after `connect`: the connection from this rank to `peer` (device,
    /// provider, both addresses); at most [`abi::TY_LINK_NAME_BYTES`] of it are used.
    fn link_name(&self, peer: u32) -> String {
        let _ = peer;
        Self::NAME.to_owned()
    }
}

/// A capability set with nothing in it, to be filled by struct update.
pub const NO_CAPABILITIES: Capabilities = Capabilities {
    size: std::mem::size_of::<Capabilities>(),
    flags: 0,
    memory_kinds: 0,
    max_peers: 0,
    max_queues: 0,
    max_signals: 0,
    max_queue_depth: 0,
    max_windows: 0,
    largest_put: 0,
};

/// Bytes that a command puts at its peer.
pub fn put_bytes(command: &Command) -> u64 {
    match command.op {
        abi::TY_OP_PUT | abi::TY_OP_PUT_SIGNAL => command.bytes,
        abi::TY_OP_PUT_VALUE => size_of::<u64>() as u64,
        _ => 0,
    }
}

/// A command with everything zero, to be filled by struct update.
pub const NO_COMMAND: Command = Command {
    op: 0,
    reserved: 0,
    flags: 0,
    queue: 0,
    peer: 0,
    signal: 0,
    add: 0,
    src_window: 0,
    dst_window: 0,
    src_offset: 0,
    dst_offset: 0,
    bytes: 0,
    value: 0,
    tag: 0,
};

/// No memory of the host, to be filled by struct update.
pub const NO_WINDOW: Window = Window {
    size: std::mem::size_of::<Window>(),
    id: 0,
    kind: 0,
    pointer: std::ptr::null_mut(),
    bytes: 0,
    fd: -1,
    device: -1,
    fd_offset: 0,
    handle: 0,
    reserved: 0,
};

/// An event with everything zero: room for `poll`.
pub const NO_EVENT: Event = Event { kind: 0, queue: 0, peer: 0, status: 0, tag: 0 };
