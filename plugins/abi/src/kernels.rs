//! The kernel set table: the compute on one kind of device. Unstable until 1.0: exact layout.

use core::ffi::c_void;

use crate::{
    TyCapabilities, TyConfig, TyError, TyExportHeader, TyHost, TyMemoryNeeds, TyStr,
    TyTransportTable, TyWindow,
};

/// Major version of the kernel set ABI.
pub const TY_KERNELS_MAJOR: u32 = 0;
/// Minor version of the kernel set ABI.
pub const TY_KERNELS_MINOR: u32 = 6;

/// A tensor of one or two dimensions. `data` is null where a tensor is absent, and only there: one
/// without elements has some address.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyTensor {
    /// Address of element (0, 0).
    pub data: *mut u8,
    /// Element type: 1 bf16, 2 fp16, 3 fp32, 4 fp8 e4m3, 5 u8, 6 i32, 7 i64.
    pub dtype: u32,
    /// Zero.
    pub reserved: u32,
    /// Rows and columns; one-dimensional tensors have one column.
    pub shape: [u64; 2],
    /// Elements from one row to the next, and from one column to the next.
    pub stride: [i64; 2],
}

/// What a kernel set is opened for. The host has validated it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyShape {
    /// `sizeof(TyShape)`.
    pub size: usize,
    /// This rank.
    pub rank: u32,
    /// R.
    pub ranks: u32,
    /// D. 1: one link reaches every rank, whichever level it is of. More: both links are given, and
    /// each row crosses the scale-out link once per domain. Ranks are domain-major: rank r is peer
    /// r mod R/D of its scale-up team and peer r / (R/D) of its scale-out team, the rail. Where one
    /// link reaches all, rank r is peer r. Absent ranks (`TY_RANK_ABSENT`) are not counted.
    pub domains: u32,
    /// E, a multiple of R.
    pub experts: u32,
    /// K, 1 to 32.
    pub topk: u32,
    /// H in elements.
    pub hidden: u32,
    /// M.
    pub max_tokens: u32,
    /// Operations that may be sent and not yet received; operation n uses slot n mod in_flight.
    pub in_flight: u32,
    /// Handles that may live at once.
    pub handles: u32,
    /// Zero.
    pub reserved: u32,
}

/// Most windows a kernel set may ask for.
pub const TY_MAX_WINDOWS: usize = 8;

/// The scale-up level: inside a domain.
pub const TY_LEVEL_SCALE_UP: u64 = 0;
/// The scale-out level: between domains.
pub const TY_LEVEL_SCALE_OUT: u64 = 1;

/// What the transports of both levels declared. A level without a transport has all zero.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyLimits {
    /// `sizeof(TyLimits)`.
    pub size: usize,
    /// The transport inside the domain.
    pub scale_up: TyCapabilities,
    /// The transport between domains.
    pub scale_out: TyCapabilities,
}

/// What a kernel set uses of one transport. All zero for a level without one.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TyLinkNeeds {
    /// Lanes used.
    pub lanes: u32,
    /// Signals used.
    pub signals: u32,
    /// Most commands of a lane that are not done yet.
    pub queue_depth: u32,
    /// Zero.
    pub reserved: u32,
    /// Most bytes of one put.
    pub largest_put: u64,
}

/// In [`TyKernelNeeds`]: it can go on without lost ranks (`lost` in [`TyPlan`]).
pub const TY_NEEDS_MASKING: u32 = 1;
/// In [`TyKernelNeeds`]: it takes calls in the order of a stream (`TY_DISPATCH_ON_STREAM`,
/// `TY_COMBINE_ON_STREAM`), and has the slots from `stream_create` on.
pub const TY_NEEDS_STREAMS: u32 = 2;

/// In [`TyKernelNeeds`]: it takes calls that nobody waits for (`TY_DISPATCH_NO_SYNC`,
/// `TY_COMBINE_NO_SYNC`), also on a stream that captures a graph, and has the slots from `graph_begin`
/// on. With `TY_NEEDS_STREAMS` only.
pub const TY_NEEDS_NO_SYNC: u32 = 4;

