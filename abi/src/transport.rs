//! The transport table: moves bytes between windows and raises signals.

use core::ffi::c_void;

use crate::common::{TyError, TyExportHeader, TyMemoryNeeds, TyStr, TyWindow};
use crate::counters::TyPeerCounters;
use crate::gpu_ring::TyGpuRing;
use crate::host::TyHost;

/// Major version of the transport ABI.
pub const TY_TRANSPORT_MAJOR: u32 = 1;
/// Minor version of the transport ABI.
pub const TY_TRANSPORT_MINOR: u32 = 12;

/// Puts of one queue to one peer arrive in order. Informative: protocols never need it (INV-2).
pub const TY_CAP_ORDERED: u64 = 1;
/// Signals are raised by the fabric's own atomics.
pub const TY_CAP_NATIVE_ATOMICS: u64 = 1 << 1;
/// Puts carry immediate data.
pub const TY_CAP_IMMEDIATE: u64 = 1 << 2;
/// The op `TY_OP_GET` works.
pub const TY_CAP_GET: u64 = 1 << 3;
/// `peer_address` works: peers' windows are mapped into this process for plain loads and stores. Then a
/// signal, with a put or alone, also carries every plain store that was made before its `post`, as a
/// release does: a reader that sees the signal may load the stored values.
pub const TY_CAP_LOAD_STORE: u64 = 1 << 4;
/// A command to a lost peer, gets from it included, ends within the deadline: with an error, or as done (INV-4). Done
/// is right where the memory of a killed peer outlives it, as shared memory does, and where a buffer holds the put
/// until a stopped peer goes on. The process lives (INV-6).
pub const TY_CAP_BOUNDED_PUT: u64 = 1 << 5;
/// Nothing moves unless a thread drives it: the transport has `progress`, and the host calls it from a
/// thread of its own while the ranks compute.
pub const TY_CAP_MANUAL_PROGRESS: u64 = 1 << 6;
/// The transport must own window memory: the host calls `alloc` instead of the kernel set.
pub const TY_CAP_OWNS_MEMORY: u64 = 1 << 7;
/// Ranks may continue without a lost one (since minor version 2). A peer that ended or stopped, at any
/// point, delays no other peer (INV-6): `post` and `poll` return, commands to other peers continue, the
/// process lives. A failure of one peer hides no failure of another: `health` reports them in turn. A put to
/// the lost peer may occupy its place in the queue until the fabric ends it.
pub const TY_CAP_MASKING: u64 = 1 << 8;
/// `device_api` works: kernels post and wait by themselves (since minor version 3).
pub const TY_CAP_DEVICE_API: u64 = 1 << 9;
/// The transport uses the NICs that `open` names (since minor version 5). Ranks of a rail then need NICs
/// that reach each other, and the communicator does not open if one is missing.
pub const TY_CAP_PLACED_NICS: u64 = 1 << 10;

/// The capabilities of a transport on this machine. The transport declares them, and the conformance
/// suite tests exactly these.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyCapabilities {
    /// `sizeof(TyCapabilities)`; set by the host, left unchanged by the component.
    pub size: usize,
    /// Bits `TY_CAP_*`.
    pub flags: u64,
    /// Kinds of memory that can be registered: bits `TY_MEMORY_*`.
    pub memory_kinds: u32,
    /// Most ranks of a team, this one included.
    pub max_peers: u32,
    /// Most queues.
    pub max_queues: u32,
    /// Most signals on one rank; at most 65,536.
    pub max_signals: u32,
    /// Most commands of a queue that are not done yet.
    pub max_queue_depth: u32,
    /// Most windows.
    pub max_windows: u32,
    /// Most bytes of one put.
    pub largest_put: u64,
}

/// The resources that the kernel set will use. The host has checked them against the capabilities.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyTransportNeeds {
    /// `sizeof(TyTransportNeeds)`.
    pub size: usize,
    /// Windows that will be registered.
    pub windows: u32,
    /// Queues that will be used: 0 .. queues.
    pub queues: u32,
    /// Signal ids that will be used on every rank: 0 .. signals; at most 65,536.
    pub signals: u32,
    /// Most commands of a queue that are not done yet.
    pub queue_depth: u32,
    /// Most bytes of one put.
    pub largest_put: u64,
    /// Most time of a connect, of a commit, and of a command whose peer takes nothing, in nanoseconds.
    pub deadline_ns: u64,
}