/// In `lost` of [`TyPlan`]: the rank was there when the teams were made, and is lost.
pub const TY_RANK_LOST: u8 = 1;
/// In `lost` of [`TyPlan`]: the rank is in no team.
pub const TY_RANK_ABSENT: u8 = 2;

/// What a kernel set needs from the transports, within the limits it was given.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyKernelNeeds {
    /// `sizeof(TyKernelNeeds)`.
    pub size: usize,
    /// Windows used; `window_bytes[0 .. windows]` are their lengths, equal on all ranks.
    pub windows: u32,
    /// Bits `TY_NEEDS_*`.
    pub flags: u32,
    /// Of the transport inside the domain.
    pub scale_up: TyLinkNeeds,
    /// Of the transport between domains.
    pub scale_out: TyLinkNeeds,
    /// Bytes of each window.
    pub window_bytes: [u64; TY_MAX_WINDOWS],
    /// Which levels each window is for: bits `1 << TY_LEVEL_*`, or 0 for every level that has a
    /// transport. It is registered with those transports only, and only their memory needs count. A
    /// transport numbers the windows that it gets from 0 on, in their order here: commands and device
    /// faces name those numbers.
    pub window_levels: [u32; TY_MAX_WINDOWS],
}

/// An opened transport as a kernel set uses it. `table` is null where the level has none.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyLink {
    /// The transport's table, with every required slot filled.
    pub table: *const TyTransportTable,
    /// Its instance.
    pub instance: *mut c_void,
    /// What it declared.
    pub capabilities: TyCapabilities,
}

/// What a waiting kernel set tells the host, and how the host stops it (INV-6). Shared by both
/// sides while the yard lives. Every field is accessed with atomic loads and stores of 8 bytes.
/// A waiter writes `phase` last when it starts to wait, and 0 when it ends.
#[repr(C)]
#[derive(Debug)]
pub struct TyWaitBoard {
    /// Not 0: stop waiting now and return `TY_ABORTED`. Written by the host.
    pub abort: u64,
    /// One of `TY_PHASE_*`, or 0 while nobody waits.
    pub phase: u64,
    /// The world rank that is waited for.
    pub peer: u64,
    /// The signal id that is waited for.
    pub signal: u64,
    /// The total that ends the wait.
    pub expected: u64,
    /// The total last seen.
    pub found: u64,
    /// `CLOCK_MONOTONIC` in nanoseconds when the wait began.
    pub since_ns: u64,
    /// Operation number, or `TY_OPERATION_OF_GRAPH`.
    pub operation: u64,
    /// The level whose transport raises the signal: one of `TY_LEVEL_*`.
    pub level: u64,
    /// The phase of a wait that ended without its signal, the last such one; else 0. A waiter writes it
    /// before `phase` becomes 0, and leaves the fields above as they were: so the host can still tell
    /// what the wait was for.
    pub gave_up: u64,
    /// Null, or `ranks` totals, one per world rank: nanoseconds that waits on it took. A waiter adds
    /// what a wait took when it ends. Set by the host.
    pub waited_ns: *mut u64,
    /// Length of `waited_ns`. Set by the host.
    pub ranks: u64,
}

/// In [`TyWaitBoard`]: an operation without a number, as a graph launched it, so that no host knows whether
/// all ranks have begun it.
pub const TY_OPERATION_OF_GRAPH: u64 = u64::MAX;

/// Waiting for a peer to enter the operation at all: bounded by `late_ms`.
pub const TY_PHASE_ENTRY: u64 = 1;
/// Waiting for an owner's grant (base offsets): bounded by `deadline_ms`, as are those below.
pub const TY_PHASE_GRANT: u64 = 2;
/// Waiting for the rows of a dispatch.
pub const TY_PHASE_ROWS: u64 = 3;
/// Waiting for the rows of a combine.
pub const TY_PHASE_COMBINE_ROWS: u64 = 4;
/// Waiting until a peer has read this rank's rows.
pub const TY_PHASE_DONE: u64 = 5;
/// Waiting for room in a command queue.
pub const TY_PHASE_QUEUE: u64 = 6;