/// An ordered list of world ranks that a transport is opened for. A `peer` is an index into it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyTeam {
    /// `sizeof(TyTeam)`.
    pub size: usize,
    /// This process' index in the list.
    pub me: u32,
    /// Length of the list.
    pub count: u32,
    /// `count` world ranks, valid for the call only.
    pub world_ranks: *const u32,
}

/// Copy `bytes` from the source window to the destination window of `peer`.
pub const TY_OP_PUT: u8 = 1;
/// Copy as `TY_OP_PUT` does, then add `add` to `signal` of `peer`: payload before signal (INV-1).
pub const TY_OP_PUT_SIGNAL: u8 = 2;
/// Store the 8 bytes of `value` at the destination, which is 8-byte aligned (INV-3).
pub const TY_OP_PUT_VALUE: u8 = 3;
/// Add `add` to `signal` of `peer`.
pub const TY_OP_SIGNAL: u8 = 4;
/// Copy `bytes` from the destination window of `peer` to the source window. Optional.
pub const TY_OP_GET: u8 = 5;

/// Ask for a `TY_EVENT_DONE` with the command's tag. Errors are always reported.
pub const TY_FLAG_NOTIFY: u16 = 1;

/// One command: 64 bytes of plain data. Commands of a queue may overtake each other.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyCommand {
    /// One of `TY_OP_*`.
    pub op: u8,
    /// Zero.
    pub reserved: u8,
    /// Bits `TY_FLAG_*`.
    pub flags: u16,
    /// The queue that the command is posted on; repeated here for the transport's convenience.
    pub queue: u32,
    /// Index into the team. May be this rank itself.
    pub peer: u32,
    /// Signal id on the peer.
    pub signal: u32,
    /// The amount to add to the signal: 1 to 65,535.
    pub add: u32,
    /// Window id on this rank.
    pub src_window: u16,
    /// Window id on the peer.
    pub dst_window: u16,
    /// Offset in the source window.
    pub src_offset: u64,
    /// Offset in the destination window.
    pub dst_offset: u64,
    /// Bytes to move; may be 0 for `TY_OP_PUT_SIGNAL`.
    pub bytes: u64,
    /// The value of `TY_OP_PUT_VALUE`.
    pub value: u64,
    /// Returned in the event of the command.
    pub tag: u64,
}

/// The command is done: its source is reusable and its slot is free (INV-4, INV-5).
pub const TY_EVENT_DONE: u32 = 1;
/// The command failed (INV-7). `status` is negative and `peer` is that of the command. The details are in `health`,
/// whose error names the peer by its world rank if it is about one.
pub const TY_EVENT_ERROR: u32 = 2;

/// One event of `poll`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyEvent {
    /// One of `TY_EVENT_*`.
    pub kind: u32,
    /// Queue of the command.
    pub queue: u32,
    /// Peer of the command.
    pub peer: u32,
    /// `TY_OK`, or the status of the failure. That of a command to a lost peer is `TY_PEER_LOST`, `TY_DEADLINE`
    /// or `TY_TRANSPORT`.
    pub status: i32,
    /// Tag of the command.
    pub tag: u64,
}