/// Arguments of `plan`: everything is fixed here. The board stays valid until `close`; links until
/// the last operation has returned, because transports are closed before; the list of windows for
/// the call only.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyPlan {
    /// `sizeof(TyPlan)`.
    pub size: usize,
    /// The transport inside the domain.
    pub scale_up: TyLink,
    /// The transport between domains.
    pub scale_out: TyLink,
    /// The registered windows, in order of their ids.
    pub windows: *const TyWindow,
    /// Number of windows.
    pub window_count: usize,
    /// Shared with the host's watchdog.
    pub board: *mut TyWaitBoard,
    /// A wait that lasts longer than this ends by itself, whatever the host does.
    pub cap_ns: u64,
    /// Null where a lost rank ends the yard. Else R bytes, one per rank, which stay valid like the
    /// board: `TY_RANK_LOST` once a rank is lost, and then for ever; `TY_RANK_ABSENT` from the start
    /// for a rank that is not there; else 0. The host writes them, with atomic stores of one byte.
    /// Neither's signals come any more: waits on it end, what it owes is left out, and no command
    /// names it. An absent rank is in no team: peers are numbered without it. A rank may be lost
    /// already when `plan` is called, and is then in its team.
    pub lost: *const u8,
}

/// Rows in one block, by source rank, then source token.
pub const TY_LAYOUT_FLAT: u32 = 1;
/// Rows grouped by local expert with aligned starts.
pub const TY_LAYOUT_EXPERT_MAJOR: u32 = 2;
/// `[E/R, R*M, H]` with counts.
pub const TY_LAYOUT_PACKED: u32 = 3;

/// Rows travel as they are.
pub const TY_CAST_NONE: u32 = 0;
/// Rows are cast to FP8 e4m3 with one f32 scale per 128 channels.
pub const TY_CAST_FP8: u32 = 1;
/// The same with scales rounded up to powers of two.
pub const TY_CAST_FP8_ROUND: u32 = 2;
/// The same, the scales' exponent bytes packed by four (UE8M0).
pub const TY_CAST_FP8_UE8M0: u32 = 3;

/// Reuse the routing of the handle: no counting.
pub const TY_DISPATCH_REPLAY: u32 = 1;
/// Worst-case sizes: the host learns no count, the counts stay in device memory.
pub const TY_DISPATCH_WORST_CASE: u32 = 2;
/// Zero the padding rows of the expert-major layout.
pub const TY_DISPATCH_ZERO_PADDING: u32 = 4;
/// In the order of `stream`: tensors are read behind what was queued there before `dispatch_send`,
/// and what is queued there after `dispatch_recv` runs behind the operation. Neither waits for rows.
/// Ranks need not agree on it.
pub const TY_DISPATCH_ON_STREAM: u32 = 8;

/// With `TY_DISPATCH_ON_STREAM`: the host waits for nothing, `dispatch_send` not even for what the ranks
/// agree on. A fresh dispatch has `TY_DISPATCH_WORST_CASE` too. What goes wrong on the device closes the
/// yard: a later call, or `flush`, tells it. Ranks need not agree on it; a refusal ends those that do too.
///
/// The stream may capture a graph: then nothing runs, and what this rank refuses is told to it alone.
/// Both halves come within one capture, and the graph may be launched any number of times while no
/// operation is open, in the same order with other operations on all ranks. What the call gave, its
/// handle and its tensors stay until the graph is launched no more.
pub const TY_DISPATCH_NO_SYNC: u32 = 16;

/// `dispatch_recv` follows at once: the caller queues and computes nothing between the two.
pub const TY_DISPATCH_AT_ONCE: u32 = 32;

/// One dispatch. Tensors are valid until `dispatch_recv` returns; with `TY_DISPATCH_ON_STREAM` until
/// the stream has passed what `dispatch_recv` left there.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyDispatch {
    /// `sizeof(TyDispatch)`.
    pub size: usize,
    /// Operation number: the same on all ranks, 0, 1, 2, ...
    pub operation: u64,
    /// Handle slot to fill, or to replay.
    pub handle: u32,
    /// Bits `TY_DISPATCH_*`.
    pub flags: u32,
    /// One of `TY_LAYOUT_*`.
    pub layout: u32,
    /// Alignment of expert starts in rows, at least 1 (expert-major only).
    pub alignment: u32,
    /// One of `TY_CAST_*`.
    pub cast: u32,
    /// Zero.
    pub reserved: u32,
    /// `[T, H]`, rows contiguous.
    pub x: TyTensor,
    /// `[T, S]` of 4-byte elements, any strides; absent unless the rows were quantised before.
    pub scales: TyTensor,
    /// `[T, K]` i64, contiguous; absent in a replay.
    pub topk_idx: TyTensor,
    /// `[T, K]` f32, contiguous; may be absent.
    pub topk_weights: TyTensor,
    /// Not empty: this rank refuses its input. Nothing moves; the text is told to all ranks.
    pub refusal: TyStr,
    /// With `TY_DISPATCH_ON_STREAM`: a stream of the device. Null there is CUDA's legacy default
    /// stream. It lives until the region of the output was released and `flush` or `close` called.
    pub stream: *mut c_void,
    /// With `TY_DISPATCH_NO_SYNC` and without `TY_DISPATCH_REPLAY`: T, in device memory, at most the rows
    /// of `topk_idx`; read as the other tensors are. Null: as many as those rows.
    pub tokens: *const u32,
}

/// What a dispatch leaves in the arena. Absent tensors have null data.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyReceived {
    /// `sizeof(TyReceived)`.
    pub size: usize,
    /// The arena region that holds all of it; goes back with `release`. That may come before the end
    /// of the handle where rows are flat: then nothing of it may be read for a combine or a replay.
    pub region: u64,
    /// Tokens received, N; the worst case where the host learns no count.
    pub tokens: u64,
    /// Rows of `x`: N (flat), X (expert-major) or E/R * R*M (packed); the worst case likewise.
    pub rows: u64,
    /// `[rows, H]`.
    pub x: TyTensor,
    /// `[rows, S]`.
    pub scales: TyTensor,
    /// `[N, K]` i32: local expert ids or -1 (flat).
    pub ids: TyTensor,
    /// f32: `[N, K]` (flat), else `[rows, 1]`.
    pub weights: TyTensor,
    /// i32 `source rank * M + source token`: `[N, 1]`, or `[rows, 1]` (packed).
    pub source: TyTensor,
    /// `[N, K]` i32: row of each expert's copy, or -1 (expert-major).
    pub slots: TyTensor,
    /// `[E/R, 1]` i32: rows per local expert, without padding.
    pub expert_counts: TyTensor,
    /// `[E/R, 1]` i32: first row per local expert (expert-major).
    pub expert_starts: TyTensor,
    /// `[R, 1]` i32: tokens per source rank.
    pub source_counts: TyTensor,
    /// `[E/R, R]` i64: `count | begin << 32` (packed).
    pub ranges: TyTensor,
    /// `[2, 1]` i64: the true N and the true number of rows, padding included.
    pub totals: TyTensor,
    /// `[R, 1]` u8: 1 where rows of a source rank are left out because it was lost, else 0. Where
    /// places were given to such rows, they hold zeros, ids and slots -1, and source -1.
    pub lost: TyTensor,
}

/// Multiply each expert's row by its weight before summing (expert-major and packed).
pub const TY_COMBINE_WEIGHTED: u32 = 1;
/// As `TY_DISPATCH_ON_STREAM`.
pub const TY_COMBINE_ON_STREAM: u32 = 2;
/// As `TY_DISPATCH_NO_SYNC`. Where only the device knows T, rows of `out` behind it are left as they are.
pub const TY_COMBINE_NO_SYNC: u32 = 4;
/// As `TY_DISPATCH_AT_ONCE`, of `combine_recv`.
pub const TY_COMBINE_AT_ONCE: u32 = 8;