/// A transport. A vendor fills this structure to contribute a fabric.
///
/// Thread rules: the host calls *cold* slots (`probe`, `open`, `close`, `memory_needs`, `alloc`,
/// `register`, `endpoint`, `connect`, `commit`, `serve_ring`, `peer_address`) on one thread at a time,
/// which may block: up to `serve_ring` it is a thread of the bring-up. One thread at a time calls *hot*
/// slots (`post`, `poll`, `read_signal`) of one queue; different threads may use different queues at
/// once. `health` may be called from any thread.
///
/// Order of calls: `probe`, `open`, `memory_needs`, (`alloc`,) `register` per window, `endpoint` and
/// `connect` per peer, `commit`, (`serve_ring`,) then hot slots, then `close`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyTransportTable {
    /// `sizeof(TyTransportTable)` of the plugin.
    pub size: usize,
    /// The component's name as a config writes it: `[a-z0-9_-]+`. Static.
    pub name: TyStr,
    /// The component's own version, as text for display. Static.
    pub version: TyStr,
    /// One line of text for display: fabric, hardware. Static.
    pub about: TyStr,
    /// Required, cold. Gives the capabilities of the component on this machine, without side effects.
    /// `config` is the text of the component's own TOML table, `file` the name of the file for
    /// messages.
    pub probe: Option<
        unsafe extern "C" fn(
            host: *const TyHost,
            config: *const TyConfig,
            capabilities: *mut TyCapabilities,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required, cold. Makes an instance for a team.
    pub open: Option<
        unsafe extern "C" fn(
            host: *const TyHost,
            open: *const TyTransportOpen,
            instance: *mut *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required, cold. Ends the instance: it accesses no window afterwards. Called once.
    pub close: Option<unsafe extern "C" fn(instance: *mut c_void)>,
    /// Required, cold. Gives the requirements on window memory.
    pub memory_needs: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            needs: *mut TyMemoryNeeds,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional, cold; required with `TY_CAP_OWNS_MEMORY`. Allocates the memory of one window: the host
    /// sets `id` and `bytes`, the transport fills the rest. `close` frees it.
    pub alloc: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            window: *mut TyWindow,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required, cold. Registers one window. All ranks register equal sizes in the same order.
    pub register: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            window: *const TyWindow,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required, cold. Writes the bytes that `peer` needs to reach this rank. `capacity` is at
    /// least `TY_ENDPOINT_BYTES`; `*bytes` becomes the length.
    pub endpoint: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            peer: u32,
            data: *mut u8,
            capacity: usize,
            bytes: *mut usize,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required, cold. Connects to `peer` (this rank itself included) with the bytes that the peer's
    /// `endpoint` wrote. They come from another process: check them, and that they are of this peer. May wait
    /// for the peer, at most `deadline_ns`.
    pub connect: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            peer: u32,
            data: *const u8,
            bytes: usize,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional, cold; required with `TY_CAP_LOAD_STORE`. Gives the address at which window `window` of
    /// `peer` is mapped in this process; valid until `close`.
    pub peer_address: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            window: u32,
            peer: u32,
            address: *mut *mut u8,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required, hot. Accepts the first `*accepted` of `count` commands of a queue. Accepting fewer
    /// is back-pressure, not an error. A command that cannot be accepted because its peer is lost
    /// is accepted and ends as a `TY_EVENT_ERROR`.
    pub post: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            queue: u32,
            commands: *const TyCommand,
            count: usize,
            accepted: *mut usize,
        ) -> i32,
    >,
    /// Required, hot. Drives the queue and writes up to `capacity` events.
    pub poll: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            queue: u32,
            events: *mut TyEvent,
            capacity: usize,
            count: *mut usize,
        ) -> i32,
    >,
    /// Required, hot. The 64-bit total of signal `id` on this rank, never reset, with acquire order:
    /// the payload of the signal is visible to the caller (INV-1).
    pub read_signal:
        Option<unsafe extern "C" fn(instance: *mut c_void, queue: u32, id: u32) -> u64>,
    /// Required, any thread. `TY_OK`, or the first asynchronous error; it stays (INV-7). An error about a
    /// peer names it, by its world rank. With `TY_CAP_MASKING`: the first error that is about no peer, if
    /// there is one; else the first error of a peer, of another peer at each call.
    pub health: Option<unsafe extern "C" fn(instance: *mut c_void, error: *mut TyError) -> i32>,
    /// Optional, any thread, also beside hot calls of every queue; required with
    /// `TY_CAP_MANUAL_PROGRESS`. Drives the fabric and stores completions for the next `poll`. Returns
    /// at once if another thread is driving. 1 if something moved, `TY_OK` if not, or a status below
    /// zero.
    pub progress: Option<unsafe extern "C" fn(instance: *mut c_void) -> i32>,
    /// Optional, any thread, after `connect`. One line for diagnoses: the connection from this rank to
    /// `peer` (device, provider, both addresses). `*bytes` becomes its length, at most `capacity`.
    pub link_name: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            peer: u32,
            data: *mut u8,
            capacity: usize,
            bytes: *mut usize,
        ) -> i32,
    >,
    /// Optional, cold, after `connect`; required with `TY_CAP_DEVICE_API`. Gives the source that
    /// kernels compile in to use this transport. Its pointers are valid until `close`.
    pub device_api: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            device_api: *mut TyDeviceApi,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional, cold, without an instance. Gives the result of `device_api` without the value of the
    /// parameters: `params` is null, their size and alignment are set. So kernels can be compiled ahead of
    /// a job, on a machine without the fabric. Its pointers are static.
    pub device_source:
        Option<unsafe extern "C" fn(device_api: *mut TyDeviceApi, error: *mut TyError) -> i32>,
    /// Optional, cold, collective: every rank of the team calls it once, after its last `connect` and before
    /// any use of the connections. For fabrics that register windows only once the team is connected. May
    /// wait for peers that still connect, at most `deadline_ns`.
    pub commit: Option<unsafe extern "C" fn(instance: *mut c_void, error: *mut TyError) -> i32>,
    /// Optional, cold, after `commit` (since minor version 10). Takes over a ring of kernels, for a
    /// transport with threads of its own. One of them takes the commands out, so that a kernel's command
    /// is handed over once. That thread takes the place of the host's thread, by the rules of
    /// [`TyGpuRing`]. `close` ends the service. `TY_UNSUPPORTED` leaves the ring to the host.
    pub serve_ring: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            ring: *const TyServeRing,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional, cold, after `connect` (since minor version 12). As `device_api`, for kernels that count windows,
    /// queues and signals from 0 and have a part of them: number 0 is the first of that part. So several users share
    /// one instance. Its pointers are valid until `close`. `TY_UNSUPPORTED`: such kernels need an instance of their
    /// own.
    pub device_api_of: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            first: *const TyFirst,
            device_api: *mut TyDeviceApi,
            error: *mut TyError,
        ) -> i32,
    >,
}

/// The first numbers of one user among those of a transport.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TyFirst {
    /// `sizeof(TyFirst)`.
    pub size: usize,
    /// Window.
    pub window: u32,
    /// Queue.
    pub queue: u32,
    /// Signal.
    pub signal: u32,
    /// Zero.
    pub reserved: u32,
}

/// A ring of kernels that a transport may serve. The memory behind the pointers of `ring`, and behind
/// `counters` and `raised`, stays valid until `close` has returned; the rest is valid for the call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyServeRing {
    /// `sizeof(TyServeRing)`.
    pub size: usize,
    /// The ring. Kernels wrote its commands, so they are checked: peer, windows, ends of puts, signal and
    /// `add`. A command that breaks a rule ends the ring with a failure.
    pub ring: *const TyGpuRing,
    /// `peers` entries, for reports: the thread stores `posted`, `done`, `raised` and `bytes` atomically.
    pub counters: *mut TyPeerCounters,
    /// `peers * ring.signals` words, by peer, then signal: the total by which each was raised, stored in
    /// the same way.
    pub raised: *mut u64,
    /// The windows of this transport, in order of their ids.
    pub windows: *const TyWindow,
    /// Number of windows.
    pub window_count: usize,
    /// Most bytes of one put.
    pub largest_put: u64,
    /// Ranks of the team.
    pub peers: u32,
    /// Zero.
    pub reserved: u32,
}

/// The contract of device APIs: `backends/gpu/device/common/transport.cuh` of this version.
pub const TY_DEVICE_API_VERSION: u32 = 2;
/// A device API in CUDA C++.
pub const TY_DIALECT_CUDA: u32 = 1;
/// A device API in HIP C++.
pub const TY_DIALECT_HIP: u32 = 2;
/// CUDA's run-time compiler can compile the device API; so can nvcc.
pub const TY_COMPILER_NVRTC: u32 = 1;
/// Only nvcc can.
pub const TY_COMPILER_NVCC: u32 = 2;
/// HIP's run-time compiler can compile the device API; so can hipcc.
pub const TY_COMPILER_HIPRTC: u32 = 3;
/// Only hipcc can.
pub const TY_COMPILER_HIPCC: u32 = 4;