/// One combine. Tensors are valid until `combine_recv` returns; with `TY_COMBINE_ON_STREAM` until the
/// stream has passed what `combine_recv` left there.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyCombine {
    /// `sizeof(TyCombine)`.
    pub size: usize,
    /// Operation number.
    pub operation: u64,
    /// Handle slot.
    pub handle: u32,
    /// Bits `TY_COMBINE_*`.
    pub flags: u32,
    /// Expert outputs: as many rows as the dispatch gave, `[rows, H]`, contiguous.
    pub x: TyTensor,
    /// f32, shaped as the dispatch's `weights`; may be absent.
    pub weights: TyTensor,
    /// `[T, H]` of the type of `x`; may be absent.
    pub bias0: TyTensor,
    /// The same.
    pub bias1: TyTensor,
    /// `[T, H]` of the type of `x`, written by `combine_recv`.
    pub out: TyTensor,
    /// `[T, K]` f32; absent unless `weights` is given.
    pub out_weights: TyTensor,
    /// `[T, 1]` u8, may be absent: written by `combine_recv` with how many of the token's selected
    /// experts are left out of its sum, because their rank was lost.
    pub missing: TyTensor,
    /// As in [`TyDispatch`].
    pub refusal: TyStr,
    /// As in [`TyDispatch`].
    pub stream: *mut c_void,
}

/// One command of a device, written by a kernel into a [`TyProxyRing`]: the fields of
/// [`TyCommand`](crate::TyCommand) that a kernel fills, then `sequence`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyProxyCommand {
    /// One of `TY_OP_*`, but not `TY_OP_GET`.
    pub op: u32,
    /// Index into the team of the level.
    pub peer: u32,
    /// Signal id on the peer.
    pub signal: u32,
    /// What to add to the signal: 1 to 65,535.
    pub add: u32,
    /// Window id on this rank.
    pub src_window: u32,
    /// Window id on the peer.
    pub dst_window: u32,
    /// Offset in the source window.
    pub src_offset: u64,
    /// Offset in the destination window.
    pub dst_offset: u64,
    /// Bytes to move.
    pub bytes: u64,
    /// The value of `TY_OP_PUT_VALUE`.
    pub value: u64,
    /// Number of the command + 1, stored last, with release order at system scope: the slot then
    /// belongs to the host until the command is done.
    pub sequence: u64,
}

/// What the host tells kernels about a ring. Every field is stored with release order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TyProxyStatus {
    /// Commands that are done (INV-4, INV-5), all before it included: only grows.
    pub done: u64,
    /// Not 0: the ring is dead, and no command ends any more; 1 + the number of the command that
    /// failed, or all ones where none is to blame. The transport's `health` says more (INV-7).
    pub failed: u64,
    /// Status below zero of the failure.
    pub status: i64,
}

/// Memory that a kernel set gives the host, so that its kernels may use a transport that has no device
/// face: they write commands, and a thread of the host posts them and tells what came of it.
///
/// Command number n is in slot n mod `capacity`. A kernel may write it once `done` + `capacity` > n.
/// Everything starts as zeros and is written by both sides, so it is accessed by atomic loads and
/// stores, but for a command whose `sequence` was seen.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyProxyRing {
    /// `sizeof(TyProxyRing)`.
    pub size: usize,
    /// The level whose transport is used: one of `TY_LEVEL_*`. The host writes which it asks for.
    pub level: u64,
    /// The lane that commands are posted on, which nobody else uses.
    pub lane: u32,
    /// Number of slots, a power of two.
    pub capacity: u32,
    /// `capacity` slots.
    pub commands: *mut TyProxyCommand,
    /// One.
    pub status: *mut TyProxyStatus,
    /// `signals` words: the totals of the signals on this rank, stored after what came with them is
    /// visible to the device (INV-1).
    pub totals: *mut u64,
    /// Signals that are told, from 0 on.
    pub signals: u32,
    /// Zero.
    pub reserved: u32,
}

/// What passed between this rank and another one over one level, since `plan`. Every field only grows,
/// and is read by the host at any time: one thread stores it, atomically.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TyPeerCounters {
    /// Commands to the peer that the transport has accepted.
    pub posted: u64,
    /// Those of them that have ended (INV-4), also with an error.
    pub done: u64,
    /// How far this rank has raised the peer's signals, all in all: the sum of `add`.
    pub raised: u64,
    /// How far it has waited, or waits, for the peer to raise its own.
    pub expected: u64,
    /// How far it has seen those rise: up to the end of its last wait on the peer that succeeded.
    pub received: u64,
}

/// How far this rank has raised one signal of a peer. As in [`TyPeerCounters`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct TyRaised {
    /// Signal id on the peer, plus one; 0 where it was never raised.
    pub signal: u64,
    /// The sum of `add`; equals the peer's total once all of it has arrived.
    pub total: u64,
}

/// What a kernel set counts for reports, in memory of its own that stays valid until `close`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyCounters {
    /// `sizeof(TyCounters)`.
    pub size: usize,
    /// R.
    pub ranks: u32,
    /// Entries of `raised` per level and rank.
    pub signals: u32,
    /// Most commands of a lane that are not done, per level.
    pub queue_depth: [u32; 2],
    /// `2 * R`: by level, then world rank.
    pub peers: *const TyPeerCounters,
    /// `2 * R * signals`: by level, then world rank.
    pub raised: *const TyRaised,
}

/// When things happened in an operation on this rank, for tools: nanoseconds of the device's clock,
/// which starts anywhere and is not that of another device.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TyTrace {
    /// `sizeof(TyTrace)`.
    pub size: usize,
    /// Its first kernel began.
    pub begun: u64,
    /// This rank's routing was counted, and its records were sent; where nothing is counted, as `begun`.
    pub counted: u64,
    /// The records of all ranks were there.
    pub heard: u64,
    /// Rows had left; of a combine: sums were made.
    pub moved: u64,
    /// The rows of all ranks had arrived; of a combine: all had read this rank's.
    pub arrived: u64,
}