/// Kernels load from and store to windows of peers (`kLoadStore`); without it they put. Has the meaning
/// of [`TY_CAP_LOAD_STORE`] for kernels.
pub const TY_DEVICE_API_LOAD_STORE: u32 = 1;

/// The source that a kernel set compiles into its kernels to use a transport.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyDeviceApi {
    /// `sizeof(TyDeviceApi)`.
    pub size: usize,
    /// [`TY_DEVICE_API_VERSION`] that the source was written for.
    pub version: u32,
    /// One of `TY_DIALECT_*`.
    pub dialect: u32,
    /// One of `TY_COMPILER_*`.
    pub compiler: u32,
    /// Bits `TY_DEVICE_API_*`: how kernels use it.
    pub flags: u32,
    /// Source text of `struct DeviceApi`, to be included inside a namespace.
    pub source: TyStr,
    /// Folders that the source includes from.
    pub include_folders: *const TyStr,
    /// Number of folders.
    pub include_folder_count: usize,
    /// Macros of the form `NAME=VALUE`.
    pub defines: *const TyStr,
    /// Number of macros.
    pub define_count: usize,
    /// The value of `DeviceApi::Params`, which kernels take by value.
    pub params: *const u8,
    /// Size of the parameters in bytes.
    pub param_bytes: usize,
    /// Alignment of the parameters in bytes.
    pub param_alignment: usize,
}

/// Room that the host gives to `endpoint`.
pub const TY_ENDPOINT_BYTES: usize = 4096;
/// Most bytes that one rank gives to `all_gather` of a [`TyExchange`].
pub const TY_EXCHANGE_BYTES: usize = 65_536;
/// Room that the host gives to `link_name`.
pub const TY_LINK_NAME_BYTES: usize = 256;

/// A component's own config table.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyConfig {
    /// `sizeof(TyConfig)`.
    pub size: usize,
    /// TOML text, lines numbered as in the operator's file. Empty if there is no table.
    pub text: TyStr,
    /// Name of the file, for messages.
    pub file: TyStr,
}

/// A service of the host for `open`, on the thread that calls `open` and while `open` runs. It is for
/// values that ranks must agree on before windows and endpoints exist, such as NCCL's unique id.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyExchange {
    /// `sizeof(TyExchange)` of the host.
    pub size: usize,
    /// Passed back to every slot.
    pub context: *mut c_void,
    /// Writes the bytes of each rank of the team to `all`, in the team's order: `count` times `bytes` bytes.
    /// Collective: all ranks pass equally many bytes, at most `TY_EXCHANGE_BYTES`, and call it equally often,
    /// including the ranks of the same component's other teams. Ends with an error at the latest when the
    /// world's deadlines pass; `open` then returns that status.
    pub all_gather: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            mine: *const u8,
            bytes: usize,
            all: *mut u8,
            error: *mut TyError,
        ) -> i32,
    >,
}

/// NICs of all names reach each other: where a transport can use none of the NICs that the topology chose
/// for this rank, it may use others, and logs that. Without the flag it refuses to open.
pub const TY_OPEN_ANY_RAILS: u32 = 1;

/// Arguments of `open`. Everything is valid for the call only.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyTransportOpen {
    /// `sizeof(TyTransportOpen)`.
    pub size: usize,
    /// The component's own table.
    pub config: TyConfig,
    /// The ranks that will communicate with each other.
    pub team: TyTeam,
    /// The resources that will be used.
    pub needs: TyTransportNeeds,
    /// `nic_count` names of NICs that the topology chose for this rank. Empty if it chose none. A
    /// transport whose own table names NICs uses those.
    pub nics: *const TyStr,
    /// Number of `nics`.
    pub nic_count: usize,
    /// Bits `TY_OPEN_*` (since minor version 6).
    pub flags: u32,
    /// Ordinal of the GPU whose kernels use the transport, as its driver counts, or -1: they run on the
    /// host (since minor version 9).
    pub device: i32,
    /// The exchange of bytes among the ranks of the team while they open (since minor version 9).
    pub exchange: *const TyExchange,
}

/// The symbol `tokenyard_transport_v1`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyTransportExport {
    /// Checked first.
    pub header: TyExportHeader,
    /// `count` tables, one per transport.
    pub components: *const *const TyTransportTable,
    /// Number of tables.
    pub count: usize,
}