/// A kernel set. All slots of one instance are called by one thread at a time.
///
/// Order of calls: `probe`, `open`, `needs`, `allocate` per window, `plan`, then operations in the
/// same order on all ranks, then `close`. Operation n may be sent only when operation
/// n - in_flight has been received.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyKernelsTable {
    /// `sizeof(TyKernelsTable)` of the plugin.
    pub size: usize,
    /// The part's name as a config writes it. Static.
    pub name: TyStr,
    /// The part's own version, for people. Static.
    pub version: TyStr,
    /// One line for people. Static.
    pub about: TyStr,
    /// Required. Whether the part can run here, without side effects; `memory_kinds` becomes the
    /// kinds of memory it works on (bits `TY_MEMORY_*`).
    pub probe: Option<
        unsafe extern "C" fn(
            host: *const TyHost,
            config: *const TyConfig,
            memory_kinds: *mut u32,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Makes an instance.
    pub open: Option<
        unsafe extern "C" fn(
            host: *const TyHost,
            config: *const TyConfig,
            shape: *const TyShape,
            instance: *mut *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Ends the instance and frees its windows, after the transports were closed.
    pub close: Option<unsafe extern "C" fn(instance: *mut c_void)>,
    /// Required. What it will use, within `limits`.
    pub needs: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            limits: *const TyLimits,
            needs: *mut TyKernelNeeds,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Allocates the memory of one window (`id` and `bytes` are given).
    pub allocate: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            needs: *const TyMemoryNeeds,
            window: *mut TyWindow,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Fixes every size, offset and buffer.
    pub plan: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            plan: *const TyPlan,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Starts a dispatch.
    pub dispatch_send: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            dispatch: *const TyDispatch,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Ends the dispatch with this operation number.
    pub dispatch_recv: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            operation: u64,
            received: *mut TyReceived,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Gives an arena region for expert outputs of a handle, so that combine need not
    /// copy them: `[rows, H]` of `dtype`. Where the handle's dispatch was in the order of a stream, so
    /// is the region: written there only.
    pub combine_input: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            handle: u32,
            dtype: u32,
            region: *mut u64,
            tensor: *mut TyTensor,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Starts a combine.
    pub combine_send: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            combine: *const TyCombine,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Required. Ends the combine with this operation number.
    pub combine_recv: Option<
        unsafe extern "C" fn(instance: *mut c_void, operation: u64, error: *mut TyError) -> i32,
    >,
    /// Required. Waits until everything it posted is done (INV-4), so that the transports may be
    /// closed once all ranks have said so; also what was received in the order of a stream and has
    /// not ended, whose errors it tells. No operation is open.
    pub flush: Option<unsafe extern "C" fn(instance: *mut c_void, error: *mut TyError) -> i32>,
    /// Required. Takes back an arena region. One that was given out in the order of a stream is free
    /// once the stream has passed what is queued there now.
    pub release: Option<unsafe extern "C" fn(instance: *mut c_void, region: u64)>,
    /// Optional; required where the set does not work on host memory, as are the next two. Gives
    /// memory of the kind it works on, for tensors of tools that have none of their own.
    pub tensor_alloc: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            bytes: u64,
            pointer: *mut *mut u8,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Takes such memory back. An operation that was sent and never received may still use it: the
    /// set waits for its kernels first, as it does in `copy`.
    pub tensor_free: Option<unsafe extern "C" fn(instance: *mut c_void, pointer: *mut u8)>,
    /// Copies between host memory and memory of the kind it works on, and waits for it. Runs behind
    /// everything in streams of `stream_create`.
    pub copy: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            to: *mut u8,
            from: *const u8,
            bytes: u64,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional; required with `TY_NEEDS_STREAMS`, as are the next two. Makes a stream for tools that
    /// have none of their own. It waits for no other stream.
    pub stream_create: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            stream: *mut *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Takes such a stream back, after everything in it.
    pub stream_destroy: Option<unsafe extern "C" fn(instance: *mut c_void, stream: *mut c_void)>,
    /// Queues a copy between two places of the device's memory on a stream of the caller, which lives
    /// until it has passed the copy.
    pub copy_on: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            stream: *mut c_void,
            to: *mut u8,
            from: *const u8,
            bytes: u64,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional, after `plan`, once for each level that has a transport. Where kernels post through the
    /// host on the level that `ring` names: its ring, valid until `close`. Else `commands` stays null. The host stops looking at it before transports are closed.
    pub proxy_ring: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            ring: *mut TyProxyRing,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional; required with `TY_NEEDS_NO_SYNC`, as are the next three. For tools: what is queued on
    /// such a stream from now on is recorded into a graph, and does not run.
    pub graph_begin: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            stream: *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Ends the recording and gives the graph.
    pub graph_end: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            stream: *mut c_void,
            graph: *mut *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Queues a graph on such a stream.
    pub graph_launch: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            stream: *mut c_void,
            graph: *mut c_void,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Takes a graph back, after every launch of it.
    pub graph_destroy: Option<unsafe extern "C" fn(instance: *mut c_void, graph: *mut c_void)>,
    /// Optional, after `plan`. What it counts for reports; without it they say that it is unknown.
    pub counters: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            counters: *mut TyCounters,
            error: *mut TyError,
        ) -> i32,
    >,
    /// Optional, for tools. When things happened in one of the last `in_flight` operations, which has
    /// ended: call `flush` before.
    pub trace: Option<
        unsafe extern "C" fn(
            instance: *mut c_void,
            operation: u64,
            trace: *mut TyTrace,
            error: *mut TyError,
        ) -> i32,
    >,
}

/// The symbol `tokenyard_kernels_v0`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TyKernelsExport {
    /// Judged first.
    pub header: TyExportHeader,
    /// `count` tables.
    pub parts: *const *const TyKernelsTable,
    /// Number of tables.
    pub count: usize,
}
